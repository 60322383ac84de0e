"""Batches over HTTP: request and response models, and functions that validate, show and fill in items."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictInt

from tipbench.judge.check import MAX_NOTE, check_item
from tipbench.judge.duels import SIDES
from tipbench.judge.sheet import SheetTip, TipItem
from tipbench.plan.rubric import FLAGS, Rubric, parse_rubric
from tipbench.text import iso
from tipbench.web.api.models import NextCursor, RequestBody, Shape
from tipbench.web.batch_store import ItemJudgement, ItemVersion, Kind, State
from tipbench.web.errors import Invalid, NotFound

MAX_ANSWERS = 400  # per new batch
MAX_TIPS = 200
MAX_SCALES = 20
MAX_REASON = 500
MAX_ACCEPT_REASON = 1000
MAX_RETURN_NOTE = 2000
_DAY_S = 86_400.0


class BatchRequest(RequestBody):
    """The kind and the size of the batch. The body is optional."""

    kind: Kind = Field(Kind.SHEET, description="sheet: score tips; duel: choose the better of two answers.")
    limit: StrictInt | None = Field(
        None,
        ge=1,
        le=MAX_ANSWERS,
        description="Maximum number of duels in a new batch, or of answers, which are taken scenario by scenario.",
    )


class TipRequest(RequestBody):
    scores: dict[str, StrictInt | None] = Field(
        default_factory=dict, max_length=MAX_SCALES, description="By scale; null or missing is not scored yet."
    )
    overlong: StrictBool | None = Field(None, description="The judge's correction; null keeps the computed flag.")
    note: str = Field("", max_length=MAX_NOTE)


class ItemRequest(RequestBody):
    """What the judge enters for an item, and the version of the item that it is based on."""

    version: StrictInt = Field(ge=0, lt=2**53, description="The version the client has read; 0 for an untouched item.")
    state: State = Field(description="Only submitted items count once the batch is closed; they need every score.")
    format_ok: StrictBool | None = Field(None, description="The judge's correction; null keeps the computed flag.")
    tips: list[TipRequest] = Field(
        default_factory=list, max_length=MAX_TIPS, description="All tips in order; empty if no tip is scored yet."
    )
    winner: Literal["a", "b", "tie"] | None = Field(None, description="Of a duel.")
    reason: str = Field("", max_length=MAX_REASON, description="Why it is skipped.")
    seconds: float = Field(
        0.0, ge=0, le=_DAY_S, allow_inf_nan=False, description="Time spent since the last save; summed over saves."
    )


class UndoRequest(RequestBody):
    """The version of the item to undo."""

    version: StrictInt = Field(ge=0, lt=2**53)


class AcceptRequest(RequestBody):
    """Reason for accepting the drift."""

    reason: str = Field(min_length=1, max_length=MAX_ACCEPT_REASON, description="One line of text.")


class ReturnRequest(RequestBody):
    """Note to the judge about what to revise."""

    note: str = Field(min_length=1, max_length=MAX_RETURN_NOTE)


class BatchLinks(Shape):
    self: str
    items: str
    close: str
    reopen: str
    page: str = Field(description="Its page in the panel.", examples=["/judge/batches/3f9a1c0b7e52"])


class BatchShape(Shape):
    """A batch: tips or duels that one judge judges in the browser. `sheet` is its id."""

    sheet: str = Field(examples=["3f9a1c0b7e52"])
    experiment: str = Field(examples=["tip-bench-auto"])
    judge: str = Field(examples=["reviewer-1"])
    kind: Literal["sheet", "duel"]
    status: Literal["open", "applied", "held"]
    items: int = Field(examples=[40])
    done: int = Field(description="Submitted items.", examples=[12])
    draft: int
    skipped: int
    empty: int
    opened: str = Field(examples=["2026-05-04T10:15:00.000Z"])
    updated: str
    closed: str | None
    seconds: float = Field(description="Spent on all items.")
    minutes_per_item: float | None = Field(description="Median over the submitted items.")
    note: str | None = Field(description="Why an admin sent it back.")
    accepted: str | None = Field(description="Why an admin accepted its drift.")
    outcome: dict[str, Any] | None = Field(description="Result of the last close.")
    links: BatchLinks


class BatchAnswer(Shape):
    batch: BatchShape


class BatchOpened(BatchAnswer):
    new: bool = Field(description="False when an open batch is continued.")


class BatchList(Shape):
    items: list[BatchShape]
    next: NextCursor


# `AnswerShape` of web.api.models is another class: a model's answer.
class AnswerShape(Shape):  # the scores and flags, or the winner, are extra fields
    """What the judge has entered for an item: the state with the scores and flags, or with the winner of a duel."""

    version: int
    state: Literal["empty", "draft", "submitted", "skipped"]
    reason: str
    seconds: float
    updated: str | None
    can_undo: bool


class ItemShape(Shape):
    item: str = Field(examples=["9c1d5d6e8f0a"])
    number: int = Field(description="Its place on the sheet, from 1.")
    scenario: dict[str, Any]
    answer: AnswerShape


class BatchDetail(BatchAnswer):
    """The full batch for its judge; admins get only the skipped items of other judges, with reasons."""

    instructions: str | None = None
    rubric: dict[str, Any] | None = None
    items: list[ItemShape] | None = None
    skips: list[dict[str, Any]] | None = None


class ItemSaved(BatchAnswer):
    item: str
    answer: AnswerShape


class HistoryShape(Shape):
    items: list[AnswerShape] = Field(description="Newest first.")
    next: NextCursor


class BatchClosedShape(BatchAnswer):
    outcome: dict[str, Any] = Field(
        description="The object that POST …/apply returns to a judge: status, applied, unfinished, drift. `blank` "
        "is the number of items that are not submitted but were scored by an earlier close; those scores are kept. "
        "`by_file` is true if all scores came from a file."
    )


RawItem = Mapping[str, Any]  # an item of the exported file


class SheetItems:
    """Items with tips to score on the rubric's scales; `raw` is the exported file.

    The content of an item is what the judge can enter: scores, flags and notes.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._scales = rubric_of(raw).scales

    def blank_content(self, item: RawItem) -> dict[str, Any]:
        """Return the content of an untouched item: no scores, and the computed flags."""
        names = [scale.name for scale in self._scales]
        tips = [{"scores": dict.fromkeys(names), "overlong": tip["overlong"], "note": ""} for tip in item["tips"]]
        return {"format_ok": item["format_ok"], "tips": tips}

    def parse_content(self, item: RawItem, request: ItemRequest) -> dict[str, Any]:
        """Return the content of a request, after the same checks as in `judge apply`. Raises Invalid."""
        _reject_field(request, "winner", "An item with tips has no winner")
        if request.tips and len(request.tips) != len(item["tips"]):
            raise Invalid(
                f"tips has all {len(item['tips'])} tips of the item in order, or none (got {len(request.tips)}).",
                path="body.tips",
            )
        content = self.blank_content(item)
        if request.format_ok is not None:
            content["format_ok"] = request.format_ok
        for tip, requested in zip(content["tips"], request.tips, strict=False):  # the request has all tips, or none
            tip["scores"] |= requested.scores
            if requested.overlong is not None:
                tip["overlong"] = requested.overlong
            tip["note"] = requested.note.replace("\r\n", "\n").replace("\r", "\n")
        tips = tuple(SheetTip(tip["tip"], tip["rationale"], tip["overlong"]) for tip in item["tips"])
        exported = TipItem(item["item"], item["scenario"], item["format_ok"], tips)
        result = check_item(self.fill(item, content), exported, rubric_of(self.raw))
        if isinstance(result, list):  # problems
            first = result[0]
            part = "body" if first.tip is None else f"body.tips.{first.tip - 1}"  # `tip` counts from 1
            raise Invalid(" ".join(problem.message for problem in result[:5]), path=f"{part}.{first.field}")
        if request.state is State.SUBMITTED:
            self._check_complete(content)
        return content

    def _check_complete(self, content: Mapping[str, Any]) -> None:
        for index, tip in enumerate(content["tips"]):
            for scale in self._scales:
                if tip["scores"][scale.name] is None:
                    raise Invalid(
                        f"tip {index + 1}, scores.{scale.name}: a submitted item needs a whole number from {scale.min} "
                        f"to {scale.max} (got null). Score it, or save the item as a draft.",
                        path=f"body.tips.{index}.scores.{scale.name}",
                    )

    def item_json(self, item: RawItem) -> dict[str, Any]:
        """Return the item as the judge sees it: the scenario, and the tips with the computed flags."""
        tips = [{name: tip[name] for name in ("tip", "rationale", "overlong")} for tip in item["tips"]]
        return {"scenario": item["scenario"], "format_ok": item["format_ok"], "tips": tips}

    def content_json(self, item: RawItem, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content with `contested`: the computed flags that the judge has changed."""
        contested = ["format_ok"] if content["format_ok"] != item["format_ok"] else []
        for index, (tip, scored) in enumerate(zip(item["tips"], content["tips"], strict=True)):
            if scored["overlong"] != tip["overlong"]:
                contested.append(f"tips.{index}.overlong")
        return {**content, "contested": contested}

    def fill(self, item: RawItem, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the item with scores, flags and notes filled in."""
        tips = [{**tip, **scored} for tip, scored in zip(item["tips"], content["tips"], strict=True)]
        return {**item, "format_ok": content["format_ok"], "tips": tips}


class DuelItems:
    """Items with two answers, of which the judge chooses the better; `raw` is the exported file."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def blank_content(self, _item: RawItem) -> dict[str, Any]:
        """Return the content of an untouched duel: no winner."""
        return {"winner": None}

    def parse_content(self, _item: RawItem, request: ItemRequest) -> dict[str, Any]:
        """Return the content of a request; a submitted duel must have a winner. Raises Invalid."""
        _reject_field(request, "format_ok", "A duel has no flags")
        _reject_field(request, "tips", "A duel has no scores")
        if request.winner is None and request.state is State.SUBMITTED:
            raise Invalid(
                "winner: a submitted duel needs 'a', 'b' or 'tie' (got null). Choose one, or save it as a draft.",
                path="body.winner",
            )
        return {"winner": request.winner}

    def item_json(self, item: RawItem) -> dict[str, Any]:
        """Return the duel as the judge sees it: the scenario and both answers."""
        sides = {side: [{"tip": tip["tip"], "rationale": tip["rationale"]} for tip in item[side]] for side in SIDES}
        return {"scenario": item["scenario"], **sides}

    def content_json(self, _item: RawItem, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content unchanged."""
        return dict(content)

    def fill(self, item: RawItem, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the item with its winner filled in."""
        return {**item, "winner": content["winner"]}


BatchItems = SheetItems | DuelItems
ITEM_TYPES: Mapping[Kind, type[BatchItems]] = {Kind.SHEET: SheetItems, Kind.DUEL: DuelItems}


def item_of(batch_items: BatchItems, item_id: str) -> RawItem:
    """Return an item by id. Raises NotFound if the batch has no such item."""
    for item in batch_items.raw["items"]:
        if item["item"] == item_id:
            return dict(item)
    raise NotFound(f"This batch has no item {item_id[:64]!r}. Load the page again.", path="path.item")


def parse_judgement(batch_items: BatchItems, item: RawItem, request: ItemRequest) -> ItemJudgement:
    """Return the judgement in a request. Raises Invalid."""
    reason = ""
    if request.state is State.SKIPPED:
        reason = " ".join(request.reason.split())
        if not reason or not reason.isprintable():
            raise Invalid("reason must say why the item is skipped.", path="body.reason")
    content = batch_items.parse_content(item, request)
    if request.state is State.EMPTY:  # the judge cleared the item: the rest of the request is validated but not saved
        content = batch_items.blank_content(item)
    return ItemJudgement(request.state, canonical_json(content), reason)


def answer_shape(batch_items: BatchItems, item: RawItem, saved: ItemVersion | None) -> AnswerShape:
    """Return the judgement of an item as the field `answer` of a response; `saved` is None for an untouched item."""
    if saved is None:
        blank = batch_items.content_json(item, batch_items.blank_content(item))
        return AnswerShape(version=0, state="empty", reason="", seconds=0.0, updated=None, can_undo=False, **blank)
    return AnswerShape(
        version=saved.version,
        state=saved.judgement.state.value,
        reason=saved.judgement.reason,
        seconds=round(saved.seconds, 1),
        updated=iso(saved.updated),
        can_undo=saved.parent is not None,
        **batch_items.content_json(item, json.loads(saved.judgement.content)),
    )


def filled_file(batch_items: BatchItems, judge: str, versions: Mapping[str, ItemVersion]) -> dict[str, Any]:
    """Return the exported file with the submitted items filled in; `versions` is by item id."""
    items: list[RawItem] = []
    for item in batch_items.raw["items"]:
        saved = versions.get(item["item"])
        if saved is None or saved.judgement.state is not State.SUBMITTED:
            items.append(item)
        else:
            items.append(batch_items.fill(item, json.loads(saved.judgement.content)))
    return {**batch_items.raw, "judge": judge, "items": items}


def rubric_of(raw: Mapping[str, Any]) -> Rubric:
    """Return the rubric in the file; cached by its text."""
    return _parse_rubric(raw["rubric"]["text"])


@lru_cache(maxsize=8)
def _parse_rubric(text: str) -> Rubric:
    return parse_rubric(text, Path("rubric.md"))


def rubric_json(rubric: Rubric) -> dict[str, Any]:
    """Return the rubric as JSON values, with the wording of each step and the anchors."""
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


def canonical_json(value: object) -> str:
    """Return JSON that is equal for equal values. Lone surrogates are escaped, because SQLite cannot store them."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def _reject_field(request: ItemRequest, name: str, message: str) -> None:
    value = getattr(request, name)
    if value is not None and value != []:
        raise Invalid(f"{message} (got {name}). Leave it out.", path=f"body.{name}")
