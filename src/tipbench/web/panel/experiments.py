"""Front page: all experiments with their progress and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from tipbench.errors import TipbenchError
from tipbench.text import plural
from tipbench.web.api.runs import NameHas, experiments_page
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.errors import status_and_code
from tipbench.web.panel.judge import home_of
from tipbench.web.panel.pages import page
from tipbench.web.queries import ExperimentsPage, experiment_path, quote_path

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

MIN_FOR_SEARCH = 12  # experiments; below, the page has no search field


@router.get("/")
def front_page(request: Request, panel: PanelState, q: NameHas = "") -> HTMLResponse:
    """List the experiments; show an error on the page if MLflow is unavailable."""
    away, found = None, ExperimentsPage()
    try:
        found = experiments_page(panel, q)
    except TipbenchError as exc:
        if status_and_code(exc)[0] not in (502, 503):
            raise
        away = str(exc)
    query = f"?{urlencode({'q': q}, errors='backslashreplace')}" if q else ""
    return page(
        request,
        "experiments.html",
        rows=[row_of(each) for each in found.items],
        total=found.total,
        has_search=found.total >= MIN_FOR_SEARCH,
        q=q,
        away=away,
        json_url=f"/api/bench/experiments{query}",
    )


def row_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's JSON from the API with links, texts and the next step."""
    name = str(found["experiment"])
    failed = f", {found['failed']:,} failed" if found["failed"] else ""
    judged = f"{found['judged']:,} judged, {found['pending']:,} pending{failed}"
    leader, basis = found["leader"], ""
    if leader:
        basis = "by rules" if leader["provisional"] else "decided" if leader["decided"] else "not decided"
        basis += ", does not beat the reference" if leader["beats_reference"] is False else ""
    if not found["cells"]:
        step = "Start a run", f"/run?experiment={quote_path(name)}"
    elif found["held"]:
        step = f"Review {plural(found['held'], 'held sheet')}", experiment_path(name, "judges")
    elif found["pending"]:
        step = f"Judge {plural(found['pending'], 'answer')}", home_of(name)
    elif found["failed"]:
        step = f"Run {plural(found['failed'], 'failed cell')} again", f"/run?experiment={quote_path(name)}"
    else:
        step = "Show the leaderboard", experiment_path(name)
    return {
        **found,
        "path": experiment_path(name),
        "answered": found["judged"] + found["pending"],
        "words": f"{judged} of {plural(found['cells'], 'cell')}",
        "basis": basis,
        "step": step,
    }
