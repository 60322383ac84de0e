"""Validate a filled sheet and report every problem with its item and field."""

from __future__ import annotations

import difflib
import re
import reprlib
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from tipbench.errors import SheetRefused
from tipbench.judge.automatic import is_reserved
from tipbench.judge.sheet import (
    FilledSheet,
    FilledT,
    ItemScore,
    ItemT,
    Sheet,
    SheetItem,
    SheetTip,
    TipItem,
    TipScore,
    TipSheet,
)
from tipbench.plan.rubric import Rubric
from tipbench.text import plural

MAX_PROBLEMS = 1000  # problems returned for one sheet
MAX_LISTED = 20  # problems listed in the error message
MAX_SHOWN = 120  # characters of a value that are shown in a message
MAX_NAME = 60  # characters of a judge's name
MAX_NOTE = 4000  # characters of a note
CSV_ROW = "csv_row"  # key of the spreadsheet row in items and tips read from CSV
_MISSING = object()
_NEWLINE = re.compile(r"\r\n?")


@dataclass(frozen=True)
class Problem:
    """A validation error in a filled sheet, with its location."""

    item: str | None
    tip: int | None  # 1-based
    field: str
    seen: str  # describes the value that was found
    expected: str
    row: int | None = None  # spreadsheet row, if read from CSV

    @property
    def message(self) -> str:
        places = [
            f"row {self.row}" if self.row is not None else "",
            f"item {self.item}" if self.item is not None else "",
            f"tip {self.tip}" if self.tip is not None else "",
            self.field,
        ]
        return f"{', '.join(filter(None, places))}: expected {self.expected}; found {self.seen}."

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "message": self.message}


@dataclass(frozen=True)
class Location:
    """A location in the sheet, and the list of problems, which several locations share."""

    problems: list[Problem]
    item: str | None = None
    tip: int | None = None
    row: int | None = None

    def at_tip(self, tip: int, raw_tip: object) -> Location:
        return replace(self, tip=tip, row=_row_of(raw_tip) or self.row)

    def add_problem(self, field: str, seen: str, expected: str) -> None:
        """Add a problem at this location; `seen` describes the value that was found."""
        self.problems.append(
            Problem(item=self.item, tip=self.tip, field=field, seen=seen, expected=expected, row=self.row)
        )


