"""Schemas of the policy server: validation of requests, types of responses, and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, NotRequired, Union

import msgspec
from pydantic import TypeAdapter
from typing_extensions import TypedDict

import tipbench
from tipbench.serve.policy import POLICIES
from tipbench.serve.request import RECOMMEND, RESET, REWARD, SCORE, USER_ID_PATTERN

_META_ARGUMENTS = {  # keyword of JSON Schema → argument of msgspec.Meta
    "minimum": "ge",
    "maximum": "le",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_length",
    "maxItems": "max_length",
    "pattern": "pattern",
}
_SIMPLE_TYPES = {"string": str, "number": float, "integer": int, "boolean": bool, "null": None}
_SUPPORTED_KEYWORDS = {*_META_ARGUMENTS, "type", "items", "properties", "required", "additionalProperties", "$defs"}
_ANNOTATIONS = {"title", "description", "examples"}  # keywords that do not affect validation
_MAX_EXACT_INTEGER = 2**53  # a float represents all integers up to this one exactly
_NO_VALUE = Annotated[int, msgspec.Meta(ge=1, le=0)]  # a type that accepts no value
_DESCRIPTION = """Policies that pick a tip for a user and learn from what the user does with it.

Send `Authorization: Bearer TOKEN` with a token of the role *app* or *admin*. Every error is
`{"error": {"code", "message", "path"}}`. The same `event_id` with the same body gives the same answer."""


def fast_validation(adapter: TypeAdapter[Any], check: Callable[[Any], object]) -> Callable[[bytes], Any]:
    """Return a function that parses and validates a request. It raises pydantic's ValidationError.

    msgspec validates first, because it is faster. Its types are made from pydantic's JSON Schema. They never accept
    more than pydantic, and sometimes less: pydantic also accepts 7.0 for a count. `check` raises ValueError for what
    JSON Schema cannot express. If msgspec or `check` rejects a request, pydantic decides.
    """
    schema = adapter.json_schema()
    validate_with_msgspec = msgspec.json.Decoder(_msgspec_type(schema, schema.get("$defs", {}))).decode
    decode = msgspec.json.Decoder().decode
    validate_with_pydantic = adapter.validator.validate_json

    def validate(body: bytes) -> Any:
        try:
            validate_with_msgspec(body)
            request = decode(body)  # plain dictionaries, as pydantic returns them
            check(request)
        except (msgspec.MsgspecError, ValueError):
            return validate_with_pydantic(body)
        return request

    return validate


def _msgspec_type(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Any:
    """Return msgspec's type for a JSON Schema. With an unsupported keyword, it accepts no value: pydantic decides."""
    keywords = schema.keys() - _ANNOTATIONS
    if keywords == {"$ref"}:
        _, _, name = schema["$ref"].rpartition("/")
        return _msgspec_type(defs[name], defs)
    if keywords == {"anyOf"}:
        return Union[tuple(_msgspec_type(option, defs) for option in schema["anyOf"])]  # noqa: UP007
    if keywords - _SUPPORTED_KEYWORDS or schema.get("additionalProperties"):
        return _NO_VALUE
    kind = schema["type"]
    if kind == "object":
        fields: list[Any] = []  # (name, type), or (name, type, default) if optional
        for name, field_schema in schema["properties"].items():
            field_type = _msgspec_type(field_schema, defs)
            is_required = name in schema.get("required", ())
            fields.append((name, field_type) if is_required else (name, field_type, None))
        return msgspec.defstruct(schema["title"], fields, kw_only=True, forbid_unknown_fields=True, gc=False)
    limits = {_META_ARGUMENTS[keyword]: value for keyword, value in schema.items() if keyword in _META_ARGUMENTS}
    if kind == "number":  # pydantic converts integers to float, which is inexact beyond these limits
        limits = {"ge": -_MAX_EXACT_INTEGER, "le": _MAX_EXACT_INTEGER, **limits}
    if "pattern" in limits:
        limits["pattern"] = limits["pattern"].removesuffix("$") + r"\Z"  # Python's `$` also matches before a newline
    base = list[_msgspec_type(schema["items"], defs)] if kind == "array" else _SIMPLE_TYPES[kind]  # type: ignore[misc]
    return Annotated[base, msgspec.Meta(**limits)] if limits else base


