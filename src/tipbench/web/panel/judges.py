"""Judges page of an experiment: judges, sheets, batches, export, drift."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import LockHeld, NotEnoughData, TipbenchError, UsageError
from tipbench.judge.charts import HEIGHT, WIDTH, DriftPoint, drift_points, drift_sentence
from tipbench.judge.command import default_name
from tipbench.judge.export import ExportRequest
from tipbench.judge.status import JudgeStatus, JudgingStatus, OpenSheet, SheetHistory
from tipbench.record.store import RunStore
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, EVERYBODY, Identity
from tipbench.web.batch_items import LONGEST_ACCEPTANCE, LONGEST_RETURN
from tipbench.web.batches import BatchService, Conflict, batch_service_of
from tipbench.web.deps import LIMIT_CONCURRENCY, Admin, Panel, PanelState, Store
from tipbench.web.errors import Forbidden, Invalid, NotFound, WebError, attachment
from tipbench.web.forms import JSON, Parts, read_parts
from tipbench.web.job_service import start_judge
from tipbench.web.judge_service import (
    DriftChart,
    SheetRequest,
    ThemeName,
    accept_drift,
    drift_svg,
    judging_lock,
    parse_sheet_request,
    sheet_file,
    sheet_for,
    sheet_of,
)
from tipbench.web.panel.charts import charts_there
from tipbench.web.panel.judge import home_of
from tipbench.web.panel.pages import bias_words, number, page
from tipbench.web.queries import experiment_path, get_experiment, quote_path, revision

_GOOD_ALPHA, _FAIR_ALPHA = 0.8, 0.667  # thresholds recommended by Krippendorff
MOST_CLOSED = 10  # closed batches listed per judge; held and open ones are always listed
_URGENT = {"held": 0, "open": 1}  # waiting for an admin first, then for the judge

BatchJson = Mapping[str, Any]  # a batch or a skip as the API's JSON


@dataclass(frozen=True)
class ScaleView:
    """A judge's drift on one scale."""

    scale: str
    words: str  # "0.4 too high"
    interval: tuple[float, float] | None
    error: float | None
    beyond: bool
    points: tuple[DriftPoint, ...]  # oldest first

    @property
    def chart_text(self) -> str:
        """Text alternative of the chart."""
        return drift_sentence(self.points)


@dataclass(frozen=True)
class JudgeView:
    """A judge's status, latest drift verdict and scales over time."""

    status: JudgeStatus
    verdict: str  # fine, beyond the limit, unknown
    sentences: tuple[str, ...]
    scales: tuple[ScaleView, ...]


@dataclass(frozen=True)
class SheetView:
    """A sheet in the list."""

    sheet: str
    judge: str | None
    exported: str
    status: str  # exported, applied, held
    provisional: bool
    items: int
    finished: int
    verdict: str | None
    accepted: str | None

    @property
    def held(self) -> bool:
        return self.status == "held"


@dataclass(frozen=True)
class BatchView:
    """A batch in the list."""

    told: BatchJson
    skips: tuple[BatchJson, ...]
    why: tuple[str, ...]  # why it is held, from the control items

    @property
    def sheet(self) -> str:
        return str(self.told["sheet"])

    @property
    def status(self) -> str:
        return str(self.told["status"])


@dataclass(frozen=True)
class JudgeBatches:
    """A judge's batches."""

    judge: str
    count: Mapping[str, int]  # batches by status
    skipped: int
    minutes: float | None  # median per submitted item
    batches: tuple[BatchView, ...]
    left_out: int  # closed batches not listed


def judge_views(judging: JudgingStatus) -> list[JudgeView]:
    """Returns all judges, people first."""
    return [_judge(judging.history, status) for status in judging.judges]


def _judge(history: Sequence[SheetHistory], status: JudgeStatus) -> JudgeView:
    own = [each for each in history if each.judge == status.judge and each.provisional == status.provisional]
    drift = own[-1].drift if own and own[-1].drift else {}
    scales = tuple(_scale(history, status, scale) for scale in drift.get("scales", ()))
    return JudgeView(status, drift.get("verdict", "unknown"), tuple(drift_words(drift)), scales)


def _scale(history: Sequence[SheetHistory], status: JudgeStatus, scale: Mapping[str, Any]) -> ScaleView:
    points = drift_points(history, status.judge, scale["scale"], provisional=status.provisional)
    ends = scale["interval"]
    return ScaleView(
        scale=scale["scale"],
        words=bias_words(scale["bias"]),
        interval=(ends[0], ends[1]) if ends else None,
        error=scale["error"],
        beyond=bool(scale["beyond"]),
        points=tuple(points),
    )


