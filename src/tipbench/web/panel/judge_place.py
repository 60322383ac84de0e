"""/judge: the judges' front page. They judge in the browser, or fetch a blind sheet, send it back and apply it.

Nothing here unblinds: experiments are not listed, and whoever works here does so under a judge's rules, admins too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import MlflowAway, NotEnoughData, SheetRefused
from tipbench.judge.sheet_files import parse_sheet
from tipbench.record.store import RunStore
from tipbench.web.auth import JUDGES_TOO, Identity
from tipbench.web.batch import Kind
from tipbench.web.batch_opening import ANSWERS
from tipbench.web.batches import desk_of
from tipbench.web.deps import Judge, Panel, PanelState, Store
from tipbench.web.downloads import attachment
from tipbench.web.errors import Invalid, NotFound, refused_sheet
from tipbench.web.forms import read_form, read_parts
from tipbench.web.judging import ApplyWish, alone, apply_sheet, sheet_file, sheet_for, wish_of
from tipbench.web.panel.judge_outcome import drift_sentences
from tipbench.web.panel.pages import page
from tipbench.web.queries import existing
from tipbench.web.tokens import Role
from tipbench.web.turns import IN_TURN, SHEET_ROOM, turns_of
from tipbench.web.uploads import Upload, share_of, uploads_of

router = APIRouter(dependencies=[JUDGES_TOO], include_in_schema=False)
working = APIRouter(dependencies=[IN_TURN, JUDGES_TOO], include_in_schema=False)  # what takes long

_BATCHES = 20  # that are listed, the newest
_LISTED = 200  # mistakes that a page shows
_KINDS = {"json": "application/json", "csv": "text/csv"}
UploadId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Name = Annotated[str, Query(max_length=200)]


@router.get("/judge")
def judge_page(request: Request, judge: Judge, panel: PanelState, experiment: Name = "") -> HTMLResponse:
    """Asks for the experiment; then offers the sheet and takes it back."""
    name = experiment.strip()
    try:
        fault = _fault(panel.tracker.open().store, name) if name else None
    except MlflowAway:
        panel.tracker.doubt()
        if not _batches(request, judge, name):
            raise
        return _desk(request, judge, name, away=True)  # what is begun goes on without MLflow
    return _desk(request, judge, name, fault=fault)


@working.post("/judge/batches")
async def open_batch(request: Request, judge: Judge, panel: PanelState) -> Response:
    """The judge's open batch, or a new one."""
    form = await read_form(request)
    return await run_in_threadpool(_opened, request, panel, judge, form)


@working.post("/judge/sheet")
async def fetch_sheet(request: Request, judge: Judge, panel: PanelState, store: Store) -> Response:
    """The judge's sheet as a file; the open one again as long as more than half of it is to do."""
    form = await read_form(request)
    return await run_in_threadpool(_sheet, request, panel, store, judge, form)


@working.post("/judge/preview")
async def preview(request: Request, judge: Judge, panel: PanelState, store: Store) -> Response:
    """What applying the file would do. Nothing is written; the bytes are kept until they are applied."""
    parts = await read_parts(request)
    name, file = parts.fields.get("experiment", "").strip(), parts.files.get("sheet")
    content = file.content if file is not None else b""
    sent = (name, file.name if file else "", content)
    async with turns_of(request).sheet():
        return await run_in_threadpool(_previewed, request, panel, store, judge, sent)


@working.post("/judge/uploads/{upload_id}/apply", dependencies=[SHEET_ROOM])
def apply(
    request: Request, upload_id: UploadId, judge: Judge, panel: PanelState, store: Store, experiment: Name
) -> Response:
    """Applies the very bytes that were previewed, once."""
    upload = _upload(request, upload_id, judge, experiment)
    if upload.outcome is None:
        wish = ApplyWish.of(_as_judge(judge), judge=None, accept=None, dry_run=False)
        try:
            with alone(panel.settings.home, panel.tracker.open().place):
                told = apply_sheet(store, upload.experiment, parse_sheet(upload.content), wish)
        except SheetRefused as exc:
            return _refused(request, judge, upload.experiment, upload.name, exc)
        uploads_of(request.app).settle(upload, told)
    return RedirectResponse(_url(f"/judge/uploads/{upload_id}", experiment), status_code=303)


@router.get("/judge/uploads/{upload_id}")
def outcome(request: Request, upload_id: UploadId, judge: Judge, experiment: Name) -> Response:
    """How applying ended."""
    upload = _upload(request, upload_id, judge, experiment)
    if upload.outcome is None:
        return RedirectResponse(_url("/judge", experiment), status_code=303)
    return _told(request, judge, upload, upload.outcome, dry=False)


