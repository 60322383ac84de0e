"""Simulated users, the tips they are offered and how they respond. All parameters come from personas.toml.

Random numbers are drawn per (seed, round, user, candidate) before a policy chooses. Every policy therefore meets the
same users, candidates and outcomes (common random numbers). More users or rounds do not change the first ones, with two
exceptions: in the world `drift`, tastes change after half of the rounds; in the world `null`, responses are computed
from means over all users.

The last axis of every array is the user. Operations then run over users in memory order, which is fast.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tipbench.serve.features import COMPOSITE_HALF_RANGE, COMPOSITE_MIDDLE, MAX_AGE_DAYS
from tipbench.serve.policy import REWARD_BY_ACTION, REWARD_BY_DWELL

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PROFILE_KEYS = ("completion_rate_30d", "dismiss_rate_30d", "mean_dwell_ms_30d", "preferred_hour", "tip_volume_30d")
ACTIONS = ("completed", "snoozed", "dismissed", "ignored")
COMPLETED = ACTIONS.index("completed")
# 0 for a completion: its reward depends on the dwell.
_ACTION_REWARDS = np.array([REWARD_BY_ACTION.get(action, 0.0) for action in ACTIONS])
_DWELL_LIMITS_MS, _DWELL_REWARDS = np.array(REWARD_BY_DWELL).T
# Part of the seed of each random generator, so that the numbers for different purposes are independent.
_USER_STREAM, _DRIFT_STREAM, _OFFER_STREAM, _OUTCOME_STREAM, _DRAW_STREAM = range(5)
_DWELL_SCALE = 0.6  # of the log-logistic distribution of dwell times
_DWELL_TASTE = 0.4  # standard deviation of `Tastes.log_dwell` between a user's categories
_RAW_BITS = 16
_RAW_LEVELS = 2**_RAW_BITS  # candidates are drawn from random integers below this number
_STEPS_PER_POINT = 4  # composites are drawn in steps of a quarter point
_BUSY_TASKS = 10  # a user with more open tasks is busy
_AGE_QUANTILES = 1024  # number of task ages, all equally likely
_LINEAR_NOISE = 0.5  # width of the uniform noise of a reward in the linear world
# Scales of the linear world's coefficients of hour_sin, hour_cos, is_overdue, task_age_norm and priority_norm.
_LINEAR_SCALES = (0.05, 0.05, 0.3, 0.3, 0.2)


class WorldName(StrEnum):
    """A variant of the simulated world."""

    STANDARD = "standard"
    NO_TASTE = "no-taste"  # categories do not matter
    NULL = "null"  # nothing matters: every tip has the same outcome probabilities
    DRIFT = "drift"  # tastes are drawn again after half of the rounds
    LOSSY = "lossy"  # some rewards never arrive
    LINEAR = "linear"  # the mean reward is linear in LinUCB's features; for tests


@dataclass(frozen=True)
class Persona:
    """A type of simulated user; personas.toml explains its parameters."""

    name: str
    parameters: Mapping[str, float]
    likes: Mapping[str, float]  # by category
    profile: Mapping[str, float]  # by PROFILE_KEYS


@dataclass(frozen=True)
class Personas:
    """The content of personas.toml."""

    version: str
    settings: Mapping[str, Any]  # the top-level keys
    candidate: Mapping[str, Any]  # distributions of the candidates' properties
    personas: tuple[Persona, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the personas; a user's persona is an index into them."""
        return tuple(persona.name for persona in self.personas)

    @property
    def categories(self) -> tuple[str, ...]:
        """Names of the categories; a tip's category is an index into them."""
        return tuple(self.settings["categories"])

    def column(self, key: str) -> Floats:
        """Return the parameter `key` of every persona."""
        return np.array([persona.parameters[key] for persona in self.personas])


@lru_cache(maxsize=1)
def load_personas() -> Personas:
    """Read the personas that come with the package."""
    content = tomllib.loads((resources.files("tipbench.simulate") / "personas.toml").read_text("utf-8"))
    personas = []
    for name, values in content.pop("persona").items():
        likes, profile = values.pop("likes"), values.pop("profile")
        personas.append(Persona(name, parameters=values, likes=likes, profile=profile))
    version, candidate = content.pop("version"), content.pop("candidate")
    return Personas(version, settings=content, candidate=candidate, personas=tuple(personas))


