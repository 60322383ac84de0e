"""Real servers that go away in mid-run, and come back."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from uuid import uuid4

from support.command import start_tipbench, tipbench, tipbench_json
from support.mlflow_server import RealMlflow
from support.real_ollama import RealOllama
from support.scripted_ollama import ScriptedProcess
from tipbench.record.journal import count_left_behind
from tipbench.record.mlflow import MlflowStore

SMALL = ("--n-tips", "2", "--num-predict", "24", "--num-ctx", "2048", "--n-scenarios", "4")


def count_cells(mlflow_url: str, experiment: str, status: str = "FINISHED") -> int:
    with MlflowStore(mlflow_url) as store:
        found = store.experiment(experiment)
        if found is None:
            return 0
        cells = store.search(found.experiment_id, where={"kind": "cell"})
        return sum(run.status == status for run in cells)


def wait_for_cells(mlflow_url: str, experiment: str, least: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while count_cells(mlflow_url, experiment) < least:
        assert process.poll() is None, "the collect ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_real_ollama_killed_and_restarted_in_mid_run_costs_nothing(
    home: Path, mlflow_url: str, gguf: Path, tmp_path: Path
) -> None:
    experiment = f"tip-bench-ollama-killed-{uuid4().hex[:8]}"
    with RealOllama(tmp_path) as ollama:
        ollama.create("alpha:135m", gguf)
        options = ("collect", "--models", "alpha:135m", "--ollama-url", ollama.url, "--mlflow-url", mlflow_url)
        process = start_tipbench(*options, *SMALL, "--experiment", experiment, home=home, log=tmp_path / "log")
        wait_for_cells(mlflow_url, experiment, 3, process)
        ollama.kill()
        time.sleep(3)
        ollama.restart()
        assert process.wait(180) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "waiting for ollama to come back" in log
    assert "ollama is back" in log
    assert count_cells(mlflow_url, experiment) == 12
    assert count_cells(mlflow_url, experiment, "FAILED") == 0


def test_a_real_mlflow_stopped_in_mid_run_costs_nothing(home: Path, tmp_path: Path) -> None:
    experiment = "tip-bench-mlflow-stopped"
    folder = tmp_path / "mlflow"
    folder.mkdir()
    with RealMlflow(folder) as mlflow, ScriptedProcess(["alpha:135m", "beta:135m"], call_s=1.0) as server:
        options = ("collect", "--models", "alpha:135m,beta:135m", "--ollama-url", server.url, "--n-tips", "2")
        where = ("--mlflow-url", mlflow.url, "--experiment", experiment)
        process = start_tipbench(*options, *where, home=home, log=tmp_path / "log")
        wait_for_cells(mlflow.url, experiment, 3, process)
        mlflow.stop()
        time.sleep(60)
        assert process.poll() is None
        assert count_left_behind((home / "journal").iterdir()) > 10, "generation should go on into the journal"
        mlflow.start()
        assert process.wait(180) == 0, (tmp_path / "log").read_text()
        assert count_cells(mlflow.url, experiment) == 48
        assert len(chats(server)) == 48
    assert "Results go into the journal meanwhile" in (tmp_path / "log").read_text()


def test_two_collects_at_once_on_one_ollama_take_turns(home: Path, mlflow_url: str, tmp_path: Path) -> None:
    busy, later = (f"tip-bench-turns-{turn}-{uuid4().hex[:8]}" for turn in (1, 2))
    with ScriptedProcess(["alpha:135m", "beta:135m"], call_s=0.2) as server:
        common = ("collect", "--ollama-url", server.url, "--mlflow-url", mlflow_url, *SMALL)
        first = (*common, "--models", "alpha:135m", "--experiment", busy)
        second = (*common, "--models", "beta:135m", "--experiment", later)
        running = start_tipbench(*first, home=home, log=tmp_path / "log")
        wait_for_cells(mlflow_url, busy, 1, running)
        refused = tipbench(*second, home=home, check=False)
        assert refused.returncode == 1
        assert busy in refused.stderr
        assert "Traceback" not in refused.stderr
        waited = tipbench_json(*second, "--wait", home=home)
        assert running.wait(60) == 0
        assert waited["generated"] == 12
        assert server.log()["max_resident"] == 1


def test_what_a_killed_collect_left_loaded_is_unloaded_without_asking(
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


def chats(server: ScriptedProcess) -> list[dict[str, object]]:
    return [request for request in server.log()["requests"] if request["path"] == "/api/chat"]
