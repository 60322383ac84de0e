"""Standings table: columns, sorting and cell texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.matrix import Pair
from tipbench.compare.report import NOTHING, State, best_text, label_of, p_text, rank_text, state_of
from tipbench.compare.statistics import Difference
from tipbench.text import interval, number, percent, short_name

LONGEST = 90  # characters of a name; JSON and CSV have the full name
STANDING = {
    State.LEADER: "leader",
    State.TIED: "tied",
    State.SEPARATED: "clearly worse",
    State.INCOMPLETE: "not ranked",
}
FLAGS = {
    "incomplete": "not judged in every scenario, so not ranked",
    "failed": "cells without a complete answer",
    "stale": "runs of an older model build, prompt or scenario are excluded",
    "truncated": "answers cut off at the token limit",
    "floored": "no usable answer; scored with the rubric's lowest scores",
    "foreign_resident": "generated while another model was in memory",
}
_FORMATS: Mapping[str, tuple[str, Callable[..., str | None], str]] = {
    "format_ok": ("format", percent, "Share of answers in exactly the requested format"),
    "overlong": ("overlong", percent, "Share of tips over the rubric's word limit"),
    "diversity": ("diversity", number, "How different the tips of one answer are: 0 to 1"),
    "latency_s": ("latency s", number, "Seconds for an answer, without loading the model"),
    "tokens_per_s": ("tokens/s", partial(number, form=".1f"), "Tokens a second; not comparable across hosts"),
}

Value = float | str | None


@dataclass(frozen=True)
class TableCell:
    """A table cell: its text, and smaller lines below it."""

    text: str
    sub: tuple[str, ...] = ()
    state: str | None = None  # shown as a badge if set


@dataclass(frozen=True)
class Column:
    """A table column: its title, cell contents, sort value and initial sort direction."""

    key: str
    title: str
    about: str
    show: Callable[[Standing], TableCell]
    value: Callable[[Standing], Value]
    high_first: bool = False
    text: bool = False


@dataclass(frozen=True)
class TableRow:
    """A row of the table."""

    pair: Pair
    model: str
    prompt: str
    state: str
    cells: tuple[TableCell, ...]
    flags: tuple[tuple[str, str], ...]
    is_baseline: bool


@dataclass(frozen=True)
class Table:
    """The columns, and the rows sorted by `sort`."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    sort: str | None
    fault: str | None = None  # error message for an unknown `sort`

    def turned(self, column: Column) -> str:
        """Returns the `sort` value of a click on a column header: best values first, then reversed."""
        first, second = (f"-{column.key}", column.key) if column.high_first else (column.key, f"-{column.key}")
        return second if self.sort == first else first

    def direction(self, column: Column) -> str | None:
        """Returns the value of `aria-sort` for a column, or None if the table is not sorted by it."""
        return {column.key: "ascending", f"-{column.key}": "descending"}.get(self.sort or "")


def standings(board: Leaderboard, sort: str | None = None) -> Table:
    """Returns the table of a board; an unknown `sort` keeps the board's order."""
    columns = tuple(_columns(board))
    by = {column.key: column for column in columns}.get((sort or "").removeprefix("-"))
    fault = f"The table cannot be sorted by {sort[:40]!r}: there is no such column." if sort and by is None else None
    ordered = _sorted(board.standings, by, descending=(sort or "").startswith("-")) if by else board.standings
    rows = tuple(_row(board, standing, columns) for standing in ordered)
    return Table(columns, rows, sort if by else None, fault)


def _sorted(rows: Sequence[Standing], by: Column, *, descending: bool) -> list[Standing]:
    """Sorts rows with unknown values last in both directions; ties keep the board's order."""
    known = [row for row in rows if by.value(row) is not None]
    unknown = [row for row in rows if by.value(row) is None]
    return [*sorted(known, key=by.value, reverse=descending), *unknown]  # type: ignore[arg-type]


