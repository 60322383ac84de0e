"""The promotion gate: five clauses that a policy must pass before it may serve.

| clause | passes when |
|---|---|
| a simulation win | standard world: paired gain ≥ 0.01 reward per decision and lower bound > 0 |
| b no persona loses | every persona's lower bound > −0.01 (all must hold, so no correction) |
| c robust | drift, lossy and no-taste worlds: lower bound > −0.01 |
| d logs agree | effective sample ≥ 2000, doubly robust gain's lower bound > −0.03, plausible weights |
| e operations | shadow calls missing < 0.1 %, no errors, same feature schema |

A lower bound is the lower end of the two-sided 95 % interval, clustered by user. A clause without enough data is
neither passed nor failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tipbench
from tipbench.compare.statistics import Estimate
from tipbench.serve.policy import POLICIES
from tipbench.serve.prior import Prior
from tipbench.simulate.off_policy import LoggedDecisions, gain, weight_diagnostics
from tipbench.simulate.simulation import Simulation, SimulationConfig, simulate
from tipbench.simulate.world import WorldName, load_personas
from tipbench.text import join_names, number, plural

MIN_GAIN = 0.01  # reward per decision
MIN_LOWER_BOUND = -0.01  # of a gain: how much may be lost
MIN_LOWER_BOUND_LOGGED = -0.03  # likewise, estimated from logs
MIN_EFFECTIVE_SAMPLE = 2000  # decisions
MAX_MISSING_SHARE = 0.001  # of the shadow calls
WORLDS = (WorldName.STANDARD, WorldName.DRIFT, WorldName.LOSSY, WorldName.NO_TASTE)


@dataclass(frozen=True)
class Size:
    """How much is simulated in each world."""

    seeds: int = 20
    users: int = 1000
    rounds: int = 200

    def __str__(self) -> str:
        return f"{self.seeds} × {self.users} × {self.rounds}"


FULL, QUICK = Size(), Size(2, 200, 100)


@dataclass(frozen=True)
class Clause:
    """One condition of the gate; `passed` is None without enough data."""

    name: str
    passed: bool | None
    value: float | None
    bound: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `--json` and the store."""
        return vars(self).copy()


@dataclass(frozen=True)
class Verdict:
    """All clauses of a check; a quick check neither passes nor fails."""

    candidate: str
    baseline: str
    clauses: tuple[Clause, ...]
    simulation_only: bool
    size: Size
    at: str
    versions: Mapping[str, str | None]
    quick: bool = False
    validity: tuple[Mapping[str, Any], ...] = ()  # of the judges: not a clause

    @property
    def passed(self) -> bool | None:
        """True if every clause passed, False if one failed, otherwise None."""
        if self.quick:
            return None
        if any(clause.passed is False for clause in self.clauses):
            return False
        return None if any(clause.passed is None for clause in self.clauses) else True

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 3 not enough data."""
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
        named = f"{'clause' if len(failed) == 1 else 'clauses'} {join_names(failed, len(failed))}"
        return f"{self.candidate} may not replace {self.baseline}: {named} failed{scope}."

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of `promote check --json`, also stored with the check."""
        return {
            "candidate": self.candidate,
            "baseline": self.baseline,
            "passed": self.passed,
            "text": self.text,
            "clauses": [clause.to_json() for clause in self.clauses],
            "simulation_only": self.simulation_only,
            "quick": self.quick,
            "size": vars(self.size),
            "at": self.at,
            "versions": dict(self.versions),
            "validity": [dict(one) for one in self.validity],
        }


def versions(candidate: str, baseline: str, priors: Sequence[Prior] = ()) -> dict[str, str | None]:
    """Return all that a check is valid for; a promotion needs a check of the same versions."""
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
    """Return the clauses a to c. `worlds` are the standard world and those in which the policy must be robust."""
    results: list[Simulation] = []
    for at, world in enumerate(worlds):
        config = SimulationConfig(policies=candidate, baseline=baseline, world=world, seed=seed, **vars(size))

        def report(so_far: Simulation, share: float, before: int = at) -> None:
            if on_progress is not None:
                on_progress(so_far, (before + share) / len(worlds))

        results.append(simulate(config, priors=priors, workers=workers, on_progress=report))
    standard, *others = results
    return (
        win_clause(standard, candidate),
        persona_clause(standard, candidate),
        _all_above("c robust", {other.config.world: other.gain(candidate) for other in others}),
    )


