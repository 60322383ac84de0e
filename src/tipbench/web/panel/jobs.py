"""/jobs: what runs, waits and has ended; and one job, live. Its page is right as it is served; a script keeps it so."""

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
from tipbench.jobs.sqlite import Which
from tipbench.web.api.jobs import JobPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState, panel_of
from tipbench.web.desk import job_links
from tipbench.web.errors import Invalid, WebError
from tipbench.web.forms import form_value
from tipbench.web.paging import LIMIT, Limit, Next
from tipbench.web.panel.job_words import JobWords
from tipbench.web.panel.pages import Chip, page
from tipbench.web.panel.run_form import fresh_key
from tipbench.web.running import retry_job

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
    """The list, newest first; filters and place are in the URL."""
    which = Which(_one_of(JobState, state, "state"), _one_of(JobKind, kind, "kind"), experiment.strip() or None)
    listed = panel.jobs.listed(which, limit=limit, after=next)
    asked = {key: value for key, value in request.query_params.items() if value}
    return page(
        request,
        "jobs.html",
        rows=[_row(panel, job, listed.places.get(job.id)) for job in listed.jobs],
        which=which,
        states=list(JobState),
        kinds=[each for each in JobKind if each is not JobKind.SIMULATE],
        following=listed.next,
        first=next is None,
        json_url=f"/api/bench/jobs?{urlencode(asked)}" if asked else "/api/bench/jobs",
    )


@router.get("/jobs/{job_id}")
def job_page(request: Request, panel: PanelState, job_id: JobPath) -> HTMLResponse:
    """One job with all that is known of it."""
    return _page(request, panel, job_id)


@router.get("/jobs/{job_id}/live")
def job_live(request: Request, panel: PanelState, job_id: JobPath) -> HTMLResponse:
    """The part of the page that changes, for its script."""
    return page(request, "job_live.html", **_context(panel, job_id))


@router.post("/jobs/{job_id}/cancel")
def cancel_job(request: Request, panel: PanelState, job_id: JobPath) -> Response:
    """Have it ended. One that has ended meanwhile needs no more than to be looked at."""
    try:
        panel.jobs.cancel(job_id)
    except JobConflict as exc:
        return _page(request, panel, job_id, fault=str(exc), status=409)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/retry")
async def retry(request: Request, panel: PanelState, admin: Admin, job_id: JobPath) -> Response:
    """A new job that takes up what this one left; the form's key makes it one, however often it is sent."""
    key = await form_value(request, "key") or None
    try:
        submitted = await run_in_threadpool(retry_job, panel, job_id, started_by=admin.name, key=key)
    except (JobConflict, WebError) as exc:
        status = exc.status if isinstance(exc, WebError) else 409
        return await run_in_threadpool(_page, request, panel, job_id, fault=str(exc), status=status)
    return RedirectResponse(f"/jobs/{submitted.job.id}", status_code=303)


def running_chip(request: Request) -> Chip | None:
    """What goes on now, in the header of every page: one small query."""
    try:
        found = panel_of(request).jobs.store.in_states({JobState.RUNNING, JobState.QUEUED}, limit=_CHIP_JOBS)
    except TipbenchError:  # the pages about jobs say what is wrong
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
        "words": JobWords(view.job, view.told.progress, view.place),
        "progress": view.told.progress,
        "links": job_links(view.job),
        "retry_key": fresh_key(),
        "running_s": _running_s(view.job),
    }


def _running_s(job: Job) -> float | None:
    return time.time() - job.started if job.state is JobState.RUNNING and job.started is not None else None


def _row(panel: Panel, job: Job, place: int | None) -> JobWords:
    """Only of what still runs the events are read: what has ended says how in its own row."""
    told = panel.jobs.book.told(job).progress if job.state in ACTIVE else Progress()
    return JobWords(job, told, place)


def _one_of(kinds: type[_Word], text: str, name: str) -> _Word | None:
    """A choice of the filters; none is all of them."""
    if not text:
        return None
    try:
        return kinds(text)
    except ValueError:
        known = ", ".join(each.value for each in kinds)
        raise Invalid(f"{name} is one of {known} (got {text[:40]!r}).", path=f"query.{name}") from None
