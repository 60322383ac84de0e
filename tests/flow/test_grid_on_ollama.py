"""A grid with the real command on real servers: an Ollama with three models of different blobs, and an MLflow."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest

from support.command import tipbench, tipbench_json
from support.experiments import recorded_runs
from support.real_ollama import PsWatcher, RealOllama

MODELS = ("alpha:135m", "beta:135m", "gamma:135m")
SMALL = ("--n-tips", "2", "--num-predict", "16", "--num-ctx", "2048")
CELLS = 9

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def mlflow_url(real_mlflow_url: str) -> str:
    return real_mlflow_url


def test_three_models_and_three_prompts_with_one_set_of_weights_in_memory(
    home: Path, ollama: RealOllama, mlflow_url: str
) -> None:
    experiment = f"tip-bench-three-{uuid4().hex[:8]}"
    options = (
        *("collect", "--models", ",".join(MODELS), "--ollama-url", ollama.url, "--mlflow-url", mlflow_url),
        *(*SMALL, "--n-scenarios", "1", "--experiment", experiment),
    )
    before = ollama.loads
    with PsWatcher(ollama.url, interval_s=0.05) as watcher:
        done = tipbench(*options, home=home)
    assert watcher.max_resident == 1
    assert watcher.all_models == set(MODELS)

    recorded = recorded_runs(mlflow_url, experiment)
    assert len(recorded) == CELLS
    assert {run.status for run in recorded} == {"FINISHED"}
    assert ollama.loads - before == 3
    by_load = sorted((run.metrics["load_s"] for run in recorded), reverse=True)
    assert by_load[2] > 3 * by_load[CELLS // 2], "the three loads take longer than the warm calls"
    assert {run.params["engine_version"] for run in recorded} == {"0.11.4"}
    assert len({run.params["model_digest"] for run in recorded}) == 3
    for run in recorded:
        assert run.params["model_params_b"].startswith("0.13")
        assert run.metrics["output_tokens"] <= 16
        assert run.metrics["latency_s"] > 0
        assert run.tags["truncated"] == "false"

    (collection,) = recorded_runs(mlflow_url, experiment, "collection")
    assert collection.metrics["most_resident"] == 1
    assert collection.metrics["handovers"] == 3
    assert "most models resident at once: 1" in done.stderr
    assert "3 handovers with memory confirmed free" in done.stderr

    again = tipbench_json(*options, home=home)
    assert (again["generated"], again["recorded_before"]) == (0, CELLS)


def test_unload_call_loads_once_for_every_cell(home: Path, ollama: RealOllama, mlflow_url: str) -> None:
    experiment = f"tip-bench-unload-call-{uuid4().hex[:8]}"
    options = ("--models", "alpha:135m", "--ollama-url", ollama.url, "--mlflow-url", mlflow_url)
    grid = (*SMALL, "--n-scenarios", "2", "--prompts", "v1", "--unload", "call")
    before = ollama.loads
    tipbench("collect", *options, *grid, "--experiment", experiment, home=home)
    assert len(recorded_runs(mlflow_url, experiment)) == 2
    assert ollama.loads - before == 2


def test_a_model_loaded_by_another_client_is_seen_and_reported(home: Path, ollama: RealOllama, mlflow_url: str) -> None:
    experiment = f"tip-bench-foreign-{uuid4().hex[:8]}"
    options = ("--models", "alpha:135m", "--ollama-url", ollama.url, "--mlflow-url", mlflow_url)
    other = threading.Thread(target=_load_another_after_one_answer, args=(ollama, count_chats(ollama)))
    with PsWatcher(ollama.url, interval_s=0.05) as watcher:
        other.start()
        grid = (*SMALL, "--prompts", "v1", "--n-scenarios", "6", "--evict")
        done = tipbench("collect", *options, *grid, "--experiment", experiment, home=home)
        other.join()
    assert watcher.max_resident == 2, "the test's second client should have loaded its model as well"
    assert "another client loaded gamma:135m" in done.stderr
    recorded = recorded_runs(mlflow_url, experiment)
    marked = [run for run in recorded if run.tags.get("foreign_resident") == "true"]
    assert len(recorded) == 6
    assert 0 < len(marked) < 6
    (collection,) = recorded_runs(mlflow_url, experiment, "collection")
    assert collection.tags["foreign_models"] == "gamma:135m"
    assert collection.metrics["most_resident"] == 2


def count_chats(ollama: RealOllama) -> int:
    """The number of chat requests in the server's log."""
    return ollama.log_file.read_text("utf-8", "replace").count('"/api/chat"')


def _load_another_after_one_answer(ollama: RealOllama, before: int) -> None:
    deadline = time.monotonic() + 120
    while count_chats(ollama) == before and time.monotonic() < deadline:
        time.sleep(0.02)
    body = json.dumps({"model": "gamma:135m", "keep_alive": "3s"}).encode()
    request = urllib.request.Request(f"{ollama.url}/api/generate", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=120).close()
