"""Comparison of one board row with another, scenario by scenario, with answers and score differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tipbench.compare.answers import Answer, ScenarioAnswers, read_answers
from tipbench.compare.cells import is_reference
from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.matrix import OTHER, Pair, merged, shared_by_all
from tipbench.compare.statistics import Difference
from tipbench.record.store import Experiment, RunStore
from tipbench.web.api.models import AnswerShape, DifferenceShape, MeetingShape, PairShape, ReferenceShape, SideShape
from tipbench.web.errors import NotFound
from tipbench.web.queries import Queries, revision
from tipbench.workflows.board import BoardQuery

EVEN = 1e-9  # points; smaller differences are ties
Role = Literal["leader", "baseline", "runner-up", "next row"]


@dataclass(frozen=True)
class Side:
    """A row's result in one scenario: its mean composite, and its answers."""

    composite: float | None
    answers: tuple[Answer, ...]

    def response(self) -> SideShape:
        """Return this side of the API's response."""
        answers = [
            AnswerShape.model_validate(
                {
                    "run_id": answer.run_id,
                    "model": answer.pair.model,
                    "prompt_version": answer.pair.prompt,
                    "state": answer.state,
                    "composite": answer.composite,
                    "format_ok": answer.format_ok,
                    "repeat": answer.repeat or None,
                    "tips": [vars(tip) for tip in answer.tips],
                }
            )
            for answer in self.answers
        ]
        return SideShape(composite=self.composite, answers=answers)


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

    def response(self) -> PairShape:
        """Return the API's response; numbers are not rounded."""
        own, other, found = self.standing.pair, self.reference, self.difference
        reference = difference = None
        if other is not None and self.role is not None:
            reference = ReferenceShape(model=other.pair.model, prompt_version=other.pair.prompt, role=self.role)
        if found is not None:
            difference = DifferenceShape(mean=found.mean, ci_low=found.ci_low, ci_high=found.ci_high, p=found.p)
        return PairShape(
            experiment=self.board.experiment,
            model=own.model,
            prompt_version=own.prompt,
            reference=reference,
            difference=difference,
            wins=self.count(1),
            losses=self.count(-1),
            even=self.count(0),
            scenarios=[
                MeetingShape(
                    scenario=each.scenario,
                    difference=each.difference,
                    own=each.own.response(),
                    reference=each.other.response() if each.other else None,
                )
                for each in self.meetings
            ],
        )


def pair_view(queries: Queries, store: RunStore, experiment: Experiment, query: BoardQuery, pair: Pair) -> PairView:
    """Return the comparison of a board row with its reference. Raises NotFound if there is no such row."""
    board = queries.board(store, experiment, query)
    standing = next((each for each in (*board.standings, *board.references) if each.pair == pair), None)
    if standing is None:
        raise NotFound(
            f"This board has no row {str(pair)[:300]}. See the leaderboard of {board.experiment[:200]}.",
            path="query.model",
        )

    def make() -> PairView:
        reference, role, difference = _reference(board, standing)
        other = reference.pair if reference else None
        meetings = sorted(
            _meetings(queries, store, experiment, query, pair, other),
            key=lambda each: (each.difference is None, each.difference or 0.0, each.scenario),
        )
        return PairView(board, standing, reference, role, difference, tuple(meetings))

    return queries.pairs.get((experiment.experiment_id, query, pair), revision(experiment), make)


def _reference(board: Leaderboard, standing: Standing) -> tuple[Standing | None, Role | None, Difference | None]:
    """Return the row to compare with, its role and the difference to it.

    It is the baseline, else the leader, else (for the leader) the next row.
    """
    rows = {each.pair: each for each in (*board.standings, *board.references)}
    candidates: tuple[tuple[Pair | None, Role, Difference | None], ...] = (
        (board.baseline, "baseline", standing.row.to_baseline),
        (board.ranking.leader, "leader", standing.row.to_leader),
    )
    for pair, role, difference in candidates:
        if pair is not None and pair != standing.pair and pair in rows:
            return rows[pair], role, difference
    following = next((each for each in board.standings if each.pair != standing.pair and each.row.estimate), None)
    if following is None or not (following.row.ranked and board.ranking.leader):
        return following, "next row" if following else None, None
    found = following.row.to_leader
    if found is not None:  # runner-up − leader, so the other way round
        low, high = (None if end is None else -end for end in (found.ci_high, found.ci_low))
        found = replace(found, mean=-found.mean, ci_low=low, ci_high=high)
    return following, "runner-up", found


def _meetings(
    queries: Queries, store: RunStore, experiment: Experiment, query: BoardQuery, own: Pair, other: Pair | None
) -> Iterator[ScenarioComparison]:
    """Yield every scenario in which the row has an answer."""
    # By scenario, even if the page's board is clustered by persona.
    board = queries.board(store, experiment, replace(query, cluster=None, baseline=None))
    every = queries.cells(store, experiment, query)
    pairs = {row: _pairs_of(row, {cell.pair for cell in every.cells}, query.by) for row in (own, other) if row}
    wanted = {pair for row in pairs.values() for pair in row}
    cells = replace(every, cells=tuple(cell for cell in every.cells if cell.pair in wanted))
    found = read_answers(queries.view(store, experiment), experiment, board, cells)
    mine = _sides(board, own, pairs[own], found)
    facing = _sides(board, other, pairs[other], found) if other else {}
    cards = {each.scenario: each.card for each in reversed(found)}
    for scenario, side in mine.items():
        against, difference = facing.get(scenario), None
        if against is not None and side.composite is not None and against.composite is not None:
            difference = side.composite - against.composite
        yield ScenarioComparison(scenario, cards[scenario], side, against, difference)


def _sides(board: Leaderboard, row: Pair, pairs: Collection[Pair], found: Iterable[ScenarioAnswers]) -> dict[str, Side]:
    """Return a row's result by scenario, of those in which it has an answer."""
    given: dict[str, list[Answer]] = defaultdict(list)
    for each in found:
        for answer in each.answers:
            if answer.pair in pairs:
                given[each.scenario].append(answer)
    matrix = board.references_matrix if row in board.references_matrix.pairs else board.matrix
    at, values = matrix.column(row), {}
    if at is not None:
        judged = (i for i in range(len(matrix.scenarios)) if matrix.judged[i, at])
        values = {matrix.scenarios[i]: float(matrix.values[i, at]) for i in judged}
    return {name: Side(values.get(name), tuple(answers)) for name, answers in given.items()}


def _pairs_of(row: Pair, pairs: Collection[Pair], by: Literal["model", "prompt"] | None) -> Sequence[Pair]:
    """Return those of the `pairs` whose cells are merged into the row."""
    if by is None or is_reference(row):
        return [row] if row in pairs else []
    pairs = {pair for pair in pairs if not is_reference(pair)}
    shared = shared_by_all(pairs, by)
    return sorted(pair for pair in pairs if merged(pair, by) == row and getattr(pair, OTHER[by]) in shared)