@dataclass(frozen=True)
class Tastes:
    """Preferences of users for categories, as categories × users."""

    utility: Floats  # added to the utility of a category's tips
    log_dwell: Floats  # logarithm of the median dwell in seconds
    completion_reward: Floats  # mean reward of a completion


@dataclass(frozen=True)
class Round:
    """One decision of every user: the offered candidates, their true mean rewards, and the random numbers.

    `hour`, `open_tasks` and `arrives` have one entry per user, `hour_cos_sin` two. Other arrays are candidates × users.
    """

    number: int
    weekday: int  # Monday is 0
    hour: Floats
    hour_cos_sin: Floats  # cosine and sine of the hour's angle
    open_tasks: Ints
    category: Ints
    is_overdue: Ints
    age_days: Ints
    priority: Ints
    composite: Floats
    slot_hour: Ints
    effort_min: Ints
    mean_reward: Floats  # the true one
    action_cdf: tuple[Floats, ...]  # cumulative probabilities of ACTIONS without the last; empty in the linear world
    log_dwell: Floats  # logarithm of the median dwell in seconds; empty in the linear world
    action_uniform: Floats  # uniform random numbers that decide the action
    dwell_uniform: Floats  # uniform random numbers that decide the dwell
    arrives: NDArray[np.bool_]  # whether the reward reaches the policy


@dataclass(frozen=True)
class Outcome:
    """The response of each user to the chosen tip."""

    action: Ints | None  # index into ACTIONS; None in the linear world, which has rewards only
    dwell_ms: Floats  # whole milliseconds; NaN unless completed
    reward: Floats
    regret: Floats  # mean reward of the best candidate − mean reward of the chosen one


