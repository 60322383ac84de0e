"""What keeps every row of a board from being complete, and so from being ranked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tipbench.compare.matrix import ScoreMatrix


@dataclass(frozen=True)
class Gap:
    """The row that lacks least, and what; or, where no scenario counts yet, the scenario that lacks least, and whom."""

    core: int  # scenarios in which at least half of the rows are judged
    rows: int
    nearest: str
    lacks: tuple[str, ...]


def gap_of(matrix: ScoreMatrix) -> Gap | None:
    """None when some row is complete, and when nothing is judged at all."""
    if matrix.complete.any() or not matrix.judged.any():
        return None
    pairs, scenarios = [str(pair) for pair in matrix.pairs], list(matrix.scenarios)
    core = int(matrix.core.sum())
    if core:
        rows = np.flatnonzero(matrix.core)
        nearest = int(matrix.judged[rows].sum(axis=0).argmax())
        lacks = [scenarios[row] for row in rows if not matrix.judged[row, nearest]]
        return Gap(core, len(pairs), pairs[nearest], tuple(lacks))
    nearest = int(matrix.judged.sum(axis=1).argmax())
    lacks = [pair for at, pair in enumerate(pairs) if not matrix.judged[nearest, at]]
    return Gap(core, len(pairs), scenarios[nearest], tuple(lacks))
