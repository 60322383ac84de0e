"""Model × prompt: the mean of every pair, with the means of rows and columns beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from tipbench.charts import LIGHT, Theme, import_altair
from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.marks import NARROW, SAID
from tipbench.compare.matrix import Pair
from tipbench.compare.report import NOTHING, State, number, one_line, shortened, state_of

MEAN = "\n"  # no name of a model or a prompt


def heat_rows(board: Leaderboard) -> tuple[list[str], list[str], dict[tuple[str, str], float | None]]:
    """Models, prompts, and the mean of each pair; under MEAN those of rows and columns whose pairs are all ranked."""
    found = {standing.pair: standing for standing in board.standings}
    models = list(dict.fromkeys(pair.model for pair in found))
    prompts = sorted({pair.prompt for pair in found})
    means: dict[tuple[str, str], float | None] = {
        (model, prompt): _mean(found.get(Pair(model, prompt))) for model in models for prompt in prompts
    }
    for model in models:
        means[model, MEAN] = _margin([found.get(Pair(model, prompt)) for prompt in prompts])
    for prompt in prompts:
        means[MEAN, prompt] = _margin([found.get(Pair(model, prompt)) for model in models])
    return models, prompts, means


def _mean(standing: Standing | None) -> float | None:
    return standing.row.estimate.mean if standing and standing.row.estimate else None


def _margin(standings: Sequence[Standing | None]) -> float | None:
    means = [_mean(standing) for standing in standings if standing and standing.row.complete]
    known = [mean for mean in means if mean is not None]
    return fmean(known) if known and len(known) == len(standings) else None


def heat_map(board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False, titled: bool = True) -> Any | None:
    """The means as coloured cells, each with its number; None when the board ranks only models or only prompts."""
    if board.by is not None:
        return None
    alt = import_altair()
    models, prompts, means = heat_rows(board)
    rows_of, columns_of = _names(models, 18 if narrow else 34), _names(prompts, 12 if narrow else 16)
    cells = [
        {"row": row, "column": column, **_cell(board, theme, model, prompt, means)}
        for model, row in rows_of.items()
        for prompt, column in columns_of.items()
    ]
    step = max(46, (NARROW - 130) // (len(prompts) + 1)) if narrow else max(64, min(110, 620 // (len(prompts) + 1)))
    crowded = max(len(name) for name in columns_of.values()) * 7 > step
    top = alt.Axis(
        orient="top", title=None, domain=False, ticks=False, labelAngle=-40 if crowded else 0, labelLimit=140
    )
    side = alt.Axis(title=None, domain=False, ticks=False, labelLimit=250, labelPadding=6)
    x = alt.X("column:N", sort=list(columns_of.values()), axis=top, scale=alt.Scale(paddingInner=0.06))
    y = alt.Y("row:N", sort=list(rows_of.values()), axis=side, scale=alt.Scale(paddingInner=0.1))
    base = alt.Chart(alt.Data(values=cells)).encode(x=x, y=y)
    boxes = base.mark_rect(cornerRadius=3).encode(
        fill=alt.Fill("fill:N", scale=None), stroke=alt.Stroke("edge:N", scale=None),
        strokeWidth=alt.StrokeWidth("width:Q", scale=None), description="text:N",
    )  # fmt: skip
    weight = {"fontWeight": {"expr": "datum.bold ? 'bold' : 'normal'"}}
    texts = base.mark_text(fontSize=13, **weight).encode(text="shown:N", color=alt.Color("ink:N", scale=None))
    chart = alt.layer(boxes, texts).properties(width=alt.Step(step), height=alt.Step(34))
    subtitle = ["mean composite; margins: means of rows and columns whose pairs are all complete", _subtitle(board)]
    return chart if narrow or not titled else chart.properties(title=alt.Title("Model × prompt", subtitle=subtitle))


def _subtitle(board: Leaderboard) -> str:
    marks = ["thick frame: leader", "thin frame: cannot be told apart from it"]
    incomplete = any(not row.complete for row in board.ranking.rows)
    return "; ".join(marks[: 2 if board.ranking.tied else 1] + (["in brackets: incomplete"] if incomplete else []))


def _names(names: Sequence[str], most: int) -> dict[str, str]:
    short: dict[str, str] = {}
    for name in names:
        label = cut = shortened(one_line(name), most)
        twin = 2
        while label in short.values() or label == "mean":
            label = f"{cut} ({twin})"
            twin += 1
        short[name] = label
    return {**short, MEAN: "mean"}


def _cell(
    board: Leaderboard, theme: Theme, model: str, prompt: str, means: Mapping[tuple[str, str], float | None]
) -> dict[str, Any]:
    value = means.get((model, prompt))
    margin = MEAN in (model, prompt)
    place = {"value": value, "shown": number(value) or NOTHING}
    plain = {"fill": theme.background, "ink": theme.ink, "edge": theme.background, "width": 0.0}
    said = f"{shortened(one_line(model), 80)}/{shortened(one_line(prompt), 80)}: mean {number(value) or 'unknown'}"
    if margin or value is None:
        corner = model == prompt == MEAN
        return {**place, **plain, "shown": "" if corner else place["shown"], "bold": False, "text": said}
    state = state_of(board, Pair(model, prompt))
    known = [mean for key, mean in means.items() if MEAN not in key and mean is not None]
    fill = shade(theme, value, min(known), max(known))
    return {
        **place,
        "fill": fill,
        "ink": readable(fill),
        "shown": f"({place['shown']})" if state is State.INCOMPLETE else place["shown"],
        "edge": theme.ink,
        "width": {State.LEADER: 3.0, State.TIED: 1.2}.get(state, 0.0),
        "bold": state is State.LEADER,
        "text": f"{said}; {SAID[state]}",
    }


def shade(theme: Theme, value: float, low: float, high: float) -> str:
    """From a tint of the accent colour (lowest) to the accent itself (highest); the middle when all are equal."""
    share = (value - low) / (high - low) if high > low else 0.5
    strength = 0.12 + 0.88 * share
    pairs = zip(_channels(theme.background), _channels(theme.accent), strict=True)
    return "#" + "".join(f"{round(base + (strong - base) * strength):02x}" for base, strong in pairs)


def readable(fill: str) -> str:
    """Black or white, whichever stands out more (WCAG 2 luminance)."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(fill)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
