"""Rewards from what a user did with a tip, version `reward-1`."""

from __future__ import annotations

import math

from tipbench.serve.request import RewardRequest

REWARD_VERSION = "reward-1"
BY_ACTION = {"dismissed": -1.0, "snoozed": 0.1, "ignored": 0.0}
WITHOUT_DWELL = 0.6
BY_DWELL = (  # the reward of a completed tip whose dwell is below this many ms
    (15_000.0, -0.3),  # too fast to have been read
    (120_000.0, 1.0),
    (math.nextafter(600_000.0, math.inf), 0.6),  # 10 minutes are included
    (math.inf, 0.3),
)


def reward_of(request: RewardRequest) -> float:
    """Return the reward in [−1, 1]: the number sent, otherwise that of action and dwell."""
    number = request.get("reward")
    if number is not None:
        return float(number)
    action = request.get("action")
    if action != "completed":
        return BY_ACTION[action or "ignored"]
    dwell_ms = request.get("dwell_ms")
    if dwell_ms is None:
        return WITHOUT_DWELL
    return next(reward for limit, reward in BY_DWELL if dwell_ms < limit)
