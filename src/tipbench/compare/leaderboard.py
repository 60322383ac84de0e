"""Leaderboard: standings, notes and JSON form; reads and records boards."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import tipbench
from tipbench.compare.attribution import Attribution, attribute
from tipbench.compare.cells import BoardCell, BoardCells, CellFilter, find_rubric, read_board, read_rubric
from tipbench.compare.duels import Duel, DuelTable, duel_table
from tipbench.compare.matrix import ALL, OTHER, Pair, Score, ScoreMatrix, Side, score_matrix, shared_by_all
from tipbench.compare.ranking import Ranking, Row, gap_of, rank
from tipbench.compare.resampling import MIN_SCENARIOS
from tipbench.compare.statistics import Difference, Estimate, Unknown
from tipbench.compare.verdict import VerdictFacts, verdict_text
from tipbench.errors import UsageError
from tipbench.judge.duels import JudgedDuel, Winner, read_duels
from tipbench.judge.scores import RUBRIC
from tipbench.record.mlflow_wire import RECORD_TAG
from tipbench.record.reader import newest_run
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import Experiment, RunStore
from tipbench.text import fingerprint, join_names, plural

MEANS = ("format_ok", "overlong", "diversity", "latency_s", "tokens_per_s")


@dataclass(frozen=True)
class Standing:
    """One row: a pair with its numbers; unknown values are None."""

    row: Row
    means: Mapping[str, float | None]  # scales, then MEANS
    judged: int
    total: int
    failed: int
    flags: tuple[str, ...]
    n_scenarios: int  # behind its composite
    n_clusters: int | None = None  # likewise, if scenarios are averaged per cluster first

    @property
    def pair(self) -> Pair:
        return self.row.pair

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form specified in PRODUCT.md."""
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
class BoardMatrices:
    """The matrices behind the rows of a board."""

    cells: BoardCells
    scenarios: ScoreMatrix  # before averaging per persona
    ranked: ScoreMatrix  # used for the ranking
    by: Side | None
    scales: tuple[str, ...]

    @property
    def clustered(self) -> bool:
        return self.ranked is not self.scenarios


def standings_of(ranking: Ranking, layout: BoardMatrices) -> tuple[Standing, ...]:
    """Returns the rows of the ranking with all their numbers."""
    groups = _groups(layout.cells.cells, layout.by)
    return tuple(_standing(row, groups.get(row.pair, []), layout) for row in ranking.rows)


def merged(pair: Pair, by: Side | None) -> Pair:
    """Returns the row that a pair belongs to."""
    return {"model": Pair(pair.model, ALL), "prompt": Pair(ALL, pair.prompt)}[by] if by else pair


def _groups(cells: Sequence[BoardCell], by: Side | None) -> dict[Pair, list[BoardCell]]:
    """Groups cells by row; by model (or prompt), only prompts (or models) shared by all rows, as in the matrix."""
    shared = shared_by_all((cell.pair for cell in cells), by) if by else set()
    groups: dict[Pair, list[BoardCell]] = {}
    for cell in cells:
        if by is None or getattr(cell.pair, OTHER[by]) in shared:
            groups.setdefault(merged(cell.pair, by), []).append(cell)
    return groups


def _standing(row: Row, cells: Sequence[BoardCell], layout: BoardMatrices) -> Standing:
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


def _scenarios_behind(pair: Pair, layout: BoardMatrices) -> int:
    column = layout.ranked.column(pair)
    if column is None:
        return 0
    wide, ranked = layout.scenarios, layout.ranked
    known = {name for name, there in zip(ranked.scenarios, ranked.judged[:, column], strict=True) if there}
    return sum(persona in known for persona, core in zip(wide.personas, wide.core, strict=True) if core)


def _mean(cells: Iterable[BoardCell], name: str, *, scored_only: bool) -> float | None:
    """Returns the mean over scenarios of the mean within each, like the composite."""
    by_scenario: dict[str, list[float]] = {}
    for cell in cells:
        source = cell.values or ({} if scored_only else cell.measured)
        if name in source:
            by_scenario.setdefault(cell.scenario, []).append(source[name])
    return fmean(fmean(values) for values in by_scenario.values()) if by_scenario else None


def _flags(row: Row, cells: Sequence[BoardCell], layout: BoardMatrices) -> Iterable[str]:
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


def pair_json(pair: Pair | None) -> dict[str, str] | None:
    """Returns the JSON form of a pair."""
    return None if pair is None else {"model": pair.model, "prompt_version": pair.prompt}


