"""Where output goes: results on stdout, everything else on stderr; tables for people, JSON for programs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 10_000  # a pipe has no width; do not fold tables for it


class _Outlet(io.FileIO):
    """A standard stream whose reader may leave, as in `tipbench collect 2>&1 | head`: the rest goes nowhere."""

    def __init__(self, number: int, forgiven: type[OSError]) -> None:
        super().__init__(number, "w", closefd=False)
        self._forgiven = forgiven

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except self._forgiven:
            return len(data)


def settle_streams() -> None:
    """Once, at the start of the process: what cannot be printed ends no run and changes no exit code.

    On stderr whatever happens is forgiven; on stdout, where results go, only that the reader has left.
    """
    sys.stdout = _settled(sys.stdout, 1, BrokenPipeError)
    sys.stderr = _settled(sys.stderr, 2, OSError)


def _settled(stream: TextIO | None, number: int, forgiven: type[OSError]) -> TextIO:
    if stream is not None and not isinstance(stream, io.TextIOWrapper):
        return stream
    if stream is None:  # closed by the caller; a file opened later must not get its number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(number, forgiven)),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",  # a model may write what this terminal cannot show
        line_buffering=stream.line_buffering if stream else True,
        write_through=stream.write_through if stream else False,
    )


def out() -> Console:
    """The console for results."""
    return _console(stderr=False)


def err() -> Console:
    """The console for progress and messages."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PIPE_WIDTH)


def say(text: str) -> None:
    """A message for people, on stderr. It may quote a model or a server, so nothing in it is obeyed."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more: no reason to stop working
        print(safe_text(text), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Indented JSON on stdout, readable where the stream can show every character."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(value, indent=2, ensure_ascii=not unicode, default=str)
    print(text.encode("utf-8", "backslashreplace").decode("utf-8"))  # half a character becomes its JSON escape


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    text: Collection[str] = (),
    keep: int | None = None,
) -> list[str]:
    """A table on stdout: columns named in `text` to the left, numbers to the right; cells are never read as markup.

    On a terminal too narrow for all, columns after the first `keep` go, from the right; returns those that went.
    """
    from rich.measure import Measurement

    rows, console, shown = list(rows), out(), len(columns)
    unbounded = console.options.update(max_width=_PIPE_WIDTH)
    table = _table(columns, rows, text)
    while shown > (keep or shown) and Measurement.get(console, unbounded, table).maximum > console.width:
        shown -= 1
        table = _table(columns[:shown], rows, text)
    if console.is_terminal:
        console.print(table)
    else:
        with console.capture() as captured:
            console.print(table)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return list(columns[shown:])


def say_left_out(columns: Sequence[str], where: str) -> None:
    """Tell which columns a narrow terminal did not show, and which option has them."""
    if columns:
        say(f"the terminal is too narrow for {', '.join(columns)}; {where} has all columns")


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], text: Collection[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell_text(cell)) for cell in row[: len(columns)]))
    return table


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
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def safe_text(text: str) -> str:
    """The same for texts of several lines."""
    return "\n".join(safe_line(line) for line in text.split("\n"))


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return "under 1 s" if seconds else "0 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def file_size(count: int | None) -> str | None:
    """Bytes as people say them."""
    if not count:
        return None if count is None else "none"
    if count < 2**20:
        return "under 1 MiB"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def parameter_count(billions: float | None) -> str | None:
    """A model's parameters: 4.46B, 135M."""
    if not billions:
        return None if billions is None else "none"
    return f"{billions:.2f}B" if billions >= 1 else f"{billions * 1000:.0f}M"


def percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"
