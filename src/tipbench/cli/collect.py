"""`tipbench collect`: generate and record missing cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.models import installed_models_hint
from tipbench.cli.options import JsonOption, open_or_start_mlflow, with_collect_options
from tipbench.cli.progress import progress_view, write_event
from tipbench.errors import ModelRefused
from tipbench.files import writable_home
from tipbench.plan.collect_config import CollectConfig
from tipbench.settings import Settings
from tipbench.text import duration, number, percent

if TYPE_CHECKING:
    from tipbench.record.events import Event
    from tipbench.record.summary import Summary

_MAX_FAILURES_SHOWN = 10


@with_collect_options
def collect(config: CollectConfig, settings: Settings, json_: JsonOption = False) -> None:
    """Generate missing cells and record them in MLflow.

    Every model answers every prompt for every scenario; each answer becomes an MLflow run.
    Only one model is in memory at a time. Safe to interrupt: running it again continues.

    Examples:

      tipbench collect

      tipbench collect --models qwen2.5:0.5b,gemma3:1b --prompts v1,v2-mentor --n-scenarios 4

      tipbench collect --models embedded:smollm2:135m,baseline:template --n-tips 3 --num-predict 384
    """
    summary = collect_with_progress(config, settings)
    if json_:
        print_json(summary.to_json())
    else:
        show_summary(summary)
    if summary.failed:
        raise typer.Exit(1)


def collect_with_progress(config: CollectConfig, settings: Settings) -> Summary:
    """Run a collect and show its progress on stderr."""
    from tipbench.generate.engine import free_memory
    from tipbench.record.collect import CollectEnvironment, run_collect

    try:
        with progress_view() as show_progress:

            def observer(event: Event) -> None:
                show_progress(event)
                write_event(event)

            environment = CollectEnvironment(
                home=writable_home(settings.home),
                open_mlflow=lambda: open_or_start_mlflow(settings, config.mlflow_url),
                free_memory=lambda model: free_memory(model, config),
                observer=observer,
            )
            return run_collect(config, environment)
    except ModelRefused as exc:
        hint = installed_models_hint("collect", config, settings)
        if hint is None:
            raise
        raise ModelRefused(f"{exc} {hint}") from exc


def show_summary(summary: Summary) -> None:
    """Print the metrics of each pair, and messages on memory, refused models, failures and the MLflow URL."""
    print(
        f"{summary.experiment}: {summary.cells} cells, {summary.generated} generated now, "
        f"{summary.recorded_before} recorded before, {summary.failed} failed; {duration(summary.seconds)}\n"
    )
    columns = ("model", "prompt", "cells", "failed", "no tip", "format", "overlong", "latency", "tok/s", "diversity")
    rows = []
    for (model, prompt), totals in summary.totals_by_pair.items():
        latency = number(totals.mean("latency_s"))
        rows.append(
            [
                model,
                prompt,
                totals.answered + totals.failed,
                totals.failed,
                totals.floored,
                percent(totals.mean("format_ok")),
                percent(totals.mean("overlong")),
                None if latency is None else f"{latency} s",
                number(totals.mean("tokens_per_s"), ".1f"),
                totals.mean("diversity"),  # rounded by `print_table`
            ]
        )
    print_table(columns, rows, text_columns=("model", "prompt"), n_always_shown=columns.index("format") + 1)
    print(flush=True)  # before the messages on stderr
    if summary.evidence is not None and summary.evidence.samples:
        print_message(f"memory: {summary.evidence.sentence()}")
    for reason in summary.refused.values():
        print_message(f"refused: {reason}")
    for failure in summary.failures[:_MAX_FAILURES_SHOWN]:
        print_message(f"failed: {failure}")
    if not_shown := summary.failures[_MAX_FAILURES_SHOWN:]:
        print_message(f"… and {len(not_shown)} more; `tipbench runs list --state failed` lists them")
    if summary.failures:
        print_message("run the same command again to retry the failed cells")
    if summary.experiment_url:
        print_message(f"MLflow: {summary.experiment_url}")
