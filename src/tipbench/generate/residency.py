"""Keeps the weights of at most one model in Ollama's memory, and monitors the memory to prove it.

`keep_alive=0` alone is not enough. Ollama frees the memory of a model some time after its response has ended. If it
receives a request for another model before that, both models are in memory. So no request for the next model is sent
until the server's list of loaded models is empty. A monitor samples the list during the whole collect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from tipbench.errors import OllamaUnavailable, ResidencyError
from tipbench.text import plural

UNLOAD_TIMEOUT_S = 60.0  # if unloading takes longer, it hangs; `ollama ps` then shows "Stopping"
_POLL_S = 0.01  # during the first second
_SLOW_POLL_S = 0.25  # after that
_MAX_SILENCE_S = 10.0  # after this time without a response, the server counts as unavailable


@dataclass(frozen=True)
class Resident:
    """A model in a server's memory."""

    name: str
    digest: str  # identifies the weights


class WeightsHost(Protocol):
    """A server that keeps weights in memory."""

    def resident(self) -> tuple[Resident, ...] | None:
        """Return the models in memory, () if it is empty, or None if the server did not respond."""
        ...

    def unload(self, name: str) -> None:
        """Start to unload a model. It is unloaded once `resident` no longer lists it."""
        ...


@dataclass(frozen=True)
class Evidence:
    """The observations of the memory during a collect, or while a model judges."""

    samples: int = 0
    most_resident: int = 0  # models in memory at the same time
    largest_gap_s: float = 0.0  # between two samples
    handovers: int = 0  # times that the memory was empty after the last call of a model
    unknown_samples: int = 0  # samples without a response
    foreign: tuple[str, ...] = ()  # models that other clients loaded
    handover_s: tuple[float, ...] = ()  # of each handover, from the last call of a model to the empty memory

    def sentence(self) -> str:
        """Return a one-line summary."""
        parts = [
            f"most models resident at once: {self.most_resident}",
            f"{plural(self.samples, 'sample')}, largest gap {self.largest_gap_s:.1f} s",
            f"{plural(self.handovers, 'handover')} with memory confirmed free",
        ]
        if self.foreign:
            parts.append(f"other clients' models seen: {', '.join(self.foreign)}")
        return "; ".join(parts)


class Monitor:
    """Samples a server's memory in a background thread, from `start` to `stop`, to find foreign models.

    A model is foreign if it was expected neither when the sample was requested nor when the response arrived.
    """

    def __init__(
        self,
        list_resident: Callable[[], tuple[Resident, ...] | None],
        *,
        report_foreign: Callable[[str], None],
        interval_s: float = 0.2,
    ) -> None:
        self._list_resident = list_resident
        self._report_foreign = report_foreign
        self._interval_s = interval_s
        self._expected: Resident | None = None
        self._tag_moved = False
        self._evidence = Evidence()
        self._foreign_times: list[float] = []
        self._last_sample_at: float | None = None
        self._last_was_foreign = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._last_sample_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="residency-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    def expect(self, model: Resident | None) -> None:
        """Set the model that is expected in memory from now on, or None. Any other model is foreign."""
        with self._lock:
            self._expected = model

    @property
    def tag_moved(self) -> bool:
        """Whether the expected model was loaded with other weights, because its tag was moved on the server."""
        return self._tag_moved

    def record_handover(self, seconds: float) -> None:
        """Record that the memory is empty, `seconds` after the last call of a model."""
        with self._lock:
            handover_s = (*self._evidence.handover_s, seconds)
            self._evidence = replace(self._evidence, handovers=len(handover_s), handover_s=handover_s)

    def foreign_between(self, start: float, end: float) -> bool:
        """Return whether a foreign model was in memory between two times of the monotonic clock.

        A sample shows only one moment. So a foreign model also counts if it is in the newest sample, as it may have
        been loaded before `end`, or in a sample shortly before `start`, as it may have been unloaded after `start`.
        """
        with self._lock:
            earliest = start - 2 * self._interval_s
            return self._last_was_foreign or any(earliest <= sampled <= end for sampled in self._foreign_times)

    def evidence(self) -> Evidence:
        with self._lock:
            return self._evidence

    def _run(self) -> None:
        while not self._stop.is_set():
            self.sample()
            self._stop.wait(self._interval_s)

    def sample(self) -> None:
        """Take one sample."""
        with self._lock:
            expected_before = self._expected
        listed = self._list_resident()
        now = time.monotonic()
        with self._lock:
            evidence = self._evidence
            if listed is None:
                self._evidence = replace(evidence, unknown_samples=evidence.unknown_samples + 1)
                return
            expected_digests = {model.digest for model in (expected_before, self._expected) if model is not None}
            foreign = [model.name for model in listed if model.digest not in expected_digests]
            new_foreign = [name for name in dict.fromkeys(foreign) if name not in evidence.foreign]
            gap_s = now - self._last_sample_at if self._last_sample_at is not None else 0.0
            self._evidence = replace(
                evidence,
                samples=evidence.samples + 1,
                most_resident=max(evidence.most_resident, len({model.digest for model in listed})),
                largest_gap_s=max(evidence.largest_gap_s, gap_s),
                foreign=(*evidence.foreign, *new_foreign),
            )
            self._last_sample_at = now
            self._last_was_foreign = bool(foreign)
            # A foreign model with the expected name has other weights. Expected names are in lower case already.
            if self._expected is not None and self._expected.name in [name.casefold() for name in foreign]:
                self._tag_moved = True
            if foreign:
                self._foreign_times.append(now)
        for name in new_foreign:
            self._report_foreign(name)


