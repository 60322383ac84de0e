"""Statistics of serving, from the event log: one user under one policy, totals, and rewards over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tipbench.serve.policy import POLICIES
from tipbench.serve.prior import Prior
from tipbench.serve.ridge import Ridge
from tipbench.sqlite import Database


def user_stats(
    database: Database, user: str, policy: str, ridge: Ridge, prior: Prior | None, *, since: int
) -> dict[str, Any]:
    """Return what a policy learned about a user, by name: θ with its standard deviation √Vᵢᵢ; counts since a reset."""
    rows = database.rows(
        "SELECT kind, count(*) FROM log WHERE user = ? AND policy = ? AND seq > ? GROUP BY kind",
        (user, policy, since),
    )
    counts = {kind: count for kind, count in rows}  # noqa: C416
    names = POLICIES[policy].features.names
    return {
        **_head(policy, prior, ridge.n, ridge.reward_sum, counts),
        "theta": dict(zip(names, ridge.theta.tolist(), strict=True)),
        "sd": dict(zip(names, np.sqrt(np.diag(ridge.v)).tolist(), strict=True)),
    }


def policy_totals(database: Database, policy: str, prior: Prior | None) -> dict[str, Any]:
    """Return the totals of a policy over all users and since the beginning of the log."""
    rows = database.rows("SELECT kind, count(*), total(reward) FROM log WHERE policy = ? GROUP BY kind", (policy,))
    counts = {kind: count for kind, count, _ in rows}
    reward_sum = sum(total for kind, _, total in rows if kind == "reward")
    return _head(policy, prior, counts.get("reward", 0), reward_sum, counts)


def _head(policy: str, prior: Prior | None, n: int, reward_sum: float, counts: Mapping[str, int]) -> dict[str, Any]:
    score, reward, late = (counts.get(kind, 0) for kind in ("score", "reward", "late"))
    return {
        "policy": policy,
        "dim": POLICIES[policy].features.dim,
        "n": n,
        "mean_reward": reward_sum / n if n else None,
        "epsilon": POLICIES[policy].epsilon,
        "pending": score - reward - late,
        "late": late,
        "duplicates": counts.get("duplicate", 0),
        "prior": prior and prior.hash,
    }


def over_time(database: Database, policy: str, kind: str, *, since: float, step_s: float) -> list[dict[str, Any]]:
    """Return the mean and its standard error in each step of time: of rewards, or of the agreement of signals."""
    rows = database.rows(
        "SELECT CAST((received - ?1) / ?2 AS INTEGER) AS step, count(*), total(reward), total(reward * reward) "
        "FROM log WHERE policy = ?3 AND kind = ?4 AND received >= ?1 GROUP BY step ORDER BY step",
        (since, step_s, policy, kind),
    )
    return [
        {
            "at": since + step * step_s,
            "n": n,
            "mean": total / n,
            "se": math.sqrt(max(squares - total * total / n, 0.0) / (n - 1) / n) if n > 1 else None,
        }
        for step, n, total, squares in rows
    ]
