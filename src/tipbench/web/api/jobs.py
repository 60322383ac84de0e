"""Job endpoints: start, list, watch, cancel, retry."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from tipbench.jobs.folder import MOST_LOG
from tipbench.jobs.job import JobKind, JobState
from tipbench.jobs.store import JobFilter
from tipbench.jobs.supervisor import Submitted
from tipbench.web.api.models import COMMON, DATA, JobAnswer, JobDetail, JobList, JobStarted, JudgeWish, refusals
from tipbench.web.api.plan import CONFIG_BODY
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, session_cookie
from tipbench.web.deps import Admin, AskedRun, Panel, PanelState, RunConfig
from tipbench.web.event_stream import MEDIA_TYPE, EventStream, JobStream, may_watch
from tipbench.web.forms import JSON, read_json
from tipbench.web.job_service import Key, RunTarget, job_json, retry_job, start_judge, start_run
from tipbench.web.paging import LIMIT, Limit, Next
from tipbench.web.responses import Json

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
    """Reads the body after authentication."""
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
    """Queues `tipbench collect` with this configuration.

    Returns 409 if the Idempotency-Key was already used with other options.
    """
    where = RunTarget(runner, wait_for_judge or asked.wait_for_judge, frozenset(asked.given))
    return _started(panel, start_run(panel, config, started_by=who.name, key=key, where=where))


@judging.post(
    "/{experiment:path}/run",
    summary="Start an automatic judge",
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
    """Queues `tipbench judge run`. The only program that can be used over HTTP is the one the operator configured."""
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
    """Returns jobs, newest first, with their positions in the queue."""
    return Json(panel.jobs.listed(JobFilter(state, kind, experiment), limit=limit, after=next).to_json())


@router.get("/{job_id}", summary="Get a job", response_model=JobDetail)
def one(job_id: JobPath, panel: PanelState) -> Response:
    """Returns the job, its progress so far and its position in the queue."""
    return Json(panel.jobs.view(job_id).to_json())


@router.post("/{job_id}/cancel", summary="Cancel a job", response_model=JobAnswer, responses=refusals(409))
def cancel(job_id: JobPath, panel: PanelState) -> Response:
    """Cancels a queued job at once; stops a running job, unloads its model and keeps the finished results.

    Cancelling a cancelled job has no effect. Returns 409 if the job has already ended in another way.
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
    """Starts a new job with the same options and a reference to the old one; recorded results are not generated again.

    Returns 409 unless the job has failed, was cancelled or is lost. If a retry has not ended yet, returns that one.
    """
    return _started(panel, retry_job(panel, job_id, started_by=who.name, key=key))


@router.get(
    "/{job_id}/log",
    summary="Get a job's log",
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
    """Returns the end of the job's log, starting at the beginning of a line. Credentials in URLs are removed."""
    tail = panel.jobs.log(job_id, most)
    headers = {"X-Log-Size": str(tail.size), "X-Log-Cut": "true" if tail.cut else "false"}
    return PlainTextResponse(tail.text.encode("utf-8", "backslashreplace"), headers=headers)


@router.get(
    "/{job_id}/events",
    summary="Stream a job's events",
    response_class=Response,
    responses={
        200: {"description": "Server-sent events.", "content": {MEDIA_TYPE: {"example": _EVENTS}}},
        **refusals(503),
    },
)
def events(
    job_id: JobPath, request: Request, who: Admin, panel: PanelState, after: Cursor = None, last: LastId = None
) -> Response:
    """Streams the job's events as server-sent events.

    The first event is `snapshot` (job, place, progress). Then each job event follows under its name, with `progress`
    after every few events, `job` when the state or queue position changes, and `end` as the last one. To resume an
    interrupted stream, send the last `id` as `after` or `Last-Event-ID`.

    Without `after`, the snapshot contains all progress so far; with `after`, it contains the progress up to that event,
    and the events that follow it are sent.
    """
    place = int(last) if last is not None and last.isascii() and last.isdigit() else after
    guard, cookie = panel.guard, session_cookie(request)
    stream = JobStream(panel.jobs, job_id, place)
    return EventStream(panel.streams, stream, request, lambda: may_watch(guard, who, cookie))


def _started(panel: Panel, submitted: Submitted) -> Response:
    job_id = submitted.job.id
    body = {**_shown(panel, job_id), "new": submitted.new}
    return Json(body, 202, headers={"Location": f"/api/bench/jobs/{job_id}"})


def _shown(panel: Panel, job_id: str) -> dict[str, Any]:
    job, place = panel.jobs.placed(job_id)
    return {"job": job_json(job), "place": place}