def _desk(
    request: Request,
    judge: Identity,
    experiment: str,
    *,
    fault: str | None = None,
    faults: Mapping[str, str] | None = None,
    away: bool = False,
    status: int = 200,
) -> HTMLResponse:
    known = bool(experiment) and fault is None
    batches = _batches(request, judge, experiment) if known else []
    return page(
        request,
        "judge.html",
        status=404 if fault else status,
        judge=judge.name,
        experiment=experiment,
        known=known,
        fault=fault,
        faults=faults or {},
        away=away,
        batch=ANSWERS,
        batches=batches[:_BATCHES],
        open=next((each for each in batches if (each["status"], each["kind"]) == ("open", "sheet")), None),
        held=[each for each in batches if each["status"] == "held"],
    )


def _batches(request: Request, judge: Identity, experiment: str) -> list[dict[str, Any]]:
    """The judge's own, newest first."""
    return desk_of(request.app).listed(_as_judge(judge), experiment)


def _opened(request: Request, panel: Panel, judge: Identity, form: Mapping[str, str]) -> Response:
    name, kind = form.get("experiment", "").strip(), form.get("kind", str(Kind.SHEET))
    if kind not in set(Kind):
        raise Invalid(f"kind is sheet or duel (got {kind[:40]!r}).", path="body.kind")
    try:
        opened = desk_of(request.app).open(judge, name, kind=Kind(kind))
    except (Invalid, NotFound):
        return _desk(request, judge, name, fault=_fault(panel.tracker.open().store, name))
    except NotEnoughData as exc:
        return _desk(request, judge, name, faults={"batch": str(exc)}, status=409)
    return RedirectResponse(f"/judge/batches/{opened.batch.sheet}", status_code=303)


def _sheet(request: Request, panel: Panel, store: RunStore, judge: Identity, form: Mapping[str, str]) -> Response:
    name = form.get("experiment", "").strip()
    if fault := _fault(store, name):
        return _desk(request, judge, name, fault=fault)
    limit = form.get("limit", "").strip()
    wish: dict[str, Any] = {"format": form.get("format", "json")}
    if limit:
        wish["limit"] = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= 6 else limit
    try:
        ask = wish_of(wish, _as_judge(judge), panel.allowed)
        with alone(panel.settings.home, panel.tracker.open().place):
            judging = sheet_for(store, name, ask)
    except Invalid as exc:
        field = (exc.path or "").removeprefix("body.")
        return _desk(request, judge, name, faults={field: str(exc).removeprefix(f"body.{field}: ")}, status=422)
    except NotEnoughData as exc:
        return _desk(request, judge, name, faults={"sheet": str(exc)}, status=409)
    content = sheet_file(judging, ask).encode("utf-8", "backslashreplace")
    return Response(content, media_type=_KINDS[ask.format], headers=attachment(f"sheet-{judging.sheet.id}", ask.format))


def _previewed(
    request: Request, panel: Panel, store: RunStore, judge: Identity, sent: tuple[str, str, bytes]
) -> Response:
    name, file_name, content = sent
    if fault := _fault(store, name):
        return _desk(request, judge, name, fault=fault)
    if not content:
        fault = "Choose the filled sheet: the JSON or CSV file that was fetched here."
        return _desk(request, judge, name, faults={"file": fault}, status=422)
    wish = ApplyWish.of(_as_judge(judge), judge=None, accept=None, dry_run=True)
    try:
        with alone(panel.settings.home, panel.tracker.open().place):
            told = apply_sheet(store, name, parse_sheet(content), wish)
    except SheetRefused as exc:
        return _refused(request, judge, name, file_name, exc)
    upload = uploads_of(request.app).keep(judge.token_id, name, file_name, content, share=share_of(judge))
    return _told(request, judge, upload, told, dry=True)


def _told(request: Request, judge: Identity, upload: Upload, told: Mapping[str, Any], *, dry: bool) -> HTMLResponse:
    changes, drift = list(told.get("changes", ())), told.get("drift") or {}
    duels = "judged_in_both_orders" in told
    return page(
        request,
        "judge_sheet.html",
        judge=judge.name,
        upload=upload,
        told=told,
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


def _fault(store: RunStore, name: str) -> str | None:
    """What is wrong with an experiment's name; the list of them is not for judges."""
    try:
        existing(store, name)
    except Invalid:
        return "An experiment's name begins with tip-bench-. Ask whoever sent you here for it."
    except NotFound:
        return "There is no experiment of this name. Ask whoever sent you here for it."
    return None


def _upload(request: Request, upload_id: str, judge: Identity, experiment: str) -> Upload:
    found = uploads_of(request.app).find(upload_id, judge.token_id, experiment)
    if found is None:
        raise NotFound("This sheet is no longer kept, or was never sent by you. Send the file again.")
    return found


def _as_judge(who: Identity) -> Identity:
    """Whoever works here is blind: an admin's rights stay outside."""
    return replace(who, role=Role.JUDGE)


def _url(path: str, experiment: str) -> str:
    return f"{path}?{urlencode({'experiment': experiment}, errors='backslashreplace')}"
