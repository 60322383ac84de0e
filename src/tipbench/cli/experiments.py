"""`tipbench experiments`: what is recorded."""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Annotated

import typer

from tipbench.cli.console import print_json, print_table, say, say_left_out
from tipbench.cli.options import JsonOption, MlflowOption
from tipbench.compare.spreadsheet import guarded
from tipbench.plan.config import EXPERIMENT_PREFIX
from tipbench.settings import load_settings


class Format(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


FormatOption = Annotated[
    Format,
    typer.Option("--format", metavar="table|json|csv", help="How it is printed. [default: table]", show_default=False),
]
COLUMNS = ("experiment", "cells", "pending", "judged", "failed", "url")


def experiments(
    mlflow_url: MlflowOption = None, format_: FormatOption = Format.TABLE, json_: JsonOption = False
) -> None:
    """List the experiments, each with its cells by state.

    Examples:

      tipbench experiments

      tipbench experiments --format csv --mlflow-url http://mlflow.example:5000
    """
    from tipbench.cli.session import open_store
    from tipbench.record.reading import count_cells

    with open_store(load_settings(), mlflow_url) as store:
        rows = [
            {"experiment": found.name, **vars(count_cells(store, found.experiment_id)), "url": found.url}
            for found in sorted(store.experiments(), key=lambda experiment: experiment.name)
            if found.name.startswith(EXPERIMENT_PREFIX)
        ]
    chosen = Format.JSON if json_ else format_
    print_rows(COLUMNS, rows, chosen, text=("experiment", "url"), keep=5)
    if not rows and chosen is Format.TABLE:
        say("nothing recorded yet; `tipbench demo` or `tipbench collect` makes the first experiment")


def print_rows(
    columns: Sequence[str],
    rows: list[dict[str, object]],
    format_: Format,
    *,
    text: Collection[str] = (),
    keep: int | None = None,
) -> None:
    """Flat rows in the asked format; an empty table is not printed, an empty CSV has its header."""
    if format_ is Format.JSON:
        print_json(rows)
    elif format_ is Format.CSV:
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: guarded(value) for key, value in row.items()} for row in rows)
    elif rows:
        gone = print_table(columns, [[row[column] for column in columns] for row in rows], text=text, keep=keep)
        say_left_out(gone, "--format csv")
