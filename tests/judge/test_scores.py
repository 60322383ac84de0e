"""The scores of one cell: what replaces what, what counts, and the metrics and tags of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sheets import other_rubric, tips_suite

from tipbench.errors import CorruptText
from tipbench.judge.scores import (
    NO_SCORES,
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
        applied_at=draw(times),
        rubric=chosen.tag,
        format_ok=format_ok,
        tips=tips,
        means=tip_means(chosen, ItemScore("", format_ok, tips)),
        held=draw(st.booleans()),
    )


@st.composite
def cell_scores(draw: st.DrawFn) -> CellScores:
    scores = NO_SCORES
    for judgement in draw(st.lists(judgements(), max_size=6)):
        scores = scores.with_judgement(judgement, provisional=draw(st.booleans()))
    return scores


@settings(max_examples=15)
@given(cell_scores(), judgements(), st.booleans(), times)
def test_the_same_judgement_again_gives_the_same_object(
    scores: CellScores, judgement: Judgement, provisional: bool, later: str
) -> None:
    once = scores.with_judgement(judgement, provisional=provisional)
    assert once.with_judgement(replace(judgement, applied_at=later), provisional=provisional) is once


@settings(max_examples=15)
@given(cell_scores())
def test_scores_round_trip_through_their_text(scores: CellScores) -> None:
    assert read_scores(scores_text(scores)) == scores
    assert scores_text(read_scores(scores_text(scores))) == scores_text(scores)


def all_judgements(scores: CellScores) -> list[Judgement]:
    return [*scores.applied.values(), *scores.held.values(), *scores.history]


@settings(max_examples=15)
@given(cell_scores(), judgements())
def test_every_judgement_is_applied_held_or_history(scores: CellScores, judgement: Judgement) -> None:
    """The same scores move when released or withdrawn; replaced ones become history, of which five are kept."""
    after = all_judgements(scores.with_judgement(judgement))
    for former in all_judgements(scores):
        moved = replace(former, held=judgement.held, applied_at=judgement.applied_at) == judgement
        old = former in scores.history and sum(kept.sheet == former.sheet for kept in after) >= 5
        assert moved or old or any(without_notes(kept).equals_except_time(without_notes(former)) for kept in after)


def without_notes(judgement: Judgement) -> Judgement:
    return replace(judgement, tips=tuple(replace(tip, note="") for tip in judgement.tips))


def one_tip(number: int, note: str = "") -> Judgement:
    tips = (TipScore(dict.fromkeys(TIPS.scale_names, number), overlong=False, note=note),)
    means = tip_means(TIPS, ItemScore("", True, tips))
    return Judgement("anna", "s1", "2026-05-01", "2026-05-02", TIPS.tag, format_ok=True, tips=tips, means=means)


def test_of_many_judgements_of_one_sheet_the_newest_five_replaced_ones_are_kept_and_one_with_notes() -> None:
    scores = NO_SCORES
    for number in (5, 4, 1, 2, 3, 4, 5):
        scores = scores.with_judgement(one_tip(number, str(number)))
    kept = [each.tips[0] for each in (*scores.history, scores.applied["anna"])]
    assert [(tip.scores["tone"], tip.note) for tip in kept] == [(4, ""), (1, ""), (2, ""), (3, ""), (4, "4"), (5, "5")]


@settings(max_examples=15)
@given(cell_scores(), judgements())
def test_a_judgement_changes_no_other_judge(scores: CellScores, judgement: Judgement) -> None:
    after = scores.with_judgement(judgement)
    for one, other in ((scores.applied, after.applied), (scores.held, after.held)):
        names = (one.keys() | other.keys()) - {judgement.judge}
        assert all(one[name] == other[name] for name in names)
    assert not any(kept.held for kept in after.applied.values())
    assert all(kept.held for kept in after.held.values())


@settings(max_examples=15)
@given(cell_scores(), judgements())
def test_a_counted_judgement_is_replaced_only_by_a_later_sheet(scores: CellScores, judgement: Judgement) -> None:
    new = replace(judgement, held=False)
    standing = scores.with_judgement(new).applied[new.judge]
    assert standing.equals_except_time(new) or (standing.sheet != new.sheet and standing.exported > new.exported)
    held = scores.with_judgement(new).held.get(new.judge)
    assert held is None or held.sheet != new.sheet


@settings(max_examples=15)
@given(judgements(), judgements())
def test_a_held_sheet_removes_no_counted_score_of_another(counted: Judgement, held: Judgement) -> None:
    counted = replace(counted, held=False, sheet="one")
    held = replace(held, held=True, sheet="two", judge=counted.judge)
    scores = NO_SCORES.with_judgement(counted).with_judgement(held)
    assert (scores.counted, scores.history) == ([counted], ())
    assert scores.held == {held.judge: held}
    assert run_change(scores, RUBRICS, 7).tags["held"] == "true"


@settings(max_examples=15)
@given(judgements(), judgements(), st.booleans())
def test_a_sheet_that_becomes_held_restores_the_scores_it_replaced(
    first: Judgement, second: Judgement, revised: bool
) -> None:
    first = replace(first, held=False, sheet="one", exported="2026-01-01")
    second = replace(second, held=False, sheet="two", exported="2026-01-02", judge=first.judge)
    scores = NO_SCORES.with_judgement(first).with_judgement(second)
    assert (scores.counted, scores.history) == ([second], (first,))
    held = replace(second, held=True, format_ok=second.format_ok != revised)
    scores = scores.with_judgement(held)
    assert scores.counted == [first]
    assert scores.held == {held.judge: held}
    assert scores.history == ((second,) if revised else ())
    assert scores.with_judgement(replace(held, held=False)).counted == [replace(held, held=False)]


@settings(max_examples=15)
@given(judgements(), judgements())
def test_a_held_sheet_that_is_accepted_too_late_is_history(old: Judgement, new: Judgement) -> None:
    old = replace(old, held=True, sheet="one", exported="2026-01-01")
    new = replace(new, held=False, sheet="two", exported="2026-01-02", judge=old.judge)
    scores = NO_SCORES.with_judgement(old).with_judgement(new).with_judgement(replace(old, held=False))
    assert (scores.counted, scores.held, scores.history) == ([new], {}, (old,))


@settings(max_examples=15)
@given(cell_scores(), judgements())
def test_a_provisional_judgement_changes_no_counted_score(scores: CellScores, judgement: Judgement) -> None:
    after = scores.with_judgement(judgement, provisional=True)
    assert (after.applied, after.counted, after.history) == (scores.applied, scores.counted, scores.history)


@settings(max_examples=15)
@given(judgements(), st.booleans())
def test_release_and_hold_add_no_history(judgement: Judgement, held: bool) -> None:
    scores = NO_SCORES.with_judgement(judgement).with_judgement(replace(judgement, held=held, applied_at="later"))
    assert scores.history == ()
    assert (scores.held if held else scores.applied).keys() == {judgement.judge}
    assert not (scores.applied if held else scores.held)


@settings(max_examples=15)
@given(cell_scores())
def test_counted_scores_are_not_held_and_under_one_rubric(scores: CellScores) -> None:
    counted = scores.counted
    assert not any(judgement.held for judgement in counted)
    assert len({judgement.rubric for judgement in counted}) <= 1
    assert bool(counted) == bool(scores.applied)
    if counted:
        newest = max(judgement.exported for judgement in scores.applied.values())
        assert max(judgement.exported for judgement in counted) == newest


@settings(max_examples=15)
@given(st.lists(judgements(TIPS), min_size=1, max_size=4, unique_by=lambda judgement: judgement.judge))
def test_a_run_gets_the_expected_composite_averaged_over_tips_then_judges(many: list[Judgement]) -> None:
    scores = NO_SCORES
    for judgement in many:
        scores = scores.with_judgement(replace(judgement, held=False))
    found = run_change(scores, RUBRICS, 7).metrics
    composites = [
        fmean(sum(tip.scores.values()) + 2 * each.format_ok - tip.overlong for tip in each.tips) for each in many
    ]
    assert found["composite"] == pytest.approx(fmean(composites))
    assert found["format_ok"] == pytest.approx(fmean(each.format_ok for each in many))
    for name in TIPS.scale_names:
        assert found[name] == pytest.approx(fmean(fmean(tip.scores[name] for tip in each.tips) for each in many))
    low, high = TIPS.composite_range
    assert low <= found["composite"] <= high


@settings(max_examples=15)
@given(judgements(OTHER))
def test_another_rubric_has_its_own_scales_and_weights(judgement: Judgement) -> None:
    found = run_change(NO_SCORES.with_judgement(replace(judgement, held=False)), RUBRICS, 7).metrics
    assert set(found) == {"warmth", "note", "format_ok", "overlong", "composite"}
    expected = fmean(tip.scores["warmth"] + 3 * tip.scores["note"] - 2 * tip.overlong for tip in judgement.tips)
    assert found["composite"] == pytest.approx(expected)


@settings(max_examples=15)
@given(cell_scores())
def test_a_run_is_judged_exactly_when_something_counts(scores: CellScores) -> None:
    change = run_change(scores, RUBRICS, 7)
    state = change.tags.get("state")
    if scores.counted:
        assert (state, change.tags["judge_pending"]) == ("judged", "false")
        assert change.tags["scores_rubric"] == scores.counted[0].rubric
        assert change.texts["artifact:rubric.md"] == RUBRICS[scores.counted[0].rubric].text
    else:
        assert state == ("pending" if scores.held else None)
        assert "composite" not in change.metrics
    assert json.loads(change.tags["judges"]) == sorted(judgement.judge for judgement in scores.counted)
    assert any(name.startswith("provisional_") for name in change.metrics) == bool(scores.provisional)


def test_of_several_provisional_judges_the_latest_counts_and_is_named() -> None:
    tip = TipScore({"relevance": 1, "actionability": 1, "tone": 1}, overlong=False)
    means = tip_means(TIPS, ItemScore("", True, (tip,)))
    rules = Judgement("rules", "s", "2026-01-01", "2026-01-03", TIPS.tag, format_ok=True, tips=(tip,), means=means)
    model = replace(rules, judge="ollama:x", applied_at="2026-01-02", means=dict.fromkeys(means, 5.0))
    scores = NO_SCORES.with_judgement(rules, provisional=True).with_judgement(model, provisional=True)
    change = run_change(scores, RUBRICS, 7)
    assert change.tags["provisional_judge"] == "rules"
    assert change.metrics == {
        "provisional_relevance": 1, "provisional_actionability": 1, "provisional_tone": 1, "provisional_composite": 5,
    }  # fmt: skip


def test_a_floor_comes_from_the_rubric() -> None:
    change = floor_change(OTHER, 7)
    assert change.metrics == {"warmth": 0, "note": 1, "format_ok": 0, "overlong": 0, "composite": 3}
    assert change.tags == {"scores_rubric": OTHER.tag}


@pytest.mark.parametrize("text", ["", "{}", '{"judges": {"a": 1}}'])
def test_a_damaged_text_is_reported_and_not_repaired(text: str) -> None:
    with pytest.raises(CorruptText, match=r"artifact:scores\.json has an unexpected format"):
        read_scores(text)


@settings(max_examples=15)
@given(judgements())
def test_held_scores_of_an_earlier_version_are_read_from_among_the_others(judgement: Judgement) -> None:
    held = replace(judgement, held=True)
    raw = json.loads(scores_text(NO_SCORES.with_judgement(held)))
    raw["judges"] = raw.pop("held")
    assert read_scores(json.dumps(raw)) == NO_SCORES.with_judgement(held)


def test_without_a_text_there_are_no_judges() -> None:
    assert read_scores(None) is NO_SCORES
