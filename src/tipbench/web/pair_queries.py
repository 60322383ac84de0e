"""Comparison of one board row with another, scenario by scenario, with answers and score differences."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tipbench.compare.answers import Answer, read_answers
from tipbench.compare.cells import BoardCells
from tipbench.compare.leaderboard import Leaderboard, Standing, difference_json, merged, pair_json
from tipbench.compare.matrix import OTHER, Pair, ScoreMatrix, shared_by_all
from tipbench.compare.statistics import Difference
from tipbench.record.store import Experiment, RunStore
from tipbench.web.errors import NotFound
from tipbench.web.queries import BoardQuery, Queries, SnapshotStore, revision

EVEN = 1e-9  # points; smaller differences are ties
Role = Literal["leader", "baseline", "runner-up", "next row"]


@dataclass(frozen=True)
class Side:
    """A row's result in one scenario: its mean composite, and its answers with their run ids."""

    composite: float | None
    answers: tuple[tuple[str, Answer], ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"composite": self.composite, "answers": [_answer_json(run_id, each) for run_id, each in self.answers]}


@dataclass(frozen=True)
class ScenarioComparison:
    """One scenario with both sides; `difference` is own − other if both are judged."""

    scenario: str
    card: Mapping[str, Any] | None
    own: Side
    other: Side | None
    difference: float | None


@dataclass(frozen=True)
class PairView:
    """A board row compared with a reference row by scenario, largest loss first."""

    board: Leaderboard
    standing: Standing
    reference: Standing | None
    role: Role | None  # of the reference
    difference: Difference | None  # own − reference, with the board's p
    meetings: tuple[ScenarioComparison, ...]

    def count(self, sign: int) -> int:
        """Return the number of scenarios won (1), lost (−1) or tied (0)."""
        known = [each.difference for each in self.meetings if each.difference is not None]
        return sum((difference > EVEN) - (difference < -EVEN) == sign for difference in known)

    def to_json(self) -> dict[str, Any]:
        """Return the API response; numbers are not rounded."""
        reference = pair_json(self.reference.pair) if self.reference else None
        return {
            "experiment": self.board.experiment,
            **(pair_json(self.standing.pair) or {}),
            "reference": {**reference, "role": self.role} if reference else None,
            "difference": difference_json(self.difference),
            "wins": self.count(1),
            "losses": self.count(-1),
            "even": self.count(0),
            "scenarios": [
                {
                    "scenario": each.scenario,
                    "difference": each.difference,
                    "own": each.own.to_json(),
                    "reference": each.other.to_json() if each.other else None,
                }
                for each in self.meetings
            ],
        }


def pair_view(queries: Queries, store: RunStore, experiment: Experiment, ask: BoardQuery, pair: Pair) -> PairView:
    """Return the comparison of a board row with its reference. Raises NotFound if there is no such row."""
    board = queries.board(store, experiment, ask)
    standing = next((each for each in board.standings if each.pair == pair), None)
    if standing is None:
        raise NotFound(
            f"This board has no row {str(pair)[:300]}. See the leaderboard of {board.experiment[:200]}.",
            path="query.model",
        )

    def make() -> PairView:
        reference, role = _reference(board, standing)
        difference = _difference(standing, reference, role)
        meetings = _Reader.of(queries, store, experiment, ask).meetings(pair, reference.pair if reference else None)
        return PairView(
            board,
            standing,
            reference,
            role,
            difference,
            tuple(sorted(meetings, key=lambda each: (each.difference is None, each.difference or 0.0, each.scenario))),
        )

    return queries.pairs.get((experiment.experiment_id, ask, pair), revision(experiment), make)


def _reference(board: Leaderboard, standing: Standing) -> tuple[Standing | None, Role | None]:
    """Return the baseline, else the leader, else (for the leader) the next row."""
    rows = {each.pair: each for each in board.standings}
    roles: tuple[tuple[Pair | None, Role], ...] = ((board.baseline, "baseline"), (board.ranking.leader, "leader"))
    for pair, role in roles:
        if pair is not None and pair != standing.pair and pair in rows:
            return rows[pair], role
    others = [each for each in board.standings if each.pair != standing.pair and each.row.estimate]
    if not others:
        return None, None
    return others[0], "runner-up" if others[0].row.complete and board.ranking.leader else "next row"


