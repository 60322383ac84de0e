"""Runs policies in a simulated world, for all users at once.

The constants of features and policies come from `tipbench.serve`. Only the arithmetic is repeated here, on arrays whose
last axis is the user. A test compares the decisions with those of the policy server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from tipbench.serve.policy import DECIMALS, LAMBDA, POLICIES, Policy
from tipbench.serve.prior import Prior
from tipbench.serve.request import Candidate, DecisionRequest
from tipbench.serve.tallies import (
    CATEGORY_WEIGHT,
    DEFAULT_COMPLETION,
    DEFAULT_DISMISSAL,
    DEFAULT_DWELL,
    LOG_FULL_VOLUME,
    MAX_DWELL_S,
    OVERALL_WEIGHT,
    Tallies,
    Tally,
)
from tipbench.simulate.world import ACTIONS, COMPLETED, Floats, Ints, Outcome, Round, World

# A control arm, v1 with an intercept: shows whether another policy gains by its features or only by its intercept.
CONTROL_ARM = "egreedy/v1+bias"
_DISMISSED = ACTIONS.index("dismissed")
_HOUR_COS = np.array([math.cos(math.tau * hour / 24) for hour in range(24)])
_HOUR_SIN = np.array([math.sin(math.tau * hour / 24) for hour in range(24)])
Draws = Callable[[Policy, int], Floats]  # (policy, round) → one uniform number in [0, 1) per user


@dataclass(frozen=True)
class Arm:
    """A policy in the simulated trial, with its prior. What bandits call an arm is a candidate here."""

    policy: Policy
    prior: Prior | None = None


def find_arm(name: str, priors: Mapping[str, Prior] | None = None) -> Arm:
    """Return an arm by name: a policy, the control arm, or `POLICY without FEATURE` for an ablation.

    FEATURE may be a pattern, such as `category_*`. `priors` are by policy; an ablation starts from the prior of POLICY,
    without the weights of the removed features. Raises UsageError for an unknown name.
    """
    policy_name, _, removed = name.partition(" without ")
    if policy_name == CONTROL_ARM:
        policy = _with_features(POLICIES["egreedy/v1"], CONTROL_ARM, (*POLICIES["egreedy/v1"].features.names, "bias"))
    elif policy_name in POLICIES:
        policy = POLICIES[policy_name]
    else:
        raise UsageError(f"There is no policy {policy_name[:60]!r}. Choose from {', '.join([*POLICIES, CONTROL_ARM])}.")
    prior = priors.get(policy_name) if priors else None
    if removed:
        kept = tuple(feature for feature in policy.features.names if not fnmatch(feature, removed))
        policy = _with_features(policy, name, kept)
        if prior is not None:
            weights = dict(zip(prior.names, prior.theta, strict=True))
            theta = tuple(weights[feature] for feature in kept)
            prior = replace(prior, policy=name, features=policy.features.version, names=kept, theta=theta)
    return Arm(policy, prior)


def _with_features(policy: Policy, name: str, feature_names: tuple[str, ...]) -> Policy:
    """Return a copy with another name and these features. Each is the policy's own, or `bias`, which is always 1."""
    own = policy.features

    def compute(request: DecisionRequest, candidates: list[Candidate], at: datetime, tallies: Tallies) -> list[float]:
        rows = own.matrix(request, candidates, at, tallies)
        ones = np.ones(len(rows))
        columns = [rows[:, own.names.index(feature)] if feature in own.names else ones for feature in feature_names]
        values: list[float] = np.stack(columns, axis=1).ravel().tolist()  # flat, as FeatureSet requires
        return values

    return replace(policy, name=name, features=FeatureSet(f"{own.version} ({name})", feature_names, compute))


@dataclass(frozen=True)
class RidgeStatistics:
    """Sufficient statistics of a ridge regression per user, without prior and λ. The first axis is the user."""

    gram: Floats  # A = Σxxᵀ
    moment: Floats  # b = Σrx
    n_rewards: Floats

    def pooled_theta(self, user_mask: NDArray[np.bool_] | None = None) -> Floats:
        """Return the coefficients of one ridge regression, without a prior, for the users in the mask (None: all)."""
        users = slice(None) if user_mask is None else user_mask
        gram, moment = self.gram[users].sum(axis=0), self.moment[users].sum(axis=0)
        return np.asarray(np.linalg.solve(gram + LAMBDA * np.eye(len(moment)), moment))


