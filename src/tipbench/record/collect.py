"""Collect: generates the missing cells of a plan, model by model, and records them in MLflow through a journal."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tipbench.errors import MlflowError, MlflowUnavailable, ResidencyError, ServerUnavailable, TipbenchError
from tipbench.files import ResourceLock
from tipbench.generate.engine import (
    Engine,
    EngineDependencies,
    EngineFailure,
    FreeMemory,
    ModelFacts,
    build_engines,
    close_engines,
    engine_locks,
    engine_type_of,
    engine_types,
    model_facts,
    refusal_error,
)
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.design import design_tags, extend_design, read_design
from tipbench.plan.grid import cells_by_model, conditions_of, suite_for
from tipbench.record.cell_run import CollectContext, cell_run
from tipbench.record.events import (
    BlockFinished,
    BlockStarted,
    CellFinished,
    Message,
    Observer,
    Refused,
    Resumed,
    Waiting,
)
from tipbench.record.generation import Block, GeneratedCell, Pause
from tipbench.record.journal import Journal, journal_folder, orphaned_journals
from tipbench.record.mlflow import MlflowConnection
from tipbench.record.mlflow_wire import RECORD_TAG, SUPERSEDED_TAG
from tipbench.record.plan import Plan, RecordedCells, make_plan, read_recorded
from tipbench.record.reader import search_cells
from tipbench.record.run import NewRun, RunChange, RunKind, RunState, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.record.summary import PairTotals, Summary, collection_run, refused_run
from tipbench.record.writer import Writers
from tipbench.text import plural

_FLUSH_S = 10.0  # maximum time for recording finished results after an interrupt or error
_MAX_RELEASE_ATTEMPTS = 3
_MAX_CLOCK_SKEW_S = 600.0  # between two machines that record into one experiment
_RETRY_INTERVAL_S = 1.0
_Result = TypeVar("_Result")


class Collector:
    """Executes the plan of one collect. A block is all missing cells of one model."""

    def __init__(
        self,
        plan: Plan,
        engines: Mapping[str, Engine],
        store: RunStore,
        experiment: Experiment,
        journal: Journal,
        observer: Observer,
    ) -> None:
        self._plan = plan
        self._context = CollectContext(plan.config, plan.suite, collection_id=uuid.uuid4().hex)
        self._engines = engines
        self._experiment = experiment
        self._journal = journal
        self._observer = observer
        self._store = store
        self._writers = Writers(store, experiment.experiment_id, journal, observer)
        self._cancel = threading.Event()
        self._pause = Pause(plan.config.server_wait_s, observer, self._cancel)
        self._totals_by_pair: dict[tuple[str, str], PairTotals] = {}  # by model and prompt
        # Cells of the current model; those recorded before count as done.
        self._model_total = self._model_done = self._model_failed = 0
        self._generated = 0
        self._failures: list[str] = []
        self._started = time.time()

    def run(self) -> Summary:
        """Generate and record the missing cells. If an error is raised, finished results are saved first."""
        for cell in self._plan.cells:
            if run := self._plan.recorded.finished.get(cell.key):
                self._add_to_totals(run)
        with closing(self._journal), self._writers:
            if self._plan.refused:
                now_ms = int(time.time() * 1000)
                self._journal.append(
                    [refused_run(model, reason, now_ms) for model, reason in self._plan.refused.items()]
                )
            for model, reason in self._plan.refused.items():
                self._observer(Refused(model, reason))
            try:
                self._generate_all()
            except BaseException:
                self._save_after_error()
                raise
            self._record_collection("complete" if not self._failures else "with failures")
            self._writers.finish(max_unavailable_s=self._plan.config.server_wait_s)
        self._supersede_concurrent_duplicates()
        summary = self._summary()
        if summary.evidence is not None:
            self._observer(summary.evidence)
        self._observer(summary.event())
        return summary

    def _save_after_error(self) -> None:
        """Record what is finished, for at most `_FLUSH_S`. The next collect records what is left in the journal."""
        try:
            self._record_collection("interrupted")
            self._writers.finish(max_unavailable_s=_FLUSH_S, max_total_s=_FLUSH_S)
        except TipbenchError as exc:
            self._observer(Message(str(exc), warning=True))

    def _generate_all(self) -> None:
        """Generate the missing cells of each model; only one model is in memory at a time."""
        for warning in self._plan.warnings:
            self._observer(Message(warning, warning=True))
        missing_blocks = list(cells_by_model(self._plan.missing))
        for engine_type in engine_types(model for model, _ in missing_blocks):
            self._pause.until_alive(self._engines[engine_type.name])
            self._engines[engine_type.name].start()
        n_cells_by_model = {model_plan.model: model_plan.cells for model_plan in self._plan.models}
        for model, cells in missing_blocks:
            engine, facts = self._engines[engine_type_of(model).name], self._plan.facts[model]
            self._model_total = n_cells_by_model[model]
            self._model_done = self._model_total - len(cells)
            self._model_failed = 0
            self._observer(BlockStarted(model, self._model_total, self._model_done))
            self._pause.until_alive(engine)
            engine.prepare(facts)  # waits until no other model is in memory
            try:
                Block(engine, facts, cells, self._plan.config, self._pause, self._cancel).run(self._save)
            except BaseException:
                self._unload_after_error(engine, model)
                raise
            self._release(engine, model)
            self._observer(BlockFinished(model))
        for engine in self._engines.values():
            engine.close()  # stops monitoring the memory, because all models are unloaded

    def _unload_after_error(self, engine: Engine, model: str) -> None:
        if not engine.alive():
            return
        try:
            engine.release(model)
            self._observer(Message(f"{model} unloaded"))
        except TipbenchError as exc:
            self._observer(Message(str(exc), warning=True))

    def _release(self, engine: Engine, model: str) -> None:
        """Unload a model; raises ResidencyError unless its server confirms that it is unloaded."""
        for _ in range(_MAX_RELEASE_ATTEMPTS):
            self._pause.until_alive(engine)
            # When a server stops, its models are unloaded. Still, wait until it runs again and confirms that.
            with suppress(ServerUnavailable):
                engine.release(model)
                return
        raise ResidencyError(f"{model} was not confirmed unloaded by the {engine.name} server.")

    def _save(self, generated_cells: list[GeneratedCell]) -> None:
        runs = [
            cell_run(
                self._context,
                self._plan.facts[generated.planned.cell.model],
                generated,
                supersedes=self._plan.recorded.failed.get(generated.planned.key, ()),
            )
            for generated in generated_cells
        ]
        self._journal.append(runs)
        for generated, run in zip(generated_cells, runs, strict=True):
            cell, result = generated.planned.cell, generated.result
            self._generated += 1
            self._model_done += 1
            self._add_to_totals(run)
            failure = tokens = speed = None
            if isinstance(result, EngineFailure):
                failure = f"{cell}: {result.kind}: {result.reason}"
                self._failures.append(failure)
                self._model_failed += 1
            else:
                tokens, speed = result.output_tokens, result.tokens_per_s
            self._observer(
                CellFinished(
                    cell.model,
                    cell.prompt,
                    cell.scenario,
                    done=self._model_done,
                    total=self._model_total,
                    failed=self._model_failed,
                    failure=failure,
                    output_tokens=tokens,
                    tokens_per_s=speed,
                )
            )
        self._writers.raise_if_failed()

    def _add_to_totals(self, run: NewRun | StoredRun) -> None:
        pair = (run.params["model"], run.params["prompt_version"])
        self._totals_by_pair.setdefault(pair, PairTotals()).add(run)

    def _record_collection(self, ended: str) -> None:
        run = collection_run(
            self._plan.config,
            self._summary(),
            record_id=self._context.collection_id,
            start_ms=int(self._started * 1000),
            end_ms=int(time.time() * 1000),
            ended=ended,
        )
        self._journal.append([run])

    def _supersede_concurrent_duplicates(self) -> None:
        """Supersede duplicates: runs of cells that were also recorded by a concurrent collect from another home folder.

        Of two concurrent collects, the one that ends last finds the other.
        """
        since_ms = (self._started - _MAX_CLOCK_SKEW_S) * 1000
        experiment_id = self._experiment.experiment_id
        with suppress(MlflowUnavailable, MlflowError):  # the next collect supersedes them
            collections = self._store.search(experiment_id, where={"kind": str(RunKind.COLLECTION)})
            others = [run for run in collections if run.tags.get(RECORD_TAG) != self._context.collection_id]
            is_concurrent = any((run.end_ms or 0) > since_ms for run in others)
            if is_concurrent:
                conditions = conditions_of(self._plan.config, self._plan.suite)
                recorded = read_recorded(self._store, experiment_id, conditions)
                supersede_duplicates(self._store, self._experiment, recorded, self._observer)

    def _summary(self) -> Summary:
        # Evidence: which models were seen in a server's memory. Only Ollama is a server; others run in this process.
        evidence = [engine.evidence() for engine in self._engines.values()]
        return Summary(
            experiment=self._experiment.name,
            experiment_url=self._experiment.url,
            cells=len(self._plan.cells),
            recorded_before=len(self._plan.cells) - len(self._plan.missing),
            generated=self._generated,
            failed=len(self._failures),
            seconds=time.time() - self._started,
            totals_by_pair=self._totals_by_pair,
            evidence=next((item for item in evidence if item is not None), None),
            refused=self._plan.refused,
            failures=tuple(self._failures),
        )


@dataclass(frozen=True)
class CollectEnvironment:
    """Dependencies of a collect."""

    home: Path
    open_mlflow: Callable[[], MlflowConnection]  # called after the models are accepted
    free_memory: Callable[[str], FreeMemory]  # for the model of this name; unknown if it runs on another machine
    observer: Observer

    def message(self, text: str) -> None:
        self.observer(Message(text))

    def warn(self, text: str) -> None:
        self.observer(Message(text, warning=True))


def run_collect(config: CollectConfig, environment: CollectEnvironment) -> Summary:
    """Run a collect. The settings and all models are checked before anything is generated."""
    suite = suite_for(config)
    purpose = f"a collect into {config.experiment}"
    server_locks = engine_locks(config, environment.home, purpose)
    engines = build_engines(
        config.model_names, EngineDependencies(config, environment.home, environment.warn, server_locks)
    )
    with ExitStack() as stack:
        stack.callback(close_engines, engines, environment.warn)
        facts, refused = _read_facts(engines, config, environment)
        mlflow = environment.open_mlflow()
        stack.callback(mlflow.close)
        environment.message(f"MLflow: {mlflow.description}")
        # A server's lock ensures that it has only one model in memory. A model's lock prevents two collects on
        # different servers from generating the same cells. All collects acquire the locks in the same order, which
        # prevents deadlocks.
        locks = [server_locks[name] for name in sorted(server_locks)] + [
            ResourceLock(environment.home, f"{model} for {config.experiment} at {mlflow.identity}", purpose)
            for model in sorted(facts)
        ]
        waited = False
        for lock in locks:
            waited |= lock.acquire(wait=config.wait, report=environment.message)
            stack.callback(lock.release)
        if waited:
            facts, refused = _read_facts(engines, config, environment)  # a model may have changed while waiting

        def retry_mlflow(action: Callable[[], _Result]) -> _Result:
            return retry_while_unavailable(action, "MLflow", config.server_wait_s, environment.observer)

        experiment = retry_mlflow(lambda: mlflow.store.ensure_experiment(config.experiment))
        folder = journal_folder(environment.home, mlflow.identity, config.experiment)
        drain_orphaned(mlflow.store, experiment, folder, environment.observer, config.server_wait_s)
        recorded = RecordedCells()
        if not experiment.created:
            recorded = retry_mlflow(
                lambda: read_recorded(mlflow.store, experiment.experiment_id, conditions_of(config, suite))
            )
        with suppress(MlflowUnavailable, MlflowError):
            supersede_duplicates(mlflow.store, experiment, recorded, environment.observer)
        plan = make_plan(suite, config, facts, refused, recorded, environment.free_memory)
        with suppress(MlflowUnavailable):  # the collect goes on; the next one records the design
            record_design(mlflow.store, experiment, plan, environment.observer)
        for alias, model in plan.aliases.items():
            environment.warn(f"{alias} is the same model as {model} (same digest): its cells are counted once.")
        return Collector(plan, engines, mlflow.store, experiment, Journal(folder), environment.observer).run()


def record_design(store: RunStore, experiment: Experiment, plan: Plan, observer: Observer) -> None:
    """Record the experiment's design, or extend it. The design does not change after a person has scored a cell."""
    recorded_design = read_design(experiment.tags)
    design = extend_design(recorded_design, plan.scenarios, plan.config.looks)
    if design is recorded_design:  # no scenario is new
        if plan.config.looks == "one" and len(design.looks) > 1:
            text = f"{experiment.name} has a design of {len(design.looks)} looks already: --looks one has no effect."
            observer(Message(text, warning=True))
        return
    judged = [] if experiment.created else search_cells(store, experiment.experiment_id, {"state": RunState.JUDGED})
    if any(run.tags.get("floored") != "true" for run in judged):  # floored answers need no judge
        if recorded_design is not None:
            text = "Scenarios are added after the first score: the leaderboard's next test is not a planned look."
            observer(Message(text, warning=True))
        return
    store.tag_experiment(experiment.experiment_id, design_tags(design))


