"""Reads, counts and filters runs. Finds runs that do not count: duplicate runs of a cell, and stale runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.errors import InvalidOption
from tipbench.plan.collect_config import EXPERIMENT_PREFIX
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import iso

# Params and metrics that `run_values` returns under their MLflow names.
_PARAMS = ("model", "scenario", "persona", "repeat", "host", "model_digest")
_METRICS = ("composite", "provisional_composite", "format_ok", "overlong", "diversity", "latency_s", "tokens_per_s")
FILTERS = {"model": "params.model", "prompt": "params.prompt_version", "scenario": "params.scenario", "state": "state"}


@dataclass(frozen=True)
class CellCounts:
    """Number of cells by state."""

    cells: int
    pending: int
    judged: int
    failed: int


def list_experiments(store: RunStore) -> list[Experiment]:
    """Return tipbench's experiments, sorted by name."""
    selected = (experiment for experiment in store.experiments() if experiment.name.startswith(EXPERIMENT_PREFIX))
    return sorted(selected, key=lambda experiment: experiment.name)


def count_states(runs: Iterable[StoredRun]) -> CellCounts:
    """Count these cells by state."""
    states = Counter(run.state for run in runs)
    return CellCounts(cells=states.total(), pending=states["pending"], judged=states["judged"], failed=states["failed"])


def current_runs(store: RunStore, experiment_id: str, where: Mapping[str, str]) -> list[StoredRun]:
    """Return the cells of an experiment, newest first, without duplicates and superseded runs. Stale runs are kept."""
    # Duplicates may have different states, so the filter by state is applied after they are removed.
    state = where.get("state")
    where_any_state = {key: value for key, value in where.items() if key != "state"}
    runs = list(search_cells(store, experiment_id, where_any_state))
    duplicates = duplicate_runs(runs)
    return [run for run in runs if run.run_id not in duplicates and (state is None or run.state == state)]


def search_cells(store: RunStore, experiment_id: str, where: Mapping[str, str]) -> Iterator[StoredRun]:
    """Yield the cells of an experiment, newest first, without runs tagged as superseded, such as retried failures.

    Pages are requested as needed.
    """
    for run in store.search(experiment_id, where={"kind": str(RunKind.CELL), **where}):
        if run.tags.get("superseded") != "true":
            yield run


def duplicate_runs(runs: Iterable[StoredRun]) -> set[str]:
    """Return the ids of duplicates: finished runs that are ignored because another finished run has the same cell_key.

    Collects with two home folders may generate the same cell at the same time. The run that a judge has scored is kept,
    otherwise the oldest, which is more likely to be on a sheet. Keeping the better answer would bias the results.
    """

    def sort_key(run: StoredRun) -> tuple[bool, int, str]:
        scored_by_judge = run.state == RunState.JUDGED and run.tags.get("floored") != "true"
        return not scored_by_judge, run.start_ms, run.run_id

    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        key = run.tags.get("cell_key")
        if key and run.status == "FINISHED" and run.tags.get("superseded") != "true":
            groups.setdefault(key, []).append(run)
    return {run.run_id for group in groups.values() for run in sorted(group, key=sort_key)[1:]}


def run_json(run: StoredRun) -> dict[str, Any]:
    """Return a run as JSON for scripts, without texts."""
    return {
        "run_id": run.run_id,
        "state": run.state,
        "params": dict(run.params),
        "metrics": dict(run.metrics),
        "tags": dict(run.tags),
    }


def run_values(run: StoredRun) -> dict[str, Any]:
    """Return the values of a run by column, for lists and CSV files; unknown values are None."""
    return {
        "run_id": run.run_id,
        "prompt": run.params.get("prompt_version"),
        "state": run.state,
        "tips": run.metrics.get("n_candidates"),
        "started": iso(run.start_ms / 1000),
        **{name: run.params.get(name) for name in _PARAMS},
        **{name: run.metrics.get(name) for name in _METRICS},
        **{name: run.tags.get(name) for name in ("kind", "failure", "superseded", "conditions")},
    }


def parse_filter(text: str) -> tuple[str, str]:
    """Parse one `key=value` of --where. The key is a name of `FILTERS`, params.NAME for a param, or a tag."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise InvalidOption("where", f"takes key=value (got {text!r}), for example model=qwen2.5:0.5b.")
    return FILTERS.get(key.strip(), key.strip()), value


_GetField = Callable[[StoredRun], str | None]

# The functions that return the name and the content hash of a run's model, prompt and scenario.
_NAMES_AND_HASHES: tuple[tuple[_GetField, _GetField], ...] = (
    (lambda run: run.params.get("model"), lambda run: run.params.get("model_digest")),
    (lambda run: run.params.get("prompt_version"), lambda run: run.tags.get("prompt_hash")),
    (lambda run: run.params.get("scenario"), lambda run: run.tags.get("scenario_hash")),
)


def newest_answered_run(runs: Iterable[StoredRun]) -> StoredRun:
    """Return the newest run with an answer; if all failed, the newest one."""
    return max(runs, key=lambda run: (run.state != RunState.FAILED, run.start_ms, run.run_id))


def stale_runs(runs: Sequence[StoredRun]) -> set[str]:
    """Return the ids of runs whose model digest, prompt text or scenario content was replaced under the same name.

    The newest answer with the same conditions has the current content. A run that failed after that answer is not
    stale, and does not make the answer stale.
    """
    stale: set[str] = set()
    for get_name, get_hash in _NAMES_AND_HASHES:
        groups: dict[tuple[str | None, str | None], list[StoredRun]] = {}
        for run in runs:
            groups.setdefault((run.tags.get("conditions"), get_name(run)), []).append(run)
        for group in groups.values():
            if len({get_hash(run) for run in group}) == 1:
                continue
            newest = newest_answered_run(group)
            for run in group:
                failed_later = run.state == RunState.FAILED and run.start_ms > newest.start_ms
                if get_hash(run) != get_hash(newest) and not failed_later:
                    stale.add(run.run_id)
    return stale