@dataclass
class ArmResult:
    """Results of an arm in one world, or pooled over the worlds of several seeds."""

    reward: Floats  # of each user, averaged over rounds
    regret: Floats
    reward_by_round: Floats  # of each round, averaged over users
    regret_by_round: Floats
    chosen: Ints | None = None  # rounds × users, if recorded
    statistics: RidgeStatistics | None = None  # if recorded


def rollout(world: World, arms: Sequence[Arm], *, draws: Draws | None = None, record: bool = False) -> list[ArmResult]:
    """Run every arm in the world; with `record`, the results have choices and ridge statistics.

    `draws` replaces the random numbers of the world, which are the same for every arm.
    """
    n_users, n_rounds = len(world), world.n_rounds
    learners = [_Learner(world, arm) for arm in arms]
    results = [
        ArmResult(
            reward=np.zeros(n_users),
            regret=np.zeros(n_users),
            reward_by_round=np.zeros(n_rounds),
            regret_by_round=np.zeros(n_rounds),
            chosen=np.zeros((n_rounds, n_users), dtype=np.int64) if record else None,
        )
        for _ in arms
    ]
    for number in range(n_rounds):
        round_ = world.round(number)
        features = _RoundFeatures(world, round_)
        world_draws = world.draws(number)
        for arm, learner, result in zip(arms, learners, results, strict=True):
            chosen = learner.choose(features, world_draws if draws is None else draws(arm.policy, number))
            outcome = world.outcome(round_, chosen)
            learner.learn(round_, chosen, outcome)
            result.reward += outcome.reward
            result.regret += outcome.regret
            result.reward_by_round[number] = outcome.reward.mean()
            result.regret_by_round[number] = outcome.regret.mean()
            if result.chosen is not None:
                result.chosen[number] = chosen
    for learner, result in zip(learners, results, strict=True):
        result.reward /= n_rounds
        result.regret /= n_rounds
        if record:
            result.statistics = learner.statistics()
    return results


class _RoundFeatures:
    """The features of a round that are the same for every arm, computed on demand."""

    def __init__(self, world: World, round_: Round) -> None:
        self.hour_cos_sin = round_.hour_cos_sin
        self._world, self._round = world, round_
        # Index of each candidate's category in a flattened array of categories × users.
        self.category_index = world.flat_index(round_.category)
        self._computed: dict[str, Floats] = {}

    def feature(self, name: str) -> Floats:
        """Return a feature as candidates × users.

        It is one row if it is the same for all candidates, and one number if it is also the same for all users.
        """
        if name not in self._computed:
            self._computed[name] = np.asarray(self._compute(name), dtype=np.float64)
        return self._computed[name]

    def _compute(self, name: str) -> Any:
        round_ = self._round
        hour_cos, hour_sin = self.hour_cos_sin
        weekday_angle = math.tau * round_.weekday / 7
        completion, dismissal, dwell_ms, preferred_hour, volume = self._world.profile
        match name:
            case "bias":
                return np.ones(1)
            case "hour_sin":
                return hour_sin
            case "hour_cos":
                return hour_cos
            case "dow_sin":
                return np.array([math.sin(weekday_angle)])
            case "dow_cos":
                return np.array([math.cos(weekday_angle)])
            case "is_overdue":
                return round_.is_overdue.astype(np.float64)
            case "task_age_norm":
                return np.minimum(round_.age_days / MAX_AGE_DAYS, 1.0)
            case "priority_norm":
                return (round_.priority - 1) / 3  # priorities are 1 to 4
            case "completion_rate":
                return completion
            case "dismiss_rate":
                return dismissal
            case "mean_dwell_norm":
                return np.minimum(dwell_ms / MAX_DWELL_MS, 1.0)
            case "preferred_hour_alignment":
                return np.cos(math.tau * (preferred_hour - round_.hour) / 24)
            case "tip_volume_norm":
                return np.minimum(np.log1p(volume) / LOG_FULL_VOLUME, 1.0)
            case "quality":
                return np.clip((round_.composite - COMPOSITE_MIDDLE) / COMPOSITE_HALF_RANGE, -1.0, 1.0)
            case "slot_match":
                # cos(slot − hour) = cos(slot)·cos(hour) + sin(slot)·sin(hour), with hours as angles
                return _HOUR_COS.take(round_.slot_hour) * hour_cos + _HOUR_SIN.take(round_.slot_hour) * hour_sin
            case "load_fit":
                load = np.minimum(round_.open_tasks, MAX_OPEN_TASKS) / MAX_OPEN_TASKS
                effort = np.minimum(round_.effort_min, MAX_EFFORT_MIN) / MAX_EFFORT_MIN
                return load * (1 - 2 * effort)  # positive for short tips, negative for long ones
        raise UsageError(f"The feature {name!r} is not defined for simulated users. Add it to simulate/rollout.py.")


