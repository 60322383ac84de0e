"""The sheet as a file: writing, reading back, and its published schema."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from sheets import filled, other_rubric, small_sheet

from tipbench.errors import SheetRefused, UsageError
from tipbench.judge.check import check_sheet
from tipbench.judge.sheet import sheet_json, sheet_text
from tipbench.judge.sheet_file import MAX_BYTES, parse_sheet, read_sheet_file, sheet_csv

SHEET = small_sheet()
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "sheet.schema.json").read_text("utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
CONTENT = json.dumps(filled(SHEET), ensure_ascii=False).encode()


def refusal(content: bytes) -> str:
    with pytest.raises(SheetRefused) as caught:
        parse_sheet(content)
    return str(caught.value)


# The file


def test_a_written_sheet_is_read_back() -> None:
    assert parse_sheet(sheet_text(SHEET).encode()) == sheet_json(SHEET)


def test_scores_given_so_far_are_filled_in() -> None:
    given = check_sheet(filled(SHEET), SHEET).finished
    some = {item: given[item] for item in ("i000", "i001")}
    again = check_sheet(parse_sheet(sheet_text(SHEET, some).encode()), SHEET)
    assert again.finished == some
    assert again.unfinished == ("i002",)


@pytest.mark.parametrize(
    "content",
    [
        codecs.BOM_UTF8 + CONTENT,
        CONTENT.decode().encode("utf-16"),
        codecs.BOM_UTF16_BE + CONTENT.decode().encode("utf-16-be"),
        b"\r\n\t " + CONTENT + b"\n\n",
        json.dumps(filled(SHEET), indent=4).replace("\n", "\r\n").encode(),
    ],
    ids=["BOM", "UTF-16", "UTF-16 big-endian", "white space", "indented, CRLF"],
)
def test_the_same_sheet_in_other_bytes_is_the_same_sheet(content: bytes) -> None:
    assert parse_sheet(content) == filled(SHEET)


def test_a_lone_surrogate_in_a_tip_round_trips() -> None:
    sheet = small_sheet(text="\ud83d")
    content = sheet_text(sheet).encode("utf-8", "backslashreplace")
    assert check_sheet(parse_sheet(content), sheet).unfinished == ("i000", "i001", "i002")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Line 1, column 1"),
        (b"Here is your sheet!", "Here is your sheet!"),
        (b"PK\x03\x04\x14\x00", "judge export"),
        (b"a,b,c\n1,2,3\n", "'row' and 'item'"),
        (CONTENT[:-40], "not valid JSON"),
        (b'{\n "format": "tipbench-sheet/1",\n "items": [,]}', "Line 3, column 12"),
        (b"[]", "an object {"),
        (b'{\n"a": 1,\n  "a": 2}', "Line 3, column 3: expected each key once in an object; found 'a' again"),
        (b'{"x": {"a": 1, "b": {"a": 1}, "\\u0061": 2}}', "Line 1, column 31"),
        (b'{"note": "NaN",\n "tone": NaN}', "Line 2, column 10: expected a whole number or null; found NaN"),
        (b'{"tone": -Infinity}', "Line 1, column 10"),
        (b'{"tip": "a\nb"}', "Line 1, column 11"),
        (b'{\n"tip": "\xc3\x28"}', "Line 2, byte 11"),
        (codecs.BOM_UTF16_LE + b"{\x00\x00", "UTF-16"),
        pytest.param(b'{"a":' * 200_000, "more deeply than any sheet", id="200,000 levels"),
    ],
)
def test_an_invalid_sheet_is_refused_with_its_place(content: bytes, words: str) -> None:
    message = refusal(content)
    assert words in message
    assert len(message) < 600
    assert message.isprintable()


def test_a_number_of_a_hundred_thousand_digits_is_refused_as_a_score() -> None:
    text = json.dumps(filled(SHEET)).replace('"tone": 1', f'"tone": {"4" * 100_000}', 1)
    with pytest.raises(SheetRefused, match=r"item i000, tip 1, scores.tone: .* found '4444"):
        check_sheet(parse_sheet(text.encode()), SHEET)


def test_a_number_beyond_floats_is_refused_as_a_score() -> None:
    text = json.dumps(filled(SHEET)).replace('"tone": 1', '"tone": 1e999', 1)
    with pytest.raises(SheetRefused, match=r"found inf"):
        check_sheet(parse_sheet(text.encode()), SHEET)


def test_a_file_beyond_the_limit_is_refused() -> None:
    assert "64 MB" in refusal(b" " * (MAX_BYTES + 1))


@pytest.mark.parametrize(
    "content",
    [b'{"a": "' + b"\\" * 3_000_000, b"{" + b'"a":1,' * 500_000, b"row,item" + b"," * 3_000_000],
    ids=["backslashes", "one key half a million times", "commas"],
)
def test_hostile_megabytes_are_refused_in_time(content: bytes) -> None:
    before = time.process_time()
    refusal(content)
    assert time.process_time() - before < 30


@settings(max_examples=50)
@given(st.binary(max_size=300) | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_give_an_object_or_a_refusal(content: bytes) -> None:
    with contextlib.suppress(SheetRefused):
        assert isinstance(parse_sheet(content), dict)


KEYS = st.sampled_from(['"a"', '"b"', '"\\u0061"', '"{,"', '"\\""'])
LOOSE_JSON = st.recursive(
    st.sampled_from(["null", "-1", "4.0", "NaN", "-Infinity", '"a"', '"NaN, {"', '"\\\\"']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda values: f"[{', '.join(values)}]")
        | st.lists(st.tuples(KEYS, inner), max_size=4).map(
            lambda pairs: "{" + ",\n".join(f"{key}: {value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.lists(st.tuples(KEYS, LOOSE_JSON), max_size=4))
def test_a_double_key_or_constant_is_refused_with_its_line_and_column(pairs: list[tuple[str, str]]) -> None:
    text = "{" + ",\n".join(f"{key}: {value}" for key, value in pairs) + "}"
    try:
        raw = parse_sheet(text.encode())
    except SheetRefused as exc:
        place = re.match(r"Line (\d+), column (\d+): .*; found (NaN|-Infinity|'.*' again)\.", str(exc))
        assert place is not None
        assert text.splitlines()[int(place[1]) - 1][int(place[2]) - 1] in 'N-"'
    else:
        assert json.dumps(raw, allow_nan=False)


@settings(max_examples=50)
@given(st.data())
def test_a_torn_or_altered_file_is_refused_or_gives_scores_in_range(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from([CONTENT, CSV]))
    start = data.draw(st.integers(0, len(source)))
    end = data.draw(st.integers(start, min(len(source), start + 40)))
    content = source[:start] + data.draw(st.binary(max_size=6)) + source[end:]
    with contextlib.suppress(SheetRefused):
        checked = check_sheet(parse_sheet(content), SHEET)
        scores = [score for item in checked.finished.values() for tip in item.tips for score in tip.scores.values()]
        assert all(type(score) is int and 1 <= score <= 5 for score in scores)


CSV = sheet_csv(SHEET, check_sheet(filled(SHEET), SHEET).finished).encode()


# On disk


def test_a_sheet_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "sheet").write_bytes(CONTENT)
    assert read_sheet_file(tmp_path / "sheet") == filled(SHEET)


def test_the_content_and_not_the_file_name_decides_the_format(tmp_path: Path) -> None:
    (tmp_path / "sheet.json").write_bytes(CSV)
    assert read_sheet_file(tmp_path / "sheet.json")["sheet"] == SHEET.id


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file .*gone\.json"):
        read_sheet_file(tmp_path / "gone.json")


def test_a_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        read_sheet_file(tmp_path)


def test_an_invalid_file_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_sheet_file(Path("a\x00b"))


def test_an_endless_file_is_read_up_to_the_limit() -> None:
    with pytest.raises(SheetRefused, match="64 MB"):
        read_sheet_file(Path("/dev/zero"))


# The published schema


@pytest.mark.parametrize("sheet", [SHEET, replace(SHEET, judge=None), small_sheet(rubric=other_rubric())])
def test_exported_and_filled_sheets_are_valid(sheet: Any) -> None:
    for raw in (sheet_json(sheet), filled(sheet), json.loads(sheet_text(sheet))):
        VALIDATOR.validate(raw)


def test_a_sheet_that_apply_accepts_is_valid() -> None:
    raw = filled(SHEET)
    raw["items"][0]["tips"][0]["scores"]["tone"] = 4.0
    raw["items"][0]["tips"][0]["note"] = None
    raw["tool"] = raw["items"][0]["tips"][0]["confidence"] = 0.7
    del raw["instructions"], raw["rubric"]["text"], raw["items"][1]["scenario"], raw["items"][2]
    assert len(check_sheet(raw, SHEET).finished) == 2
    VALIDATOR.validate(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("overlong", 1),
        ("scores", {"tone": 4.5}),
        ("note", "x" * 4001),
    ],
)
def test_the_schema_refuses_wrong_types_too(key: str, value: object) -> None:
    raw = filled(SHEET)
    raw["items"][0]["tips"][0][key] = value
    assert not VALIDATOR.is_valid(raw)
