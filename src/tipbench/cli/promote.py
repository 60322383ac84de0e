"""`tipbench promote check / apply / undo`: check a policy, make it active, and go back to the previous one."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tipbench.cli.console import print_json
from tipbench.cli.options import JsonOption, PriorOption, command_group
from tipbench.cli.progress import progress_counter
from tipbench.cli.simulate import estimate_text
from tipbench.errors import UsageError
from tipbench.settings import load_settings
from tipbench.text import plural

if TYPE_CHECKING:
    from tipbench.serve.prior import Prior
    from tipbench.simulate.simulation import Simulation

app = command_group("Check a policy, make it the active one, and go back.")

CandidatePolicyOption = Annotated[str, typer.Option("--candidate", metavar="POLICY", help="The policy to promote.")]


@app.command("check")
def check(
    candidate: CandidatePolicyOption,
    baseline: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Policy to compare with. [default: the active policy]")
    ] = None,
    simulation_only: Annotated[
        bool,
        typer.Option("--simulation-only", help="Check only in simulation (clauses a to c), without the event log."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="2 seeds × 200 users × 100 rounds; neither passes nor fails (exit 3), and is not recorded."
        ),
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, metavar="NUMBER", help="Number of seeds. [default: 20]")
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=10, max=20_000, metavar="NUMBER", help="Users per seed. [default: 1000]")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=4, max=5000, metavar="NUMBER", help="Decisions per user. [default: 200]")
    ] = None,
    prior: PriorOption = None,
    json_: JsonOption = False,
) -> None:
    """Check whether a policy may replace the active one.

    The policy passes if all clauses hold: (a) it wins in simulation; (b) no persona loses; (c) it does not lose in
    other worlds, in which tastes change halfway (drift), some rewards never arrive (lossy), or the category of a
    tip does not matter (no-taste); (d) the event log agrees that it does not lose; (e) its shadow dropped almost no
    calls and had no errors. Exit 0 if it passed, 1 if it failed, 3 if there is not enough data. The check is recorded
    for `promote apply`, except with --quick.

    Examples:

      tipbench promote check --candidate egreedy/v3 --simulation-only

      tipbench promote check --candidate egreedy/v3 --baseline egreedy/v1 --json
    """
    from tipbench.simulate.promotion_gate import FULL, QUICK, WORLDS, Size
    from tipbench.workflows.promotion import check_promotion

    default_size = QUICK if quick else FULL
    size = Size(seeds or default_size.seeds, users or default_size.users, rounds or default_size.rounds)
    n_simulations = len(WORLDS) * size.seeds
    with progress_counter("simulating") as show_count:

        def show_progress(_so_far: Simulation, share_done: float) -> None:
            show_count(round(share_done * n_simulations), n_simulations)

        verdict = check_promotion(
            load_settings().home,
            candidate,
            baseline,
            size=size,
            simulation_only=simulation_only,
            quick=quick,
            priors=_load_priors(prior),
            user=getpass.getuser(),
            on_progress=show_progress,
        )
    if json_:
        print_json(verdict.to_json())
    else:
        outcomes = {True: "passed", False: "FAILED", None: "no data"}
        for clause in verdict.clauses:
            print(f"{outcomes[clause.passed]:8} {clause.name}: {clause.why}")
        for scale_validity in verdict.validity:  # how well judged scores predict completion
            print(validity_text(scale_validity))
        print(verdict.text)
    raise typer.Exit(verdict.exit_code)


@app.command("apply")
def apply(candidate: CandidatePolicyOption, prior: PriorOption = None, json_: JsonOption = False) -> None:
    """Make a policy the active one.

    Needs a passed check against the active policy, at most 7 days old, made with the present versions of tipbench, both
    policies and their priors. A running server switches to the policy within 5 seconds.

    Examples:

      tipbench promote apply --candidate egreedy/v3
    """
    from tipbench.workflows.promotion import apply_promotion, promotion_json

    promotion = apply_promotion(load_settings().home, candidate, priors=_load_priors(prior), user=getpass.getuser())
    if json_:
        print_json(promotion_json(promotion))
    else:
        print(
            f"{promotion.candidate} is active now; it replaces {promotion.baseline}. `tipbench promote undo` goes back."
        )


@app.command("undo")
def undo(json_: JsonOption = False) -> None:
    """Go back to the policy that was active before.

    Examples:

      tipbench promote undo
    """
    from tipbench.workflows.promotion import promotion_json, undo_promotion

    promotion = undo_promotion(load_settings().home, user=getpass.getuser())
    if json_:
        print_json(promotion_json(promotion))
    else:
        print(f"{promotion.candidate} is active again; it replaces {promotion.baseline}.")


def _load_priors(paths: list[Path] | None) -> list[Prior]:
    """Load the priors. Raises UsageError if two are for the same policy."""
    from tipbench.serve.prior import load_prior

    priors = [load_prior(path) for path in paths or ()]
    if len({prior.policy for prior in priors}) < len(priors):
        raise UsageError("--prior takes one file per policy, but two files are for the same policy. Leave one out.")
    return priors


def validity_text(scale_validity: Mapping[str, Any]) -> str:
    """Return a line on how well the scores on a scale predict whether users complete tips."""
    scale, correlation = scale_validity["scale"], scale_validity["correlation"]
    tips = plural(scale_validity["tips"], "tip")
    if correlation is None:
        return f"judged {scale} and completion: not enough data ({tips} with outcomes)"
    estimate = {"mean": correlation, "ci_low": scale_validity["ci_low"], "ci_high": scale_validity["ci_high"]}
    return f"judged {scale} and completion: rank correlation {estimate_text(estimate, '+.2f')} over {tips}"
