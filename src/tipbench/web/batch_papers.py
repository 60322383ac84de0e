"""What a judge works on in the browser: the public part of a sheet or of duels, and the checks of what is said of it.

The checks are those of a file that comes back; only what is named as wrong is a place in the request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tipbench.judge.checking import check_item
from tipbench.judge.duel_sheet import SIDES
from tipbench.judge.problems import Problem
from tipbench.judge.sheet import Item, SheetTip
from tipbench.plan.rubric import FLAGS, Rubric
from tipbench.plan.rubric_files import parse_rubric
from tipbench.web.batch import Kept, Kind, Said, State
from tipbench.web.batch_shapes import ItemWish
from tipbench.web.errors import Invalid, NotFound

RawItem = Mapping[str, Any]
_read_rubric = lru_cache(maxsize=8)(lambda text: parse_rubric(text, Path("rubric.md")))


class Paper(Protocol):
    """One kind of work."""

    raw: Mapping[str, Any]  # as the file has it

    def blank(self, item: RawItem, /) -> dict[str, Any]:
        """What is said of an item before anything is said."""

    def checked(self, item: RawItem, wish: ItemWish, /) -> dict[str, Any]:
        """The answer that a wish makes. Invalid names the wrong field, for `submitted` also one that is missing."""

    def shown(self, item: RawItem, /) -> dict[str, Any]:
        """What the judge is to look at."""

    def told(self, item: RawItem, answer: Mapping[str, Any], /) -> dict[str, Any]:
        """The answer as it is shown to its judge."""

    def filled(self, item: RawItem, answer: Mapping[str, Any], /) -> dict[str, Any]:
        """The item as a filled file has it."""


class ScoringPaper:
    """Tips to be scored on the rubric's scales."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._scales = rubric_of(raw).scales

    def blank(self, item: RawItem) -> dict[str, Any]:
        """No score; flags as computed."""
        nothing = {scale.name: None for scale in self._scales}
        tips = [{"scores": dict(nothing), "overlong": tip["overlong"], "note": ""} for tip in item["tips"]]
        return {"format_ok": item["format_ok"], "tips": tips}

    def checked(self, item: RawItem, wish: ItemWish) -> dict[str, Any]:
        """By the checks of `judge apply`."""
        _refuse_given(wish, "winner", "An item with tips has no winner")
        if wish.tips and len(wish.tips) != len(item["tips"]):
            raise Invalid(
                f"tips has all {len(item['tips'])} tips of the item in order, or none (got {len(wish.tips)}).",
                path="body.tips",
            )
        answer = self.blank(item)
        if wish.format_ok is not None:
            answer["format_ok"] = wish.format_ok
        for tip, given in zip(answer["tips"], wish.tips, strict=False):
            tip["scores"] |= given.scores
            tip["overlong"] = tip["overlong"] if given.overlong is None else given.overlong
            tip["note"] = given.note.replace("\r\n", "\n").replace("\r", "\n")
        outcome = check_item(self.filled(item, answer), _item(item), rubric_of(self.raw))
        if isinstance(outcome, list):
            raise _refusal(outcome)
        if outcome is None and wish.state is State.SUBMITTED:
            raise self._unfinished(answer)
        return answer

    def shown(self, item: RawItem) -> dict[str, Any]:
        """The tips with the flags that code computed."""
        tips = [{name: tip[name] for name in ("tip", "rationale", "overlong")} for tip in item["tips"]]
        return {"scenario": item["scenario"], "format_ok": item["format_ok"], "tips": tips}

    def told(self, item: RawItem, answer: Mapping[str, Any]) -> dict[str, Any]:
        """With the flags that the judge sees otherwise."""
        contested = ["format_ok"] if answer["format_ok"] != item["format_ok"] else []
        for at, (tip, given) in enumerate(zip(item["tips"], answer["tips"], strict=True)):
            contested += [f"tips.{at}.overlong"] if given["overlong"] != tip["overlong"] else []
        return {**answer, "contested": contested}

    def filled(self, item: RawItem, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Scores, flags and notes in their places."""
        tips = [{**tip, **given} for tip, given in zip(item["tips"], answer["tips"], strict=True)]
        return {**item, "format_ok": answer["format_ok"], "tips": tips}

    def _unfinished(self, answer: Mapping[str, Any]) -> Invalid:
        at, scale = next(
            (at, scale)
            for at, tip in enumerate(answer["tips"])
            for scale in self._scales
            if tip["scores"][scale.name] is None
        )
        return Invalid(
            f"tip {at + 1}, scores.{scale.name}: a submitted item has a whole number from {scale.min} to {scale.max} "
            "there (got null). Score it, or save the item as a draft.",
            path=f"body.tips.{at}.scores.{scale.name}",
        )


class DuelPaper:
    """Two answers side by side, of which the better one is to be named."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def blank(self, _item: RawItem) -> dict[str, Any]:
        """No winner."""
        return {"winner": None}

    def checked(self, _item: RawItem, wish: ItemWish) -> dict[str, Any]:
        """A winner, when it is submitted."""
        _refuse_given(wish, "format_ok", "A duel has no flags")
        _refuse_given(wish, "tips", "A duel has no scores")
        if wish.winner is None and wish.state is State.SUBMITTED:
            raise Invalid(
                "winner: a submitted duel has 'a', 'b' or 'tie' there (got null). Choose one, or save it as a draft.",
                path="body.winner",
            )
        return {"winner": wish.winner}

    def shown(self, item: RawItem) -> dict[str, Any]:
        """Both answers."""
        sides = {side: [{"tip": tip["tip"], "rationale": tip["rationale"]} for tip in item[side]] for side in SIDES}
        return {"scenario": item["scenario"], **sides}

    def told(self, _item: RawItem, answer: Mapping[str, Any]) -> dict[str, Any]:
        """As it was said."""
        return dict(answer)

    def filled(self, item: RawItem, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The winner in its place."""
        return {**item, "winner": answer["winner"]}


PAPERS: Mapping[Kind, Callable[[Mapping[str, Any]], Paper]] = {Kind.SHEET: ScoringPaper, Kind.DUEL: DuelPaper}


def item_of(paper: Paper, item_id: str) -> RawItem:
    """The item of that id. NotFound when it is not of this paper."""
    for item in paper.raw["items"]:
        if item["item"] == item_id:
            return dict(item)
    raise NotFound(f"This batch has no item {item_id[:64]!r}. Load the page again.", path="path.item")


def said_of(paper: Paper, item: RawItem, wish: ItemWish) -> Said:
    """What a wish says of an item, checked. Invalid names the wrong field."""
    reason = " ".join(wish.reason.split())
    if wish.state is State.SKIPPED and not (reason and reason.isprintable()):
        raise Invalid("reason says in words why the item is skipped.", path="body.reason")
    answer = paper.checked(item, wish)
    if wish.state is State.EMPTY:
        answer = paper.blank(item)
    return Said(wish.state, canonical(answer), reason if wish.state is State.SKIPPED else "")


def answer_json(paper: Paper, item: RawItem, kept: Kept | None, when: Mapping[str, Any]) -> dict[str, Any]:
    """What the judge has said of an item; `when` has its times as they are shown."""
    answer = json.loads(kept.said.content) if kept else paper.blank(item)
    return {
        "version": kept.version if kept else 0,
        "state": str(kept.said.state if kept else State.EMPTY),
        **paper.told(item, answer),
        "reason": kept.said.reason if kept else "",
        "seconds": round(kept.seconds, 1) if kept else 0.0,
        **when,
        "can_undo": kept is not None and kept.parent is not None,
    }


def filled_file(paper: Paper, judge: str, given: Mapping[str, Kept]) -> dict[str, Any]:
    """The file with every submitted answer in its place; all others are blank, as they are not finished."""
    done = {item: kept for item, kept in given.items() if kept.said.state is State.SUBMITTED}
    items = [
        paper.filled(item, json.loads(done[item["item"]].said.content)) if item["item"] in done else item
        for item in paper.raw["items"]
    ]
    return {**paper.raw, "judge": judge, "items": items}


def rubric_of(raw: Mapping[str, Any]) -> Rubric:
    """The rubric that stands in the file."""
    rubric: Rubric = _read_rubric(raw["rubric"]["text"])
    return rubric


def rubric_json(rubric: Rubric) -> dict[str, Any]:
    """The rubric for the page: the wording of each step, and the anchors."""
    return {
        "id": rubric.id,
        "sha256": rubric.sha256,
        "word_limit": rubric.word_limit,
        "text": rubric.text,
        "scales": [
            {
                "name": scale.name,
                "min": scale.min,
                "max": scale.max,
                "about": scale.about,
                "steps": [{"score": score, "text": text} for score, text in enumerate(scale.steps, scale.min)],
            }
            for scale in rubric.scales
        ],
        "flags": list(FLAGS),
        "weights": dict(rubric.weights),
        "anchors": [
            {name: getattr(anchor, name) for name in ("scenario", "tip", "rationale", "scores", "why")}
            for anchor in rubric.anchors
        ],
    }


def canonical(value: object) -> str:
    """Equal values give equal texts; half a character of a model's becomes its escape, which SQLite can keep."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def _item(raw: RawItem) -> Item:
    tips = tuple(SheetTip(tip["tip"], tip["rationale"], tip["overlong"]) for tip in raw["tips"])
    return Item(raw["item"], raw["scenario"], raw["format_ok"], tips)


def _refuse_given(wish: ItemWish, name: str, message: str) -> None:
    value = getattr(wish, name)
    if value is not None and value != []:
        raise Invalid(f"{message} (got {name}). Leave it out.", path=f"body.{name}")


def _refusal(problems: Iterable[Problem]) -> Invalid:
    told = list(problems)
    first = told[0]
    tip = "" if first.tip is None else f"tips.{first.tip - 1}."
    return Invalid(" ".join(problem.message for problem in told[:5]), path=f"body.{tip}{first.field}")
