"""Answers of all pairs by scenario, for reading side by side, with the scores that count on the board."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tipbench.compare.cells import COMPOSITE, BoardCell, BoardCells
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.errors import CorruptText, SuiteError
from tipbench.judge.material import CANDIDATES
from tipbench.judge.scores import NO_SCORES, SCORES, CellScores, read_scores
from tipbench.plan.suite import load_suite
from tipbench.record.run import RunKind, StoredRun
from tipbench.record.store import Experiment, RunStore


@dataclass(frozen=True)
class AnswerTip:
    """One tip. `scores` has the mean over the judges that count, and is empty if the tip is not scored."""

    tip: str
    rationale: str
    scores: Mapping[str, float]
    overlong: bool | None = None


@dataclass(frozen=True)
class Answer:
    """One pair's answer to one scenario. Tips beyond the requested number are not judged and are omitted."""

    pair: Pair
    state: str  # judged, pending or failed
    composite: float | None
    format_ok: bool | None
    tips: tuple[AnswerTip, ...]
    repeat: str = ""  # number of the repeat, from 1; empty if the run has none recorded
    run_id: str = ""


@dataclass(frozen=True)
class ScenarioAnswers:
    """One content version of a scenario, and its answers."""

    scenario: str
    card: Mapping[str, Any] | None  # None if the suite is not available, or no longer has this version
    answers: tuple[Answer, ...]  # in the order of the board


def read_answers(
    store: RunStore, experiment: Experiment, board: Leaderboard, cells: BoardCells
) -> tuple[ScenarioAnswers, ...]:
    """Return the answers of a board's cells, grouped by scenario and content version."""
    where = {"kind": str(RunKind.CELL), **cells.cell_filter.where}
    run_ids = {cell.run.run_id for cell in cells.cells}
    scores_by_run: dict[str, CellScores] = {}
    tips_by_run: dict[str, list[tuple[str, str]]] = {}
    for run, texts in store.read(experiment.experiment_id, where=where, texts=(CANDIDATES, SCORES)):
        if run.run_id in run_ids:
            scores_by_run[run.run_id] = read_scores(texts.get(SCORES))
            tips_by_run[run.run_id] = _parse_tips(run, texts.get(CANDIDATES, "[]"))
    cards = scenario_cards({cell.run.params.get("suite", "") for cell in cells.cells})
    board_order = {standing.pair: position for position, standing in enumerate(board.standings)}
    grouped: dict[tuple[str, str], list[BoardCell]] = defaultdict(list)
    for cell in sorted(cells.cells, key=lambda cell: (board_order.get(cell.pair, len(board_order)), str(cell.pair))):
        grouped[cell.scenario, cell.run.tags.get("scenario_hash", "")].append(cell)
    result = []
    for (scenario, content_hash), scenario_cells in sorted(grouped.items()):
        answers = tuple(
            _answer(board, cell, tips_by_run.get(cell.run.run_id, ()), scores_by_run.get(cell.run.run_id, NO_SCORES))
            for cell in scenario_cells
        )
        result.append(ScenarioAnswers(scenario, cards.get((scenario, content_hash)), answers))
    return tuple(result)


def _answer(board: Leaderboard, cell: BoardCell, tips: Sequence[tuple[str, str]], scores: CellScores) -> Answer:
    judgements = scores.provisional.values() if board.provisional else scores.counted
    tips_by_judge = [judgement.tips for judgement in judgements if judgement.judge in board.judges]
    answer_tips = []
    for position, (text, rationale) in enumerate(tips):
        judged = [judged_tips[position] for judged_tips in tips_by_judge if position < len(judged_tips)]
        scales = judged[0].scores if judged else ()  # the same for all judges of a rubric
        means = {scale: fmean(tip.scores[scale] for tip in judged if scale in tip.scores) for scale in scales}
        overlong = any(tip.overlong for tip in judged) if judged else None
        answer_tips.append(AnswerTip(text, rationale, means, overlong))
    format_ok = cell.metrics.get("format_ok")
    if cell.values:
        state = "judged"
    elif cell.failed:
        state = "failed"
    else:
        state = "pending"
    return Answer(
        pair=cell.pair,
        state=state,
        composite=cell.values.get(COMPOSITE),
        format_ok=None if format_ok is None else format_ok >= 0.5,  # the mean of several judges, who may disagree
        tips=tuple(answer_tips),
        repeat=cell.run.params.get("repeat", ""),
        run_id=cell.run.run_id,
    )


def _parse_tips(run: StoredRun, text: str) -> list[tuple[str, str]]:
    try:
        requested_tips = json.loads(text)[: int(run.params["n_tips"])]  # others are never judged
        return [(str(tip["tip"]), str(tip["rationale"])) for tip in requested_tips]
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptText(f"The text {CANDIDATES} of run {run.run_id} is not a valid list of tips ({exc}).") from exc


def scenario_cards(suites: Iterable[str]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the scenarios as judges see them, by id and content hash. Suites that are not available are skipped."""
    cards: dict[tuple[str, str], Mapping[str, Any]] = {}
    for name in suites:
        try:
            scenarios = load_suite(name).scenarios
        except SuiteError:  # the folder of a custom suite is unknown here
            continue
        cards |= {(scenario.id, scenario.content_hash): scenario.to_card() for scenario in scenarios}
    return cards