class World:
    """The users and rounds of one seed."""

    def __init__(self, name: WorldName | str, seed: int, n_users: int, n_rounds: int) -> None:
        self.name = WorldName(name)
        self.seed = seed
        self.n_rounds = n_rounds
        self.personas = load_personas()
        self.n_candidates = int(self.personas.settings["candidates"])
        self.persona: Ints = np.arange(n_users) % len(self.personas.personas)  # of each user, as an index
        self._parameters: dict[str, Floats] = {}  # cache of _per_user
        self._user_index = np.arange(n_users)
        # Of each user: 1 number for the offset of the base utility, 3 for the profile, 2 per category for the tastes.
        n_tastes = 2 * len(self.personas.categories)
        normal = np.random.default_rng((seed, _USER_STREAM)).standard_normal((n_users, 4 + n_tastes)).T
        offset = self._per_user("spread") * normal[0]
        self.profile = self._make_profile(offset, normal[1:4])  # PROFILE_KEYS × users
        self._base = self._per_user("base") + offset
        self._tastes = self._draw_tastes(normal[4:])
        drift_normal = np.random.default_rng((seed, _DRIFT_STREAM)).standard_normal((n_users, n_tastes)).T
        self._later_tastes = self._draw_tastes(drift_normal) if self.name is WorldName.DRIFT else self._tastes
        # The linear world has no drift, so it can use the drift's numbers for its coefficients.
        self._linear_coefficients = np.array(_LINEAR_SCALES)[:, None] * np.tanh(drift_normal[: len(_LINEAR_SCALES)])
        self._task_table, self._tip_table = _utility_tables(self.personas)
        self._preferred_hour_cos_sin = _cos_sin(self._per_user("preferred_hour"))
        self._slot_hour_cos_sin = _cos_sin(np.array(self.personas.candidate["slot_hours"]))

    def __len__(self) -> int:
        """Return the number of users."""
        return len(self.persona)

    def draws(self, number: int) -> Floats:
        """Return a uniform number in [0, 1) for each user. It decides the policy's random choice in this round."""
        return np.random.default_rng((self.seed, _DRAW_STREAM, number)).random(len(self))

    def flat_index(self, rows: Ints) -> Ints:
        """Return indices into a flattened array of rows × users, for row numbers whose last axis is the user."""
        return np.asarray(rows * len(self) + self._user_index)

    def _per_user(self, key: str) -> Floats:
        """Return the parameter `key` of every user's persona."""
        if key not in self._parameters:
            self._parameters[key] = np.asarray(self.personas.column(key)[self.persona], dtype=np.float64)
        return self._parameters[key]

    def _make_profile(self, offset: Floats, normal: Floats) -> Floats:
        """Return each user's profile: that of the persona plus random deviations, whose size is an assumption."""
        table = [[persona.profile[key] for key in PROFILE_KEYS] for persona in self.personas.personas]
        completed, dismissed, dwell, hour, volume = np.array(table, dtype=np.float64)[self.persona].T
        dwell_normal, hour_normal, volume_normal = normal
        # The offset of the base utility changes the rates too: the higher, the more completions and fewer dismissals.
        return np.stack(
            [
                _sigmoid(_logit(completed) + 0.8 * offset),
                _sigmoid(_logit(dismissed) - 0.8 * offset),
                dwell * np.exp(0.2 * dwell_normal),
                (hour + 0.5 * hour_normal) % 24,
                np.round(volume * np.exp(0.3 * volume_normal)),
            ]
        )

    def _draw_tastes(self, normal: Floats) -> Tastes:
        utility_normal, dwell_normal = np.split(normal, 2)
        log_dwell = np.tile(np.log(self._per_user("dwell_s")), (len(dwell_normal), 1))
        if self.name is WorldName.NULL:
            log_dwell = np.full_like(log_dwell, log_dwell.mean())
        if self.name in (WorldName.NO_TASTE, WorldName.NULL):
            return Tastes(np.zeros_like(utility_normal), log_dwell, _mean_completion_reward(log_dwell))
        likes = [
            [persona.likes.get(category, 0.0) for persona in self.personas.personas]
            for category in self.personas.categories
        ]
        utility = np.array(likes)[:, self.persona] + self._per_user("taste") * utility_normal
        log_dwell = log_dwell + _DWELL_TASTE * dwell_normal
        return Tastes(utility, log_dwell, _mean_completion_reward(log_dwell))

    def round(self, number: int) -> Round:
        """Return the decision that every user faces in this round."""
        settings, candidate, n_candidates = self.personas.settings, self.personas.candidate, self.n_candidates
        # Of each user: the hour, the open tasks and seven properties of each candidate.
        rng = np.random.default_rng((self.seed, _OFFER_STREAM, number))
        integers = rng.integers(0, _RAW_LEVELS, (len(self), 2 + 7 * n_candidates), dtype=np.uint16)
        raw = np.ascontiguousarray(integers.T).astype(np.int64)
        raw_hour, raw_open_tasks = raw[:2]
        properties = raw[2:].reshape(7, n_candidates, len(self))  # properties × candidates × users
        raw_category, raw_overdue, raw_age, raw_priority, raw_composite, raw_slot, raw_effort = properties
        # Of each user: whether the reward arrives, and the action and the dwell for each candidate.
        rng = np.random.default_rng((self.seed, _OUTCOME_STREAM, number))
        uniform = rng.random((len(self), 1 + 2 * n_candidates)).T
        arrival_uniform = uniform[0]
        action_uniform, dwell_uniform = uniform[1:].reshape(2, n_candidates, len(self))
        first, last = settings["first_hour"], settings["last_hour"]
        hour = np.floor((first + (last - first) * raw_hour / _RAW_LEVELS) * 60) / 60  # whole minutes
        hour_cos_sin = _cos_sin(hour)
        open_tasks = 1 + _pick(raw_open_tasks, candidate["most_open_tasks"])
        category = _pick(raw_category, len(self.personas.categories))
        overdue = (raw_overdue < candidate["overdue"] * _RAW_LEVELS).astype(np.int64)
        ages = _age_quantiles(candidate["mean_age_days"], candidate["longest_age_days"])
        age = ages.take(_pick(raw_age, _AGE_QUANTILES))
        priority = np.ones_like(category)
        for cumulative_share in np.cumsum(candidate["priorities"])[:-1]:
            priority += raw_priority >= cumulative_share * _RAW_LEVELS
        low, high = candidate["lowest_composite"], candidate["highest_composite"]
        composite_step = _pick(raw_composite, int(_STEPS_PER_POINT * (high - low)) + 1)
        slot_index = _pick(raw_slot, len(candidate["slot_hours"]))
        effort_index = _pick(raw_effort, len(candidate["efforts_min"]))
        lost_share = settings["lost_rewards"] if self.name is WorldName.LOSSY else 0.0
        action_cdf: tuple[Floats, ...] = ()
        log_dwell = np.empty(0)
        if self.name is WorldName.LINEAR:
            mean = self._linear_mean(hour_cos_sin, overdue, age, priority)
        else:
            tastes = self._later_tastes if number >= self.n_rounds // 2 else self._tastes
            taste_index = self.flat_index(category)
            if self.name is WorldName.NULL:
                utility = np.full(slot_index.shape, float(self.personas.column("base").mean()))
            else:
                busy = (open_tasks > _BUSY_TASKS).astype(np.int64)
                utility = self._time_utility(hour_cos_sin, slot_index)
                utility += _look_up(self._task_table, self.persona, overdue, priority - 1, age)
                utility += _look_up(self._tip_table, self.persona, busy, effort_index, composite_step)
            utility += tastes.utility.take(taste_index)
            mean, action_cdf = self._response(utility, tastes.completion_reward.take(taste_index))
            log_dwell = tastes.log_dwell.take(taste_index)
        return Round(
            number=number,
            weekday=number // int(settings["decisions_per_day"]) % 7,
            hour=hour,
            hour_cos_sin=hour_cos_sin,
            open_tasks=open_tasks,
            category=category,
            is_overdue=overdue,
            age_days=age,
            priority=priority,
            composite=low + composite_step / _STEPS_PER_POINT,
            slot_hour=np.array(candidate["slot_hours"]).take(slot_index),
            effort_min=np.array(candidate["efforts_min"]).take(effort_index),
            mean_reward=mean,
            action_cdf=action_cdf,
            log_dwell=log_dwell,
            action_uniform=action_uniform,
            dwell_uniform=dwell_uniform,
            arrives=arrival_uniform >= lost_share,
        )

    def _time_utility(self, hour_cos_sin: Floats, slot_index: Ints) -> Floats:
        """Return each user's base utility plus the utility of the hour and of each candidate's slot."""
        hour_cos, hour_sin = hour_cos_sin
        preferred_cos, preferred_sin = self._preferred_hour_cos_sin
        hour_match = preferred_cos * hour_cos + preferred_sin * hour_sin
        by_hour = self._base + self._per_user("hour") * np.exp(4 * (hour_match - 1))
        slot_match = np.maximum(self._slot_hour_cos_sin.T @ hour_cos_sin, 0.0)  # slots × users
        by_slot = by_hour + self._per_user("slot") * slot_match**2
        return np.asarray(by_slot.take(self.flat_index(slot_index)))

    def _response(self, utility: Floats, completion_reward: Floats) -> tuple[Floats, tuple[Floats, ...]]:
        """Return the mean reward and the `action_cdf` of each candidate; personas.toml has the formula."""
        snooze, dismiss = self._per_user("snooze"), self._per_user("dismiss")
        if self.name is WorldName.NULL:
            snooze, dismiss = np.full_like(snooze, snooze.mean()), np.full_like(dismiss, dismiss.mean())
        completed, snoozed, dismissed = np.exp(utility), np.exp(snooze), np.exp(dismiss - 0.8 * utility)
        scale = 1 / (completed + snoozed + dismissed + 1.0)  # from weights to probabilities; ignored has the weight 1
        completed, snoozed, dismissed = completed * scale, snoozed * scale, dismissed * scale
        completed_or_snoozed = completed + snoozed
        snooze_reward, dismiss_reward = REWARD_BY_ACTION["snoozed"], REWARD_BY_ACTION["dismissed"]
        mean = completed * completion_reward + snooze_reward * snoozed + dismiss_reward * dismissed
        return mean, (completed, completed_or_snoozed, completed_or_snoozed + dismissed)

    def _linear_mean(self, hour_cos_sin: Floats, overdue: Ints, age: Ints, priority: Ints) -> Floats:
        hour_cos, hour_sin = hour_cos_sin
        by_sin, by_cos, by_overdue, by_age, by_priority = self._linear_coefficients
        task = by_overdue * overdue + by_age * np.minimum(age / MAX_AGE_DAYS, 1.0) + by_priority * (priority - 1) / 3
        return np.asarray(by_sin * hour_sin + by_cos * hour_cos + task)

    def outcome(self, round_: Round, chosen: Ints) -> Outcome:
        """Return the response of each user to the chosen candidate."""
        chosen_index = self.flat_index(chosen)
        mean, uniform = round_.mean_reward.take(chosen_index), round_.action_uniform.take(chosen_index)
        regret = round_.mean_reward.max(axis=0) - mean
        if not round_.action_cdf:  # the linear world
            reward = mean + _LINEAR_NOISE * (uniform - 0.5)
            return Outcome(action=None, dwell_ms=np.full(len(self), np.nan), reward=reward, regret=regret)
        action = np.zeros(len(self), dtype=np.int64)
        for cumulative in round_.action_cdf:
            action += uniform >= cumulative.take(chosen_index)
        deviation = _DWELL_SCALE * _logit(round_.dwell_uniform.take(chosen_index))
        dwell_ms = np.round(1000 * np.exp(round_.log_dwell.take(chosen_index) + deviation))
        dwell_ms[action != COMPLETED] = np.nan
        return Outcome(action, dwell_ms, rewards(action, dwell_ms), regret)


