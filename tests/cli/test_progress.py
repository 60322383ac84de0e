"""Progress: plain lines without a terminal, bars on one; neither prints control sequences of a model or server."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.scripted_ollama import ScriptedOllama
from tipbench.cli.progress import LineProgress, event_text
from tipbench.record.events import BlockFinished, BlockStarted, CellFinished, Message, Recording, Resumed, Waiting

CELL = ("alpha:135m", "v1", "nurse@morning")


def test_lines_show_blocks_failures_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    with LineProgress() as view:
        view(BlockStarted("alpha:135m", 24, 10))
        view(CellFinished(*CELL, done=11, total=24))
        view(CellFinished(*CELL, done=12, total=24, failed=1, failure="x\x1b[2J: incomplete"))
        view(BlockFinished("alpha:135m"))
        view(Message("careful", warning=True))
        view(Recording(3))  # at intervals
    assert capsys.readouterr().err.splitlines() == [
        "alpha:135m: 10 of 24 recorded before, 14 to generate",
        "failed: x [2J: incomplete",
        "alpha:135m: 12 of 24 done, memory freed",
        "warning: careful",
    ]


def test_a_pause_is_visible_with_its_limit() -> None:
    assert "waiting for ollama, at most 2 min" in event_text(Waiting("ollama", 120))
    assert "at most" not in event_text(Waiting("MLflow", 0))
    assert event_text(Resumed("ollama")) == "ollama is available again"


@pytest.mark.process
def test_a_terminal_gets_bars_and_lines_that_fit(home: Path, mlflow_url: str) -> None:
    with ScriptedOllama(["alpha:135m"], call_s=0.1) as server:
        shown = run_on_terminal(
            *("collect", "--models", "alpha:135m,baseline:template", "--n-scenarios", "2", "--prompts", "v1"),
            *("--n-tips", "2", "--num-predict", "64", "--ollama-url", server.url, "--mlflow-url", mlflow_url),
            *("--experiment", "tip-bench-terminal"),
        )
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"alpha:135m +━+ 2/2 +\d+ tok/s", plain)
    assert re.search(r"recording in MLflow ━+ +(\d+)/\1 ", plain), "the last bar is left unfinished"
    table = plain[plain.index("generated now") :].splitlines()
    assert max(len(line) for line in table if line.startswith(("model", "alpha", "base"))) <= 80
    assert "--json has all columns" in plain


def run_on_terminal(*arguments: str) -> str:
    """Run a command on a terminal of 80 columns; returns its output."""
    terminal, command_side = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "LINES": "40", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "tipbench", *arguments]
    process = subprocess.Popen(command, env=env, stdin=command_side, stdout=command_side, stderr=command_side)
    os.close(command_side)
    received = bytearray()
    try:
        while chunk := os.read(terminal, 65536):
            received += chunk
    except OSError:  # on Linux: the other side has closed
        pass
    finally:
        os.close(terminal)
    assert process.wait(60) == 0, received.decode("utf-8", "replace")
    return received.decode()
