"""Agreement: between judges, and of a judge with the scores they gave the same tips before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tipbench.plan.rubric import Scale


def alpha(scale: Scale, ratings: Sequence[Mapping[str, int]]) -> float | None:
    """Krippendorff's ordinal alpha over tips, each as judge → score; 1 is full agreement, 0 what chance gives.

    Only tips with two judges or more count. None with fewer than two such tips, or when all their scores are equal:
    without differences between tips there is nothing to agree on.
    """
    units = [list(unit.values()) for unit in ratings if len(unit) >= 2]
    seen = {score for unit in units for score in unit}
    if len(units) < 2 or len(seen) < 2:
        return None
    if min(seen) < scale.min or max(seen) > scale.max:
        raise ValueError(f"{scale.name} goes from {scale.min} to {scale.max}; seen {min(seen)} to {max(seen)}.")
    from krippendorff import alpha as krippendorff_alpha

    steps = scale.max - scale.min + 1
    counts = np.array([np.bincount(np.array(unit) - scale.min, minlength=steps) for unit in units])
    domain = np.arange(scale.min, scale.max + 1)
    return float(krippendorff_alpha(value_counts=counts, value_domain=domain, level_of_measurement="ordinal"))


@dataclass(frozen=True)
class ScaleAgreement:
    """One scale, over the tips that were scored twice."""

    scale: str
    n: int
    exact: float | None  # share of tips with the same score both times
    difference: float | None  # mean absolute difference, in the scale's points
    shift: float | None  # mean of later − earlier: a judge growing milder or stricter


@dataclass(frozen=True)
class SelfAgreement:
    """A judge's later scores held against their own earlier ones."""

    n: int  # tips
    exact: float  # share of single scores that are the same both times, over all scales
    scales: tuple[ScaleAgreement, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, unrounded; None where unknown."""
        return {**asdict(self), "scales": [asdict(scale) for scale in self.scales]}


def self_agreement(
    scales: Sequence[Scale], pairs: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]
) -> SelfAgreement | None:
    """Compare the (earlier, later) scores of each tip scored twice; None when there is none."""
    changes = {scale.name: _changes(scale.name, pairs) for scale in scales}
    total = sum(len(found) for found in changes.values())
    if not total:
        return None
    same = sum(found.count(0) for found in changes.values())
    return SelfAgreement(len(pairs), same / total, tuple(_scale(name, found) for name, found in changes.items()))


def _changes(name: str, pairs: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> list[int]:
    return [later[name] - earlier[name] for earlier, later in pairs if name in earlier and name in later]


def _scale(name: str, changes: list[int]) -> ScaleAgreement:
    n = len(changes)
    if not n:
        return ScaleAgreement(name, 0, None, None, None)
    absolute = sum(abs(change) for change in changes)
    return ScaleAgreement(name, n, changes.count(0) / n, absolute / n, sum(changes) / n)
