"""Parses raw answers into tips: strictly if an answer is the requested JSON, else leniently."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from tipbench.generate.loose_json import Node, read_loose

MAX_TIPS = 200  # tips kept from an answer, unless more were requested

_TIP_KEYS = frozenset(
    {"tip", "tips", "advice", "suggestion", "recommendation", "hint", "action", "tip text", "productivity tip"}
)
_RATIONALE_KEYS = frozenset(
    {"rationale", "rational", "reason", "reasoning", "why", "explanation", "justification", "benefit"}
)
_TITLE_KEYS = frozenset({"title", "headline", "heading", "name"})
# `_normalise_key` makes "" of keys without letters, such as "1".
_DESCRIPTION_KEYS = frozenset({"", "text", "description", "content", "body", "detail", "details", "message", "value"})
_MAX_KEY_CHARS = 40  # longer keys are not normalised

_NOT_LETTERS = re.compile(r"[\W\d_]+")
_CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NEWLINES = re.compile("\r\n?")
_THINK_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


@dataclass(frozen=True)
class Tip:
    """One tip of an answer. The rationale is empty if the answer has none."""

    tip: str
    rationale: str = ""


@dataclass(frozen=True)
class Answer:
    """The tips of one raw answer, and whether it has exactly the requested format."""

    tips: tuple[Tip, ...]
    format_ok: bool


def parse_answer(raw: str, n_tips: int) -> Answer:
    """Parse the tips in a model's answer. Never raises, and takes time linear in the length of the answer."""
    exact = _distinct(_parse_exact(raw, n_tips), n_tips)
    if exact and len(exact) == n_tips:
        return Answer(exact, format_ok=True)
    text = _without_thinking(raw)
    roots = read_loose(text)
    tips = [tip for root in roots for tip in _tips_in(root)]
    # JSON with a tip key was meant to contain the tips, even if none is complete. Other lines are then not tips.
    if not tips and not any(map(_has_tip_key, roots)):
        tips = _list_tips(text)
    cleaned = (Tip(_clean(tip.tip), _clean(tip.rationale)) for tip in tips)
    return Answer(_distinct(cleaned, max(MAX_TIPS, n_tips)), format_ok=False)


def is_overlong(tip: str, word_limit: int) -> bool:
    """Return whether a tip has more words than the limit. A word without a letter or digit does not count."""
    words = [word for word in tip.split() if any(map(str.isalnum, word))]
    return len(words) > word_limit


def tips_json(tips: Iterable[Tip]) -> str:
    """Return the tips as compact JSON. Does not escape lone surrogates; the store does."""
    records = [{"tip": tip.tip, "rationale": tip.rationale} for tip in tips]
    return json.dumps(records, ensure_ascii=False, separators=(",", ":"))


def _parse_exact(raw: str, n_tips: int) -> list[Tip]:
    """Return the valid tips, duplicates included, if the answer is a JSON list of the requested length; else []."""
    try:  # objects become tuples of (key, value), so that duplicate keys are detected
        value: object = json.loads(
            raw,
            object_pairs_hook=tuple,
            parse_constant=_reject_constant,
            parse_int=_discard_number,
            parse_float=_discard_number,
        )
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, list) or len(value) != n_tips:
        return []
    tips = []
    for pairs in value:
        keys = sorted(key for key, _ in pairs) if isinstance(pairs, tuple) else []
        if keys == ["rationale", "tip"] and all(isinstance(text, str) for _, text in pairs):
            fields = dict(pairs)
            tip, rationale = _clean(fields["tip"]), _clean(fields["rationale"])
            if tip and rationale:
                tips.append(Tip(tip, rationale))
    return tips


def _reject_constant(constant: str) -> object:
    """Reject NaN and Infinity, which Python accepts although they are not JSON."""
    raise ValueError(constant)


def _discard_number(_number: str) -> None:
    """Discard a number. Tips need none, and Python does not convert numbers of more than 4300 digits."""


