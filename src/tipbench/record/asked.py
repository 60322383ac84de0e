"""What an experiment holds of the cells that a configuration asks for, told from the records alone.

No engine is asked, so any box that reaches MLflow can say how far a run of another box is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tipbench.plan.config import CollectConfig
from tipbench.plan.grid import choose_prompts, choose_scenarios
from tipbench.plan.suite import load_suite
from tipbench.record.current import stale_runs
from tipbench.record.outcome import Setting
from tipbench.record.reading import CellCounts, cells
from tipbench.record.run import RunState, StoredRun
from tipbench.record.store import RunStore


def asked_cells(store: RunStore, experiment_id: str, config: CollectConfig) -> list[StoredRun]:
    """The recorded cells of this configuration, newest first, without superseded and stale ones."""
    suite = load_suite(config.suite)
    prompts = {(each.version, each.hash) for each in choose_prompts(suite, config.prompt_versions)}
    scenarios = {(each.id, each.content_hash) for each in choose_scenarios(suite, config.n_scenarios)}
    repeats = {str(number) for number in range(1, config.repeats + 1)}
    models = set(config.model_names)
    found = [
        run
        for run in cells(store, experiment_id, {"conditions": Setting(config, suite, "").conditions})
        if run.params.get("model") in models
        and (run.params.get("prompt_version"), run.tags.get("prompt_hash")) in prompts
        and (run.params.get("scenario"), run.tags.get("scenario_hash")) in scenarios
        and run.params.get("repeat") in repeats
    ]
    stale = stale_runs(found)
    return [run for run in found if run.run_id not in stale]


def asked_conditions(config: CollectConfig) -> str:
    """The conditions under which this configuration's cells are recorded."""
    return Setting(config, load_suite(config.suite), "").conditions


def counted(runs: Sequence[StoredRun]) -> CellCounts:
    """These runs by state."""
    states = [run.state for run in runs]
    return CellCounts(len(states), *(states.count(str(state)) for state in RunState))
