"""The judges' history as a chart: bias on the hidden controls, sheet by sheet, one panel for each scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tipbench.charts import LIGHT, Theme, import_altair
from tipbench.judge.status import SheetHistory

_SUBTITLE = "sheet by sheet, oldest above; a verdict also goes by the error and the contrast over all scales"


def history_rows(history: Sequence[SheetHistory]) -> list[dict[str, Any]]:
    """One row for each sheet and scale that has a bias."""
    rows = []
    for number, sheet in enumerate(history, start=1):
        verdict = (sheet.drift or {}).get("verdict", "unknown")
        for scale in (sheet.drift or {}).get("scales", []):
            if scale["bias"] is None:
                continue
            low, high = scale["interval"] or (scale["bias"], scale["bias"])
            rows.append(
                {
                    "number": number,
                    "sheet": f"{number} · {sheet.exported[:10]} · {sheet.judge} · {verdict}",
                    "judge": sheet.judge,
                    "scale": scale["scale"],
                    "bias": scale["bias"],
                    "low": low,
                    "high": high,
                    "verdict": "beyond the limit" if scale["beyond"] else "within the limit",
                }
            )
    return rows


def history_chart(history: Sequence[SheetHistory], theme: Theme = LIGHT) -> Any:
    """Dots with their intervals on a line of no bias; a drifted scale is another shape, not only another colour."""
    alt = import_altair()
    rows = history_rows(history)
    order = list(dict.fromkeys(row["sheet"] for row in rows))
    sheet = alt.Y("sheet:N", sort=order, title=None)
    base = alt.Chart(alt.Data(values=rows))
    reach = max([1.0, *(abs(row[end]) for row in rows for end in ("low", "high"))])
    span = alt.Scale(domain=[-reach, reach])
    zero = base.mark_rule(color=theme.muted, strokeDash=[3, 3]).encode(x=alt.datum(0))
    line = base.mark_rule(strokeWidth=2, color=theme.muted).encode(
        y=sheet, x=alt.X("low:Q", scale=span, title="too low ← bias → too high"), x2="high:Q"
    )
    states = ["within the limit", "beyond the limit"]
    dot = base.mark_point(filled=True, size=90, opacity=1).encode(
        y=sheet,
        x=alt.X("bias:Q", scale=span),
        color=alt.Color(
            "verdict:N", title=None, scale=alt.Scale(domain=states, range=[theme.accent, theme.warning]),
            legend=alt.Legend(orient="top"),
        ),
        shape=alt.Shape("verdict:N", title=None, scale=alt.Scale(domain=states, range=["circle", "diamond"])),
        tooltip=["sheet:N", "scale:N", "bias:Q", "low:Q", "high:Q", "verdict:N"],
    )  # fmt: skip
    panel = alt.layer(zero, line, dot).properties(width=200, height=alt.Step(26))
    names = list(dict.fromkeys(row["scale"] for row in rows))
    return panel.facet(column=alt.Column("scale:N", sort=names, title=None)).properties(
        title=alt.Title("How the judges score the hidden controls", subtitle=_SUBTITLE)
    )
