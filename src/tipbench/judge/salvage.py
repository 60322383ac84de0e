"""What can still be used of a program's output: filled items inside prose, fences, several documents or half of one."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tipbench.judge.checking import check_item
from tipbench.judge.filler import Unscored
from tipbench.judge.sheet import Item, ItemScore, Sheet
from tipbench.plan.rubric import Rubric

_TOKEN = re.compile(r'[\[\]{}]|"(?:[^"\\\n]|\\.)*+"?')  # no string of JSON goes over the end of a line
_KEYS = ('"item"', '"items"')
_MOST_DEPTH = 200
_READS = 8  # objects inside objects are read again; so many times the whole text, then no more
_ROOM = 1_000_000
_MOST_VERSIONS = 8  # of one item
_SHOWN = 60
_MOST_REASON = 300


@dataclass(frozen=True)
class Salvaged:
    """Every version of every asked item that was found, in the order they came; and what spoke against the rest."""

    versions: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    foreign: str = ""  # why a sheet in the output was not looked into


def salvage(output: bytes, sheet: Sheet) -> Salvaged:
    """The sheet's items in an output of any shape. Nothing is checked here but which sheet and rubric they claim."""
    asked = {item.id for item in sheet.items}
    versions: dict[str, list[dict[str, Any]]] = {}
    foreign = ""
    for found in _objects(output.decode("utf-8", "replace")):
        reason = _belongs_elsewhere(found, sheet)
        if reason:
            foreign = foreign or reason
            continue
        for item in _items_of(found):
            name = item.get("item")
            if isinstance(name, str) and name in asked:
                known = versions.setdefault(name, [])
                if len(known) < _MOST_VERSIONS and item not in known:
                    known.append(item)
    return Salvaged(versions, foreign)


def settle(item: Item, rubric: Rubric, found: Sequence[Salvaged], trouble: str) -> ItemScore | Unscored:
    """The first place with a valid answer for an item counts; without any, the most telling complaint is the reason."""
    wrong, unfinished = "", False
    for place in found:
        scores: list[ItemScore] = []
        for version in place.versions.get(item.id, ()):
            checked = check_item(version, item, rubric)
            if isinstance(checked, ItemScore):
                scores += [checked] if checked not in scores else []
            elif checked is None:
                unfinished = True
            else:
                wrong = wrong or "; ".join(problem.message for problem in checked[:2])
        if len(scores) == 1:
            return scores[0]
        if scores:
            wrong = wrong or "it came back more than once, with different scores"
    return Unscored(item.id, _reason(wrong, unfinished, found, trouble))


def _reason(wrong: str, unfinished: bool, found: Sequence[Salvaged], trouble: str) -> str:
    if wrong:
        return safe_line(f"came back wrong: {wrong}", _MOST_REASON)
    foreign = next((place.foreign for place in found if place.foreign), "")
    said = "came back unfinished" if unfinished else "did not come back"
    return safe_line("; ".join(part for part in (said, foreign, trouble) if part), _MOST_REASON)


def _items_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A whole sheet's items, or an item that stands alone because its sheet was cut off."""
    items = found.get("items")
    if isinstance(items, list):
        return [item for item in items if isinstance(item, dict)]
    return [found] if "item" in found else []


def _belongs_elsewhere(found: dict[str, Any], sheet: Sheet) -> str:
    """A key that is missing is forgiven: an item's own hash says what it belongs to."""
    if "items" not in found:
        return ""
    if found.get("sheet", sheet.id) != sheet.id:
        return f"another sheet came back: {_shown(found['sheet'])} instead of {sheet.id}"
    rubric = found.get("rubric")
    sha256 = rubric.get("sha256", sheet.rubric.sha256) if isinstance(rubric, dict) else sheet.rubric.sha256
    if sha256 != sheet.rubric.sha256:
        return f"it came back with another rubric: {_shown(sha256)}"
    return ""


def _objects(text: str) -> list[dict[str, Any]]:
    """Complete JSON objects with a key `items` or `item`, the outermost of each, in order. One pass over the text.

    An object that never ends (a cut-off sheet, a brace in prose) does not hide the complete ones inside it.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    open_at: deque[list[int]] = deque(maxlen=_MOST_DEPTH)  # where a bracket opened, and whether it has such a key
    left = _READS * len(text) + _ROOM
    for token in _TOKEN.finditer(text):
        mark = token[0][0]
        if mark in "[{":
            open_at.append([token.start(), 0])
        elif mark == '"' and open_at and token[0] in _KEYS:
            open_at[-1][1] = 1
        elif mark in "]}" and open_at:
            start, wanted = open_at.pop()
            if wanted and left > 0:
                left -= token.end() - start
                if (value := _load(text[start : token.end()])) is not None:
                    while found and found[-1][0] > start:
                        found.pop()
                    found.append((start, value))
    return [value for _, value in found]


def _load(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # also a number too long to be one
        return None
    return value if isinstance(value, dict) else None


def _shown(value: object) -> str:
    return safe_line(repr(value), _SHOWN)


def safe_line(text: str, most: int) -> str:
    """Text of unknown origin on one line, without anything a terminal would obey, and not longer than `most`."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
