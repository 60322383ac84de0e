"""Bradley–Terry model of the tied set: log-odds strengths from blind A/B duels, with intervals.

The unit is the scenario. The two orders of a match-up are judged independently, so they are two observations; several
judges of one order are averaged to one outcome between 0 and 1; a tie is half a win. Strengths maximise a lightly
penalised likelihood: each match-up played gets (rows − 1) / (2 × match-ups) extra wins each way (half a win for two
rows). This approximates Firth's correction and keeps the strength of a row that won everything finite.

Intervals are profile likelihood intervals, because Wald intervals fail for a row that won everything. A bound is where
the log-likelihood has dropped by t² / 2, with t at scenarios − 1 degrees of freedom, times the overdispersion: how much
more the results vary between scenarios than the model expects (sandwich variance by scenario / model variance, at
least 1). The winner is the row whose difference to every other row has an interval above 0. There is no winner below
six scenarios: if a judge decides both orders alike, one of two equal rows wins all of five scenarios in more than 5 %
of the cases.
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

from tipbench.compare.matrix import Floats, Pair, pair_json
from tipbench.compare.resampling import ALPHA
from tipbench.compare.statistics import Unknown, t_quantile
from tipbench.plan.design import MIN_SCENARIOS

POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}
MAX_LOG_ODDS = 20.0  # the search for an interval bound ends here; a bound beyond it is None
RIDGE = 1e-12  # keeps extreme steps solvable without moving the maximum


@dataclass(frozen=True)
class Duel:
    """One judged comparison. `first` is the side shown first (`a`)."""

    first: Pair
    second: Pair
    scenario: str
    winner: Literal["first", "second", "tie"]


@dataclass(frozen=True)
class Strength:
    """Log-odds with an interval; both bounds are None below six scenarios, and one is None if it is unbounded."""

    value: float
    ci_low: float | None
    ci_high: float | None


@dataclass(frozen=True)
class DuelStanding:
    """One row of the duel table."""

    pair: Pair
    strength: Strength  # relative to the average of all rows
    behind_top: Strength | None  # top − this row; None for the top
    points: float  # duels won; a tie counts half
    duels: int
    n_scenarios: int


@dataclass(frozen=True)
class DuelTable:
    """Duel standings, strongest first."""

    standings: tuple[DuelStanding, ...]
    winner: Pair | None
    first_share: float  # share of points of the side shown first; 0.5 means no order effect
    n_scenarios: int
    absent: tuple[Pair, ...] = ()  # rows of the group without a duel; if there are any, there is no winner

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, as in the leaderboard JSON."""
        return {
            "standings": [
                {
                    **(pair_json(each.pair) or {}),
                    "strength": each.strength.value,
                    "ci_low": each.strength.ci_low,
                    "ci_high": each.strength.ci_high,
                    "points": each.points,
                    "duels": each.duels,
                    "n_scenarios": each.n_scenarios,
                }
                for each in self.standings
            ],
            "winner": pair_json(self.winner),
            "absent": [pair_json(pair) for pair in self.absent],
        }


def duel_table(duels: Sequence[Duel], among: Collection[Pair] = ()) -> DuelTable | Unknown:
    """Estimate the strengths of the rows; Unknown without duels, or if no chain of duels connects all rows.

    `among` is the tied group: there is no winner until every row of it has a duel.
    """
    if any(duel.first == duel.second for duel in duels):
        raise ValueError("A row cannot meet itself in a duel.")
    if not duels:
        return Unknown("No duel has been judged.")
    games = _Games.of(duels)
    if unconnected := games.unconnected():
        named = ", ".join(map(str, unconnected[:3]))
        return Unknown(f"The duels do not connect all rows: nothing links {games.pairs[0]} with {named}.")
    strengths = games.fit()
    # Rounded, so that equal strengths are in the order of their names whatever the rounding errors of the fit.
    order = sorted(range(len(games.pairs)), key=lambda row: (-round(float(strengths[row]), 9), games.pairs[row]))
    standings = tuple(_standing(games, duels, strengths, row, top=order[0]) for row in order)
    absent = tuple(sorted(set(among) - set(games.pairs)))
    leads = [each.behind_top.ci_low for each in standings if each.behind_top]
    clearly_best = all(lead is not None and lead > 0 for lead in leads)
    winner = None
    if games.n_scenarios >= MIN_SCENARIOS and clearly_best and not absent:
        winner = standings[0].pair
    first_share = sum(POINTS[duel.winner] for duel in duels) / len(duels)
    return DuelTable(standings, winner, first_share, games.n_scenarios, absent)


