"""The leaderboard of an experiment: computes it from cells, formats it as JSON and records it."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import fmean
from typing import Any, Literal

import numpy as np

import tipbench
from tipbench.compare.attribution import Attribution, attribute
from tipbench.compare.cells import (
    COMPOSITE,
    BoardCell,
    BoardCells,
    CellFilter,
    Coverage,
    is_reference,
    read_board_cells,
    read_rubric,
    without_reference_prompt,
)
from tipbench.compare.duels import Duel, DuelTable, duel_table
from tipbench.compare.matrix import (
    OTHER_SIDE,
    Pair,
    Score,
    ScoreMatrix,
    Side,
    averaged_pair,
    score_matrix,
    shared_by_all,
)
from tipbench.compare.ranking import NextLook, PairResult, Ranking, RankOptions, judged_scenarios, missing_scores, rank
from tipbench.compare.statistics import Unknown, clopper_pearson, estimate_json, is_fragile
from tipbench.compare.verdict import board_notes, unknown_pair_message, verdict_text
from tipbench.errors import UsageError
from tipbench.judge.drift import Verdict
from tipbench.judge.duels import Winner, read_duels
from tipbench.judge.scores import RUBRIC
from tipbench.judge.sheet_store import SHEET_KIND, TIPS, SheetStatus
from tipbench.plan.design import Design, read_design
from tipbench.record.mlflow_wire import RECORD_TAG
from tipbench.record.reader import newest_answered_run
from tipbench.record.run import NewRun, RunKind, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import fingerprint

BOARD = "artifact:leaderboard.json"
METRICS = ("format_ok", "overlong", "diversity", "latency_s", "tokens_per_s")  # averaged per row, like the scales
# Params of a run; `diversity` is the option here, not the metric.
CONDITIONS = ("n_tips", "temperature", "diversity", "seed", "num_ctx", "num_predict", "sampling")
# The answer shown first is called A.
_WINNERS: dict[Winner, Literal["first", "second", "tie"]] = {Winner.A: "first", Winner.B: "second", Winner.TIE: "tie"}


@dataclass(frozen=True)
class ModelSize:
    """The size of a model."""

    params_b: float | None  # billions of parameters; None if unknown
    memory_bytes: int | None  # of weights and context, estimated by `collect`; None if unknown


@dataclass(frozen=True)
class Usable:
    """How frequent and how good the answers with a usable tip are."""

    rate: float  # share of the scenarios, 0 to 1
    low: float  # lower end of the 95 % Clopper–Pearson interval of the rate
    high: float  # its upper end
    n_scenarios: int  # with an answer
    composite: float | None  # mean of the usable answers; None if none of them is judged

    @property
    def n_usable(self) -> float:
        """The number of scenarios with a usable tip. It can be a fraction, because repeats are averaged."""
        return self.rate * self.n_scenarios


@dataclass(frozen=True)
class Standing:
    """One row of the leaderboard: a pair with its numbers. Unknown values are None."""

    result: PairResult  # its rank and composite
    means: Mapping[str, float | None]  # of the scales, then of METRICS
    usable: Usable | None  # None without an answer
    n_cells: int
    n_judged: int  # of its cells
    n_failed: int  # of its cells
    flags: tuple[str, ...]  # keys of `standings.FLAG_TEXTS`
    n_scenarios: int  # scenarios in the composite
    n_clusters: int | None = None  # clusters in the composite; None if scenarios are not averaged per cluster

    @property
    def pair(self) -> Pair:
        return self.result.pair

    def to_json(self) -> dict[str, Any]:
        """Return an item of `standings` in the leaderboard JSON."""
        result, estimate, usable = self.result, self.result.estimate, self.usable
        return {
            "rank": result.rank,
            "rank_low": result.rank_low,
            "rank_high": result.rank_high,
            "model": result.pair.model,
            "prompt_version": result.pair.prompt,
            "composite": estimate.mean if estimate else None,
            "ci_low": estimate.ci_low if estimate else None,
            "ci_high": estimate.ci_high if estimate else None,
            "composite_adjusted": result.adjusted_mean,
            "composite_usable": usable.composite if usable else None,
            "usable": usable.rate if usable else None,
            "usable_low": usable.low if usable else None,
            "usable_high": usable.high if usable else None,
            "p_best": result.p_best,
            "diff_to_leader": estimate_json(result.to_leader),
            "diff_to_baseline": estimate_json(result.to_baseline),
            **self.means,
            "n_scenarios": self.n_scenarios,
            "n_clusters": self.n_clusters,
            "judged": self.n_judged,
            "total": self.n_cells,
            "failed": self.n_failed,
            "flags": list(self.flags),
        }


@dataclass(frozen=True)
class JudgingRecord:
    """Pace of an experiment's judges and concerns about them, from its sheets."""

    minutes_per_answer: float | None = None  # from export to apply, without provisional sheets; None if unknown
    concerns: Mapping[str, str] = field(default_factory=dict)  # by judge, such as "is far off the reference scores"
    held: frozenset[str] = frozenset()  # judges with scores that are stored but not counted


