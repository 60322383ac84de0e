"""The promotion gate: five clauses that a policy must pass before it may serve.

| clause | passes when |
|---|---|
| a simulation win | standard world: gain ≥ 0.01 reward per decision, paired by user, and lower bound > 0 |
| b no persona loses | every persona: lower bound > −0.01 (no correction for multiple tests, as all must pass) |
| c robust | drift, lossy and no-taste worlds: lower bound > −0.01 |
| d logs agree | effective sample ≥ 2000, doubly robust gain: lower bound > −0.03, mean weight close to 1 |
| e operations | fewer than 0.1 % of the shadow's calls dropped, no errors, features as logged |

A lower bound is the lower end of the two-sided 95 % interval of the gain, clustered by user. Without enough data,
clauses a to c fail; d and e are neither passed nor failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tipbench
from tipbench.compare.statistics import Estimate
from tipbench.serve.policy import POLICIES
from tipbench.serve.prior import Prior
from tipbench.serve.switches import ShadowCounts
from tipbench.simulate.off_policy import LoggedDecisions, gain, weight_diagnostics
from tipbench.simulate.simulation import Simulation, SimulationConfig, simulate
from tipbench.simulate.world import WorldName, load_personas
from tipbench.text import join_names, number, plural

MIN_GAIN = 0.01  # reward per decision
MIN_LOWER_BOUND = -0.01  # of a simulated gain, in reward per decision
MIN_LOWER_BOUND_LOGGED = -0.03  # of a gain estimated from logs
MIN_EFFECTIVE_SAMPLE = 2000  # decisions
MAX_DROPPED_SHARE = 0.001  # of the shadow calls
WORLDS = (WorldName.STANDARD, WorldName.DRIFT, WorldName.LOSSY, WorldName.NO_TASTE)


@dataclass(frozen=True)
class Size:
    """Size of the simulation in each world."""

    seeds: int = 20
    users: int = 1000
    rounds: int = 200  # decisions per user

    def __str__(self) -> str:
        return f"{self.seeds} × {self.users} × {self.rounds}"


FULL, QUICK = Size(), Size(seeds=2, users=200, rounds=100)


@dataclass(frozen=True)
class Clause:
    """One condition of the gate; `passed` is None without enough data (d and e only)."""

    name: str  # its letter and title
    passed: bool | None
    value: float | None  # the number that must be above or below the bound
    bound: float
    why: str


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    candidate: str
    baseline: str
    clauses: tuple[Clause, ...]
    simulation_only: bool
    size: Size
    at: str
    versions: Mapping[str, str | None]
    quick: bool = False
    validity: tuple[Mapping[str, Any], ...] = ()  # how well judges' scores predict which tips users complete; no clause

    @property
    def passed(self) -> bool | None:
        """False if a clause failed, True if all passed. None without enough data, and for a quick check."""
        if self.quick:
            return None
        results = [clause.passed for clause in self.clauses]
        if False in results:
            return False
        return None if None in results else True

    @property
    def exit_code(self) -> int:
        """0 for passed, 1 for failed, 3 for not enough data."""
        return {True: 0, False: 1, None: 3}[self.passed]

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        scope = " in simulation (clauses a–c; logs and operations were not checked)" if self.simulation_only else ""
        if self.quick:
            return f"No verdict: --quick simulates only {self.size}. Run the check without it before a promotion."
        if self.passed:
            return f"{self.candidate} may replace {self.baseline}{scope}."
        if self.passed is None:
            return f"Not enough data to promote {self.candidate}: see the clauses without a result."
        failed = [clause.name.split()[0] for clause in self.clauses if clause.passed is False]
        noun = "clause" if len(failed) == 1 else "clauses"
        names = join_names(failed, limit=len(failed))
        return f"{self.candidate} may not replace {self.baseline}: {noun} {names} failed{scope}."

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of `promote check --json`, also stored with the check."""
        return {
            "candidate": self.candidate,
            "baseline": self.baseline,
            "passed": self.passed,
            "text": self.text,
            "clauses": [vars(clause) for clause in self.clauses],
            "simulation_only": self.simulation_only,
            "quick": self.quick,
            "size": vars(self.size),
            "at": self.at,
            "versions": dict(self.versions),
            "validity": [dict(row) for row in self.validity],
        }


def versions(candidate: str, baseline: str, priors: Sequence[Prior] = ()) -> dict[str, str | None]:
    """Return the versions that a check is valid for. A promotion needs a check of the same versions."""
    hashes = {prior.policy: prior.hash for prior in priors}
    return {
        "candidate": POLICIES[candidate].version,
        "baseline": POLICIES[baseline].version,
        "candidate_prior": hashes.get(candidate),
        "baseline_prior": hashes.get(baseline),
        "personas": load_personas().version,
        "tipbench": tipbench.__version__,
    }