def _columns(board: Leaderboard) -> Iterator[Column]:
    yield Column("rank", "rank", "Rank and rank range", _rank, lambda row: row.row.rank)
    yield Column("composite", "composite", "Mean composite with its 95 % interval", _composite, _mean, high_first=True)
    best = partial(best_text, board)
    yield Column(
        "p_best", "P(best)", "Chance of being the best row",
        lambda row: TableCell(best(row) or NOTHING), lambda row: row.row.p_best, high_first=True,
    )  # fmt: skip
    yield from _differences(board)
    yield Column(
        "standing",
        "standing",
        "Compared with the leader",
        lambda row: TableCell(STANDING[state_of(board, row.pair)], state=str(state_of(board, row.pair))),
        lambda row: list(State).index(state_of(board, row.pair)),
        text=True,
    )
    for scale in board.scales:
        yield _measure(scale, short_name(scale, 24), number, "Mean of the scale")
    for key, (title, form, about) in _FORMATS.items():
        yield _measure(key, title, form, about, high_first=key not in ("overlong", "latency_s"))
    yield Column(
        "judged", "judged", "Judged cells of all cells",
        lambda row: TableCell(f"{row.judged}/{row.total}", (f"{row.failed} failed",) if row.failed else ()),
        lambda row: row.judged, high_first=True,
    )  # fmt: skip


def _differences(board: Leaderboard) -> Iterator[Column]:
    sides = [("leader", "to_leader", "to leader", "Row − leader")]
    if board.baseline is not None:
        name = short_name(label_of(board, board.baseline), LONGEST)
        sides.insert(0, ("baseline", "to_baseline", "to baseline", f"Row − {name}"))
    for key, attribute, title, about in sides:
        yield Column(
            key, title, f"{about}, with its 95 % interval; p is adjusted for all rows",
            partial(_difference, board, attribute), partial(_difference_value, attribute), high_first=True,
        )  # fmt: skip


def _measure(key: str, title: str, form: Callable[..., str | None], about: str, *, high_first: bool = True) -> Column:
    return Column(
        key,
        title,
        about,
        lambda row: TableCell(form(row.means.get(key)) or NOTHING),
        lambda row: row.means.get(key),
        high_first,
    )


def _rank(standing: Standing) -> TableCell:
    row = standing.row
    wide = row.rank is not None and row.rank_low != row.rank_high
    return TableCell(str(row.rank) if row.rank else NOTHING, (f"{row.rank_low}–{row.rank_high}",) if wide else ())


def _mean(standing: Standing) -> float | None:
    return standing.row.estimate.mean if standing.row.estimate else None


def _composite(standing: Standing) -> TableCell:
    found = standing.row.estimate
    ends = interval(found.ci_low, found.ci_high) if found else None
    return TableCell(number(_mean(standing)) or NOTHING, (ends,) if ends else ())


def _difference(board: Leaderboard, attribute: str, standing: Standing) -> TableCell:
    found: Difference | None = getattr(standing.row, attribute)
    own = board.ranking.leader if attribute == "to_leader" else board.baseline
    if standing.pair == own:
        return TableCell(NOTHING)
    if found is None:
        return TableCell(NOTHING)
    p = p_text(found)
    words = baseline_words(found) if attribute == "to_baseline" else None
    p_words = f"p {p if p.startswith('<') else f'= {p}'}" if p else None
    parts = (interval(found.ci_low, found.ci_high, "+.2f"), p_words, words)
    return TableCell(number(found.mean, "+.2f") or NOTHING, tuple(part for part in parts if part))


def baseline_words(found: Difference | None) -> str | None:
    """Describes a difference; None if it cannot be decided."""
    if found is None or found.separated is None:
        return None
    return "not clearly different" if not found.separated else "better" if found.mean > 0 else "worse"


def _difference_value(attribute: str, standing: Standing) -> float | None:
    found: Difference | None = getattr(standing.row, attribute)
    return found.mean if found else None


def _row(board: Leaderboard, standing: Standing, columns: Sequence[Column]) -> TableRow:
    pair = standing.pair
    return TableRow(
        pair=pair,
        model="" if board.by == "prompt" else short_name(pair.model, LONGEST),
        prompt="" if board.by == "model" else short_name(pair.prompt, LONGEST),
        state=str(state_of(board, pair)),
        cells=tuple(column.show(standing) for column in columns),
        flags=tuple((flag, FLAGS.get(flag, flag)) for flag in standing.flags),
        is_baseline=pair == board.baseline,
    )


def rank_words(standing: Standing) -> str:
    """Returns a row's rank as text."""
    text = rank_text(standing)
    return f"rank {text}" if text else "not ranked"
