"""What keeps a board from being ranked is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import board as matrix_of
from worlds import world

from support.judged import scored
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import gap_of

A, B, C = Pair("a:1b", "v1"), Pair("b:1b", "v1"), Pair("c:1b", "v1")
ODD = Pair("b:1b", "v2")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]


Columns = Mapping[Pair, Sequence[float | None]]


def made(columns: Columns, **options: object) -> Leaderboard:
    return make_board("tip-bench-test", scored(columns), BoardOptions(**options))  # type: ignore[arg-type]


def without(*holes: int) -> list[float | None]:
    return [None if at in holes else value for at, value in enumerate(LOW)]


def test_the_row_nearest_to_complete_is_named_with_what_it_lacks() -> None:
    said = made({A: without(0, 1), B: without(2), C: without(3, 4)}).verdict
    assert said == (
        "No pair is judged in all of the 8 scenarios in which half of them are: b:1b/v1 has most and lacks p2@s2."
    )


def test_more_than_five_missing_scenarios_are_counted() -> None:
    halves = {A: [*LOW[:7], *[None] * 7], B: [*[None] * 7, *LOW[:7]]}
    assert made(halves).verdict.endswith("a:1b/v1 has most and lacks p0@s12, p0@s8, p1@s13, p1@s9, p2@s10 and 2 more.")


def test_where_no_scenario_counts_yet_the_nearest_one_is_named() -> None:
    said = made({A: without(1, 2, 3, 4, 5, 6, 7), B: [None] * 8, C: [None] * 8}).verdict
    assert said == "No scenario is judged for half of the 3 pairs: p0@s0 has most and lacks b:1b/v1 and c:1b/v1."


def test_models_that_share_no_prompt_are_said_to() -> None:
    columns = {A: LOW, ODD: LOW}
    assert made(columns, by="model").verdict == "Nothing can be ranked: no prompt is shared by all models."
    assert made(columns, by="prompt").verdict == "Nothing can be ranked: no model is shared by all prompts."


def test_a_board_by_model_names_what_its_rows_lack() -> None:
    columns: Columns = {A: without(0), Pair("a:1b", "v2"): without(1), B: without(2, 3), ODD: LOW}
    said = made(columns, by="model").verdict
    assert said.startswith("No model is judged in all of the 8 scenarios in which half of them are: a:1b/* ")


def test_per_persona_it_is_scenarios_that_are_missing() -> None:
    said = made({A: without(0, 1), B: without(2), C: without(3, 4)}, cluster="persona").verdict
    assert said.endswith("b:1b/v1 has most and lacks p2@s2.")


def test_one_scenario_is_one() -> None:
    said = made({A: LOW[:1], B: [value + 1 for value in LOW[:1]]}).verdict
    assert "over 1 scenario," in said
    assert "Too few scenarios: 1; at least 6 needed." in said


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 5), st.floats(0, 0.9))
def test_a_gap_is_there_exactly_where_something_is_judged_and_nothing_is_complete(
    seed: int, n: int, k: int, missing: float
) -> None:
    rng = np.random.default_rng(seed)
    values = world(rng, [0.0] * k, n)
    values[rng.random(values.shape) < missing] = np.nan
    matrix = matrix_of(values)
    gap = gap_of(matrix)
    assert (gap is None) == bool(matrix.complete.any() or not matrix.judged.any())
    if gap is not None:
        assert gap.lacks
        assert gap.core == matrix.core.sum()
