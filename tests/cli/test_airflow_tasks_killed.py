"""A task or its command is killed: the other one ends too, the memory is freed, the next attempt continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.polling import eventually
from support.scripted_ollama import MemorySettings, ScriptedOllama
from tipbench.cli.airflow_tasks import collect_model
from tipbench.files import ResourceLock
from tipbench.http import canonical_url

pytestmark = pytest.mark.process

ALPHA = "alpha:135m"
PROGRAM = """
import json, sys
from tipbench.cli.airflow_tasks import collect_model
from tipbench.errors import TipbenchError
try:
    collect_model(json.loads(sys.argv[1]), sys.argv[2], None)
except TipbenchError as exc:
    sys.exit(str(exc))
"""


@pytest.fixture
def slow_ollama() -> Iterator[ScriptedOllama]:
    """A server that answers and unloads slowly."""
    with ScriptedOllama(models=[ALPHA], call_s=0.3, memory=MemorySettings(unload_s=1.0)) as server:
        yield server


@pytest.fixture
def conf(mlflow_url: str, slow_ollama: ScriptedOllama, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A conf with the servers that the worker's settings allow."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    monkeypatch.setenv("OLLAMA_HOST", slow_ollama.url)
    return {
        "models": ALPHA,
        "prompts": "v1",
        "n_tips": 2,
        "n_scenarios": 8,
        "num_predict": 64,
        "server_wait_s": 5,
        "experiment": f"tip-bench-killed-{uuid4().hex[:8]}",
        "ollama_url": slow_ollama.url,
        "mlflow_url": mlflow_url,
    }


@contextmanager
def running_task(conf: Mapping[str, Any], slow_ollama: ScriptedOllama) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a task as Airflow does, once its model has answered twice."""
    task = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(conf), ALPHA],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with task:
        try:
            assert eventually(lambda: len(slow_ollama.log.calls(outcome="finished")) >= 2, 120)
            yield task
        finally:
            task.kill()


def command_pid(task: subprocess.Popen[str]) -> int:
    """The process of the command that a task has started."""
    (child,) = Path(f"/proc/{task.pid}/task/{task.pid}/children").read_text().split()
    return int(child)


def dead_holder(home: Path, url: str) -> str | None:
    """The model that the last holder of the server's lock did not unload; waits until the lock is free."""
    lock = ResourceLock(home, f"Ollama at {canonical_url(url)}", "a test")
    lock.acquire(wait=True, report=lambda _text: None)
    lock.release()
    return lock.dead_holder.model if lock.dead_holder else None


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGKILL,), (signal.SIGTERM, signal.SIGKILL)],
    ids=["killed", "terminated and killed"],
)
def test_a_killed_task_ends_its_command_which_frees_the_memory(
    conf: dict[str, Any], slow_ollama: ScriptedOllama, home: Path, signals: tuple[signal.Signals, ...]
) -> None:
    with running_task(conf, slow_ollama) as task:
        for number in signals:
            task.send_signal(number)
            time.sleep(0.3)
    assert dead_holder(home, slow_ollama.url) is None
    assert slow_ollama.resident == ()


def test_a_terminated_task_waits_for_its_command_and_the_next_attempt_continues(
    conf: dict[str, Any], slow_ollama: ScriptedOllama
) -> None:
    with running_task(conf, slow_ollama) as task:
        task.terminate()
        _printed, stderr = task.communicate(timeout=180)
    assert "the next attempt continues" in stderr
    assert slow_ollama.resident == ()


def test_a_killed_command_fails_its_task_and_the_next_attempt_frees_the_memory_and_continues(
    conf: dict[str, Any], slow_ollama: ScriptedOllama
) -> None:
    with running_task(conf, slow_ollama) as task:
        os.kill(command_pid(task), signal.SIGKILL)
        _printed, stderr = task.communicate(timeout=180)
    assert "ended by signal 9" in stderr
    slow_ollama.set(call_s=0.0, unload_s=0.01)
    again = collect_model(conf, ALPHA, None)
    assert (again["cells"], again["failed"]) == (8, 0)
    assert again["recorded_before"] >= 1  # the second answer may not be saved yet
    assert len(slow_ollama.log.calls(outcome="finished")) <= 10  # plus repeated and interrupted requests
    assert slow_ollama.resident == ()