def simulation_clauses(
    candidate: str,
    baseline: str,
    size: Size = FULL,
    *,
    priors: Sequence[Prior] = (),
    worlds: Sequence[WorldName] = WORLDS,
    seed: int = 0,
    workers: int | None = None,
    on_progress: Callable[[Simulation, float], None] | None = None,
) -> tuple[Clause, ...]:
    """Return clauses a to c. The first of `worlds` is for clauses a and b, the others are for clause c."""
    results: list[Simulation] = []

    def report(so_far: Simulation, share: float) -> None:
        if on_progress is not None:
            on_progress(so_far, (len(results) + share) / len(worlds))

    for world in worlds:
        config = SimulationConfig(policies=candidate, baseline=baseline, world=world, seed=seed, **vars(size))
        results.append(simulate(config, priors=priors, workers=workers, on_progress=report))
    standard, *others = results
    return (
        win_clause(standard, candidate),
        persona_clause(standard, candidate),
        _lower_bounds_clause("c robust", {other.config.world: other.gain(candidate) for other in others}),
    )


def win_clause(standard: Simulation, candidate: str) -> Clause:
    """Return clause a from the simulation of the standard world."""
    estimate = standard.gain(candidate)
    passed = False
    if estimate is not None and estimate.ci_low is not None:
        passed = estimate.mean >= MIN_GAIN and estimate.ci_low > 0
    why = (
        f"{standard.config.world} world: gain per decision {_format_estimate(estimate)}; "
        f"needs at least {MIN_GAIN:g}, and an interval above 0"
    )
    return Clause("a simulation win", passed, estimate.mean if estimate else None, MIN_GAIN, why)


def persona_clause(standard: Simulation, candidate: str) -> Clause:
    """Return clause b from the simulation of the standard world."""
    gains = {name: standard.gain(candidate, persona=index) for index, name in enumerate(load_personas().names)}
    return _lower_bounds_clause("b no persona loses", gains)


def _format_estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    if estimate.ci_low is None or estimate.ci_high is None:
        return f"{number(estimate.mean, '+.4f')}, no interval"
    return f"{number(estimate.mean, '+.4f')} ({number(estimate.ci_low, '+.4f')} to {number(estimate.ci_high, '+.4f')})"


def _lower_bounds_clause(name: str, gains: Mapping[str, Estimate | None]) -> Clause:
    lower_bounds = [_lower_bound(estimate) for estimate in gains.values()]
    known = [bound for bound in lower_bounds if bound is not None]
    worst = min(known, default=None)
    passed = None not in lower_bounds and worst is not None and worst > MIN_LOWER_BOUND
    why = "; ".join(f"{key} {_format_estimate(estimate)}" for key, estimate in gains.items())
    why += f"; every lower bound must be above {number(MIN_LOWER_BOUND)}"
    return Clause(name, passed, worst, MIN_LOWER_BOUND, why)


def _lower_bound(estimate: Estimate | None) -> float | None:
    """Return the lower bound of a gain. Without spread, as between equal policies, it is the mean."""
    if estimate is None:
        return None
    return estimate.mean if estimate.sd == 0 else estimate.ci_low


def log_clause(log: LoggedDecisions | None, problem: str = "") -> Clause:
    """Return clause d; `problem` is the reason if there is no log."""
    name, bound = "d logs agree", MIN_LOWER_BOUND_LOGGED
    if log is None:
        return Clause(name, passed=None, value=None, bound=bound, why=problem)
    weights, estimate = weight_diagnostics(log), gain(log)
    if estimate.ci_low is None or estimate.ci_high is None:
        why = "The log has decisions of one user only; intervals need at least two."
        return Clause(name, passed=None, value=None, bound=bound, why=why)
    why = (
        f"doubly robust gain {_format_estimate(estimate)} from {plural(weights.n_decisions, 'decision')} of "
        f"{plural(estimate.n, 'user')}; effective sample {weights.effective_sample:,.0f}, "
        f"mean weight {weights.mean_weight.mean:.3f}, largest {weights.largest_weight:.1f}"
    )
    passed: bool | None
    if not weights.is_plausible:
        passed = False
        why += ". The mean weight is not 1: the probabilities are wrong"
    elif weights.effective_sample < MIN_EFFECTIVE_SAMPLE:
        passed = None
        why += f"; needs an effective sample of {MIN_EFFECTIVE_SAMPLE:,}"
    elif estimate.ci_low > bound:
        passed = True
    else:
        # None: the interval includes the bound, so more data may decide either way.
        passed = False if estimate.ci_high < bound else None
        why += f"; the lower bound must be above {number(bound)}"
    return Clause(name, passed, estimate.ci_low, bound, why)


def operations_clause(candidate: str, shadow: str | None, counts: ShadowCounts, *, has_same_schema: bool) -> Clause:
    """Return clause e, from the counts of the candidate's shadow; `shadow` is None if it has no shadow.

    `has_same_schema` is whether the baseline still has the features with which its decisions were logged.
    """
    name, bound = "e operations", MAX_DROPPED_SHARE
    if shadow is None:
        why = f"{candidate} has no shadow, so only --simulation-only can check it."
        return Clause(name, passed=None, value=None, bound=bound, why=why)
    if not counts.calls:
        why = f"{shadow} has not been called. Enable it and serve for a while."
        return Clause(name, passed=None, value=None, bound=bound, why=why)
    dropped_share = counts.dropped / counts.calls
    schema = "same feature schema" if has_same_schema else "another feature schema"
    dropped = f"{counts.dropped:,} of {plural(counts.calls, 'shadow call')} dropped"
    why = f"{dropped}, {plural(counts.errors, 'error')}, {schema}"
    passed = dropped_share < bound and counts.errors == 0 and has_same_schema
    return Clause(name, passed, dropped_share, bound, why)
