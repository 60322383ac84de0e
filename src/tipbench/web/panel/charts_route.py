"""/experiments/NAME/charts/KIND.svg: the board's charts, drawn once for a revision."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_queries import ChartAsk, ChartKind, ThemeName, chart
from tipbench.web.deps import PanelState, Store
from tipbench.web.errors import NotFound
from tipbench.web.panel.board_links import PageAsk
from tipbench.web.queries import existing
from tipbench.web.snapshots import revision as revision_of

# Opened by itself a picture is a document of ours with names in it that others gave: it gets no script and no origin.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
FOR_GOOD = "private, max-age=31536000, immutable"

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@router.get("/experiments/{experiment:path}/charts/{kind}.svg")
def chart_picture(
    experiment: ExperimentPath,
    kind: ChartKind,
    ask: PageAsk,
    panel: PanelState,
    store: Store,
    theme: ThemeName = "light",
    narrow: bool = False,
    revision: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """One chart. Asked for at the present revision, a browser may keep it: another one has another address."""
    found = existing(store, experiment)
    svg = chart(panel.queries, store, found, ask, ChartAsk(kind, theme, narrow))
    if svg is None:
        raise NotFound(f"This board has no chart {kind}: it has no rows for it.", path="path.kind")
    now = revision_of(found)
    kept = {"Cache-Control": FOR_GOOD} if now is not None and revision == now else {}
    headers = {"Content-Security-Policy": POLICY, **kept}
    return Response(svg.encode("utf-8", "backslashreplace"), media_type="image/svg+xml", headers=headers)
