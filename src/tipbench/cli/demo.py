"""`tipbench demo`: the whole flow on embedded parts, without Ollama."""

from __future__ import annotations

import typer

from tipbench.cli.collect import run, show_summary
from tipbench.cli.console import print_json, say
from tipbench.cli.models import fetch_with_progress
from tipbench.cli.options import JsonOption, MlflowOption
from tipbench.settings import load_settings

EXPERIMENT = "tip-bench-demo"
DEMO = {
    "models": "baseline:template,embedded:smollm2:135m",
    "n_tips": 3,
    "n_scenarios": 4,
    "num_predict": 384,
    "experiment": EXPERIMENT,
}


def demo(mlflow_url: MlflowOption = None, json_: JsonOption = False) -> None:
    """Run the whole flow on embedded parts: no Ollama needed.

    A real 135M-parameter model and a no-model baseline answer three prompts for four scenarios; everything is
    recorded in a local MLflow. A second demo continues the first.
    """
    settings = load_settings()
    config = settings.collect_config({**DEMO, "mlflow_url": mlflow_url})
    fetch_with_progress(settings)
    summary = run(config, settings)
    if json_:
        print_json(summary.to_json())
    else:
        show_summary(summary)
        say(_NEXT)
    if summary.failed:
        raise typer.Exit(1)


_NEXT = f"""
What next
  tipbench runs list --experiment {EXPERIMENT}     every answer; `runs show ID` prints one with its prompt
  tipbench plan                                     with Ollama running: what a real benchmark would do
  tipbench collect                                  …and do it
  tipbench mlflow down                              stop the local MLflow (its data stay)"""
