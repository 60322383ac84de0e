"""Collect: plans the run, generates model by model, records through the journal, and returns a summary."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tipbench.errors import (
    MlflowError,
    MlflowUnavailable,
    ModelRefused,
    ResidencyError,
    ServerUnavailable,
    TipbenchError,
)
from tipbench.files import ResourceLock
from tipbench.generate.engine import (
    Engine,
    EngineDependencies,
    EngineFailure,
    Memory,
    ModelFacts,
    build_engines,
    close_engines,
    engine_of,
    model_facts,
)
from tipbench.http import canonical_url
from tipbench.plan.config import CollectConfig
from tipbench.plan.grid import blocks, suite_for
from tipbench.plan.suite import Suite
from tipbench.record.cell_run import RunContext, Timing, cell_run
from tipbench.record.events import BlockFinished, BlockStarted, CellFinished, Message, Observer, Resumed, Waiting
from tipbench.record.generation import Block, Generated, Pause, run_block
from tipbench.record.journal import Journal, journal_folder, orphaned_journals
from tipbench.record.mlflow_wire import RECORD_TAG, SUPERSEDED_TAG
from tipbench.record.plan_check import Plan, Recorded, make_plan, read_recorded
from tipbench.record.run import NewRun, RunChange, RunKind
from tipbench.record.store import Experiment, RunStore
from tipbench.record.summary import Summary, Tally, collection_run, refused_run
from tipbench.record.writer import Writers
from tipbench.text import plural

_STOP_WAIT_S = 10.0
_FLUSH_S = 10.0
_RELEASE_TRIES = 3
_CLOCK_SKEW_S = 600.0  # between two machines that record into one experiment


class Collector:
    """Executes the plan of one collect."""

    def __init__(
        self,
        plan: Plan,
        context: RunContext,
        engines: Mapping[str, Engine],
        store: RunStore,
        experiment: Experiment,
        journal: Journal,
        observer: Observer,
    ) -> None:
        self._plan = plan
        self._context = context
        self._engines = engines
        self._experiment = experiment
        self._journal = journal
        self._observer = observer
        self._store = store
        self._writers = Writers(store, experiment.experiment_id, journal, observer)
        self._cancel = threading.Event()
        self._pause = Pause(plan.config.server_wait_s, observer, self._cancel)
        self._tally = Tally()
        self._generated = 0
        self._failures: list[str] = []
        self._started = time.time()

    def run(self) -> Summary:
        """Generate and record the missing cells; on an error, saves what is finished and re-raises."""
        for cell in self._plan.cells:
            if run := self._plan.recorded.finished.get(cell.key):
                self._tally.add(run.params, run.tags, run.metrics)
        try:
            with self._writers:
                self._note_refused()
                try:
                    self._generate_all()
                except BaseException:
                    self._flush_after_error()
                    raise
                self._note_collection("complete" if not self._failures else "with failures")
                self._writers.finish(self._plan.config.server_wait_s)
            self._supersede_twins()
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
                run_block(block, self._save, _STOP_WAIT_S)
            self._observer(BlockFinished(model))
        for engine in self._engines.values():
            engine.close()  # no weights are in memory any more, so there is nothing to monitor

    @contextmanager
    def _in_memory(self, engine: Engine, model: str) -> Iterator[None]:
        """Hold a model in memory for the block: waits until no other is loaded, and unloads it at the end."""
        self._pause.until_alive(engine)
        engine.prepare(self._plan.facts[model])
        try:
            yield
        except BaseException:
            self._release_after_error(engine, model)
            raise
        self._release(engine, model)

    def _release(self, engine: Engine, model: str) -> None:
        for _ in range(_RELEASE_TRIES):
            self._pause.until_alive(engine)
            try:
                engine.release(model)
            except ServerUnavailable:
                continue  # it became unreachable: its weights are gone, or are unloaded on the next try
            return
        raise ResidencyError(f"{model} was not confirmed unloaded by the {engine.name} server.")

    def _release_after_error(self, engine: Engine, model: str) -> None:
        if not engine.alive():
            return
        try:
            engine.release(model)
            self._observer(Message(f"{model} unloaded"))
        except TipbenchError as exc:
            self._observer(Message(str(exc), warning=True))

    def _save(self, batch: list[Generated]) -> None:
        runs = [self._run_of(generated) for generated in batch]
        self._journal.append(runs)
        for generated, run in zip(batch, runs, strict=True):
            self._generated += 1
            self._tally.add(run.params, run.tags, run.metrics)
            self._report(generated)
        self._writers.check()

    def _run_of(self, generated: Generated) -> NewRun:
        planned = generated.planned
        when = Timing(
            generated.start_ms,
            generated.end_ms,
            generated.foreign_resident,
            self._plan.recorded.failed.get(planned.key, ()),
        )
        return cell_run(self._context, planned, self._plan.facts[planned.cell.model], generated.result, when)

    def _report(self, generated: Generated) -> None:
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
            record_id=self._context.collection_id,
            start_ms=int(self._started * 1000),
            end_ms=int(time.time() * 1000),
            ended=ended,
        )
        self._journal.append([run])

    def _supersede_twins(self) -> None:
        """Tag the twins that collects of other homes made during this one; whichever ends last sees them all."""
        since = (self._started - _CLOCK_SKEW_S) * 1000
        experiment_id, own = self._experiment.experiment_id, self._context.collection_id
        with suppress(MlflowUnavailable, MlflowError):  # readers ignore twins, and the next collect tags them
            collections = self._store.search(experiment_id, where={"kind": str(RunKind.COLLECTION)})
            if any((run.end_ms or 0) > since for run in collections if run.tags.get(RECORD_TAG) != own):
                recorded = read_recorded(self._store, experiment_id, self._context.conditions)
                supersede_twins(self._store, self._experiment, recorded, self._observer)

    def _flush_after_error(self) -> None:
        """Give MLflow a short time; what is not recorded stays in the journal for the next run."""
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


_RETRY_S = 1.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class TrackingStore:
    """Where results are recorded: the store, its identity for the journal, and its description for people."""

    store: RunStore
    identity: str
    how: str
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class CollectEnvironment:
    """Dependencies of a collect: the home folder, the store, the free memory and the observer."""

    home: Path
    open_store: Callable[[], TrackingStore]  # called after the models are accepted
    free_memory: Callable[[str], Memory]  # of the machine that runs a model
    observer: Observer

    def message(self, text: str) -> None:
        self.observer(Message(text))

    def warn(self, text: str) -> None:
        self.observer(Message(text, warning=True))


def run_collect(config: CollectConfig, environment: CollectEnvironment) -> Summary:
    """Run phase A, a collect; everything that can be refused is refused before anything is generated."""
    suite = suite_for(config)
    purpose = f"a collect into {config.experiment}"
    ollama_lock = ResourceLock(environment.home, f"Ollama at {canonical_url(config.ollama_url)}", purpose)
    engines = build_engines(
        config.model_names, EngineDependencies(config, environment.home, environment.warn, ollama_lock)
    )
    with ExitStack() as stack:
        stack.callback(close_engines, engines, environment.warn)
        facts, refused = _read_facts(engines, config, environment)
        tracking = environment.open_store()
        stack.callback(tracking.close)
        environment.message(f"MLflow: {tracking.how}")
        locks = [ollama_lock] if "ollama" in engines else []
        locks += [
            ResourceLock(environment.home, f"{model} for {config.experiment} at {tracking.identity}", purpose)
            for model in sorted(facts)
        ]
        if _acquire_all(locks, stack, config, environment):
            facts, refused = _read_facts(engines, config, environment)  # a model may have changed while waiting
        experiment = retry_while_unavailable(
            lambda: tracking.store.ensure_experiment(config.experiment),
            "MLflow",
            config.server_wait_s,
            environment.observer,
        )
        folder = journal_folder(environment.home, tracking.identity, config.experiment)
        drain_orphaned(tracking.store, experiment, folder, environment.observer, config.server_wait_s)
        context = RunContext(config, suite, uuid.uuid4().hex)
        recorded = _read_recorded(tracking.store, experiment, context, environment)
        with suppress(MlflowUnavailable, MlflowError):
            supersede_twins(tracking.store, experiment, recorded, environment.observer)
        plan = make_plan(suite, config, facts, refused, recorded, environment.free_memory)
        for alias, model in plan.aliases.items():
            environment.warn(f"{alias} is the same model as {model} (same digest): its cells are counted once.")
        return Collector(
            plan, context, engines, tracking.store, experiment, Journal(folder), environment.observer
        ).run()


def dry_run(
    config: CollectConfig, home: Path, recorded: Callable[[Suite], Recorded], free: Callable[[str], Memory]
) -> Plan:
    """Return the plan of a collect, without locks, a journal or calls to a model."""
    suite = suite_for(config)
    engines = build_engines(config.model_names, EngineDependencies(config, home, lambda _text: None))
    try:
        facts, refused = model_facts(engines, config)
    finally:
        close_engines(engines, lambda _text: None)
    return make_plan(suite, config, facts, refused, recorded(suite), free)


def drain_orphaned(store: RunStore, experiment: Experiment, folder: Path, observer: Observer, wait_s: float) -> None:
    """Record results that dead processes left in their journals, before planning, so that they count as finished."""
    for journal in orphaned_journals(folder):
        try:
            if journal.damaged:
                lines = plural(journal.damaged, "line")
                text = f"{lines} of the journal {journal.path} cannot be read and will not be recorded"
                observer(Message(f"{text}; the file is kept as {journal.damaged_path.name}.", warning=True))
            if left := journal.outstanding():
                observer(Message(f"{plural(left, 'finished result')} of an earlier run: recording"))
                with Writers(store, experiment.experiment_id, journal, observer, draining=True) as writers:
                    writers.finish(wait_s)
        finally:
            journal.close()


def supersede_twins(store: RunStore, experiment: Experiment, recorded: Recorded, observer: Observer) -> None:
    """Tag further finished runs of a key as superseded, and say how many."""
    if not recorded.twins:
        return
    for run_id in sorted(recorded.twins):
        store.update(run_id, RunChange(tags={SUPERSEDED_TAG: "true"}, at_ms=int(time.time() * 1000)))
    store.touch(experiment.experiment_id)
    number = plural(len(recorded.twins), "cell was", "cells were")
    observer(Message(f"{number} also generated by another home; one answer per cell counts.", warning=True))


def retry_while_unavailable(action: Callable[[], _Answer], server: str, wait_s: float, observer: Observer) -> _Answer:
    """Call `action`; while the server is unreachable, retries for at most `wait_s` seconds and reports the wait."""
    deadline = time.monotonic() + wait_s
    reported = False
    while True:
        try:
            answer = action()
        except ServerUnavailable as exc:
            if time.monotonic() >= deadline:
                raise
            if not reported:
                observer(Message(str(exc), warning=True))
                observer(Waiting(server, wait_s))
                reported = True
            time.sleep(_RETRY_S)
        else:
            if reported:
                observer(Resumed(server))
            return answer


def _read_facts(
    engines: Mapping[str, Engine], config: CollectConfig, environment: CollectEnvironment
) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    """Return the accepted and the refused models; an unreachable server is an error at once, unless `wait` is set."""
    wait_s = config.server_wait_s if config.wait else 0.0
    facts, refused = retry_while_unavailable(
        lambda: model_facts(engines, config), "Ollama", wait_s, environment.observer
    )
    if refused and not (config.skip_refused and facts):
        hint = " Pass --skip-refused to run the others." if facts else ""
        raise ModelRefused(" ".join(refused.values()) + hint)
    return facts, refused


def _acquire_all(
    locks: Sequence[ResourceLock], stack: ExitStack, config: CollectConfig, environment: CollectEnvironment
) -> bool:
    """Acquire all locks, always in the same order; returns whether it had to wait for one.

    One collect per Ollama server keeps its memory to one model; one per model and experiment prevents two collects on
    two servers from generating the same cells at the same time.
    """
    waited = False
    for lock in locks:
        waited |= lock.acquire(wait=config.wait, report=environment.message)
        stack.callback(lock.release)
    return waited


def _read_recorded(
    store: RunStore, experiment: Experiment, context: RunContext, environment: CollectEnvironment
) -> Recorded:
    if experiment.created:
        return Recorded()
    return retry_while_unavailable(
        lambda: read_recorded(store, experiment.experiment_id, context.conditions),
        "MLflow",
        context.config.server_wait_s,
        environment.observer,
    )
