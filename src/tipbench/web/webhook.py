"""Webhook: validated options, signed deliveries, retries."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

import tipbench
from tipbench.errors import TipbenchError, UsageError
from tipbench.http import async_http_client, is_http_url, is_loopback
from tipbench.settings import Settings
from tipbench.sqlite import Database
from tipbench.text import iso
from tipbench.web.deps import Panel
from tipbench.web.security import host_name
from tipbench.web.signing import SHORTEST_SECRET, signed_headers
from tipbench.web.webhook_store import (
    TEST,
    Attempt,
    Delivery,
    Message,
    WebhookStore,
    WebhookWatcher,
    message_of,
    mlflow_opener,
)

DEFAULT_WATCH_S = 30.0
_LONGEST_WATCH_S = 86_400.0
_LONGEST_URL = 2000
_LONGEST_SECRET = 200
_PLAIN = "http://"


@dataclass(frozen=True)
class WebhookOptions:
    """Webhook options. In `hosts`, `http://name` allows plain HTTP to that host, `name` only HTTPS."""

    url: str = field(repr=False)  # path or query may contain a secret
    secret: str = field(repr=False)
    hosts: frozenset[str] = frozenset()
    watch_s: float = DEFAULT_WATCH_S

    @property
    def receiver(self) -> str:
        """Id of the receiver, derived from the URL: a new URL is a new receiver without earlier deliveries."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise UsageError unless the URL is allowed."""
        name = host_name(urlsplit(self.url).netloc)
        if name is None:
            raise UsageError("hook_url has no valid host. Example: https://judge.example.org/tipbench")
        if is_loopback(self.url) or f"{_PLAIN}{name}" in self.hosts:
            return
        if name not in self.hosts:
            raise UsageError(
                f"hook_url has the host {name}, which is not in hook_hosts. To allow it, set TIPBENCH_HOOK_HOSTS={name}"
            )
        if urlsplit(self.url).scheme != "https":
            raise UsageError(
                f"hook_url uses plain HTTP to {name}. Use HTTPS, or allow it with TIPBENCH_HOOK_HOSTS={_PLAIN}{name}"
            )


def hook_options(settings: Settings) -> WebhookOptions | None:
    """Return the configured webhook, or None. Raises UsageError with the invalid setting."""
    url = settings.get("hook_url")
    if not url:
        return None
    hosts = frozenset(_host(each) for each in settings.listed("hook_hosts"))
    options = WebhookOptions(_url(url), _secret(settings.get("hook_secret")), hosts, _watch_s(settings))
    options.check()
    return options


