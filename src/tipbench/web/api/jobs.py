"""Jobs over HTTP: start, list, watch, cancel, retry."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from tipbench.jobs.folder import MOST_LOG
from tipbench.jobs.job import JobKind, JobState
from tipbench.jobs.queue import Submitted
from tipbench.jobs.sqlite import Which
from tipbench.web.api.plan import CONFIG_BODY
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, session_cookie
from tipbench.web.deps import Admin, AskedRun, Panel, PanelState, RunConfig
from tipbench.web.desk import job_json
from tipbench.web.forms import JSON, read_json
from tipbench.web.paging import LIMIT, Limit, Next
from tipbench.web.rendering import Json
from tipbench.web.running import Key, Where, retry_job, start_judge, start_run
from tipbench.web.shapes import (
    COMMON,
    DATA,
    JobAnswer,
    JobDetail,
    JobList,
    JobStarted,
    JudgeWish,
    refusals,
)
from tipbench.web.streaming import MEDIA_TYPE, EventStream, JobStream, may_look_on

running = APIRouter(prefix="/api/bench", tags=["run"], dependencies=[ADMINS_ONLY], responses=COMMON)
judging = APIRouter(prefix="/api/bench/judge", tags=["judge"], dependencies=[ADMINS_ONLY], responses={**COMMON, **DATA})
router = APIRouter(
    prefix="/api/bench/jobs", tags=["jobs"], dependencies=[ADMINS_ONLY], responses={**COMMON, **refusals(404)}
)

LOG_BYTES = 65_536
_STARTED: dict[int | str, dict[str, Any]] = {
    202: {
        "description": "The job, new or that of an earlier request with the same key.",
        "headers": {"Location": {"description": "The job.", "schema": {"type": "string"}}},
    }
}
_WISH: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Who judges, and what.",
        "content": {JSON: {"schema": JudgeWish.model_json_schema(), "example": {"with": "rules"}}},
    }
}
_EVENTS = 'retry: 3000\nid: 4211\nevent: job\ndata: {"job": {"id": "…", "state": "running"}, "place": null}\n\n'
RunnerName = Annotated[
    Literal["local", "airflow"] | None,
    Query(description="Who runs it: this machine, or Airflow where it is configured. Without it, as `runner` says."),
]
WaitForJudge = Annotated[
    bool, Query(description="In Airflow: compare when every cell of the run is judged; until then the job is waiting.")
]
JobPath = Annotated[
    str,
    Path(
        max_length=64,
        pattern=r"^[0-9A-Za-z][0-9A-Za-z_-]*$",
        description="The job's id.",
        examples=["20260504-101500-1a2b3c4d"],
    ),
]
Cursor = Annotated[int | None, Query(ge=0, lt=2**63, description="Go on after the event with this id.")]
LastId = Annotated[
    str | None, Header(alias="Last-Event-ID", max_length=40, description="As `after`; browsers send it by themselves.")
]


async def read_judge_wish(request: Request, _admin: Admin) -> dict[str, Any]:
    """The body, read once it is known who asks."""
    return await read_json(request)


@running.post(
    "/run",
    summary="Start a run",
    status_code=202,
    response_model=JobStarted,
    openapi_extra=CONFIG_BODY,
    responses={**_STARTED, **refusals(409)},
)
def run(
    config: RunConfig,
    asked: AskedRun,
    who: Admin,
    panel: PanelState,
    key: Key = None,
    runner: RunnerName = None,
    wait_for_judge: WaitForJudge = False,
) -> Response:
    """Queues `tipbench collect` with this configuration. The same key with other options is refused (409)."""
    where = Where(runner, wait_for_judge or asked.wait_for_judge, frozenset(asked.given))
    return _started(panel, start_run(panel, config, started_by=who.name, key=key, where=where))


@judging.post(
    "/{experiment:path}/run",
    summary="Start a judge that is no person",
    status_code=202,
    response_model=JobStarted,
    openapi_extra=_WISH,
    responses=_STARTED,
)
def judge(
    experiment: ExperimentPath,
    wish: Annotated[dict[str, Any], Depends(read_judge_wish)],
    who: Admin,
    panel: PanelState,
    key: Key = None,
) -> Response:
    """Queues `tipbench judge run`. Programs other than the configured one cannot be named over HTTP."""
    return _started(panel, start_judge(panel, experiment, wish, started_by=who.name, key=key))


@router.get("", summary="List the jobs", response_model=JobList)
def jobs(
    panel: PanelState,
    state: JobState | None = None,
    kind: JobKind | None = None,
    experiment: Annotated[str | None, Query(max_length=200)] = None,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Newest first, with their places in the queue."""
    return Json(panel.jobs.listed(Which(state, kind, experiment), limit=limit, after=next).to_json())