@dataclass(frozen=True)
class Leaderboard:
    """A computed board, the only source of everything that is printed, drawn, recorded or served."""

    experiment: str
    suite: str
    rubric: str  # id@sha256; empty if nothing is scored
    conditions: Mapping[str, Any]
    judges: tuple[str, ...]
    provisional: bool
    baseline: Pair | None
    cluster: str | None  # `persona` if scenarios are averaged per persona
    by: Side | None  # `model` if models are ranked, as means over prompts; `prompt` likewise; None if pairs are ranked
    ranking: Ranking
    standings: tuple[Standing, ...]
    attribution: Attribution | Unknown
    scales: tuple[str, ...]
    matrix: ScoreMatrix
    reference_matrix: ScoreMatrix  # over the scenarios of `matrix`
    notes: tuple[str, ...] = ()  # caveats, as sentences
    hosts: tuple[str, ...] = ()
    duels: DuelTable | Unknown | None = None  # None if no duel between tied rows is judged
    where: Mapping[str, str] = field(default_factory=dict)  # the filter of the cells
    judge: str | None = None  # if set, only the scores of this judge are used
    n_scenarios: int = 0  # core scenarios, also if they are averaged per persona
    obstacle: str | None = None  # why nothing can be ranked, whatever the scores are
    references: tuple[Standing, ...] = ()  # rows that are compared with the leader but not ranked, best first
    fragile: bool = False  # decided, but a few more unusable answers of the leader would change that
    unplanned_reason: str | None = None  # why the tests are not a planned look; None if they are
    exclude: tuple[str, ...] = ()  # pairs or models left out
    judging: JudgingRecord = field(default_factory=JudgingRecord)
    composite_range: tuple[float, float] | None = None  # lowest and highest possible; None if the rubric is not found
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)  # by model
    coverage: Coverage | None = None

    @property
    def verdict(self) -> str:
        return verdict_text(self)

    @property
    def confidence(self) -> str:
        """The confidence level of the intervals of differences, 1 − significance level: "98.18 %" with four looks."""
        return f"{100 * (1 - self.ranking.level):.4g} %"

    @property
    def unit(self) -> str:
        """What a row is averaged over: `scenario` or `persona`."""
        return self.cluster or "scenario"

    @property
    def row_noun(self) -> str:
        """What is ranked: `pair`, `model` or `prompt`."""
        return self.by or "pair"

    def to_json(self) -> dict[str, Any]:
        """Return the object that `compare --format json` and the API return."""
        ranking, attribution = self.ranking, self.attribution
        rubric_id, _, rubric_sha256 = self.rubric.partition("@")
        return {
            "experiment": self.experiment,
            "suite": self.suite,
            "rubric": rubric_id or None,
            "rubric_sha256": rubric_sha256 or None,
            "conditions": dict(self.conditions),
            "judges": list(self.judges),
            "provisional": self.provisional,
            "baseline": self.baseline.to_json() if self.baseline else None,
            "cluster": self.cluster,
            "by": self.by,
            "where": dict(self.where),
            "judge": self.judge,
            "exclude": list(self.exclude),
            "verdict": {
                "text": self.verdict,
                "leader": ranking.leader.to_json() if ranking.leader else None,
                "tied_with_leader": [pair.to_json() for pair in ranking.tied],
                "decided": ranking.decided,
                "fragile": self.fragile,
                "level": ranking.level,
                "look": ranking.look.to_json() if ranking.look else None,
                "next_look": ranking.next_look.to_json() if ranking.next_look else None,
                "beats_reference": ranking.beats_reference,
                "diff_to_reference": estimate_json(ranking.to_reference),
                "scenarios_needed": None if self.cluster else ranking.units_needed,
                "clusters_needed": ranking.units_needed if self.cluster else None,
                "smallest_detectable": ranking.smallest_detectable,
                "n_scenarios": self.n_scenarios,
                "n_clusters": ranking.n_units if self.cluster else None,
            },
            "standings": [standing.to_json() for standing in self.standings],
            "references": [standing.to_json() for standing in self.references],
            "attribution": None if isinstance(attribution, Unknown) else attribution.shares(),
            "attribution_details": (
                {"reason": attribution.reason} if isinstance(attribution, Unknown) else attribution.details()
            ),
            "duels": self.duels.to_json() if isinstance(self.duels, DuelTable) else None,
            "notes": list(self.notes),
            "hosts": list(self.hosts),
        }


