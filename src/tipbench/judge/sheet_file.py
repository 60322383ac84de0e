"""Sheet files: parses edited JSON and CSV files, and writes CSV for spreadsheets."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tipbench.errors import SheetRefused, UsageError
from tipbench.judge.check import CSV_ROW, MAX_PROBLEMS, Problem, refusal, shown, shown_name
from tipbench.judge.sheet import FORMAT, ItemScore, TipItem, TipSheet
from tipbench.record.texts import escape, unescape

BOM = "\ufeff"  # byte order mark; some spreadsheets need it to detect UTF-8
_ROW_KINDS = ("about", "instructions", "rubric", "tip")  # values of the column "row"
SCORE_PREFIX = "score:"  # begins the names of score columns, so that a scale may have the name of another column
MAX_BYTES = 64_000_000
MAX_TIPS = 1000  # per item
MAX_ROWS = 200_000

_COLUMNS_BEFORE_SCORES = ("row", "item", "number", "scenario", "tip", "rationale")
_COLUMNS_AFTER_SCORES = ("format_ok", "overlong", "note", "scenario_id", "sha256")
_REQUIRED_COLUMNS = ("row", "item", "number", "tip", "rationale", "format_ok", "overlong", "sha256")
_SEPARATORS = ",;\t"
_NUMBER_PUNCTUATION = r"\s.,:/%eE+\-"
_UNSAFE_CELL = re.compile(
    r"['\t\r]"  # spreadsheets may remove a leading apostrophe, and start a formula after a tab or line end
    r"|\s*[=+\-@＝＋－＠]"  # a formula
    rf"|[{_NUMBER_PUNCTUATION}]*[0-9][0-9{_NUMBER_PUNCTUATION}]*\Z"  # a number, date, time or percentage
    r"|\s*(?:true|false)\s*\Z",
    re.IGNORECASE,
)
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}(?:[.,]0{1,20})?")
_MAX_DIGITS = 40  # longer numbers stay strings, because Python limits the conversion to integers
# Only the tokens that `_invalid_json_message` needs: strings, punctuation, NaN and Infinity.
_JSON_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\],:]|-?Infinity|NaN', re.DOTALL)
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_sheet_file(path: Path) -> dict[str, Any]:
    """Read and parse a sheet file. Raises UsageError if it cannot be read, and SheetRefused if it is not a sheet."""
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
    """Parse a JSON or CSV sheet into the structure of the JSON file. Raises SheetRefused with the error's location."""
    if len(content) > MAX_BYTES:
        raise SheetRefused(
            f"A sheet has at most {MAX_BYTES // 1_000_000} MB; this one is larger. Apply the file that was exported."
        )
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
    try:
        # Tips may contain lone surrogates, which a strict decoder rejects.
        text = content.decode(encoding, "surrogatepass").removeprefix(BOM)
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        raise SheetRefused(
            f"Line {line}, byte {exc.start + 1} of the file: expected {encoding.upper()} text; found "
            f"{content[exc.start : exc.start + 4]!r}. Save the file as UTF-8 (in a spreadsheet: CSV UTF-8)."
        ) from exc
    if text.lstrip()[:1] in ("{", "["):
        return _parse_json(text)
    if (separator := _separator(text)) is not None:
        return _parse_csv(text, separator)
    raise SheetRefused(
        "Line 1, column 1: expected a sheet, which is JSON and begins with {, or CSV with the columns 'row' and 'item' "
        f"in its first line; found {shown(text[:200])}. Fill in the file that judge export wrote and apply that."
    )


def sheet_csv(sheet: TipSheet, scores: Mapping[str, ItemScore] | None = None) -> str:
    """Return the sheet as CSV, with existing scores filled in. It must be written as UTF-8."""
    output = io.StringIO()
    score_columns = [SCORE_PREFIX + name for name in sheet.rubric.scale_names]
    columns = (*_COLUMNS_BEFORE_SCORES, *score_columns, *_COLUMNS_AFTER_SCORES)
    # All cells are quoted, so that spreadsheets with another separator do not split them.
    writer = csv.DictWriter(output, columns, restval="", quoting=csv.QUOTE_ALL)
    writer.writeheader()

    def csv_value(value: object) -> object:
        if isinstance(value, bool):
            return str(value).upper()
        return escape_cell(value) if isinstance(value, str) else value

    for row in (*_head_rows(sheet), *_tip_rows(sheet, scores or {})):
        writer.writerow({name: csv_value(value) for name, value in row.items()})
    for line in sheet.rubric.text.splitlines():
        if line.strip():
            writer.writerow({"row": "rubric", "tip": escape_cell(line)})
    return BOM + output.getvalue()


