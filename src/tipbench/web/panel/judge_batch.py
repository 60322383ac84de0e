"""/judge/batches: a batch is judged in the browser. The page is a frame; its script speaks with the API for batches.

What it shows comes from `web.batches`, which is blind. Once a batch is closed its page tells how that ended.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.web.api.batches import SheetPath
from tipbench.web.auth import JUDGES_TOO
from tipbench.web.batch import Kind, Status
from tipbench.web.batches import desk_of
from tipbench.web.deps import Judge
from tipbench.web.panel.judge_outcome import outcome_view
from tipbench.web.panel.pages import page

router = APIRouter(dependencies=[JUDGES_TOO], include_in_schema=False)

_TEMPLATES = {Kind.SHEET: "judge_batch.html", Kind.DUEL: "judge_duel.html"}


@router.get("/judge/batches/{sheet}")
def batch_page(request: Request, sheet: SheetPath, judge: Judge) -> HTMLResponse:
    """Where an open batch is judged; of a closed one, how it ended; of another's, for admins, how far it is."""
    desk = desk_of(request.app)
    told = desk.one(judge, sheet)
    batch = told["batch"]
    if "skips" in told:
        return page(request, "judge_other.html", batch=batch, skips=told["skips"], json_url=batch["links"]["self"])
    shown: dict[str, Any] = {
        "batch": batch,
        "judge_url": home_of(batch["experiment"]),
        "here_path": f"/judge/batches/{sheet}",
        "json_url": batch["links"]["self"],
    }
    if batch["status"] != Status.OPEN:
        return page(request, "judge_outcome.html", view=outcome_view(batch), **shown)
    return page(request, _TEMPLATES[Kind(batch["kind"])], recorded=desk.recorded_already(sheet), **shown)


@router.post("/judge/batches/{sheet}/reopen")
def reopen(request: Request, sheet: SheetPath, judge: Judge) -> Response:
    """Lets its judge go on."""
    desk_of(request.app).reopen(judge, sheet)
    return RedirectResponse(f"/judge/batches/{sheet}", status_code=303)


def home_of(experiment: str) -> str:
    """The judge's front page for an experiment."""
    return f"/judge?{urlencode({'experiment': experiment}, errors='backslashreplace')}"