class _UserTallies:
    """The tallies of all users, in one array: fields of `Tally` × categories × users."""

    FEATURES = (
        "category_completion",
        "category_dismissal",
        "category_dwell",
        "category_hour_alignment",
        "category_volume",
    )

    def __init__(self, world: World) -> None:
        n_fields = len(Tally._fields)
        self._world = world
        self._sums = np.zeros((n_fields, len(world.personas.categories), len(world)))
        self._flat_sums = self._sums.reshape(n_fields, -1)  # a view of the same numbers

    def features(self, hour_cos_sin: Floats) -> dict[str, Floats]:
        """Return the FEATURES at this hour, each as categories × users."""
        hour_cos, hour_sin = hour_cos_sin
        seen, completed, dismissed, dwell_s, dwell_n, hour_x, hour_y = self._sums  # the fields of Tally

        # With fewer tips, a user's overall rate is closer to the default, and a category's rate to the overall rate.
        def overall_rate(total: Floats, n_overall: Floats, default: float) -> Floats:
            weighted_total = total.sum(axis=0) + OVERALL_WEIGHT * default
            return np.asarray(np.minimum(weighted_total / (n_overall + OVERALL_WEIGHT), 1.0))

        def category_rate(total: Floats, n: Floats, overall: Floats) -> Floats:
            return np.asarray(np.minimum((total + CATEGORY_WEIGHT * overall) / (n + CATEGORY_WEIGHT), 1.0))

        seen_overall = seen.sum(axis=0)
        dwell = dwell_s / MAX_DWELL_S
        # The mean of cos(hour of a completed tip − this hour), with hours as angles; + 1 shrinks it towards 0.
        hour_alignment = np.clip((hour_cos * hour_x + hour_sin * hour_y) / (completed + 1), -1.0, 1.0)
        values = (
            category_rate(completed, seen, overall_rate(completed, seen_overall, DEFAULT_COMPLETION)),
            category_rate(dismissed, seen, overall_rate(dismissed, seen_overall, DEFAULT_DISMISSAL)),
            category_rate(dwell, dwell_n, overall_rate(dwell, dwell_n.sum(axis=0), DEFAULT_DWELL)),
            hour_alignment,
            np.minimum(np.log1p(seen) / LOG_FULL_VOLUME, 1.0),
        )
        return dict(zip(self.FEATURES, values, strict=True))

    def add(self, category: Ints, outcome: Outcome, arrives: Floats, hour_cos_sin: Floats) -> None:
        """Count the outcomes whose rewards arrived: `arrives` is 1 for these users, otherwise 0."""
        hour_cos, hour_sin = hour_cos_sin
        completed = dismissed = np.zeros_like(arrives)
        if outcome.action is not None:  # None in the linear world, which has rewards only
            completed = arrives * (outcome.action == COMPLETED)
            dismissed = arrives * (outcome.action == _DISMISSED)
        dwell_s = np.minimum(np.nan_to_num(outcome.dwell_ms / 1000), MAX_DWELL_S) * completed
        added = {
            "seen": arrives,
            "completed": completed,
            "dismissed": dismissed,
            "dwell_s_sum": dwell_s,
            "dwell_n": completed,  # only completed actions have a dwell
            "hour_x": hour_cos * completed,
            "hour_y": hour_sin * completed,
        }
        # Every user has a different index; with equal ones, `+=` would add only one of the outcomes.
        self._flat_sums[:, self._world.flat_index(category)] += np.stack([added[field] for field in Tally._fields])


