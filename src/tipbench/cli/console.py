"""Console output: results on stdout, messages on stderr; tables or JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tipbench.text import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 10_000  # characters; tables are not wrapped when stdout is a pipe


class _TolerantFile(io.FileIO):
    """A standard stream that ignores write errors: `tipbench collect 2>&1 | head` continues after `head` has ended."""

    def __init__(self, descriptor: int, ignored: type[OSError]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._ignored = ignored

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except self._ignored:
            return len(data)


def wrap_streams() -> None:
    """Replace stdout and stderr at startup, so that a closed pipe does not end a command or change its exit code."""
    sys.stdout = _tolerant_stream(sys.stdout, 1, BrokenPipeError)  # other errors are raised, because results are lost
    sys.stderr = _tolerant_stream(sys.stderr, 2, OSError)  # messages may be lost, results may not


def _tolerant_stream(stream: TextIO | None, descriptor: int, ignored: type[OSError]) -> TextIO:
    if stream is not None and not isinstance(stream, io.TextIOWrapper):
        return stream  # a test has replaced it
    if stream is None:  # closed at startup: the next opened file must not get its descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
    return io.TextIOWrapper(
        io.BufferedWriter(_TolerantFile(descriptor, ignored)),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",  # model output may not be encodable
        line_buffering=stream.line_buffering if stream else True,
        write_through=stream.write_through if stream else False,
    )


def make_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout, for results, or on stderr, for progress."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PIPE_WIDTH)


def print_message(text: str) -> None:
    """Print a message to stderr. Control characters are escaped, because it may quote a model or a server."""
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(printable_lines(text), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print indented JSON to stdout. Non-ASCII characters are escaped unless the encoding is UTF-8."""
    is_utf8 = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    text = json.dumps(value, indent=2, ensure_ascii=not is_utf8, default=str)
    # UTF-8 cannot encode lone surrogates; "backslashreplace" writes them as \udXXX, which is also their JSON escape.
    print(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    text_columns: Collection[str] = (),
    n_always_shown: int | None = None,
    all_columns_option: str = "--json",
) -> None:
    """Print a table to stdout. `text_columns` are left-aligned, others right-aligned.

    If the terminal is too narrow, columns after the first `n_always_shown` (default: all) are dropped from the right.
    A message then lists them with the option that prints all columns.
    """
    from rich.measure import Measurement

    rows = list(rows)
    console = make_console()
    # rich measures no more than the width in its options. With the terminal's width, no table would seem too wide.
    wide_options = console.options.update(max_width=_PIPE_WIDTH)
    n_shown = len(columns)
    min_shown = n_shown if n_always_shown is None else n_always_shown
    table = _make_table(columns, rows, text_columns)
    while n_shown > min_shown and Measurement.get(console, wide_options, table).maximum > console.width:
        n_shown -= 1
        table = _make_table(columns[:n_shown], rows, text_columns)
    if console.is_terminal:
        console.print(table)
    else:  # no spaces at the ends of lines
        with console.capture() as captured:
            console.print(table)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    sys.stdout.flush()  # before the message on stderr
    if dropped := columns[n_shown:]:
        print_message(f"the terminal is too narrow for {', '.join(dropped)}; {all_columns_option} has all columns")


def _make_table(columns: Sequence[str], rows: Iterable[Sequence[object]], text_columns: Collection[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(entry_text(value)) for value in row[: len(columns)]))
    return table


def entry_text(value: object) -> str:
    """Return a value as text for a table; None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return printable(str(value))
