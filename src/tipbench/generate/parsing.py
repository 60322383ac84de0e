"""Parses raw answers into tips: strictly if they are the requested JSON, best effort otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from tipbench.generate.loose_json import Node, read_loose

MAX_TIPS = 200  # unless more were requested

_TIP_KEYS = frozenset(
    {"tip", "tips", "advice", "suggestion", "recommendation", "hint", "action", "tip text", "productivity tip"}
)
_WHY_KEYS = frozenset(
    {"rationale", "rational", "reason", "reasoning", "why", "explanation", "justification", "benefit"}
)
_HEAD_KEYS = frozenset({"title", "headline", "heading", "name"})
_BODY_KEYS = frozenset({"", "text", "description", "content", "body", "detail", "details", "message", "value"})
_MAX_KEY_CHARS = 40

_NOT_LETTERS = re.compile(r"[\W\d_]+")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NEWLINES = re.compile("\r\n?")
_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


@dataclass(frozen=True)
class Tip:
    """One candidate tip. The rationale is empty if none was given."""

    tip: str
    rationale: str = ""


@dataclass(frozen=True)
class Answer:
    """The tips of one raw answer, and whether it has exactly the requested format."""

    tips: tuple[Tip, ...]
    format_ok: bool


def parse_answer(raw: str, n_tips: int) -> Answer:
    """Parse the tips in a model's answer; never raises, and takes time linear in its length."""
    exact = _distinct(_parse_exact(raw, n_tips), n_tips)
    if exact and len(exact) == n_tips:
        return Answer(exact, format_ok=True)
    text = _without_thinking(raw)
    roots = read_loose(text)
    tips = [tip for root in roots for tip in _tips_in(root)]
    if not tips and not any(map(_names_tips, roots)):
        tips = _list_tips(text)
    cleaned = (Tip(_clean(tip.tip), _clean(tip.rationale)) for tip in tips)
    return Answer(_distinct(cleaned, max(MAX_TIPS, n_tips)), format_ok=False)


def is_overlong(tip: str, word_limit: int) -> bool:
    """Return whether a tip exceeds the word limit; words are split at whitespace and have a letter or digit."""
    return sum(any(map(str.isalnum, word)) for word in tip.split()) > word_limit


def tips_json(tips: Iterable[Tip]) -> str:
    """Return the tips as a compact JSON list without escapes; lone surrogates are left for the store to escape."""
    listed = [{"tip": tip.tip, "rationale": tip.rationale} for tip in tips]
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":"))


def _parse_exact(raw: str, n_tips: int) -> list[Tip]:
    """Return the valid tips of a JSON list of the requested length, duplicates included; else an empty list."""
    try:  # objects become tuples of pairs, so that a duplicate key is noticed
        value: object = json.loads(
            raw, object_pairs_hook=tuple, parse_constant=_reject_constant, parse_int=_ignored, parse_float=_ignored
        )
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, list) or len(value) != n_tips:
        return []
    tips = []
    for pairs in value:
        keys = sorted(key for key, _ in pairs) if isinstance(pairs, tuple) else []
        if keys == ["rationale", "tip"] and all(isinstance(text, str) for _, text in pairs):
            tip, rationale = (_clean(dict(pairs)[key]) for key in ("tip", "rationale"))
            if tip and rationale:
                tips.append(Tip(tip, rationale))
    return tips


def _reject_constant(constant: str) -> object:
    """Reject NaN and Infinity, which Python accepts although they are not JSON."""
    raise ValueError(constant)


def _ignored(_number: str) -> None:
    """Discard a number: Python refuses to convert one of 5000 digits, and none is needed."""


def _distinct(tips: Iterable[Tip], limit: int) -> tuple[Tip, ...]:
    kept: dict[str, Tip] = {}
    for tip in tips:
        if len(kept) >= limit:
            break
        folded = " ".join(tip.tip.split()).casefold()
        if folded:
            kept.setdefault(folded, tip)
    return tuple(kept.values())


def _clean(text: str) -> str:
    return _CONTROLS.sub("", _NEWLINES.sub("\n", text)).strip()


