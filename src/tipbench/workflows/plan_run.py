"""The plan of a collect: cells still to generate, the differences it can detect, and the time to judge it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tipbench.compare.statistics import smallest_detectable
from tipbench.errors import LocalServerError, MlflowUnavailable, NotEnoughData
from tipbench.generate.engine import engine_of, free_memory
from tipbench.plan.config import CollectConfig
from tipbench.plan.design import MIN_SCENARIOS, make_design
from tipbench.plan.grid import conditions_of
from tipbench.plan.suite import Suite
from tipbench.record.collect import TrackingStore, dry_run
from tipbench.record.journal import journal_folder, journalled_keys
from tipbench.record.plan_check import Plan, Recorded, read_recorded
from tipbench.record.run import RunState
from tipbench.text import duration, plural

PAIRED_SD = 2.0  # standard deviation of composite differences over scenarios, as measured with small models
SECONDS_PER_TIP = 10.0  # to read a tip and score it on three scales


def plan_run(
    config: CollectConfig, home: Path, opened: Callable[[], AbstractContextManager[TrackingStore]]
) -> tuple[Plan, list[str]]:
    """Return the plan of a collect and its warnings; nothing is generated or written.

    `opened` opens MLflow for reading. If MLflow is unavailable, the plan counts nothing as recorded and warns.
    """
    warnings: list[str] = []

    def recorded(suite: Suite) -> Recorded:
        try:
            with opened() as tracking:
                folder = journal_folder(home, tracking.identity, config.experiment)
                journalled = frozenset(journalled_keys(folder))
                experiment = tracking.store.experiment(config.experiment)
                if experiment is None:
                    return Recorded(journalled=journalled)
                conditions = conditions_of(config, suite)
                return replace(
                    read_recorded(tracking.store, experiment.experiment_id, conditions), journalled=journalled
                )
        except NotEnoughData:
            return Recorded()
        except (LocalServerError, MlflowUnavailable) as exc:
            warnings.append(f"{exc} The plan counts nothing as recorded.")
            return Recorded()

    plan = dry_run(config, home, recorded, lambda model: free_memory(model, config))
    return plan, warnings + plan.warnings


@dataclass(frozen=True)
class Outlook:
    """The smallest difference that the plan's scenarios detect with 80 % power, and the time that judging takes."""

    scenarios: int
    pairs: int  # without references
    detectable: float | None  # in points of composite; None if these scenarios cannot decide
    answers: int  # not judged yet
    judging_s: float
    composite_range: tuple[float, float]  # of the rubric

    @property
    def text(self) -> str:
        """The outlook in words."""
        scenarios = plural(self.scenarios, "scenario")
        if self.pairs < 2:
            decides = "Fewer than two pairs of model and prompt cannot be ranked."
        elif self.detectable is None:
            decides = f"{scenarios} cannot decide; at least {MIN_SCENARIOS} are needed."
        else:
            low, high = self.composite_range
            decides = f"{scenarios} find differences of about {self.detectable:.1f} in composite ({low:g} to {high:g})."
        if not self.answers:
            return decides
        return f"{decides} Judging {plural(self.answers, 'answer')} takes about {duration(self.judging_s)}."

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `plan --json` and the API."""
        return {**vars(self), "text": self.text}


def plan_outlook(plan: Plan) -> Outlook:
    """Estimate the outlook from typical values, because scores and the pace of judges are not known yet."""
    cells = [each.cell for each in plan.cells]
    pairs = {(cell.model, cell.prompt) for cell in cells if engine_of(cell.model).kind == "model"}
    design = make_design((cell.scenario for cell in cells), plan.config.looks)
    scenarios = len(design.scenarios)
    recorded = (plan.recorded.finished.get(each.key) for each in plan.cells)
    judged = sum(run is not None and run.state == RunState.JUDGED for run in recorded)
    answers = len(cells) - judged
    return Outlook(
        scenarios=scenarios,
        pairs=len(pairs),
        detectable=smallest_detectable(PAIRED_SD, scenarios, comparisons=len(pairs) - 1, level=design.level)
        if len(pairs) > 1
        else None,
        answers=answers,
        judging_s=answers * plan.config.n_tips * SECONDS_PER_TIP,
        composite_range=plan.suite.rubric.range,
    )
