"""`tipbench events export`: the policy server's event log, for other programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO

import typer

from tipbench.cli.console import print_message
from tipbench.errors import NotEnoughData, UsageError
from tipbench.files import check_output
from tipbench.settings import load_settings
from tipbench.text import plural

app = typer.Typer(help="Read the policy server's event log.", no_args_is_help=True, rich_markup_mode=None)


class ExportFormat(StrEnum):
    """Format of an export."""

    JSONL = "jsonl"
    DSJSON = "dsjson"
    OBP = "obp"


@app.callback()
def _group() -> None:
    """Read the policy server's event log."""


@app.command("export")
def export(
    format_: Annotated[
        ExportFormat, typer.Option("--format", metavar="jsonl|dsjson|obp", help="The format; see below.")
    ] = ExportFormat.JSONL,
    policy: Annotated[str | None, typer.Option("--policy", metavar="NAME", help="Only events of this policy.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file. [default: stdout]")] = None,
) -> None:
    """Export decisions, rewards and signals; the server may run.

    jsonl has one line per decision, reward and shadow signal. dsjson has one line per rewarded decision, for `vw
    --dsjson --cb_explore_adf`. obp is one JSON object with the arrays of the Open Bandit Pipeline's bandit feedback.
    Users appear as keyed hashes, never by id.

    Examples:

      tipbench events export > events.jsonl

      tipbench events export --format dsjson --policy egreedy/v1 --out decisions.dsjson
    """
    from tipbench.serve.event_export import export_events
    from tipbench.serve.event_log import FILE, FOLDER, open_store

    home = load_settings().home
    if not (home / FOLDER / FILE).exists():
        raise NotEnoughData(f"There is no event log in {home}. `tipbench serve` creates it.")
    with closing(open_store(home)) as database, _target(out) as file:
        count = 0
        for line in export_events(database, format_.value, policy=policy):
            file.write(line + "\n")
            count += 1
    print_message(f"{plural(count, 'line')} exported")


@contextmanager
def _target(out: Path | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    check_output(out, "--out")
    try:
        with out.open("w", encoding="utf-8") as file:
            yield file
    except OSError as exc:
        raise UsageError(f"--out {out} could not be written: {exc.strerror}. Choose another file.") from exc
