"""Stores texts of any length and content as MLflow tags, without loss.

MLflow silently truncates a tag at 8000 characters, so a longer text is split into the parts KEY.001, KEY.002, …;
KEY.meta has its length and hash. Databases reject NUL, and JSON rejects lone surrogates. Both, and the escape character
U+241B itself, are stored as U+241B and four hex digits. All other characters are stored unchanged.

The writer of a text may die at any moment, so readers follow these rules:

- KEY.meta is not empty: the text consists of the parts that KEY.meta names.
- KEY.meta is empty or missing, and KEY exists: the text is the value of KEY.
- KEY.meta is empty, and KEY is missing: the first text is still being written.

A text that is written in several requests must not overwrite the parts of the text that it replaces. If the numbers
would overlap, the new parts are numbered after the old ones; `first` in KEY.meta is the number of the first new part.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tipbench.errors import CorruptText

MAX_TAG_CHARS = 8000  # MLflow's limit for a tag

_KEY_PREFIX = "artifact:"
_ESCAPE = "\u241b"
_UNSAFE = re.compile("[\x00\ud800-\udfff\u241b]")
_ESCAPED = re.compile(_ESCAPE + "(0000|d[89a-f][0-9a-f]{2}|241b)")
_PART_TAG = re.compile(r"(?s)(.+)\.([0-9]{3,})\Z")
_META = ".meta"


def escape(text: str) -> str:
    """Escape NUL and lone surrogates; `unescape` reverses it."""
    return _UNSAFE.sub(lambda match: f"{_ESCAPE}{ord(match[0]):04x}", text)


def unescape(stored: str) -> str:
    """Reverse `escape`; sequences that `escape` cannot have written are left unchanged."""
    if _ESCAPE not in stored:
        return stored
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), stored)


def check_key(key: str) -> None:
    """Raise ValueError for a key that is not valid for a text, or could be mistaken for a part of another text."""
    if not is_text_tag(key) or text_key(key) != key:
        raise ValueError(f"a text's key begins with {_KEY_PREFIX!r} and ends neither in .meta nor in a number: {key!r}")


def is_text_tag(tag: str) -> bool:
    """Return whether a tag holds a text, a part of one, or its `.meta`."""
    return tag.startswith(_KEY_PREFIX)


def text_key(tag: str) -> str:
    """Return the key of the text that a tag belongs to: KEY for KEY, KEY.meta and KEY.001."""
    if tag.endswith(_META):
        return tag.removesuffix(_META)
    match = _PART_TAG.match(tag)
    return match[1] if match else tag


def to_tags(key: str, text: str) -> dict[str, str]:
    """Return the tags that hold this text: one tag if it fits, otherwise numbered parts and their `.meta`."""
    check_key(key)
    escaped = escape(text)
    return {key: escaped} if len(escaped) <= MAX_TAG_CHARS else _split(key, text, escaped, first=1)


def _split(key: str, text: str, escaped: str, *, first: int) -> dict[str, str]:
    """Return the parts of a long text, numbered from `first`, and their `.meta`."""
    parts = [escaped[start : start + MAX_TAG_CHARS] for start in range(0, len(escaped), MAX_TAG_CHARS)]
    tags = {_part_tag(key, number): part for number, part in enumerate(parts, start=first)}
    meta = {"parts": len(parts), "chars": len(text), "sha256": _sha256(text)}
    if first > 1:
        meta["first"] = first
    return tags | {key + _META: json.dumps(meta, separators=(",", ":"))}


def _part_tag(key: str, number: int) -> str:
    return f"{key}.{number:03d}"


def single_request_tags(key: str, text: str, current: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that replace the current text. They must be written in one request."""
    tags = to_tags(key, text)
    if key in tags and key + _META in current:
        tags[key + _META] = ""  # otherwise readers would still use the parts
    return tags


