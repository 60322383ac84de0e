"""Two experiments on the scenarios they share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import known

from support.judged import cells_of
from tipbench.compare.cells import BoardCell, BoardCells, CellFilter
from tipbench.compare.experiments import ExperimentComparison, compare_experiments
from tipbench.compare.matrix import Pair
from tipbench.errors import MixedRubrics, NotEnoughData, UsageError

A, B, C = Pair("a:1b", "v1"), Pair("a:1b", "v2"), Pair("c:1b", "v1")
NAMES = ("tip-bench-may", "tip-bench-june")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
WAVE = [0.5, -0.5, 0.3, -0.3, 0.4, -0.4, 0.2, -0.2]
HIGH = [one + 2 + wave for one, wave in zip(LOW, WAVE, strict=True)]


def compare(first: BoardCells, second: BoardCells, *mapping: tuple[Pair, Pair]) -> ExperimentComparison:
    return compare_experiments(NAMES, (first, second), mapping)


def with_content(board: BoardCells, scenario: str, content: str) -> BoardCells:
    def change(cell: BoardCell) -> BoardCell:
        if cell.scenario != scenario:
            return cell
        return replace(cell, run=replace(cell.run, tags={**cell.run.tags, "scenario_hash": content}))

    return replace(board, cells=tuple(change(cell) for cell in board.cells))


def test_the_json_has_the_documented_format() -> None:
    found = compare(cells_of({A: LOW, B: HIGH}), cells_of({A: HIGH, B: HIGH})).to_json()
    assert found["experiments"] == list(NAMES)
    assert [set(pair) for pair in found["pairs"]] == [
        {"model", "prompt_version", "n_scenarios", "first", "second", "diff"}
    ] * 2
    assert set(found["pairs"][0]["diff"]) == {"mean", "ci_low", "ci_high", "p"}
    assert (found["provisional"], found["notes"]) == (False, [])


def test_a_difference_is_second_minus_first_paired_by_scenario() -> None:
    from scipy.stats import ttest_rel

    (pair,) = compare(cells_of({A: LOW}), cells_of({A: HIGH})).pairs
    difference, expected = known(pair.difference), ttest_rel(HIGH, LOW).confidence_interval(0.95)
    assert difference.mean == pytest.approx(2.0)
    assert (difference.ci_low, difference.ci_high) == pytest.approx((expected.low, expected.high), abs=0.02)
    assert difference.p == pytest.approx(2 / 256)
    assert (pair.first_mean, pair.second_mean) == pytest.approx((sum(LOW) / 8, sum(HIGH) / 8))


def test_p_is_adjusted_over_the_pairs() -> None:
    alone = compare(cells_of({A: LOW}), cells_of({A: [one + wave for one, wave in zip(HIGH, LOW, strict=True)]}))
    noise = [one + wave for one, wave in zip(LOW, WAVE[::-1], strict=True)]
    more = compare(
        cells_of({A: LOW, B: LOW, C: LOW}),
        cells_of({A: [one + wave for one, wave in zip(HIGH, LOW, strict=True)], B: noise, C: noise[::-1]}),
    )
    p = [known(known(pair.difference).p) for pair in (*alone.pairs, *more.pairs)]
    assert p[1] >= p[0]


def test_only_scenarios_that_both_are_judged_in_count() -> None:
    first = cells_of({A: [None, *LOW[1:]]})
    second = cells_of({A: [*HIGH[:6], None, HIGH[7]]})
    (pair,) = compare(first, second).pairs
    assert pair.n_scenarios == 6
    assert pair.first_mean == pytest.approx(sum([*LOW[1:6], LOW[7]]) / 6)


def test_a_scenario_whose_content_changed_is_another_one() -> None:
    (pair,) = compare(cells_of({A: LOW}), with_content(cells_of({A: HIGH}), "p0@s0", "changed")).pairs
    assert pair.n_scenarios == 7


def test_nothing_shared_is_unknown_and_not_zero() -> None:
    (pair,) = compare(cells_of({A: [9.0, None]}), cells_of({A: [None, 9.0]})).pairs
    assert (pair.n_scenarios, pair.first_mean, pair.second_mean, pair.difference) == (0, None, None, None)
    assert pair.to_json()["diff"] is None


def test_one_shared_scenario_has_only_a_mean() -> None:
    (pair,) = compare(cells_of({A: [9.0]}), cells_of({A: [10.0]})).pairs
    assert pair.to_json()["diff"] == {"mean": 1.0, "ci_low": None, "ci_high": None, "p": None}


def test_pairs_of_one_name_are_compared_and_others_are_listed() -> None:
    found = compare(cells_of({A: LOW, B: LOW}), cells_of({A: HIGH, C: HIGH}))
    assert [pair.pair for pair in found.pairs] == [A]
    assert "Only in tip-bench-may: a:1b/v2." in found.notes
    assert "Only in tip-bench-june: c:1b/v1." in found.notes


def test_mapped_pairs_name_both() -> None:
    found = compare(cells_of({A: LOW, B: LOW}), cells_of({B: HIGH, C: HIGH}), (A, B), (B, C))
    first, second = found.to_json()["pairs"]
    assert (first["prompt_version"], first["mapped_to"]) == ("v1", {"model": "a:1b", "prompt_version": "v2"})
    assert second["mapped_to"] == {"model": "c:1b", "prompt_version": "v1"}
    columns, rows = found.table()
    assert [row[:2] for row in rows] == [["a:1b", "v1 → v2"], ["a:1b → c:1b", "v2 → v1"]]
    assert all(len(row) == len(columns) for row in rows)


def test_a_mapping_takes_the_place_of_the_name_and_leaves_other_names_alone() -> None:
    found = compare(cells_of({A: LOW, B: LOW}), cells_of({A: HIGH, B: HIGH}), (A, B))
    assert [(pair.pair, pair.mapped_to) for pair in found.pairs] == [(A, B), (B, None)]


@pytest.mark.parametrize("mapping", [[(C, A)], [(A, C)]])
def test_a_mapped_pair_that_is_not_there_is_refused(mapping: list[tuple[Pair, Pair]]) -> None:
    with pytest.raises(UsageError, match="The pair c:1b/v1 is not on this board"):
        compare(cells_of({A: LOW}), cells_of({A: HIGH}), *mapping)


def test_a_pair_mapped_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        compare(cells_of({A: LOW}), cells_of({A: HIGH, B: HIGH}), (A, A), (A, B))


def test_no_pair_of_one_name_is_not_enough() -> None:
    with pytest.raises(NotEnoughData, match="--map"):
        compare(cells_of({A: LOW}), cells_of({C: HIGH}))


def test_two_rubrics_are_refused() -> None:
    with pytest.raises(MixedRubrics, match="--rejudge"):
        compare(cells_of({A: LOW}), cells_of({A: HIGH}, rubric="tip-v2@" + "b" * 64))


@pytest.mark.parametrize("which", [0, 1])
def test_judged_and_provisional_scores_are_never_mixed(which: int) -> None:
    boards = [cells_of({A: LOW}), cells_of({A: HIGH})]
    boards[which] = replace(boards[which], provisional=True)
    with pytest.raises(NotEnoughData, match=f"Judge {NAMES[which]} first"):
        compare(boards[0], boards[1])


def test_two_provisional_boards_are_compared_with_a_note() -> None:
    found = compare(cells_of({A: LOW}, provisional=True), cells_of({A: HIGH}, provisional=True))
    assert found.to_json()["provisional"] is True
    assert found.notes[0].startswith("Provisional")


@pytest.mark.parametrize("which", [0, 1])
def test_a_provisional_board_is_marked_if_the_other_has_only_floors(which: int) -> None:
    boards = [cells_of({A: LOW}, provisional=True, judges=("rules",))] * 2
    floored = [
        replace(cell, run=replace(cell.run, tags={**cell.run.tags, "floored": "true"})) for cell in boards[0].cells
    ]
    boards[which] = replace(boards[which], cells=tuple(floored), provisional=False, judges=())
    found = compare(boards[0], boards[1])
    assert found.provisional
    assert found.notes[0] == "Provisional: scored by rules, not by people."


def test_other_differences_are_listed() -> None:
    second = cells_of({A: HIGH}, conditions="other", judges=("ben",))
    changed = [replace(cell, run=replace(cell.run, params={**cell.run.params, "temperature": "0.1"}))
               for cell in second.cells]  # fmt: skip
    found = compare(cells_of({A: LOW}), replace(second, cells=tuple(changed)))
    assert "Collected under different conditions: temperature 0.7 → 0.1." in found.notes
    assert any("different judges (anna; ben)" in note for note in found.notes)


def test_the_verdict_names_the_changed_pairs() -> None:
    noise = [one + wave for one, wave in zip(LOW, WAVE, strict=True)]
    found = compare(cells_of({A: LOW, B: HIGH, C: LOW}), cells_of({A: HIGH, B: LOW, C: noise}))
    assert found.verdict == (
        "Better in tip-bench-june: a:1b/v1; worse in tip-bench-june: a:1b/v2; "
        "1 of 3 pairs are not clearly different from their results in tip-bench-may."
    )


@settings(max_examples=20)
@given(st.permutations(range(16)), st.lists(st.floats(2, 17), min_size=16, max_size=16))
def test_the_order_of_cells_changes_nothing(order: list[int], values: list[float]) -> None:
    first = cells_of({A: values[:8], B: values[8:]})
    second = cells_of({A: values[8:], B: values[:8]})
    shuffled = replace(first, cells=tuple(first.cells[at] for at in order))
    assert compare(shuffled, second) == compare(first, second)


def test_provisional_scores_of_different_judges_do_not_compare() -> None:
    first = cells_of({A: LOW}, provisional=True, judges=("rules",))
    second = cells_of({A: HIGH}, provisional=True, judges=("ollama:q",))
    with pytest.raises(NotEnoughData, match=r"tip-bench-may are by rules, those of tip-bench-june by ollama:q"):
        compare(first, second)
    assert compare(first, replace(second, judges=("rules",))).verdict.startswith("Provisional: ")


def test_stale_runs_of_either_are_noted() -> None:
    notes = compare(cells_of({A: LOW}, stale={A: 3}), cells_of({A: HIGH}, stale={A: 1})).notes
    assert "3 runs of tip-bench-may of older model builds, prompts or scenarios are excluded." in notes
    assert "1 run of tip-bench-june of older model builds, prompts or scenarios is excluded." in notes


def test_markdown_has_notes_and_csv_has_a_provisional_column() -> None:
    found = compare(cells_of({A: LOW}, stale={A: 3}), cells_of({A: HIGH}))
    assert "\n- Note: 3 runs of tip-bench-may" in found.markdown()
    assert found.csv().splitlines()[0].endswith(",provisional")
    assert found.csv().splitlines()[1].endswith(",false")


def test_a_filter_is_noted() -> None:
    selection = CellFilter({"suite": "tips"}, "anna")
    notes = compare(cells_of({A: LOW}, cell_filter=selection), cells_of({A: HIGH}, cell_filter=selection)).notes
    assert "Only cells with suite=tips; only anna's scores." in notes
