"""Requests: which are valid, and the field that makes another one invalid."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tipbench.serve.request import RECOMMEND, RESET, REWARD, SCORE, parse_time

T = {"tip_id": "t"}
SCORED: dict[str, Any] = {"user_id": "u1", "candidates": [T]}
REWARDED: dict[str, Any] = {"user_id": "u1", "event_id": "e", "action": "completed"}


@pytest.mark.parametrize(
    ("adapter", "request_body"),
    [
        (SCORE, SCORED),
        (SCORE, {**SCORED, "candidates": [{"tip_id": f"t{number}"} for number in range(200)]}),
        (SCORE, {**SCORED, "event_id": None, "at": None, "context": None, "profile_features": None}),
        (SCORE, {**SCORED, "candidates": [{**T, "task": None, "category": None, "composite": 17}]}),
        (SCORE, {**SCORED, "user_id": "A-z_0.9@x:y"}),
        (RECOMMEND, {"user_id": "u1"}),
        (REWARD, REWARDED),
        (REWARD, {"user_id": "u1", "event_id": "e", "reward": -1}),
        (REWARD, {**REWARDED, "dwell_ms": 0, "profile_features": {"by_category": {"focus": {"seen": 3}}}}),
        (RESET, {"user_id": "u1"}),
    ],
)
def test_a_valid_request_is_kept_as_it_is(adapter: TypeAdapter[Any], request_body: dict[str, Any]) -> None:
    assert adapter.validate_json(json.dumps(request_body)) == request_body


def test_a_lower_case_z_is_utc() -> None:
    found = SCORE.validate_json(json.dumps({**SCORED, "at": "2026-04-27t08:30:00z"}))
    assert found["at"] == "2026-04-27t08:30:00Z"
    assert parse_time(found["at"]) == datetime(2026, 4, 27, 8, 30, tzinfo=UTC)


def test_a_whole_number_with_a_fraction_of_zero_is_an_integer() -> None:
    tally = {"seen": 3.0, "completed": 1e0, "dismissed": 0.0, "dwell_n": 2.0}
    request = {
        **SCORED,
        "context": {"open_tasks": 7.0},
        "candidates": [{**T, "task": {"priority": 3.0}}],
        "profile_features": {"tip_volume_30d": 31.0, "by_category": {"focus": tally}},
    }
    validated = SCORE.validate_json(json.dumps(request))
    assert validated == request
    assert ".0" not in json.dumps(validated)  # stored as the integers that were meant


@pytest.mark.parametrize(
    ("adapter", "request_body", "place"),
    [
        (SCORE, {**SCORED, "user_id": "../x"}, "user_id"),
        (SCORE, {**SCORED, "user_id": "u\0"}, "user_id"),
        (SCORE, {**SCORED, "user_id": "u" * 10_000}, "user_id"),
        (SCORE, {**SCORED, "user_id": "аdmin"}, "user_id"),
        (SCORE, {**SCORED, "user_id": 1}, "user_id"),
        (SCORE, {"candidates": [T]}, "user_id"),
        (SCORE, {**SCORED, "event_id": "a b"}, "event_id"),
        (SCORE, {"user_id": "u1"}, "candidates"),
        (SCORE, {**SCORED, "candidates": []}, "candidates"),
        (SCORE, {**SCORED, "candidates": [T, T]}, "candidates"),
        (SCORE, {**SCORED, "candidates": [{"tip_id": f"t{number}"} for number in range(201)]}, "candidates"),
        (SCORE, {**SCORED, "candidates": [{**T, "composite": float("nan")}]}, "candidates.0.composite"),
        (SCORE, {**SCORED, "candidates": [{**T, "composite": "12"}]}, "candidates.0.composite"),
        (SCORE, {**SCORED, "candidates": [{**T, "task": {"priority": 5}}]}, "candidates.0.task.priority"),
        (SCORE, {**SCORED, "candidates": [{**T, "task": {"priority": 2.5}}]}, "candidates.0.task.priority"),
        (SCORE, {**SCORED, "candidates": [{**T, "task": {"priority": "3"}}]}, "candidates.0.task.priority"),
        (SCORE, {**SCORED, "candidates": [{**T, "task": {"priority": True}}]}, "candidates.0.task.priority"),
        (SCORE, {**SCORED, "candidates": [{**T, "task": {"is_overdue": 1}}]}, "candidates.0.task.is_overdue"),
        (SCORE, {**SCORED, "candidates": [{**T, "tipp": 1}]}, "candidates.0.tipp"),
        (SCORE, {**SCORED, "at": "2026-04-27T08:30:00"}, "at"),
        (SCORE, {**SCORED, "at": "yesterday"}, "at"),
        (SCORE, {**SCORED, "context": {"open_tasks": -1}}, "context.open_tasks"),
        (SCORE, {**SCORED, "profile_features": {"preferred_hour": 25}}, "profile_features.preferred_hour"),
        (RECOMMEND, {"user_id": "u1", "candidates": []}, "candidates"),
        (REWARD, {"user_id": "u1", "event_id": "e"}, ""),
        (REWARD, {**REWARDED, "action": "liked"}, "action"),
        (REWARD, {**REWARDED, "reward": 1.1}, "reward"),
        (REWARD, {**REWARDED, "dwell_ms": -1}, "dwell_ms"),
        (RESET, {"user_id": "u1", "erase": "yes"}, "erase"),
    ],
)
def test_an_invalid_request_is_refused_at_its_place(
    adapter: TypeAdapter[Any], request_body: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        adapter.validate_json(json.dumps(request_body))
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == [place]
