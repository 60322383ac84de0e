"""Console output: results on stdout, messages and progress on stderr; tables or JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from tipbench.text import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 10_000  # do not wrap tables when stdout is a pipe


class _Outlet(io.FileIO):
    """A standard stream that discards output after a write error, as in `tipbench collect 2>&1 | head`."""

    def __init__(self, number: int, forgiven: type[OSError]) -> None:
        super().__init__(number, "w", closefd=False)
        self._forgiven = forgiven

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except self._forgiven:
            return len(data)


def wrap_streams() -> None:
    """Replace stdout and stderr once at startup, so that write errors do not end a run or change its exit code.

    On stderr every OSError is ignored; on stdout, which carries results, only a broken pipe.
    """
    sys.stdout = _settled(sys.stdout, 1, BrokenPipeError)
    sys.stderr = _settled(sys.stderr, 2, OSError)


def _settled(stream: TextIO | None, number: int, forgiven: type[OSError]) -> TextIO:
    if stream is not None and not isinstance(stream, io.TextIOWrapper):
        return stream
    if stream is None:  # closed by the caller; a file opened later must not reuse the descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(number, forgiven)),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",  # model output may not be encodable
        line_buffering=stream.line_buffering if stream else True,
        write_through=stream.write_through if stream else False,
    )


def out() -> Console:
    """Return a console for results, on stdout."""
    return _console(stderr=False)


def err() -> Console:
    """Return a console for progress and messages, on stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PIPE_WIDTH)


def print_message(text: str) -> None:
    """Print a message to stderr, with control characters escaped, as it may quote a model or a server."""
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(printable_lines(text), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print indented JSON to stdout; non-ASCII characters are escaped unless the encoding is UTF-8."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(value, indent=2, ensure_ascii=not unicode, default=str)
    print(text.encode("utf-8", "backslashreplace").decode("utf-8"))  # lone surrogates become JSON escapes


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    text: Collection[str] = (),
    keep: int | None = None,
) -> list[str]:
    """Print a table to stdout: columns in `text` left-aligned, others right-aligned; markup is not interpreted.

    On a narrow terminal, columns after the first `keep` are dropped from the right; returns the dropped columns.
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


def print_dropped_columns(columns: Sequence[str], where: str) -> None:
    """Print which columns were dropped, and which option shows them."""
    if columns:
        print_message(f"the terminal is too narrow for {', '.join(columns)}; {where} has all columns")


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
    """Format a value for a table; None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return printable(str(value))


def percent(share: float | None) -> str | None:
    """Format a fraction as a percentage, such as 42%."""
    return None if share is None else f"{share:.0%}"


_LINE_EVERY_S = 5.0
_BAR_FROM = 5  # no bar for fewer steps

Count = Callable[[int, int], None]  # done, total


@contextmanager
def progress_counter(what: str) -> Iterator[Count]:
    """Show progress on stderr; yields a function to call with (done, total)."""
    if sys.stderr.isatty():
        with _bar(what) as count:
            yield count
    else:
        yield _lines(what)


def _lines(what: str) -> Count:
    next_at = time.monotonic() + _LINE_EVERY_S

    def count(done: int, of: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at and done < of:
            next_at = time.monotonic() + _LINE_EVERY_S
            print_message(f"{what}: {done} of {of}")

    return count


@contextmanager
def _bar(what: str) -> Iterator[Count]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True) as progress:
        task = progress.add_task(what, visible=False)
        yield lambda done, of: progress.update(task, completed=done, total=of, visible=of >= _BAR_FROM)
