"""Quality against latency, with the line of pairs that no other pair beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any

from tipbench.charts import LIGHT, Theme, import_altair
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.marks import NARROW, SAID, labels_of, state_marks
from tipbench.compare.matrix import Pair
from tipbench.compare.report import State, label_of, number, shortened, state_of

WIDTH, HEIGHT = 600, 340
LETTER = 6.3  # pixels, about, at the size of the labels
LINE = 15


@dataclass(frozen=True)
class Point:
    """A row that has both numbers."""

    pair: Pair
    latency: float
    composite: float
    complete: bool


def points_of(board: Leaderboard) -> list[Point]:
    """The rows with a score and a latency, in the board's order."""
    points = []
    for standing in board.standings:
        estimate, latency = standing.row.estimate, standing.means.get("latency_s")
        if estimate is not None and latency is not None:
            points.append(Point(standing.pair, latency, estimate.mean, standing.row.complete))
    return points


def front_of(points: Sequence[Point]) -> list[Point]:
    """The complete rows that no other is at least as fast and better than, or as good and faster; fastest first."""
    front: list[Point] = []
    for point in sorted((p for p in points if p.complete), key=lambda p: (p.latency, -p.composite)):
        if not front or point.composite > front[-1].composite:
            front.append(point)
    return front


def pareto(board: Leaderboard, theme: Theme = LIGHT, *, narrow: bool = False, titled: bool = True) -> Any | None:
    """Each pair's composite against its latency; None when no row has both."""
    points = points_of(board)
    if not points:
        return None
    alt = import_altair()
    size = (NARROW - 60, 300) if narrow else (WIDTH, HEIGHT)
    frame = _Frame.around(points, *size)
    front = front_of(points)
    labels = labels_of(board, 22 if narrow else 34)
    named = place_labels(frame, points, [(p, labels[p.pair]) for p in _worth_naming(board, points, front)])
    x_scale = alt.Scale(type="log" if frame.log else "linear", domain=list(frame.x), nice=False, zero=False)
    x = alt.X("latency:Q", scale=x_scale, axis=alt.Axis(title="latency in seconds, without load (left is faster)",
              tickCount=5, format="~g"))  # fmt: skip
    y = alt.Y("composite:Q", scale=alt.Scale(domain=list(frame.y), nice=False, zero=False),
              axis=alt.Axis(title="composite (up is better)", tickCount=6))  # fmt: skip
    line = alt.Chart(alt.Data(values=[vars_of(p) for p in front])).mark_line(
        interpolate="step-after", color=theme.palette[2], strokeWidth=2, strokeDash=[6, 3]
    ).encode(x=x, y=y)  # fmt: skip
    rows = [{**vars_of(p), "said": SAID[state_of(board, p.pair)], "text": _sentence(board, p, front)} for p in points]
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
    return chart.properties(title=alt.Title("Quality against latency", subtitle=_subtitle(board)))


def vars_of(point: Point) -> dict[str, float]:
    return {"latency": point.latency, "composite": point.composite}


def _subtitle(board: Leaderboard) -> list[str]:
    lines = ["dashed line: the pairs that no other pair beats in both; they are named first, as far as there is room"]
    if len(board.hosts) > 1:
        lines.append(f"from {len(board.hosts)} hosts: latencies do not compare across them")
    return lines


def _sentence(board: Leaderboard, point: Point, front: Sequence[Point]) -> str:
    where = "; no other pair beats it in both" if point in front else ""
    name = shortened(label_of(board, point.pair), 160)
    return (
        f"{name}: composite {number(point.composite)}, latency {number(point.latency)} s; "
        f"{SAID[state_of(board, point.pair)]}{where}"
    )


def _worth_naming(board: Leaderboard, points: Sequence[Point], front: Sequence[Point]) -> list[Point]:
    """Leader and front first: where labels do not fit, the last ones go."""
    states = {point.pair: state_of(board, point.pair) for point in points}
    ranked = [*(p for p in points if states[p.pair] is State.LEADER), *front]
    ranked += [p for p in points if states[p.pair] is State.TIED]
    if len(points) <= 15:
        ranked += points
    return list(dict.fromkeys(ranked))


@dataclass(frozen=True)
class _Frame:
    """Where a number stands in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool
    width: int
    height: int

    @classmethod
    def around(cls, points: Sequence[Point], width: int, height: int) -> _Frame:
        fast, slow = min(p.latency for p in points), max(p.latency for p in points)
        low, high = min(p.composite for p in points), max(p.composite for p in points)
        air = max((high - low) * 0.1, 0.25)
        if fast > 0 and slow / fast > 30:
            return cls((fast / 1.5, slow * 1.5), (low - air, high + air), True, width, height)
        side = max((slow - fast) * 0.08, slow * 0.05, 0.01)
        return cls((max(fast - side, 0.0), slow + side), (low - air, high + air), False, width, height)

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
    """Labels beside their points, where they cover no point, line or other label; what does not fit is left out."""
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
    """The line of the front: to the right, then up."""
    boxes = []
    for (x, y), (next_x, next_y) in pairwise(places):
        boxes += [(x, y - 2, next_x, y + 2), (next_x - 2, next_y, next_x + 2, y)]
    return boxes


def _spots(x: float, y: float) -> list[tuple[str, float, float]]:
    """Up and to the left first: beside the front that side is empty."""
    return [
        ("right", x - 11, y), ("right", x - 6, y - 13), ("left", x + 11, y), ("left", x + 8, y + 13),
        ("center", x, y - 16), ("center", x, y + 17), ("right", x - 8, y + 13), ("left", x + 8, y - 13),
        ("right", x + 7, y - 17), ("right", x + 7, y + 17),
    ]  # fmt: skip


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