def rewards(action: Ints, dwell_ms: Floats) -> Floats:
    """Return the reward of each action by the rules of `serve.policy`. Only completed actions have a dwell."""
    # NaN, a missing dwell, sorts after all limits; as the last limit (infinity) is left out, it gets the last index.
    by_dwell = _DWELL_REWARDS.take(np.searchsorted(_DWELL_LIMITS_MS[:-1], dwell_ms, side="right"))
    return np.where(action == COMPLETED, by_dwell, _ACTION_REWARDS.take(action))


def _mean_completion_reward(log_dwell: Floats) -> Floats:
    """Return the mean reward of a completion; `log_dwell` is the log median of its log-logistic dwell in seconds."""
    # The reward of the longest dwells, plus for each limit: the probability of a dwell below it × the extra reward.
    _, last_reward = REWARD_BY_DWELL[-1]
    mean = np.full(log_dwell.shape, last_reward)
    for (limit_ms, reward), (_, next_reward) in pairwise(REWARD_BY_DWELL):
        probability_below = _sigmoid((np.log(limit_ms / 1000) - log_dwell) / _DWELL_SCALE)
        mean += (reward - next_reward) * probability_below
    return mean


def _utility_tables(personas: Personas) -> tuple[Floats, Floats]:
    """Return utilities of tasks (persona × overdue × priority × age) and tips (persona × busy × effort × composite)."""

    def parameter(key: str) -> Floats:
        return personas.column(key)[:, None, None, None]

    candidate = personas.candidate
    overdue, priority = np.arange(2)[:, None, None], np.arange(4)[:, None] / 3
    age = np.arange(candidate["longest_age_days"] + 1)
    task = (
        parameter("overdue") * overdue * (1 + priority) / 2
        - parameter("priority_curve") * (priority - parameter("priority_peak")) ** 2
        + parameter("age") * np.tanh(age / 7)
    )
    busy, effort = np.arange(2)[:, None, None], np.array(candidate["efforts_min"])[:, None]
    step = 1 / _STEPS_PER_POINT
    composite = np.arange(candidate["lowest_composite"], candidate["highest_composite"] + step, step)
    quality = (composite - COMPOSITE_MIDDLE) / COMPOSITE_HALF_RANGE
    tip = parameter("load") * busy * (1 - effort / 15) + parameter("quality") * (quality - quality**3 / 3)
    return task, tip


