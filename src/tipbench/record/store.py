"""The RunStore protocol: writes, searches and updates runs.

`tipbench.record.mlflow.MlflowStore` implements it, and `MemoryStore` for tests, with the same limits and rules.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from tipbench.errors import MlflowError, MlflowUnavailable
from tipbench.record import mlflow_wire as wire
from tipbench.record.run import NewRun, RunChange, StoredRun
from tipbench.record.texts import check_key, from_tags, is_text_tag, unescape, unneeded_tags


@dataclass(frozen=True)
class Experiment:
    """A named collection of runs."""

    experiment_id: str
    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None  # web page of its runs
    created: bool = False  # True: created by the call that returned it, so it is empty

    def run_url(self, run_id: str) -> str | None:
        """Return the URL of a run's web page; None if there is none."""
        return None if self.url is None else f"{self.url}/{run_id}"


class RunStore(Protocol):
    """Stores runs and their texts of any length: `search` returns no texts, `read` the requested ones, `get` all.

    Raises MlflowUnavailable if the store is unreachable, MlflowError if it rejects a request.
    """

    def experiment(self, name: str) -> Experiment | None:
        """Return the experiment of this name, or None."""
        ...

    def ensure_experiment(self, name: str) -> Experiment:
        """Return the experiment of this name, created if missing."""
        ...

    def experiments(self) -> list[Experiment]: ...

    def record(self, experiment_id: str, run: NewRun, *, may_exist: bool = False) -> str:
        """Write a complete run and return its id.

        With `may_exist`, the store is searched first. If it has a finished run with the same cell_key that is not
        superseded, or a finished or failed run with the same record_id, no run is written and that run's id is
        returned. A half-written run with the same record_id is completed.
        """
        ...

    def search(self, experiment_id: str, *, where: Mapping[str, str], limit: int | None = None) -> Iterator[StoredRun]:
        """Search runs by tags (plain keys) or params (`params.NAME`), newest first, without texts."""
        ...

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """Like `search`, with those of the requested texts that a run has. Each text is verified against its hash."""
        ...

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        """Return one run with all its texts, each verified against its hash."""
        ...

    def update(self, run_id: str, change: RunChange) -> None:
        """Update a recorded run. The tags are written last, and `state` last of all: a new state means that all is new.

        If the writer dies, each text is either the old or the new one, and complete, but the tags may still be the old
        ones. Raises MlflowError for an illegal transition of the run's `state`. A run should have one writer at a time:
        of two, the later texts and tags win.
        """
        ...

    def mark_changed(self, experiment_id: str) -> None:
        """Set a new `tipbench.revision`, which invalidates readers' caches."""
        ...

    def tag_experiment(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of the experiment, and mark it as changed."""
        ...


@dataclass
class _MemoryRun:
    experiment_id: str
    run: StoredRun
    text_tags: dict[str, str] = field(default_factory=dict)


class MemoryStore:
    """Stores runs for the lifetime of the process. Set `away` to simulate an unreachable server."""

    def __init__(self) -> None:
        self.away = False
        self._lock = threading.RLock()
        self._experiments: dict[str, Experiment] = {}
        self._runs: dict[str, _MemoryRun] = {}

    def experiment(self, name: str) -> Experiment | None:
        return next((experiment for experiment in self.experiments() if experiment.name == name), None)

    def ensure_experiment(self, name: str) -> Experiment:
        with self._lock_or_raise():
            experiment = self.experiment(name)
            if experiment is None:
                experiment = Experiment(str(len(self._experiments) + 1), name)
                self._experiments[experiment.experiment_id] = experiment
                return replace(experiment, created=True)
            return experiment

    def experiments(self) -> list[Experiment]:
        with self._lock_or_raise():
            return list(self._experiments.values())

    def record(self, experiment_id: str, run: NewRun, *, may_exist: bool = False) -> str:
        tags = wire.checked_tags(run)
        with self._lock_or_raise():
            where = wire.where_same_run(run)
            stored_runs = self.search(experiment_id, where=where, include_half_written=True) if may_exist else ()
            existing = wire.classify_existing(run, stored_runs)
            run_id = existing.written_id
            if run_id is None:
                run_id = existing.half_written_id or self.begin(experiment_id, run)
                memory_run = self._runs[run_id]
                memory_run.text_tags = {key: value for key, value in tags.items() if is_text_tag(key)}
                memory_run.run = replace(
                    memory_run.run,
                    status="FINISHED" if run.ok else "FAILED",
                    end_ms=run.end_ms,
                    params=dict(run.params),
                    metrics={key: float(number) for key, number in run.metrics.items()},
                )
            for old_id in run.supersedes:
                if old_id != run_id and old_id in self._runs:
                    old = self._runs[old_id]
                    old.run = replace(old.run, tags={**old.run.tags, wire.SUPERSEDED_TAG: "true"})
            for abandoned_id in existing.abandoned_ids:  # half-written runs that are not completed
                del self._runs[abandoned_id]
            return run_id

    def begin(self, experiment_id: str, run: NewRun) -> str:
        """Create a half-written run: the first step of `record`, and what an interrupted `record` leaves."""
        with self._lock_or_raise():
            if experiment_id not in self._experiments:
                raise MlflowError(f"There is no experiment {experiment_id}.", code="RESOURCE_DOES_NOT_EXIST")
            run_id = uuid.uuid4().hex
            # `checked_tags` escapes values; a StoredRun has the original ones.
            tags = {key: unescape(value) for key, value in wire.checked_tags(run).items() if not is_text_tag(key)}
            stored = StoredRun(run_id, "RUNNING", run.start_ms, end_ms=None, params={}, metrics={}, tags=tags)
            self._runs[run_id] = _MemoryRun(experiment_id, stored)
            return run_id

    def search(
        self,
        experiment_id: str,
        *,
        where: Mapping[str, str],
        limit: int | None = None,
        include_half_written: bool = False,
    ) -> Iterator[StoredRun]:
        matching = self._matching_runs(experiment_id, where, limit, include_half_written=include_half_written)
        return (run for run, _ in matching)

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        for key in texts:
            check_key(key)
        matching = self._matching_runs(experiment_id, where, limit)
        return ((run, from_tags(text_tags, texts)) for run, text_tags in matching)

    def _matching_runs(
        self, experiment_id: str, where: Mapping[str, str], limit: int | None, *, include_half_written: bool = False
    ) -> list[tuple[StoredRun, dict[str, str]]]:
        with self._lock_or_raise():
            matching = [
                memory_run
                for memory_run in self._runs.values()
                if memory_run.experiment_id == experiment_id
                and (include_half_written or memory_run.run.status in wire.WRITTEN_STATUSES)
                and wire.matches(memory_run.run, where)
            ]
            matching.sort(key=lambda memory_run: (-memory_run.run.start_ms, memory_run.run.run_id))
            return [(memory_run.run, memory_run.text_tags) for memory_run in matching[:limit]]

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        with self._lock_or_raise():
            memory_run = self._memory_run(run_id)
            return memory_run.run, from_tags(memory_run.text_tags)

    def update(self, run_id: str, change: RunChange) -> None:
        with self._lock_or_raise():
            memory_run = self._memory_run(run_id)
            run = memory_run.run
            batches = wire.change_batches(change, wire.CurrentRun(run, memory_run.text_tags))
            text_tags = wire.text_tags_after(memory_run.text_tags, batches)
            for key in change.texts:
                for tag in unneeded_tags(key, text_tags):
                    del text_tags[tag]
            memory_run.text_tags = text_tags
            metrics = {key: float(number) for key, number in change.metrics.items()}
            memory_run.run = replace(run, metrics={**run.metrics, **metrics}, tags={**run.tags, **change.tags})

    def mark_changed(self, experiment_id: str) -> None:
        self.tag_experiment(experiment_id, {})

    def tag_experiment(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        with self._lock_or_raise():
            experiment = self._experiments[experiment_id]
            tags = {**experiment.tags, **tags, wire.REVISION_TAG: uuid.uuid4().hex}
            self._experiments[experiment_id] = replace(experiment, tags=tags)

    def _memory_run(self, run_id: str) -> _MemoryRun:
        memory_run = self._runs.get(run_id)
        if memory_run is None:
            raise MlflowError(f"There is no run {run_id}.", code="RESOURCE_DOES_NOT_EXIST", status=404)
        return memory_run

    def _lock_or_raise(self) -> threading.RLock:
        """Return the lock; raises MlflowUnavailable while `away` is set."""
        if self.away:
            raise MlflowUnavailable("The store in memory is set to be unreachable.")
        return self._lock