def drift_words(drift: Mapping[str, Any] | None) -> list[str]:
    """Returns sentences on a judge's drift on the control items; never reveals which items are controls."""
    if not drift:
        return []
    sentences = [
        f"{scale['scale']} is scored {bias_words(scale['bias'])}, more than chance explains."
        for scale in drift.get("scales", ())
        if scale["beyond"]
    ]
    if drift.get("error_beyond"):
        sentences.append(
            f"The scores differ from the reference scores by {_one_decimal(drift['error'])} points on average; "
            f"the limit is {_one_decimal(drift['error_limit'])}."
        )
    if drift.get("contrast_beyond"):
        sentences.append(
            "Good and poor tips get similar scores: where the reference scores are 1 point apart, these "
            f"are {_one_decimal(drift['contrast'])} apart on average; "
            f"the limit is {_one_decimal(drift['contrast_limit'])}."
        )
    if sentences or "error" not in drift:
        return sentences
    if drift["verdict"] == "unknown":
        return ["Unknown: too few control tips are scored."]
    return [
        f"No drift: the scores differ from the reference scores by {_one_decimal(drift['error'])} points on average."
    ]


def sheet_views(judging: JudgingStatus) -> list[SheetView]:
    """Returns all sheets, newest first."""
    back = {each.sheet: _returned(each) for each in judging.history}
    out = {each.sheet: _handed_out(each) for each in judging.open_sheets if each.sheet not in back}
    return sorted({**back, **out}.values(), key=lambda sheet: (sheet.exported, sheet.sheet), reverse=True)


def _returned(sheet: SheetHistory) -> SheetView:
    verdict = (sheet.drift or {}).get("verdict")
    return SheetView(
        sheet.sheet, sheet.judge or None, sheet.exported, sheet.status, sheet.provisional, sheet.items,
        sheet.finished, verdict, sheet.accepted,
    )  # fmt: skip


def _handed_out(sheet: OpenSheet) -> SheetView:
    return SheetView(
        sheet.sheet, sheet.judge, sheet.exported, "exported", sheet.provisional, sheet.items, sheet.finished, None, None
    )


def batch_views(
    found: Iterable[BatchJson],
    skips: Callable[[str], Sequence[BatchJson]],
    minutes: Mapping[str, float],
    judging: JudgingStatus,
) -> list[JudgeBatches]:
    """Groups batches by judge, judges with held batches first; `found` is ordered by last use, newest first."""
    drifts = {each.sheet: each.drift for each in judging.history}
    by_judge: dict[str, list[BatchJson]] = {}
    for batch in sorted(found, key=_urgency):
        by_judge.setdefault(batch["judge"], []).append(batch)
    ordered = sorted(by_judge.items(), key=lambda each: (_urgency(each[1][0]), each[0]))
    return [_judge_batches(judge, own, skips, minutes.get(judge), drifts) for judge, own in ordered]


def _urgency(batch: BatchJson) -> int:
    return _URGENT.get(batch["status"], len(_URGENT))


def _judge_batches(
    judge: str,
    own: Sequence[BatchJson],
    skips: Callable[[str], Sequence[BatchJson]],
    minutes: float | None,
    drifts: Mapping[str, Mapping[str, Any] | None],
) -> JudgeBatches:
    count = Counter(batch["status"] for batch in own)
    shown = own[: count["held"] + count["open"] + MOST_CLOSED]
    views = tuple(
        BatchView(
            batch,
            tuple(skips(batch["sheet"])) if batch["skipped"] else (),
            tuple(drift_words(drifts.get(batch["sheet"]))) if batch["status"] == "held" else (),
        )
        for batch in shown
    )
    skipped = sum(batch["skipped"] for batch in own)
    return JudgeBatches(judge, count, skipped, minutes, views, len(own) - len(shown))


def alpha_words(alpha: float | None) -> str:
    """Describes the agreement between judges."""
    if alpha is None:
        return "unknown: too few answers have two judges"
    if alpha >= _GOOD_ALPHA:
        return "good"
    return "fair: good enough for careful conclusions" if alpha >= _FAIR_ALPHA else "weak: look at the rubric together"


def _one_decimal(value: float | None) -> str:
    return number(None if value is None else round(value, 1) + 0.0, 1)


router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

CSV, SVG = "text/csv", "image/svg+xml"
_PLACE = "/experiments/{experiment:path}/judges"
_KEEP_PICTURE = "private, max-age=3600"  # the URL contains the revision
_TICKED = ("all", "rejudge", "focus")
_CHANGED = ("made", "accepted", "returned")
_MOST = {"reason": LONGEST_ACCEPTANCE, "note": LONGEST_RETURN}  # characters
_USUAL: Mapping[str, str] = {"judge": "", "limit": "", "overlap": "20", "format": "json"}
_SheetId = Annotated[str | None, Query(max_length=64)]
_Failures = (WebError, TipbenchError)
_Undecided = (Invalid, Conflict, LockHeld)


