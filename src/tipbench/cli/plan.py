"""`tipbench plan`: show what `collect` would do with the same options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.models import installed_hint
from tipbench.cli.options import JsonOption, with_collect_options
from tipbench.plan.config import CollectConfig
from tipbench.settings import Settings
from tipbench.text import duration, file_size, parameter_count, plural

if TYPE_CHECKING:
    from tipbench.record.plan_check import Plan


@with_collect_options
def plan(config: CollectConfig, settings: Settings, json_: JsonOption = False) -> None:
    """Show what collect would do, without running it.

    Shows all cells, those already recorded, refused models with reasons, memory and time, the differences that the
    scenarios can find, and how long judging takes.
    Takes the options of collect; nothing is generated or written.

    Examples:

      tipbench plan

      tipbench plan --models llama3.2:3b,gemma3:4b --suite tips-32 --json
    """
    from tipbench.generate.engine import refused_start
    from tipbench.record.plan_check import plan_json
    from tipbench.workflows.plan_run import plan_outlook, plan_run

    made, warnings = plan_run(
        config, settings.home, lambda: settings.mlflow.open(config.mlflow_url, report=print_message)
    )
    outlook = plan_outlook(made)
    if json_:
        print_json(plan_json(made) | {"outlook": outlook.to_json()})
    else:
        _show(made)
        if made.models:
            print(outlook.text)
    for warning in warnings:
        print_message(f"warning: {warning}")
    for reason in made.refused.values():
        print_message(f"refused: {reason}")
    if refused_start(made.facts, made.refused, config, "") is not None:
        hint = "Pass --skip-refused to run the others." if made.facts else installed_hint("plan", config, settings)
        if hint:
            print_message(hint)
        raise typer.Exit(2)


def _show(made: Plan) -> None:
    if not made.models:
        print("nothing to generate: every model is refused")
        return
    scenarios = len({cell.cell.scenario for cell in made.cells})
    print(
        f"{made.config.experiment}: suite {made.suite.name}, {plural(scenarios, 'scenario')}, "
        f"{plural(len(made.config.prompt_versions), 'prompt')}, {plural(made.config.n_tips, 'tip')} per answer, "
        f"rubric {made.suite.rubric.id}\n"
    )
    print_table(
        ["model", "parameters", "memory", "cells", "recorded", "missing", "time"],
        [
            [
                model.model,
                parameter_count(model.params_b),
                file_size(model.memory_bytes),
                model.cells,
                model.recorded,
                model.cells - model.recorded,
                _time(model.seconds, measured=model.measured),
            ]
            for model in made.models
        ],
        text=["model"],
    )
    cells = plural(len(made.cells), "cell")
    if made.missing:
        failed = sum(cell.key in made.recorded.failed for cell in made.missing)
        again = f" ({failed:,} of them failed before)" if failed else ""
        time = f"about {duration(made.seconds)}" if made.seconds is not None else "time unknown"
        recorded = len(made.cells) - len(made.missing)
        print(f"\n{cells}, {recorded:,} recorded, {len(made.missing):,} to generate{again}; {time}")
    else:
        print(f"\n{cells}, all recorded; nothing to generate")
    waiting = sum(cell.key in made.recorded.journalled for cell in made.cells)
    if waiting:
        print(f"{plural(waiting, 'finished cell')} in the journal: the next collect records them first")
    if made.stale:
        print(f"{plural(made.stale, 'recorded answer')} stale: from an earlier version of the model or of the prompt")


def _time(seconds: float | None, *, measured: bool) -> str | None:
    if seconds is None:
        return None
    return duration(seconds) if measured or not seconds else f"~{duration(seconds)}"
