"""`tipbench demo`: the whole flow on embedded parts, without Ollama."""

from __future__ import annotations

from typing import Annotated

import typer

from tipbench.cli.collect import run, show_summary
from tipbench.cli.console import print_json, say
from tipbench.cli.models import fetch_with_progress
from tipbench.cli.options import JsonOption
from tipbench.cli.session import leads_to, local_mlflow
from tipbench.plan.config import CollectConfig, make_config
from tipbench.settings import Settings, load_settings

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
        typer.Option("--mlflow-url", metavar="URL", help="Another MLflow server than the demo's own local one."),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Run the whole flow on embedded parts: no Ollama needed.

    A real 135M-parameter model and a no-model baseline answer three prompts for four scenarios; everything is
    recorded in a local MLflow. A second demo continues the first. Settings other than TIPBENCH_HOME
    do not change it.
    """
    settings = load_settings()
    config = demo_config(mlflow_url)
    fetch_with_progress(settings)
    if config.mlflow_url is None:
        config = demo_config(local_mlflow(settings))
    summary = run(config, settings)
    if json_:
        print_json(summary.to_json())
    else:
        show_summary(summary)
        say(_NEXT.format(where=_where(settings, config)))
    if summary.failed:
        raise typer.Exit(1)


def demo_config(mlflow_url: str | None) -> CollectConfig:
    """The demo's own configuration: whatever the user has set up for real benchmarks does not change it."""
    return make_config({**DEMO, "mlflow_url": mlflow_url}, {"mlflow_url": "--mlflow-url"})


def _where(settings: Settings, config: CollectConfig) -> str:
    """The option that makes a reading command look where the demo recorded; empty when it does so by itself."""
    from tipbench.addresses import without_login

    if not config.mlflow_url or leads_to(settings, config.mlflow_url):
        return ""
    return f" --mlflow-url {without_login(config.mlflow_url)}"


_NEXT = f"""
What next
  tipbench runs list --experiment {EXPERIMENT}{{where}}
                                                    every answer; `runs show ID` prints one with its prompt
  tipbench plan                                     with Ollama running: what a real benchmark would do
  tipbench collect                                  …and do it
  tipbench mlflow down                              stop the local MLflow (its data stay)"""
