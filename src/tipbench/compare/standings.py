"""The table of standings in HTML: its columns, its sort order and the texts of its cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.matrix import Pair
from tipbench.compare.report import STATE_TEXTS, State, best_text, label_of, p_text, rank_text, state_of
from tipbench.compare.statistics import Difference
from tipbench.compare.verdict import NOT_CLEARLY_DIFFERENT
from tipbench.markup import NOTHING, duration
from tipbench.text import interval, number, percent, short_name

MAX_NAME_CHARS = 90  # in a table; JSON and CSV have the full name
FLAG_TEXTS = {
    "incomplete": "too few scenarios judged in common with the leader, so not ranked",
    "adjusted": "lacks scenarios: its mean is also shown adjusted for these",
    "failed": "cells without a complete answer",
    "stale": "runs of an older model build, prompt or scenario are excluded",
    "truncated": "prompts truncated by the server, because they did not fit into the context",
    "floored": "no usable answer; scored with the rubric's lowest scores",
    "foreign_resident": "generated while another model was in memory",
}


@dataclass(frozen=True)
class TableCell:
    """A cell of the table."""

    text: str
    small_lines: tuple[str, ...] = ()  # below the text
    value: float | None = None  # rows are sorted by it
    state: str | None = None  # shown as a badge if set


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    key: str  # in the URL
    title: str
    description: str
    high_first: bool = False  # the first click on the header sorts in descending order
    is_text: bool = False  # has texts, not numbers
    extra: bool = False  # hidden until the user shows it


@dataclass(frozen=True)
class TableRow:
    """A row of the table; its cells are in the order of the columns."""

    pair: Pair
    model: str
    prompt: str
    state: str
    cells: tuple[TableCell, ...]
    flags: tuple[tuple[str, str], ...]  # (flag, its description)
    is_baseline: bool


@dataclass(frozen=True)
class Table:
    """The columns, and the rows sorted by `sort`."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    sort: str | None  # key of a column, with a leading `-` if descending; None for the order of the board
    sort_fault: str | None = None  # error message for an unknown `sort`

    def sort_on_click(self, column: Column) -> str:
        """Return the `sort` value of a click on a column header. The first click sorts best values first."""
        first, second = (f"-{column.key}", column.key) if column.high_first else (column.key, f"-{column.key}")
        return second if self.sort == first else first

    def direction(self, column: Column) -> str | None:
        """Return the value of `aria-sort` for a column, or None if the table is not sorted by it."""
        if self.sort == column.key:
            return "ascending"
        return "descending" if self.sort == f"-{column.key}" else None


def standings_table(board: Leaderboard, sort: str | None = None) -> Table:
    """Return the table of a board, with references last. An unknown `sort` keeps the order of the board."""
    columns = tuple(_columns(board))
    keys = [column.key for column in columns]
    rows = [_row(board, standing) for standing in board.standings]
    references = [_row(board, standing) for standing in board.references]
    sort_key = (sort or "").removeprefix("-")
    if sort_key not in keys:
        fault = f"The table cannot be sorted by {sort[:40]!r}: there is no such column." if sort else None
        return Table(columns, (*rows, *references), sort=None, sort_fault=fault)
    sort_index = keys.index(sort_key)
    sign = 1 if sort == sort_key else -1

    def order(row: TableRow) -> tuple[bool, float]:
        value = row.cells[sort_index].value
        return value is None, sign * (value or 0.0)  # unknown values are last in both directions

    return Table(columns, (*sorted(rows, key=order), *references), sort)


def _columns(board: Leaderboard) -> Iterator[Column]:
    """Yield the columns, in the order of `_cells`."""
    yield Column("rank", "rank", "Rank and rank range")
    composite_range = ""
    if board.composite_range:
        lowest, highest = board.composite_range
        composite_range = f", {lowest:g} to {highest:g}"
    composite = f"Mean composite{composite_range}, higher is better, with its 95 % interval"
    yield Column("composite", "composite", composite, high_first=True)
    yield Column("p_best", "P(best)", "Chance of being the best row", high_first=True)
    interval_and_p = f"with its {board.confidence} interval; p is adjusted for all rows"
    if board.baseline is not None:
        name = short_name(label_of(board, board.baseline), MAX_NAME_CHARS)
        yield Column("baseline", "to baseline", f"Row − {name}, {interval_and_p}", high_first=True)
    yield Column("leader", "to leader", f"Row − leader, {interval_and_p}", high_first=True)
    yield Column("standing", "standing", "Compared with the leader", is_text=True)
    yield Column("latency_s", "latency", "Time for an answer, without loading the model")
    yield Column("judged", "judged", "Judged cells / all cells", high_first=True)
    usable = "Scenarios with a usable tip, and the exact 95 % interval of their rate"
    yield Column("usable", "usable", usable, high_first=True, extra=True)
    for scale in board.scales:
        yield Column(scale, short_name(scale, 24), "Mean of the scale", high_first=True, extra=True)
    yield Column("format_ok", "format", "Share of answers in exactly the requested format", high_first=True, extra=True)
    yield Column("overlong", "overlong", "Share of tips over the rubric's word limit", extra=True)
    diversity = "How different the tips of one answer are: 0 to 1"
    yield Column("diversity", "diversity", diversity, high_first=True, extra=True)
    tokens = "Tokens a second; not comparable across hosts"
    yield Column("tokens_per_s", "tokens/s", tokens, high_first=True, extra=True)