def difference_json(difference: Difference | None) -> dict[str, float | None] | None:
    """Returns the JSON form of a difference."""
    if difference is None:
        return None
    return {name: getattr(difference, name) for name in ("mean", "ci_low", "ci_high", "p")}


def attribution_json(found: Attribution | Unknown) -> dict[str, float | None] | None:
    """Returns the shares of the sum of squares, which sum to 1; a side with one member is None."""
    return None if isinstance(found, Unknown) else found.shares()


def attribution_details(found: Attribution | Unknown) -> dict[str, Any]:
    """Returns coverage, marginal means, interactions and persona share; or the reason there is no attribution."""
    if isinstance(found, Unknown):
        return {"reason": found.reason}
    sides = {"models": found.models, "prompts": found.prompts}
    return {
        "n_scenarios": found.n_scenarios,
        "without": list(found.without),
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


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"mean": estimate.mean, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}


def duels_json(table: DuelTable | Unknown | None) -> dict[str, Any] | None:
    """Returns the JSON form of the duels, which do not affect the ranking; None if there is no table."""
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
        "absent": [pair_json(pair) for pair in table.absent],
    }


_LISTED = 3
_PAIRS = 12


def board_notes(
    cells: BoardCells,
    ranking: Ranking,
    standings: Sequence[Standing],
    hosts: Sequence[str],
    by: Side | None,
    unit: str = "scenario",
) -> Iterable[str]:
    """Returns the notes on a board, most important first."""
    if not any(standing.judged for standing in standings):
        yield "Not judged yet. Create a sheet for a judge with `tipbench judge export`."
    elif cells.provisional:
        yield f"Provisional: scored by {', '.join(cells.judges) or 'no one yet'}, not by people."
    if filters := filter_text(cells.question.where, cells.question.judge):
        yield f"{filters[:1].upper()}{filters[1:]}."
    yield from _excluded_notes(cells, by)
    if any("incomplete" in standing.flags for standing in standings):
        yield "Rows that are not judged in every scenario are not ranked (flag: incomplete)."
    if ranking.too_few and any(row.p_best is not None for row in ranking.rows):
        yield f"P(best) needs at least {MIN_SCENARIOS} {unit}s and is not shown."
    if len(hosts) > 1:
        yield f"Latency and tokens/s come from {len(hosts)} hosts and are not comparable across hosts."


def filter_text(where: Mapping[str, str], judge: str | None) -> str:
    """Returns the filters as text; empty if there are none."""
    filters = join_names((f"{key}={value}" for key, value in where.items()), _PAIRS)
    parts = [f"only cells with {filters}" if filters else "", f"only {judge}'s scores" if judge else ""]
    return "; ".join(part for part in parts if part)


def _excluded_notes(cells: BoardCells, by: Side | None) -> Iterable[str]:
    if cells.other_conditions:
        ids = " or ".join(f"--where conditions={each}" for each in cells.other_ids[:_LISTED])
        yield f"{excluded_text(cells.other_conditions, 'under other conditions')}; {ids or '--where'} to show them."
    if stale := sum(cells.stale.values()):
        yield f"{excluded_text(stale, 'of older model builds, prompts or scenarios')} (flag: stale)."
    if by is not None:
        yield from _unshared_notes(cells, by)


def excluded_text(runs: int, which: str) -> str:
    """Returns the text for a number of excluded runs."""
    return f"{plural(runs, 'run')} {which} {'is' if runs == 1 else 'are'} excluded"


def _unshared_notes(cells: BoardCells, by: Side) -> Iterable[str]:
    """Returns notes on excluded prompts (or models): rows are means over those that all rows share."""
    pairs = {cell.pair for cell in cells.cells}
    shared = shared_by_all(pairs, by)
    left = sorted({getattr(pair, OTHER[by]) for pair in pairs} - shared)
    if not shared:
        yield f"No {OTHER[by]} is shared by all {by}s, so the {by}s cannot be ranked."
    elif left:
        yield f"Not every {by} has {', '.join(left)}: excluded from the means by {by}."


def unknown_pair_message(pair: Pair, there: Sequence[Pair], cells: BoardCells) -> str:
    """Returns the error message for a pair that is not on the board, with the available pairs."""
    stale = cells.stale.get(pair, 0)
    if stale:
        runs = f"all {stale} runs of it are" if stale > 1 else "its only run is"
        return f"The pair {pair} is not on this board: {runs} of an older build or prompt. Collect it again."
    others = f" {excluded_text(cells.other_conditions, 'under other conditions')}." if cells.other_conditions else ""
    return f"The pair {pair} is not on this board. Available: {join_names(there, _PAIRS)}.{others}"


