from __future__ import annotations

import hashlib
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suite_folder import SuiteFolder

from tipbench.errors import SuiteError
from tipbench.plan.rubric import FLAGS, Rubric, Scale
from tipbench.plan.suite import load_suite

TIPS = load_suite("tips")
RUBRIC = TIPS.rubric


@pytest.fixture
def folder(tmp_path: Path) -> SuiteFolder:
    return SuiteFolder(tmp_path / "my-suite")


@st.composite
def rubrics(draw: st.DrawFn) -> Rubric:
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, min_size=1, max_size=3))
    scales = []
    for name in names:
        low = draw(st.integers(-3, 3))
        scales.append(Scale(name, low, low + draw(st.integers(1, 4)), "", ()))
    weights = {name: draw(st.integers(-3, 3)) / 2 for name in [*names, *FLAGS]}
    floor = {**{scale.name: scale.min for scale in scales}, **dict.fromkeys(FLAGS, 0)}
    return Rubric("r", "0" * 64, "", 40, tuple(scales), weights, floor, ())


@given(rubrics())
def test_range_is_the_lowest_and_highest_possible_composite(rubric: Rubric) -> None:
    values = [range(scale.min, scale.max + 1) for scale in rubric.scales]
    composites = [
        rubric.composite(dict(zip(rubric.scale_names, scores, strict=True)), format_ok=format_ok, overlong=overlong)
        for scores in product(*values)
        for format_ok, overlong in product((False, True), repeat=2)
    ]
    assert (min(composites), max(composites)) == rubric.composite_range
    assert rubric.composite_range[0] <= rubric.floor_composite <= rubric.composite_range[1]


def test_rubric_tip_v1_has_the_documented_weights() -> None:
    scores = {"relevance": 4, "actionability": 3, "tone": 5}
    assert RUBRIC.composite(scores, format_ok=True, overlong=False) == 14
    assert RUBRIC.composite(scores, format_ok=False, overlong=True) == 11
    assert RUBRIC.composite_range == (2, 17)
    assert RUBRIC.floor_composite == 3
    assert RUBRIC.word_limit == 40


def test_mean_scores_of_several_judges_have_a_composite_too() -> None:
    scores = {"relevance": 2.5, "actionability": 3.0, "tone": 4.5}
    assert RUBRIC.composite(scores, format_ok=True, overlong=False) == 12


def test_tag_identifies_the_exact_bytes_of_the_file() -> None:
    assert RUBRIC.tag == f"tip-v1@{hashlib.sha256(RUBRIC.text.encode()).hexdigest()}"


def test_anchors_and_controls_show_every_step_of_every_scale() -> None:
    for examples in (RUBRIC.anchors, TIPS.controls):
        for scale in RUBRIC.scales:
            shown = {example.scores[scale.name] for example in examples}
            assert shown == set(range(scale.min, scale.max + 1)), scale.name


def test_built_in_rubric_has_anchors_for_every_scenario() -> None:
    counts = Counter(anchor.scenario for anchor in RUBRIC.anchors)
    assert len(RUBRIC.anchors) >= 14
    assert min(counts[scenario.id] for scenario in TIPS.scenarios) >= 1


def test_built_in_suite_has_controls_for_every_scenario() -> None:
    counts = Counter(control.scenario for control in TIPS.controls)
    assert len(TIPS.controls) >= 24
    assert min(counts[scenario.id] for scenario in TIPS.scenarios) >= 3


def test_every_built_in_control_has_a_rationale_like_the_answers() -> None:
    assert [control.tip for control in TIPS.controls if not control.rationale] == []


def test_every_scale_value_is_in_10_to_35_percent_of_the_controls() -> None:
    """A judge who always gives 3 must be detected."""
    for scale in RUBRIC.scales:
        counts = Counter(control.scores[scale.name] for control in TIPS.controls)
        assert max(counts.values()) <= 0.35 * len(TIPS.controls)
        assert min(counts.values()) >= 0.10 * len(TIPS.controls)


