"""Diversity of a set of tips: bounds, symmetry, and the lowest and highest values."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tipbench.generate.diversity import MAX_TIPS, MAX_WORDS, measure_diversity

TIPS = st.lists(st.text(max_size=60), min_size=2, max_size=8)
WORDS = ["invoice", "timer", "kettle", "walk", "letter", "drawer", "ring", "sister", "garden", "bicycle"]


@settings(deadline=None)
@given(TIPS)
def test_every_number_lies_between_zero_and_one(tips: list[str]) -> None:
    found = measure_diversity(tips)
    assert found is not None
    assert all(0.0 <= value <= 1.0 for value in vars(found).values())


@settings(deadline=None)
@given(TIPS.flatmap(lambda tips: st.tuples(st.just(tips), st.permutations(tips))))
def test_the_order_of_the_tips_does_not_matter(both: tuple[list[str], list[str]]) -> None:
    assert measure_diversity(both[0]) == measure_diversity(both[1])


@settings(deadline=None)
@given(st.text(max_size=60), st.integers(2, 6))
def test_copies_of_one_tip_have_no_diversity(tip: str, copies: int) -> None:
    found = measure_diversity([tip] * copies)
    assert found is not None
    assert found.score == 0.0
    assert found.distinct_2 <= 1.0


@settings(deadline=None)
@given(st.permutations(WORDS))
def test_tips_without_a_shared_word_are_fully_diverse(words: list[str]) -> None:
    found = measure_diversity([" ".join(words[:5]), " ".join(words[5:])])
    assert found is not None
    assert (found.score, found.distinct_2) == (1.0, 1.0)


def test_fewer_than_two_tips_have_no_diversity_score() -> None:
    assert measure_diversity([]) is None
    assert measure_diversity(["Set a timer."]) is None


def test_case_spacing_and_punctuation_make_no_difference() -> None:
    found = measure_diversity(["Set a  timer!", "set a timer"])
    assert found is not None
    assert found.score == 0.0


def test_function_words_do_not_make_tips_alike() -> None:
    found = measure_diversity(["Write to the bank for an hour.", "Walk in the park for a while."])
    assert found is not None
    assert found.score > 0.9


def test_a_near_copy_is_less_diverse_than_a_new_idea() -> None:
    first = "Open the invoice and write the first line for ten minutes."
    near = measure_diversity([first, "Open the invoice and write the last line for ten minutes."])
    new = measure_diversity([first, "Walk round the block and ring your sister on the way."])
    assert near is not None
    assert new is not None
    assert near.score < 0.6 < new.score


def test_a_copy_in_another_word_order_differs_from_an_exact_copy() -> None:
    found = measure_diversity(["kettle timer drawer letter", "letter drawer timer kettle"])
    assert found is not None
    assert 0.0 < found.score < 1.0


def test_tips_without_any_word_are_compared_as_they_are() -> None:
    same, different = measure_diversity(["🙂", "🙂"]), measure_diversity(["🙂", "🚀"])
    assert same is not None
    assert different is not None
    assert (same.score, different.score) == (0.0, 1.0)


def test_text_beyond_the_limits_is_ignored() -> None:
    tips = [f"{WORDS[i % 10]} tip{i}" for i in range(MAX_TIPS)]
    assert measure_diversity(tips + ["more"] * 1000) == measure_diversity(tips)
    long = " ".join(f"w{i}" for i in range(MAX_WORDS))
    assert measure_diversity([long, "x"]) == measure_diversity([long + " more" * 100_000, "x"])