__all__ = ["COMPOSITE", "BoardOptions", "Leaderboard", "Standing", "make_board"]

COMPOSITE = "composite"


@dataclass(frozen=True)
class Leaderboard:
    """A complete board: the only source of everything printed, drawn, recorded and served."""

    experiment: str
    suite: str
    rubric: str
    rubric_tag: str
    conditions: Mapping[str, Any]
    judges: tuple[str, ...]
    provisional: bool
    baseline: Pair | None
    cluster: str | None  # `persona` if scenarios are averaged per persona
    by: str | None  # `model` or `prompt` if averaged over the other side
    ranking: Ranking
    standings: tuple[Standing, ...]
    attribution: Attribution | Unknown
    scales: tuple[str, ...]
    matrix: ScoreMatrix
    notes: tuple[str, ...] = ()  # caveats for the reader
    hosts: tuple[str, ...] = ()
    duels: DuelTable | Unknown | None = None
    where: Mapping[str, str] = field(default_factory=dict)  # filter on cells
    judge: str | None = None  # only this judge's scores
    n_scenarios: int = 0  # core scenarios, even if averaged per persona
    obstacle: str | None = None  # why nothing can be ranked, regardless of scores

    @property
    def verdict(self) -> str:
        return verdict_text(self.ranking, self.duels, self.verdict_facts)

    @property
    def verdict_facts(self) -> VerdictFacts:
        """The names of rows and units, and the source of the scores, for the verdict."""
        source = f"scored by {', '.join(self.judges)}" if self.judges else "no usable answers"
        scored = any(row.estimate for row in self.ranking.rows)
        return VerdictFacts(
            unit=self.unit,
            row=self.by or "pair",
            provisional=source if self.provisional and scored else None,
            obstacle=self.obstacle,
        )

    @property
    def unit(self) -> str:
        """The unit that rows are averaged over: `scenario` or the cluster."""
        return self.cluster or "scenario"

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `compare --format json` and the API return."""
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
class BoardOptions:
    """Options for building a board."""

    baseline: Pair | None = None
    cluster: Literal["persona"] | None = None
    by: Side | None = None
    scales: tuple[str, ...] = field(default_factory=tuple)


def make_board(experiment: str, cells: BoardCells, options: BoardOptions) -> Leaderboard:
    """Builds the board of the cells. Raises UsageError if the baseline is not on it."""
    pairs = _matrix(cells.cells)
    scenarios = pairs.by(options.by) if options.by else pairs
    matrix = scenarios.by_persona() if options.cluster else scenarios
    if options.baseline is not None and options.baseline not in matrix.pairs:
        raise UsageError(unknown_pair_message(options.baseline, matrix.pairs, cells))
    ranking = replace(
        rank(matrix, baseline=options.baseline), gap=gap_of(scenarios) if scenarios.judged.any() else gap_of(pairs)
    )
    ranking = replace(ranking, rows=(*ranking.rows, *_stale_rows(cells, options.by, matrix.pairs)))
    standings = standings_of(ranking, BoardMatrices(cells, scenarios, matrix, options.by, options.scales))
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
        obstacle=_obstacle(pairs.pairs, options.by),
    )


def _matrix(cells: Sequence[BoardCell]) -> ScoreMatrix:
    scores = [Score(cell.pair, cell.scenario, cell.persona, cell.values[COMPOSITE]) for cell in cells if cell.values]
    return score_matrix(scores, {cell.pair for cell in cells})


def _stale_rows(cells: BoardCells, by: Side | None, there: Sequence[Pair]) -> list[Row]:
    """Returns rows whose runs are all stale; they are listed on the board but not ranked."""
    pairs = {merged(pair, by) for pair in cells.gone} - set(there)
    return [Row(pair=pair, complete=False, estimate=None, level=None) for pair in sorted(pairs)]


def _obstacle(pairs: Sequence[Pair], by: Side | None) -> str | None:
    if by is None or not pairs or shared_by_all(pairs, by):
        return None
    return f"no {OTHER[by]} is shared by all {by}s"


def _conditions(cells: BoardCells) -> dict[str, Any]:
    names = ("n_tips", "temperature", "diversity", "seed", "num_ctx", "num_predict", "sampling")
    run = cells.cells[0].run if cells.cells else None
    values = {name: run.params.get(name) for name in names} if run else {}
    return {"id": cells.conditions, **values}


_WINNERS: dict[Winner, Literal["first", "second", "tie"]] = {
    Winner.A: "first",
    Winner.B: "second",
    Winner.TIE: "tie",
}


def duels_of(
    store: RunStore, experiment: Experiment, cells: BoardCells | None = None, *, judge: str | None = None
) -> list[Duel]:
    """Returns the judged duels; with `cells`, only those between answers of that board under its rubric."""
    duels = read_duels(store, experiment)
    if judge is not None:
        duels = [duel for duel in duels if duel.judge == judge]
    if cells is not None:
        runs = {cell.run.run_id for cell in cells.cells}
        duels = [duel for duel in duels if runs.issuperset(duel.runs) and duel.rubric == cells.rubric]
    return [_duel(duel) for duel in duels]


def with_duels(
    store: RunStore, experiment: Experiment, board: Leaderboard, cells: BoardCells, *, judge: str | None = None
) -> Leaderboard:
    """Adds the duels within the tied set to the board; ranks, leader and `decided` do not change."""
    if board.provisional or board.by is not None or not board.ranking.tied:
        return board
    among = {pair for pair in (board.ranking.leader, *board.ranking.tied) if pair is not None}
    duels = [duel for duel in duels_of(store, experiment, cells, judge=judge) if {duel.first, duel.second} <= among]
    return replace(board, duels=duel_table(duels, among)) if duels else board


def _duel(duel: JudgedDuel) -> Duel:
    first, second = (Pair(model, prompt) for model, prompt in duel.names)
    return Duel(first, second, duel.scenario, _WINNERS[duel.winner])


def read_leaderboard(
    store: RunStore,
    experiment: Experiment,
    question: CellFilter,
    *,
    baseline: Pair | None = None,
    by: Literal["model", "prompt"] | None = None,
    cluster: Literal["persona"] | None = None,
) -> tuple[Leaderboard, BoardCells]:
    """Returns the board of an experiment, including duels, and its cells."""
    cells = read_board(store, experiment.experiment_id, question)
    scales = scale_names(store, experiment.experiment_id, cells)
    board = make_board(experiment.name, cells, BoardOptions(baseline, cluster, by, scales))
    return with_duels(store, experiment, board, cells, judge=question.judge), cells


def scale_names(store: RunStore, experiment_id: str, cells: BoardCells) -> tuple[str, ...]:
    """Returns the scales of the rubric of the scores, or of the newest run's rubric if that is not found."""
    runs = [cell.run for cell in cells.cells]
    found = find_rubric(store, experiment_id, cells.rubric, runs) if cells.rubric else None
    if found is None and runs:
        found = read_rubric(store.get(newest_run(runs).run_id)[1].get(RUBRIC))
    return found.scale_names if found else ()


