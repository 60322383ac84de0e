"""Charts of a board: forest plot, heat map, quality against latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

from tipbench.charts import LIGHT, Theme, import_altair
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.report import STATE_TEXTS, State, best_text, label_of, rank_text, state_of
from tipbench.compare.verdict import NOT_CLEARLY_DIFFERENT, TIED, filter_text
from tipbench.markup import NOTHING
from tipbench.text import interval, join_names, number, one_line, plural, short_name

WIDE = 760  # total width in pixels
NARROW = 320  # on a phone

T = TypeVar("T")

SHAPES = {
    State.LEADER: "diamond",
    State.TIED: "circle",
    State.SEPARATED: "square",  # clearly worse than the leader
    State.INCOMPLETE: "triangle-up",
    State.REFERENCE: "cross",
}


def labels_of(board: Leaderboard, max_length: int) -> dict[Pair, str]:
    """Return a unique short label for each row."""
    labels = {}
    for pair in (standing.pair for standing in board.standings):
        if board.by is None:
            prompt_length = max(max_length // 2, max_length - 1 - len(one_line(pair.model)))
            prompt = short_name(pair.prompt, prompt_length)
            labels[pair] = f"{short_name(pair.model, max_length - 1 - len(prompt))}/{prompt}"
        else:
            labels[pair] = short_name(label_of(board, pair), max_length)
    return _unique(labels)


def _unique(labels: Mapping[T, str], *reserved: str) -> dict[T, str]:
    """Add numbers to labels that are repeated or reserved: "a (2)"."""
    taken, unique = set(reserved), {}
    for key, label in labels.items():
        unique[key], n = label, 1
        while unique[key] in taken:
            n += 1
            unique[key] = f"{label} ({n})"
        taken.add(unique[key])
    return unique


def state_colours(theme: Theme) -> dict[State, str]:
    """Return the colour of each state, strongest for the leader and tied rows."""
    return {
        State.LEADER: theme.palette[1],
        State.TIED: theme.accent,
        State.SEPARATED: theme.muted,
        State.INCOMPLETE: theme.muted,
        State.REFERENCE: theme.muted,
    }


def state_marks(alt: Any, board: Leaderboard, theme: Theme, *, narrow: bool) -> dict[str, Any]:
    """Return the encodings that show a point's state, with one legend."""
    present = {state_of(board, standing.pair) for standing in board.standings}
    states = [state for state in State if state in present]
    colours = state_colours(theme)
    legend = alt.Legend(orient="top", title=None, columns=1 if narrow else len(states), symbolSize=110, labelLimit=300)
    fills = [theme.background if state is State.INCOMPLETE else colours[state] for state in states]
    domain = [STATE_TEXTS[state] for state in states]

    def encoding(channel: Any, values: list[str]) -> Any:
        return channel("state_text:N", legend=legend, scale=alt.Scale(domain=domain, range=values))

    return {
        "shape": encoding(alt.Shape, [SHAPES[state] for state in states]),
        "stroke": encoding(alt.Stroke, [colours[state] for state in states]),
        "fill": encoding(alt.Fill, fills),
    }


MEAN = "\n"  # stands for all models or all prompts in a key of `heat_map_means`; cannot be a name


def heat_map_means(board: Leaderboard) -> tuple[list[str], list[str], dict[tuple[str, str], float | None]]:
    """Return models, prompts and means by (model, prompt).

    A key with MEAN has the mean over all pairs of a model or of a prompt; None unless all of them are ranked.
    """
    results = {standing.pair: standing.result for standing in board.standings}
    models = list(dict.fromkeys(pair.model for pair in results))
    prompts = sorted({pair.prompt for pair in results})

    def average(pairs: Sequence[Pair]) -> float | None:
        found = [results[pair] for pair in pairs if pair in results]
        ranked_means = [result.estimate.mean for result in found if result.is_ranked and result.estimate]
        return fmean(ranked_means) if ranked_means and len(ranked_means) == len(pairs) else None

    means: dict[tuple[str, str], float | None] = {}
    for model in models:
        for prompt in prompts:
            result = results.get(Pair(model, prompt))
            means[model, prompt] = result.estimate.mean if result and result.estimate else None
        means[model, MEAN] = average([Pair(model, prompt) for prompt in prompts])
    for prompt in prompts:
        means[MEAN, prompt] = average([Pair(model, prompt) for model in models])
    return models, prompts, means