class RankedTip(TypedDict):
    """A candidate with its score and its probability of being chosen."""

    tip_id: str
    score: float
    probability: float


class ScoreAnswer(TypedDict):
    """The chosen tip, and all candidates, best score first. `tip` is its text, if it is from the catalogue.

    `dim` is the number of features, and `n` the number of the user's rewards that the policy learned before choosing.
    """

    event_id: str
    policy: str
    dim: int
    chosen: str
    probability: float
    explored: bool
    ranking: list[RankedTip]
    n: int
    prior: str | None
    tip: NotRequired[str | None]


class RewardAnswer(TypedDict):
    """The answer to a reward. `applied` is false if the reward was sent before or is `late`.

    A reward is late if it comes more than 24 hours after the tip was chosen. `n` is the number of the user's rewards
    that the policy has learned.
    """

    applied: bool
    reward: float
    late: bool
    n: int


class StatsAnswer(TypedDict):
    """What a policy has learned from a user. Without `user_id` in the request, the totals of all users.

    `n` is the number of learned rewards. `theta` and `sd` are the estimated weights of the features and their standard
    deviations; totals do not have them.
    """

    policy: str
    dim: int
    n: int
    mean_reward: float | None
    epsilon: float
    theta: NotRequired[dict[str, float]]
    sd: NotRequired[dict[str, float]]
    pending: int
    late: int
    duplicates: int
    prior: str | None


class ResetAnswer(TypedDict):
    """`cleared` is true for each policy that had a state of the user."""

    cleared: dict[str, bool]


class Shadow(TypedDict):
    """A shadow policy, whether it is enabled, and how often it was called; dropped and failed calls are included."""

    policy: str
    enabled: bool
    calls: int
    dropped: int
    errors: int


class PolicyVersion(TypedDict):
    """A policy with its version, number of features, version of the feature set (`features`) and prior."""

    name: str
    version: str
    dim: int
    features: str
    prior: str | None


class PoliciesAnswer(TypedDict):
    """The active policy, the shadows and all policies."""

    active: str
    shadows: dict[str, Shadow]
    policies: list[PolicyVersion]
    warnings: list[str]


class ErrorDetail(TypedDict):
    """`code` is for programs, `message` for people, `path` is the invalid part of the request."""

    code: str
    message: str
    path: str | None


class ErrorAnswer(TypedDict):
    """The response of a failed request."""

    error: ErrorDetail


class HealthAnswer(TypedDict):
    """The server accepts requests."""

    status: str
    version: str


