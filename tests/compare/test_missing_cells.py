"""A board that cannot be ranked names the missing cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import matrix_of, simulate

from support.judged import cells_of
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import missing_scores

A, B, C = Pair("a:1b", "v1"), Pair("b:1b", "v1"), Pair("c:1b", "v1")
ODD = Pair("b:1b", "v2")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]


Columns = Mapping[Pair, Sequence[float | None]]


def board_of(columns: Columns, **options: object) -> Leaderboard:
    return make_board("tip-bench-test", cells_of(columns), BoardOptions(**options))  # type: ignore[arg-type]


def without(*holes: int) -> list[float | None]:
    return [None if at in holes else value for at, value in enumerate(LOW)]


def test_the_row_nearest_to_complete_is_named_with_what_it_lacks() -> None:
    text = board_of({A: without(0, 1, 2), B: without(3, 4, 5), C: without(0, 3, 6)}).verdict
    lacks = "the closest, c:1b/v1, lacks p2@s6."
    assert text == f"No pair is judged in all of the 6 core scenarios (judged for half of the pairs); {lacks}"


def test_more_than_five_missing_scenarios_are_counted() -> None:
    parts = {pair: [LOW[at % 8] if at % 3 == place else None for at in range(15)] for place, pair in enumerate((A, B))}
    assert board_of(parts).verdict.endswith("the closest, a:1b/v1, lacks p0@s4, p1@s1, p1@s13, p2@s10 and p3@s7.")


def test_where_no_scenario_counts_yet_the_nearest_one_is_named() -> None:
    thirds = {
        pair: [value if at % 3 == place else None for at, value in enumerate(LOW)]
        for place, pair in enumerate((A, B, C))
    }
    text = board_of(thirds).verdict
    assert text == "No scenario is judged for half of the 3 pairs; the closest, p0@s0, lacks b:1b/v1 and c:1b/v1."


def test_models_without_a_shared_prompt_are_reported() -> None:
    columns = {A: LOW, ODD: LOW}
    assert board_of(columns, by="model").verdict == "Nothing can be ranked: no prompt is shared by all models."
    assert board_of(columns, by="prompt").verdict == "Nothing can be ranked: no model is shared by all prompts."


def test_a_board_by_model_names_what_its_rows_miss() -> None:
    columns: Columns = {A: without(0, 2), Pair("a:1b", "v2"): without(1, 3), B: without(2, 3, 5), ODD: LOW}
    text = board_of(columns, by="model").verdict
    assert text.startswith(
        "No model is judged in all of the 6 core scenarios (judged for half of the models); the closest, b:1b/*, "
    )


def test_per_persona_the_missing_scenarios_are_named() -> None:
    text = board_of({A: without(0, 1), B: without(2), C: without(3, 4)}, cluster="persona").verdict
    assert text.endswith("the closest, b:1b/v1, lacks p2@s2.")


def test_one_missing_scenario_is_singular() -> None:
    text = board_of({A: LOW[:1], B: [value + 1 for value in LOW[:1]]}).verdict
    assert "over 1 scenario," in text
    assert "Too few scenarios: 1; at least 6 needed" in text


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 5), st.floats(0, 0.9))
def test_missing_scores_exist_exactly_if_something_is_judged_and_nothing_is_complete(
    seed: int, n: int, k: int, missing: float
) -> None:
    rng = np.random.default_rng(seed)
    values = simulate(rng, [0.0] * k, n)
    values[rng.random(values.shape) < missing] = np.nan
    matrix = matrix_of(values)
    found = missing_scores(matrix)
    can_lead = matrix.judged[matrix.core].sum(axis=0) >= min(6, matrix.core.sum())
    assert (found is None) == bool((matrix.core.any() and can_lead.any()) or not matrix.judged.any())
    if found is not None:
        assert found.lacks
        assert found.n_core == matrix.core.sum()
