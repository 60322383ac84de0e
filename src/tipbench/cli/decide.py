"""`tipbench decide`: freeze a decision with its evidence."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.console import print_json, safe_text, say
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment
from tipbench.cli.pairs import read_pair
from tipbench.cli.writing import check_file, write_file
from tipbench.errors import UsageError
from tipbench.settings import load_settings

if TYPE_CHECKING:
    from tipbench.compare.decision import Decision
    from tipbench.compare.matrix import Pair
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.store import Experiment


def decide(
    choose: Annotated[str, typer.Option("--choose", metavar="MODEL/PROMPT", help="The pair that is chosen.")],
    because: Annotated[str, typer.Option("--because", metavar="TEXT", help="Why, in 1 to 2000 characters.")],
    experiment: ExperimentOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.md",
            help="A new file for the record; - is stdout. [default: decision-EXPERIMENT-TIME.md]",
        ),
    ] = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Freeze a decision with its evidence.

    The whole standing, the numbers, the hashes and the reason become a run in MLflow and a Markdown file. It says
    plainly where the numbers do not carry the choice: when the pair does not lead, cannot be told apart from others,
    or was scored provisionally only. Deciding again is another decision: nothing is replaced.

    Examples:

      tipbench decide --choose qwen2.5:0.5b/v2-mentor --because "Leads, and is the fastest of those it ties with."

      tipbench decide --experiment tip-bench-may --choose gemma3:1b/v1 --because "Licence." --out docs/choice.md
    """
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.compare.decision import checked_reason, decision_markdown, decision_run
    from tipbench.judge.judging import milliseconds, now_iso

    settings = load_settings()
    chosen, reason, at = read_pair(choose, "--choose"), checked_reason(because), now_iso()
    name = chosen_experiment(settings, experiment)
    path = _target(out, name, at)
    with open_store(settings, mlflow_url) as store:
        found = existing_experiment(store, name)
        decision = _decision(store, found, chosen, reason, at)
        run_id = store.record(found.experiment_id, decision_run(decision, milliseconds(at)))
        store.touch(found.experiment_id)
    text = decision_markdown(decision)
    if path is not None:
        kept = f"The decision is kept: `tipbench runs show {run_id}` has its text."
        write_file(path, text, "--out", kept)
    if json_:
        print_json({**decision.to_json(), "run_id": run_id, "file": str(path) if path else None})
        return
    if path is None:
        print(safe_text(text), end="")
    else:
        print(safe_text(f"decided: {chosen} in {name}, written to {path}"))
    for sentence in decision.findings:
        say(sentence) if path is None else print(safe_text(sentence))
    say(f"kept in MLflow as run {run_id}")


def _target(out: Path | None, experiment: str, at: str) -> Path | None:
    """Where the record goes; None is stdout. What was decided once is not written over."""
    if out is not None and str(out) == "-":
        return None
    stamp = at[:19].replace("-", "").replace(":", "")
    path = out or Path(f"decision-{experiment.replace('/', '-')}-{stamp}Z.md")
    check_file(path, "--out")
    if path.exists():
        raise UsageError(f"--out takes a new file; {path} exists, and may be an earlier decision. Choose another name.")
    return path


def _decision(store: MlflowStore, experiment: Experiment, chosen: Pair, reason: str, at: str) -> Decision:
    from tipbench.compare.cells import Question
    from tipbench.compare.decision import make_decision
    from tipbench.compare.reading import read_leaderboard

    board, cells = read_leaderboard(store, experiment, Question())
    return make_decision(board, cells, chosen, reason, decision_id=uuid.uuid4().hex, at=at)