def escape_cell(text: str) -> str:
    """Escape a text so that spreadsheets do not execute or convert it. `unescape_cell` reverses it."""
    escaped = escape(text)
    return f"'{escaped}" if _UNSAFE_CELL.match(escaped) else escaped


def unescape_cell(cell: str) -> str:
    """Return the original text of a cell escaped by `escape_cell`."""
    return unescape(cell.removeprefix("'"))


def _parse_csv(text: str, separator: str) -> dict[str, Any]:
    """Parse CSV into the structure of the JSON file, without cards and rubric text. Raises SheetRefused if invalid."""
    problems: list[Problem] = []
    about: dict[str, str] = {}
    rows_by_item: dict[tuple[str, str], list[_Row]] = defaultdict(list)  # by item id and hash
    for row in _rows(text, separator, problems):
        if len(problems) > MAX_PROBLEMS:
            break
        kind = row.stripped("row").casefold()
        if kind == "tip":
            rows_by_item[row.stripped("item"), row.stripped("sha256")].append(row)
        elif kind == "about":
            name, value = row.stripped("item").casefold(), row.stripped("tip")
            first_value = about.setdefault(name, value)
            if value != first_value:
                problems.append(row.problem("tip", f"{shown(first_value)} for {shown(name)}, as in a row before"))
        elif kind not in _ROW_KINDS:
            problems.append(row.problem("row", f"one of {', '.join(_ROW_KINDS)}; delete rows of your own"))
    items = [_parse_item(rows, problems) for rows in rows_by_item.values()]
    if problems:
        raise refusal(problems)
    content: dict[str, Any] = {name: about[name] for name in ("format", "sheet", "experiment") if name in about}
    content["judge"] = about.get("judge") or None
    content["rubric"] = {name: about[f"rubric {name}"] for name in ("id", "sha256") if f"rubric {name}" in about}
    return content | {"items": items}


@dataclass(frozen=True)
class _Row:
    number: int  # 1-based, including the header
    cells: Mapping[str, str]  # by column

    def text(self, column: str) -> str:
        return unescape_cell(self.cells.get(column, ""))

    def stripped(self, column: str) -> str:
        return self.text(column).strip()

    def problem(self, column: str, expected: str) -> Problem:
        item, value = self.stripped("item"), self.cells.get(column, "")
        return Problem(
            item=shown_name(item) if item else None,
            tip=None,
            field=column,
            seen=shown(value),
            expected=expected,
            row=self.number,
        )


def _parse_item(rows: Sequence[_Row], problems: list[Problem]) -> dict[str, Any]:
    """Parse the rows of one item, in any order. Adds any problems to `problems`."""
    tips: dict[int, dict[str, Any]] = {}  # by number
    format_flags: list[object] = []
    flag_descriptions: list[str] = []  # for the error message
    for row in rows:
        number = _parse_integer(row.stripped("number"))
        if not isinstance(number, int) or not 1 <= number <= MAX_TIPS:
            problems.append(row.problem("number", "the tip's number as exported, from 1 on"))
            continue
        if number in tips:
            first_row = tips[number][CSV_ROW]
            problems.append(row.problem("number", f"each tip of an item once; row {first_row} has this one too"))
            continue
        if format_ok := row.stripped("format_ok"):
            format_flags.append(_parse_flag(format_ok))
            flag_descriptions.append(f"{format_ok} in row {row.number}")
        tips[number] = {
            "tip": row.text("tip"),
            "rationale": row.text("rationale"),
            "overlong": _parse_flag(row.stripped("overlong")),
            "scores": {
                column.removeprefix(SCORE_PREFIX): _parse_integer(row.stripped(column))
                for column in row.cells
                if column.startswith(SCORE_PREFIX)
            },
            "note": row.text("note"),
            CSV_ROW: row.number,
        }
    if not format_flags:
        item_format_ok: object = ""  # validation rejects it
    elif len(format_flags) == 1 or set(format_flags) in ({True}, {False}):
        item_format_ok = format_flags[0]  # the only flag, or one of several equal and valid ones
    else:
        item_format_ok = " and ".join(flag_descriptions)  # validation rejects this text and shows it
    return {
        "item": rows[0].stripped("item"),
        "sha256": rows[0].stripped("sha256"),
        "format_ok": item_format_ok,
        # None for a missing number; validation rejects it.
        "tips": [tips.get(number) for number in range(1, max(tips, default=0) + 1)],
        CSV_ROW: rows[0].number,
    }


