"""The scores of one cell: what replaces what, what counts, what it makes of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sheets import other_rubric, tips_suite

from tipbench.errors import CorruptText
from tipbench.judge.scores import (
    NOBODY,
    CellScores,
    Judgement,
    floor_change,
    read_scores,
    run_change,
    scores_text,
    tip_means,
)
from tipbench.judge.sheet import ItemScore, TipScore
from tipbench.plan.rubric import Rubric

TIPS, OTHER = tips_suite().rubric, other_rubric()
RUBRICS: Mapping[str, Rubric] = {TIPS.tag: TIPS, OTHER.tag: OTHER}
N_TIPS = 3

times = st.datetimes().map(lambda when: when.isoformat())


@st.composite
def judgements(draw: st.DrawFn, rubric: Rubric | None = None) -> Judgement:
    chosen = rubric or draw(st.sampled_from(list(RUBRICS.values())))
    tip = st.builds(
        TipScore,
        scores=st.fixed_dictionaries({scale.name: st.integers(scale.min, scale.max) for scale in chosen.scales}),
        overlong=st.booleans(),
        note=st.text(max_size=8),
    )
    tips = tuple(draw(st.lists(tip, min_size=N_TIPS, max_size=N_TIPS)))
    format_ok = draw(st.booleans())
    return Judgement(
        judge=draw(st.sampled_from(["anna", "ben", "Zoë 😀"])),
        sheet=draw(st.text("abcdef0123456789", min_size=1, max_size=12)),
        exported=draw(times),
        at=draw(times),
        rubric=chosen.tag,
        format_ok=format_ok,
        tips=tips,
        means=tip_means(chosen, ItemScore("", format_ok, tips)),
        held=draw(st.booleans()),
    )


@st.composite
def cell_scores(draw: st.DrawFn) -> CellScores:
    scores = NOBODY
    for given_ in draw(st.lists(judgements(), max_size=6)):
        scores = scores.with_judgement(given_, provisional=draw(st.booleans()))
    return scores


@given(cell_scores(), judgements(), st.booleans(), times)
def test_the_same_judgement_again_gives_the_same_object(
    scores: CellScores, given_: Judgement, provisional: bool, later: str
) -> None:
    once = scores.with_judgement(given_, provisional=provisional)
    assert once.with_judgement(replace(given_, at=later), provisional=provisional) is once


@given(cell_scores())
def test_scores_survive_their_text(scores: CellScores) -> None:
    assert read_scores(scores_text(scores)) == scores
    assert scores_text(read_scores(scores_text(scores))) == scores_text(scores)


@given(cell_scores(), judgements())
def test_history_grows_by_the_former_judgement_and_by_nothing_else(scores: CellScores, given_: Judgement) -> None:
    former = scores.judges.get(given_.judge)
    after = scores.with_judgement(given_)
    released = former is not None and replace(former, held=given_.held, at=given_.at) == given_
    grown = () if former is None or after is scores or released else (former,)
    assert after.history == scores.history + grown
    assert after.judges[given_.judge].says_the_same_as(given_)
    assert {name: kept for name, kept in after.judges.items() if name != given_.judge} == {
        name: kept for name, kept in scores.judges.items() if name != given_.judge
    }


@given(cell_scores(), judgements())
def test_a_provisional_judgement_moves_nothing_that_counts(scores: CellScores, given_: Judgement) -> None:
    after = scores.with_judgement(given_, provisional=True)
    assert (after.judges, after.counted, after.history) == (scores.judges, scores.counted, scores.history)


@given(judgements(), st.booleans())
def test_release_and_hold_alone_make_no_history(given_: Judgement, held: bool) -> None:
    scores = NOBODY.with_judgement(given_).with_judgement(replace(given_, held=held, at="later"))
    assert scores.history == ()
    assert scores.judges[given_.judge].held is held


@given(cell_scores())
def test_what_counts_is_free_and_under_one_rubric(scores: CellScores) -> None:
    counted = scores.counted
    assert not any(given_.held for given_ in counted)
    assert len({given_.rubric for given_ in counted}) <= 1
    free = [given_ for given_ in scores.judges.values() if not given_.held]
    assert bool(counted) == bool(free)
    if free:
        assert max(given_.exported for given_ in free) == max(given_.exported for given_ in counted)


@given(st.lists(judgements(TIPS), min_size=1, max_size=4, unique_by=lambda given_: given_.judge))
def test_a_run_gets_the_composite_by_hand_averaged_over_tips_then_judges(many: list[Judgement]) -> None:
    scores = NOBODY
    for given_ in many:
        scores = scores.with_judgement(replace(given_, held=False))
    found = run_change(scores, RUBRICS, 7).metrics
    composites = [
        fmean(sum(tip.scores.values()) + 2 * each.format_ok - tip.overlong for tip in each.tips) for each in many
    ]
    assert found["composite"] == pytest.approx(fmean(composites))
    assert found["format_ok"] == pytest.approx(fmean(each.format_ok for each in many))
    for name in TIPS.scale_names:
        assert found[name] == pytest.approx(fmean(fmean(tip.scores[name] for tip in each.tips) for each in many))
    low, high = TIPS.range
    assert low <= found["composite"] <= high


@given(judgements(OTHER))
def test_another_rubric_has_its_own_scales_and_weights(given_: Judgement) -> None:
    found = run_change(NOBODY.with_judgement(replace(given_, held=False)), RUBRICS, 7).metrics
    assert set(found) == {"warmth", "note", "format_ok", "overlong", "composite"}
    by_hand = fmean(tip.scores["warmth"] + 3 * tip.scores["note"] - 2 * tip.overlong for tip in given_.tips)
    assert found["composite"] == pytest.approx(by_hand)


@given(cell_scores())
def test_a_run_is_judged_exactly_when_something_counts(scores: CellScores) -> None:
    change = run_change(scores, RUBRICS, 7)
    state = change.tags.get("state")
    if scores.counted:
        assert (state, change.tags["judge_pending"]) == ("judged", "false")
        assert change.tags["scores_rubric"] == scores.counted[0].rubric
        assert change.texts["artifact:rubric.md"] == RUBRICS[scores.counted[0].rubric].text
    else:
        assert state == ("pending" if scores.judges else None)
        assert "composite" not in change.metrics
    assert json.loads(change.tags["judges"]) == sorted(given_.judge for given_ in scores.counted)
    assert any(name.startswith("provisional_") for name in change.metrics) == bool(scores.provisional)


def test_of_several_provisional_judges_the_latest_counts_and_is_named() -> None:
    tip = TipScore({"relevance": 1, "actionability": 1, "tone": 1}, overlong=False)
    means = tip_means(TIPS, ItemScore("", True, (tip,)))
    rules = Judgement("rules", "s", "2026-01-01", "2026-01-03", TIPS.tag, format_ok=True, tips=(tip,), means=means)
    model = replace(rules, judge="ollama:x", at="2026-01-02", means=dict.fromkeys(means, 5.0))
    scores = NOBODY.with_judgement(rules, provisional=True).with_judgement(model, provisional=True)
    change = run_change(scores, RUBRICS, 7)
    assert change.tags["provisional_judge"] == "rules"
    assert change.metrics == {
        "provisional_relevance": 1, "provisional_actionability": 1, "provisional_tone": 1, "provisional_composite": 5,
    }  # fmt: skip


def test_a_floor_comes_from_the_rubric() -> None:
    change = floor_change(OTHER, 7)
    assert change.metrics == {"warmth": 0, "note": 1, "format_ok": 0, "overlong": 0, "composite": 3}
    assert change.tags == {"scores_rubric": OTHER.tag}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"judges": [], "provisional": {}, "history": []}', '{"judges": {"a": 1}}', "null"]
)
def test_a_spoilt_text_is_told_and_not_guessed_at(text: str) -> None:
    with pytest.raises(CorruptText, match=r"artifact:scores\.json is not what tipbench writes"):
        read_scores(text)


def test_no_text_is_nobody() -> None:
    assert read_scores(None) is NOBODY