def _cells(board: Leaderboard, standing: Standing, state: State) -> Iterator[TableCell]:
    """Yield the cells of a row, in the order of `_columns`."""
    result, means = standing.result, standing.means
    rank_range = None
    if result.rank is not None and result.rank_low != result.rank_high:
        rank_range = f"{result.rank_low}–{result.rank_high}"
    yield _cell(result.rank, str(result.rank) if result.rank else None, rank_range)
    adjusted = f"{number(result.adjusted_mean)} adjusted" if result.is_adjusted else None
    estimate = result.estimate
    if estimate is None:
        yield _cell(None, None, adjusted)
    else:
        bounds = interval(estimate.ci_low, estimate.ci_high)
        yield _cell(estimate.mean, number(estimate.mean), bounds, adjusted)
    yield _cell(result.p_best, best_text(board, standing))
    if board.baseline is not None:
        yield _difference_cell(result.to_baseline, baseline_words(result.to_baseline))
    yield _difference_cell(result.to_leader)
    best_first = list(State)
    yield TableCell(STATE_TEXTS[state], value=best_first.index(state), state=str(state))
    yield _cell(means.get("latency_s"), duration(means.get("latency_s")))
    failed = f"{standing.n_failed} failed" if standing.n_failed else None
    yield _cell(standing.n_judged, f"{standing.n_judged}/{standing.n_cells}", failed)
    if (usable := standing.usable) is None:
        yield _cell(None, None)
    else:
        count = f"{usable.n_usable:g} of {usable.n_scenarios}"
        composite = None
        if usable.composite is not None and usable.rate < 1:  # else it equals the row's composite
            composite = f"{number(usable.composite)} if usable"
        yield _cell(usable.rate, count, f"{percent(usable.low)} to {percent(usable.high)}", composite)
    for scale in board.scales:
        yield _cell(means.get(scale), number(means.get(scale)))
    yield _cell(means.get("format_ok"), percent(means.get("format_ok")))
    yield _cell(means.get("overlong"), percent(means.get("overlong")))
    yield _cell(means.get("diversity"), number(means.get("diversity")))
    yield _cell(means.get("tokens_per_s"), number(means.get("tokens_per_s"), ".1f"))


def _cell(value: float | None, text: str | None, *small_lines: str | None) -> TableCell:
    return TableCell(text or NOTHING, tuple(line for line in small_lines if line), value)


def _difference_cell(difference: Difference | None, words: str | None = None) -> TableCell:
    if difference is None:
        return TableCell(NOTHING)
    p = p_text(difference)
    p_words = None
    if p is not None:
        p_words = f"p {p}" if p.startswith("<") else f"p = {p}"
    bounds = interval(difference.ci_low, difference.ci_high, "+.2f")
    return _cell(difference.mean, number(difference.mean, "+.2f"), bounds, p_words, words)


def baseline_words(difference: Difference | None) -> str | None:
    """Return how a row compares with the baseline, such as "better"; None if the difference is not tested."""
    if difference is None or difference.separated is None:
        return None
    if not difference.separated:
        return NOT_CLEARLY_DIFFERENT
    return "better" if difference.better else "worse"


def _row(board: Leaderboard, standing: Standing) -> TableRow:
    pair, state = standing.pair, state_of(board, standing.pair)
    return TableRow(
        pair=pair,
        model="" if board.by == "prompt" else short_name(pair.model, MAX_NAME_CHARS),
        prompt="" if board.by == "model" or state is State.REFERENCE else short_name(pair.prompt, MAX_NAME_CHARS),
        state=str(state),
        cells=tuple(_cells(board, standing, state)),
        flags=tuple((flag, FLAG_TEXTS[flag]) for flag in standing.flags),
        is_baseline=pair == board.baseline,
    )


def rank_words(standing: Standing) -> str:
    """Return the rank of a row as words: `rank 2 (1–4)` or `not ranked`."""
    text = rank_text(standing)
    return f"rank {text}" if text else "not ranked"