def heat_map(board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False) -> Any | None:
    """Draw the mean of each pair as a coloured box; None if the board ranks only models or only prompts."""
    if board.by is not None:
        return None
    alt = import_altair()
    models, prompts, means = heat_map_means(board)
    model_names = {name: short_name(name, 18 if narrow else 34) for name in models}
    prompt_names = {name: short_name(name, 12 if narrow else 16) for name in prompts}
    row_labels = {**_unique(model_names, "mean"), MEAN: "mean"}
    column_labels = {**_unique(prompt_names, "mean"), MEAN: "mean"}
    pair_means = [mean for key, mean in means.items() if MEAN not in key and mean is not None]
    boxes_data = []
    for model, row in row_labels.items():
        for prompt, column in column_labels.items():
            mean = means.get((model, prompt))
            description = f"{short_name(model, 80)}/{short_name(prompt, 80)}: mean {number(mean) or 'unknown'}"
            shown = "" if model == prompt == MEAN else number(mean) or NOTHING
            box: dict[str, Any] = {"row": row, "column": column, "shown": shown, "text": description, "bold": False}
            box |= {"fill": theme.background, "ink": theme.ink, "edge": theme.background, "width": 0.0}
            if mean is not None and MEAN not in (model, prompt):
                state = state_of(board, Pair(model, prompt))
                fill = shade(theme, mean, min(pair_means), max(pair_means))
                box |= {"fill": fill, "ink": ink_on(fill), "edge": theme.ink, "bold": state is State.LEADER}
                box["width"] = {State.LEADER: 3.0, State.TIED: 1.2}.get(state, 0.0)
                box["shown"] = f"({shown})" if state is State.INCOMPLETE else shown
                box["text"] = f"{description}; {STATE_TEXTS[state]}"
            boxes_data.append(box)
    n_columns = len(prompts) + 1
    step = max(64, min(110, 620 // n_columns))  # width of a column in pixels; the rest of WIDE is for the model names
    if narrow:
        step = max(46, (NARROW - 130) // n_columns)
    label_width_px = max(len(label) for label in column_labels.values()) * 7  # a letter is about 7 pixels wide
    angle = -40 if label_width_px > step else 0
    top = alt.Axis(orient="top", title=None, domain=False, ticks=False, labelAngle=angle, labelLimit=140)
    side = alt.Axis(title=None, domain=False, ticks=False, labelLimit=250, labelPadding=6)
    x = alt.X("column:N", sort=list(column_labels.values()), axis=top, scale=alt.Scale(paddingInner=0.06))
    y = alt.Y("row:N", sort=list(row_labels.values()), axis=side, scale=alt.Scale(paddingInner=0.1))
    base = alt.Chart(alt.Data(values=boxes_data)).encode(x=x, y=y)
    boxes = base.mark_rect(cornerRadius=3).encode(
        fill=alt.Fill("fill:N", scale=None), stroke=alt.Stroke("edge:N", scale=None),
        strokeWidth=alt.StrokeWidth("width:Q", scale=None), description="text:N",
    )  # fmt: skip
    weight = {"fontWeight": {"expr": "datum.bold ? 'bold' : 'normal'"}}
    texts = base.mark_text(fontSize=13, **weight).encode(text="shown:N", color=alt.Color("ink:N", scale=None))
    return alt.layer(boxes, texts).properties(width=alt.Step(step), height=alt.Step(34))


def _composite_title(board: Leaderboard) -> str:
    if board.composite_range is None:
        return "composite (higher is better)"
    lowest, highest = board.composite_range
    return f"composite ({lowest:g} to {highest:g}, higher is better)"


def shade(theme: Theme, value: float, low: float, high: float) -> str:
    """Return a colour between a tint of the accent (at `low`) and the accent (at `high`)."""
    share = (value - low) / (high - low) if high > low else 0.5
    strength = 0.12 + 0.88 * share  # the lowest is still distinct from the background
    channels = zip(_channels(theme.background), _channels(theme.accent), strict=True)
    mixed = [round(background + (accent - background) * strength) for background, accent in channels]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def ink_on(fill: str) -> str:
    """Return black or white, whichever has more contrast to the fill (WCAG 2 luminance)."""
    channels = [channel / 255 for channel in _channels(fill)]
    red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    black_contrast, white_contrast = (luminance + 0.05) / 0.05, 1.05 / (luminance + 0.05)
    return "#000000" if black_contrast > white_contrast else "#ffffff"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


PARETO_WIDTH, PARETO_HEIGHT = 600, 340  # of the chart of quality against latency
LETTER_WIDTH = 6.3  # approximate, in pixels
LABEL_HEIGHT = 15  # pixels
_MAX_UNCONNECTED = 20  # pixels; a label further above or below is connected to its point by a line
_MAX_LATENCY_RATIO = 40  # a point with less than 1/40 of the longest latency is drawn at 1/40


@dataclass(frozen=True)
class Point:
    """A row with both a composite and a latency."""

    pair: Pair
    latency: float
    composite: float
    is_ranked: bool
    drawn_latency: float = 0.0  # the latency at which it is drawn, see _MAX_LATENCY_RATIO


def points_of(board: Leaderboard) -> list[Point]:
    """Return the rows with a composite and a latency, in board order."""
    points = []
    for standing in board.standings:
        estimate, latency = standing.result.estimate, standing.means.get("latency_s")
        if estimate is not None and latency is not None:
            points.append(Point(standing.pair, latency, estimate.mean, standing.result.is_ranked))
    # A row that takes almost no time would squeeze all others into a corner.
    shortest_drawn = max((point.latency for point in points), default=0.0) / _MAX_LATENCY_RATIO
    return [replace(point, drawn_latency=max(point.latency, shortest_drawn)) for point in points]


def front_of(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front of the ranked rows in composite and latency, fastest first."""
    front: list[Point] = []
    for point in sorted((p for p in points if p.is_ranked), key=lambda p: (p.latency, -p.composite)):
        if not front or point.composite > front[-1].composite:
            front.append(point)
    return front


def pareto(board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False) -> Any | None:
    """Draw composite against latency; None if no row has both."""
    points = points_of(board)
    if not points:
        return None
    alt = import_altair()
    width, height = (NARROW - 60, 300) if narrow else (PARETO_WIDTH, PARETO_HEIGHT)
    area = PlotArea.for_points(points, width, height)
    front = front_of(points)
    states = {point.pair: state_of(board, point.pair) for point in points}
    # Labels that do not fit are dropped, so the most important are placed first.
    labelled = [*(p for p in points if states[p.pair] is State.LEADER), *front]
    labelled += [p for p in points if states[p.pair] is State.TIED]
    if len(points) <= 15:
        labelled += points
    labels = labels_of(board, 22 if narrow else 34)
    label_texts = {}
    for p in labelled:
        label_texts[p] = labels[p.pair]
        if p.drawn_latency != p.latency:
            label_texts[p] += f" ({p.latency * 1000:.2g} ms)"
    placed = place_labels(area, points, label_texts)
    x_scale = alt.Scale(type="log" if area.log else "linear", domain=list(area.x), nice=False, zero=False)
    x = alt.X("latency:Q", scale=x_scale, axis=alt.Axis(title="latency in seconds, without load (left is faster)",
              tickCount=5, format="~g"))  # fmt: skip
    y = alt.Y("composite:Q", scale=alt.Scale(domain=list(area.y), nice=False, zero=False),
              axis=alt.Axis(title=_composite_title(board), tickCount=6))  # fmt: skip
    on_front = [{"latency": p.drawn_latency, "composite": p.composite} for p in front]
    line = alt.Chart(alt.Data(values=on_front)).mark_line(
        interpolate="step-after", color=theme.palette[2], strokeWidth=2, strokeDash=[6, 3]
    ).encode(x=x, y=y)  # fmt: skip
    rows = []
    for p in points:
        state_text = STATE_TEXTS[states[p.pair]]
        numbers = f"composite {number(p.composite)}, latency {number(p.latency)} s"
        unbeaten = "; no other pair beats it in both" if p in front else ""
        text = f"{short_name(label_of(board, p.pair), 160)}: {numbers}; {state_text}{unbeaten}"
        rows.append({"latency": p.drawn_latency, "composite": p.composite, "state_text": state_text, "text": text})
    dots = alt.Chart(alt.Data(values=rows)).mark_point(size=100, opacity=1, strokeWidth=2).encode(
        x=x, y=y, description="text:N", **state_marks(alt, board, theme, narrow=narrow)
    )  # fmt: skip
    pixels = {"scale": None, "axis": None}  # without a scale, positions are in pixels
    texts = [
        alt.Chart(alt.Data(values=[label for label in placed if label["align"] == align]))
        .mark_text(align=align, baseline="middle", color=theme.ink, fontSize=12)
        .encode(x=alt.X("x:Q", **pixels), y=alt.Y("y:Q", **pixels), text="label:N")
        for align in ("left", "right", "center")
    ]
    far = [label for label in placed if label["far"]]
    connections = alt.Chart(alt.Data(values=far)).mark_rule(color=theme.muted).encode(
        x=alt.X("from_x:Q", **pixels), y=alt.Y("from_y:Q", **pixels), x2="x:Q", y2="y:Q"
    )  # fmt: skip
    return alt.layer(line, connections, dots, *texts).properties(width=width, height=height)


@dataclass(frozen=True)
class PlotArea:
    """The ranges of both axes, and the size in pixels."""

    x: tuple[float, float]  # latency
    y: tuple[float, float]  # composite
    log: bool  # whether the latency axis is logarithmic
    width: int
    height: int

    @classmethod
    def for_points(cls, points: Sequence[Point], width: int, height: int) -> PlotArea:
        """Return an area with all points and some padding.

        The latency axis is logarithmic if the slowest point takes more than 30 times as long as the fastest.
        """
        fast, slow = min(p.drawn_latency for p in points), max(p.drawn_latency for p in points)
        low, high = min(p.composite for p in points), max(p.composite for p in points)
        y_padding = max((high - low) * 0.1, 0.25)
        y = low - y_padding, high + y_padding
        if fast > 0 and slow / fast > 30:
            return cls((fast / 1.5, slow * 1.5), y, log=True, width=width, height=height)
        x_padding = max((slow - fast) * 0.08, slow * 0.05, 0.01)
        return cls((max(fast - x_padding, 0.0), slow + x_padding), y, log=False, width=width, height=height)

    def pixels(self, point: Point) -> tuple[float, float]:
        """Return the distances of a point from the left and from the top."""
        (left, right), (low, high), latency = self.x, self.y, point.drawn_latency
        if self.log:
            left, right, latency = log(left), log(right), log(latency)
        from_left = (latency - left) / (right - left)
        from_top = (high - point.composite) / (high - low)
        return from_left * self.width, from_top * self.height


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        horizontally = self.left < other.right and other.left < self.right
        return horizontally and self.top < other.bottom and other.top < self.bottom


def place_labels(area: PlotArea, points: Sequence[Point], labels: Mapping[Point, str]) -> list[dict[str, float | str]]:
    """Place labels near their points, without overlaps. Labels that do not fit are dropped."""
    taken = [_Box(x - 7, y - 7, x + 7, y + 7) for x, y in map(area.pixels, points)]  # a point is 14 pixels wide
    for (x, y), (next_x, next_y) in pairwise(map(area.pixels, front_of(points))):  # the front's line: right, then up
        taken += [_Box(x, y - 2, next_x, y + 2), _Box(next_x - 2, next_y, next_x + 2, y)]
    placed: list[dict[str, float | str]] = []
    for point, label in labels.items():
        x, y = area.pixels(point)
        width = LETTER_WIDTH * len(label)
        for align, label_x, label_y in _label_positions(x, y):
            left = label_x - {"left": 0.0, "center": width / 2, "right": width}[align]
            box = _Box(left, label_y - LABEL_HEIGHT / 2, left + width, label_y + LABEL_HEIGHT / 2)
            inside = box.left >= 0 and box.right <= area.width and box.top >= 0 and box.bottom <= area.height
            if inside and not any(map(box.overlaps, taken)):
                taken.append(box)
                line = {"from_x": x, "from_y": y, "far": abs(label_y - y) > _MAX_UNCONNECTED}
                placed.append({"x": label_x, "y": label_y, "label": label, "align": align, **line})
                break
    return placed


def _label_positions(x: float, y: float) -> Iterator[tuple[str, float, float]]:
    """Yield possible positions of a label as (alignment, x, y), best first."""
    # Left and left above (both right-aligned) come first: the front's line comes from below and leaves to the right.
    yield from (
        ("right", x - 11, y), ("right", x - 6, y - 13), ("left", x + 11, y), ("left", x + 8, y + 13),
        ("center", x, y - 16), ("center", x, y + 17), ("right", x - 8, y + 13), ("left", x + 8, y - 13),
        ("right", x + 7, y - 17), ("right", x + 7, y + 17),
    )  # fmt: skip
    for y_shift in (sign * distance for distance in range(28, 140, 14) for sign in (-1, 1)):
        for align, x_shift in (("right", -14), ("left", 14), ("right", -70), ("left", 70)):
            yield align, x + x_shift, y + y_shift


NUMBERS_WIDTH = 190  # pixels of the column of numbers next to the intervals


def forest_rows(board: Leaderboard, max_length: int = 38) -> list[dict[str, Any]]:
    """Return one record per row, in board order."""
    labels = labels_of(board, max_length)
    rows = []
    for standing in board.standings:
        estimate, state = standing.result.estimate, state_of(board, standing.pair)
        value = "not judged"
        if estimate:
            bounds = interval(estimate.ci_low, estimate.ci_high) or "no interval"
            value = f"{number(estimate.mean)} ({bounds})"
        rank, best = rank_text(standing), best_text(board, standing)
        parts = [
            f"{short_name(label_of(board, standing.pair), 120)}: composite {value}",
            STATE_TEXTS[state],
            f"rank {rank}" if rank else None,
            f"probability of being best {best}" if best else None,
            f"judged {standing.n_judged} of {standing.n_cells}",
        ]
        rows.append(
            {
                "label": labels[standing.pair],
                "mean": estimate.mean if estimate else None,
                "low": estimate.ci_low if estimate else None,
                "high": estimate.ci_high if estimate else None,
                "value": value,
                "rank": f"rank {rank}" if rank else NOTHING,
                "state": str(state),
                "state_text": STATE_TEXTS[state],
                "shaded": bool(board.ranking.tied_ranked) and state in (State.LEADER, State.TIED),
                "text": "; ".join(part for part in parts if part),
            }
        )
    return rows


def forest(board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False, titled: bool = False) -> Any:
    """Draw the mean and 95 % interval of each row. `titled` adds a title, for a chart outside a report."""
    alt = import_altair()
    rows = forest_rows(board, 44 if narrow else 38)
    height = 46 if narrow else 26
    axis = None if narrow else alt.Axis(title=None, domain=False, ticks=False, labelPadding=8, labelLimit=270)
    y = alt.Y("label:N", sort=[row["label"] for row in rows], axis=axis, scale=alt.Scale(paddingInner=0))
    right_end = {"expr": f"width - {0 if narrow else NUMBERS_WIDTH}"}
    drawn = [row[key] for row in rows for key in ("low", "mean", "high") if row[key] is not None]
    low, high = (min(drawn), max(drawn)) if drawn else (0.0, 1.0)
    padding = max((high - low) * 0.04, 0.25) if drawn else 0.0
    x_scale = alt.Scale(domain=[low - padding, high + padding], nice=False, zero=False, range=[8, right_end])
    title = _composite_title(board) + ("" if narrow else ": mean and 95 % interval")  # no room on a phone
    x = alt.X("low:Q", scale=x_scale, axis=alt.Axis(title=title, grid=True, tickCount=6))
    base = alt.Chart(alt.Data(values=rows))
    offset = {"yOffset": 8} if narrow else {}  # below the label
    shading = base.transform_filter("datum.shaded").mark_rect(color=theme.accent, opacity=0.13).encode(
        y=y, x=alt.value(0), x2=alt.value("width")
    )  # fmt: skip
    states = [str(state) for state in State]
    dashes = [[4, 5] if state is State.INCOMPLETE else [1, 0] for state in State]
    colours = [state_colours(theme)[state] for state in State]
    line = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2.5, strokeCap="round", **offset).encode(
        y=y, x=x, x2="high:Q", description="text:N",
        strokeDash=alt.StrokeDash("state:N", legend=None, scale=alt.Scale(domain=states, range=dashes)),
        color=alt.Color("state:N", legend=None, scale=alt.Scale(domain=states, range=colours)),
    )  # fmt: skip
    dot = base.transform_filter("isValid(datum.mean)").mark_point(size=120, opacity=1, strokeWidth=2, **offset).encode(
        y=y, x=alt.X("mean:Q", scale=x_scale), description="text:N",
        **state_marks(alt, board, theme, narrow=narrow),
    )  # fmt: skip
    bold = {"fontWeight": {"expr": "datum.state === 'leader' ? 'bold' : 'normal'"}}
    style = {"baseline": "middle", "color": theme.ink, "fontSize": 12, "align": "left", **bold}
    if narrow:
        text = base.mark_text(**style, limit=NARROW - 16, dx=6, yOffset=-11).encode(y=y, x=alt.value(0), text="label:N")
    else:
        numbers_x = alt.XValue({"expr": f"width - {NUMBERS_WIDTH}"})
        text = base.mark_text(**style, dx=14).encode(y=y, x=numbers_x, text="value:N")
    chart = alt.layer(shading, line, dot, text).resolve_scale(color="independent").properties(
        width=NARROW if narrow else WIDE, height=alt.Step(height),
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    )  # fmt: skip
    if not titled:
        return chart
    rows_name = f"{board.by}s" if board.by else "pairs of model and prompt"
    provisional = " · provisional scores" if board.provisional else ""
    scenarios = plural(board.ranking.n_units, board.unit)
    lines = [f"{short_name(board.experiment, 60)} · over {scenarios}{provisional}"]
    if filters := filter_text(board.where, board.judge):
        lines.append(short_name(filters, 110))
    if board.ranking.tied_ranked:
        lines.append(f"shaded: the leader and the rows {NOT_CLEARLY_DIFFERENT} from it (by paired differences)")
    return chart.properties(title=alt.Title(f"Scores of the {rows_name}", subtitle=lines))


ChartKind = Literal["forest", "heat", "pareto"]
_MAX_NAME = 80  # characters of a name in a description


@dataclass(frozen=True)
class BoardChart:
    """A kind of chart."""

    title: str
    caption: str
    draw: Callable[..., Any]
    describe: Callable[[Leaderboard], str]


def kinds_of(board: Leaderboard) -> Iterator[ChartKind]:
    """Yield the kinds of chart that apply to the board; none if no row has a score."""
    if not any(standing.result.estimate for standing in board.standings):
        return
    yield "forest"
    if board.by is None:
        yield "heat"
    if points_of(board):
        yield "pareto"


def _describe_forest(board: Leaderboard) -> str:
    means = [standing.result.estimate.mean for standing in board.standings if standing.result.estimate]
    leader = board.ranking.leader
    lead = f"{_full_name(board, leader)} leads" if leader else "no row leads"
    tied = [_full_name(board, pair) for pair in board.ranking.tied_ranked]
    ties = f"; {TIED} with {join_names(tied, 4)}" if tied else ""
    span = f"composites from {number(min(means))} to {number(max(means))}"
    return f"Forest plot of {plural(len(means), 'row')}: {span}; {lead}{ties}. The table of standings has all numbers."


def _describe_heat(board: Leaderboard) -> str:
    models, prompts, means = heat_map_means(board)
    known = {key: mean for key, mean in means.items() if MEAN not in key and mean is not None}
    model, prompt = max(known, key=lambda key: known[key])
    grid = f"{plural(len(models), 'model')} by {plural(len(prompts), 'prompt')}"
    best = f"{short_name(model, _MAX_NAME)} with {short_name(prompt, _MAX_NAME)}, {number(known[model, prompt])}"
    return f"Heat map of mean composites, {grid}; highest: {best}. The table below has all numbers."


def _describe_pareto(board: Leaderboard) -> str:
    points = points_of(board)
    front = [f"{_full_name(board, p.pair)} ({number(p.latency)} s, {number(p.composite)})" for p in front_of(points)]
    line = f"no other row is both better and faster than {join_names(front, 4)}" if front else "no row is ranked"
    return f"Composite against latency of {plural(len(points), 'row')}: {line}."


def _full_name(board: Leaderboard, pair: Pair) -> str:
    return short_name(label_of(board, pair), _MAX_NAME)


CHARTS: Mapping[ChartKind, BoardChart] = {
    "forest": BoardChart(
        "Composite with its 95 % interval",
        f"Shaded rows are {NOT_CLEARLY_DIFFERENT} from the leader. Rows are compared by paired differences, so a row "
        "can be clearly worse although the intervals overlap.",
        forest,
        _describe_forest,
    ),
    "heat": BoardChart(
        "Model × prompt",
        "Mean composite of each pair, with the means of models and prompts. Thick frame: the leader; thin frame: "
        f"{TIED} with it; in brackets: not ranked.",
        heat_map,
        _describe_heat,
    ),
    "pareto": BoardChart(
        "Quality against latency",
        "Up is better, left is faster. The dashed line connects the ranked rows that no other one beats in both. "
        "Latency excludes loading the model.",
        pareto,
        _describe_pareto,
    ),
}
