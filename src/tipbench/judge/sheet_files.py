"""From the bytes of a sheet that came back, JSON or CSV, to its plain content. What it says is checked elsewhere."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any

from tipbench.errors import SheetRefused, UsageError
from tipbench.judge.problems import shown
from tipbench.judge.sheet_csv import is_csv, raw_from_csv

MAX_BYTES = 64_000_000
_LONGEST_NUMBER = 40  # digits; Python refuses to convert very long ones, and no score is so long

_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\],:]|-?Infinity|NaN', re.DOTALL)


class _Flaw(ValueError):
    """Something that Python's JSON reader would let through."""


def read_sheet_file(path: Path) -> dict[str, Any]:
    """The content of a sheet file. Raises UsageError where there is none, SheetRefused where it is no sheet."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as exc:
        raise UsageError(f"There is no file {path}. Give the filled sheet that judge export wrote.") from exc
    except IsADirectoryError as exc:
        raise UsageError(f"{path} is a folder. Give the filled sheet itself.") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}. Give the filled sheet that judge export wrote.") from exc
    return parse_sheet(content)


def parse_sheet(content: bytes) -> dict[str, Any]:
    """The content of a sheet, in the shape of the JSON form. Raises SheetRefused, with the place."""
    if len(content) > MAX_BYTES:
        raise SheetRefused(
            f"A sheet has at most {MAX_BYTES // 1_000_000} MB; this one is larger. Apply the file that was exported."
        )
    text = _decoded(content)
    if text.lstrip()[:1] in ("{", "["):
        return _from_json(text)
    if is_csv(text):
        return raw_from_csv(text)
    raise SheetRefused(
        "Line 1, column 1: expected a sheet, which is JSON and begins with {, or CSV with the columns 'row' and 'item' "
        f"in its first line; found {shown(text[:200])}. Fill in the file that judge export wrote and apply that."
    )


def _decoded(content: bytes) -> str:
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
    try:
        return content.decode(encoding, "surrogatepass").removeprefix("\ufeff")
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        raise SheetRefused(
            f"Line {line}, byte {exc.start + 1} of the file: expected {encoding.upper()} text; found "
            f"{content[exc.start : exc.start + 4]!r}. Save the file as UTF-8 (in a spreadsheet: CSV UTF-8)."
        ) from exc


def _from_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant, parse_int=_bounded_int
        )
    except json.JSONDecodeError as exc:
        raise SheetRefused(
            f"Line {exc.lineno}, column {exc.colno}: the file is no whole JSON ({exc.msg}). "
            "Mend the file there, or export the sheet again with --sheet and copy the scores over."
        ) from exc
    except _Flaw as exc:
        raise SheetRefused(_first_flaw(text)) from exc
    except RecursionError as exc:
        raise SheetRefused(
            "The file has objects or lists inside each other deeper than any sheet. Apply the file that was exported."
        ) from exc
    if not isinstance(value, dict):
        raise SheetRefused(
            f"Line 1, column 1: expected an object {{…}} with format, sheet, rubric and items; found {shown(value)}. "
            "Keep the exported file's outer shape."
        )
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    kept = dict(pairs)
    if len(kept) < len(pairs):
        raise _Flaw
    return kept


def _no_constant(name: str) -> object:
    raise _Flaw(name)


def _bounded_int(digits: str) -> int | str:
    return int(digits) if len(digits) <= _LONGEST_NUMBER else digits


def _first_flaw(text: str) -> str:
    """The first double key or constant with its place, which Python's reader does not tell."""
    keys: list[set[str] | None] = []  # of each open object; None for a list
    key_next = False
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word in "{[":
            keys.append(set() if word == "{" else None)
        elif word in "}]":
            keys.pop()
        elif word[0] in "NI-":
            place = _line_and_column(text, token.start())
            return f"{place}: expected a whole number or null; found {word}. Write the score there, or null."
        elif word[0] == '"' and key_next and (known := keys[-1]) is not None:
            key = json.loads(word)
            if key in known:
                place = _line_and_column(text, token.start())
                return f"{place}: expected each key once in an object; found {shown(key)} again. Remove one of the two."
            known.add(key)
        key_next = word in "{,"
    raise AssertionError("a flaw was met and cannot be found again")


def _line_and_column(text: str, position: int) -> str:
    return f"Line {text.count(chr(10), 0, position) + 1}, column {position - text.rfind(chr(10), 0, position)}"
