"""Drift on the controls: what it catches, what it lets pass, and what it says; rates by simulation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tipbench.generate.parsing import Tip
from tipbench.judge.controls import compose
from tipbench.judge.drift import FALSE_ALARM_RATE, MIN_CONTROLS, ControlScore, Drift, Verdict, measure_drift
from tipbench.judge.material import Candidate
from tipbench.plan.rubric import Rubric, Scale
from tipbench.plan.suite import load_suite

Scores = NDArray[np.int64]  # tips × scales
Judge = Callable[[np.random.Generator, Scores], Scores]

CONTROLS_A_SHEET = 40
BALANCED = (0.15, 0.20, 0.30, 0.20, 0.15)
MORE_THREES = (0.10, 0.20, 0.40, 0.20, 0.10)
MOSTLY_GOOD = (0.05, 0.10, 0.20, 0.30, 0.35)


def shipped_rubric() -> Rubric:
    return load_suite("tips").rubric


SCALES = shipped_rubric().scales
SCALE_COUNT = len(SCALES)


def judge(noise: float, drift: Sequence[float] = (0.0,) * SCALE_COUNT) -> Judge:
    def scored(rng: np.random.Generator, references: Scores) -> Scores:
        meant: NDArray[np.float64] = references + np.array(drift) + rng.normal(0, noise, references.shape)
        return np.rint(meant).astype(np.int64).clip(1, 5)

    return scored


def at_random(rng: np.random.Generator, references: Scores) -> Scores:
    return rng.integers(1, 6, references.shape)


def always(score: int) -> Judge:
    return lambda _rng, references: np.full_like(references, score)


def leaning(scale: int, by: float) -> Judge:
    return judge(0.7, [by if column == scale else 0.0 for column in range(SCALE_COUNT)])


def tips(scores: Scores, references: Scores, scales: Sequence[Scale] = SCALES) -> list[ControlScore]:
    names = [scale.name for scale in scales]
    return [
        ControlScore(dict(zip(names, given, strict=True)), dict(zip(names, agreed, strict=True)))
        for given, agreed in zip(scores.tolist(), references.tolist(), strict=True)
    ]


@cache
def shipped_sheets() -> list[Scores]:
    """References of 40 sheets, each the controls that the real export hides among 40 answers of five tips."""
    suite = load_suite("tips")
    cards = {scenario.id: scenario.to_card() for scenario in suite.scenarios}
    answer = (Tip("Open the form.", "It is short."),) * 5
    cells = [Candidate(f"{s} {n}", s, answer, True, frozenset()) for s in cards for n in range(5)]

    def exported(seed: int) -> Scores:
        rng = random.Random(seed)
        entries = compose(
            cells, cards, suite.controls, suite.rubric, shown=(), earlier=(), sheet_id=f"sheet {seed}", rng=rng
        )
        agreed = [reference for entry in entries for reference in entry.references]
        return np.array([[reference[scale.name] for scale in SCALES] for reference in agreed])

    return [exported(seed) for seed in range(40)]


def spread_sheets(n: int, shares: Sequence[float], how_many: int = 40) -> list[Scores]:
    """References in these shares, each scale in an order of its own."""
    rng = np.random.default_rng(n)
    column = np.searchsorted(np.cumsum(shares), (np.arange(n) + 0.5) / n) + 1
    return [np.stack([rng.permutation(column) for _ in SCALES], axis=1) for _ in range(how_many)]


def held(who: Judge, sheets: Sequence[Scores], worlds: int = 400) -> float:
    """The share of worlds in which the judge's sheet would be held."""
    rng = np.random.default_rng(7)
    drifts = (
        measure_drift(SCALES, tips(who(rng, ref), ref)) for ref in (sheets[k % len(sheets)] for k in range(worlds))
    )
    return sum(drift.verdict is Verdict.BEYOND for drift in drifts) / worlds


def one_drift(who: Judge, n: int = CONTROLS_A_SHEET, seed: int = 1) -> Drift:
    references = spread_sheets(n, BALANCED, how_many=1)[0]
    return measure_drift(SCALES, tips(who(np.random.default_rng(seed), references), references))


