"""Runs policies against a world: `rollout` for all users at once, `slow_rollout` with the policy objects of the server.

Both make the same decisions from the same seed, which is tested. Feature names, constants, ε, α and λ come from
`tipbench.serve`; what is repeated here is the arithmetic, over arrays whose last axis is the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from typing import Any, Protocol

import numpy as np

from tipbench.errors import UsageError
from tipbench.serve import features as f
from tipbench.serve import tallies as t
from tipbench.serve.features import FeatureSet
from tipbench.serve.policy import DECIMALS, POLICIES, Policy, reward_of
from tipbench.serve.prior import Prior
from tipbench.serve.request import Candidate, Occasion, ProfileFeatures, RewardRequest, ScoreRequest
from tipbench.serve.tallies import Tallies
from tipbench.simulate.world import ACTIONS, COMPLETED, PROFILE_KEYS, Floats, Ints, Outcome, Round, World

CONTROL = "egreedy/v1+bias"  # simulated only: shows whether a gain comes from new features or from an intercept
_DISMISSED = ACTIONS.index("dismissed")
_HOURS = np.array([[math.cos(math.tau * hour / 24), math.sin(math.tau * hour / 24)] for hour in range(24)]).T
Draws = Callable[[Policy, int], Floats]  # for a policy and a round: one number in [0, 1) per user


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
        return Arm(
            _with_features(policy, name, tuple(one for one in policy.features.names if not fnmatch(one, left_out)))
        )
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
class ArmTotals:
    """Results of an arm: sums over rounds per user, and means over users per round."""

    reward: Floats
    regret: Floats
    reward_by_round: Floats
    regret_by_round: Floats
    chosen: Ints | None = None  # rounds × users, if recorded
    statistics: tuple[Floats, Floats] | None = None  # A and b of every user, if recorded


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

    def totals(self, statistics: tuple[Floats, Floats] | None) -> ArmTotals:
        rounds = np.array(self.rounds).reshape(-1, 2)
        chosen = np.array(self.chosen) if self.chosen else None
        return ArmTotals(self.reward, self.regret, rounds[:, 0], rounds[:, 1], chosen, statistics)


def rollout(
    world: World,
    arms: Sequence[Arm],
    *,
    draws: Draws | None = None,
    record: bool = False,
    on_round: Callable[[int], None] | None = None,
) -> list[ArmTotals]:
    """Run every arm in the world. `record` also returns the choices and what was learned."""
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
        if on_round is not None:
            on_round(number)
    return [
        total.totals(learner.statistics() if record else None) for total, learner in zip(sums, learners, strict=True)
    ]


class _Batch:
    """Features of one round that do not depend on what a policy did before."""

    def __init__(self, world: World, offered: Round) -> None:
        self.world = world
        self.offered = offered
        self.hour = offered.clock
        # Index of each candidate's category in a flat array of categories × users.
        self.place = offered.category * len(world) + np.arange(len(world))
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
                return np.minimum(now.age_days / f.MAX_AGE_DAYS, 1.0)
            case "priority_norm":
                return (now.priority - 1) / 3
            case "completion_rate":
                return completion
            case "dismiss_rate":
                return dismissal
            case "mean_dwell_norm":
                return np.minimum(dwell_ms / f.MAX_DWELL_MS, 1.0)
            case "preferred_hour_alignment":
                return np.cos(math.tau * (preferred_hour - now.hour) / 24)
            case "tip_volume_norm":
                return np.minimum(np.log1p(volume) / math.log(101), 1.0)
            case "quality":
                return np.clip((now.composite - f.COMPOSITE_MIDDLE) / f.COMPOSITE_HALF, -1.0, 1.0)
            case "slot_match":
                return _HOURS[0].take(now.slot_hour) * self.hour[0] + _HOURS[1].take(now.slot_hour) * self.hour[1]
            case "load_fit":
                load = np.minimum(now.open_tasks, f.MAX_OPEN_TASKS) / f.MAX_OPEN_TASKS
                return load * (1 - 2 * np.minimum(now.effort_min, f.MAX_EFFORT_MIN) / f.MAX_EFFORT_MIN)
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
        self._sums = np.zeros((len(t.FIELDS), len(world.personas.categories), len(world)))
        self._flat = self._sums.reshape(len(t.FIELDS), -1)
        self._users = np.arange(len(world))

    def features(self, hour: Floats) -> dict[str, Floats]:
        """Return the five features, categories × users."""
        seen, completed, dismissed, dwell_s, dwell_n, hour_x, hour_y = self._sums
        count = seen.sum(axis=0)

        # A category with few tips is drawn towards the user's overall rate.
        def shrunk(part: Floats, whole: Floats, overall: Floats) -> Floats:
            return np.asarray(np.minimum((part + t.CATEGORY_WEIGHT * overall) / (whole + t.CATEGORY_WEIGHT), 1.0))

        def rate(part: Floats, whole: Floats, usual: float) -> Floats:
            return np.asarray(np.minimum((part.sum(axis=0) + t.OVERALL_WEIGHT * usual) / (whole + t.OVERALL_WEIGHT), 1))

        dwell = dwell_s / t.MAX_DWELL_S
        values = (
            shrunk(completed, seen, rate(completed, count, t.COMPLETION)),
            shrunk(dismissed, seen, rate(dismissed, count, t.DISMISSAL)),
            shrunk(dwell, dwell_n, rate(dwell, dwell_n.sum(axis=0), t.DWELL)),
            np.clip((hour[0] * hour_x + hour[1] * hour_y) / (completed + 1), -1.0, 1.0),
            np.minimum(np.log1p(seen) / math.log(101), 1.0),
        )
        return dict(zip(self.NAMES, values, strict=True))

    def add(self, category: Ints, outcome: Outcome, arrives: Floats, hour: Floats) -> None:
        """Count the rewards that arrived."""
        completed = np.zeros_like(arrives) if outcome.action is None else arrives * (outcome.action == COMPLETED)
        dismissed = np.zeros_like(arrives) if outcome.action is None else arrives * (outcome.action == _DISMISSED)
        dwell = np.minimum(np.nan_to_num(outcome.dwell_ms / 1000), t.MAX_DWELL_S) * completed
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
            self._x[at] = tallied[name].take(batch.place) if name in tallied else batch.feature(name)
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

    def statistics(self) -> tuple[Floats, Floats]:
        """Return A = Σxxᵀ and b = Σrx of every user (first axis), without the prior."""
        inverse = np.linalg.inv(self._v.transpose(2, 0, 1))
        b = np.einsum("nde,en->nd", inverse, self._theta) - self._lambda * self._start
        return inverse - self._lambda * np.eye(len(self._start)), b


# One decision at a time, as the server makes them


def score_request(world: World, offered: Round, user: int) -> ScoreRequest:
    """Return the request that the application sends for a simulated user."""
    categories = world.personas.categories
    candidates: list[Candidate] = [
        {
            "tip_id": f"t{at}",
            "category": categories[offered.category[at, user]],
            "task": {
                "is_overdue": bool(offered.is_overdue[at, user]),
                "age_days": float(offered.age_days[at, user]),
                "priority": int(offered.priority[at, user]),
            },
            "composite": float(offered.composite[at, user]),
            "slot_hour": float(offered.slot_hour[at, user]),
            "effort_min": float(offered.effort_min[at, user]),
        }
        for at in range(world.candidates)
    ]
    return {
        "user_id": f"user-{user}",
        "event_id": f"round-{offered.number}",
        "at": world.time(offered, user).replace(tzinfo=UTC).isoformat(),
        "context": {"open_tasks": int(offered.open_tasks[user])},
        "candidates": candidates,
        "profile_features": profile_features(world, user),
    }


def profile_features(world: World, user: int) -> ProfileFeatures:
    """Return the `profile_features` of a simulated user, sent with score and reward."""
    values = dict(zip(PROFILE_KEYS, world.profile[:, user].tolist(), strict=True))
    return ProfileFeatures(**{**values, "tip_volume_30d": int(values["tip_volume_30d"])})  # type: ignore[typeddict-item]


def reward_request(world: World, offered: Round, user: int, outcome: Outcome) -> RewardRequest:
    """Return the reward that the application sends for a simulated user."""
    request = RewardRequest(
        user_id=f"user-{user}", event_id=f"round-{offered.number}", profile_features=profile_features(world, user)
    )
    if outcome.action is None:
        request["reward"] = float(outcome.reward[user])
        return request
    request["action"] = ACTIONS[outcome.action[user]]  # type: ignore[typeddict-item]
    if outcome.action[user] == COMPLETED:
        request["dwell_ms"] = float(outcome.dwell_ms[user])
    return request


class Chooser(Protocol):
    """Decides for simulated users and learns from them: the policy objects, a service or a server."""

    def score(self, request: ScoreRequest) -> str:
        """Return the id of the chosen tip."""
        ...

    def reward(self, request: RewardRequest) -> None:
        """Learn what the user did with the tip."""
        ...


def drive(world: World, chooser: Chooser) -> ArmTotals:
    """Run the world decision by decision, with the requests that an application would send."""
    total = _Sums(np.zeros(len(world)), np.zeros(len(world)))
    for number in range(world.rounds):
        offered = world.round(number)
        tips = [chooser.score(score_request(world, offered, user)) for user in range(len(world))]
        chosen = np.array([int(tip.removeprefix("t")) for tip in tips])
        outcome = world.outcome(offered, chosen)
        for user in np.flatnonzero(offered.arrives):
            chooser.reward(reward_request(world, offered, int(user), outcome))
        total.add(outcome, chosen, record=True)
    return total.totals(None)


def slow_rollout(world: World, arm: Arm, *, draws: Draws | None = None) -> ArmTotals:
    """Run one arm decision by decision on the objects of `tipbench.serve`."""
    return drive(world, _PolicyObjects(world, arm, draws))


class _PolicyObjects:
    """A Chooser made of the objects of `tipbench.serve`: a ridge regression and tallies for each user."""

    def __init__(self, world: World, arm: Arm, draws: Draws | None) -> None:
        self._policy = arm.policy
        self._draws = draws or (lambda _policy, number: world.draws(number))
        self._ridges = [arm.policy.ridge(arm.prior) for _ in range(len(world))]
        self._tallies = [Tallies() for _ in range(len(world))]
        self._served: dict[str, tuple[Floats, str | None, float]] = {}  # by user: features, category and hour

    def score(self, request: ScoreRequest) -> str:
        user, number = _number(request["user_id"]), _number(request["event_id"] or "")
        moment = datetime.fromisoformat(request["at"] or "")
        rows = self._policy.features.matrix(request, request["candidates"], moment, self._tallies[user])
        uniform = float(self._draws(self._policy, number)[user])
        chosen = self._policy.decide(rows, self._ridges[user], uniform).chosen
        candidate = request["candidates"][chosen]
        self._served[request["user_id"]] = rows[chosen], candidate.get("category"), f.hour_of(moment)
        return candidate["tip_id"]

    def reward(self, request: RewardRequest) -> None:
        user, (x, category, hour) = _number(request["user_id"]), self._served[request["user_id"]]
        self._ridges[user].update(x, reward_of(request))
        self._tallies[user].add(category, request.get("action"), request.get("dwell_ms"), hour)


def _number(name: str) -> int:
    """Return the number in `user-7` or `round-7`."""
    return int(name.rpartition("-")[2])
