"""Bradley–Terry model of duels: estimates the strengths of tied pairs as log-odds, with intervals.

In a scenario, two pairs are judged in both orders. Each order is one observation: the share of the judges who chose
one side, where a tie is half a win. Scenarios are independent.

Strengths maximise a penalised likelihood. Every pair gets a fraction of an extra win over each pair that it met. The
fraction is the same everywhere, and all fractions add up to the number of pairs − 1: with two pairs, half a win each.
This approximates Firth's correction. Without it, a pair that won everything would have an infinite strength.

Intervals are profile likelihood intervals, because Wald intervals fail for a pair that won everything. They are widened
by the overdispersion: how much more the results vary between scenarios than the model expects.

The winner's lead over every other pair has an interval above 0. With fewer than six scenarios there is no winner: if a
judge always chooses the same answer in both orders, a scenario is one coin toss for two equal pairs, and one of them
wins all of five scenarios in 2 / 2⁵ = 6 % of the cases. Only 5 % are allowed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tipbench.compare.matrix import Floats, Pair
from tipbench.compare.resampling import ALPHA
from tipbench.compare.statistics import Unknown, t_quantile
from tipbench.plan.design import MIN_SCENARIOS

POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}  # of the side shown first, by winner
MAX_LOG_ODDS = 20.0  # the search for an interval bound ends at this distance; a bound beyond it is None
RIDGE = 1e-12  # keeps the Newton step solvable at extreme strengths; does not change the maximum


@dataclass(frozen=True)
class Duel:
    """One judged comparison."""

    first: Pair  # shown first, as `a`
    second: Pair
    scenario: str
    winner: Literal["first", "second", "tie"]


@dataclass(frozen=True)
class Strength:
    """Log-odds with an interval. With fewer than six scenarios both bounds are None."""

    value: float
    ci_low: float | None  # None also if the interval has no lower bound
    ci_high: float | None  # None also if the interval has no upper bound


@dataclass(frozen=True)
class DuelStanding:
    """One row of the duel table."""

    pair: Pair
    strength: Strength  # relative to the average of all pairs
    behind_top: Strength | None  # strength of the top pair − strength of this pair; None for the top pair
    points: float  # duels won; a tie counts half
    n_duels: int
    n_scenarios: int


@dataclass(frozen=True)
class DuelTable:
    """Duel standings, strongest first."""

    standings: tuple[DuelStanding, ...]
    winner: Pair | None
    first_share: float  # share of the points won by the side shown first; 0.5 means no order effect
    n_scenarios: int
    absent: tuple[Pair, ...] = ()  # tied pairs without a duel; if there are any, there is no winner

    def to_json(self) -> dict[str, Any]:
        """Return the part of the leaderboard's JSON about duels."""
        return {
            "standings": [
                {
                    **each.pair.to_json(),
                    "strength": each.strength.value,
                    "ci_low": each.strength.ci_low,
                    "ci_high": each.strength.ci_high,
                    "points": each.points,
                    "duels": each.n_duels,
                    "n_scenarios": each.n_scenarios,
                }
                for each in self.standings
            ],
            "winner": self.winner.to_json() if self.winner else None,
            "absent": [pair.to_json() for pair in self.absent],
        }


def duel_table(duels: Sequence[Duel], contenders: Collection[Pair] = ()) -> DuelTable | Unknown:
    """Estimate the strengths of all pairs that have a duel.

    Returns Unknown if there are no duels, or if no chain of duels connects some pairs. There is no winner until all
    `contenders` have a duel.
    """
    if not duels:
        return Unknown("No duel has been judged.")
    model = _BradleyTerryModel.of(duels)
    if unconnected := model.unconnected():
        names = ", ".join(map(str, unconnected[:3]))
        return Unknown(f"The duels do not connect all rows: nothing links {model.pairs[0]} with {names}.")
    strengths = model.fit()
    # Strengths are rounded, so that pairs that differ only by numerical errors are in the order of their names.
    order = sorted(range(len(model.pairs)), key=lambda i: (-round(float(strengths[i]), 9), model.pairs[i]))
    standings = tuple(_standing(model, duels, strengths, i, top=order[0]) for i in order)
    absent = tuple(sorted(set(contenders) - set(model.pairs)))
    lower_bounds = [each.behind_top.ci_low for each in standings if each.behind_top]
    clearly_best = all(bound is not None and bound > 0 for bound in lower_bounds)
    winner = None
    if model.n_scenarios >= MIN_SCENARIOS and clearly_best and not absent:
        winner = standings[0].pair
    first_share = sum(POINTS[duel.winner] for duel in duels) / len(duels)
    return DuelTable(standings, winner, first_share, model.n_scenarios, absent)