def _distinct(tips: Iterable[Tip], limit: int) -> tuple[Tip, ...]:
    """Return the first `limit` tips, without empty tips and duplicates. Case and whitespace are ignored."""
    kept: dict[str, Tip] = {}
    for tip in tips:
        if len(kept) >= limit:
            break
        folded = " ".join(tip.tip.split()).casefold()
        if folded:
            kept.setdefault(folded, tip)
    return tuple(kept.values())


def _clean(text: str) -> str:
    return _CONTROL_CHARS.sub("", _NEWLINES.sub("\n", text)).strip()


def _without_thinking(raw: str) -> str:
    """Remove `<think>` blocks. A closing tag without an opening tag ends a block that the prompt opened."""
    kept: list[str] = []
    block_end = 0
    inside = block_seen = False
    for tag in _THINK_TAG.finditer(raw):
        is_closing = bool(tag[1])
        if not is_closing and not inside:
            kept.append(raw[block_end : tag.start()])
            inside = block_seen = True
        elif is_closing and (inside or not block_seen):  # a lone closing tag counts only before the first block
            block_end = tag.end()
            inside, block_seen = False, True
    if not inside:
        kept.append(raw[block_end:])
    return "".join(kept)


def _normalise_key(key: str) -> str:
    """Normalise a key: `Tip_1` and `TIP` become `tip`, and `tip_id` becomes `tip id`."""
    if len(key) > _MAX_KEY_CHARS:
        return key
    return _NOT_LETTERS.sub(" ", key).strip().casefold()


def _has_tip_key(node: Node) -> bool:
    if any(_normalise_key(key) in _TIP_KEYS for key in node.keys):  # includes keys whose value is truncated
        return True
    return any(_has_tip_key(entry) for _, entry in node.entries if isinstance(entry, Node))


def _tips_in(node: Node, label: str = "") -> list[Tip]:
    """Return the tips of a node: the texts of its tip keys, else the tips of nested nodes, else its other texts.

    `label` is the normalised key of the node, or of the nearest enclosing node that has a key.
    """
    texts = [(key, value) for key, value in node.entries if isinstance(value, str)]
    keyed_texts = [(_normalise_key(key), text) for key, text in texts if key is not None]
    if any(key in _TIP_KEYS for key, _ in keyed_texts):
        return _keyed_tips(keyed_texts)
    has_text_without_key = len(keyed_texts) < len(texts)
    if keyed_texts and has_text_without_key and all(key in _RATIONALE_KEYS for key, _ in keyed_texts):
        # In ["Do this", "rationale": "that"] the text without a key is the tip.
        return _keyed_tips([("tip" if key is None else _normalise_key(key), text) for key, text in texts])
    rationale = next((text for key, text in keyed_texts if key in _RATIONALE_KEYS), "")
    nested: list[Tip] = []
    for key, value in node.entries:
        if isinstance(value, Node):
            nested += _tips_in(value, label if key is None else _normalise_key(key))
    if nested:
        if len(nested) == 1 and not nested[0].rationale:  # the outer object may have the rationale
            return [Tip(nested[0].tip, rationale)]
        return nested
    if keyed_texts:
        return _described_tip(keyed_texts, rationale, is_tip_value=label in _TIP_KEYS)
    if label == "" or label in _TIP_KEYS:  # "": no key, or a key without letters, such as "1"
        return _array_tips(text for _, text in texts)
    return []


def _keyed_tips(keyed_texts: list[tuple[str, str]]) -> list[Tip]:
    """Return a tip for each tip key, with its rationale. One object may have `tip1`, `rationale1`, `tip2` …

    A description counts as a rationale too.
    """
    tips: list[Tip] = []
    next_rationale = ""  # a rationale that precedes its tip
    for key, text in keyed_texts:
        if key in _TIP_KEYS:
            tips.append(Tip(text, next_rationale))
            next_rationale = ""
        elif key in _RATIONALE_KEYS or key in _DESCRIPTION_KEYS:
            if tips and not tips[-1].rationale:
                tips[-1] = Tip(tips[-1].tip, text)
            else:
                next_rationale = text
    return tips


