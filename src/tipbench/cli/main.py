"""`tipbench`: assembles the commands and turns what went wrong into a sentence and an exit code."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

import tipbench
from tipbench.cli import collect, demo, experiments, mlflow, models, plan, runs
from tipbench.cli.console import say
from tipbench.errors import TipbenchError

INTERRUPTED = 130

app = typer.Typer(
    name="tipbench",
    help="Find the small local model and the prompt that write the best short productivity tips.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("demo")(demo.demo)
app.command("plan")(plan.plan)
app.command("collect")(collect.collect)
app.command("experiments")(experiments.experiments)
app.add_typer(runs.app, name="runs")
app.add_typer(models.app, name="models")
app.add_typer(mlflow.app, name="mlflow")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tipbench {tipbench.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the small local model and the prompt that write the best short productivity tips.

    Start with `tipbench demo`. With Ollama running: `tipbench plan`, then `tipbench collect`.
    """


def main() -> NoReturn:
    """The entry point: exit 0 fine, 1 failed, 2 misused, 3 not enough data, 130 interrupted."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        app()
    except TipbenchError as exc:
        say(f"error: {exc}")
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        say("interrupted; the same command continues where this one stopped")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left, as in `tipbench runs list | head`
        sys.exit(0)
    sys.exit(0)


def _as_interrupt(_signal: int, _frame: FrameType | None) -> None:
    """A polite kill (a job's cancel, a shutdown) ends a run like Ctrl-C: weights unloaded, nothing lost."""
    raise KeyboardInterrupt