def _standing(model: _BradleyTerryModel, duels: Sequence[Duel], strengths: Floats, i: int, *, top: int) -> DuelStanding:
    pair = model.pairs[i]
    n_pairs = len(model.pairs)
    own_duels = [duel for duel in duels if pair in (duel.first, duel.second)]
    points = [POINTS[duel.winner] if duel.first == pair else 1 - POINTS[duel.winner] for duel in own_duels]
    one_hot = np.eye(n_pairs)
    return DuelStanding(
        pair=pair,
        strength=model.contrast_estimate(strengths, one_hot[i] - 1 / n_pairs),
        behind_top=None if i == top else model.contrast_estimate(strengths, one_hot[top] - one_hot[i]),
        points=sum(points),
        n_duels=len(own_duels),
        n_scenarios=len({duel.scenario for duel in own_duels}),
    )


@dataclass(frozen=True, eq=False)
class _BradleyTerryModel:
    """The arrays have one entry per observation: two pairs in one scenario, shown in one order."""

    pairs: tuple[Pair, ...]
    left: NDArray[np.int64]  # index in `pairs` of one side; always lower than `right`
    right: NDArray[np.int64]  # index in `pairs` of the other side
    left_share: Floats  # points won by the left side, averaged over the judges
    scenario: NDArray[np.int64]  # number of the scenario, from 0

    @classmethod
    def of(cls, duels: Sequence[Duel]) -> _BradleyTerryModel:
        pairs = tuple(sorted({pair for duel in duels for pair in (duel.first, duel.second)}))
        number_of_pair = {pair: number for number, pair in enumerate(pairs)}
        number_of_scenario = {name: number for number, name in enumerate(sorted({duel.scenario for duel in duels}))}
        # (scenario, left, right, swapped) → points of the left side, one per judge
        points: dict[tuple[int, int, int, bool], list[float]] = defaultdict(list)
        for duel in duels:
            first, second = number_of_pair[duel.first], number_of_pair[duel.second]
            left, right = sorted((first, second))
            swapped = first == right
            left_points = 1 - POINTS[duel.winner] if swapped else POINTS[duel.winner]
            points[number_of_scenario[duel.scenario], left, right, swapped].append(left_points)
        keys = np.array(sorted(points), dtype=np.int64)
        shares = np.array([sum(by_judge) / len(by_judge) for _, by_judge in sorted(points.items())])
        return cls(pairs, left=keys[:, 1], right=keys[:, 2], left_share=shares, scenario=keys[:, 0])

    @property
    def n_scenarios(self) -> int:
        return int(self.scenario.max()) + 1

    @cached_property
    def wins(self) -> Floats:
        """[i, j] is the number of wins of pair i over pair j, including the extra wins of the penalty."""
        n_pairs = len(self.pairs)
        wins = np.zeros((n_pairs, n_pairs))
        np.add.at(wins, (self.left, self.right), self.left_share)
        np.add.at(wins, (self.right, self.left), 1 - self.left_share)
        have_met = wins + wins.T > 0
        # n_pairs − 1 extra wins in total, shared equally by the true entries of `have_met`. Two pairs that met have two
        # such entries: [i, j] and [j, i].
        extra_wins = (n_pairs - 1) / have_met.sum()
        return np.asarray(wins + have_met * extra_wins)

    def unconnected(self) -> list[Pair]:
        """Return the pairs that no chain of duels connects to the first pair."""
        links = (self.wins > 0).astype(np.int64)
        reached = np.zeros(len(self.pairs), dtype=np.int64)
        reached[0] = 1
        for _ in self.pairs:  # each round adds the pairs that have a duel with a reached pair
            reached = np.minimum(reached + links @ reached, 1)
        return [pair for pair, seen in zip(self.pairs, reached, strict=True) if not seen]

    def log_likelihood(self, strengths: Floats) -> float:
        return float(-(self.wins * np.logaddexp(0.0, strengths[None, :] - strengths[:, None])).sum())

    def gradient_and_information(self, strengths: Floats) -> tuple[Floats, Floats]:
        """Return the gradient and information (negative second derivatives) of the log-likelihood."""
        expected = _win_probability(strengths[:, None] - strengths[None, :])
        n_games = self.wins + self.wins.T
        variance = n_games * expected * (1 - expected)
        gradient = (self.wins - n_games * expected).sum(axis=1)
        information = np.diag(variance.sum(axis=1)) - variance
        return gradient, information

    def fit(self, start: Floats | None = None, fixed: Floats | None = None) -> Floats:
        """Maximise the likelihood by Newton's method, with Lagrange multipliers for the constraints.

        The sum of the strengths, and the contrast `fixed` if given, keep the value they have at `start`.
        """
        n_pairs = len(self.pairs)
        strengths = np.zeros(n_pairs) if start is None else start
        constraints = np.ones((1, n_pairs)) if fixed is None else np.stack([np.ones(n_pairs), fixed])
        n_constraints = len(constraints)
        zeros = np.zeros((n_constraints, n_constraints))
        for _ in range(100):
            gradient, information = self.gradient_and_information(strengths)
            system = np.block([[information + RIDGE * np.eye(n_pairs), constraints.T], [constraints, zeros]])
            step = np.linalg.solve(system, np.concatenate([gradient, np.zeros(n_constraints)]))[:n_pairs]
            remaining_gain = gradient @ step / 2  # in log-likelihood, by its quadratic approximation
            if remaining_gain < 0.5e-14:  # converged after this step
                strengths = strengths + step
                break
            before = self.log_likelihood(strengths)
            fraction = 1.0  # of the step; halved until the likelihood does not decrease
            while self.log_likelihood(strengths + fraction * step) < before and fraction > 1e-6:
                fraction /= 2
            if fraction <= 1e-6:  # only rounding errors are left
                break
            strengths = strengths + fraction * step
        return np.asarray(strengths)

    def contrast_estimate(self, fitted: Floats, contrast: Floats) -> Strength:
        """Return a contrast of the fitted strengths with its profile likelihood interval."""
        value = float(contrast @ fitted)
        if self.n_scenarios < MIN_SCENARIOS:
            return Strength(value, None, None)
        t_squared = t_quantile(1 - ALPHA / 2, self.n_scenarios - 1) ** 2
        max_drop = t_squared * self._overdispersion(fitted, contrast) / 2  # of the log-likelihood within the interval
        return Strength(
            value,
            ci_low=self._interval_bound(fitted, contrast, max_drop, -1),
            ci_high=self._interval_bound(fitted, contrast, max_drop, +1),
        )

    def _overdispersion(self, fitted: Floats, contrast: Floats) -> float:
        """Return the contrast's sandwich variance by scenario divided by its variance in the model; at least 1."""
        _, information = self.gradient_and_information(fitted)
        direction = np.linalg.pinv(information, hermitian=True) @ contrast
        residuals = self.left_share - _win_probability(fitted[self.left] - fitted[self.right])
        influences = residuals * (direction[self.left] - direction[self.right])
        per_scenario = np.bincount(self.scenario, weights=influences)
        n = self.n_scenarios
        sandwich_variance = float(np.square(per_scenario).sum()) * n / (n - 1)
        return max(1.0, sandwich_variance / float(contrast @ direction))

    def _interval_bound(self, fitted: Floats, contrast: Floats, max_drop: float, sign: int) -> float | None:
        """Return the lower (`sign` −1) or upper (+1) bound; None if it is beyond MAX_LOG_ODDS."""
        from scipy.optimize import brentq

        maximum = self.log_likelihood(fitted)
        direction = contrast / (contrast @ contrast)  # a step of 1 in this direction changes the contrast by 1

        def above_limit(distance: float) -> float:
            """Return how far the profile log-likelihood at this distance is above its value at the bound."""
            refitted = self.fit(fitted + sign * distance * direction, contrast)
            return self.log_likelihood(refitted) - maximum + max_drop

        outside = min(sqrt(max_drop), MAX_LOG_ODDS)  # a first guess, doubled until it is beyond the bound
        while above_limit(outside) > 0:
            if outside == MAX_LOG_ODDS:
                return None
            outside = min(2 * outside, MAX_LOG_ODDS)
        return float(contrast @ fitted) + sign * float(brentq(above_limit, 0.0, outside, xtol=1e-9))


def _win_probability(difference: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(difference / 2)))
