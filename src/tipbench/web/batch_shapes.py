"""What batches take and answer, for the border and for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from tipbench.judge.checking import MAX_NOTE
from tipbench.web.batch import Kind, State

MOST_ANSWERS = 400  # that a judge may ask for at once
MOST_TIPS = 200
MOST_SCALES = 20
LONGEST_REASON = 500
LONGEST_ACCEPTANCE = 1000
LONGEST_RETURN = 2000
_DAY_S = 86_400.0
_NEXT = "Pass it as `next` for the page after this one; null at the end."


class _Wish(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BatchWish(_Wish):
    """What to judge; may be left out."""

    kind: Kind = Field(Kind.SHEET, description="sheet: score tips; duel: say which of two answers is better.")
    limit: StrictInt | None = Field(
        None, ge=1, le=MOST_ANSWERS, description="At most so many answers of a new batch; whole scenarios first."
    )


class TipWish(_Wish):
    scores: dict[str, StrictInt | None] = Field(
        default_factory=dict, max_length=MOST_SCALES, description="By scale; null or missing is not scored yet."
    )
    overlong: StrictBool | None = Field(None, description="As the judge sees it; null is as computed.")
    note: str = Field("", max_length=MAX_NOTE)


class ItemWish(_Wish):
    """What the judge says of an item now, and which version of it they saw."""

    version: StrictInt = Field(ge=0, lt=2**53, description="The version that was seen; 0 for an untouched item.")
    state: State = Field(description="submitted counts when the batch closes; it needs every score.")
    format_ok: StrictBool | None = Field(None, description="As the judge sees it; null is as computed.")
    tips: list[TipWish] = Field(
        default_factory=list, max_length=MOST_TIPS, description="All tips in order; empty for none scored yet."
    )
    winner: Literal["a", "b", "tie"] | None = Field(None, description="Of a duel.")
    reason: str = Field("", max_length=LONGEST_REASON, description="Why it is skipped.")
    seconds: float = Field(
        0.0, ge=0, le=_DAY_S, allow_inf_nan=False, description="Spent on it since the last save; they are summed."
    )


class UndoWish(_Wish):
    """Which version of the item was seen."""

    version: StrictInt = Field(ge=0, lt=2**53)


class AcceptWish(_Wish):
    """Why the scores count all the same."""

    reason: str = Field(min_length=1, max_length=LONGEST_ACCEPTANCE, description="In words on one line.")


class ReturnWish(_Wish):
    """What the judge should look at again."""

    note: str = Field(min_length=1, max_length=LONGEST_RETURN)


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow")


class BatchLinks(_Shape):
    self: str
    items: str
    close: str
    reopen: str
    page: str = Field(description="Its page in the panel.", examples=["/judge/batches/3f9a1c0b7e52"])


class BatchShape(_Shape):
    """A sheet that is judged in the browser."""

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
    outcome: dict[str, Any] | None = Field(description="What the last close told.")
    links: BatchLinks


class BatchAnswer(_Shape):
    batch: BatchShape


class BatchOpened(BatchAnswer):
    new: bool = Field(description="False when an open batch is continued.")


class BatchList(_Shape):
    items: list[BatchShape]
    next: str | None = Field(description=_NEXT)


class AnswerShape(_Shape):
    """What the judge has said of an item so far; scores and flags, or the winner of a duel, stand beside."""

    version: int
    state: Literal["empty", "draft", "submitted", "skipped"]
    reason: str
    seconds: float
    updated: str | None
    can_undo: bool


class ItemShape(_Shape):
    item: str = Field(examples=["9c1d5d6e8f0a"])
    number: int = Field(description="Its place on the sheet, from 1.")
    scenario: dict[str, Any]
    answer: AnswerShape


class BatchDetail(BatchAnswer):
    """The whole batch for its judge; an admin is told of another's only which items were skipped, and why."""

    instructions: str | None = None
    rubric: dict[str, Any] | None = None
    items: list[ItemShape] | None = None
    skips: list[dict[str, Any]] | None = None


class ItemSaved(BatchAnswer):
    item: str
    answer: AnswerShape


class HistoryShape(_Shape):
    items: list[AnswerShape] = Field(description="Newest first.")
    next: str | None = Field(description=_NEXT)


class BatchClosedShape(BatchAnswer):
    outcome: dict[str, Any] = Field(
        description="As POST …/apply answers a judge: status, applied, unfinished, drift; `blank` items are not "
        "submitted now and keep the scores they had. `by_file` is true when all scores came as a file."
    )
