"""GET /api/bench/leaderboard: the board, its report, its tables, and one row of it closely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from tipbench.compare.html import CSP as REPORT_CSP
from tipbench.compare.matrix import Pair
from tipbench.compare.report import to_csv, to_markdown
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.asking import BoardQuery
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.downloads import attachment
from tipbench.web.pair_queries import pair_view
from tipbench.web.pair_shapes import PairShape, RevisionShape
from tipbench.web.queries import existing
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON, DATA, BoardShape
from tipbench.web.snapshots import revision

router = APIRouter(
    prefix="/api/bench/leaderboard", tags=["leaderboard"], dependencies=[ADMINS_ONLY], responses={**COMMON, **DATA}
)

RowModel = Annotated[str, Query(min_length=1, max_length=500, description="The row's model; * by prompt.")]
RowPrompt = Annotated[str, Query(min_length=1, max_length=500, description="The row's prompt; * by model.")]


def _file(kind: str, meaning: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": meaning, "content": {kind: {"schema": {"type": "string"}}}}}


@router.get(
    "/{experiment:path}/report.html",
    summary="Download the report",
    response_class=Response,
    responses=_file("text/html", "One file that needs nothing else."),
)
def report(experiment: ExperimentPath, ask: BoardQuery, panel: PanelState, store: Store) -> Response:
    """The board with its charts and answers as one HTML file, as `compare --html` writes it."""
    # Opened in place it would be a page of ours that models wrote into: it gets no script and no origin.
    policy = {"Content-Security-Policy": f"{REPORT_CSP}; frame-ancestors 'none'; sandbox"}
    return _download(panel.queries.report(store, experiment, ask), "text/html", experiment, "html", policy)


@router.get(
    "/{experiment:path}/standings.csv",
    summary="Download the standings",
    response_class=Response,
    responses=_file("text/csv", "One line for each row, not rounded."),
)
def standings(experiment: ExperimentPath, ask: BoardQuery, panel: PanelState, store: Store) -> Response:
    """The standings for a spreadsheet, as `compare --format csv` prints them."""
    return _download(to_csv(panel.queries.leaderboard(store, experiment, ask)), "text/csv", experiment, "csv")


@router.get(
    "/{experiment:path}/board.md",
    summary="Download the board as Markdown",
    response_class=Response,
    responses=_file("text/markdown", "Verdict, table and notes, for a pull request."),
)
def markdown(experiment: ExperimentPath, ask: BoardQuery, panel: PanelState, store: Store) -> Response:
    """The board as `compare --format md` prints it."""
    return _download(to_markdown(panel.queries.leaderboard(store, experiment, ask)), "text/markdown", experiment, "md")


@router.get("/{experiment:path}/pairs", summary="Where a row wins and loses", response_model=PairShape)
def one_pair(
    experiment: ExperimentPath, model: RowModel, prompt: RowPrompt, ask: BoardQuery, panel: PanelState, store: Store
) -> Response:
    """One row against the baseline or the leader: the scenarios, the largest loss first, with both sides' answers."""
    found = pair_view(panel.queries, store, existing(store, experiment), ask, Pair(model, prompt))
    return Json(found.to_json())


@router.get("/{experiment:path}/revision", summary="Whether anything has changed", response_model=RevisionShape)
def current_revision(experiment: ExperimentPath, store: Store) -> Response:
    """A word that changes whenever somebody writes to the experiment; cheap, for watching it."""
    found = existing(store, experiment)
    return Json({"experiment": found.name, "revision": revision(found)})


@router.get("/{experiment:path}", summary="The leaderboard", response_model=BoardShape)
def leaderboard(experiment: ExperimentPath, ask: BoardQuery, panel: PanelState, store: Store) -> Response:
    """The same object as `tipbench compare --format json`; nothing is written for it."""
    return Json(panel.queries.leaderboard(store, experiment, ask).to_json())


def _download(text: str, media_type: str, name: str, ending: str, headers: Mapping[str, str] | None = None) -> Response:
    content = text.encode("utf-8", "backslashreplace")
    return Response(content, media_type=media_type, headers={**(headers or {}), **attachment(name, ending)})
