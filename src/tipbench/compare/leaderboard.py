"""The leaderboard: standings with error bars, a verdict in words, and what the spread is due to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from tipbench.compare.attribution import Attribution, attribute
from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.duels import DuelTable
from tipbench.compare.matrix import Pair, Score, ScoreMatrix, score_matrix
from tipbench.compare.ranking import Ranking, Row, rank
from tipbench.compare.statistics import Difference, Unknown
from tipbench.compare.verdict import verdict_text
from tipbench.errors import UsageError

MEANS = ("format_ok", "overlong", "diversity", "latency_s", "tokens_per_s")
COMPOSITE = "composite"
_LISTED = 3


@dataclass(frozen=True)
class Standing:
    """One row: a pair with its numbers. Unknown is None."""

    row: Row
    means: Mapping[str, float | None]  # the scales, then MEANS
    judged: int
    total: int
    failed: int
    flags: tuple[str, ...]

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
            "n_scenarios": estimate.n if estimate else 0,
            "judged": self.judged,
            "total": self.total,
            "failed": self.failed,
            "flags": list(self.flags),
        }


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

    @property
    def verdict(self) -> str:
        return verdict_text(self.ranking, self.duels, clusters="personas" if self.cluster else "scenarios")

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
            "verdict": {
                "text": self.verdict,
                "leader": pair_json(ranking.leader),
                "tied_with_leader": [pair_json(pair) for pair in ranking.tied],
                "decided": ranking.decided,
                "scenarios_needed": ranking.scenarios_needed,
                "smallest_detectable": ranking.smallest_detectable,
                "n_scenarios": ranking.n_scenarios,
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
    by: Literal["model", "prompt"] | None = None
    scales: tuple[str, ...] = field(default_factory=tuple)


def make_board(experiment: str, cells: BoardCells, options: Options) -> Leaderboard:
    """Rank the pairs of the cells."""
    matrix = _matrix(cells.cells, options)
    if options.baseline is not None and options.baseline not in matrix.pairs:
        known = ", ".join(str(pair) for pair in matrix.pairs[:12])
        raise UsageError(f"There is no pair {options.baseline} on this board. There are: {known}.")
    ranking = rank(matrix, baseline=options.baseline)
    groups = _groups(cells.cells, options.by)
    standings = tuple(_standing(row, groups.get(row.pair, []), cells, options) for row in ranking.rows)
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
        attribution=attribute(_matrix(cells.cells, Options())),
        scales=options.scales,
        matrix=matrix,
        notes=tuple(_notes(cells, standings, hosts)),
        hosts=hosts,
    )


def _matrix(cells: Iterable[BoardCell], options: Options) -> ScoreMatrix:
    cells = list(cells)
    scores = [Score(cell.pair, cell.scenario, cell.persona, cell.values[COMPOSITE]) for cell in cells if cell.values]
    matrix = score_matrix(scores, {cell.pair for cell in cells})
    if options.by is not None:
        matrix = matrix.by(options.by)
    return matrix.by_persona() if options.cluster else matrix


def _groups(cells: Iterable[BoardCell], by: str | None) -> dict[Pair, list[BoardCell]]:
    groups: dict[Pair, list[BoardCell]] = {}
    for cell in cells:
        pair = cell.pair
        if by is not None:
            pair = Pair(pair.model, "*") if by == "model" else Pair("*", pair.prompt)
        groups.setdefault(pair, []).append(cell)
    return groups


def _standing(row: Row, cells: Sequence[BoardCell], board: BoardCells, options: Options) -> Standing:
    scales = {name: _mean(cells, name, scored_only=True) for name in options.scales}
    others = {name: _mean(cells, name, scored_only=False) for name in MEANS}
    return Standing(
        row=row,
        means={**scales, **others},
        judged=sum(bool(cell.values) for cell in cells),
        total=len(cells),
        failed=sum(cell.failed for cell in cells),
        flags=tuple(_flags(row, cells, board)),
    )


def _mean(cells: Iterable[BoardCell], name: str, *, scored_only: bool) -> float | None:
    """Over scenarios of the mean within each, like the composite."""
    by_scenario: dict[str, list[float]] = {}
    for cell in cells:
        source = cell.values or ({} if scored_only else cell.run.metrics)
        if name in source:
            by_scenario.setdefault(cell.scenario, []).append(source[name])
    return fmean(fmean(values) for values in by_scenario.values()) if by_scenario else None


def _flags(row: Row, cells: Sequence[BoardCell], board: BoardCells) -> Iterable[str]:
    if not row.complete:
        yield "incomplete"
    if any(cell.failed for cell in cells):
        yield "failed"
    if board.stale.get(row.pair):
        yield "stale"
    tags = [cell.run.tags for cell in cells]
    if any(each.get("truncated") == "true" for each in tags):
        yield "truncated"
    if any(each.get("floored") == "true" for each in tags):
        yield "floored"
    if any(each.get("foreign_resident") == "true" for each in tags):
        yield "foreign_resident"


def _conditions(cells: BoardCells) -> dict[str, Any]:
    names = ("n_tips", "temperature", "diversity", "seed", "num_ctx", "num_predict", "sampling")
    run = cells.cells[0].run if cells.cells else None
    values = {name: run.params.get(name) for name in names} if run else {}
    return {"id": cells.conditions, **values}


def _notes(cells: BoardCells, standings: Sequence[Standing], hosts: Sequence[str]) -> Iterable[str]:
    if not any(standing.judged for standing in standings):
        yield "Nobody has scored a cell yet: `tipbench judge export` makes a sheet for a judge."
    elif cells.provisional:
        yield f"Provisional: scored by {', '.join(cells.judges) or 'nobody yet'}, not by people."
    if cells.other_conditions:
        ids = " or ".join(f"--where conditions={each}" for each in cells.other_ids[:_LISTED])
        yield f"{cells.other_conditions} runs under other conditions are left out; {ids or '--where'} shows them."
    if stale := sum(cells.stale.values()):
        yield f"{stale} runs of older model builds, prompts or scenarios are left out (flag: stale)."
    if any("incomplete" in standing.flags for standing in standings):
        yield "Rows that are not judged in every scenario are not ranked (flag: incomplete)."
    if len(hosts) > 1:
        yield f"Latency and tokens/s come from {len(hosts)} hosts and do not compare across them."


def pair_json(pair: Pair | None) -> dict[str, str] | None:
    """A pair as scripts read it."""
    return None if pair is None else {"model": pair.model, "prompt_version": pair.prompt}


def difference_json(difference: Difference | None) -> dict[str, float | None] | None:
    """A difference as scripts read it."""
    if difference is None:
        return None
    return {name: getattr(difference, name) for name in ("mean", "ci_low", "ci_high", "p")}


def attribution_json(found: Attribution | Unknown) -> dict[str, float] | None:
    """Shares of the sum of squares, summing to 1; None where the layout does not allow it."""
    if isinstance(found, Unknown):
        return None
    names = ("model", "prompt", "interaction", "scenario", "residual")
    return {name: factor.share if (factor := getattr(found, name)) is not None else 0.0 for name in names}


def attribution_details(found: Attribution | Unknown) -> dict[str, Any]:
    """Marginal means, interaction flags, the persona's share; or why there is no attribution."""
    if isinstance(found, Unknown):
        return {"reason": found.reason}
    sides = {"models": found.models, "prompts": found.prompts}
    return {
        **{
            side: [{"name": each.name, **_estimate(each.estimate)} for each in marginals]
            for side, marginals in sides.items()
        },
        "interactions": [
            {"prompt_version": flag.prompt, "helps": list(flag.helps), "hurts": list(flag.hurts)}
            for flag in found.flags
        ],
        "persona": found.persona.share if found.persona else None,
    }


def _estimate(estimate: Any) -> dict[str, float | None]:
    return {"mean": estimate.mean, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}


def duels_json(table: DuelTable | Unknown | None) -> dict[str, Any] | None:
    """The duels beside the board; they never change it."""
    if table is None or isinstance(table, Unknown):
        return None
    return {
        "standings": [
            {
                **(pair_json(each.pair) or {}),
                "strength": each.strength.value,
                "ci_low": each.strength.ci_low,
                "ci_high": each.strength.ci_high,
                "points": each.points,
                "duels": each.duels,
                "n_scenarios": each.n_scenarios,
            }
            for each in table.standings
        ],
        "winner": pair_json(table.winner),
    }
