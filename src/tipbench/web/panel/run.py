"""Page of one run: grouped facts, memory evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse

from tipbench.judge.material import CANDIDATES, RAW
from tipbench.judge.sheet_store import KEY
from tipbench.record.run import RunKind, StoredRun
from tipbench.web.api.runs import ExperimentPath, RunPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel.pages import duration, number, page, percent
from tipbench.web.panel.runs import (
    PROMPT,
    answer_view,
    notices,
    other_texts,
    read_filters,
    readable,
    run_note,
    run_title,
    shown_params,
)
from tipbench.web.queries import experiment_path, quote_path
from tipbench.web.run_queries import Related, RunQueries

Facts = list[tuple[str, str]]

_WHAT = (
    ("model", "model"), ("prompt", "prompt_version"), ("scenario", "scenario"), ("persona", "persona"),
    ("time slot", "time_slot"), ("repeat", "repeat"), ("suite", "suite"),
)  # fmt: skip
_HOW = (
    ("tips requested", "n_tips"), ("temperature", "temperature"), ("seed", "seed"), ("context", "num_ctx"),
    ("token limit", "num_predict"), ("diversity requested", "diversity"),
)  # fmt: skip
_ON = (
    ("engine", "engine"), ("version", "engine_version"), ("host", "host"), ("parameters (B)", "model_params_b"),
    ("quantization", "quantization"), ("digest", "model_digest"),
)  # fmt: skip
_KEPT = (
    ("cell key", "cell_key"), ("conditions", "conditions"), ("prompt hash", "prompt_hash"),
    ("scenario hash", "scenario_hash"), ("cell seed", "cell_seed"), ("scores under", "scores_rubric"),
    ("done reason", "done_reason"), ("written by tipbench", "tipbench.version"),
)  # fmt: skip
_SECONDS = ("latency_s", "load_s", "ttft_s", "seconds", "residency_largest_gap_s")
_SHARES = ("overlong", "self_exact")
_COUNTS = (
    "prompt_tokens", "output_tokens", "n_candidates", "cells", "recorded_before", "generated", "failed",
    "most_resident", "residency_samples", "residency_unknown_samples", "handovers", "n_items", "n_cells",
    "n_controls", "n_repeats", "n_control_tips", "n_scored_controls", "finished", "pairs", "scenarios", "tied",
)  # fmt: skip
_LABELS = {
    "latency_s": "latency, excluding load", "load_s": "load", "ttft_s": "time to first token",
    "prompt_tokens": "prompt tokens", "output_tokens": "output tokens", "tokens_per_s": "tokens/s",
    "n_candidates": "tips found", "format_ok": "format ok", "overlong": "overlong tips",
}  # fmt: skip
_FLAGS = {"format_ok": ("no", "yes"), "decided": ("no", "yes")}


@dataclass(frozen=True)
class Evidence:
    """The models observed in memory during a run's collect."""

    run_id: str
    known: bool  # False if no server was observed, as with the embedded engine
    sentence: str
    facts: Facts
    foreign: str
    at_most_one: bool


def groups(run: Mapping[str, Any]) -> list[tuple[str, Facts]]:
    """Returns a cell's input, settings, environment and record; unknown values are left out."""
    params, tags = run["params"], run["tags"]
    found = [
        ("Input", _known(_WHAT, params)),
        ("Settings", [*_known(_HOW, params), *_sampling(params.get("sampling"))]),
        ("Environment", _known(_ON, params)),
        ("Record", [("run", run["run_id"]), *_known(_KEPT, tags)]),
    ]
    return [(title, facts) for title, facts in found if facts]


def measures(metrics: Mapping[str, float | None]) -> Facts:
    """Returns all metrics of a run with their units, sorted by name."""
    return [(_LABELS.get(name, name.replace("_", " ")), measure(name, metrics[name])) for name in sorted(metrics)]


def measure(name: str, value: float | None) -> str:
    """Formats a metric with its unit."""
    if name in _SECONDS:
        return duration(value)
    if name in _FLAGS and value in (0.0, 1.0):
        return _FLAGS[name][int(value)]
    if name in _SHARES:
        return percent(value)
    if name in _COUNTS and value is not None and value.is_integer():
        return number(int(value))
    return number(value, 3 if name in ("diversity", "distinct_2") else 2)


def evidence_of(collection: StoredRun | None) -> Evidence | None:
    """Returns the evidence recorded by a collect, or None if its run does not exist (yet)."""
    if collection is None:
        return None
    metrics, tags = collection.metrics, collection.tags
    watched = ("most_resident", "residency_samples", "residency_largest_gap_s", "handovers")
    names = ("most models resident", "samples", "largest gap", "verified handovers")
    facts = [(name, measure(key, metrics[key])) for name, key in zip(names, watched, strict=True) if key in metrics]
    if metrics.get("residency_unknown_samples"):
        facts.append(("failed samples", measure("n_items", metrics["residency_unknown_samples"])))
    return Evidence(
        run_id=collection.run_id,
        known="most_resident" in metrics,
        sentence=tags.get("evidence", ""),
        facts=facts,
        foreign=tags.get("foreign_models", ""),
        at_most_one=metrics.get("most_resident", 0.0) <= 1,
    )


def _known(names: tuple[tuple[str, str], ...], values: Mapping[str, str]) -> Facts:
    return [(label, values[key]) for label, key in names if values.get(key) not in (None, "", "unknown")]


def _sampling(text: str | None) -> Facts:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return [("sampling", text or "")]
    return [(str(name), str(each)) for name, each in value.items()] if isinstance(value, dict) else []


router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

_Key = Annotated[Literal["shown"] | None, Query(description="Show the key to a sheet's blinding.")]
_LISTED = 10  # other runs of the same cell


@router.get("/experiments/{experiment:path}/runs/{run_id:run_id}")
def run_page(
    request: Request, experiment: ExperimentPath, run_id: RunPath, panel: PanelState, store: Store, key: _Key = None
) -> HTMLResponse:
    """Shows a run; the list's filters stay in the URL for the links to the previous and next run."""
    run = panel.queries.run(store, experiment, run_id)
    book, filters = RunQueries(panel.queries, store, experiment), read_filters(request)
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
        notices=notices(run, stale=related.stale),
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
    """Returns the run itself if it is a collect, whose page shows its own evidence."""
    if kind != RunKind.COLLECTION:
        return None
    return StoredRun(
        run["run_id"], run["status"], run["start_ms"], run["end_ms"], run["params"], run["metrics"], run["tags"]
    )
