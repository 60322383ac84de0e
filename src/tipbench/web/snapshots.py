"""An experiment's runs as they stood at one revision: read from MLflow once, then searched in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from tipbench.judge.material import CANDIDATES, RAW
from tipbench.judge.scores import SCORES
from tipbench.record.mlflow_wire import REVISION_TAG, matches
from tipbench.record.run import NewRun, RunChange, RunKind, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.web.cache import Cache

KEPT = 4  # snapshots; 2400 cells take about 40 MB
# Texts that are kept with a snapshot: boards, answers and the state of judging are made of these. They come with every
# reading of the runs anyway, so keeping them saves a second one; prompts and rubrics are read when asked for.
_TEXTS: Mapping[str, tuple[str, ...]] = {str(RunKind.CELL): (SCORES, CANDIDATES, RAW)}

Kept = tuple[tuple[StoredRun, Mapping[str, str]], ...]


def revision(experiment: Experiment) -> str | None:
    """What changes whenever somebody has written to the experiment."""
    return experiment.tags.get(REVISION_TAG)


class SnapshotStore:
    """The RunStore port with the runs of one experiment in memory; everything else passes through."""

    def __init__(self, store: RunStore, experiment: Experiment, cache: Cache) -> None:
        self._store = store
        self._experiment = experiment
        self._cache = cache

    def snapshot(self, kind: str) -> Kept:
        """All runs of a kind, newest first."""
        key, version = ("snapshot", self._experiment.experiment_id, kind), revision(self._experiment)
        return self._cache.get(key, version, lambda: self._load(kind))

    def _load(self, kind: str) -> Kept:
        found = self._store.read(self._experiment.experiment_id, where={"kind": kind}, texts=_TEXTS.get(kind, ()))
        return tuple(sorted(found, key=lambda each: (-each[0].start_ms, each[0].run_id)))

    def search(self, experiment_id: str, *, where: Mapping[str, str], limit: int | None = None) -> Iterator[StoredRun]:
        """From memory, where the experiment and the kind are known."""
        return (run for run, _ in self.read(experiment_id, where=where, texts=(), limit=limit))

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """From memory, where the experiment, the kind and the texts are known."""
        kind = where.get("kind", "")
        ours = experiment_id == self._experiment.experiment_id and kind in set(RunKind)
        if not ours or not set(texts) <= set(_TEXTS.get(kind, ())):
            return self._store.read(experiment_id, where=where, texts=texts, limit=limit)
        found = (
            (run, {name: kept[name] for name in texts if name in kept})
            for run, kept in self.snapshot(kind)
            if matches(run, where)
        )
        return islice(found, limit)

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        """One run with all its texts, as it is now."""
        return self._store.get(run_id)

    def experiment(self, name: str) -> Experiment | None:
        """As the store has it."""
        return self._store.experiment(name)

    def experiments(self) -> list[Experiment]:
        """As the store has them."""
        return self._store.experiments()

    def ensure_experiment(self, name: str) -> Experiment:
        """As the store does."""
        return self._store.ensure_experiment(name)

    def record(self, experiment_id: str, run: NewRun, *, maybe_there: bool = False) -> str:
        """As the store does."""
        return self._store.record(experiment_id, run, maybe_there=maybe_there)

    def update(self, run_id: str, change: RunChange) -> None:
        """As the store does."""
        self._store.update(run_id, change)

    def touch(self, experiment_id: str) -> None:
        """As the store does."""
        self._store.touch(experiment_id)
