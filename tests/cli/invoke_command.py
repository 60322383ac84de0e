"""Commands run inside the test's process: quick, with stdout, stderr and exit code told apart."""

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
    """Run a command; whatever is no exit is our bug and is raised."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return Ended(result.exit_code, result.stdout, result.stderr)


def refused(*arguments: str) -> str:
    """Run a command that must be misuse: exit 2, nothing on stdout, no traceback; what it said."""
    ended = invoke(*arguments)
    assert (ended.code, ended.stdout) == (2, ""), ended
    assert "Traceback" not in ended.stderr
    return ended.stderr
