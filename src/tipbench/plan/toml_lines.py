"""Where a key stands in a TOML text: tomllib forgets lines, and an error message needs them.

A scanner, not a parser: it reads text that tomllib has already accepted. Keys inside inline tables and entries of
arrays are found at the line of the key that holds them.
"""

from __future__ import annotations

import re
from collections import Counter

Place = tuple[str | int, ...]  # as pydantic writes it: ("personas", 0, "tasks", 2, "priority")

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*')"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_ARRAY_HEADER = re.compile(rf"\s*\[\[\s*({_DOTTED})\s*\]\]")
_TABLE_HEADER = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")
_TOKEN = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*|[\[\]{}]')


def find_line(text: str, place: Place) -> int:
    """The 1-based line of a key or table; of the nearest table around it when it is not written there."""
    lines = _lines_of_keys(text)
    while place:
        if place in lines:
            return lines[place]
        inside = [line for known, line in lines.items() if known[: len(place)] == place]
        if inside:
            return min(inside)
        place = place[:-1]
    return 1


def _lines_of_keys(text: str) -> dict[Place, int]:
    lines: dict[Place, int] = {}
    entries: Counter[Place] = Counter()
    table: Place = ()
    value = _OpenValue()
    for number, line in enumerate(text.split("\n"), start=1):
        if value.is_open:
            value.read(line)
        elif header := _ARRAY_HEADER.match(line):
            *parents, name = _parts(header[1])
            array = (*_resolve(parents, entries), name)
            table = (*array, entries[array])
            entries[array] += 1
            lines[table] = number
        elif header := _TABLE_HEADER.match(line):
            table = _resolve(_parts(header[1]), entries)
            lines[table] = number
        elif key := _KEY.match(line):
            lines[(*table, *_parts(key[1]))] = number
            value.read(line[key.end() :])
    return lines


class _OpenValue:
    """Whether the text read so far ends inside a multi-line string or an unclosed bracket."""

    def __init__(self) -> None:
        self._quote = ""
        self._depth = 0

    @property
    def is_open(self) -> bool:
        return bool(self._quote) or self._depth > 0

    def read(self, line: str) -> None:
        position = 0
        while position < len(line):
            if self._quote:
                end = line.find(self._quote, position)
                if end < 0:
                    return
                self._quote, position = "", end + 3
            elif token := _TOKEN.search(line, position):
                self._take(token[0])
                position = token.end()
            else:
                return

    def _take(self, mark: str) -> None:
        if mark in ('"""', "'''"):
            self._quote = mark
        else:
            self._depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark, 0)


def _parts(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(_PART, dotted)]


def _resolve(names: list[str], entries: Counter[Place]) -> Place:
    """A table's full place: below an array of tables, the array's latest entry is meant."""
    place: Place = ()
    for name in names:
        place = (*place, name)
        if entries[place]:
            place = (*place, entries[place] - 1)
    return place
