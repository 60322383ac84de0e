"""`tipbench simulate`: policies against simulated users."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.options import JsonOption, MlflowOption, open_tracking_store
from tipbench.cli.progress import emit, progress_counter
from tipbench.errors import UsageError
from tipbench.record.events import Simulating
from tipbench.settings import load_settings
from tipbench.text import duration, interval, number, plural

if TYPE_CHECKING:
    from tipbench.simulate.simulation import Simulation

PriorOption = Annotated[
    list[Path] | None,
    typer.Option("--prior", metavar="FILE", help="A prior made by `tipbench prior fit`; repeatable, one per policy."),
]


def simulate(
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies", metavar="NAMES", help="Comma-separated policies. [default: all, with egreedy/v1+bias]"
        ),
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(
            "--world", metavar="NAME", help="standard, no-taste, null, drift, lossy or linear. [default: standard]"
        ),
    ] = None,
    users: Annotated[
        int | None, typer.Option("--users", metavar="NUMBER", help="Users per seed. [default: 1000]")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="NUMBER", help="Decisions per user. [default: 200]")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", metavar="NUMBER", help="Number of seeds, each with its own users. [default: 5]"),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="NUMBER", help="The first seed. [default: 0]")] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="POLICY", help="Compared with. [default: egreedy/v1]")
    ] = None,
    ablation: Annotated[
        str | None, typer.Option("--ablation", metavar="POLICY", help="Also run it without each of its features.")
    ] = None,
    prior: PriorOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png|.svg", help="Write the curves.")] = None,
    record: Annotated[bool, typer.Option("--record/--no-record", help="Record it in MLflow (tip-sim).")] = True,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Simulate policies on users with known preferences.

    Every policy gets the same users, tips and random numbers, so differences are paired by user; intervals are 95 %.
    The control arm egreedy/v1+bias, which exists in simulations only, shows whether a gain comes from new features or
    from an intercept. Needs no Ollama.

    Examples:

      tipbench simulate

      tipbench simulate --policies egreedy/v1,egreedy/v3 --world drift --ablation egreedy/v3 --plot curves.png
    """
    from tipbench.charts import check_chart_file, save_chart
    from tipbench.serve.prior import load_prior
    from tipbench.simulate import simulation as library
    from tipbench.simulate.charts import curves_chart
    from tipbench.workflows.simulation import record_simulation

    settings = load_settings()
    names = ("policies", "world", "users", "rounds", "seeds", "seed", "baseline", "ablation")
    given = (policies, world, users, rounds, seeds, seed, baseline, ablation)
    config = library.make_simulation_config(dict(zip(names, given, strict=True)))
    priors = [load_prior(path) for path in prior or ()]
    if plot is not None:
        check_chart_file(plot)
    with progress_counter(f"simulating {config.world}") as count:

        def report(so_far: Simulation, _share: float) -> None:
            count(so_far.seeds_done, config.seeds)
            emit_simulation(so_far.to_json())

        result = library.simulate(config, priors=priors, on_progress=report).to_json()
    if record:
        with open_tracking_store(settings, mlflow_url) as opened:
            run_id = record_simulation(opened.store, result)
            experiment = opened.store.experiment(library.EXPERIMENT)
        print_message(f"recorded in {opened.how}, experiment {library.EXPERIMENT}, run {run_id}")
        result |= {"run_id": run_id, "url": experiment.run_url(run_id) if experiment else None}
        emit_simulation(result)
    if plot is not None:
        save_chart(curves_chart(result), plot)
    if json_:
        print_json(result)
    else:
        print_simulation(result)


def emit_simulation(result: dict[str, Any]) -> None:
    """Write the progress of a simulation to the event file of a job."""
    emit(
        Simulating(
            result["seeds_done"],
            result["config"]["seeds"],
            result["config"]["world"],
            tuple(policy["name"] for policy in result["policies"]),
            tuple(result["policies"][0]["curve"]["round"]),
            tuple(tuple(policy["curve"]["reward"]) for policy in result["policies"]),
            result["config"]["users"],
            result.get("run_id"),
            result.get("url"),
        )
    )


def print_simulation(result: dict[str, Any]) -> None:
    """Print the tables of a simulation."""
    baseline = result["config"]["baseline"]
    columns = ("policy", "reward", "regret", f"gain over {baseline}")
    rows = [(p["name"], span(p["reward"]), span(p["regret"]), span(p["gain"])) for p in result["policies"]]
    print_table(columns, rows, text=("policy",))
    print()
    names = [row["persona"] for row in result["policies"][0]["personas"]]
    others = [policy for policy in result["policies"] if policy["gain"] is not None]
    print_table(
        ("gain by persona", *(policy["name"] for policy in others)),
        [(name, *(span(policy["personas"][at]["gain"]) for policy in others)) for at, name in enumerate(names)],
        text=("gain by persona",),
    )
    if result["ablation"]:
        print()
        title = f"left out of {result['config']['ablation']}"
        print_table((title, "loss"), [(row["feature"], span(row["loss"])) for row in result["ablation"]], text=(title,))
    done = plural(result["decisions"], "decision")
    print_message(f"{done} in {duration(result['seconds'])}; per decision, 95 % intervals over users")


def span(found: dict[str, Any] | None) -> str | None:
    """Return a mean with its interval; None for a dash."""
    if found is None:
        return None
    ends = interval(found["ci_low"], found["ci_high"], "+.4f")
    return f"{number(found['mean'], '+.4f')} ({ends or 'no interval'})"


def read_world(name: str) -> Any:
    """Return a world by name; raises UsageError."""
    from tipbench.simulate.world import WorldName

    try:
        return WorldName(name)
    except ValueError as exc:
        known = ", ".join(WorldName)
        raise UsageError(f"--world takes one of {known} (got {name[:40]!r}).") from exc
