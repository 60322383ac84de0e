"""How rows of a board are marked in its charts: short names, and a shape, a colour and words for each state."""

from __future__ import annotations

from typing import Any

from tipbench.charts import Theme
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.report import State, label_of, one_line, shortened, state_of

WIDE = 760  # the whole picture, in pixels
NARROW = 320

SAID = {
    State.LEADER: "leader",
    State.TIED: "cannot be told apart from it",
    State.SEPARATED: "separated from it",
    State.INCOMPLETE: "incomplete, not ranked",
}
SHAPES = {
    State.LEADER: "diamond",
    State.TIED: "circle",
    State.SEPARATED: "square",
    State.INCOMPLETE: "triangle-up",
}


def labels_of(board: Leaderboard, most: int) -> dict[Pair, str]:
    """A short name for each row, no two alike."""
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
        return shortened(label_of(board, pair), most)
    prompt = shortened(one_line(pair.prompt), max(most // 2, most - 1 - len(one_line(pair.model))))
    return f"{shortened(one_line(pair.model), most - 1 - len(prompt))}/{prompt}"


def state_colours(theme: Theme) -> dict[State, str]:
    """Strong where it matters."""
    return {
        State.LEADER: theme.palette[1],
        State.TIED: theme.accent,
        State.SEPARATED: theme.muted,
        State.INCOMPLETE: theme.muted,
    }


def state_marks(alt: Any, board: Leaderboard, theme: Theme, *, narrow: bool) -> dict[str, Any]:
    """Encodings of a point by its state: shape, outline, and a filling unless it is incomplete; one legend."""
    there = {state_of(board, standing.pair) for standing in board.standings}
    states = [state for state in State if state in there]
    colours = state_colours(theme)
    domain = [SAID[state] for state in states]
    legend = alt.Legend(orient="top", title=None, columns=1 if narrow else len(states), symbolSize=110, labelLimit=300)
    inside = [theme.background if state is State.INCOMPLETE else colours[state] for state in states]
    return {
        "shape": alt.Shape("said:N", legend=legend, scale=alt.Scale(domain=domain, range=[SHAPES[s] for s in states])),
        "stroke": alt.Stroke(
            "said:N", legend=legend, scale=alt.Scale(domain=domain, range=[colours[s] for s in states])
        ),
        "fill": alt.Fill("said:N", legend=legend, scale=alt.Scale(domain=domain, range=inside)),
    }
