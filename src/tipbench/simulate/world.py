"""Simulated users, the tips they are offered and how they respond; all numbers come from personas.toml.

Everything random is drawn per (seed, round, user, candidate) before a policy chooses, so that every policy meets the
same users, candidates and outcomes (common random numbers), and more users or rounds do not change the existing ones.

The last axis of every array is the user: operations then run over users in memory order, which is what makes a
simulation fast.
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

from tipbench.serve.features import COMPOSITE_HALF_RANGE, COMPOSITE_MIDDLE
from tipbench.serve.policy import BY_ACTION, BY_DWELL

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PROFILE_KEYS = ("completion_rate_30d", "dismiss_rate_30d", "mean_dwell_ms_30d", "preferred_hour", "tip_volume_30d")
ACTIONS = ("completed", "snoozed", "dismissed", "ignored")
COMPLETED = ACTIONS.index("completed")
_ACTION_REWARDS = np.array([BY_ACTION.get(name, 0.0) for name in ACTIONS])
_DWELL_LIMITS, _DWELL_REWARDS = np.array(BY_DWELL).T
_USER_STREAM, _DRIFT_STREAM, _OFFER_STREAM, _OUTCOME_STREAM, _DRAW_STREAM = range(5)
_DWELL_SCALE = 0.6  # of the log-logistic distribution of the dwell
_DWELL_TASTE = 0.4  # standard deviation of the log median between a user's categories
_RAW_LEVELS = 2**16  # of the random integers that offers are drawn from
_AGE_QUANTILES = 1024
_LINEAR_NOISE = 0.5  # range of the uniform noise in the linear world
# Scales of the linear world's coefficients of hour_sin, hour_cos, is_overdue, task_age_norm and priority_norm.
_LINEAR_SCALES = (0.05, 0.05, 0.3, 0.3, 0.2)


class WorldName(StrEnum):
    """A variant of the simulated world."""

    STANDARD = "standard"
    NO_TASTE = "no-taste"  # categories do not matter
    NULL = "null"  # nothing matters: every tip has the same chances
    DRIFT = "drift"  # tastes are drawn again half-way
    LOSSY = "lossy"  # some rewards never arrive
    LINEAR = "linear"  # the mean reward is linear in LinUCB's features; for tests


@dataclass(frozen=True)
class Persona:
    """A type of simulated user; personas.toml explains the numbers."""

    name: str
    numbers: Mapping[str, float]
    likes: Mapping[str, float]  # by category
    profile: Mapping[str, float]  # by PROFILE_KEYS


@dataclass(frozen=True)
class Personas:
    """The content of personas.toml."""

    version: str
    settings: Mapping[str, Any]
    candidate: Mapping[str, Any]
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
        """Return one number of every persona."""
        return np.array([persona.numbers[key] for persona in self.personas])


@lru_cache(maxsize=1)
def load_personas() -> Personas:
    """Read the personas that come with the package."""
    raw = tomllib.loads((resources.files("tipbench.simulate") / "personas.toml").read_text("utf-8"))
    personas = tuple(
        Persona(name, {k: v for k, v in row.items() if k not in ("likes", "profile")}, row["likes"], row["profile"])
        for name, row in raw.pop("persona").items()
    )
    return Personas(raw.pop("version"), raw, raw.pop("candidate"), personas)


@dataclass(frozen=True)
class Tastes:
    """What users like; categories × users."""

    utility: Floats
    log_dwell: Floats  # logarithm of the median dwell in seconds
    value: Floats  # mean reward of a completion


@dataclass(frozen=True)
class Round:
    """One decision of every user: the offer, the true mean reward of each candidate, and the random numbers.

    `hour`, `clock`, `open_tasks` and `arrives` have one entry per user, the other arrays are candidates × users.
    """

    number: int
    weekday: int  # Monday is 0
    hour: Floats
    clock: Floats  # cosine and sine of the hour's angle × users
    open_tasks: Ints
    category: Ints
    is_overdue: Ints
    age_days: Ints
    priority: Ints
    composite: Floats
    slot_hour: Ints
    effort_min: Ints
    mean: Floats
    action_cdf: tuple[Floats, ...]  # cumulative probabilities of completed, snoozed, dismissed; empty if linear
    log_dwell: Floats
    action_uniform: Floats  # uniform random numbers that decide the action
    dwell_uniform: Floats
    arrives: NDArray[np.bool_]  # whether the reward reaches the policy


@dataclass(frozen=True)
class Outcome:
    """What the users did with the chosen tips."""

    action: Ints | None  # index into ACTIONS; None in the linear world, which has rewards only
    dwell_ms: Floats  # whole milliseconds; NaN unless completed
    reward: Floats
    regret: Floats  # best candidate's mean reward − that of the chosen


class World:
    """Users and rounds of one seed; with `outcome_seed`, the same users and offers with other random outcomes."""

    def __init__(
        self, name: WorldName | str, seed: int, users: int, rounds: int, *, outcome_seed: int | None = None
    ) -> None:
        self.name = WorldName(name)
        self.seed = seed
        self.rounds = rounds
        self.personas = load_personas()
        self.candidates = int(self.personas.settings["candidates"])
        self.persona: Ints = np.arange(users) % len(self.personas.personas)
        self._numbers: dict[str, Floats] = {}
        self._outcome_seed = seed if outcome_seed is None else outcome_seed
        self._columns = np.arange(users)
        categories = len(self.personas.categories)
        normal = np.random.default_rng((seed, _USER_STREAM)).standard_normal((users, 4 + 2 * categories)).T
        offset = self._per_user("spread") * normal[0]
        self.profile = self._make_profile(offset, normal[1:4])  # PROFILE_KEYS × users
        self._base = self._per_user("base") + offset
        self._tastes = self._draw_tastes(normal[4:])
        later = np.random.default_rng((seed, _DRIFT_STREAM)).standard_normal((users, 2 * categories)).T
        self._later_tastes = self._draw_tastes(later) if self.name is WorldName.DRIFT else self._tastes
        self._theta = np.array(_LINEAR_SCALES)[:, None] * np.tanh(later[:5])
        self._tables = _response_tables(self.personas)
        self._preferred = _clock(self._per_user("preferred_hour"))
        self._slots = _clock(np.array(self.personas.candidate["slot_hours"]))

    def __len__(self) -> int:
        """Return the number of users."""
        return len(self.persona)

    def draws(self, number: int) -> Floats:
        """Return a number in [0, 1) for each user, with which its policy draws from its probabilities."""
        return np.random.default_rng((self.seed, _DRAW_STREAM, number)).random(len(self))

    def _per_user(self, key: str) -> Floats:
        """Return a persona's number for every user."""
        if key not in self._numbers:
            self._numbers[key] = np.asarray(self.personas.column(key)[self.persona], dtype=np.float64)
        return self._numbers[key]

    def _make_profile(self, offset: Floats, normal: Floats) -> Floats:
        """Return each user's `profile_features`: the persona's, shifted by the user's offset."""
        table = [[persona.profile[key] for key in PROFILE_KEYS] for persona in self.personas.personas]
        completed, dismissed, dwell, hour, volume = np.array(table, dtype=np.float64)[self.persona].T
        return np.stack(
            [
                _sigmoid(_logit(completed) + 0.8 * offset),
                _sigmoid(_logit(dismissed) - 0.8 * offset),
                dwell * np.exp(0.2 * normal[0]),
                (hour + 0.5 * normal[1]) % 24,
                np.round(volume * np.exp(0.3 * normal[2])),
            ]
        )

    def _draw_tastes(self, normal: Floats) -> Tastes:
        """Return the users' tastes from standard normal numbers."""
        half = len(normal) // 2
        log_dwell = np.log(self._per_user("dwell_s")) + np.zeros((half, 1))
        if self.name in (WorldName.NO_TASTE, WorldName.NULL):
            log_dwell = log_dwell.mean() + 0 * log_dwell if self.name is WorldName.NULL else log_dwell
            return Tastes(np.zeros_like(normal[:half]), log_dwell, _completion_value(log_dwell))
        likes = [[p.likes.get(name, 0.0) for p in self.personas.personas] for name in self.personas.categories]
        utility = np.array(likes)[:, self.persona] + self._per_user("taste") * normal[:half]
        log_dwell = log_dwell + _DWELL_TASTE * normal[half:]
        return Tastes(utility, log_dwell, _completion_value(log_dwell))

    def round(self, number: int) -> Round:
        """Return the decision that every user faces in this round."""
        offer, settings, k = self.personas.candidate, self.personas.settings, self.candidates
        rng = np.random.default_rng((self.seed, _OFFER_STREAM, number))
        raw = rng.integers(0, _RAW_LEVELS, (len(self), 2 + 7 * k), dtype=np.uint16)
        raw = np.ascontiguousarray(raw.T).astype(np.int64)
        uniform = np.random.default_rng((self._outcome_seed, _OUTCOME_STREAM, number)).random((len(self), 1 + 2 * k)).T
        parts = raw[2:].reshape(7, k, len(self))  # properties × candidates × users
        first, last = settings["first_hour"], settings["last_hour"]
        hour = np.floor((first + (last - first) * raw[0] / _RAW_LEVELS) * 60) / 60
        clock = _clock(hour)
        open_tasks = 1 + _pick(raw[1], offer["most_open_tasks"])
        category = _pick(parts[0], len(self.personas.categories))
        overdue = (parts[1] < offer["overdue"] * _RAW_LEVELS).astype(np.int64)
        age = _age_quantiles(offer["mean_age_days"], offer["longest_age_days"]).take(_pick(parts[2], _AGE_QUANTILES))
        priority = np.ones_like(category)
        for share in np.cumsum(offer["priorities"])[:-1]:
            priority += parts[3] >= share * _RAW_LEVELS
        low, high = offer["lowest_composite"], offer["highest_composite"]
        grade = _pick(parts[4], int(4 * (high - low)) + 1)  # the composite in quarter points above the lowest
        slot = _pick(parts[5], len(offer["slot_hours"]))
        effort = _pick(parts[6], len(offer["efforts_min"]))
        action_cdf: tuple[Floats, ...] = ()
        log_dwell = np.empty(0)
        if self.name is WorldName.LINEAR:
            mean = self._linear_mean(clock, overdue, age, priority)
        else:
            tastes = self._later_tastes if number >= self.rounds // 2 else self._tastes
            place = category * len(self) + self._columns  # in an array of categories × users
            if self.name is WorldName.NULL:
                utility = np.full(slot.shape, float(self.personas.column("base").mean()))
            else:
                utility = self._slot_utility(clock, slot) + self._task_utility(overdue, priority, age)
                utility += self._tip_utility(open_tasks, effort, grade)
            utility += tastes.utility.take(place)
            mean, action_cdf = self._response(utility, tastes.value.take(place))
            log_dwell = tastes.log_dwell.take(place)
        return Round(
            number=number,
            weekday=number // int(settings["decisions_per_day"]) % 7,
            hour=hour,
            clock=clock,
            open_tasks=open_tasks,
            category=category,
            is_overdue=overdue,
            age_days=age,
            priority=priority,
            composite=low + grade / 4,
            slot_hour=np.array(offer["slot_hours"]).take(slot),
            effort_min=np.array(offer["efforts_min"]).take(effort),
            mean=mean,
            action_cdf=action_cdf,
            log_dwell=log_dwell,
            action_uniform=uniform[1 : 1 + k],
            dwell_uniform=uniform[1 + k :],
            arrives=uniform[0] >= (settings["lost_rewards"] if self.name is WorldName.LOSSY else 0.0),
        )

    def _slot_utility(self, clock: Floats, slot: Ints) -> Floats:
        """Return the utility of the time of day and of each candidate's slot."""
        preferred = self._preferred[0] * clock[0] + self._preferred[1] * clock[1]
        common = self._base + self._per_user("hour") * np.exp(4 * (preferred - 1))
        by_slot = common + self._per_user("slot") * np.maximum(self._slots.T @ clock, 0.0) ** 2  # slots × users
        return np.asarray(by_slot.take(slot * len(self) + self._columns))

    # The tables are indexed as flat arrays, which is faster.

    def _task_utility(self, overdue: Ints, priority: Ints, age: Ints) -> Floats:
        table, _ = self._tables
        _, flags, priorities, ages = table.shape
        return np.asarray(table.take(((self.persona * flags + overdue) * priorities + priority - 1) * ages + age))

    def _tip_utility(self, open_tasks: Ints, effort: Ints, grade: Ints) -> Floats:
        _, table = self._tables
        busy = (open_tasks > 10).astype(np.int64)
        _, loads, efforts, grades = table.shape
        return np.asarray(table.take(((self.persona * loads + busy) * efforts + effort) * grades + grade))

    def _response(self, utility: Floats, value: Floats) -> tuple[Floats, tuple[Floats, ...]]:
        """Return the mean reward and `action_cdf`; personas.toml has the formula."""
        snooze, dismiss = self._per_user("snooze"), self._per_user("dismiss")
        if self.name is WorldName.NULL:
            snooze, dismiss = snooze.mean() + 0 * snooze, dismiss.mean() + 0 * dismiss
        completed, snoozed, dismissed = np.exp(utility), np.exp(snooze), np.exp(dismiss - 0.8 * utility)
        scale = 1 / (completed + snoozed + dismissed + 1.0)
        completed *= scale
        dismissed *= scale
        snoozed = snoozed * scale
        second = completed + snoozed
        mean = completed * value + BY_ACTION["snoozed"] * snoozed + BY_ACTION["dismissed"] * dismissed
        return mean, (completed, second, second + dismissed)

    def _linear_mean(self, clock: Floats, overdue: Ints, age: Ints, priority: Ints) -> Floats:
        theta = self._theta
        task = theta[2] * overdue + theta[3] * np.minimum(age / 30, 1.0) + theta[4] * (priority - 1) / 3
        return np.asarray(theta[0] * clock[1] + theta[1] * clock[0] + task)

    def outcome(self, offered: Round, chosen: Ints) -> Outcome:
        """Return what each user does with the chosen candidate."""
        place = chosen * len(self) + self._columns
        mean, uniform = offered.mean.take(place), offered.action_uniform.take(place)
        regret = offered.mean.max(axis=0) - mean
        if not offered.action_cdf:
            reward = mean + _LINEAR_NOISE * (uniform - 0.5)
            return Outcome(None, np.full(len(self), np.nan), reward, regret)
        action = np.zeros(len(self), dtype=np.int64)
        for cumulative in offered.action_cdf:
            action += uniform >= cumulative.take(place)
        spread = _DWELL_SCALE * _logit(offered.dwell_uniform.take(place))
        dwell = np.round(1000 * np.exp(offered.log_dwell.take(place) + spread))
        dwell[action != COMPLETED] = np.nan
        return Outcome(action, dwell, rewards(action, dwell), regret)


