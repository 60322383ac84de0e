"""Judges page of an experiment: judges, sheets, batches, export, drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import LockHeld, NotEnoughData, TipbenchError, UsageError
from tipbench.judge.automatic import JudgeChoice, JudgeKind
from tipbench.judge.charts import HEIGHT, WIDTH, drift_points, drift_sentence
from tipbench.judge.command import default_name
from tipbench.judge.drift import CUSUM_LIMIT, limit_sentences
from tipbench.judge.export import ExportRequest
from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetSummary
from tipbench.markup import number
from tipbench.record.store import RunStore
from tipbench.web.api.models import JudgeRunRequest
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, EVERYBODY, Identity
from tipbench.web.batch_items import MAX_ACCEPT_REASON, MAX_RETURN_NOTE, BatchShape
from tipbench.web.batches import BatchService, batch_service_of
from tipbench.web.board_query import ThemeName
from tipbench.web.deps import LIMIT_SHEET_REQUESTS, Admin, Panel, PanelState, Store
from tipbench.web.errors import Conflict, Forbidden, Invalid, NotFound, WebError, validate_part
from tipbench.web.forms import MAX_LIMIT
from tipbench.web.job_service import start_judge
from tipbench.web.judge_service import (
    DriftChartQuery,
    accept_drift,
    drift_svg,
    get_or_export_sheet,
    get_sheet,
    parse_sheet_request,
    sheet_response,
)
from tipbench.web.panel.jobs import new_idempotency_key
from tipbench.web.panel.judge import bias_words, judge_page_url
from tipbench.web.panel.pages import SentForm, charts_installed, page
from tipbench.web.queries import experiment_path, get_experiment, quote_path, revision
from tipbench.workflows.judging import SheetRequest

_GOOD_ALPHA, _FAIR_ALPHA = 0.8, 0.667  # thresholds recommended by Krippendorff
MAX_CLOSED = 10  # closed batches listed per judge; held and open ones are always listed
_MOST_URGENT_FIRST = (  # whether a judge's scores count; what needs an admin's decision comes first
    "held",
    "partly held",
    "count, unchecked",
    "count, drift accepted",
    "count",
    "none",
    "provisional",
)
_STATUS_ORDER = {"held": 0, "open": 1}  # held batches wait for an admin

Skips = Sequence[Mapping[str, Any]]  # the skipped items of a batch


def judge_views(judging: JudgingStatus) -> list[dict[str, Any]]:
    """Return each judge's status, latest drift verdict and bias by scale. Judges who need a decision come first."""

    def urgency(status: JudgeStatus) -> int:
        return _MOST_URGENT_FIRST.index(judging.use_of_scores(status))

    views = []
    for status in sorted(judging.judges, key=lambda each: (urgency(each), each.judge)):
        sheets = [
            each for each in judging.history if each.judge == status.judge and each.provisional == status.provisional
        ]
        drift = (sheets[-1].drift if sheets else None) or {}  # of the latest sheet
        scales = []
        for scale in drift.get("scales", ()):
            points = drift_points(sheets, status.judge, scale["scale"], provisional=status.provisional)
            scales.append(
                {
                    "latest": scale,
                    "bias": bias_words(scale["bias"]),
                    "has_points": bool(points),
                    "chart_text": drift_sentence(points),
                }
            )
        views.append(
            {
                "status": status,
                "verdict": drift.get("verdict", "unknown"),
                "sentences": drift_summary(drift),
                "scales": scales,
                "use": judging.use_of_scores(status),
            }
        )
    return views


def held_views(judging: JudgingStatus, batches: Iterable[BatchShape]) -> list[dict[str, Any]]:
    """Return the held sheets that wait for an admin's decision, oldest first.

    A sheet whose batch is open is left out, because its judge is revising it. A held sheet can be returned to its
    judge only if its batch is held too; otherwise the scores came from a file.
    """
    status_by_batch = {batch.sheet: batch.status for batch in batches}
    views = []
    for sheet in judging.history:
        batch_status = status_by_batch.get(sheet.sheet)  # None without a batch
        if sheet.status == "held" and batch_status != "open" and not sheet.provisional:
            views.append({"sheet": sheet, "why": drift_summary(sheet.drift), "in_browser": batch_status == "held"})
    return views


