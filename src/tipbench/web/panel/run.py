"""Page of one run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse

from tipbench.compare.answers import scenario_cards
from tipbench.errors import CorruptText
from tipbench.judge.material import CANDIDATES, RAW
from tipbench.judge.scores import NO_SCORES, RUBRIC, SCORES, CellScores, Judgement, read_scores
from tipbench.judge.sheet import TipScore
from tipbench.judge.sheet_store import HIDDEN, KEY
from tipbench.markup import duration, number, percent
from tipbench.record.run import RunKind, StoredRun
from tipbench.web.api.runs import ExperimentPath, RunPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import BoardUrl
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel.pages import page
from tipbench.web.panel.runs import read_filters, run_note, run_title
from tipbench.web.queries import Related, RunFilters, RunQueries, experiment_path, quote_path

Facts = list[tuple[str, str]]  # label, value
UsedJudgement = tuple[str, Judgement]  # its use ("counts", "held", "provisional" and so on), and the judgement

PROMPT = "artifact:prompt.txt"
_TEXTS_WITH_SECTION = (PROMPT, RAW, CANDIDATES, SCORES)  # on a cell's page

# Labels and the names of params.
_INPUT = (
    ("model", "model"), ("prompt", "prompt_version"), ("scenario", "scenario"), ("persona", "persona"),
    ("time slot", "time_slot"), ("repeat", "repeat"), ("suite", "suite"),
)  # fmt: skip
_SETTINGS = (
    ("tips requested", "n_tips"), ("temperature", "temperature"), ("seed", "seed"), ("context", "num_ctx"),
    ("token limit", "num_predict"), ("diversity requested", "diversity"),
)  # fmt: skip
_ENVIRONMENT = (
    ("engine", "engine"), ("version", "engine_version"), ("host", "host"), ("parameters (B)", "model_params_b"),
    ("quantization", "quantization"), ("digest", "model_digest"),
)  # fmt: skip
_RECORD = (  # labels and the names of tags
    ("cell key", "cell_key"), ("conditions", "conditions"), ("prompt hash", "prompt_hash"),
    ("scenario hash", "scenario_hash"), ("cell seed", "cell_seed"), ("rubric of the scores", "scores_rubric"),
    ("done reason", "done_reason"), ("written by tipbench", "tipbench.version"),
)  # fmt: skip
# Metrics by unit.
_SECONDS = ("latency_s", "load_s", "ttft_s", "seconds", "residency_largest_gap_s")
_SHARES = ("overlong", "self_exact", "p_best")
_COUNTS = (
    "prompt_tokens", "output_tokens", "n_candidates", "cells", "recorded_before", "generated", "failed",
    "most_resident", "residency_samples", "residency_unknown_samples", "handovers", "n_items", "n_cells",
    "n_controls", "n_repeats", "n_control_tips", "n_scored_controls", "finished", "pairs", "scenarios", "tied",
    "n_scenarios", "rank",
)  # fmt: skip
_LABELS = {
    "latency_s": "latency, excluding load", "load_s": "load", "ttft_s": "time to first token",
    "tokens_per_s": "tokens/s", "n_candidates": "tips found", "overlong": "overlong tips", "seconds": "duration",
    "residency_largest_gap_s": "largest gap between samples", "p_best": "probability of being the best",
    "ci_low": "lower end of the interval", "ci_high": "upper end of the interval",
}  # fmt: skip
_FLAGS = ("format_ok", "decided")  # 0 is no, 1 is yes
_MEMORY = (  # labels and the names of metrics
    ("most models in memory at once", "most_resident"), ("samples", "residency_samples"),
    ("largest gap", "residency_largest_gap_s"), ("verified handovers", "handovers"),
)  # fmt: skip


@dataclass(frozen=True)
class TipView:
    """A tip of an answer with the scores of each judge."""

    tip: str
    rationale: str
    judged: bool  # False for tips beyond the requested number
    scores: tuple[tuple[str, str, TipScore], ...]  # judge, use as in UsedJudgement, scores


@dataclass(frozen=True)
class AnswerView:
    """A cell's answer with all its scores."""

    tips: tuple[TipView, ...]
    judgements: tuple[UsedJudgement, ...]
    history: tuple[UsedJudgement, ...]  # oldest first
    scales: tuple[str, ...]
    errors: tuple[str, ...]  # of texts that cannot be parsed


@dataclass(frozen=True)
class Notice:
    """A notice at the top of a run's page."""

    kind: str  # info, warn or bad
    title: str
    text: str = ""


