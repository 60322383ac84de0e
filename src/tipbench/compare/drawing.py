"""The board as charts, each defined once: for a file, the report and the panel, wide or for a narrow page.

What a row's state is shows in its shape and its text as well as in its colour. Values and marks carry a description,
which the SVG keeps as `aria-label`; the table of the board has all numbers.
"""

from __future__ import annotations

from typing import Any

from tipbench.charts import LIGHT, Theme, import_altair
from tipbench.compare.attribution import Attribution
from tipbench.compare.heat_map import heat_map
from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.marks import NARROW, SAID, WIDE, labels_of, state_colours, state_marks
from tipbench.compare.notes import question_text
from tipbench.compare.pareto import pareto
from tipbench.compare.report import (
    NOTHING,
    State,
    best_text,
    factors_of,
    interval,
    label_of,
    number,
    one_line,
    percent,
    probability,
    rank_text,
    shortened,
    state_of,
)
from tipbench.compare.words import counted

__all__ = ["attribution_bar", "forest", "heat_map", "pareto"]

VALUES = 190  # pixels for the numbers beside the intervals


def forest_rows(board: Leaderboard, most: int = 38) -> list[dict[str, Any]]:
    """One record for each row of the board, in its order."""
    labels = labels_of(board, most)
    rows = []
    for standing in board.standings:
        estimate, state = standing.row.estimate, state_of(board, standing.pair)
        ends = interval(estimate.ci_low, estimate.ci_high) if estimate else None
        value = f"{number(estimate.mean)} ({ends or 'no interval'})" if estimate else "not judged"
        rows.append(
            {
                "label": labels[standing.pair],
                "mean": estimate.mean if estimate else None,
                "low": estimate.ci_low if estimate else None,
                "high": estimate.ci_high if estimate else None,
                "value": value,
                "rank": f"rank {rank_text(standing)}" if standing.row.rank else NOTHING,
                "state": str(state),
                "said": SAID[state],
                "top": bool(board.ranking.tied) and state in (State.LEADER, State.TIED),
                "text": _sentence(board, standing, value, state),
            }
        )
    return rows


def _sentence(board: Leaderboard, standing: Standing, value: str, state: State) -> str:
    rank, best = rank_text(standing), best_text(board, standing)
    parts = [
        f"{shortened(label_of(board, standing.pair), 120)}: composite {value}",
        SAID[state],
        f"rank {rank}" if rank else None,
        f"probability of being best {best}" if best else None,
        f"judged {standing.judged} of {standing.total}",
    ]
    return "; ".join(part for part in parts if part)


def forest(board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False, titled: bool = True) -> Any:
    """One line for each pair: its mean and 95 % interval; rows that cannot be told apart from the leader are shaded."""
    alt = import_altair()
    rows = forest_rows(board, 44 if narrow else 38)
    height = 46 if narrow else 26
    axis = None if narrow else alt.Axis(title=None, domain=False, ticks=False, labelPadding=8, labelLimit=270)
    y = alt.Y("label:N", sort=[row["label"] for row in rows], axis=axis, scale=alt.Scale(paddingInner=0))
    room = {"expr": f"width - {0 if narrow else VALUES}"}
    x_scale = alt.Scale(domain=_reach(rows), nice=False, zero=False, range=[8, room])
    ends = alt.X(
        "low:Q", scale=x_scale, axis=alt.Axis(title="composite, mean and 95 % interval", grid=True, tickCount=6)
    )
    base = alt.Chart(alt.Data(values=rows))
    drop = {"yOffset": 8} if narrow else {}
    shade = base.transform_filter("datum.top").mark_rect(color=theme.accent, opacity=0.13).encode(
        y=y, x=alt.value(0), x2=alt.value("width")
    )  # fmt: skip
    line = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2.5, strokeCap="round", **drop).encode(
        y=y, x=ends, x2="high:Q", description="text:N",
        strokeDash=alt.StrokeDash("state:N", legend=None, scale=alt.Scale(
            domain=[str(state) for state in State], range=[[1, 0], [1, 0], [1, 0], [4, 5]])),
        color=alt.Color("state:N", legend=None, scale=alt.Scale(
            domain=[str(state) for state in State], range=list(state_colours(theme).values()))),
    )  # fmt: skip
    dot = base.transform_filter("isValid(datum.mean)").mark_point(size=120, opacity=1, strokeWidth=2, **drop).encode(
        y=y, x=alt.X("mean:Q", scale=x_scale), description="text:N",
        **state_marks(alt, board, theme, narrow=narrow),
    )  # fmt: skip
    layers = [shade, line, dot, *_forest_texts(alt, base, y, theme, narrow=narrow)]
    chart = alt.layer(*layers).resolve_scale(color="independent").properties(
        width=NARROW if narrow else WIDE, height=alt.Step(height),
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    )  # fmt: skip
    title, subtitle = _forest_title(board)
    return chart if narrow or not titled else chart.properties(title=alt.Title(title, subtitle=subtitle))


