"""The collector: works off a plan, with engines in front, the journal in the middle and writers behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tipbench.errors import ResidencyError, ServerAway, TipbenchError
from tipbench.generate.engine import Engine, EngineFailure, engine_of
from tipbench.plan.grid import blocks
from tipbench.record.events import BlockFinished, BlockStarted, CellFinished, Message, Observer
from tipbench.record.generation import Block, Generated, Pause, run_block
from tipbench.record.journal import Journal
from tipbench.record.outcome import Circumstances, Setting, cell_run
from tipbench.record.planning import Plan
from tipbench.record.run import NewRun
from tipbench.record.store import Experiment, RunStore
from tipbench.record.summary import Summary, Tally, collection_run, refused_run
from tipbench.record.writer import Writers

_STOP_WAIT_S = 10.0
_FLUSH_S = 10.0
_RELEASE_TRIES = 3


class Collector:
    """One collect after its plan was made."""

    def __init__(
        self,
        plan: Plan,
        setting: Setting,
        engines: Mapping[str, Engine],
        store: RunStore,
        experiment: Experiment,
        journal: Journal,
        observer: Observer,
    ) -> None:
        self._plan = plan
        self._setting = setting
        self._engines = engines
        self._experiment = experiment
        self._journal = journal
        self._observer = observer
        self._writers = Writers(store, experiment.experiment_id, journal, observer)
        self._cancel = threading.Event()
        self._pause = Pause(plan.config.server_wait_s, observer, self._cancel)
        self._tally = Tally()
        self._generated = 0
        self._failures: list[str] = []
        self._started = time.time()

    def run(self) -> Summary:
        """Generate what is missing and see it recorded; on trouble keep what is finished, then pass it on."""
        for cell in self._plan.cells:
            if run := self._plan.recorded.finished.get(cell.key):
                self._tally.add(run.params, run.tags, run.metrics)
        try:
            with self._writers:
                self._note_refused()
                try:
                    self._generate_all()
                except BaseException:
                    self._flush_after_trouble()
                    raise
                self._note_collection("complete" if not self._failures else "with failures")
                self._writers.finish(self._plan.config.server_wait_s)
        finally:
            self._journal.close()
        return self._summary()

    def _generate_all(self) -> None:
        for warning in (model.warning for model in self._plan.models):
            if warning is not None:
                self._observer(Message(warning, warning=True))
        todo = list(blocks(self._plan.missing))
        for kind in dict.fromkeys(engine_of(model) for model, _ in todo):
            self._pause.until_alive(self._engines[kind])
            self._engines[kind].start()
        for model, cells in todo:
            engine = self._engines[engine_of(model)]
            planned = next(item for item in self._plan.models if item.model == model)
            self._observer(BlockStarted(model, planned.cells, planned.cells - len(cells)))
            with self._in_memory(engine, model):
                block = Block(engine, self._plan.facts[model], cells, self._plan.config, self._pause, self._cancel)
                run_block(block, self._keep, _STOP_WAIT_S)
            self._observer(BlockFinished(model))
        for engine in self._engines.values():
            engine.close()  # nothing is in memory any more, so there is nothing left to watch

    @contextmanager
    def _in_memory(self, engine: Engine, model: str) -> Iterator[None]:
        """A model's time in memory: begins with nothing else there, ends when it is gone."""
        self._pause.until_alive(engine)
        engine.prepare(self._plan.facts[model])
        try:
            yield
        except BaseException:
            self._release_in_trouble(engine, model)
            raise
        self._release(engine, model)

    def _release(self, engine: Engine, model: str) -> None:
        for _ in range(_RELEASE_TRIES):
            self._pause.until_alive(engine)
            try:
                engine.release(model)
            except ServerAway:
                continue  # it went away in between; what it had loaded went with it, or will be asked for again
            return
        raise ResidencyError(f"{model} could not be seen leaving the memory of the {engine.name} server.")

    def _release_in_trouble(self, engine: Engine, model: str) -> None:
        if not engine.alive():
            return
        try:
            engine.release(model)
            self._observer(Message(f"{model} unloaded"))
        except TipbenchError as exc:
            self._observer(Message(str(exc), warning=True))

    def _keep(self, batch: list[Generated]) -> None:
        runs = [self._run_of(generated) for generated in batch]
        self._journal.append(runs)
        for generated, run in zip(batch, runs, strict=True):
            self._generated += 1
            self._tally.add(run.params, run.tags, run.metrics)
            self._tell(generated)
        self._writers.check()

    def _run_of(self, generated: Generated) -> NewRun:
        planned = generated.planned
        when = Circumstances(
            generated.start_ms,
            generated.end_ms,
            generated.foreign_resident,
            self._plan.recorded.failed.get(planned.key, ()),
        )
        return cell_run(self._setting, planned, self._plan.facts[planned.cell.model], generated.result, when)

    def _tell(self, generated: Generated) -> None:
        cell, result = generated.planned.cell, generated.result
        if isinstance(result, EngineFailure):
            failure = f"{cell}: {result.kind}: {result.reason}"
            self._failures.append(failure)
            self._observer(CellFinished(cell, failure=failure))
        else:
            self._observer(CellFinished(cell, None, result.output_tokens, result.tokens_per_s))

    def _note_refused(self) -> None:
        now = int(time.time() * 1000)
        runs = [refused_run(model, reason, now) for model, reason in self._plan.refused.items()]
        if runs:
            self._journal.append(runs)

    def _note_collection(self, ended: str) -> None:
        run = collection_run(
            self._plan.config,
            self._summary(),
            record_id=self._setting.collection_id,
            start_ms=int(self._started * 1000),
            end_ms=int(time.time() * 1000),
            ended=ended,
        )
        self._journal.append([run])

    def _flush_after_trouble(self) -> None:
        """Give MLflow a moment; what it does not take stays in the journal for the next run."""
        try:
            self._note_collection("interrupted")
            self._writers.finish(_FLUSH_S, at_most_s=_FLUSH_S)
        except TipbenchError as exc:
            self._observer(Message(str(exc), warning=True))

    def _summary(self) -> Summary:
        evidence = [engine.evidence() for engine in self._engines.values()]
        return Summary(
            experiment=self._experiment.name,
            experiment_url=self._experiment.url,
            cells=len(self._plan.cells),
            recorded_before=len(self._plan.cells) - len(self._plan.missing),
            generated=self._generated,
            failed=len(self._failures),
            seconds=time.time() - self._started,
            tally=self._tally,
            evidence=next((item for item in evidence if item is not None), None),
            refused=self._plan.refused,
            failures=tuple(self._failures),
        )
