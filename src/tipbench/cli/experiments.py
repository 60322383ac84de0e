"""`tipbench experiments`: list recorded experiments."""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Annotated

import typer

from tipbench.cli.console import print_dropped_columns, print_json, print_message, print_table
from tipbench.cli.options import JsonOption, MlflowOption, open_store
from tipbench.plan.config import EXPERIMENT_PREFIX
from tipbench.settings import load_settings
from tipbench.text import escape_formula


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

    with open_store(load_settings(), mlflow_url) as store:
        rows = [
            {"experiment": found.name, **vars(count_states(cells(store, found.experiment_id, {}))), "url": found.url}
            for found in sorted(store.experiments(), key=lambda experiment: experiment.name)
            if found.name.startswith(EXPERIMENT_PREFIX)
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
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: escape_formula(value) for key, value in row.items()} for row in rows)
    elif rows:
        dropped = print_table(columns, [[row[column] for column in columns] for row in rows], text=text, keep=keep)
        print_dropped_columns(dropped, "--format csv")
