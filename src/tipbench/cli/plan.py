"""`tipbench plan`: show what `collect` would do with the same options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.options import JsonOption, with_collect_options
from tipbench.plan.config import CollectConfig
from tipbench.settings import Settings
from tipbench.text import duration, file_size, parameter_count, plural

if TYPE_CHECKING:
    from tipbench.plan.suite import Suite
    from tipbench.record.plan_check import Plan, Recorded


@with_collect_options
def plan(config: CollectConfig, settings: Settings, json_: JsonOption = False) -> None:
    """Show what collect would do, without running it.

    Shows all cells, those already recorded, refused models with reasons, memory and time.
    Takes the options of collect; nothing is generated or written.

    Examples:

      tipbench plan

      tipbench plan --models llama3.2:3b,gemma3:4b --suite tips-32 --json
    """
    from tipbench.cli.session import free_memory_for
    from tipbench.record.collect import dry_run
    from tipbench.record.plan_check import plan_json

    made = dry_run(
        config, settings.home, lambda suite: _recorded(config, settings, suite), lambda m: free_memory_for(m, config)
    )
    if json_:
        print_json(plan_json(made))
    else:
        _show(made)
    for model in made.models:
        if model.warning:
            print_message(f"warning: {model.warning}")
    for reason in made.refused.values():
        print_message(f"refused: {reason}")
    if made.refused and not (config.skip_refused and made.facts):
        raise typer.Exit(2)


def _recorded(config: CollectConfig, settings: Settings, suite: Suite) -> Recorded:
    """Read what is already recorded; does not start a local MLflow that has no data."""
    from tipbench.cli.session import journal_of, open_store
    from tipbench.errors import LocalServerError, MlflowUnavailable, NotEnoughData
    from tipbench.record.cell_run import RunContext
    from tipbench.record.journal import journalled_keys
    from tipbench.record.plan_check import Recorded, read_recorded

    try:
        with open_store(settings, config.mlflow_url) as store:
            journalled = frozenset(journalled_keys(journal_of(settings, config.mlflow_url, config.experiment)))
            experiment = store.experiment(config.experiment)
            if experiment is None:
                return Recorded(journalled=journalled)
            found = read_recorded(store, experiment.experiment_id, RunContext(config, suite, "").conditions)
            return replace(found, journalled=journalled)
    except NotEnoughData:
        return Recorded()
    except (LocalServerError, MlflowUnavailable) as exc:
        print_message(f"warning: {exc} The plan counts nothing as recorded.")
        return Recorded()


def _show(made: Plan) -> None:
    if not made.models:
        print("nothing to generate: every model is refused")
        return
    scenarios = len({cell.cell.scenario for cell in made.cells})
    print(
        f"{made.config.experiment}: suite {made.suite.name}, {plural(scenarios, 'scenario')}, "
        f"{plural(len(made.config.prompt_versions), 'prompt')}, {plural(made.config.n_tips, 'tip')} a cell, "
        f"rubric {made.suite.rubric.id}\n"
    )
    print_table(
        ["model", "parameters", "memory", "cells", "recorded", "to generate", "time"],
        [
            [
                model.model,
                parameter_count(model.params_b),
                file_size(model.memory_bytes),
                model.cells,
                model.recorded,
                model.cells - model.recorded,
                _time(model.seconds, model.measured),
            ]
            for model in made.models
        ],
        text=["model"],
    )
    print(f"\n{_total(made)}")
    waiting = sum(cell.key in made.recorded.journalled for cell in made.cells)
    if waiting:
        print(f"{plural(waiting, 'finished cell')} in the journal: the next collect records them first")
    if made.stale:
        print(f"{plural(made.stale, 'recorded answer')} stale: an earlier version of the model or of the prompt")


def _total(made: Plan) -> str:
    cells = plural(len(made.cells), "cell")
    if not made.missing:
        return f"{cells}, all recorded; nothing to generate"
    failed = sum(cell.key in made.recorded.failed for cell in made.missing)
    again = f" ({failed:,} of them failed before)" if failed else ""
    time = f"about {duration(made.seconds)}" if made.seconds is not None else "time unknown"
    recorded = len(made.cells) - len(made.missing)
    return f"{cells}, {recorded:,} recorded, {len(made.missing):,} to generate{again}; {time}"


def _time(seconds: float | None, measured: bool) -> str | None:
    if seconds is None:
        return None
    return duration(seconds) if measured or not seconds else f"roughly {duration(seconds)}"
