"""Plans a collect: cells to generate, detectable differences, and the time that judging takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tipbench.compare.statistics import smallest_detectable
from tipbench.errors import LocalMlflowError, MlflowUnavailable, NotEnoughData
from tipbench.generate.engine import (
    EngineDependencies,
    build_engines,
    close_engines,
    engine_type_of,
    free_memory,
    model_facts,
)
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.design import MIN_SCENARIOS, make_design
from tipbench.plan.grid import conditions_of, suite_for
from tipbench.record.journal import journal_folder, journalled_keys
from tipbench.record.mlflow import MlflowConnection
from tipbench.record.plan import Plan, RecordedCells, make_plan, read_recorded
from tipbench.record.run import RunState
from tipbench.text import duration, plural

# Standard deviation, over scenarios, of the difference between the composites of two pairs; measured with small models.
PAIRED_SD = 2.0
SECONDS_PER_TIP = 10.0  # to read a tip and score it on three scales


def plan_collect(
    config: CollectConfig, home: Path, open_mlflow: Callable[[], AbstractContextManager[MlflowConnection]]
) -> tuple[Plan, list[str]]:
    """Return the plan of a collect and its warnings, without generating or writing anything.

    If MLflow is unavailable, no cell counts as recorded, and a warning is added.
    """
    suite = suite_for(config)
    engines = build_engines(config.model_names, EngineDependencies(config, home, report=lambda _text: None))
    try:
        facts, refused = model_facts(engines, config)
    finally:
        close_engines(engines, report=lambda _text: None)
    recorded = RecordedCells()
    warnings: list[str] = []
    try:
        with open_mlflow() as mlflow:
            journalled = frozenset(journalled_keys(journal_folder(home, mlflow.identity, config.experiment)))
            experiment = mlflow.store.experiment(config.experiment)
            if experiment is not None:
                recorded = read_recorded(mlflow.store, experiment.experiment_id, conditions_of(config, suite))
            recorded = replace(recorded, journalled=journalled)
    except NotEnoughData:  # there is no MLflow server and no stored data
        pass
    except (LocalMlflowError, MlflowUnavailable) as exc:
        warnings.append(f"{exc} The plan counts nothing as recorded.")
    plan = make_plan(suite, config, facts, refused, recorded, lambda model: free_memory(model, config))
    return plan, warnings + plan.warnings


@dataclass(frozen=True)
class Outlook:
    """The differences that a plan can detect, and the time that judging it takes."""

    scenarios: int
    pairs: int  # without references
    detectable: float | None  # smallest composite difference found with 80 % power; None if it cannot be estimated
    answers: int  # answers to judge
    judging_s: float
    composite_range: tuple[float, float]  # of the rubric

    @property
    def text(self) -> str:
        """The outlook in one or two sentences."""
        scenarios = plural(self.scenarios, "scenario")
        if self.pairs < 2:
            detectable_text = "Fewer than two pairs of model and prompt cannot be ranked."
        elif self.detectable is None:
            detectable_text = f"{scenarios} cannot decide; at least {MIN_SCENARIOS} are needed."
        else:
            low, high = self.composite_range
            detectable_text = (
                f"{scenarios} find differences of about {self.detectable:.1f} in composite ({low:g} to {high:g})."
            )
        if not self.answers:
            return detectable_text
        return f"{detectable_text} Judging {plural(self.answers, 'answer')} takes about {duration(self.judging_s)}."

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form for `plan --json` and the API."""
        return {**vars(self), "text": self.text}


def plan_outlook(plan: Plan) -> Outlook:
    """Estimate the outlook of a plan with PAIRED_SD and SECONDS_PER_TIP."""
    cells = [planned.cell for planned in plan.cells]
    pairs = {(cell.model, cell.prompt) for cell in cells if not engine_type_of(cell.model).is_reference}
    design = make_design((cell.scenario for cell in cells), plan.config.looks)
    n_scenarios = len(design.scenarios)
    detectable: float | None = None
    if len(pairs) > 1:
        detectable = smallest_detectable(PAIRED_SD, n_scenarios, comparisons=len(pairs) - 1, level=design.level)
    recorded_runs = (plan.recorded.finished.get(planned.key) for planned in plan.cells)
    n_judged = sum(run is not None and run.state == RunState.JUDGED for run in recorded_runs)
    n_answers = len(cells) - n_judged
    return Outlook(
        scenarios=n_scenarios,
        pairs=len(pairs),
        detectable=detectable,
        answers=n_answers,
        judging_s=n_answers * plan.config.n_tips * SECONDS_PER_TIP,
        composite_range=plan.suite.rubric.composite_range,
    )
