"""GET /api/bench/experiments: the recorded experiments."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from tipbench.errors import MlflowUnavailable, NotEnoughData
from tipbench.web.api.models import COMMON, ExperimentList, error_responses
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Panel, PanelState
from tipbench.web.forms import MOST, Limit, Next
from tipbench.web.queries import ExperimentsPage, ExperimentsQuery

router = APIRouter(prefix="/api/bench", tags=["experiments"], dependencies=[ADMINS_ONLY], responses=COMMON)


NameHas = Annotated[
    str, Query(max_length=200, description="Only experiments whose name contains this text, ignoring case.")
]


@router.get("/experiments", summary="List the experiments", responses=error_responses(502, 503))
def experiments(
    panel: PanelState,
    q: NameHas = "",
    limit: Limit = MOST,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> ExperimentList:
    """Return the experiments sorted by name, with the number of cells in each state.

    The list is empty until something has been recorded.
    """
    found = experiments_page(panel, ExperimentsQuery(q, limit, next))
    return ExperimentList.model_validate({"items": found.items, "next": found.next})


def experiments_page(panel: Panel, query: ExperimentsQuery) -> ExperimentsPage:
    """Return a page of experiments for the API and the front page; empty if MLflow has never been used."""
    try:
        return panel.queries.experiments(panel.tracker.open().store, query)
    except NotEnoughData:
        return ExperimentsPage()
    except MlflowUnavailable:
        panel.tracker.locate_again()
        raise
