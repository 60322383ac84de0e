"""Charts of a board: forest plot, heat map, attribution bars, quality against latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import fmean
from typing import Any

from tipbench.charts import LIGHT, Theme, import_altair
from tipbench.compare.attribution import Attribution
from tipbench.compare.leaderboard import Leaderboard, Standing, filter_text
from tipbench.compare.matrix import Pair
from tipbench.compare.report import NOTHING, State, best_text, factors_of, label_of, rank_text, state_of
from tipbench.text import interval, number, one_line, percent, plural, probability, short_name

WIDE = 760  # total width in pixels
NARROW = 320

STATE_LABELS = {
    State.LEADER: "leader",
    State.TIED: "not clearly different from it",
    State.SEPARATED: "clearly worse",
    State.INCOMPLETE: "not ranked",
}
SHAPES = {
    State.LEADER: "diamond",
    State.TIED: "circle",
    State.SEPARATED: "square",
    State.INCOMPLETE: "triangle-up",
}


def labels_of(board: Leaderboard, most: int) -> dict[Pair, str]:
    """Returns a unique short label for each row."""
    labels: dict[Pair, str] = {}
    for standing in board.standings:
        label = short = _short(board, standing.pair, most)
        twin = 2
        while label in labels.values():
            label = f"{short} ({twin})"
            twin += 1
        labels[standing.pair] = label
    return labels


def _short(board: Leaderboard, pair: Pair, most: int) -> str:
    if board.by is not None:
        return short_name(label_of(board, pair), most)
    prompt = short_name(pair.prompt, max(most // 2, most - 1 - len(one_line(pair.model))))
    return f"{short_name(pair.model, most - 1 - len(prompt))}/{prompt}"


def state_colours(theme: Theme) -> dict[State, str]:
    """Returns the colour of each state, strongest for the leader and tied rows."""
    return {
        State.LEADER: theme.palette[1],
        State.TIED: theme.accent,
        State.SEPARATED: theme.muted,
        State.INCOMPLETE: theme.muted,
    }


def state_marks(alt: Any, board: Leaderboard, theme: Theme, *, narrow: bool) -> dict[str, Any]:
    """Returns the encodings of a point by state: shape, outline, and fill unless incomplete, in one legend."""
    there = {state_of(board, standing.pair) for standing in board.standings}
    states = [state for state in State if state in there]
    colours = state_colours(theme)
    domain = [STATE_LABELS[state] for state in states]
    legend = alt.Legend(orient="top", title=None, columns=1 if narrow else len(states), symbolSize=110, labelLimit=300)
    inside = [theme.background if state is State.INCOMPLETE else colours[state] for state in states]
    return {
        "shape": alt.Shape(
            "status:N", legend=legend, scale=alt.Scale(domain=domain, range=[SHAPES[s] for s in states])
        ),
        "stroke": alt.Stroke(
            "status:N", legend=legend, scale=alt.Scale(domain=domain, range=[colours[s] for s in states])
        ),
        "fill": alt.Fill("status:N", legend=legend, scale=alt.Scale(domain=domain, range=inside)),
    }


MEAN = "\n"  # key of the margins; never the name of a model or prompt


def heat_rows(board: Leaderboard) -> tuple[list[str], list[str], dict[tuple[str, str], float | None]]:
    """Returns models, prompts and pair means; a margin (key MEAN) is None if any of its pairs is unranked."""
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
    """Draws the mean of each pair as a coloured cell; None if the board ranks only models or only prompts."""
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
    subtitle = ["mean composite; margins: means of rows and columns whose pairs are all ranked", _subtitle(board)]
    return chart if narrow or not titled else chart.properties(title=alt.Title("Model × prompt", subtitle=subtitle))


def _subtitle(board: Leaderboard) -> str:
    marks = ["thick frame: leader", "thin frame: not clearly different from it"]
    incomplete = any(not row.complete for row in board.ranking.rows)
    return "; ".join(marks[: 2 if board.ranking.tied else 1] + (["in brackets: not ranked"] if incomplete else []))


def _names(names: Sequence[str], most: int) -> dict[str, str]:
    short: dict[str, str] = {}
    for name in names:
        label = cut = short_name(name, most)
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
    description = f"{short_name(model, 80)}/{short_name(prompt, 80)}: mean {number(value) or 'unknown'}"
    if margin or value is None:
        corner = model == prompt == MEAN
        return {**place, **plain, "shown": "" if corner else place["shown"], "bold": False, "text": description}
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
        "text": f"{description}; {STATE_LABELS[state]}",
    }


def shade(theme: Theme, value: float, low: float, high: float) -> str:
    """Returns a colour from a tint of the accent (lowest) to the accent (highest); the middle if all are equal."""
    share = (value - low) / (high - low) if high > low else 0.5
    strength = 0.12 + 0.88 * share
    pairs = zip(_channels(theme.background), _channels(theme.accent), strict=True)
    return "#" + "".join(f"{round(base + (strong - base) * strength):02x}" for base, strong in pairs)


def readable(fill: str) -> str:
    """Returns black or white, whichever has more contrast (WCAG 2 luminance)."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(fill)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


