"""Closed output streams: the run continues and exits as usual."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.polling import eventually
from support.scripted_ollama import Fault, ScriptedOllama
from tipbench.cli.console import print_message
from tipbench.cli.progress import LineProgress
from tipbench.record.events import BlockStarted, Message

pytestmark = pytest.mark.process

CELLS = 6


def start_collect(server: ScriptedOllama, mlflow_url: str, experiment: str, **streams: Any) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "tipbench", "collect", "--models", "alpha:135m", "--prompts", "v1"),
        *("--n-scenarios", str(CELLS), "--n-tips", "2", "--num-predict", "64"),
        *("--ollama-url", server.url, "--mlflow-url", mlflow_url, "--experiment", f"tip-bench-{experiment}"),
    ]
    return subprocess.Popen(command, **streams)


def test_a_closed_terminal_does_not_stop_the_run(mlflow_url: str, tmp_path: Path) -> None:
    reading_end, writing_end = pty.openpty()
    with ScriptedOllama(["alpha:135m"], call_s=0.2) as server, (tmp_path / "out").open("wb") as out:
        process = start_collect(server, mlflow_url, "left-terminal", stdout=out, stderr=writing_end)
        os.close(writing_end)
        assert eventually(lambda: bool(server.log.calls()), 180)
        os.close(reading_end)
        assert process.wait(180) == 0
        assert len(server.log.calls(outcome="finished")) == CELLS
        assert not server.resident
    assert f"{CELLS} generated now" in (tmp_path / "out").read_text()


def test_failures_with_closed_output_still_exit_with_1(mlflow_url: str) -> None:
    reading_end, writing_end = os.pipe()
    with ScriptedOllama(["alpha:135m"], call_s=0.1) as server:
        server.add_faults(Fault("error_line"))
        process = start_collect(server, mlflow_url, "left-failed", stdout=writing_end, stderr=writing_end)
        os.close(writing_end)
        assert eventually(lambda: bool(server.log.calls()), 180)
        os.close(reading_end)
        assert process.wait(180) == 1


def test_with_a_closed_stderr_the_run_succeeds_and_stdout_has_only_results() -> None:
    command = ["bash", "-c", f"exec {sys.executable} -m tipbench plan --models baseline:template --json 2>&-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=180, check=True)
    assert done.stdout.startswith("{")
    assert done.stdout.endswith("}\n")


def test_results_that_cannot_be_written_exit_with_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "tipbench", "plan", "--models", "baseline:template", "--json"]
        assert subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, timeout=180, check=False).returncode != 0


class BrokenStream:
    """A stream whose writes fail."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def write(self, _text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


def test_messages_to_a_closed_stream_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed file")):
        monkeypatch.setattr("sys.stderr", BrokenStream(error))
        print_message("hello")
        with LineProgress() as view:
            view(BlockStarted("alpha:135m", 24, 10))
            view(Message("careful", warning=True))
