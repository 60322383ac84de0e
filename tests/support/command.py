"""The real `tipbench` command as a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def tipbench(
    *arguments: str, home: Path, timeout_s: float = 300, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command; raises if it fails, unless `check` is false."""
    done = subprocess.run(_command(arguments), env=_env(home), capture_output=True, text=True, timeout=timeout_s)  # noqa: PLW1510
    if check and done.returncode != 0:
        raise AssertionError(f"tipbench {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done


def tipbench_json(*arguments: str, home: Path, timeout_s: float = 300) -> Any:
    """Run a command with --json and return its parsed output."""
    return json.loads(tipbench(*arguments, "--json", home=home, timeout_s=timeout_s).stdout)


def start_tipbench(*arguments: str, home: Path, log: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a command, with its output in `log`."""
    output: Any = log.open("ab") if log is not None else subprocess.DEVNULL
    try:
        return subprocess.Popen(_command(arguments), env=_env(home), stdout=output, stderr=output)
    finally:
        if log is not None:
            output.close()


def _command(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "tipbench", *arguments]


def _env(home: Path) -> dict[str, str]:
    return {**os.environ, "TIPBENCH_HOME": str(home), "PYTHONWARNINGS": "error"}