# Rates, by simulation


@pytest.mark.parametrize("noise", [0.4, 1.0])
def test_an_honest_judge_on_the_shipped_controls_is_rarely_held(noise: float) -> None:
    assert held(judge(noise), shipped_sheets()) <= 0.06


@pytest.mark.parametrize(("scale", "by"), [(0, 0.5), (1, -0.5), (2, 0.5)])
def test_half_a_point_on_one_scale_is_caught_with_the_shipped_controls(scale: int, by: float) -> None:
    assert held(leaning(scale, by), shipped_sheets(), worlds=300) >= 0.85


def test_a_judge_who_answers_at_random_is_held_with_the_shipped_controls() -> None:
    assert held(at_random, shipped_sheets(), worlds=200) >= 0.99


@pytest.mark.parametrize("score", [1, 3, 5])
def test_a_judge_who_gives_everybody_the_same_is_held_with_the_shipped_controls(score: int) -> None:
    assert held(always(score), shipped_sheets(), worlds=len(shipped_sheets())) >= 0.99


@pytest.mark.parametrize("who", [at_random, always(3)], ids=["random", "3"])
@pytest.mark.parametrize("n", [20, 60])
def test_a_judge_who_does_not_read_cannot_hide_among_threes(n: int, who: Judge) -> None:
    assert held(who, spread_sheets(n, MORE_THREES), worlds=100) >= 0.99


@pytest.mark.parametrize(("n", "shares"), [(20, MORE_THREES), (60, MOSTLY_GOOD)], ids=["threes", "good"])
def test_an_honest_judge_is_rarely_held_whatever_the_references(n: int, shares: Sequence[float]) -> None:
    assert held(judge(1.0), spread_sheets(n, shares), worlds=400) <= 0.07


def test_with_more_controls_half_a_point_is_seen_more_often() -> None:
    few, some, many = (held(leaning(0, 0.5), spread_sheets(n, MORE_THREES), worlds=200) for n in (20, 40, 60))
    assert few < some < many


# Verdicts


def test_a_perfect_judge_is_fine() -> None:
    drift = one_drift(lambda _rng, references: references)
    assert drift.verdict is Verdict.FINE
    assert drift.error == 0
    assert drift.contrast == pytest.approx(1)
    assert [scale.bias for scale in drift.scales] == pytest.approx([0.0] * SCALE_COUNT)


@settings(max_examples=20)
@given(st.lists(st.tuples(*[st.integers(1, 5)] * SCALE_COUNT), min_size=MIN_CONTROLS, max_size=50))
def test_a_perfect_judge_is_fine_whatever_the_references(agreed: list[tuple[int, ...]]) -> None:
    references = np.array(agreed)
    assert measure_drift(SCALES, tips(references, references)).verdict is Verdict.FINE


@pytest.mark.parametrize("value", [1, 3])
def test_a_perfect_judge_is_fine_where_all_references_are_equal(value: int) -> None:
    references = np.full((30, SCALE_COUNT), value)
    drift = measure_drift(SCALES, tips(references, references))
    assert drift.verdict is Verdict.FINE
    assert (drift.contrast, drift.contrast_limit) == (None, None)


def test_a_judge_who_never_varies_is_held_where_all_references_are_equal_and_differ() -> None:
    references = np.full((20, SCALE_COUNT), 3)
    drift = measure_drift(SCALES, tips(references + 1, references))
    assert drift.verdict is Verdict.BEYOND
    assert all(scale.beyond and scale.bias == pytest.approx(1) for scale in drift.scales)


def test_a_nearly_perfect_judge_of_excellent_tips_is_fine() -> None:
    references = np.full((40, SCALE_COUNT), 5)
    scores = references.copy()
    scores[:6] -= 1
    drift = measure_drift(SCALES, tips(scores, references))
    assert drift.verdict is Verdict.FINE
    assert all(scale.difference is not None and scale.difference < -0.1 for scale in drift.scales)


