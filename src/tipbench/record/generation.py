"""Generates the cells of one model in worker threads. Pauses while the model server is unreachable."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tipbench.errors import JournalError, ServerUnavailable
from tipbench.generate.engine import Completion, Engine, EngineFailure, FailureKind, GenerationRequest, ModelFacts
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.grid import PlannedCell
from tipbench.record.events import Observer, Resumed, Waiting

_ALIVE_POLL_S = 0.5
_BATCH_DELAY_S = 0.01  # wait before saving, so that one save writes results that finish together
_STOP_WAIT_S = 10.0  # maximum wait for running calls after a stop
_MAX_CRASHES = 10  # the cell fails after this many crashes of the server
_MAX_LOAD_FAILURES = 3  # the remaining cells fail after this many failures to load the model since the last answer


@dataclass(frozen=True)
class GeneratedCell:
    """A cell and its result."""

    planned: PlannedCell
    result: Completion | EngineFailure
    start_ms: int
    end_ms: int
    foreign_resident: bool = False  # another client's model was in memory at the same time


class Pause:
    """Waits for an unavailable engine. If several threads wait, only one of them polls."""

    def __init__(self, wait_s: float, observer: Observer, cancel: threading.Event) -> None:
        self._wait_s = wait_s
        self._observer = observer
        self._cancel = cancel
        self._lock = threading.Lock()

    def until_alive(self, engine: Engine) -> None:
        """Return once the engine responds or `cancel` is set; raises ServerUnavailable after `wait_s` seconds."""
        with self._lock:
            if engine.alive():
                return
            self._observer(Waiting(engine.name, self._wait_s))
            deadline = time.monotonic() + self._wait_s
            while not self._cancel.wait(_ALIVE_POLL_S):
                if engine.alive():
                    self._observer(Resumed(engine.name))
                    return
                if time.monotonic() > deadline:
                    raise ServerUnavailable(
                        f"The {engine.name} server was unavailable for {self._wait_s:g} s. Start the server, then run "
                        "the same command again for what is unfinished."
                    )


class Block:
    """Generates one model's cells in `config.workers` threads."""

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        cells: Sequence[PlannedCell],
        config: CollectConfig,
        pause: Pause,
        cancel: threading.Event,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._cells = cells
        self._config = config
        self._pause = pause
        self._cancel = cancel
        self._unassigned_cells = iter(cells)
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[GeneratedCell | BaseException] = queue.SimpleQueue()
        self._skip_result: EngineFailure | None = None  # the result of all remaining cells, if set
        self._load_failures = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"generate-{n}", daemon=True)
            for n in range(min(config.workers, len(cells)))
        ]

    def run(self, save: Callable[[list[GeneratedCell]], None]) -> None:
        """Generate all cells and pass the results to `save` in batches.

        An exception of a worker is raised here. On any exception, the workers are stopped and finished answers are
        saved before it is raised.
        """
        batch: list[GeneratedCell] = []
        try:
            for thread in self._threads:
                thread.start()
            remaining = len(self._cells)
            while remaining:
                batch.append(self._next_result())
                time.sleep(_BATCH_DELAY_S)
                while not self._results.empty():
                    batch.append(self._next_result())
                remaining -= len(batch)
                to_save, batch = batch, []  # if `save` raises, the batch must not be saved again
                save(to_save)
        except BaseException as exc:
            finished = batch + self._stop()
            if finished and not isinstance(exc, JournalError):  # after a JournalError, `save` would fail again
                save(finished)
            raise

    def _stop(self) -> list[GeneratedCell]:
        """Cancel the running calls and return complete answers that are not saved yet.

        Failures are left out: the next collect generates these cells again anyway.
        """
        self._cancel.set()
        self._engine.abort()
        deadline = time.monotonic() + _STOP_WAIT_S
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))
        finished = []
        while not self._results.empty():
            item = self._results.get()
            if isinstance(item, GeneratedCell) and isinstance(item.result, Completion):
                finished.append(item)
        return finished

    def _next_result(self) -> GeneratedCell:
        item = self._results.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        try:
            while not self._cancel.is_set():
                with self._lock:
                    planned = next(self._unassigned_cells, None)
                if planned is None:
                    return
                # After the last call, the engine may unload the model. With several workers, no call is marked as the
                # last one, because others may still run after it.
                one_worker = self._config.workers == 1 or len(self._cells) == 1
                is_last = one_worker and planned is self._cells[-1]
                start_ms, start = _now_ms(), time.monotonic()
                result = self._skip_result or self._complete(planned, last=is_last)
                if isinstance(result, EngineFailure) and result.kind is FailureKind.CANCELLED:
                    continue
                self._skip_rest_if_unusable(result)
                foreign_resident = self._engine.foreign_between(start, time.monotonic())
                self._results.put(GeneratedCell(planned, result, start_ms, _now_ms(), foreign_resident))
        except BaseException as exc:  # noqa: BLE001 - a thread has no caller: `run` raises it in the main thread
            self._results.put(exc)

    def _complete(self, planned: PlannedCell, *, last: bool) -> Completion | EngineFailure:
        request = GenerationRequest(
            model=planned.cell.model,
            system=planned.rendered.system,
            user=planned.rendered.user,
            scenario=planned.scenario,
            n_tips=self._config.n_tips,
            options=planned.options,
            timeout_s=self._config.timeout_s,
            last=last,
            disable_thinking=self._facts.can_think,
            cancel=self._cancel,
        )
        crashes = 0
        while True:
            result = self._engine.complete(request)
            if not isinstance(result, EngineFailure) or result.kind is not FailureKind.SERVER_GONE:
                return result
            crashes += 1
            if crashes >= _MAX_CRASHES:
                return result
            self._pause.until_alive(self._engine)
            if self._cancel.is_set():
                return EngineFailure(FailureKind.CANCELLED, "stopped")

    def _skip_rest_if_unusable(self, result: Completion | EngineFailure) -> None:
        if isinstance(result, Completion):
            self._load_failures = 0
            return
        if result.kind is FailureKind.LOAD_FAILED:
            self._load_failures += 1
        is_unusable = result.kind in (FailureKind.MISSING_MODEL, FailureKind.NOT_LOCAL)
        if self._skip_result is None and (is_unusable or self._load_failures >= _MAX_LOAD_FAILURES):
            self._skip_result = EngineFailure(result.kind, f"skipped: {result.reason}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