def _without_thinking(raw: str) -> str:
    """Remove `<think>` blocks; a closing tag alone ends a block that the prompt opened."""
    kept: list[str] = []
    pos, inside, any_block = 0, False, False
    for tag in _THINK.finditer(raw):
        closing = bool(tag[1])
        if not closing and not inside:
            kept.append(raw[pos : tag.start()])
            inside = any_block = True
        elif closing and (inside or not any_block):
            pos, inside, any_block = tag.end(), False, True
    return "".join(kept) + ("" if inside else raw[pos:])


def _normalise_key(key: str) -> str:
    """Normalise a key: `Tip_1` and `TIP` become `tip`; `tip_id` does not."""
    return _NOT_LETTERS.sub(" ", key).strip().casefold() if len(key) <= _MAX_KEY_CHARS else key


def _names_tips(node: Node) -> bool:
    return any(_normalise_key(key) in _TIP_KEYS for key in node.keys) or any(
        _names_tips(entry) for _, entry in node.entries if isinstance(entry, Node)
    )


def _tips_in(node: Node, label: str = "") -> list[Tip]:
    """Return the tips of a node: from keys that name tips, else from nested nodes, else from its other keys."""
    texts = [
        (None if key is None else _normalise_key(key), value) for key, value in node.entries if isinstance(value, str)
    ]
    named = [(key, text) for key, text in texts if key is not None]
    reason = next((text for key, text in named if key in _WHY_KEYS), "")
    if any(key in _TIP_KEYS for key, _ in named):
        return _named_tips(named)
    if named and len(named) < len(texts) and all(key in _WHY_KEYS for key, _ in named):
        # ["Do this", "rationale": "that"]
        return _named_tips([("tip" if key is None else key, text) for key, text in texts])
    deeper = [
        tip
        for key, value in node.entries
        if isinstance(value, Node)
        for tip in _tips_in(value, label if key is None else _normalise_key(key))
    ]
    if deeper:
        if len(deeper) == 1 and not deeper[0].rationale:  # the outer object may have the reason
            return [Tip(deeper[0].tip, reason)]
        return deeper
    if named:
        return _described_tip(named, reason, announced=label in _TIP_KEYS)
    return _plain_tips(text for _, text in texts) if label == "" or label in _TIP_KEYS else []


def _named_tips(named: list[tuple[str, str]]) -> list[Tip]:
    """Pair each `tip` key with its rationale; one object may hold several (`tip1`, `rationale1`, `tip2` …)."""
    tips: list[Tip] = []
    waiting = ""
    for key, text in named:
        if key in _TIP_KEYS:
            tips.append(Tip(text, waiting))
            waiting = ""
        elif key in _WHY_KEYS or key in _BODY_KEYS:
            if tips and not tips[-1].rationale:
                tips[-1] = Tip(tips[-1].tip, text)
            else:
                waiting = text
    return tips


def _described_tip(named: list[tuple[str, str]], reason: str, *, announced: bool) -> list[Tip]:
    """Build a tip from a title and a description, or either with a reason.

    A title alone is a tip only if it is `announced`: if the key of the enclosing object names tips.
    """
    head = next((_split_label(text)[0] for key, text in named if key in _HEAD_KEYS), "")
    body = next((_split_label(text)[0] for key, text in named if key in _BODY_KEYS), "")
    if not _is_meaningful(head):
        head = ""
    if not (body or reason or announced):
        return []
    tip = head or body
    if head and body:
        tip = f"{head} {body}" if head[-1] in ".!?:" else f"{head}: {body}"
    return [Tip(tip, reason)] if _is_meaningful(tip) else []


def _plain_tips(texts: Iterable[str]) -> list[Tip]:
    """Parse an array of strings, some of which may be labelled as the rationale of the previous one."""
    tips: list[Tip] = []
    for text in texts:
        content, is_why = _split_label(text.strip())
        if is_why and tips:
            tips[-1] = Tip(tips[-1].tip, content)
        elif not is_why and _is_meaningful(content):
            tips.append(Tip(content))
    return tips


