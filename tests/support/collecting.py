"""Collects in the test's process, on a scripted Ollama and a store in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tipbench.generate.engine import FreeMemory
from tipbench.plan.collect_config import CollectConfig, make_config
from tipbench.record.collect import CollectEnvironment, run_collect
from tipbench.record.events import Event, Message
from tipbench.record.mlflow import MlflowConnection
from tipbench.record.run import StoredRun
from tipbench.record.store import MemoryStore
from tipbench.record.summary import Summary

SMALL = {"n_tips": 2, "num_predict": 64, "n_scenarios": 4, "server_wait_s": 5, "timeout_s": 5}


@dataclass
class Collecting:
    """The home, store and server of several collects, and their events."""

    home: Path
    ollama_url: str
    store: MemoryStore = field(default_factory=MemoryStore)
    events: list[Event] = field(default_factory=list)
    free_memory: Callable[[str], FreeMemory] = lambda _model: FreeMemory()

    def config(self, **changes: object) -> CollectConfig:
        return make_config({**SMALL, "ollama_url": self.ollama_url, "models": "alpha:135m,beta:135m", **changes})

    def run(self, **changes: object) -> Summary:
        environment = CollectEnvironment(
            home=self.home,
            open_mlflow=lambda: MlflowConnection(self.store, "memory", "memory"),
            free_memory=self.free_memory,
            observer=self.events.append,
        )
        return run_collect(self.config(**changes), environment)

    def runs(self, kind: str = "cell", experiment: str = "tip-bench-auto") -> list[StoredRun]:
        found = self.store.experiment(experiment)
        return [] if found is None else list(self.store.search(found.experiment_id, where={"kind": kind}))

    def finished(self) -> list[StoredRun]:
        return [run for run in self.runs() if run.status == "FINISHED"]

    def messages(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Message))
