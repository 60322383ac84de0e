"""The answers' shapes for one row of a board, and for watching an experiment, as the OpenAPI document has them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tipbench.web.shapes import DifferenceShape, PairName


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow")  # more keys may stand beside these


class TipShape(_Shape):
    tip: str = Field(examples=["Open the handover note and write its first line; stop after five minutes."])
    rationale: str
    scores: dict[str, float] = Field(description="Means over the judges that count.", examples=[{"relevance": 4.0}])
    overlong: bool | None


class AnswerShape(PairName):
    run_id: str = Field(examples=["1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed"])
    state: Literal["judged", "pending", "failed"]
    composite: float | None
    format_ok: bool | None
    repeat: str | None
    tips: list[TipShape]


class SideShape(_Shape):
    composite: float | None = Field(description="The row's mean in this scenario.")
    answers: list[AnswerShape]


class MeetingShape(_Shape):
    scenario: str = Field(examples=["nurse@evening"])
    difference: float | None = Field(description="Own − reference; null unless both are judged.")
    own: SideShape
    reference: SideShape | None


class ReferenceShape(PairName):
    role: Literal["leader", "baseline", "runner-up", "next row"]


class PairShape(PairName):
    """A row against another, scenario by scenario, the largest loss first."""

    experiment: str
    reference: ReferenceShape | None = Field(description="The baseline, the leader, or for the leader the next row.")
    difference: DifferenceShape | None = Field(description="Row − reference over the scenarios both have.")
    wins: int
    losses: int
    even: int
    scenarios: list[MeetingShape]


class RevisionShape(_Shape):
    experiment: str
    revision: str | None = Field(description="Null while nothing was ever written to it by tipbench.")