def shown_address(url: str) -> str:
    """Return the URL for display, without credentials, path and query, which may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "not an address"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}/…" if parts.scheme and host else "not an address"


def _url(text: str) -> str:
    """Validate the URL; error messages omit its secret parts."""
    url = text.strip()
    if len(url) > _LONGEST_URL or not url.isascii() or not is_http_url(url):
        raise UsageError(
            f"hook_url must be an HTTP URL of at most {_LONGEST_URL} ASCII characters (got "
            f"{shown_address(text)[:80]!r}), for example https://judge.example.org/tipbench"
        )
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.fragment:
        raise UsageError(
            f"hook_url must not contain credentials or a fragment (got {shown_address(url)[:80]!r} with one). "
            "The receiver authenticates the panel by the signature."
        )
    return url


def _host(text: str) -> str:
    plain = _PLAIN if text.lower().startswith(_PLAIN) else ""
    bare = text[len(plain) :].removeprefix("https://").strip("/")
    name = host_name(f"[{bare}]" if bare.count(":") > 1 and not bare.startswith("[") else bare)
    if name is None or (":" in bare and ":" not in name):
        raise UsageError(
            f"hook_hosts must be names without ports, separated by commas, with http:// in front where plain HTTP is "
            f"allowed (got {text[:80]!r}); for example judge.example.org,http://judge"
        )
    return plain + name


def _secret(text: str | None) -> str:
    """Validate the secret, which comes from the environment only; error messages omit its value."""
    if text is None:
        raise UsageError(
            "hook_url is set but TIPBENCH_HOOK_SECRET is not; the receiver needs it to verify requests. "
            "Create one with `openssl rand -hex 32` and configure it in the receiver too."
        )
    if not SHORTEST_SECRET <= len(text) <= _LONGEST_SECRET or not text.isascii() or not text.isprintable():
        raise UsageError(
            f"TIPBENCH_HOOK_SECRET must have {SHORTEST_SECRET} to {_LONGEST_SECRET} printable ASCII characters "
            f"(got {len(text)}). Create one with `openssl rand -hex 32`."
        )
    return text


def _watch_s(settings: Settings) -> float:
    text = settings.get("hook_watch_s") or str(DEFAULT_WATCH_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= _LONGEST_WATCH_S:
        raise UsageError(
            f"hook_watch_s must be a number of seconds from 1 to {_LONGEST_WATCH_S:g} (got {text[:40]!r})."
        )
    return seconds


TICK_S = 1.0
ANSWER_S = 10.0  # timeout of a whole attempt
WAITS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0)  # after each failed attempt; one more attempt than waits
_LONGEST_REASON = 300
_POLL_S = 0.1
log = logging.getLogger("tipbench.web")


class Stopped(Exception):
    """The panel is stopping during an attempt."""


@dataclass(frozen=True)
class Poster:
    """Sends one attempt; does not follow redirects, and reads only the status of the response."""

    options: WebhookOptions
    clock: Callable[[], float] = time.time
    answer_s: float = ANSWER_S

    def post(self, message: Message, number: int, stop: threading.Event) -> Attempt:
        """Send a message and return the attempt. Raises Stopped if `stop` is set before it finishes."""
        began, now = time.monotonic(), self.clock()
        try:
            self.options.check()
            status, reason = asyncio.run(self._bounded(message, now, stop))
        except httpx.TimeoutException:
            status, reason = None, self._late
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, TipbenchError) as exc:
            text = f"{type(exc).__name__}: {exc}".replace(self.options.url, shown_address(self.options.url))
            status, reason = None, text[:_LONGEST_REASON]
        return Attempt(number, now, time.monotonic() - began, status, reason)

    @property
    def _late(self) -> str:
        return f"no response within {self.answer_s:g} s"

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
            return _result(await task)
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # mark as retrieved, so that asyncio does not log it

    async def _send(self, message: Message, now: float) -> int:
        url, body = self.options.url, message.body.encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"tipbench/{tipbench.__version__}",
            **signed_headers(self.options.secret, message.id, message.event, body, now),
        }
        async with (
            async_http_client(url, follow_redirects=False, timeout=self.answer_s) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            return response.status_code


def _result(status: int) -> tuple[int, str]:
    if 200 <= status < 300:
        return status, ""
    more = "; redirects are not followed" if 300 <= status < 400 else ""
    return status, f"responded with {status}{more}"


class Webhook:
    """Watches experiments and sends deliveries. `start` calls `tick` in a thread until `close`."""

    def __init__(
        self,
        poster: Poster,
        store: WebhookStore,
        watch: WebhookWatcher,
        leads: Callable[[], bool],
        *,
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        """Only the panel for which `leads` returns True sends, if several share a home folder."""
        self._poster, self._store, self._watch, self._leads = poster, store, watch, leads
        self._waits_s = tuple(waits_s)
        self._stop = threading.Event()
        self._testing = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Start the thread."""
        if self._thread is None:
            self._store.abandon_others()
            self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop, interrupting an attempt if necessary; the next panel repeats it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(60)
            self._thread = None

    def tick(self) -> bool:
        """Check for pending cells if due, and send due deliveries; return False if another process leads."""
        if not self._leads():
            return False
        if self._watch.due():
            self._watch.look()
        while not self._stop.is_set() and (delivery := self._store.due()) is not None:
            self._try(delivery)
        return True

    def test(self, experiment: str | None = None) -> Delivery | None:
        """Send a test message once, immediately; return None if another test is running or the panel is stopping."""
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
        """Return all stored deliveries, newest first."""
        return self._store.all()

    def state(self) -> dict[str, Any]:
        """Return configuration and status, without secrets."""
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
        result = "accepted" if attempt.taken else attempt.reason
        log.log(level, "webhook: delivery %s (%s), attempt %d: %s", message.id, what, number, result)
        return attempt

    def _run(self) -> None:
        wait_s = TICK_S
        while not self._stop.wait(wait_s):
            wait_s = TICK_S
            try:
                self.tick()
            except Stopped:
                return
            except Exception:  # keep the thread alive, for example when the disk is full
                log.exception("webhook: error; trying again")
                wait_s = 10 * TICK_S


def make_webhook(options: WebhookOptions, panel: Panel, database: Database, *, given: bool) -> Webhook:
    """Create the webhook of a panel; `given` if its store was passed in, so MLflow is not located."""
    store = WebhookStore(database, options.receiver)
    opened = mlflow_opener(panel.settings, panel.tracker, given=given)
    watch = WebhookWatcher(store, panel.jobs.store, opened, every_s=options.watch_s, away=panel.tracker.doubt)
    return Webhook(Poster(options), store, watch, lambda: panel.jobs.supervisor.leads)