def _difference(standing: Standing, reference: Standing | None, role: Role | None) -> Difference | None:
    if role == "baseline":
        return standing.row.to_baseline
    if role == "leader":
        return standing.row.to_leader
    found = reference.row.to_leader if reference and role == "runner-up" else None
    if found is None:
        return None
    low, high = (None if end is None else -end for end in (found.ci_high, found.ci_low))
    return replace(found, mean=-found.mean, ci_low=low, ci_high=high)


@dataclass(frozen=True)
class _Answered:
    scenario: str
    card: Mapping[str, Any] | None
    answer: Answer
    run_id: str


@dataclass(frozen=True)
class _Reader:
    view: SnapshotStore
    experiment: Experiment
    ask: BoardQuery
    board: Leaderboard  # by scenario, even if the page's board is clustered by persona
    cells: BoardCells

    @classmethod
    def of(cls, queries: Queries, store: RunStore, experiment: Experiment, ask: BoardQuery) -> _Reader:
        board = queries.board(store, experiment, replace(ask, cluster=None, baseline=None))
        return cls(queries.view(store, experiment), experiment, ask, board, queries.cells(store, experiment, ask))

    def meetings(self, own: Pair, other: Pair | None) -> Iterator[ScenarioComparison]:
        """Yield every scenario in which the row has an answer."""
        ours, theirs = self._pairs_of(own), self._pairs_of(other) if other is not None else []
        found = self._answers({*ours, *theirs})
        mine, facing = self._sides(own, ours, found), self._sides(other, theirs, found) if other is not None else {}
        for scenario, side in mine.items():
            against = facing.get(scenario)
            card = next(each.card for each in found if each.scenario == scenario)
            yield ScenarioComparison(scenario, card, side, against, _gap(side, against))

    def _answers(self, pairs: Collection[Pair]) -> list[_Answered]:
        """Return the pairs' answers with run ids, by scenario and in the order of their cells."""
        own = [cell for cell in self.cells.cells if cell.pair in pairs]
        waiting: dict[tuple[str, str], dict[Pair, deque[str]]] = defaultdict(lambda: defaultdict(deque))
        for cell in own:
            waiting[cell.scenario, cell.run.tags.get("scenario_hash", "")][cell.pair].append(cell.run.run_id)
        found = read_answers(self.view, self.experiment, self.board, replace(self.cells, cells=tuple(own)))
        return [
            _Answered(each.scenario, each.card, answer, runs[answer.pair].popleft())
            for each, (_, runs) in zip(found, sorted(waiting.items()), strict=True)
            for answer in each.answers
        ]

    def _sides(self, row: Pair, pairs: Collection[Pair], found: Iterable[_Answered]) -> dict[str, Side]:
        given: dict[str, list[tuple[str, Answer]]] = defaultdict(list)
        for each in found:
            if each.answer.pair in pairs:
                given[each.scenario].append((each.run_id, each.answer))
        values = _column(self.board.matrix, row)
        return {name: Side(values.get(name), tuple(answers)) for name, answers in given.items()}

    def _pairs_of(self, row: Pair) -> Sequence[Pair]:
        """Return the pairs whose cells are merged into the row."""
        pairs = {cell.pair for cell in self.cells.cells}
        by = self.ask.by
        if by is None:
            return [row] if row in pairs else []
        shared = shared_by_all(pairs, by)
        return sorted(pair for pair in pairs if merged(pair, by) == row and getattr(pair, OTHER[by]) in shared)


def _gap(own: Side, other: Side | None) -> float | None:
    if other is None or own.composite is None or other.composite is None:
        return None
    return own.composite - other.composite


def _column(matrix: ScoreMatrix, row: Pair) -> dict[str, float]:
    at = matrix.column(row)
    if at is None:
        return {}
    rows: Iterable[int] = range(len(matrix.scenarios))
    return {matrix.scenarios[i]: float(matrix.values[i, at]) for i in rows if matrix.judged[i, at]}


def _answer_json(run_id: str, answer: Answer) -> dict[str, Any]:
    return {
        "run_id": run_id,
        **(pair_json(answer.pair) or {}),
        "state": answer.state,
        "composite": answer.composite,
        "format_ok": answer.format_ok,
        "repeat": answer.repeat or None,
        "tips": [
            {"tip": tip.tip, "rationale": tip.rationale, "scores": dict(tip.scores), "overlong": tip.overlong}
            for tip in answer.tips
        ],
    }
