"""`tipbench demo`: the whole workflow with built-in models, without Ollama."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from tipbench.cli.collect import collect_with_progress, show_summary
from tipbench.cli.compare import show_board
from tipbench.cli.console import print_json, print_message
from tipbench.cli.models import fetch_with_progress
from tipbench.cli.options import JsonOption, open_experiment, open_store
from tipbench.errors import NotEnoughData, TipbenchError
from tipbench.files import writable_home
from tipbench.http import strip_login
from tipbench.plan.collect_config import CollectConfig, make_config
from tipbench.settings import Settings, load_settings

EXPERIMENT = "tip-bench-demo"
DEMO_OPTIONS = {
    "models": "baseline:template,embedded:smollm2:135m",
    "n_tips": 3,
    "num_predict": 384,
    "experiment": EXPERIMENT,
}


def demo(
    mlflow_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The MLflow server. [default: the demo's local one]")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Run the whole workflow on built-in models, without Ollama.

    A real 135M-parameter model answers three prompts for eight scenarios. A template, the reference without a model,
    answers the scenarios without a prompt. The answers are recorded in a local MLflow, the rules judge scores them
    provisionally, and the leaderboard is printed. Running the demo again continues it. Settings other than
    TIPBENCH_HOME are ignored.

    Examples:

      tipbench demo
    """
    from tipbench.compare.cells import CellFilter
    from tipbench.compare.leaderboard import read_leaderboard, record_board
    from tipbench.judge.export import ExportRequest
    from tipbench.judge.rules import RulesJudge
    from tipbench.judge.run import JudgeEnvironment, run_judge

    settings = load_settings()
    config = demo_config(local_mlflow(settings) if mlflow_url is None else mlflow_url)
    with open_store(settings, config.mlflow_url) as store:
        store.experiment(EXPERIMENT)  # raises before the download if MLflow is unavailable
    fetch_with_progress(settings)
    summary = collect_with_progress(config, settings)
    with open_experiment(settings, config.mlflow_url, config.experiment) as (store, experiment):
        with contextlib.suppress(NotEnoughData):  # everything was judged by an earlier demo
            run_judge(store, experiment, RulesJudge(), ExportRequest(), environment=JudgeEnvironment(print_message))
        board, _ = read_leaderboard(store, experiment, CellFilter())
        record_board(store, experiment.experiment_id, board)
    if json_:
        print_json(summary.to_json() | {"leaderboard": board.to_json()})
    else:
        show_summary(summary)
        print()
        show_board(board)
        sys.stdout.flush()  # before the message on stderr
        url = config.mlflow_url
        mlflow_option = ""
        if url and not is_default_server(settings, url):
            mlflow_option = f" --mlflow-url {strip_login(url)}"
        print_message(_next_steps(mlflow_option))
    if summary.failed:
        raise typer.Exit(1)


def demo_config(mlflow_url: str | None) -> CollectConfig:
    """Return the demo's configuration. The user's settings do not change it."""
    return make_config({**DEMO_OPTIONS, "mlflow_url": mlflow_url}, sources={"mlflow_url": "--mlflow-url"})


def local_mlflow(settings: Settings) -> str:
    """Start the local MLflow if needed and return its URL. A server on MLflow's usual port is ignored."""
    from tipbench.record.mlflow import find_mlflow

    return find_mlflow(None, writable_home(settings.home), start=True, report=print_message, usual_urls=()).url


def is_default_server(settings: Settings, url: str) -> bool:
    """Return whether a command without --mlflow-url reads from the server at `url`."""
    from tipbench.record.mlflow import find_mlflow

    try:
        default = find_mlflow(settings.get("mlflow_url"), settings.home, start=False, report=print_message)
        server = find_mlflow(url, settings.home, start=False, report=print_message)
    except TipbenchError:
        return False
    return default.identity == server.identity


def _next_steps(mlflow_option: str) -> str:
    return f"""
What next
- judge by hand: export a blind sheet, fill it in, then run `tipbench judge apply`:
  tipbench judge export --experiment {EXPERIMENT} --judge YOU --out sheet.json{mlflow_option}
- the leaderboard with charts and all answers:
  tipbench compare {EXPERIMENT} --html report.html{mlflow_option}
- the web panel, to start runs, judge answers and decide:
  tipbench panel{mlflow_option}
- all answers; `tipbench runs show ID` prints one with its prompt:
  tipbench runs list --experiment {EXPERIMENT}{mlflow_option}
- a real benchmark, with Ollama running: `tipbench plan`, then `tipbench collect`
- stop the local MLflow; its data is kept: `tipbench mlflow down`"""
