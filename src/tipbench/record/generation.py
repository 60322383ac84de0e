"""The generating half of a collect: model by model, cell by cell, with a pause when the server is away."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tipbench.errors import JournalError, OllamaAway
from tipbench.generate.engine import Ask, Completion, Engine, EngineFailure, FailureKind, ModelFacts
from tipbench.plan.config import CollectConfig
from tipbench.plan.grid import PlannedCell
from tipbench.record.events import Observer, Resumed, Waiting

_ALIVE_POLL_S = 0.5
_GATHER_S = 0.01  # asking comes first: what finishes meanwhile is journalled together, with one sync
_MOST_GONE = 10  # a cell that takes the server down every time would otherwise never end
_LOADS_BEFORE_GIVING_UP = 3


@dataclass(frozen=True)
class Generated:
    """A cell and what came of it."""

    planned: PlannedCell
    result: Completion | EngineFailure
    start_ms: int
    end_ms: int
    foreign_resident: bool


class Pause:
    """Waits for an engine that is away: one thread asks, the others wait with it."""

    def __init__(self, wait_s: float, observer: Observer, cancel: threading.Event) -> None:
        self._wait_s = wait_s
        self._observer = observer
        self._cancel = cancel
        self._lock = threading.Lock()

    def until_alive(self, engine: Engine) -> None:
        """Returns when the engine answers (or the run is cancelled); OllamaAway after `wait_s`."""
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
                    raise OllamaAway(
                        f"The {engine.name} server did not come back within {self._wait_s:g} s; what was not finished "
                        "stays to be done. Start it and run the same command again."
                    )


class Block:
    """One model's cells, asked by `config.workers` threads; results come out in the order they finish."""

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
        self._next = iter(enumerate(cells))
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[Generated | BaseException] = queue.SimpleQueue()
        self._hopeless: EngineFailure | None = None
        self._load_failures = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"ask-{n}", daemon=True)
            for n in range(min(config.workers, len(cells)))
        ]

    def results(self) -> Iterator[list[Generated]]:
        """Batches of whatever has finished meanwhile; raises what a worker raised."""
        for thread in self._threads:
            thread.start()
        left = len(self._cells)
        while left:
            batch = [self._take()]
            time.sleep(_GATHER_S)
            while not self._results.empty():
                batch.append(self._take())
            left -= len(batch)
            yield batch

    def stop(self, wait_s: float) -> list[Generated]:
        """Break off the calls under way; what had finished and was not taken yet comes back."""
        self._cancel.set()
        self._engine.abort()
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        finished = []
        while not self._results.empty():
            item = self._results.get()
            if isinstance(item, Generated) and isinstance(item.result, Completion):
                finished.append(item)
        return finished

    def _take(self) -> Generated:
        item = self._results.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        try:
            while not self._cancel.is_set():
                with self._lock:
                    index, planned = next(self._next, (None, None))
                if planned is None:
                    return
                alone = self._config.workers == 1 or len(self._cells) == 1
                generated = self._generate(planned, last=alone and index == len(self._cells) - 1)
                if generated is not None:
                    self._results.put(generated)
        except BaseException as exc:  # noqa: BLE001 - a thread has no caller: `results` raises it in the main thread
            self._results.put(exc)

    def _generate(self, planned: PlannedCell, *, last: bool) -> Generated | None:
        start_ms, start = _now_ms(), time.monotonic()
        result = self._hopeless or self._ask(planned, last)
        if isinstance(result, EngineFailure) and result.kind is FailureKind.CANCELLED:
            return None
        self._note_hopeless(result)
        foreign = self._engine.foreign_between(start, time.monotonic())
        return Generated(planned, result, start_ms, _now_ms(), foreign)

    def _ask(self, planned: PlannedCell, last: bool) -> Completion | EngineFailure:
        ask = Ask(
            model=planned.cell.model,
            system=planned.rendered.system,
            user=planned.rendered.user,
            scenario=planned.scenario,
            n_tips=self._config.n_tips,
            options=planned.options,
            timeout_s=self._config.timeout_s,
            last=last,
            thinking=self._facts.thinking,
            cancel=self._cancel,
        )
        gone = 0
        while True:
            result = self._engine.complete(ask)
            if not isinstance(result, EngineFailure) or result.kind is not FailureKind.SERVER_GONE:
                return result
            gone += 1
            if gone >= _MOST_GONE:
                return result
            self._pause.until_alive(self._engine)
            if self._cancel.is_set():
                return EngineFailure(FailureKind.CANCELLED, "stopped")

    def _note_hopeless(self, result: Completion | EngineFailure) -> None:
        """A model that is gone, or will not load, is not asked for each of its remaining cells."""
        if isinstance(result, Completion):
            self._load_failures = 0
            return
        if result.kind is FailureKind.LOAD_FAILED:
            self._load_failures += 1
        gone = result.kind in (FailureKind.MISSING_MODEL, FailureKind.NOT_LOCAL)
        if self._hopeless is None and (gone or self._load_failures >= _LOADS_BEFORE_GIVING_UP):
            self._hopeless = EngineFailure(result.kind, f"not asked any more: {result.reason}")


def run_block(block: Block, keep: Callable[[list[Generated]], None], interrupted_wait_s: float) -> None:
    """Hand every batch of results to `keep`; on any trouble stop the workers and keep what had finished."""
    try:
        for batch in block.results():
            keep(batch)
    except BaseException as exc:
        finished = block.stop(interrupted_wait_s)
        if finished and not isinstance(exc, JournalError):
            keep(finished)
        raise


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
