"""Which recorded cells a board rests on, and what each of them counts for."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.boards import cell
from tipbench.compare.cells import BoardCells, CellFilter, is_excluded, read_board_cells, select_cells
from tipbench.compare.matrix import Pair
from tipbench.errors import CorruptText, MixedRubrics, NotEnoughData, UsageError
from tipbench.judge.scores import NO_SCORES, CellScores, Judgement, run_change, scores_text
from tipbench.plan.suite import load_suite
from tipbench.record.run import NewRun, RunKind, StoredRun
from tipbench.record.store import MemoryStore

A, B = Pair("a:1b", "v1"), Pair("b:1b", "v1")
RUBRIC, OTHER_RUBRIC = f"tip-v1@{'ab' * 32}", f"tip-v1@{'cd' * 32}"

Cell = tuple[StoredRun, CellScores]


def run(
    pair: Pair, scenario: str = "nurse@morning", composite: float | None = 10.0, *, at: int = 1, **tags: str
) -> StoredRun:
    """A cell that started at a time; equal ones of other builds or conditions get other ids."""
    made = cell(pair, scenario, composite, tags=tags)
    return replace(made, run_id=f"{pair}@{scenario}#{at}{sorted(tags.items())}", start_ms=at)


def floored_run(pair: Pair) -> StoredRun:
    return run(pair, composite=2.0, floored="true")


def built(made: StoredRun, digest: str) -> StoredRun:
    return replace(made, run_id=f"{made.run_id}~{digest}", params={**made.params, "model_digest": digest})


def given_by(judge: str, composite: float, *, at: str = "2026-05-01", rubric: str = RUBRIC, **other: Any) -> Judgement:
    return Judgement(judge, "s1", at, at, rubric, True, (), {"composite": composite, "tone": composite / 4}, **other)


def by_judges(*judgements: Judgement) -> CellScores:
    return CellScores({each.judge: each for each in judgements}, {})


def by_rules(*judgements: Judgement) -> CellScores:
    return CellScores({}, {each.judge: each for each in judgements})


def chosen(cells: Sequence[StoredRun | Cell], **filters: Any) -> BoardCells:
    pairs = [each if isinstance(each, tuple) else (each, NO_SCORES) for each in cells]
    return select_cells(pairs, CellFilter(**filters))


def composites(board: BoardCells) -> dict[str, float | None]:
    return {each.run.run_id: each.values.get("composite") for each in board.cells}


def test_the_newest_conditions_count_and_the_rest_is_counted() -> None:
    old = [run(pair, conditions="c0", at=1) for pair in (A, B)]
    new = run(A, conditions="c9", at=2)
    board = chosen([*old, new])
    assert list(composites(board)) == [new.run_id]
    assert (board.conditions, board.n_other_conditions, board.other_conditions) == ("c9", 2, ("c0",))


def test_other_conditions_are_named_newest_first() -> None:
    board = chosen([run(A, conditions=f"c{at}", at=at) for at in (2, 4, 1, 3)])
    assert (board.conditions, board.other_conditions) == ("c4", ("c3", "c2", "c1"))


def test_selected_conditions_are_not_excluded() -> None:
    """As `--where conditions=c0` reads them: nothing newer is there to be chosen."""
    board = chosen([run(A, conditions="c0", at=1)], where={"conditions": "c0"})
    assert (board.conditions, board.n_other_conditions, board.other_conditions) == ("c0", 0, ())


def test_a_model_that_was_pulled_again_counts_with_its_newest_build() -> None:
    old, new = built(run(A, at=1), "sha256:old"), built(run(A, at=2), "sha256:new")
    other = built(run(B, at=1), "sha256:old")
    board = chosen([old, other, new])
    assert set(composites(board)) == {new.run_id, other.run_id}
    assert board.stale == {A: 1}


def test_a_prompt_that_was_rewritten_counts_with_its_newest_text() -> None:
    old = [run(pair, prompt_hash="p1", at=1) for pair in (A, B)]
    new = run(A, prompt_hash="p2", at=2)
    board = chosen([*old, new])
    assert list(composites(board)) == [new.run_id]
    assert board.stale == {A: 1, B: 1}


def test_a_scenario_that_was_rewritten_counts_with_its_newest_content() -> None:
    old = [run(pair, scenario_hash="h1", at=1) for pair in (A, B)]
    new = run(A, scenario_hash="h2", at=2)
    elsewhere = run(B, "teacher@morning", scenario_hash="h3", at=1)
    board = chosen([*old, new, elsewhere])
    assert set(composites(board)) == {new.run_id, elsewhere.run_id}
    assert board.stale == {A: 1, B: 1}


def test_builds_are_compared_within_one_set_of_conditions() -> None:
    """A newer build under conditions that are not looked at makes nothing stale."""
    old = built(run(A, conditions="c9", at=3), "sha256:old")
    newer_elsewhere = built(run(A, conditions="c0", at=2), "sha256:new")
    board = chosen([old, newer_elsewhere])
    assert (list(composites(board)), board.stale) == ([old.run_id], {})


def test_pending_and_failed_cells_are_included_without_a_score() -> None:
    failed = run(A, "teacher@morning", None, state="failed")
    board = chosen([run(A), run(B, composite=None), failed])
    assert set(composites(board).values()) == {10.0, None}
    assert [each.failed for each in board.cells] == [False, False, True]


def test_a_failed_cell_is_never_scored_even_with_stored_metrics() -> None:
    failed = run(A, composite=12.0, state="failed")
    stored = CellScores({"anna": given_by("anna", 12.0)}, {"rules": given_by("rules", 12.0)})
    for filters in ({}, {"provisional": True}):
        board = chosen([(failed, stored), run(B)], **filters)
        assert composites(board)[failed.run_id] is None


def test_provisional_scores_show_only_while_no_judge_has_scored() -> None:
    rules = by_rules(given_by("rules", 7.0))
    waiting, judged = run(A, composite=None), run(B)
    before = chosen([(waiting, rules), (run(B, composite=None), rules)])
    assert (before.provisional, before.judges, set(composites(before).values())) == (True, ("rules",), {7.0})
    after = chosen([(waiting, rules), (judged, replace(rules, applied={"anna": given_by("anna", 10.0)}))])
    assert (after.provisional, after.judges) == (False, ("anna",))
    assert composites(after) == {waiting.run_id: None, judged.run_id: 10.0}
    selected = chosen([(waiting, rules), (judged, rules)], provisional=True)
    assert (selected.provisional, set(composites(selected).values())) == (True, {7.0})


def test_provisional_scores_are_used_even_if_metrics_of_people_exist() -> None:
    judged = run(A, composite=14.0)
    board = chosen([(judged, by_rules(given_by("rules", 7.0)))], provisional=True)
    assert (board.cells[0].values["composite"], board.cells[0].values["latency_s"]) == (7.0, 2.0)


def test_of_several_provisional_judges_the_latest_counts_alone() -> None:
    both = by_rules(given_by("rules", 7.0, at="2026-05-02"), given_by("ollama:q", 9.0, at="2026-05-03"))
    older_only = by_rules(given_by("rules", 7.0, at="2026-05-01"))
    board = chosen([(run(A, composite=None), both), (run(B, composite=None), older_only)])
    assert board.judges == ("ollama:q",)
    assert sorted(composites(board).values(), key=str) == [9.0, None]


def test_floored_cells_count_in_both_kinds_of_board() -> None:
    floored = floored_run(A)
    waiting = run(B, composite=None)
    provisional = chosen([floored, (waiting, by_rules(given_by("rules", 7.0)))])
    assert provisional.provisional, "a floor is nobody's judgement"
    assert sorted(composites(provisional).values(), key=str) == [2.0, 7.0]
    judged = chosen([floored, (run(B), by_judges(given_by("anna", 10.0)))])
    assert (judged.provisional, judged.judges) == (False, ("anna",))
    assert set(composites(judged).values()) == {2.0, 10.0}
    of_anna = chosen([floored, (run(B), by_judges(given_by("anna", 10.0)))], judge="anna")
    assert set(composites(of_anna).values()) == {2.0, 10.0}


def test_one_judge_alone_counts_where_that_judge_has_scored() -> None:
    both = by_judges(given_by("anna", 12.0), given_by("ben", 8.0))
    cells = [(run(A), both), (run(B), by_judges(given_by("ben", 6.0)))]
    assert chosen(cells).judges == ("anna", "ben")
    assert set(composites(chosen(cells)).values()) == {10.0}, "the mean over judges is what the run has"
    of_anna = chosen(cells, judge="anna")
    assert (of_anna.judges, sorted(composites(of_anna).values(), key=str)) == (("anna",), [12.0, None])
    assert of_anna.cells[0].values["tone"] == 3.0
    assert set(composites(chosen(cells, judge="ben")).values()) == {8.0, 6.0}


def test_a_judge_whose_scores_do_not_count_is_refused_with_the_valid_ones() -> None:
    held = by_judges(given_by("anna", 12.0)).with_judgement(given_by("ben", 3.0, held=True))
    with pytest.raises(NotEnoughData, match=r"No score of ben counts here; scores of anna count\."):
        chosen([(run(A), held)], judge="ben")
    with pytest.raises(NotEnoughData, match="no scores count yet"):
        chosen([floored_run(A)], judge="ben")


def test_scores_without_a_composite_are_refused_with_the_run() -> None:
    """As in a run that was changed by hand."""
    damaged = replace(run(A), metrics={"tone": 3.0})
    with pytest.raises(CorruptText, match=f"run {re.escape(damaged.run_id)} lack the composite"):
        chosen([damaged, run(B)])
    rules = Judgement("rules", "s1", "2026-05-01", "2026-05-01", RUBRIC, True, (), {"tone": 3.0})
    with pytest.raises(CorruptText, match="lack the composite"):
        chosen([(run(A, composite=None), by_rules(rules))])


def test_scores_of_two_rubrics_are_refused_with_the_next_step() -> None:
    cells = [run(A, "nurse@morning"), run(A, "teacher@morning"), run(B, scores_rubric=OTHER_RUBRIC)]
    with pytest.raises(MixedRubrics) as refused:
        chosen(cells)
    message = str(refused.value)
    assert "tip-v1@abababab (2 cells), tip-v1@cdcdcdcd (1 cell)" in message
    assert "judge export --rejudge" in message


def test_provisional_scores_of_two_rubrics_are_refused_too() -> None:
    cells = [
        (run(A, composite=None), by_rules(given_by("rules", 7.0))),
        (run(B, composite=None), by_rules(given_by("rules", 7.0, rubric=OTHER_RUBRIC))),
    ]
    with pytest.raises(MixedRubrics, match="again with `tipbench judge run`"):
        chosen(cells)


def test_another_rubric_in_stale_or_unscored_cells_does_not_matter() -> None:
    stale = built(run(A, at=1, scores_rubric=OTHER_RUBRIC), "sha256:old")
    waiting = run(B, composite=None, scores_rubric=OTHER_RUBRIC)
    board = chosen([stale, built(run(A, at=2), "sha256:new"), waiting])
    assert board.rubric == RUBRIC


def test_without_a_score_there_is_no_rubric_and_no_judge() -> None:
    board = chosen([run(A, composite=None)])
    assert (board.rubric, board.judges, board.provisional, board.has_scores) == ("", (), False, False)


def test_repeats_of_a_cell_all_count() -> None:
    repeats = [run(A, composite=value, at=at, cell_key=f"k{at}") for at, value in enumerate((4.0, 6.0), start=1)]
    assert sorted(composites(chosen(repeats)).values()) == [4.0, 6.0]  # type: ignore[type-var]


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_the_order_of_runs_does_not_change_what_is_chosen(seed: int) -> None:
    cells = [run(pair, conditions=f"c{at % 2}", prompt_hash=f"p{at}", at=at) for pair in (A, B) for at in range(1, 5)]
    cells += [built(run(A, "teacher@morning", conditions="c1", prompt_hash="p3", at=9), "sha256:new")]
    plain, shuffled = chosen(cells), list(cells)
    random.Random(seed).shuffle(shuffled)
    board = chosen(shuffled)
    assert composites(board) == composites(plain)
    assert replace(board, cells=()) == replace(plain, cells=())


def recorded(store: MemoryStore, scenario: str, *, ok: bool = True, supersedes: tuple[str, ...] = ()) -> str:
    state = "pending" if ok else "failed"
    found = store.ensure_experiment("tip-bench-cells")
    return store.record(
        found.experiment_id,
        NewRun(
            RunKind.CELL, f"{scenario}{ok}", "cell", 1, 2, ok=ok, cell_key=scenario,
            params={"model": "a:1b", "prompt_version": "v1", "scenario": scenario, "persona": "nurse"},
            tags={"state": state, "conditions": "c1", "scenario_hash": scenario}, supersedes=supersedes,
        ),
    )  # fmt: skip


def test_a_failure_that_was_replaced_is_excluded() -> None:
    store = MemoryStore()
    failed = recorded(store, "nurse@morning", ok=False)
    again = recorded(store, "nurse@morning", supersedes=(failed,))
    other = recorded(store, "nurse@evening", ok=False)
    board = read_board_cells(store, "1", CellFilter())
    assert {each.run.run_id: each.failed for each in board.cells} == {again: False, other: True}


def test_scores_are_read_with_the_cells() -> None:
    store, rubric = MemoryStore(), load_suite("tips").rubric
    run_id = recorded(store, "nurse@morning")
    scores = by_judges(given_by("anna", 12.0, rubric=rubric.tag))
    assert "anna" in scores_text(scores)
    store.update(run_id, run_change(scores, {rubric.tag: rubric}, 1))
    board = read_board_cells(store, "1", CellFilter())
    assert (board.judges, board.rubric, board.cells[0].values["composite"]) == (("anna",), rubric.tag, 12.0)


def test_nothing_recorded_or_nothing_that_matches_is_not_enough() -> None:
    store = MemoryStore()
    experiment = store.ensure_experiment("tip-bench-cells")
    for where in ({}, {"params.model": "nosuch"}):
        with pytest.raises(NotEnoughData, match="No cells match"):
            read_board_cells(store, experiment.experiment_id, CellFilter(where))
        recorded(store, "nurse@morning")


def test_runs_of_other_kinds_are_not_cells() -> None:
    store = MemoryStore()
    recorded(store, "nurse@morning")
    with pytest.raises(UsageError, match="--where kind=judging excludes every cell"):
        read_board_cells(store, "1", CellFilter({"kind": "judging"}))
    assert len(read_board_cells(store, "1", CellFilter({"kind": "cell"})).cells) == 1


@pytest.mark.parametrize("name", ["baseline:template", "baseline:template/none", "baseline:template/v1", "*/none"])
def test_a_reference_is_excluded_with_any_prompt(name: str) -> None:
    assert is_excluded(Pair("baseline:template", "none"), (name,))
    assert not is_excluded(Pair("a:1b", "v1"), (name,))