def _head_rows(sheet: TipSheet) -> Iterator[dict[str, object]]:
    about = {
        "format": FORMAT,
        "sheet": sheet.id,
        "experiment": sheet.experiment,
        "judge": sheet.judge or "",
        "rubric id": sheet.rubric.id,
        "rubric sha256": sheet.rubric.sha256,
    }
    for name, value in about.items():
        yield {"row": "about", "item": name, "tip": value}
    yield {"row": "instructions", "tip": sheet.instructions}
    names = ", ".join(SCORE_PREFIX + name for name in sheet.rubric.scale_names)
    yield {
        "row": "instructions",
        "tip": f"In this table an empty cell means null. Score the rows that begin with 'tip', in {names}; "
        "format_ok is for the whole item and is in its first row only; write your name next to 'judge' above. "
        "The rubric is below the tips. Keep every apostrophe in front of a text: it stops the spreadsheet from running "
        "the text. Save as CSV (UTF-8).",
    }


def _tip_rows(sheet: TipSheet, scores: Mapping[str, ItemScore]) -> Iterator[dict[str, object]]:
    for item in sheet.items:
        item_score = scores.get(item.id)
        format_ok = item_score.format_ok if item_score else item.format_ok
        for index, tip in enumerate(item.tips):
            score = item_score.tips[index] if item_score else None
            yield {
                "row": "tip",
                "item": item.id,
                "sha256": item.sha256,
                "scenario_id": str(item.card.get("id", "")),
                "scenario": _card_text(item),
                "number": index + 1,
                "tip": tip.tip,
                "rationale": tip.rationale,
                "format_ok": format_ok if index == 0 else None,
                "overlong": score.overlong if score else tip.overlong,
                **{SCORE_PREFIX + name: score.scores[name] if score else None for name in sheet.rubric.scale_names},
                "note": score.note if score else "",
            }


def _card_text(item: TipItem) -> str:
    card = item.card
    try:
        slot, persona = card["slot"], card["persona"]
        lines = [
            f"{card['weekday']} {card['day']}, {slot['time']}, {slot['label']}",
            f"{persona['name']}, {persona['role']}. {persona['about']}",
            *(f"{name}: {'; '.join(persona[name])}" for name in ("preferences", "habits") if persona[name]),
        ]
        for task in persona["tasks"]:
            due = f", due {task['due']}" if task["due"] else ""
            overdue = ", overdue" if task["overdue"] else ""
            details = f"priority {task['priority']} of 4{due}{overdue}, {task['age_days']} days old"
            lines.append(f"Task: {task['title']} ({details})")
    except (KeyError, TypeError):  # a card with another structure
        return str(dict(card))
    return "\n".join(lines)


def _separator(text: str) -> str | None:
    """Return the separator of the CSV, or None if the first line lacks the columns of a sheet."""
    first_line = text[:10_000].split("\n", 1)[0].split("\r", 1)[0]
    for separator in _SEPARATORS:
        if {"row", "item"} <= {_column_name(cell) for cell in first_line.split(separator)}:
            return separator
    return None


def _column_name(cell: str) -> str:
    return cell.strip().strip('"').strip().casefold()