class _ShortRepr(reprlib.Repr):
    """Formats constants as JSON does, and abbreviates very large integers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 70
        self.maxlevel = 2
        self.maxdict = self.maxlist = 3

    def repr_bool(self, value: bool, _level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802 - reprlib dispatches on the type's name
        return "null"

    def repr_int(self, value: int, _level: int) -> str:
        return repr(value) if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"


def shown(value: object) -> str:
    """Format a value on one short line without terminal control characters."""
    text = _ShortRepr().repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def shown_name(name: object) -> str:
    """Format an unknown key or name for a message, without quotes."""
    return shown(name).strip("'\"")


def refusal(problems: Iterable[Problem]) -> SheetRefused:
    """Return a SheetRefused that lists the first MAX_LISTED problems and carries up to MAX_PROBLEMS."""
    first = list(islice(problems, MAX_PROBLEMS + 1))
    kept = first[:MAX_PROBLEMS]
    truncated = len(first) > MAX_PROBLEMS
    count = f"{'more than ' if truncated else ''}{plural(len(kept), 'problem')}"
    headline = f"The sheet has {count}; nothing was applied. Correct and apply it again:"
    lines = [headline, *(f"  {problem.message}" for problem in kept[:MAX_LISTED])]
    if len(kept) > MAX_LISTED:
        lines.append(f"  and {len(kept) - MAX_LISTED} more" + (" at least" if truncated else ""))
    return SheetRefused("\n".join(lines), kept)


def check_sheet(
    raw: Mapping[str, Any], sheet: TipSheet, *, judge: str | None = None, allow_reserved_name: bool = False
) -> FilledSheet[ItemScore]:
    """Validate a filled file of tips against the exported `sheet`. Raises SheetRefused with every problem."""
    check = partial(check_item, rubric=sheet.rubric)
    return check_file(raw, sheet, check, judge=judge, allow_reserved_name=allow_reserved_name)


def check_file(
    raw: Mapping[str, Any],
    sheet: Sheet[ItemT],
    check_one: Callable[[Mapping[str, Any], ItemT], FilledT | list[Problem] | None],
    *,
    judge: str | None = None,
    allow_reserved_name: bool = False,
) -> FilledSheet[FilledT]:
    """Validate a filled file of tips or duels. Raises SheetRefused with every problem.

    `sheet` is the exported sheet, and `judge` the value of --judge. `check_one` validates one item: it returns the
    scores or the winner, or a list of problems, or None if the item is unfinished.
    """
    top = Location(problems=[])  # copies of it add to the same list
    rubric = raw.get("rubric")
    if not isinstance(rubric, Mapping):
        top.add_problem("rubric", describe_value(raw, "rubric"), "an object with the rubric's id and sha256")
    else:
        check_value(top, rubric, "id", sheet.rubric.id, field="rubric.id")
        check_value(top, rubric, "sha256", sheet.rubric.sha256, field="rubric.sha256")
        if "text" in rubric:
            check_text(top, rubric, "text", sheet.rubric.text, field="rubric.text")
    judge_name = _check_judge(top, raw, owner=sheet.judge, option=judge, allow_reserved_name=allow_reserved_name)
    raw_items = raw.get("items")
    if not isinstance(raw_items, list):
        top.add_problem("items", describe_value(raw, "items"), "a list of the sheet's items")
        raw_items = []
    items = {item.id: item for item in sheet.items}
    checked: dict[str, FilledT | None] = {}  # by item id; None if the item is unfinished or has problems
    for index, raw_item in enumerate(raw_items):
        if len(top.problems) > MAX_PROBLEMS:
            break
        if not isinstance(raw_item, Mapping):
            top.add_problem(f"items[{index}].item", shown(raw_item), f"an item of sheet {sheet.id}")
            continue
        row = _row_of(raw_item)
        field = f"items[{index}].item" if row is None else "item"
        id_ = raw_item.get("item")
        item = items.get(id_) if isinstance(id_, str) else None
        if item is None:
            replace(top, row=row).add_problem(field, describe_value(raw_item, "item"), f"an item of sheet {sheet.id}")
        elif item.id in checked:
            expected = "each item once; remove one of the two"
            replace(top, item=item.id, row=row).add_problem(field, "a duplicate", expected)
        else:
            result = check_one(raw_item, item)
            if isinstance(result, list):
                top.problems.extend(result)
                checked[item.id] = None
            else:
                checked[item.id] = result
    if top.problems or judge_name is None:
        raise refusal(top.problems)
    finished = {id_: filled for id_ in items if (filled := checked.get(id_)) is not None}
    return FilledSheet(judge_name, finished, unfinished=tuple(id_ for id_ in items if id_ not in finished))


def check_item(raw_item: Mapping[str, Any], item: TipItem, rubric: Rubric) -> ItemScore | list[Problem] | None:
    """Validate one item. Returns its scores, None if any score is blank, or its problems."""
    location = Location(problems=[], item=item.id, row=_row_of(raw_item))
    check_unchanged(location, raw_item, item)
    format_ok = _read_flag(location, raw_item, "format_ok")
    raw_tips = raw_item.get("tips")
    if not isinstance(raw_tips, list):
        location.add_problem("tips", describe_value(raw_item, "tips"), f"a list of {len(item.tips)} tips")
        return location.problems
    if len(raw_tips) != len(item.tips):
        location.add_problem("tips", str(len(raw_tips)), f"the item's {len(item.tips)} tips")
        return location.problems
    tips = [
        _check_tip(location.at_tip(number, raw_tip), raw_tip, tip, rubric)
        for number, (raw_tip, tip) in enumerate(zip(raw_tips, item.tips, strict=True), start=1)
    ]
    if location.problems:
        return location.problems
    finished = tuple(tip for tip in tips if tip is not None)
    if len(finished) < len(tips):
        return None
    return ItemScore(item.id, format_ok, finished)


def check_unchanged(location: Location, raw_item: Mapping[str, Any], item: SheetItem) -> None:
    """Check that an item's id, hash and card are as exported."""
    check_value(location, raw_item, "item", item.id)
    check_value(location, raw_item, "sha256", item.sha256)
    if "scenario" not in raw_item:  # such as an item from CSV; the hash checked above includes the card
        return
    raw_card, card = raw_item["scenario"], item.card
    if not isinstance(raw_card, Mapping):
        location.add_problem("scenario", shown(raw_card), "the card as exported")
        return
    all_names = {**card, **raw_card}
    changed_names = (name for name in all_names if raw_card.get(name, _MISSING) != card.get(name, _MISSING))
    for name in islice(changed_names, 5):
        location.add_problem(f"scenario.{shown_name(name)}", describe_value(raw_card, name), "the card as exported")


def unmet_name_requirement(name: object, *, allow_reserved_name: bool = False) -> str | None:
    """Return the requirement that a judge's name violates, or None if the name is valid."""
    normalized = normalize_name(name) if isinstance(name, str) else ""
    if not 1 <= len(normalized) <= MAX_NAME or not normalized.isprintable():
        return f"a name of 1 to {MAX_NAME} printable characters on one line"
    if not allow_reserved_name and is_reserved(normalized):
        return "a name other than 'rules' and 'ollama:…', which belong to the provisional judges"
    return None


def normalize_name(name: str) -> str:
    """Return the name in Unicode NFC without surrounding whitespace, as it is stored."""
    return unicodedata.normalize("NFC", name).strip()


def _check_judge(
    location: Location, raw: Mapping[str, Any], owner: str | None, option: str | None, *, allow_reserved_name: bool
) -> str | None:
    """Return the judge's name. The file, the option --judge and the sheet's owner must not contradict each other."""
    in_file = raw.get("judge")
    if isinstance(in_file, str) and not in_file.strip():
        in_file = None
    given = [name for name in (in_file, option, owner) if name is not None]  # the most binding name is last
    if not given:
        location.add_problem("judge", shown(in_file), "the judge's name: write it into the file or pass --judge NAME")
        return None
    for name in given:
        if requirement := unmet_name_requirement(name, allow_reserved_name=allow_reserved_name):
            location.add_problem("judge", shown(name), requirement)
            return None
    *others, expected = map(normalize_name, given)
    reason = "as given by --judge; use one of the two names" if owner is None else "whose sheet this is"
    for name in others:
        if name != expected:
            location.add_problem("judge", shown(name), f"{shown(expected)}, {reason}")
            return None
    return expected


