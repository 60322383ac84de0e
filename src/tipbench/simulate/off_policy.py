"""Off-policy evaluation: estimates the value of a target policy from the logged decisions of another policy.

π(a) is the target policy's probability of the candidate a, r the reward, and q̂ a reward model. The importance weight w
is π(chosen candidate) divided by the logged probability of the chosen candidate.

    IPS    mean of w·r                                      Horvitz and Thompson 1952
    SNIPS  Σ w·r / Σ w                                      Swaminathan and Joachims 2015
    DM     mean of Σₐ π(a)·q̂(a)                             as biased as q̂, so it is reported but never decides
    DR     mean of Σₐ π(a)·q̂(a) + w·(r − q̂(chosen))         Dudík, Langford and Li 2011

Decisions of one user are not independent, so intervals are clustered by user (linearised, Student-t).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import nan, sqrt
from typing import Any

import numpy as np

from tipbench.compare.statistics import Estimate, t_quantile
from tipbench.errors import NotEnoughData, UsageError
from tipbench.serve.event_log import Entry
from tipbench.serve.features import hour_of
from tipbench.serve.policy import Policy, Ridge
from tipbench.serve.prior import Prior
from tipbench.serve.request import parse_time
from tipbench.serve.tallies import Tallies
from tipbench.simulate.world import Floats, Ints

FOLDS = 5  # groups of users, for cross-fitting the reward model
MIN_TIPS = 30  # tips needed for a rank correlation
_BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True)
class LoggedDecisions:
    """Decisions with rewards; each array has one value per decision, in the order in which the rewards were logged."""

    user: Ints
    reward: Floats
    logged_probability: Floats  # of the chosen candidate, under the policy that served it
    target_probability: Floats  # of the chosen candidate, under the target policy
    q_chosen: Floats  # q̂ of the chosen candidate
    q_target: Floats  # Σₐ π(a)·q̂(a)

    @property
    def weights(self) -> Floats:
        """Importance weight w of each decision."""
        return np.asarray(self.target_probability / self.logged_probability)

    @property
    def doubly_robust(self) -> Floats:
        """Doubly robust value of each decision."""
        return np.asarray(self.q_target + self.weights * (self.reward - self.q_chosen))


def clustered_mean(values: Floats, user: Ints, weights: Floats | None = None) -> Estimate:
    """Return the (weighted) mean with an interval clustered by user.

    Raises NotEnoughData if there are no values or if all weights are 0.
    """
    if not len(values):
        raise NotEnoughData("There is no decision with a reward to evaluate. Serve tips and send rewards first.")
    weights = np.ones_like(values) if weights is None else weights
    total = float(weights.sum())
    if total <= 0:
        raise NotEnoughData("Every logged choice has probability 0 under the target policy, so it cannot be evaluated.")
    mean = float((weights * values).sum() / total)
    _, cluster = np.unique(user, return_inverse=True)
    n_users = int(cluster.max()) + 1
    if n_users < 2:
        return Estimate(mean, ci_low=None, ci_high=None, sd=None, n=n_users)
    influence = np.bincount(cluster, weights * (values - mean)) / total  # of each user on the mean
    se = sqrt(n_users / (n_users - 1) * float((influence**2).sum()))
    half_width = t_quantile(0.975, n_users - 1) * se
    # Estimate computes its standard error as sd / √n.
    return Estimate(mean, ci_low=mean - half_width, ci_high=mean + half_width, sd=se * sqrt(n_users), n=n_users)


def gain(log: LoggedDecisions) -> Estimate:
    """Return the doubly robust value of the target minus the mean logged reward, on the same decisions."""
    return clustered_mean(log.doubly_robust - log.reward, log.user)


ESTIMATORS: dict[str, Callable[[LoggedDecisions], Estimate]] = {
    "IPS": lambda log: clustered_mean(log.weights * log.reward, log.user),
    "SNIPS": lambda log: clustered_mean(log.reward, log.user, weights=log.weights),
    "DM": lambda log: clustered_mean(log.q_target, log.user),
    "DR": lambda log: clustered_mean(log.doubly_robust, log.user),
}


@dataclass(frozen=True)
class WeightDiagnostics:
    """Diagnostics of the weights: their mean should be near 1, and the effective sample large."""

    mean_weight: Estimate
    largest_weight: float
    effective_sample: float  # (Σw)²/Σw²: the log is as informative as this many decisions of the target policy
    n_decisions: int

    @property
    def is_plausible(self) -> bool:
        """True if the mean weight is within 3 clustered standard errors of 1."""
        error = abs(self.mean_weight.mean - 1)
        if error <= 1e-9:  # a rounding error; the weights of two equal policies have a standard error of 0
            return True
        return self.mean_weight.se is not None and error <= 3 * self.mean_weight.se


def weight_diagnostics(log: LoggedDecisions) -> WeightDiagnostics:
    """Compute the diagnostics of the importance weights."""
    weights = log.weights
    squares = float((weights**2).sum())
    return WeightDiagnostics(
        mean_weight=clustered_mean(weights, log.user),
        largest_weight=float(weights.max()),
        effective_sample=float(weights.sum()) ** 2 / squares if squares else 0.0,
        n_decisions=len(weights),
    )


# From the event log


@dataclass
class ReplayedDecision:
    """A logged decision, with the features and probabilities that the target policy would have used."""

    user: int  # index of the user
    policy: str  # the policy that made the decision
    chosen: int  # index of the chosen candidate
    logged_probability: float  # of the chosen candidate
    target_probabilities: list[float]  # of all candidates
    features: Floats  # a matrix: candidates × features
    hour: float  # of the day
    chosen_candidate: Mapping[str, Any]
    reward: float = nan  # until the reward is read
    action: str | None = None


def replay(entries: Iterable[Entry], target: Policy, prior: Prior | None = None) -> list[ReplayedDecision]:
    """Return the rewarded decisions of the log, in the order in which their rewards were logged.

    The target's probabilities are computed from the logged requests, after learning the user's earlier rewards. Raises
    UsageError for decisions without valid probabilities of all candidates.
    """
    users: dict[str, int] = {}  # index of each user
    ridges: dict[str, Ridge] = {}  # by user
    tallies: dict[str, Tallies] = {}  # by user
    unrewarded: dict[tuple[str, str], ReplayedDecision] = {}  # by user and event
    rewarded: list[ReplayedDecision] = []
    for entry in entries:
        user = entry.user
        key = (user, entry.event or "")
        if entry.kind == "reset":
            ridges.pop(user, None)
            tallies.pop(user, None)
            unrewarded = {(owner, event): each for (owner, event), each in unrewarded.items() if owner != user}
        elif entry.kind == "score":  # a decision
            body, candidates = entry.body, entry.body["request"]["candidates"]
            probabilities = body.get("probabilities")
            if not probabilities or len(probabilities) != len(candidates) or not all(0 < p <= 1 for p in probabilities):
                raise UsageError(
                    f"Entry {entry.seq} of the event log has no probabilities, so no other policy can be evaluated "
                    "from it. Use decisions that `tipbench serve` logged."
                )
            chosen = [candidate["tip_id"] for candidate in candidates].index(body["chosen"])
            moment = parse_time(body["at"])
            features = target.features.matrix(body["request"], candidates, moment, tallies.setdefault(user, Tallies()))
            ridge = ridges.setdefault(user, target.ridge(prior))
            unrewarded[key] = ReplayedDecision(
                user=users.setdefault(user, len(users)),
                policy=entry.policy or "",
                chosen=chosen,
                logged_probability=probabilities[chosen],
                target_probabilities=target.probabilities(target.scores(features, ridge)),
                features=features,
                hour=hour_of(moment),
                chosen_candidate=candidates[chosen],
            )
        elif entry.kind == "reward" and key in unrewarded:
            decision = unrewarded.pop(key)
            decision.reward = float(entry.reward or 0.0)
            decision.action = entry.body.get("action")
            ridges[user].update(decision.features[decision.chosen], decision.reward)
            category = decision.chosen_candidate.get("category")
            tallies[user].add(category, decision.action, entry.body.get("dwell_ms"), decision.hour)
            rewarded.append(decision)
    return rewarded


def logged_decisions(replayed: Iterable[ReplayedDecision], logged_by: str) -> LoggedDecisions:
    """Return the decisions that the policy `logged_by` made, with estimates of a reward model.

    The model is a ridge regression on the target's features (λ = 1). A user's rewards are estimated from other users.
    Raises NotEnoughData if the policy has no decisions.
    """
    decisions = [decision for decision in replayed if decision.policy == logged_by]
    if not decisions:
        raise NotEnoughData(f"The log has no decision of {logged_by} with a reward. Serve tips and send rewards first.")
    user = np.array([decision.user for decision in decisions])
    reward = np.array([decision.reward for decision in decisions])
    # The features of the chosen candidates, and 1 for the intercept.
    x = np.array([np.append(decision.features[decision.chosen], 1.0) for decision in decisions])
    fold = user % FOLDS
    q_chosen, q_target = np.zeros(len(decisions)), np.zeros(len(decisions))
    for held_out in range(FOLDS):
        training = x[fold != held_out]
        gram = training.T @ training + np.eye(x.shape[1])
        theta = np.linalg.solve(gram, training.T @ reward[fold != held_out])
        for index in np.flatnonzero(fold == held_out):
            decision = decisions[index]
            q = decision.features @ theta[:-1] + theta[-1]
            q_chosen[index] = q[decision.chosen]
            q_target[index] = np.dot(decision.target_probabilities, q)
    logged_probability = np.array([decision.logged_probability for decision in decisions])
    target_probability = np.array([decision.target_probabilities[decision.chosen] for decision in decisions])
    return LoggedDecisions(user, reward, logged_probability, target_probability, q_chosen, q_target)


# Validity of the judges: does judged quality predict completion?


@dataclass(frozen=True)
class Validity:
    """Rank correlation over tips between a judged scale and the completion rate."""

    scale: str
    tips: int  # number of tips
    correlation: float | None  # None with fewer than MIN_TIPS, or if all scores or all rates are equal
    ci_low: float | None
    ci_high: float | None


def rank_correlation(scale: str, judged: Floats, completion_rates: Floats) -> Validity:
    """Return Spearman's rank correlation over tips, with a 95 % bootstrap interval."""
    n_tips = len(judged)
    if n_tips < MIN_TIPS or np.ptp(judged) == 0 or np.ptp(completion_rates) == 0:
        return Validity(scale, n_tips, correlation=None, ci_low=None, ci_high=None)
    from scipy.stats import rankdata

    def correlation(sampled: Ints) -> Floats:
        """Return the correlation over the tips with these indices; for a matrix, one correlation per row."""
        x, y = rankdata(judged[sampled], axis=-1), rankdata(completion_rates[sampled], axis=-1)
        x -= x.mean(axis=-1, keepdims=True)
        y -= y.mean(axis=-1, keepdims=True)
        norm = np.sqrt((x**2).sum(axis=-1) * (y**2).sum(axis=-1))
        return np.asarray((x * y).sum(axis=-1) / np.where(norm > 0, norm, np.nan))

    samples = np.random.default_rng(0).integers(0, n_tips, (_BOOTSTRAP_SAMPLES, n_tips))
    low, high = np.nanquantile(correlation(samples), [0.025, 0.975])
    return Validity(scale, n_tips, float(correlation(np.arange(n_tips))), float(low), float(high))


def judge_validity(replayed: Iterable[ReplayedDecision], scales: Mapping[str, Mapping[str, float]]) -> list[Validity]:
    """Return the rank correlation of each judged scale with the completion rate of the tips.

    `scales` has the scores by scale and tip id. A missing composite is taken from the logged candidate.
    """
    completed: dict[str, list[bool]] = {}  # by tip id: whether the tip was completed, each time it was served
    judged: dict[str, dict[str, float]] = {"composite": {}, **{scale: dict(scores) for scale, scores in scales.items()}}
    for decision in replayed:
        if decision.action is None:  # the reward was sent without an action
            continue
        tip = str(decision.chosen_candidate["tip_id"])
        completed.setdefault(tip, []).append(decision.action == "completed")
        if decision.chosen_candidate.get("composite") is not None:
            judged["composite"].setdefault(tip, float(decision.chosen_candidate["composite"]))
    validities = []
    for scale, scores in judged.items():
        tips = sorted(set(scores) & set(completed))
        rates = np.array([sum(completed[tip]) / len(completed[tip]) for tip in tips])
        validities.append(rank_correlation(scale, np.array([scores[tip] for tip in tips]), rates))
    return validities
