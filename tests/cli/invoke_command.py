"""Commands run inside the test's process: quick, with separate stdout, stderr and exit code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from tipbench.cli.main import app


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def invoke(*arguments: str) -> Ended:
    """Run a command; any exception except an exit is raised."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return Ended(result.exit_code, result.stdout, result.stderr)


def refused(*arguments: str) -> str:
    """Run a command that must be a usage error (exit 2, empty stdout, no traceback); returns its message."""
    ended = invoke(*arguments)
    assert (ended.code, ended.stdout) == (2, ""), ended
    assert "Traceback" not in ended.stderr
    return ended.stderr
