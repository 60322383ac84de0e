"""GET /api/bench/leaderboard: the board, its downloads, and the details of one row."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from tipbench.compare.html import CSP as REPORT_CSP
from tipbench.compare.matrix import Pair
from tipbench.compare.report import to_csv, to_markdown
from tipbench.web.api.models import (
    COMMON_ERRORS,
    EXPERIMENT_ERRORS,
    BoardShape,
    PairShape,
    RevisionShape,
    text_response,
)
from tipbench.web.api.runs import ExperimentPath, download
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import BoardQueryParam, pair_view
from tipbench.web.deps import PanelState, Store
from tipbench.web.queries import get_experiment, revision

router = APIRouter(
    prefix="/api/bench/leaderboard",
    tags=["leaderboard"],
    dependencies=[ADMINS_ONLY],
    responses={**COMMON_ERRORS, **EXPERIMENT_ERRORS},
)

ModelParam = Annotated[
    str, Query(min_length=1, max_length=500, description="The row's model; * if the board ranks prompts.")
]
PromptParam = Annotated[
    str, Query(min_length=1, max_length=500, description="The row's prompt; * if the board ranks models.")
]


@router.get(
    "/{experiment:path}/report.html",
    summary="Download the report",
    response_class=Response,
    responses=text_response("text/html", "A self-contained HTML file."),
)
def report(experiment: ExperimentPath, query: BoardQueryParam, panel: PanelState, store: Store) -> Response:
    """Return the board with its charts and answers as one HTML file, as written by `compare --html`."""
    response = download(panel.queries.report(store, experiment, query), "text/html", experiment, "html")
    # The report contains model output. The sandbox disables scripts and gives it no access to the panel's origin.
    response.headers["Content-Security-Policy"] = f"{REPORT_CSP}; frame-ancestors 'none'; sandbox"
    return response


@router.get(
    "/{experiment:path}/standings.csv",
    summary="Download the standings",
    response_class=Response,
    responses=text_response("text/csv", "One line per row, not rounded."),
)
def standings(experiment: ExperimentPath, query: BoardQueryParam, panel: PanelState, store: Store) -> Response:
    """Return the standings as CSV, as printed by `compare --format csv`."""
    board = panel.queries.board(store, get_experiment(store, experiment), query)
    return download(to_csv(board), "text/csv", experiment, "csv")


@router.get(
    "/{experiment:path}/board.md",
    summary="Download the board as Markdown",
    response_class=Response,
    responses=text_response("text/markdown", "Verdict, table and notes."),
)
def markdown(experiment: ExperimentPath, query: BoardQueryParam, panel: PanelState, store: Store) -> Response:
    """Return the board as Markdown, as printed by `compare --format md`."""
    board = panel.queries.board(store, get_experiment(store, experiment), query)
    return download(to_markdown(board), "text/markdown", experiment, "md")


@router.get("/{experiment:path}/pairs", summary="Compare a pair with another row")
def one_pair(
    experiment: ExperimentPath,
    model: ModelParam,
    prompt: PromptParam,
    query: BoardQueryParam,
    panel: PanelState,
    store: Store,
) -> PairShape:
    """Compare one row with the baseline or the leader, scenario by scenario.

    The response has the answers of both rows. Its scenarios are sorted, the largest loss first.
    """
    mlflow_experiment = get_experiment(store, experiment)
    return pair_view(panel.queries, store, mlflow_experiment, query, Pair(model, prompt)).response()


@router.get("/{experiment:path}/revision", summary="Get the revision")
def current_revision(experiment: ExperimentPath, store: Store) -> RevisionShape:
    """Return a string that changes with every write to the experiment; cheap enough for polling."""
    mlflow_experiment = get_experiment(store, experiment)
    return RevisionShape(experiment=mlflow_experiment.name, revision=revision(mlflow_experiment))


@router.get("/{experiment:path}", summary="Get the leaderboard")
def leaderboard(experiment: ExperimentPath, query: BoardQueryParam, panel: PanelState, store: Store) -> BoardShape:
    """Return the same object as `tipbench compare --format json`, without saving it in MLflow."""
    return BoardShape.model_validate(panel.queries.board(store, get_experiment(store, experiment), query).to_json())