async def sent_form(request: Request, _admin: Admin) -> Parts:
    """Reads a submitted form after authentication."""
    return await read_parts(request)


SentForm = Annotated[Parts, Depends(sent_form)]


@router.get(_PLACE)
def judges_page(
    request: Request,
    experiment: ExperimentPath,
    panel: PanelState,
    store: Store,
    made: _SheetId = None,
    accepted: _SheetId = None,
    returned: _SheetId = None,
    made_as: Annotated[Literal["json", "csv"], Query(alias="as")] = "json",
) -> HTMLResponse:
    """Shows the judging status; `made`, `accepted` and `returned` are sheets just changed by a form."""
    return judges_response(
        request, experiment, panel, store, made=made, accepted=accepted, returned=returned, made_as=made_as
    )


def judges_response(
    request: Request,
    experiment: str,
    panel: Panel,
    store: RunStore,
    *,
    status: int = 200,
    values: Mapping[str, Any] | None = None,
    errors: Mapping[str, str] | None = None,
    **shown: Any,
) -> HTMLResponse:
    """Renders the page, after an invalid form with its values and errors."""
    found = get_experiment(store, experiment)
    judging = panel.queries.judging_of(store, found)
    sheets, batches_service = sheet_views(judging), batch_service_of(request.app)
    batches, minutes = (
        batches_service.listed(request.state.identity, experiment, EVERYBODY),
        batches_service.minutes_per_item(experiment),
    )
    in_browser = {batch["sheet"] for batch in batches}
    known = in_browser | {sheet.sheet for sheet in sheets}
    batch = {name: each if each in known else None for name in _CHANGED for each in (shown.get(name),)}
    return page(
        request,
        "judges.html",
        status=status,
        experiment=experiment,
        judging=judging,
        judges=judge_views(judging),
        sheets=sheets,
        batches=batch_views(batches, batches_service.skips, minutes, judging),
        in_browser=in_browser,
        minutes=minutes,
        alphas=[(name, value, alpha_words(value)) for name, value in judging.alpha.items()],
        revision=revision(found) or "",
        charts=charts_there(),
        chart_size=(WIDTH, HEIGHT),
        values={**_USUAL, **(values or {})},
        errors=errors or {},
        made_as=shown.get("made_as", "json"),
        again=secrets.token_hex(16),  # idempotency key: one job per page view
        program=_program(panel),
        judge_url=home_of(experiment),
        judge_link=str(request.base_url).rstrip("/") + home_of(experiment),
        batches_url=f"/api/bench/judge/{quote_path(experiment)}/batches?judge=*",
        here_path=experiment_path(experiment, "judges"),
        json_url=f"/api/bench/judges/{quote_path(experiment)}",
        mlflow_url=found.url,
        **batch,
    )


@router.get(_PLACE + "/drift.svg")
def drift_picture(
    experiment: ExperimentPath,
    panel: PanelState,
    store: Store,
    judge: Annotated[str, Query(max_length=200)],
    scale: Annotated[str, Query(max_length=100)],
    provisional: bool = False,
    theme: ThemeName = "light",
) -> Response:
    """Returns the chart of a judge's drift on one scale over time, as SVG."""
    picture = drift_svg(panel.queries, store, experiment, DriftChart(judge, scale, provisional, theme))
    content = picture.encode("utf-8", "backslashreplace")
    return Response(content, media_type=SVG, headers={"Cache-Control": _KEEP_PICTURE})


@router.get(_PLACE + "/sheets/{sheet}.{form}")
def sheet_download(
    experiment: ExperimentPath, sheet: str, form: Literal["json", "csv"], store: Store, filled: bool = False
) -> Response:
    """Downloads an existing sheet, blank or with the scores applied so far."""
    judging = sheet_of(store, experiment, sheet)
    ask = SheetRequest(ExportRequest(), sheet=sheet, filled=filled, format=form)
    name = f"sheet-{judging.sheet.id}{'-filled' if filled else ''}"
    return Response(
        sheet_file(judging, ask).encode("utf-8", "backslashreplace"),
        media_type=CSV if form == "csv" else JSON,
        headers=attachment(name, form),
    )