def rewards(action: Ints, dwell_ms: Floats) -> Floats:
    """Return the reward of each outcome by the table of `serve.policy`; completed ones have a dwell."""
    of_dwell = _DWELL_REWARDS.take(np.searchsorted(_DWELL_LIMITS[:-1], dwell_ms, side="right"))
    return np.where(action == COMPLETED, of_dwell, _ACTION_REWARDS.take(action))


def _completion_value(log_dwell: Floats) -> Floats:
    """Return the mean reward of a completion whose log-logistic dwell has this median."""
    total = np.full(log_dwell.shape, BY_DWELL[-1][1])
    for (limit, value), (_, later) in pairwise(BY_DWELL):
        total += (value - later) * _sigmoid((np.log(limit / 1000) - log_dwell) / _DWELL_SCALE)
    return total


def _response_tables(known: Personas) -> tuple[Floats, Floats]:
    """Return the utility of tasks (persona × overdue × priority × age) and tips (persona × busy × effort × grade)."""

    def number(key: str) -> Floats:
        return known.column(key)[:, None, None, None]

    offer = known.candidate
    overdue, priority = np.arange(2)[:, None, None], np.arange(4)[:, None] / 3
    age = np.arange(offer["longest_age_days"] + 1)
    task = (
        number("overdue") * overdue * (1 + priority) / 2
        - number("priority_curve") * (priority - number("priority_peak")) ** 2
        + number("age") * np.tanh(age / 7)
    )
    busy, effort = np.arange(2)[:, None, None], np.array(offer["efforts_min"])[:, None]
    composite = np.arange(offer["lowest_composite"], offer["highest_composite"] + 0.25, 0.25)
    quality = (composite - COMPOSITE_MIDDLE) / COMPOSITE_HALF_RANGE
    tip = number("load") * busy * (1 - effort / 15) + number("quality") * (quality - quality**3 / 3)
    return task, tip


@lru_cache(maxsize=8)
def _age_quantiles(mean_age: float, longest: int) -> Ints:
    """Return quantiles of an exponential age in whole days."""
    shares = (np.arange(_AGE_QUANTILES) + 0.5) / _AGE_QUANTILES
    return np.minimum(-mean_age * np.log1p(-shares), longest).astype(np.int64)


def _pick(raw: Ints, count: int) -> Ints:
    """Map random 16-bit numbers to 0 … count − 1."""
    return (raw * count) >> 16


def _clock(hours: Floats) -> Floats:
    """Return cosine and sine of each hour's angle; the product of two of them is the cosine of their difference."""
    angle = 2 * np.pi / 24 * hours
    return np.stack([np.cos(angle), np.sin(angle)])


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-values)))


def _logit(share: Floats) -> Floats:
    share = np.clip(share, 1e-12, 1 - 1e-12)
    return np.asarray(np.log(share / (1 - share)))
