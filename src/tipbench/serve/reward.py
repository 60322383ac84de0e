"""Rewards from what a user did with a tip, version `reward-1`."""

from __future__ import annotations

from tipbench.serve.request import RewardRequest

REWARD_VERSION = "reward-1"
_BY_ACTION = {"dismissed": -1.0, "snoozed": 0.1, "ignored": 0.0}


def reward_of(request: RewardRequest) -> float:
    """Return the reward in [−1, 1]: the number sent, otherwise that of action and dwell."""
    number = request.get("reward")
    if number is not None:
        return float(number)
    action = request.get("action")
    if action != "completed":
        return _BY_ACTION[action or "ignored"]
    dwell_ms = request.get("dwell_ms")
    if dwell_ms is None:
        return 0.6
    if dwell_ms < 15_000:
        return -0.3  # too fast to have been read
    if dwell_ms < 120_000:
        return 1.0
    return 0.6 if dwell_ms <= 600_000 else 0.3
