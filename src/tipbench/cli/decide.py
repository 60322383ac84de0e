"""`tipbench decide`: record a decision with its evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment, open_experiment
from tipbench.errors import UsageError
from tipbench.files import check_output, write_output
from tipbench.settings import load_settings
from tipbench.text import printable_lines


def decide(
    choose: Annotated[str, typer.Option(metavar="MODEL/PROMPT", help="The chosen pair.")],
    because: Annotated[str, typer.Option(metavar="TEXT", help="The reason, 1 to 2000 characters.")],
    experiment: ExperimentOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md", help="New file for the record; - for stdout. [default: decision-EXPERIMENT-TIME.md]"
        ),
    ] = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Record a decision with its evidence.

    Saves the leaderboard, the scores, the hashes and the reason as a run in MLflow and as a Markdown file. The record
    states where the scores do not support the choice: if the pair does not lead, is tied with others,
    or has only provisional scores. Every call adds a new decision; earlier ones are never replaced.

    Examples:

      tipbench decide --choose qwen2.5:0.5b/v2-mentor --because "Leads, and is the fastest of those it ties with."

      tipbench decide --experiment tip-bench-may --choose gemma3:1b/v1 --because "Licence." --out docs/choice.md
    """
    from tipbench.compare.decision import decide as record_decision
    from tipbench.compare.decision import decision_markdown, validate_reason
    from tipbench.judge.sheet_store import now_iso
    from tipbench.workflows.board import parse_pair_option

    settings = load_settings()
    chosen, reason = parse_pair_option(choose, "choose"), validate_reason(because)
    decided_at = now_iso()
    name = chosen_experiment(settings, experiment)
    path = None
    if str(out) != "-":  # a dash is stdout
        stamp = decided_at[:19].replace("-", "").replace(":", "")  # such as 20260503T101500
        path = out or Path(f"decision-{name.replace('/', '-')}-{stamp}Z.md")
        check_output(path, "--out")
        if path.exists():
            raise UsageError(f"--out must be a new file; {path} exists. Choose another name.")
    with open_experiment(settings, mlflow_url, name) as (store, stored_experiment):
        decision, run_id = record_decision(store, stored_experiment, chosen, reason, at=decided_at)
    text = decision_markdown(decision)
    if path is not None:
        next_step = f"The decision is saved in MLflow: print it with `tipbench runs show {run_id}`."
        write_output(path, text, "--out", next_step)
    if json_:
        print_json({**decision.to_json(), "run_id": run_id, "file": str(path) if path else None})
        return
    if path is None:
        print(printable_lines(text), end="")
        for sentence in decision.findings:
            print_message(sentence)
    else:
        print(printable_lines("\n".join([f"decided: {chosen} in {name}, written to {path}", *decision.findings])))
    print_message(f"saved in MLflow as run {run_id}")
