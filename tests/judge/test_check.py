"""Filled sheets, honest and hostile: each is refused with the place named, or gives scores that are all in range."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sheets import filled, other_rubric, small_sheet

from tipbench.errors import SheetRefused
from tipbench.judge.check import Problem, check_item, check_sheet, normalize_name, shown, unmet_name_requirement
from tipbench.judge.sheet import FilledSheet, ItemScore, TipSheet, sheet_json

Raw = dict[str, Any]
SHEET = small_sheet()


def problems_of(raw: Any, sheet: TipSheet = SHEET, **options: Any) -> list[Problem]:
    with pytest.raises(SheetRefused) as refused:
        check_sheet(raw, sheet, **options)
    found = [problem for problem in refused.value.problems if isinstance(problem, Problem)]
    assert found
    assert found[0].message in str(refused.value)
    return found


def tip(raw: Raw, item: int = 0, number: int = 0) -> Raw:
    found: Raw = raw["items"][item]["tips"][number]
    return found


def set_score(value: object) -> Callable[[Raw], None]:
    return lambda raw: tip(raw, 1, 1)["scores"].update(tone=value)


def swap_tips(raw: Raw) -> None:
    one, other = tip(raw, 0), tip(raw, 1)
    one["tip"], other["tip"] = other["tip"], one["tip"]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def rename(target: Raw, old: str, new: str) -> None:
    target[new] = target.pop(old)


# Changes of a filled sheet, and the first expected problem: item, tip, field, part of the message.
HOSTILE: dict[str, tuple[Callable[[Raw], object], tuple[str | None, int | None, str], str]] = {
    "score of 6": (set_score(6), ("i001", 2, "scores.tone"), "found 6"),
    "half a point": (set_score(4.5), ("i001", 2, "scores.tone"), "found 4.5"),
    "a string": (set_score("4"), ("i001", 2, "scores.tone"), "found '4'"),
    "not a number": (set_score(float("nan")), ("i001", 2, "scores.tone"), "found nan"),
    "an unknown scale": (lambda raw: tip(raw)["scores"].update(wit=3), ("i000", 1, "scores.wit"), "relevance"),
    "a missing scale": (lambda raw: tip(raw)["scores"].pop("tone"), ("i000", 1, "scores.tone"), "no such key"),
    "a scale in look-alike letters": (
        lambda raw: rename(tip(raw)["scores"], "tone", "tоne"), ("i000", 1, "scores.tоne"), "only the rubric's scales",
    ),
    "no scores": (lambda raw: tip(raw).pop("scores"), ("i000", 1, "scores"), "no such key"),
    "swapped texts": (swap_tips, ("i000", 1, "tip"), "as exported"),
    "a tip mended": (lambda raw: tip(raw).update(tip=tip(raw)["tip"] + "."), ("i000", 1, "tip"), "😀.'"),
    "a rationale changed": (lambda raw: tip(raw).update(rationale="x"), ("i000", 1, "rationale"), "found 'x'"),
    "a tip too few": (lambda raw: raw["items"][0]["tips"].pop(), ("i000", None, "tips"), "found 1"),
    "a tip too many": (
        lambda raw: raw["items"][0]["tips"].append(copy.deepcopy(tip(raw))), ("i000", None, "tips"), "found 3",
    ),
    "no tips": (lambda raw: raw["items"][0].pop("tips"), ("i000", None, "tips"), "no such key"),
    "a flag as a text": (lambda raw: tip(raw).update(overlong="false"), ("i000", 1, "overlong"), "true or false"),
    "no flag": (lambda raw: raw["items"][0].pop("format_ok"), ("i000", None, "format_ok"), "no such key"),
    "a note too long": (lambda raw: tip(raw).update(note="x" * 4001), ("i000", 1, "note"), "4001"),
    "another hash": (lambda raw: raw["items"][0].update(sha256="0" * 64), ("i000", None, "sha256"), "as exported"),
    "another person on the card": (
        lambda raw: raw["items"][0]["scenario"]["persona"].update(name="Eve"),
        ("i000", None, "scenario.persona"), "card",
    ),
    "a card with more on it": (
        lambda raw: raw["items"][0]["scenario"].update(mood="low"), ("i000", None, "scenario.mood"), "found 'low'",
    ),
    "a card of deep lists": (
        lambda raw: raw["items"][0]["scenario"].update(day=nested(900)),
        ("i000", None, "scenario.day"), "found [[[...]]]",
    ),
    "a foreign item": (lambda raw: raw["items"][2].update(item="i999"), (None, None, "items[2].item"), "'i999'"),
    "an item twice": (
        lambda raw: raw["items"].append(copy.deepcopy(raw["items"][0])), ("i000", None, "items[3].item"), "once",
    ),
    "another rubric's hash": (lambda raw: raw["rubric"].update(sha256="0"), (None, None, "rubric.sha256"), "found '0'"),
    "a rubric softened": (
        lambda raw: raw["rubric"].update(text=raw["rubric"]["text"].replace("No hook", "A hook")),
        (None, None, "rubric.text"), "A hook",
    ),
    "another judge": (lambda raw: raw.update(judge="bert"), (None, None, "judge"), "'anna', whose sheet this is"),
    "a judge who colours the terminal": (lambda raw: raw.update(judge="\x1b[31m"), (None, None, "judge"), r"\x1b"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_sheet_is_refused_at_its_place(name: str) -> None:
    spoil, (item, tip_number, field), word = HOSTILE[name]
    raw = filled(SHEET)
    spoil(raw)
    first = problems_of(raw)[0]
    assert (first.item, first.tip, first.field) == (item, tip_number, field)
    assert word in first.message
    assert len(first.message) < 400
    assert first.message.isprintable()


def test_a_filled_sheet_gives_its_scores() -> None:
    checked = check_sheet(filled(SHEET), SHEET)
    assert checked.judge == "anna"
    assert checked.unfinished == ()
    assert list(checked.finished) == ["i000", "i001", "i002"]
    assert checked.finished["i000"].format_ok is True
    assert checked.finished["i000"].tips[1].scores == {"relevance": 2, "actionability": 2, "tone": 2}
    assert checked.finished["i000"].tips[1].overlong is True


def test_an_exported_sheet_is_completely_unfinished() -> None:
    assert check_sheet(sheet_json(SHEET), SHEET) == FilledSheet("anna", {}, ("i000", "i001", "i002"))


def test_reordered_items_give_the_same_scores() -> None:
    raw = filled(SHEET)
    raw["items"].reverse()
    assert check_sheet(raw, SHEET) == check_sheet(filled(SHEET), SHEET)


def test_an_item_that_was_left_out_is_unfinished() -> None:
    raw = filled(SHEET)
    del raw["items"][1]
    assert check_sheet(raw, SHEET).unfinished == ("i001",)


def test_one_null_leaves_the_item_unfinished() -> None:
    raw = filled(SHEET)
    tip(raw, 1, 1)["scores"]["tone"] = None
    checked = check_sheet(raw, SHEET)
    assert checked.unfinished == ("i001",)
    assert list(checked.finished) == ["i000", "i002"]


def test_an_unfinished_item_is_validated_too() -> None:
    raw = filled(SHEET)
    tip(raw, 1, 1)["scores"].update(tone=None, relevance=9)
    assert problems_of(raw)[0].field == "scores.relevance"


def test_the_score_4_0_is_read_as_4() -> None:
    raw = filled(SHEET)
    tip(raw)["scores"]["tone"] = 4.0
    score = check_sheet(raw, SHEET).finished["i000"].tips[0].scores["tone"]
    assert (score, type(score)) == (4, int)


def test_flags_and_notes_are_read_from_the_judge() -> None:
    raw = filled(SHEET)
    raw["items"][0]["format_ok"] = False
    tip(raw).update(overlong=True, note="two\r\nlines")
    tip(raw, 0, 1).update(note=None)
    first = check_sheet(raw, SHEET).finished["i000"]
    assert first.format_ok is False
    assert (first.tips[0].overlong, first.tips[0].note, first.tips[1].note) == (True, "two\nlines", "")


def test_unknown_keys_are_ignored() -> None:
    raw = filled(SHEET)
    raw["tool"] = raw["items"][0]["mine"] = tip(raw)["confidence"] = 0.7
    assert check_sheet(raw, SHEET) == check_sheet(filled(SHEET), SHEET)


def test_card_and_rubric_text_may_be_omitted_because_of_their_hashes() -> None:
    raw = filled(SHEET)
    del raw["rubric"]["text"], raw["items"][0]["scenario"], raw["instructions"]
    assert check_sheet(raw, SHEET) == check_sheet(filled(SHEET), SHEET)


def test_changed_line_endings_are_accepted() -> None:
    raw = filled(SHEET)
    tip(raw)["tip"] = tip(raw)["tip"].replace("\n", "\r\n")
    raw["rubric"]["text"] = raw["rubric"]["text"].replace("\n", "\r\n")
    assert len(check_sheet(raw, SHEET).finished) == 3


def test_every_problem_is_listed() -> None:
    raw = filled(SHEET, judge="bert")
    raw["rubric"]["id"] = "x"
    tip(raw, 0)["scores"]["tone"] = 6
    tip(raw, 1)["note"] = 5
    tip(raw, 2)["overlong"] = None
    fields = [problem.field for problem in problems_of(raw)]
    assert fields == ["rubric.id", "judge", "scores.tone", "note", "overlong"]


def test_the_message_lists_twenty_problems_and_counts_the_rest() -> None:
    sheet = small_sheet(items=30)
    raw = filled(sheet)
    for item in raw["items"]:
        item["format_ok"] = 1
    with pytest.raises(SheetRefused, match=r"30 problems; nothing was applied") as refused:
        check_sheet(raw, sheet)
    assert str(refused.value).splitlines()[-1].strip() == "and 10 more"
    assert len(str(refused.value).splitlines()) == 22


def test_the_list_of_problems_stops_at_a_thousand() -> None:
    raw = filled(SHEET)
    raw["items"] = [{"item": str(number)} for number in range(200_000)]
    before = time.process_time()
    problems = problems_of(raw)
    assert len(problems) == 1000
    assert time.process_time() - before < 30


def test_a_problem_is_plain_json() -> None:
    raw = filled(SHEET)
    tip(raw)["scores"]["tone"] = 6
    problem = problems_of(raw)[0].to_json()
    assert json.loads(json.dumps(problem)) == {
        "item": "i000",
        "tip": 1,
        "field": "scores.tone",
        "seen": "6",
        "expected": "a whole number from 1 to 5, or null",
        "row": None,
        "message": "item i000, tip 1, scores.tone: expected a whole number from 1 to 5, or null; found 6.",
    }


# The judge's name


def test_the_judge_named_in_the_file_is_used() -> None:
    sheet = replace(SHEET, judge=None)
    assert check_sheet(filled(sheet, judge=" anna "), sheet).judge == "anna"


@pytest.mark.parametrize("written", [None, "", "  "])
def test_the_option_names_the_judge_of_an_unnamed_file(written: str | None) -> None:
    sheet = replace(SHEET, judge=None)
    assert check_sheet(filled(sheet, judge=written), sheet, judge="bert").judge == "bert"


def test_a_sheet_exported_for_a_judge_needs_no_name() -> None:
    assert check_sheet(filled(SHEET, judge=None), SHEET).judge == "anna"


def test_a_file_without_a_judge_is_refused_with_the_next_step() -> None:
    sheet = replace(SHEET, judge=None)
    assert "--judge NAME" in problems_of(filled(sheet, judge=None), sheet)[0].message


def test_the_option_may_not_contradict_the_file() -> None:
    sheet = replace(SHEET, judge=None)
    problem = problems_of(filled(sheet, judge="anna"), sheet, judge="bert")[0]
    assert (problem.field, problem.seen) == ("judge", "'anna'")


def test_the_option_may_not_change_the_judge_of_a_sheet() -> None:
    assert problems_of(filled(SHEET, judge=None), judge="bert")[0].seen == "'bert'"


@pytest.mark.parametrize("name", ["rules", "Rules", " rules ", "ollama:qwen2.5:0.5b", "OLLAMA:x"])
def test_the_names_of_provisional_judges_are_reserved(name: str) -> None:
    sheet = replace(SHEET, judge=None)
    assert "provisional" in problems_of(filled(sheet, judge=name), sheet)[0].message
    assert check_sheet(filled(sheet, judge=name), sheet, allow_reserved_name=True).judge == name.strip()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 61,
        "a\tb",
        "a\u202eb",
        "\ud800",
        5,
    ],
)
def test_an_invalid_judge_name_is_refused(name: object) -> None:
    assert unmet_name_requirement(name) is not None


@pytest.mark.parametrize(
    "name",
    [
        "x" * 60,
        "Anna Müller",
    ],
)
def test_a_valid_judge_name_is_accepted(name: str) -> None:
    assert unmet_name_requirement(name) is None


def test_names_are_compared_in_normalised_form() -> None:
    assert normalize_name("Jose\u0301") == "José"


# One item at a time


def test_a_single_item_can_be_validated() -> None:
    raw = filled(SHEET)["items"]
    assert isinstance(check_item(raw[0], SHEET.items[0], SHEET.rubric), ItemScore)
    assert check_item(sheet_json(SHEET)["items"][0], SHEET.items[0], SHEET.rubric) is None
    wrong = check_item(raw[1], SHEET.items[0], SHEET.rubric)
    assert isinstance(wrong, list)
    assert wrong[0].field == "item"


def test_an_invalid_item_gives_a_list_of_problems() -> None:
    assert isinstance(check_item({"item": "i000"}, SHEET.items[0], SHEET.rubric), list)


# Another rubric


@pytest.mark.parametrize(
    ("scores", "field"),
    [
        ({"warmth": 10, "note": 3}, None),
        ({"warmth": 11, "note": 3}, "scores.warmth"),
        ({"warmth": 0, "note": 0}, "scores.note"),
        ({"warmth": 0, "note": 1, "tone": 3}, "scores.tone"),
    ],
)
def test_scales_and_ranges_come_from_the_rubric(scores: dict[str, int], field: str | None) -> None:
    sheet = small_sheet(rubric=other_rubric())
    raw = filled(sheet)
    tip(raw)["scores"] = scores
    if field is None:
        assert check_sheet(raw, sheet).finished["i000"].tips[0].scores == scores
    else:
        assert problems_of(raw, sheet)[0].field == field


# Arbitrary input

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 7) | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a plain value, but not inside the card."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [found for key, entry in entries if key != "scenario" for found in places(entry, (*path, key))]
    return [path, *inner] if path else inner


PLACES = places(filled(SHEET))


def mutate(raw: Raw, path: tuple[Any, ...], operation: str, value: Any) -> None:
    target: Any = raw
    for key in path[:-1]:
        if not isinstance(target, dict | list) or (isinstance(target, dict) and key not in target):
            return
        if isinstance(target, list) and not (isinstance(key, int) and key < len(target)):
            return
        target = target[key]
    key = path[-1]
    if isinstance(target, list) and isinstance(key, int) and key < len(target):
        if operation == "double":
            target.append(copy.deepcopy(target[key]))
        elif operation == "drop":
            del target[key]
        else:
            target[key] = value
    elif isinstance(target, dict) and key in target:
        if operation == "double":
            target[f"{key} "] = target[key]
        elif operation == "drop":
            del target[key]
        else:
            target[key] = value


MUTATION = st.tuples(st.sampled_from(PLACES), st.sampled_from(["put", "drop", "double"]), PLAIN)


@settings(max_examples=60)
@given(st.lists(MUTATION, min_size=1, max_size=4), st.booleans())
def test_a_mutated_sheet_is_refused_with_a_place_or_gives_scores_in_range(
    mutations: list[tuple[tuple[Any, ...], str, Any]], swap: bool
) -> None:
    raw = filled(SHEET)
    for path, operation, value in mutations:
        mutate(raw, path, operation, value)
    if swap and isinstance(raw.get("items"), list):
        raw["items"].reverse()
    checked = outcome(raw)
    if isinstance(checked, FilledSheet):
        assert_in_range(checked)
    for problem in () if isinstance(checked, FilledSheet) else checked.problems:
        assert isinstance(problem, Problem)
        assert problem.field
        assert json.dumps(problem.to_json())
    assert isinstance(checked, FilledSheet) or checked.problems


def outcome(raw: Raw) -> FilledSheet[ItemScore] | SheetRefused:
    try:
        return check_sheet(raw, SHEET)
    except SheetRefused as refused:
        return refused


def assert_in_range(checked: FilledSheet[ItemScore]) -> None:
    for item in checked.finished.values():
        for scored in item.tips:
            assert tuple(scored.scores) == SHEET.rubric.scale_names
            assert all(type(score) is int and 1 <= score <= 5 for score in scored.scores.values())
    assert sorted([*checked.finished, *checked.unfinished]) == ["i000", "i001", "i002"]


@settings(max_examples=60)
@given(PLAIN | st.text() | st.binary())
def test_a_value_in_a_message_is_short_and_printable(value: object) -> None:
    assert len(shown(value)) <= 121
    assert shown(value).isprintable()
