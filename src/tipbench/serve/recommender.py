"""The recommender: the active policy picks a tip, then shadows score the same request for comparison.

A shadow scores in its own thread, from a bounded queue, after the response has been sent. It reads a snapshot of the
state, logs a signal `shadow:<name>` and gets no reward, so it can neither change nor delay a response.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from tipbench.errors import QueueFull, UsageError
from tipbench.serve.catalogue import Catalogue
from tipbench.serve.event_log import Entry, open_database
from tipbench.serve.features import hour_of
from tipbench.serve.policy import POLICIES
from tipbench.serve.request import RecommendRequest, ScoreRequest, parse_time
from tipbench.serve.service import PolicyService, Result, request_time
from tipbench.serve.switches import SHADOWS, ShadowCounts, Switches

_SAVE_COUNTS_S = 5.0  # how often counts are saved; the panel and `promote check` read the saved ones
_logger = logging.getLogger(__name__)

ShadowScorer = Callable[[PolicyService, str, Entry], dict[str, Any]]


def score_shadow(service: PolicyService, policy: str, entry: Entry) -> dict[str, Any]:
    """Return the choice of a shadow's policy for a logged request; changes no state."""
    request = cast("ScoreRequest", entry.body["request"])
    tips = [candidate["tip_id"] for candidate in request["candidates"]]
    ridge, tallies = service.snapshot(policy, entry.user)
    at = parse_time(entry.body["at"])
    features = POLICIES[policy].features.matrix(request, request["candidates"], at, tallies)
    random_number = service.keys.repeatable_random(policy, entry.user, entry.event or "")
    decision = POLICIES[policy].decide(features, ridge, random_number)
    chosen = tips[decision.chosen]
    return {
        "chosen": chosen,
        "probabilities": dict(zip(tips, decision.probabilities, strict=True)),
        "scores": dict(zip(tips, decision.scores, strict=True)),
        "agrees": chosen == entry.body["chosen"],
    }


class Recommender:
    """Picks tips with the active policy, and runs its shadows."""

    def __init__(
        self,
        service: PolicyService,
        *,
        catalogue: Catalogue | None = None,
        queue_capacity: int = 1000,
        scorer: ShadowScorer = score_shadow,
    ) -> None:
        self.service = service
        self._database = open_database(service.home)
        self.switches = Switches(self._database, clock=service.clock)
        self._catalogue = catalogue
        self._shadows = {
            name: _Shadow(name, policy, service, self.switches, queue_capacity, scorer)
            for name, policy in SHADOWS.items()
        }

    def recommend(self, request: RecommendRequest) -> Result:
        """Pick a tip with the active policy. Raises UsageError if there are no candidates and no catalogue."""
        candidates = request.get("candidates")
        if not candidates:
            if self._catalogue is None:
                raise UsageError("The request has no candidates, and the server no catalogue. Send candidates.")
            hour = hour_of(request_time(request, self.service.clock()))
            candidates = self._catalogue.candidates(hour)
        return self.service.serve(self.switches.active(), request, candidates, is_recommendation=True)

    def has_enabled_shadow(self) -> bool:
        """Return whether a shadow is enabled."""
        return any(self.switches.shadows().values())

    def queue_for_shadows(self, result: Result) -> None:
        """Queue a request for the enabled shadows. Called after its response has been sent.

        Never blocks: if a shadow's queue is full, the request is dropped and counted.
        """
        if result.entry is None:  # a repeated request
            return
        for name, enabled in self.switches.shadows().items():
            if enabled and SHADOWS[name] != result.entry.policy:  # the active policy needs no shadow
                self._shadows[name].put(result.entry)

    def policies(self) -> dict[str, Any]:
        """Return the active policy, the shadows with their counts, and all policies with their versions."""
        enabled = self.switches.shadows()
        prior_hashes = self.service.prior_hashes
        warnings = [
            f"{name} has no prior: a shadow never learns, so its choices mean little until `serve --prior` is used."
            for name, policy in SHADOWS.items()
            if enabled[name] and policy not in prior_hashes
        ]
        if self.service.flush_error:
            warnings.append(
                f"State cannot be saved at the moment ({self.service.flush_error}). The event log is complete."
            )
        return {
            "active": self.switches.active(),
            "shadows": {
                name: {"policy": policy, "enabled": enabled[name], **asdict(self._shadows[name].totals())}
                for name, policy in SHADOWS.items()
            },
            "policies": [
                {
                    "name": name,
                    "version": policy.version,
                    "dim": policy.features.dim,
                    "features": policy.features.version,
                    "prior": prior_hashes.get(name),
                }
                for name, policy in POLICIES.items()
            ],
            "warnings": warnings,
        }

    def wait(self) -> None:
        """Wait until the shadows have scored all queued requests."""
        for shadow in self._shadows.values():
            shadow.queue.join()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop the shadows within `timeout_s` and save their counts; requests still queued are dropped."""
        deadline = time.monotonic() + timeout_s
        for shadow in self._shadows.values():
            shadow.close(max(deadline - time.monotonic(), 0.0))
        self._database.close()


class _Shadow:
    """The queue, thread and counts of one shadow."""

    def __init__(
        self,
        name: str,
        policy: str,
        service: PolicyService,
        switches: Switches,
        queue_capacity: int,
        scorer: ShadowScorer,
    ) -> None:
        self.queue: queue.Queue[Entry] = queue.Queue(queue_capacity)
        self._name, self._policy = name, policy
        self._service, self._switches, self._scorer = service, switches, scorer
        self._counts = ShadowCounts()  # since the last save
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, entry: Entry) -> None:
        try:
            self.queue.put_nowait(entry)
        except queue.Full:
            self._count(calls=1, dropped=1)
            return
        self._count(calls=1)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def totals(self) -> ShadowCounts:
        with self._lock:
            return self._switches.shadow_counts(self._name) + self._counts

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._count(dropped=self.queue.qsize())
        self._save()

    def _run(self) -> None:
        saved_at = time.monotonic()
        while not self._closing.is_set():
            try:
                entry = self.queue.get(timeout=0.2)
            except queue.Empty:
                pass
            else:
                self._score(entry)
                self.queue.task_done()
            if time.monotonic() - saved_at > _SAVE_COUNTS_S:
                self._save()
                saved_at = time.monotonic()

    def _score(self, entry: Entry) -> None:
        started = time.perf_counter()
        try:
            choice = self._scorer(self._service, self._policy, entry)
            latency_ms = round((time.perf_counter() - started) * 1000, 3)
            body = {"signal": f"shadow:{self._name}", **choice, "latency_ms": latency_ms, "at": entry.body["at"]}
            self._service.log_signal(entry, self._policy, body)
        except QueueFull:  # the log cannot keep up, and responses have priority
            self._count(dropped=1)
        except Exception:
            if not self._closing.is_set():  # while closing, the service may be closed before this thread ends
                self._count(errors=1)
                _logger.exception("The shadow %s failed", self._name)

    def _count(self, *, calls: int = 0, dropped: int = 0, errors: int = 0) -> None:
        with self._lock:
            self._counts += ShadowCounts(calls, dropped, errors)

    def _save(self) -> None:
        with self._lock:
            if self._counts != ShadowCounts():
                self._switches.add_shadow_counts(self._name, self._counts)
                self._counts = ShadowCounts()