def drain_orphaned(store: RunStore, experiment: Experiment, folder: Path, observer: Observer, wait_s: float) -> None:
    """Record the results left in the journals of dead processes.

    Call it before planning, so that these results count as recorded.
    """
    for journal in orphaned_journals(folder):
        try:
            if journal.n_damaged_lines:
                lines = plural(journal.n_damaged_lines, "line")
                text = f"{lines} of the journal {journal.path} cannot be read and will not be recorded"
                observer(Message(f"{text}; the file is kept as {journal.damaged_path.name}.", warning=True))
            if n_results := journal.n_unstored():
                observer(Message(f"{plural(n_results, 'finished result')} of an earlier collect: recording"))
                with Writers(store, experiment.experiment_id, journal, observer, draining=True) as writers:
                    writers.finish(max_unavailable_s=wait_s)
        finally:
            journal.close()


def supersede_duplicates(store: RunStore, experiment: Experiment, recorded: RecordedCells, observer: Observer) -> None:
    """Tag duplicate runs, the surplus finished runs of a cell, as superseded.

    An error is harmless: readers ignore duplicates, and the next collect supersedes them.
    """
    if not recorded.duplicates:
        return
    for run_id in sorted(recorded.duplicates):
        store.update(run_id, RunChange(tags={SUPERSEDED_TAG: "true"}, at_ms=int(time.time() * 1000)))
    store.mark_changed(experiment.experiment_id)
    text = (
        f"{plural(len(recorded.duplicates), 'cell was', 'cells were')} also generated from another home folder; "
        "one answer per cell counts."
    )
    observer(Message(text, warning=True))


def retry_while_unavailable(action: Callable[[], _Result], server: str, wait_s: float, observer: Observer) -> _Result:
    """Return the result of `action`; retry for at most `wait_s` seconds while the server is unavailable."""
    deadline = time.monotonic() + wait_s
    reported = False
    while True:
        try:
            result = action()
        except ServerUnavailable as exc:
            if time.monotonic() >= deadline:
                raise
            if not reported:
                observer(Message(str(exc), warning=True))
                observer(Waiting(server, wait_s))
                reported = True
            time.sleep(_RETRY_INTERVAL_S)
        else:
            if reported:
                observer(Resumed(server))
            return result


def _read_facts(
    engines: Mapping[str, Engine], config: CollectConfig, environment: CollectEnvironment
) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    """Return the facts of accepted models and the reasons for refused ones."""
    wait_s = config.server_wait_s if config.wait else 0.0
    labels = [engine_type.label for engine_type in engine_types(config.model_names) if engine_type.server]
    servers = " or ".join(labels) or "engine"
    facts, refused = retry_while_unavailable(
        lambda: model_facts(engines, config), servers, wait_s, environment.observer
    )
    if error := refusal_error(facts, refused, config, hint=" Pass --skip-refused to run the others."):
        raise error
    return facts, refused
