"""Requests of the policy server: plain dictionaries, validated by pydantic.

They are faster than objects, and can be logged as JSON as they are. `SCORE.validate_json(body)` returns a
`ScoreRequest` or raises pydantic's `ValidationError`. The server does the same faster, with `fast_validation` of
`web/serving_schema.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Required

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    with_config,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from tipbench.errors import UsageError

MAX_CANDIDATES = 200
USER_ID_PATTERN = r"^[A-Za-z0-9_.@:-]{1,128}$"
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_USER_ID = re.compile(USER_ID_PATTERN)

Action = Literal["completed", "snoozed", "dismissed", "ignored"]


def check_user_id(user_id: str) -> str:
    """Return the user id; raises UsageError if it is invalid."""
    if not _USER_ID.fullmatch(user_id):
        raise UsageError(
            f"A user id has 1 to 128 characters of A-Z, a-z, 0-9 and _ . @ : - (got {user_id[:40]!r} with "
            f"{len(user_id)} characters). Send another id for this user."
        )
    return user_id


def parse_time(at: str) -> datetime:
    """Parse a time in ISO 8601 with an offset; raises ValueError."""
    moment = datetime.fromisoformat(at)
    if moment.tzinfo is None:
        raise ValueError("the time needs an offset, as in 2026-04-27T08:30:00+02:00")
    return moment


def _normalize_time(at: str) -> str:
    normalized = f"{at[:-1]}Z" if at.endswith("z") else at  # RFC 3339 allows both
    parse_time(normalized)  # raises ValueError if the time is invalid
    return normalized


def _check_tip_ids(candidates: list[Candidate]) -> list[Candidate]:
    if len({candidate["tip_id"] for candidate in candidates}) < len(candidates):
        raise ValueError("tip ids must be unique within a request")
    return candidates


@dataclass(frozen=True)
class _WholeNumber:
    """A whole number between two limits, both included; 7.0 is accepted as 7, and strings are not."""

    lowest: int
    highest: int

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.chain_schema(
            [core_schema.float_schema(strict=True, allow_inf_nan=False), self._integer_schema()]
        )

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(self._integer_schema())

    def _integer_schema(self) -> CoreSchema:
        return core_schema.int_schema(strict=False, ge=self.lowest, le=self.highest)


UserId = Annotated[str, Field(pattern=USER_ID_PATTERN, examples=["u1"])]
EventId = Annotated[str, Field(pattern=USER_ID_PATTERN)]
Time = Annotated[str, Field(max_length=64, examples=["2026-04-27T08:30:00+02:00"]), AfterValidator(_normalize_time)]
Category = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[int, _WholeNumber(0, 10**9)]
Hour = Annotated[float, Field(ge=0, le=24)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


@with_config(_STRICT)
class Task(TypedDict, total=False):
    """The task that a candidate is about."""

    is_overdue: bool | None
    age_days: NotNegative | None
    priority: Annotated[int, _WholeNumber(1, 4)] | None


@with_config(_STRICT)
class Candidate(TypedDict, total=False):
    """A tip that may be shown; everything but its id is optional."""

    tip_id: Required[Annotated[str, Field(min_length=1, max_length=128)]]
    category: Category | None
    task: Task | None
    composite: float | None
    slot_hour: Hour | None
    effort_min: NotNegative | None


@with_config(_STRICT)
class CategoryTally(TypedDict, total=False):
    """What the user did with the tips of one category.

    hour_x and hour_y are the sums of cos and sin of 2π·hour/24 over the completed tips.
    """

    seen: Count
    completed: Count
    dismissed: Count
    dwell_s_sum: NotNegative
    dwell_n: Count
    hour_x: float
    hour_y: float


@with_config(_STRICT)
class ProfileFeatures(TypedDict, total=False):
    """The user's last 30 days, counted by the application; `by_category` replaces the tallies of the server."""

    completion_rate_30d: Share | None
    dismiss_rate_30d: Share | None
    mean_dwell_ms_30d: NotNegative | None
    preferred_hour: Hour | None
    tip_volume_30d: Count | None
    by_category: Annotated[dict[Category, CategoryTally], Field(max_length=1000)] | None


@with_config(_STRICT)
class Context(TypedDict, total=False):
    """The user's present situation."""

    open_tasks: Count | None


Candidates = Annotated[list[Candidate], Field(min_length=1, max_length=MAX_CANDIDATES), AfterValidator(_check_tip_ids)]


@with_config(_STRICT)
class DecisionRequest(TypedDict, total=False):
    """The fields of every request for a decision: the user, the time and the situation."""

    user_id: Required[UserId]
    event_id: EventId | None
    at: Time | None
    context: Context | None
    profile_features: ProfileFeatures | None


@with_config(_STRICT)
class ScoreRequest(DecisionRequest, total=False):
    """Pick one of the candidates."""

    candidates: Required[Candidates]


@with_config(_STRICT)
class RecommendRequest(DecisionRequest, total=False):
    """Pick a tip; without `candidates` they come from the catalogue."""

    candidates: Candidates | None


@with_config(_STRICT)
class RewardRequest(TypedDict, total=False):
    """What the user did with the tip of an event; `reward` replaces the reward computed from action and dwell."""

    user_id: Required[UserId]
    event_id: Required[EventId]
    action: Action | None
    dwell_ms: NotNegative | None
    reward: Annotated[float, Field(ge=-1, le=1)] | None
    profile_features: ProfileFeatures | None


def check_decision_request(request: ScoreRequest | RecommendRequest) -> None:
    """Raise ValueError if the time is invalid or not normalized, or if tip ids repeat.

    These are the checks that `fast_validation` needs in addition to the JSON Schema. A request that fails them is
    not rejected yet: pydantic validates it, and normalizes the time.
    """
    at, candidates = request.get("at"), request.get("candidates")
    if at is not None and _normalize_time(at) != at:
        raise ValueError("the time is not normalized")
    if candidates is not None:
        _check_tip_ids(candidates)


def _check_reward(request: RewardRequest) -> RewardRequest:
    if request.get("action") is None and request.get("reward") is None:
        raise ValueError("a reward needs `action` or `reward`")
    return request


@with_config(_STRICT)
class ResetRequest(TypedDict, total=False):
    """Clear what all policies learned about a user; `erase` also deletes the user's events."""

    user_id: Required[UserId]
    erase: bool


SCORE = TypeAdapter(ScoreRequest)
RECOMMEND = TypeAdapter(RecommendRequest)
REWARD: TypeAdapter[RewardRequest] = TypeAdapter(Annotated[RewardRequest, AfterValidator(_check_reward)])
RESET = TypeAdapter(ResetRequest)