def wait_until_gone(host: WeightsHost, digest: str, *, timeout_s: float = UNLOAD_TIMEOUT_S) -> tuple[Resident, ...]:
    """Poll until the model with this digest is unloaded, and return the models that are still in memory.

    Raises ResidencyError if the model is still in memory after `timeout_s`, and OllamaUnavailable if the server is
    silent for too long.
    """
    start = time.monotonic()
    last_response = start
    while True:
        listed = host.resident()
        now = time.monotonic()
        if listed is not None:
            last_response = now
            if all(model.digest != digest for model in listed):
                return listed
            if now - start > timeout_s:
                raise ResidencyError(
                    f"{_names(listed)} is still in memory after {now - start:.0f} s, so no further model was loaded: "
                    "unloading hangs. Restart the Ollama server."
                )
        elif now - last_response > min(_MAX_SILENCE_S, timeout_s):
            raise OllamaUnavailable(
                f"The Ollama server did not report what is in memory for {now - last_response:.0f} s."
            )
        time.sleep(_POLL_S if now - start < 1 else _SLOW_POLL_S)


def wait_until_empty(host: WeightsHost, *, wait_s: float) -> None:
    """Poll until the memory is empty; raises ResidencyError if another client's model stays longer than `wait_s`."""
    start = time.monotonic()
    while (listed := host.resident()) != ():  # an unknown memory, None, may have a model
        waited = time.monotonic() - start
        if waited > wait_s:
            if listed is None:
                raise ResidencyError(
                    f"The server has not reported for {waited:.0f} s what is in its memory, so no further model was "
                    "loaded. Check the server, then run the command again."
                )
            raise ResidencyError(
                f"{_names(listed)} is still in memory after {waited:.0f} s, so no further model was loaded: another "
                "client keeps it. Stop that client, or pass --evict."
            )
        time.sleep(_POLL_S if waited < 1 else _SLOW_POLL_S)


def ensure_empty(host: WeightsHost, *, leftover_digest: str | None, evict: bool, wait_s: float) -> None:
    """Ensure that the memory is empty before the first model is loaded.

    Unloads the model that a killed process left in memory, given by its digest, and with `evict` all other models.
    Raises ResidencyError if other models are in memory and `evict` is false.
    """
    deadline = time.monotonic() + max(wait_s, 1.0)  # ask a few times even if `wait_s` is 0
    while (listed := host.resident()) is None:
        if time.monotonic() > deadline:
            raise ResidencyError(f"The Ollama server did not report within {wait_s:g} s what is in its memory.")
        time.sleep(_SLOW_POLL_S)
    foreign = [model for model in listed if model.digest != leftover_digest]
    if foreign and not evict:
        raise ResidencyError(
            f"{_names(foreign)} is in the Ollama server's memory, which must be empty at the start. Stop it with "
            f"`ollama stop {foreign[0].name}`, wait until it expires, or pass --evict."
        )
    for model in listed:
        host.unload(model.name)
    if listed:
        wait_until_empty(host, wait_s=max(wait_s, UNLOAD_TIMEOUT_S))


def _names(models: Iterable[Resident]) -> str:
    return ", ".join(model.name for model in models)
