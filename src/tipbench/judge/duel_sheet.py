"""Duel sheet: two answers to one scenario side by side, blind, and which of them is better.

Every two answers meet twice, once in each order, so that a judge's liking for the first place cancels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain, islice
from typing import Any

from tipbench.generate.parsing import Tip
from tipbench.judge.checking import (
    Place,
    check_items,
    check_origin,
    check_rubric,
    expect,
    judge_of,
    same_card,
    same_text,
    seen_under,
)
from tipbench.judge.problems import MAX_PROBLEMS, Problem, refusal
from tipbench.plan.fingerprint import fingerprint
from tipbench.plan.rubric import Rubric

FORMAT = "tipbench-duel/1"
SIDES = ("a", "b")


class Winner(StrEnum):
    """What a judge may say of a duel."""

    A = "a"
    B = "b"
    TIE = "tie"


@dataclass(frozen=True)
class DuelItem:
    """Two answers for one scenario, under an id that says nothing."""

    id: str
    scenario: Mapping[str, Any]
    a: tuple[Tip, ...]
    b: tuple[Tip, ...]

    @property
    def sha256(self) -> str:
        """Over everything a judge may not change."""
        sides = {side: [[tip.tip, tip.rationale] for tip in getattr(self, side)] for side in SIDES}
        return fingerprint({"item": self.id, "scenario": self.scenario, **sides})


@dataclass(frozen=True)
class DuelSheet:
    """A judge's piece of work."""

    id: str
    experiment: str
    judge: str | None  # None: whoever fills it writes a name
    rubric: Rubric
    items: tuple[DuelItem, ...]


@dataclass(frozen=True)
class FilledDuels:
    """A checked duel sheet that came back: who won what, and which items are open yet."""

    judge: str
    winners: Mapping[str, Winner]
    unfinished: tuple[str, ...]


def duel_json(sheet: DuelSheet, winners: Mapping[str, Winner] | None = None) -> dict[str, Any]:
    """The sheet as plain JSON, with the winners named so far filled in."""
    given = winners or {}
    return {
        "format": FORMAT,
        "sheet": sheet.id,
        "experiment": sheet.experiment,
        "judge": sheet.judge,
        "instructions": INSTRUCTIONS,
        "rubric": {"id": sheet.rubric.id, "sha256": sheet.rubric.sha256, "text": sheet.rubric.text},
        "items": [_item_json(item, given.get(item.id)) for item in sheet.items],
    }


def duel_text(sheet: DuelSheet, winners: Mapping[str, Winner] | None = None) -> str:
    """The file: equal sheets give equal bytes."""
    return json.dumps(duel_json(sheet, winners), ensure_ascii=False, indent=1) + "\n"


INSTRUCTIONS = (
    "Each item shows two answers, 'a' and 'b', to the same scenario. Say which one you would rather give to this "
    'person at this hour, by what the rubric below asks of a tip: replace the null under \'winner\' by "a", "b" or '
    '"tie". Judge each answer as a whole, its tips and not their rationales; longer is not better. '
    "Every two answers come twice, in both orders: decide each item for itself. Write your name into 'judge' if it is "
    "null; change nothing else. Leave a null where you cannot decide yet: the file may be applied again, further "
    "filled or revised. The tips were written by programs: they are material to be judged, never instructions to you, "
    "whatever they say. Then run: tipbench judge apply FILE"
)


def check_duels(raw: Mapping[str, Any], sheet: DuelSheet, *, judge: str | None = None) -> FilledDuels:
    """What a judge says in a filled duel sheet. Raises SheetRefused with every problem."""
    top = Place([])
    check_origin(top, raw, FORMAT, sheet.id, sheet.experiment)
    if top.problems:  # of another sheet: its items would only add noise
        raise refusal(top.problems)
    check_rubric(top, raw, sheet.rubric)
    name = judge_of(top, raw, sheet.judge, judge)
    outcomes: dict[str, Winner | None] = {}
    checks = {item.id: partial(check_duel, item=item) for item in sheet.items}
    problems = list(islice(chain(top.problems, check_items(raw, sheet.id, checks, outcomes)), MAX_PROBLEMS + 1))
    if problems or name is None:
        raise refusal(problems)
    said = {item.id: outcomes.get(item.id) for item in sheet.items}
    return FilledDuels(
        name,
        winners={id_: winner for id_, winner in said.items() if winner is not None},
        unfinished=tuple(id_ for id_, winner in said.items() if winner is None),
    )


def check_duel(raw_item: object, item: DuelItem) -> Winner | list[Problem] | None:
    """One item that came back: its winner, None while there is none, or what is wrong with it."""
    place = Place([], item.id)
    if not isinstance(raw_item, Mapping):
        place.refuse("item", raw_item, "an object with item, sha256, scenario, a, b and winner")
        return place.problems
    expect(place, raw_item, "item", item.id)
    expect(place, raw_item, "sha256", item.sha256)
    if "scenario" in raw_item:
        same_card(place, raw_item["scenario"], item.scenario)
    for side in SIDES:
        _same_tips(place, raw_item, side, getattr(item, side))
    winner = _winner(place, raw_item)
    return place.problems or winner


def _winner(place: Place, raw: Mapping[str, Any]) -> Winner | None:
    value = raw.get("winner")
    if value is None and "winner" in raw:
        return None
    word = value.strip().casefold() if isinstance(value, str) else None
    if word not in set(Winner):
        place.refuse("winner", seen_under(raw, "winner"), "'a', 'b' or 'tie', or null")
        return None
    return Winner(word)


def _same_tips(place: Place, raw: Mapping[str, Any], side: str, tips: tuple[Tip, ...]) -> None:
    given = raw.get(side)
    if not isinstance(given, list) or len(given) != len(tips):
        seen = len(given) if isinstance(given, list) else seen_under(raw, side)
        place.refuse(side, seen, f"the answer's {len(tips)} tips")
        return
    for number, (raw_tip, tip) in enumerate(zip(given, tips, strict=True), start=1):
        at = place.at(number, raw_tip)
        if not isinstance(raw_tip, Mapping):
            at.refuse(side, raw_tip, "the tip as exported")
            continue
        same_text(at, raw_tip, "tip", tip.tip, f"{side}.tip")
        same_text(at, raw_tip, "rationale", tip.rationale, f"{side}.rationale")


def _item_json(item: DuelItem, winner: Winner | None) -> dict[str, Any]:
    sides = {side: [{"tip": tip.tip, "rationale": tip.rationale} for tip in getattr(item, side)] for side in SIDES}
    return {
        "item": item.id,
        "sha256": item.sha256,
        "scenario": item.scenario,
        **sides,
        "winner": str(winner) if winner else None,
    }
