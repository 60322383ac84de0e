"""Markdown tables, code blocks and readable JSON for docs/generate.py."""  # noqa: INP001 - as there

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def fenced(language: str, text: str) -> str:
    """Return a Markdown code block."""
    return f"```{language}\n{text}\n```"


def pretty(value: Any) -> str:
    """Return indented JSON in which values that fit on one line stay on it."""
    return "\n".join(_lines(value, "", ""))


def _lines(value: Any, indent: str, key: str) -> Iterator[str]:
    short = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(key) + len(short) <= 110 or not isinstance(value, dict | list) or not value:
        yield f"{indent}{key}{short}"
        return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    yield f"{indent}{key}{opening}"
    parts = value.items() if isinstance(value, dict) else [("", each) for each in value]
    for at, (name, each) in enumerate(parts, start=1):
        *before, last = _lines(each, f"{indent}  ", f"{json.dumps(name)}: " if isinstance(value, dict) else "")
        yield from before
        yield last if at == len(value) else f"{last},"
    yield f"{indent}{closing}"
