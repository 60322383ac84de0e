"""`tipbench prior fit`: fit the estimate that new users of a policy start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.options import JsonOption, command_group
from tipbench.cli.simulate import estimate_text
from tipbench.errors import UsageError
from tipbench.files import check_output
from tipbench.settings import load_settings
from tipbench.text import number, plural

app = command_group("Fit the estimate that new users of a policy start from.")


@app.command("fit")
def fit(
    policy: Annotated[str, typer.Option(metavar="NAME", help="The policy that will use the prior.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    from_: Annotated[
        Literal["simulation", "log"],
        typer.Option("--from", metavar="simulation|log", help="Simulated users, or the server's event log."),
    ] = "simulation",
    world: Annotated[str, typer.Option(metavar="NAME", help="The simulated world.")] = "standard",
    users: Annotated[int, typer.Option(min=10, max=20_000, metavar="NUMBER", help="Simulated users.")] = 1000,
    rounds: Annotated[int, typer.Option(min=4, max=5000, metavar="NUMBER", help="Decisions per user.")] = 100,
    seed: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="The seed.")] = 0,
    json_: JsonOption = False,
) -> None:
    """Fit a prior from a simulation or from the event log.

    Measures how much the prior reduces the squared error of predicted rewards, on users that it was not fitted on.
    A prior from a simulation is also tried on new users of several worlds. In reward per decision, `gain` is the
    difference to users who start without a prior; `price`, usually negative, is the difference to users who start from
    a prior fitted in their own world. Use the file with `tipbench serve --prior FILE`.

    Examples:

      tipbench prior fit --policy egreedy/v3 --from simulation --out prior.json

      tipbench prior fit --policy egreedy/v3 --from log --out prior.json
    """
    from tipbench.serve.policy import check_policy
    from tipbench.simulate.prior_fit import fit_from_simulation
    from tipbench.simulate.world import WorldName
    from tipbench.workflows.promotion import fit_prior_from_log

    check_policy(policy)
    check_output(out, "--out")
    if from_ == "log":
        fitted = fit_prior_from_log(load_settings().home, policy)
    elif world not in set(WorldName):
        raise UsageError(f"--world takes one of {', '.join(WorldName)} (got {world[:40]!r}).")
    else:
        fitted = fit_from_simulation(policy, WorldName(world), users=users, rounds=rounds, seed=seed)
    fitted.prior.save(out)
    result = fitted.to_json()
    if json_:
        print_json(result)
        return
    print_table(
        ("feature", "weight"),
        [(feature, number(weight, "+.3f")) for feature, weight in result["theta"].items()],
        text_columns=("feature",),
    )
    explained = estimate_text(result["explained"])
    print(f"\nsquared error per reward of users not in the fit, compared with predicting 0: reduced by {explained}")
    if result["worlds"]:
        print()
        rows = [(row["world"], estimate_text(row["gain"]), estimate_text(row["price"])) for row in result["worlds"]]
        print_table(
            ("world", "gain over no prior", "price: gain over the world's own prior"),
            rows,
            text_columns=("world",),
        )
    print_message(f"prior {fitted.prior.hash} of {policy} from {plural(fitted.n_users, 'user')} written to {out}")
