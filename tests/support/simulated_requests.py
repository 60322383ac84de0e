"""Simulated users as an application sends them: one request per decision, to policy objects, a service or a server."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Protocol

import numpy as np

from tipbench.serve.features import hour_of
from tipbench.serve.policy import reward_of
from tipbench.serve.request import Candidate, ProfileFeatures, RewardRequest, ScoreRequest
from tipbench.serve.tallies import Tallies
from tipbench.simulate.rollout import Arm, ArmResult, Draws
from tipbench.simulate.world import ACTIONS, COMPLETED, PROFILE_KEYS, Floats, Outcome, Round, World


def decision_time(world: World, offered: Round, user: int) -> datetime:
    """Return the local time of a user's decision, without an offset."""
    settings = world.personas.settings
    start = datetime.combine(date.fromisoformat(settings["first_day"]), datetime.min.time())
    days = offered.number // int(settings["decisions_per_day"])
    return start + timedelta(days=days, minutes=round(float(offered.hour[user]) * 60))


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
        for at in range(world.n_candidates)
    ]
    return {
        "user_id": f"user-{user}",
        "event_id": f"round-{offered.number}",
        "at": decision_time(world, offered, user).replace(tzinfo=UTC).isoformat(),
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


def drive(world: World, chooser: Chooser) -> ArmResult:
    """Run the world decision by decision, with the requests that an application would send."""
    rewards, regrets, choices = [], [], []
    for number in range(world.n_rounds):
        offered = world.round(number)
        tips = [chooser.score(score_request(world, offered, user)) for user in range(len(world))]
        chosen = np.array([int(tip.removeprefix("t")) for tip in tips])
        outcome = world.outcome(offered, chosen)
        for user in np.flatnonzero(offered.arrives):
            chooser.reward(reward_request(world, offered, int(user), outcome))
        rewards.append(outcome.reward)
        regrets.append(outcome.regret)
        choices.append(chosen)
    reward, regret = np.array(rewards), np.array(regrets)
    return ArmResult(
        reward.mean(axis=0), regret.mean(axis=0), reward.mean(axis=1), regret.mean(axis=1), np.array(choices)
    )


def slow_rollout(world: World, arm: Arm, *, draws: Draws | None = None) -> ArmResult:
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
        self._served[request["user_id"]] = rows[chosen], candidate.get("category"), hour_of(moment)
        return candidate["tip_id"]

    def reward(self, request: RewardRequest) -> None:
        user, (x, category, hour) = _number(request["user_id"]), self._served[request["user_id"]]
        self._ridges[user].update(x, reward_of(request))
        self._tallies[user].add(category, request.get("action"), request.get("dwell_ms"), hour)


def _number(name: str) -> int:
    """Return the number in `user-7` or `round-7`."""
    return int(name.rpartition("-")[2])
