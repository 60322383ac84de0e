"""Judges page of an experiment: judges, sheets, batches, export, drift."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import LockHeld, NotEnoughData, TipbenchError, UsageError
from tipbench.judge.automatic import JudgeChoice, JudgeKind
from tipbench.judge.charts import HEIGHT, WIDTH, DriftPoint, drift_points, drift_sentence
from tipbench.judge.command import default_name
from tipbench.judge.drift import CUSUM_LIMIT, limit_sentences
from tipbench.judge.export import ExportRequest
from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetSummary
from tipbench.markup import number
from tipbench.record.store import RunStore
from tipbench.web.api.models import JudgeRunRequest
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, EVERYBODY, Identity
from tipbench.web.batch_items import LONGEST_ACCEPTANCE, LONGEST_RETURN, BatchShape
from tipbench.web.batches import BatchService, batch_service_of
from tipbench.web.board_query import ThemeName
from tipbench.web.deps import LIMIT_CONCURRENCY, Admin, Panel, PanelState, Store
from tipbench.web.errors import Conflict, Forbidden, Invalid, NotFound, WebError, checked
from tipbench.web.forms import MOST
from tipbench.web.job_service import start_judge
from tipbench.web.judge_service import (
    DriftChart,
    accept_drift,
    drift_svg,
    parse_sheet_request,
    sheet_for,
    sheet_of,
    sheet_response,
)
from tipbench.web.panel.judge import bias_words, home_of
from tipbench.web.panel.pages import SentForm, charts_there, page
from tipbench.web.queries import experiment_path, get_experiment, quote_path, revision
from tipbench.workflows.judging import SheetRequest

_GOOD_ALPHA, _FAIR_ALPHA = 0.8, 0.667  # thresholds recommended by Krippendorff
MOST_CLOSED = 10  # closed batches listed per judge; held and open ones are always listed
_SCORES_BY_URGENCY = (
    "held",
    "partly held",
    "count, unchecked",
    "count, drift accepted",
    "count",
    "none",
    "provisional",
)
_URGENT = {"held": 0, "open": 1}  # waiting for an admin first, then for the judge

Skips = Sequence[Mapping[str, Any]]  # the skipped items of a batch


@dataclass(frozen=True)
class ScaleView:
    """A judge's drift on one scale."""

    now: Mapping[str, Any]  # of the latest sheet
    points: tuple[DriftPoint, ...]  # over time, oldest first

    @property
    def bias(self) -> str:
        return bias_words(self.now["bias"])

    @property
    def chart_text(self) -> str:
        """The text alternative of the chart."""
        return drift_sentence(self.points)


@dataclass(frozen=True)
class JudgeView:
    """A judge's status, latest drift verdict and scales over time."""

    status: JudgeStatus
    verdict: str  # fine, beyond the limit, unknown
    sentences: tuple[str, ...]
    scales: tuple[ScaleView, ...]
    scores: str  # how they are used

    @property
    def urgency(self) -> tuple[int, str]:
        """Sort key: what needs an admin first."""
        return _SCORES_BY_URGENCY.index(self.scores), self.status.judge


@dataclass(frozen=True)
class HeldView:
    """A held sheet that waits for an admin: accept it, or return it to its judge if it is a batch in the browser."""

    sheet: SheetSummary
    why: tuple[str, ...]
    in_browser: bool


@dataclass(frozen=True)
class JudgeBatches:
    """A judge's batches."""

    judge: str
    count: Mapping[str, int]  # batches by status
    skipped: int
    minutes: float | None  # median per submitted item
    batches: tuple[tuple[BatchShape, Skips], ...]
    left_out: int  # closed batches not listed


def judge_views(judging: JudgingStatus) -> list[JudgeView]:
    """Return all judges, those whose scores need a decision first, automatic ones last."""
    views = []
    for status in judging.judges:
        machine = status.provisional
        own = [each for each in judging.history if each.judge == status.judge and each.provisional == machine]
        drift = own[-1].drift if own and own[-1].drift else {}
        scales = tuple(
            ScaleView(scale, tuple(drift_points(own, status.judge, scale["scale"], provisional=machine)))
            for scale in drift.get("scales", ())
        )
        verdict = drift.get("verdict", "unknown")
        views.append(JudgeView(status, verdict, tuple(drift_words(drift)), scales, judging.use_of(status)))
    return sorted(views, key=lambda judge: judge.urgency)