@dataclass(frozen=True)
class BoardOptions:
    """Everything that a board depends on besides its cells."""

    baseline: Pair | None = None
    cluster: Literal["persona"] | None = None
    by: Side | None = None
    scales: tuple[str, ...] = ()
    design: Design | None = None
    judging: JudgingRecord = field(default_factory=JudgingRecord)


def make_board(experiment: str, cells: BoardCells, options: BoardOptions) -> Leaderboard:
    """Compute the board of the cells; raises UsageError if the baseline is not on it."""
    pair_matrix, reference_matrix = _matrices(cells)
    by = options.by
    scenario_matrix = pair_matrix.averaged_by(by) if by else pair_matrix
    matrix = scenario_matrix
    if options.cluster:
        matrix = scenario_matrix.averaged_by_persona()
        # References are averaged over the same scenarios as the candidates.
        reference_matrix = reference_matrix.averaged_by_persona(core=scenario_matrix.core)
    available = (*matrix.pairs, *reference_matrix.pairs)
    if options.baseline is not None and options.baseline not in available:
        raise UsageError(unknown_pair_message(options.baseline, available, cells))
    unplanned_reason = _why_unplanned(cells, options)
    design = None if unplanned_reason else options.design
    # On a board by model or prompt, a row is silent (without any answer) if all its pairs are.
    answered = {averaged_pair(cell.pair, by) for cell in cells.cells if not cell.failed}
    silent = frozenset(averaged_pair(pair, by) for pair in cells.silent)
    only_stale = frozenset(averaged_pair(pair, by) for pair in cells.only_stale if not is_reference(pair))
    rank_options = RankOptions(
        baseline=options.baseline,
        design=design,
        finished_scenarios=cells.finished_scenarios,
        silent=silent - answered,
        stale=only_stale - set(matrix.pairs),
    )
    ranking = rank(matrix, rank_options, reference_matrix)
    # If a board by model or prompt has no mean at all, report the scores that the pairs lack.
    incomplete_matrix = scenario_matrix if scenario_matrix.judged.any() else pair_matrix
    missing = missing_scores(incomplete_matrix, needs_all_core=options.cluster is not None)
    ranking = replace(ranking, missing_scores=missing)
    if ranking.next_look is not None and design is not None:
        pace = options.judging.minutes_per_answer
        ranking = replace(ranking, next_look=_with_effort(ranking.next_look, design, cells, matrix, pace))
    standings = tuple(_standings(ranking.rows, cells, options, scenario_matrix, matrix))
    reference_standings = tuple(_standings(ranking.references, cells, options, scenario_matrix, matrix))
    runs = [cell.run for cell in cells.cells]
    conditions: dict[str, Any] = {"id": cells.conditions}
    if runs:
        conditions |= {name: runs[0].params.get(name) for name in CONDITIONS}
    obstacle = "no answer has a usable tip" if cells.all_unusable else None
    if by and pair_matrix.pairs and not shared_by_all(pair_matrix.pairs, by):
        obstacle = f"no {OTHER_SIDE[by]} is shared by all {by}s"
    board = Leaderboard(
        experiment=experiment,
        suite=", ".join(sorted({run.params.get("suite", "") for run in runs})),
        rubric=cells.rubric,
        conditions=conditions,
        judges=cells.judges,
        provisional=cells.provisional,
        baseline=options.baseline,
        cluster=options.cluster,
        by=by,
        ranking=ranking,
        standings=standings,
        attribution=attribute(pair_matrix),
        scales=options.scales,
        matrix=matrix,
        reference_matrix=reference_matrix,
        hosts=tuple(sorted({run.params["host"] for run in runs if "host" in run.params})),
        where=dict(cells.cell_filter.where),
        judge=cells.cell_filter.judge,
        n_scenarios=int(scenario_matrix.core.sum()),
        obstacle=obstacle,
        references=reference_standings,
        fragile=_decision_is_fragile(ranking, standings, cells),
        unplanned_reason=unplanned_reason,
        exclude=cells.cell_filter.exclude,
        judging=options.judging,
        composite_range=cells.rubric_content.composite_range if cells.rubric_content else None,
        sizes={run.params.get("model", ""): _size(run) for run in runs},
        coverage=cells.coverage,
    )
    return replace(board, notes=tuple(board_notes(board, cells)))


