"""What the judges' page asks and does beside the judging itself: one sheet again, a drift accepted, a picture."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

from tipbench.charts import THEMES, to_svg
from tipbench.judge.drift_drawing import drift_chart, drift_points
from tipbench.judge.judging import Judging, SheetStatus, find_judging
from tipbench.judge.sheet import sheet_json
from tipbench.record.store import RunStore
from tipbench.web.auth import Identity
from tipbench.web.errors import Invalid, NotFound
from tipbench.web.judging import ApplyWish, apply_sheet
from tipbench.web.queries import Queries, existing
from tipbench.web.snapshots import revision

ThemeName = Literal["light", "dark"]
_one_drawing = threading.Lock()  # a page asks for many at a time; the other core is for the pages


@dataclass(frozen=True)
class DriftAsk:
    """Which picture: one judge on one scale."""

    judge: str
    scale: str
    provisional: bool = False
    theme: ThemeName = "light"


def sheet_of(store: RunStore, name: str, sheet: str) -> Judging:
    """A sheet of the experiment. NotFound when there is none of that id."""
    experiment = existing(store, name)
    found = find_judging(store, experiment.experiment_id, experiment.name, sheet)
    if found is None:
        raise NotFound(f"{name[:200]} has no sheet {sheet[:64]!r}. Its judges' page lists them.", path="path.sheet")
    return found


def accept_drift(store: RunStore, name: str, sheet: str, reason: str, who: Identity) -> dict[str, Any]:
    """Count the held scores of a sheet all the same, and keep why. Invalid when it is not held."""
    wish = ApplyWish.of(who, judge=None, accept=reason, dry_run=False)
    judging = sheet_of(store, name, sheet)
    if judging.status is not SheetStatus.HELD:
        raise Invalid(f"Sheet {sheet[:64]} is {judging.status}, so there is no drift to accept.", path="body.sheet")
    filled = sheet_json(replace(judging.sheet, judge=judging.owner), judging.answers)
    return apply_sheet(store, name, filled, wish)


def drift_svg(queries: Queries, store: RunStore, name: str, ask: DriftAsk) -> str:
    """The picture, drawn once for a revision. NotFound when nothing is known of that judge on that scale."""
    experiment = existing(store, name)
    judging = queries.judging_of(store, experiment)
    points = drift_points(judging.history, ask.judge, ask.scale, provisional=ask.provisional)
    if not points:
        raise NotFound("No sheet of this judge has a known bias on this scale.", path="query.judge")

    def make() -> str:
        with _one_drawing:
            return to_svg(drift_chart(points, THEMES[ask.theme]), THEMES[ask.theme])

    return queries.charts.get(("drift", experiment.experiment_id, ask), revision(experiment), make)
