"""Rubrics define how tips are scored; controls measure judges."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from tipbench.errors import SuiteError
from tipbench.plan.toml_file import Id, Line, Place, Schema, TomlText

FLAGS = ("format_ok", "overlong")  # computed from the answer; a rubric sets only their weights and floor


@dataclass(frozen=True)
class Scale:
    """One criterion, scored in whole steps from `min` to `max`."""

    name: str
    min: int
    max: int
    about: str
    steps: tuple[str, ...]  # a description of each step, lowest first


@dataclass(frozen=True)
class CalibratedTip:
    """A tip with agreed scores, such as an anchor: an example that the rubric shows to judges."""

    scenario: str
    tip: str
    rationale: str  # of the tip, as in an answer
    scores: Mapping[str, int]
    why: str  # the reason for the scores


class Control(CalibratedTip):
    """A calibrated tip that is hidden in a sheet, to measure the judge."""


@dataclass(frozen=True)
class Rubric:
    """The scoring text and the values parsed from it."""

    id: str
    sha256: str  # of the whole file
    text: str  # the whole file
    word_limit: int
    scales: tuple[Scale, ...]
    weights: Mapping[str, float]  # of every scale and flag
    floor: Mapping[str, float]  # of every scale and flag; the scores of an answer without a usable tip
    anchors: tuple[CalibratedTip, ...]

    @property
    def tag(self) -> str:
        """The id and hash, as stored with scores."""
        return f"{self.id}@{self.sha256}"

    @property
    def scale_names(self) -> tuple[str, ...]:
        return tuple(scale.name for scale in self.scales)

    def composite(self, scores: Mapping[str, float], *, format_ok: bool, overlong: bool) -> float:
        """Return the weighted sum of one tip's scores and flags."""
        weighted = [self.weights[name] * scores[name] for name in self.scale_names]
        weighted += [self.weights["format_ok"] * format_ok, self.weights["overlong"] * overlong]
        return float(sum(weighted))

    @property
    def floor_composite(self) -> float:
        """The composite of an answer without a usable tip."""
        return self.composite(
            self.floor, format_ok=bool(self.floor["format_ok"]), overlong=bool(self.floor["overlong"])
        )

    @property
    def composite_range(self) -> tuple[float, float]:
        """The lowest and the highest possible composite."""
        ranges = [(scale.name, scale.min, scale.max) for scale in self.scales] + [(flag, 0, 1) for flag in FLAGS]
        # Sorted, because a negative weight reverses the range.
        weighted = [sorted((self.weights[name] * low, self.weights[name] * high)) for name, low, high in ranges]
        return float(sum(low for low, _ in weighted)), float(sum(high for _, high in weighted))


FENCE = "+++"  # the line before and after the TOML head
# Metrics of a cell besides its scales and flags; a scale must have another name.
OTHER_METRICS = frozenset({
    "composite", "diversity", "distinct_2", "latency_s", "load_s", "ttft_s", "prompt_tokens", "output_tokens",
    "tokens_per_s", "n_candidates",
})  # fmt: skip


def _check_metric_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise ValueError("must be a name for a metric: a letter, then up to 39 out of a-z, 0-9 and '_'")
    if name in OTHER_METRICS or name in FLAGS or name.startswith("provisional_"):
        raise ValueError("is already the name of a metric; choose another")
    return name


class _ScaleSchema(Schema):
    name: Annotated[str, AfterValidator(_check_metric_name)]
    min: int
    max: int
    about: Line
    steps: list[Line]


class _TipSchema(Schema):
    scenario: Line
    tip: Line
    rationale: Annotated[str, Field(max_length=2000)] = ""
    scores: dict[str, int]
    why: Line


class _HeadSchema(Schema):
    id: Id
    word_limit: Annotated[int, Field(ge=1, le=1000)]
    scales: Annotated[list[_ScaleSchema], Field(min_length=1, max_length=12)]
    weights: dict[str, float]
    floor: dict[str, float]
    anchors: Annotated[list[_TipSchema], Field(default_factory=list)]


class _ControlsSchema(Schema):
    controls: Annotated[list[_TipSchema], Field(default_factory=list)]


