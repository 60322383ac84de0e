"""Collect: for each missing cell generate, journal, record. Safe to stop and run again, at any moment."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tipbench.addresses import identity_of
from tipbench.errors import ModelRefused, ServerAway
from tipbench.generate.engine import Engine, ModelFacts
from tipbench.generate.engines import EngineNeeds, ask_facts, build_engines, close_engines
from tipbench.generate.lock import ResourceLock
from tipbench.generate.sizing import Memory
from tipbench.plan.config import CollectConfig
from tipbench.plan.grid import suite_for
from tipbench.plan.suite import Suite
from tipbench.record.collector import Collector
from tipbench.record.events import Message, Observer, Resumed, Waiting
from tipbench.record.journal import Journal, journal_folder, left_behind
from tipbench.record.outcome import Setting
from tipbench.record.planning import Plan, Recorded, make_plan, read_recorded
from tipbench.record.store import Experiment, RunStore
from tipbench.record.summary import Summary
from tipbench.record.writer import Writers

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

    def tell(self, text: str) -> None:
        self.observer(Message(text))

    def warn(self, text: str) -> None:
        self.observer(Message(text, warning=True))


def run_collect(config: CollectConfig, around: Surroundings) -> Summary:
    """The whole of phase A. Everything that can be refused is refused before anything is generated."""
    suite = suite_for(config)
    purpose = f"a collect into {config.experiment}"
    ollama_lock = ResourceLock(around.home, f"Ollama at {identity_of(config.ollama_url)}", purpose)
    engines = build_engines(config.model_names, EngineNeeds(config, around.home, around.warn, ollama_lock))
    with ExitStack() as stack:
        stack.callback(close_engines, engines, around.warn)
        facts, refused = _ask_facts(engines, config, around)
        keeper = around.open_keeper()
        stack.callback(keeper.close)
        around.tell(f"MLflow: {keeper.how}")
        locks = [ollama_lock] if "ollama" in engines else []
        locks += [
            ResourceLock(around.home, f"{model} for {config.experiment} at {keeper.identity}", purpose)
            for model in sorted(facts)
        ]
        if _take(locks, stack, config, around):
            facts, refused = _ask_facts(engines, config, around)  # a model may have changed in the queue
        experiment = patiently(
            lambda: keeper.store.ensure_experiment(config.experiment), "MLflow", config.server_wait_s, around.observer
        )
        folder = journal_folder(around.home, keeper.identity, config.experiment)
        drain_left_behind(keeper.store, experiment, folder, around.observer, config.server_wait_s)
        setting = Setting(config, suite, uuid.uuid4().hex)
        recorded = _read_recorded(keeper.store, experiment, setting, around)
        plan = make_plan(suite, config, facts, refused, recorded, around.free_memory)
        for alias, model in plan.aliases.items():
            around.warn(f"{alias} is the same model as {model} (same digest): its cells are counted once.")
        return Collector(plan, setting, engines, keeper.store, experiment, Journal(folder), around.observer).run()


def dry_run(
    config: CollectConfig, home: Path, recorded: Callable[[Suite], Recorded], free: Callable[[str], Memory]
) -> Plan:
    """The plan of a collect, without its locks, its journal or a single call to a model."""
    suite = suite_for(config)
    engines = build_engines(config.model_names, EngineNeeds(config, home, lambda _text: None))
    try:
        facts, refused = ask_facts(engines, config)
    finally:
        close_engines(engines, lambda _text: None)
    return make_plan(suite, config, facts, refused, recorded(suite), free)


def drain_left_behind(store: RunStore, experiment: Experiment, folder: Path, observer: Observer, wait_s: float) -> None:
    """Record what dead processes left in their journals, before anything is planned: finished is finished."""
    for journal in left_behind(folder):
        try:
            if left := journal.outstanding():
                observer(Message(f"{left} finished result{'s' * (left > 1)} of an earlier run: recording"))
                with Writers(store, experiment.experiment_id, journal, observer, draining=True) as writers:
                    writers.finish(wait_s)
        finally:
            journal.close()


def patiently(action: Callable[[], _Answer], server: str, wait_s: float, observer: Observer) -> _Answer:
    """Do it; while the server is away, wait for it visibly for at most `wait_s`."""
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
                observer(Waiting(server, wait_s))
                told = True
            time.sleep(_RETRY_S)
        else:
            if told:
                observer(Resumed(server))
            return answer


def _ask_facts(
    engines: Mapping[str, Engine], config: CollectConfig, around: Surroundings
) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    facts, refused = patiently(lambda: ask_facts(engines, config), "Ollama", config.server_wait_s, around.observer)
    if refused and not (config.skip_refused and facts):
        hint = " Pass --skip-refused to run the others." if facts else ""
        raise ModelRefused(" ".join(refused.values()) + hint)
    return facts, refused


def _take(locks: Sequence[ResourceLock], stack: ExitStack, config: CollectConfig, around: Surroundings) -> bool:
    """Take all locks, always in the same order; whether one had to be waited for.

    One collect per Ollama server keeps its memory to one model; one per model and experiment keeps two collects on
    two servers from generating the same cells at the same time.
    """
    waited = False
    for lock in locks:
        waited |= lock.acquire(wait=config.wait, report=around.tell)
        stack.callback(lock.release)
    return waited


def _read_recorded(store: RunStore, experiment: Experiment, setting: Setting, around: Surroundings) -> Recorded:
    if experiment.created:
        return Recorded()
    return patiently(
        lambda: read_recorded(store, experiment.experiment_id, setting.conditions),
        "MLflow",
        setting.config.server_wait_s,
        around.observer,
    )
