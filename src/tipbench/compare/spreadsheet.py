"""CSV that a spreadsheet reads and does not run."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")  # but tab and newline


def guarded(value: object) -> object:
    """A CSV cell that a spreadsheet will not run: a text that looks like a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A header and rows; unknown is an empty cell, numbers are not rounded.

    Control characters become visible: a board on a terminal must not move its cursor, whatever a model is called.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_shown(column) for column in columns])
    writer.writerows([_shown(value) for value in row] for row in rows)
    return out.getvalue()


def _shown(value: object) -> object:
    safe = guarded(value)
    return _HIDDEN.sub("\ufffd", safe) if isinstance(safe, str) else safe