WIDTH, HEIGHT = 600, 340
LETTER = 6.3  # approximate character width of a label, in pixels
LINE = 15


@dataclass(frozen=True)
class Point:
    """A row with both a composite and a latency."""

    pair: Pair
    latency: float
    composite: float
    complete: bool


def points_of(board: Leaderboard) -> list[Point]:
    """Returns the rows with a composite and a latency, in board order."""
    points = []
    for standing in board.standings:
        estimate, latency = standing.row.estimate, standing.means.get("latency_s")
        if estimate is not None and latency is not None:
            points.append(Point(standing.pair, latency, estimate.mean, standing.row.complete))
    return points


def front_of(points: Sequence[Point]) -> list[Point]:
    """Returns the Pareto front of the complete rows in composite and latency, fastest first."""
    front: list[Point] = []
    for point in sorted((p for p in points if p.complete), key=lambda p: (p.latency, -p.composite)):
        if not front or point.composite > front[-1].composite:
            front.append(point)
    return front


def pareto(board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False, titled: bool = True) -> Any | None:
    """Draws composite against latency; None if no row has both."""
    points = points_of(board)
    if not points:
        return None
    alt = import_altair()
    size = (NARROW - 60, 300) if narrow else (WIDTH, HEIGHT)
    frame = _Frame.around(points, *size)
    front = front_of(points)
    labels = labels_of(board, 22 if narrow else 34)
    named = place_labels(frame, points, [(p, labels[p.pair]) for p in _labelled_points(board, points, front)])
    x_scale = alt.Scale(type="log" if frame.log else "linear", domain=list(frame.x), nice=False, zero=False)
    x = alt.X("latency:Q", scale=x_scale, axis=alt.Axis(title="latency in seconds, without load (left is faster)",
              tickCount=5, format="~g"))  # fmt: skip
    y = alt.Y("composite:Q", scale=alt.Scale(domain=list(frame.y), nice=False, zero=False),
              axis=alt.Axis(title="composite (up is better)", tickCount=6))  # fmt: skip
    line = alt.Chart(alt.Data(values=[point_values(p) for p in front])).mark_line(
        interpolate="step-after", color=theme.palette[2], strokeWidth=2, strokeDash=[6, 3]
    ).encode(x=x, y=y)  # fmt: skip
    rows = [
        {
            **point_values(p),
            "status": STATE_LABELS[state_of(board, p.pair)],
            "text": _pareto_description(board, p, front),
        }
        for p in points
    ]
    dots = alt.Chart(alt.Data(values=rows)).mark_point(size=100, opacity=1, strokeWidth=2).encode(
        x=x, y=y, description="text:N", **state_marks(alt, board, theme, narrow=narrow)
    )  # fmt: skip
    texts = [
        alt.Chart(alt.Data(values=[each for each in named if each["align"] == align]))
        .mark_text(align=align, baseline="middle", color=theme.ink, fontSize=12)
        .encode(x=alt.X("x:Q", scale=None, axis=None), y=alt.Y("y:Q", scale=None, axis=None), text="label:N")
        for align in ("left", "right", "center")
    ]
    chart = alt.layer(line, dots, *texts).properties(width=size[0], height=size[1])
    if narrow or not titled:
        return chart
    return chart.properties(title=alt.Title("Quality against latency", subtitle=_pareto_subtitle(board)))


