"""The plan of a collect: its cells, which of them are recorded, refused models, memory and time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tipbench.generate.engine import FreeMemory, ModelFacts, engine_type_of, memory_needed, memory_warning
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.design import Design, make_design
from tipbench.plan.grid import (
    ModelIdentity,
    PlannedCell,
    cells_by_model,
    choose_prompts,
    choose_scenarios,
    conditions_of,
    plan_grid,
    scenarios_warning,
)
from tipbench.plan.prompts import WITHOUT_PROMPT
from tipbench.plan.suite import Suite, load_suite
from tipbench.record.reader import current_runs, duplicate_runs, search_cells, stale_runs
from tipbench.record.run import StoredRun
from tipbench.record.store import RunStore

_ROUGH_BYTES_PER_S = 15e9  # memory bandwidth of a small machine; each token reads all weights once
_ROUGH_TOKENS_PER_TIP = 70
_MIN_S_PER_TOKEN = 0.005  # of any model, however small


@dataclass(frozen=True)
class RecordedCells:
    """What is recorded with the conditions of a grid, including stale runs."""

    finished: Mapping[str, StoredRun] = field(default_factory=dict)  # by cell key
    failed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by cell key: run ids, to be superseded
    journalled: frozenset[str] = frozenset()  # keys of finished cells in a local journal, not yet in MLflow
    duplicates: frozenset[str] = frozenset()  # ids of duplicate finished runs, to be superseded


@dataclass(frozen=True)
class ModelPlan:
    """One model's part of the plan; values are None if unknown."""

    model: str
    cells: int
    recorded: int  # in MLflow or in the journal
    params_b: float | None
    memory_bytes: int | None
    seconds: float | None  # for the cells still to generate
    measured: bool  # `seconds` is estimated from recorded cells, not from the file size
    warning: str | None = None