def drift_summary(drift: Mapping[str, Any] | None) -> list[str]:
    """Return sentences on a judge's drift. They do not reveal which items are controls."""
    if not drift:
        return []
    sentences = [
        f"{scale['scale'].capitalize()} is scored {bias_words(scale['bias'])}, more than chance explains."
        for scale in drift.get("scales", ())
        if scale["beyond"]
    ]
    sentences += limit_sentences(drift)
    has_numbers = "error" in drift  # error: the mean difference from the reference scores
    if sentences or not has_numbers:
        return sentences
    if drift["verdict"] == "unknown":
        return ["Unknown: too few control tips are scored."]
    return [f"No drift: the scores differ from the reference scores by {number(drift['error'], 1)} points on average."]


def all_sheets(judging: JudgingStatus) -> list[SheetSummary]:
    """Return all sheets, newest first."""
    applied = {each.sheet for each in judging.history}  # also partly scored sheets, which are still open
    not_applied = [each for each in judging.open_sheets if each.sheet not in applied]
    return sorted([*judging.history, *not_applied], key=lambda sheet: (sheet.exported, sheet.sheet), reverse=True)


def batch_views(
    newest_first: Iterable[BatchShape], skips: Callable[[str], Skips], minutes_per_item: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Group batches by judge. Judges with held batches come first, then those with open ones."""
    by_judge: dict[str, list[BatchShape]] = {}
    for batch in sorted(newest_first, key=_status_order):
        by_judge.setdefault(batch.judge, []).append(batch)
    views = []
    # A judge's first batch is the most urgent one.
    for judge in sorted(by_judge, key=lambda name: (_status_order(by_judge[name][0]), name)):
        batches = by_judge[judge]
        count = Counter[str](batch.status for batch in batches)
        listed = batches[: count["held"] + count["open"] + MAX_CLOSED]  # closed batches come last
        views.append(
            {
                "judge": judge,
                "count": count,  # of batches, by status
                "skipped": sum(batch.skipped for batch in batches),  # items
                "minutes_per_item": minutes_per_item.get(judge),
                "batches": [(batch, skips(batch.sheet) if batch.skipped else ()) for batch in listed],
                "left_out": len(batches) - len(listed),  # closed batches
            }
        )
    return views


def _status_order(batch: BatchShape) -> int:
    return _STATUS_ORDER.get(batch.status, len(_STATUS_ORDER))


def alpha_words(alpha: float | None) -> str:
    """Return a description of the agreement between judges."""
    if alpha is None:
        return "unknown: too few answers have two judges"
    if alpha >= _GOOD_ALPHA:
        return "good"
    if alpha >= _FAIR_ALPHA:
        return "fair: good enough for careful conclusions"
    return "weak: look at the rubric together"


router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

SVG = "image/svg+xml"
_PATH = "/experiments/{experiment:path}/judges"
_CACHE_CONTROL = "private, max-age=3600"  # the page adds the revision to the URL of a chart
_EXPORT_TEXTS = ("judge", "limit", "format")
_EXPORT_CHECKBOXES = ("all", "rejudge", "focus")
_EXPORT_DEFAULTS: Mapping[str, str] = {"judge": "", "limit": "", "overlap": "20", "format": "json"}
_MAX_CHARS = {"reason": MAX_ACCEPT_REASON, "note": MAX_RETURN_NOTE}
_DECISION_ERRORS = (Invalid, Conflict, LockHeld)


@router.get(_PATH)
def judges_page(request: Request, experiment: ExperimentPath, panel: PanelState, store: Store) -> HTMLResponse:
    """Show the judging status. `?made=`, `?accepted=` and `?returned=` name the sheet that a form has just changed."""
    return judges_response(request, experiment, panel, store)


def judges_response(
    request: Request,
    experiment: str,
    panel: Panel,
    store: RunStore,
    *,
    status: int = 200,
    values: Mapping[str, Any] | None = None,
    errors: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """Render the page; after an invalid form, `values` and `errors` are shown in it."""
    mlflow_experiment = get_experiment(store, experiment)
    judging = panel.queries.judging(store, mlflow_experiment)
    sheets = all_sheets(judging)
    batch_service = batch_service_of(request.app)
    batches = batch_service.page(request.state.identity, experiment, EVERYBODY, limit=MAX_LIMIT).items
    minutes_per_item = batch_service.minutes_per_item(experiment)
    in_browser = {batch.sheet for batch in batches}
    known_sheets = in_browser | {sheet.sheet for sheet in sheets}
    query = request.query_params
    changed: dict[str, Any] = {
        name: query[name] if query.get(name) in known_sheets else None for name in ("made", "accepted", "returned")
    }
    return page(
        request,
        "judges.html",
        status=status,
        experiment=experiment,
        judging=judging,
        judges=judge_views(judging),
        sheets=sheets,
        batches=batch_views(batches, batch_service.skips, minutes_per_item),
        held=held_views(judging, batches),
        in_browser=in_browser,
        minutes_per_item=minutes_per_item,
        alphas=[(name, value, alpha_words(value)) for name, value in judging.alpha.items()],
        revision=revision(mlflow_experiment) or "",
        charts=charts_installed(),
        cusum_limit=CUSUM_LIMIT,
        chart_size=(WIDTH, HEIGHT),
        values={**_EXPORT_DEFAULTS, **(values or {})},
        errors=errors or {},
        made_as="csv" if query.get("as") == "csv" else "json",
        job_key=new_idempotency_key(),
        program=_program_name(panel),
        judge_url=judge_page_url(experiment),
        judge_address=str(request.base_url).rstrip("/") + judge_page_url(experiment),
        batches_url=f"/api/bench/judge/{quote_path(experiment)}/batches?judge=*",
        here_path=experiment_path(experiment, "judges"),
        json_url=f"/api/bench/judges/{quote_path(experiment)}",
        mlflow_url=mlflow_experiment.url,
        **changed,
    )


@router.get(_PATH + "/drift.svg")
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
    svg = drift_svg(panel.queries, store, experiment, DriftChartQuery(judge, scale, provisional, theme))
    content = svg.encode("utf-8", "backslashreplace")  # UTF-8 cannot encode lone surrogates
    return Response(content, media_type=SVG, headers={"Cache-Control": _CACHE_CONTROL})


@router.get(_PATH + "/sheets/{sheet}.{form}")
def sheet_download(
    experiment: ExperimentPath, sheet: str, form: Literal["json", "csv"], store: Store, filled: bool = False
) -> Response:
    """Download an existing sheet, blank or with the scores applied so far."""
    stored = get_sheet(store, experiment, sheet)
    # The export options are not used, because the sheet exists.
    sheet_request = SheetRequest(ExportRequest(), sheet=sheet, filled=filled, format=form)
    return sheet_response(stored, sheet_request)


@dataclass(frozen=True)
class JudgesForm:
    """A sent form of this page, with what its handlers need."""

    request: Request
    experiment: str
    fields: Mapping[str, str]
    admin: Identity
    panel: Panel
    store: RunStore

    def text(self, name: str) -> str:
        """Return a text field; raise Invalid if it is too long."""
        text = self.fields.get(name, "").replace("\r\n", "\n").strip()
        if len(text) > _MAX_CHARS[name]:
            raise Invalid(f"{name} has at most {_MAX_CHARS[name]} characters (got {len(text)}).", path=f"body.{name}")
        return text

    def done(self, change: str, sheet: str, extra_query: str = "") -> Response:
        """Redirect to the page, which confirms the change of a sheet."""
        path = experiment_path(self.experiment, "judges")
        return RedirectResponse(f"{path}?{change}={quote_path(sheet)}{extra_query}#{change}", 303)

    def failed(self, form_name: str, exc: Exception) -> HTMLResponse:
        """Render the page with the error: next to its field if that is in the export form, otherwise as an alert."""
        path = getattr(exc, "path", None) or ""
        _, _, field = str(path).rpartition(".")
        message = str(exc)
        if message.startswith(("body.", "query.")):  # the path of the field, a colon, and the message for the user
            _, _, without_path = message.partition(": ")
            message = without_path or message
        if field == "overlap":  # entered in percent, but validated as a share of 1
            message = f"A share from 0 to 100 % (got {self.fields.get('overlap', '')[:40]!r})."
        field_names = (*_EXPORT_DEFAULTS, *_EXPORT_CHECKBOXES, *_MAX_CHARS, "sheet", "model")
        is_export_field = form_name == "export" and field in _EXPORT_DEFAULTS
        error_key = field if is_export_field else form_name
        return judges_response(
            self.request,
            self.experiment,
            self.panel,
            self.store,
            status=exc.status if isinstance(exc, WebError) else 409,
            values={
                name: self.fields[name][: _MAX_CHARS.get(name, 200)] for name in field_names if name in self.fields
            },
            errors={error_key: message},
        )


def judges_form(
    request: Request, experiment: ExperimentPath, form: SentForm, admin: Admin, panel: PanelState, store: Store
) -> JudgesForm:
    """Return the sent form."""
    return JudgesForm(request, experiment, form.fields, admin, panel, store)


SentJudgesForm = Annotated[JudgesForm, Depends(judges_form)]


@router.post(_PATH + "/export", dependencies=[LIMIT_SHEET_REQUESTS])
def export(form: SentJudgesForm) -> Response:
    """Create a sheet and redirect to the page, which offers it for download."""
    options: dict[str, Any] = {name: text for name in _EXPORT_TEXTS if (text := form.fields.get(name, "").strip())}
    if overlap := form.fields.get("overlap", "").strip():
        try:
            options["overlap"] = float(overlap) / 100
        except ValueError:
            options["overlap"] = overlap  # the validation below reports it
    options |= {name: True for name in _EXPORT_CHECKBOXES if name in form.fields}
    try:
        sheet_request = parse_sheet_request(options, form.admin, form.panel.permissions)
        stored = get_or_export_sheet(form.store, form.experiment, sheet_request)
    except (Invalid, NotEnoughData) as exc:
        return form.failed("export", exc)
    return form.done("made", stored.sheet.id, f"&as={sheet_request.format}")


@router.post(_PATH + "/accept", dependencies=[LIMIT_SHEET_REQUESTS])
def accept(form: SentJudgesForm) -> Response:
    """Accept held scores; the reason is stored with the sheet."""
    sheet = form.fields.get("sheet", "")
    batch_service = batch_service_of(form.request.app)
    try:
        reason = form.text("reason")
        if _is_batch(batch_service, form.admin, sheet, form.experiment):
            batch_service.accept(form.admin, sheet, reason, form.experiment)
        else:
            with form.panel.mlflow.judging_lock():
                accept_drift(form.store, form.experiment, sheet, reason, form.admin)
    except _DECISION_ERRORS as exc:
        return form.failed("accept", exc)
    return form.done("accepted", sheet)


@router.post(_PATH + "/return")
def send_back(form: SentJudgesForm) -> Response:
    """Return a held batch to its judge with a note."""
    sheet = form.fields.get("sheet", "")
    try:
        batch_service_of(form.request.app).send_back(form.admin, sheet, form.text("note"), form.experiment)
    except _DECISION_ERRORS as exc:
        return form.failed("return", exc)
    return form.done("returned", sheet)


@router.post(_PATH + "/run")
def run_judge(form: SentJudgesForm) -> Response:
    """Start an automatic judge as a job."""
    judge = form.fields.get("with", str(JudgeKind.RULES))
    idempotency_key = form.fields.get("key") or None  # sending the form again starts no second job
    if judge == JudgeKind.MODEL:
        judge = str(JudgeChoice(JudgeKind.MODEL, form.fields.get("model", "").strip()))
    try:
        options = validate_part(JudgeRunRequest, {"with": judge}, "body")
        started = start_judge(
            form.panel, form.experiment, options, started_by=form.admin.name, idempotency_key=idempotency_key
        )
    except (WebError, TipbenchError) as exc:
        return form.failed("run", exc)
    return RedirectResponse(f"/jobs/{quote_path(started.job.id)}", 303)


def _is_batch(batch_service: BatchService, admin: Identity, sheet: str, experiment: str) -> bool:
    try:
        batch_service.get_own(admin, sheet, experiment)
    except NotFound:
        return False
    except Forbidden:  # another judge's batch
        return True
    return True


def _program_name(panel: Panel) -> str | None:
    """Return the name of the configured judging program. Its arguments are left out: they may contain secrets."""
    command = panel.settings.get("judge_command")
    if not command:
        return None
    try:
        return default_name(command)
    except UsageError:
        return "the program"