def point_values(point: Point) -> dict[str, float]:
    return {"latency": point.latency, "composite": point.composite}


def _pareto_subtitle(board: Leaderboard) -> list[str]:
    lines = ["dashed line: pairs that no other pair beats in both; their labels are placed first"]
    if len(board.hosts) > 1:
        lines.append(f"from {len(board.hosts)} hosts: latencies are not comparable across hosts")
    return lines


def _pareto_description(board: Leaderboard, point: Point, front: Sequence[Point]) -> str:
    where = "; no other pair beats it in both" if point in front else ""
    name = short_name(label_of(board, point.pair), 160)
    return (
        f"{name}: composite {number(point.composite)}, latency {number(point.latency)} s; "
        f"{STATE_LABELS[state_of(board, point.pair)]}{where}"
    )


def _labelled_points(board: Leaderboard, points: Sequence[Point], front: Sequence[Point]) -> list[Point]:
    """Returns the points to label, leader and front first, because later labels are dropped if they do not fit."""
    states = {point.pair: state_of(board, point.pair) for point in points}
    ranked = [*(p for p in points if states[p.pair] is State.LEADER), *front]
    ranked += [p for p in points if states[p.pair] is State.TIED]
    if len(points) <= 15:
        ranked += points
    return list(dict.fromkeys(ranked))


@dataclass(frozen=True)
class _Frame:
    """Maps data values to pixel positions."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool
    width: int
    height: int

    @classmethod
    def around(cls, points: Sequence[Point], width: int, height: int) -> _Frame:
        fast, slow = min(p.latency for p in points), max(p.latency for p in points)
        low, high = min(p.composite for p in points), max(p.composite for p in points)
        padding = max((high - low) * 0.1, 0.25)
        if fast > 0 and slow / fast > 30:
            return cls((fast / 1.5, slow * 1.5), (low - padding, high + padding), True, width, height)
        side = max((slow - fast) * 0.08, slow * 0.05, 0.01)
        return cls((max(fast - side, 0.0), slow + side), (low - padding, high + padding), False, width, height)

    def place(self, point: Point) -> tuple[float, float]:
        (left, right), (low, high) = self.x, self.y
        at = point.latency
        if self.log:
            left, right, at = log(left), log(right), log(at)
        across = (at - left) / (right - left)
        return across * self.width, (high - point.composite) / (high - low) * self.height


_Box = tuple[float, float, float, float]  # left, top, right, bottom


def place_labels(
    frame: _Frame, points: Sequence[Point], wanted: Sequence[tuple[Point, str]]
) -> list[dict[str, float | str]]:
    """Places labels next to their points without overlapping points, lines or labels; drops those that do not fit."""
    taken: list[_Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in map(frame.place, points)]
    taken += _steps([frame.place(point) for point in front_of(points)])
    placed: list[dict[str, float | str]] = []
    for point, label in wanted:
        x, y = frame.place(point)
        wide = LETTER * len(label)
        for align, at, middle in _spots(x, y):
            left = at - {"left": 0.0, "center": wide / 2, "right": wide}[align]
            box = (left, middle - LINE / 2, left + wide, middle + LINE / 2)
            inside = box[0] >= 0 and box[2] <= frame.width and box[1] >= 0 and box[3] <= frame.height
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                placed.append({"x": at, "y": middle, "label": label, "align": align})
                break
    return placed


def _steps(places: Sequence[tuple[float, float]]) -> list[_Box]:
    """Returns the boxes covered by the front's step line: to the right, then up."""
    boxes = []
    for (x, y), (next_x, next_y) in pairwise(places):
        boxes += [(x, y - 2, next_x, y + 2), (next_x - 2, next_y, next_x + 2, y)]
    return boxes


