"""Numbers, names and times formatted for people, and texts without control sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.text import (
    duration,
    file_size,
    interval,
    join_names,
    number,
    one_line,
    p_value,
    parameter_count,
    percent,
    plural,
    printable,
    printable_lines,
    short_name,
)


def test_a_noun_agrees_with_its_number() -> None:
    assert [plural(n, "cell") for n in (0, 1, 2400)] == ["0 cells", "1 cell", "2,400 cells"]
    assert [plural(n, "cell waits", "cells wait") for n in (1, 2)] == ["1 cell waits", "2 cells wait"]


@pytest.mark.parametrize(
    ("names", "text"), [("", ""), ("a", "a"), ("ab", "a and b"), ("abc", "a, b and c"), ("abcde", "a, b, c and 2 more")]
)
def test_names_beyond_the_limit_are_counted(names: str, text: str) -> None:
    assert join_names(names, 3) == text


@given(st.text())
def test_control_sequences_of_terminals_are_removed(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)


@given(st.text())
def test_a_text_keeps_its_lines_and_its_printable_characters(text: str) -> None:
    shown = printable_lines(text)
    assert shown.count("\n") == text.count("\n")
    assert [char for char in shown if char not in " \n"] == [c for c in text if c.isprintable() and c not in " \n"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "unknown"), (0, "0 s"), (0.2, "under 1 s"), (59.6, "60 s"), (150, "2 min"), (20_000, "5.6 h")],
)
def test_durations_are_formatted_for_people(seconds: float | None, expected: str) -> None:
    assert duration(seconds) == expected


def test_sizes_are_formatted_for_people() -> None:
    assert [file_size(n) for n in (None, 0, 384, 98_362_982, 2 * 2**30)] == [
        *(None, "none", "under 1 MiB", "94 MiB", "2.0 GiB")
    ]
    assert [parameter_count(n) for n in (None, 0.0, 0.135, 4.46)] == [None, "none", "135M", "4.46B"]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, "0 %"), (0.005, "<1 %"), (0.995, ">99 %"), (1.0, "100 %"), (None, None)]
)
def test_a_share_is_never_rounded_to_0_or_100_percent(share: float | None, expected: str | None) -> None:
    assert percent(share) == expected


def test_numbers_are_rounded_and_unknown_stays_unknown() -> None:
    assert number(-1.234) == "−1.23"
    assert interval(1.0, None) is None
    assert interval(-1.0, 2.0, "+.1f") == "−1.0 to +2.0"
    assert (p_value(0.0001), p_value(0.25), p_value(None)) == ("<0.001", "0.250", None)


@given(st.text(), st.integers(3, 50))
def test_a_short_name_keeps_its_ends(text: str, most: int) -> None:
    line, short = one_line(text), short_name(text, most)
    assert len(short) <= most
    assert short == line or (short[0], short[-1]) == (line[0], line[-1])


@given(st.text())
def test_a_single_line_has_no_control_or_direction_characters(text: str) -> None:
    line = one_line(text)
    assert len(line.splitlines()) <= 1
    assert not set(line) & set("\x00\x1b\u202e\u2066\ud800")
    line.encode()
