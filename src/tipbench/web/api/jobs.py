"""Job endpoints: plan and start runs, start judges, list, cancel and retry jobs, read logs, stream events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tipbench.errors import JobNotFound, ServerUnavailable, TipbenchError
from tipbench.jobs.folder import MAX_LOG_BYTES
from tipbench.jobs.job import ENDED, JobKind, JobState, RecordedEvent
from tipbench.jobs.progress import ProgressSnapshot
from tipbench.jobs.store import JobFilter, Submitted
from tipbench.plan.collect_config import WAIT_FOR_JUDGE, CollectConfig
from tipbench.record.events import event_json
from tipbench.record.plan import plan_json
from tipbench.web.api.models import (
    COMMON_ERRORS,
    EXPERIMENT_ERRORS,
    JobAnswer,
    JobDetail,
    JobList,
    JobRow,
    JobShape,
    JobStarted,
    JudgeRunRequest,
    PlanShape,
    error_responses,
    text_response,
)
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, Authenticator, Identity, require_admin, session_cookie
from tipbench.web.deps import Admin, CollectBodyParam, CollectConfigParam, Panel, PanelState
from tipbench.web.errors import SafeJsonResponse, error_json, to_json
from tipbench.web.forms import DEFAULT_LIMIT, JSON_TYPE, Limit, Next, body_of, body_schema
from tipbench.web.job_service import CollectTarget, IdempotencyKey, JobService, retry_job, start_collect, start_judge
from tipbench.web.security import StreamLimits
from tipbench.workflows.plan_collect import plan_collect, plan_outlook

run_router = APIRouter(prefix="/api/bench", tags=["run"], dependencies=[ADMINS_ONLY], responses=COMMON_ERRORS)
judge_router = APIRouter(
    prefix="/api/bench/judge",
    tags=["judge"],
    dependencies=[ADMINS_ONLY],
    responses={**COMMON_ERRORS, **EXPERIMENT_ERRORS},
)
router = APIRouter(
    prefix="/api/bench/jobs",
    tags=["jobs"],
    dependencies=[ADMINS_ONLY],
    responses={**COMMON_ERRORS, **error_responses(404)},
)

_logger = logging.getLogger("tipbench.web")
DEFAULT_LOG_BYTES = 65_536
EVENT_STREAM = "text/event-stream"
STARTED_RESPONSE: dict[int | str, dict[str, Any]] = {
    202: {
        "description": "The new job, or the job of an earlier request with the same Idempotency-Key.",
        "headers": {"Location": {"description": "The job.", "schema": {"type": "string"}}},
    }
}
_JUDGE_BODY = body_schema(JudgeRunRequest, {"with": "rules"}, about="Options of the judge.")
_EVENT_EXAMPLE = 'retry: 3000\nid: 4211\nevent: job\ndata: {"job": {"id": "…", "state": "running"}, "place": null}\n\n'
_WAIT_FOR_JUDGE_ABOUT = "Airflow only: the job waits until all its answers are judged, then compares."
_CONFIG_BODY = body_schema(
    CollectConfig,
    {"models": "baseline:template", "prompts": "v1", "n_tips": 3, "n_scenarios": 2},
    about="Options that differ from the defaults; see GET /api/bench/config.",
    required=False,
)
# An option of the Airflow DAG, not of CollectConfig. A plan ignores it.
_CONFIG_BODY["requestBody"]["content"][JSON_TYPE]["schema"]["properties"][WAIT_FOR_JUDGE] = {
    "type": "boolean",
    "default": False,
    "description": _WAIT_FOR_JUDGE_ABOUT,
}
RunnerName = Annotated[
    Literal["local", "airflow"] | None,
    Query(
        description="Where the job runs: on this machine, or in Airflow if configured. Default: the setting `runner`."
    ),
]
WaitForJudge = Annotated[bool, Query(description=_WAIT_FOR_JUDGE_ABOUT)]
JobPath = Annotated[
    str,
    Path(
        max_length=64,
        pattern=r"^[0-9A-Za-z][0-9A-Za-z_-]*$",
        description="The job's id.",
        examples=["20260504-101500-1a2b3c4d"],
    ),
]
Cursor = Annotated[int | None, Query(ge=0, lt=2**63, description="Resume after the event with this id.")]
LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", max_length=40, description="Same as `after`; sent by browsers when they reconnect."),
]


@run_router.post(
    "/plan",
    summary="Plan a run",
    openapi_extra=_CONFIG_BODY,
    responses=error_responses(409, 502, 503),
)
def plan(config: CollectConfigParam, panel: PanelState) -> PlanShape:
    """Return what a collect with this configuration would do; nothing is generated or recorded.

    The plan has the number of cells, how many are already recorded, the refused models with reasons, and estimates of
    memory and time.
    """
    return PlanShape.model_validate(plan_of(panel, config))


def plan_of(panel: Panel, config: CollectConfig) -> dict[str, Any]:
    """Return the plan for the API and the start page.

    `outlook` says which differences between pairs the run can detect, and how long judging takes.
    """
    run_plan, warnings = plan_collect(
        config, panel.settings.home, open_mlflow=lambda: panel.mlflow.connected(config.mlflow_url)
    )
    return {**plan_json(run_plan), "outlook": plan_outlook(run_plan).to_json(), "warnings": warnings}


@run_router.get("/config", summary="Get the configuration schema", response_model=dict[str, Any])
def config(panel: PanelState) -> dict[str, Any]:
    """Return the JSON schema of the options of `tipbench collect`.

    The defaults are the settings of this server. An option that is a URL lists the allowed URLs.
    """
    return panel.permissions.schema()


@run_router.get("/openapi.json", summary="Get the OpenAPI document", response_model=dict[str, Any])
def openapi(request: Request) -> Any:
    """Return the OpenAPI document of the whole API."""
    return request.app.openapi()


@run_router.post(
    "/run",
    summary="Start a run",
    status_code=202,
    response_model_exclude_unset=True,
    openapi_extra=_CONFIG_BODY,
    responses={**STARTED_RESPONSE, **error_responses(409)},
)
def run(
    config: CollectConfigParam,
    body: CollectBodyParam,
    who: Admin,
    panel: PanelState,
    response: Response,
    idempotency_key: IdempotencyKey = None,
    runner: RunnerName = None,
    wait_for_judge: WaitForJudge = False,
) -> JobStarted:
    """Queue `tipbench collect` with this configuration.

    Returns 409 if the Idempotency-Key was already used with other options.
    """
    # `body` has only what the client sent; `config` also has the settings and defaults.
    target = CollectTarget(runner, wait_for_judge or body.wait_for_judge, explicit_keys=frozenset(body.options))
    submitted = start_collect(panel, config, started_by=who.name, idempotency_key=idempotency_key, target=target)
    return respond_with_job(panel, submitted, response)


@judge_router.post(
    "/{experiment:path}/run",
    summary="Start an automatic judge",
    status_code=202,
    response_model_exclude_unset=True,
    openapi_extra=_JUDGE_BODY,
    responses=STARTED_RESPONSE,
)
def judge(
    experiment: ExperimentPath,
    body: Annotated[JudgeRunRequest, body_of(JudgeRunRequest, require_admin)],
    who: Admin,
    panel: PanelState,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobStarted:
    """Queue `tipbench judge run`. A judge program must be configured by the operator; requests cannot name one."""
    submitted = start_judge(panel, experiment, body, started_by=who.name, idempotency_key=idempotency_key)
    return respond_with_job(panel, submitted, response)


@router.get("", summary="List the jobs", response_model_exclude_unset=True)
def jobs(
    panel: PanelState,
    state: JobState | None = None,
    kind: JobKind | None = None,
    experiment: Annotated[str | None, Query(max_length=200)] = None,
    limit: Limit = DEFAULT_LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> JobList:
    """Return jobs, newest first, with their positions in the queue."""
    page = panel.jobs.page(JobFilter(state, kind, experiment), limit=limit, after=next)
    positions = panel.jobs.queue_positions()
    rows = [JobRow.of(job, place=positions.get(job.id)) for job in page.items]
    return JobList(items=rows, next=page.next)


@router.get("/{job_id}", summary="Get a job", response_model_exclude_unset=True)
def one(job_id: JobPath, panel: PanelState) -> JobDetail:
    """Return the job, its progress so far and its position in the queue."""
    job, position = panel.jobs.get_with_position(job_id)
    snapshot = panel.jobs.progress.current(job)
    return JobDetail(job=JobShape.of(job), place=position, progress=snapshot.progress.to_json(), cursor=snapshot.cursor)


@router.post(
    "/{job_id}/cancel",
    summary="Cancel a job",
    response_model_exclude_unset=True,
    responses=error_responses(409),
)
def cancel(job_id: JobPath, panel: PanelState) -> JobAnswer:
    """Cancel a queued job, or stop a running job and unload its model; finished results are kept.

    Cancelling a cancelled job has no effect. Returns 409 if the job has succeeded, failed or is lost.
    """
    panel.jobs.cancel(job_id)
    job, position = panel.jobs.get_with_position(job_id)
    return JobAnswer(job=JobShape.of(job), place=position)


@router.post(
    "/{job_id}/retry",
    summary="Retry a job",
    status_code=202,
    response_model_exclude_unset=True,
    responses={**STARTED_RESPONSE, **error_responses(409)},
)
def retry(
    job_id: JobPath, who: Admin, panel: PanelState, response: Response, idempotency_key: IdempotencyKey = None
) -> JobStarted:
    """Start a new job with the options of this one. Recorded results are not generated again.

    Returns 409 unless the job has failed, was cancelled or is lost. If an earlier retry has not ended yet, it is
    returned instead of a new job.
    """
    submitted = retry_job(panel, job_id, started_by=who.name, idempotency_key=idempotency_key)
    return respond_with_job(panel, submitted, response)


@router.get(
    "/{job_id}/log",
    summary="Get a job's log",
    response_class=Response,
    responses=text_response("text/plain", "The end of the command's output."),
)
def log(
    job_id: JobPath,
    panel: PanelState,
    max_bytes: Annotated[
        int, Query(alias="bytes", ge=1, le=MAX_LOG_BYTES, description="Maximum number of bytes.")
    ] = DEFAULT_LOG_BYTES,
) -> Response:
    """Return the end of the job's log, starting at the beginning of a line. Credentials in URLs are removed."""
    tail = panel.jobs.log(job_id, max_bytes)
    headers = {"X-Log-Size": str(tail.size), "X-Log-Cut": "true" if tail.cut else "false"}
    return PlainTextResponse(tail.text.encode("utf-8", "backslashreplace"), headers=headers)