def _described_tip(keyed_texts: list[tuple[str, str]], rationale: str, *, is_tip_value: bool) -> list[Tip]:
    """Return a tip from a title, a description, or both; [] if there is none.

    A title alone is a tip only with a rationale, or if the object is the value of a tip key.
    """

    def first_text(keys: frozenset[str]) -> str:
        text, _ = _split_label(next((text for key, text in keyed_texts if key in keys), ""))
        return text

    title, description = first_text(_TITLE_KEYS), first_text(_DESCRIPTION_KEYS)
    if not _is_meaningful(title):
        title = ""
    if not (description or rationale or is_tip_value):
        return []
    tip = title or description
    if title and description:
        tip = f"{title} {description}" if title[-1] in ".!?:" else f"{title}: {description}"
    return [Tip(tip, rationale)] if _is_meaningful(tip) else []


def _array_tips(texts: Iterable[str]) -> list[Tip]:
    """Parse an array of strings. A string labelled as a rationale belongs to the previous tip."""
    tips: list[Tip] = []
    for text in texts:
        content, is_rationale = _split_label(text.strip())
        if is_rationale and tips:
            tips[-1] = Tip(tips[-1].tip, content)
        elif not is_rationale and _is_meaningful(content):
            tips.append(Tip(content))
    return tips


MAX_LINES = 20_000  # lines of an answer that are parsed as a list; the rest is ignored

# The possessive quantifiers (`++`, `*+`) prevent backtracking, which could take quadratic time.
_EMPHASIS = re.compile(r"\*\*|__|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)")
_HEADING = re.compile(r"(?:#{1,6}|>)\s++")
# A number may also be a keycap emoji.
_MARKER = re.compile(r"(?:\(?(?P<number>\d{1,3})(?:[.):]|\ufe0f?\u20e3)|(?P<bullet>[-*•‣◦▪–—·+]))\s++")
_TIP_LABEL = re.compile(
    r"(?:productivity )?(?:tip|suggestion|advice|recommendation)(?:\s?#?\d{1,3}\s?[:.)–—-]|\s?[:–—])\s*+", re.IGNORECASE
)
_RATIONALE_WORDS = r"(?:rationale|reason(?:ing)?|explanation|benefit|why(?: (?:it|this)(?: works| helps| matters)?)?)"
_RATIONALE_LABEL = re.compile(rf"(?:{_RATIONALE_WORDS}|because)\s?\d{{0,3}}\s?[:–—]\s*+", re.IGNORECASE)
_INLINE_RATIONALE = re.compile(rf"(?<=[\s(]){_RATIONALE_WORDS}\s?:\s*+", re.IGNORECASE)
_ONLY_LABEL = re.compile(r"\W*+(?:productivity )?tips?\W*+\d{0,3}\W*+", re.IGNORECASE)
_QUOTES = {'"': '"', "“": "”", "'": "'", "‘": "’", "«": "»"}
_CODE_STARTS = ("{", "}", "[", "]", '"', "```")


class _LineKind(Enum):
    LABEL = auto()  # begins with "Tip 1:" or similar
    NUMBER = auto()
    BULLET = auto()
    RATIONALE = auto()  # begins with "Rationale:" or similar
    PLAIN = auto()
    BLANK = auto()
    CODE = auto()


@dataclass(frozen=True, slots=True)
class _Line:
    kind: _LineKind
    text: str = ""
    is_indented: bool = False


@dataclass
class _Item:
    """A list item: the lines of its tip, and its rationale."""

    parts: list[str]
    rationale: str = ""
    has_labelled_rationale: bool = False  # else the rationale was found by its position

    @property
    def is_unfinished(self) -> bool:
        """Whether the last part does not end a sentence."""
        last_char = self.parts[-1][-1]
        return last_char.isalnum() or last_char in ",;"

    def tip(self) -> Tip | None:
        """Join the parts, with a colon after a headline; None if the item is not a tip."""
        joined = self.parts[:1]
        for before, part in pairwise(self.parts):
            is_headline = before[-1].isalnum() and part[0].isupper()
            joined += [": " if is_headline else " ", part]
        text, rationale = "".join(joined), self.rationale
        if inline := _INLINE_RATIONALE.search(text):
            rationale = text[inline.end() :].rstrip(")") or rationale
            text = text[: inline.start()].rstrip(" (-–—")
        text = _unquote(text.strip())
        if not _is_meaningful(text) or text.endswith(":"):
            return None
        return Tip(text, _unquote(rationale.strip()))