@router.get("/{job_id}", summary="One job and its progress", response_model=JobDetail)
def one(job_id: JobPath, panel: PanelState) -> Response:
    """The job, what its events add up to so far, and its place in the queue."""
    return Json(panel.jobs.view(job_id).to_json())


@router.post("/{job_id}/cancel", summary="Cancel a job", response_model=JobAnswer, responses=refusals(409))
def cancel(job_id: JobPath, panel: PanelState) -> Response:
    """At once while it waits; else its processes are ended, the model leaves memory, and what is finished is kept.

    Cancelling again changes nothing; a job that has ended otherwise is refused (409).
    """
    panel.jobs.cancel(job_id)
    return Json(_shown(panel, job_id))


@router.post(
    "/{job_id}/retry",
    summary="Retry a job",
    status_code=202,
    response_model=JobStarted,
    responses={**_STARTED, **refusals(409)},
)
def retry(job_id: JobPath, who: Admin, panel: PanelState, key: Key = None) -> Response:
    """A new job with the same options that names the old one; what is recorded is not generated again.

    For a job that failed, was cancelled or is lost (409 otherwise). While such a retry has not ended, asking again
    gives that one.
    """
    return _started(panel, retry_job(panel, job_id, started_by=who.name, key=key))


@router.get(
    "/{job_id}/log",
    summary="The end of a job's log",
    response_class=Response,
    responses={
        200: {
            "description": "What the command printed last.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
)
def log(
    job_id: JobPath,
    panel: PanelState,
    most: Annotated[int, Query(alias="bytes", ge=1, le=MOST_LOG, description="At most so much of it.")] = LOG_BYTES,
) -> Response:
    """From the beginning of a line; logins in addresses are left out."""
    tail = panel.jobs.log(job_id, most)
    headers = {"X-Log-Size": str(tail.size), "X-Log-Cut": "true" if tail.cut else "false"}
    return PlainTextResponse(tail.text.encode("utf-8", "backslashreplace"), headers=headers)


@router.get(
    "/{job_id}/events",
    summary="A job's events as they happen",
    response_class=Response,
    responses={
        200: {"description": "Server-sent events.", "content": {MEDIA_TYPE: {"example": _EVENTS}}},
        **refusals(503),
    },
)
def events(
    job_id: JobPath, request: Request, who: Admin, panel: PanelState, after: Cursor = None, last: LastId = None
) -> Response:
    """First `snapshot` (job, place, progress), then each event under its name, `progress` after each few of them, `job`
    when its state or place changes, and `end` at the very end. `id` is where to go on after a break.

    Without `after` the snapshot holds everything so far; with it, the state then, and what was missed follows.
    """
    place = int(last) if last is not None and last.isascii() and last.isdigit() else after
    guard, cookie = panel.guard, session_cookie(request)
    stream = JobStream(panel.jobs, job_id, place)
    return EventStream(panel.streams, stream, request, lambda: may_look_on(guard, who, cookie))


def _started(panel: Panel, submitted: Submitted) -> Response:
    job_id = submitted.job.id
    body = {**_shown(panel, job_id), "new": submitted.new}
    return Json(body, 202, headers={"Location": f"/api/bench/jobs/{job_id}"})


def _shown(panel: Panel, job_id: str) -> dict[str, Any]:
    job, place = panel.jobs.placed(job_id)
    return {"job": job_json(job), "place": place}