BOARD = "artifact:leaderboard.json"


def record_board(store: RunStore, experiment_id: str, board: Leaderboard) -> str:
    """Records the board and returns the run id; an identical board is recorded only once."""
    content = board.to_json()
    record_id = fingerprint(content, 32)
    there = next(store.search(experiment_id, where={RECORD_TAG: record_id}, limit=1), None)
    if there is not None:
        return there.run_id
    run_id = store.record(experiment_id, _run(board, content, record_id), maybe_there=True)
    store.touch(experiment_id)
    return run_id


def _run(board: Leaderboard, content: Mapping[str, Any], record_id: str) -> NewRun:
    now = int(time.time() * 1000)
    top = board.standings[0].row.estimate if board.ranking.leader and board.standings else None
    return NewRun(
        kind=RunKind.LEADERBOARD,
        record_id=record_id,
        name=f"leaderboard of {board.experiment}",
        start_ms=now,
        end_ms=now,
        params={"rubric": board.rubric_tag or "none", "conditions": str(board.conditions.get("id", ""))},
        metrics={
            "pairs": float(len(board.standings)),
            "scenarios": float(board.n_scenarios),
            "decided": float(board.ranking.decided),
            "tied": float(len(board.ranking.tied)),
            **({"leader_composite": top.mean} if top else {}),
        },
        tags={
            "leader": str(board.ranking.leader or "none"),
            "provisional": str(board.provisional).lower(),
            "judges": json.dumps(list(board.judges), ensure_ascii=False),
            "mlflow.note.content": board.verdict,
            "tipbench.version": tipbench.__version__,
        },
        texts={BOARD: json.dumps(content, ensure_ascii=False, separators=(",", ":"))},
    )
