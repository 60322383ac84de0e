"""`tipbench runs list / show`: read recorded runs."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.console import make_console, print_json, print_message
from tipbench.cli.experiments import print_rows
from tipbench.cli.options import (
    ExperimentOption,
    JsonOption,
    ListFormat,
    ListFormatOption,
    MlflowOption,
    WhereOption,
    chosen_experiment,
    command_group,
    open_experiment,
    open_store,
)
from tipbench.errors import MlflowError, UsageError
from tipbench.settings import load_settings
from tipbench.text import printable_lines

if TYPE_CHECKING:
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.run import StoredRun

app = command_group("List and show recorded runs.")

_MAX_TABLE_ROWS = 50
_FULL_ID_CHARS = 32
_SHORT_ID_CHARS = 8
_TEXT_COLUMNS = ("run", "model", "prompt", "scenario", "state")
_NUMBER_COLUMNS = ("tips", "format_ok", "overlong", "latency_s", "tokens_per_s", "diversity", "composite")
_TABLE_COLUMNS = (*_TEXT_COLUMNS, *_NUMBER_COLUMNS)
_ALL_COLUMNS = (*_TABLE_COLUMNS, "repeat", "host", "failure", "conditions", "model_digest")
# Stored as floats in MLflow, and printed as integers if whole. `format_ok` is the mean over the judges.
_INTEGER_COLUMNS = ("tips", "format_ok")


@app.command("list")
def list_runs(
    experiment: ExperimentOption = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Only this model.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="VERSION", help="Only this prompt version.")] = None,
    scenario: Annotated[str | None, typer.Option(metavar="ID", help="Only this scenario, as persona@slot.")] = None,
    state: Annotated[str | None, typer.Option(metavar="pending|judged|failed", help="Only this state.")] = None,
    where: WhereOption = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="NUMBER", help=f"Maximum number of runs. [default: {_MAX_TABLE_ROWS} in a table, else all]"
        ),
    ] = None,
    mlflow_url: MlflowOption = None,
    format_: ListFormatOption = "table",
    json_: JsonOption = False,
) -> None:
    """List recorded cells, newest first.

    Examples:

      tipbench runs list --model qwen2.5:0.5b --state failed

      tipbench runs list --experiment tip-bench-demo --format csv > runs.csv
    """
    from tipbench.record.reader import FILTERS, run_json, run_values, search_cells
    from tipbench.record.run import RunState
    from tipbench.workflows.board import parse_filters

    if state is not None and state not in set(RunState):
        raise UsageError(f"--state is one of {', '.join(RunState)} (got {state!r}).")
    options = {"model": model, "prompt": prompt, "scenario": scenario, "state": state}
    option_filters = {FILTERS[key]: value for key, value in options.items() if value is not None}
    filters = dict(parse_filters(where or (), option_filters))
    output_format: ListFormat = "json" if json_ else format_
    as_table = output_format == "table"
    max_rows = _MAX_TABLE_ROWS if limit is None and as_table else limit
    with open_experiment(load_settings(), mlflow_url, experiment) as (store, stored_experiment):
        max_read = None if max_rows is None else max_rows + 1  # one more, to detect that there are more
        runs = list(islice(search_cells(store, stored_experiment.experiment_id, filters), max_read))
    shown = runs[:max_rows]
    if output_format == "json":
        print_json([run_json(run) for run in shown])
    else:
        rows = [run_values(run) for run in shown]
        for row in rows:
            for name in _INTEGER_COLUMNS:
                if row[name] is not None and float(row[name]).is_integer():
                    row[name] = int(row[name])
            run_id = str(row["run_id"])
            row["run"] = run_id[:_SHORT_ID_CHARS] if as_table else run_id
        print_rows(
            _TABLE_COLUMNS if as_table else _ALL_COLUMNS,
            rows,
            output_format,
            text_columns=_TEXT_COLUMNS,
            n_always_shown=len(_TEXT_COLUMNS),
        )
    if not runs:
        name = stored_experiment.name
        print_message(f"no run of {name} matches" if filters else f"{name} has no runs yet")
    elif limit is None and len(runs) > len(shown):
        print_message(f"the newest {max_rows} are shown; --limit shows more, --format csv or json shows all")


@app.command("show")
def show_run(
    run_id: Annotated[
        str, typer.Argument(metavar="RUN", help="The run's id, or its beginning as `runs list` prints it.")
    ],
    experiment: ExperimentOption = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Show one run with all its texts: prompt, raw answer, tips.

    A full id is found in any experiment, a prefix only in the given one.

    Examples:

      tipbench runs show 1b9d6bcd --experiment tip-bench-demo

      tipbench runs show 1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed --json
    """
    from tipbench.record.reader import run_json

    settings = load_settings()
    name = chosen_experiment(settings, experiment)
    with open_store(settings, mlflow_url) as store:
        full_id = run_id if len(run_id) >= _FULL_ID_CHARS else _expand_id(store, name, run_id)
        try:
            run, texts = store.get(full_id)
        except MlflowError as exc:
            # A 404 without MLflow's error code comes from another kind of server.
            if exc.status == 404 and exc.code:
                raise UsageError(
                    f"Unknown run {full_id} in MLflow at {store.url}. `tipbench runs list` shows the recorded runs."
                ) from exc
            raise
    if json_:
        print_json(run_json(run) | {"texts": texts})
    else:
        _print_run(run, texts)


def _expand_id(store: MlflowStore, experiment: str, prefix: str) -> str:
    """Return the only run id that begins with `prefix`. Raises UsageError if there is none, or more than one."""
    from tipbench.record.reader import search_cells
    from tipbench.workflows.mlflow import existing_experiment

    stored_experiment = existing_experiment(store, experiment)
    runs = search_cells(store, stored_experiment.experiment_id, {})
    matching_ids = [run.run_id for run in runs if run.run_id.startswith(prefix)]
    if len(matching_ids) == 1:
        return matching_ids[0]
    if matching_ids:
        problem, advice = f"{len(matching_ids)} runs begin", "Give more of the id"
    else:
        problem, advice = "No run begins", "Give its --experiment"
    raise UsageError(
        f"{problem} with {prefix!r} in {stored_experiment.name}. {advice}; `tipbench runs list` shows the runs."
    )


def _print_run(run: StoredRun, texts: dict[str, str]) -> None:
    from rich.text import Text

    console = make_console()
    for title, values in (("params", run.params), ("metrics", run.metrics), ("tags", run.tags)):
        console.print(Text(title, style="bold"))
        for key, value in sorted(values.items()):
            console.print(Text(printable_lines(f"  {key}: {value}")), soft_wrap=True)
    for key, text in sorted(texts.items()):
        console.print(Text(printable_lines(f"\n── {key} ({len(text)} characters)"), style="bold"))
        console.print(Text(printable_lines(text)), soft_wrap=True)
