"""Tips out of plain text: numbered lists, bullets, and lines such as "Tip 1: …" with "Rationale: …" below. Pure.

Prose is never a tip. Lines that say "tip" or carry a number are taken; bullets only where there are none of those.
What stands below a tip completes it when it ends in a colon or in the middle of a sentence, else it is its rationale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

MAX_LINES = 20_000  # what follows is not read

_EMPHASIS = re.compile(r"\*\*|__|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)")
_HEADING = re.compile(r"(?:#{1,6}|>)\s++")
_MARKER = re.compile(r"(?:\(?(?P<number>\d{1,3})(?:[.):]|\ufe0f?\u20e3)|(?P<bullet>[-*•‣◦▪–—·+]))\s++")
_LABEL = re.compile(
    r"(?:productivity )?(?:tip|suggestion|advice|recommendation)(?:\s?#?\d{1,3}\s?[:.)–—-]|\s?[:–—])\s*+", re.IGNORECASE
)
_WHY_WORDS = r"(?:rationale|reason(?:ing)?|explanation|benefit|why(?: (?:it|this)(?: works| helps| matters)?)?)"
_WHY = re.compile(rf"(?:{_WHY_WORDS}|because)\s?\d{{0,3}}\s?[:–—]\s*+", re.IGNORECASE)
_WHY_INSIDE = re.compile(rf"(?<=[\s(]){_WHY_WORDS}\s?:\s*+", re.IGNORECASE)
_BARE_LABEL = re.compile(r"\W*+(?:productivity )?tips?\W*+\d{0,3}\W*+", re.IGNORECASE)
_QUOTES = {'"': '"', "“": "”", "'": "'", "‘": "’", "«": "»"}
_CODE = ("{", "}", "[", "]", '"', "```")


class _Kind(Enum):
    LABEL = "label"
    NUMBER = "number"
    BULLET = "bullet"
    WHY = "why"
    PLAIN = "plain"
    BLANK = "blank"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class _Line:
    kind: _Kind
    text: str = ""
    indented: bool = False


@dataclass
class _Item:
    parts: list[str]
    why: str = ""
    why_said: bool = False  # by the word, not by its place

    @property
    def unfinished(self) -> bool:
        return not self.parts or self.parts[-1][-1].isalnum() or self.parts[-1][-1] in ",;"

    def text(self) -> str:
        """The parts in one line; a headline and what follows it are joined by a colon."""
        joined = self.parts[:1]
        for before, part in zip(self.parts, self.parts[1:], strict=False):
            joined.append((": " if before[-1].isalnum() and part[0].isupper() else " ") + part)
        return "".join(joined)


def list_tips(text: str) -> list[tuple[str, str]]:
    """Tip and rationale of every list item; empty for plain prose."""
    lines = [_read(line) for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n", MAX_LINES)[:MAX_LINES]]
    items = _Collector(_tip_kinds(lines))
    for line in lines:
        items.add(line)
    return list(_finished(items.found))


def split_label(text: str) -> tuple[str, bool]:
    """The text without a leading "Tip 1:" or "Rationale:", and whether it is a rationale."""
    why = _WHY.match(text)
    label = why or _LABEL.match(text)
    return (text[label.end() :] if label else text), why is not None


def says_something(text: str) -> bool:
    """Two words at least (or a script that may not part its words), and more than "Tip 1"."""
    if _BARE_LABEL.fullmatch(text) or not any(map(str.isalpha, text)):
        return False
    return len(text.split(maxsplit=1)) > 1 or not text.isascii()


def _read(raw: str) -> _Line:
    bare = raw.strip()
    if not bare:
        return _Line(_Kind.BLANK)
    if bare.startswith(_CODE):
        return _Line(_Kind.CODE)
    line = _EMPHASIS.sub("", bare)
    heading = _HEADING.match(line)
    line = line[heading.end() :] if heading else line
    marker = _MARKER.match(line)
    line = line[marker.end() :].strip() if marker else line.strip()
    text, is_why = split_label(line)
    if is_why:
        kind = _Kind.WHY
    elif len(text) < len(line):
        kind = _Kind.LABEL
    elif marker:
        kind = _Kind.NUMBER if marker["number"] else _Kind.BULLET
    else:
        kind = _Kind.PLAIN
    return _Line(kind, text.strip(), raw[0].isspace())


def _tip_kinds(lines: list[_Line]) -> frozenset[_Kind]:
    labels = sum(line.kind is _Kind.LABEL for line in lines)
    if labels > 1:
        return frozenset({_Kind.LABEL})
    if labels or any(line.kind is _Kind.NUMBER for line in lines):
        return frozenset({_Kind.LABEL, _Kind.NUMBER})
    return frozenset({_Kind.BULLET})


@dataclass
class _Collector:
    kinds: frozenset[_Kind]
    found: list[_Item] = field(default_factory=list)
    current: _Item | None = None
    gap: bool = False
    why_next: bool = False

    def add(self, line: _Line) -> None:
        if line.kind is _Kind.BLANK:
            self.gap = True
            return
        if line.kind in self.kinds:
            self.current = _Item([line.text] if line.text else [])
            self.found.append(self.current)
            self.why_next = False
        elif line.kind is _Kind.CODE:
            self.current = None
        elif self.current is not None:
            self._below(self.current, line)
        self.gap = False

    def _below(self, item: _Item, line: _Line) -> None:
        if line.kind is _Kind.WHY or self.why_next:
            self.why_next = not line.text
            if not item.why_said and line.text:
                item.why, item.why_said = line.text, True
        elif not line.text:
            return
        elif not item.parts or item.parts[-1].endswith(":"):
            item.parts.append(line.text)
        elif line.kind is _Kind.PLAIN and self.gap and not line.indented:
            self.current = None  # closing words
        elif line.kind is _Kind.PLAIN and item.unfinished:
            item.parts.append(line.text)
        elif not item.why:
            item.why = line.text


def _finished(items: list[_Item]) -> Iterator[tuple[str, str]]:
    for item in items:
        tip, why = item.text(), item.why
        inside = _WHY_INSIDE.search(tip)
        if inside and inside.start() > 0:
            tip, why = tip[: inside.start()].rstrip(" (-–—"), tip[inside.end() :].rstrip(")") or why
        tip = _unquoted(tip.strip())
        if says_something(tip) and not tip.endswith(":"):
            yield tip, _unquoted(why.strip())


def _unquoted(text: str) -> str:
    quoted = len(text) > 1 and _QUOTES.get(text[0]) == text[-1]
    return text[1:-1].strip() if quoted else text
