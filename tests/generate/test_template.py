"""The baseline without a model: valid, unique tips for built-in and unusual scenarios."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date, time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tipbench.errors import ModelRefused
from tipbench.generate import template
from tipbench.generate.engine import Completion, EngineFailure, FailureKind, GenerationRequest
from tipbench.generate.parsing import is_overlong, parse_answer
from tipbench.generate.template import MODEL, TemplateEngine
from tipbench.plan.scenarios import Persona, Scenario, Slot, Task
from tipbench.plan.suite import builtin_suites, load_suite

DAY = date(2026, 3, 10)
PERSONA = Persona(
    id="baker",
    name="Mirre",
    role="baker",
    about="Bakes at night.",
    preferences=("few words",),
    habits=("sweeps the floor at six",),
    tasks=(
        Task("Order rye flour", 3, date(2026, 3, 10), 2),
        Task("Pay the water bill", 2, date(2026, 3, 1), 30),
        Task("Draw a new sign", 1, None, 90),
    ),
)
SCENARIO = Scenario(PERSONA, Slot("dawn", "at dawn", time(5, 50)), DAY)
VERBS = {"Set", "Start", "Put", "Use", "Do", "Take", "Block", "Spend", "Look"}


def ask(scenario: Scenario = SCENARIO, n_tips: int = 5, seed: int = 42, model: str = MODEL) -> GenerationRequest:
    return GenerationRequest(model=model, system="", user="", scenario=scenario, n_tips=n_tips, options={"seed": seed})


def answer(scenario: Scenario = SCENARIO, n_tips: int = 5, seed: int = 42) -> str:
    completion = TemplateEngine().complete(ask(scenario, n_tips, seed))
    assert isinstance(completion, Completion)
    return completion.text


def tips(scenario: Scenario = SCENARIO, n_tips: int = 5, seed: int = 42) -> list[str]:
    return [tip["tip"] for tip in json.loads(answer(scenario, n_tips, seed))]


def test_every_built_in_scenario_gets_exact_answers_of_one_to_twenty_tips() -> None:
    for suite in builtin_suites():
        for scenario in load_suite(suite).scenarios:
            for n_tips in (1, 2, 3, 5, 20):
                parsed = parse_answer(answer(scenario, n_tips), n_tips)
                assert parsed.format_ok, (scenario.id, n_tips)
                assert len({tip.tip for tip in parsed.tips}) == n_tips


def test_every_tip_is_a_short_instruction_with_a_duration_about_one_of_the_tasks() -> None:
    for suite in builtin_suites():
        for scenario in load_suite(suite).scenarios:
            for tip in tips(scenario, 20):
                assert not is_overlong(tip, 39), tip
                assert tip.split()[0] in VERBS, tip
                assert re.search(r"\b\d+ minutes\b", tip), tip
                assert any(f"“{task.title}”" in tip for task in scenario.persona.tasks), tip


@settings(deadline=None, max_examples=30)
@given(n_tips=st.integers(0, 400), seed=st.integers(0, 2**64), hour=st.integers(0, 23))
def test_any_number_of_tips_at_any_hour_are_all_different(n_tips: int, seed: int, hour: int) -> None:
    scenario = replace(SCENARIO, slot=Slot("any", "any hour", time(hour, 59)))
    found = tips(scenario, n_tips, seed)
    assert len(found) == len({tip.casefold() for tip in found}) == n_tips


def test_the_same_seed_gives_the_same_answer_and_other_seeds_give_others() -> None:
    assert answer(seed=1) == answer(seed=1)
    assert len({answer(seed=seed) for seed in range(10)}) > 3


def test_the_first_tip_is_about_the_overdue_task() -> None:
    assert all("Pay the water bill" in tips(seed=seed)[0] for seed in range(10))


def test_the_first_tips_are_not_all_about_one_task() -> None:
    first = " ".join(tips(n_tips=3))
    assert all(task.title in first for task in PERSONA.tasks)


def test_the_hour_and_a_habit_are_named() -> None:
    found = " ".join(tips(n_tips=5))
    assert "05:50" in found
    assert "sweeps the floor at six" in found


def test_the_evening_ends_with_a_note_and_the_morning_does_not() -> None:
    evening = replace(SCENARIO, slot=Slot("night", "night", time(22, 0)))
    assert any("then stop for today" in tip for tip in tips(evening))
    assert not any("then stop for today" in tip for tip in tips())


def test_odd_tasks_and_no_habits_still_give_exact_short_answers() -> None:
    for tasks in [
        (),
        (Task("Only one", 1, None, 0),),
        (Task("Twice", 1, None, 0), Task("twice", 4, DAY, 1)),
        (Task("{task} {0} %s \\ \"quoted\" 'n' 🙂", 2, None, 0),),
        (Task(" ".join(["very"] * 300) + " long", 2, None, 0),),
        (Task(" ".join(["same"] * 30) + " a", 2, None, 0), Task(" ".join(["same"] * 30) + " b", 2, None, 0)),
        (Task("Lone \ud800 surrogate", 2, date.max, 0), Task("Nul \x00 inside", 2, date.min, 0)),
    ]:
        odd = replace(SCENARIO, persona=replace(PERSONA, tasks=tasks, habits=()))
        parsed = parse_answer(answer(odd, 20), 20)
        assert parsed.format_ok
        assert not any(is_overlong(tip.tip, 39) for tip in parsed.tips)


def test_facts_report_that_nothing_is_loaded() -> None:
    facts = TemplateEngine().facts(MODEL)
    assert (facts.engine, facts.params_b, facts.file_bytes, facts.remote) == ("baseline", 0.0, 0, False)
    assert re.fullmatch(r"[0-9a-f]{64}", facts.digest)
    assert facts.host


def test_another_wording_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TemplateEngine().facts(MODEL).digest
    first, *others = template._KINDS
    monkeypatch.setattr(template, "_KINDS", (replace(first, rationale=first.rationale + " Really."), *others))
    assert TemplateEngine().facts(MODEL).digest != before


def test_another_name_is_refused_with_the_right_one() -> None:
    with pytest.raises(ModelRefused, match=r"baseline:template; the request names 'baseline:clever'"):
        TemplateEngine().facts("baseline:clever")
    failure = TemplateEngine().complete(ask(model="baseline:clever"))
    assert isinstance(failure, EngineFailure)
    assert failure.kind is FailureKind.MISSING_MODEL


def test_a_completion_has_a_measured_time_and_no_load_or_tokens() -> None:
    completion = TemplateEngine().complete(ask())
    assert isinstance(completion, Completion)
    assert completion.done_reason == "stop"
    assert completion.latency_s is not None
    assert completion.latency_s > 0
    assert completion.load_s == 0.0
    assert completion.output_tokens is completion.prompt_tokens is completion.tokens_per_s is None


def test_releasing_and_closing_do_nothing_and_may_be_repeated() -> None:
    engine = TemplateEngine()
    engine.release(MODEL)
    engine.close()
    engine.close()
    assert isinstance(engine.complete(ask()), Completion)
