"""An experiment with runs of all kinds and states, for the pages that show them."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product

from support.judging import Rule, SheetDriver, fill
from tipbench.compare.cells import CellFilter
from tipbench.compare.decision import decision_run, make_decision
from tipbench.compare.leaderboard import read_leaderboard, record_board
from tipbench.compare.matrix import Pair
from tipbench.generate.engine import Completion, EngineFailure, FailureKind, ModelFacts
from tipbench.generate.residency import Evidence
from tipbench.judge.export import ExportRequest
from tipbench.judge.rules import RulesJudge
from tipbench.judge.run import run_judge
from tipbench.judge.sheet_store import ItemKind, StoredSheet, now_iso
from tipbench.plan.collect_config import CollectConfig, make_config
from tipbench.plan.grid import ModelIdentity, PlannedCell, plan_grid
from tipbench.plan.suite import Suite, load_suite
from tipbench.record.cell_run import CollectContext, cell_run
from tipbench.record.generation import GeneratedCell
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import Experiment, RunStore
from tipbench.record.summary import Summary, collection_run, refused_run

SAMPLE_EXPERIMENT = "tip-bench-furnished"
COLLECTION = "c0" * 16
_HOUR_MS = 3_600_000


@dataclass(frozen=True)
class SampleTexts:
    """The texts and names of the experiment, which come from outside."""

    suite: Suite = field(default_factory=lambda: load_suite("tips"))
    models: tuple[str, ...] = ("qwen2.5:0.5b", "gemma3:1b", "llama3.2:3b", "baseline:template")
    tips: tuple[str, ...] = (
        "Before the tea, write the first line of the handover note; stop after five minutes.",
        "Put the certificate card beside the cup and open the renewal page once.",
        "Ask Petra about Saturday in one short message on the way in.",
    )
    rationales: tuple[str, ...] = ("It is small and starts now.",)
    notes: tuple[str, ...] = ("", "Close to a 4.", "Which task is meant?")
    judges: tuple[str, str] = ("anna", "ben")
    failures: tuple[str, ...] = ("The server closed the connection.",)
    refused: tuple[tuple[str, str], ...] = (("gemma3:27b", "gemma3:27b has 27.4B parameters; the limit is 4B."),)
    foreign: tuple[str, ...] = ("mistral:7b",)
    scenarios: tuple[str, ...] = ()  # of additional judged cells; no suite has these scenarios


@dataclass(frozen=True)
class SampleExperiment:
    """The recorded experiment."""

    driver: SheetDriver
    pairs: tuple[Pair, ...]
    runs: dict[str, str]  # one run id for each kind and state
    held_sheet: str
    open_sheet: str

    @property
    def name(self) -> str:
        return self.driver.experiment.name


def record_sample(store: RunStore, name: str = SAMPLE_EXPERIMENT, texts: SampleTexts | None = None) -> SampleExperiment:
    """Record models × prompts × scenarios, judged by two judges, and runs of every other kind and state."""
    texts = texts or SampleTexts()
    driver = SheetDriver(store, store.ensure_experiment(name))
    writer = _SampleWriter(driver, texts)
    runs = writer.record_grid()
    run_judge(store, driver.experiment, RulesJudge(), ExportRequest())
    held, still_open = writer.judge()
    runs |= writer.record_unjudged()
    writer.record_other_kinds()
    store.mark_changed(driver.experiment.experiment_id)
    pairs = tuple(Pair(*each) for each in product(texts.models, texts.suite.prompts))
    return SampleExperiment(driver, pairs, runs | writer.run_by_kind(), held, still_open)


@dataclass(frozen=True)
class _SampleWriter:
    driver: SheetDriver
    texts: SampleTexts
    tick: Iterator[int] = field(default_factory=lambda: count(int(time.time() * 1000) - 48 * _HOUR_MS, 60_000))
    used: Counter[str] = field(default_factory=Counter)  # texts used so far, by field of SampleTexts

    @property
    def config(self) -> CollectConfig:
        return make_config({"models": "as-written", "prompts": "v1", "n_tips": 3, "experiment": SAMPLE_EXPERIMENT})

    def next_text(self, name: str) -> str:
        """Return the next text of a field of SampleTexts, in a cycle."""
        texts: tuple[str, ...] = getattr(self.texts, name)
        self.used[name] += 1
        return texts[(self.used[name] - 1) % len(texts)]

    def cells(self, model: str, build: str = "2") -> list[tuple[ModelFacts, PlannedCell]]:
        facts = ModelFacts(model, "ollama", "0.11.4", "box", f"sha256:{_hash(model)}{build}", 1.5, "Q4_K_M")
        suite = self.texts.suite
        planned = [
            cell
            for version in suite.prompts  # a version's name may contain a comma, so each is planned separately
            for cell in plan_grid(
                replace(suite, prompts={"v1": suite.prompts[version]}),
                self.config,
                [ModelIdentity(model, facts.digest)],
            )
        ]
        return [(facts, cell) for cell in planned]

    def record(self, facts: ModelFacts, cell: PlannedCell, text: str | None, supersedes: Sequence[str] = ()) -> str:
        context = CollectContext(self.config, self.texts.suite, COLLECTION)
        start = next(self.tick)
        answer: Completion | EngineFailure
        if text is None:
            answer = EngineFailure(FailureKind.RESET, self.next_text("failures"), partial=self.texts.tips[0])
        else:
            speed = 20 + 60 * _share(facts.model)
            answer = Completion(text, "stop", 140 / speed, 0.4, 0.2, 900, 140, speed)
        generated = GeneratedCell(cell, answer, start, start + 3000, foreign_resident=text == "")
        run = cell_run(context, facts, generated, tuple(supersedes))
        return self.driver.store.record(self.driver.experiment.experiment_id, run)

    def answer(self) -> str:
        tips = [{"tip": self.next_text("tips"), "rationale": self.next_text("rationales")} for _ in range(3)]
        return json.dumps(tips, ensure_ascii=True)

    def record_grid(self) -> dict[str, str]:
        """Record the grid: one cell at the second attempt, one also with an older build, one without a usable tip."""
        runs: dict[str, str] = {}
        for at, model in enumerate(self.texts.models):
            cells = self.cells(model)
            if at == 0:
                runs["stale"] = self.record(*self.cells(model, build="1")[0], self.answer())
                runs["superseded"] = self.record(*cells[0], None)
            for number, (facts, cell) in enumerate(cells):
                if at == number == 0:
                    runs["judged"] = self.record(facts, cell, self.answer(), supersedes=[runs["superseded"]])
                elif at == 1 and number == len(cells) - 1:
                    runs["floored"] = self.record(facts, cell, "")
                else:
                    self.record(facts, cell, self.answer())
        return runs

    def judge(self) -> tuple[str, str]:
        """Apply two sheets of the first judge and one of the second; the second also has a held and an open one."""
        first, second = self.texts.judges
        half = len(self.texts.models) * len(self.texts.suite.prompts) * len(self.texts.suite.scenarios) // 2
        for options in ({"limit": half}, {}):
            self.apply_filled(self.driver.export(first, seed=1, **options).stored)
        self.apply_filled(self.driver.export(second, seed=2, limit=half // 2, everything=True).stored)
        held = self.driver.export(second, seed=3, limit=half, everything=True).stored  # enough controls for a verdict
        assert self.driver.apply(self.filled(held, careless=True)).status == "held"
        still_open = self.driver.export(second, seed=4, everything=True).stored
        return held.sheet.id, still_open.sheet.id

    def apply_filled(self, judging: StoredSheet) -> None:
        applied = self.driver.apply(self.filled(judging))
        assert applied.status == "applied", applied

    def filled(self, judging: StoredSheet, *, careless: bool = False) -> dict[str, object]:
        """Fill a sheet with scores by model and prompt, controls with their references; a careless judge gives 5."""
        rule: Rule = (lambda _rng, _reference: 5) if careless else (lambda _rng, reference: reference)
        raw, cells = fill(judging, rule), self.driver.cells()
        for entry, item in zip(judging.entries, raw["items"], strict=True):
            for at, tip in enumerate(item["tips"]):
                tip["note"] = self.next_text("notes")
                if entry.kind is not ItemKind.CONTROL and entry.run_id is not None and not careless:
                    params = cells[entry.run_id].params
                    level = 1.6 + 1.4 * _share(params["model"]) + _share(params["prompt_version"])
                    tip["scores"] = {
                        name: round(level + _share(entry.run_id, at, name) + 0.4 * _share(entry.run_id, judging.owner))
                        for name in tip["scores"]
                    }
        return raw

    def record_unjudged(self) -> dict[str, str]:
        """Record runs after the judging: pending cells of a new model, and a failure with each message."""
        cells = self.cells("newcomer:3b")
        pending = [self.record(*cell, self.answer()) for cell in cells[:3]]
        failed = [
            self.record(*cell, None) for cell, _ in zip(cells[3:] * 10, self.texts.failures, strict=False)
        ]  # one run for each message; of one cell the last counts
        for at, scenario in enumerate(self.texts.scenarios):
            self.record_unknown(self.texts.models[0], scenario, at)
        return {"pending": pending[0], "failed": failed[0]}

    def record_unknown(self, model: str, scenario: str, at: int) -> None:
        """Record a judged cell of a scenario that is in no suite."""
        facts, cell = self.cells(model)[0]
        run = cell_run(
            CollectContext(self.config, self.texts.suite, COLLECTION), facts,
            GeneratedCell(cell, Completion(self.answer(), "stop"), next(self.tick), next(self.tick)),
        )  # fmt: skip
        persona, _, slot = scenario.partition("@")
        scores = {"relevance": 3.0, "actionability": 3.0, "tone": 3.0, "composite": 11.0}
        self.driver.store.record(
            self.driver.experiment.experiment_id,
            replace(
                run,
                cell_key=_hash(scenario, at),
                name=scenario[:200],
                params={**run.params, "scenario": scenario, "persona": persona or "x", "time_slot": slot or "x"},
                metrics={**run.metrics, **scores},
                tags={**run.tags, "state": "judged", "judge_pending": "false", "scenario_hash": _hash(scenario),
                      "scores_rubric": self.texts.suite.rubric.tag},
            ),
        )  # fmt: skip

    def record_other_kinds(self) -> None:
        """Record the runs that are not cells."""
        store, experiment = self.driver.store, self.driver.experiment
        evidence = Evidence(412, 1, 0.9, 3, 1, self.texts.foreign, (0.4, 0.6, 0.5))
        refused = dict(self.texts.refused)
        summary = Summary(experiment.name, None, 96, 0, 96, 1, 512.5, {}, evidence, refused, tuple(self.texts.failures))
        now = next(self.tick)
        done = collection_run(
            self.config, summary, record_id=COLLECTION, start_ms=now - _HOUR_MS, end_ms=now, ended="complete"
        )
        store.record(experiment.experiment_id, done)
        for model, reason in refused.items():
            store.record(experiment.experiment_id, refused_run(model, reason, next(self.tick)))
        store.mark_changed(experiment.experiment_id)
        board, cells = read_leaderboard(store, experiment, CellFilter())
        record_board(store, experiment.experiment_id, board)
        decision = make_decision(
            board, cells, board.standings[0].pair, self.texts.rationales[0], decision_id=uuid.uuid4().hex, at=now_iso()
        )
        store.record(experiment.experiment_id, decision_run(decision, now))

    def run_by_kind(self) -> dict[str, str]:
        """Return the id of one run of each kind except cells."""
        found: dict[str, str] = {}
        for kind in RunKind:
            if kind not in (RunKind.CELL, RunKind.SIMULATION):  # simulations are recorded in another experiment
                where = {"kind": str(kind)}
                run = next(self.driver.store.search(self.driver.experiment.experiment_id, where=where, limit=1))
                found[str(kind)] = run.run_id
        return found


def empty_experiment(store: RunStore, name: str) -> Experiment:
    """An experiment with a refused model and no other run."""
    experiment = store.ensure_experiment(name)
    run: NewRun = refused_run("gemma3:27b", "gemma3:27b has 27.4B parameters; the limit is 4B.", 1)
    store.record(experiment.experiment_id, run)
    store.mark_changed(experiment.experiment_id)
    return experiment


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()


def _share(*parts: object) -> float:
    """A number from 0 to 1 that depends only on the parts."""
    return int(_hash(*parts)[:8], 16) / 0xFFFFFFFF
