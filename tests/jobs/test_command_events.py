"""The events that a real command writes to TIPBENCH_EVENTS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from support.command import tipbench
from support.polling import eventually
from support.scripted_ollama import Fault, ScriptedOllama
from tipbench.jobs.folder import read_events
from tipbench.record import events as wire

pytestmark = pytest.mark.process

SMALL = ("--prompts", "v1", "--n-scenarios", "2", "--n-tips", "2", "--num-predict", "64")


@pytest.fixture
def event_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("TIPBENCH_EVENTS", str(path))
    return path


def new_experiment(name: str) -> str:
    """Return an experiment name that is new in every run of a test."""
    return f"tip-bench-events-{name}-{uuid4().hex[:8]}"


def events_of(event_file: Path) -> list[wire.Event]:
    return [each.event for each in read_events(event_file)]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("nosuch",), 2),
        (("compare", "--experiment", "tip-bench-none", "--mlflow-url", "http://127.0.0.1:9"), 1),
    ],
)
def test_the_last_event_is_the_exit_code(words: tuple[str, ...], code: int, event_file: Path, home: Path) -> None:
    done = tipbench(*words, home=home, check=False)
    assert done.returncode == code
    assert events_of(event_file)[0] == wire.Started(_version())
    assert events_of(event_file)[-1] == wire.Exit(code)


def _version() -> str:
    import tipbench as package

    return package.__version__


def test_the_failure_event_has_the_printed_message(event_file: Path, home: Path) -> None:
    done = tipbench("collect", "--n-tips", "many", home=home, check=False)
    failure = next(event for event in events_of(event_file) if isinstance(event, wire.Failure))
    assert done.stderr == f"error: {failure.text}\n"


def test_failed_cells_are_counted_and_named(event_file: Path, home: Path, mlflow_url: str) -> None:
    with ScriptedOllama(script=[Fault("error_line", value=2, calls=(1,))]) as server:
        where = ("--ollama-url", server.url, "--mlflow-url", mlflow_url, "--experiment", new_experiment("failed"))
        tipbench("collect", "--models", "alpha:135m", *where, *SMALL, home=home, check=False)
    cells = [event for event in events_of(event_file) if isinstance(event, wire.CellFinished)]
    assert [(cell.done, cell.failed) for cell in cells] == [(1, 1), (2, 1)]
    assert cells[0].failure is not None
    assert "alpha:135m/v1" in cells[0].failure
    assert events_of(event_file)[-1] == wire.Exit(1)


def test_an_ollama_that_becomes_unavailable_is_waited_for_visibly(
    event_file: Path, home: Path, mlflow_url: str
) -> None:
    with ScriptedOllama(call_s=0.2) as server:
        server.pause_listening()
        where = ("--ollama-url", server.url, "--mlflow-url", mlflow_url, "--experiment", new_experiment("away"))
        process = subprocess.Popen(
            [sys.executable, "-m", "tipbench", "collect", "--wait", "--models", "alpha:135m", *where, *SMALL],
            env={**os.environ, "TIPBENCH_HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_event(event_file, wire.Waiting)
        server.resume()
        assert process.wait(180) == 0
    pauses = [event for event in events_of(event_file) if isinstance(event, wire.Waiting | wire.Resumed)]
    assert pauses == [wire.Waiting("Ollama", 300), wire.Resumed("Ollama")]


def test_an_interrupted_command_reports_130_and_that_the_model_is_unloaded(
    event_file: Path, home: Path, mlflow_url: str
) -> None:
    with ScriptedOllama(script=[Fault("hold", calls=(2,))]) as server:
        where = ("--ollama-url", server.url, "--mlflow-url", mlflow_url, "--experiment", new_experiment("130"))
        process = subprocess.Popen(
            [sys.executable, "-m", "tipbench", "collect", "--models", "alpha:135m", *where, *SMALL[:2]],
            env={**os.environ, "TIPBENCH_HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_event(event_file, wire.CellFinished)
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 130
    assert events_of(event_file)[-1] == wire.Exit(130)
    assert wire.Message("alpha:135m unloaded") in events_of(event_file)


def wait_for_event(event_file: Path, kind: type[object]) -> None:
    assert eventually(lambda: any(isinstance(event, kind) for event in events_of(event_file)))


def test_an_event_file_that_cannot_be_written_is_a_usage_error(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIPBENCH_EVENTS", str(tmp_path / "nosuch" / "events"))
    done = tipbench("--version", home=home, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: TIPBENCH_EVENTS takes a file; ")
    assert "Traceback" not in done.stderr


def test_without_the_variable_nothing_is_written(home: Path, tmp_path: Path) -> None:
    tipbench("--version", home=home)
    assert list(tmp_path.glob("**/*.jsonl")) == []


def test_a_subprocess_of_the_command_writes_no_events(
    event_file: Path, home: Path, mlflow_url: str, tmp_path: Path
) -> None:
    """A judge program may call tipbench itself; its exit code is not that of the command."""
    judge = tmp_path / "judge.py"
    seen = tmp_path / "seen.json"
    judge.write_text(f"import json, os, pathlib; pathlib.Path({str(seen)!r}).write_text(json.dumps(dict(os.environ)))")
    where = ("--experiment", new_experiment("child"), "--mlflow-url", mlflow_url)
    tipbench("collect", "--models", "baseline:template", *where, *SMALL, home=home)
    command = f"command:{sys.executable} {judge}"
    tipbench("judge", "run", "--with", command, "--judge", "ben", *where, home=home, check=False)
    environment = json.loads(seen.read_text())
    assert "PATH" in environment
    assert [name for name in environment if name.startswith("TIPBENCH_")] == []
