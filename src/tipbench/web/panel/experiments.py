"""Front page: all experiments with their progress and the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from tipbench.errors import TipbenchError
from tipbench.text import plural
from tipbench.web.api.experiments import NameHas, experiments_page
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.errors import KINDS
from tipbench.web.panel.pages import page
from tipbench.web.queries import ExperimentsPage, ExperimentsQuery, experiment_path, quote_path

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

MANY = 12  # number of experiments at which the search field appears


@dataclass(frozen=True)
class Row:
    """An experiment in the list."""

    name: str
    url: str
    mlflow: str | None
    cells: int
    judged: int
    pending: int
    failed: int
    step: str
    step_url: str

    @property
    def share(self) -> float | None:
        """Judged share of the answered cells, 0 to 1; None if nothing is answered."""
        answered = self.judged + self.pending
        return self.judged / answered if answered else None

    @property
    def words(self) -> str:
        """Text alternative of the progress bar."""
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{self.judged:,} judged, {self.pending:,} pending{failed} of {plural(self.cells, 'cell')}"


@router.get("/")
def front_page(request: Request, panel: PanelState, q: NameHas = "") -> HTMLResponse:
    """Lists the experiments; shows an error on the page if MLflow is unavailable."""
    away, found = None, ExperimentsPage()
    try:
        found = experiments_page(panel, ExperimentsQuery(q))
    except TipbenchError as exc:
        if next(status for kind, status, _ in KINDS if isinstance(exc, kind)) not in (502, 503):
            raise
        away = str(exc)
    query = f"?{urlencode({'q': q}, errors='backslashreplace')}" if q else ""
    return page(
        request,
        "experiments.html",
        rows=[row_of(each) for each in found.items],
        total=found.total,
        many=found.total >= MANY,
        q=q,
        away=away,
        json_url=f"/api/bench/experiments{query}",
    )


def row_of(each: dict[str, Any]) -> Row:
    """Returns the list row, with the next step, for an experiment in the API's JSON."""
    name = str(each["experiment"])
    step, url = _next_step(name, each)
    counts = {key: int(each[key]) for key in ("cells", "judged", "pending", "failed")}
    return Row(name, experiment_path(name), each["url"], step=step, step_url=url, **counts)


def _next_step(name: str, counts: dict[str, Any]) -> tuple[str, str]:
    if not counts["cells"]:
        return "Start a run", f"/run?experiment={quote_path(name)}"
    if counts["pending"]:
        return f"Judge {plural(counts['pending'], 'answer')}", experiment_path(name, "judges")
    if counts["failed"]:
        return f"Run {plural(counts['failed'], 'failed cell')} again", f"/run?experiment={quote_path(name)}"
    return "Show the leaderboard", experiment_path(name)
