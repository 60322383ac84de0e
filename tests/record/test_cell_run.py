"""From answers to runs: fields, states and floors as PRODUCT.md defines them."""

from __future__ import annotations

import json
from dataclasses import replace

from support.requests import SUITE, planned
from tipbench.generate.engine import Completion, EngineFailure, FailureKind, ModelFacts
from tipbench.plan.collect_config import make_config
from tipbench.plan.rubric import FLAGS, OTHER_METRICS
from tipbench.record.cell_run import CollectContext, cell_run
from tipbench.record.generation import GeneratedCell
from tipbench.record.run import NewRun, RunKind

FACTS = ModelFacts("alpha:135m", "ollama", "0.11.4", "box", "sha-alpha", params_b=0.1345, quantization="Q4_1")
TIPS = [
    {"tip": "Open the report and write one line.", "rationale": "Small start."},
    {"tip": "b " * 50, "rationale": "x"},
]
PARAMS = (
    "model prompt_version scenario persona time_slot n_tips temperature seed repeat diversity suite engine "
    "engine_version host model_digest model_params_b quantization num_ctx num_predict sampling rubric"
)


def run_of(
    result: Completion | EngineFailure, *, foreign_resident: bool = False, supersedes: tuple[str, ...] = ()
) -> NewRun:
    setting = CollectContext(make_config({"n_tips": 2}), SUITE, "collection-1")
    generated = GeneratedCell(planned(n_tips=2)[0], result, 1000, 2000, foreign_resident)
    return cell_run(setting, FACTS, generated, supersedes)


def answer(text: str) -> Completion:
    return Completion(text, "stop", latency_s=1.5, load_s=0.5, ttft_s=0.1, prompt_tokens=300, output_tokens=60)


def test_params_are_exactly_those_of_the_contract() -> None:
    run = run_of(answer(json.dumps(TIPS)))
    assert list(run.params) == PARAMS.split()
    assert run.params["seed"] == "42"
    assert run.params["diversity"] == "false"
    assert run.params["rubric"] == SUITE.rubric.tag
    assert json.loads(run.params["sampling"]) == {"min_p": 0, "repeat_penalty": 1.1, "top_k": 40, "top_p": 0.9}


def test_a_usable_answer_is_pending() -> None:
    run = run_of(answer(json.dumps(TIPS)))
    assert (run.kind, run.ok) == (RunKind.CELL, True)
    assert (run.tags["state"], run.tags["judge_pending"]) == ("pending", "true")
    assert (run.tags["done_reason"], run.tags["truncated"]) == ("stop", "false")
    assert run.metrics["format_ok"] == 1
    assert run.metrics["overlong"] == 0.5
    assert run.metrics["n_candidates"] == 2
    assert 0 <= run.metrics["diversity"] <= 1
    assert "composite" not in run.metrics
    assert "tokens_per_s" not in run.metrics  # not reported by the engine


def test_a_scale_cannot_have_the_name_of_a_recorded_metric() -> None:
    result = replace(answer(json.dumps(TIPS)), tokens_per_s=30.0)
    assert set(run_of(result).metrics) == OTHER_METRICS - {"composite"} | set(FLAGS)


def test_all_texts_are_stored() -> None:
    run = run_of(answer(json.dumps(TIPS)))
    assert set(run.texts) == {
        "artifact:prompt.txt", "artifact:raw.txt", "artifact:candidates.json", "artifact:rubric.md",
    }  # fmt: skip
    assert run.texts["artifact:raw.txt"] == json.dumps(TIPS)
    assert json.loads(run.texts["artifact:candidates.json"])[0] == TIPS[0]
    assert run.texts["artifact:rubric.md"] == SUITE.rubric.text
    assert "# system" in run.texts["artifact:prompt.txt"]


def test_an_answer_without_a_tip_is_judged_immediately_at_the_floor() -> None:
    run = run_of(answer("I am sorry, I cannot help with that."))
    assert (run.tags["state"], run.tags["judge_pending"], run.ok) == ("judged", "false", True)
    assert run.tags["scores_rubric"] == SUITE.rubric.tag
    expected = {"relevance": 1, "actionability": 1, "tone": 1, "format_ok": 0, "overlong": 0, "composite": 3}
    assert {key: run.metrics[key] for key in expected} == expected
    assert run.metrics["n_candidates"] == 0


def test_a_failure_is_never_scored_and_keeps_what_arrived() -> None:
    run = run_of(EngineFailure(FailureKind.INCOMPLETE, "the answer broke off", '[{"tip": "Op'))
    assert not run.ok
    assert run.metrics == {}
    assert (run.tags["state"], run.tags["judge_pending"]) == ("failed", "false")
    assert run.tags["failure"] == "incomplete"
    assert run.texts["artifact:raw.txt"] == '[{"tip": "Op'


def test_only_the_first_n_tips_count_but_all_are_kept() -> None:
    many = [{"tip": f"tip number {n}", "rationale": "r"} for n in range(5)]
    run = run_of(answer(json.dumps(many)))
    assert run.metrics["format_ok"] == 0
    assert run.metrics["n_candidates"] == 5
    assert len(json.loads(run.texts["artifact:candidates.json"])) == 5


def test_foreign_models_and_superseded_runs_are_recorded() -> None:
    run = run_of(answer("x"), foreign_resident=True, supersedes=("old",))
    assert run.tags["foreign_resident"] == "true"
    assert run.supersedes == ("old",)
    assert (run.start_ms, run.end_ms) == (1000, 2000)
    assert "foreign_resident" not in run_of(answer("x")).tags
