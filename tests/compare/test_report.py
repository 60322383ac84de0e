"""The board as text: nothing is lost, nothing is run by a spreadsheet, nothing is read as markup."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.boards import HOSTILE, PAIRS, SCALES, board
from tipbench.compare.duels import Duel, duel_table
from tipbench.compare.matrix import Pair
from tipbench.compare.report import (
    STATE_TEXTS,
    TEXT_COLUMNS,
    State,
    chance_text,
    footer_lines,
    label_of,
    markdown_table,
    plain_markdown,
    state_of,
    table_rows,
    to_csv,
    to_markdown,
)
from tipbench.text import csv_text


def is_missing(pair: Pair, scenario: str) -> bool:
    return pair == PAIRS[0] and scenario.endswith(("morning", "evening"))


def test_the_table_has_a_line_for_each_row_and_a_cell_for_each_column() -> None:
    leaderboard = board()
    columns, rows = table_rows(leaderboard)
    assert columns[:7] == ["rank", "model", "prompt", "composite", "standing", "95 % interval", "P(best)"]
    assert set(SCALES) < set(columns)
    assert set(TEXT_COLUMNS) < set(columns)
    assert len(rows) == 12
    assert {len(row) for row in rows} == {len(columns)}


def test_with_a_baseline_differences_to_it_and_to_the_leader_are_shown() -> None:
    leaderboard, plain = board(baseline=PAIRS[0]), board()
    columns, rows = table_rows(leaderboard)
    assert columns[7:11] == ["to leader", "p", "to baseline", "p (baseline)"]
    own = [row for row in rows if row[1:3] == [PAIRS[0].model, PAIRS[0].prompt]]
    assert own[0][9:11] == [None, None]
    assert all(row[9] and row[10] for row in rows if row not in own)
    assert [row[:9] for row in rows] == [row[:9] for row in table_rows(plain)[1]], "p and standing belong together"


@pytest.mark.parametrize(("n", "shown"), [(4, False), (8, True)])
def test_a_chance_of_being_best_is_shown_to_people_from_six_scenarios_on(n: int, shown: bool) -> None:
    leaderboard = board(n=n)
    columns, rows = table_rows(leaderboard)
    assert all((row[columns.index("P(best)")] is not None) is shown for row in rows)
    assert any(note.startswith("P(best) needs at least 6 scenarios") for note in leaderboard.notes) is not shown
    chances = [row["p_best"] for row in leaderboard.to_json()["standings"]]
    assert sum(chances) == pytest.approx(1), "programs get the numbers either way"


def test_the_smallest_detectable_difference_is_below_the_table() -> None:
    leaderboard = board()
    least = leaderboard.to_json()["verdict"]["smallest_detectable"]
    assert footer_lines(leaderboard)[0] == (
        f"Differences to the leader of less than {least:.1f} points are unlikely to be detected with 8 scenarios."
    )
    assert not any("unlikely to be detected" in line for line in footer_lines(board(n=4)))


def test_attribution_names_excluded_rows() -> None:
    def without_llama(pair: Pair, scenario: str) -> bool:
        return pair.model == "llama3.2:3b" and scenario.startswith("nurse")

    leaderboard = board(missing=without_llama)
    (shown,) = [line for line in footer_lines(leaderboard) if line.startswith("What explains")]
    assert shown.startswith("What explains the differences (over the complete rows, without llama3.2:3b): model ")
    assert leaderboard.to_json()["attribution_details"]["without"] == ["llama3.2:3b"]


def test_a_board_by_model_has_no_column_for_prompts() -> None:
    columns, rows = table_rows(board(by="model"))
    assert "prompt" not in columns
    assert len(rows) == 4


def test_an_unknown_value_is_not_a_number() -> None:
    columns, rows = table_rows(board(PAIRS[:2], missing=lambda _pair, _scenario: True))
    for name in ("rank", "composite", "95 % interval", "P(best)", "to leader", "p"):
        assert {row[columns.index(name)] for row in rows} == {None}


def test_every_row_shows_its_relation_to_the_leader() -> None:
    leaderboard = board(missing=is_missing)
    columns, rows = table_rows(leaderboard)
    shown = [row[columns.index("standing")] for row in rows]
    order = [STATE_TEXTS[state] for state in State]
    assert (shown[0], shown[-1]) == ("leader", "not ranked")
    places = [order.index(each or "") for each in shown]
    assert places == sorted(places)
    assert state_of(leaderboard, Pair("no", "such")) is State.INCOMPLETE


def test_csv_has_the_names_of_the_json_form_and_does_not_round() -> None:
    leaderboard = board()
    rows = list(csv.DictReader(io.StringIO(to_csv(leaderboard))))
    first = leaderboard.standings[0].to_json()
    assert float(rows[0]["composite"]) == first["composite"]
    assert float(rows[1]["diff_to_leader_ci_low"]) == leaderboard.standings[1].to_json()["diff_to_leader"]["ci_low"]
    assert rows[0]["diff_to_leader_mean"] == ""
    plain = {name for name in first if not name.startswith("diff_to_")}
    assert plain < set(rows[0])


def test_no_cell_of_a_csv_is_a_formula() -> None:
    leaderboard = board([Pair(name, "=1+1") for name in HOSTILE])
    rows = list(csv.reader(io.StringIO(to_csv(leaderboard))))
    numbers = re.compile(r"-?[\d.e-]+")
    assert all(
        cell[:1] not in ("=", "+", "-", "@", "\t", "\r") or numbers.fullmatch(cell) for row in rows for cell in row
    )
    assert "'=HYPERLINK(1)" in {cell for row in rows for cell in row}


@settings(max_examples=20)
@given(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs"])), min_size=1, max_size=4))
def test_csv_values_round_trip_except_for_the_apostrophe(cells: list[str]) -> None:
    columns = [f"c{at}" for at in range(len(cells))]
    _, row = csv.reader(io.StringIO(csv_text(columns, [cells]), newline=""))
    assert [cell.removeprefix("'") for cell in row] == [cell.removeprefix("'") for cell in cells]


@settings(max_examples=20)
@given(st.text())
def test_a_csv_has_no_control_characters(text: str) -> None:
    table = csv_text(["a"], [[text]])
    assert not {char for char in table if ord(char) < 32 or 127 <= ord(char) < 160} - {"\n", "\t"}
    table.encode()


def test_csv_has_a_provisional_column_on_every_line() -> None:
    for provisional in (True, False):
        rows = csv.DictReader(io.StringIO(to_csv(board(provisional=provisional))))
        assert {row["provisional"] for row in rows} == {str(provisional).lower()}


@pytest.mark.parametrize("text", ["(@team)", "https://evil.example/x", "www.evil.example"])
def test_markdown_has_no_mentions_and_no_links(text: str) -> None:
    markdown = plain_markdown(text)
    assert not re.search(r"(?<!\w)@\w|@[\w-]+\.\w|\w://|www\.", markdown)
    assert re.sub("[\\\\\u200b]", "", markdown) == text


def test_scenarios_and_hashes_are_unchanged_in_markdown() -> None:
    assert plain_markdown("nurse@morning tip-v1@ab12 qwen2.5:0.5b/v1") == "nurse@morning tip-v1@ab12 qwen2.5:0.5b/v1"


@settings(max_examples=20)
@given(st.text())
def test_a_markdown_cell_is_one_cell_and_no_markup(text: str) -> None:
    lines = markdown_table(["a", "b"], [[text, None]]).split("\n")
    assert len(lines) == 4
    bare = re.sub(r"\\.", "", lines[2])
    assert bare.count("|") == 3
    assert not set(bare) & set("<>`*[]")


def test_markdown_has_verdict_table_and_reasons() -> None:
    leaderboard = board(missing=is_missing)
    text = to_markdown(leaderboard)
    assert text.startswith("## tip-bench-test\n\n**")
    assert text.count("\n| ") == 14
    assert "No attribution" in text
    assert "- Note: Rows that share fewer than 6 scenarios with the leader are not ranked" in text


def test_the_label_of_a_reference_has_no_prompt() -> None:
    assert label_of(board(), Pair("baseline:template", "none")) == "baseline:template"
    assert label_of(board(), Pair("a:1b", "none")) == "a:1b/none"


def test_attribution_is_below_the_table() -> None:
    (line,) = [line for line in footer_lines(board()) if line.startswith("What explains")]
    assert re.fullmatch(
        r"What explains the differences: model <?\d+ % \(p \S+\), prompt <?\d+ % \(p \S+\), "
        r"model × prompt <?\d+ % \(p \S+\), scenario <?\d+ %, unexplained <?\d+ %\.",
        line,
    )


def test_duels_are_below_the_table_with_their_points() -> None:
    first, second = PAIRS[:2]
    duels = [Duel(first, second, f"s{at}", "first") for at in range(6)]
    shown = footer_lines(board(duels=duel_table(duels)))[-1]
    assert f"{first} 6 of 6, {second} 0 of 6" in shown


def test_a_probability_from_resampling_is_never_shown_as_0_or_1() -> None:
    assert chance_text(0.0) == "<1 %"
    assert chance_text(1.0) == ">99 %"
    assert chance_text(0.62) == "62 %"
    assert chance_text(None) is None
