"""Ranks pairs: paired differences, step-down tests at planned looks, rank ranges, probability of being best.

Two pairs are compared over the scenarios in which both are judged. A pair is ranked if it shares enough scenarios with
the leader. Means and P(best) use all scores. Tests use only the scenarios of the design's latest look, at the level of
the design. Without a design, they use all scenarios, at ALPHA. On a board by model or by prompt, a pair stands for a
model or a prompt (`averaged_pair`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tipbench.compare.matrix import Floats, Mask, Pair, ScoreMatrix
from tipbench.compare.resampling import ALPHA, N_FLIPS, N_RESAMPLES, TOLERANCE, empirical_bayes, significantly_better
from tipbench.compare.statistics import (
    Difference,
    Estimate,
    additive_fit,
    conditional_power,
    paired_difference,
    scenarios_needed,
    shown_estimate,
    sidak_critical_t,
    simultaneous_differences,
    smallest_detectable,
    untested,
)
from tipbench.plan.design import MIN_SCENARIOS, Design, least_scenarios

MAX_GROWTH = 10  # a decision that needs more than this multiple of the present scenarios is out of reach


@dataclass(frozen=True)
class MissingScores:
    """The scores that are missing for a first ranking.

    `closest` is what is nearest to being complete: a pair, and `lacks` has the core scenarios that it lacks. If there
    are no core scenarios yet, it is a scenario, and `lacks` has the pairs that are not judged in it.
    """

    n_core: int  # core scenarios
    n_needed: int  # core scenarios that a pair needs to be ranked; 0 if there are no core scenarios
    n_pairs: int
    closest: str
    lacks: tuple[str, ...]


def missing_scores(matrix: ScoreMatrix, *, needs_all_core: bool = False) -> MissingScores | None:
    """Return the scores that are missing for a ranking; None if a pair can lead, or if nothing is judged.

    With `needs_all_core`, only a pair with all core scenarios can lead. Means per persona need this: a mean
    over fewer of a persona's scenarios is not comparable.
    """
    can_lead = matrix.complete if needs_all_core else _can_lead(matrix)
    if can_lead.any() or not matrix.judged.any():
        return None
    pairs, scenarios = [str(pair) for pair in matrix.pairs], list(matrix.scenarios)
    n_core = int(matrix.core.sum())
    if n_core:
        closest = int(matrix.judged[matrix.core].sum(axis=0).argmax())
        lacks = [scenarios[index] for index in np.flatnonzero(matrix.core & ~matrix.judged[:, closest])]
        n_needed = n_core if needs_all_core else min(MIN_SCENARIOS, n_core)
        return MissingScores(n_core, n_needed, n_pairs=len(pairs), closest=pairs[closest], lacks=tuple(lacks))
    closest = int(matrix.judged.sum(axis=1).argmax())
    lacks = [pair for column, pair in enumerate(pairs) if not matrix.judged[closest, column]]
    return MissingScores(n_core, n_needed=0, n_pairs=len(pairs), closest=scenarios[closest], lacks=tuple(lacks))


@dataclass(frozen=True)
class Look:
    """A planned interim analysis of the design."""

    number: int  # from 1
    of: int  # number of looks of the design
    at: int  # number of scenarios that it tests: the first ones of the design

    def to_json(self) -> dict[str, int]:
        """Return the value of `look` in the JSON of a leaderboard."""
        return {"number": self.number, "of": self.of, "at": self.at}


@dataclass(frozen=True)
class NextLook:
    """The next planned look, the judging that it needs, and its conditional power."""

    look: Look
    power: float | None  # chance to decide at this look; None if too little is judged to estimate it
    # Filled in by `make_board`:
    n_scenarios: int = 0  # to judge before this look
    n_answers: int = 0  # to judge before this look
    minutes: float | None = None  # of judging, at the measured pace; None if the pace is unknown

    def to_json(self) -> dict[str, Any]:
        """Return the value of `next_look` in the JSON of a leaderboard."""
        return {
            **self.look.to_json(),
            "scenarios": self.n_scenarios,
            "answers": self.n_answers,
            "minutes": self.minutes,
            "power": self.power,
        }


@dataclass(frozen=True)
class PairResult:
    """One pair with its statistics. Ranks and `p_best` are None if it is not ranked."""

    pair: Pair
    is_ranked: bool
    estimate: Estimate | None  # over its own scenarios; None if it is not judged
    adjusted_mean: float | None  # mean adjusted for missing scenarios; None if it cannot be estimated
    is_adjusted: bool = False  # its scenarios are not exactly the core ones: `adjusted_mean` and `estimate` can differ
    rank: int | None = None
    rank_low: int | None = None  # best rank that the tests leave open
    rank_high: int | None = None  # worst rank that the tests leave open
    p_best: float | None = None  # probability of being the best ranked pair
    to_leader: Difference | None = None  # pair − leader; None for the leader, or without shared scenarios
    to_baseline: Difference | None = None  # pair − baseline
    is_stale: bool = False  # all its runs are stale


@dataclass(frozen=True)
class Ranking:
    """The result of `rank`. Units are scenarios, or personas if the matrix has means per persona."""

    rows: tuple[PairResult, ...]  # the ranked pairs in rank order, then the others, then stale ones
    leader: Pair | None
    tied: tuple[Pair, ...]  # ranked pairs not significantly different from the leader, then unranked pairs with scores
    # At least two pairs have answers, all of these are ranked, and the leader is significantly better than the others.
    decided: bool
    units_needed: int | None  # in total, to decide with 80 % power; None if decided, unknown or out of reach
    smallest_detectable: float | None  # smallest true difference to the leader that is detected with 80 % power
    n_units: int  # core units
    too_few_units: bool  # fewer than MIN_SCENARIOS: nothing can be decided
    level: float = ALPHA  # significance level of the tests
    look: Look | None = None  # the latest look reached; None also if no looks are planned
    next_look: NextLook | None = None
    n_tested: int = 0  # core units in the tests; 0 before the first look
    references: tuple[PairResult, ...] = ()  # best first
    to_reference: Difference | None = None  # leader − best reference, as a single test
    silent: tuple[Pair, ...] = ()  # pairs without any answer; they do not prevent a decision
    missing_scores: MissingScores | None = None  # None if a pair can lead or nothing is judged; added by `make_board`

    @cached_property
    def ranked(self) -> frozenset[Pair]:
        """The ranked pairs."""
        return frozenset(row.pair for row in self.rows if row.is_ranked)

    @cached_property
    def tied_ranked(self) -> tuple[Pair, ...]:
        """The tied pairs that are ranked, and therefore tested."""
        return tuple(pair for pair in self.tied if pair in self.ranked)

    @cached_property
    def unranked(self) -> tuple[PairResult, ...]:
        """The unranked pairs that prevent a decision: neither silent nor stale."""
        return tuple(row for row in self.rows if not (row.is_ranked or row.is_stale or row.pair in self.silent))

    @cached_property
    def ahead(self) -> tuple[Pair, ...]:
        """Ranked pairs that are significantly better than the leader in the tested scenarios, despite a lower mean."""
        return tuple(row.pair for row in self.rows if row.is_ranked and row.to_leader and row.to_leader.better)

    @property
    def beats_reference(self) -> bool | None:
        """Whether the leader is significantly better than the best reference; None if unknown."""
        if self.to_reference is None or self.to_reference.separated is None:
            return None
        return self.to_reference.better


@dataclass(frozen=True)
class RankOptions:
    """Everything that a ranking depends on besides the scores."""

    baseline: Pair | None = None
    design: Design | None = None  # None if no looks are planned
    finished_scenarios: frozenset[str] = frozenset()  # those in which no answer waits for a judge
    silent: frozenset[Pair] = frozenset()  # pairs without any answer
    stale: frozenset[Pair] = frozenset()  # pairs whose runs are all stale, so the matrix does not have them
    n_flips: int = N_FLIPS
    n_resamples: int = N_RESAMPLES

    @property
    def level(self) -> float:
        """The significance level of each test."""
        return self.design.level if self.design else ALPHA


def rank(matrix: ScoreMatrix, options: RankOptions | None = None, references: ScoreMatrix | None = None) -> Ranking:
    """Rank the pairs of `matrix`, and compare those of `references` with the leader.

    Both matrices have the same scenarios.
    """
    options = options or RankOptions()
    if references is None:
        references = replace(matrix, pairs=(), values=np.empty((len(matrix.scenarios), 0)))
    values, core, design = matrix.values, matrix.core, options.design
    n_core = int(core.sum())
    adjusted_means, leader, ranked = _leader_and_ranked(matrix)
    look, look_scenarios = _latest_look(matrix, ranked, options)
    leader_pair, leader_values = None, None
    to_leader: Mapping[Pair, Difference | None] = {}
    to_baseline: Mapping[Pair, Difference | None] = {}
    p_best: Mapping[Pair, float] = {}
    shrinkage = 1.0
    if leader is not None:
        leader_pair, leader_values = matrix.pairs[leader], values[:, leader]
        to_leader = _differences(matrix, ranked, leader_pair, leader_values, look_scenarios, options)
        p_best, shrinkage = _p_best_and_shrinkage(matrix.select(ranked), options.n_resamples)
    if options.baseline is not None:
        source = references if options.baseline in references.pairs else matrix
        baseline_values = source.values[:, source.pairs.index(options.baseline)]
        to_baseline = _differences(matrix, ranked, options.baseline, baseline_values, look_scenarios, options)
    rows = []
    for column, pair in enumerate(matrix.pairs):
        estimate, adjusted_mean = shown_estimate(values[:, column]), float(adjusted_means[column])
        has_adjusted_mean = not np.isnan(adjusted_mean)
        row = PairResult(
            pair=pair,
            is_ranked=bool(ranked[column]),
            estimate=estimate,
            adjusted_mean=adjusted_mean if has_adjusted_mean else None,
            is_adjusted=bool(estimate and has_adjusted_mean and (matrix.judged[:, column] != core).any()),
            p_best=p_best.get(pair),
            to_leader=to_leader.get(pair),
            to_baseline=to_baseline.get(pair),
        )
        rows.append(row)
    tested_scores = np.where(look_scenarios[:, None], values[:, ranked], np.nan)
    ranked_rows = _with_ranks([row for row in rows if row.is_ranked], tested_scores, options)
    ranked_rows.sort(key=lambda row: (row.rank or 0, row.pair))
    other_rows = sorted((row for row in rows if not row.is_ranked), key=_order_without_rank)
    stale_rows = [
        PairResult(pair, is_ranked=False, estimate=None, adjusted_mean=None, is_stale=True)
        for pair in sorted(options.stale)
    ]
    # Every ranked pair except the leader has a difference, because it shares scenarios with the leader.
    rivals = {row.pair: row.to_leader for row in ranked_rows if row.to_leader is not None}
    tied = {pair: difference for pair, difference in rivals.items() if not difference.separated}
    unranked_rows = [row for row in other_rows if row.pair not in options.silent]
    # A pair with too few scores to be ranked is not tested, so it may still be the best.
    too_few_judged = [row.pair for row in unranked_rows if row.estimate] if leader is not None else []
    sds = [difference.sd for difference in rivals.values() if difference.sd]
    median_sd = float(np.median(sds)) if sds else None
    n_tested = int((look_scenarios & core).sum())
    reference_rows = _reference_rows(references, leader_pair, leader_values, look_scenarios, options)
    ranking = Ranking(
        rows=(*ranked_rows, *other_rows, *stale_rows),
        leader=leader_pair,
        tied=(*tied, *too_few_judged),
        decided=bool(rivals) and not unranked_rows and all(difference.worse for difference in rivals.values()),
        units_needed=_scenarios_needed(tied, shrinkage, options.level, n_core),
        smallest_detectable=smallest_detectable(
            median_sd, n_tested or n_core, comparisons=len(rivals), level=options.level
        ),
        n_units=n_core,
        too_few_units=n_core < MIN_SCENARIOS,
        level=options.level,
        look=look,
        n_tested=n_tested,
        references=reference_rows,
        to_reference=_negated(reference_rows[0].to_leader) if reference_rows else None,
        silent=tuple(sorted(options.silent)),
    )
    return replace(ranking, next_look=_next_look(ranking, matrix, design, shrinkage)) if design else ranking


def _can_lead(matrix: ScoreMatrix) -> Mask:
    """Return a mask of the pairs that are judged in at least six core scenarios, or in all if there are fewer."""
    judged_in_core = matrix.judged[matrix.core]
    n_core = len(judged_in_core)
    if not n_core:
        return np.zeros(len(matrix.pairs), dtype=bool)
    return np.asarray(judged_in_core.sum(axis=0) >= min(MIN_SCENARIOS, n_core))


def _leader_and_ranked(matrix: ScoreMatrix) -> tuple[Floats, int | None, Mask]:
    """Return the adjusted means, the column of the leader, and a mask of the ranked pairs.

    An adjusted mean is the mean of (score − scenario effect) over the pair's scenarios. The leader has the highest. A
    pair is ranked if it could lead and shares enough scenarios with the leader.
    """
    can_lead = _can_lead(matrix)
    if not can_lead.any():
        return np.full(len(matrix.pairs), np.nan), None, can_lead
    effects = additive_fit(matrix.values[:, can_lead], matrix.core).scenario_effects[:, None]
    counted = matrix.judged & ~np.isnan(effects)
    counts = counted.sum(axis=0)
    sums = np.where(counted, matrix.values - effects, 0.0).sum(axis=0)
    adjusted_means = sums / np.where(counts > 0, counts, np.nan)
    # If several pairs are equal but for rounding errors, the first leads.
    highest = np.max(adjusted_means[can_lead])
    leader = int(np.flatnonzero(can_lead & (adjusted_means >= highest - TOLERANCE))[0])
    n_shared = (matrix.judged & matrix.judged[:, [leader]]).sum(axis=0)  # scenarios each pair shares with the leader
    n_needed = min(MIN_SCENARIOS, int(matrix.core.sum()))
    return adjusted_means, leader, np.asarray(can_lead & (n_shared >= n_needed))


def judged_scenarios(matrix: ScoreMatrix, finished_scenarios: frozenset[str]) -> frozenset[str]:
    """Return the scenarios that count as judged at a look: finished ones, and core scenarios.

    Answers in a core scenario that wait for a judge do not delay a look.
    """
    core_scenarios = (name for name, is_core in zip(matrix.scenarios, matrix.core, strict=True) if is_core)
    return finished_scenarios.union(core_scenarios)


def _latest_look(matrix: ScoreMatrix, ranked: Mask, options: RankOptions) -> tuple[Look | None, Mask]:
    """Return the latest look reached and a mask of its scenarios. Without a design, returns None and all scenarios.

    A look is reached when all its scenarios count as judged, and every ranked pair is judged in enough of them to be
    tested at the design's level. Scenarios that are judged later are not tested before the next look.
    """
    design = options.design
    if design is None:
        return None, np.ones(len(matrix.scenarios), dtype=bool)
    reached, reached_scenarios = None, np.zeros(len(matrix.scenarios), dtype=bool)
    judged = judged_scenarios(matrix, options.finished_scenarios)
    for number, at in enumerate(design.looks, start=1):
        names = set(design.scenarios[:at])
        scenarios = np.array([name in names for name in matrix.scenarios], dtype=bool)
        n_judged = matrix.judged[np.ix_(scenarios, ranked)].sum(axis=0)  # scenarios of each ranked pair
        can_be_tested = ranked.any() and n_judged.min() >= least_scenarios(design.level)
        if names <= judged and can_be_tested:
            reached, reached_scenarios = Look(number, len(design.looks), at), scenarios
    return reached, reached_scenarios


def _differences(
    matrix: ScoreMatrix, ranked: Mask, other: Pair, other_values: Floats, scenarios: Mask, options: RankOptions
) -> dict[Pair, Difference | None]:
    """Return pair − `other` for all pairs but `other`. Only ranked pairs are tested, as one family over `scenarios`."""
    family = [column for column, pair in enumerate(matrix.pairs) if ranked[column] and pair != other]
    tested_values = np.where(scenarios[:, None], matrix.values[:, family], np.nan)
    differences = simultaneous_differences(tested_values, other_values, options.level, n_flips=options.n_flips)
    tested = {matrix.pairs[column]: difference for column, difference in zip(family, differences, strict=True)}
    return {
        pair: tested.get(pair) or untested(paired_difference(matrix.values[:, column], other_values))
        for column, pair in enumerate(matrix.pairs)
        if pair != other
    }


def _p_best_and_shrinkage(ranked: ScoreMatrix, n_resamples: int) -> tuple[Mapping[Pair, float], float]:
    """Return each pair's probability of being the best, and the shrinkage of `EmpiricalBayes`.

    With several pairs in a single scenario, errors cannot be estimated: there are no probabilities, and the shrinkage
    is 1, which changes nothing.
    """
    if len(ranked.scenarios) == 1 and len(ranked.pairs) > 1:
        return {}, 1.0
    # Scores can be missing, but resampling needs complete values: the pseudo-values.
    fit = additive_fit(ranked.values, core=np.ones(len(ranked.scenarios), dtype=bool))
    posterior = empirical_bayes(fit.pseudo_values, n_resamples=n_resamples)
    return dict(zip(ranked.pairs, posterior.p_best.tolist(), strict=True)), posterior.shrinkage


def _with_ranks(rows: Sequence[PairResult], tested_scores: Floats, options: RankOptions) -> list[PairResult]:
    """Add ranks and rank ranges to the ranked rows. `tested_scores` has a column for each row."""
    if not rows:
        return []
    # [i, j]: row i is significantly better than row j.
    better = significantly_better(tested_scores, n_flips=options.n_flips, level=options.level)
    # The tests against the leader are a smaller family, so they can find more differences. Add those in which the
    # leader wins; otherwise the rank ranges could contradict `decided`.
    leader = next(i for i, row in enumerate(rows) if row.to_leader is None)
    for i, row in enumerate(rows):
        if row.to_leader is not None and row.to_leader.worse:
            better[leader, i] = True
            better[i, leader] = False
    adjusted_means = np.array([row.adjusted_mean for row in rows], dtype=np.float64)
    return [
        replace(
            row,
            rank=1 + int((adjusted_means > adjusted_means[i] + TOLERANCE).sum()),
            rank_low=1 + int(better[:, i].sum()),
            rank_high=len(rows) - int(better[i].sum()),
        )
        for i, row in enumerate(rows)
    ]


def _reference_rows(
    references: ScoreMatrix,
    leader: Pair | None,
    leader_values: Floats | None,
    scenarios: Mask,
    options: RankOptions,
) -> tuple[PairResult, ...]:
    """Return the references, best first. Each is compared with the leader in a single test."""
    rows = []
    for values, pair in zip(references.values.T, references.pairs, strict=True):
        difference = None
        if leader is not None and leader_values is not None:
            single = replace(references, pairs=(pair,), values=values[:, None])
            is_tested = np.ones(1, dtype=bool)
            difference = _differences(single, is_tested, leader, leader_values, scenarios, options)[pair]
            if difference is not None and difference.n < MIN_SCENARIOS:
                # Too few shared scenarios for a test: return the difference over all scenarios, untested.
                difference = untested(paired_difference(values, leader_values))
        rows.append(
            PairResult(pair, is_ranked=False, estimate=shown_estimate(values), adjusted_mean=None, to_leader=difference)
        )
    return tuple(sorted(rows, key=_order_without_rank))


def _negated(difference: Difference | None) -> Difference | None:
    if difference is None:
        return None
    # `0.0 - x` never returns −0.0.
    return replace(
        difference,
        mean=0.0 - difference.mean,
        ci_low=None if difference.ci_high is None else 0.0 - difference.ci_high,
        ci_high=None if difference.ci_low is None else 0.0 - difference.ci_low,
    )


def _order_without_rank(row: PairResult) -> tuple[bool, float, Pair]:
    """Return the sort key of rows without a rank: highest mean first, pairs without a score last."""
    return row.estimate is None, -row.estimate.mean if row.estimate else 0.0, row.pair


def _scenarios_needed(tied: Mapping[Pair, Difference], shrinkage: float, level: float, n_core: int) -> int | None:
    """Return the scenarios needed to separate each pair of `tied` from the leader.

    None if no pair is tied, or if the number is unknown or out of reach.
    """
    most = MAX_GROWTH * max(n_core, MIN_SCENARIOS)
    needed_by_pair = []
    for diff in tied.values():
        at_least = max(MIN_SCENARIOS, diff.n + 1)
        needed = scenarios_needed(shrinkage * diff.mean, diff.sd, comparisons=len(tied), at_least=at_least, level=level)
        if needed is None or needed > most:
            return None
        needed_by_pair.append(needed)
    return max(needed_by_pair, default=None)


def _next_look(ranking: Ranking, matrix: ScoreMatrix, design: Design, shrinkage: float) -> NextLook | None:
    """Return the next look; None if the board is decided, or if no look that is left can decide.

    Its power is the lowest conditional power over all pairs but the leader; None if the look itself cannot decide.
    """
    n_reached = ranking.look.number if ranking.look else 0
    least = least_scenarios(design.level)
    if ranking.decided or n_reached == len(design.looks) or design.looks[-1] < least:
        return None
    upcoming = Look(n_reached + 1, len(design.looks), design.looks[n_reached])
    if ranking.leader is None or len(ranking.ranked) < 2 or upcoming.at < least:
        return NextLook(upcoming, power=None)
    leader_scores = matrix.values[:, matrix.pairs.index(ranking.leader)]
    critical = sidak_critical_t(upcoming.at, comparisons=max(len(ranking.tied_ranked), 1), level=design.level)
    powers = []
    for column, pair in enumerate(matrix.pairs):
        if pair == ranking.leader or pair in ranking.silent:
            continue
        lead = paired_difference(leader_scores, matrix.values[:, column])
        if lead is None or not lead.sd:
            return NextLook(upcoming, power=None)
        power = conditional_power(
            lead.mean,
            lead.sd,
            n_now=min(lead.n, upcoming.at),
            n_then=upcoming.at,
            expected_mean=shrinkage * lead.mean,
            critical=critical,
        )
        powers.append(power)
    return NextLook(upcoming, min(powers))