def held_views(judging: JudgingStatus, batches: Iterable[BatchShape]) -> list[HeldView]:
    """Return the sheets that wait for a decision, oldest first; not batches that their judge is revising."""
    states = {batch.sheet: batch.status for batch in batches}
    return [
        HeldView(each, tuple(drift_words(each.drift)), each.sheet in states)
        for each in judging.history
        if each.status == "held" and not each.provisional and states.get(each.sheet, "held") == "held"
    ]


def drift_words(drift: Mapping[str, Any] | None) -> list[str]:
    """Return sentences on a judge's drift on the control items; never reveals which items are controls."""
    if not drift:
        return []
    sentences = [
        f"{scale['scale'].capitalize()} is scored {bias_words(scale['bias'])}, more than chance explains."
        for scale in drift.get("scales", ())
        if scale["beyond"]
    ]
    sentences += limit_sentences(drift)
    if sentences or "error" not in drift:
        return sentences
    if drift["verdict"] == "unknown":
        return ["Unknown: too few control tips are scored."]
    return [
        f"No drift: the scores differ from the reference scores by {_one_decimal(drift['error'])} points on average."
    ]


def all_sheets(judging: JudgingStatus) -> list[SheetSummary]:
    """Return all sheets, newest first."""
    back = {each.sheet for each in judging.history}
    out = [each for each in judging.open_sheets if each.sheet not in back]
    return sorted([*judging.history, *out], key=lambda sheet: (sheet.exported, sheet.sheet), reverse=True)


def batch_views(
    found: Iterable[BatchShape],
    skips: Callable[[str], Skips],
    minutes: Mapping[str, float],
) -> list[JudgeBatches]:
    """Group batches by judge, judges with held batches first; `found` is ordered by last use, newest first."""
    by_judge: dict[str, list[BatchShape]] = {}
    for batch in sorted(found, key=_urgency):
        by_judge.setdefault(batch.judge, []).append(batch)
    views = []
    for judge, own in sorted(by_judge.items(), key=lambda each: (_urgency(each[1][0]), each[0])):
        count = Counter[str](batch.status for batch in own)
        listed = own[: count["held"] + count["open"] + MOST_CLOSED]
        shown = tuple((batch, skips(batch.sheet) if batch.skipped else ()) for batch in listed)
        skipped = sum(batch.skipped for batch in own)
        views.append(JudgeBatches(judge, count, skipped, minutes.get(judge), shown, len(own) - len(shown)))
    return views


def _urgency(batch: BatchShape) -> int:
    return _URGENT.get(batch.status, len(_URGENT))


def alpha_words(alpha: float | None) -> str:
    """Describe the agreement between judges."""
    if alpha is None:
        return "unknown: too few answers have two judges"
    if alpha >= _GOOD_ALPHA:
        return "good"
    return "fair: good enough for careful conclusions" if alpha >= _FAIR_ALPHA else "weak: look at the rubric together"


def _one_decimal(value: float | None) -> str:
    return number(None if value is None else round(value, 1) + 0.0, 1)


router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