def parse_rubric(text: str, path: Path, scenario_ids: Collection[str] | None = None) -> Rubric:
    """Parse a rubric. `path` is for error messages. Without `scenario_ids`, anchors may use any scenario."""
    lines = text.split("\n")
    fences = [index for index, line in enumerate(lines) if line.strip() == FENCE]
    if len(fences) < 2 or any(line.strip() for line in lines[: fences[0]]):
        raise SuiteError(
            path, 1, f"a rubric begins with a TOML head between two '{FENCE}' lines; there is none. See docs/suites.md."
        )
    first, second, *_ = fences
    head_text = "\n".join(lines[first + 1 : second])
    source = TomlText(path, head_text, first_line=first + 2)  # `first` counts from 0, lines from 1
    head = source.parse(_HeadSchema)
    scales = tuple(Scale(raw.name, raw.min, raw.max, raw.about, tuple(raw.steps)) for raw in head.scales)
    for index, scale in enumerate(scales):
        if scale.min >= scale.max:
            place = ("scales", index, "max")
            raise source.error(place, f"'max' must be above 'min'; found {scale.min} to {scale.max}.")
        n_steps = scale.max - scale.min + 1
        if len(scale.steps) != n_steps:
            place = ("scales", index, "steps")
            raise source.error(
                place, f"'steps' must describe each of the {n_steps} steps; it has {len(scale.steps)} entries."
            )
    names = [scale.name for scale in scales]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise source.error(("scales", index, "name"), f"there are two scales named '{name}'.")
    for table, values in (("weights", head.weights), ("floor", head.floor)):
        _check_keys(source, (table,), values, names + list(FLAGS))
    for scale in scales:
        if not scale.min <= head.floor[scale.name] <= scale.max:
            raise source.error(("floor", scale.name), _off_scale_message(scale, head.floor[scale.name]))
    for flag in FLAGS:
        if head.floor[flag] not in (0, 1):
            raise source.error(("floor", flag), f"'{flag}' is a flag, 0 or 1; found {head.floor[flag]:g}.")
    _check_tips(source, "anchors", head.anchors, scales, scenario_ids)
    return Rubric(
        id=head.id,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        text=text,
        word_limit=head.word_limit,
        scales=scales,
        weights=head.weights,
        floor=head.floor,
        anchors=tuple(CalibratedTip(**dict(anchor)) for anchor in head.anchors),
    )


def load_controls(path: Path, rubric: Rubric, scenario_ids: Collection[str]) -> tuple[Control, ...]:
    """Read a controls file and validate it against the rubric."""
    source = TomlText.read(path)
    controls = source.parse(_ControlsSchema).controls
    _check_tips(source, "controls", controls, rubric.scales, scenario_ids)
    anchor_tips = {anchor.tip for anchor in rubric.anchors}
    for index, control in enumerate(controls):
        if control.tip in anchor_tips:
            raise source.error(
                ("controls", index, "tip"),
                "this tip is an anchor of the rubric; judges see it there, so it cannot test them. Write another.",
            )
    return tuple(Control(**dict(control)) for control in controls)


def _check_keys(source: TomlText, place: Place, values: Mapping[str, float], required: list[str]) -> None:
    for name in values:
        if name not in required:
            raise source.error((*place, name), f"unknown key '{name}'. Known here: {', '.join(required)}.")
    for name in required:
        if name not in values:
            raise source.error(place, f"'{name}' is missing in '{place[-1]}'. It needs: {', '.join(required)}.")


def _check_tips(
    source: TomlText, table: str, tips: list[_TipSchema], scales: Sequence[Scale], scenario_ids: Collection[str] | None
) -> None:
    seen: set[tuple[str, str]] = set()
    for index, tip in enumerate(tips):
        place = (table, index)
        if scenario_ids is not None and tip.scenario not in scenario_ids:
            raise source.error((*place, "scenario"), f"the suite has no scenario '{tip.scenario}'.")
        if (tip.scenario, tip.tip) in seen:
            raise source.error((*place, "tip"), f"this tip is listed twice for {tip.scenario}.")
        seen.add((tip.scenario, tip.tip))
        _check_keys(source, (*place, "scores"), tip.scores, [scale.name for scale in scales])
        for scale in scales:
            score = tip.scores[scale.name]
            if not scale.min <= score <= scale.max:
                raise source.error((*place, "scores", scale.name), _off_scale_message(scale, score))


def _off_scale_message(scale: Scale, value: float) -> str:
    return f"'{scale.name}' goes from {scale.min} to {scale.max}; found {value:g}."
