"""`tipbench runs list / show`: read back what was recorded."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

import typer

from tipbench.cli.console import out, print_json, safe_text
from tipbench.cli.experiments import Format, FormatOption, print_rows
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment
from tipbench.settings import load_settings

app = typer.Typer(help="Read back recorded runs.", no_args_is_help=True, rich_markup_mode=None)

_TABLE_LIMIT = 50


@app.command("list")
def list_runs(
    experiment: ExperimentOption = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Only this prompt version.")] = None,
    scenario: Annotated[str | None, typer.Option(help="Only this scenario, as persona@slot.")] = None,
    state: Annotated[str | None, typer.Option(help="Only pending, judged or failed.")] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", metavar="KEY=VALUE", help="Any tag, or params.NAME; repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"At most so many, newest first (table: {_TABLE_LIMIT}; else all).")
    ] = None,
    mlflow_url: MlflowOption = None,
    format_: FormatOption = Format.TABLE,
    json_: JsonOption = False,
) -> None:
    """List recorded cells, newest first.

    Examples:

      tipbench runs list --model qwen2.5:0.5b --state failed

      tipbench runs list --experiment tip-bench-demo --format csv > runs.csv
    """
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.record.reading import FILTERS, cells, read_filter, run_json

    named = {"model": model, "prompt": prompt, "scenario": scenario, "state": state}
    filters = {FILTERS[key]: value for key, value in named.items() if value is not None}
    filters |= dict(read_filter(text) for text in where or [])
    settings = load_settings()
    chosen = Format.JSON if json_ else format_
    most = limit or (_TABLE_LIMIT if chosen is Format.TABLE else None)
    name = chosen_experiment(settings, experiment)
    with open_store(settings, mlflow_url) as store:
        found = existing_experiment(store, name)
        runs = [run_json(run) for run in islice(cells(store, found.experiment_id, filters), most)]
    if chosen is Format.JSON:
        print_json(runs)
    else:
        print_rows([_row(run, short=chosen is Format.TABLE) for run in runs], chosen, left=5)


def _row(run: dict[str, Any], *, short: bool) -> dict[str, object]:
    params, metrics = run["params"], run["metrics"]
    row: dict[str, object] = {
        "run": run["run_id"],
        "model": params.get("model"),
        "prompt": params.get("prompt_version"),
        "scenario": params.get("scenario"),
        "state": run["state"],
        "tips": _whole(metrics.get("n_candidates")),
        "format_ok": _whole(metrics.get("format_ok")),
        "overlong": metrics.get("overlong"),
        "diversity": metrics.get("diversity"),
        "latency_s": metrics.get("latency_s"),
        "tokens_per_s": metrics.get("tokens_per_s"),
        "composite": metrics.get("composite"),
    }
    if not short:
        row |= {"repeat": params.get("repeat"), "host": params.get("host"), "failure": run["tags"].get("failure")}
        row |= {"conditions": run["tags"].get("conditions"), "model_digest": params.get("model_digest")}
    return row


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


@app.command("show")
def show_run(
    run_id: Annotated[str, typer.Argument(help="The run's id, as `runs list` prints it.")],
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Show one run with all its texts: prompt, raw answer, tips.

    Example:

      tipbench runs show 0123456789abcdef0123456789abcdef
    """
    from rich.text import Text

    from tipbench.cli.session import open_store
    from tipbench.record.reading import run_json

    with open_store(load_settings(), mlflow_url) as store:
        run, texts = store.get(run_id)
    if json_:
        print_json(run_json(run) | {"texts": texts})
        return
    console = out()
    for title, values in (("params", run.params), ("metrics", run.metrics), ("tags", run.tags)):
        console.print(Text(title, style="bold"))
        for key, value in sorted(values.items()):
            console.print(Text(safe_text(f"  {key}: {value}")), soft_wrap=True)
    for key, text in sorted(texts.items()):
        console.print(Text(f"\n── {key} ({len(text)} characters)", style="bold"))
        console.print(Text(safe_text(text)), soft_wrap=True)
