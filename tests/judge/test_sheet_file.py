"""The CSV form: it contains its instructions and no formula, and spreadsheets may save it."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sheets import filled, other_rubric, small_sheet

from tipbench.errors import SheetRefused
from tipbench.judge.check import Problem, check_sheet
from tipbench.judge.sheet import FilledSheet, ItemScore, SheetTip, TipItem, TipSheet
from tipbench.judge.sheet_file import BOM, escape_cell, parse_sheet, sheet_csv, unescape_cell

SHEET = small_sheet()
ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.text("'=+-@\t\r\n \",;␛00241b\x00\ud83d1eE😀")


def filled_csv(sheet: TipSheet = SHEET) -> str:
    checked = check_sheet(filled(sheet), sheet)
    return sheet_csv(sheet, checked.finished)


def read_rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text.removeprefix(BOM), newline="")))


def write_rows(rows: Iterable[Iterable[str]], separator: str = ",", line_end: str = "\r\n") -> str:
    """As a spreadsheet writes a table: quotes only where needed."""
    out = io.StringIO()
    csv.writer(out, delimiter=separator, lineterminator=line_end).writerows(rows)
    return out.getvalue()


def check(text: str, sheet: TipSheet = SHEET) -> FilledSheet[ItemScore]:
    return check_sheet(parse_sheet(text.encode()), sheet)


def problems_of(text: str, sheet: TipSheet = SHEET) -> list[Problem]:
    with pytest.raises(SheetRefused) as refused:
        check(text, sheet)
    return [problem for problem in refused.value.problems if isinstance(problem, Problem)]


def with_cell(column: str, value: str, *, tip_row: int = 0) -> tuple[str, int]:
    """The filled table with one cell changed, and its row number in a spreadsheet."""
    rows = read_rows(filled_csv())
    at = _tip_rows(rows)[tip_row]
    rows[at][rows[0].index(column)] = value
    return write_rows(rows), at + 1


def _tip_rows(rows: list[list[str]]) -> list[int]:
    return [number for number, row in enumerate(rows) if row[0] == "tip"]


# Writing


def test_the_first_rows_describe_the_file() -> None:
    rows = read_rows(sheet_csv(SHEET))
    about = {row[1]: row[4] for row in rows if row[0] == "about"}
    assert about == {
        "format": "tipbench-sheet/1",
        "sheet": SHEET.id,
        "experiment": SHEET.experiment,
        "judge": "anna",
        "rubric id": SHEET.rubric.id,
        "rubric sha256": escape_cell(SHEET.rubric.sha256),
    }
    assert [row[0] for row in rows][:9] == ["row", *["about"] * 6, *["instructions"] * 2]


def test_the_first_tip_is_near_the_top_and_the_rubric_is_below_the_tips() -> None:
    kinds = [row[0] for row in read_rows(sheet_csv(SHEET))[1:]]
    assert kinds.index("tip") < 10
    assert kinds == sorted(kinds, key=["about", "instructions", "tip", "rubric"].index)


def test_the_file_has_the_rubric_line_by_line() -> None:
    lines = [unescape_cell(row[4]) for row in read_rows(sheet_csv(SHEET)) if row[0] == "rubric"]
    assert lines == [line for line in SHEET.rubric.text.splitlines() if line.strip()]


def test_there_is_one_row_for_each_tip_with_a_column_for_each_scale() -> None:
    rows = read_rows(sheet_csv(small_sheet(rubric=other_rubric())))
    assert [name for name in rows[0] if name.startswith("score:")] == ["score:warmth", "score:note"]
    assert [(row[1], row[2]) for row in rows if row[0] == "tip"] == [
        (f"i{item:03d}", str(tip)) for item in range(3) for tip in (1, 2)
    ]


def test_a_card_of_another_structure_is_shown_unchanged() -> None:
    item = TipItem("i1", {"id": "x", "about": "a shop"}, format_ok=True, tips=(SheetTip("Sweep.", "", overlong=False),))
    assert "a shop" in sheet_csv(replace(SHEET, items=(item,)))


@settings(max_examples=25)
@given(ANY_TEXT)
def test_no_cell_can_be_run_as_a_formula(text: str) -> None:
    cell = escape_cell(text)
    assert not cell.lstrip().startswith(("=", "+", "-", "@"))
    assert not cell.startswith(("\t", "\r"))


@pytest.mark.parametrize(
    "text",
    [
        "12e5",
        "1,5",
        "TRUE",
        "  =1+1",
    ],
)
def test_a_text_that_a_spreadsheet_would_change_gets_one_apostrophe(text: str) -> None:
    assert escape_cell(text) == f"'{text}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Set a timer.",
        "a=b",
    ],
)
def test_an_ordinary_text_is_unchanged(text: str) -> None:
    assert escape_cell(text) == text


@settings(max_examples=25)
@given(ANY_TEXT)
def test_any_text_round_trips_through_its_cell(text: str) -> None:
    assert unescape_cell(escape_cell(text)) == text


# Reading


@settings(max_examples=25)
@given(ANY_TEXT, ANY_TEXT)
def test_any_text_round_trips_through_the_file(tip: str, rationale: str) -> None:
    item = TipItem("i1", {"id": "x"}, format_ok=True, tips=(SheetTip(tip, rationale, overlong=False),))
    raw = parse_sheet(sheet_csv(replace(SHEET, items=(item,))).encode())
    assert (raw["items"][0]["tips"][0]["tip"], raw["items"][0]["tips"][0]["rationale"]) == (tip, rationale)


@settings(max_examples=25)
@given(ANY_TEXT, ANY_TEXT, st.sampled_from([",", ";", "\t"]), st.sampled_from(["\n", "\r\n"]))
def test_any_text_is_accepted_after_a_spreadsheet_has_saved_it(
    tip: str, rationale: str, separator: str, line_end: str
) -> None:
    item = TipItem("i1", {"id": "x"}, format_ok=True, tips=(SheetTip(tip, rationale, overlong=False),))
    sheet = replace(SHEET, items=(item,))
    rows = [[cell.replace("\r\n", "\n").replace("\r", "\n") for cell in row] for row in read_rows(sheet_csv(sheet))]
    text = write_rows([[cell.replace("\n", line_end) for cell in row] for row in rows], separator, line_end)
    assert check(text, sheet).unfinished == ("i1",)


@pytest.mark.parametrize("sheet", [SHEET, small_sheet(rubric=other_rubric())], ids=["tip-v1", "other scales"])
def test_csv_and_json_give_the_same_scores(sheet: TipSheet) -> None:
    assert check(filled_csv(sheet), sheet) == check_sheet(filled(sheet), sheet)


def test_an_exported_table_is_completely_unfinished() -> None:
    assert check(sheet_csv(SHEET)) == FilledSheet("anna", {}, ("i000", "i001", "i002"))


def remove_guards(text: str) -> str:
    return write_rows([[cell.removeprefix("'") for cell in row] for row in read_rows(text)])


def move_columns(text: str) -> str:
    return write_rows([[*row[5:], *row[:5]] for row in read_rows(text)])


def add_columns(text: str) -> str:
    head, *rows = read_rows(text)
    return write_rows([[*head, "my thoughts", "", ""], *([*row, "hm", "", ""] for row in rows)])


def add_rows(text: str) -> str:
    rows = read_rows(text)
    return write_rows([*rows[:9], [], [""] * 14, *rows[9:], [], [" "], []])


def write_decimals(text: str) -> str:
    head, *rows = read_rows(text)
    return write_rows([head, *([f"{cell}.0" if cell in "12345" and cell else cell for cell in row] for row in rows)])


def lowercase_flags(text: str) -> str:
    flags = {"TRUE": "true", "FALSE": "0"}
    return write_rows([[flags.get(cell, cell) for cell in row] for row in read_rows(text)])


def drop_last_cells(text: str) -> str:
    return write_rows([row[:5] if row[0] in ("about", "rubric") else row for row in read_rows(text)])


SPREADSHEETS: dict[str, Callable[[str], str]] = {
    "saved again": lambda text: write_rows(read_rows(text)),
    "semicolons": lambda text: write_rows(read_rows(text), ";"),
    "CR everywhere": lambda text: text.replace("\r\n", "\n").replace("\n", "\r"),
    "apostrophes eaten": remove_guards,
    "columns moved": move_columns,
    "columns added": add_columns,
    "empty rows": add_rows,
    "4.0": write_decimals,
    "true and 0": lowercase_flags,
    "short rows": drop_last_cells,
}


@pytest.mark.parametrize("name", SPREADSHEETS)
def test_what_a_spreadsheet_does_on_saving_changes_no_score(name: str) -> None:
    assert check(SPREADSHEETS[name](filled_csv())) == check_sheet(filled(SHEET), SHEET)


def test_unicode_text_of_a_spreadsheet_is_read() -> None:
    content = write_rows(read_rows(filled_csv()), "\t").encode("utf-16")
    assert check_sheet(parse_sheet(content), SHEET) == check_sheet(filled(SHEET), SHEET)


def test_a_removed_guard_apostrophe_is_not_a_change() -> None:
    item = TipItem("i1", {"id": "x"}, format_ok=True, tips=(SheetTip("'Now' is best", "'", overlong=False),))
    sheet = replace(SHEET, items=(item,))
    assert check(remove_guards(sheet_csv(sheet)), sheet).unfinished == ("i1",)


def test_notes_with_quoted_line_breaks_round_trip() -> None:
    text, _ = with_cell("note", 'he said "no";\r\nthen, yes')
    assert check(text).finished["i000"].tips[0].note == 'he said "no";\nthen, yes'


def test_the_name_is_taken_from_its_row() -> None:
    sheet = replace(SHEET, judge=None)
    rows = read_rows(filled_csv(sheet))
    next(row for row in rows if row[1] == "judge")[4] = "bert"
    assert check(write_rows(rows), sheet).judge == "bert"


def test_format_ok_may_be_written_into_every_row() -> None:
    rows = read_rows(filled_csv())
    at = rows[0].index("format_ok")
    for row in rows:
        if row[0] == "tip":
            row[at] = "FALSE"
    assert [score.format_ok for score in check(write_rows(rows)).finished.values()] == [False, False, False]


# Refusing


@pytest.mark.parametrize(
    ("column", "value", "field", "word"),
    [
        ("score:tone", "6", "scores.tone", "found 6"),
        ("score:tone", "4.5", "scores.tone", "found '4.5'"),
        ("score:tone", "٤", "scores.tone", "whole number"),
        ("score:tone", "=2+2", "scores.tone", "found '=2+2'"),
        ("overlong", "maybe", "overlong", "found 'maybe'"),
        ("tip", "another", "tip", "as exported"),
        ("note", "x" * 4001, "note", "4001 characters"),
        ("number", "", "number", "the tip's number"),
        ("number", "2000", "number", "the tip's number"),
        ("row", "mine", "row", "delete rows of your own"),
        ("item", "i999", "item", "an item of sheet s7f3a9c"),
    ],
)
def test_a_wrong_cell_is_refused_with_its_row(column: str, value: str, field: str, word: str) -> None:
    text, row = with_cell(column, value)
    first = problems_of(text)[0]
    assert (first.row, first.field) == (row, field)
    assert first.message.startswith(f"row {row}, ")
    assert word in first.message


def test_two_values_of_one_flag_are_refused() -> None:
    text, row = with_cell("format_ok", "FALSE", tip_row=1)
    message = problems_of(text)[0].message
    assert f"TRUE in row {row - 1} and FALSE in row {row}" in message


def test_a_tip_twice_is_refused_with_both_rows() -> None:
    rows = read_rows(filled_csv())
    last = _tip_rows(rows)[-1]
    first = problems_of(write_rows([*rows, rows[last]]))[0]
    assert (first.row, first.field) == (len(rows) + 1, "number")
    assert f"row {last + 1} has this one too" in first.message


def test_a_tip_whose_row_was_deleted_is_refused() -> None:
    rows = read_rows(filled_csv())
    del rows[_tip_rows(rows)[-1]]
    assert problems_of(write_rows(rows))[0].item == "i002"


def test_an_item_whose_rows_were_deleted_is_unfinished() -> None:
    rows = read_rows(filled_csv())
    first, last = _tip_rows(rows)[-2:]
    assert check(write_rows([*rows[:first], *rows[last + 1 :]])).unfinished == ("i002",)


def test_rows_of_one_item_with_two_hashes_are_refused() -> None:
    text, _ = with_cell("sha256", "0" * 64, tip_row=1)
    assert "i000" in {problem.item for problem in problems_of(text)}


def test_another_rubric_is_refused() -> None:
    rows = read_rows(filled_csv())
    next(row for row in rows if row[1] == "rubric sha256")[4] = "x"
    assert problems_of(write_rows(rows))[0].field == "rubric.sha256"


def test_a_table_without_its_first_rows_is_refused() -> None:
    rows = [row for row in read_rows(filled_csv()) if row[0] != "about"]
    assert [problem.field for problem in problems_of(write_rows(rows))] == ["rubric.id", "rubric.sha256"]


def test_about_rows_that_contradict_each_other_are_refused() -> None:
    rows = read_rows(filled_csv())
    assert "as in a row before" in problems_of(write_rows([*rows, ["about", "judge", "", "", "bert"]]))[0].message


@pytest.mark.parametrize(
    "column",
    [
        "number",
        "tip",
    ],
)
def test_a_missing_column_is_named(column: str) -> None:
    rows = read_rows(filled_csv())
    at = rows[0].index(column)
    problem = problems_of(write_rows([row[:at] + row[at + 1 :] for row in rows]))[0]
    assert (problem.field, problem.row) == (column, 1)


def test_a_column_twice_is_refused() -> None:
    assert "each column once" in problems_of(write_rows([[*row, row[4]] for row in read_rows(filled_csv())]))[0].message


def test_cells_beyond_the_columns_are_refused() -> None:
    rows = read_rows(filled_csv())
    rows[-1].append("stray")
    assert problems_of(write_rows(rows))[0].row == len(rows)


def test_a_table_cut_inside_a_cell_is_refused_with_its_line() -> None:
    with pytest.raises(SheetRefused, match=r"^Line \d+: the CSV cannot be read"):
        check(filled_csv()[:-3])


def test_a_cell_of_a_megabyte_is_refused_with_its_line() -> None:
    text, _ = with_cell("note", "x" * 1_000_000)
    with pytest.raises(SheetRefused, match=r"^Line \d+: "):
        check(text)


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"tip,{number},1\n" for number in range(100_000)),
        ",".join(map(str, range(500_000))),
    ],
    ids=["foreign items", "one wide row"],
)
def test_hostile_megabytes_are_refused_in_time(text: str) -> None:
    head = "row,item,number,sha256,tip,rationale,format_ok,overlong"
    before = time.process_time()
    for content in (f"{head}\n{text}", f"{head},{text}"):
        problems_of(content)
    assert time.process_time() - before < 30


def test_a_table_of_another_kind_is_refused() -> None:
    with pytest.raises(SheetRefused, match="'row' and 'item'"):
        parse_sheet(b"name,score\na,4\n")


@settings(max_examples=25)
@given(st.text(",;\t\"'\r\n rowitemtpabu1=", max_size=80))
def test_any_text_gives_a_sheet_or_a_refusal(text: str) -> None:
    for head in ("", "row,item,number,sha256,tip,rationale,format_ok,overlong,score:tone\n"):
        with contextlib.suppress(SheetRefused):
            check_sheet(parse_sheet((head + text).encode()), SHEET)
