"""The webhook: a thread that watches for pending cells and calls the configured address, apart from all requests.

A delivery is tried until it is taken or no try is left; what waits is on disk. At least once: a receiver whose answer
was lost gets the same delivery, with the same id, again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

import tipbench
from tipbench.addresses import is_loopback
from tipbench.errors import TipbenchError
from tipbench.generate.http import tls_for
from tipbench.times import iso
from tipbench.web.database import Database
from tipbench.web.deps import Panel
from tipbench.web.hook_options import HookOptions, shown_address
from tipbench.web.hook_store import Attempt, Delivery, HookStore, Message
from tipbench.web.hook_watch import TEST, Watch, answering, message_of
from tipbench.web.signing import signed_headers

TICK_S = 1.0
ANSWER_S = 10.0  # for the whole of an attempt, whatever the receiver does
WAITS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0)  # after each try that was not taken; one try more than waits
_LONGEST_REASON = 300
_POLL_S = 0.1
log = logging.getLogger("tipbench.web")


class Stopped(Exception):
    """The panel ends while an attempt is under way."""


@dataclass(frozen=True)
class Poster:
    """Makes one attempt: no redirect is followed, nothing of the answer but its status is read."""

    options: HookOptions
    clock: Callable[[], float] = time.time
    answer_s: float = ANSWER_S

    def post(self, message: Message, number: int, stop: threading.Event) -> Attempt:
        """What came of it. Stopped when `stop` is set meanwhile."""
        began, now = time.monotonic(), self.clock()
        try:
            self.options.check()
            status, reason = asyncio.run(self._bounded(message, now, stop))
        except httpx.TimeoutException:
            status, reason = None, self._late
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError, TipbenchError) as exc:
            said = f"{type(exc).__name__}: {exc}".replace(self.options.url, shown_address(self.options.url))
            status, reason = None, said[:_LONGEST_REASON]
        return Attempt(number, now, time.monotonic() - began, status, reason)

    @property
    def _late(self) -> str:
        return f"no answer within {self.answer_s:g} s"

    async def _bounded(self, message: Message, now: float, stop: threading.Event) -> tuple[int | None, str]:
        task = asyncio.ensure_future(self._send(message, now))
        deadline = time.monotonic() + self.answer_s
        try:
            while not task.done():
                if stop.is_set():
                    raise Stopped
                if time.monotonic() > deadline:
                    return None, self._late
                await asyncio.wait({task}, timeout=_POLL_S)
            return _told(await task)
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # it was looked at: asyncio need not report it

    async def _send(self, message: Message, now: float) -> int:
        url, body = self.options.url, message.body.encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"tipbench/{tipbench.__version__}",
            **signed_headers(self.options.secret, message.id, message.event, body, now),
        }
        async with (
            httpx.AsyncClient(
                trust_env=not is_loopback(url), verify=tls_for(url), follow_redirects=False, timeout=self.answer_s
            ) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            return response.status_code


def _told(status: int) -> tuple[int, str]:
    if 200 <= status < 300:
        return status, ""
    more = "; redirects are not followed" if 300 <= status < 400 else ""
    return status, f"answered {status}{more}"


class Hook:
    """Watches and sends. `tick` does all there is to do now; `start` ticks on a thread until `close`."""

    def __init__(
        self,
        poster: Poster,
        store: HookStore,
        watch: Watch,
        leads: Callable[[], bool],
        *,
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        """Of the panels on one home the one that `leads` sends."""
        self._poster, self._store, self._watch, self._leads = poster, store, watch, leads
        self._waits_s = tuple(waits_s)
        self._stop = threading.Event()
        self._testing = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Tick on a thread of its own."""
        if self._thread is None:
            self._store.abandon_others()
            self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop, in the middle of an attempt if need be: it is made again by the next panel."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(60)
            self._thread = None

    def tick(self) -> bool:
        """Look if it is time, send what is due; False, and nothing done, while another process leads."""
        if not self._leads():
            return False
        if self._watch.due():
            self._watch.look()
        while not self._stop.is_set() and (delivery := self._store.due()) is not None:
            self._try(delivery)
        return True

    def test(self, experiment: str | None = None) -> Delivery | None:
        """Send a message that says nothing, once and now; None while another such test is under way."""
        if not self._testing.acquire(blocking=False):
            return None
        try:
            message = message_of(TEST, self._poster.clock(), experiment)
            return self._store.tried_once(message, self._attempt(message, 1))
        except Stopped:
            return None
        finally:
            self._testing.release()

    def deliveries(self) -> list[Delivery]:
        """Every delivery that is kept, newest first."""
        return self._store.all()

    def state(self) -> dict[str, Any]:
        """How it is configured, and how it fares; no secrets."""
        options = self._poster.options
        return {
            "configured": True,
            "url": shown_address(options.url),
            "hosts": sorted(options.hosts),
            "watch_s": options.watch_s,
            "watching": self._leads(),
            "looked": iso(self._watch.looked),
            "problem": self._watch.problem,
            "queued": self._store.queued(),
        }

    def _try(self, delivery: Delivery) -> None:
        attempt = self._attempt(delivery.message, len(delivery.attempts) + 1)
        waits = self._waits_s[attempt.number - 1 : attempt.number]
        self._store.attempted(delivery, attempt, self._poster.clock() + waits[0] if waits else None)

    def _attempt(self, message: Message, number: int) -> Attempt:
        attempt = self._poster.post(message, number, self._stop)
        level = logging.INFO if attempt.taken else logging.WARNING
        what = f"{message.event} {message.experiment or ''}".strip()
        told = "taken" if attempt.taken else attempt.reason
        log.log(level, "webhook: delivery %s (%s), try %d: %s", message.id, what, number, told)
        return attempt

    def _run(self) -> None:
        wait_s = TICK_S
        while not self._stop.wait(wait_s):
            wait_s = TICK_S
            try:
                self.tick()
            except Stopped:
                return
            except Exception:  # a thread has no caller: a full disk must not end it for good
                log.exception("webhook: could not go on; trying again")
                wait_s = 10 * TICK_S


def make_hook(options: HookOptions, panel: Panel, database: Database, *, given: bool) -> Hook:
    """The webhook of a panel; `given` when its store is, and no MLflow is to be looked for."""
    store = HookStore(database, options.receiver)
    opened = answering(panel.settings, panel.tracker, given=given)
    watch = Watch(store, panel.jobs.store, opened, every_s=options.watch_s, away=panel.tracker.doubt)
    return Hook(Poster(options), store, watch, lambda: panel.jobs.supervisor.leads)
