"""Every command of the command line, read from the application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from tipbench.cli.main import app


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, sub in command.commands.items():
        if hasattr(sub, "commands"):
            yield from _commands(sub, (*path, name))
        else:
            yield (*path, name), sub


COMMANDS = dict(_commands(typer.main.get_command(app)))  # by the words that call it; groups are not commands
