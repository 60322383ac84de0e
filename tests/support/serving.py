"""Requests and services for the tests of serving."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tipbench.serve.event_log import SECRET_FILE
from tipbench.serve.request import SCORE, Candidate, RewardRequest, ScoreRequest
from tipbench.serve.service import PolicyService

AT = "2026-04-27T08:30:00+02:00"  # a Monday
PROFILE = {
    "completion_rate_30d": 0.4,
    "dismiss_rate_30d": 0.2,
    "mean_dwell_ms_30d": 42_000,
    "preferred_hour": 9,
    "tip_volume_30d": 31,
}
CATEGORIES = ("focus", "rest", "admin")


def candidate(number: int = 0) -> Candidate:
    """A candidate; successive numbers differ in every value."""
    return {
        "tip_id": f"t{number}",
        "category": CATEGORIES[number % len(CATEGORIES)],
        "task": {"is_overdue": number % 2 == 0, "age_days": 2.0 + 3 * number, "priority": 1 + number % 4},
        "composite": 5.0 + number,
        "slot_hour": (7.0 + 2 * number) % 24,
        "effort_min": 5.0 + number,
    }


def score_request(user: str = "u1", k: int = 3, **changes: Any) -> ScoreRequest:
    """A valid request, validated as by the server; a change to None removes the key."""
    request = {
        "user_id": user,
        "at": AT,
        "context": {"open_tasks": 7},
        "candidates": [candidate(number) for number in range(k)],
        "profile_features": PROFILE,
        **changes,
    }
    return SCORE.validate_python({name: value for name, value in request.items() if value is not None})


def reward_request(event: str, user: str = "u1", **changes: Any) -> RewardRequest:
    """A tip that was completed after 42 seconds."""
    return {"user_id": user, "event_id": event, "action": "completed", "dwell_ms": 42_000.0, **changes}  # type: ignore[typeddict-item]


@contextlib.contextmanager
def open_service(home: Path, **options: Any) -> Iterator[PolicyService]:
    """A service that is closed at the end; a new home gets a fixed secret, so that draws repeat."""
    home.mkdir(parents=True, exist_ok=True)
    if not (home / SECRET_FILE).exists():
        (home / SECRET_FILE).write_text("5e" * 32)
    with contextlib.closing(PolicyService(home, **options)) as service:
        yield service


def learn(service: PolicyService, policy: str, count: int, user: str = "u1", prefix: str = "e") -> None:
    """Score `count` events and reward them with different actions, from which the policy learns."""
    actions = ("completed", "dismissed", "snoozed", "ignored")
    for number in range(count):
        event = f"{prefix}{number}"
        hour = f"2026-04-{27 + number % 3}T{number % 24:02}:15:00+02:00"
        service.score(policy, score_request(user, 5, event_id=event, at=hour))
        service.reward(policy, reward_request(event, user, action=actions[number % 4], dwell_ms=1000.0 * 7 * number))
    service.log.wait()
