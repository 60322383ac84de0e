"""Drift on the controls: detection, false alarms and messages; rates by simulation."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_judges import (
    SCALE_COUNT,
    SCALES,
    Judge,
    Scores,
    alarms_of,
    biased_judge,
    constant_judge,
    control_tips,
    held_rate,
    noisy_judge,
    random_judge,
    shipped_sheets,
    trends_of,
)

from tipbench.judge.drift import FALSE_ALARM_RATE, MIN_CONTROLS, Drift, Verdict, measure_drift, measure_trends
from tipbench.plan.rubric import Rubric, Scale
from tipbench.plan.suite import load_suite

CONTROLS_A_SHEET = 40
BALANCED = (0.15, 0.20, 0.30, 0.20, 0.15)
MORE_THREES = (0.10, 0.20, 0.40, 0.20, 0.10)
MOSTLY_GOOD = (0.05, 0.10, 0.20, 0.30, 0.35)


def shipped_rubric() -> Rubric:
    return load_suite("tips").rubric


def spread_sheets(n: int, shares: Sequence[float], count: int = 40) -> list[Scores]:
    """Sheets whose references have these shares of the steps, in another order for each scale."""
    rng = np.random.default_rng(n)
    column = np.searchsorted(np.cumsum(shares), (np.arange(n) + 0.5) / n) + 1
    return [np.stack([rng.permutation(column) for _ in SCALES], axis=1) for _ in range(count)]


def drift_of(judge: Judge, n: int = CONTROLS_A_SHEET, seed: int = 1) -> Drift:
    references = spread_sheets(n, BALANCED, count=1)[0]
    return measure_drift(SCALES, control_tips(judge(np.random.default_rng(seed), references), references))


# Rates, by simulation


@pytest.mark.simulation
@pytest.mark.parametrize(("noise", "icc"), [(0.4, 0.0), (0.7, 0.2), (0.7, 0.4), (1.0, 0.0), (1.0, 0.4)])
def test_an_honest_judge_on_the_shipped_controls_is_rarely_held(noise: float, icc: float) -> None:
    """Also if the errors within an answer are correlated, because its tips are not independent."""
    assert held_rate(noisy_judge(noise, icc=icc), shipped_sheets(), worlds=1000) <= 0.06


@pytest.mark.simulation
@pytest.mark.parametrize(("scale", "by"), [(0, 0.5), (1, -0.5), (2, 0.5)])
def test_a_bias_of_half_a_point_is_detected_with_the_shipped_controls(scale: int, by: float) -> None:
    assert held_rate(biased_judge(scale, by), shipped_sheets(), worlds=300) >= 0.85
    assert held_rate(biased_judge(scale, by), shipped_sheets(most_tips=40), worlds=600) >= 0.80


def test_a_judge_who_scores_at_random_is_held_with_the_shipped_controls() -> None:
    assert held_rate(random_judge, shipped_sheets(), worlds=200) >= 0.99


@pytest.mark.parametrize("score", [1, 3, 5])
def test_a_judge_with_constant_scores_is_held_with_the_shipped_controls(score: int) -> None:
    assert held_rate(constant_judge(score), shipped_sheets(), worlds=len(shipped_sheets())) >= 0.99


@pytest.mark.parametrize("judge", [random_judge, constant_judge(3)], ids=["random", "3"])
@pytest.mark.parametrize("n", [20, 60])
def test_a_judge_who_always_gives_3_is_held(n: int, judge: Judge) -> None:
    assert held_rate(judge, spread_sheets(n, MORE_THREES), worlds=100) >= 0.99


@pytest.mark.parametrize(("n", "shares"), [(20, MORE_THREES), (60, MOSTLY_GOOD)], ids=["threes", "good"])
def test_an_honest_judge_is_rarely_held_with_any_references(n: int, shares: Sequence[float]) -> None:
    assert held_rate(noisy_judge(1.0), spread_sheets(n, shares), worlds=400) <= 0.07


@pytest.mark.simulation
def test_with_more_controls_a_bias_of_half_a_point_is_detected_more_often() -> None:
    few, some, many = (held_rate(biased_judge(0, 0.5), spread_sheets(n, MORE_THREES), worlds=200) for n in (20, 40, 60))
    assert few < some < many


def test_errors_alike_within_an_answer_widen_the_interval() -> None:
    references = shipped_sheets()[0]
    rng = np.random.default_rng(4)
    independent, alike = (
        measure_drift(SCALES, control_tips(noisy_judge(0.7, icc=icc)(rng, references), references))
        for icc in (0.0, 0.9)
    )
    assert (independent.icc or 0.0) < 0.3 < (alike.icc or 0.0)
    assert min(scale.se or 0 for scale in alike.scales) > max(scale.se or 9 for scale in independent.scales)


@pytest.mark.simulation
def test_an_honest_judge_has_no_trend_over_twenty_sheets() -> None:
    alarms = np.mean([alarms_of(trends_of(noisy_judge(0.7, icc=0.2), 20, seed)) for seed in range(30)], axis=0)
    assert max(alarms) <= 0.07


@pytest.mark.simulation
def test_a_small_bias_that_persists_is_added_up_over_sheets() -> None:
    """0.2 points are rarely seen on one sheet."""
    assert held_rate(biased_judge(0, 0.2), shipped_sheets(), worlds=200) <= 0.35
    found = [trends_of(biased_judge(0, 0.2), 10, seed) for seed in range(20)]
    assert np.mean([one.sums[0].beyond and one.sums[0].high > one.sums[0].low for one in found]) >= 0.8
    assert any(f"{SCALES[0].name} is scored too high over 10 sheets" in " ".join(one.sentences()) for one in found)
    first = trends_of(constant_judge(5), 1, 1)
    assert any(" over 1 sheet, " in sentence for sentence in first.sentences())


def test_a_judge_without_errors_has_no_trend() -> None:
    assert not any(alarms_of(trends_of(lambda _, references: references, 4, 1)))


def test_errors_that_grow_over_a_sheet_are_shown_as_fatigue() -> None:
    def tiring_judge(rng: np.random.Generator, references: Scores) -> Scores:
        growth = np.linspace(0.4, 1.6, len(references))[:, None]
        return np.rint(references + growth * rng.normal(size=references.shape)).astype(np.int64).clip(1, 5)

    found = [trends_of(tiring_judge, 4, seed) for seed in range(10)]
    assert all(one.fatigue is not None and one.fatigue.value > 0 for one in found)
    assert np.mean([alarms_of(one)[1] for one in found]) >= 0.9
    assert "at the end of a sheet" in " ".join(found[0].sentences())


def test_a_judge_who_stays_near_the_middle_is_shown_as_compressing() -> None:
    def compressing_judge(rng: np.random.Generator, references: Scores) -> Scores:
        exact = 3 + 0.7 * (references - 3) + 0.7 * rng.normal(size=references.shape)
        return np.rint(exact).astype(np.int64).clip(1, 5)

    found = [trends_of(compressing_judge, 3, seed) for seed in range(10)]
    assert all(one.compression is not None and one.compression.value < 0 for one in found)
    assert np.mean([alarms_of(one)[2] for one in found]) >= 0.9
    assert "too close together" in " ".join(found[0].sentences())


def test_trends_without_controls_are_unknown() -> None:
    found = measure_trends(SCALES, [[]])
    assert (found.sums, found.fatigue, found.compression) == ((), None, None)
    assert json.loads(json.dumps(found.to_json()))["fatigue"] is None


# Verdicts


def test_a_perfect_judge_is_fine() -> None:
    drift = drift_of(lambda _rng, references: references)
    assert drift.verdict is Verdict.FINE
    assert drift.error == 0
    assert drift.contrast == pytest.approx(1)
    assert [scale.bias for scale in drift.scales] == pytest.approx([0.0] * SCALE_COUNT)


@settings(max_examples=20)
@given(st.lists(st.tuples(*[st.integers(1, 5)] * SCALE_COUNT), min_size=MIN_CONTROLS, max_size=50))
def test_a_perfect_judge_is_fine_with_any_references(agreed: list[tuple[int, ...]]) -> None:
    references = np.array(agreed)
    assert measure_drift(SCALES, control_tips(references, references)).verdict is Verdict.FINE


@pytest.mark.parametrize("value", [1, 3])
def test_a_perfect_judge_is_fine_where_all_references_are_equal(value: int) -> None:
    references = np.full((30, SCALE_COUNT), value)
    drift = measure_drift(SCALES, control_tips(references, references))
    assert drift.verdict is Verdict.FINE
    assert (drift.contrast, drift.contrast_limit) == (None, None)


def test_a_judge_who_never_varies_is_held_where_all_references_are_equal_and_differ() -> None:
    references = np.full((20, SCALE_COUNT), 3)
    drift = measure_drift(SCALES, control_tips(references + 1, references))
    assert drift.verdict is Verdict.BEYOND
    assert all(scale.beyond and scale.bias == pytest.approx(1) for scale in drift.scales)


def test_a_nearly_perfect_judge_of_excellent_tips_is_fine() -> None:
    references = np.full((40, SCALE_COUNT), 5)
    scores = references.copy()
    scores[:6] -= 1
    drift = measure_drift(SCALES, control_tips(scores, references))
    assert drift.verdict is Verdict.FINE
    assert all(scale.difference is not None and scale.difference < -0.1 for scale in drift.scales)


@pytest.mark.parametrize("judge", [constant_judge(5), noisy_judge(0.7)], ids=["always 5", "honest"])
def test_under_twenty_controls_the_verdict_is_unknown_and_the_numbers_are_shown(judge: Judge) -> None:
    drift = drift_of(judge, n=MIN_CONTROLS - 1)
    assert drift.verdict is Verdict.UNKNOWN
    assert not drift.error_beyond
    assert not drift.contrast_beyond
    assert drift.error is not None
    assert all(scale.bias is not None and scale.interval and not scale.beyond for scale in drift.scales)


def test_without_controls_drift_is_unknown() -> None:
    drift = measure_drift(SCALES, [])
    assert drift.verdict is Verdict.UNKNOWN
    assert (drift.n_controls, drift.error, drift.error_limit, drift.contrast) == (0, None, None, None)
    assert all((scale.n, scale.bias, scale.interval, scale.error) == (0, None, None, None) for scale in drift.scales)


def test_one_control_has_a_bias_but_no_interval() -> None:
    drift = measure_drift(SCALES[:1], control_tips(np.array([[4]]), np.array([[3]]), SCALES[:1]))
    assert drift.scales[0].bias == pytest.approx(1)
    assert drift.scales[0].interval is None


def test_a_score_outside_the_scale_is_a_bug_and_raises() -> None:
    with pytest.raises(ValueError, match=r"goes from 1 to 5; seen 3 to 6"):
        measure_drift(SCALES[:1], control_tips(np.array([[6]]), np.array([[3]]), SCALES[:1]))


# Numbers


def test_bias_names_the_right_scale_and_direction() -> None:
    drift = drift_of(biased_judge(1, -1.0))
    assert [scale.beyond for scale in drift.scales] == [False, True, False]
    assert drift.scales[1].bias is not None
    assert -1.2 < drift.scales[1].bias < -0.6


def test_clipping_is_not_mistaken_for_bias() -> None:
    references = spread_sheets(10_000, MOSTLY_GOOD, count=1)[0]
    drift = measure_drift(SCALES, control_tips(noisy_judge(1.0)(np.random.default_rng(3), references), references))
    for scale in drift.scales:
        assert scale.difference is not None
        assert scale.bias is not None
        assert scale.difference < -0.1
        assert abs(scale.bias) < 0.04


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(MIN_CONTROLS, 60), st.floats(0.1, 2.0), st.floats(-2, 2))
def test_a_bias_counts_exactly_if_its_interval_excludes_zero(seed: int, n: int, noise: float, by: float) -> None:
    drift = drift_of(noisy_judge(noise, [by] * SCALE_COUNT), n, seed)
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
    one, other = (measure_drift(SCALES[:1], control_tips(c[:, :1], c[:, 1:], SCALES[:1])) for c in (columns, turned))
    assert one.verdict is other.verdict
    assert one.error == pytest.approx(other.error)
    assert one.scales[0].bias == pytest.approx(other.scales[0].bias)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=50))
def test_reversing_the_scale_reverses_the_bias(pairs: list[tuple[int, int]]) -> None:
    columns = np.array(pairs)
    one, other = (
        measure_drift(SCALES[:1], control_tips(c[:, :1], c[:, 1:], SCALES[:1])) for c in (columns, 6 - columns)
    )
    assert one.scales[0].bias == pytest.approx(-(other.scales[0].bias or 0.0), abs=1e-9)
    assert one.error == pytest.approx(other.error)
    assert one.contrast == pytest.approx(other.contrast)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-50, 50)])
def test_careless_judges_are_held_and_careful_ones_pass_on_other_ranges(low: int, high: int) -> None:
    scales = [Scale(name, low, high, "", ("",) * (high - low + 1)) for name in ("first", "second")]
    rng = np.random.default_rng(2)
    references = rng.integers(low, high + 1, (60, 2))
    noise = rng.normal(0, 0.7 * (high - low) / 4, references.shape)
    careful = np.clip(np.rint(references + noise), low, high).astype(np.int64)
    careless = rng.integers(low, high + 1, references.shape)
    assert measure_drift(scales, control_tips(careful, references, scales)).verdict is Verdict.FINE
    assert measure_drift(scales, control_tips(careless, references, scales)).verdict is Verdict.BEYOND


def test_scales_of_different_ranges_weigh_alike_in_the_error() -> None:
    scales = [Scale("short", 1, 5, "", ("",) * 5), Scale("long", 0, 40, "", ("",) * 41)]
    references = np.array([[2, 10]] * 30)
    drift = measure_drift(scales, control_tips(references + np.array([1, 10]), references, scales))
    assert drift.error == pytest.approx(1.0)
    assert [scale.error for scale in drift.scales] == pytest.approx([1.0, 10.0])


# Messages


def test_the_message_of_a_held_judge_names_scale_direction_and_size() -> None:
    drift = drift_of(biased_judge(0, 1.0))
    sentence = drift.sentences(shipped_rubric())[0]
    assert sentence.startswith(f"{SCALES[0].name} is scored too high: by {drift.scales[0].bias:.1f} points")
    assert "1 to 5" in sentence


def test_the_message_of_a_random_judge_names_the_error_over_the_limit() -> None:
    drift = drift_of(random_judge)
    assert drift.error is not None
    assert drift.error_limit is not None
    text = " ".join(drift.sentences(shipped_rubric()))
    assert f"The scores differ from the reference scores by {drift.error:.1f} points" in text
    assert f"more than the limit of {drift.error_limit:.1f}." in text


def test_the_message_of_a_judge_who_always_gives_3_names_too_similar_scores() -> None:
    assert "get similar scores" in " ".join(drift_of(constant_judge(3)).sentences(shipped_rubric()))


def test_the_message_of_a_fine_judge_is_one_sentence() -> None:
    (sentence,) = drift_of(noisy_judge(0.5)).sentences(shipped_rubric())
    assert sentence.startswith("No drift found on 40 control tips")


def test_an_unknown_verdict_names_what_is_missing() -> None:
    (sentence,) = drift_of(noisy_judge(0.5), n=7).sentences(shipped_rubric())
    assert "unknown" in sentence
    assert "20 control tips" in sentence
    assert "7" not in sentence  # a count would reveal the controls to a judge who applies item by item


def test_json_is_plain_and_complete() -> None:
    drift = drift_of(noisy_judge(0.7))
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
