"""The gate: three outcomes by the paired-t interval, and what machines that read builds are told."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.judged import RUBRIC, scored
from tipbench.compare.cells import BoardCells
from tipbench.compare.gate import GateResult, Outcome, annotation, evaluate_gate, junit_xml, unknown
from tipbench.compare.matrix import Pair
from tipbench.errors import UsageError

OLD, NEW = Pair("qwen2.5:0.5b", "v1"), Pair("qwen2.5:0.5b", "v2-mentor")
BASE = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
WAVE = [0.5, -0.5, 0.3, -0.3, 0.4, -0.4, 0.2, -0.2]


def gate(differences: list[float], margin: float = 1.0) -> GateResult:
    base = [BASE[at % 8] for at in range(len(differences))]
    return evaluate_gate(
        scored({OLD: base, NEW: [one + two for one, two in zip(base, differences, strict=True)]}), NEW, OLD, margin
    )


@pytest.mark.parametrize(
    ("shift", "outcome", "code", "strict_code"),
    [
        (0.0, Outcome.NOT_WORSE, 0, 0),
        (-0.5, Outcome.NOT_WORSE, 0, 0),
        (-1.0, Outcome.UNDECIDED, 0, 1),
        (-2.0, Outcome.WORSE, 1, 1),
    ],
)
def test_the_interval_against_the_margin_decides(shift: float, outcome: Outcome, code: int, strict_code: int) -> None:
    result = gate([shift + wave for wave in WAVE])
    assert result.outcome is outcome
    assert (result.exit_code(), result.exit_code(strict=True)) == (code, strict_code)
    assert result.n_scenarios == 8
    assert result.reason.startswith(f"{outcome}: qwen2.5:0.5b/v2-mentor − qwen2.5:0.5b/v1 = ")
    assert "\n" not in result.reason


def test_the_interval_is_the_paired_t_interval() -> None:
    from scipy.stats import ttest_1samp

    differences = [wave - 0.3 for wave in WAVE]
    found = gate(differences).difference
    assert found is not None
    expected = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (found.ci_low, found.ci_high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(-0.3)


def test_a_margin_of_nothing_asks_for_a_real_gain() -> None:
    assert gate([0.1 + wave for wave in WAVE], margin=0).outcome is Outcome.UNDECIDED
    assert gate([2.0 + wave for wave in WAVE], margin=0).outcome is Outcome.NOT_WORSE


def test_undecided_tells_how_many_scenarios_would_decide() -> None:
    result = gate([-0.8 + wave for wave in WAVE])
    assert result.scenarios_needed is not None
    assert result.scenarios_needed > 8
    assert f"About {result.scenarios_needed} scenarios" in result.reason
    assert gate(WAVE).scenarios_needed is None


def test_a_difference_of_just_the_margin_needs_nobody_knows_how_many() -> None:
    result = gate([-1.0 + wave for wave in WAVE])
    assert (result.outcome, result.scenarios_needed) == (Outcome.UNDECIDED, None)
    assert "cannot be estimated" in result.reason


@pytest.mark.parametrize("shift", [0.0, -0.5])
def test_the_same_difference_everywhere_passes_from_six_scenarios_on(shift: float) -> None:
    """It has no spread and so no interval; six equal signs are what chance gives in 2 of 64 cases."""
    assert gate([shift] * 6).outcome is Outcome.NOT_WORSE
    few = gate([shift] * 5)
    assert (few.outcome, few.scenarios_needed) == (Outcome.UNDECIDED, 6)


def test_the_same_loss_everywhere_fails() -> None:
    assert gate([-1.5] * 8).outcome is Outcome.WORSE
    assert gate([-1.0] * 8).outcome is Outcome.UNDECIDED


def test_two_shared_judged_scenarios_are_the_least() -> None:
    cells = scored({OLD: [9.0, 10.0, 11.0, None], NEW: [None, 10.5, None, 12.0]})
    result = evaluate_gate(cells, NEW, OLD)
    assert (result.outcome, result.exit_code(), result.n_scenarios) == (Outcome.UNKNOWN, 3, 1)
    assert "1 scenario in which" in result.reason
    nothing = evaluate_gate(scored({OLD: [None], NEW: [None]}), NEW, OLD)
    assert (nothing.outcome, nothing.difference) == (Outcome.UNKNOWN, None)
    two = evaluate_gate(scored({OLD: [9.0, 10.0], NEW: [9.2, 10.0]}), NEW, OLD)
    assert two.outcome is not Outcome.UNKNOWN


def test_provisional_scores_decide_nothing() -> None:
    result = evaluate_gate(scored({OLD: BASE, NEW: BASE}, provisional=True), NEW, OLD)
    assert (result.outcome, result.exit_code(strict=True)) == (Outcome.UNKNOWN, 3)
    assert "provisional" in result.reason


def test_only_the_two_pairs_count() -> None:
    third = Pair("other", "v1")
    with_third = scored({OLD: BASE, NEW: [one - 0.9 for one in BASE[:7]] + [20.0], third: [1.0] * 8})
    alone = scored({OLD: BASE, NEW: [one - 0.9 for one in BASE[:7]] + [20.0]})
    assert evaluate_gate(with_third, NEW, OLD) == evaluate_gate(alone, NEW, OLD)


def test_an_unknown_pair_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"x/y is not on this board.*qwen2.5:0.5b/v1 and qwen2.5:0.5b/v2-mentor"):
        evaluate_gate(scored({OLD: BASE, NEW: BASE}, other_conditions=3), Pair("x", "y"), OLD)


def test_a_pair_is_not_held_against_itself() -> None:
    with pytest.raises(UsageError, match="same pair"):
        evaluate_gate(scored({OLD: BASE}), OLD, OLD)


@settings(max_examples=40)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12), st.floats(0, 3))
def test_whatever_the_differences_the_outcome_keeps_its_definition(differences: list[float], margin: float) -> None:
    result = gate(differences, margin)
    found = result.difference
    assert found is not None
    if found.ci_low is not None and found.ci_high is not None:
        expected = Outcome.NOT_WORSE if found.ci_low > -margin else Outcome.UNDECIDED
        assert result.outcome is (Outcome.WORSE if found.ci_high < -margin else expected)
    if result.scenarios_needed is not None:
        assert result.scenarios_needed > result.n_scenarios


def test_a_pair_that_is_just_worse_by_the_margin_passes_seldom() -> None:
    rng = np.random.default_rng(5)
    passed = sum(gate(list(rng.normal(-1.0, 2.0, size=8))).outcome is Outcome.NOT_WORSE for _ in range(400))
    assert passed <= 16, "2.5 % by design"


# For machines


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text.encode("utf-8"))  # noqa: S314 - our own


NASTY = Pair('<m&"\x00\x1b\ud800>', "v%1\r\n::error::x,y")


@pytest.mark.parametrize(
    ("shift", "strict", "found"),
    [
        (0.0, False, None),
        (-1.0, False, "skipped"),
        (-1.0, True, "failure"),
    ],
)
def test_junit_has_one_case_with_its_outcome(shift: float, strict: bool, found: str | None) -> None:
    text = junit_xml("tip-bench-x", gate([shift + wave for wave in WAVE]), strict=strict)
    root = parsed(text)
    (case,) = root.iter("testcase")
    kinds = [child.tag for child in case if child.tag != "system-out"]
    assert kinds == ([found] if found else [])
    (suite,) = root.iter("testsuite")
    for attribute, kind in (("failures", "failure"), ("skipped", "skipped"), ("errors", "error")):
        assert suite.get(attribute) == root.get(attribute) == str(int(found == kind))
    assert suite.get("tests") == "1"


def test_junit_shows_unknown_as_an_error() -> None:
    root = parsed(junit_xml("tip-bench-x", unknown(NEW, OLD, 1.0, "nothing there")))
    (error,) = root.iter("error")
    assert error.get("message") == "unknown: nothing there"


def test_junit_of_nasty_names_is_still_xml() -> None:
    text = junit_xml("tip-bench-<&>", unknown(NASTY, OLD, 1.0, 'a "reason" <with> & \x07'))
    root = parsed(text)
    (error,) = root.iter("error")
    assert error.get("message") == 'unknown: a "reason" <with> & \ufffd'
    (case,) = root.iter("testcase")
    assert (case.get("name") or "").startswith('<m&"\ufffd\ufffd\ufffd>/v%1')


@pytest.mark.parametrize(
    ("shift", "strict", "level"),
    [
        (0.0, True, "notice"),
        (-1.0, False, "warning"),
        (-1.0, True, "error"),
    ],
)
def test_an_annotation_has_the_level_of_the_outcome(shift: float, strict: bool, level: str) -> None:
    line = annotation("tip-bench-x", gate([shift + wave for wave in WAVE]), strict=strict)
    assert line.startswith(f"::{level} title=tipbench gate%3A qwen2.5%3A0.5b/v2-mentor against qwen2.5%3A0.5b/v1 in ")
    assert "::not worse: " in line or "::undecided: " in line or "::worse: " in line


def test_an_annotation_is_one_line_that_names_cannot_break_out_of() -> None:
    line = annotation("tip-bench-x", unknown(NASTY, OLD, 1.0, "50 % of\r\n::error::all"))
    assert line.splitlines() == [line]
    title, _, message = line.removeprefix("::error title=").partition("::")
    assert not set(title) & set(":,\r\n\x00")
    assert "v%251%0D%0A%3A%3Aerror%3A%3Ax%2Cy" in title
    assert message == "unknown: 50 %25 of%0D%0A::error::all"


def with_holes(state: str) -> BoardCells:
    """The candidate lacks two of eight cells."""
    base = scored({OLD: BASE, NEW: [*[one + 2 for one in BASE[:6]], None, None]})
    cells = [
        each if each.values else replace(each, run=replace(each.run, tags={**each.run.tags, "state": state}))
        for each in base.cells
    ]
    return replace(base, cells=tuple(cells))


@pytest.mark.parametrize("state", ["failed", "pending"])
def test_what_is_missing_of_the_candidate_is_said_and_warned_of(state: str) -> None:
    result = evaluate_gate(with_holes(state), NEW, OLD)
    assert (result.outcome, result.exit_code(strict=True)) == (Outcome.NOT_WORSE, 0)
    assert f"; 2 candidate cells {state}." in result.reason
    assert annotation("tip-bench-x", result).startswith("::warning ")
    found = result.to_json()
    assert (found["failed"], found["pending"]) == ((2, 0) if state == "failed" else (0, 2))
    assert (found["baseline_scenarios"], found["n_scenarios"]) == (8, 6)


def test_json_names_rubric_judges_and_conditions() -> None:
    found = gate(WAVE).to_json()
    assert (found["rubric"], found["judges"], found["conditions"]) == (RUBRIC, ["anna"], "c" * 8)
    assert (found["failed"], found["pending"]) == (0, 0)
    nothing = unknown(NEW, OLD, 1.0, "nothing is there.").to_json()
    assert {nothing[name] for name in ("failed", "pending", "rubric", "judges", "conditions")} == {None}
