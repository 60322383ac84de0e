"""`tipbench models list / fetch`: what may run, and the embedded model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from invoke_command import invoke, usage_error

from support.mlflow_server import free_port
from support.scripted_ollama import Fault, ModelSpec, ScriptedOllama

KEYS = {"model", "engine", "params_b", "quantization", "file_bytes", "digest", "refusal"}


def test_models_are_listed_with_the_reason_why_one_may_not_run() -> None:
    cloud = ModelSpec("far:cloud", remote_model="far", remote_host="https://far.example")
    with ScriptedOllama(["alpha:135m", ModelSpec("x:e2b", params=4_460_000_000), cloud]) as server:
        result = invoke("models", "list", "--ollama-url", server.url)
        rows = {row["model"]: row for row in invoke("models", "list", "--ollama-url", server.url, "--json").json}
        stricter = invoke("models", "list", "--ollama-url", server.url, "--max-model-b", "0.1", "--json").json
    assert result.code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["alpha:135m", "135M", "Q4_1", "94", "MiB", "yes"] in lines
    assert ["x:e2b", "4.46B", "Q4_1", "94", "MiB", "no"] in lines
    assert "x:e2b has 4.46B parameters; the limit is 4B." in result.stdout
    assert "far:cloud is a cloud model" in result.stdout
    assert all(set(row) == KEYS for row in rows.values())
    assert rows["alpha:135m"]["refusal"] is None
    assert {row["model"] for row in stricter if row["refusal"] is None} == {"baseline:template"}


def test_without_ollama_the_other_engines_are_listed() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = invoke("models", "list", "--ollama-url", url)
    assert result.code == 0
    assert result.stderr.startswith("warning: ")
    assert url in result.stderr
    assert "baseline:template" in result.stdout
    assert "tipbench models fetch" in result.stdout


def test_a_model_that_ollama_will_not_describe_is_listed_with_its_reason() -> None:
    with ScriptedOllama(["alpha:135m", "beta:135m"]) as server:
        server.add_faults(Fault("status", 500, model="alpha:135m", path="/api/show"))
        rows = {row["model"]: row for row in invoke("models", "list", "--ollama-url", server.url, "--json").json}
    assert "alpha:135m cannot be used" in rows["alpha:135m"]["refusal"]
    assert rows["beta:135m"]["refusal"] is None


def test_a_bad_limit_is_named_by_its_flag() -> None:
    assert usage_error("models", "list", "--max-model-b", "big").startswith("error: --max-model-b: ")


def test_fetch_prints_the_path_of_existing_weights(weights_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIPBENCH_HOME", str(weights_home))
    result = invoke("models", "fetch")
    assert result.code == 0
    assert Path(result.stdout.strip()).suffix == ".gguf"
    assert Path(result.stdout.strip()).is_file()
