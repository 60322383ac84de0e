"""One recorded and judged experiment for each state of a board."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from support.judging import SheetDriver, always, fill, items_of, record_cells
from tipbench.judge.export import ExportRequest
from tipbench.judge.rules import RulesJudge
from tipbench.judge.run import run_judge
from tipbench.plan.grid import PlannedCell
from tipbench.plan.suite import load_suite
from tipbench.record.run import NewRun, StoredRun
from tipbench.record.store import MemoryStore

PREFIX = "tip-bench-"
MODELS = ("small:0.5b", "large:3b")
SIZES = {"small:0.5b": 0.5, "large:3b": 3.2}
MIDDLE = 3

Level = Callable[[StoredRun, random.Random], int]


class SizedStore(MemoryStore):
    """Records each model with its own size, memory and speed; `record_cells` gives all the same."""

    def record(self, experiment_id: str, run: NewRun, *, may_exist: bool = False) -> str:
        billions = SIZES.get(run.params.get("model", ""))
        if billions is not None:
            tags = {**run.tags, "memory_bytes": str(int(billions * 0.7 * 2**30))}
            params = {**run.params, "model_params_b": str(billions)}
            metrics = {**run.metrics, "latency_s": billions}
            run = replace(run, params=params, tags=tags, metrics=metrics)
        return super().record(experiment_id, run, may_exist=may_exist)


def board_states() -> MemoryStore:
    """A store with an experiment for each state, named after the state."""
    store = SizedStore()
    _driver(store, "unjudged")
    _driver(store, "unusable", write=lambda _cell, _rng: "I would rather not.")
    rules = _driver(store, "rules")
    run_judge(store, rules.experiment, RulesJudge(), ExportRequest())
    first = _driver(store, "first-batch")
    run_judge(store, first.experiment, RulesJudge(), ExportRequest())
    _judge(first, _by_model(0), scenarios=2)
    held = _driver(store, "held")
    assert held.apply(fill(held.export("ben").stored, always(5))).status == "held"
    accepted = _driver(store, "accepted")
    filled = fill(accepted.export("ben").stored, always(5))
    accepted.apply(filled)
    accepted.apply(filled, accept="The judge is known to be generous.")
    _judge(_driver(store, "decided"), _by_model(2))
    _judge(_driver(store, "tied"), _slightly_better)
    _judge(_driver(store, "close"), _by_model(0))
    _judge(_driver(store, "reference-ahead", models=(*MODELS, "baseline:template")), _template_best)
    for name, models, suite in (("wide", 20, "tips-32"), ("large", 5, "tips-32")):
        many = tuple(f"model-{at:02}:1b" for at in range(models))
        _judge(_driver(store, name, models=many, suite=suite), _any_level)
    for experiment in store.experiments():
        store.mark_changed(experiment.experiment_id)
    return store


def _driver(
    store: MemoryStore,
    name: str,
    *,
    models: Sequence[str] = MODELS,
    suite: str = "tips",
    write: Callable[[PlannedCell, random.Random], str] | None = None,
) -> SheetDriver:
    options = {} if write is None else {"write": write}
    found = record_cells(store, models=models, experiment=PREFIX + name, suite=load_suite(suite), **options)  # type: ignore[arg-type]
    return SheetDriver(store, found)


def _judge(driver: SheetDriver, level: Level, *, scenarios: int | None = None) -> None:
    """Judge all cells, or those of the first scenarios, at these levels; controls at their references."""
    judging = driver.export("anna", everything=True).stored
    raw, cells = fill(judging), driver.cells()
    chosen = sorted({run.params["scenario"] for run in cells.values()})[:scenarios]
    for run_id, item in items_of(raw, judging).items():
        run = cells[run_id]
        rng = random.Random(" ".join(run.params[name] for name in ("model", "prompt_version", "scenario")))
        for tip in item["tips"]:
            value = level(run, rng) if run.params["scenario"] in chosen else None
            tip["scores"] = dict.fromkeys(tip["scores"], value and min(5, max(1, value)))
    assert driver.apply(raw).status == "applied"


def _by_model(lead: int) -> Level:
    """Levels at which the large model with prompt v1 leads, or none does for a lead of 0."""

    def level(run: StoredRun, rng: random.Random) -> int:
        if lead and run.params["model"] == "large:3b" and run.params["prompt_version"] == "v1":
            return MIDDLE + lead
        return MIDDLE + rng.choice((-1, 0, 0, 1))

    return level


def _slightly_better(run: StoredRun, rng: random.Random) -> int:
    if run.params["model"] != "large:3b":
        return MIDDLE - rng.choice((0, 1))
    return MIDDLE + rng.choice({"v1": (0, 1, 2), "v2-mentor": (0, 0, 1)}.get(run.params["prompt_version"], (-1, 0)))


def _template_best(run: StoredRun, rng: random.Random) -> int:
    return 5 if run.params["model"] == "baseline:template" else rng.choice((2, 3))


def _any_level(run: StoredRun, rng: random.Random) -> int:
    return MIDDLE + (int(run.params["model"][6:8]) % 3) - 1 + rng.choice((-1, 0, 1))