def answer_view(run: Mapping[str, Any]) -> AnswerView:
    """Return a cell's answer with its scores."""
    errors: list[str] = []
    scores, tips = NO_SCORES, []
    try:
        scores = read_scores(run["texts"].get(SCORES))
    except CorruptText as exc:
        errors.append(str(exc))
    try:
        candidates = json.loads(run["texts"].get(CANDIDATES) or "[]")
        tips = [(str(tip["tip"]), str(tip["rationale"])) for tip in candidates]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        errors.append(f"The text {CANDIDATES} is not in tipbench's format; it is shown below unchanged.")
    judgements = tuple(_current_judgements(scores))
    requested = run["params"].get("n_tips", "")
    is_valid = requested.isdecimal() and len(requested) < 6  # false if another program has changed the run
    n_judged = int(requested) if is_valid else len(tips)
    views = []
    for index, (tip, rationale) in enumerate(tips):
        tip_scores = tuple(
            (judgement.judge, use, judgement.tips[index])
            for use, judgement in judgements
            if index < len(judgement.tips)
        )
        views.append(TipView(tip, rationale, judged=index < n_judged, scores=tip_scores))
    history = tuple(("replaced", judgement) for judgement in scores.history)
    scales: dict[str, None] = {}  # in order
    for _, judgement in (*judgements, *history):
        for tip_score in judgement.tips:
            scales |= dict.fromkeys(tip_score.scores)
    return AnswerView(tuple(views), judgements, history, tuple(scales), tuple(errors))


def _current_judgements(scores: CellScores) -> Iterator[UsedJudgement]:
    counted = {judgement.judge for judgement in scores.counted}  # not those applied under another rubric
    for name, judgement in sorted(scores.applied.items()):
        yield ("counts" if name in counted else "other rubric"), judgement
    for _, judgement in sorted(scores.held.items()):
        yield "held", judgement
    latest = scores.latest_provisional
    for _, judgement in sorted(scores.provisional.items()):
        yield ("provisional" if judgement is latest else "provisional, earlier"), judgement


def notices(run: Mapping[str, Any], *, stale: bool = False) -> Iterator[Notice]:
    """Yield the notices for a run, the most important first."""
    state, tags = run["state"], run["tags"]  # only cells have a state; the status is MLflow's
    floored = tags.get("floored") == "true"
    if state == "failed":
        reason = f"{tags.get('failure', 'unknown')}: {tags.get('failure_reason', 'no reason was stored')}"
        yield Notice("bad", "No complete answer, so nothing is scored. The next collect tries it again.", reason)
    elif run["status"] == "FAILED":
        yield Notice("bad", "The run failed.", tags.get("ended", ""))
    if tags.get("superseded") == "true":
        yield Notice("info", "Superseded: a later attempt at the same cell has replaced this run.")
    if stale:
        yield Notice(
            "warn",
            "Stale: the model's digest, the prompt's text or the scenario has changed since. The leaderboard uses "
            "the newer answer.",
        )
    if floored:
        yield Notice("info", "No usable answer: it has the rubric's lowest scores.")
    if tags.get("held") == "true":
        yield Notice(
            "warn", "Some scores are held: their judge is too far off the reference scores, so they do not count."
        )
    if state == "pending" and tags.get("provisional_judge"):
        yield Notice("info", "The scores are provisional: no person has judged this answer yet.")
    if tags.get("foreign_resident") == "true":
        yield Notice(
            "warn", "Another client's model was in memory while this was generated: the times are not comparable."
        )
    if tags.get("truncated") == "true":
        yield Notice("warn", "The prompt did not fit into the context (num_ctx), so the server truncated it.")
    if tags.get("done_reason") == "aborted":
        yield Notice(
            "warn", "The answer ended early, perhaps because the model repeated itself; the text up to then is used."
        )
    if run["metrics"].get("format_ok") == 0 and not floored and state != "failed":
        yield Notice("info", "The answer is not in the requested format, but its tips could be extracted.")


def other_texts(run: Mapping[str, Any], *, with_key: bool) -> list[tuple[str, str]]:
    """Return texts without their own section. Those that reveal a sheet's key (each item's run) need `with_key`."""
    names = set(run["texts"])
    if run["tags"].get("kind") == RunKind.CELL:
        names -= set(_TEXTS_WITH_SECTION)
    if not with_key:
        names = {name for name in names if name != KEY and HIDDEN not in name}
    rubric_last = sorted(names, key=lambda name: (name == RUBRIC, name))
    return [(name, _indented(run["texts"][name])) for name in rubric_last]


