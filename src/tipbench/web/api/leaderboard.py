"""GET /api/bench/leaderboard: the board, its report and its table."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from tipbench.compare.html import CSP as REPORT_CSP
from tipbench.compare.report import to_csv
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.asking import BoardQuery
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON, DATA, BoardShape

router = APIRouter(
    prefix="/api/bench/leaderboard", tags=["leaderboard"], dependencies=[ADMINS_ONLY], responses={**COMMON, **DATA}
)


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
    content = panel.queries.report(store, experiment, ask).encode("utf-8", "backslashreplace")
    # Opened in place it would be a page of ours that models wrote into: it gets no script and no origin.
    policy = {"Content-Security-Policy": f"{REPORT_CSP}; frame-ancestors 'none'; sandbox"}
    return Response(content, media_type="text/html", headers={**policy, **attachment(experiment, "html")})


@router.get(
    "/{experiment:path}/standings.csv",
    summary="Download the standings",
    response_class=Response,
    responses=_file("text/csv", "One line for each row, not rounded."),
)
def standings(experiment: ExperimentPath, ask: BoardQuery, panel: PanelState, store: Store) -> Response:
    """The standings for a spreadsheet, as `compare --format csv` prints them."""
    content = to_csv(panel.queries.leaderboard(store, experiment, ask)).encode("utf-8", "backslashreplace")
    return Response(content, media_type="text/csv", headers=attachment(experiment, "csv"))


@router.get("/{experiment:path}", summary="The leaderboard", response_model=BoardShape)
def leaderboard(experiment: ExperimentPath, ask: BoardQuery, panel: PanelState, store: Store) -> Response:
    """The same object as `tipbench compare --format json`; nothing is written for it."""
    return Json(panel.queries.leaderboard(store, experiment, ask).to_json())


def attachment(name: str, ending: str) -> dict[str, str]:
    """Saved under a name that every file system takes, never opened in place."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100].strip(".-") or "tipbench"
    return {"Content-Disposition": f'attachment; filename="{plain}.{ending}"'}
