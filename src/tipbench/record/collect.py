"""Collect: for each missing cell generate, journal, record. Safe to stop and run again, at any moment."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tipbench.addresses import identity_of
from tipbench.errors import ModelRefused, OllamaAway, ServerAway, TipbenchError
from tipbench.generate.engine import Engine, EngineFailure, ModelFacts, engine_of
from tipbench.generate.engines import EngineNeeds, ask_facts, build_engines, close_engines
from tipbench.generate.lock import ResourceLock
from tipbench.generate.sizing import Memory
from tipbench.plan.config import CollectConfig
from tipbench.plan.grid import blocks, choose_prompts, choose_scenarios
from tipbench.plan.suite import Suite, load_suite
from tipbench.record.events import (
    BlockFinished,
    BlockStarted,
    CellFinished,
    Message,
    Observer,
    Resumed,
    Waiting,
)
from tipbench.record.generation import Block, Generated, Pause, run_block
from tipbench.record.journal import Journal, journal_folder, left_behind
from tipbench.record.outcome import Circumstances, Setting, cell_run
from tipbench.record.planning import Plan, Recorded, make_plan, read_recorded
from tipbench.record.run import NewRun
from tipbench.record.store import Experiment, RunStore
from tipbench.record.summary import Summary, Tally, collection_run, refused_run
from tipbench.record.writer import Writers

_STOP_WAIT_S = 10.0
_FLUSH_S = 10.0
_RETRY_S = 1.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Keeper:
    """Where results go: the store, who it is for the journal, and how to name it to people."""

    store: RunStore
    identity: str
    how: str
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Surroundings:
    """What a collect needs from outside: folders, a way to MLflow, and somebody to tell."""

    home: Path
    open_keeper: Callable[[], Keeper]  # called once the models are known to be allowed
    free_memory: Callable[[str], Memory]  # of the machine that computes for a model
    observer: Observer

    def report(self, text: str) -> None:
        self.observer(Message(text, warning=True))


def run_collect(config: CollectConfig, around: Surroundings) -> Summary:
    """The whole of phase A. Everything that can be refused is refused before anything is generated."""
    suite = load_suite(config.suite)
    choose_prompts(suite, config.prompt_versions)
    choose_scenarios(suite, config.n_scenarios)
    server = f"Ollama at {identity_of(config.ollama_url)}"
    ollama_lock = ResourceLock(around.home, server, f"a collect into {config.experiment}")
    needs = EngineNeeds(config, around.home, around.report, ollama_lock)
    engines = build_engines(config.model_names, needs)
    try:
        facts, refused = patiently(lambda: ask_facts(engines, config), config.server_wait_s, around.observer)
        _stop_if_refused(facts, refused, config)
        with ExitStack() as stack:
            keeper = around.open_keeper()
            stack.callback(keeper.close)
            around.observer(Message(f"MLflow: {keeper.how}"))
            _take_locks(stack, ollama_lock, engines, config, keeper, around)
            experiment = patiently(
                lambda: keeper.store.ensure_experiment(config.experiment), config.server_wait_s, around.observer
            )
            folder = journal_folder(around.home, keeper.identity, config.experiment)
            drain_left_behind(keeper.store, experiment, folder, around.observer, config.server_wait_s)
            setting = Setting(config, suite, uuid.uuid4().hex)
            recorded = Recorded()
            if not experiment.created:
                recorded = patiently(
                    lambda: read_recorded(keeper.store, experiment.experiment_id, setting.conditions),
                    config.server_wait_s,
                    around.observer,
                )
            plan = make_plan(suite, config, facts, refused, recorded, around.free_memory)
            return Collector(plan, setting, engines, keeper, experiment, Journal(folder), around.observer).run()
    finally:
        close_engines(engines, around.report)


def dry_run(
    config: CollectConfig, home: Path, recorded: Callable[[Suite], Recorded], free: Callable[[str], Memory]
) -> Plan:
    """The plan of a collect, without its locks, its journal or a single call to a model."""
    suite = load_suite(config.suite)
    choose_prompts(suite, config.prompt_versions)
    choose_scenarios(suite, config.n_scenarios)
    engines = build_engines(config.model_names, EngineNeeds(config, home, lambda _text: None))
    try:
        facts, refused = ask_facts(engines, config)
    finally:
        close_engines(engines, lambda _text: None)
    return make_plan(suite, config, facts, refused, recorded(suite), free)


def drain_left_behind(store: RunStore, experiment: Experiment, folder: Path, observer: Observer, wait_s: float) -> int:
    """Record what dead processes left in their journals, before anything is planned: finished is finished."""
    drained = 0
    for journal in left_behind(folder):
        try:
            left = journal.outstanding()
            if left:
                observer(Message(f"{left} finished result{'s' * (left > 1)} of an earlier run: recording"))
                with Writers(store, experiment.experiment_id, journal, observer, maybe_there=True) as writers:
                    writers.finish(wait_s)
                drained += left
        finally:
            journal.close()
    return drained


def patiently(action: Callable[[], _Answer], wait_s: float, observer: Observer) -> _Answer:
    """Do it; while a server is away, wait for it visibly for at most `wait_s`."""
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            answer = action()
        except ServerAway as exc:
            if time.monotonic() >= deadline:
                raise
            if not told:
                observer(Message(str(exc), warning=True))
                observer(Waiting("the server", wait_s))
                told = True
            time.sleep(_RETRY_S)
        else:
            if told:
                observer(Resumed("the server"))
            return answer


def _stop_if_refused(facts: Mapping[str, ModelFacts], refused: Mapping[str, str], config: CollectConfig) -> None:
    if refused and not (config.skip_refused and facts):
        hint = "" if config.skip_refused else " Pass --skip-refused to run the others."
        raise ModelRefused(" ".join(refused.values()) + (hint if facts else ""))


def _take_locks(
    stack: ExitStack,
    ollama_lock: ResourceLock,
    engines: dict[str, Engine],
    config: CollectConfig,
    keeper: Keeper,
    around: Surroundings,
) -> None:
    """One collect per Ollama server; without one, one per experiment, so that no key is generated twice at once."""
    locks = [ollama_lock] if "ollama" in engines else []
    if set(engines) - {"ollama"}:
        resource = f"the experiment {config.experiment} at {keeper.identity}"
        locks.append(ResourceLock(around.home, resource, f"a collect into {config.experiment}"))
    for lock in locks:
        lock.acquire(wait=config.wait, report=around.report)
        stack.callback(lock.release)


class Collector:
    """Works off a plan: engines in front, journal in the middle, writers behind."""

    def __init__(
        self,
        plan: Plan,
        setting: Setting,
        engines: dict[str, Engine],
        keeper: Keeper,
        experiment: Experiment,
        journal: Journal,
        observer: Observer,
    ) -> None:
        self._plan = plan
        self._setting = setting
        self._engines = engines
        self._keeper = keeper
        self._experiment = experiment
        self._journal = journal
        self._observer = observer
        self._writers = Writers(keeper.store, experiment.experiment_id, journal, observer)
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
        for model, cells in blocks(self._plan.missing):
            engine = self._engines[engine_of(model)]
            planned = next(item for item in self._plan.models if item.model == model)
            self._observer(BlockStarted(model, planned.cells, planned.cells - len(cells)))
            with self._in_memory(engine, model):
                block = Block(engine, self._plan.facts[model], cells, self._plan.config, self._pause, self._cancel)
                run_block(block, self._keep, _STOP_WAIT_S)
            self._observer(BlockFinished(model))
        close_engines(self._engines, lambda text: self._observer(Message(text, warning=True)))

    @contextmanager
    def _in_memory(self, engine: Engine, model: str) -> Iterator[None]:
        """A model's time in memory: begins with nothing else there, ends with nothing there."""
        self._pause.until_alive(engine)
        engine.prepare(self._plan.facts[model])
        try:
            yield
        except BaseException as exc:
            if not isinstance(exc, OllamaAway):
                self._release_in_trouble(engine, model)
            raise
        self._pause.until_alive(engine)
        engine.release(model)

    def _release_in_trouble(self, engine: Engine, model: str) -> None:
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
        if self._generated:
            start_ms, end_ms = int(self._started * 1000), int(time.time() * 1000)
            run = collection_run(
                self._plan.config,
                self._summary(),
                record_id=self._setting.collection_id,
                start_ms=start_ms,
                end_ms=end_ms,
                ended=ended,
            )
            self._journal.append([run])

    def _flush_after_trouble(self) -> None:
        """Give MLflow a moment; what it does not take stays in the journal for the next run."""
        try:
            self._note_collection("interrupted")
            self._writers.finish(min(_FLUSH_S, self._plan.config.server_wait_s))
        except TipbenchError as exc:
            self._observer(Message(str(exc), warning=True))

    def _summary(self) -> Summary:
        evidence = [engine.evidence() for engine in self._engines.values()]
        return Summary(
            experiment=self._experiment.name,
            experiment_url=self._experiment.url,
            tracking=self._keeper.how,
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