def _matrices(cells: BoardCells) -> tuple[ScoreMatrix, ScoreMatrix]:
    """Return the matrix of the candidates, and that of the references over the same scenarios.

    Both are without scores until a judge has scored an answer: floor scores alone must not make a ranking.
    """
    scored = [cell for cell in cells.cells if cell.values] if cells.has_scores else []
    scores = [Score(cell.pair, cell.scenario, cell.persona, cell.values[COMPOSITE]) for cell in scored]
    full = score_matrix(scores, {cell.pair for cell in cells.cells})
    reference_mask = np.array([is_reference(pair) for pair in full.pairs], dtype=bool)
    candidate_matrix = full.select(~reference_mask)  # without scenarios in which no candidate is judged
    scenario_mask = np.isin(full.scenarios, candidate_matrix.scenarios)
    return candidate_matrix, full.select(reference_mask, scenario_mask)


def _why_unplanned(cells: BoardCells, options: BoardOptions) -> str | None:
    """Return why the tests of this board are not planned looks of the design; None if they are."""
    cell_filter = cells.cell_filter
    if cell_filter.where or cell_filter.judge or options.cluster or options.by:
        return "a part of the data, or another unit, is selected"
    if options.design is None:
        return "no looks were planned before the first score"
    planned = set(options.design.scenarios)
    if any(cell.scenario not in planned for cell in cells.candidate_cells):
        return "scenarios were added after the first score"
    return None


def _with_effort(
    next_look: NextLook, design: Design, cells: BoardCells, matrix: ScoreMatrix, pace: float | None
) -> NextLook:
    """Add the scenarios and answers to judge before the next look, and the minutes; `pace` is minutes per answer."""
    planned = set(design.scenarios[: next_look.look.at])
    collected = [cell for cell in cells.candidate_cells if cell.scenario in planned]
    rows = set(matrix.pairs) - cells.silent
    n_collected = len({(cell.pair, cell.scenario) for cell in collected if cell.pair in rows})
    n_uncollected = len(planned) * len(rows) - n_collected
    n_waiting = sum(cell.waits_for_judge for cell in collected)  # silent pairs have no waiting cell
    n_answers = n_uncollected + n_waiting
    return replace(
        next_look,
        n_scenarios=len(planned - judged_scenarios(matrix, cells.finished_scenarios)),
        n_answers=n_answers,
        minutes=None if pace is None else pace * n_answers,
    )


