"""Judge's pages: open batches, judging, sheet upload, result of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import MlflowUnavailable, NotEnoughData, SheetRefused
from tipbench.judge.sheet_file import parse_sheet
from tipbench.record.store import RunStore
from tipbench.text import plural
from tipbench.web.api.batches import SheetPath
from tipbench.web.auth import JUDGES_TOO, Identity, Role
from tipbench.web.batch_store import Kind, Status
from tipbench.web.batches import ANSWERS, batch_service_of
from tipbench.web.deps import LIMIT_CONCURRENCY, LIMIT_SHEETS, Judge, Panel, PanelState, Store, concurrency_limits
from tipbench.web.errors import Invalid, NotFound, attachment, refused_sheet
from tipbench.web.forms import read_form, read_parts
from tipbench.web.judge_service import (
    ApplyOptions,
    apply_sheet,
    judging_lock,
    parse_sheet_request,
    sheet_file,
    sheet_for,
)
from tipbench.web.panel.pages import bias_words, number, page, percent
from tipbench.web.queries import get_experiment
from tipbench.web.uploads import Upload, quota_of, uploads_of

_DECIMALS = 1  # of the bias shown to a judge


@dataclass(frozen=True)
class ScaleResult:
    """A judge's bias and error on one scale."""

    name: str
    words: str  # "0.4 too high"
    error: float | None
    beyond: bool


@dataclass(frozen=True)
class BatchResult:
    """The result of a closed batch: the judge's drift and agreement."""

    verdict: str  # fine, beyond the limit, unknown
    summary: str
    scales: tuple[ScaleResult, ...]
    sentences: tuple[str, ...]
    itself: str | None  # agreement with the judge's own earlier scores
    left: int  # items without scores
    kept: int  # items cleared here, which keep their earlier scores
    by_file: bool  # scores were uploaded as a file, not entered in the browser

    @property
    def beyond(self) -> bool:
        """Whether any scale exceeds its drift limit."""
        return any(scale.beyond for scale in self.scales)


_REVISED = {"ok": "fine", "fine": "fine", "held": "beyond the limit", "beyond the limit": "beyond the limit"}
_SUMMARIES = {
    "fine": "Your scores match the reference scores as closely as an attentive judge's.",
    "beyond the limit": "Your scores differ from the reference scores by more than chance explains.",
    "unknown": "Too few scores to compare them with the reference scores.",
}


def batch_result(batch: Mapping[str, Any]) -> BatchResult:
    """Returns the result of a closed batch, given as the API's JSON."""
    result = batch["outcome"] or {}
    drift = result.get("drift") or {}
    verdict = _REVISED.get(drift.get("verdict", "unknown"), "unknown") if drift else "unknown"
    return BatchResult(
        verdict=verdict,
        summary=_SUMMARIES.get(verdict, _SUMMARIES["unknown"]),
        scales=tuple(_scale(scale) for scale in drift.get("scales", ()) if scale["bias"] is not None),
        sentences=tuple(_duel_sentences(result) if batch["kind"] == "duel" else drift_sentences(drift)),
        itself=_itself(result.get("self_agreement")),
        left=result.get("unfinished", batch["items"] - batch["done"]),
        kept=result.get("blank", 0),
        by_file=bool(result.get("by_file")),
    )


def _scale(scale: Mapping[str, Any]) -> ScaleResult:
    return ScaleResult(scale["scale"], bias_words(scale["bias"], _DECIMALS), scale["error"], bool(scale["beyond"]))


