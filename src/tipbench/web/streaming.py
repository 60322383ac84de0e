"""A job's events as they happen, as server-sent events. No thread waits for them: each stream looks now and then.

`id` is the cursor of the last event that was told, so whoever comes back with it (`Last-Event-ID`) misses nothing.
"""

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

from tipbench.errors import JobMissing, ServerAway, TipbenchError
from tipbench.jobs.book import Told
from tipbench.jobs.event_log import Recorded
from tipbench.jobs.events import event_json
from tipbench.jobs.job import ENDED
from tipbench.web.auth import Guard, Identity
from tipbench.web.desk import JobDesk, job_json
from tipbench.web.errors import error_json
from tipbench.web.rendering import Json, to_json

log = logging.getLogger("tipbench.web")

MEDIA_TYPE = "text/event-stream"
RETRY_MS = 3000  # after which a browser that lost the stream comes back
_AT_ONCE = 200
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}  # JSON escapes the others by itself


@dataclass
class Streams:
    """How many streams are open, and how often each looks. Used on the event loop alone."""

    most: int = 64
    poll_s: float = 0.5
    heartbeat_s: float = 15.0
    open: int = 0


class JobStream:
    """What is told to one who looks on. Not thread-safe: asked by one at a time."""

    def __init__(self, desk: JobDesk, job_id: str, after: int | None = None) -> None:
        """Raises JobMissing. Without `after` the story so far is the snapshot; with it, it goes on from there."""
        self._desk = desk
        self._job = desk.store.get(job_id)
        self._after = after
        self._told = Told()
        self._shown: dict[str, Any] = {}

    def begin(self) -> bytes:
        """The snapshot."""
        self._shown = self._look()
        book = self._desk.book
        self._told = book.told(self._job) if self._after is None else book.told_until(self._job, self._after)
        body = {**self._shown, "progress": self._told.progress.to_json(), "cursor": self._told.cursor}
        return f"retry: {RETRY_MS}\n".encode() + frame("snapshot", body, self._told.cursor)

    def more(self) -> tuple[bytes, bool]:
        """What is new since, and whether that was the end. The job is read first: its end comes after its events."""
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

    def _events(self) -> list[Recorded]:
        try:
            return list(self._desk.supervisor.runner_of(self._job).events(self._job, self._told.cursor, _AT_ONCE))
        except ServerAway:
            return []

    def _look(self) -> dict[str, Any]:
        self._job, place = self._desk.placed(self._job.id)
        return {"job": job_json(self._job), "place": place}


class EventStream(StreamingResponse):
    """The answer of …/events. Counts itself while it is sent; one too many is refused."""

    def __init__(self, streams: Streams, stream: JobStream, request: Request, allowed: Callable[[], bool]) -> None:
        self._streams = streams
        headers = {"X-Accel-Buffering": "no"}  # a proxy that gathers the answer would hold every event back
        super().__init__(_tell(streams, stream, request, allowed), media_type=MEDIA_TYPE, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the job has ended, the client has left or may no longer look."""
        if self._streams.open >= self._streams.most:
            await _too_many(self._streams)(scope, receive, send)
            return
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1


async def _tell(
    streams: Streams, stream: JobStream, request: Request, allowed: Callable[[], bool]
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
    except JobMissing:
        return  # forgotten meanwhile
    except TipbenchError as exc:
        log.warning("a stream of events ends: %s", exc)  # the client comes back by itself


def frame(event: str, data: Any, cursor: int) -> bytes:
    """One event; its data are one line whatever a model wrote, for readers too that know more line ends than \\n."""
    line = to_json(data).decode().translate(_LINE_ENDS)
    return f"id: {cursor}\nevent: {event}\ndata: {line}\n\n".encode()


def _named(recorded: Recorded) -> tuple[str, dict[str, Any]]:
    body = event_json(recorded.event)
    return body["event"], {"at": recorded.at, **body}


def _too_many(streams: Streams) -> Json:
    message = f"{streams.most} streams of events are open already. Close a page of the panel, or try again shortly."
    return Json(error_json("too_many_streams", message), 503, headers={"Retry-After": "5"})


def may_look_on(guard: Guard, identity: Identity, cookie: str) -> bool:
    """Whether somebody who was allowed still is: neither revoked nor expired, and not logged out."""
    if identity.session is not None:
        return guard.by_cookie(cookie) is not None
    token = guard.tokens.get(identity.token_id)
    return token is None or token.state(guard.tokens.clock()) == "active"  # the operator's own is on no list
