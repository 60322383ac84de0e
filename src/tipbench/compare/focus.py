"""Selects the cells to judge next: those that most reduce uncertainty about the leader."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tipbench.compare.cells import BoardCells
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import Ranking, Row


@dataclass(frozen=True)
class Focus:
    """The cells to judge first: those of the leader and the rows tied with it, by scenario."""

    pairs: tuple[Pair, ...]
    scenarios: tuple[str, ...]  # most useful first
    run_ids: frozenset[str]


def focus(cells: BoardCells, ranking: Ranking) -> Focus | None:
    """Returns the cells to judge next; None without a leader, without ties, or if no top cells are left to judge.

    One more shared scenario reduces the squared error of a paired mean by sd² / n(n + 1). The value of a scenario is
    the sum over the tied rows it would newly pair with the leader, each weighted by its p (how undecided it is).
    """
    if ranking.leader is None or not ranking.tied:
        return None
    top = (ranking.leader, *ranking.tied)
    done: dict[str, set[Pair]] = defaultdict(set)
    open_: dict[str, set[Pair]] = defaultdict(set)
    run_ids: dict[str, set[str]] = defaultdict(set)
    for cell in cells.cells:
        if cell.pair not in top or cell.failed:
            continue
        if cell.values:
            done[cell.scenario].add(cell.pair)
        else:
            open_[cell.scenario].add(cell.pair)
            run_ids[cell.scenario].add(cell.run.run_id)
    value = {scenario: _value(ranking, done[scenario], done[scenario] | pairs) for scenario, pairs in open_.items()}
    useful = sorted((scenario for scenario in value if value[scenario] > 0), key=lambda each: (-value[each], each))
    if not useful:
        return None
    return Focus(top, tuple(useful), frozenset().union(*(run_ids[scenario] for scenario in useful)))


def _value(ranking: Ranking, before: set[Pair], after: set[Pair]) -> float:
    rows: Mapping[Pair, Row] = {row.pair: row for row in ranking.rows}
    leader = ranking.leader
    if leader is None or leader not in after:
        return 0.0
    newly_paired = [pair for pair in ranking.tied if pair in after and not (pair in before and leader in before)]
    return sum(_uncertainty(rows[pair]) for pair in newly_paired)


def _uncertainty(row: Row) -> float:
    diff = row.to_leader
    if diff is None or diff.sd is None or diff.p is None:
        return 1.0  # unknown difference: maximum uncertainty
    return diff.p * diff.sd**2 / (diff.n * (diff.n + 1))