def _standings(
    rows: Iterable[PairResult],
    cells: BoardCells,
    options: BoardOptions,
    scenario_matrix: ScoreMatrix,
    matrix: ScoreMatrix,
) -> Iterator[Standing]:
    """Yield the standing of each row. `matrix` is the one that is ranked: `scenario_matrix` or its means per persona.

    On a board by model, a cell counts only if all models share its prompt, as in the matrix; likewise by prompt.
    """
    by = options.by
    shared = shared_by_all((cell.pair for cell in cells.candidate_cells), by) if by else set()
    groups: dict[Pair, list[BoardCell]] = defaultdict(list)
    for cell in cells.cells:
        if by is None or cell.is_reference:
            groups[cell.pair].append(cell)
        elif getattr(cell.pair, OTHER_SIDE[by]) in shared:
            groups[averaged_pair(cell.pair, by)].append(cell)
    with_stale_runs = {averaged_pair(pair, by) for pair in cells.stale}
    for row in rows:
        row_cells = groups[row.pair]
        n_averaged = row.estimate.n if row.estimate else 0  # scenarios, or personas
        n_scenarios = n_averaged
        if options.cluster:
            column = matrix.column(row.pair)
            personas_with_mean = () if column is None else np.array(matrix.personas)[matrix.judged[:, column]]
            is_averaged = np.isin(scenario_matrix.personas, personas_with_mean) & scenario_matrix.core
            n_scenarios = int(is_averaged.sum())
        values = [(cell.scenario, cell.values) for cell in row_cells]
        metrics = [(cell.scenario, cell.metrics) for cell in row_cells]
        means = {name: _metric_mean(name, values) for name in options.scales}
        means |= {name: _metric_mean(name, metrics) for name in METRICS}
        yield Standing(
            result=row,
            means=means,
            usable=_usable(row_cells),
            n_judged=sum(bool(cell.values) for cell in row_cells),
            n_cells=len(row_cells),
            n_failed=sum(cell.failed for cell in row_cells),
            flags=tuple(_flags(row, row_cells, stale=row.pair in with_stale_runs)),
            n_scenarios=n_scenarios,
            n_clusters=n_averaged if options.cluster else None,
        )


def _metric_mean(name: str, cells: Iterable[tuple[str, Mapping[str, float]]]) -> float | None:
    """Return the mean of a metric over the cells that have it; `cells` has (scenario, metrics) of each."""
    return _scenario_mean((scenario, metrics[name]) for scenario, metrics in cells if name in metrics)


def _scenario_mean(values: Iterable[tuple[str, float]]) -> float | None:
    """Average (scenario, value) pairs first within each scenario, then over scenarios, like the composite."""
    by_scenario: dict[str, list[float]] = defaultdict(list)
    for scenario, value in values:
        by_scenario[scenario].append(value)
    # Without repeats a scenario has one value; fmean is slow and is called for every metric of every row.
    means = [repeats[0] if len(repeats) == 1 else fmean(repeats) for repeats in by_scenario.values()]
    return fmean(means) if means else None


def _usable(cells: Iterable[BoardCell]) -> Usable | None:
    answered = [cell for cell in cells if not cell.failed]
    rate = _scenario_mean((cell.scenario, float(not cell.floored)) for cell in answered)
    if rate is None:
        return None
    n = len({cell.scenario for cell in answered})
    low, high = clopper_pearson(rate * n, n)
    judged = [cell for cell in answered if cell.values and not cell.floored]
    composite = _scenario_mean((cell.scenario, cell.values[COMPOSITE]) for cell in judged)
    return Usable(rate, low, high, n_scenarios=n, composite=composite)


