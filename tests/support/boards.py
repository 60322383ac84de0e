"""Boards from stored runs with known scores."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from tipbench.compare.answers import Answer, AnswerTip, ScenarioAnswers
from tipbench.compare.cells import CellFilter, select_cells
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.compare.matrix import Pair
from tipbench.judge.scores import NO_SCORES
from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetSummary
from tipbench.plan.suite import load_suite
from tipbench.record.run import StoredRun

SCALES = ("relevance", "actionability", "tone")
MODELS = ("qwen2.5:0.5b", "qwen2.5:1.5b", "gemma3:1b", "llama3.2:3b")
PROMPTS = ("v1", "v2-mentor", "v3-few-shot")
TWELVE = tuple(Pair(model, prompt) for model in MODELS for prompt in PROMPTS)
HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(2)>",
    "\u202eright to left\u202c שלום",
    "x" * 10_000,
    "👩‍🚀🔥" * 20,
    "two\nlines\r\nand\ttabs\x00\x1b[31m",
    "]]>--><!-- </style></svg></title> &amp; &lt;",
    "half a character \ud800",
    "=HYPERLINK(1)",
    "| a | b |`*_",
)

Missing = Callable[[Pair, str], bool]


def cell(pair: Pair, scenario: str, composite: float | None, **other: Any) -> StoredRun:
    """The run of one cell, pending if it has no composite."""
    judged = composite is not None
    metrics = {"composite": composite, **dict.fromkeys(SCALES, composite / 17 * 5)} if composite is not None else {}
    tags = {"kind": "cell", "state": "judged" if judged else "pending", "conditions": "c1", "scenario_hash": scenario}
    return StoredRun(
        run_id=f"{pair}@{scenario}",
        status="FINISHED",
        start_ms=1,
        end_ms=2,
        params={
            "model": pair.model, "prompt_version": pair.prompt, "scenario": scenario, "suite": "tips",
            "persona": scenario.partition("@")[0], "host": "box", "n_tips": "3", "temperature": "0.7",
        },
        metrics={**metrics, "latency_s": 2.0, "tokens_per_s": 31.5, "format_ok": 1.0, "overlong": 0.1,
                 "diversity": 0.62, **other.get("metrics", {})},
        tags={**tags, **({"scores_rubric": f"tip-v1@{'ab' * 32}"} if judged else {}), **other.get("tags", {})},
    )  # fmt: skip


def scenario_names(n: int) -> list[str]:
    """The first `n` scenarios of the built-in suites."""
    names = [scenario.id for scenario in load_suite("tips-32").scenarios]
    return names[:n]


def board(
    pairs: Sequence[Pair] = TWELVE,
    *,
    n: int = 8,
    lead: float = 1.5,
    noise: float = 1.2,
    seed: int = 5,
    missing: Missing = lambda _pair, _scenario: False,
    latency: Mapping[str, float] | None = None,
    baseline: Pair | None = None,
    by: Literal["model", "prompt"] | None = None,
    experiment: str = "tip-bench-test",
    **changes: Any,
) -> Leaderboard:
    """A board whose mean scores rise from the first pair to the last by three times `lead`."""
    rng = random.Random(seed)
    score_shifts = {scenario: rng.gauss(0, 1) for scenario in scenario_names(n)}
    runs = []
    for at, pair in enumerate(pairs):
        level = 8.5 + lead * 3 * at / max(len(pairs) - 1, 1)
        speed = (latency or {}).get(pair.model, 0.6 + 0.35 * at)
        for scenario, shift in score_shifts.items():
            score = min(17.0, max(2.0, level + shift + rng.gauss(0, noise)))
            value = None if missing(pair, scenario) else round(score, 3)
            runs.append(cell(pair, scenario, value, metrics={"latency_s": speed * rng.uniform(0.9, 1.1)}))
    chosen = select_cells([(run, NO_SCORES) for run in runs], CellFilter())
    leaderboard = make_board(experiment, chosen, BoardOptions(baseline=baseline, by=by, scales=SCALES))
    return replace(leaderboard, **{"judges": ("anna", "ben"), **changes})


def answers(leaderboard: Leaderboard, *, tips: Sequence[str] = (), scenarios: int = 3) -> tuple[ScenarioAnswers, ...]:
    """The answers of every pair of a board in its first scenarios."""
    cards = {scenario.id: scenario.to_card() for scenario in load_suite("tips-32").scenarios}
    texts = tips or (
        "Before the tea, write the first line of the handover note; stop after five minutes.",
        "Put the certificate card beside the cup and open the renewal page once.",
        "Ask Petra about Saturday in one short message on the way in.",
    )
    written = tuple(
        AnswerTip(
            text, "It is small and starts now.", {"relevance": 4.0, "actionability": 3.5, "tone": 5.0}, len(text) > 200
        )
        for text in texts
    )
    return tuple(
        ScenarioAnswers(
            name,
            cards.get(name),
            tuple(_answer(leaderboard, each.pair, row, written) for each in leaderboard.standings),
        )
        for row, name in enumerate(leaderboard.matrix.scenarios[:scenarios])
    )


def _answer(leaderboard: Leaderboard, pair: Pair, row: int, tips: tuple[AnswerTip, ...]) -> Answer:
    matrix = leaderboard.matrix
    column = matrix.pairs.index(pair)
    judged = bool(matrix.judged[row, column])
    value = float(matrix.values[row, column]) if judged else None
    return Answer(pair, "judged" if judged else "pending", value, True, tips)


def judging() -> JudgingStatus:
    """The status of two judges, one of them drifted, and the rules judge."""
    scales = [
        {"scale": name, "n": 40, "bias": bias, "interval": [bias - 0.3, bias + 0.3], "difference": bias,
         "error": 0.4, "beyond": bias > 0.5}
        for name, bias in zip(SCALES, (0.1, 0.62, -0.2), strict=True)
    ]  # fmt: skip
    drift = {"verdict": "beyond the limit", "n_controls": 40, "error": 0.51, "error_limit": 0.9, "scales": scales}
    return JudgingStatus(
        experiment="tip-bench-test",
        cells=96,
        pending=0,
        held=0,
        judged=96,
        floored=2,
        twice=20,
        rubrics=("tip-v1",),
        alpha={"relevance": 0.81, "actionability": 0.74, "tone": None},
        judges=(
            JudgeStatus("anna", False, 80, 0, 2, 0, "fine", 0.41, 0.9, 1.5),
            JudgeStatus("ben", False, 36, 0, 1, 0, "beyond the limit", 0.51, None, 2.0),
            JudgeStatus("rules", True, 96, 0, 1, 0, "unknown", None, None, None),
        ),
        history=(
            SheetSummary("s1", "ben", "2026-05-01T10:00:00+00:00", "applied", False, 40, 40, drift, "he was right"),
        ),
    )
