"""Job events as server-sent events; streams poll, so they do not hold a thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tipbench.errors import JobNotFound, ServerUnavailable, TipbenchError
from tipbench.jobs.event_file import RecordedEvent
from tipbench.jobs.events import event_json
from tipbench.jobs.job import ENDED
from tipbench.jobs.progress import ProgressSnapshot
from tipbench.web.auth import Authenticator, Identity
from tipbench.web.errors import error_json
from tipbench.web.job_service import JobService, job_json
from tipbench.web.responses import Json, to_json

log = logging.getLogger("tipbench.web")

MEDIA_TYPE = "text/event-stream"
RETRY_MS = 3000  # reconnection delay of browsers
_AT_ONCE = 200
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}  # JSON escapes the others


@dataclass
class StreamLimits:
    """Limits, intervals and number of open streams. Not thread-safe: use on the event loop only."""

    most: int = 64
    poll_s: float = 0.5
    heartbeat_s: float = 15.0
    open: int = 0


class JobStream:
    """Frames of one job for one client. Not thread-safe."""

    def __init__(self, desk: JobService, job_id: str, after: int | None = None) -> None:
        """Start after the cursor `after`, or from the current progress if None. Raises JobNotFound."""
        self._desk = desk
        self._job = desk.store.get(job_id)
        self._after = after
        self._told = ProgressSnapshot()
        self._shown: dict[str, Any] = {}

    def begin(self) -> bytes:
        """Return the snapshot frame."""
        self._shown = self._look()
        book = self._desk.book
        self._told = book.told(self._job) if self._after is None else book.told_until(self._job, self._after)
        body = {**self._shown, "progress": self._told.progress.to_json(), "cursor": self._told.cursor}
        return f"retry: {RETRY_MS}\n".encode() + frame("snapshot", body, self._told.cursor)

    def more(self) -> tuple[bytes, bool]:
        """Return new frames, and whether the job has ended. Reads the job before its events, so none is missed."""
        face = self._look()
        found = self._events()
        frames = []
        for recorded in found:
            self._told = self._told.after(recorded)
            frames.append(frame(*_named(recorded), recorded.cursor))
        if found:
            frames.append(frame("progress", self._told.progress.to_json(), self._told.cursor))
        if face != self._shown:
            self._shown = face
            frames.append(frame("job", face, self._told.cursor))
        ended = self._job.state in ENDED and not found
        if ended:
            frames.append(frame("end", face, self._told.cursor))
        return b"".join(frames), ended

    def _events(self) -> list[RecordedEvent]:
        try:
            return list(self._desk.supervisor.runner_of(self._job).events(self._job, self._told.cursor, _AT_ONCE))
        except ServerUnavailable:
            return []

    def _look(self) -> dict[str, Any]:
        self._job, place = self._desk.placed(self._job.id)
        return {"job": job_json(self._job), "place": place}


class EventStream(StreamingResponse):
    """Response of …/events. Responds with 503 if too many streams are open."""

    def __init__(self, streams: StreamLimits, stream: JobStream, request: Request, allowed: Callable[[], bool]) -> None:
        self._streams = streams
        headers = {"X-Accel-Buffering": "no"}  # a buffering proxy would delay events
        super().__init__(_tell(streams, stream, request, allowed), media_type=MEDIA_TYPE, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until the job ends, the client disconnects or is no longer authorised."""
        if self._streams.open >= self._streams.most:
            await _too_many(self._streams)(scope, receive, send)
            return
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1


async def _tell(
    streams: StreamLimits, stream: JobStream, request: Request, allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    try:
        yield await run_in_threadpool(stream.begin)
        beat = time.monotonic() + streams.heartbeat_s
        while not await request.is_disconnected():
            news, ended = await run_in_threadpool(stream.more)
            if news:
                yield news
            if ended:
                return
            if time.monotonic() >= beat:
                if not await run_in_threadpool(allowed):
                    return
                yield b": still here\n\n"
                beat = time.monotonic() + streams.heartbeat_s
            await asyncio.sleep(streams.poll_s)
    except JobNotFound:
        return  # deleted while streaming
    except TipbenchError as exc:
        log.warning("a stream of events ends: %s", exc)  # the client reconnects


def frame(event: str, data: Any, cursor: int) -> bytes:
    """Return one event; its data is one line, also for clients that split at Unicode line ends."""
    line = to_json(data).decode().translate(_LINE_ENDS)
    return f"id: {cursor}\nevent: {event}\ndata: {line}\n\n".encode()


def _named(recorded: RecordedEvent) -> tuple[str, dict[str, Any]]:
    body = event_json(recorded.event)
    return body["event"], {"at": recorded.at, **body}


def _too_many(streams: StreamLimits) -> Json:
    message = f"{streams.most} streams of events are open already. Close a page of the panel, or try again shortly."
    return Json(error_json("too_many_streams", message), 503, headers={"Retry-After": "5"})


def may_watch(guard: Authenticator, identity: Identity, cookie: str) -> bool:
    """Whether the client is still authorised: token not revoked or expired, session not ended."""
    if identity.session is not None:
        return guard.by_cookie(cookie) is not None
    token = guard.tokens.get(identity.token_id)
    return token is None or token.state(guard.tokens.clock()) == "active"  # None: the operator's token
