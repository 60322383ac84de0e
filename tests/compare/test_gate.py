"""The gate: three outcomes by the paired-t interval, and the reports for build systems."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import known

from support.judged import RUBRIC, scored
from tipbench.compare.cells import BoardCells
from tipbench.compare.gate import GateOptions, GateResult, Outcome, annotation, evaluate_gate, junit_xml, unknown_result
from tipbench.compare.matrix import Pair
from tipbench.errors import UsageError
from tipbench.plan.suite import load_suite
from tipbench.workflows.board import parse_pair_option

OLD, NEW = Pair("qwen2.5:0.5b", "v1"), Pair("qwen2.5:0.5b", "v2-mentor")
BASE = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
WAVE = [0.5, -0.5, 0.3, -0.3, 0.4, -0.4, 0.2, -0.2]


def gate(differences: list[float], margin: float = 1.0) -> GateResult:
    base = [BASE[at % 8] for at in range(len(differences))]
    cells = scored({OLD: base, NEW: [one + two for one, two in zip(base, differences, strict=True)]})
    return evaluate_gate(cells, GateOptions(NEW, OLD, margin))


BOTH = GateOptions(NEW, OLD)


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
    found = known(gate(differences).difference)
    expected = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (found.ci_low, found.ci_high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(-0.3)


def test_a_margin_of_zero_needs_a_real_gain() -> None:
    assert gate([0.1 + wave for wave in WAVE], margin=0).outcome is Outcome.UNDECIDED
    assert gate([2.0 + wave for wave in WAVE], margin=0).outcome is Outcome.NOT_WORSE


def test_undecided_has_the_number_of_scenarios_that_would_decide() -> None:
    result = gate([-0.8 + wave for wave in WAVE])
    assert known(result.scenarios_needed) > 8
    assert f"About {result.scenarios_needed} scenarios" in result.reason
    assert gate(WAVE).scenarios_needed is None


def test_for_a_difference_equal_to_the_margin_the_number_is_unknown() -> None:
    result = gate([-1.0 + wave for wave in WAVE])
    assert (result.outcome, result.scenarios_needed) == (Outcome.UNDECIDED, None)
    assert "cannot be estimated" in result.reason


@pytest.mark.parametrize("shift", [0.0, -0.5])
def test_equal_differences_pass_from_six_scenarios_on(shift: float) -> None:
    """They have no spread and so no interval; six equal signs are what chance gives in 2 of 64 cases."""
    assert gate([shift] * 6).outcome is Outcome.NOT_WORSE
    assert gate([shift] * 5).outcome is Outcome.UNKNOWN


def test_the_same_loss_everywhere_fails() -> None:
    assert gate([-1.5] * 8).outcome is Outcome.WORSE
    assert gate([-1.0] * 8).outcome is Outcome.UNDECIDED


def test_fewer_than_six_shared_scenarios_are_not_enough_data() -> None:
    cells = scored({OLD: [*BASE[:5], None, None, None], NEW: BASE})
    result = evaluate_gate(cells, BOTH)
    assert (result.outcome, result.exit_code(), result.n_scenarios) == (Outcome.UNKNOWN, 3, 5)
    assert "both judged in 5 scenarios; at least 6 are needed" in result.reason
    assert "`tipbench judge export`" in result.reason
    nothing = evaluate_gate(scored({OLD: [None], NEW: [None]}), BOTH)
    assert (nothing.outcome, nothing.difference) == (Outcome.UNKNOWN, None)


def test_provisional_scores_decide_nothing() -> None:
    result = evaluate_gate(scored({OLD: BASE, NEW: BASE}, provisional=True), BOTH)
    assert (result.outcome, result.exit_code(strict=True)) == (Outcome.UNKNOWN, 3)
    assert "provisional" in result.reason


def test_only_the_two_pairs_count() -> None:
    third = Pair("other", "v1")
    with_third = scored({OLD: BASE, NEW: [one - 0.9 for one in BASE[:7]] + [20.0], third: [1.0] * 8})
    alone = scored({OLD: BASE, NEW: [one - 0.9 for one in BASE[:7]] + [20.0]})
    assert evaluate_gate(with_third, BOTH) == evaluate_gate(alone, BOTH)


def test_an_unknown_pair_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"x/y is not on this board.*qwen2.5:0.5b/v1 and qwen2.5:0.5b/v2-mentor"):
        evaluate_gate(scored({OLD: BASE, NEW: BASE}, n_other_conditions=3), GateOptions(Pair("x", "y"), OLD))


def test_a_pair_is_not_compared_with_itself() -> None:
    with pytest.raises(UsageError, match="same pair"):
        evaluate_gate(scored({OLD: BASE}), GateOptions(OLD, OLD))


@settings(max_examples=40)
@given(st.lists(st.floats(-5, 5), min_size=6, max_size=12), st.floats(0, 3))
def test_the_outcome_follows_its_definition_for_any_differences(differences: list[float], margin: float) -> None:
    result = gate(differences, margin)
    found = known(result.difference)
    if found.ci_low is not None and found.ci_high is not None:
        expected = Outcome.NOT_WORSE if found.ci_low > -margin else Outcome.UNDECIDED
        assert result.outcome is (Outcome.WORSE if found.ci_high < -margin else expected)
    if result.scenarios_needed is not None:
        assert result.scenarios_needed > result.n_scenarios


def test_a_pair_that_is_worse_by_exactly_the_margin_rarely_passes() -> None:
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
    root = parsed(junit_xml("tip-bench-x", unknown_result(BOTH, "nothing there")))
    (error,) = root.iter("error")
    assert error.get("message") == "not enough data: nothing there"


def test_junit_of_hostile_names_is_valid_xml() -> None:
    text = junit_xml("tip-bench-<&>", unknown_result(GateOptions(NASTY, OLD), 'a "reason" <with> & \x07'))
    root = parsed(text)
    (error,) = root.iter("error")
    assert error.get("message") == 'not enough data: a "reason" <with> & \ufffd'
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


def test_names_cannot_break_out_of_an_annotation() -> None:
    line = annotation("tip-bench-x", unknown_result(GateOptions(NASTY, OLD), "50 % of\r\n::error::all"))
    assert line.splitlines() == [line]
    title, _, message = line.removeprefix("::error title=").partition("::")
    assert not set(title) & set(":,\r\n\x00")
    assert "v%251%0D%0A%3A%3Aerror%3A%3Ax%2Cy" in title
    assert message == "not enough data: 50 %25 of%0D%0A::error::all"


def with_holes(state: str) -> BoardCells:
    """The candidate lacks two of eight cells."""
    base = scored({OLD: BASE, NEW: [*[one + 2 for one in BASE[:6]], None, None]})
    cells = [
        each if each.values else replace(each, run=replace(each.run, tags={**each.run.tags, "state": state}))
        for each in base.cells
    ]
    return replace(base, cells=tuple(cells))


@pytest.mark.parametrize(("state", "command"), [("failed", "tipbench collect"), ("pending", "tipbench judge export")])
def test_candidate_that_is_not_judged_wherever_the_baseline_is_gets_no_result(state: str, command: str) -> None:
    result = evaluate_gate(with_holes(state), BOTH)
    assert (result.outcome, result.exit_code()) == (Outcome.UNKNOWN, 3)
    assert "is not judged in 2 of the 8 scenarios of qwen2.5:0.5b/v1 (p2@s6 and p3@s7)" in result.reason
    assert command in result.reason
    assert ("--failed-as-floor" in result.reason) == (state == "failed")
    assert annotation("tip-bench-x", result).startswith("::error ")
    found = result.to_json()
    assert (found["failed"], found["pending"]) == ((2, 0) if state == "failed" else (0, 2))
    assert (found["baseline_scenarios"], found["n_scenarios"], found["missing"]) == (8, 6, ["p2@s6", "p3@s7"])


def test_failed_cells_can_count_at_the_floor() -> None:
    """Two points better where it answers, but without an answer in two of eight scenarios."""
    cells = replace(with_holes("failed"), rubric_content=load_suite("tips").rubric)
    result = evaluate_gate(cells, replace(BOTH, failed_as_floor=True))
    assert (result.outcome, result.n_scenarios) == (Outcome.UNDECIDED, 8)
    assert known(result.difference).mean == pytest.approx((6 * 2 + (3 - BASE[6]) + (3 - BASE[7])) / 8)
    assert "2 failed cells counted at the floor" in result.reason


def test_reference_is_a_baseline_under_any_prompt() -> None:
    reference = Pair("baseline:template", "v1")
    cells = scored({reference: BASE, NEW: [one + 2 + wave for one, wave in zip(BASE, WAVE, strict=True)]})
    result = evaluate_gate(cells, GateOptions(NEW, parse_pair_option("baseline:template/anything", "baseline")))
    assert (result.outcome, str(result.options.baseline)) == (Outcome.NOT_WORSE, "baseline:template/none")


def test_json_names_rubric_judges_and_conditions() -> None:
    found = gate(WAVE).to_json()
    assert (found["rubric"], found["judges"], found["conditions"]) == (RUBRIC, ["anna"], "c" * 8)
    assert (found["failed"], found["pending"]) == (0, 0)
    nothing = unknown_result(BOTH, "nothing is there.").to_json()
    assert {nothing[name] for name in ("failed", "pending", "rubric", "judges", "conditions")} == {None}
