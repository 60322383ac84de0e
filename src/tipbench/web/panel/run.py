"""/experiments/{experiment}/runs/{run}: one run with everything that is known of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse

from tipbench.judge.judging import KEY
from tipbench.judge.material import CANDIDATES, RAW
from tipbench.record.run import RunKind, StoredRun
from tipbench.web.api.runs import ExperimentPath, RunPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel.pages import page
from tipbench.web.panel.run_facts import evidence_of, groups, measures
from tipbench.web.panel.run_view import (
    PROMPT,
    answer_view,
    other_texts,
    readable,
    remarks,
    run_note,
    run_title,
    shown_params,
)
from tipbench.web.panel.runs import read_filters
from tipbench.web.panel.showing import experiment_path, quote_path
from tipbench.web.run_queries import Related, RunBook

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

_Key = Annotated[Literal["shown"] | None, Query(description="Show the key to a sheet's blinding.")]
_LISTED = 10  # other runs of the same cell


@router.get("/experiments/{experiment:path}/runs/{run_id:run_id}")
def run_page(
    request: Request, experiment: ExperimentPath, run_id: RunPath, panel: PanelState, store: Store, key: _Key = None
) -> HTMLResponse:
    """One run. The filters of the list it was found in stay in the address, for the way to the next one."""
    run = panel.queries.run(store, experiment, run_id)
    book, filters = RunBook(panel.queries, store, experiment), read_filters(request)
    kind = run["tags"].get("kind", "")
    is_cell = kind == RunKind.CELL
    if str(filters.kind) != kind and kind in set(RunKind):
        filters = filters.model_copy(update={"kind": RunKind(kind)})
    related = book.related(run) if is_cell else Related()
    query = filters.query(next=None)
    return page(
        request,
        "one_run.html",
        experiment=experiment,
        run=run,
        kind=kind,
        title=run_title(run),
        note=run_note(run),
        remarks=remarks(run, stale=related.stale),
        groups=groups(run) if is_cell else [],
        measures=measures(run["metrics"]),
        params=shown_params(run, with_key=key == "shown"),
        answer=answer_view(run) if is_cell else None,
        prompt=run["texts"].get(PROMPT),
        raw=run["texts"].get(RAW),
        candidates=run["texts"].get(CANDIDATES),
        texts=[(name, readable(text)) for name, text in other_texts(run, with_key=key == "shown")],
        has_key=KEY in run["texts"],
        key_shown=key == "shown",
        evidence=evidence_of(related.collection if is_cell else _as_stored(run, kind)),
        tries=related.tries[:_LISTED],
        builds=related.builds[:_LISTED],
        neighbours=book.neighbours(filters.ask, run_id),
        query=f"?{query}" if query else "",
        json_url=f"/api/bench/runs/{quote_path(experiment)}/{run_id}",
        mlflow_url=run["url"],
        list_url=experiment_path(experiment, "runs") + (f"?{query}" if query else ""),
    )


def _as_stored(run: dict[str, Any], kind: str) -> StoredRun | None:
    """A collect's own page shows its own evidence."""
    if kind != RunKind.COLLECTION:
        return None
    return StoredRun(
        run["run_id"], run["status"], run["start_ms"], run["end_ms"], run["params"], run["metrics"], run["tags"]
    )
