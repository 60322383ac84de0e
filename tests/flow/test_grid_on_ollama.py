"""The main job on real parts: a real Ollama with three different sets of weights, a real MLflow, the real command."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest

from support.command import tipbench, tipbench_json
from support.real_ollama import PsWatcher, RealOllama
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun

MODELS = ("alpha:135m", "beta:135m", "gamma:135m")
ASK = ("--n-tips", "2", "--num-predict", "128", "--num-ctx", "2048")


def runs(mlflow_url: str, experiment: str, kind: str = "cell") -> list[StoredRun]:
    with MlflowStore(mlflow_url) as store:
        found = store.experiment(experiment)
        assert found is not None
        return list(store.search(found.experiment_id, where={"kind": kind}))


@pytest.mark.timeout(1800)  # 72 real answers: a minute and a half on two idle cores, many on busy ones
def test_three_models_three_prompts_eight_scenarios_one_set_of_weights(
    home: Path, ollama: RealOllama, mlflow_url: str
) -> None:
    experiment = f"tip-bench-three-{uuid4().hex[:8]}"
    options = ("collect", "--models", ",".join(MODELS), "--ollama-url", ollama.url, "--mlflow-url", mlflow_url)
    before = ollama.loads
    with PsWatcher(ollama.url, interval_s=0.05) as watcher:
        done = tipbench(*options, *ASK, "--experiment", experiment, home=home, timeout_s=1500)
    assert watcher.max_resident == 1
    assert watcher.seen == set(MODELS)

    recorded = runs(mlflow_url, experiment)
    assert len(recorded) == 72
    assert {run.status for run in recorded} == {"FINISHED"}
    assert ollama.loads - before == 3
    by_load = sorted((run.metrics["load_s"] for run in recorded), reverse=True)
    assert by_load[2] > 3 * by_load[36], "the three loads stand out of the warm calls"
    assert {run.params["engine_version"] for run in recorded} == {"0.11.4"}
    assert len({run.params["model_digest"] for run in recorded}) == 3
    for run in recorded:
        assert run.params["model_params_b"].startswith("0.13")
        assert run.metrics["output_tokens"] <= 128
        assert run.metrics["latency_s"] > 0
        assert run.tags["truncated"] == "false"

    (collection,) = runs(mlflow_url, experiment, "collection")
    assert collection.metrics["most_resident"] == 1
    assert collection.metrics["handovers"] == 3
    assert "most models resident at once: 1" in done.stderr
    assert "3 handovers verified empty" in done.stderr

    again = tipbench_json(*options, *ASK, "--experiment", experiment, home=home)
    assert (again["generated"], again["recorded_before"]) == (0, 72)


def test_unload_call_loads_once_for_every_cell(home: Path, ollama: RealOllama, mlflow_url: str) -> None:
    experiment = f"tip-bench-unload-call-{uuid4().hex[:8]}"
    options = ("--models", "alpha:135m,beta:135m", "--ollama-url", ollama.url, "--mlflow-url", mlflow_url)
    small = ("--n-tips", "2", "--num-predict", "16", "--num-ctx", "2048", "--n-scenarios", "2", "--prompts", "v1")
    before = ollama.loads
    with PsWatcher(ollama.url, interval_s=0.05) as watcher:
        tipbench("collect", *options, *small, "--unload", "call", "--experiment", experiment, home=home)
    assert watcher.max_resident == 1
    recorded = runs(mlflow_url, experiment)
    assert len(recorded) == 4
    assert ollama.loads - before == 4


@pytest.mark.timeout(1200)
def test_a_second_client_that_loads_another_model_is_seen_and_reported(
    home: Path, ollama: RealOllama, mlflow_url: str
) -> None:
    experiment = f"tip-bench-foreign-{uuid4().hex[:8]}"
    options = ("--models", "alpha:135m", "--ollama-url", ollama.url, "--mlflow-url", mlflow_url)
    stop = threading.Event()
    intruder = threading.Thread(target=_intrude, args=(ollama.url, stop))
    with PsWatcher(ollama.url, interval_s=0.05) as watcher:
        intruder.start()
        small = ("--n-tips", "2", "--num-predict", "64", "--num-ctx", "2048", "--n-scenarios", "8")
        try:
            words = ("collect", *options, *small, "--experiment", experiment, "--evict")
            done = tipbench(*words, home=home, timeout_s=900)
        finally:
            stop.set()
            intruder.join()
    assert watcher.max_resident == 2, "the test's second client should really have loaded beside ours"
    assert "another client loaded gamma:135m" in done.stderr
    recorded = runs(mlflow_url, experiment)
    marked = [run for run in recorded if run.tags.get("foreign_resident") == "true"]
    assert len(recorded) == 24
    assert 0 < len(marked) < 24
    (collection,) = runs(mlflow_url, experiment, "collection")
    assert collection.tags["foreign_models"] == "gamma:135m"
    assert collection.metrics["most_resident"] == 2


def _intrude(url: str, stop: threading.Event) -> None:
    """Another client: waits until something is loaded, then loads gamma beside it for a few seconds."""
    while not stop.is_set() and not _get(f"{url}/api/ps")["models"]:
        time.sleep(0.05)
    time.sleep(2)
    if not stop.is_set():
        _post(f"{url}/api/generate", {"model": "gamma:135m", "keep_alive": "3s"})


def _get(url: str) -> dict[str, list[object]]:
    with urllib.request.urlopen(url, timeout=30) as response:
        return dict(json.load(response))


def _post(url: str, body: dict[str, object]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()


def test_a_missing_model_is_refused_by_the_real_server_too(home: Path, ollama: RealOllama, mlflow_url: str) -> None:
    options = ("--models", "alpha:135m,nosuch:1b", "--ollama-url", ollama.url, "--mlflow-url", mlflow_url)
    done = tipbench("collect", *options, "--experiment", "tip-bench-missing", home=home, check=False)
    assert done.returncode == 2
    assert "ollama pull nosuch:1b" in done.stderr
    assert "Traceback" not in done.stderr
