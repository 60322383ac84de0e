"""The scenario × pair matrix of scores; NaN where a pair is not judged in a scenario.

Scores of a pair in one scenario (tips, repeats, judges) are not independent, so they are averaged before any test.
Scenarios and pairs are sorted, so the matrix does not depend on the order in which scores are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, isfinite
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

Side = Literal["model", "prompt"]  # one of the two fields of a pair

ALL = "*"  # replaces the side of a pair that is averaged over
OTHER_SIDE: Mapping[Side, Side] = {"model": "prompt", "prompt": "model"}


@dataclass(frozen=True, order=True)
class Pair:
    """A model with a prompt, the unit of ranking; written MODEL/PROMPT and split at the last slash."""

    model: str
    prompt: str

    def __str__(self) -> str:
        return f"{self.model}/{self.prompt}"

    def to_json(self) -> dict[str, str]:
        """Return the pair as in every JSON of the product."""
        return {"model": self.model, "prompt_version": self.prompt}


def averaged_pair(pair: Pair, by: Side | None) -> Pair:
    """Return MODEL/* for `by` model, */PROMPT for `by` prompt, else the pair itself."""
    if by is None:
        return pair
    return Pair(pair.model, ALL) if by == "model" else Pair(ALL, pair.prompt)


def parse_pair(text: str) -> Pair | None:
    """Parse MODEL/PROMPT; None if there is no slash or a side is empty."""
    model, _, prompt = text.rpartition("/")
    return Pair(model, prompt) if model and prompt else None


@dataclass(frozen=True)
class Score:
    """The score of one judged run."""

    pair: Pair
    scenario: str
    persona: str
    value: float


@dataclass(frozen=True, eq=False)
class ScoreMatrix:
    """Scores with scenarios as rows and pairs as columns; NaN where there is no score."""

    scenarios: tuple[str, ...]
    personas: tuple[str, ...]  # of each scenario
    pairs: tuple[Pair, ...]
    values: Floats

    @cached_property
    def judged(self) -> Mask:
        """Mask of the entries with a score."""
        return ~np.isnan(self.values)

    @cached_property
    def core(self) -> Mask:
        """Mask of the core scenarios: at least half of the pairs that have any score are judged in them."""
        n_pairs = self.judged.any(axis=0).sum()
        n_judged = self.judged.sum(axis=1)  # pairs, in each scenario
        return np.asarray((2 * n_judged >= n_pairs) & (n_judged > 0))

    @cached_property
    def complete(self) -> Mask:
        """Mask of the pairs judged in every core scenario; all False without core scenarios."""
        if not self.core.any():
            return np.zeros(len(self.pairs), dtype=bool)
        return np.asarray(self.judged[self.core].all(axis=0))

    def column(self, pair: Pair) -> int | None:
        """Return the column of a pair; None if the pair is not in the matrix."""
        return self.pairs.index(pair) if pair in self.pairs else None

    def select(self, pairs: Mask, scenarios: Mask | None = None) -> ScoreMatrix:
        """Return these pairs in these scenarios; by default those in which at least one of the pairs is judged."""
        columns = np.flatnonzero(pairs)
        if scenarios is None:
            scenarios = np.asarray(self.judged[:, columns].any(axis=1))
        rows = np.flatnonzero(scenarios)
        return ScoreMatrix(
            scenarios=tuple(self.scenarios[row] for row in rows),
            personas=tuple(self.personas[row] for row in rows),
            pairs=tuple(self.pairs[column] for column in columns),
            values=self.values[np.ix_(rows, columns)],
        )

    def averaged_by_persona(self, core: Mask | None = None) -> ScoreMatrix:
        """Return one row per persona: the means over its core scenarios, for statements about new personas.

        `core` defaults to `self.core`. A mean with a missing score is NaN, so that all means of a row are over the same
        scenarios.
        """
        core = self.core if core is None else core
        personas = tuple(sorted({persona for persona, is_core in zip(self.personas, core, strict=True) if is_core}))
        values = np.empty((len(personas), len(self.pairs)))
        for row, persona in enumerate(personas):
            is_averaged = core & (np.array(self.personas) == persona)
            values[row] = self.values[is_averaged].mean(axis=0)
        return ScoreMatrix(scenarios=personas, personas=personas, pairs=self.pairs, values=values)

    def averaged_by(self, side: Side) -> ScoreMatrix:
        """Return the means per model over the prompts that all models share, or per prompt over the shared models.

        A mean is NaN in a scenario in which one of its scores is missing. The side that is averaged over becomes `*`.
        """
        mean_pairs = tuple(sorted({averaged_pair(pair, side) for pair in self.pairs}))
        shared = shared_by_all(self.pairs, side)
        # The last digit of a later sum over a column of `means` depends on the memory order. "F" gives the same numbers
        # as earlier versions.
        means = np.full((len(self.scenarios), len(mean_pairs)), np.nan, order="F")
        if shared:
            is_shared = [getattr(pair, OTHER_SIDE[side]) in shared for pair in self.pairs]
            for column, mean_pair in enumerate(mean_pairs):
                is_member = [averaged_pair(pair, side) == mean_pair for pair in self.pairs]
                means[:, column] = self.values[:, np.logical_and(is_member, is_shared)].mean(axis=1)
        return replace(self, pairs=mean_pairs, values=means)


def shared_by_all(pairs: Iterable[Pair], side: Side) -> set[str]:
    """Return the prompts that all models share (side `model`), or the models that all prompts share."""
    others: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        others[getattr(pair, side)].add(getattr(pair, OTHER_SIDE[side]))
    return set.intersection(*others.values()) if others else set()


def score_matrix(scores: Iterable[Score], pairs: Iterable[Pair] = ()) -> ScoreMatrix:
    """Average the scores of each pair and scenario. `pairs` adds columns for pairs without scores."""
    entries: dict[tuple[str, Pair], list[float]] = defaultdict(list)
    personas: dict[str, str] = {}  # by scenario
    for score in scores:
        if not isfinite(score.value):
            raise ValueError(f"A score is a finite number; {score.pair} in {score.scenario} has {score.value}.")
        if personas.setdefault(score.scenario, score.persona) != score.persona:
            raise ValueError(
                f"A scenario has one persona; {score.scenario} has {personas[score.scenario]} and {score.persona}."
            )
        entries[score.scenario, score.pair].append(score.value)
    scenarios = sorted(personas)
    all_pairs = sorted({pair for _, pair in entries} | set(pairs))
    rows = {scenario: row for row, scenario in enumerate(scenarios)}
    columns = {pair: column for column, pair in enumerate(all_pairs)}
    values = np.full((len(rows), len(columns)), np.nan)
    for (scenario, pair), repeats in entries.items():
        values[rows[scenario], columns[pair]] = fsum(repeats) / len(repeats)
    return ScoreMatrix(tuple(scenarios), tuple(personas[scenario] for scenario in scenarios), tuple(all_pairs), values)
