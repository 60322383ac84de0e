"""Real servers that are stopped and restarted in mid-run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from support.command import start_tipbench, tipbench, tipbench_json
from support.experiments import recorded_runs
from support.mlflow_server import RealMlflow
from support.polling import eventually
from support.real_ollama import RealOllama
from support.scripted_ollama import ScriptedProcess
from tipbench.record.journal import count_unstored

pytestmark = pytest.mark.process

SMALL = ("--n-tips", "2", "--num-predict", "16", "--num-ctx", "2048", "--n-scenarios", "6", "--prompts", "v1")
CELLS = 6


def count_cells(mlflow_url: str, experiment: str, status: str = "FINISHED") -> int:
    return sum(run.status == status for run in recorded_runs(mlflow_url, experiment))


def wait_until(check: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for a condition that must become true while the command runs."""
    assert eventually(lambda: check() or process.poll() is not None, 120)
    assert check(), "the collect ended too early"


def wait_for_cells(mlflow_url: str, experiment: str, least: int, process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: count_cells(mlflow_url, experiment) >= least, process)


def test_a_real_ollama_killed_and_restarted_in_mid_run_costs_nothing(
    home: Path, mlflow_url: str, gguf: Path, tmp_path: Path
) -> None:
    experiment = f"tip-bench-ollama-killed-{uuid4().hex[:8]}"
    with RealOllama(tmp_path) as ollama:
        ollama.create("alpha:135m", gguf)
        options = ("collect", "--models", "alpha:135m", "--ollama-url", ollama.url, "--mlflow-url", mlflow_url)
        where = ("--experiment", experiment, "--num-predict", "64")
        process = start_tipbench(*options, *SMALL, *where, home=home, log=tmp_path / "log")
        wait_for_cells(mlflow_url, experiment, 1, process)
        ollama.kill()
        wait_until(lambda: "waiting for ollama" in (tmp_path / "log").read_text(), process)
        ollama.restart()
        assert process.wait(180) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "ollama is available again" in log
    assert count_cells(mlflow_url, experiment) == CELLS
    assert count_cells(mlflow_url, experiment, "FAILED") == 0


@pytest.mark.real
def test_a_real_mlflow_stopped_in_mid_run_costs_nothing(home: Path, tmp_path: Path) -> None:
    experiment = "tip-bench-mlflow-stopped"
    folder = tmp_path / "mlflow"
    folder.mkdir()
    with RealMlflow(folder) as mlflow, ScriptedProcess(["alpha:135m"], call_s=0.5) as server:
        options = ("collect", "--models", "alpha:135m", "--ollama-url", server.url, "--n-tips", "2")
        where = ("--mlflow-url", mlflow.url, "--experiment", experiment)
        process = start_tipbench(*options, *where, home=home, log=tmp_path / "log")
        wait_for_cells(mlflow.url, experiment, 2, process)
        mlflow.stop()
        wait_until(lambda: count_unstored((home / "journal").iterdir()) >= 5, process)  # generation continues
        mlflow.start()
        assert process.wait(180) == 0, (tmp_path / "log").read_text()
        assert count_cells(mlflow.url, experiment) == 24
        assert sum(request["path"] == "/api/chat" for request in server.log()["requests"]) == 24
    assert "Results are kept in the journal until MLflow is available" in (tmp_path / "log").read_text()


def test_two_collects_at_once_on_one_ollama_take_turns(home: Path, mlflow_url: str, tmp_path: Path) -> None:
    busy, later = (f"tip-bench-turns-{turn}-{uuid4().hex[:8]}" for turn in (1, 2))
    with ScriptedProcess(["alpha:135m", "beta:135m"], call_s=5.0) as server:
        common = ("collect", "--ollama-url", server.url, "--mlflow-url", mlflow_url, *SMALL)
        first = (*common, "--models", "alpha:135m", "--experiment", busy)
        second = (*common, "--models", "beta:135m", "--experiment", later)
        running = start_tipbench(*first, home=home, log=tmp_path / "log")
        wait_until(lambda: bool(server.log()["max_resident"]), running)
        refused = tipbench(*second, home=home, check=False)
        server.set(call_s=0.05)
        assert refused.returncode == 1
        assert busy in refused.stderr
        assert "Traceback" not in refused.stderr
        waited = tipbench_json(*second, "--wait", home=home)
        assert running.wait(180) == 0
        assert waited["generated"] == CELLS
        assert server.log()["max_resident"] == 1


def test_weights_left_by_a_killed_collect_are_unloaded_without_evict(
    home: Path, mlflow_url: str, tmp_path: Path
) -> None:
    experiment = f"tip-bench-leftover-{uuid4().hex[:8]}"
    with ScriptedProcess(["alpha:135m", "beta:135m"], call_s=0.3) as server:
        where = ("--ollama-url", server.url, "--mlflow-url", mlflow_url, "--experiment", experiment)
        options = ("collect", *where, *SMALL, "--models", "alpha:135m,beta:135m")
        process = start_tipbench(*options, home=home, log=tmp_path / "log")
        wait_for_cells(mlflow_url, experiment, 1, process)
        process.kill()
        process.wait()
        assert tipbench_json(*options, home=home)["failed"] == 0
        assert server.log()["max_resident"] == 1
