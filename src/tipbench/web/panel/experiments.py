"""Front page: all experiments with their progress and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from tipbench.errors import TipbenchError
from tipbench.text import plural
from tipbench.web.api.runs import NameContains, find_experiments
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.panel.judge import judge_page_url
from tipbench.web.panel.pages import is_mlflow_error, page
from tipbench.web.queries import ExperimentsPage, experiment_path, quote_path

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

MIN_FOR_SEARCH = 12  # number of experiments from which the page has a search field


@router.get("/")
def front_page(request: Request, panel: PanelState, q: NameContains = "") -> HTMLResponse:
    """List the experiments; show an error on the page if MLflow is unavailable."""
    mlflow_error, experiments = None, ExperimentsPage()
    try:
        experiments = find_experiments(panel, q)
    except TipbenchError as exc:
        if not is_mlflow_error(exc):
            raise
        mlflow_error = str(exc)
    # UTF-8 cannot encode lone surrogates, so they are escaped.
    query = f"?{urlencode({'q': q}, errors='backslashreplace')}" if q else ""
    return page(
        request,
        "experiments.html",
        rows=[row_of(each) for each in experiments.items],
        total=experiments.n_all,
        has_search=experiments.n_all >= MIN_FOR_SEARCH,
        q=q,
        mlflow_error=mlflow_error,
        json_url=f"/api/bench/experiments{query}",
    )


def row_of(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the page: the API's JSON of an experiment with links, texts and the next step."""
    name = str(experiment["experiment"])
    start_url = f"/run?experiment={quote_path(name)}"
    if not experiment["cells"]:
        step, step_url = "Start a run", start_url
    elif experiment["held"]:
        step, step_url = f"Review {plural(experiment['held'], 'held sheet')}", experiment_path(name, "judges")
    elif experiment["pending"]:
        step, step_url = f"Judge {plural(experiment['pending'], 'answer')}", judge_page_url(name)
    elif experiment["failed"]:
        step, step_url = f"Run {plural(experiment['failed'], 'failed cell')} again", start_url
    else:
        step, step_url = "Show the leaderboard", experiment_path(name)
    failed = f", {experiment['failed']:,} failed" if experiment["failed"] else ""
    counts = f"{experiment['judged']:,} judged, {experiment['pending']:,} pending{failed}"
    return {
        **experiment,
        "path": experiment_path(name),
        "answered": experiment["judged"] + experiment["pending"],
        "bar_label": f"{counts} of {plural(experiment['cells'], 'cell')}",
        "leader_status": _leader_status(experiment["leader"]),
        "step": step,
        "step_url": step_url,
    }


def _leader_status(leader: Mapping[str, Any] | None) -> str:
    if not leader:
        return ""
    status = "decided" if leader["decided"] else "not decided"
    if leader["provisional"]:
        status = "provisional"
    if leader["beats_reference"] is False:
        status += ", does not beat the reference"
    return status
