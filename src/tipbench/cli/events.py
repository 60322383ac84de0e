"""`tipbench events export / evaluate`: export the policy server's event log, or estimate a policy's value from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.options import JsonOption, command_group
from tipbench.cli.promote import validity_text
from tipbench.cli.simulate import estimate_text
from tipbench.errors import UsageError
from tipbench.files import check_output
from tipbench.settings import load_settings
from tipbench.text import plural

app = command_group("Export and evaluate the policy server's event log.")


@app.command("export")
def export(
    format_: Annotated[
        Literal["jsonl", "dsjson", "obp"],
        typer.Option("--format", metavar="jsonl|dsjson|obp", help="The format; see above."),
    ] = "jsonl",
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Only events of this policy.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The file. [default: stdout]")] = None,
) -> None:
    """Export decisions, rewards and signals of the policy server.

    jsonl has one line per decision, reward and signal; a signal has the tip that a shadow policy would have chosen.
    dsjson has one line per rewarded decision, for `vw --dsjson --cb_explore_adf`. obp is one JSON object with the
    arrays of the Open Bandit Pipeline's bandit feedback. Users appear as keyed hashes, never by id. The server may be
    running.

    Examples:

      tipbench events export > events.jsonl

      tipbench events export --format dsjson --policy egreedy/v1 --out decisions.dsjson
    """
    from tipbench.serve.event_export import export_events
    from tipbench.workflows.promotion import existing_log

    with existing_log(load_settings().home) as database, _open_output(out) as file:
        count = 0
        for line in export_events(database, format_, policy=policy):
            file.write(line + "\n")
            count += 1
    print_message(f"{plural(count, 'line')} exported")


@app.command("evaluate")
def evaluate(
    policy: Annotated[str, typer.Option(metavar="POLICY", help="The policy to evaluate.")],
    logged_by: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="The policy whose decisions are used. [default: the active policy]"),
    ] = None,
    prior: Annotated[Path | None, typer.Option(metavar="FILE", help="A prior of the evaluated policy.")] = None,
    catalogue: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tip catalogue with the judges' scores by scale.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Estimate a policy's value from another policy's decisions.

    For every logged decision, the probabilities of --policy are computed from the same user's earlier rewards. IPS,
    SNIPS and DR estimate its mean reward; DM, the reward model alone, is shown for information. Intervals are 95 %,
    clustered by user. With 30 tips or more, also shows how well judges' scores predict how often users complete a tip:
    the rank correlation of the composite, and with --catalogue also of each scale. Exit 3 if there is not enough data.

    Examples:

      tipbench events evaluate --policy egreedy/v3

      tipbench events evaluate --policy egreedy/v3 --logged-by egreedy/v1 --catalogue tips.toml --json
    """
    from tipbench.serve.catalogue import load_catalogue
    from tipbench.serve.prior import load_prior
    from tipbench.workflows.promotion import evaluate_log

    scores = load_catalogue(catalogue).scores if catalogue is not None else {}
    loaded_prior = load_prior(prior) if prior is not None else None
    evaluation = evaluate_log(load_settings().home, policy, logged_by, prior=loaded_prior, scores=scores)
    if json_:
        print_json(evaluation)
        return
    decisions, users = plural(evaluation["decisions"], "decision"), plural(evaluation["users"], "user")
    print(f"{policy}, estimated from {decisions} of {evaluation['logged_by']} for {users}")
    print(f"logged reward  {estimate_text(evaluation['logged_reward'])}")
    for name, estimate in evaluation["estimates"].items():
        print(f"{name:14} {estimate_text(estimate)}")
    print(f"gain (DR)      {estimate_text(evaluation['gain'])}")
    weights = evaluation["weights"]
    mean_weight = weights["mean"]["mean"]  # the estimate also has an interval
    warning = "" if weights["plausible"] else " (implausible: not near 1)"
    print(
        f"weights: mean {mean_weight:.3f}{warning}, "
        f"largest {weights['largest']:.1f}, effective sample {weights['effective_sample']:,.0f}"
    )
    for scale_validity in evaluation["validity"]:
        print(validity_text(scale_validity))


@contextmanager
def _open_output(out: Path | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    check_output(out, "--out")
    try:
        with out.open("w", encoding="utf-8") as file:
            yield file
    except OSError as exc:
        raise UsageError(f"--out {out} could not be written: {exc.strerror}. Choose another file.") from exc