def win_clause(standard: Simulation, candidate: str) -> Clause:
    """Return clause a."""
    found = standard.gain(candidate)
    passed = found is not None and found.ci_low is not None and found.mean >= MIN_GAIN and found.ci_low > 0
    why = f"{standard.config.world} world: gain per decision {_span(found)}; needs at least {MIN_GAIN:g}, above 0"
    return Clause("a simulation win", passed, found.mean if found else None, MIN_GAIN, why)


def persona_clause(standard: Simulation, candidate: str) -> Clause:
    """Return clause b."""
    personas = enumerate(load_personas().names)
    return _all_above("b no persona loses", {name: standard.gain(candidate, persona=at) for at, name in personas})


def _span(found: Estimate | None) -> str:
    if found is None or found.ci_low is None or found.ci_high is None:
        return f"{number(found.mean, '+.4f')}, no interval" if found else "unknown"
    return f"{number(found.mean, '+.4f')} ({number(found.ci_low, '+.4f')} to {number(found.ci_high, '+.4f')})"


def _all_above(name: str, gains: Mapping[str, Estimate | None]) -> Clause:
    """Return a clause that passes if every lower bound is above MIN_LOWER_BOUND; equal policies do not lose."""
    lows = [found.mean if found.sd == 0 else found.ci_low for found in gains.values() if found is not None]
    known = [low for low in lows if low is not None]
    worst = min(known, default=None)
    passed = len(known) == len(gains) and worst is not None and worst > MIN_LOWER_BOUND
    why = "; ".join(f"{key} {_span(found)}" for key, found in gains.items())
    return Clause(
        name, passed, worst, MIN_LOWER_BOUND, f"{why}; every lower bound must be above {number(MIN_LOWER_BOUND)}"
    )


def log_clause(log: LoggedDecisions | None, problem: str = "") -> Clause:
    """Return clause d; `problem` is why there are no logged decisions."""
    name, bound = "d logs agree", MIN_LOWER_BOUND_LOGGED
    if log is None:
        return Clause(name, None, None, bound, problem)
    weights, found = weight_diagnostics(log), gain(log)
    if found.ci_low is None or found.ci_high is None:
        return Clause(name, None, None, bound, "The log has decisions of one user only; intervals need at least two.")
    why = (
        f"doubly robust gain {_span(found)} from {plural(weights.decisions, 'decision')} of "
        f"{plural(found.n, 'user')}; effective sample {weights.effective:,.0f}, "
        f"mean weight {weights.mean.mean:.3f}, largest {weights.largest:.1f}"
    )
    if not weights.plausible:
        return Clause(name, False, found.ci_low, bound, f"{why}. The mean weight is not 1: the probabilities are wrong")
    if weights.effective < MIN_EFFECTIVE_SAMPLE:
        return Clause(name, None, found.ci_low, bound, f"{why}; needs an effective sample of {MIN_EFFECTIVE_SAMPLE:,}")
    if found.ci_low > bound:
        return Clause(name, True, found.ci_low, bound, why)
    passed = False if found.ci_high < bound else None
    return Clause(name, passed, found.ci_low, bound, f"{why}; the lower bound must be above {number(bound)}")


@dataclass(frozen=True)
class ShadowRecord:
    """The candidate's shadow calls in the log."""

    expected: int  # decisions served while the shadow was on
    signals: int  # shadow calls logged for these decisions
    errors: int
    same_schema: bool


def operations_clause(record: ShadowRecord | None, shadow: str) -> Clause:
    """Return clause e."""
    name = "e operations"
    if record is None or not record.expected:
        return Clause(
            name, None, None, MAX_MISSING_SHARE, f"{shadow} has no calls in the log. Enable it and serve for a while."
        )
    missing = 1 - record.signals / record.expected
    schema = "same feature schema" if record.same_schema else "another feature schema"
    calls = f"{record.signals:,} of {plural(record.expected, 'shadow call')} logged"
    why = f"{calls}, {plural(record.errors, 'error')}, {schema}"
    passed = missing < MAX_MISSING_SHARE and record.errors == 0 and record.same_schema
    return Clause(name, passed, missing, MAX_MISSING_SHARE, why)
