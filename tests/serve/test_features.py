"""Features: the values in the tables of the contract, and properties that hold for any request."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.serving import AT, PROFILE, candidate, score_request
from tipbench.serve.features import FEATURES, Floats
from tipbench.serve.policy import POLICIES
from tipbench.serve.request import ScoreRequest, parse_time
from tipbench.serve.tallies import Tallies

ADR = Path(__file__).parents[2] / "docs" / "adr" / "0012-from-seven-to-twelve-dimensions.md"
SEVEN = ("hour_sin", "hour_cos", "is_overdue", "task_age_norm", "priority_norm", "dow_sin", "dow_cos")


def example_tallies() -> Tallies:
    """Tallies of three tips: two of focus (one completed at 9 after 60 s, one dismissed), one without a category."""
    tallies = Tallies()
    tallies.add("focus", "completed", 60_000, 9.0)
    tallies.add("focus", "dismissed", None, 20.0)
    tallies.add(None, "completed", 5_000_000, 3.0)
    return tallies


def matrix(name: str, request: ScoreRequest, tallies: Tallies | None = None) -> Floats:
    at = parse_time(request.get("at") or AT)
    return FEATURES[name].matrix(request, request["candidates"], at, tallies or Tallies())


def first_candidate(name: str, tallies: Tallies | None = None, **changes: Any) -> dict[str, float]:
    """The features of the first candidate by name."""
    row = matrix(name, score_request(**changes), tallies)[0]
    return dict(zip(FEATURES[name].names, row.tolist(), strict=True))


def test_r03_v1_has_seven_dimensions() -> None:
    assert FEATURES["v1"].names == SEVEN
    assert first_candidate("v1") == pytest.approx(
        {
            "hour_sin": 0.7933533402912352,
            "hour_cos": -0.6087614290087207,
            "is_overdue": 1.0,
            "task_age_norm": 2 / 30,
            "priority_norm": 0.0,
            "dow_sin": 0.0,
            "dow_cos": 1.0,
        },
        abs=1e-15,
    )


def test_r04_v2_has_the_features_of_v1_and_five_of_the_user() -> None:
    five = ("completion_rate", "dismiss_rate", "mean_dwell_norm", "preferred_hour_alignment", "tip_volume_norm")
    assert FEATURES["v2"].names == (*SEVEN, *five)
    values = matrix("v2", score_request())
    np.testing.assert_array_equal(values[:, :7], matrix("v1", score_request()))
    expected = [0.4, 0.2, 0.07, 0.9914448613738104, 0.7509524161184398]
    assert values[0, 7:].tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("dwell_s", "value"), [(0, 0.0), (599, 599 / 600), (600, 1.0), (10_000, 1.0)])
def test_r05_mean_dwell_is_clipped_at_ten_minutes(dwell_s: float, value: float) -> None:
    assert first_candidate("v2", profile_features={"mean_dwell_ms_30d": dwell_s * 1000})["mean_dwell_norm"] == value


@pytest.mark.parametrize(("preferred", "value"), [(8.5, 1.0), (20.5, -1.0), (14.5, 0.0), (2.5, 0.0)])
def test_r06_preferred_hour_alignment_is_one_cosine(preferred: float, value: float) -> None:
    features = first_candidate("v2", profile_features={"preferred_hour": preferred})
    assert features["preferred_hour_alignment"] == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize(("volume", "value"), [(0, 0.0), (9, 0.499), (100, 1.0), (10**6, 1.0)])
def test_r07_tip_volume_is_logarithmic(volume: int, value: float) -> None:
    features = first_candidate("v2", profile_features={"tip_volume_30d": volume})
    assert features["tip_volume_norm"] == pytest.approx(value, abs=0.002)


def test_r08_the_position_and_normalisation_of_every_feature_are_documented() -> None:
    documented: dict[str, dict[int, str]] = {"v1": {}, "v2": {}, "v3": {}}
    for line in ADR.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall("`([a-z_]+)`", cells[0])
        if len(cells) == 5 and names:
            assert cells[1]
            for by_position, places in zip(documented.values(), cells[2:], strict=True):
                if places:
                    by_position.update(zip(map(int, places.split(",")), names, strict=True))
    assert {name: tuple(by_position[i] for i in sorted(by_position)) for name, by_position in documented.items()} == {
        name: features.names for name, features in FEATURES.items()
    }
    assert all(sorted(by_position) == list(range(FEATURES[name].dim)) for name, by_position in documented.items())


@pytest.mark.parametrize("profile", [None, {}, {"preferred_hour": None}, dict.fromkeys(PROFILE)])
@pytest.mark.parametrize("policy", POLICIES)
def test_r16_profile_features_may_be_missing_or_null(policy: str, profile: dict[str, Any] | None) -> None:
    features = POLICIES[policy].features
    request = score_request()
    request["profile_features"] = profile  # type: ignore[typeddict-item]
    values = features.matrix(request, request["candidates"], parse_time(AT), Tallies())
    del request["profile_features"]
    np.testing.assert_array_equal(values, features.matrix(request, request["candidates"], parse_time(AT), Tallies()))
    if policy == "egreedy/v2":
        assert not values[:, 7:].any()


def test_v3_has_the_values_of_its_table() -> None:
    assert FEATURES["v3"].dim == 12
    overall = (2 + 0.5) / 5, (1 + 0.5) / 5, ((60 + 600) / 600 + 0.4) / 4
    assert list(first_candidate("v3", example_tallies()).values()) == pytest.approx(
        [
            1.0,
            *(1.0, 2 / 30, 0.0),
            (5.0 - 9.5) / 7.5,
            math.cos(math.tau * 1.5 / 24),
            7 / 20 * (1 - 2 * 5 / 30),
            (1 + 4 * overall[0]) / 6,
            (1 + 4 * overall[1]) / 6,
            (0.1 + 4 * overall[2]) / 5,
            math.cos(math.tau * 0.5 / 24) / 2,
            math.log(3) / math.log(101),
        ],
        abs=1e-15,
    )


def test_a_candidate_without_values_has_the_user_s_rates_and_zeros() -> None:
    values = matrix("v3", score_request(candidates=[{"tip_id": "bare"}]), example_tallies())[0].tolist()
    assert values == pytest.approx([1.0, *[0.0] * 6, 0.5, 0.3, (1.1 + 0.4) / 4, 0.0, 0.0])


def test_tallies_of_a_request_replace_those_of_the_server() -> None:
    sent = {"focus": dict(example_tallies().by_category["focus"]._asdict()), "rest": {"seen": 4}}
    request = score_request(profile_features={"by_category": sent})
    expected = Tallies.from_values(sent)  # type: ignore[arg-type]
    np.testing.assert_array_equal(matrix("v3", request, example_tallies()), matrix("v3", score_request(), expected))
    assert (
        matrix("v3", request, example_tallies()).tolist() != matrix("v3", score_request(), example_tallies()).tolist()
    )


def test_every_dimension_of_v3_but_the_bias_varies_over_candidates() -> None:
    tallies = example_tallies()
    tallies.add("rest", "completed", 300_000, 22.0)
    varies = np.ptp(matrix("v3", score_request(k=8), tallies), axis=0) > 1e-3
    assert dict(zip(FEATURES["v3"].names, varies.tolist(), strict=True)) == {
        name: name != "bias" for name in FEATURES["v3"].names
    }


@pytest.mark.parametrize("name", FEATURES)
def test_hour_features_are_continuous_at_midnight_and_use_the_local_hour(name: str) -> None:
    before, after = ("2026-04-27T23:59:59.999999+02:00", "2026-04-27T00:00:00+02:00")
    assert np.allclose(matrix(name, score_request(at=before)), matrix(name, score_request(at=after)), atol=1e-9)
    here, there = ("2026-04-27T08:30:00+02:00", "2026-04-27T08:30:00-09:00")
    np.testing.assert_array_equal(matrix(name, score_request(at=here)), matrix(name, score_request(at=there)))


NUMBERS = st.none() | st.floats(0, 1e300)
CANDIDATES = st.fixed_dictionaries(
    {},
    optional={
        "category": st.none() | st.sampled_from(["focus", "rest"]),
        "task": st.none()
        | st.fixed_dictionaries(
            {}, optional={"is_overdue": st.booleans(), "age_days": NUMBERS, "priority": st.integers(1, 4)}
        ),
        "composite": st.none() | st.floats(-1e300, 1e300),
        "slot_hour": st.none() | st.floats(0, 24),
        "effort_min": NUMBERS,
    },
)
HOSTILE_TALLY = st.fixed_dictionaries(
    {},
    optional={
        "seen": st.integers(0, 10**9),
        "completed": st.integers(0, 10**9),
        "dismissed": st.integers(0, 10**9),
        "dwell_s_sum": st.floats(0, 1e300),
        "dwell_n": st.integers(0, 10**9),
        "hour_x": st.floats(-1e300, 1e300),
        "hour_y": st.floats(-1e300, 1e300),
    },
)


@given(
    CANDIDATES,
    st.datetimes(),
    st.none() | st.integers(0, 10**9),
    st.none() | st.dictionaries(st.sampled_from(["focus", "other"]), HOSTILE_TALLY),
)
def test_all_features_of_a_valid_request_are_finite_and_within_one(
    values: dict[str, Any], at: Any, open_tasks: int | None, by_category: dict[str, Any] | None
) -> None:
    request = score_request(
        candidates=[{"tip_id": "t", **values}, candidate(1)],
        context={"open_tasks": open_tasks},
        profile_features={**PROFILE, "mean_dwell_ms_30d": 1e300, "by_category": by_category},
        at=f"{at.isoformat()}+00:00",
    )
    for name in FEATURES:
        found = matrix(name, request, example_tallies())
        assert np.isfinite(found).all()
        assert np.abs(found).max() <= 1.0
