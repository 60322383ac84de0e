"""Output on a terminal: no control sequences, and unknown as a dash."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tipbench.cli.console import entry_text, print_message, print_table
from tipbench.cli.experiments import print_rows
from tipbench.text import csv_text, replace_controls


def test_a_message_that_quotes_a_server_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    print_message("error: \x1b[2Jgone")
    assert capsys.readouterr().err == "error:  [2Jgone\n"


def test_unknown_is_a_dash_and_zero_is_not() -> None:
    assert entry_text(None) == "–"
    assert entry_text(0.0) == "0.00"
    assert entry_text(False) == "no"


def test_a_table_without_a_terminal_is_whole_and_has_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 400
    print_table(["name", "n"], [[long, 1], ["[red]y", None]], text_columns=["name"], n_always_shown=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"{long}  1"
    assert lines[3] == f"[red]y{' ' * (400 - 6)}  –"
    assert all(line == line.rstrip() for line in lines)


def test_a_narrow_terminal_drops_columns_from_the_right_and_reports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    rows: list[dict[str, object]] = [{"run": "abcdefgh", "model": "alpha:135m", "tips": 3, "speed": 1.5, "more": 2.5}]
    print_rows(
        ["run", "model", "tips", "speed", "more"], rows, "table", text_columns=["run", "model"], n_always_shown=2
    )
    printed = capsys.readouterr()
    assert "tips" in printed.out
    assert "speed" not in printed.out
    assert "too narrow for speed, more; --format csv has all" in printed.err


def test_a_csv_cell_is_never_a_formula() -> None:
    for text in ["=1+1", "+1", "-cmd", "@SUM(A1)", "\t=1", "\r=1"]:
        assert csv_text([text], []).startswith("'")


@given(st.text().filter(lambda text: text[:1] not in "=+-@\t\r" and "\0" not in text and "\r" not in text))
@example("\x1b[2J")
def test_csv_values_round_trip_with_control_characters_made_visible(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out := io.StringIO())
        print_rows(["a", "b"], [{"a": text, "b": None}], "csv")
    out.seek(0)
    assert list(csv.DictReader(out)) == [{"a": replace_controls(text), "b": ""}]


def test_an_empty_csv_still_has_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(["a", "b"], [], "csv")
    assert capsys.readouterr().out == "a,b\n"
