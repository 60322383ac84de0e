"""`tipbench catalogue build`: turn a pair's judged tips into candidates for the policy server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, command_group, open_experiment
from tipbench.errors import UsageError
from tipbench.files import check_output, write_output
from tipbench.settings import load_settings
from tipbench.text import plural, printable_lines

app = command_group("Build tips for the policy server from a judged experiment.")


@app.command("build")
def build(
    pair: Annotated[
        str, typer.Option(metavar="MODEL/PROMPT", help="The pair whose tips are used, as `compare` shows it.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="The file to write; it must not exist yet.")],
    experiment: ExperimentOption = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Write a tip catalogue from a judged experiment.

    The catalogue has the pair's scored tips that have a valid format and keep to the word limit, each with its
    composite score, time slot, duration, and a category derived from keywords. It is a TOML file to read and edit;
    `tipbench serve --catalogue FILE` validates it and picks from it when a request has no candidates.

    Examples:

      tipbench catalogue build --experiment tip-bench-may --pair qwen2.5:0.5b/v2-mentor --out tips.toml
    """
    from tipbench.workflows.board import parse_pair_option
    from tipbench.workflows.catalogue import build_catalogue

    chosen_pair = parse_pair_option(pair, "pair")
    if out.exists():
        raise UsageError(f"--out {out} exists, and may have been edited. Choose another file, or delete it first.")
    check_output(out, "--out")
    with open_experiment(load_settings(), mlflow_url, experiment) as (store, stored_experiment):
        catalogue = build_catalogue(store, stored_experiment, chosen_pair)
    write_output(out, catalogue.to_toml(), "--out")
    categories = Counter(tip.category for tip in catalogue.tips)
    if catalogue.provisional:
        print_message("warning: the scores are provisional; judge the tips before you serve them to people")
    if json_:
        print_json({**catalogue.model_dump(exclude={"tips"}), "tips": len(catalogue.tips), "categories": categories})
        return
    category_counts = ", ".join(f"{category} {count}" for category, count in categories.most_common())
    tips = plural(len(catalogue.tips), "tip")
    print(printable_lines(f"{tips} of {chosen_pair} written to {out} ({category_counts})"))