def _flags(row: PairResult, cells: Sequence[BoardCell], *, stale: bool) -> Iterator[str]:
    """Yield the flags of a row; `standings.FLAG_TEXTS` describes them."""
    if not row.is_ranked and not is_reference(row.pair):
        yield "incomplete"
    if row.is_adjusted:
        yield "adjusted"
    if any(cell.failed for cell in cells):
        yield "failed"
    if stale:
        yield "stale"
    for name in ("truncated", "floored", "foreign_resident"):
        if any(cell.run.tags.get(name) == "true" for cell in cells):
            yield name


def _decision_is_fragile(ranking: Ranking, standings: Sequence[Standing], cells: BoardCells) -> bool:
    usable = next((standing.usable for standing in standings if standing.pair == ranking.leader), None)
    if not ranking.decided or usable is None or cells.rubric_content is None:
        return False
    # The lead over the closest row; `to_leader` is row − leader.
    lead = -max(row.to_leader.mean for row in ranking.rows if row.is_ranked and row.to_leader is not None)
    return is_fragile(
        lead,
        usable_mean=usable.composite,
        floor=cells.rubric_content.floor_composite,
        n_unusable=(1 - usable.rate) * usable.n_scenarios,
        n=usable.n_scenarios,
    )


def _size(run: StoredRun) -> ModelSize:
    memory = run.tags.get("memory_bytes", "")
    try:
        params_b = float(run.params.get("model_params_b", ""))
    except ValueError:  # "unknown"
        params_b = None
    return ModelSize(params_b, int(memory) if memory.isdecimal() else None)


def read_leaderboard(
    store: RunStore,
    experiment: Experiment,
    cell_filter: CellFilter,
    *,
    baseline: Pair | None = None,
    by: Side | None = None,
    cluster: Literal["persona"] | None = None,
) -> tuple[Leaderboard, BoardCells]:
    """Return the board of an experiment with its duels, and the cells that it was computed from."""
    cells = read_board_cells(store, experiment.experiment_id, cell_filter)
    options = BoardOptions(
        baseline=without_reference_prompt(baseline) if baseline else None,
        cluster=cluster,
        by=by,
        scales=scale_names(store, cells),
        design=read_design(experiment.tags),
        judging=read_judging(store, experiment.experiment_id),
    )
    return with_duels(store, experiment, make_board(experiment.name, cells, options), cells), cells


def scale_names(store: RunStore, cells: BoardCells) -> tuple[str, ...]:
    """Return the scales of the board's rubric. If it is not found, uses the rubric of the newest run."""
    rubric, runs = cells.rubric_content, [cell.run for cell in cells.cells]
    if rubric is None and runs:
        _, texts = store.get(newest_answered_run(runs).run_id)
        rubric = read_rubric(texts.get(RUBRIC))
    return rubric.scale_names if rubric else ()


def read_judging(store: RunStore, experiment_id: str) -> JudgingRecord:
    """Read the judging record from the tags and metrics of the sheets' runs."""
    applied: dict[str, list[StoredRun]] = defaultdict(list)  # by judge
    held: set[str] = set()
    minutes = n_answers = 0.0  # of applied sheets that are not provisional
    for run in store.search(experiment_id, where={"kind": str(RunKind.JUDGING)}):
        tags, status = run.tags, run.tags.get("sheet_status")
        if tags.get(SHEET_KIND, TIPS) != TIPS or "judge" not in tags:  # duels, or no judge is named
            continue
        if status == SheetStatus.HELD:
            held.add(tags["judge"])
        if status != SheetStatus.APPLIED:
            continue
        applied[tags["judge"]].append(run)
        n_items, n_finished = run.metrics.get("n_items", 0.0), run.metrics.get("finished", 0.0)
        is_timed = "applied_at" in tags and "exported_at" in tags and n_items and n_finished
        if is_timed and tags.get("provisional") != "true":
            duration = datetime.fromisoformat(tags["applied_at"]) - datetime.fromisoformat(tags["exported_at"])
            minutes += duration.total_seconds() / 60
            n_cells = run.metrics.get("n_cells", n_items)  # the other items are controls and repeats
            n_answers += n_finished * n_cells / n_items  # assumes the same share of cells among finished and all items
    concerns = {judge: _concern(runs) for judge, runs in applied.items()}
    return JudgingRecord(
        minutes_per_answer=minutes / n_answers if n_answers and minutes > 0 else None,
        concerns={judge: concern for judge, concern in concerns.items() if concern},
        held=frozenset(held),
    )


