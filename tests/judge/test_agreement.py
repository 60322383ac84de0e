"""Agreement between judges and of a judge with themselves: extremes, invariances and a published example."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tipbench.judge.drift import alpha, self_agreement
from tipbench.plan.rubric import Scale

CLARITY = Scale("clarity", 1, 5, "", ("",) * 5)
WARMTH = Scale("warmth", 0, 10, "", ("",) * 11)

Unit = list[int]  # the scores of one tip by some judges
UNITS = st.lists(st.lists(st.integers(1, 5), max_size=4), max_size=15)

# Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), the example with missing data: ordinal alpha 0.815.
PUBLISHED = (
    [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
)


def published_units() -> list[Unit]:
    return [[score for score in tip if score is not None] for tip in zip(*PUBLISHED, strict=True)]


def random_units(n: int, seed: int) -> list[Unit]:
    rng = np.random.default_rng(seed)
    return [[int(a), int(b)] for a, b in rng.integers(1, 6, (n, 2))]


def test_the_published_example_has_the_published_alpha() -> None:
    assert alpha(CLARITY, published_units()) == pytest.approx(0.815, abs=0.0005)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=20).filter(lambda scores: len(set(scores)) > 1))
def test_full_agreement_is_one(scores: list[int]) -> None:
    assert alpha(CLARITY, [[score, score, score] for score in scores]) == pytest.approx(1.0)


def test_random_judges_agree_by_chance_only() -> None:
    assert alpha(CLARITY, random_units(4000, seed=1)) == pytest.approx(0.0, abs=0.05)


def test_opposite_judges_are_below_chance() -> None:
    found = alpha(CLARITY, [[score, 6 - score] for score in (1, 2, 3, 4, 5) * 4])
    assert found is not None
    assert found < -0.5


def test_a_near_miss_agrees_more_than_a_far_one() -> None:
    near = alpha(CLARITY, [[1, 2], [3, 3], [5, 5], [2, 2]])
    far = alpha(CLARITY, [[1, 5], [3, 3], [5, 5], [2, 2]])
    assert near is not None
    assert far is not None
    assert far < near < 1


@settings(max_examples=30)
@given(UNITS, st.randoms(use_true_random=False))
def test_agreement_depends_neither_on_the_order_of_tips_nor_of_judges(units: list[Unit], random: Random) -> None:
    shuffled = [random.sample(unit, len(unit)) for unit in units]
    random.shuffle(shuffled)
    assert alpha(CLARITY, shuffled) == pytest.approx(alpha(CLARITY, units), abs=1e-9)


@settings(max_examples=30)
@given(UNITS, st.integers(1, 5))
def test_a_tip_with_one_judge_changes_nothing(units: list[Unit], score: int) -> None:
    assert alpha(CLARITY, [*units, [score], []]) == alpha(CLARITY, units)


@settings(max_examples=30)
@given(UNITS)
def test_alpha_is_unknown_or_at_most_one(units: list[Unit]) -> None:
    found = alpha(CLARITY, units)
    assert found is None or found <= 1 + 1e-9


@pytest.mark.parametrize(
    "units",
    [[], [[1], [2]], [[1, 2]], [[3, 3]] * 9],
    ids=["none", "one judge each", "one tip", "no variation"],
)
def test_with_too_little_data_alpha_is_unknown(units: list[Unit]) -> None:
    assert alpha(CLARITY, units) is None


def test_a_scale_from_zero_works_the_same() -> None:
    shifted = [[score - 1 for score in unit] for unit in published_units()]
    assert alpha(WARMTH, shifted) == pytest.approx(0.815, abs=0.0005)


def test_the_same_scores_twice_are_full_self_agreement() -> None:
    scores = [{"clarity": k % 5 + 1, "warmth": k} for k in range(9)]
    found = self_agreement([CLARITY, WARMTH], [(one, one) for one in scores])
    assert found is not None
    assert (found.n, found.exact) == (9, 1.0)
    assert [(scale.exact, scale.difference, scale.shift) for scale in found.scales] == [(1.0, 0.0, 0.0)] * 2


def test_self_agreement_counts_by_scale_and_shows_the_direction() -> None:
    pairs = [
        ({"clarity": 2, "warmth": 5}, {"clarity": 3, "warmth": 5}),
        ({"clarity": 4, "warmth": 5}, {"clarity": 4, "warmth": 2}),
    ]
    found = self_agreement([CLARITY, WARMTH], pairs)
    assert found is not None
    clarity, warmth = found.scales
    assert found.exact == 0.5
    assert (clarity.exact, clarity.difference, clarity.shift) == (0.5, 0.5, 0.5)
    assert (warmth.exact, warmth.difference, warmth.shift) == (0.5, 1.5, -1.5)


def test_without_repeats_self_agreement_is_unknown() -> None:
    assert self_agreement([CLARITY], []) is None


def test_self_agreement_is_plain_json() -> None:
    found = self_agreement([CLARITY], [({"clarity": 2}, {"clarity": 3})])
    assert found is not None
    assert json.loads(json.dumps(found.to_json())) == {
        "n": 1,
        "exact": 0.0,
        "scales": [{"scale": "clarity", "n": 1, "exact": 0.0, "difference": 1.0, "shift": 1.0}],
    }
