"""One judge on one scale over time: the bias on the hidden controls, sheet by sheet, as a small chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.charts import LIGHT, Theme, import_altair
from tipbench.judge.status import SheetHistory

WIDTH, HEIGHT = 320, 160  # of the whole picture
MOST_POINTS = 40  # the newest; more would not be told apart
_LEAST_REACH = 1.5  # points either way, so that charts of one page compare and chance does not look like drift


@dataclass(frozen=True)
class DriftPoint:
    """What one sheet's controls say of its judge on one scale."""

    sheet: str
    date: str  # ISO
    bias: float
    low: float
    high: float
    beyond: bool


def drift_points(history: Sequence[SheetHistory], judge: str, scale: str, *, provisional: bool) -> list[DriftPoint]:
    """The judge's sheets that have a bias on the scale, oldest first."""
    own = [sheet for sheet in history if sheet.judge == judge and sheet.provisional == provisional]
    found = [
        _point(sheet, each)
        for sheet in own
        for each in (sheet.drift or {}).get("scales", ())
        if each["scale"] == scale and each["bias"] is not None
    ]
    return found[-MOST_POINTS:]


def _point(sheet: SheetHistory, scale: dict[str, Any]) -> DriftPoint:
    low, high = scale["interval"] or (scale["bias"], scale["bias"])
    return DriftPoint(sheet.sheet, sheet.exported[:10], scale["bias"], low, high, bool(scale["beyond"]))


def drift_chart(points: Sequence[DriftPoint], theme: Theme = LIGHT) -> Any:
    """Dots with their intervals around the line of no bias, oldest on the left; a drifted one is a diamond."""
    alt = import_altair()
    rows = [{**vars(point), "number": at, "text": _said(point)} for at, point in enumerate(points, start=1)]
    reach = max([_LEAST_REACH, *(abs(end) for point in points for end in (point.low, point.high))])
    scale = alt.Scale(domain=[-reach, reach], nice=False)
    whole = math.floor(reach)
    x = alt.X("number:O", axis=alt.Axis(title="sheet, oldest first", labelAngle=0, labelOverlap=True, ticks=False))
    y = alt.Y("low:Q", scale=scale, axis=alt.Axis(title="bias, points", values=[-whole, 0, whole], format="+d"))
    base = alt.Chart(alt.Data(values=rows))
    zero = base.mark_rule(color=theme.muted, strokeDash=[4, 3]).encode(y=alt.datum(0))
    line = base.mark_rule(strokeWidth=2, color=theme.muted).encode(x=x, y=y, y2="high:Q", description="text:N")
    states = [False, True]
    dot = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x,
        y=alt.Y("bias:Q", scale=scale),
        description="text:N",
        color=alt.Color("beyond:N", legend=None, scale=alt.Scale(domain=states, range=[theme.accent, theme.warning])),
        shape=alt.Shape("beyond:N", legend=None, scale=alt.Scale(domain=states, range=["circle", "diamond"])),
    )
    return alt.layer(zero, line, dot).properties(
        width=WIDTH, height=HEIGHT, autosize=alt.AutoSizeParams(type="fit", contains="padding")
    )


def drift_sentence(points: Sequence[DriftPoint]) -> str:
    """What the chart shows, for those who cannot see it."""
    return "; ".join(_said(point) for point in points) or "no sheet with a known bias"


def _said(point: DriftPoint) -> str:
    limit = ", beyond the limit" if point.beyond else ""
    return f"{point.date}: bias {point.bias:+.2f} ({point.low:+.2f} to {point.high:+.2f}){limit}"
