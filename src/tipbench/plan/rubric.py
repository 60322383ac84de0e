"""The rubric: scales, flags, weights, floor and anchors; and the controls that measure who applies it.

Nothing here knows a scale by name: a rubric with other scales and weights works the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLAGS = ("format_ok", "overlong")  # computed by code for every tip; a rubric only weighs them


@dataclass(frozen=True)
class Scale:
    """One thing a judge scores, in whole steps from `min` to `max`; `steps` says what each means, lowest first."""

    name: str
    min: int
    max: int
    about: str
    steps: tuple[str, ...]


@dataclass(frozen=True)
class CalibratedTip:
    """A tip with agreed scores, and why."""

    scenario: str
    tip: str
    rationale: str
    scores: Mapping[str, int]
    why: str


class Anchor(CalibratedTip):
    """Shown in the rubric."""


class Control(CalibratedTip):
    """Hidden among the items of a sheet, to measure the judge."""


@dataclass(frozen=True)
class Rubric:
    """The pinned scoring text and what code needs of it."""

    id: str
    sha256: str  # of the whole file
    text: str  # the whole file
    word_limit: int
    scales: tuple[Scale, ...]
    weights: Mapping[str, float]  # every scale and every flag
    floor: Mapping[str, float]  # what an answer without a usable tip gets: every scale and every flag
    anchors: tuple[Anchor, ...]

    @property
    def tag(self) -> str:
        return f"{self.id}@{self.sha256}"

    @property
    def scale_names(self) -> tuple[str, ...]:
        return tuple(scale.name for scale in self.scales)

    def composite(self, scores: Mapping[str, float], *, format_ok: bool, overlong: bool) -> float:
        """The weighted sum of one tip's scores and flags."""
        values = {**{name: scores[name] for name in self.scale_names}, "format_ok": format_ok, "overlong": overlong}
        return float(sum(self.weights[name] * value for name, value in values.items()))

    @property
    def floor_composite(self) -> float:
        flags = {name: bool(self.floor[name]) for name in FLAGS}
        return self.composite(self.floor, format_ok=flags["format_ok"], overlong=flags["overlong"])

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest composite there can be."""
        bounds = {**{scale.name: (scale.min, scale.max) for scale in self.scales}, **dict.fromkeys(FLAGS, (0, 1))}
        ends = [sorted(self.weights[name] * end for end in bounds[name]) for name in bounds]
        return float(sum(low for low, _ in ends)), float(sum(high for _, high in ends))