class _Learner:
    """One arm: a ridge regression per user, with Sherman–Morrison updates.

    In the subscripts of `einsum`, d and e are features, k is the candidate and n is the user.
    """

    def __init__(self, world: World, arm: Arm) -> None:
        self._policy, self._user_index = arm.policy, np.arange(len(world))
        initial = arm.policy.ridge(arm.prior)
        self._lambda, self._initial_theta = initial.lam, initial.theta
        self._theta = np.repeat(initial.theta[:, None], len(world), axis=1)  # features × users
        self._v = np.repeat(initial.v[:, :, None], len(world), axis=2)  # (λI + Σxxᵀ)⁻¹, features × features × users
        self._x = np.empty((len(initial.theta), world.n_candidates, len(world)))  # of the current round
        uses_tallies = not set(_UserTallies.FEATURES).isdisjoint(arm.policy.features.names)
        self._tallies = _UserTallies(world) if uses_tallies else None
        self._n_rewards = np.zeros(len(world))

    def choose(self, features: _RoundFeatures, draws: Floats) -> Ints:
        """Return the index of the candidate chosen for each user; `draws` are uniform numbers in [0, 1)."""
        tallied = self._tallies.features(features.hour_cos_sin) if self._tallies else {}
        for row, name in enumerate(self._policy.features.names):
            if name in tallied:
                self._x[row] = tallied[name].take(features.category_index)
            else:
                self._x[row] = features.feature(name)
        scores = np.einsum("dkn,dn->kn", self._x, self._theta)
        if self._policy.alpha:
            vx = np.einsum("den,ekn->dkn", self._v, self._x)
            variance = np.einsum("dkn,dkn->kn", vx, self._x)
            scores += self._policy.alpha * np.sqrt(variance)
        scores = scores.round(DECIMALS)
        is_best = scores == scores.max(axis=0)
        exploration = self._policy.epsilon / len(scores)
        probabilities = exploration + (1.0 - self._policy.epsilon) / is_best.sum(axis=0) * is_best
        # The first candidate whose cumulative probability exceeds the draw.
        chosen = (np.cumsum(probabilities, axis=0) <= draws).sum(axis=0)
        return np.asarray(np.minimum(chosen, len(scores) - 1))  # rounding errors may leave the sum below a draw

    def learn(self, round_: Round, chosen: Ints, outcome: Outcome) -> None:
        """Learn from the rewards that arrived."""
        x = self._x[:, chosen, self._user_index]
        arrives = round_.arrives.astype(np.float64)
        self._n_rewards += arrives
        vx = np.einsum("den,en->dn", self._v, x)
        step = vx * (arrives / (1.0 + np.einsum("dn,dn->n", vx, x)))  # 0 without a reward
        self._theta += step * (outcome.reward - np.einsum("dn,dn->n", x, self._theta))
        for row, factor in enumerate(step):  # row by row, without a temporary array as large as _v
            self._v[row] -= factor * vx
        if self._tallies:
            category = round_.category[chosen, self._user_index]
            self._tallies.add(category, outcome, arrives, round_.hour_cos_sin)

    def statistics(self) -> RidgeStatistics:
        """Return the sums over the rewards that the arm has learned from."""
        regularized_gram = np.linalg.inv(self._v.transpose(2, 0, 1))  # λI + Σxxᵀ
        moment = np.einsum("nde,en->nd", regularized_gram, self._theta) - self._lambda * self._initial_theta
        gram = regularized_gram - self._lambda * np.eye(len(self._initial_theta))
        return RidgeStatistics(gram, moment, self._n_rewards)
