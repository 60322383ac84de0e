"""Ranks pairs: paired differences, step-down tests, rank ranges, probability of best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tipbench.compare.matrix import Pair, ScoreMatrix
from tipbench.compare.resampling import FLIPS, MIN_SCENARIOS, NOTHING, RESAMPLES, SEED, best_shares, better_than
from tipbench.compare.statistics import (
    Difference,
    Estimate,
    differences_to,
    mean_estimate,
    pseudo_values,
    scenarios_needed,
    smallest_detectable,
)


@dataclass(frozen=True)
class Gap:
    """The most complete row and its missing scenarios; without core scenarios, the scenario and its missing rows."""

    core: int  # number of scenarios in which at least half of the rows are judged
    rows: int
    nearest: str
    lacks: tuple[str, ...]


def gap_of(matrix: ScoreMatrix) -> Gap | None:
    """Returns what is missing for a ranking; None if a row is complete or nothing is judged."""
    if matrix.complete.any() or not matrix.judged.any():
        return None
    pairs, scenarios = [str(pair) for pair in matrix.pairs], list(matrix.scenarios)
    core = int(matrix.core.sum())
    if core:
        rows = np.flatnonzero(matrix.core)
        nearest = int(matrix.judged[rows].sum(axis=0).argmax())
        lacks = [scenarios[row] for row in rows if not matrix.judged[row, nearest]]
        return Gap(core, len(pairs), pairs[nearest], tuple(lacks))
    nearest = int(matrix.judged.sum(axis=1).argmax())
    lacks = [pair for at, pair in enumerate(pairs) if not matrix.judged[nearest, at]]
    return Gap(core, len(pairs), scenarios[nearest], tuple(lacks))


@dataclass(frozen=True)
class Row:
    """One pair with its statistics. Ranks and `p_best` are None for incomplete rows."""

    pair: Pair
    complete: bool
    estimate: Estimate | None  # over its own scenarios; None if nothing is judged
    level: float | None  # sort key; None if incomplete
    rank: int | None = None
    rank_low: int | None = None
    rank_high: int | None = None
    p_best: float | None = None
    to_leader: Difference | None = None  # None for the leader, or without shared scenarios
    to_baseline: Difference | None = None


@dataclass(frozen=True)
class Ranking:
    """Rows in rank order (incomplete ones last), and the numbers of the verdict."""

    rows: tuple[Row, ...]
    leader: Pair | None
    tied: tuple[Pair, ...]  # complete rows not separated from the leader
    decided: bool  # at least two complete rows, and all others significantly worse than the leader
    scenarios_needed: int | None  # in total, to separate every tied row; None if decided or unknown
    smallest_detectable: float | None  # difference detected with 80 % power
    n_scenarios: int  # core scenarios
    too_few: bool  # below MIN_SCENARIOS, nothing can be decided
    gap: Gap | None = None  # what is missing, if no row is complete

    @cached_property
    def complete(self) -> frozenset[Pair]:
        """The ranked pairs, cached for lookups per row."""
        return frozenset(row.pair for row in self.rows if row.complete)

    @cached_property
    def tied_set(self) -> frozenset[Pair]:
        """`tied` as a set, cached for lookups per row."""
        return frozenset(self.tied)


def rank(
    matrix: ScoreMatrix,
    *,
    baseline: Pair | None = None,
    seed: int = SEED,
    flips: int = FLIPS,
    resamples: int = RESAMPLES,
) -> Ranking:
    """Ranks all rows, with rank ranges, probability of being best, and tests against leader and baseline."""
    ranked = _ranked_rows(matrix, seed=seed, flips=flips, resamples=resamples)
    leader = next(iter(ranked), None)
    to_leader = differences_to(matrix, leader, seed=seed, flips=flips) if leader else {}
    to_baseline = differences_to(matrix, baseline, seed=seed, flips=flips) if baseline else {}
    rows = [_row(matrix, pair, ranked, to_leader, to_baseline) for pair in _in_order(matrix, ranked)]
    rivals = {row.pair: row.to_leader for row in rows if row.complete and row.pair != leader}
    tied = {pair: diff for pair, diff in rivals.items() if diff is None or not diff.separated}
    worse = [diff for diff in rivals.values() if diff and diff.separated and diff.mean < 0]
    core = int(matrix.core.sum())
    return Ranking(
        rows=tuple(rows),
        leader=leader,
        tied=tuple(tied),
        decided=bool(rivals) and len(worse) == len(rivals),
        scenarios_needed=_needed_for(tied),
        smallest_detectable=_detectable(rivals, core),
        n_scenarios=core,
        too_few=core < MIN_SCENARIOS,
        gap=gap_of(matrix),
    )


@dataclass(frozen=True)
class _Place:
    level: float
    rank: int
    rank_low: int
    rank_high: int
    p_best: float | None


def _ranked_rows(matrix: ScoreMatrix, *, seed: int, flips: int, resamples: int) -> dict[Pair, _Place]:
    board = matrix.only(matrix.complete)
    k = len(board.pairs)
    if not k:
        return {}
    pseudo = pseudo_values(board.values)
    level = pseudo.mean(axis=0)
    better = better_than(board.values, seed=seed, flips=flips)
    shares = best_shares(pseudo, seed=seed, resamples=resamples) if len(pseudo) >= 2 or k == 1 else None
    places = {
        pair: _Place(
            level=float(level[at]),
            rank=1 + int((level > level[at] + NOTHING).sum()),
            rank_low=1 + int(better[:, at].sum()),
            rank_high=k - int(better[at].sum()),
            p_best=None if shares is None else float(shares[at]),
        )
        for at, pair in enumerate(board.pairs)
    }
    return dict(sorted(places.items(), key=lambda item: (item[1].rank, item[0])))


def _in_order(matrix: ScoreMatrix, ranked: Mapping[Pair, _Place]) -> list[Pair]:
    means = {pair: mean_estimate(matrix.values[:, at]) for at, pair in enumerate(matrix.pairs) if pair not in ranked}
    rest = sorted(means.items(), key=lambda item: (item[1] is None, -item[1].mean if item[1] else 0.0, item[0]))
    return [*ranked, *(pair for pair, _ in rest)]


def _row(
    matrix: ScoreMatrix,
    pair: Pair,
    ranked: Mapping[Pair, _Place],
    to_leader: Mapping[Pair, Difference | None],
    to_baseline: Mapping[Pair, Difference | None],
) -> Row:
    row = Row(
        pair=pair,
        complete=pair in ranked,
        estimate=mean_estimate(matrix.values[:, matrix.pairs.index(pair)]),
        level=None,
        to_leader=to_leader.get(pair),
        to_baseline=to_baseline.get(pair),
    )
    place = ranked.get(pair)
    if place is None:
        return row
    return replace(
        row,
        level=place.level,
        rank=place.rank,
        rank_low=place.rank_low,
        rank_high=place.rank_high,
        p_best=place.p_best,
    )


def _needed_for(tied: Mapping[Pair, Difference | None]) -> int | None:
    """Returns the largest number needed by any tied row; None if it is unknown for one of them."""
    needs = [_needed(diff, len(tied)) for diff in tied.values()]
    known = [need for need in needs if need is not None]
    return max(known) if known and len(known) == len(needs) else None


def _needed(diff: Difference | None, comparisons: int) -> int | None:
    if diff is None:
        return None
    return scenarios_needed(diff.mean, diff.sd, comparisons=comparisons, at_least=max(MIN_SCENARIOS, diff.n + 1))


def _detectable(rivals: Mapping[Pair, Difference | None], n: int) -> float | None:
    spreads = [diff.sd for diff in rivals.values() if diff and diff.sd]
    return smallest_detectable(float(np.median(spreads)), n, comparisons=len(rivals)) if spreads else None
