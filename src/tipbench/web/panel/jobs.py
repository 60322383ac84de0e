"""Jobs pages: the list, and one job with live updates. The pages work without JavaScript; a script updates them."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import JobConflict, TipbenchError
from tipbench.jobs.job import ACTIVE, Job, JobKind, JobState
from tipbench.jobs.progress import Progress
from tipbench.jobs.store import JobFilter
from tipbench.web.api.jobs import JobPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState, panel_of
from tipbench.web.errors import Invalid, WebError
from tipbench.web.forms import form_value
from tipbench.web.job_service import job_links, retry_job
from tipbench.web.paging import LIMIT, Limit, Next
from tipbench.web.panel.job_progress import JobText
from tipbench.web.panel.pages import Chip, page
from tipbench.web.panel.start import new_idempotency_key

router = APIRouter(include_in_schema=False, dependencies=[ADMINS_ONLY])
LOG_BYTES = 16_384
_CHIP_JOBS = 100
_Word = TypeVar("_Word", bound=StrEnum)
_Choice = Annotated[str, Query(max_length=20)]


@router.get("/jobs")
def jobs_page(
    request: Request,
    panel: PanelState,
    state: _Choice = "",
    kind: _Choice = "",
    experiment: Annotated[str, Query(max_length=200)] = "",
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> HTMLResponse:
    """Lists the jobs, newest first; filters and page are in the URL."""
    which = JobFilter(_one_of(JobState, state, "state"), _one_of(JobKind, kind, "kind"), experiment.strip() or None)
    listed = panel.jobs.listed(which, limit=limit, after=next)
    asked = {key: value for key, value in request.query_params.items() if value}
    return page(
        request,
        "jobs.html",
        rows=[_row(panel, job, listed.queue_positions.get(job.id)) for job in listed.jobs],
        which=which,
        states=list(JobState),
        kinds=[each for each in JobKind if each is not JobKind.SIMULATE],
        following=listed.next,
        first=next is None,
        json_url=f"/api/bench/jobs?{urlencode(asked)}" if asked else "/api/bench/jobs",
    )


@router.get("/jobs/{job_id}")
def job_page(request: Request, panel: PanelState, job_id: JobPath) -> HTMLResponse:
    """Shows a job."""
    return _page(request, panel, job_id)


@router.get("/jobs/{job_id}/live")
def job_live(request: Request, panel: PanelState, job_id: JobPath) -> HTMLResponse:
    """Returns the part of the job page that changes, for its script."""
    return page(request, "job_live.html", **_context(panel, job_id))


@router.post("/jobs/{job_id}/cancel")
def cancel_job(request: Request, panel: PanelState, job_id: JobPath) -> Response:
    """Cancels a job; shows its page with an error if it has already ended."""
    try:
        panel.jobs.cancel(job_id)
    except JobConflict as exc:
        return _page(request, panel, job_id, fault=str(exc), status=409)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/retry")
async def retry(request: Request, panel: PanelState, admin: Admin, job_id: JobPath) -> Response:
    """Starts a retry of the job; the form's idempotency key prevents duplicates when it is sent again."""
    key = await form_value(request, "key") or None
    try:
        submitted = await run_in_threadpool(retry_job, panel, job_id, started_by=admin.name, key=key)
    except (JobConflict, WebError) as exc:
        status = exc.status if isinstance(exc, WebError) else 409
        return await run_in_threadpool(_page, request, panel, job_id, fault=str(exc), status=status)
    return RedirectResponse(f"/jobs/{submitted.job.id}", status_code=303)


def running_chip(request: Request) -> Chip | None:
    """Returns the header's chip with the number of running or queued jobs; one cheap query, as every page needs it."""
    try:
        found = panel_of(request).jobs.store.in_states({JobState.RUNNING, JobState.QUEUED}, limit=_CHIP_JOBS)
    except TipbenchError:  # shown on the jobs pages
        return None
    running = [job for job in found if job.state is JobState.RUNNING]
    named, word = (running, "running") if running else (found, "queued")
    if not named:
        return None
    url = f"/jobs/{named[0].id}" if len(named) == 1 else f"/jobs?state={word}"
    return Chip(f"{len(named)} {word}", url, word)


def _page(request: Request, panel: Panel, job_id: str, *, fault: str | None = None, status: int = 200) -> HTMLResponse:
    context = _context(panel, job_id)
    return page(
        request,
        "job.html",
        status=status,
        fault=fault,
        log=panel.jobs.log(job_id, LOG_BYTES),
        log_bytes=LOG_BYTES,
        json_url=context["links"]["self"],
        mlflow_url=context["job"].links.get("mlflow"),
        **context,
    )


def _context(panel: Panel, job_id: str) -> dict[str, Any]:
    view = panel.jobs.view(job_id)
    return {
        "job": view.job,
        "words": JobText(view.job, view.told.progress, view.place),
        "progress": view.told.progress,
        "links": job_links(view.job),
        "retry_key": new_idempotency_key(),
        "running_s": _running_s(view.job),
    }


def _running_s(job: Job) -> float | None:
    return time.time() - job.started if job.state is JobState.RUNNING and job.started is not None else None


def _row(panel: Panel, job: Job, place: int | None) -> JobText:
    """Returns a list row; events are read for active jobs only, since an ended job stores its result."""
    told = panel.jobs.book.told(job).progress if job.state in ACTIVE else Progress()
    return JobText(job, told, place)


def _one_of(kinds: type[_Word], text: str, name: str) -> _Word | None:
    """Parses a filter value; empty means no filter."""
    if not text:
        return None
    try:
        return kinds(text)
    except ValueError:
        known = ", ".join(each.value for each in kinds)
        raise Invalid(f"{name} is one of {known} (got {text[:40]!r}).", path=f"query.{name}") from None
