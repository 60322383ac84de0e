"""Text for people: plurals, numbers, sizes and times. Also untrusted text, CSV and hashes."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import overload

_WHITESPACE = re.compile(r"\s+")
# Control characters (except tab and newline), text-direction characters, and surrogates
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# Words


def plural(n: int, noun: str, many: str | None = None) -> str:
    """Format a count with its noun: 1 cell, 2,400 cells. `many` is an irregular plural."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {many or noun + 's'}"


def capitalized(text: str) -> str:
    """Return the text with a capital first letter; unlike `str.capitalize`, the other letters stay as they are."""
    return f"{text[:1].upper()}{text[1:]}"


def join_names(names: Iterable[object], limit: int) -> str:
    """Join names as "a, b and c"; names beyond `limit` are only counted, as in "a, b and 3 more"."""
    texts = [str(name) for name in names]
    if len(texts) > limit:
        return f"{', '.join(texts[:limit])} and {len(texts) - limit} more"
    if len(texts) > 1:
        return f"{', '.join(texts[:-1])} and {texts[-1]}"
    return "".join(texts)


# Numbers


@overload
def number(value: float, spec: str = ".2f") -> str: ...
@overload
def number(value: float | None, spec: str = ".2f") -> str | None: ...
def number(value: float | None, spec: str = ".2f") -> str | None:
    """Format a number by `spec`, with the typographic minus sign (U+2212). None stays None."""
    return None if value is None else format(value, spec).replace("-", "−")


def interval(low: float | None, high: float | None, spec: str = ".2f") -> str | None:
    """Format an interval as "low to high"; None if either end is missing."""
    return None if low is None or high is None else f"{number(low, spec)} to {number(high, spec)}"


def percent(share: float | None) -> str | None:
    """Format a share as 42 %. Only exact values are shown as 0 % and 100 %; values close to them as <1 % and >99 %."""
    if share is None:
        return None
    if 0 < share <= 0.005:
        return "<1 %"
    if 0.995 <= share < 1:
        return ">99 %"
    return f"{share:.0%}".replace("%", " %")


def p_value(p: float | None) -> str | None:
    """Format a p-value with three decimals, below 0.001 as <0.001."""
    if p is None:
        return None
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def file_size(n_bytes: int | None) -> str | None:
    """Format a number of bytes as 1.2 GiB or 340 MiB."""
    if n_bytes is None:
        return None
    if n_bytes == 0:
        return "none"
    if n_bytes < 2**20:
        return "under 1 MiB"
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def parameter_count(billions: float | None) -> str | None:
    """Format a model's parameter count as 4.46B or 135M."""
    if billions is None:
        return None
    if billions == 0:
        return "none"
    return f"{billions:.2f}B" if billions >= 1 else f"{billions * 1000:.0f}M"


# Times


def duration(seconds: float | None) -> str:
    """Format seconds as 45 s, 12 min or 2.5 h."""
    if seconds is None:
        return "unknown"
    if seconds == 0:
        return "0 s"
    if seconds < 1:
        return "under 1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


@overload
def iso(seconds: float) -> str: ...
@overload
def iso(seconds: float | None) -> str | None: ...
def iso(seconds: float | None) -> str | None:
    """Format a Unix timestamp in ISO 8601, UTC: 2026-05-04T10:15:00.000Z."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Untrusted text


def printable(text: str, keep: str = "") -> str:
    """Replace non-printable characters, which a terminal could interpret, with spaces, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else " " for char in text)


def printable_lines(text: str) -> str:
    """Like `printable`, but keeps line breaks."""
    return printable(text, keep="\n")


def replace_controls(text: str) -> str:
    """Replace control characters (except tab and newline), text-direction characters and surrogates with U+FFFD."""
    return _CONTROLS.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Return the text on one line, with control and text-direction characters replaced."""
    return _WHITESPACE.sub(" ", replace_controls(text.replace("\r", " "))).strip()


def shorten(text: str, max_chars: int) -> str:
    """Truncate the text to `max_chars` characters, with an ellipsis at the end."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1].rstrip()}…"


def short_name(name: str, max_chars: int) -> str:
    """Return the name on one line, shortened in the middle: names often differ at the beginning or the end."""
    line = one_line(name)
    if len(line) <= max_chars:
        return line
    n_tail = (max_chars - 1) // 2
    n_head = max_chars - 1 - n_tail
    return f"{line[:n_head]}…{line[-n_tail:]}"


# CSV


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return CSV with a header. None becomes an empty field; numbers are not rounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_csv_value(column) for column in columns])
    writer.writerows([_csv_value(value) for value in row] for row in rows)
    return out.getvalue()


def _csv_value(value: object) -> object:
    """Return text that a spreadsheet does not evaluate as a formula, and that cannot control a terminal."""
    if not isinstance(value, str):
        return value
    is_formula = value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return replace_controls(f"'{value}" if is_formula else value)


# Hashes


def fingerprint(value: object, length: int = 64) -> str:
    """Return the first `length` hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
