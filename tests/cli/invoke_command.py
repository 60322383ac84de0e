"""Commands run inside the test's process: quick, with separate stdout, stderr and exit code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from tipbench.cli.main import app


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def invoke(*arguments: str) -> CommandResult:
    """Run a command; any exception except an exit is raised."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return CommandResult(result.exit_code, result.stdout, result.stderr)


def usage_error(*arguments: str) -> str:
    """Run a command that must be a usage error (exit 2, empty stdout, no traceback); returns its message."""
    result = invoke(*arguments)
    assert (result.code, result.stdout) == (2, ""), result
    assert "Traceback" not in result.stderr
    return result.stderr