def _standing(games: _Games, duels: Sequence[Duel], strengths: Floats, row: int, *, top: int) -> DuelStanding:
    pair, k = games.pairs[row], len(games.pairs)
    own = [duel for duel in duels if pair in (duel.first, duel.second)]
    points = [POINTS[duel.winner] if duel.first == pair else 1 - POINTS[duel.winner] for duel in own]
    unit = np.eye(k)
    return DuelStanding(
        pair=pair,
        strength=games.contrast_estimate(strengths, unit[row] - 1 / k),
        behind_top=None if row == top else games.contrast_estimate(strengths, unit[top] - unit[row]),
        points=sum(points),
        duels=len(own),
        n_scenarios=len({duel.scenario for duel in own}),
    )


@dataclass(frozen=True, eq=False)
class _Games:
    """Arrays with one entry per (scenario, match-up, order), whose duels are averaged over the judges."""

    pairs: tuple[Pair, ...]
    left: NDArray[np.int64]  # position in `pairs`, below that of the right side
    right: NDArray[np.int64]
    share: Floats  # of the points, won by the left side
    scenario: NDArray[np.int64]

    @classmethod
    def of(cls, duels: Sequence[Duel]) -> _Games:
        pairs = tuple(sorted({pair for duel in duels for pair in (duel.first, duel.second)}))
        number_of_pair = {pair: number for number, pair in enumerate(pairs)}
        number_of_scenario = {name: number for number, name in enumerate(sorted({duel.scenario for duel in duels}))}
        points: dict[tuple[int, int, int, bool], list[float]] = defaultdict(list)  # of the left side, one per judge
        for duel in duels:
            first, second = number_of_pair[duel.first], number_of_pair[duel.second]
            left, right = sorted((first, second))
            swapped = first == right
            won = 1 - POINTS[duel.winner] if swapped else POINTS[duel.winner]
            points[number_of_scenario[duel.scenario], left, right, swapped].append(won)
        keys = np.array(sorted(points), dtype=np.int64)
        shares = np.array([sum(given) / len(given) for _, given in sorted(points.items())])
        return cls(pairs, left=keys[:, 1], right=keys[:, 2], share=shares, scenario=keys[:, 0])

    @property
    def n_scenarios(self) -> int:
        return int(self.scenario.max()) + 1

    @cached_property
    def wins(self) -> Floats:
        """[i, j]: wins of i over j, including the extra wins of the penalty."""
        k = len(self.pairs)
        wins = np.zeros((k, k))
        np.add.at(wins, (self.left, self.right), self.share)
        np.add.at(wins, (self.right, self.left), 1 - self.share)
        played = wins + wins.T > 0
        twice_the_match_ups = played.sum()  # [i, j] and [j, i] are one match-up
        return np.asarray(wins + played * ((k - 1) / twice_the_match_ups))

    def unconnected(self) -> list[Pair]:
        """Return the rows that no chain of duels connects to the first row."""
        links = (self.wins > 0).astype(np.int64)
        reached = np.zeros(len(self.pairs), dtype=np.int64)
        reached[0] = 1
        for _ in self.pairs:
            reached = np.minimum(reached + links @ reached, 1)
        return [pair for pair, seen in zip(self.pairs, reached, strict=True) if not seen]

    def log_likelihood(self, strengths: Floats) -> float:
        return float(-(self.wins * np.logaddexp(0.0, strengths[None, :] - strengths[:, None])).sum())

    def gradient_and_information(self, strengths: Floats) -> tuple[Floats, Floats]:
        """Return the gradient and information (negative second derivatives) of the log-likelihood."""
        expected = _win_probability(strengths[:, None] - strengths[None, :])
        games = self.wins + self.wins.T
        variance = games * expected * (1 - expected)
        gradient = (self.wins - games * expected).sum(axis=1)
        information = np.diag(variance.sum(axis=1)) - variance
        return gradient, information

    def fit(self, start: Floats | None = None, fixed: Floats | None = None) -> Floats:
        """Return the strengths of the highest likelihood; `fixed` is a contrast held at its value at `start`.

        Newton's method with Lagrange multipliers; the sum of the strengths is always held.
        """
        k = len(self.pairs)
        strengths = np.zeros(k) if start is None else start
        constraints = np.ones((1, k)) if fixed is None else np.stack([np.ones(k), fixed])
        n_constraints = len(constraints)
        corner = np.zeros((n_constraints, n_constraints))
        for _ in range(100):
            gradient, information = self.gradient_and_information(strengths)
            system = np.block([[information + RIDGE * np.eye(k), constraints.T], [constraints, corner]])
            step = np.linalg.solve(system, np.concatenate([gradient, np.zeros(n_constraints)]))[:k]
            if gradient @ step < 1e-14:  # converged: take one last full step
                strengths = strengths + step
                break
            before, size = self.log_likelihood(strengths), 1.0
            while self.log_likelihood(strengths + size * step) < before and size > 1e-6:
                size /= 2
            if size <= 1e-6:
                break
            strengths = strengths + size * step
        return np.asarray(strengths)

    def contrast_estimate(self, best: Floats, contrast: Floats) -> Strength:
        """Return a contrast of the fitted strengths `best` with its profile likelihood interval."""
        value = float(contrast @ best)
        if self.n_scenarios < MIN_SCENARIOS:
            return Strength(value, None, None)
        t_squared = t_quantile(1 - ALPHA / 2, self.n_scenarios - 1) ** 2
        drop = t_squared * self._overdispersion(best, contrast) / 2
        return Strength(
            value,
            ci_low=self._interval_bound(best, contrast, drop, -1),
            ci_high=self._interval_bound(best, contrast, drop, +1),
        )

    def _overdispersion(self, best: Floats, contrast: Floats) -> float:
        """Return the contrast's sandwich variance by scenario over its variance in the model, at least 1."""
        _, information = self.gradient_and_information(best)
        direction = np.linalg.pinv(information, hermitian=True) @ contrast
        residuals = self.share - _win_probability(best[self.left] - best[self.right])
        influences = residuals * (direction[self.left] - direction[self.right])
        per_scenario = np.bincount(self.scenario, weights=influences)
        n = self.n_scenarios
        sandwich_variance = float(np.square(per_scenario).sum()) * n / (n - 1)
        return max(1.0, sandwich_variance / float(contrast @ direction))

    def _interval_bound(self, best: Floats, contrast: Floats, drop: float, sign: int) -> float | None:
        """Return where the profile log-likelihood is `drop` below its maximum; None if beyond MAX_LOG_ODDS."""
        from scipy.optimize import brentq

        maximum = self.log_likelihood(best)
        direction = contrast / (contrast @ contrast)  # a step of 1 in this direction changes the contrast by 1

        def above_limit(distance: float) -> float:
            """Return the profile log-likelihood at this distance, minus that of the bound."""
            refitted = self.fit(best + sign * distance * direction, contrast)
            return self.log_likelihood(refitted) - maximum + drop

        far = min(sqrt(drop), MAX_LOG_ODDS)
        while above_limit(far) > 0:
            if far == MAX_LOG_ODDS:
                return None
            far = min(2 * far, MAX_LOG_ODDS)
        return float(contrast @ best) + sign * float(brentq(above_limit, 0.0, far, xtol=1e-9))


def _win_probability(difference: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(difference / 2)))
