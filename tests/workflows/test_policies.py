"""The report of the policy server."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clock import Clock
from support.serving import open_service, score_request
from tipbench.workflows.policies import means_over_time

HOUR = 3600.0


def test_rewards_over_time_are_means_with_95_percent_intervals(tmp_path: Path) -> None:
    clock = Clock()
    start = clock.now
    with open_service(tmp_path, clock=clock) as service:
        for number, value in enumerate((1.0, 0.0, -1.0, 0.5)):
            event = service.score("linucb", score_request()).body["event_id"]
            clock.now = start + HOUR * (number // 3)
            service.reward("linucb", {"user_id": "u1", "event_id": event, "reward": value})
        service.log.wait()
        means = means_over_time(service.log.database, "linucb", "reward", since=start, step_s=HOUR)
        assert service.stats("linucb")["mean_reward"] == 0.125
    half = 1.96 / 3**0.5
    assert means == [
        {"day": "2027-01-15", "n": 3, "mean": 0.0, "low": pytest.approx(-half), "high": pytest.approx(half)},
        {"day": "2027-01-15", "n": 1, "mean": 0.5, "low": None, "high": None},
    ]
