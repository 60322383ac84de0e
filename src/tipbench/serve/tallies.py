"""Tallies: counts of what a user did with the tips of each category, for features of `egreedy/v3`.

All policies of a user share the tallies. A tally is immutable, so a copy of `Tallies.by_category` is a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from tipbench.serve.request import CategoryTally

MAX_DWELL_S = 600.0
NO_CATEGORY = ""
DEFAULT_COMPLETION, DEFAULT_DISMISSAL, DEFAULT_DWELL = 0.25, 0.25, 0.2  # the rates of a user without any tally
# Rates are shrunk to a prior rate: a weight of 2 counts like two more tips with the prior rate.
OVERALL_WEIGHT = 2.0  # for a user's rates; their prior is the default rates
CATEGORY_WEIGHT = 4.0  # for the rates of a category; their prior is the user's rates
LOG_FULL_VOLUME = math.log(101)  # a volume is log(1 + tips) / LOG_FULL_VOLUME: 1 for 100 tips


class Tally(NamedTuple):
    """Counts and sums of one category; hour_x and hour_y sum cos and sin of 2π·hour/24 over completed tips."""

    seen: int = 0  # tips with a reward, not all shown ones; in a request's own tallies, whatever its sender counts
    completed: int = 0
    dismissed: int = 0
    dwell_s_sum: float = 0.0
    dwell_n: int = 0
    hour_x: float = 0.0
    hour_y: float = 0.0


_EMPTY = Tally()


class Tallies:
    """The tallies of one user by category; tips without a category are under `NO_CATEGORY`."""

    __slots__ = ("_overall", "by_category")

    def __init__(self, by_category: Mapping[str, Tally] | None = None) -> None:
        self.by_category = dict(by_category or {})
        self._overall: tuple[float, float, float] | None = None

    @classmethod
    def from_values(cls, by_category: Mapping[str, CategoryTally]) -> Tallies:
        """Return tallies from plain values, as in `profile_features.by_category` of a request."""
        return cls({category: Tally(**tally) for category, tally in by_category.items()})

    def copy(self) -> Tallies:
        """Return a snapshot."""
        return Tallies(self.by_category)

    def add(self, category: str | None, action: str | None, dwell_ms: float | None, hour: float) -> None:
        """Count one learned reward; `hour` is the time of day of its decision."""
        name = category or NO_CATEGORY
        tally = self.by_category.get(name, _EMPTY)
        angle = math.tau * hour / 24
        completed, dismissed = int(action == "completed"), int(action == "dismissed")
        dwell_s = 0.0 if dwell_ms is None else min(dwell_ms / 1000, MAX_DWELL_S)
        self.by_category[name] = Tally(
            seen=tally.seen + 1,
            completed=tally.completed + completed,
            dismissed=tally.dismissed + dismissed,
            dwell_s_sum=tally.dwell_s_sum + dwell_s,
            dwell_n=tally.dwell_n + int(dwell_ms is not None),
            hour_x=tally.hour_x + completed * math.cos(angle),
            hour_y=tally.hour_y + completed * math.sin(angle),
        )
        self._overall = None

    def features(self, category: str | None, hour: float) -> tuple[float, float, float, float, float]:
        """Return completion, dismissal, dwell, hour alignment and volume of a category.

        The first three are rates, shrunk to the user's rates; dwell is a share of MAX_DWELL_S. The alignment is from
        −1 to 1: near 1 if many tips were completed, all near this hour. Without a category, the rates are the user's,
        and the others 0.
        """
        completion, dismissal, dwell = self._overall_rates()
        if not category:
            return completion, dismissal, dwell, 0.0, 0.0
        seen, completed, dismissed, dwell_s_sum, dwell_n, hour_x, hour_y = self.by_category.get(category, _EMPTY)
        angle = math.tau * hour / 24
        alignment = (math.cos(angle) * hour_x + math.sin(angle) * hour_y) / (completed + 1)
        return (
            _shrink(completed, seen, completion, CATEGORY_WEIGHT),
            _shrink(dismissed, seen, dismissal, CATEGORY_WEIGHT),
            _shrink(dwell_s_sum / MAX_DWELL_S, dwell_n, dwell, CATEGORY_WEIGHT),
            max(-1.0, min(alignment, 1.0)),
            min(math.log1p(seen) / LOG_FULL_VOLUME, 1.0),
        )

    def _overall_rates(self) -> tuple[float, float, float]:
        if self._overall is None:
            # Sum in a fixed order: after a restart, the loaded tallies must give exactly the same floats.
            tallies = [self.by_category[name] for name in sorted(self.by_category)]
            seen = sum(tally.seen for tally in tallies)
            completed = sum(tally.completed for tally in tallies)
            dismissed = sum(tally.dismissed for tally in tallies)
            dwell_total = sum(tally.dwell_s_sum for tally in tallies) / MAX_DWELL_S
            dwell_n = sum(tally.dwell_n for tally in tallies)
            self._overall = (
                _shrink(completed, seen, DEFAULT_COMPLETION, OVERALL_WEIGHT),
                _shrink(dismissed, seen, DEFAULT_DISMISSAL, OVERALL_WEIGHT),
                _shrink(dwell_total, dwell_n, DEFAULT_DWELL, OVERALL_WEIGHT),
            )
        return self._overall


def _shrink(total: float, n: int, prior_rate: float, weight: float) -> float:
    """Return the rate total / n, shrunk to a prior rate; at most 1, as a request may have inconsistent tallies."""
    return min((total + weight * prior_rate) / (n + weight), 1.0)
