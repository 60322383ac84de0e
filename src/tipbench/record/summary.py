"""Summary of a collect: measures of each pair, and evidence of which models were in memory."""

from __future__ import annotations

import json
import statistics
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import tipbench
from tipbench.generate.residency import Evidence
from tipbench.http import strip_login
from tipbench.plan.collect_config import URL_KEYS, CollectConfig
from tipbench.record.events import Collected
from tipbench.record.run import NewRun, RunKind, RunState, StoredRun

MEASURES = ("format_ok", "overlong", "diversity", "latency_s", "tokens_per_s")
_MAX_NOTE_CHARS = 5000


@dataclass
class PairTotals:
    """Running totals of one pair."""

    answered: int = 0
    failed: int = 0
    floored: int = 0  # answers without a usable tip
    values: dict[str, list[float]] = field(default_factory=dict)  # by measure; one per answered cell that has it

    def add(self, run: NewRun | StoredRun) -> None:
        """Add a cell's run."""
        if run.tags.get("state") == RunState.FAILED:
            self.failed += 1
            return
        self.answered += 1
        self.floored += int(run.tags.get("floored") == "true")
        for name in MEASURES:
            if name in run.metrics:
                self.values.setdefault(name, []).append(run.metrics[name])

    def mean(self, name: str) -> float | None:
        return statistics.fmean(self.values[name]) if self.values.get(name) else None


@dataclass(frozen=True)
class Summary:
    """Result of a collect."""

    experiment: str
    experiment_url: str | None
    cells: int
    recorded_before: int
    generated: int  # including failed
    failed: int
    seconds: float
    totals_by_pair: Mapping[tuple[str, str], PairTotals]  # by model and prompt
    evidence: Evidence | None
    refused: Mapping[str, str]  # by model: the reason
    failures: tuple[str, ...] = ()  # one line per failed cell

    def numbers(self) -> dict[str, float]:
        """Return the numbers for `to_json` and for the metrics of `collection_run`."""
        return {name: getattr(self, name) for name in ("cells", "recorded_before", "generated", "failed", "seconds")}

    def event(self) -> Collected:
        """Return the event that reports this result."""
        return Collected(
            experiment=self.experiment,
            cells=self.cells,
            recorded_before=self.recorded_before,
            generated=self.generated,
            failed=self.failed,
            refused=tuple(self.refused.values()),
            seconds=self.seconds,
            url=self.experiment_url,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of `collect --json`."""
        return {
            "experiment": self.experiment,
            "experiment_url": self.experiment_url,
            **self.numbers(),
            "pairs": [
                {
                    "model": model,
                    "prompt_version": prompt,
                    "answered": pair.answered,
                    "failed": pair.failed,
                    "floored": pair.floored,
                    **{name: pair.mean(name) for name in MEASURES},
                }
                for (model, prompt), pair in self.totals_by_pair.items()
            ],
            "evidence": asdict(self.evidence) if self.evidence is not None else None,
            "refused": [{"model": model, "reason": reason} for model, reason in self.refused.items()],
            "failures": list(self.failures),
        }


def collection_run(
    config: CollectConfig, summary: Summary, *, record_id: str, start_ms: int, end_ms: int, ended: str
) -> NewRun:
    """Build the run of kind=collection. `ended` is "complete", "with failures" or "interrupted"."""
    metrics = summary.numbers()
    tags = {"ended": ended, "tipbench.version": tipbench.__version__}
    values = config.model_dump()
    urls_without_login = {key: strip_login(values[key]) for key in URL_KEYS if values[key]}
    texts = {"artifact:config.json": json.dumps(values | urls_without_login, indent=1)}
    if (evidence := summary.evidence) is not None:
        metrics |= {
            "most_resident": evidence.most_resident,  # largest number of models in memory at once
            "residency_samples": evidence.samples,
            "residency_unknown_samples": evidence.unknown_samples,
            "residency_largest_gap_s": evidence.largest_gap_s,
            "handovers": evidence.handovers,
        }
        tags |= {
            "evidence": evidence.sentence(),
            "foreign_models": ", ".join(evidence.foreign)[:_MAX_NOTE_CHARS],
            "mlflow.note.content": evidence.sentence(),
        }
        texts["artifact:evidence.json"] = json.dumps(asdict(evidence), indent=1)
    return NewRun(
        kind=RunKind.COLLECTION,
        record_id=record_id,
        name=f"collection {summary.generated} of {summary.cells}",
        start_ms=start_ms,
        end_ms=end_ms,
        ok=ended == "complete",
        params={"models": config.models, "prompts": config.prompts, "suite": config.suite},
        metrics={key: float(value) for key, value in metrics.items()},
        tags=tags,
        texts=texts,
    )


def refused_run(model: str, reason: str, now_ms: int) -> NewRun:
    """Build the run of kind=refused, for a model that must not run. A repeated refusal has the same record id."""
    note = reason[:_MAX_NOTE_CHARS]
    return NewRun(
        kind=RunKind.REFUSED,
        record_id=uuid.uuid5(uuid.NAMESPACE_URL, f"refused\n{model}\n{reason}").hex,
        name=f"refused {model}",
        start_ms=now_ms,
        end_ms=now_ms,
        params={"model": model},
        tags={"reason": note, "tipbench.version": tipbench.__version__, "mlflow.note.content": note},
    )
