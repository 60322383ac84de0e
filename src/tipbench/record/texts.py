"""Texts of any length and content as MLflow tags, without loss.

MLflow cuts a tag at 8000 characters and says nothing, so a longer text goes into KEY.001, KEY.002, … with
KEY.meta, which has its length and hash. Databases refuse NUL and JSON refuses lone surrogates, so both are
escaped as U+241B and four hex digits; so is U+241B itself. Any other text is stored as it is, readable in
MLflow's own pages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from tipbench.errors import CorruptText

PREFIX = "artifact:"
TAG_CHARS = 8000

_ESCAPE = "\u241b"
_UNSAFE = re.compile("[\x00\ud800-\udfff\u241b]")
_ESCAPED = re.compile(_ESCAPE + "(0000|d[89a-f][0-9a-f]{2}|241b)")
_PART_KEY = re.compile(r"(?s)(.+)\.([0-9]{3,})\Z")
_META = ".meta"


def escape(text: str) -> str:
    """The text without NUL and lone surrogates; `unescape` gives it back."""
    return _UNSAFE.sub(lambda match: f"{_ESCAPE}{ord(match[0]):04x}", text)


def unescape(stored: str) -> str:
    """The text that `escape` was given; what `escape` cannot have written stays as it is."""
    if _ESCAPE not in stored:
        return stored
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), stored)


def to_tags(key: str, text: str) -> dict[str, str]:
    """The tags that hold this text: one if it fits, else numbered parts and their `.meta`."""
    if not key.startswith(PREFIX) or key.endswith(_META) or _PART_KEY.match(key):
        raise ValueError(f"a text's key begins with {PREFIX!r} and ends neither in .meta nor in a number: {key!r}")
    stored = escape(text)
    if len(stored) <= TAG_CHARS:
        return {key: stored}
    parts = [stored[at : at + TAG_CHARS] for at in range(0, len(stored), TAG_CHARS)]
    tags = {f"{key}.{number:03d}": part for number, part in enumerate(parts, start=1)}
    meta = {"parts": len(parts), "chars": len(text), "sha256": _sha256(text)}
    return tags | {key + _META: json.dumps(meta, separators=(",", ":"))}


def from_tags(tags: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The texts, each checked, and the tags that are none. Raises CorruptText."""
    rest = {key: value for key, value in tags.items() if not key.startswith(PREFIX)}
    whole: dict[str, str] = {}
    metas: dict[str, str] = {}
    parts: dict[str, dict[str, str]] = {}
    for key in tags.keys() - rest.keys():
        if key.endswith(_META):
            metas[key.removesuffix(_META)] = tags[key]
        elif match := _PART_KEY.match(key):
            parts.setdefault(match[1], {})[match[2]] = tags[key]
        else:
            whole[key] = tags[key]
    if orphans := parts.keys() - metas.keys():
        raise _corrupt(min(orphans), "it has parts but no .meta")
    if double := whole.keys() & metas.keys():
        raise _corrupt(min(double), "it is there both whole and in parts")
    texts = {key: _whole(key, stored) for key, stored in whole.items()}
    texts |= {key: _joined(key, meta, parts.get(key, {})) for key, meta in metas.items()}
    return dict(sorted(texts.items())), rest


def _whole(key: str, stored: str) -> str:
    text = unescape(stored)
    if escape(text) != stored:
        raise _corrupt(key, "it has an escape sequence that tipbench does not write")
    return text


def _joined(key: str, meta: str, parts: Mapping[str, str]) -> str:
    count, chars, sha256 = _meta(key, meta)
    if len(parts) > count:
        raise _corrupt(key, f"it has {len(parts)} parts where .meta says {count}")
    missing = next((number for number in range(1, count + 1) if f"{number:03d}" not in parts), None)
    if missing is not None:
        raise _corrupt(key, f"part {missing:03d} of {count} is missing")
    text = unescape("".join(parts[f"{number:03d}"] for number in range(1, count + 1)))
    if len(text) != chars:
        raise _corrupt(key, f"it has {len(text)} characters where .meta says {chars}")
    if _sha256(text) != sha256:
        raise _corrupt(key, "its SHA-256 does not match: a part was altered, or parts changed places")
    return text


def _meta(key: str, meta: str) -> tuple[int, int, str]:
    try:
        loaded = json.loads(meta)
        count, chars, sha256 = loaded["parts"], loaded["chars"], loaded["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise _corrupt(key, f"its .meta cannot be read: {meta[:80]!r}") from exc
    if type(count) is not int or type(chars) is not int or not 1 <= count <= chars:
        raise _corrupt(key, f"its .meta makes no sense: {meta[:80]!r}")
    return count, chars, str(sha256)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _corrupt(key: str, what: str) -> CorruptText:
    return CorruptText(f"The text {key} is damaged in MLflow: {what}. Record it again, or restore the tags it lost.")
