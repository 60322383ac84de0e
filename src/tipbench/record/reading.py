"""Reading back what is recorded: counts, lists and one run with its texts, as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tipbench.errors import UsageError
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore

FILTERS = {
    "model": "params.model",
    "prompt": "params.prompt_version",
    "scenario": "params.scenario",
    "state": "state",
}


@dataclass(frozen=True)
class CellCounts:
    """How an experiment's cells stand; superseded runs are left out."""

    cells: int
    pending: int
    judged: int
    failed: int


def count_cells(store: RunStore, experiment_id: str) -> CellCounts:
    """Count an experiment's cells by state."""
    states = [run.state for run in cells(store, experiment_id, {})]
    return CellCounts(len(states), *(states.count(str(state)) for state in RunState))


def cells(store: RunStore, experiment_id: str, where: Mapping[str, str]) -> Iterator[StoredRun]:
    """The cells of an experiment, newest first, without those that a later try has replaced."""
    for run in store.search(experiment_id, where={"kind": str(RunKind.CELL), **where}):
        if run.tags.get("superseded") != "true":
            yield run


def run_json(run: StoredRun) -> dict[str, Any]:
    """A run as scripts read it: without texts."""
    return {
        "run_id": run.run_id,
        "state": run.state,
        "params": dict(run.params),
        "metrics": dict(run.metrics),
        "tags": dict(run.tags),
    }


def read_filter(text: str) -> tuple[str, str]:
    """One `key=value` of --where: a name of `FILTERS`, a param as params.NAME, or a tag."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UsageError(f"--where takes key=value (got {text!r}); for example --where model=qwen2.5:0.5b")
    return FILTERS.get(key.strip(), key.strip()), value