def multi_request_tags(key: str, text: str, current: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tags to write first, in several requests, and those to write last, in one request.

    Readers get the old text until the last tags are written.
    """
    tags = single_request_tags(key, text, current)
    if key in tags:  # the text fits into one tag
        return {}, tags
    old_numbers = _part_numbers(key, current)
    n_parts = len(tags) - 1  # the other tag is .meta
    if old_numbers and old_numbers.start <= n_parts:  # the numbers overlap
        tags = _split(key, text, escape(text), first=old_numbers.stop)
    last = {key + _META: tags.pop(key + _META)}
    if key not in current and key + _META not in current:
        tags = {key + _META: ""} | tags  # written before the parts: parts without .meta would count as damaged
    return tags, last


def unneeded_tags(key: str, tags: Mapping[str, str]) -> list[str]:
    """Return the tags of this text that are no longer needed, in the order in which to delete them."""
    text_tags = tags_of(key, tags)
    part_tags = sorted(text_tags.keys() - {key, key + _META})
    if key + _META not in text_tags:
        return part_tags if key in text_tags else []  # without KEY, the text is damaged: keep its parts
    if not text_tags[key + _META]:  # readers ignore the parts
        return [*part_tags, key + _META]
    numbers = _part_numbers(key, tags)
    if numbers is None:  # .meta is invalid, so it is unknown which tags are needed
        return []
    unneeded = [key] if key in text_tags else []
    for tag in part_tags:
        number = int(tag.removeprefix(key + "."))
        if number not in numbers or tag != _part_tag(key, number):  # KEY.0001 is not the tag of part 1
            unneeded.append(tag)
    return unneeded


def tags_of(key: str, tags: Mapping[str, str]) -> dict[str, str]:
    """Return all tags of one text."""
    return {tag: value for tag, value in tags.items() if text_key(tag) == key}


def _part_numbers(key: str, tags: Mapping[str, str]) -> range | None:
    """Return the numbers of the text's parts; None if it has no parts or its .meta is invalid."""
    meta = tags.get(key + _META)
    if not meta:
        return None
    try:
        return _parse_meta(key, meta).part_numbers
    except CorruptText:
        return None


def from_tags(text_tags: Mapping[str, str], wanted: Collection[str] | None = None) -> dict[str, str]:
    """Return the texts by key; with `wanted`, only those keys. Raises CorruptText if a text is damaged."""
    tags_by_key: dict[str, dict[str, str]] = {}
    for tag, value in text_tags.items():
        key = text_key(tag)
        if wanted is None or key in wanted:
            tags_by_key.setdefault(key, {})[tag] = value
    texts = {key: _read_text(key, tags) for key, tags in sorted(tags_by_key.items())}
    return {key: text for key, text in texts.items() if text is not None}


def _read_text(key: str, tags: Mapping[str, str]) -> str | None:
    """Return the text, by the rules at the top of this module. None if the first text is still being written."""
    if tags.get(key + _META):
        meta = _parse_meta(key, tags[key + _META])
        numbers = meta.part_numbers
        missing = next((number for number in numbers if _part_tag(key, number) not in tags), None)
        if missing is not None:
            raise _corrupt(key, f"part {missing:03d} of {meta.parts} is missing")
        text = unescape("".join(tags[_part_tag(key, number)] for number in numbers))
        if len(text) != meta.chars:
            raise _corrupt(key, f"it has {len(text)} characters but .meta has {meta.chars}")
        if _sha256(text) != meta.sha256:
            raise _corrupt(key, "its SHA-256 does not match: a part was altered, or parts changed places")
        return text
    if key in tags:
        text = unescape(tags[key])
        if escape(text) != tags[key]:
            raise _corrupt(key, "it has an escape sequence that tipbench does not write")
        return text
    if key + _META not in tags:
        raise _corrupt(key, "it has parts but no .meta")
    return None


@dataclass(frozen=True)
class _Meta:
    parts: int
    chars: int
    sha256: str
    first: int  # number of the first part

    @property
    def part_numbers(self) -> range:
        return range(self.first, self.first + self.parts)


def _parse_meta(key: str, raw: str) -> _Meta:
    try:
        values = json.loads(raw)
        meta = _Meta(values["parts"], values["chars"], str(values["sha256"]), values.get("first", 1))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise _corrupt(key, f"its .meta cannot be read: {raw[:80]!r}") from exc
    numbers = (meta.parts, meta.chars, meta.first)
    are_integers = all(type(number) is int for number in numbers)  # isinstance would accept true and false
    if not are_integers or not 1 <= meta.parts <= meta.chars or meta.first < 1:
        raise _corrupt(key, f"its .meta is invalid: {raw[:80]!r}")
    return meta


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _corrupt(key: str, problem: str) -> CorruptText:
    return CorruptText(f"The text {key} is damaged in MLflow: {problem}. Record it again, or restore the tags it lost.")
