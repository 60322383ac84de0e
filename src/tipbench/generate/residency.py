"""Keeps at most one model in Ollama's memory, and monitors the memory as evidence.

`keep_alive=0` alone is not enough: Ollama unloads a model only some time after its response. A request for another
model before that puts both in memory. So the next model is requested only once the server lists no loaded model.
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
_POLL_S = 0.01  # in the first second
_SLOW_POLL_S = 0.25  # later
_MAX_SILENCE_S = 10.0  # without a response; then the server counts as unavailable


@dataclass(frozen=True)
class Resident:
    """A model in a server's memory."""

    name: str
    digest: str  # identifies the weights


class WeightsHost(Protocol):
    """A server that loads models into memory."""

    def resident(self) -> tuple[Resident, ...] | None:
        """Return the models in memory, or None if the server did not respond."""
        ...

    def unload(self, name: str) -> None:
        """Start to unload a model. It is unloaded once `resident` no longer lists it."""
        ...


@dataclass(frozen=True)
class Evidence:
    """What a monitor has observed."""

    samples: int = 0  # with a response
    most_resident: int = 0  # models in memory at the same time
    largest_gap_s: float = 0.0  # between two samples with a response, or from the start to the first
    handovers: int = 0  # how often the memory was seen empty after a model was released
    unknown_samples: int = 0  # without a response; not in `samples`
    foreign: tuple[str, ...] = ()  # models that other clients loaded
    handover_s: tuple[float, ...] = ()  # of each handover, from the release of a model to the empty memory

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
    """Samples a server's memory in a background thread."""

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
        self._foreign_in_last_sample = False
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
        """Set the only model that may be in memory from now on, or None. Any other model is foreign."""
        with self._lock:
            self._expected = model

    @property
    def tag_moved(self) -> bool:
        """Whether the expected name was loaded with other weights: the server's tag was moved."""
        return self._tag_moved

    def record_handover(self, seconds: float) -> None:
        """Record that the memory is empty, `seconds` after a model was released."""
        with self._lock:
            handover_s = (*self._evidence.handover_s, seconds)
            self._evidence = replace(self._evidence, handovers=len(handover_s), handover_s=handover_s)

    def foreign_between(self, start: float, end: float) -> bool:
        """Return whether a foreign model may have been in memory between two times of the monotonic clock."""
        with self._lock:
            # A model may have been loaded before `end` although only the newest sample, taken later, shows it. And a
            # model last seen up to two intervals before `start` may still have been in memory then.
            earliest = start - 2 * self._interval_s
            return self._foreign_in_last_sample or any(earliest <= at <= end for at in self._foreign_times)

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
            # The expected model may have changed during the request: both are allowed.
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
            self._foreign_in_last_sample = bool(foreign)
            # A foreign model with the expected name has other weights. Expected names are in lower case.
            if self._expected is not None and self._expected.name in [name.casefold() for name in foreign]:
                self._tag_moved = True
            if foreign:
                self._foreign_times.append(now)
        for name in new_foreign:
            self._report_foreign(name)


def wait_until_gone(host: WeightsHost, digest: str, *, timeout_s: float = UNLOAD_TIMEOUT_S) -> tuple[Resident, ...]:
    """Poll until the model with this digest is unloaded, and return the models that are still in memory.

    Raises ResidencyError after `timeout_s`, and OllamaUnavailable if the server does not respond.
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
    """Poll until the memory is empty. Raises ResidencyError after `wait_s`."""
    start = time.monotonic()
    while (listed := host.resident()) != ():  # None: unknown, so not known to be empty
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
    """Empty the memory before the first model is loaded.

    Unloads the model that a killed process left, `leftover_digest`, and with `evict` all others. Raises ResidencyError
    if there are others and `evict` is false, if the server does not report, or if the memory does not become empty.
    """
    deadline = time.monotonic() + max(wait_s, 1.0)  # retry a few times even if `wait_s` is 0
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
