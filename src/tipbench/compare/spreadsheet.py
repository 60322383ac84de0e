"""CSV that a spreadsheet reads and does not run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence


def guarded(value: object) -> object:
    """A CSV cell that a spreadsheet will not run: a text that looks like a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A header and rows; unknown is an empty cell, numbers are not rounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([guarded(column) for column in columns])
    writer.writerows([guarded(value) for value in row] for row in rows)
    return out.getvalue()
