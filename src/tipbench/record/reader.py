"""Reads recorded runs: counts, filters and JSON; finds twins and stale runs, which do not count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.errors import InvalidOption
from tipbench.plan.config import EXPERIMENT_PREFIX
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import iso

_PARAMS = ("model", "scenario", "persona", "repeat", "host", "model_digest")
_SCORES = ("composite", "provisional_composite", "format_ok", "overlong", "diversity")
FILTERS = {"model": "params.model", "prompt": "params.prompt_version", "scenario": "params.scenario", "state": "state"}


@dataclass(frozen=True)
class CellCounts:
    """Number of cells by state."""

    cells: int
    pending: int
    judged: int
    failed: int


def experiments(store: RunStore) -> list[Experiment]:
    """Return tipbench's experiments, sorted by name."""
    found = (each for each in store.experiments() if each.name.startswith(EXPERIMENT_PREFIX))
    return sorted(found, key=lambda each: each.name)


def count_states(runs: Iterable[StoredRun]) -> CellCounts:
    """Count these cells by state."""
    states = [run.state for run in runs]
    return CellCounts(len(states), *(states.count(str(state)) for state in RunState))


def cells(store: RunStore, experiment_id: str, where: Mapping[str, str]) -> list[StoredRun]:
    """Return the cells of an experiment, newest first, without superseded ones and twins."""
    found = list(search_cells(store, experiment_id, {key: value for key, value in where.items() if key != "state"}))
    twins = twin_runs(found)
    return [run for run in found if run.run_id not in twins and where.get("state", run.state) == run.state]


def search_cells(store: RunStore, experiment_id: str, where: Mapping[str, str]) -> Iterator[StoredRun]:
    """Yield the cells of an experiment page by page, newest first, without those tagged as superseded."""
    for run in store.search(experiment_id, where={"kind": str(RunKind.CELL), **where}):
        if run.tags.get("superseded") != "true":
            yield run


def twin_runs(runs: Iterable[StoredRun]) -> set[str]:
    """Return ids of finished runs that do not count because another finished run has the same cell_key.

    Collects with two home folders may generate the same cell at the same time. The run that a judge has scored counts,
    else the oldest, which is more likely to be on a sheet. Choosing the better answer would bias the results.
    """

    def order(run: StoredRun) -> tuple[bool, int, str]:
        scored = run.state == RunState.JUDGED and run.tags.get("floored") != "true"
        return not scored, run.start_ms, run.run_id

    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        key = run.tags.get("cell_key")
        if key and run.status == "FINISHED" and run.tags.get("superseded") != "true":
            groups.setdefault(key, []).append(run)
    return {run.run_id for group in groups.values() for run in sorted(group, key=order)[1:]}


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
    """Return the columns of lists and CSV files of runs; unknown values are None."""
    return {
        "run_id": run.run_id,
        "prompt": run.params.get("prompt_version"),
        "state": run.state,
        "tips": run.metrics.get("n_candidates"),
        "started": iso(run.start_ms / 1000),
        **{name: run.params.get(name) for name in _PARAMS},
        **{name: run.metrics.get(name) for name in (*_SCORES, "latency_s", "tokens_per_s")},
        **{name: run.tags.get(name) for name in ("kind", "failure", "superseded", "conditions")},
    }


def parse_filter(text: str) -> tuple[str, str]:
    """Parse one `key=value` of --where: a name of `FILTERS`, a param as params.NAME, or a tag."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise InvalidOption("where", f"takes key=value (got {text!r}), for example model=qwen2.5:0.5b.")
    return FILTERS.get(key.strip(), key.strip()), value


Reader = Callable[[StoredRun], str | None]

# The name of a model, prompt or scenario, and the hash of its content.
_NAMES_AND_HASHES: tuple[tuple[Reader, Reader], ...] = (
    (lambda run: run.params.get("model"), lambda run: run.params.get("model_digest")),
    (lambda run: run.params.get("prompt_version"), lambda run: run.tags.get("prompt_hash")),
    (lambda run: run.params.get("scenario"), lambda run: run.tags.get("scenario_hash")),
)


def newest_run(runs: Iterable[StoredRun]) -> StoredRun:
    """Return the newest answer, or the newest run if there is no answer."""
    return max(runs, key=lambda run: (not _failed(run), run.start_ms, run.run_id))


def stale_runs(runs: Sequence[StoredRun]) -> set[str]:
    """Return ids of runs of an earlier model digest, prompt text or scenario content than the newest of that name.

    Only runs with the same conditions are compared. A failure after the newest answer does not make that answer stale,
    and is not stale itself.
    """
    stale: set[str] = set()
    for name, content_hash in _NAMES_AND_HASHES:
        groups: dict[tuple[str | None, str | None], list[StoredRun]] = {}
        for run in runs:
            groups.setdefault((run.tags.get("conditions"), name(run)), []).append(run)
        for group in groups.values():
            if len({content_hash(run) for run in group}) > 1:
                newest = newest_run(group)
                replaced = (run for run in group if content_hash(run) != content_hash(newest))
                stale.update(run.run_id for run in replaced if not (_failed(run) and run.start_ms > newest.start_ms))
    return stale


def _failed(run: StoredRun) -> bool:
    return run.state == RunState.FAILED