@pytest.mark.parametrize("who", [always(5), judge(0.7)], ids=["always 5", "honest"])
def test_under_twenty_controls_the_verdict_is_unknown_and_the_numbers_are_shown(who: Judge) -> None:
    drift = one_drift(who, n=MIN_CONTROLS - 1)
    assert drift.verdict is Verdict.UNKNOWN
    assert not drift.error_beyond
    assert not drift.contrast_beyond
    assert drift.error is not None
    assert all(scale.bias is not None and scale.interval and not scale.beyond for scale in drift.scales)


def test_without_controls_nothing_is_known() -> None:
    drift = measure_drift(SCALES, [])
    assert drift.verdict is Verdict.UNKNOWN
    assert (drift.n_controls, drift.error, drift.error_limit, drift.contrast) == (0, None, None, None)
    assert all((scale.n, scale.bias, scale.interval, scale.error) == (0, None, None, None) for scale in drift.scales)


def test_one_control_has_a_bias_but_no_interval() -> None:
    drift = measure_drift(SCALES[:1], tips(np.array([[4]]), np.array([[3]]), SCALES[:1]))
    assert drift.scales[0].bias == pytest.approx(1)
    assert drift.scales[0].interval is None


def test_a_scale_without_any_control_leaves_an_otherwise_good_judge_unknown() -> None:
    references = spread_sheets(40, BALANCED, how_many=1)[0][:, :2]
    drift = measure_drift(SCALES, tips(references, references, SCALES[:2]))
    assert drift.verdict is Verdict.UNKNOWN
    assert drift.scales[2].n == 0


def test_a_bias_is_held_even_where_another_scale_has_no_control() -> None:
    references = spread_sheets(40, BALANCED, how_many=1)[0][:, :2]
    drift = measure_drift(SCALES, tips(np.full_like(references, 5), references, SCALES[:2]))
    assert drift.verdict is Verdict.BEYOND


def test_a_score_outside_the_scale_is_our_mistake_and_loud() -> None:
    with pytest.raises(ValueError, match=r"goes from 1 to 5; seen 3 to 6"):
        measure_drift(SCALES[:1], tips(np.array([[6]]), np.array([[3]]), SCALES[:1]))


# Numbers


def test_bias_names_the_right_scale_and_direction() -> None:
    drift = one_drift(leaning(1, -1.0))
    assert [scale.beyond for scale in drift.scales] == [False, True, False]
    assert drift.scales[1].bias is not None
    assert -1.2 < drift.scales[1].bias < -0.6


def test_clipping_is_not_mistaken_for_bias() -> None:
    references = spread_sheets(10_000, MOSTLY_GOOD, how_many=1)[0]
    drift = measure_drift(SCALES, tips(judge(1.0)(np.random.default_rng(3), references), references))
    for scale in drift.scales:
        assert scale.difference is not None
        assert scale.bias is not None
        assert scale.difference < -0.1
        assert abs(scale.bias) < 0.04


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(MIN_CONTROLS, 60), st.floats(0.1, 2.0), st.floats(-2, 2))
def test_beyond_is_exactly_an_interval_that_leaves_out_zero(seed: int, n: int, noise: float, by: float) -> None:
    drift = one_drift(judge(noise, [by] * SCALE_COUNT), n, seed)
    for scale in drift.scales:
        assert scale.interval is not None
        low, high = scale.interval
        assert scale.beyond == (not low <= 0 <= high)
    alarms = [drift.error_beyond, drift.contrast_beyond, *(scale.beyond for scale in drift.scales)]
    assert drift.verdict is (Verdict.BEYOND if any(alarms) else Verdict.FINE)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=50))
def test_the_order_of_the_controls_does_not_matter(pairs: list[tuple[int, int]]) -> None:
    columns = np.array(pairs)
    turned = np.random.default_rng(len(pairs)).permutation(columns)
    one, other = (measure_drift(SCALES[:1], tips(c[:, :1], c[:, 1:], SCALES[:1])) for c in (columns, turned))
    assert one.verdict is other.verdict
    assert one.error == pytest.approx(other.error)
    assert one.scales[0].bias == pytest.approx(other.scales[0].bias)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=50))
