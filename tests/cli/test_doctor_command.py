"""`tipbench doctor`: the problems of this machine's set-up, with advice."""

from __future__ import annotations

from pathlib import Path

import pytest
from invoke_command import invoke

from support.mlflow_server import free_port
from support.scripted_ollama import ModelSpec, ScriptedOllama


def statuses(*options: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in invoke("doctor", *options, "--json").json:
        assert set(finding) == {"check", "status", "found", "advice"}
        found.setdefault(finding["check"], []).append(finding["status"])
    return found


def test_a_working_set_up_passes_every_check(home: Path, mlflow_url: str) -> None:
    with ScriptedOllama(["alpha:135m", ModelSpec("large:e2b", params=4_460_000_000)]) as server:
        options = ("--ollama-url", server.url, "--mlflow-url", mlflow_url)
        result = invoke("doctor", *options)
        found = statuses(*options)
        assert server.log.calls() == []
    assert result.code == 0
    assert "✓ models: alpha:135m; refused: large:e2b" in result.stdout
    assert "ollama pull qwen2.5:0.5b" in result.stdout  # a default model that is not installed
    assert {"versions", "settings", "disk", "memory", "ollama", "models", "mlflow"} <= set(found)
    assert "failed" not in [status for each in found.values() for status in each]
    assert not home.exists()


def test_models_that_need_no_server_are_not_missing_on_it(mlflow_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIPBENCH_MODELS", "alpha:135m,embedded:smollm2:135m,baseline:template")
    with ScriptedOllama(["alpha:135m"]) as server:
        assert statuses("--ollama-url", server.url, "--mlflow-url", mlflow_url)["models"] == ["ok"]


def test_each_problem_has_its_advice_and_the_exit_code_is_1(mlflow_url: str) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    result = invoke("doctor", "--ollama-url", dead, "--mlflow-url", mlflow_url)
    assert result.code == 1
    assert f"✕ ollama: Ollama at {dead} does not respond" in result.stdout
    assert statuses("--ollama-url", dead, "--mlflow-url", dead)["mlflow"] == ["failed"]
    with ScriptedOllama([]) as server:
        assert statuses("--ollama-url", server.url, "--mlflow-url", mlflow_url)["models"] == ["failed"]


def test_broken_settings_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tipbench.toml").write_text("n_tipps = 3\n")
    result = invoke("doctor")
    assert result.code == 1
    assert "unknown key 'n_tipps'" in result.stdout
