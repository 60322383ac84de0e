"""Promotions: check a candidate policy, make it active, undo a promotion, and evaluate policies on the event log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tipbench.errors import NotEnoughData, UsageError
from tipbench.serve.event_log import open_database, read_entries, store_exists
from tipbench.serve.policy import check_policy, known_policy
from tipbench.serve.prior import Prior
from tipbench.serve.switches import SHADOWS, Promotion, ShadowCounts, Switches
from tipbench.simulate.off_policy import (
    ESTIMATORS,
    ReplayedDecision,
    clustered_mean,
    gain,
    judge_validity,
    logged_decisions,
    replay,
    weight_diagnostics,
)
from tipbench.simulate.prior_fit import FittedPrior, fit_from_log
from tipbench.simulate.promotion_gate import (
    FULL,
    Clause,
    Size,
    Verdict,
    log_clause,
    operations_clause,
    simulation_clauses,
    versions,
)
from tipbench.simulate.simulation import Simulation
from tipbench.sqlite import Database
from tipbench.text import iso

MAX_CHECK_AGE_S = 7 * 86_400.0


@contextmanager
def switches_of(home: Path) -> Iterator[Switches]:
    """Open the stored active policy, enabled shadows, checks and promotions. The policy server may be running."""
    with closing(open_database(home)) as database:
        yield Switches(database)


def check_promotion(
    home: Path,
    candidate: str,
    baseline: str | None = None,
    *,
    size: Size = FULL,
    simulation_only: bool = False,
    quick: bool = False,
    priors: Sequence[Prior] = (),
    user: str = "",
    on_progress: Callable[[Simulation, float], None] | None = None,
) -> Verdict:
    """Check a candidate policy against a baseline policy, by default the active one, and record the verdict.

    With `simulation_only`, the event log is not checked. With `quick`, it is not checked either, and the verdict is not
    recorded.
    """
    check_policy(candidate)
    with switches_of(home) as switches:
        baseline = baseline or switches.active()
        check_policy(baseline)
        if baseline == candidate:
            raise UsageError(
                f"{candidate} is the baseline too: there is nothing to compare. Choose another --baseline."
            )
        clauses = simulation_clauses(candidate, baseline, size, priors=priors, on_progress=on_progress)
        validity: tuple[dict[str, Any], ...] = ()
        if not simulation_only and not quick:
            log_clauses, validity = _check_log(home, switches, candidate, baseline, priors)
            clauses = (*clauses, *log_clauses)
        verdict = Verdict(
            candidate,
            baseline,
            clauses,
            simulation_only=simulation_only,
            size=size,
            at=iso(time.time()),
            versions=versions(candidate, baseline, priors),
            quick=quick,
            validity=validity,
        )
        if not quick:
            switches.add_check(verdict.to_json(), user=user)
    return verdict


def _check_log(
    home: Path, switches: Switches, candidate: str, baseline: str, priors: Sequence[Prior]
) -> tuple[tuple[Clause, Clause], tuple[dict[str, Any], ...]]:
    """Return the clauses on logged decisions and on the shadow, and the validity of the judged scores."""
    candidate_prior = next((prior for prior in priors if prior.policy == candidate), None)
    try:
        replayed = replay_log(home, candidate, candidate_prior)
        decisions_clause = log_clause(logged_decisions(replayed, baseline))
    except NotEnoughData as exc:
        replayed = []
        decisions_clause = log_clause(log=None, problem=str(exc))
    shadow = next((name for name, policy in SHADOWS.items() if policy == candidate), None)
    counts = switches.shadow_counts(shadow) if shadow is not None else ShadowCounts()
    has_same_schema = _logged_with_current_features(home, baseline)
    shadow_clause = operations_clause(candidate, shadow, counts, has_same_schema=has_same_schema)
    # `scales` is empty because the log has only the composite, which is used anyway.
    validity = tuple(asdict(scale_validity) for scale_validity in judge_validity(replayed, scales={}))
    return (decisions_clause, shadow_clause), validity


def _logged_with_current_features(home: Path, policy: str) -> bool:
    """Return whether the policy's newest logged decision used its current feature set; True if there is none."""
    with closing(open_database(home)) as database:
        rows = database.execute(
            "SELECT json_extract(body, '$.features') FROM log WHERE policy = ? AND kind = 'score' "
            "ORDER BY seq DESC LIMIT 1",
            (policy,),
        )
    if not rows:
        return True
    (features,) = rows[0]
    return bool(features == known_policy(policy).features.version)


