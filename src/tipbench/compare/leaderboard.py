"""The leaderboard: standings with error bars, a verdict in words, and what the spread is due to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tipbench.compare.attribution import Attribution, attribute
from tipbench.compare.board_json import attribution_details, attribution_json, duels_json, pair_json
from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.duels import DuelTable
from tipbench.compare.matrix import OTHER, Pair, Score, ScoreMatrix, Side, score_matrix, shared_by_all
from tipbench.compare.missing import gap_of
from tipbench.compare.notes import board_notes, not_on_board
from tipbench.compare.ranking import Ranking, Row, rank
from tipbench.compare.standing import Layout, Standing, merged, standings_of
from tipbench.compare.statistics import Unknown
from tipbench.compare.verdict import Telling, verdict_text
from tipbench.errors import UsageError

__all__ = ["COMPOSITE", "Leaderboard", "Options", "Standing", "make_board"]

COMPOSITE = "composite"


@dataclass(frozen=True)
class Leaderboard:
    """A board, complete: what is printed, drawn, logged and served is made of this alone."""

    experiment: str
    suite: str
    rubric: str
    rubric_tag: str
    conditions: Mapping[str, Any]
    judges: tuple[str, ...]
    provisional: bool
    baseline: Pair | None
    cluster: str | None  # `persona` when rows rest on means per persona
    by: str | None  # `model` or `prompt` when the other side is averaged over
    ranking: Ranking
    standings: tuple[Standing, ...]
    attribution: Attribution | Unknown
    scales: tuple[str, ...]
    matrix: ScoreMatrix
    notes: tuple[str, ...] = ()  # what a reader must know before believing it
    hosts: tuple[str, ...] = ()
    duels: DuelTable | Unknown | None = None
    where: Mapping[str, str] = field(default_factory=dict)  # only such cells
    judge: str | None = None  # only this judge's scores
    n_scenarios: int = 0  # that count, also where rows rest on means per persona
    hindrance: str | None = None  # why nothing can be ranked, whatever is judged

    @property
    def verdict(self) -> str:
        return verdict_text(self.ranking, self.duels, self.telling)

    @property
    def telling(self) -> Telling:
        """What rows and units are called, and whose scores they are."""
        by_whom = f"scored by {', '.join(self.judges)}" if self.judges else "floors only"
        scored = any(row.estimate for row in self.ranking.rows)
        return Telling(
            unit=self.unit,
            row=self.by or "pair",
            provisional=by_whom if self.provisional and scored else None,
            hindrance=self.hindrance,
        )

    @property
    def unit(self) -> str:
        """What rows are means over."""
        return self.cluster or "scenario"

    def to_json(self) -> dict[str, Any]:
        """The object that `compare --format json` and the API give."""
        ranking = self.ranking
        return {
            "experiment": self.experiment,
            "suite": self.suite,
            "rubric": self.rubric or None,
            "rubric_sha256": self.rubric_tag.partition("@")[2] or None,
            "conditions": dict(self.conditions),
            "judges": list(self.judges),
            "provisional": self.provisional,
            "baseline": pair_json(self.baseline),
            "cluster": self.cluster,
            "by": self.by,
            "where": dict(self.where),
            "judge": self.judge,
            "verdict": {
                "text": self.verdict,
                "leader": pair_json(ranking.leader),
                "tied_with_leader": [pair_json(pair) for pair in ranking.tied],
                "decided": ranking.decided,
                "scenarios_needed": None if self.cluster else ranking.scenarios_needed,
                "clusters_needed": ranking.scenarios_needed if self.cluster else None,
                "smallest_detectable": ranking.smallest_detectable,
                "n_scenarios": self.n_scenarios,
                "n_clusters": ranking.n_scenarios if self.cluster else None,
            },
            "standings": [standing.to_json() for standing in self.standings],
            "attribution": attribution_json(self.attribution),
            "attribution_details": attribution_details(self.attribution),
            "duels": duels_json(self.duels),
            "notes": list(self.notes),
            "hosts": list(self.hosts),
        }


@dataclass(frozen=True)
class Options:
    """How a board is made of its cells."""

    baseline: Pair | None = None
    cluster: Literal["persona"] | None = None
    by: Side | None = None
    scales: tuple[str, ...] = field(default_factory=tuple)


def make_board(experiment: str, cells: BoardCells, options: Options) -> Leaderboard:
    """Rank the pairs of the cells."""
    pairs = _matrix(cells.cells)
    scenarios = pairs.by(options.by) if options.by else pairs
    matrix = scenarios.by_persona() if options.cluster else scenarios
    if options.baseline is not None and options.baseline not in matrix.pairs:
        raise UsageError(not_on_board(options.baseline, matrix.pairs, cells))
    ranking = replace(
        rank(matrix, baseline=options.baseline), gap=gap_of(scenarios) if scenarios.judged.any() else gap_of(pairs)
    )
    ranking = replace(ranking, rows=(*ranking.rows, *_gone(cells, options.by, matrix.pairs)))
    standings = standings_of(ranking, Layout(cells, scenarios, matrix, options.by, options.scales))
    runs = [cell.run for cell in cells.cells]
    hosts = tuple(sorted({run.params["host"] for run in runs if "host" in run.params}))
    return Leaderboard(
        experiment=experiment,
        suite=", ".join(sorted({run.params.get("suite", "") for run in runs})),
        rubric=cells.rubric.partition("@")[0],
        rubric_tag=cells.rubric,
        conditions=_conditions(cells),
        judges=cells.judges,
        provisional=cells.provisional,
        baseline=options.baseline,
        cluster=options.cluster,
        by=options.by,
        ranking=ranking,
        standings=standings,
        attribution=attribute(pairs),
        scales=options.scales,
        matrix=matrix,
        notes=tuple(board_notes(cells, ranking, standings, hosts, options.by, options.cluster or "scenario")),
        hosts=hosts,
        where=dict(cells.question.where),
        judge=cells.question.judge,
        n_scenarios=int(scenarios.core.sum()),
        hindrance=_hindrance(pairs.pairs, options.by),
    )


def _matrix(cells: Sequence[BoardCell]) -> ScoreMatrix:
    scores = [Score(cell.pair, cell.scenario, cell.persona, cell.values[COMPOSITE]) for cell in cells if cell.values]
    return score_matrix(scores, {cell.pair for cell in cells})


def _gone(cells: BoardCells, by: Side | None, there: Sequence[Pair]) -> list[Row]:
    """Rows of which nothing is current. They stand on the board, and count nowhere."""
    pairs = {merged(pair, by) for pair in cells.gone} - set(there)
    return [Row(pair=pair, complete=False, estimate=None, level=None) for pair in sorted(pairs)]


def _hindrance(pairs: Sequence[Pair], by: Side | None) -> str | None:
    if by is None or not pairs or shared_by_all(pairs, by):
        return None
    return f"no {OTHER[by]} is shared by all {by}s"


def _conditions(cells: BoardCells) -> dict[str, Any]:
    names = ("n_tips", "temperature", "diversity", "seed", "num_ctx", "num_predict", "sampling")
    run = cells.cells[0].run if cells.cells else None
    values = {name: run.params.get(name) for name in names} if run else {}
    return {"id": cells.conditions, **values}