def _forest_title(board: Leaderboard) -> tuple[str, list[str]]:
    what = {"model": "models", "prompt": "prompts"}.get(board.by or "", "pairs of model and prompt")
    over = counted(board.ranking.n_scenarios, board.unit)
    kind = " · provisional scores" if board.provisional else ""
    lines = [f"{shortened(one_line(board.experiment), 60)} · over {over}{kind}"]
    if asked := question_text(board.where, board.judge):
        lines.append(shortened(one_line(asked), 110))
    if board.ranking.tied:
        lines.append("shaded: the leader and what cannot be told apart from it (by paired differences, not by overlap)")
    return f"How good the {what} are", lines


def _forest_texts(alt: Any, base: Any, y: Any, theme: Theme, *, narrow: bool) -> list[Any]:
    bold = {"fontWeight": {"expr": "datum.state === 'leader' ? 'bold' : 'normal'"}}
    if narrow:
        ink = {"color": theme.ink, "baseline": "middle", "limit": NARROW - 16}
        name = base.mark_text(**ink, **bold, align="left", fontSize=12, dx=6, yOffset=-11).encode(
            y=y, x=alt.value(0), text="label:N"
        )
        return [name]
    right = {"baseline": "middle", "color": theme.ink, "fontSize": 12}
    value = base.mark_text(**right, **bold, align="left", dx=14).encode(
        y=y, x=alt.XValue({"expr": f"width - {VALUES}"}), text="value:N"
    )
    return [value]


def _reach(rows: list[dict[str, Any]]) -> list[float]:
    """From the lowest to the highest end, with a little air."""
    ends = [row[key] for row in rows for key in ("low", "mean", "high") if row[key] is not None]
    if not ends:
        return [0.0, 1.0]
    low, high = min(ends), max(ends)
    air = max((high - low) * 0.04, 0.25)
    return [low - air, high + air]


def attribution_bar(
    board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False, titled: bool = True
) -> Any | None:
    """How much of the spread each source accounts for; None when the layout does not tell."""
    if not isinstance(board.attribution, Attribution):
        return None
    alt = import_altair()
    rows = [
        {
            "source": label,
            "share": factor.share,
            "value": percent(factor.share) if factor.p is None else f"{percent(factor.share)}, {_p_text(factor.p)}",
            "text": f"{label}: {percent(factor.share)} of the spread",
        }
        for label, factor in factors_of(board.attribution)
    ]
    axis = alt.Axis(title=None, domain=False, ticks=False, labelPadding=6)
    y = alt.Y("source:N", sort=[row["source"] for row in rows], axis=axis)
    most = max(factor.share for _, factor in factors_of(board.attribution))
    span = alt.Scale(domain=[0, min(1.0, most)], nice=False, range=[0, {"expr": "width - 90"}])
    x = alt.X("share:Q", scale=span, axis=alt.Axis(title="share of the sum of squares", format=".0%", tickCount=4))
    base = alt.Chart(alt.Data(values=rows))
    bars = base.mark_bar(color=theme.accent, height={"band": 0.62}).encode(y=y, x=x, description="text:N")
    texts = base.mark_text(align="left", dx=6, color=theme.ink, fontSize=12).encode(y=y, x=x, text="value:N")
    chart = alt.layer(bars, texts).properties(
        width=NARROW if narrow else 600, height=alt.Step(28),
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    )  # fmt: skip
    return chart if narrow or not titled else chart.properties(title=alt.Title("What the spread of scores is due to"))


def _p_text(p: float) -> str:
    shown = probability(p) or ""
    return f"p < {shown[1:]}" if shown.startswith("<") else f"p = {shown}"