def test_rubric_with_other_scales_works(folder: SuiteFolder) -> None:
    rubric = load_suite(str(folder)).rubric
    assert rubric.scale_names == ("usefulness",)
    assert rubric.composite_range == (-1, 7)
    assert rubric.composite({"usefulness": 2}, format_ok=True, overlong=True) == 4


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('id = "museum-v1"', 'id = "Museum 1"', "out of a-z, 0-9 and '-'; found 'Museum 1'"),
        ("word_limit = 25", "word_limit = 0", "'word_limit' must be at least 1; found 0"),
        ("word_limit = 25", 'word_limit = "25"', "'word_limit' must be a valid integer; found '25'"),
        ("word_limit = 25", "word_limit = ", "not valid TOML"),
        ('name = "usefulness"', 'name = "composite"', "already the name of a metric"),
        ('name = "usefulness"', 'name = "Use full"', "'name' must be a name for a metric"),
        ("max = 3", "max = 0", "'max' must be above 'min'; found 0 to 0"),
        ('steps = ["No.", ', "steps = [", "each of the 4 steps; it has 3 entries"),
        ("usefulness = 2", "charm = 2", "unknown key 'charm'. Known here: usefulness, format_ok, overlong"),
        ("usefulness = 0", "usefulness = 4", "'usefulness' goes from 0 to 3; found 4"),
        ("format_ok = 0", "format_ok = 2", "'format_ok' is a flag, 0 or 1; found 2"),
        ("scores = { usefulness = 3 }", "scores = { usefulness = 9 }", "goes from 0 to 3; found 9"),
        ("scores = { usefulness = 3 }", "scores = { usefulness = 2.5 }", "must be a valid integer; found 2.5"),
        ("scores = { usefulness = 3 }", "scores = { charm = 3 }", "unknown key 'charm'"),
        ('scenario = "curator@opening"', 'scenario = "curator@night"', "no scenario 'curator@night'"),
        ("[weights] ", "[wights] ", "'weights' is missing. (1 more in this file)"),
        ("format_ok = 1", "format_ok = nan", "'format_ok' must be a finite number; found nan"),
    ],
)
def test_broken_rubric_is_refused_with_line_and_reason(folder: SuiteFolder, old: str, new: str, reason: str) -> None:
    line = folder.replace("rubric.md", old, new)
    with pytest.raises(SuiteError) as refused:
        load_suite(str(folder))
    assert refused.value.path == folder.path / "rubric.md"
    assert reason in refused.value.reason
    assert refused.value.line == (line if "is missing" not in reason else 2)


def test_missing_weight_is_reported_at_its_table(folder: SuiteFolder) -> None:
    line = folder.replace("rubric.md", "[weights] ", "[weights] ")
    folder.replace("rubric.md", "overlong = -1\n", "")
    with pytest.raises(SuiteError, match=f"rubric.md:{line}: 'overlong' is missing in 'weights'"):
        load_suite(str(folder))


@pytest.mark.parametrize("text", ["# Just prose\n", "+++\nid = 'x'\n"])
def test_rubric_without_a_head_is_refused(folder: SuiteFolder, text: str) -> None:
    folder.write("rubric.md", text)
    with pytest.raises(SuiteError, match=r"rubric\.md:1: a rubric begins with a TOML head"):
        load_suite(str(folder))


def test_two_scales_of_one_name_are_refused(folder: SuiteFolder) -> None:
    scale = '[[scales]]\nname = "usefulness"\nmin = 0\nmax = 1\nabout = "a"\nsteps = ["a", "b"]\n\n'
    folder.replace("rubric.md", "[weights] ", scale + "[weights] ")
    with pytest.raises(SuiteError, match="two scales named 'usefulness'"):
        load_suite(str(folder))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("usefulness = 1", "usefulness = 4", "goes from 0 to 3; found 4"),
        ("curator@opening", "nobody@opening", "no scenario 'nobody@opening'"),
        ("Answer the loan request from Lyon as soon as possible.", "Stay positive and organised.", "an anchor"),
        ("why = ", "because = ", "'why' is missing"),
    ],
)
def test_broken_control_is_refused_with_line_and_reason(folder: SuiteFolder, old: str, new: str, reason: str) -> None:
    line = folder.replace("controls.toml", old, new)
    with pytest.raises(SuiteError) as refused:
        load_suite(str(folder))
    assert refused.value.path == folder.path / "controls.toml"
    assert reason in refused.value.reason
    assert refused.value.line == (line if "missing" not in reason else 1)


def test_control_that_is_listed_twice_is_refused(folder: SuiteFolder) -> None:
    text = (folder.path / "controls.toml").read_text()
    folder.write("controls.toml", text + "\n" + text)
    with pytest.raises(SuiteError, match="listed twice for curator@opening"):
        load_suite(str(folder))