_SCORE_EXAMPLE = {
    "user_id": "u1",
    "event_id": "u1-2026-04-27-1",
    "at": "2026-04-27T08:30:00+02:00",
    "context": {"open_tasks": 7},
    "candidates": [
        {
            "tip_id": "t9",
            "category": "focus",
            "task": {"is_overdue": True, "age_days": 4, "priority": 3},
            "composite": 12.75,
            "slot_hour": 9,
            "effort_min": 5,
        },
        {"tip_id": "t4", "category": "break"},
    ],
    "profile_features": {"completion_rate_30d": 0.4, "dismiss_rate_30d": 0.2, "preferred_hour": 9},
}
_REWARD_EXAMPLE = {"user_id": "u1", "event_id": "u1-2026-04-27-1", "action": "completed", "dwell_ms": 42000}
_ERROR_DESCRIPTIONS = {  # by status
    400: "The body is not JSON.",
    401: "The token is missing or invalid.",
    403: "The token's role may not call the policy server.",
    404: "The event is unknown.",
    409: "The event exists with another body, policy or reward, or is from before the user's reset.",
    413: "The body is over 256 KiB.",
    422: "A value is invalid; `path` is the field.",
    429: "Too many wrong tokens; see Retry-After.",
    503: "The store is busy or cannot be written; see Retry-After.",
}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {  # by name of the schema
    "ScoreRequest": SCORE,
    "RecommendRequest": RECOMMEND,
    "RewardRequest": REWARD,
    "ResetRequest": RESET,
    **{
        answer.__name__: TypeAdapter(answer)
        for answer in (ScoreAnswer, RewardAnswer, StatsAnswer, ResetAnswer, PoliciesAnswer, HealthAnswer, ErrorAnswer)
    },
}


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document of all routes."""
    _, definitions = TypeAdapter.json_schemas(
        ((name, "validation", adapter) for name, adapter in _ADAPTERS.items()),
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "tipbench policy server", "version": tipbench.__version__, "description": _DESCRIPTION},
        "paths": dict(_paths()),
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _paths() -> Iterator[tuple[str, dict[str, Any]]]:
    score_operation = partial(_operation, request="ScoreRequest", example=_SCORE_EXAMPLE, response="ScoreAnswer")
    reward_operation = partial(_operation, request="RewardRequest", example=_REWARD_EXAMPLE, response="RewardAnswer")
    policies_by_path = {"egreedy": "egreedy/v1"} | {name: name for name in POLICIES}  # `egreedy` is an alias
    for path, policy in policies_by_path.items():
        yield f"/score/{path}", {"post": score_operation(f"Pick a tip with {policy}")}
        yield f"/reward/{path}", {"post": reward_operation(f"Send a reward to {policy}")}
        stats = _operation(f"Get what {policy} learned", response="StatsAnswer", has_user_id=True)
        yield f"/stats/{path}", {"get": stats}
    recommend = _operation(
        "Pick a tip with the active policy; shadows score it too",
        request="RecommendRequest",
        example=_SCORE_EXAMPLE,
        response="ScoreAnswer",
    )
    yield "/recommend", {"post": recommend}
    yield "/reward", {"post": reward_operation("Send a reward to the policy that served the event")}
    reset_example = {"user_id": "u1", "erase": False}
    reset = _operation("Clear a user's state", request="ResetRequest", example=reset_example, response="ResetAnswer")
    yield "/reset", {"post": reset}
    yield "/policies", {"get": _operation("List policies and shadows", response="PoliciesAnswer")}
    plain_text = {"text/plain": {"schema": {"type": "string"}}}
    yield "/metrics", {"get": _operation("Get metrics for Prometheus", content=plain_text)}
    any_object = {"application/json": {"schema": {"type": "object"}}}
    yield "/openapi.json", {"get": _operation("Get this document", content=any_object)}
    yield "/healthz", {"get": {**_operation("Get the server's health", response="HealthAnswer"), "security": []}}


def _operation(
    summary: str,
    *,
    request: str | None = None,
    example: dict[str, Any] | None = None,
    response: str = "",
    content: dict[str, Any] | None = None,
    has_user_id: bool = False,
) -> dict[str, Any]:
    """`request` and `response` are names of schemas; `content` replaces `response`."""
    error_statuses = (400, 401, 403, 404, 409, 413, 422, 429, 503) if request else (401, 403, 422, 429, 503)
    error = {"application/json": {"schema": _reference("ErrorAnswer")}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "OK", "content": content or {"application/json": {"schema": _reference(response)}}},
            **{
                str(status): {"description": _ERROR_DESCRIPTIONS[status], "content": error} for status in error_statuses
            },
        },
    }
    if request:
        media_type = {"schema": _reference(request), "example": example}
        operation["requestBody"] = {"required": True, "content": {"application/json": media_type}}
    if has_user_id:
        schema = {"type": "string", "pattern": USER_ID_PATTERN}
        operation["parameters"] = [{"name": "user_id", "in": "query", "schema": schema, "example": "u1"}]
    return operation


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