def _look_up(table: Floats, *indices: Ints) -> Floats:
    """Return the entries of the table with these indices; indexing the flattened table is faster."""
    flat_index, *others = indices
    for size, index in zip(table.shape[1:], others, strict=True):
        flat_index = flat_index * size + index
    return np.asarray(table.take(flat_index))


@lru_cache(maxsize=8)
def _age_quantiles(mean_days: float, longest_days: int) -> Ints:
    """Return equally likely ages of a task in whole days, from an exponential distribution."""
    shares = (np.arange(_AGE_QUANTILES) + 0.5) / _AGE_QUANTILES
    return np.minimum(-mean_days * np.log1p(-shares), longest_days).astype(np.int64)


def _pick(raw: Ints, count: int) -> Ints:
    """Map random integers below _RAW_LEVELS to 0 … count − 1."""
    return (raw * count) >> _RAW_BITS


def _cos_sin(hours: Floats) -> Floats:
    # The scalar product of two hours is 1 if they are equal, and −1 if they are twelve hours apart.
    angle = 2 * np.pi / 24 * hours
    return np.stack([np.cos(angle), np.sin(angle)])


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-values)))


def _logit(share: Floats) -> Floats:
    share = np.clip(share, 1e-12, 1 - 1e-12)
    return np.asarray(np.log(share / (1 - share)))
