"""The summary card: one state for each situation, and plain sentences with the numbers of the board."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.judged import cells_of
from tipbench.compare.card import SummaryCard, summary_card
from tipbench.compare.cells import Coverage
from tipbench.compare.leaderboard import BoardOptions, JudgingRecord, ModelSize, make_board
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import Look, NextLook
from tipbench.plan.design import make_design

A, B, C, TEMPLATE = Pair("a:3b", "v1"), Pair("b:1b", "v1"), Pair("c:1b", "v1"), Pair("baseline:template", "none")
GOOD = [13.0, 14.0, 12.5, 13.5, 14.5, 12.0, 13.0, 14.0]
LOW = [value - 4 - at % 2 for at, value in enumerate(GOOD)]
EVEN = [value + (1.0, -1.1)[at % 2] for at, value in enumerate(GOOD)]


def card(columns: Mapping[Pair, Sequence[float | None]], **changes: Any) -> SummaryCard:
    cells = cells_of(columns, **changes.pop("cells", {}))
    design = make_design(cell.scenario for cell in cells.cells) if changes.pop("planned", True) else None
    options = BoardOptions(scales=("tone",), design=design, by=changes.get("by"))
    leaderboard = make_board("tip-bench-x", cells, options)
    sizes = {"a:3b": ModelSize(3.2, 2 * 2**30), "b:1b": ModelSize(1.0, None)}
    return summary_card(replace(leaderboard, **{"composite_range": (2.0, 17.0), "sizes": sizes, **changes}))


def test_a_decided_board_names_the_pair_to_use_and_how_to_record_it() -> None:
    found = card({A: GOOD, B: LOW})
    assert (found.state, found.title) == ("decided", "Use a:3b/v1")
    assert found.lines[0] == "a:3b/v1: 13.3 of 17, 3.20B parameters, about 2.0 GiB in memory."
    assert "every other pair is clearly worse" in found.lines[1]
    assert found.next == "Next: record it: `tipbench decide --choose a:3b/v1 --because …`."


def test_a_tie_names_the_smallest_and_the_next_look_with_its_effort() -> None:
    found = card({A: GOOD, B: EVEN})
    assert (found.state, found.title) == ("close", "Too close to call: a:3b/v1 leads")
    assert "Among the tied, b:1b is the smallest (1.00B)." in found.lines
    waiting: list[float | None] = [*GOOD, *[None] * 8]
    coming = card({A: waiting, B: [*EVEN, *[None] * 8]})
    assert coming.state == "tied"
    assert coming.next.startswith("Next: judge 8 more scenarios (16 answers)")


@pytest.mark.parametrize(
    ("latency_of_a", "latency_of_b", "sentence"),
    [
        (1.0, 2.0, "it is the fastest (1.0\N{NO-BREAK SPACE}s per answer) and the smallest (1.00B)"),
        (2.0, 1.0, "b:3b/v1 is the fastest (1.0\N{NO-BREAK SPACE}s per answer) and a:1b is the smallest (1.00B)"),
    ],
)
def test_the_fastest_and_the_smallest_are_the_same_row_only_if_it_is_the_leader(
    latency_of_a: float, latency_of_b: float, sentence: str
) -> None:
    leader, rival = Pair("a:1b", "v1"), Pair("b:3b", "v1")
    leaderboard = make_board("tip-bench-x", cells_of({leader: GOOD, rival: EVEN}), BoardOptions())
    latencies = {leader: latency_of_a, rival: latency_of_b}
    standings = tuple(replace(each, means={"latency_s": latencies[each.pair]}) for each in leaderboard.standings)
    sizes = {"a:1b": ModelSize(1.0, None), "b:3b": ModelSize(3.0, None)}
    assert f"Among the tied, {sentence}." in summary_card(replace(leaderboard, standings=standings, sizes=sizes)).lines


def test_a_pair_with_too_few_scores_keeps_the_board_open_and_is_what_comes_next() -> None:
    short: list[float | None] = [*GOOD[:5], *[None] * 3]
    found = card({A: GOOD, B: LOW, C: short})
    assert (found.state, found.title) == ("tied", "Not decided: a:3b/v1 leads")
    assert "Not decided: c:1b/v1 (judged in 5 scenarios) may still lead." in found.lines
    assert not any("Among the tied" in line for line in found.lines), "it is not known to be as good"
    assert found.next == "Next: judge 3 more answers; the chance to decide is not known yet."
    cells = cells_of({A: GOOD, B: LOW, C: short}).cells
    scored = tuple(cell for cell in cells if cell.values)
    uncollected = card({A: GOOD, B: LOW, C: short}, cells={"cells": scored})
    assert uncollected.next == "Next: collect and judge the missing answers of c:1b/v1, or compare with `--exclude`."


def test_the_next_step_fits_boards_that_cannot_be_decided_as_they_are() -> None:
    alone = card({A: GOOD})
    assert alone.next == "Next: collect another model or prompt to compare it with."
    assert "How sure: not enough to decide over 8 scenarios; there is nothing to compare it with." in alone.lines
    assert card({A: GOOD[:1], B: LOW[:1]}).next == (
        "Next: collect more scenarios; at least 6 scenarios are needed to decide."
    )
    by_model = card({A: GOOD, B: LOW}, by="model")
    assert (by_model.title, by_model.next) == ("Use a:3b", "Next: choose one of its pairs on the board without `--by`.")


def test_the_chance_of_being_best_is_that_among_the_ranked() -> None:
    found = card({A: GOOD, B: LOW, C: [None] * 8})
    assert any("the chance that it is the best of the 2 ranked is >99 %" in line for line in found.lines)


def test_minutes_and_chance_are_part_of_the_next_step() -> None:
    leaderboard = make_board("tip-bench-x", cells_of({A: GOOD, B: EVEN}), BoardOptions())
    look = NextLook(Look(2, 4, 16), power=0.62, n_scenarios=8, n_answers=16, minutes=25.2)
    found = summary_card(replace(leaderboard, ranking=replace(leaderboard.ranking, next_look=look)))
    assert found.next == "Next: judge 8 more scenarios (16 answers), about 25 minutes, 62 % chance to decide."


@pytest.mark.parametrize(
    ("power", "ending"),
    [(None, "; the chance to decide is not known yet."), (0.02, "; probably too close to call even then.")],
)
def test_an_unknown_or_small_chance_is_part_of_the_next_step(power: float | None, ending: str) -> None:
    leaderboard = make_board("tip-bench-x", cells_of({A: GOOD, B: EVEN}), BoardOptions())
    look = NextLook(Look(2, 4, 16), power=power, n_scenarios=8, n_answers=16)
    found = summary_card(replace(leaderboard, ranking=replace(leaderboard.ranking, next_look=look)))
    assert found.next == f"Next: judge 8 more scenarios (16 answers){ending}"


def test_a_tie_without_a_planned_look_names_the_effort_that_would_decide_and_why_there_is_no_look() -> None:
    leaderboard = make_board("tip-bench-x", cells_of({A: GOOD, B: EVEN}), BoardOptions(judging=JudgingRecord(1.5)))
    found = summary_card(replace(leaderboard, ranking=replace(leaderboard.ranking, units_needed=24)))
    assert found.state == "tied"
    assert found.next == (
        "Next: collect and judge 16 more scenarios (32 answers), about 48 minutes, 80 % chance to decide."
    )
    (sure,) = [line for line in found.lines if line.startswith("How sure: ")]
    assert sure.endswith(", but this is not a planned look: no looks were planned before the first score.")


def test_a_reference_that_is_better_comes_first() -> None:
    found = card({A: LOW, B: LOW, TEMPLATE: GOOD})
    assert (found.state, found.title) == ("behind", "Use none of them: baseline:template is better")
    (sentence,) = [line for line in found.lines if line.startswith("Does not beat baseline:template: −")]
    assert " to −" in sentence
    beaten = card({A: GOOD, B: LOW, TEMPLATE: LOW})
    assert any(line.startswith("Beats baseline:template: +") for line in beaten.lines)


def test_a_reference_alone_ranks_nothing_and_needs_a_model() -> None:
    found = card({TEMPLATE: GOOD})
    assert (found.state, found.title) == ("unranked", "No ranking yet: too little is collected")
    assert found.lines == ("Nothing to rank: only the reference baseline:template is recorded.",)
    assert found.next == "Next: collect a model with a prompt, which can be ranked."


def test_provisional_scores_are_never_called_sure() -> None:
    found = card({A: GOOD, B: LOW}, cells={"provisional": True, "judges": ("rules",)})
    assert (found.state, found.title) == ("provisional", "For now: a:3b/v1")
    assert any("scored by rules over 8 scenarios, not by people" in line for line in found.lines)
    assert "tipbench judge export" in found.next


@pytest.mark.parametrize(
    ("people", "next_step"),
    [
        (0, "Next: judge 6 scenarios by hand, so that people's scores count: "),
        (2, "Next: judge 4 scenarios by hand, so that people's scores count: "),
        (8, "Next: compare by people's scores: they cover 8 of 8 scenarios."),
    ],
)
def test_the_next_step_after_rules_is_what_people_have_not_judged(people: int, next_step: str) -> None:
    cells = {"provisional": True, "judges": ("rules",), "coverage": Coverage(people, 8, 8)}
    assert card({A: GOOD, B: LOW}, cells=cells).next.startswith(next_step)


def test_before_the_first_look_nothing_is_called_decided() -> None:
    few: list[float | None] = [*GOOD[:3], *[None] * 29]
    found = card({A: few, B: [value and value - 5 for value in few]})
    assert found.state in ("early", "unranked")
    assert "Use" not in found.title
    some = card({A: [*GOOD[:6], *[None] * 26], B: [*LOW[:6], *[None] * 26]})
    assert some.state == "early"
    assert any(
        line.startswith("How sure: nothing is tested before the first look, at 8 scenarios; ") for line in some.lines
    )


def test_an_unjudged_board_names_its_pending_answers_and_held_scores() -> None:
    nothing: list[float | None] = [None] * 8
    unjudged = card({A: nothing, B: nothing}, cells={"judges": ()}, judges=())
    assert (unjudged.state, unjudged.lines) == ("unjudged", ("16 answers of 2 pairs wait for a judge.",))
    assert "tipbench judge run --with rules" in unjudged.next
    held = card(
        {A: nothing, B: nothing}, cells={"judges": ()}, judges=(), judging=JudgingRecord(held=frozenset({"ben"}))
    )
    assert held.next == "Next: accept or return the held scores of ben."


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"fragile": True}, "a few more unusable answers could change it"),
        ({"judging": JudgingRecord(concerns={"anna": "was accepted although too far off"})}, "anna was accepted"),
        ({"judging": JudgingRecord(held=frozenset({"ben"}))}, "scores of ben are held and not counted"),
        ({"planned": False}, "this is not a planned look: no looks were planned before the first score"),
    ],
)
def test_concerns_about_a_lead_are_named(changes: dict[str, Any], part: str) -> None:
    (sure,) = [line for line in card({A: GOOD, B: LOW}, **changes).lines if line.startswith("How sure: ")]
    assert part in sure


def test_a_board_on_which_every_cell_failed_says_where_to_read_why() -> None:
    cells = cells_of({A: [None] * 4, B: [None] * 4}, judges=()).cells
    failed = tuple(replace(cell, run=replace(cell.run, tags={**cell.run.tags, "state": "failed"})) for cell in cells)
    found = card({A: [None] * 4}, cells={"cells": failed, "judges": ()})
    assert (found.state, found.title) == ("unusable", "No usable answers")
    assert found.lines == ("None of 8 cells has an answer: all failed.",)
    assert "`tipbench runs list --state failed --json --experiment tip-bench-x`" in found.next


def test_a_board_by_model_without_a_shared_prompt_says_why_nothing_can_be_ranked() -> None:
    found = card({A: [None] * 4, Pair("b:1b", "v2"): [None] * 4}, cells={"judges": ()}, by="model")
    assert (found.state, found.title) == ("unranked", "No ranking yet")
    assert found.lines == ("Nothing can be ranked: no prompt is shared by all models.",)
    assert found.next == (
        "Next: collect and judge the missing answers of a:3b/* and b:1b/*, or compare with `--exclude`."
    )


def test_a_reference_and_a_pair_whose_runs_are_all_stale_need_a_model_too() -> None:
    found = card({TEMPLATE: GOOD}, cells={"stale": {A: 8}})
    assert (found.state, found.title) == ("unranked", "No ranking yet: too little is collected")
    assert found.lines == ("Nothing to rank: all runs of 1 pair are of an older build, prompt or scenario.",)
    assert found.next == "Next: collect a model with a prompt, which can be ranked."
