"""`tipbench events`: the policy server's event log, exported for other programs, and evaluated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.options import JsonOption, command_group
from tipbench.cli.promote import interval_text, validity_text
from tipbench.errors import UsageError
from tipbench.files import check_output
from tipbench.settings import load_settings
from tipbench.text import plural

app = command_group("Export and evaluate the policy server's event log.")


class ExportFormat(StrEnum):
    """Format of an export."""

    JSONL = "jsonl"
    DSJSON = "dsjson"
    OBP = "obp"


@app.command("export")
def export(
    format_: Annotated[
        ExportFormat, typer.Option("--format", metavar="jsonl|dsjson|obp", help="The format; see above.")
    ] = ExportFormat.JSONL,
    policy: Annotated[str | None, typer.Option("--policy", metavar="NAME", help="Only events of this policy.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file. [default: stdout]")] = None,
) -> None:
    """Export decisions, rewards and signals; the server may run.

    jsonl has one line per decision, reward and shadow signal. dsjson has one line per rewarded decision, for `vw
    --dsjson --cb_explore_adf`. obp is one JSON object with the arrays of the Open Bandit Pipeline's bandit feedback.
    Users appear as keyed hashes, never by id.

    Examples:

      tipbench events export > events.jsonl

      tipbench events export --format dsjson --policy egreedy/v1 --out decisions.dsjson
    """
    from tipbench.serve.event_export import export_events
    from tipbench.workflows.promotion import existing_log

    with existing_log(load_settings().home) as database, _target(out) as file:
        count = 0
        for line in export_events(database, format_.value, policy=policy):
            file.write(line + "\n")
            count += 1
    print_message(f"{plural(count, 'line')} exported")


@app.command("evaluate")
def evaluate(
    policy: Annotated[str, typer.Option("--policy", metavar="POLICY", help="The policy to evaluate.")],
    logged_by: Annotated[
        str | None,
        typer.Option("--logged-by", metavar="POLICY", help="Whose decisions are used. [default: the active policy]"),
    ] = None,
    prior: Annotated[
        Path | None, typer.Option("--prior", metavar="FILE", help="A prior of the evaluated policy.")
    ] = None,
    catalogue: Annotated[
        Path | None,
        typer.Option("--catalogue", metavar="FILE", help="A tip catalogue with the judges' scores by scale."),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Estimate a policy's value from another one's decisions.

    Also shows whether judged quality predicts completion. The policy's probabilities are computed again at every logged
    decision, from the same user's earlier rewards. IPS, SNIPS and DR are estimates of its mean reward; DM, the reward
    model alone, is shown and decides nothing. Intervals are 95 %, clustered by user. A scale's rank correlation with
    completion needs 30 tips with outcomes. Exit 3 if there is not enough data.

    Examples:

      tipbench events evaluate --policy egreedy/v3

      tipbench events evaluate --policy egreedy/v3 --logged-by egreedy/v1 --catalogue tips.toml --json
    """
    from tipbench.serve.catalogue import load_catalogue
    from tipbench.serve.prior import load_prior
    from tipbench.workflows.promotion import evaluate_log

    scores = load_catalogue(catalogue).scores if catalogue is not None else {}
    fitted = load_prior(prior) if prior is not None else None
    found = evaluate_log(load_settings().home, policy, logged_by, prior=fitted, scores=scores)
    if json_:
        print_json(found)
        return
    decisions, users = plural(found["decisions"], "decision"), plural(found["users"], "user")
    print(f"{policy} from {decisions} of {found['logged_by']} for {users}")
    print(f"logged reward  {interval_text(found['logged_reward'])}")
    for name, estimate in found["estimates"].items():
        print(f"{name:14} {interval_text(estimate)}")
    print(f"gain (DR)      {interval_text(found['gain'])}")
    weights = found["weights"]
    print(
        f"weights: mean {weights['mean']['mean']:.3f}{'' if weights['plausible'] else ' (implausible: not near 1)'}, "
        f"largest {weights['largest']:.1f}, effective sample {weights['effective_sample']:,.0f}"
    )
    for one in found["validity"]:
        print(validity_text(one))


@contextmanager
def _target(out: Path | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    check_output(out, "--out")
    try:
        with out.open("w", encoding="utf-8") as file:
            yield file
    except OSError as exc:
        raise UsageError(f"--out {out} could not be written: {exc.strerror}. Choose another file.") from exc
