"""HTML for the panel and the report: escaping, formats, the Jinja environment with its macros, and style sheets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tipbench.text import percent as plain_percent
from tipbench.text import plural

NOTHING = "–"
MINUS = "−"
_NBSP = "\u00a0"
# Invisible characters, and those that reorder the surrounding text.
_INVISIBLE = re.compile("[\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\U000e0000-\U000e007f]")
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NEWLINES = re.compile("\r\n?")
_QUOTED = re.compile("`([^`]{1,200})`")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def text(value: str) -> Markup:
    """Escape untrusted text for HTML and replace characters that HTML does not allow."""
    allowed = _NOT_TEXT.sub("\ufffd", _NEWLINES.sub("\n", value))
    return Markup(escape(allowed, quote=True))  # noqa: S704 - just escaped


def visible(value: object) -> Markup:
    """Escape untrusted text, and show invisible and bidirectional control characters as code points."""
    shown = str(value)
    if shown.isprintable():  # nothing to replace; faster for large tables
        return Markup(escape(shown, quote=True))  # noqa: S704 - just escaped
    return text(_INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", shown))


def number(value: float | None, digits: int = 2) -> str:
    """Format a number as 1,234.50; integers have no decimals."""
    if value is None or not math.isfinite(value):
        return NOTHING
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"
    return shown.replace("-", MINUS)


def signed(value: float | None, digits: int = 2) -> str:
    """Format a number as +0.50 or −0.50; ±0.00 if it rounds to zero."""
    if value is None or not math.isfinite(value):
        return NOTHING
    rounded = round(value, digits)
    sign = "±"
    if rounded != 0:
        sign = "+" if rounded > 0 else MINUS
    return f"{sign}{abs(rounded):,.{digits}f}"


def percent(value: float | None) -> str:
    """Format a share as 42 %; 0 % and 100 % only if they are exact."""
    shown = plain_percent(value) if value is not None and math.isfinite(value) else None
    return NOTHING if shown is None else shown.replace(" ", _NBSP)


def duration(seconds: float | None) -> str:
    """Format seconds as <1 ms, 340 ms, 2.4 s, 3 min 20 s, 2 h 5 min or 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0:
        return MINUS + duration(-seconds)
    if seconds < 1:
        return f"<1{_NBSP}ms" if 0 < seconds < 0.0005 else f"{seconds * 1000:.0f}{_NBSP}ms"
    if seconds < 9.95:  # just above, one decimal would give 10.0
        return f"{seconds:.1f}{_NBSP}s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}{_NBSP}s"
    if whole < _HOUR:
        return _two_units(whole, _MINUTE, "min", 1, "s")
    if whole < _DAY:
        return _two_units(whole, _HOUR, "h", _MINUTE, "min")
    return _two_units(whole, _DAY, "d", _HOUR, "h")


def when(value: str | float | None, style: Literal["minutes", "seconds", "ago"] = "minutes") -> Markup | str:
    """Return a `<time>` element in UTC for an ISO string or a Unix timestamp; a dash if it is missing or invalid.

    `site.js` shows the local time instead, or in the style `ago` a recent time as "2 min ago".
    """
    moment = _moment(value)
    if moment is None:
        return NOTHING
    exact = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    shown = moment.strftime("%d %b %Y, %H:%M:%S" if style == "seconds" else "%d %b %Y, %H:%M").lstrip("0")
    return Markup('<time datetime="{}" data-style="{}">{} UTC</time>').format(exact, style, shown.replace(" ", _NBSP))


def clock(seconds: float) -> str:
    """Format seconds as 0:05, 12:05 or 1:02:05; `job.js` continues the count in the browser."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def lines(value: object) -> Markup:
    """Escape a message, keeping line breaks and showing text in backticks as code."""
    # `str`, because `sub` on a Markup would escape the tags that it adds.
    shown = (_QUOTED.sub(r"<code>\1</code>", str(visible(line))) for line in str(value).splitlines())
    return Markup("<br>").join(Markup(line) for line in shown)  # noqa: S704 - escaped by `visible`


def _two_units(whole: int, large: int, large_name: str, small: int, small_name: str) -> str:
    first, rest = divmod(whole, large)
    second = rest // small
    return f"{first}{_NBSP}{large_name}" + (f" {second}{_NBSP}{small_name}" if second else "")


def _moment(value: str | float | None) -> datetime | None:
    if value is None:
        return None
    try:
        if not isinstance(value, str):
            return datetime.fromtimestamp(value, UTC)
        moment = datetime.fromisoformat(value)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        return None


def environment(
    *packages: str, filters: Mapping[str, Any] | None = None, template_globals: Mapping[str, Any] | None = None
) -> Environment:
    """Return a Jinja environment with the templates of this package and of `packages`; all values are escaped."""
    jinja = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (__name__, *packages)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = (visible, number, signed, percent, duration, when, clock, lines, plural)
    jinja.filters |= {**{each.__name__: each for each in formats}, **(filters or {})}
    jinja.globals |= {"NOTHING": NOTHING, **(template_globals or {})}
    # Loaded last, so that the macros can use the filters and globals above.
    jinja.globals["ui"] = jinja.get_template("macros/ui.html").module
    return jinja


def static_folder(package: str = __name__) -> Traversable:
    """Return the folder with the style sheets and scripts of a package."""
    return files(package).joinpath("static")


def style_sheets(package: str = __name__, *names: str) -> str:
    """Return style sheets of a package as one text; by default those of every page."""
    chosen = names or ("tokens.css", "base.css", "components.css")
    return "".join(static_folder(package).joinpath(name).read_text("utf-8") for name in chosen)
