"""The server's validation of requests gives what pydantic gives, whether or not msgspec accepts them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tipbench.serve.request import RECOMMEND, SCORE, check_decision_request
from tipbench.web.serving_schema import fast_validation

USUAL: dict[str, Any] = {
    "user_id": "u1",
    "event_id": "e1",
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
        {"tip_id": "t4", "task": None},
    ],
    "profile_features": {"completion_rate_30d": 0.4, "mean_dwell_ms_30d": 42000, "tip_volume_30d": 31},
}
ADAPTERS: dict[str, TypeAdapter[Any]] = {"score": SCORE, "recommend": RECOMMEND}
FAST = {name: fast_validation(adapter, check_decision_request) for name, adapter in ADAPTERS.items()}

TEXTS = [
    "",
    "u1",
    "u1\n",
    "a b",
    "x" * 64,
    "x" * 65,
    "x" * 129,
    "é",
    "\0",
    "2026-04-27T08:30:00z",
    "2026-04-27T08:30:00",
]
NUMBERS = [0, -0.0, 1, 3, 4, 5, 24, 24.5, -1, 7.0, 2.5, 1e9, 10**9 + 1, 10**30, 1e-400, float("nan"), float("inf")]
TALLY = {"focus": {"seen": 3, "dwell_s_sum": 1.5}}
VALUES = [*TEXTS, *NUMBERS, None, True, [], {}, [{"tip_id": "t"}], [{"tip_id": "t"}] * 2, TALLY]


def all_positions(value: Any) -> list[tuple[Any, str | int]]:
    """Return every value of a request as its container and its key there."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [position for key, each in items for position in ((value, key), *all_positions(each))]


def assert_same(name: str, body: bytes) -> None:
    results = []
    for validate in (FAST[name], ADAPTERS[name].validate_json):
        try:
            results.append(validate(body))
        except ValidationError as exc:
            results.append(exc.errors(include_url=False, include_context=False, include_input=False))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", FAST)
def test_a_usual_request_is_not_left_to_pydantic(name: str) -> None:
    def fail(_: bytes) -> None:
        pytest.fail("pydantic was asked")

    adapter = SimpleNamespace(json_schema=ADAPTERS[name].json_schema, validator=SimpleNamespace(validate_json=fail))
    validate = fast_validation(cast("TypeAdapter[Any]", adapter), check_decision_request)
    assert validate(json.dumps(USUAL).encode()) == USUAL


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_another_value_at_any_place_gives_what_pydantic_gives(name: str, value: Any) -> None:
    for number in range(len(all_positions(USUAL))):
        request = json.loads(json.dumps(USUAL))
        parent, key = all_positions(request)[number]
        parent[key] = value
        assert_same(name, json.dumps(request).encode())


@pytest.mark.parametrize("name", FAST)
def test_another_key_or_a_missing_one_gives_what_pydantic_gives(name: str) -> None:
    for number in range(len(all_positions(USUAL))):
        request = json.loads(json.dumps(USUAL))
        parent, key = all_positions(request)[number]
        removed = parent.pop(key)
        assert_same(name, json.dumps(request).encode())
        if isinstance(parent, dict):
            parent["by_category"] = removed
            assert_same(name, json.dumps(request).encode())


@given(st.sampled_from(sorted(FAST)), st.data())
@settings(deadline=None)
def test_a_changed_byte_gives_what_pydantic_gives(name: str, data: st.DataObject) -> None:
    body = json.dumps(USUAL).encode()
    at = data.draw(st.integers(0, len(body) - 1))
    assert_same(name, body[:at] + data.draw(st.binary(max_size=2)) + body[at + 1 :])


def test_one_key_twice_gives_what_pydantic_gives() -> None:
    rest = b'"candidates": [{"tip_id": "t"}]}'
    for first, second in ((b'"u1"', b'"u2"'), (b'"u1"', b"1"), (b"1", b'"u2"')):
        assert_same("score", b'{"user_id": ' + first + b', "user_id": ' + second + b", " + rest)


@pytest.mark.parametrize("more", [{"format": "date"}, {"multipleOf": 2}, {"additionalProperties": {"type": "null"}}])
def test_what_the_types_cannot_express_is_left_to_pydantic(more: dict[str, Any]) -> None:
    schema = {"title": "X", "type": "object", "properties": {}, **more}
    validator = SimpleNamespace(validate_json=lambda _: "pydantic")
    adapter = SimpleNamespace(json_schema=lambda: schema, validator=validator)
    assert fast_validation(cast("TypeAdapter[Any]", adapter), lambda _: None)(b"{}") == "pydantic"
