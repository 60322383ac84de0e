"""Benchmarks with known truth: scenario effects, row effects and noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tipbench.compare.matrix import Floats, Pair, ScoreMatrix
from tipbench.compare.resampling import ALPHA, step_down

PAIRED_SD = 2.0

T = TypeVar("T")


def known(value: T | None) -> T:
    """The value, which must not be None."""
    assert value is not None
    return value


def pairs_of(k: int) -> tuple[Pair, ...]:
    """`k` pairs, in sorted order."""
    return tuple(Pair(f"m{at:03}", "v1") for at in range(k))


def matrix_of(values: Floats, pairs: Sequence[Pair] = (), personas: Sequence[str] = ()) -> ScoreMatrix:
    """A matrix from plain numbers; scenarios get names in order."""
    n, k = values.shape
    scenarios = tuple(f"s{at:03}" for at in range(n))
    return ScoreMatrix(scenarios, tuple(personas) or scenarios, tuple(pairs) or pairs_of(k), values)


def simulate(rng: np.random.Generator, effects: Sequence[float] | Floats, n: int) -> Floats:
    """Scenarios × rows; a paired difference has an SD of PAIRED_SD."""
    noise = rng.normal(scale=PAIRED_SD / np.sqrt(2), size=(n, len(effects)))
    return np.asarray(10 + rng.normal(scale=2.0, size=(n, 1)) + np.asarray(effects) + noise)


def decided_and_tied(values: Floats, n_flips: int = 499) -> tuple[bool, set[int]]:
    """(decided, the leader and its tied rows) as `rank` gives them, without the rest of the board."""
    leader = int(values.mean(axis=0).argmax())
    others = [at for at in range(values.shape[1]) if at != leader]
    adjusted = step_down(values[:, others] - values[:, [leader]], n_flips=n_flips)
    tied = {at for at, p in zip(others, adjusted, strict=True) if p is None or p > ALPHA}
    return not tied, tied | {leader}
