"""The facts of a run in groups: what was asked, how, on what, what was measured, what was in memory. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tipbench.record.run import StoredRun
from tipbench.web.panel.showing import duration, number, percent

Facts = list[tuple[str, str]]

_WHAT = (
    ("model", "model"), ("prompt", "prompt_version"), ("scenario", "scenario"), ("persona", "persona"),
    ("time slot", "time_slot"), ("repeat", "repeat"), ("suite", "suite"),
)  # fmt: skip
_HOW = (
    ("tips asked for", "n_tips"), ("temperature", "temperature"), ("seed", "seed"), ("context", "num_ctx"),
    ("most tokens", "num_predict"), ("diversity asked for", "diversity"),
)  # fmt: skip
_ON = (
    ("engine", "engine"), ("version", "engine_version"), ("host", "host"), ("parameters (B)", "model_params_b"),
    ("quantization", "quantization"), ("digest", "model_digest"),
)  # fmt: skip
_KEPT = (
    ("cell key", "cell_key"), ("conditions", "conditions"), ("prompt hash", "prompt_hash"),
    ("scenario hash", "scenario_hash"), ("seed of the cell", "cell_seed"), ("scores under", "scores_rubric"),
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
    "latency_s": "latency, without load", "load_s": "load", "ttft_s": "to the first token",
    "prompt_tokens": "tokens read", "output_tokens": "tokens written", "tokens_per_s": "tokens/s",
    "n_candidates": "tips found", "format_ok": "asked format", "overlong": "overlong tips",
}  # fmt: skip
_FLAGS = {"format_ok": ("no", "yes"), "decided": ("no", "yes")}


@dataclass(frozen=True)
class Evidence:
    """What was seen in memory during the collect that a run belongs to."""

    run_id: str
    known: bool  # False: no server was watched, as with the embedded engine
    sentence: str
    facts: Facts
    foreign: str
    at_most_one: bool


def groups(run: Mapping[str, Any]) -> list[tuple[str, Facts]]:
    """What a cell was asked, how, and on what; unknown facts are left out."""
    params, tags = run["params"], run["tags"]
    found = [
        ("What was asked", _known(_WHAT, params)),
        ("How", [*_known(_HOW, params), *_sampling(params.get("sampling"))]),
        ("On what", _known(_ON, params)),
        ("Record", [("run", run["run_id"]), *_known(_KEPT, tags)]),
    ]
    return [(title, facts) for title, facts in found if facts]


def measures(metrics: Mapping[str, float | None]) -> Facts:
    """Every number of a run in its unit, by name."""
    return [(_LABELS.get(name, name.replace("_", " ")), measure(name, metrics[name])) for name in sorted(metrics)]


def measure(name: str, value: float | None) -> str:
    """One number as people read it."""
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
    """The evidence that a collect has left; None when its run is not there (yet)."""
    if collection is None:
        return None
    metrics, tags = collection.metrics, collection.tags
    watched = ("most_resident", "residency_samples", "residency_largest_gap_s", "handovers")
    names = ("most models resident", "samples", "largest gap", "handovers seen empty")
    facts = [(name, measure(key, metrics[key])) for name, key in zip(names, watched, strict=True) if key in metrics]
    if metrics.get("residency_unknown_samples"):
        facts.append(("samples without an answer", measure("n_items", metrics["residency_unknown_samples"])))
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
