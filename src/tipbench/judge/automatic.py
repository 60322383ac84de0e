"""The automatic judge that is chosen with `judge run --with`, and the names reserved for automatic judges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from tipbench.errors import InvalidOption


class JudgeKind(StrEnum):
    """The kinds of automatic judges."""

    RULES = "rules"
    COMMAND = "command"  # any program
    MODEL = "ollama"  # a model of the Ollama server


# For the API. It includes command:PROGRAM, which is then refused over HTTP with a specific message.
WITH_PATTERN = rf"^({JudgeKind.RULES}|{JudgeKind.COMMAND}|{JudgeKind.COMMAND}:.*|{JudgeKind.MODEL}:[!-~]+)$"


@dataclass(frozen=True)
class JudgeChoice:
    """An automatic judge: rules, command:PROGRAM or ollama:MODEL; `command` uses the configured program."""

    kind: JudgeKind
    target: str = ""  # the program or the model

    @classmethod
    def parse(cls, text: object) -> JudgeChoice:
        """Parse the value of `--with`; raises InvalidOption."""
        if not isinstance(text, str):
            raise _invalid(text)
        if text in (JudgeKind.RULES, JudgeKind.COMMAND):
            return cls(JudgeKind(text))
        kind, _, target = text.partition(":")
        if kind not in (JudgeKind.COMMAND, JudgeKind.MODEL) or not target.strip():
            raise _invalid(text)
        return cls(JudgeKind(kind), target)

    def with_program(self, program: str | None) -> JudgeChoice:
        """Return this choice; `command` without a program gets `program`. Raises InvalidOption if both are missing."""
        if self.kind is not JudgeKind.COMMAND or self.target:
            return self
        if program is None or not program.strip():
            raise _invalid(self)
        return replace(self, target=program)

    def __str__(self) -> str:
        # If the panel's form has no model, this is "ollama:", which `parse` refuses.
        has_colon = self.target or self.kind is JudgeKind.MODEL
        return f"{self.kind}:{self.target}" if has_colon else str(self.kind)


def is_reserved(name: str) -> bool:
    """Return whether only the judges `rules` and `ollama:MODEL` may use this name. Ignores case."""
    folded = name.casefold()
    return folded == JudgeKind.RULES or folded.startswith(f"{JudgeKind.MODEL}:")


def _invalid(text: object) -> InvalidOption:
    return InvalidOption(
        "with",
        f"takes rules, command:PROGRAM or ollama:MODEL (got {str(text)[:80]!r}); "
        'for example --with command:"python my_judge.py". command without a program uses TIPBENCH_JUDGE_COMMAND.',
    )
