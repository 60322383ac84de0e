"""The panel's report on the policies, read from the policy server's database. The server need not run."""

from __future__ import annotations

import math
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json
from typing_extensions import TypedDict

from tipbench.serve.event_log import load_keys, open_database, store_exists
from tipbench.serve.policy import POLICIES, Ridge
from tipbench.serve.request import check_user_id
from tipbench.serve.service import policy_totals, user_stats
from tipbench.serve.state_store import load_user
from tipbench.serve.switches import SHADOWS, Switches
from tipbench.sqlite import Database

DAYS = 14  # in the report
MAX_POOLED_REWARDS = 10_000  # the newest; the weights over all users are computed from them
_DAY_S = 86_400.0
_Z = 1.96  # of a two-sided 95 % interval


class Mean(TypedDict):
    """A mean over one day or all days, with its 95 % interval; `low` and `high` are None if there is only one value."""

    day: str | None  # in UTC, such as 2026-04-27; None for all days
    n: int
    mean: float
    low: float | None
    high: float | None


class Weight(TypedDict):
    """The weight θ of one feature, with its standard deviation."""

    feature: str
    theta: float
    sd: float


class PolicySummary(TypedDict):
    """Counts, rewards and weights of one policy, for all users or for one."""

    name: str
    version: str
    dim: int
    n: int  # rewards learned from
    mean_reward: float | None
    pending: int  # choices without a reward
    late: int  # rewards after the time limit
    duplicates: int  # repeated rewards
    rewards: list[Mean]  # by day
    weights: list[Weight]


class ShadowSummary(TypedDict):
    """A shadow: whether it is enabled, its counts, and the share of requests in which it chose the served tip."""

    name: str
    policy: str
    enabled: bool
    calls: int
    dropped: int
    errors: int
    agreement: Mean | None


class PoliciesReport(TypedDict):
    """The report; `user` has one user's summary of each policy if an id was given."""

    active: str | None  # policy; None if the policy server's database does not exist
    policies: list[PolicySummary]
    shadows: list[ShadowSummary]
    user: list[PolicySummary] | None


def read_policies(home: Path, user_id: str | None = None) -> PoliciesReport:
    """Return the report, also for one user if an id is given; raises UsageError for an invalid id.

    Rewards by day and the agreement of shadows are from the last DAYS; counts are from the whole log.
    """
    if user_id is not None:
        check_user_id(user_id)
    if not store_exists(home):
        return {"active": None, "policies": [], "shadows": [], "user": None}
    with closing(open_database(home)) as database:
        midnight = time.time() // _DAY_S * _DAY_S
        since = midnight - (DAYS - 1) * _DAY_S
        switches = Switches(database)
        active = switches.active()
        policies = [_summary_of_all_users(database, name, since) for name in POLICIES]
        shadows = [_shadow_summary(database, switches, name, since) for name in SHADOWS]
        user = None
        if user_id is not None:
            user = _user_summaries(database, load_keys(home).hash_user_id(user_id))
        return {"active": active, "policies": policies, "shadows": shadows, "user": user}


def set_shadow(home: Path, name: str, *, enabled: bool) -> None:
    """Enable or disable a shadow; a running server follows within seconds. Raises UsageError for an unknown name."""
    with closing(open_database(home)) as database:
        Switches(database).set_shadow(name, enabled)


def _summary_of_all_users(database: Database, policy: str, since: float) -> PolicySummary:
    days = means_over_time(database, policy, "reward", since=since, step_s=_DAY_S)
    totals = policy_totals(database, policy)
    return _policy_summary(policy, totals, days, _pooled_weights(database, policy))


def _user_summaries(database: Database, user_key: str) -> list[PolicySummary]:
    # The database does not contain the server's priors, so the weights are those learned from rewards alone, as in
    # `_pooled_weights`.
    user = load_user(user_key, priors={}, database=database, state_store=None)
    summaries = []
    for policy in POLICIES:
        ridge = user.ridge(policy)
        stats = user_stats(database, user.key, policy, ridge, reset_seq=user.reset_seq)
        weights = _weights(policy, ridge) if ridge.n else []
        summaries.append(_policy_summary(policy, stats, days=[], weights=weights))
    return summaries


def _policy_summary(policy: str, stats: dict[str, Any], days: list[Mean], weights: list[Weight]) -> PolicySummary:
    return {
        "name": policy,
        "version": POLICIES[policy].version,
        "dim": stats["dim"],
        "n": stats["n"],
        "mean_reward": stats["mean_reward"],
        "pending": stats["pending"],
        "late": stats["late"],
        "duplicates": stats["duplicates"],
        "rewards": days,
        "weights": weights,
    }


def _pooled_weights(database: Database, policy: str) -> list[Weight]:
    """Return the weights of one ridge regression for all users; empty without rewards."""
    rows = database.execute(
        "SELECT body, reward FROM log WHERE policy = ? AND kind = 'reward' ORDER BY seq DESC LIMIT ?",
        (policy, MAX_POOLED_REWARDS),
    )
    if not rows:
        return []
    x = np.array([from_json(body)["x"] for body, _ in rows])  # features, one row per reward
    rewards = np.array([reward for _, reward in rows])
    ridge = POLICIES[policy].ridge()
    ridge.restore(a=x.T @ x, b=x.T @ rewards, n=len(rows), reward_sum=float(rewards.sum()))  # `ridge.v` adds λI to A
    return _weights(policy, ridge)


def _weights(policy: str, ridge: Ridge) -> list[Weight]:
    deviations = np.sqrt(np.diag(ridge.v)).tolist()
    names = POLICIES[policy].features.names
    return [
        {"feature": name, "theta": theta, "sd": sd}
        for name, theta, sd in zip(names, ridge.theta.tolist(), deviations, strict=True)
    ]


def _shadow_summary(database: Database, switches: Switches, name: str, since: float) -> ShadowSummary:
    # All days are one step, so there is at most one mean.
    means = means_over_time(database, SHADOWS[name], "signal", since=since, step_s=DAYS * _DAY_S)
    counts = switches.shadow_counts(name)
    return {
        "name": name,
        "policy": SHADOWS[name],
        "enabled": switches.shadows()[name],
        "calls": counts.calls,
        "dropped": counts.dropped,
        "errors": counts.errors,
        "agreement": {**means[0], "day": None} if means else None,
    }


def means_over_time(database: Database, policy: str, kind: str, *, since: float, step_s: float) -> list[Mean]:
    """Return the mean `reward` of a policy's log entries of one kind, in each step of `step_s` seconds after `since`.

    In entries of kind `signal`, the column `reward` is 1 if the shadow chose the served tip, otherwise 0.
    """
    rows = database.execute(
        "SELECT CAST((received - ?1) / ?2 AS INTEGER) AS step, count(*), total(reward), total(reward * reward) "
        "FROM log WHERE policy = ?3 AND kind = ?4 AND received >= ?1 GROUP BY step ORDER BY step",
        (since, step_s, policy, kind),
    )
    means: list[Mean] = []
    for step, n, total, total_squares in rows:
        mean = total / n
        low = high = None
        if n > 1:
            variance = max(total_squares - total * total / n, 0.0) / (n - 1)
            half_width = _Z * math.sqrt(variance / n)
            low, high = mean - half_width, mean + half_width
        day = datetime.fromtimestamp(since + step * step_s, UTC).date().isoformat()
        means.append({"day": day, "n": n, "mean": mean, "low": low, "high": high})
    return means
