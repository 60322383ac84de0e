"""Import page: upload a filled sheet, preview its changes, apply it.

An upload is kept in memory for up to an hour, so that exactly the previewed content is applied. Only the token that
sent it can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import LockHeld, SheetRefused
from tipbench.judge.sheet_file import parse_sheet
from tipbench.record.store import RunStore
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, Identity
from tipbench.web.deps import LIMIT_FILLED_SHEETS, LIMIT_SHEET_REQUESTS, Admin, PanelState, Store
from tipbench.web.errors import Invalid, refused_sheet
from tipbench.web.forms import UploadedFile
from tipbench.web.judge_service import ApplyOptions, Upload, apply_sheet, quota_of, uploads_of
from tipbench.web.panel.judge import changed_scales
from tipbench.web.panel.judges import drift_summary, judges_response
from tipbench.web.panel.pages import SentForm, page
from tipbench.web.queries import experiment_path, get_experiment, quote_path

router = APIRouter(dependencies=[LIMIT_SHEET_REQUESTS, ADMINS_ONLY], include_in_schema=False)

_PATH = "/experiments/{experiment:path}/judges/import"
_UploadId = Annotated[str, Path(max_length=64)]
_EXPIRED = "This upload has expired: uploads are kept for an hour or until a restart. Upload the file again."


@router.post(_PATH)
def upload_sheet(
    request: Request, experiment: ExperimentPath, form: SentForm, admin: Admin, panel: PanelState, store: Store
) -> Response:
    """Store an uploaded sheet and redirect to its preview."""
    get_experiment(store, experiment)
    file = form.files.get("file", UploadedFile("", b""))
    judge = form.fields.get("judge", "").strip() or None
    if not file.content:
        error = f"The file {file.name[:80]} is empty." if file.name else "Choose the filled sheet first."
        return judges_response(request, experiment, panel, store, status=422, errors={"file": error})
    try:
        ApplyOptions.of(admin, judge=judge, accept=None, dry_run=True)  # check the judge's name before keeping the file
    except Invalid as exc:
        error = str(exc).removeprefix("query.judge takes ")  # the start names the API's parameter
        # `filled_by` is the id of the form field `judge`.
        return judges_response(request, experiment, panel, store, status=422, errors={"filled_by": error})
    upload = uploads_of(request.app).add(
        admin.token_id, experiment, file.name, file.content, judge, quota=quota_of(admin)
    )
    return RedirectResponse(experiment_path(experiment, "judges", "import", upload.id), 303)


@router.get(_PATH + "/{upload_id}", dependencies=[LIMIT_FILLED_SHEETS])
def preview(
    request: Request, experiment: ExperimentPath, upload_id: _UploadId, admin: Admin, store: Store
) -> HTMLResponse:
    """Show the changes an upload would make, or the result once it has been applied."""
    get_experiment(store, experiment)
    upload = uploads_of(request.app).find(upload_id, admin.token_id, experiment)
    if upload is None:
        return _render_import(request, experiment, upload=None, status=404, error=_EXPIRED)
    if upload.outcome is not None:
        return _render_import(request, experiment, upload, outcome=upload.outcome)
    return _preview_page(request, upload, admin, store)


@router.post(_PATH + "/{upload_id}", dependencies=[LIMIT_FILLED_SHEETS])
def confirm(
    request: Request,
    experiment: ExperimentPath,
    upload_id: _UploadId,
    form: SentForm,
    admin: Admin,
    panel: PanelState,
    store: Store,
) -> Response:
    """Apply the previewed upload; repeated requests have no effect."""
    get_experiment(store, experiment)
    uploads = uploads_of(request.app)
    upload = uploads.find(upload_id, admin.token_id, experiment)
    if upload is None:
        return _render_import(request, experiment, upload=None, status=404, error=_EXPIRED)
    if form.fields.get("sha256") != upload.sha256:
        error = "The form refers to another file than the stored one. Check the preview again."
        return _preview_page(request, upload, admin, store, status=409, error=error)
    if upload.outcome is None:
        accept_reason = form.fields.get("reason", "").strip() or None
        final = "final" in form.fields
        try:
            options = ApplyOptions.of(admin, judge=upload.judge, accept=accept_reason, dry_run=False, final=final)
            with panel.mlflow.judging_lock():
                result = apply_sheet(store, experiment, parse_sheet(upload.content), options)
                uploads.save_outcome(upload, result)
        except Invalid as exc:
            return _preview_page(request, upload, admin, store, status=exc.status, error=str(exc))
        except (LockHeld, SheetRefused) as exc:
            return _preview_page(request, upload, admin, store, status=409, error=str(exc))
    return RedirectResponse(experiment_path(experiment, "judges", "import", upload.id), 303)


def _preview_page(
    request: Request, upload: Upload, admin: Identity, store: RunStore, *, status: int = 200, error: str | None = None
) -> HTMLResponse:
    options = ApplyOptions.of(admin, judge=upload.judge, accept=None, dry_run=True)
    try:
        result = apply_sheet(store, upload.experiment, parse_sheet(upload.content), options)
    except SheetRefused as exc:
        return _render_import(request, upload.experiment, upload, status=422, refused=refused_sheet(exc))
    except Invalid as exc:
        return _render_import(request, upload.experiment, upload, status=422, error=str(exc))
    return _render_import(request, upload.experiment, upload, status=status, previewed=result, error=error)


def _render_import(
    request: Request,
    experiment: str,
    upload: Upload | None,
    *,
    status: int = 200,
    previewed: Mapping[str, Any] | None = None,
    outcome: Mapping[str, Any] | None = None,
    refused: Mapping[str, Any] | None = None,
    error: str | None = None,
) -> HTMLResponse:
    changes = previewed["changes"] if previewed else []
    return page(
        request,
        "sheet_import.html",
        status=status,
        experiment=experiment,
        upload=upload,
        previewed=previewed,
        outcome=outcome,
        sentences=drift_summary(outcome.get("drift")) if outcome else [],
        refused=refused,
        error=error,
        changes=changes,
        changed_scales=changed_scales(changes),
        duels=previewed is not None and "judged_in_both_orders" in previewed,  # only results of duels have this key
        judges_path=experiment_path(experiment, "judges"),
        json_url=f"/api/bench/judges/{quote_path(experiment)}",
    )
