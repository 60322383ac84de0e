"""Bradley–Terry model of the tied set: log-odds strengths from blind A/B duels, with intervals.

The unit is the scenario. Duels of one match-up in one scenario (both orders, several judges) are averaged to one
outcome between 0 and 1; a tie is half a win. Strengths maximise a lightly penalised likelihood: each match-up played
gets (rows − 1) / (2 × match-ups) extra wins each way (half a win for two rows). This approximates Firth's correction
and keeps the strength of a row that won everything finite. Intervals are profile likelihood intervals, because Wald
intervals fail for a clean sweep: the drop in likelihood is compared with t² at scenarios − 1 degrees of freedom,
scaled by the overdispersion between scenarios (sandwich variance by scenario / model variance, at least 1). The winner
is the row whose difference to every other row has an interval above 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tipbench.compare.matrix import Floats, Pair
from tipbench.compare.resampling import ALPHA
from tipbench.compare.statistics import Unknown, t_quantile

POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}
MAX_LOG_ODDS = 20.0  # log-odds; an interval bound beyond this is unbounded
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
    """Log-odds with an interval; a bound is None if there are too few scenarios to limit it."""

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


def duel_table(duels: Sequence[Duel], among: Collection[Pair] = ()) -> DuelTable | Unknown:
    """Estimates the strengths of the rows; Unknown without duels, or if no chain of duels connects all rows.

    `among` is the tied group: there is no winner until every row of it has a duel.
    """
    if any(duel.first == duel.second for duel in duels):
        raise ValueError("A row cannot meet itself in a duel.")
    if not duels:
        return Unknown("No duel has been judged.")
    games = _Games.of(duels)
    apart = games.unreached()
    if apart:
        named = ", ".join(map(str, apart[:3]))
        return Unknown(f"The duels do not connect all rows: nothing links {games.pairs[0]} with {named}.")
    best = games.strengths()
    order = sorted(range(len(games.pairs)), key=lambda at: (-round(float(best[at]), 9), games.pairs[at]))
    standings = tuple(_standing(games, duels, best, at, order[0]) for at in order)
    gaps = [row.behind_top.ci_low for row in standings if row.behind_top]
    absent = tuple(sorted(set(among) - set(games.pairs)))
    won = not absent and all(gap is not None and gap > 0 for gap in gaps)
    first = sum(POINTS[duel.winner] for duel in duels) / len(duels)
    return DuelTable(standings, standings[0].pair if won else None, first, games.n_scenarios, absent)


def _standing(games: _Games, duels: Sequence[Duel], best: Floats, at: int, top: int) -> DuelStanding:
    pair, k = games.pairs[at], len(games.pairs)
    own = [duel for duel in duels if pair in (duel.first, duel.second)]
    points = [POINTS[duel.winner] if duel.first == pair else 1 - POINTS[duel.winner] for duel in own]
    unit = np.eye(k)
    return DuelStanding(
        pair=pair,
        strength=games.strength(best, unit[at] - 1 / k),
        behind_top=None if at == top else games.strength(best, unit[top] - unit[at]),
        points=sum(points),
        duels=len(own),
        n_scenarios=len({duel.scenario for duel in own}),
    )


@dataclass(frozen=True, eq=False)
class _Games:
    """Arrays with one entry per (scenario, match-up): both sides, and the left side's share of the points."""

    pairs: tuple[Pair, ...]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    share: Floats
    scenario: NDArray[np.int64]

    @classmethod
    def of(cls, duels: Sequence[Duel]) -> _Games:
        pairs = tuple(sorted({pair for duel in duels for pair in (duel.first, duel.second)}))
        names = {name: at for at, name in enumerate(sorted({duel.scenario for duel in duels}))}
        place = {pair: at for at, pair in enumerate(pairs)}
        met: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for duel in duels:
            first, second, points = place[duel.first], place[duel.second], POINTS[duel.winner]
            swapped = first > second
            key = (names[duel.scenario], *sorted((first, second)))
            met[key[0], key[1], key[2]].append(1 - points if swapped else points)
        keys = np.array(sorted(met), dtype=np.int64)
        shares = np.array([sum(found) / len(found) for _, found in sorted(met.items())])
        return cls(pairs, keys[:, 1], keys[:, 2], shares, keys[:, 0])

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
        return np.asarray(wins + played * ((k - 1) / played.sum()))  # played counts each match-up twice

    def unreached(self) -> list[Pair]:
        """Returns the rows that no chain of duels connects to the first."""
        links = (self.wins > 0).astype(np.int64)
        reached = np.zeros(len(self.pairs), dtype=np.int64)
        reached[0] = 1
        for _ in self.pairs:
            reached = np.minimum(reached + links @ reached, 1)
        return [pair for pair, seen in zip(self.pairs, reached, strict=True) if not seen]

    def likelihood(self, strengths: Floats) -> float:
        return float(-(self.wins * np.logaddexp(0.0, strengths[None, :] - strengths[:, None])).sum())

    def slopes(self, strengths: Floats) -> tuple[Floats, Floats]:
        """Returns the gradient and information (negative second derivatives) of the log-likelihood."""
        chance = _chance(strengths[:, None] - strengths[None, :])
        games = self.wins + self.wins.T
        weight = games * chance * (1 - chance)
        return (self.wins - games * chance).sum(axis=1), np.diag(weight.sum(axis=1)) - weight

    def strengths(self, start: Floats | None = None, fixed: Floats | None = None) -> Floats:
        """Maximises the likelihood by Newton's method; `fixed` is a contrast held at its value at `start`."""
        k = len(self.pairs)
        at = np.zeros(k) if start is None else start
        held = np.ones((1, k)) if fixed is None else np.stack([np.ones(k), fixed])
        corner = np.zeros((len(held), len(held)))
        for _ in range(100):
            gradient, information = self.slopes(at)
            system = np.block([[information + RIDGE * np.eye(k), held.T], [held, corner]])
            step = np.linalg.solve(system, np.concatenate([gradient, np.zeros(len(held))]))[:k]
            if gradient @ step < 1e-14:  # converged: take one last full step
                at = at + step
                break
            here, size = self.likelihood(at), 1.0
            while self.likelihood(at + size * step) < here and size > 1e-6:
                size /= 2
            if size <= 1e-6:
                break
            at = at + size * step
        return np.asarray(at)

    def strength(self, best: Floats, contrast: Floats) -> Strength:
        """Returns a contrast of strengths with its profile likelihood interval."""
        value = float(contrast @ best)
        if self.n_scenarios < 2:
            return Strength(value, None, None)
        drop = t_quantile(1 - ALPHA / 2, self.n_scenarios - 1) ** 2 * self._stretch(best, contrast) / 2
        return Strength(value, self._end(best, contrast, drop, -1), self._end(best, contrast, drop, +1))

    def _stretch(self, best: Floats, contrast: Floats) -> float:
        _, information = self.slopes(best)
        direction = np.linalg.pinv(information, hermitian=True) @ contrast
        surprise = self.share - _chance(best[self.left] - best[self.right])
        pulls = surprise * (direction[self.left] - direction[self.right])
        per_scenario = np.bincount(self.scenario, weights=pulls)
        n = self.n_scenarios
        return max(1.0, float(np.square(per_scenario).sum()) * n / (n - 1) / float(contrast @ direction))

    def _end(self, best: Floats, contrast: Floats, drop: float, sign: int) -> float | None:
        from scipy.optimize import brentq

        peak, along = self.likelihood(best), contrast / (contrast @ contrast)

        def spare(distance: float) -> float:
            moved = self.strengths(best + sign * distance * along, contrast)
            return self.likelihood(moved) - peak + drop

        far = min(sqrt(drop), MAX_LOG_ODDS)
        while spare(far) > 0:
            if far == MAX_LOG_ODDS:
                return None
            far = min(2 * far, MAX_LOG_ODDS)
        return float(contrast @ best) + sign * float(brentq(spare, 0.0, far, xtol=1e-9))


def _chance(difference: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(difference / 2)))