def _concern(sheets: Iterable[StoredRun]) -> str | None:
    """Return the concern about the judge of these applied sheets, as a sentence without its subject; None if none."""
    all_tags = [run.tags for run in sheets]
    verdicts = {tags.get("drift") for tags in all_tags}
    if any("drift_accepted" in tags for tags in all_tags):
        return "was accepted although too far off the reference scores"
    if Verdict.BEYOND in verdicts:
        return "is far off the reference scores"
    if Verdict.FINE not in verdicts:
        return "is not checked against reference scores yet"
    if None in verdicts:
        return "has scores that are not checked against reference scores yet"
    return None


def duels_of(store: RunStore, experiment: Experiment, cells: BoardCells) -> list[Duel]:
    """Return the duels between answers of a board, judged under its rubric.

    A board filtered by judge has only that judge's duels.
    """
    run_ids = {cell.run.run_id for cell in cells.cells}
    judge = cells.cell_filter.judge
    duels = []
    for duel in read_duels(store, experiment):
        is_by_judge = judge is None or duel.judge == judge
        first, second = (Pair(*pair) for pair in duel.pairs)
        # A duel of a pair with itself exists only if the stored sheet was changed outside tipbench.
        if is_by_judge and duel.rubric == cells.rubric and run_ids.issuperset(duel.runs) and first != second:
            duels.append(Duel(first, second, duel.scenario, _WINNERS[duel.winner]))
    return duels


def with_duels(store: RunStore, experiment: Experiment, board: Leaderboard, cells: BoardCells) -> Leaderboard:
    """Add the duels between the leader and the ranked rows tied with it. Does not change ranks, leader or `decided`."""
    # `tied` also has unranked pairs, which need scores, not duels.
    if board.provisional or board.by is not None or not board.ranking.tied_ranked:
        return board
    contenders = {pair for pair in (board.ranking.leader, *board.ranking.tied_ranked) if pair is not None}
    duels = [duel for duel in duels_of(store, experiment, cells) if {duel.first, duel.second} <= contenders]
    return replace(board, duels=duel_table(duels, contenders)) if duels else board


def record_board(store: RunStore, experiment_id: str, board: Leaderboard) -> str:
    """Record the board in MLflow and return the run id. An identical board is recorded only once."""
    content = board.to_json()
    record_id = fingerprint(content, 32)
    existing_run = next(store.search(experiment_id, where={RECORD_TAG: record_id}, limit=1), None)
    if existing_run is not None:
        return existing_run.run_id
    now = int(time.time() * 1000)
    leader_estimate = board.standings[0].result.estimate if board.ranking.leader else None
    run = NewRun(
        kind=RunKind.LEADERBOARD,
        record_id=record_id,
        name=f"leaderboard of {board.experiment}",
        start_ms=now,
        end_ms=now,
        params={"rubric": board.rubric or "none", "conditions": str(board.conditions.get("id", ""))},
        metrics={
            "pairs": float(len(board.standings)),
            "scenarios": float(board.n_scenarios),
            "decided": float(board.ranking.decided),
            "tied": float(len(board.ranking.tied)),
            **({"leader_composite": leader_estimate.mean} if leader_estimate else {}),
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
    run_id = store.record(experiment_id, run, may_exist=True)
    store.mark_changed(experiment_id)
    return run_id
