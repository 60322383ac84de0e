"""Runs policies against a simulated world, for all users at once.

Feature names, constants, ε, α and λ come from `tipbench.serve`; only the arithmetic is repeated here, over arrays whose
last axis is the user. A test checks that the decisions are those of the server's policy objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatch
from typing import Any

import numpy as np

from tipbench.errors import UsageError
from tipbench.serve.features import (
    COMPOSITE_HALF_RANGE,
    COMPOSITE_MIDDLE,
    MAX_AGE_DAYS,
    MAX_DWELL_MS,
    MAX_EFFORT_MIN,
    MAX_OPEN_TASKS,
    FeatureSet,
)
from tipbench.serve.policy import DECIMALS, POLICIES, Policy
from tipbench.serve.prior import Prior
from tipbench.serve.request import Candidate, Occasion
from tipbench.serve.tallies import (
    CATEGORY_WEIGHT,
    DEFAULT_COMPLETION,
    DEFAULT_DISMISSAL,
    DEFAULT_DWELL,
    FIELDS,
    MAX_DWELL_S,
    OVERALL_WEIGHT,
    Tallies,
)
from tipbench.simulate.world import ACTIONS, COMPLETED, Floats, Ints, Outcome, Round, World

CONTROL = "egreedy/v1+bias"  # simulated only: shows whether a gain comes from new features or from an intercept
_DISMISSED = ACTIONS.index("dismissed")
_HOURS = np.array([[math.cos(math.tau * hour / 24), math.sin(math.tau * hour / 24)] for hour in range(24)]).T
Draws = Callable[[Policy, int], Floats]  # (policy, round) → one uniform number in [0, 1) per user


@dataclass(frozen=True)
class Arm:
    """A policy to simulate, with its prior."""

    policy: Policy
    prior: Prior | None = None

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self.policy.name


def find_arm(name: str, prior: Prior | None = None) -> Arm:
    """Return an arm by name: a policy, the control arm, or `POLICY without FEATURE` for an ablation.

    FEATURE may be a pattern. `prior` is used if it was fitted for this policy. Raises UsageError for unknown names.
    """
    base, _, left_out = name.partition(" without ")
    if base == CONTROL:
        policy = _with_features(POLICIES["egreedy/v1"], CONTROL, (*POLICIES["egreedy/v1"].features.names, "bias"))
    elif base in POLICIES:
        policy = POLICIES[base]
    else:
        raise UsageError(f"There is no policy {base[:60]!r}. Choose from {', '.join([*POLICIES, CONTROL])}.")
    if left_out:
        features = tuple(feature for feature in policy.features.names if not fnmatch(feature, left_out))
        return Arm(_with_features(policy, name, features))
    return Arm(policy, prior if prior and prior.policy == name else None)


def _with_features(policy: Policy, name: str, names: tuple[str, ...]) -> Policy:
    """Return the policy with some of its own features, or with a bias."""
    base = policy.features

    def compute(request: Occasion, candidates: list[Candidate], at: datetime, tallies: Tallies) -> list[float]:
        rows = base.matrix(request, candidates, at, tallies)
        ones = np.ones(len(rows))
        columns = [rows[:, base.names.index(feature)] if feature in base.names else ones for feature in names]
        return [float(value) for value in np.stack(columns, axis=1).ravel()]

    return replace(policy, name=name, features=FeatureSet(f"{base.version} ({name})", names, compute))


@dataclass(frozen=True)
class RidgeStatistics:
    """Sufficient statistics of ridge regression for every user (first axis), without a prior."""

    gram: Floats  # A = Σxxᵀ
    moment: Floats  # b = Σrx
    n: Floats  # rewards

    def theta(self, users: Any = slice(None)) -> Floats:
        """Return the ridge regression pooled over the users of this mask, by default over all."""
        gram, moment = self.gram[users].sum(axis=0), self.moment[users].sum(axis=0)
        return np.asarray(np.linalg.solve(gram + np.eye(len(moment)), moment))


@dataclass(frozen=True)
class ArmTotals:
    """Results of an arm: sums over rounds per user, and means over users per round."""

    reward: Floats
    regret: Floats
    reward_by_round: Floats
    regret_by_round: Floats
    chosen: Ints | None = None  # rounds × users, if recorded
    statistics: RidgeStatistics | None = None  # if recorded


@dataclass
class _Sums:
    reward: Floats
    regret: Floats
    rounds: list[tuple[float, float]] = field(default_factory=list)
    chosen: list[Ints] = field(default_factory=list)

    def add(self, outcome: Outcome, chosen: Ints, *, record: bool) -> None:
        self.reward += outcome.reward
        self.regret += outcome.regret
        self.rounds.append((float(outcome.reward.mean()), float(outcome.regret.mean())))
        if record:
            self.chosen.append(chosen)

    def totals(self, statistics: RidgeStatistics | None) -> ArmTotals:
        rounds = np.array(self.rounds).reshape(-1, 2)
        chosen = np.array(self.chosen) if self.chosen else None
        return ArmTotals(self.reward, self.regret, rounds[:, 0], rounds[:, 1], chosen, statistics)


def rollout(world: World, arms: Sequence[Arm], *, draws: Draws | None = None, record: bool = False) -> list[ArmTotals]:
    """Run every arm in the world; with `record`, the results include choices and ridge statistics."""
    learners = [_Learner(world, arm) for arm in arms]
    sums = [_Sums(np.zeros(len(world)), np.zeros(len(world))) for _ in arms]
    for number in range(world.rounds):
        batch = _Batch(world, world.round(number))
        common = world.draws(number)
        for arm, learner, total in zip(arms, learners, sums, strict=True):
            chosen = learner.choose(batch, common if draws is None else draws(arm.policy, number))
            outcome = world.outcome(batch.offered, chosen)
            learner.learn(batch, chosen, outcome)
            total.add(outcome, chosen, record=record)
    found = [learner.statistics(world.rounds) if record else None for learner in learners]
    return [total.totals(statistics) for total, statistics in zip(sums, found, strict=True)]


class _Batch:
    """Features of one round that are the same for every policy."""

    def __init__(self, world: World, offered: Round) -> None:
        self.world = world
        self.offered = offered
        self.hour = offered.clock
        # Position of each candidate's category in a flat array of categories × users.
        self.category_index = offered.category * len(world) + np.arange(len(world))
        self._known: dict[str, Floats] = {}

    def feature(self, name: str) -> Floats:
        """Return a feature of all users: per candidate, or one row if it is the same for all candidates."""
        if name not in self._known:
            self._known[name] = np.asarray(self._compute(name), dtype=np.float64)
        return self._known[name]

    def _compute(self, name: str) -> Any:
        now, profile, day = self.offered, self.world.profile, math.tau * self.offered.weekday / 7
        completion, dismissal, dwell_ms, preferred_hour, volume = profile
        match name:
            case "bias":
                return np.ones(1)
            case "hour_sin":
                return self.hour[1]
            case "hour_cos":
                return self.hour[0]
            case "dow_sin":
                return np.array([math.sin(day)])
            case "dow_cos":
                return np.array([math.cos(day)])
            case "is_overdue":
                return now.is_overdue.astype(np.float64)
            case "task_age_norm":
                return np.minimum(now.age_days / MAX_AGE_DAYS, 1.0)
            case "priority_norm":
                return (now.priority - 1) / 3
            case "completion_rate":
                return completion
            case "dismiss_rate":
                return dismissal
            case "mean_dwell_norm":
                return np.minimum(dwell_ms / MAX_DWELL_MS, 1.0)
            case "preferred_hour_alignment":
                return np.cos(math.tau * (preferred_hour - now.hour) / 24)
            case "tip_volume_norm":
                return np.minimum(np.log1p(volume) / math.log(101), 1.0)
            case "quality":
                return np.clip((now.composite - COMPOSITE_MIDDLE) / COMPOSITE_HALF_RANGE, -1.0, 1.0)
            case "slot_match":
                return _HOURS[0].take(now.slot_hour) * self.hour[0] + _HOURS[1].take(now.slot_hour) * self.hour[1]
            case "load_fit":
                load = np.minimum(now.open_tasks, MAX_OPEN_TASKS) / MAX_OPEN_TASKS
                return load * (1 - 2 * np.minimum(now.effort_min, MAX_EFFORT_MIN) / MAX_EFFORT_MIN)
        raise UsageError(f"The feature {name!r} has no form for simulated users. Add it to simulate/rollout.py.")


class _UserTallies:
    """`serve.tallies.Tallies` of all users: fields × categories × users."""

    NAMES = (
        "category_completion",
        "category_dismissal",
        "category_dwell",
        "category_hour_alignment",
        "category_volume",
    )

    def __init__(self, world: World) -> None:
        self._sums = np.zeros((len(FIELDS), len(world.personas.categories), len(world)))
        self._flat = self._sums.reshape(len(FIELDS), -1)
        self._users = np.arange(len(world))

    def features(self, hour: Floats) -> dict[str, Floats]:
        """Return the five features, categories × users."""
        seen, completed, dismissed, dwell_s, dwell_n, hour_x, hour_y = self._sums
        count = seen.sum(axis=0)

        # A category with few tips is drawn towards the user's overall rate.
        def shrunk(part: Floats, whole: Floats, overall: Floats) -> Floats:
            return np.asarray(np.minimum((part + CATEGORY_WEIGHT * overall) / (whole + CATEGORY_WEIGHT), 1.0))

        def rate(part: Floats, whole: Floats, usual: float) -> Floats:
            return np.asarray(np.minimum((part.sum(axis=0) + OVERALL_WEIGHT * usual) / (whole + OVERALL_WEIGHT), 1))

        dwell = dwell_s / MAX_DWELL_S
        values = (
            shrunk(completed, seen, rate(completed, count, DEFAULT_COMPLETION)),
            shrunk(dismissed, seen, rate(dismissed, count, DEFAULT_DISMISSAL)),
            shrunk(dwell, dwell_n, rate(dwell, dwell_n.sum(axis=0), DEFAULT_DWELL)),
            np.clip((hour[0] * hour_x + hour[1] * hour_y) / (completed + 1), -1.0, 1.0),
            np.minimum(np.log1p(seen) / math.log(101), 1.0),
        )
        return dict(zip(self.NAMES, values, strict=True))

    def add(self, category: Ints, outcome: Outcome, arrives: Floats, hour: Floats) -> None:
        """Count the rewards that arrived."""
        completed = np.zeros_like(arrives) if outcome.action is None else arrives * (outcome.action == COMPLETED)
        dismissed = np.zeros_like(arrives) if outcome.action is None else arrives * (outcome.action == _DISMISSED)
        dwell = np.minimum(np.nan_to_num(outcome.dwell_ms / 1000), MAX_DWELL_S) * completed
        added = (arrives, completed, dismissed, dwell, completed, hour[0] * completed, hour[1] * completed)
        self._flat[:, category * len(self._users) + self._users] += np.stack(added)


class _Learner:
    """One arm for all users: V (features × features × users) and θ (features × users), updated by Sherman–Morrison.

    In the subscripts of `einsum`, d and e are features, k is the candidate and n is the user.
    """

    def __init__(self, world: World, arm: Arm) -> None:
        self._policy, self._users = arm.policy, np.arange(len(world))
        fresh = arm.policy.ridge(arm.prior)
        self._lambda, self._start = fresh.lam, fresh.theta
        shape = len(fresh.theta), len(world)
        self._theta = np.repeat(fresh.theta[:, None], len(world), axis=1)
        self._v = np.repeat(fresh.v[:, :, None], len(world), axis=2)
        self._x = np.empty((shape[0], world.candidates, shape[1]))
        uses_tallies = not set(_UserTallies.NAMES).isdisjoint(arm.policy.features.names)
        self._tallies = _UserTallies(world) if uses_tallies else None

    def choose(self, batch: _Batch, draws: Floats) -> Ints:
        """Return the index of every user's candidate."""
        tallied = self._tallies.features(batch.hour) if self._tallies else {}
        for at, name in enumerate(self._policy.features.names):
            self._x[at] = tallied[name].take(batch.category_index) if name in tallied else batch.feature(name)
        scores = np.einsum("dkn,dn->kn", self._x, self._theta)
        if self._policy.alpha:
            spread = np.einsum("dkn,dkn->kn", np.einsum("den,ekn->dkn", self._v, self._x), self._x)
            scores += self._policy.alpha * np.sqrt(spread)
        scores = scores.round(DECIMALS)
        best = scores == scores.max(axis=0)
        explore = self._policy.epsilon / len(scores)
        cumulated = np.cumsum(explore + (1.0 - self._policy.epsilon) / best.sum(axis=0) * best, axis=0)
        return np.asarray(np.minimum((cumulated <= draws).sum(axis=0), len(scores) - 1))

    def learn(self, batch: _Batch, chosen: Ints, outcome: Outcome) -> None:
        """Learn the rewards that arrived."""
        x = self._x[:, chosen, self._users]
        arrives = batch.offered.arrives.astype(np.float64)
        vx = np.einsum("den,en->dn", self._v, x)
        scaled = vx * (arrives / (1.0 + np.einsum("dn,dn->n", vx, x)))
        self._theta += scaled * (outcome.reward - np.einsum("dn,dn->n", x, self._theta))
        for at, factor in enumerate(scaled):
            self._v[at] -= factor * vx
        if self._tallies:
            category = batch.offered.category[chosen, self._users]
            self._tallies.add(category, outcome, arrives, batch.hour)

    def statistics(self, rounds: int) -> RidgeStatistics:
        """Return the sums over the rounds that this arm has learned from."""
        inverse = np.linalg.inv(self._v.transpose(2, 0, 1))
        moment = np.einsum("nde,en->nd", inverse, self._theta) - self._lambda * self._start
        gram = inverse - self._lambda * np.eye(len(self._start))
        return RidgeStatistics(gram, moment, np.full(len(self._users), float(rounds)))