@router.post(_PLACE + "/export", dependencies=[LIMIT_CONCURRENCY])
def export(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Creates a sheet and redirects to the page, which offers it for download."""
    try:
        ask = parse_sheet_request(_export_options(form.fields), who, panel.allowed)
        judging = sheet_for(store, experiment, ask)
    except (Invalid, NotEnoughData) as exc:
        return _form_error(request, experiment, panel, store, "export", form.fields, exc)
    there = experiment_path(experiment, "judges")
    return RedirectResponse(f"{there}?made={judging.sheet.id}&as={ask.format}#made", 303)


@router.post(_PLACE + "/accept", dependencies=[LIMIT_CONCURRENCY])
def accept(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Accepts held scores; the reason is stored with the sheet."""
    sheet, batches_service = form.fields.get("sheet", ""), batch_service_of(request.app)
    try:
        reason = _text_field(form.fields, "reason")
        if _is_batch(batches_service, who, sheet, experiment):
            batches_service.accept(who, sheet, reason, experiment)
        else:
            with judging_lock(panel.settings.home, panel.tracker.open().place):
                accept_drift(store, experiment, sheet, reason, who)
    except _Undecided as exc:
        return _form_error(request, experiment, panel, store, "accept", form.fields, exc)
    return RedirectResponse(f"{experiment_path(experiment, 'judges')}?accepted={quote_path(sheet)}#accepted", 303)


@router.post(_PLACE + "/return")
def send_back(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Returns a held batch to its judge with a note."""
    sheet = form.fields.get("sheet", "")
    try:
        batch_service_of(request.app).send_back(who, sheet, _text_field(form.fields, "note"), experiment)
    except _Undecided as exc:
        return _form_error(request, experiment, panel, store, "return", form.fields, exc)
    return RedirectResponse(f"{experiment_path(experiment, 'judges')}?returned={quote_path(sheet)}#returned", 303)


@router.post(_PLACE + "/run")
def run_judge(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Starts an automatic judge as a job."""
    wanted, key = form.fields.get("with", "rules"), form.fields.get("again") or None
    if wanted == "ollama":
        wanted = f"ollama:{form.fields.get('model', '').strip()}"
    try:
        started = start_judge(panel, experiment, {"with": wanted}, started_by=who.name, key=key)
    except _Failures as exc:
        return _form_error(request, experiment, panel, store, "run", form.fields, exc)
    return RedirectResponse(f"/jobs/{quote_path(started.job.id)}", 303)


def _export_options(fields: Mapping[str, str]) -> dict[str, Any]:
    """Converts form fields to the API's options; empty fields are left out."""
    options: dict[str, Any] = {name: fields[name].strip() for name in ("judge", "limit", "format") if fields.get(name)}
    options = {name: value for name, value in options.items() if value}
    if overlap := fields.get("overlap", "").strip():
        try:
            options["overlap"] = float(overlap) / 100
        except ValueError:
            options["overlap"] = overlap
    return options | {name: True for name in _TICKED if name in fields}


def _form_error(
    request: Request,
    experiment: str,
    panel: Panel,
    store: RunStore,
    which: str,
    fields: Mapping[str, str],
    exc: Exception,
) -> HTMLResponse:
    """Renders the page with the error next to its field, or above the form if it belongs to none."""
    place = str(getattr(exc, "path", None) or "").rpartition(".")[2]
    message = str(exc).partition(": ")[2] if str(exc).startswith(("body.", "query.")) else str(exc)
    named = place if place in ("judge", "limit", "overlap", "format") and which == "export" else which
    if place == "overlap":
        message = f"A share from 0 to 100 % (got {fields.get('overlap', '')[:40]!r})."
    kept = (*_USUAL, *_TICKED, *_MOST, "sheet", "model")
    values = {name: fields[name][: _MOST.get(name, 200)] for name in kept if name in fields}
    status = getattr(exc, "status", 409)
    return judges_response(
        request, experiment, panel, store, status=status, values=values, errors={named or which: message or str(exc)}
    )


def _text_field(fields: Mapping[str, str], name: str) -> str:
    """Returns a text field; raises Invalid if it is too long."""
    text = fields.get(name, "").replace("\r\n", "\n").strip()
    if len(text) > _MOST[name]:
        raise Invalid(f"{name} has at most {_MOST[name]} characters (got {len(text)}).", path=f"body.{name}")
    return text


def _is_batch(batches_service: BatchService, who: Identity, sheet: str, experiment: str) -> bool:
    """Returns whether a sheet is a browser batch, of any judge."""
    try:
        batches_service.own(who, sheet, experiment)
    except Forbidden:
        return True
    except NotFound:
        return False
    return True


def _program(panel: Panel) -> str | None:
    """Returns the name of the configured judging program, without its arguments, which may contain secrets."""
    command = panel.settings.get("judge_command")
    if not command:
        return None
    try:
        return default_name(command)
    except UsageError:
        return "the program"