def test_turning_the_scale_upside_down_turns_the_bias_round(pairs: list[tuple[int, int]]) -> None:
    columns = np.array(pairs)
    one, other = (measure_drift(SCALES[:1], tips(c[:, :1], c[:, 1:], SCALES[:1])) for c in (columns, 6 - columns))
    assert one.scales[0].bias == pytest.approx(-(other.scales[0].bias or 0.0), abs=1e-9)
    assert one.error == pytest.approx(other.error)
    assert one.contrast == pytest.approx(other.contrast)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-50, 50)])
def test_other_ranges_hold_the_careless_and_pass_the_careful(low: int, high: int) -> None:
    scales = [Scale(name, low, high, "", ("",) * (high - low + 1)) for name in ("first", "second")]
    rng = np.random.default_rng(2)
    references = rng.integers(low, high + 1, (60, 2))
    noise = rng.normal(0, 0.7 * (high - low) / 4, references.shape)
    careful = np.clip(np.rint(references + noise), low, high).astype(np.int64)
    careless = rng.integers(low, high + 1, references.shape)
    assert measure_drift(scales, tips(careful, references, scales)).verdict is Verdict.FINE
    assert measure_drift(scales, tips(careless, references, scales)).verdict is Verdict.BEYOND


def test_scales_of_different_ranges_weigh_alike_in_the_error() -> None:
    scales = [Scale("short", 1, 5, "", ("",) * 5), Scale("long", 0, 40, "", ("",) * 41)]
    references = np.array([[2, 10]] * 30)
    drift = measure_drift(scales, tips(references + np.array([1, 10]), references, scales))
    assert drift.error == pytest.approx(1.0)
    assert [scale.error for scale in drift.scales] == pytest.approx([1.0, 10.0])


# Words


def test_a_held_judge_reads_scale_direction_and_size() -> None:
    drift = one_drift(leaning(0, 1.0))
    sentence = drift.sentences(shipped_rubric())[0]
    assert sentence.startswith(f"{SCALES[0].name} is scored too high: by {drift.scales[0].bias:.1f} points")
    assert "1 to 5" in sentence


def test_a_random_judge_reads_that_the_error_is_over_the_limit() -> None:
    drift = one_drift(at_random)
    assert drift.error is not None
    assert drift.error_limit is not None
    said = " ".join(drift.sentences(shipped_rubric()))
    assert f"The scores differ from the reference scores by {drift.error:.1f} points" in said
    assert f"more than the limit of {drift.error_limit:.1f}." in said


def test_an_always_three_judge_reads_that_tips_get_scores_too_much_alike() -> None:
    assert "get similar scores" in " ".join(one_drift(always(3)).sentences(shipped_rubric()))


def test_a_fine_judge_reads_one_sentence_of_comfort() -> None:
    (sentence,) = one_drift(judge(0.5)).sentences(shipped_rubric())
    assert sentence.startswith("No drift found on 40 control tips")


def test_an_unknown_verdict_says_what_is_missing() -> None:
    (sentence,) = one_drift(judge(0.5), n=7).sentences(shipped_rubric())
    assert "unknown" in sentence
    assert "20 control tips" in sentence
    assert "7" not in sentence  # counting would tell a judge who applies item by item which were controls


def test_json_is_plain_and_complete() -> None:
    drift = one_drift(judge(0.7))
    found = json.loads(json.dumps(drift.to_json(), allow_nan=False))
    assert found == drift.to_json()
    assert found["verdict"] == drift.verdict.value
    assert found["false_alarm_rate"] == FALSE_ALARM_RATE
    assert [scale["scale"] for scale in found["scales"]] == [scale.name for scale in SCALES]
    assert found["scales"][0]["bias"] == drift.scales[0].bias


def test_json_of_nothing_has_nulls_not_zeros() -> None:
    found = measure_drift(SCALES, []).to_json()
    assert found["error"] is None
    assert found["scales"][0]["bias"] is None
    assert found["scales"][0]["interval"] is None