def _spots(x: float, y: float) -> list[tuple[str, float, float]]:
    """Returns candidate label positions, left and upper left first: that side of the front is empty."""
    return [
        ("right", x - 11, y), ("right", x - 6, y - 13), ("left", x + 11, y), ("left", x + 8, y + 13),
        ("center", x, y - 16), ("center", x, y + 17), ("right", x - 8, y + 13), ("left", x + 8, y - 13),
        ("right", x + 7, y - 17), ("right", x + 7, y + 17),
    ]  # fmt: skip


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


__all__ = ["attribution_bar", "forest", "heat_map", "pareto"]

VALUES = 190  # width in pixels of the numbers next to the intervals


def forest_rows(board: Leaderboard, most: int = 38) -> list[dict[str, Any]]:
    """Returns one record per row, in board order."""
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
                "status": STATE_LABELS[state],
                "top": bool(board.ranking.tied) and state in (State.LEADER, State.TIED),
                "text": _description(board, standing, value, state),
            }
        )
    return rows


def _description(board: Leaderboard, standing: Standing, value: str, state: State) -> str:
    rank, best = rank_text(standing), best_text(board, standing)
    parts = [
        f"{short_name(label_of(board, standing.pair), 120)}: composite {value}",
        STATE_LABELS[state],
        f"rank {rank}" if rank else None,
        f"probability of being best {best}" if best else None,
        f"judged {standing.judged} of {standing.total}",
    ]
    return "; ".join(part for part in parts if part)


def forest(board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False, titled: bool = True) -> Any:
    """Draws the mean and 95 % interval of each row; the leader and the rows tied with it are shaded."""
    alt = import_altair()
    rows = forest_rows(board, 44 if narrow else 38)
    height = 46 if narrow else 26
    axis = None if narrow else alt.Axis(title=None, domain=False, ticks=False, labelPadding=8, labelLimit=270)
    y = alt.Y("label:N", sort=[row["label"] for row in rows], axis=axis, scale=alt.Scale(paddingInner=0))
    room = {"expr": f"width - {0 if narrow else VALUES}"}
    x_scale = alt.Scale(domain=_axis_domain(rows), nice=False, zero=False, range=[8, room])
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
    over = plural(board.ranking.n_scenarios, board.unit)
    kind = " · provisional scores" if board.provisional else ""
    lines = [f"{short_name(board.experiment, 60)} · over {over}{kind}"]
    if filters := filter_text(board.where, board.judge):
        lines.append(short_name(filters, 110))
    if board.ranking.tied:
        lines.append("shaded: the leader and the rows not clearly different from it (by paired differences)")
    return f"Scores of the {what}", lines


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


def _axis_domain(rows: list[dict[str, Any]]) -> list[float]:
    """Returns the axis domain: the lowest to the highest end, with padding."""
    ends = [row[key] for row in rows for key in ("low", "mean", "high") if row[key] is not None]
    if not ends:
        return [0.0, 1.0]
    low, high = min(ends), max(ends)
    padding = max((high - low) * 0.04, 0.25)
    return [low - padding, high + padding]


def attribution_bar(
    board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False, titled: bool = True
) -> Any | None:
    """Draws the share of the variance that each source explains; None without attribution."""
    if not isinstance(board.attribution, Attribution):
        return None
    alt = import_altair()
    rows = [
        {
            "source": label,
            "share": factor.share,
            "value": percent(factor.share) if factor.p is None else f"{percent(factor.share)}, {_p_text(factor.p)}",
            "text": f"{label}: {percent(factor.share)} of the variance",
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
    return chart if narrow or not titled else chart.properties(title=alt.Title("What explains the differences"))


def _p_text(p: float) -> str:
    shown = probability(p) or ""
    return f"p < {shown[1:]}" if shown.startswith("<") else f"p = {shown}"
