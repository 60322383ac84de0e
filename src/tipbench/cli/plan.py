"""`tipbench plan`: show what `collect` would do with the same options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.models import installed_models_hint
from tipbench.cli.options import JsonOption, with_collect_options
from tipbench.plan.collect_config import CollectConfig
from tipbench.settings import Settings
from tipbench.text import duration, file_size, parameter_count, plural

if TYPE_CHECKING:
    from tipbench.record.plan import Plan


@with_collect_options
def plan(config: CollectConfig, settings: Settings, json_: JsonOption = False) -> None:
    """Show what collect would do, without running it.

    Shows how many cells there are and how many are recorded, refused models with reasons, memory and time, the smallest
    difference between pairs that can be detected, and how long judging takes. Takes the options of collect; nothing is
    generated or written.

    Examples:

      tipbench plan

      tipbench plan --models llama3.2:3b,gemma3:4b --suite tips-32 --json
    """
    from tipbench.generate.engine import refusal_error
    from tipbench.record.plan import plan_json
    from tipbench.workflows.plan_collect import plan_collect, plan_outlook

    planned, warnings = plan_collect(
        config, settings.home, lambda: settings.mlflow.open(config.mlflow_url, report=print_message)
    )
    outlook = plan_outlook(planned)
    if json_:
        print_json(plan_json(planned) | {"outlook": outlook.to_json()})
    else:
        _print_plan(planned)
        if planned.models:
            print(outlook.text)
    for warning in warnings:
        print_message(f"warning: {warning}")
    for reason in planned.refused.values():
        print_message(f"refused: {reason}")
    if refusal_error(planned.facts, planned.refused, config) is not None:
        if planned.facts:  # some models are accepted
            print_message("Pass --skip-refused to run the others.")
        elif hint := installed_models_hint("plan", config, settings):
            print_message(hint)
        raise typer.Exit(2)


def _print_plan(planned: Plan) -> None:
    if not planned.models:
        print("nothing to generate: every model is refused")
        return
    n_scenarios = len({planned_cell.cell.scenario for planned_cell in planned.cells})
    print(
        f"{planned.config.experiment}: suite {planned.suite.name}, {plural(n_scenarios, 'scenario')}, "
        f"{plural(len(planned.config.prompt_versions), 'prompt')}, {plural(planned.config.n_tips, 'tip')} per answer, "
        f"rubric {planned.suite.rubric.id}\n"
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
                _time_text(model.seconds, measured=model.measured),
            ]
            for model in planned.models
        ],
        text_columns=["model"],
    )
    cells = plural(len(planned.cells), "cell")
    if planned.missing:
        n_recorded = len(planned.cells) - len(planned.missing)
        n_failed = sum(cell.key in planned.recorded.failed for cell in planned.missing)
        failed_before = f" ({n_failed:,} of them failed before)" if n_failed else ""
        time_text = f"about {duration(planned.seconds)}" if planned.seconds is not None else "time unknown"
        print(f"\n{cells}, {n_recorded:,} recorded, {len(planned.missing):,} to generate{failed_before}; {time_text}")
    else:
        print(f"\n{cells}, all recorded; nothing to generate")
    if n_journalled := sum(cell.key in planned.recorded.journalled for cell in planned.cells):
        print(f"{plural(n_journalled, 'finished cell')} in the journal: the next collect records them first")
    if planned.n_stale:
        print(
            f"{plural(planned.n_stale, 'recorded answer')} stale: from an earlier version of the model or of the prompt"
        )


def _time_text(seconds: float | None, *, measured: bool) -> str | None:
    if seconds is None:
        return None
    is_estimate = seconds > 0 and not measured
    return f"~{duration(seconds)}" if is_estimate else duration(seconds)
