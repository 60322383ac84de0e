"""Where output goes: results on stdout, everything else on stderr; tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 200  # a pipe has no width; do not fold tables for it


def out() -> Console:
    """The console for results."""
    return _console(stderr=False)


def err() -> Console:
    """The console for progress and messages."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PLAIN_WIDTH)


def say(text: str) -> None:
    """A message for people, on stderr. Never markup: it may quote a model or a server."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> None:
    """A table on stdout; the first `left` columns are text, the others numbers. Cells are never read as markup."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell_text(cell)) for cell in row))
    out().print(table)


def cell_text(value: object) -> str:
    """How a value stands in a table: unknown is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return safe_line(str(value))


def safe_line(text: str) -> str:
    """Text of unknown origin on one line, without anything a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)


def safe_text(text: str) -> str:
    """The same for texts of several lines."""
    return "\n".join(safe_line(line) for line in text.split("\n"))


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return "under 1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def gibibytes(count: int | None) -> str | None:
    return None if count is None else f"{count / 2**30:.1f} GiB"
