"""What the pages on runs ask beyond the lists: what can be chosen, what is old, what else there is of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tipbench.compare.spreadsheet import csv_text
from tipbench.record.current import stale_runs
from tipbench.record.mlflow_wire import CELL_TAG, RECORD_TAG, SUPERSEDED_TAG
from tipbench.record.run import RunKind, StoredRun
from tipbench.record.store import RunStore
from tipbench.times import iso
from tipbench.web.queries import Queries, RunsAsk, existing
from tipbench.web.snapshots import revision

CHOICES = ("model", "prompt_version", "scenario", "persona")  # params by which runs are chosen
MOST_CHOICES = 300
_WHOLE = 10**9
_SAME = ("model", "prompt_version", "scenario", "repeat")
_COLUMNS = (
    "run_id", "kind", "model", "prompt", "scenario", "persona", "repeat", "state", "tips", "composite",
    "provisional_composite", "format_ok", "overlong", "diversity", "latency_s", "tokens_per_s", "started", "host",
    "failure", "superseded", "conditions", "model_digest",
)  # fmt: skip


@dataclass(frozen=True)
class Neighbours:
    """A run's place in the list it was found in: ids of the runs beside it, and how far down it stands."""

    newer: str | None = None
    older: str | None = None
    place: int | None = None  # counted from 1; None when the list does not have it
    total: int = 0


@dataclass(frozen=True)
class Related:
    """What else there is of a cell. Each is newest first, without the run itself."""

    stale: bool = False  # a newer digest, prompt text or scenario of that name has replaced it
    tries: tuple[StoredRun, ...] = ()  # of the same cell_key: it failed, and was tried again
    builds: tuple[StoredRun, ...] = ()  # of the same cell under the same conditions, with other content
    collection: StoredRun | None = None  # the collect it came from


class RunBook:
    """The runs of one experiment, from the snapshot that the lists live on."""

    def __init__(self, queries: Queries, store: RunStore, name: str) -> None:
        self.experiment = existing(store, name)
        self._queries = queries
        self._view = queries.view(store, self.experiment)

    def choices(self, kind: str) -> dict[str, list[str]]:
        """The values that can be chosen, by param."""
        key = ("choices", self.experiment.experiment_id, kind)
        return self._queries.small.get(key, revision(self.experiment), lambda: _choices(self._runs(kind)))

    def stale(self) -> frozenset[str]:
        """Ids of the cells that a newer build of their model, prompt or scenario has replaced."""
        key = ("stale", self.experiment.experiment_id)
        return self._queries.small.get(key, revision(self.experiment), self._stale)

    def neighbours(self, ask: RunsAsk, run_id: str) -> Neighbours:
        """The runs beside this one in the list that is asked for."""
        found = [run.run_id for run in self._runs(ask.kind, dict(ask.where)) if ask.superseded or not _superseded(run)]
        if run_id not in found:
            return Neighbours(total=len(found))
        at = found.index(run_id)
        older = found[at + 1] if at + 1 < len(found) else None
        return Neighbours(found[at - 1] if at else None, older, at + 1, len(found))

    def related(self, run: Mapping[str, Any]) -> Related:
        """What else there is of a cell."""
        params, tags, run_id = run["params"], run["tags"], run["run_id"]
        others = [each for each in self._runs(str(RunKind.CELL)) if each.run_id != run_id]
        alike = [
            each
            for each in others
            if each.tags.get("conditions") == tags.get("conditions") and _same(each.params, params, _SAME)
        ]
        key = tags.get(CELL_TAG)
        return Related(
            stale=run_id in self.stale(),
            tries=tuple(each for each in others if key is not None and each.tags.get(CELL_TAG) == key),
            builds=tuple(each for each in alike if each.tags.get(CELL_TAG) != key),
            collection=self._collection(tags.get("collection")),
        )

    def _collection(self, record: str | None) -> StoredRun | None:
        where = {RECORD_TAG: record} if record else None
        return next(iter(self._runs(str(RunKind.COLLECTION), where)), None) if where else None

    def _stale(self) -> frozenset[str]:
        return frozenset(stale_runs([run for run in self._runs(str(RunKind.CELL)) if not _superseded(run)]))

    def _runs(self, kind: str, where: Mapping[str, str] | None = None) -> Iterable[StoredRun]:
        return self._view.search(self.experiment.experiment_id, where={"kind": kind, **(where or {})})


def runs_csv(queries: Queries, store: RunStore, name: str, ask: RunsAsk) -> str:
    """All runs that match as a table for a spreadsheet, newest first, numbers not rounded."""
    whole = RunsAsk(ask.where, ask.kind, limit=_WHOLE, superseded=ask.superseded)
    return csv_text(_COLUMNS, [_row(run) for run in queries.runs(store, name, whole)["items"]])


def _row(run: Mapping[str, Any]) -> list[object]:
    params, metrics, tags = run["params"], run["metrics"], run["tags"]
    values: dict[str, object] = {
        **{name: params.get(name) for name in ("model", "scenario", "persona", "repeat", "host", "model_digest")},
        **{name: tags.get(name) for name in ("kind", "failure", "superseded", "conditions")},
        **{name: metrics.get(name) for name in ("composite", "provisional_composite", "format_ok", "overlong")},
        **{name: metrics.get(name) for name in ("diversity", "latency_s", "tokens_per_s")},
        "run_id": run["run_id"],
        "prompt": params.get("prompt_version"),
        "state": run["state"],
        "tips": metrics.get("n_candidates"),
        "started": iso(run["start_ms"] / 1000),
    }
    return [values[column] for column in _COLUMNS]


def _choices(runs: Iterable[StoredRun]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {name: set() for name in CHOICES}
    for run in runs:
        for name, values in found.items():
            if name in run.params:
                values.add(run.params[name])
    return {name: sorted(values)[:MOST_CHOICES] for name, values in found.items()}


def _same(one: Mapping[str, str], other: Mapping[str, str], names: Iterable[str]) -> bool:
    return all(one.get(name) == other.get(name) for name in names)


def _superseded(run: StoredRun) -> bool:
    return run.tags.get(SUPERSEDED_TAG) == "true"
