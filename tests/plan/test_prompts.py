from __future__ import annotations

import dataclasses
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.errors import SuiteError
from tipbench.plan.prompts import DIVERSITY_SENTENCE, PLACEHOLDERS, Prompt, parse_prompt, render
from tipbench.plan.scenarios import Scenario
from tipbench.plan.suite import builtin_suites, load_suite

TIPS, TIPS_32 = load_suite("tips"), load_suite("tips-32")
PATH = Path("prompts/v9.md")


def parse(text: str) -> Prompt:
    return parse_prompt("v9", text, PATH)


def test_every_known_placeholder_can_be_filled() -> None:
    prompt = Prompt("all", "s", "\n".join(f"{name}={{{{ {name} }}}}" for name in PLACEHOLDERS))
    text = render(prompt, TIPS.scenarios[0], n_tips=7, ask_for_diversity=True).user
    for expected in (
        "n_tips=7",
        f"diversity={DIVERSITY_SENTENCE}",
        "name=Ines",
        "weekday=Monday",
        "date=27 April 2026",
        "time=07:30",
        "slot=early morning",
    ):
        assert expected in text


@given(st.sampled_from(TIPS_32.scenarios), st.sampled_from(list(TIPS_32.prompts)), st.integers(1, 50), st.booleans())
def test_built_in_prompts_leave_no_placeholder(scenario: Scenario, version: str, n_tips: int, diversity: bool) -> None:
    rendered = render(TIPS_32.prompts[version], scenario, n_tips=n_tips, ask_for_diversity=diversity)
    assert "{{" not in rendered.system + rendered.user
    assert f"exactly {n_tips} objects" in rendered.user
    assert (DIVERSITY_SENTENCE in rendered.user) == diversity


@pytest.mark.parametrize("name", builtin_suites())
def test_built_in_prompts_state_the_word_limit_of_the_rubric(name: str) -> None:
    suite = load_suite(name)
    for prompt in suite.prompts.values():
        assert f"at most {suite.rubric.word_limit} words" in prompt.user


def test_first_prompt_is_short_enough_for_a_small_model() -> None:
    """450 tokens are about 1800 characters of English."""
    for scenario in TIPS_32.scenarios:
        rendered = render(TIPS_32.prompts["v1"], scenario, n_tips=5, ask_for_diversity=False)
        assert len(rendered.system) + len(rendered.user) < 1800


def test_few_shot_prompt_is_the_first_prompt_plus_examples() -> None:
    first, few_shot = TIPS.prompts["v1"], TIPS.prompts["v3-few-shot"]
    assert few_shot.system == first.system
    assert few_shot.user.endswith(first.user)
    assert few_shot.user.count('[{"tip": "') == 3


def test_few_shot_examples_do_not_name_a_persona_of_the_suite() -> None:
    examples = TIPS.prompts["v3-few-shot"].user.removesuffix(TIPS.prompts["v1"].user)
    for scenario in TIPS_32.scenarios:
        assert scenario.persona.name not in examples
        assert not any(task.title in examples for task in scenario.persona.tasks)


def test_tasks_are_rendered_with_due_date_and_age_relative_to_the_day() -> None:
    scenario = TIPS.scenarios[0]
    task = scenario.persona.tasks[0]
    dues = [None, date(2026, 4, 26), date(2026, 4, 27), date(2026, 4, 28), date(2026, 4, 30)]
    tasks = tuple(dataclasses.replace(task, title=f"T{n}", due=due, age_days=n) for n, due in enumerate(dues))
    persona = dataclasses.replace(scenario.persona, tasks=tasks)
    prompt = Prompt("v", "s", "{{ tasks }}")
    text = render(prompt, dataclasses.replace(scenario, persona=persona), n_tips=1, ask_for_diversity=False).user
    assert text.split("\n") == [
        "- T0 (priority 4 of 4, no due date, 0 days old)",
        "- T1 (priority 4 of 4, overdue by 1 day, 1 day old)",
        "- T2 (priority 4 of 4, due today, 2 days old)",
        "- T3 (priority 4 of 4, due tomorrow, 3 days old)",
        "- T4 (priority 4 of 4, due in 3 days, 4 days old)",
    ]


def test_braces_in_a_persona_are_not_filled_in_again() -> None:
    scenario = TIPS.scenarios[0]
    odd = dataclasses.replace(scenario, persona=dataclasses.replace(scenario.persona, about="{{ n_tips }}"))
    assert render(Prompt("v", "s", "{{ about }}"), odd, n_tips=3, ask_for_diversity=False).user == "{{ n_tips }}"


def test_prompt_without_the_placeholder_still_requests_diversity() -> None:
    prompt = Prompt("v", "system", "Write {{ n_tips }}.")
    assert (
        render(prompt, TIPS.scenarios[0], n_tips=3, ask_for_diversity=True).user == f"Write 3.\n\n{DIVERSITY_SENTENCE}"
    )
    assert render(prompt, TIPS.scenarios[0], n_tips=3, ask_for_diversity=False).user == "Write 3."


def test_comment_before_the_first_heading_is_not_part_of_the_prompt() -> None:
    prompt = parse(
        "# A title\n\na comment {{ anything }}\n\n# system\n\nBe kind.\n\n# user\n\nWrite {{n_tips}} tips.\n"
    )
    assert prompt == Prompt("v9", "Be kind.", "Write {{n_tips}} tips.")


def test_windows_line_ends_make_the_same_prompt() -> None:
    text = "# system\nBe kind.\n# user\nWrite {{ n_tips }}\ntips."
    assert parse(text.replace("\n", "\r\n")).hash == parse(text).hash


def test_hash_distinguishes_system_and_user_texts() -> None:
    hashes = {Prompt("v", "a", "b").hash, Prompt("v", "b", "a").hash, Prompt("v", "ab", "").hash}
    assert len(hashes) == 3
    assert Prompt("v", "a", "b").hash == Prompt("w", "a", "b").hash


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("Write {{ n_tips }}.", None, "the '# system' section is missing"),
        ("# system\nBe kind {{ n_tips }}.\n", None, "the '# user' section is missing"),
        ("# system\n\n# user\n{{ n_tips }}", 1, "the '# system' section is empty"),
        ("# system\na\n# user\n{{ n_tips }}\n# user\nb", 5, "a second '# user' section"),
        ("# system\na\n# user\n{{ n_tips }}\n{{ mood }}", 5, "unknown placeholder '{{ mood }}'. Known: n_tips"),
        ("# system\na\n# user\n{{ n_tips }} {{ name", 4, "not closed"),
        ("# system\na\n# user\nWrite five tips.", None, "Use {{ n_tips }}"),
    ],
)
def test_broken_prompt_is_refused_with_line_and_reason(text: str, line: int | None, reason: str) -> None:
    with pytest.raises(SuiteError) as refused:
        parse(text)
    assert (refused.value.path, refused.value.line) == (PATH, line)
    assert reason in refused.value.reason
