"""Features: a candidate, the time and the user as numbers in [−1, 1]. A missing value is 0.

What policies have learned depends on the formulas: a changed one needs a new version of its feature set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from tipbench.serve.request import Candidate, DecisionRequest, ProfileFeatures
from tipbench.serve.tallies import LOG_FULL_VOLUME, Tallies

Floats = NDArray[np.float64]

# Features are scaled by constants: running statistics would change the meaning of what policies have learned.
MAX_AGE_DAYS = 30.0
MAX_DWELL_MS = 600_000.0  # 10 minutes
MAX_OPEN_TASKS = 20.0
MAX_EFFORT_MIN = 30.0
COMPOSITE_MIDDLE, COMPOSITE_HALF_RANGE = 9.5, 7.5  # composites are from 2 to 17

_V1_NAMES = ("hour_sin", "hour_cos", "is_overdue", "task_age_norm", "priority_norm", "dow_sin", "dow_cos")
_V2_NAMES = (
    *_V1_NAMES,
    "completion_rate",
    "dismiss_rate",
    "mean_dwell_norm",
    "preferred_hour_alignment",
    "tip_volume_norm",
)
_V3_NAMES = (
    *("bias", "is_overdue", "task_age_norm", "priority_norm", "quality", "slot_match", "load_fit"),
    # The user's tallies of the candidate's category
    *("category_completion", "category_dismissal", "category_dwell", "category_hour_alignment", "category_volume"),
)

Compute = Callable[[DecisionRequest, list[Candidate], datetime, Tallies], list[float]]


@dataclass(frozen=True)
class FeatureSet:
    """The features of a policy: their names, and the function that computes them."""

    version: str
    names: tuple[str, ...]
    compute: Compute  # returns the rows of all candidates as one flat list

    @property
    def dim(self) -> int:
        """Number of features."""
        return len(self.names)

    def matrix(self, request: DecisionRequest, candidates: list[Candidate], at: datetime, tallies: Tallies) -> Floats:
        """Return one row per candidate. `at` is the user's local time.

        v3 uses the profile's `by_category`, if given, instead of `tallies`.
        """
        values = self.compute(request, candidates, at, tallies)
        return np.fromiter(values, np.float64, len(values)).reshape(len(candidates), len(self.names))


def hour_of(at: datetime) -> float:
    """Return the time of day in hours: 8:30 is 8.5."""
    return at.hour + at.minute / 60 + (at.second + at.microsecond / 1e6) / 3600


def time_features(at: datetime) -> tuple[float, float, float, float]:
    """Return hour_sin, hour_cos, dow_sin and dow_cos; Monday is day 0."""
    hour_angle, day_angle = math.tau * hour_of(at) / 24, math.tau * at.weekday() / 7
    return math.sin(hour_angle), math.cos(hour_angle), math.sin(day_angle), math.cos(day_angle)


def task_features(candidate: Candidate) -> tuple[float, float, float]:
    """Return is_overdue, task_age_norm and priority_norm; 0 without a task."""
    task = candidate.get("task")
    if not task:
        return 0.0, 0.0, 0.0
    age = task.get("age_days") or 0.0
    priority = task.get("priority") or 1  # 1 is the lowest of 4
    return (
        1.0 if task.get("is_overdue") else 0.0,
        age / MAX_AGE_DAYS if age < MAX_AGE_DAYS else 1.0,
        (priority - 1) / 3,
    )


def user_features(profile: ProfileFeatures | None, hour: float) -> tuple[float, float, float, float, float]:
    """Return the last five features of v2."""
    if not profile:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    preferred = profile.get("preferred_hour")
    return (
        profile.get("completion_rate_30d") or 0.0,
        profile.get("dismiss_rate_30d") or 0.0,
        min((profile.get("mean_dwell_ms_30d") or 0.0) / MAX_DWELL_MS, 1.0),
        0.0 if preferred is None else math.cos(math.tau * (preferred - hour) / 24),
        min(math.log1p(profile.get("tip_volume_30d") or 0) / LOG_FULL_VOLUME, 1.0),
    )


def _compute_v1(request: DecisionRequest, candidates: list[Candidate], at: datetime, tallies: Tallies) -> list[float]:  # noqa: ARG001
    hour_sin, hour_cos, dow_sin, dow_cos = time_features(at)
    values: list[float] = []
    for candidate in candidates:
        overdue, age, priority = task_features(candidate)
        values += (hour_sin, hour_cos, overdue, age, priority, dow_sin, dow_cos)
    return values


def _compute_v2(request: DecisionRequest, candidates: list[Candidate], at: datetime, tallies: Tallies) -> list[float]:  # noqa: ARG001
    hour_sin, hour_cos, dow_sin, dow_cos = time_features(at)
    shared_features = (dow_sin, dow_cos, *user_features(request.get("profile_features"), hour_of(at)))
    values: list[float] = []
    for candidate in candidates:
        overdue, age, priority = task_features(candidate)  # `*task_features(…)` takes twice as long
        values += (hour_sin, hour_cos, overdue, age, priority)
        values += shared_features
    return values


def _compute_v3(request: DecisionRequest, candidates: list[Candidate], at: datetime, tallies: Tallies) -> list[float]:
    hour = hour_of(at)
    profile = request.get("profile_features")
    if profile and (by_category := profile.get("by_category")) is not None:
        tallies = Tallies.from_values(by_category)
    open_tasks = (request.get("context") or {}).get("open_tasks")
    load = 0.0 if open_tasks is None else min(open_tasks, MAX_OPEN_TASKS) / MAX_OPEN_TASKS
    features_by_category: dict[str | None, tuple[float, ...]] = {}
    values: list[float] = []
    for candidate in candidates:
        composite, slot_hour = candidate.get("composite"), candidate.get("slot_hour")
        effort, category = candidate.get("effort_min"), candidate.get("category")
        category_features = features_by_category.get(category)
        if category_features is None:
            category_features = features_by_category[category] = tallies.features(category, hour)
        quality = 0.0 if composite is None else (composite - COMPOSITE_MIDDLE) / COMPOSITE_HALF_RANGE
        if not -1.0 <= quality <= 1.0:
            quality = math.copysign(1.0, quality)
        overdue, age, priority = task_features(candidate)
        load_fit = 0.0  # with many open tasks, positive for short tips and negative for long ones
        if effort is not None:
            load_fit = load * (1 - 2 * effort / MAX_EFFORT_MIN) if effort < MAX_EFFORT_MIN else -load
        values += (
            1.0,
            overdue,
            age,
            priority,
            quality,
            0.0 if slot_hour is None else math.cos(math.tau * (hour - slot_hour) / 24),
            load_fit,
        )
        values += category_features
    return values


FEATURES = {
    "v1": FeatureSet("features-v1/1", _V1_NAMES, _compute_v1),
    "v2": FeatureSet("features-v2/1", _V2_NAMES, _compute_v2),
    "v3": FeatureSet("features-v3/1", _V3_NAMES, _compute_v3),
}
