"""`tipbench experiments`: list recorded experiments."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.options import JsonOption, ListFormat, ListFormatOption, MlflowOption, open_store
from tipbench.settings import load_settings
from tipbench.text import csv_text

COLUMNS = ("experiment", "cells", "pending", "judged", "failed", "url")


def experiments(
    mlflow_url: MlflowOption = None, format_: ListFormatOption = "table", json_: JsonOption = False
) -> None:
    """List experiments with their cell counts by state.

    Examples:

      tipbench experiments

      tipbench experiments --format csv --mlflow-url http://mlflow.example:5000
    """
    from tipbench.record.reader import count_states, current_runs, list_experiments

    with open_store(load_settings(), mlflow_url) as store:
        rows: list[dict[str, object]] = []
        for experiment in list_experiments(store):
            counts = count_states(current_runs(store, experiment.experiment_id, where={}))
            rows.append({"experiment": experiment.name, **vars(counts), "url": experiment.url})
    output_format = "json" if json_ else format_
    print_rows(COLUMNS, rows, output_format, text_columns=("experiment", "url"), n_always_shown=COLUMNS.index("url"))
    if not rows and output_format == "table":
        print_message("no experiments yet; create one with `tipbench demo` or `tipbench collect`")


def print_rows(
    columns: Sequence[str],
    rows: list[dict[str, object]],
    output_format: ListFormat,
    *,
    text_columns: Collection[str] = (),  # left-aligned
    n_always_shown: int | None = None,  # first columns, which are never dropped on a narrow terminal
) -> None:
    """Print rows as a table, CSV or JSON. Without rows, a table prints nothing and CSV prints its header."""
    if output_format == "json":
        print_json(rows)
        return
    values = [[row[column] for column in columns] for row in rows]
    if output_format == "csv":
        print(csv_text(columns, values), end="")
    elif rows:
        print_table(
            columns, values, text_columns=text_columns, n_always_shown=n_always_shown, all_columns_option="--format csv"
        )