def _indented(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(value, ensure_ascii=False, indent=2) if isinstance(value, dict | list) else text


def shown_params(run: Mapping[str, Any], *, with_key: bool) -> Facts:
    """Return the params sorted by name. A sheet's seed reveals its key, so it is included only with `with_key`."""
    hides_seed = run["tags"].get("kind") == RunKind.JUDGING and not with_key
    return sorted((name, value) for name, value in run["params"].items() if not (hides_seed and name == "seed"))


def groups(run: Mapping[str, Any]) -> list[tuple[str, Facts]]:
    """Return a cell's input, settings, environment and record; unknown values are left out."""
    params = run["params"]
    all_groups = [
        ("Input", _known_facts(_INPUT, params)),
        ("Settings", [*_known_facts(_SETTINGS, params), *_sampling_facts(params.get("sampling") or "{}")]),
        ("Environment", _known_facts(_ENVIRONMENT, params)),
        ("Record", [("run", run["run_id"]), *_known_facts(_RECORD, run["tags"])]),
    ]
    return [(title, facts) for title, facts in all_groups if facts]


def _sampling_facts(text: str) -> Facts:
    try:
        sampling = json.loads(text)
    except (ValueError, RecursionError):
        return [("sampling", text)]
    return [(str(name), str(value)) for name, value in sampling.items()] if isinstance(sampling, dict) else []


def format_metrics(metrics: Mapping[str, float | None]) -> Facts:
    """Return all metrics of a run with their units, sorted by name."""
    return [
        (_LABELS.get(name, name.removeprefix("n_").replace("_", " ")), format_metric(name, metrics[name]))
        for name in sorted(metrics)
    ]


def format_metric(name: str, value: float | None) -> str:
    """Format a metric with its unit."""
    if name in _SECONDS:
        return duration(value)
    if name in _FLAGS and value in (0.0, 1.0):
        return "yes" if value else "no"
    if name in _SHARES:
        return percent(value)
    if name in _COUNTS and value is not None and value.is_integer():
        return number(int(value))
    decimals = 3 if name in ("diversity", "distinct_2") else 2
    return number(value, decimals)


def memory_evidence(collect_run: StoredRun | None) -> dict[str, Any] | None:
    """Return the facts about models in memory during a collect, or None if its run does not exist (yet)."""
    if collect_run is None:
        return None
    metrics, tags = collect_run.metrics, collect_run.tags
    facts = [(label, format_metric(key, metrics[key])) for label, key in _MEMORY if key in metrics]
    if failed_samples := metrics.get("residency_unknown_samples"):
        facts.append(("failed samples", format_metric("residency_unknown_samples", failed_samples)))
    return {
        "run_id": collect_run.run_id,
        "known": "most_resident" in metrics,  # not for the embedded engine: it has no server to observe
        "facts": facts,
        "foreign": tags.get("foreign_models", ""),
        "at_most_one": metrics.get("most_resident", 0.0) <= 1,
    }


def _known_facts(labels: tuple[tuple[str, str], ...], values: Mapping[str, str]) -> Facts:
    return [(label, values[key]) for label, key in labels if values.get(key) not in (None, "", "unknown")]


router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

_Key = Annotated[
    Literal["shown"] | None, Query(description="Show the sheet's key, which reveals the run behind each item.")
]
_MAX_OTHER_RUNS = 10  # of the same cell


@router.get("/experiments/{experiment:path}/runs/{run_id:run_id}")
def run_page(
    request: Request, experiment: ExperimentPath, run_id: RunPath, panel: PanelState, store: Store, key: _Key = None
) -> HTMLResponse:
    """Show a run. The URL has the filters of the list, for the links to the previous and next run."""
    run = panel.queries.run(store, experiment, run_id)
    queries = RunQueries(panel.queries, store, experiment)
    filters = read_filters(request)
    kind = run["tags"].get("kind", "")
    is_cell = kind == RunKind.CELL
    if str(filters.kind) != kind and kind in set(RunKind):  # the previous and next run are of the same kind
        filters = filters.model_copy(update={"kind": RunKind(kind)})
    related = queries.related(run) if is_cell else Related()
    collect_run = related.collection
    if kind == RunKind.COLLECTION:
        collect_run = StoredRun(**{each.name: run[each.name] for each in fields(StoredRun)})
    params = run["params"]
    cards = scenario_cards([params.get("suite", "")]) if is_cell else {}
    query = filters.query(next=None)
    filter_query = f"?{query}" if query else ""
    return page(
        request,
        "run.html",
        experiment=experiment,
        run=run,
        kind=kind,
        title=run_title(run),
        note=run_note(run),
        notices=list(notices(run, stale=related.stale)),
        groups=groups(run) if is_cell else [],
        metrics=format_metrics(run["metrics"]),
        params=shown_params(run, with_key=key == "shown"),
        answer=answer_view(run) if is_cell else None,
        # None if the scenario has changed or its suite is not available
        scenario=cards.get((params.get("scenario", ""), run["tags"].get("scenario_hash", ""))),
        answers_url=BoardUrl(experiment).scenario(params.get("scenario", "")),
        prompt=run["texts"].get(PROMPT),
        raw=run["texts"].get(RAW),
        candidates=run["texts"].get(CANDIDATES),
        texts=other_texts(run, with_key=key == "shown"),
        has_key=KEY in run["texts"],
        key_shown=key == "shown",
        evidence=memory_evidence(collect_run),
        other_attempts=related.other_attempts[:_MAX_OTHER_RUNS],
        other_versions=related.other_versions[:_MAX_OTHER_RUNS],
        by_time=filters.sort == RunFilters().sort,  # the default is by time
        neighbours=queries.neighbours(filters, run_id),
        query=filter_query,
        json_url=f"/api/bench/runs/{quote_path(experiment)}/{run_id}",
        mlflow_url=run["url"],
        list_url=experiment_path(experiment, "runs") + filter_query,
    )
