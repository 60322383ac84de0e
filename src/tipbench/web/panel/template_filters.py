"""Template filters for numbers, times and untrusted text; unknown values are shown as a dash."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from urllib.parse import quote

from markupsafe import Markup

from tipbench.compare.html import text as as_html

NOTHING = "–"
MINUS = "−"
_GAP = "\u00a0"
_MILLISECONDS = 100_000_000_000  # timestamps above are in milliseconds, below in seconds
# Invisible characters, and those that reorder the surrounding text.
_UNSEEN = re.compile("[\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\U000e0000-\U000e007f]")
_QUOTED = re.compile("`([^`]{1,200})`")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def visible(value: object) -> Markup:
    """Escapes untrusted text; invisible and bidirectional control characters are replaced by their code points."""
    named = _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", str(value))
    return Markup(as_html(named))  # noqa: S704 - as_html has just escaped it


def number(value: float | None, digits: int = 2) -> str:
    """Formats a number as 1,234.50; integers have no decimals."""
    if value is None or not math.isfinite(value):
        return NOTHING
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"
    return shown.replace("-", MINUS)


def signed(value: float | None, digits: int = 2) -> str:
    """Formats a number as +0.50 or −0.50; ±0.00 if it rounds to zero."""
    if value is None or not math.isfinite(value):
        return NOTHING
    rounded = round(value, digits) + 0.0
    sign = "+" if rounded > 0 else MINUS if rounded < 0 else "±"
    return f"{sign}{abs(rounded):,.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """Formats a fraction of 1 as 42 %."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value * 100:.{digits}f}{_GAP}%".replace("-", MINUS)


def bias_words(bias: float | None, digits: int = 2) -> str:
    """Formats a judge's bias as "0.40 too high"."""
    if bias is None:
        return "unknown"
    size = f"{abs(bias):.{digits}f}"
    return f"{size} too {'high' if bias > 0 else 'low'}" if float(size) else "even"


def duration(seconds: float | None) -> str:
    """Formats seconds as 340 ms, 2.4 s, 3 min 20 s, 2 h 5 min or 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0:
        return MINUS + duration(-seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f}{_GAP}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}{_GAP}s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}{_GAP}s"
    if whole < _HOUR:
        return _two(whole, _MINUTE, "min", 1, "s")
    return _two(whole, _HOUR, "h", _MINUTE, "min") if whole < _DAY else _two(whole, _DAY, "d", _HOUR, "h")


def when(value: str | float | datetime | None) -> Markup | str:
    """Returns a `<time>` element in UTC for an ISO string, a datetime, or seconds or milliseconds since 1970.

    `site.js` replaces it with the local time.
    """
    moment = _moment(value)
    if moment is None:
        return NOTHING
    exact, shown = moment.strftime("%Y-%m-%dT%H:%M:%SZ"), moment.strftime("%d %b %Y, %H:%M").lstrip("0")
    return Markup('<time datetime="{}">{} UTC</time>').format(exact, shown.replace(" ", _GAP))


def quote_path(value: object) -> str:
    """Quotes a path segment, including slashes."""
    return quote(str(value), safe="", errors="backslashreplace")


def experiment_path(name: str, *rest: str) -> str:
    """Returns the path of an experiment's page: experiment_path(name, "runs", run_id)."""
    return "/".join(["/experiments", *(quote_path(part) for part in (name, *rest))])


def lines(value: object) -> Markup:
    """Escapes a message, keeping line breaks and showing text in backticks as code."""
    shown = (_QUOTED.sub(r"<code>\1</code>", visible(line)) for line in str(value).splitlines())
    return Markup("<br>").join(Markup(line) for line in shown)  # noqa: S704 - made visible, hence escaped


def _two(whole: int, large: int, large_name: str, small: int, small_name: str) -> str:
    first, rest = divmod(whole, large)
    second = rest // small
    return f"{first}{_GAP}{large_name}" + (f" {second}{_GAP}{small_name}" if second else "")


def _moment(value: str | float | datetime | None) -> datetime | None:
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
        if value is None:
            return None
        return datetime.fromtimestamp(value / 1000 if value > _MILLISECONDS else value, UTC)
    except (ValueError, OverflowError, OSError):
        return None
