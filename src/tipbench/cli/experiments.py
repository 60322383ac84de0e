"""`tipbench experiments`: list recorded experiments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Annotated

import typer

from tipbench.cli.console import print_dropped_columns, print_json, print_message, print_table
from tipbench.cli.options import JsonOption, MlflowOption, open_store
from tipbench.settings import load_settings
from tipbench.text import csv_text


class Format(StrEnum):
    """Output format of a list."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


FormatOption = Annotated[
    Format,
    typer.Option("--format", metavar="table|json|csv", help="Output format. [default: table]", show_default=False),
]
COLUMNS = ("experiment", "cells", "pending", "judged", "failed", "url")


def experiments(
    mlflow_url: MlflowOption = None, format_: FormatOption = Format.TABLE, json_: JsonOption = False
) -> None:
    """List experiments with their cell counts by state.

    Examples:

      tipbench experiments

      tipbench experiments --format csv --mlflow-url http://mlflow.example:5000
    """
    from tipbench.record.reader import cells, count_states
    from tipbench.record.reader import experiments as recorded_experiments

    with open_store(load_settings(), mlflow_url) as store:
        rows = [
            {"experiment": found.name, **vars(count_states(cells(store, found.experiment_id, {}))), "url": found.url}
            for found in recorded_experiments(store)
        ]
    chosen = Format.JSON if json_ else format_
    print_rows(COLUMNS, rows, chosen, text=("experiment", "url"), keep=5)
    if not rows and chosen is Format.TABLE:
        print_message("no experiments yet; create one with `tipbench demo` or `tipbench collect`")


def print_rows(
    columns: Sequence[str],
    rows: list[dict[str, object]],
    format_: Format,
    *,
    text: Collection[str] = (),
    keep: int | None = None,
) -> None:
    """Print flat rows in the given format; an empty table prints nothing, an empty CSV its header.

    The first `keep` columns are never dropped in a narrow terminal.
    """
    if format_ is Format.JSON:
        print_json(rows)
    elif format_ is Format.CSV:
        print(csv_text(columns, [[row[column] for column in columns] for row in rows]), end="")
    elif rows:
        dropped = print_table(columns, [[row[column] for column in columns] for row in rows], text=text, keep=keep)
        print_dropped_columns(dropped, "--format csv")