def _check_tip(location: Location, raw: object, tip: SheetTip, rubric: Rubric) -> TipScore | None:
    """Return the tip's scores, or None if any is blank or invalid."""
    if not isinstance(raw, Mapping):
        location.add_problem("tip", shown(raw), "the tip as exported, with its scores")
        return None
    check_text(location, raw, "tip", tip.tip)
    check_text(location, raw, "rationale", tip.rationale)
    overlong = _read_flag(location, raw, "overlong")
    scores = _read_scores(location, raw, rubric)
    note = raw.get("note")
    if note is not None and not isinstance(note, str):
        location.add_problem("note", shown(note), "a text")
    elif note is not None and len(note) > MAX_NOTE:
        location.add_problem("note", f"{len(note)} characters", f"at most {MAX_NOTE} characters")
    if scores is None:
        return None
    return TipScore(scores, overlong, _normalize_newlines(note) if isinstance(note, str) else "")


def _read_scores(location: Location, raw: Mapping[str, Any], rubric: Rubric) -> dict[str, int] | None:
    """Return the scores by scale, or None if any is blank or invalid."""
    raw_scores = raw.get("scores")
    if not isinstance(raw_scores, Mapping):
        location.add_problem("scores", describe_value(raw, "scores"), f"an object with {', '.join(rubric.scale_names)}")
        return None
    unknown_names = (name for name in raw_scores if name not in rubric.scale_names)
    for name in islice(unknown_names, 20):
        expected = f"only the rubric's scales: {', '.join(rubric.scale_names)}"
        location.add_problem(f"scores.{shown_name(name)}", shown(raw_scores[name]), expected)
    scores: dict[str, int] = {}
    for scale in rubric.scales:
        value = raw_scores.get(scale.name, _MISSING)
        if value is None:  # blank
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and scale.min <= value <= scale.max and value == int(value):
            scores[scale.name] = int(value)
        else:
            seen = describe_value(raw_scores, scale.name)
            location.add_problem(
                f"scores.{scale.name}", seen, f"a whole number from {scale.min} to {scale.max}, or null"
            )
    return scores if len(scores) == len(rubric.scales) else None


def _read_flag(location: Location, raw: Mapping[str, Any], key: str) -> bool:
    """Return a boolean. Any other value is a problem and is returned as False."""
    value = raw.get(key)
    if not isinstance(value, bool):
        location.add_problem(key, describe_value(raw, key), "true or false")
    return value is True


def check_value(location: Location, raw: Mapping[str, Any], key: str, value: str, field: str = "") -> None:
    """Check that `raw[key]` is the exported `value`. `field` replaces the key in the problem."""
    if raw.get(key) != value:
        location.add_problem(field or key, describe_value(raw, key), f"{shown(value)}, as exported")


def check_text(location: Location, raw: Mapping[str, Any], key: str, text: str, field: str = "") -> None:
    """Check that a text is unchanged, except for line endings and an apostrophe that a spreadsheet has removed."""
    value, original = raw.get(key), _normalize_newlines(text)
    if not isinstance(value, str):
        location.add_problem(field or key, describe_value(raw, key), f"the text as exported, {shown(text)}")
        return
    current = _normalize_newlines(value)
    if current == original or (CSV_ROW in raw and f"'{current}" == original):
        return
    characters = enumerate(zip(current, original, strict=False))
    differences = (index for index, (now, before) in characters if now != before)
    first_difference = next(differences, min(len(current), len(original)))  # one may be a prefix of the other
    start = max(0, first_difference - 12)  # show some characters before the difference
    position = f" from character {start + 1} on" if start else ""
    expected = f"the text as exported, {shown(original[start : start + 200])}{position}"
    location.add_problem(field or key, shown(current[start : start + 200]) + position, expected)


def describe_value(raw: Mapping[str, Any], key: str) -> str:
    """Describe the value of a key. If the key is missing, name a similar key."""
    if key in raw:
        return shown(raw[key])
    # Limited, because a crafted file could make the comparison slow.
    others = {name.casefold(): name for name in islice(raw, 50) if isinstance(name, str) and len(name) <= 40}
    similar = difflib.get_close_matches(key, others, n=1, cutoff=0.75)
    return f"no such key, but {shown(others[similar[0]])}" if similar else "no such key"


def _row_of(raw: object) -> int | None:
    """Return the spreadsheet row of an item or tip, or None if it was not read from CSV."""
    row = raw.get(CSV_ROW) if isinstance(raw, Mapping) else None
    return row if isinstance(row, int) and 0 < row < 2**31 else None  # a JSON file may have any value there


def _normalize_newlines(text: str) -> str:
    return _NEWLINE.sub("\n", text)
