"""Charts on the board page: sizes, descriptions, routes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from tipbench.compare.charts import HEIGHT, NARROW, WIDE, WIDTH, front_of, heat_rows, points_of
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.report import label_of, state_of
from tipbench.text import join_names, number, one_line, plural, short_name
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import BoardUrl, ChartKind, ChartQuery, PageAsk, ThemeName, chart
from tipbench.web.deps import PanelState, Store
from tipbench.web.errors import NotFound
from tipbench.web.queries import get_experiment
from tipbench.web.queries import revision as revision_of

_NAMED = 4
_LETTER = 6.2  # approximate width of a label's character, in pixels
_SLANT = 0.64  # height of a slanted label, relative to its length

Size = tuple[int, int]


@dataclass(frozen=True)
class Source:
    """One variant of a chart image."""

    url: str
    width: int
    height: int


@dataclass(frozen=True)
class Figure:
    """A chart on the page, in light and dark, wide and narrow variants."""

    kind: ChartKind
    title: str
    alt: str
    caption: str
    light: Source
    dark: Source
    narrow_light: Source
    narrow_dark: Source


def charts_there() -> bool:
    """Returns whether the extra `charts` is installed."""
    return all(importlib.util.find_spec(name) for name in ("altair", "vl_convert"))


def figures(board: Leaderboard, url: BoardUrl, revision: str | None) -> dict[ChartKind, Figure]:
    """Returns the board's charts by kind."""
    return {kind: _figure(kind, board, url, revision) for kind in kinds_of(board)}


def kinds_of(board: Leaderboard) -> Iterator[ChartKind]:
    """Yields the kinds of chart that apply to the board; none if no row has a score."""
    if not any(standing.row.estimate for standing in board.standings):
        return
    yield "forest"
    if board.by is None:
        yield "heat"
    if points_of(board):
        yield "pareto"


def _figure(kind: ChartKind, board: Leaderboard, url: BoardUrl, revision: str | None) -> Figure:
    sizes = {narrow: chart_size(kind, board, narrow=narrow) for narrow in (False, True)}

    def source(theme: str, *, narrow: bool) -> Source:
        width, height = sizes[narrow]
        return Source(url.chart(kind, theme=theme, narrow=narrow, revision=revision), width, height)

    words = _WORDS[kind]
    return Figure(
        kind=kind,
        title=words.title,
        alt=words.say(board),
        caption=words.caption,
        light=source("light", narrow=False),
        dark=source("dark", narrow=False),
        narrow_light=source("light", narrow=True),
        narrow_dark=source("dark", narrow=True),
    )


def chart_size(kind: ChartKind, board: Leaderboard, *, narrow: bool) -> Size:
    """Returns the width and height of a chart in pixels."""
    rows = len(board.standings)
    states = len({state_of(board, standing.pair) for standing in board.standings})
    if kind == "forest":
        return (NARROW, 46 * rows + 58 + 16 * states) if narrow else (WIDE, 26 * rows + 74)
    if kind == "pareto":
        return (NARROW - 12, 358 + 16 * states) if narrow else (WIDTH + 48, HEIGHT + 74)
    return _heat_size(board, narrow=narrow)


def _heat_size(board: Leaderboard, *, narrow: bool) -> Size:
    models, prompts, _ = heat_rows(board)
    columns = len(prompts) + 1
    step = max(46, (NARROW - 130) // columns) if narrow else max(64, min(110, 620 // columns))
    side = min(18 if narrow else 34, max(len(one_line(model)) for model in models))
    top = min(12 if narrow else 16, max(len(one_line(prompt)) for prompt in prompts))
    head = 20 + _SLANT * _LETTER * top if top * 7 > step else 25
    return round(14 + _LETTER * side + step * columns), round(34 * (len(models) + 1) + head)


def _forest_words(board: Leaderboard) -> str:
    known = [standing for standing in board.standings if standing.row.estimate]
    means = [standing.row.estimate.mean for standing in known if standing.row.estimate]
    leader = board.ranking.leader
    lead = f"{_name(board, leader)} leads" if leader else "no row leads"
    tied = [_name(board, pair) for pair in board.ranking.tied]
    rest = f"; tied with {join_names(tied, _NAMED)}" if tied else ""
    span = f"composites from {number(min(means))} to {number(max(means))}"
    return f"Forest plot of {plural(len(known), 'row')}: {span}; {lead}{rest}. The table of standings has all numbers."


def _heat_words(board: Leaderboard) -> str:
    models, prompts, means = heat_rows(board)
    known = {(m, p): means[m, p] for m in models for p in prompts if means[m, p] is not None}
    (model, prompt), value = max(known.items(), key=lambda item: item[1] or 0.0)
    grid = f"{plural(len(models), 'model')} by {plural(len(prompts), 'prompt')}"
    best = f"{short_name(model, 80)} with {short_name(prompt, 80)}"
    return f"Heat map of mean composites, {grid}; highest: {best}, {number(value)}. The table below has all numbers."


def _pareto_words(board: Leaderboard) -> str:
    points = points_of(board)
    front = [f"{_name(board, p.pair)} ({number(p.latency)} s, {number(p.composite)})" for p in front_of(points)]
    line = f"no other row is both better and faster than {join_names(front, _NAMED)}" if front else "no row is complete"
    return f"Composite against latency of {plural(len(points), 'row')}: {line}."


def _name(board: Leaderboard, pair: Pair) -> str:
    return short_name(label_of(board, pair), 80)


@dataclass(frozen=True)
class _Words:
    title: str
    caption: str
    say: Callable[[Leaderboard], str]


_WORDS: Mapping[ChartKind, _Words] = {
    "forest": _Words(
        "Composite with its 95 % interval",
        "Shaded rows are not clearly different from the leader. Rows are compared by paired differences, so a row can "
        "be clearly worse although the intervals overlap.",
        _forest_words,
    ),
    "heat": _Words(
        "Model × prompt",
        "Mean composite of each pair, with the means of models and prompts. Thick frame: the leader; thin frame: tied "
        "with it; in brackets: incomplete.",
        _heat_words,
    ),
    "pareto": _Words(
        "Quality against latency",
        "Up is better, left is faster. The dashed line connects the complete rows that no other row beats in both. "
        "Latency excludes loading the model.",
        _pareto_words,
    ),
}


# Charts contain untrusted names: sandboxed, so that they have no scripts and no origin when opened directly.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
FOR_GOOD = "private, max-age=31536000, immutable"

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@router.get("/experiments/{experiment:path}/charts/{kind}.svg")
def chart_picture(
    experiment: ExperimentPath,
    kind: ChartKind,
    ask: PageAsk,
    panel: PanelState,
    store: Store,
    theme: ThemeName = "light",
    narrow: bool = False,
    revision: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """Returns a chart as SVG; cacheable indefinitely if the URL contains the current revision."""
    found = get_experiment(store, experiment)
    svg = chart(panel.queries, store, found, ask, ChartQuery(kind, theme, narrow))
    if svg is None:
        raise NotFound(f"This board has no {kind} chart: no row has the data for it.", path="path.kind")
    now = revision_of(found)
    kept = {"Cache-Control": FOR_GOOD} if now is not None and revision == now else {}
    headers = {"Content-Security-Policy": POLICY, **kept}
    return Response(svg.encode("utf-8", "backslashreplace"), media_type="image/svg+xml", headers=headers)
