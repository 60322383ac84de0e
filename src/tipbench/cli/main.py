"""`tipbench`: assemble the commands, and map exceptions to error messages and exit codes."""

from __future__ import annotations

import inspect
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import tipbench
from tipbench.cli import (
    catalogue,
    collect,
    compare,
    controls,
    decide,
    demo,
    doctor,
    events,
    experiments,
    gate,
    judge,
    judge_run,
    judge_status,
    mlflow,
    models,
    panel,
    plan,
    prior,
    promote,
    runs,
    serve,
    simulate,
    state,
    token,
)
from tipbench.cli.console import print_message, wrap_streams
from tipbench.cli.progress import INTERRUPTED, event_output, write_event
from tipbench.errors import TipbenchError, UsageError
from tipbench.record.events import Failure

EXIT_CODES = {
    0: "success",
    1: "failed: a server is unavailable, a cell failed, or another error",
    2: "usage error: invalid command, options, files or models; nothing was generated",
    3: "not enough data for a result",
    INTERRUPTED: "interrupted by Ctrl-C or SIGTERM: weights unloaded, finished cells kept",
}
# The other commands of `judge` are in judge.py.
judge.app.command("status")(judge_status.status)
judge.app.command("run")(judge_run.run)
COMMANDS: dict[str, Callable[..., None] | typer.Typer] = {  # in the order of the help
    "demo": demo.demo,
    "plan": plan.plan,
    "collect": collect.collect,
    "judge": judge.app,
    "compare": compare.compare,
    "gate": gate.gate,
    "decide": decide.decide,
    "experiments": experiments.experiments,
    "runs": runs.app,
    "controls": controls.app,
    "models": models.app,
    "mlflow": mlflow.app,
    "doctor": doctor.doctor,
    "panel": panel.panel,
    "token": token.app,
    "serve": serve.serve,
    "catalogue": catalogue.app,
    "events": events.app,
    "state": state.app,
    "simulate": simulate.simulate,
    "prior": prior.app,
    "promote": promote.app,
}


class Command(TyperCommand):
    """A command whose help does not wrap examples, so that they can be copied."""

    def format_help_text(self, _ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            text = inspect.cleandoc(self.help or "")
            # Click does not wrap a paragraph whose first line is "\b". Each example gets such a line.
            formatter.write_text(re.sub(r"(?m)^( +)(?=tipbench )", r"\1\b\n", text))


class RootGroup(TyperGroup):
    """The group of all commands; maps exceptions to `EXIT_CODES`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of `COMMANDS`; Typer would list groups last."""
        return sorted(super().list_commands(ctx), key=list(COMMANDS).index)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Expected errors are printed without a traceback."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except TipbenchError as exc:
            print_message(f"error: {exc}")
            write_event(Failure(str(exc)))
            raise typer.Exit(exc.exit_code) from exc
        except KeyboardInterrupt:
            print_message("interrupted; the same command continues where this one stopped")
            raise typer.Exit(INTERRUPTED) from None
        return result


app = typer.Typer(
    name="tipbench",
    cls=RootGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for name, command in COMMANDS.items():
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
        for subcommand in command.registered_commands:
            subcommand.cls = Command
    else:
        app.command(name, cls=Command)(command)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"tipbench {tipbench.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the small local model and prompt that write the best short productivity tips.

    Start with `tipbench demo`. With Ollama running: `plan`, `collect`, `judge export`, `judge apply`, `compare`.
    """


def main() -> NoReturn:
    """Entry point of the `tipbench` command."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)  # sent to cancel a job, and at shutdown
    wrap_streams()
    try:
        with event_output():
            app()
    except UsageError as exc:  # raised by event_output; `RootGroup` handles errors of commands
        print_message(f"error: {exc}")
        sys.exit(exc.exit_code)
    sys.exit(0)  # not reached, as `app` exits itself; for the type NoReturn
