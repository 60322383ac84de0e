"""GET /api/bench/policies: the policies of `tipbench serve`, their shadows, and one user's state."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from tipbench.errors import UsageError
from tipbench.web.api.models import COMMON
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Panel, PanelState
from tipbench.web.errors import Invalid
from tipbench.workflows.policies import PoliciesReport, read_policies

router = APIRouter(prefix="/api/bench", tags=["policies"], dependencies=[ADMINS_ONLY], responses=COMMON)

UserId = Annotated[
    str | None,
    Query(max_length=200, description="Adds the state of the user with this id, as the app sends it.", examples=["u1"]),
]


@router.get("/policies", summary="Get policies and shadows")
def policies(panel: PanelState, user_id: UserId = None) -> PoliciesReport:
    """Return the active policy, counts, rewards by day with 95 % intervals, weights, and the shadows."""
    return policies_report(panel, user_id)


def policies_report(panel: Panel, user_id: str | None) -> PoliciesReport:
    """Return the report for the API and the page. Raises Invalid for a wrong user id."""
    try:
        return read_policies(panel.settings.home, user_id)
    except UsageError as exc:
        raise Invalid(str(exc), path="query.user_id") from exc
