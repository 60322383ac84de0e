"""Recorded cells, and judges who fill sheets by a rule."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tipbench.generate.engine import Completion, ModelFacts
from tipbench.judge.apply import ApplyResult, SheetApplier
from tipbench.judge.export import ExportRequest, ExportResult, export_sheet
from tipbench.judge.scores import RUBRIC, SCORES, CellScores, read_scores
from tipbench.judge.sheet import sheet_json
from tipbench.judge.sheet_file import unescape_cell
from tipbench.judge.sheet_store import DRIFT, FILLED, KEY, SHEET, ItemKind, StoredSheet
from tipbench.plan.collect_config import make_config
from tipbench.plan.grid import ModelIdentity, PlannedCell, plan_grid
from tipbench.plan.suite import Suite, load_suite
from tipbench.record.cell_run import CollectContext, cell_run
from tipbench.record.generation import GeneratedCell
from tipbench.record.run import NewRun, RunChange, StoredRun
from tipbench.record.store import Experiment, MemoryStore, RunStore

EXPERIMENT = "tip-bench-judging"
MODELS = ("alpha:135m", "beta:1b")

Write = Callable[[PlannedCell, random.Random], str]


def three_tips(_cell: PlannedCell, rng: random.Random) -> str:
    """A random answer in the requested format."""
    things = ["open the window", "write one line", "call the shop", "sort three papers", "put the kettle on"]
    tips = [
        {"tip": f"Tip {rng.randrange(10**9)}: {rng.choice(things)} for {n + 2} minutes.", "rationale": "It is short."}
        for n in range(3)
    ]
    return json.dumps(tips)


def record_cells(
    store: RunStore,
    *,
    models: Sequence[str] = MODELS,
    experiment: str = EXPERIMENT,
    suite: Suite | None = None,
    write: Write = three_tips,
    start_ms: int = 1_000,
    build: str = "1",
    **options: object,
) -> Experiment:
    """Record a grid of answered cells, as a collect does."""
    found = store.ensure_experiment(experiment)
    suite = suite or load_suite("tips")
    values = {"models": ",".join(models), "n_tips": 3, "experiment": experiment, "prompts": ",".join(suite.prompts)}
    config = make_config({**values, **options})
    setting = CollectContext(config, suite, "c" * 32)
    for model in models:
        facts = ModelFacts(model, "ollama", "0.11.4", "here", f"sha256:{model}/{build}", params_b=1.0)
        for cell in plan_grid(suite, config, [ModelIdentity(model, facts.digest)]):
            answer = Completion(write(cell, random.Random(cell.key)), "stop", latency_s=1.0)
            run = cell_run(setting, facts, GeneratedCell(cell, answer, start_ms, start_ms + 1))
            store.record(found.experiment_id, run)
    return found


class SeededStore(MemoryStore):
    """A store in memory whose run ids are the same in every test run, because the order of a sheet depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self._ids = random.Random(1)

    def begin(self, experiment_id: str, run: NewRun) -> str:
        kept = self._runs.pop(super().begin(experiment_id, run))
        run_id = f"{self._ids.getrandbits(128):032x}"
        self._runs[run_id] = replace(kept, run=replace(kept.run, run_id=run_id))
        return run_id

    def copy_from(self, other: SeededStore) -> None:
        """Copy the content of the other store."""
        self._experiments = dict(other._experiments)
        self._runs = {run_id: replace(kept, text_tags=dict(kept.text_tags)) for run_id, kept in other._runs.items()}
        self._ids.setstate(other._ids.getstate())


Rule = Callable[[random.Random, int], int]


def at_random(rng: random.Random, _reference: int) -> int:
    return rng.randint(1, 5)


def agreed(_rng: random.Random, reference: int) -> int:
    """A judge who gives the reference scores, so that no test depends on chance."""
    return reference


def honest(rng: random.Random, reference: int) -> int:
    """A judge who gives scores near the reference."""
    return min(5, max(1, round(reference + rng.gauss(0, 0.6))))


def always(score: int) -> Rule:
    """A judge who always gives the same score."""
    return lambda _rng, _reference: score


