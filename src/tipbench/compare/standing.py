"""One row of the board: a pair with its numbers, from the same cells as its composite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tipbench.compare.board_json import difference_json
from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.matrix import ALL, OTHER, Pair, ScoreMatrix, Side, shared_by_all
from tipbench.compare.ranking import Ranking, Row

MEANS = ("format_ok", "overlong", "diversity", "latency_s", "tokens_per_s")


@dataclass(frozen=True)
class Standing:
    """One row: a pair with its numbers. Unknown is None."""

    row: Row
    means: Mapping[str, float | None]  # the scales, then MEANS
    judged: int
    total: int
    failed: int
    flags: tuple[str, ...]
    n_scenarios: int  # that its composite rests on
    n_clusters: int | None = None  # likewise, where scenarios were averaged first

    @property
    def pair(self) -> Pair:
        return self.row.pair

    def to_json(self) -> dict[str, Any]:
        """As PRODUCT.md has it."""
        row, estimate = self.row, self.row.estimate
        return {
            "rank": row.rank,
            "rank_low": row.rank_low,
            "rank_high": row.rank_high,
            "model": row.pair.model,
            "prompt_version": row.pair.prompt,
            "composite": estimate.mean if estimate else None,
            "ci_low": estimate.ci_low if estimate else None,
            "ci_high": estimate.ci_high if estimate else None,
            "p_best": row.p_best,
            "diff_to_leader": difference_json(row.to_leader),
            "diff_to_baseline": difference_json(row.to_baseline),
            **self.means,
            "n_scenarios": self.n_scenarios,
            "n_clusters": self.n_clusters,
            "judged": self.judged,
            "total": self.total,
            "failed": self.failed,
            "flags": list(self.flags),
        }


@dataclass(frozen=True)
class Layout:
    """How rows are made of cells."""

    cells: BoardCells
    scenarios: ScoreMatrix  # before anything was averaged per persona
    ranked: ScoreMatrix  # what the ranking rests on
    by: Side | None
    scales: tuple[str, ...]

    @property
    def clustered(self) -> bool:
        return self.ranked is not self.scenarios


def standings_of(ranking: Ranking, layout: Layout) -> tuple[Standing, ...]:
    """The rows of the ranking with all their numbers."""
    groups = _groups(layout.cells.cells, layout.by)
    return tuple(_standing(row, groups.get(row.pair, []), layout) for row in ranking.rows)


def merged(pair: Pair, by: Side | None) -> Pair:
    """The row a pair belongs to."""
    return {"model": Pair(pair.model, ALL), "prompt": Pair(ALL, pair.prompt)}[by] if by else pair


def _groups(cells: Sequence[BoardCell], by: Side | None) -> dict[Pair, list[BoardCell]]:
    """The cells of each row; by model those of the prompts that every model has, as in the matrix."""
    shared = shared_by_all((cell.pair for cell in cells), by) if by else set()
    groups: dict[Pair, list[BoardCell]] = {}
    for cell in cells:
        if by is None or getattr(cell.pair, OTHER[by]) in shared:
            groups.setdefault(merged(cell.pair, by), []).append(cell)
    return groups


def _standing(row: Row, cells: Sequence[BoardCell], layout: Layout) -> Standing:
    scales = {name: _mean(cells, name, scored_only=True) for name in layout.scales}
    others = {name: _mean(cells, name, scored_only=False) for name in MEANS}
    units = row.estimate.n if row.estimate else 0
    return Standing(
        row=row,
        means={**scales, **others},
        judged=sum(bool(cell.values) for cell in cells),
        total=len(cells),
        failed=sum(cell.failed for cell in cells),
        flags=tuple(_flags(row, cells, layout)),
        n_scenarios=_scenarios_behind(row.pair, layout) if layout.clustered else units,
        n_clusters=units if layout.clustered else None,
    )


def _scenarios_behind(pair: Pair, layout: Layout) -> int:
    column = layout.ranked.column(pair)
    if column is None:
        return 0
    wide, ranked = layout.scenarios, layout.ranked
    known = {name for name, there in zip(ranked.scenarios, ranked.judged[:, column], strict=True) if there}
    return sum(persona in known for persona, core in zip(wide.personas, wide.core, strict=True) if core)


def _mean(cells: Iterable[BoardCell], name: str, *, scored_only: bool) -> float | None:
    """Over scenarios of the mean within each, like the composite."""
    by_scenario: dict[str, list[float]] = {}
    for cell in cells:
        source = cell.values or ({} if scored_only else cell.measured)
        if name in source:
            by_scenario.setdefault(cell.scenario, []).append(source[name])
    return fmean(fmean(values) for values in by_scenario.values()) if by_scenario else None


def _flags(row: Row, cells: Sequence[BoardCell], layout: Layout) -> Iterable[str]:
    if not row.complete:
        yield "incomplete"
    if any(cell.failed for cell in cells):
        yield "failed"
    if any(count for pair, count in layout.cells.stale.items() if merged(pair, layout.by) == row.pair):
        yield "stale"
    tags = [cell.run.tags for cell in cells]
    for name in ("truncated", "floored", "foreign_resident"):
        if any(each.get(name) == "true" for each in tags):
            yield name