SVG = "image/svg+xml"
_PLACE = "/experiments/{experiment:path}/judges"
_KEEP_PICTURE = "private, max-age=3600"  # the URL contains the revision
_TEXTS = ("judge", "limit", "format")
_TICKED = ("all", "rejudge", "focus")
_CHANGED = ("made", "accepted", "returned")
_MOST = {"reason": LONGEST_ACCEPTANCE, "note": LONGEST_RETURN}  # characters
_USUAL: Mapping[str, str] = {"judge": "", "limit": "", "overlap": "20", "format": "json"}
_SheetId = Annotated[str | None, Query(max_length=64)]
_Undecided = (Invalid, Conflict, LockHeld)


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
    """Show the judging status; `made`, `accepted` and `returned` are sheets just changed by a form."""
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
    """Render the page, after an invalid form with its values and errors."""
    found = get_experiment(store, experiment)
    judging = panel.queries.judging_of(store, found)
    sheets, batches_service = all_sheets(judging), batch_service_of(request.app)
    batches = batches_service.page(request.state.identity, experiment, EVERYBODY, limit=MOST).items
    minutes = batches_service.minutes_per_item(experiment)
    in_browser = {batch.sheet for batch in batches}
    known = in_browser | {sheet.sheet for sheet in sheets}
    changed = {name: shown[name] if shown.get(name) in known else None for name in _CHANGED}
    return page(
        request,
        "judges.html",
        status=status,
        experiment=experiment,
        judging=judging,
        judges=judge_views(judging),
        sheets=sheets,
        batches=batch_views(batches, batches_service.skips, minutes),
        held=held_views(judging, batches),
        in_browser=in_browser,
        minutes=minutes,
        alphas=[(name, value, alpha_words(value)) for name, value in judging.alpha.items()],
        revision=revision(found) or "",
        charts=charts_there(),
        cusum_limit=CUSUM_LIMIT,
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
        **changed,
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
    """Return the chart of a judge's drift on one scale over time, as SVG."""
    picture = drift_svg(panel.queries, store, experiment, DriftChart(judge, scale, provisional, theme))
    content = picture.encode("utf-8", "backslashreplace")
    return Response(content, media_type=SVG, headers={"Cache-Control": _KEEP_PICTURE})


@router.get(_PLACE + "/sheets/{sheet}.{form}")
def sheet_download(
    experiment: ExperimentPath, sheet: str, form: Literal["json", "csv"], store: Store, filled: bool = False
) -> Response:
    """Download an existing sheet, blank or with the scores applied so far."""
    judging = sheet_of(store, experiment, sheet)
    query = SheetRequest(ExportRequest(), sheet=sheet, filled=filled, format=form)
    return sheet_response(judging, query)


@router.post(_PLACE + "/export", dependencies=[LIMIT_CONCURRENCY])
def export(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Create a sheet and redirect to the page, which offers it for download."""
    fields = form.fields
    options: dict[str, Any] = {name: text for name in _TEXTS if (text := fields.get(name, "").strip())}
    if overlap := fields.get("overlap", "").strip():
        try:
            options["overlap"] = float(overlap) / 100
        except ValueError:
            options["overlap"] = overlap
    options |= {name: True for name in _TICKED if name in fields}
    try:
        query = parse_sheet_request(options, who, panel.allowed)
        judging = sheet_for(store, experiment, query)
    except (Invalid, NotEnoughData) as exc:
        return _form_error(request, experiment, panel, store, "export", fields, exc)
    there = experiment_path(experiment, "judges")
    return RedirectResponse(f"{there}?made={judging.sheet.id}&as={query.format}#made", 303)


@router.post(_PLACE + "/accept", dependencies=[LIMIT_CONCURRENCY])
def accept(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Accept held scores; the reason is stored with the sheet."""
    sheet, batches_service = form.fields.get("sheet", ""), batch_service_of(request.app)
    try:
        reason = _text_field(form.fields, "reason")
        if _is_batch(batches_service, who, sheet, experiment):
            batches_service.accept(who, sheet, reason, experiment)
        else:
            with panel.tracker.judging_lock():
                accept_drift(store, experiment, sheet, reason, who)
    except _Undecided as exc:
        return _form_error(request, experiment, panel, store, "accept", form.fields, exc)
    return RedirectResponse(f"{experiment_path(experiment, 'judges')}?accepted={quote_path(sheet)}#accepted", 303)


@router.post(_PLACE + "/return")
def send_back(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Return a held batch to its judge with a note."""
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
    """Start an automatic judge as a job."""
    wanted, key = form.fields.get("with", str(JudgeKind.RULES)), form.fields.get("again") or None
    if wanted == JudgeKind.MODEL:
        wanted = str(JudgeChoice(JudgeKind.MODEL, form.fields.get("model", "").strip()))
    try:
        started = start_judge(
            panel, experiment, checked(JudgeRunRequest, {"with": wanted}, "body"), started_by=who.name, key=key
        )
    except (WebError, TipbenchError) as exc:
        return _form_error(request, experiment, panel, store, "run", form.fields, exc)
    return RedirectResponse(f"/jobs/{quote_path(started.job.id)}", 303)


def _form_error(
    request: Request,
    experiment: str,
    panel: Panel,
    store: RunStore,
    which: str,
    fields: Mapping[str, str],
    exc: Exception,
) -> HTMLResponse:
    """Render the page with the error next to its field, or above the form if it belongs to none."""
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
    """Return a text field; raise Invalid if it is too long."""
    text = fields.get(name, "").replace("\r\n", "\n").strip()
    if len(text) > _MOST[name]:
        raise Invalid(f"{name} has at most {_MOST[name]} characters (got {len(text)}).", path=f"body.{name}")
    return text


def _is_batch(batches_service: BatchService, who: Identity, sheet: str, experiment: str) -> bool:
    """Return whether a sheet is a browser batch, of any judge."""
    try:
        batches_service.own(who, sheet, experiment)
    except Forbidden:
        return True
    except NotFound:
        return False
    return True


def _program(panel: Panel) -> str | None:
    """Return the name of the configured judging program, without its arguments, which may contain secrets."""
    command = panel.settings.get("judge_command")
    if not command:
        return None
    try:
        return default_name(command)
    except UsageError:
        return "the program"
