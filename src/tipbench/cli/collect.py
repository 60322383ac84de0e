"""`tipbench collect`: generate what is missing and record it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tipbench.cli.console import cell_text, duration, print_json, print_table, say
from tipbench.cli.options import JsonOption, with_collect_options
from tipbench.plan.config import CollectConfig
from tipbench.settings import Settings

if TYPE_CHECKING:
    from tipbench.record.summary import Summary

_SHOWN_FAILURES = 10


@with_collect_options
def collect(config: CollectConfig, settings: Settings, json_: JsonOption = False) -> None:
    """Phase A: ask every model every prompt for every scenario, and record each answer in MLflow.

    Safe to stop and run again: it continues. One model's weights are in memory at a time.

    Examples:

      tipbench collect

      tipbench collect --models qwen2.5:0.5b,gemma3:1b --prompts v1,v2-mentor --n-scenarios 4

      tipbench collect --models embedded:smollm2:135m,baseline:template --n-tips 3 --num-predict 384
    """
    summary = run(config, settings)
    if json_:
        print_json(summary.to_json())
    else:
        show_summary(summary)
    if summary.failed:
        raise typer.Exit(1)


def run(config: CollectConfig, settings: Settings) -> Summary:
    """Collect with progress on stderr."""
    from tipbench.cli.progress import progress_view
    from tipbench.cli.session import surroundings
    from tipbench.record.collect import run_collect

    with progress_view() as view:
        return run_collect(config, surroundings(settings, config, view))


def show_summary(summary: Summary) -> None:
    """The objective measures per pair, the evidence, and where to look."""
    print_table(
        f"{summary.experiment}: {summary.cells} cells, {summary.generated} generated now, "
        f"{summary.recorded_before} recorded before, {summary.failed} failed; {duration(summary.seconds)}",
        ["model", "prompt", "answers", "failed", "no tip", "format ok", "overlong", "diversity", "latency s", "tok/s"],
        [
            [
                model,
                prompt,
                pair.answered,
                pair.failed,
                pair.floored,
                _percent(pair.mean("format_ok")),
                _percent(pair.mean("overlong")),
                pair.mean("diversity"),
                pair.mean("latency_s"),
                pair.mean("tokens_per_s"),
            ]
            for (model, prompt), pair in summary.tally.pairs.items()
        ],
        left=2,
    )
    if summary.evidence is not None and summary.evidence.samples:
        say(f"memory: {summary.evidence.sentence()}")
    for model, reason in summary.refused.items():
        say(f"refused: {model}: {reason}")
    for failure in summary.failures[:_SHOWN_FAILURES]:
        say(f"failed: {cell_text(failure)}")
    if len(summary.failures) > _SHOWN_FAILURES:
        say(f"… and {len(summary.failures) - _SHOWN_FAILURES} more; `tipbench runs list --state failed` lists them")
    if summary.failures:
        say("run the same command again to try the failed cells once more")
    if summary.experiment_url:
        say(f"look at it: {summary.experiment_url}")


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"