def fill(judging: StoredSheet, rule: Rule = agreed, *, judge: str | None = None, seed: int = 1) -> dict[str, Any]:
    """The sheet's JSON with all scores filled in; the rule gets a control's reference, else a random score."""
    rng = random.Random(seed)
    raw: dict[str, Any] = json.loads(json.dumps(sheet_json(judging.sheet)))
    if judge is not None:
        raw["judge"] = judge
    for entry, item in zip(judging.entries, raw["items"], strict=True):
        for at, tip in enumerate(item["tips"]):
            reference = entry.agreed_scores[at] if entry.kind is ItemKind.CONTROL else {}
            tip["scores"] = {name: rule(rng, reference.get(name) or rng.randint(1, 5)) for name in tip["scores"]}
    return raw


def fill_csv(text: str, filled: Mapping[str, Any], *, delimiter: str = ",") -> str:
    """The CSV sheet with the scores of a filled JSON sheet, as a spreadsheet saves it."""
    rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))
    tips = {(item["item"], str(at)): tip for item in filled["items"] for at, tip in enumerate(item["tips"], start=1)}
    for row in rows:
        if row["row"] == "tip":
            scores = tips[unescape_cell(row["item"]), unescape_cell(row["number"])]["scores"]
            row.update({f"score:{name}": str(score) for name, score in scores.items()})
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def by_hand(item: Mapping[str, Any]) -> dict[str, float]:
    """The expected metrics of a filled item under the built-in rubric: scales, flags and composite."""
    tips = item["tips"]
    means = {name: fmean(tip["scores"][name] for tip in tips) for name in tips[0]["scores"]}
    return {
        **means,
        "format_ok": float(item["format_ok"]),
        "overlong": fmean(tip["overlong"] for tip in tips),
        "composite": fmean(
            tip["scores"]["relevance"] + tip["scores"]["actionability"] + tip["scores"]["tone"]
            + 2 * item["format_ok"] - tip["overlong"]
            for tip in tips
        ),
    }  # fmt: skip


def items_of(raw: Mapping[str, Any], judging: StoredSheet, kind: ItemKind = ItemKind.CELL) -> dict[str, Any]:
    """The items of one kind in a filled sheet, by run id, or by item id if they have no run."""
    items = {item["item"]: item for item in raw["items"]}
    return {entry.run_id or entry.item.id: items[entry.item.id] for entry in judging.entries if entry.kind is kind}


@dataclass(frozen=True)
class SheetDriver:
    """Exports and applies the sheets of an experiment, without the command line."""

    store: RunStore
    experiment: Experiment

    def export(self, judge: str | None = "anna", *, seed: int | None = 1, **options: Any) -> ExportResult:
        return export_sheet(self.store, self.experiment, ExportRequest(judge=judge, seed=seed, **options))

    def apply(
        self,
        raw: Mapping[str, Any],
        *,
        judge: str | None = None,
        accept: str | None = None,
        final: bool = False,
        dry_run: bool = False,
    ) -> ApplyResult:
        applier = SheetApplier.for_file(self.store, raw, judge=judge)
        return applier.run(accept=accept, final=final, dry_run=dry_run)

    def judged_by(self, judge: str, rule: Rule = agreed, *, seed: int = 1, **options: Any) -> ApplyResult:
        """Export a sheet, fill it and apply it."""
        return self.apply(fill(self.export(judge, **options).stored, rule, seed=seed))

    def cells(self) -> dict[str, StoredRun]:
        return {run.run_id: run for run in self.store.search(self.experiment.experiment_id, where={"kind": "cell"})}

    def scores(self) -> dict[str, CellScores]:
        found = self.store.read(self.experiment.experiment_id, where={"kind": "cell"}, texts=[SCORES])
        return {run.run_id: read_scores(texts.get(SCORES)) for run, texts in found}

    def remove_score(self, run_id: str, judge: str, scale: str) -> None:
        """Remove a judge's score of a cell's first tip, as somebody could by hand in MLflow."""
        _, texts = self.store.get(run_id)
        raw = json.loads(texts[SCORES])
        del raw["judges"][judge]["tips"][0]["scores"][scale]
        self.store.update(run_id, RunChange(texts={SCORES: json.dumps(raw)}, at_ms=1))

    def everything(self) -> dict[str, tuple[StoredRun, dict[str, str]]]:
        """All runs with the texts that judging writes, to compare before and after."""
        texts = [SCORES, RUBRIC, SHEET, KEY, FILLED, DRIFT]
        found = self.store.read(self.experiment.experiment_id, where={}, texts=texts)
        return {run.run_id: (run, kept) for run, kept in found}
