"""The key to the blinding: what stands behind each item of a sheet. Kept in MLflow, never in the sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tipbench.judge.sheet import Item
from tipbench.plan.fingerprint import fingerprint
from tipbench.plan.rubric import Control


class Behind(StrEnum):
    """What an item really is."""

    CELL = "cell"  # an answer that waits for this judge's scores
    CONTROL = "control"  # calibrated tips in the dress of an answer: measures the judge
    REPEAT = "repeat"  # an answer this judge has scored before: measures self-agreement


@dataclass(frozen=True)
class Entry:
    """One item with what is behind it."""

    item: Item
    behind: Behind
    run_id: str | None = None  # of a cell or a repeat
    controls: tuple[str, ...] = ()  # ids of the control tips, in the item's order
    references: tuple[Mapping[str, int], ...] = ()  # their agreed scores


def control_id(control: Control) -> str:
    """A control by its content, so that it is known again on another box and after a change of the file."""
    return fingerprint([control.scenario, control.tip], 12)