@dataclass(frozen=True)
class Plan:
    """The plan that `tipbench plan` shows and `tipbench collect` executes."""

    suite: Suite
    config: CollectConfig
    facts: Mapping[str, ModelFacts]
    refused: Mapping[str, str]  # reason by model
    cells: tuple[PlannedCell, ...]
    recorded: RecordedCells
    models: tuple[ModelPlan, ...]

    @property
    def missing(self) -> list[PlannedCell]:
        done = self.recorded.finished.keys() | self.recorded.journalled
        return [cell for cell in self.cells if cell.key not in done]

    @property
    def scenarios(self) -> tuple[str, ...]:
        """The scenarios of the plan, in the suite's order."""
        return tuple(scenario.id for scenario in choose_scenarios(self.suite, self.config.n_scenarios))

    @property
    def design(self) -> Design:
        """The design that the experiment gets if this is its first collect."""
        return make_design(self.scenarios, self.config.looks)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of a model in the plan, mapped to its first one."""
        first_names: dict[str, str] = {}  # by digest
        aliases = {}
        for facts in self.facts.values():
            first_name = first_names.setdefault(facts.digest, facts.model)
            if first_name != facts.model:
                aliases[facts.model] = first_name
        return aliases

    @property
    def warnings(self) -> list[str]:
        warnings = [scenarios_warning(self.suite, self.config.n_scenarios), *(model.warning for model in self.models)]
        return [warning for warning in warnings if warning is not None]

    @property
    def n_stale(self) -> int:
        """Number of runs of planned cells that are outdated: the weights, the prompt or the scenario has changed."""
        keys = {planned.key for planned in self.cells}
        planned_cells = [planned.cell for planned in self.cells]
        names = {(cell.model, cell.prompt, cell.scenario, str(cell.repeat)) for cell in planned_cells}
        unplanned_runs = [run for key, run in self.recorded.finished.items() if key not in keys]
        params = ("model", "prompt_version", "scenario", "repeat")
        return sum(tuple(run.params.get(param, "") for param in params) in names for run in unplanned_runs)

    @property
    def seconds(self) -> float | None:
        """Estimated time for the missing cells; None if it is unknown for any model."""
        estimates = [model.seconds for model in self.models if model.cells > model.recorded]
        known = [seconds for seconds in estimates if seconds is not None]
        return sum(known, 0.0) if len(known) == len(estimates) else None


def read_recorded(store: RunStore, experiment_id: str, conditions: str) -> RecordedCells:
    """Return the finished runs of these conditions, and the failed runs and duplicates to be superseded."""
    finished: dict[str, StoredRun] = {}
    failed: dict[str, list[str]] = {}
    runs = list(search_cells(store, experiment_id, {"conditions": conditions}))
    duplicates = frozenset(duplicate_runs(runs))
    for run in runs:
        key = run.tags.get("cell_key", "")
        if run.status == "FINISHED" and run.run_id not in duplicates:
            finished.setdefault(key, run)
        elif run.status == "FAILED":
            failed.setdefault(key, []).append(run.run_id)
    return RecordedCells(finished, {key: tuple(ids) for key, ids in failed.items()}, duplicates=duplicates)


def make_plan(
    suite: Suite,
    config: CollectConfig,
    facts: Mapping[str, ModelFacts],
    refused: Mapping[str, str],
    recorded: RecordedCells,
    free_memory: Callable[[str], FreeMemory],
) -> Plan:
    """Build the plan. `free_memory` returns the free memory for a model; unknown if it runs on another machine."""
    identities = [
        ModelIdentity(each.model, each.digest, each.can_think, engine_type_of(each.model).has_prompt)
        for each in facts.values()
    ]
    grid = plan_grid(suite, config, identities)
    models = []
    for model, model_cells in cells_by_model(grid):
        model_facts = facts[model]
        keys = [cell.key for cell in model_cells]
        n_recorded = sum(key in recorded.finished or key in recorded.journalled for key in keys)
        memory_bytes = memory_needed(model_facts, num_ctx=config.num_ctx, concurrency=config.workers)
        runs = [recorded.finished[key] for key in keys if key in recorded.finished]
        latencies = [run.metrics["latency_s"] for run in runs if "latency_s" in run.metrics]
        s_per_cell = None
        if latencies:
            s_per_cell = statistics.fmean(latencies)
        elif not engine_type_of(model).holds_weights:
            s_per_cell = 0.0  # a template
        elif model_facts.file_bytes:
            tokens = min(config.num_predict, config.n_tips * _ROUGH_TOKENS_PER_TIP)
            s_per_cell = tokens * max(model_facts.file_bytes / _ROUGH_BYTES_PER_S, _MIN_S_PER_TOKEN)
        models.append(
            ModelPlan(
                model=model,
                cells=len(keys),
                recorded=n_recorded,
                params_b=model_facts.params_b,
                memory_bytes=memory_bytes,
                seconds=None if s_per_cell is None else s_per_cell * (len(keys) - n_recorded) / config.workers,
                measured=bool(latencies),
                warning=memory_warning(model_facts, memory_bytes, free_memory(model)),
            )
        )
    return Plan(suite, config, facts, refused, tuple(grid), recorded, tuple(models))


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values, for `plan --json` and the API."""
    return {
        "experiment": plan.config.experiment,
        "suite": plan.suite.name,
        "suite_fingerprint": plan.suite.fingerprint,
        "rubric": plan.suite.rubric.tag,
        "prompts": list(plan.config.prompt_versions),
        # Unlike `plan.scenarios`, empty if all models are refused.
        "scenarios": list(dict.fromkeys(planned.cell.scenario for planned in plan.cells)),
        "looks": list(plan.design.looks),
        "cells": len(plan.cells),
        "recorded": len(plan.cells) - len(plan.missing),
        "to_generate": len(plan.missing),
        "journalled": sum(cell.key in plan.recorded.journalled for cell in plan.cells),
        "stale": plan.n_stale,
        "failed_before": sum(cell.key in plan.recorded.failed for cell in plan.missing),
        "seconds": plan.seconds,
        "models": [vars(model) for model in plan.models],
        "refused": [{"model": model, "reason": reason} for model, reason in plan.refused.items()],
    }


def configured_cells(store: RunStore, experiment_id: str, config: CollectConfig) -> list[StoredRun]:
    """Return the recorded cells of this configuration, newest first, without superseded and stale ones."""
    suite = load_suite(config.suite)
    prompts = choose_prompts(suite, config.prompt_versions)
    scenarios = {(each.id, each.content_hash) for each in choose_scenarios(suite, config.n_scenarios)}
    repeats = {str(number) for number in range(1, config.repeats + 1)}
    pairs = {
        (model, prompt.version, prompt.hash)
        for model in config.model_names
        for prompt in (prompts if engine_type_of(model).has_prompt else [WITHOUT_PROMPT])
    }
    configured = [
        run
        for run in current_runs(store, experiment_id, where={"conditions": conditions_of(config, suite)})
        if (run.params.get("model"), run.params.get("prompt_version"), run.tags.get("prompt_hash")) in pairs
        and (run.params.get("scenario"), run.tags.get("scenario_hash")) in scenarios
        and run.params.get("repeat") in repeats
    ]
    stale = stale_runs(configured)
    return [run for run in configured if run.run_id not in stale]