@router.get(
    "/{job_id}/events",
    summary="Stream a job's events",
    response_class=Response,
    responses={
        200: {"description": "Server-sent events.", "content": {EVENT_STREAM: {"example": _EVENT_EXAMPLE}}},
        **error_responses(503),
    },
)
def events(
    job_id: JobPath,
    request: Request,
    who: Admin,
    panel: PanelState,
    after: Cursor = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Stream the job's events as server-sent events.

    The first event is `snapshot`, with the fields of GET /api/bench/jobs/{job_id}. The events of the job follow, each
    under its own name. After one or more of them, a `progress` event has the progress so far. A `job` event is sent
    when the job or its position in the queue (`place`) changes. The last event is `end`.

    To resume an interrupted stream, send the last `id` as `after` or `Last-Event-ID`. The snapshot then contains the
    progress up to that event, and all later events are sent. Without an `id`, it contains all progress so far.
    """
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        after = int(last_event_id)  # a reconnecting browser sends both, and the header is newer
    cookie = session_cookie(request)
    return EventStreamResponse(
        panel.streams,
        JobFrames(panel.jobs, job_id, after),
        request,
        is_authorised=lambda: is_still_authorised(panel.authenticator, who, cookie),
    )


def respond_with_job(panel: Panel, submitted: Submitted, response: Response) -> JobStarted:
    """Return the submitted job, and set the Location header of the response."""
    job, position = panel.jobs.get_with_position(submitted.job.id)
    response.headers["Location"] = f"/api/bench/jobs/{job.id}"
    return JobStarted(job=JobShape.of(job), place=position, new=submitted.new)


RETRY_MS = 3000  # reconnection delay of browsers
_MAX_EVENTS = 200  # per read
# Escapes, by code point, for line ends that the JSON encoder leaves as they are; some clients split lines at them.
_LINE_END_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


class JobFrames:
    """Server-sent events of one job for one client, encoded as frames. Not thread-safe."""

    def __init__(self, service: JobService, job_id: str, after: int | None = None) -> None:
        """Start after the event with the cursor `after`, or from the current progress if None. Raises JobNotFound."""
        self._service = service
        self._job = service.store.get(job_id)
        self._after = after
        self._snapshot = ProgressSnapshot()
        self._sent_job: dict[str, Any] = {}  # job JSON that was sent last

    def first_frame(self) -> bytes:
        """Return the snapshot frame."""
        self._sent_job = self._refresh_job()
        progress = self._service.progress
        self._snapshot = progress.current(self._job) if self._after is None else progress.at(self._job, self._after)
        body = {**self._sent_job, "progress": self._snapshot.progress.to_json(), "cursor": self._snapshot.cursor}
        return f"retry: {RETRY_MS}\n".encode() + frame("snapshot", body, self._snapshot.cursor)

    def next_frames(self) -> tuple[bytes, bool]:
        """Return the frames of new events, and whether the job has ended and all events were returned."""
        # Read the job first: if it has ended by now, the events read next are the last ones.
        current_job = self._refresh_job()
        new_events: list[RecordedEvent] = []
        with suppress(ServerUnavailable):  # the job's runner is no longer configured
            runner = self._service.supervisor.runner_of(self._job)
            new_events = list(runner.events(self._job, self._snapshot.cursor, _MAX_EVENTS))
        frames = []
        for recorded in new_events:
            self._snapshot = self._snapshot.after(recorded)
            body = event_json(recorded.event)
            frames.append(frame(body["event"], {"at": recorded.at, **body}, recorded.cursor))
        if new_events:
            frames.append(frame("progress", self._snapshot.progress.to_json(), self._snapshot.cursor))
        if current_job != self._sent_job:
            self._sent_job = current_job
            frames.append(frame("job", current_job, self._snapshot.cursor))
        ended = self._job.state in ENDED and not new_events
        if ended:
            frames.append(frame("end", current_job, self._snapshot.cursor))
        return b"".join(frames), ended

    def _refresh_job(self) -> dict[str, Any]:
        """Read the job again; return its JSON, with its position in the queue."""
        self._job, position = self._service.get_with_position(self._job.id)
        return JobAnswer(job=JobShape.of(self._job), place=position).model_dump(exclude_unset=True)


class EventStreamResponse(StreamingResponse):
    """Streams the frames of a job. Responds with 503 if too many streams are open."""

    def __init__(
        self, limits: StreamLimits, job_frames: JobFrames, request: Request, is_authorised: Callable[[], bool]
    ) -> None:
        self._limits = limits
        headers = {"X-Accel-Buffering": "no"}  # a buffering proxy would delay events
        content = _stream(limits, job_frames, request, is_authorised)
        super().__init__(content, media_type=EVENT_STREAM, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until the job ends, or the client disconnects or is no longer authorised."""
        if self._limits.n_open >= self._limits.max_open:
            problem = f"{self._limits.max_open} event streams are already open."
            body = error_json("too_many_streams", f"{problem} Close a page of the panel, or try again shortly.")
            await SafeJsonResponse(body, 503, headers={"Retry-After": "5"})(scope, receive, send)
            return
        self._limits.n_open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._limits.n_open -= 1


async def _stream(
    limits: StreamLimits, job_frames: JobFrames, request: Request, is_authorised: Callable[[], bool]
) -> AsyncIterator[bytes]:
    try:
        yield await run_in_threadpool(job_frames.first_frame)
        next_heartbeat = time.monotonic() + limits.heartbeat_s
        while not await request.is_disconnected():
            frames, ended = await run_in_threadpool(job_frames.next_frames)
            if frames:
                yield frames
            if ended:
                return
            if time.monotonic() >= next_heartbeat:
                if not await run_in_threadpool(is_authorised):
                    return
                yield b": keep-alive\n\n"
                next_heartbeat = time.monotonic() + limits.heartbeat_s
            await asyncio.sleep(limits.poll_s)
    except JobNotFound:
        return  # deleted while streaming
    except TipbenchError as exc:
        _logger.warning("event stream ended: %s", exc)  # the client reconnects


def frame(event: str, data: Any, cursor: int) -> bytes:
    """Encode one server-sent event."""
    line = to_json(data).decode().translate(_LINE_END_ESCAPES)
    return f"id: {cursor}\nevent: {event}\ndata: {line}\n\n".encode()


def is_still_authorised(authenticator: Authenticator, identity: Identity, cookie: str) -> bool:
    """Return whether the client's session is still valid, or its token if it has no session."""
    if identity.session is not None:
        return authenticator.by_cookie(cookie) is not None
    token = authenticator.tokens.get(identity.token_id)
    if token is None:  # the operator's token, which is a setting; stored tokens are never deleted
        return True
    return authenticator.tokens.is_active(token)
