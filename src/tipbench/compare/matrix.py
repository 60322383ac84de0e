"""The scenario × pair matrix of scores; NaN where a pair is not judged in a scenario.

Tips, repeats and judges within a cell are not independent, so they are averaged before any test.
Scenarios and pairs are sorted, so the matrix does not depend on the order in which scores are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, isfinite
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

Side = Literal["model", "prompt"]

ALL = "*"  # placeholder for the side averaged over
OTHER: Mapping[Side, Side] = {"model": "prompt", "prompt": "model"}


@dataclass(frozen=True, order=True)
class Pair:
    """A model with a prompt, the unit of ranking; written MODEL/PROMPT and split at the last slash."""

    model: str
    prompt: str

    def __str__(self) -> str:
        return f"{self.model}/{self.prompt}"


def parse_pair(text: str) -> Pair | None:
    """Parses MODEL/PROMPT; None if there is no slash or a side is empty."""
    model, _, prompt = text.rpartition("/")
    return Pair(model, prompt) if model and prompt else None


@dataclass(frozen=True)
class Score:
    """The score of one judged run. Repeats of the same pair and scenario are averaged."""

    pair: Pair
    scenario: str
    persona: str
    value: float


@dataclass(frozen=True, eq=False)
class ScoreMatrix:
    """Scores with scenarios as rows and pairs as columns; NaN if not judged."""

    scenarios: tuple[str, ...]
    personas: tuple[str, ...]  # of each scenario
    pairs: tuple[Pair, ...]
    values: Floats

    @cached_property
    def judged(self) -> Mask:
        """Mask of the cells with a score."""
        return ~np.isnan(self.values)

    @cached_property
    def core(self) -> Mask:
        """Mask of the scenarios in which at least half of the pairs are judged."""
        return np.asarray((2 * self.judged.sum(axis=1) >= len(self.pairs)) & self.judged.any(axis=1))

    @cached_property
    def complete(self) -> Mask:
        """Mask of the pairs judged in every core scenario; all False without core scenarios."""
        if not self.core.any():
            return np.zeros(len(self.pairs), dtype=bool)
        return np.asarray(self.judged[self.core].all(axis=0))

    def column(self, pair: Pair) -> int | None:
        """Returns the column of a pair; None if absent."""
        return self.pairs.index(pair) if pair in self.pairs else None

    def only(self, columns: Mask | Sequence[int]) -> ScoreMatrix:
        """Selects pairs, in matrix order, and the scenarios in which at least one of them is judged."""
        wanted = np.arange(len(self.pairs))[np.asarray(columns)]
        rows = np.flatnonzero(self.judged[:, wanted].any(axis=1))
        return ScoreMatrix(
            scenarios=tuple(self.scenarios[row] for row in rows),
            personas=tuple(self.personas[row] for row in rows),
            pairs=tuple(self.pairs[column] for column in wanted),
            values=self.values[np.ix_(rows, wanted)],
        )

    def by_persona(self) -> ScoreMatrix:
        """Averages per persona, to generalise to new personas.

        Only core scenarios count, and a pair missing one of them is NaN for that persona, so that all means of a
        persona cover the same scenarios.
        """
        personas = tuple(sorted({persona for persona, core in zip(self.personas, self.core, strict=True) if core}))
        members = [self.core & (np.array(self.personas) == persona) for persona in personas]
        means = [self.values[rows].mean(axis=0) for rows in members]
        return ScoreMatrix(personas, personas, self.pairs, _stacked(means, len(self.pairs)))

    def by(self, side: Side) -> ScoreMatrix:
        """Averages per model over the prompts that all models share, or per prompt over the shared models.

        A mean is NaN in a scenario where one of its scores is missing. The other side of the pairs is `*`.
        """
        other = OTHER[side]
        names = sorted({getattr(pair, side) for pair in self.pairs})
        shared = shared_by_all(self.pairs, side)
        columns = [
            [at for at, pair in enumerate(self.pairs) if getattr(pair, side) == name and getattr(pair, other) in shared]
            for name in names
        ]
        merged = tuple(Pair(name, ALL) if side == "model" else Pair(ALL, name) for name in names)
        if not shared:
            return replace(self, pairs=merged, values=np.full((len(self.scenarios), len(names)), np.nan))
        means = [self.values[:, members].mean(axis=1) for members in columns]
        return replace(self, pairs=merged, values=_stacked(means, len(self.scenarios)).T)


def shared_by_all(pairs: Iterable[Pair], side: Side) -> set[str]:
    """Returns the prompts that all models share (side `model`), or the models that all prompts share."""
    owned: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        owned[getattr(pair, side)].add(getattr(pair, OTHER[side]))
    return set.intersection(*owned.values()) if owned else set()


def score_matrix(scores: Iterable[Score], pairs: Iterable[Pair] = ()) -> ScoreMatrix:
    """Averages scores within (pair, scenario); `pairs` adds columns for pairs without scores."""
    cells: dict[tuple[str, Pair], list[float]] = defaultdict(list)
    personas: dict[str, str] = {}
    for score in scores:
        if not isfinite(score.value):
            raise ValueError(f"A score is a finite number; {score.pair} in {score.scenario} has {score.value}.")
        if personas.setdefault(score.scenario, score.persona) != score.persona:
            raise ValueError(
                f"A scenario has one persona; {score.scenario} has {personas[score.scenario]} and {score.persona}."
            )
        cells[score.scenario, score.pair].append(score.value)
    columns = {pair: at for at, pair in enumerate(sorted({pair for _, pair in cells} | set(pairs)))}
    rows = {scenario: at for at, scenario in enumerate(sorted(personas))}
    values = np.full((len(rows), len(columns)), np.nan)
    for (scenario, pair), found in cells.items():
        values[rows[scenario], columns[pair]] = fsum(found) / len(found)
    return ScoreMatrix(tuple(rows), tuple(personas[scenario] for scenario in rows), tuple(columns), values)


def _stacked(rows: Sequence[Floats], width: int) -> Floats:
    return np.stack(rows) if rows else np.empty((0, width))
