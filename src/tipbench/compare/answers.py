"""Answers of all pairs by scenario, with the scores counted on the board, for side-by-side reading."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.leaderboard import COMPOSITE, Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.errors import CorruptText, SuiteError
from tipbench.judge.material import CANDIDATES
from tipbench.judge.scores import NO_SCORES, SCORES, CellScores, read_scores
from tipbench.plan.suite import load_suite
from tipbench.record.run import RunKind
from tipbench.record.store import Experiment, RunStore

Cards = Mapping[tuple[str, str], Mapping[str, Any]]  # by scenario id and content hash


@dataclass(frozen=True)
class AnswerTip:
    """One tip with its mean scores over the counted judges; empty if it is not scored."""

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
    repeat: str = ""  # repeat number, if there are several
    run_id: str = ""


@dataclass(frozen=True)
class ScenarioAnswers:
    """One scenario with its card (None if its suite is not available) and its answers in board order."""

    scenario: str
    card: Mapping[str, Any] | None
    answers: tuple[Answer, ...]


def read_answers(
    store: RunStore, experiment: Experiment, board: Leaderboard, cells: BoardCells
) -> tuple[ScenarioAnswers, ...]:
    """Return the answers of the cells a board is based on."""
    where = {"kind": str(RunKind.CELL), **cells.question.where}
    run_ids = {cell.run.run_id for cell in cells.cells}
    found = {
        run.run_id: (run, texts)
        for run, texts in store.read(experiment.experiment_id, where=where, texts=(CANDIDATES, SCORES))
        if run.run_id in run_ids
    }
    scores = {run_id: read_scores(texts.get(SCORES)) for run_id, (_, texts) in found.items()}
    tips = {run_id: _tips(run_id, run.params, texts.get(CANDIDATES, "[]")) for run_id, (run, texts) in found.items()}
    cards = scenario_cards({cell.run.params.get("suite", "") for cell in cells.cells})
    order = {standing.pair: at for at, standing in enumerate(board.standings)}
    grouped: dict[tuple[str, str], list[BoardCell]] = defaultdict(list)
    for cell in sorted(cells.cells, key=lambda cell: (order.get(cell.pair, len(order)), str(cell.pair))):
        grouped[cell.scenario, cell.run.tags.get("scenario_hash", "")].append(cell)
    return tuple(
        ScenarioAnswers(
            key[0],
            cards.get(key),
            tuple(
                _answer(board, cell, tips.get(cell.run.run_id, ()), scores.get(cell.run.run_id, NO_SCORES))
                for cell in members
            ),
        )
        for key, members in sorted(grouped.items())
    )


def _answer(board: Leaderboard, cell: BoardCell, tips: Sequence[tuple[str, str]], scores: CellScores) -> Answer:
    judgements = scores.provisional.values() if board.provisional else scores.counted
    given = [judgement.tips for judgement in judgements if judgement.judge in board.judges]
    shown = []
    for at, (text, why) in enumerate(tips):
        scored = [judged[at] for judged in given if at < len(judged)]
        names = scored[0].scores if scored else ()
        means = {name: fmean(tip.scores[name] for tip in scored if name in tip.scores) for name in names}
        shown.append(AnswerTip(text, why, means, any(tip.overlong for tip in scored) if scored else None))
    flag = cell.values.get("format_ok", cell.run.metrics.get("format_ok"))
    return Answer(
        pair=cell.pair,
        state="judged" if cell.values else "failed" if cell.failed else "pending",
        composite=cell.values.get(COMPOSITE),
        format_ok=None if flag is None else flag >= 0.5,
        tips=tuple(shown),
        repeat=cell.run.params.get("repeat", ""),
        run_id=cell.run.run_id,
    )


def _tips(run_id: str, params: Mapping[str, str], text: str) -> list[tuple[str, str]]:
    try:
        return [(str(tip["tip"]), str(tip["rationale"])) for tip in json.loads(text)[: int(params["n_tips"])]]
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptText(f"The text {CANDIDATES} of run {run_id} is not a valid list of tips ({exc}).") from exc


def scenario_cards(suites: Iterable[str]) -> Cards:
    """Return the cards of all scenarios of these suites, except suites that are not available here."""
    cards: dict[tuple[str, str], Mapping[str, Any]] = {}
    for name in suites:
        try:
            scenarios = load_suite(name).scenarios
        except SuiteError:  # a custom suite whose folder is unknown here
            continue
        cards |= {(scenario.id, scenario.content_hash): scenario.to_card() for scenario in scenarios}
    return cards
