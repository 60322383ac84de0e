"""The value of `judge run --with`: parsed, printed, and the names that belong to automatic judges."""

from __future__ import annotations

import re

import pytest

from tipbench.errors import InvalidOption
from tipbench.judge.automatic import WITH_PATTERN, JudgeChoice, JudgeKind, is_reserved


@pytest.mark.parametrize("text", ["rules", "command", "command:python my_judge.py", "ollama:llama3.2:3b"])
def test_a_choice_prints_as_it_was_written(text: str) -> None:
    assert str(JudgeChoice.parse(text)) == text
    assert re.fullmatch(WITH_PATTERN, text)


@pytest.mark.parametrize("text", ["", "rule", "rules:", "ollama", "ollama:", "ollama: ", "command:", "gpt:4", None, 3])
def test_any_other_value_is_refused_with_the_three_forms(text: object) -> None:
    with pytest.raises(InvalidOption, match="--with takes rules, command:PROGRAM or ollama:MODEL"):
        JudgeChoice.parse(text)


def test_command_without_a_program_uses_the_configured_one() -> None:
    alone = JudgeChoice.parse("command")
    assert alone.with_program("agent --judge") == JudgeChoice(JudgeKind.COMMAND, "agent --judge")
    assert JudgeChoice.parse("command:mine").with_program("agent").target == "mine"
    for missing in (None, "", " "):
        with pytest.raises(InvalidOption, match="TIPBENCH_JUDGE_COMMAND"):
            alone.with_program(missing)


def test_names_of_provisional_judges_are_reserved_in_any_case() -> None:
    assert is_reserved("Rules")
    assert is_reserved("OLLAMA:gemma3:1b")
    assert not any(map(is_reserved, ("ollama", "ruleset", "command:x", "anna")))
