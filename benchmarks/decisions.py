"""The requests and rewards of the serving benchmark, the same for every program."""

from __future__ import annotations

import random
from typing import Any

CATEGORIES = ("focus", "break", "planning", "contact")


def request_body(candidates: int, seed: int) -> Any:
    """A score request of an app, with all values that a policy can use."""
    rng = random.Random(seed)
    return {
        "user_id": f"user-{seed % 1000}",
        "at": f"2026-04-{1 + seed % 28:02d}T{seed % 24:02d}:30:00+02:00",
        "context": {"open_tasks": rng.randrange(20)},
        "candidates": [
            {
                "tip_id": f"tip-{number}",
                "category": CATEGORIES[number % len(CATEGORIES)],
                "task": {
                    "is_overdue": rng.random() < 0.3,
                    "age_days": rng.randrange(60),
                    "priority": rng.randint(1, 4),
                },
                "composite": round(rng.uniform(2, 17), 2),
                "slot_hour": rng.randrange(24),
                "effort_min": rng.randrange(1, 30),
            }
            for number in range(candidates)
        ],
        "profile_features": {
            "completion_rate_30d": 0.4,
            "dismiss_rate_30d": 0.2,
            "mean_dwell_ms_30d": 42000,
            "preferred_hour": 9,
            "tip_volume_30d": 31,
        },
    }


def reward_for(features: Any, rng: random.Random) -> float:
    """A reward that depends on the chosen candidate, so that a policy can learn."""
    return max(-1.0, min(1.0, float(features[2]) - float(features[3]) + rng.gauss(0, 0.3)))
