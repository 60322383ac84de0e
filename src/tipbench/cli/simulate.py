"""`tipbench simulate`: policies against simulated users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.options import JsonOption, MlflowOption, PlotOption, PriorOption, open_or_start_mlflow
from tipbench.cli.progress import progress_counter, write_event
from tipbench.record.events import Simulating
from tipbench.settings import load_settings
from tipbench.text import duration, interval, number, plural

if TYPE_CHECKING:
    from tipbench.simulate.simulation import Simulation


def simulate(
    policies: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated policies. [default: all, including egreedy/v1+bias]"),
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="standard, no-taste, null, drift, lossy or linear. [default: standard]"),
    ] = None,
    users: Annotated[int | None, typer.Option(metavar="NUMBER", help="Users per seed. [default: 1000]")] = None,
    rounds: Annotated[int | None, typer.Option(metavar="NUMBER", help="Decisions per user. [default: 200]")] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Number of seeds, each with its own users. [default: 5]")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="NUMBER", help="The first seed. [default: 0]")] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Policy to compare with. [default: egreedy/v1]")
    ] = None,
    ablation: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Also run this policy without each of its features, one at a time."),
    ] = None,
    prior: PriorOption = None,
    plot: PlotOption = None,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Record the result in MLflow, experiment tip-sim.")
    ] = True,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Simulate policies on users with known preferences.

    Every policy gets the same users, tips and random numbers, so differences are paired by user; intervals are 95 %.
    The control arm egreedy/v1+bias, which exists in simulations only, shows whether a gain comes from new features or
    from an intercept. The chart of --plot has the reward by round. Needs no Ollama.

    Examples:

      tipbench simulate

      tipbench simulate --policies egreedy/v1,egreedy/v3 --world drift --ablation egreedy/v3 --plot curves.png
    """
    from tipbench.charts import check_chart_file, save_chart
    from tipbench.serve.prior import load_prior
    from tipbench.simulate import simulation
    from tipbench.simulate.charts import curves_chart
    from tipbench.workflows.simulation import record_simulation

    settings = load_settings()
    config = simulation.make_simulation_config(
        {
            "policies": policies,
            "world": world,
            "users": users,
            "rounds": rounds,
            "seeds": seeds,
            "seed": seed,
            "baseline": baseline,
            "ablation": ablation,
        }
    )
    priors = [load_prior(path) for path in prior or ()]
    if plot is not None:
        check_chart_file(plot)
    with progress_counter(f"simulating {config.world}") as show_count:

        def show_progress(so_far: Simulation, _share_done: float) -> None:
            show_count(so_far.seeds_done, config.seeds)
            _write_progress(so_far.to_json())

        result = simulation.simulate(config, priors=priors, on_progress=show_progress).to_json()
    if record:
        with open_or_start_mlflow(settings, mlflow_url) as mlflow:
            run_id = record_simulation(mlflow.store, result)
            experiment = mlflow.store.experiment(simulation.EXPERIMENT)
        print_message(f"recorded in {mlflow.description}, experiment {simulation.EXPERIMENT}, run {run_id}")
        result |= {"run_id": run_id, "url": experiment.run_url(run_id) if experiment else None}
        _write_progress(result)
    if plot is not None:
        save_chart(curves_chart(result), plot)
    if json_:
        print_json(result)
    else:
        _print_simulation(result)


def _write_progress(result: dict[str, Any]) -> None:
    write_event(
        Simulating(
            done=result["seeds_done"],
            total=result["config"]["seeds"],
            world=result["config"]["world"],
            policies=tuple(policy["name"] for policy in result["policies"]),
            rounds=tuple(result["policies"][0]["curve"]["round"]),  # the same for all policies
            rewards=tuple(tuple(policy["curve"]["reward"]) for policy in result["policies"]),
            users=result["config"]["users"],
            run_id=result.get("run_id"),
            url=result.get("url"),
        )
    )


def _print_simulation(result: dict[str, Any]) -> None:
    policies = result["policies"]
    gain_title = f"gain over {result['config']['baseline']}"
    print_table(
        ("policy", "reward", "regret", gain_title),
        [
            (policy["name"], *(estimate_text(policy[key]) for key in ("reward", "regret", "gain")))
            for policy in policies
        ],
        text_columns=("policy",),
    )
    print()
    rows = [
        (row["persona"], policy["name"], estimate_text(row["gain"]))
        for policy in policies
        for row in policy["personas"]
        if row["gain"] is not None  # None for the baseline, or without users of this persona
    ]
    print_table(("persona", "policy", gain_title), sorted(rows), text_columns=("persona", "policy"))
    if result["ablation"]:
        print()
        feature_title = f"left out of {result['config']['ablation']}"
        losses = [(row["feature"], estimate_text(row["loss"])) for row in result["ablation"]]
        print_table((feature_title, "loss"), losses, text_columns=(feature_title,))
    decisions = plural(result["decisions"], "decision")
    print_message(
        f"{decisions} in {duration(result['seconds'])}; values are per decision, with 95 % intervals over users"
    )


def estimate_text(estimate: Mapping[str, float | None] | None, format_spec: str = "+.4f") -> str | None:
    """Return the mean with its interval; None without an estimate."""
    if estimate is None:
        return None
    limits = interval(estimate["ci_low"], estimate["ci_high"], format_spec) or "no interval"
    return f"{number(estimate['mean'], format_spec)} ({limits})"
