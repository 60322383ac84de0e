"""What a reader must know before believing a board: whose scores, which cells, what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tipbench.compare.cells import BoardCells
from tipbench.compare.matrix import OTHER, Pair, Side, shared_by_all
from tipbench.compare.ranking import Ranking
from tipbench.compare.resampling import MIN_SCENARIOS
from tipbench.compare.standing import Standing
from tipbench.compare.words import counted, listed

_LISTED = 3
_PAIRS = 12


def board_notes(
    cells: BoardCells,
    ranking: Ranking,
    standings: Sequence[Standing],
    hosts: Sequence[str],
    by: Side | None,
    unit: str = "scenario",
) -> Iterable[str]:
    """In the order of their weight."""
    if not any(standing.judged for standing in standings):
        yield "Nobody has scored a cell yet: `tipbench judge export` makes a sheet for a judge."
    elif cells.provisional:
        yield f"Provisional: scored by {', '.join(cells.judges) or 'nobody yet'}, not by people."
    if asked := question_text(cells.question.where, cells.question.judge):
        yield f"{asked[:1].upper()}{asked[1:]}."
    yield from _left_out(cells, by)
    if any("incomplete" in standing.flags for standing in standings):
        yield "Rows that are not judged in every scenario are not ranked (flag: incomplete)."
    if ranking.too_few and any(row.p_best is not None for row in ranking.rows):
        yield f"P(best) is shown from {MIN_SCENARIOS} {unit}s on: fewer say too little."
    if len(hosts) > 1:
        yield f"Latency and tokens/s come from {len(hosts)} hosts and do not compare across them."


def question_text(where: Mapping[str, str], judge: str | None) -> str:
    """What was asked of the cells, in words; empty when it was everything."""
    asked = listed((f"{key}={value}" for key, value in where.items()), _PAIRS)
    parts = [f"only cells with {asked}" if asked else "", f"only {judge}'s scores" if judge else ""]
    return "; ".join(part for part in parts if part)


def _left_out(cells: BoardCells, by: Side | None) -> Iterable[str]:
    if cells.other_conditions:
        ids = " or ".join(f"--where conditions={each}" for each in cells.other_ids[:_LISTED])
        yield f"{left_out(cells.other_conditions, 'under other conditions')}; {ids or '--where'} shows them."
    if stale := sum(cells.stale.values()):
        yield f"{left_out(stale, 'of older model builds, prompts or scenarios')} (flag: stale)."
    if by is not None:
        yield from _left_out_by(cells, by)


def left_out(runs: int, which: str) -> str:
    """So many runs of a sort are left out."""
    return f"{counted(runs, 'run')} {which} {'is' if runs == 1 else 'are'} left out"


def _left_out_by(cells: BoardCells, by: Side) -> Iterable[str]:
    """Rows are means over the other side, so only what all of them have can count."""
    pairs = {cell.pair for cell in cells.cells}
    shared = shared_by_all(pairs, by)
    left = sorted({getattr(pair, OTHER[by]) for pair in pairs} - shared)
    if not shared:
        yield f"No {OTHER[by]} stands beside every {by}, so the {by}s cannot be ranked alone."
    elif left:
        yield f"Not every {by} has {', '.join(left)}: left out of the means by {by}."


def not_on_board(pair: Pair, there: Sequence[Pair], cells: BoardCells) -> str:
    """Why a pair that was named cannot be looked at, and which can."""
    stale = cells.stale.get(pair, 0)
    if stale:
        runs = f"all {stale} runs of it are" if stale > 1 else "its only run is"
        return f"There is no pair {pair} on this board: {runs} of an older build or prompt. Collect it again."
    others = f" {left_out(cells.other_conditions, 'under other conditions')}." if cells.other_conditions else ""
    named = ", ".join(map(str, there[:_PAIRS])) + (f" and {len(there) - _PAIRS} more" if there[_PAIRS:] else "")
    return f"There is no pair {pair} on this board. There are: {named}.{others}"