def drift_sentences(drift: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each drift limit over all scales that is exceeded."""
    if drift.get("error_beyond"):
        yield (
            f"On average your scores differ from the reference scores by {number(drift['error'], 1)} points; "
            f"the limit is {number(drift['error_limit'], 1)}."
        )
    if drift.get("contrast_beyond"):
        yield (
            "Good and poor tips get similar scores: where the reference scores are 1 point apart, yours "
            f"are {number(drift['contrast'] + 0.0, 1)} apart; the limit is {number(drift['contrast_limit'], 1)}."
        )


def _itself(agreement: Mapping[str, Any] | None) -> str | None:
    if not agreement or not agreement.get("n"):
        return None
    return (
        f"{plural(agreement['n'], 'tip')} you had scored before were repeated: {percent(agreement['exact'])} of "
        "these scores are the same as the first time."
    )


def _duel_sentences(result: Mapping[str, Any]) -> Iterator[str]:
    both, same = result.get("judged_in_both_orders"), result.get("same_in_both_orders")
    if both:
        yield (
            f"{plural(both, 'duel')} were shown in both orders; in {number(same)} of them you chose the same answer "
            "both times."
        )


batch_router = APIRouter(dependencies=[JUDGES_TOO], include_in_schema=False)

_TEMPLATES = {Kind.SHEET: "judge_batch.html", Kind.DUEL: "judge_duel.html"}


@batch_router.get("/judge/batches/{sheet}")
def batch_page(request: Request, sheet: SheetPath, judge: Judge) -> HTMLResponse:
    """Shows an open batch for judging, or a closed one with its result; to admins, the progress of another judge's."""
    batches = batch_service_of(request.app)
    result = batches.one(judge, sheet)
    batch = result["batch"]
    if "skips" in result:
        return page(request, "judge_other.html", batch=batch, skips=result["skips"], json_url=batch["links"]["self"])
    shown: dict[str, Any] = {
        "batch": batch,
        "judge_url": home_of(batch["experiment"]),
        "here_path": f"/judge/batches/{sheet}",
        "json_url": batch["links"]["self"],
    }
    if batch["status"] != Status.OPEN:
        return page(request, "judge_outcome.html", view=batch_result(batch), **shown)
    return page(request, _TEMPLATES[Kind(batch["kind"])], recorded=batches.recorded_already(sheet), **shown)


@batch_router.post("/judge/batches/{sheet}/reopen")
def reopen(request: Request, sheet: SheetPath, judge: Judge) -> Response:
    """Reopens a batch for its judge."""
    batch_service_of(request.app).reopen(judge, sheet)
    return RedirectResponse(f"/judge/batches/{sheet}", status_code=303)


def home_of(experiment: str) -> str:
    """Returns the URL of the judge's page for an experiment."""
    return f"/judge?{urlencode({'experiment': experiment}, errors='backslashreplace')}"


router = APIRouter(dependencies=[JUDGES_TOO], include_in_schema=False)
working = APIRouter(dependencies=[LIMIT_CONCURRENCY, JUDGES_TOO], include_in_schema=False)  # concurrency-limited

_BATCHES = 20  # newest batches listed
_LISTED = 200  # errors shown on a page
_KINDS = {"json": "application/json", "csv": "text/csv"}
UploadId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Name = Annotated[str, Query(max_length=200)]


@router.get("/judge")
def judge_page(request: Request, judge: Judge, panel: PanelState, experiment: Name = "") -> HTMLResponse:
    """Shows a form for the experiment's name, then its batches, sheet download and sheet upload."""
    name = experiment.strip()
    try:
        error = _experiment_error(panel.tracker.open().store, name) if name else None
    except MlflowUnavailable:
        panel.tracker.doubt()
        if not _batches(request, judge, name):
            raise
        return _judge_page(request, judge, name, away=True)  # open batches do not require MLflow
    return _judge_page(request, judge, name, error=error)


@working.post("/judge/batches")
async def open_batch(request: Request, judge: Judge, panel: PanelState) -> Response:
    """Redirects to the judge's open batch, or to a new one."""
    form = await read_form(request)
    return await run_in_threadpool(_open_batch, request, panel, judge, form)


@working.post("/judge/sheet")
async def fetch_sheet(request: Request, judge: Judge, panel: PanelState, store: Store) -> Response:
    """Downloads a sheet; returns the open one again while more than half of it is unscored."""
    form = await read_form(request)
    return await run_in_threadpool(_download_sheet, request, panel, store, judge, form)


@working.post("/judge/preview")
async def preview(request: Request, judge: Judge, panel: PanelState, store: Store) -> Response:
    """Previews an uploaded sheet. Nothing is recorded; the file is stored until it is applied."""
    parts = await read_parts(request)
    name, file = parts.fields.get("experiment", "").strip(), parts.files.get("sheet")
    content = file.content if file is not None else b""
    sent = (name, file.name if file else "", content)
    async with concurrency_limits(request).sheet():
        return await run_in_threadpool(_preview_upload, request, panel, store, judge, sent)


@working.post("/judge/uploads/{upload_id}/apply", dependencies=[LIMIT_SHEETS])
def apply(
    request: Request,
    upload_id: UploadId,
    judge: Judge,
    panel: PanelState,
    store: Store,
    experiment: Name,
    final: bool = False,
) -> Response:
    """Applies the previewed file, and finishes its sheet if `final`; repeated requests have no effect."""
    upload = _upload(request, upload_id, judge, experiment)
    if upload.outcome is None:
        options = ApplyOptions.of(_as_judge(judge), judge=None, accept=None, dry_run=False, final=final)
        try:
            with judging_lock(panel.settings.home, panel.tracker.open().place):
                result = apply_sheet(store, upload.experiment, parse_sheet(upload.content), options)
        except SheetRefused as exc:
            return _refused(request, judge, upload.experiment, upload.name, exc)
        uploads_of(request.app).settle(upload, result)
    return RedirectResponse(_url(f"/judge/uploads/{upload_id}", experiment), status_code=303)


@router.get("/judge/uploads/{upload_id}")
def outcome(request: Request, upload_id: UploadId, judge: Judge, experiment: Name) -> Response:
    """Shows the result of applying an upload."""
    upload = _upload(request, upload_id, judge, experiment)
    if upload.outcome is None:
        return RedirectResponse(_url("/judge", experiment), status_code=303)
    return _sheet_page(request, judge, upload, upload.outcome, dry=False)


def _judge_page(
    request: Request,
    judge: Identity,
    experiment: str,
    *,
    error: str | None = None,
    errors_by_field: Mapping[str, str] | None = None,
    away: bool = False,
    status: int = 200,
) -> HTMLResponse:
    known = bool(experiment) and error is None
    batches = _batches(request, judge, experiment) if known else []
    return page(
        request,
        "judge.html",
        status=404 if error else status,
        judge=judge.name,
        experiment=experiment,
        known=known,
        fault=error,
        faults=errors_by_field or {},
        away=away,
        batch=ANSWERS,
        batches=batches[:_BATCHES],
        open=next((each for each in batches if (each["status"], each["kind"]) == ("open", "sheet")), None),
        held=[each for each in batches if each["status"] == "held"],
    )


def _batches(request: Request, judge: Identity, experiment: str) -> list[dict[str, Any]]:
    """Returns the judge's own batches, most recently used first."""
    return batch_service_of(request.app).listed(_as_judge(judge), experiment)


def _open_batch(request: Request, panel: Panel, judge: Identity, form: Mapping[str, str]) -> Response:
    name, kind = form.get("experiment", "").strip(), form.get("kind", str(Kind.SHEET))
    if kind not in set(Kind):
        raise Invalid(f"kind is sheet or duel (got {kind[:40]!r}).", path="body.kind")
    try:
        opened = batch_service_of(request.app).open(judge, name, kind=Kind(kind))
    except (Invalid, NotFound):
        return _judge_page(request, judge, name, error=_experiment_error(panel.tracker.open().store, name))
    except NotEnoughData as exc:
        return _judge_page(request, judge, name, errors_by_field={"batch": str(exc)}, status=409)
    return RedirectResponse(f"/judge/batches/{opened.batch.sheet}", status_code=303)


def _download_sheet(
    request: Request, panel: Panel, store: RunStore, judge: Identity, form: Mapping[str, str]
) -> Response:
    name = form.get("experiment", "").strip()
    if error := _experiment_error(store, name):
        return _judge_page(request, judge, name, error=error)
    limit = form.get("limit", "").strip()
    options: dict[str, Any] = {"format": form.get("format", "json")}
    if limit:
        options["limit"] = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= 6 else limit
    try:
        ask = parse_sheet_request(options, _as_judge(judge), panel.allowed)
        with judging_lock(panel.settings.home, panel.tracker.open().place):
            judging = sheet_for(store, name, ask)
    except Invalid as exc:
        field = (exc.path or "").removeprefix("body.")
        return _judge_page(
            request, judge, name, errors_by_field={field: str(exc).removeprefix(f"body.{field}: ")}, status=422
        )
    except NotEnoughData as exc:
        return _judge_page(request, judge, name, errors_by_field={"sheet": str(exc)}, status=409)
    content = sheet_file(judging, ask).encode("utf-8", "backslashreplace")
    return Response(content, media_type=_KINDS[ask.format], headers=attachment(f"sheet-{judging.sheet.id}", ask.format))


def _preview_upload(
    request: Request, panel: Panel, store: RunStore, judge: Identity, sent: tuple[str, str, bytes]
) -> Response:
    name, file_name, content = sent
    if error := _experiment_error(store, name):
        return _judge_page(request, judge, name, error=error)
    if not content:
        error = "Choose the filled sheet: the JSON or CSV file you downloaded here."
        return _judge_page(request, judge, name, errors_by_field={"file": error}, status=422)
    options = ApplyOptions.of(_as_judge(judge), judge=None, accept=None, dry_run=True)
    try:
        with judging_lock(panel.settings.home, panel.tracker.open().place):
            result = apply_sheet(store, name, parse_sheet(content), options)
    except SheetRefused as exc:
        return _refused(request, judge, name, file_name, exc)
    upload = uploads_of(request.app).keep(judge.token_id, name, file_name, content, share=quota_of(judge))
    return _sheet_page(request, judge, upload, result, dry=True)


def _sheet_page(
    request: Request, judge: Identity, upload: Upload, result: Mapping[str, Any], *, dry: bool
) -> HTMLResponse:
    changes, drift = list(result.get("changes", ())), result.get("drift") or {}
    duels = "judged_in_both_orders" in result
    return page(
        request,
        "judge_sheet.html",
        judge=judge.name,
        upload=upload,
        told=result,
        dry=dry,
        verdict=drift.get("verdict"),
        scales=[scale for scale in drift.get("scales", ()) if scale.get("bias") is not None],
        sentences=list(drift_sentences(drift)),
        changes=changes,
        columns=list(dict.fromkeys(name for change in changes for name in change.get("given") or ())),
        duels=duels,
        judge_url=_url("/judge", upload.experiment),
        apply_url=_url(f"/judge/uploads/{upload.id}/apply", upload.experiment),
    )


def _refused(request: Request, judge: Identity, name: str, file_name: str, exc: SheetRefused) -> HTMLResponse:
    errors = refused_sheet(exc)["errors"]
    return page(
        request,
        "judge_refused.html",
        status=422,
        judge=judge.name,
        file_name=file_name or "The file",
        errors=errors[:_LISTED],
        more=max(0, len(errors) - _LISTED),
        judge_url=_url("/judge", name),
    )


def _experiment_error(store: RunStore, name: str) -> str | None:
    """Returns the error for an invalid or unknown experiment; judges may not list experiments."""
    try:
        get_experiment(store, name)
    except Invalid:
        return "An experiment's name starts with tip-bench-. Ask the person who invited you for the name."
    except NotFound:
        return "There is no experiment with this name. Ask the person who invited you for the name."
    return None


def _upload(request: Request, upload_id: str, judge: Identity, experiment: str) -> Upload:
    found = uploads_of(request.app).find(upload_id, judge.token_id, experiment)
    if found is None:
        raise NotFound("This upload has expired or belongs to another user. Upload the file again.")
    return found


def _as_judge(who: Identity) -> Identity:
    """Returns the identity with the judge's role: admins judge blind as well."""
    return replace(who, role=Role.JUDGE)


def _url(path: str, experiment: str) -> str:
    return f"{path}?{urlencode({'experiment': experiment}, errors='backslashreplace')}"
