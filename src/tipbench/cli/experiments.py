"""`tipbench experiments`: what is recorded."""

from __future__ import annotations

import csv
import sys
from enum import StrEnum
from typing import Annotated

import typer

from tipbench.cli.console import print_json, print_table, say
from tipbench.cli.options import JsonOption, MlflowOption
from tipbench.plan.config import EXPERIMENT_PREFIX
from tipbench.settings import load_settings


class Format(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


FormatOption = Annotated[Format, typer.Option("--format", help="table, json or csv.")]


def experiments(
    mlflow_url: MlflowOption = None, format_: FormatOption = Format.TABLE, json_: JsonOption = False
) -> None:
    """List the experiments with their numbers of cells.

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
    if not rows and not json_ and format_ is Format.TABLE:
        say("nothing recorded yet; `tipbench demo` or `tipbench collect` makes the first experiment")
        return
    print_rows(rows, Format.JSON if json_ else format_)


def print_rows(rows: list[dict[str, object]], format_: Format, *, left: int = 1) -> None:
    """Flat rows in the asked format."""
    if format_ is Format.JSON:
        print_json(rows)
        return
    columns = list(rows[0]) if rows else []
    if format_ is Format.CSV:
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: guarded(value) for key, value in row.items()} for row in rows)
        return
    print_table("", columns, [list(row.values()) for row in rows], left=left)


def guarded(value: object) -> object:
    """A CSV cell that a spreadsheet will not run: a text that looks like a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