def _list_tips(text: str) -> list[Tip]:
    """Return the tips of a list that is written as text; empty for prose."""
    raw_lines = _NEWLINES.sub("\n", text).split("\n", MAX_LINES)[:MAX_LINES]  # without the unsplit rest
    lines = [_classify_line(line) for line in raw_lines]
    n_labels = sum(line.kind is _LineKind.LABEL for line in lines)
    # The kinds of line that begin an item:
    if n_labels > 1:
        item_start_kinds = {_LineKind.LABEL}  # numbered lines are then details of a tip
    elif n_labels or any(line.kind is _LineKind.NUMBER for line in lines):
        item_start_kinds = {_LineKind.LABEL, _LineKind.NUMBER}  # a numbered line with a label has the kind LABEL
    else:
        item_start_kinds = {_LineKind.BULLET}
    items: list[_Item] = []
    current: _Item | None = None
    after_blank = False  # the previous line is blank
    rationale_next = False  # the previous line is only the label of a rationale
    for line in lines:
        if line.kind is _LineKind.BLANK:
            after_blank = True
            continue
        if line.kind in item_start_kinds:
            current = _Item([line.text] if line.text else [])
            items.append(current)
            rationale_next = False
        elif line.kind is _LineKind.CODE or current is None:
            current = None  # ignore all lines until the next tip
        elif line.kind is _LineKind.RATIONALE or rationale_next:
            rationale_next = not line.text
            if line.text and not current.has_labelled_rationale:
                current.rationale, current.has_labelled_rationale = line.text, True
        elif not line.text:
            pass  # only markup, such as "**"
        elif not current.parts or current.parts[-1].endswith(":"):
            current.parts.append(line.text)  # the text below a marker or headline
        elif line.kind is _LineKind.PLAIN and after_blank and not line.is_indented:
            current = None  # closing remarks after the list
        elif line.kind is _LineKind.PLAIN and current.is_unfinished:
            current.parts.append(line.text)  # the rest of a sentence
        elif not current.rationale:
            current.rationale = line.text  # a line after a complete tip explains it
        after_blank = False
    return [tip for item in items if (tip := item.tip()) is not None]


def _split_label(text: str) -> tuple[str, bool]:
    """Return the text without a label such as "Tip 1:" or "Rationale:", and whether it is a rationale."""
    if label := _RATIONALE_LABEL.match(text):
        return text[label.end() :], True
    if label := _TIP_LABEL.match(text):
        return text[label.end() :], False
    return text, False


def _is_meaningful(text: str) -> bool:
    """Return whether a text may be a tip: more than a label such as "Tip 1", and at least two words.

    One word is enough if it is not ASCII, because some scripts do not separate words.
    """
    if _ONLY_LABEL.fullmatch(text) or not any(map(str.isalpha, text)):
        return False
    return len(text.split(maxsplit=1)) > 1 or not text.isascii()


def _classify_line(raw: str) -> _Line:
    stripped = raw.strip()
    if not stripped:
        return _Line(_LineKind.BLANK)
    if stripped.startswith(_CODE_STARTS):
        return _Line(_LineKind.CODE)
    line = _EMPHASIS.sub("", stripped)
    heading = _HEADING.match(line)
    line = line[heading.end() :] if heading else line
    marker = _MARKER.match(line)
    line = line[marker.end() :].strip() if marker else line.strip()
    text, is_rationale = _split_label(line)
    has_label = len(text) < len(line)
    if is_rationale:
        kind = _LineKind.RATIONALE
    elif has_label:
        kind = _LineKind.LABEL
    elif marker:
        kind = _LineKind.NUMBER if marker["number"] else _LineKind.BULLET
    else:
        kind = _LineKind.PLAIN
    return _Line(kind, text.strip(), is_indented=raw[0].isspace())


def _unquote(text: str) -> str:
    is_quoted = len(text) > 1 and _QUOTES.get(text[0]) == text[-1]
    return text[1:-1].strip() if is_quoted else text
