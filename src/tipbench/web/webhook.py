"""The webhook: checks experiments for new pending cells, and sends signed messages about them to a receiver.

A thread calls `Webhook.tick` once a second. When a check is due, `WebhookWatcher` looks for new pending cells and
queues a *delivery* about them in `WebhookStore`. `Poster` then sends the deliveries that are due. A failed attempt is
repeated after longer and longer waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlsplit

import httpx

import tipbench
from tipbench.errors import MlflowUnavailable, TipbenchError, UsageError
from tipbench.http import async_http_client, is_http_url, is_loopback
from tipbench.jobs.job import JobKind, JobState
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import check_experiment_name
from tipbench.record.mlflow import MlflowConnection
from tipbench.record.reader import search_cells
from tipbench.record.run import RunState
from tipbench.record.store import Experiment
from tipbench.settings import Settings
from tipbench.sqlite import Connection, Database
from tipbench.text import iso
from tipbench.web.api.models import AttemptShape, DeliveryShape, HookShape
from tipbench.web.deps import Panel
from tipbench.web.options import check_secret
from tipbench.web.queries import revision
from tipbench.web.security import host_name, host_without_port
from tipbench.web.signing import MIN_SECRET_LENGTH, signed_headers

log = logging.getLogger("tipbench.web")
_MAX_URL_LENGTH = 2000  # characters
_HTTP = "http://"


@dataclass(frozen=True)
class WebhookOptions:
    """Webhook options. In `hosts`, `http://name` allows HTTP and HTTPS to that host, `name` only HTTPS.

    A loopback URL is always allowed.
    """

    url: str = field(repr=False)  # its path or query may contain a secret
    secret: str = field(repr=False)
    hosts: frozenset[str] = frozenset()
    watch_s: float = 30.0  # interval between two checks for pending cells

    @property
    def receiver(self) -> str:
        """Id of the receiver, derived from the URL. A new URL is a new receiver without earlier deliveries."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise UsageError unless the URL is allowed."""
        name = host_name(urlsplit(self.url).netloc)
        if name is None:
            raise UsageError("hook_url has no valid host. Example: https://judge.example.org/tipbench")
        if is_loopback(self.url) or f"{_HTTP}{name}" in self.hosts:
            return
        if name not in self.hosts:
            raise UsageError(
                f"hook_url has the host {name}, which is not in hook_hosts. To allow it, set TIPBENCH_HOOK_HOSTS={name}"
            )
        if urlsplit(self.url).scheme != "https":
            raise UsageError(
                f"hook_url uses plain HTTP to {name}. Use HTTPS, or allow it with TIPBENCH_HOOK_HOSTS={_HTTP}{name}"
            )


def read_webhook_options(settings: Settings) -> WebhookOptions | None:
    """Return the options of the configured webhook, or None. Raises UsageError if a setting is invalid."""
    configured = settings.operator_config()
    if not configured.hook_url:
        return None
    hosts = frozenset(_allowed_host(text) for text in configured.hook_hosts)
    url = configured.hook_url.strip()
    if len(url) > _MAX_URL_LENGTH or not url.isascii() or not is_http_url(url):
        raise UsageError(
            f"hook_url must be an HTTP URL of at most {_MAX_URL_LENGTH} ASCII characters (got "
            f"{shown_address(configured.hook_url)[:80]!r}), for example https://judge.example.org/tipbench"
        )
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.fragment:
        raise UsageError(
            f"hook_url must not contain credentials or a fragment, as that for {shown_address(url)[:80]!r} does. "
            "The receiver authenticates the panel by the signature."
        )
    secret = settings.get("hook_secret")
    if secret is None:
        raise UsageError(
            "hook_url is set but TIPBENCH_HOOK_SECRET is not; the receiver needs it to verify requests. "
            "Create one with `openssl rand -hex 32` and configure it in the receiver too."
        )
    check_secret("TIPBENCH_HOOK_SECRET", secret, MIN_SECRET_LENGTH)
    options = WebhookOptions(url, secret, hosts, configured.hook_watch_s)
    options.check()
    return options