MAX_LINES = 20_000  # the rest is ignored

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
    LABEL = auto()
    NUMBER = auto()
    BULLET = auto()
    WHY = auto()
    PLAIN = auto()
    BLANK = auto()
    CODE = auto()


@dataclass(frozen=True, slots=True)
class _Line:
    kind: _Kind
    text: str = ""
    indented: bool = False


@dataclass
class _Item:
    parts: list[str]
    why: str = ""
    why_labelled: bool = False  # by its label, not by its position

    @property
    def unfinished(self) -> bool:
        return not self.parts or self.parts[-1][-1].isalnum() or self.parts[-1][-1] in ",;"

    def tip(self) -> Tip | None:
        """Join the parts, with a colon between a headline and what follows it; None if the item is not a tip."""
        joined = self.parts[:1]
        for before, part in pairwise(self.parts):
            joined.append((": " if before[-1].isalnum() and part[0].isupper() else " ") + part)
        text, why = "".join(joined), self.why
        inside = _WHY_INSIDE.search(text)
        if inside and inside.start() > 0:
            text, why = text[: inside.start()].rstrip(" (-–—"), text[inside.end() :].rstrip(")") or why
        text = _unquoted(text.strip())
        return Tip(text, _unquoted(why.strip())) if _is_meaningful(text) and not text.endswith(":") else None


def _list_tips(text: str) -> list[Tip]:
    """Return the tip of every list item; empty for plain prose."""
    lines = [
        _classify_line(line)
        for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n", MAX_LINES)[:MAX_LINES]
    ]
    labels = sum(line.kind is _Kind.LABEL for line in lines)
    kinds = {_Kind.BULLET}  # of the lines that begin a tip
    if labels or any(line.kind is _Kind.NUMBER for line in lines):
        kinds = {_Kind.LABEL} if labels > 1 else {_Kind.LABEL, _Kind.NUMBER}
    items: list[_Item] = []
    current: _Item | None = None
    gap = why_next = False  # a blank line came before; the rationale is on the next line
    for line in lines:
        if line.kind is _Kind.BLANK:
            gap = True
            continue
        if line.kind in kinds:
            current = _Item([line.text] if line.text else [])
            items.append(current)
            why_next = False
        elif line.kind is _Kind.CODE or current is None:
            current = None
        elif line.kind is _Kind.WHY or why_next:
            why_next = not line.text
            if line.text and not current.why_labelled:
                current.why, current.why_labelled = line.text, True
        elif not line.text:
            pass
        elif not current.parts or current.parts[-1].endswith(":"):
            current.parts.append(line.text)
        elif line.kind is _Kind.PLAIN and gap and not line.indented:
            current = None  # closing remarks
        elif line.kind is _Kind.PLAIN and current.unfinished:
            current.parts.append(line.text)
        elif not current.why:
            current.why = line.text
        gap = False
    return [tip for item in items if (tip := item.tip()) is not None]


def _split_label(text: str) -> tuple[str, bool]:
    """Return the text without a leading "Tip 1:" or "Rationale:", and whether it is a rationale."""
    why = _WHY.match(text)
    label = why or _LABEL.match(text)
    return (text[label.end() :] if label else text), why is not None


def _is_meaningful(text: str) -> bool:
    """Return whether a text is more than "Tip 1": at least two words, or a script that may not separate words."""
    if _BARE_LABEL.fullmatch(text) or not any(map(str.isalpha, text)):
        return False
    return len(text.split(maxsplit=1)) > 1 or not text.isascii()


def _classify_line(raw: str) -> _Line:
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
    text, is_why = _split_label(line)
    if is_why:
        kind = _Kind.WHY
    elif len(text) < len(line):
        kind = _Kind.LABEL
    elif marker:
        kind = _Kind.NUMBER if marker["number"] else _Kind.BULLET
    else:
        kind = _Kind.PLAIN
    return _Line(kind, text.strip(), raw[0].isspace())


def _unquoted(text: str) -> str:
    quoted = len(text) > 1 and _QUOTES.get(text[0]) == text[-1]
    return text[1:-1].strip() if quoted else text
