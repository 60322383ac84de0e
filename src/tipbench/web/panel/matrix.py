"""Scenario matrix: the score of every pair in every scenario, and all answers to one scenario side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from tipbench.compare.answers import read_answers
from tipbench.compare.cells import COMPOSITE, BoardCells
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.report import state_of
from tipbench.compare.standings import MAX_NAME_CHARS
from tipbench.text import short_name
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import BoardUrl, PageQuery, tidy_url
from tipbench.web.deps import PanelState, Store
from tipbench.web.errors import NotFound
from tipbench.web.panel.leaderboard import load_board
from tipbench.web.panel.pages import here, page
from tipbench.web.queries import experiment_path, get_experiment

SHADES = 9  # steps of colour from the lowest to the highest score of the board
PHONE_PAIRS = 6  # scores shown per scenario in a narrow window, best pairs first
Order = Literal["name", "hardest", "spread"]
ORDERS: tuple[tuple[Order, str], ...] = (
    ("name", "By name"),
    ("hardest", "Hardest first"),
    ("spread", "Most different"),
)

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@dataclass(frozen=True)
class MatrixEntry:
    """A pair's mean composite in a scenario."""

    value: float | None  # None unless judged
    state: str  # judged, pending, failed, or missing
    shade: int = 0


@dataclass(frozen=True)
class MatrixRow:
    """A scenario with one entry per pair."""

    scenario: str
    entries: tuple[MatrixEntry, ...]

    @property
    def values(self) -> list[float]:
        """The values of the judged entries."""
        return [entry.value for entry in self.entries if entry.value is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        return max(self.values) - min(self.values) if self.values else None


def matrix_rows(cells: BoardCells, pairs: Sequence[Pair], order: Order) -> list[MatrixRow]:
    """Return a row for each scenario; repeats are averaged."""
    composites: dict[tuple[str, Pair], list[float]] = defaultdict(list)
    unjudged_states: dict[tuple[str, Pair], str] = {}  # used if no repeat is judged
    for cell in cells.cells:
        key = cell.scenario, cell.pair
        if unjudged_states.get(key) != "pending":  # failed only if all repeats have failed
            unjudged_states[key] = "failed" if cell.failed else "pending"
        if cell.values:
            composites[key].append(cell.values[COMPOSITE])
    means = {key: fmean(values) for key, values in composites.items()}
    low, high = min(means.values(), default=0.0), max(means.values(), default=0.0)

    def entry_of(scenario: str, pair: Pair) -> MatrixEntry:
        value = means.get((scenario, pair))
        if value is None:
            return MatrixEntry(None, unjudged_states.get((scenario, pair), "missing"))
        share = (value - low) / (high - low) if high > low else 0.5
        return MatrixEntry(value, "judged", min(SHADES - 1, int(share * SHADES)))

    scenarios = sorted({cell.scenario for cell in cells.cells})
    rows = [MatrixRow(scenario, tuple(entry_of(scenario, pair) for pair in pairs)) for scenario in scenarios]
    # In both of these orders, scenarios without a judged entry come last.
    if order == "hardest":
        rows.sort(key=lambda row: (row.mean is None, row.mean or 0.0))
    elif order == "spread":
        rows.sort(key=lambda row: (row.spread is None, -(row.spread or 0.0)))
    return rows


@router.get("/experiments/{experiment:path}/scenarios")
def scenarios_page(
    request: Request,
    experiment: ExperimentPath,
    query: PageQuery,
    panel: PanelState,
    store: Store,
    scenario: Annotated[str | None, Query(max_length=300)] = None,
    order: Order = "name",
) -> Response:
    """Show the matrix, or the answers of all pairs to one scenario."""
    if (tidy := tidy_url(request, experiment_path(experiment, "scenarios"))) is not None:
        return RedirectResponse(tidy, 303)
    mlflow_experiment = get_experiment(store, experiment)
    query = replace(query, by=None, cluster=None, baseline=None)  # the matrix has none of them
    result = load_board(panel.queries, store, mlflow_experiment, query)
    url = BoardUrl(experiment, query)
    if result.board is None:
        return page(request, "matrix.html", experiment=experiment, rows=None, problem=result.problem, url=url)
    board = result.board
    cells = panel.queries.cells(store, mlflow_experiment, query)
    pairs = columns_of(board, cells)
    rows = matrix_rows(cells, pairs, order)
    ranked = {standing.pair for standing in board.standings}
    context: dict[str, Any] = {
        "experiment": experiment,
        "board": board,
        "url": url,
        "columns": [
            {
                "model": short_name(pair.model, MAX_NAME_CHARS),
                "prompt": short_name(pair.prompt, MAX_NAME_CHARS),
                "state": str(state_of(board, pair)) if pair in ranked else "reference",
            }
            for pair in pairs
        ],
        "rows": rows,
        "on_phone": PHONE_PAIRS,
        "shades": SHADES,
        "values": [value for row in rows for value in row.values],
        "orders": [  # label, URL, whether it is the current order
            (label, here(request, order=None if key == "name" else key), key == order) for key, label in ORDERS
        ],
        "order": order,
        "problem": None,
        "json_url": url.api(),
        "mlflow_url": mlflow_experiment.url,
    }
    if scenario is None:
        return page(request, "matrix.html", **context)
    scenarios = [row.scenario for row in rows]
    if scenario not in scenarios:
        raise NotFound(f"This board has no scenario {scenario[:100]}.", path="query.scenario")
    position = scenarios.index(scenario)
    scenario_cells = replace(cells, cells=tuple(cell for cell in cells.cells if cell.scenario == scenario))
    cached_store = panel.queries.cached_store(store, mlflow_experiment)
    groups = read_answers(cached_store, mlflow_experiment, board, scenario_cells)  # one per version of the scenario
    answers = [(pairs.index(answer.pair), answer) for group in groups for answer in group.answers]
    answers.sort(key=lambda column_and_answer: column_and_answer[0])
    return page(
        request,
        "scenario.html",
        **context,
        scenario=scenario,
        card=next((group.card for group in groups if group.card is not None), None),
        answers=answers,
        has_repeats=len({answer.repeat for _, answer in answers}) > 1,
        row=rows[position],
        number=position + 1,
        previous=scenarios[position - 1] if position else None,
        next=scenarios[position + 1] if position + 1 < len(scenarios) else None,
    )


def columns_of(board: Leaderboard, cells: BoardCells) -> list[Pair]:
    """Return the pairs in board order, then the references."""
    present = {cell.pair for cell in cells.cells}
    ranked = [standing.pair for standing in board.standings if standing.pair in present]
    return [*ranked, *sorted(present - set(ranked))]