def replay_log(home: Path, target: str, prior: Prior | None = None) -> list[ReplayedDecision]:
    """Return the rewarded decisions of the log, each with the choice that `target` would have made.

    Raises NotEnoughData if there is no log.
    """
    with existing_log(home) as database:
        return replay(read_entries(database, kinds=("score", "reward", "reset")), known_policy(target), prior)


@contextmanager
def existing_log(home: Path) -> Iterator[Database]:
    """Open the event log. The server may be running. Raises NotEnoughData if there is no log."""
    if not store_exists(home):
        raise NotEnoughData(f"There is no event log in {home}. `tipbench serve` creates it.")
    with closing(open_database(home)) as database:
        yield database


def evaluate_log(
    home: Path,
    target: str,
    logged_by: str | None = None,
    *,
    prior: Prior | None = None,
    scores: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Estimate the value of `target` from the logged decisions of `logged_by`, by default the active policy.

    The result also contains how well judged scores predict that users complete a tip. `scores` are by scale and tip id.
    Raises NotEnoughData if the log is missing or too small.
    """
    replayed = replay_log(home, target, prior)
    with switches_of(home) as switches:
        logging_policy = logged_by or switches.active()
        check_policy(logging_policy)
    log = logged_decisions(replayed, logging_policy)
    weights = weight_diagnostics(log)
    return {
        "policy": target,
        "logged_by": logging_policy,
        "decisions": weights.n_decisions,
        "users": weights.mean_weight.n,
        "logged_reward": clustered_mean(log.reward, log.user).to_json(),
        "estimates": {name: estimator(log).to_json() for name, estimator in ESTIMATORS.items()},
        "gain": gain(log).to_json(),
        "weights": {
            "mean": weights.mean_weight.to_json(),
            "largest": weights.largest_weight,
            "effective_sample": weights.effective_sample,
            "plausible": weights.is_plausible,
        },
        "validity": [asdict(scale_validity) for scale_validity in judge_validity(replayed, scores or {})],
    }


def fit_prior_from_log(home: Path, policy: str) -> FittedPrior:
    """Fit a prior on the event log. Raises NotEnoughData if the log is missing or too small."""
    return fit_from_log(policy, replay_log(home, policy))


def apply_promotion(home: Path, candidate: str, *, priors: Sequence[Prior] = (), user: str) -> Promotion:
    """Make the candidate active. Raises UsageError without a passed check of the present `versions`.

    The check must be against the active policy, and not older than MAX_CHECK_AGE_S.
    """
    check_policy(candidate)
    with switches_of(home) as switches:
        active = switches.active()
        if active == candidate:
            raise UsageError(f"{candidate} is active already; there is nothing to apply.")
        current_versions = versions(candidate, active, priors)
        check = switches.passed_check(candidate, active, current_versions, max_age_s=MAX_CHECK_AGE_S)
        if check is None:
            raise UsageError(
                f"{candidate} has not passed a check against {active}, the active policy, with the present versions "
                f"within the last 7 days. Run `tipbench promote check --candidate {candidate}` first."
            )
        return switches.apply(candidate, user=user, check=check)


def undo_promotion(home: Path, *, user: str) -> Promotion:
    """Make the previously active policy active again. Raises UsageError if there is none."""
    with switches_of(home) as switches:
        return switches.undo(user=user)


def promotion_json(promotion: Promotion) -> dict[str, Any]:
    """Return a promotion for the API and `--json`."""
    return {**vars(promotion), "at": iso(promotion.at), "user": promotion.user or None}
