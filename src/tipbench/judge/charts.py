"""Charts of judge bias on the hidden controls, by sheet and over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.charts import LIGHT, Theme, import_altair
from tipbench.judge.status import SheetSummary

# A row's label ends with the sheet's verdict, which can be "beyond the limit" although the bias (the dot) is not.
_SUBTITLE = "one row per sheet, oldest first; a sheet's verdict also uses its error and contrast over all scales"


@dataclass(frozen=True)
class DriftPoint:
    """A judge's bias on one scale, measured by one sheet's controls."""

    sheet: str
    date: str  # ISO
    scale: str
    bias: float
    low: float
    high: float
    beyond: bool  # whether the bias is beyond its limit


def _sheet_points(sheet: SheetSummary) -> Iterator[DriftPoint]:
    """Yield a point for each scale with a known bias."""
    for scale in (sheet.drift or {}).get("scales", ()):
        if (bias := scale["bias"]) is not None:
            low, high = scale["interval"] or (bias, bias)  # without an interval, only a point is drawn
            date = sheet.exported[:10]
            yield DriftPoint(sheet.sheet, date, scale["scale"], bias, low, high, beyond=bool(scale["beyond"]))


def history_rows(history: Sequence[SheetSummary]) -> list[dict[str, Any]]:
    """Return one row per sheet and scale with a known bias."""
    rows = []
    for number, sheet in enumerate(history, start=1):
        sheet_verdict = (sheet.drift or {}).get("verdict", "unknown")
        label = f"{number} · {sheet.exported[:10]} · {sheet.judge} · {sheet_verdict}"
        for point in _sheet_points(sheet):
            verdict = "beyond the limit" if point.beyond else "within the limit"
            rows.append({**vars(point), "sheet": label, "judge": sheet.judge, "verdict": verdict})
    return rows


def history_chart(history: Sequence[SheetSummary]) -> Any:
    """Plot bias with intervals per sheet and scale; a bias beyond its limit has another shape and colour."""
    alt = import_altair()
    rows = history_rows(history)
    sheet_order = list(dict.fromkeys(row["sheet"] for row in rows))
    y = alt.Y("sheet:N", sort=sheet_order, title=None)
    base = alt.Chart(alt.Data(values=rows))
    extent = max([1.0, *(abs(row[end]) for row in rows for end in ("low", "high"))])
    bias_scale = alt.Scale(domain=[-extent, extent])
    zero = base.mark_rule(color=LIGHT.muted, strokeDash=[3, 3]).encode(x=alt.datum(0))
    line = base.mark_rule(strokeWidth=2, color=LIGHT.muted).encode(
        y=y, x=alt.X("low:Q", scale=bias_scale, title="too low ← bias → too high"), x2="high:Q"
    )
    verdicts = ["within the limit", "beyond the limit"]
    dot = base.mark_point(filled=True, size=90, opacity=1).encode(
        y=y,
        x=alt.X("bias:Q", scale=bias_scale),
        color=alt.Color(
            "verdict:N", title=None, scale=alt.Scale(domain=verdicts, range=[LIGHT.accent, LIGHT.warning]),
            legend=alt.Legend(orient="top"),
        ),
        shape=alt.Shape("verdict:N", title=None, scale=alt.Scale(domain=verdicts, range=["circle", "diamond"])),
        tooltip=["sheet:N", "scale:N", "bias:Q", "low:Q", "high:Q", "verdict:N"],
    )  # fmt: skip
    scale_chart = alt.layer(zero, line, dot).properties(width=200, height=alt.Step(26))
    scale_names = list(dict.fromkeys(row["scale"] for row in rows))
    return scale_chart.facet(column=alt.Column("scale:N", sort=scale_names, title=None)).properties(
        title=alt.Title("Judges' bias on the hidden controls", subtitle=_SUBTITLE)
    )


WIDTH, HEIGHT = 320, 160  # pixels, including axes
MAX_POINTS = 40  # more would overlap
_MIN_EXTENT = 1.5  # points of the score on each side of 0; makes charts comparable and does not magnify noise


def drift_points(history: Sequence[SheetSummary], judge: str, scale: str, *, provisional: bool) -> list[DriftPoint]:
    """Return the newest MAX_POINTS points of a judge on one scale, oldest first."""
    points = [
        point
        for sheet in history
        if sheet.judge == judge and sheet.provisional == provisional
        for point in _sheet_points(sheet)
        if point.scale == scale
    ]
    return points[-MAX_POINTS:]


def drift_chart(points: Sequence[DriftPoint], theme: Theme = LIGHT) -> Any:
    """Plot bias with intervals, oldest on the left. A bias beyond its limit is a diamond."""
    alt = import_altair()
    rows = [
        {**vars(point), "number": number, "text": _point_text(point)} for number, point in enumerate(points, start=1)
    ]
    extent = max([_MIN_EXTENT, *(abs(end) for point in points for end in (point.low, point.high))])
    bias_scale = alt.Scale(domain=[-extent, extent], nice=False)
    last_tick = math.floor(extent)
    x = alt.X(
        "number:O",
        axis=alt.Axis(title="sheet, oldest first", labelAngle=0, labelOverlap=True, ticks=False, titlePadding=8),
    )
    y = alt.Y(
        "low:Q",
        scale=bias_scale,
        axis=alt.Axis(title="bias, points", values=[-last_tick, 0, last_tick], format="+d", titlePadding=14),
    )
    base = alt.Chart(alt.Data(values=rows))
    zero = base.mark_rule(color=theme.muted, strokeDash=[4, 3]).encode(y=alt.datum(0))
    line = base.mark_rule(strokeWidth=2, color=theme.muted).encode(x=x, y=y, y2="high:Q", description="text:N")
    beyond_values = [False, True]
    dot = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x,
        y=alt.Y("bias:Q", scale=bias_scale),
        description="text:N",
        color=alt.Color(
            "beyond:N", legend=None, scale=alt.Scale(domain=beyond_values, range=[theme.accent, theme.warning])
        ),
        shape=alt.Shape("beyond:N", legend=None, scale=alt.Scale(domain=beyond_values, range=["circle", "diamond"])),
    )
    return alt.layer(zero, line, dot).properties(
        width=WIDTH, height=HEIGHT, autosize=alt.AutoSizeParams(type="fit", contains="padding")
    )


def drift_sentence(points: Sequence[DriftPoint]) -> str:
    """Return a text alternative for the chart."""
    return "; ".join(_point_text(point) for point in points) or "no sheet with a known bias"


def _point_text(point: DriftPoint) -> str:
    limit = ", beyond the limit" if point.beyond else ""
    return f"{point.date}: bias {point.bias:+.2f} ({point.low:+.2f} to {point.high:+.2f}){limit}"