def shown_address(url: str) -> str:
    """Return the URL for display, without its credentials, path and query, which may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "not an address"
    _, _, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{host}/…" if parts.scheme and host else "not an address"


def _allowed_host(text: str) -> str:
    """Return an entry of `hook_hosts` as an element of WebhookOptions.hosts. Raises UsageError if it is invalid."""
    lower = text.lower()
    prefix = _HTTP if lower.startswith(_HTTP) else ""
    name = host_without_port(lower.removeprefix(_HTTP).removeprefix("https://").strip("/"))
    if name is None:
        raise UsageError(
            f"hook_hosts must be names without ports, separated by commas, with http:// in front where plain HTTP is "
            f"allowed (got {text[:80]!r}); for example judge.example.org,http://judge"
        )
    return prefix + name


MAX_FINISHED = 500  # stored deliveries that are not queued; the oldest are deleted first
_DELIVERY_COLUMNS = "id, event, experiment, body, state, created, next_try"
_WHERE_EXPERIMENT = "receiver = ? AND place = ? AND experiment_id = ?"  # `place` is the identity of the MLflow server

Event = Literal["cells.pending", "test"]
ExperimentKey = tuple[str, str]  # identity of the MLflow server, id of the experiment


class DeliveryState(StrEnum):
    """State of a delivery."""

    QUEUED = "queued"  # waiting for its first or next attempt
    DELIVERED = "delivered"  # the receiver responded with 2xx
    FAILED = "failed"  # no attempts left, or the receiver is no longer configured
    REPLACED = "replaced"  # superseded by a newer delivery of the same experiment


@dataclass(frozen=True)
class Attempt:
    """One attempt to send a delivery."""

    number: int  # starting at 1
    time: float  # of its start, in Unix seconds
    took_s: float
    status: int | None  # of the response; None without one
    reason: str  # why the attempt failed; empty if it succeeded

    @property
    def final_state(self) -> DeliveryState:
        """State of the delivery if no attempt follows this one."""
        accepted = self.status is not None and 200 <= self.status < 300
        return DeliveryState.DELIVERED if accepted else DeliveryState.FAILED


@dataclass(frozen=True)
class Delivery:
    """A message to the receiver, with its body as JSON and all attempts to send it."""

    id: str
    event: Event
    experiment: str | None
    body: str
    state: DeliveryState
    created: float
    next_try: float | None = None
    attempts: tuple[Attempt, ...] = ()

    def response(self) -> DeliveryShape:
        """Return the delivery in the form of the API."""
        return DeliveryShape(
            id=self.id,
            event=self.event,
            experiment=self.experiment,
            state=self.state.value,
            created=iso(self.created),
            next_try=iso(self.next_try),
            attempts=[
                AttemptShape.model_validate(
                    {**vars(attempt), "time": iso(attempt.time), "reason": attempt.reason or None}
                )
                for attempt in self.attempts
            ],
            payload=json.loads(self.body),
        )


class WebhookStore:
    """Stores the deliveries to one receiver and the runs reported to it. Thread-safe; only one process may send."""

    def __init__(self, database: Database, receiver: str, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._receiver = receiver
        self._clock = clock

    # reported runs

    def revision(self, experiment_key: ExperimentKey) -> str | None:
        """Return the experiment's revision at the last saved check; None if none was saved."""
        statement = f"SELECT revision FROM hook_seen WHERE {_WHERE_EXPERIMENT}"  # noqa: S608
        rows = self._database.execute(statement, (self._receiver, *experiment_key))
        return next((str(revision) for (revision,) in rows), None)

    def reported(self, experiment_key: ExperimentKey) -> frozenset[str]:
        """Return the ids of the reported runs that were pending at the last check."""
        statement = f"SELECT run_id FROM hook_told WHERE {_WHERE_EXPERIMENT}"  # noqa: S608
        rows = self._database.execute(statement, (self._receiver, *experiment_key))
        return frozenset(str(run_id) for (run_id,) in rows)

    def save_check(
        self, experiment_key: ExperimentKey, revision: str, pending: Collection[str], delivery: Delivery | None
    ) -> None:
        """Save the result of a check and its delivery in one transaction.

        Only pending runs stay marked as reported: a run that is judged and reopened is reported again.
        """
        row_key = (self._receiver, *experiment_key)
        with self._database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO hook_seen VALUES (?, ?, ?, ?)", (*row_key, revision))
            db.execute(f"DELETE FROM hook_told WHERE {_WHERE_EXPERIMENT}", row_key)  # noqa: S608
            db.executemany("INSERT INTO hook_told VALUES (?, ?, ?, ?)", [(*row_key, run_id) for run_id in pending])
            if delivery is not None:
                db.execute(
                    "UPDATE hook_deliveries SET state = ?, next_try = NULL"  # noqa: S608
                    f" WHERE {_WHERE_EXPERIMENT} AND state = ? AND event = ?",
                    (DeliveryState.REPLACED, *row_key, DeliveryState.QUEUED, delivery.event),
                )
                self._insert(db, delivery, experiment_key)
        if delivery is not None:
            self._delete_old()

    # deliveries

    def next_due(self) -> Delivery | None:
        """Return the delivery that has been due the longest; None if none is due."""
        where = "receiver = ? AND state = ? AND next_try <= ? ORDER BY next_try, created LIMIT 1"
        deliveries = self._read(where, (self._receiver, DeliveryState.QUEUED, self._clock()))
        return deliveries[0] if deliveries else None

    def save_attempt(self, delivery: Delivery, attempt: Attempt, next_try: float | None) -> None:
        """Save an attempt and the new state of its delivery.

        A failed attempt is repeated at `next_try`. If that is None, the delivery fails, and its runs are reported again
        after the experiment's next change.
        """
        state = attempt.final_state
        if state is DeliveryState.FAILED and next_try is not None:
            state = DeliveryState.QUEUED
        with self._database.transaction() as db:
            _insert_attempt(db, delivery.id, attempt)
            db.execute(
                "UPDATE hook_deliveries SET state = ?, next_try = ? WHERE id = ?",
                (state, next_try if state is DeliveryState.QUEUED else None, delivery.id),
            )
            if state is DeliveryState.FAILED:
                db.execute(
                    "DELETE FROM hook_told WHERE (receiver, place, experiment_id) IN"
                    " (SELECT receiver, place, experiment_id FROM hook_deliveries WHERE id = ?)",
                    (delivery.id,),
                )

    def save_test(self, delivery: Delivery, attempt: Attempt) -> Delivery:
        """Save a test delivery with its only attempt, and return it in its final state."""
        delivery = replace(delivery, state=attempt.final_state, next_try=None, attempts=(attempt,))
        with self._database.transaction() as db:
            self._insert(db, delivery, experiment_key=("", ""))  # a test is not about an experiment in MLflow
            _insert_attempt(db, delivery.id, attempt)
        self._delete_old()
        return delivery

    def all(self) -> list[Delivery]:
        """Return all stored deliveries, newest first, including those to earlier receivers."""
        return self._read("1 ORDER BY created DESC, id", ())

    def n_queued(self) -> int:
        """Return the number of queued deliveries."""
        statement = "SELECT COUNT(*) FROM hook_deliveries WHERE receiver = ? AND state = ?"
        [(count,)] = self._database.execute(statement, (self._receiver, DeliveryState.QUEUED))
        return int(count)

    def abandon_others(self) -> None:
        """Mark queued deliveries to earlier receivers as failed, so that they are not sent to the new URL."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE hook_deliveries SET state = ?, next_try = NULL WHERE receiver <> ? AND state = ?",
                (DeliveryState.FAILED, self._receiver, DeliveryState.QUEUED),
            )

    def _insert(self, db: Connection, delivery: Delivery, experiment_key: ExperimentKey) -> None:
        columns = f"receiver, place, experiment_id, {_DELIVERY_COLUMNS}"
        values = (self._receiver, *experiment_key, *(getattr(delivery, name) for name in _DELIVERY_COLUMNS.split(", ")))
        db.execute(f"INSERT INTO hook_deliveries ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)  # noqa: S608

    def _read(self, where: str, values: tuple[object, ...]) -> list[Delivery]:
        rows = self._database.execute(f"SELECT {_DELIVERY_COLUMNS} FROM hook_deliveries WHERE {where}", values)  # noqa: S608
        attempts: dict[str, list[Attempt]] = {str(row[0]): [] for row in rows}  # by delivery id
        statement = (
            "SELECT delivery, number, time, took_s, status, reason FROM hook_attempts"
            " WHERE delivery IN (SELECT value FROM json_each(?)) ORDER BY number"
        )
        for delivery_id, *attempt_values in self._database.execute(statement, (json.dumps(list(attempts)),)):
            attempts[delivery_id].append(Attempt(*attempt_values))
        return [
            Delivery(id_, event, experiment, body, DeliveryState(state), created, next_try, tuple(attempts[id_]))
            for id_, event, experiment, body, state, created, next_try in rows
        ]

    def _delete_old(self) -> None:
        """Delete finished deliveries beyond MAX_FINISHED, and attempts without a delivery."""
        with self._database.transaction() as db:
            db.execute(
                "DELETE FROM hook_deliveries WHERE state <> ?1 AND id NOT IN"
                " (SELECT id FROM hook_deliveries WHERE state <> ?1 ORDER BY created DESC LIMIT ?2)",
                (DeliveryState.QUEUED, MAX_FINISHED),
            )
            db.execute("DELETE FROM hook_attempts WHERE delivery NOT IN (SELECT id FROM hook_deliveries)")


def _insert_attempt(db: Connection, delivery_id: str, attempt: Attempt) -> None:
    values = (delivery_id, attempt.number, attempt.time, attempt.took_s, attempt.status, attempt.reason)
    db.execute("INSERT INTO hook_attempts VALUES (?, ?, ?, ?, ?, ?)", values)


ATTEMPT_TIMEOUT_S = 10.0
_MAX_REASON_LENGTH = 300  # characters
_POLL_S = 0.1  # interval at which an attempt checks whether the panel is stopping


class Stopped(Exception):
    """An attempt was interrupted because the panel is stopping."""


@dataclass(frozen=True)
class Poster:
    """Sends deliveries to the receiver. Does not follow redirects, and reads only the status of the response."""

    options: WebhookOptions
    clock: Callable[[], float] = time.time
    timeout_s: float = ATTEMPT_TIMEOUT_S

    def post(self, delivery: Delivery, stop: threading.Event) -> Attempt:
        """Send the next attempt of a delivery and return it. Raises Stopped if `stop` is set before it finishes."""
        started_s, now = time.monotonic(), self.clock()
        status: int | None = None
        try:
            self.options.check()  # also here, so that a host that is not allowed is never called
            status = asyncio.run(self._send_unless_stopped(delivery, now, stop))
            reason = "" if 200 <= status < 300 else f"responded with {status}"
            if 300 <= status < 400:
                reason += "; redirects are not followed"
        except (httpx.TimeoutException, TimeoutError):
            reason = f"no response within {self.timeout_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, TipbenchError) as exc:
            text = f"{type(exc).__name__}: {exc}".replace(self.options.url, shown_address(self.options.url))
            reason = text[:_MAX_REASON_LENGTH]
        return Attempt(len(delivery.attempts) + 1, now, time.monotonic() - started_s, status, reason)

    async def _send_unless_stopped(self, delivery: Delivery, now: float, stop: threading.Event) -> int:
        """Return the response's status. Raises TimeoutError after `timeout_s`, Stopped if `stop` is set."""
        sending = asyncio.ensure_future(self._send(delivery, now))
        try:
            async with asyncio.timeout(self.timeout_s):
                while not sending.done():
                    if stop.is_set():
                        raise Stopped
                    await asyncio.wait({sending}, timeout=_POLL_S)
                return sending.result()
        finally:
            sending.cancel()

    async def _send(self, delivery: Delivery, now: float) -> int:
        url, body = self.options.url, delivery.body.encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"tipbench/{tipbench.__version__}",
            **signed_headers(self.options.secret, delivery.id, delivery.event, body, now),
        }
        async with (
            async_http_client(url, follow_redirects=False, timeout=self.timeout_s) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            return response.status_code


def new_delivery(event: Event, now: float, experiment: str | None, **counts: int) -> Delivery:
    """Create a delivery that is due now. `counts` are numbers of cells.

    The body contains no models or prompts, because the receiver judges blind. Its links are paths: the receiver has
    the panel's address in its configuration.
    """
    id_, links = secrets.token_hex(16), {}
    if experiment is not None:
        quoted = quote(experiment, safe="", errors="backslashreplace")  # UTF-8 cannot encode lone surrogates
        api_path = f"/api/bench/judge/{quoted}"
        links = {"sheets": f"{api_path}/sheets", "apply": f"{api_path}/apply"}
    payload: dict[str, Any] = {
        "event": event,
        "id": id_,
        "time": iso(now),
        "experiment": experiment,
        **counts,
        "links": links,
    }
    return Delivery(id_, event, experiment, json.dumps(payload), DeliveryState.QUEUED, now, next_try=now)


MAX_CHANGING_S = 600.0  # after this time, new cells are reported even if the experiment is still changing


class _Change(NamedTuple):
    """A change of an experiment that is not reported yet, because the experiment may still be changing."""

    revision: str  # at the latest check
    since: float  # time of the check that found the change


class WebhookWatcher:
    """Checks experiments for new pending cells and queues deliveries about them. Not thread-safe."""

    def __init__(
        self,
        store: WebhookStore,
        jobs: JobStore,
        open_mlflow: Callable[[], MlflowConnection],
        *,
        every_s: float,
        clock: Callable[[], float] = time.time,
        on_unavailable: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._jobs, self._open_mlflow = store, jobs, open_mlflow
        self._every_s, self._clock, self._on_unavailable = every_s, clock, on_unavailable
        self._next_check_at = 0.0
        self._collecting: set[str] = set()  # names of experiments with a running collect job
        self._collected: set[str] = set()  # those whose job has stopped; cleared by a check without errors
        self._changing: dict[ExperimentKey, _Change] = {}
        self.checked_at: float | None = None  # time of the last check without an error
        self.problem: str | None = None  # first error of the last check

    def check_if_due(self) -> None:
        """Call `check` if the last one was `every_s` seconds ago, or if a collect job has just stopped running."""
        running = self._jobs.in_states({JobState.RUNNING})
        collecting = {job.experiment for job in running if job.kind is JobKind.COLLECT}
        just_collected = self._collecting - collecting
        self._collecting = collecting
        self._collected = (self._collected | just_collected) - collecting
        if just_collected or self._clock() >= self._next_check_at:
            self.check()

    def check(self) -> None:
        """Queue a delivery for every experiment with new pending cells. The first error is stored in `problem`."""
        self._next_check_at = self._clock() + self._every_s
        problems: list[TipbenchError] = []
        try:
            mlflow = self._open_mlflow()
            for experiment in mlflow.store.experiments():
                try:
                    self._check_experiment(mlflow, experiment)
                except MlflowUnavailable:
                    raise  # the other experiments cannot be read either
                except TipbenchError as exc:
                    problems.append(exc)
        except TipbenchError as exc:
            if isinstance(exc, MlflowUnavailable):
                self._on_unavailable()
            problems.append(exc)
        if not problems:
            self._collected.clear()
            self.checked_at = self._clock()
        problem = str(problems[0]) if problems else None
        if problem is not None and problem != self.problem:
            log.warning("webhook: check for pending cells failed: %s", problem)
        self.problem = problem

    def _check_experiment(self, mlflow: MlflowConnection, experiment: Experiment) -> None:
        try:
            check_experiment_name(experiment.name)
        except ValueError:
            return  # not an experiment of tipbench
        if experiment.name in self._collecting:
            return  # all cells are reported together when the job ends
        experiment_key = (mlflow.identity, experiment.experiment_id)
        current = revision(experiment) or ""
        if self._store.revision(experiment_key) == current:
            self._changing.pop(experiment_key, None)
            return
        now = self._clock()
        change = self._changing.get(experiment_key)
        # The panel does not see when another program finishes a collect. So that all cells are reported together, it
        # waits until two checks in a row find the same revision.
        is_settled = change is not None and (change.revision == current or now - change.since >= MAX_CHANGING_S)
        if not (is_settled or experiment.name in self._collected):
            self._changing[experiment_key] = _Change(current, since=change.since if change else now)
            return
        self._changing.pop(experiment_key, None)
        runs = search_cells(mlflow.store, experiment.experiment_id, {"state": str(RunState.PENDING)})
        pending = {run.run_id for run in runs}
        new = pending - self._store.reported(experiment_key)
        counts = {"pending": len(pending), "new": len(new)}
        delivery = new_delivery("cells.pending", self._clock(), experiment.name, **counts) if new else None
        self._store.save_check(experiment_key, current, pending, delivery)


TICK_S = 1.0  # interval between two calls of `Webhook.tick`
RETRY_WAITS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0)  # after the first, second, … failed attempt


class Webhook:
    """Watches experiments and sends deliveries. `start` calls `tick` in a thread until `close`."""

    def __init__(
        self, poster: Poster, store: WebhookStore, watcher: WebhookWatcher, is_leader: Callable[[], bool]
    ) -> None:
        """`is_leader` returns whether this process sends: of several panels that share a home folder, only one does."""
        self._poster, self._store, self._watcher, self._is_leader = poster, store, watcher, is_leader
        self._stop = threading.Event()
        self._testing = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._store.abandon_others()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. An interrupted attempt is repeated when a panel starts again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(60)
            self._thread = None

    def tick(self) -> bool:
        """Check for pending cells and send deliveries, if due. Return False if another process does it."""
        if not self._is_leader():
            return False
        self._watcher.check_if_due()
        while not self._stop.is_set() and (delivery := self._store.next_due()) is not None:
            attempt = self._attempt(delivery)
            is_last = attempt.number > len(RETRY_WAITS_S)
            next_try = None if is_last else self._poster.clock() + RETRY_WAITS_S[attempt.number - 1]
            self._store.save_attempt(delivery, attempt, next_try)
        return True

    def test(self, experiment: str | None = None) -> Delivery | None:
        """Send a test delivery, without retries. Returns None if another test is running or the panel is stopping."""
        if not self._testing.acquire(blocking=False):
            return None
        try:
            delivery = new_delivery("test", self._poster.clock(), experiment)
            return self._store.save_test(delivery, self._attempt(delivery))
        except Stopped:
            return None
        finally:
            self._testing.release()

    def deliveries(self) -> list[Delivery]:
        """Return all stored deliveries, newest first."""
        return self._store.all()

    def state(self) -> HookShape:
        """Return the configuration and status, without secrets."""
        options = self._poster.options
        return HookShape(
            configured=True,
            url=shown_address(options.url),
            hosts=sorted(options.hosts),
            watch_s=options.watch_s,
            watching=self._is_leader(),
            looked=iso(self._watcher.checked_at),
            problem=self._watcher.problem,
            queued=self._store.n_queued(),
        )

    def _attempt(self, delivery: Delivery) -> Attempt:
        attempt = self._poster.post(delivery, self._stop)
        level = logging.WARNING if attempt.reason else logging.INFO
        subject = f"{delivery.event} {delivery.experiment or ''}".strip()
        result = attempt.reason or "accepted"
        log.log(level, "webhook: delivery %s (%s), attempt %d: %s", delivery.id, subject, attempt.number, result)
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


def make_webhook(options: WebhookOptions, panel: Panel, database: Database) -> Webhook:
    """Create the webhook of a panel."""
    store = WebhookStore(database, options.receiver)
    watcher = WebhookWatcher(
        store,
        panel.jobs.store,
        panel.mlflow.open_running,
        every_s=options.watch_s,
        on_unavailable=panel.mlflow.locate_again,
    )
    return Webhook(Poster(options), store, watcher, is_leader=lambda: panel.jobs.supervisor.holds_lock)