def _rows(text: str, separator: str, problems: list[Problem]) -> Iterator[_Row]:
    """Validate the header, then yield each non-empty row. Adds rows with too many cells to `problems`."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        columns = [_column_name(cell) for cell in next(reader)]
        counts = Counter(filter(None, columns))
        missing = [name for name in _REQUIRED_COLUMNS if name not in counts]
        repeated = [name for name, count in counts.items() if count > 1]

        def column_problem(name: str, *, seen: str, expected: str) -> Problem:
            return Problem(item=None, tip=None, field=name, seen=seen, expected=expected, row=1)

        wrong_columns = [
            column_problem(name, seen="no such column", expected="the column as exported") for name in missing
        ]
        wrong_columns += [
            column_problem(shown_name(name), seen="it twice", expected="each column once; remove one of them")
            for name in repeated
        ]
        if wrong_columns:
            raise refusal(wrong_columns)
        for number, cells in enumerate(reader, start=2):
            if number > MAX_ROWS:
                raise SheetRefused(f"A sheet has at most {MAX_ROWS} rows; this one has more. Apply the exported file.")
            if any(cell.strip() for cell in cells):
                row = _Row(number, dict(zip(columns, cells, strict=False)))
                if any(cell.strip() for cell in cells[len(columns) :]):
                    problems.append(row.problem("row", f"at most {len(columns)} cells; empty those beyond"))
                yield row
    except csv.Error as exc:
        raise SheetRefused(
            f"Line {reader.line_num}: the CSV cannot be read ({exc}). Save the table from the spreadsheet again as CSV."
        ) from exc


def _parse_flag(cell: str) -> object:
    """Parse a boolean. Return any other cell unchanged; validation rejects it."""
    parsed = _parse_integer(cell)  # a text that is not an integer is returned unchanged
    without_decimals = cell if parsed is None else str(parsed)  # a spreadsheet may write 1 as 1.0
    return _FLAGS.get(without_decimals.casefold(), cell)


def _parse_integer(cell: str) -> int | str | None:
    """Parse an integer, also '3.0' or '3,0'; empty is None. Return any other cell unchanged; validation rejects it."""
    if not cell:
        return None
    if not _INTEGER.fullmatch(cell):
        return cell
    return int(re.split("[.,]", cell)[0])


class _InvalidJson(ValueError):
    """Duplicate keys, NaN or Infinity, which Python's JSON parser accepts."""


def _parse_json(text: str) -> dict[str, Any]:
    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise _InvalidJson
        return values

    def reject_constant(name: str) -> object:
        raise _InvalidJson(name)

    def parse_bounded_int(digits: str) -> int | str:
        return int(digits) if len(digits) <= _MAX_DIGITS else digits

    try:
        value = json.loads(
            text,
            object_pairs_hook=reject_duplicate_keys,
            parse_constant=reject_constant,
            parse_int=parse_bounded_int,
        )
    except json.JSONDecodeError as exc:
        raise SheetRefused(
            f"Line {exc.lineno}, column {exc.colno}: the file is not valid JSON ({exc.msg}). "
            "Fix it there, or export the sheet again with --sheet and copy the scores over."
        ) from exc
    except _InvalidJson as exc:
        raise SheetRefused(_invalid_json_message(text)) from exc
    except RecursionError as exc:
        raise SheetRefused(
            "The file nests objects or lists more deeply than any sheet does. Apply the file that was exported."
        ) from exc
    if not isinstance(value, dict):
        raise SheetRefused(
            f"Line 1, column 1: expected an object {{…}} with format, sheet, rubric and items; found {shown(value)}. "
            "Keep the exported file's outer shape."
        )
    return value


def _invalid_json_message(text: str) -> str:
    """Locate the first duplicate key, NaN or Infinity. Python's JSON parser does not report its location."""
    open_keys: list[set[str] | None] = []  # for each open object its keys so far, for each open list None
    after_brace_or_comma = False  # if so, the next string in an object is a key
    for match in _JSON_TOKEN.finditer(text):
        word = match[0]
        if word in "{[":
            open_keys.append(set() if word == "{" else None)
        elif word in "}]":
            open_keys.pop()
        elif word[0] in "NI-":  # NaN, Infinity, -Infinity
            place = _line_and_column(text, match.start())
            return f"{place}: expected a whole number or null; found {word}. Write the score there, or null."
        elif word[0] == '"' and after_brace_or_comma and (earlier_keys := open_keys[-1]) is not None:
            key = json.loads(word)
            if key in earlier_keys:
                place = _line_and_column(text, match.start())
                return f"{place}: expected each key once in an object; found {shown(key)} again. Remove one of the two."
            earlier_keys.add(key)
        after_brace_or_comma = word in "{,"
    raise AssertionError("invalid JSON was found before and cannot be found again")


def _line_and_column(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"Line {line}, column {column}"
