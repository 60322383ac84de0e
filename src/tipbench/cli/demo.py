"""`tipbench demo`: the whole workflow with built-in models, without Ollama."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.collect import run, show_summary
from tipbench.cli.compare import show_board
from tipbench.cli.console import print_json, print_message
from tipbench.cli.models import fetch_with_progress
from tipbench.cli.options import JsonOption
from tipbench.cli.session import is_default_server, local_mlflow
from tipbench.http import strip_login
from tipbench.plan.config import CollectConfig, make_config
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.compare.leaderboard import Leaderboard

EXPERIMENT = "tip-bench-demo"
DEMO = {
    "models": "baseline:template,embedded:smollm2:135m",
    "n_tips": 3,
    "n_scenarios": 4,
    "num_predict": 384,
    "experiment": EXPERIMENT,
}


def demo(
    mlflow_url: Annotated[
        str | None,
        typer.Option("--mlflow-url", metavar="URL", help="The MLflow server. [default: the demo's local one]"),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Run the whole workflow on built-in models, without Ollama.

    A real 135M-parameter model and a baseline without a model answer three prompts for four scenarios. The answers are
    recorded in a local MLflow, the rules judge scores them provisionally, and the leaderboard is printed. Running the
    demo again continues it. Settings other than TIPBENCH_HOME are ignored.
    """
    settings = load_settings()
    config = demo_config(mlflow_url)
    fetch_with_progress(settings)
    if config.mlflow_url is None:
        config = demo_config(local_mlflow(settings))
    summary = run(config, settings)
    board = _judged_by_rules(settings, config)
    if json_:
        print_json(summary.to_json() | {"leaderboard": board.to_json()})
    else:
        show_summary(summary)
        print()
        show_board(board)
        print_message(_NEXT.format(where=_where(settings, config)))
    if summary.failed:
        raise typer.Exit(1)


def _judged_by_rules(settings: Settings, config: CollectConfig) -> Leaderboard:
    """Score unscored cells with the rules judge, and return the leaderboard."""
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.compare.cells import CellFilter
    from tipbench.compare.leaderboard import read_leaderboard, record_board
    from tipbench.errors import NotEnoughData
    from tipbench.judge.export import ExportRequest
    from tipbench.judge.rules import RulesJudge
    from tipbench.judge.run import run_judge

    with open_store(settings, config.mlflow_url) as store:
        found = existing_experiment(store, config.experiment)
        with contextlib.suppress(NotEnoughData):  # everything was judged by an earlier demo
            run_judge(store, found, RulesJudge(), ExportRequest(), report=print_message)
        board, _ = read_leaderboard(store, found, CellFilter())
        record_board(store, found.experiment_id, board)
        return board


def demo_config(mlflow_url: str | None) -> CollectConfig:
    """Return the demo's configuration, which ignores the user's settings."""
    return make_config({**DEMO, "mlflow_url": mlflow_url}, {"mlflow_url": "--mlflow-url"})


def _where(settings: Settings, config: CollectConfig) -> str:
    """Return the --mlflow-url option that other commands need to read the demo's results; empty if not needed."""
    if not config.mlflow_url or is_default_server(settings, config.mlflow_url):
        return ""
    return f" --mlflow-url {strip_login(config.mlflow_url)}"


_NEXT = f"""
What next
  tipbench judge export --experiment {EXPERIMENT} --judge YOU --out sheet.json{{where}}
                                                    judge by hand: a blind sheet; fill it in, then `judge apply`
  tipbench compare {EXPERIMENT} --html report.html{{where}}
                                                    the leaderboard with charts and all answers
  tipbench panel{{where}}
                                                    the web panel: start, watch, judge, decide
  tipbench runs list --experiment {EXPERIMENT}{{where}}
                                                    all answers; `runs show ID` prints one with its prompt
  tipbench plan                                     with Ollama running: the plan of a real benchmark
  tipbench collect                                  … and run it
  tipbench mlflow down                              stop the local MLflow; its data is kept"""
