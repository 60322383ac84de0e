"""Receive: find the sheet a file belongs to, and check the file against it, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tipbench.errors import SheetRefused
from tipbench.judge.checking import check_sheet
from tipbench.judge.judging import Judging, find_judging
from tipbench.judge.problems import Problem, refusal, shown
from tipbench.judge.sheet import FORMAT, Filled
from tipbench.plan.config import check_experiment_name
from tipbench.record.store import Experiment, RunStore


@dataclass(frozen=True)
class Received:
    """A checked sheet, ready to be applied."""

    experiment: Experiment
    judging: Judging
    filled: Filled


def receive(store: RunStore, raw: Mapping[str, Any], *, judge: str | None = None) -> Received:
    """The sheet in MLflow that this file is a filled copy of. SheetRefused names everything that is wrong."""
    experiment, judging = _origin(store, raw)
    expected = replace(judging.sheet, judge=judging.owner or judging.sheet.judge)
    filled = check_sheet(raw, expected, judge=judge, allow_reserved=judging.provisional)
    return Received(experiment, judging, filled)


def _origin(store: RunStore, raw: Mapping[str, Any]) -> tuple[Experiment, Judging]:
    experiment, sheet_id = origin(store, raw, FORMAT)
    judging = find_judging(store, experiment.experiment_id, experiment.name, sheet_id)
    if judging is None:
        raise no_such_sheet(experiment, sheet_id)
    return experiment, judging


def origin(store: RunStore, raw: Mapping[str, Any], format_: str) -> tuple[Experiment, str]:
    """The experiment and the id that a file of this format names. SheetRefused when it names none."""
    if raw.get("format") != format_:
        raise refusal([Problem(None, None, "format", shown(raw.get("format")), f"{format_!r}")])
    name, sheet_id = raw.get("experiment"), raw.get("sheet")
    if not isinstance(name, str) or not _is_experiment(name):
        raise refusal([Problem(None, None, "experiment", shown(name), "the name it was exported with, tip-bench-…")])
    if not isinstance(sheet_id, str) or not 0 < len(sheet_id) <= 64:
        raise refusal([Problem(None, None, "sheet", shown(sheet_id), "the id it was exported with")])
    experiment = store.experiment(name)
    if experiment is None:
        raise refusal(
            [Problem(None, None, "experiment", shown(name), "an experiment of this MLflow; see --mlflow-url")]
        )
    return experiment, sheet_id


def no_such_sheet(experiment: Experiment, sheet_id: str) -> SheetRefused:
    """The refusal of a file whose sheet is not in MLflow."""
    expected = f"a sheet exported from {experiment.name} and recorded in this MLflow; see --mlflow-url"
    return refusal([Problem(None, None, "sheet", shown(sheet_id), expected)])


def _is_experiment(name: str) -> bool:
    try:
        check_experiment_name(name)
    except ValueError:
        return False
    return True
