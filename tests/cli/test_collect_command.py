"""`tipbench collect`: output, messages and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from invoke_command import invoke, usage_error

from support.command import tipbench
from support.experiments import recorded_runs
from support.mlflow_server import free_port
from support.scripted_ollama import Fault, ModelSpec, ScriptedOllama

SMALL = ("--n-scenarios", "2", "--prompts", "v1", "--n-tips", "2", "--num-predict", "64")
TOO_LARGE = ModelSpec("x:e2b", params=4_460_000_000)
CLOUD = ModelSpec("far:120b-cloud", params=120_000_000_000, remote_model="far:120b", remote_host="https://far.example")


def options(server: ScriptedOllama, mlflow_url: str, experiment: str, *models: str) -> tuple[str, ...]:
    servers = ("--ollama-url", server.url, "--mlflow-url", mlflow_url, "--experiment", f"tip-bench-{experiment}")
    return ("--models", ",".join(models or ("alpha:135m",)), *servers, *SMALL)


@pytest.mark.process
def test_results_are_on_stdout_and_messages_on_stderr(home: Path, mlflow_url: str) -> None:
    with ScriptedOllama(call_s=0.25) as server:
        done = tipbench("collect", *options(server, mlflow_url, "streams"), home=home)
    table = done.stdout.splitlines()
    assert table[0].startswith("tip-bench-streams: 2 cells, 2 generated now, 0 recorded before, 0 failed; ")
    assert table[2].split() == [
        *("model", "prompt", "cells", "failed", "no", "tip", "format", "overlong", "latency", "tok/s", "diversity")
    ]
    assert re.match(r"alpha:135m +v1 +2 +0 +0 +100 % +0 % +\d+\.\d\d s +\d+\.\d +\d\.\d\d$", table[4])
    assert f"MLflow: {mlflow_url}" in done.stderr
    assert "alpha:135m: 2 to generate" in done.stderr
    assert "alpha:135m: 2 of 2 done" in done.stderr
    assert "memory: most models resident at once: 1; " in done.stderr
    assert re.search(rf"MLflow: {mlflow_url}/#/experiments/\d+/runs", done.stderr)
    assert "\x1b" not in done.stdout + done.stderr


def test_with_json_stdout_has_only_json(mlflow_url: str) -> None:
    with ScriptedOllama(call_s=0.25) as server:
        result = invoke("collect", *options(server, mlflow_url, "json"), "--json")
    assert result.code == 0
    assert result.json["generated"] == 2
    assert result.json["evidence"]["most_resident"] == 1
    assert result.json["pairs"][0] | {"model": "alpha:135m", "answered": 2} == result.json["pairs"][0]


def test_a_second_collect_reports_that_everything_is_recorded(mlflow_url: str) -> None:
    with ScriptedOllama() as server:
        first = invoke("collect", *options(server, mlflow_url, "again"), "--json").json
        result = invoke("collect", *options(server, mlflow_url, "again"))
        calls = len(server.log.calls())
    assert (result.code, first["cells"], calls) == (0, 2, 2)
    assert "2 cells, 0 generated now, 2 recorded before" in result.stdout
    assert "alpha:135m" in result.stdout


def test_a_refused_model_stops_the_run_before_anything_is_generated() -> None:
    with ScriptedOllama(["alpha:135m", TOO_LARGE]) as server:
        for model, reason in (
            ("x:e2b", "x:e2b has 4.46B parameters; the limit is 4B"),
            ("nosuch:1b", "nosuch:1b is not on the Ollama server"),
        ):
            nowhere = f"http://127.0.0.1:{free_port()}"  # no request may be sent to MLflow
            message = usage_error("collect", *options(server, nowhere, "refused", "alpha:135m", model))
            assert message.startswith(f"error: {reason}")
            assert "--skip-refused" in message
        assert "ollama pull nosuch:1b" in message
        assert server.log.calls() == []


def test_skip_refused_runs_the_rest_and_records_the_refusal(mlflow_url: str) -> None:
    with ScriptedOllama(["alpha:135m", TOO_LARGE, CLOUD]) as server:
        chosen = options(server, mlflow_url, "skip", "x:e2b", "alpha:135m", "far:120b-cloud")
        result = invoke("collect", *chosen, "--skip-refused")
        again = invoke("collect", *chosen, "--skip-refused", "--json")
        requested = {request.model for request in server.log.calls()}
    assert (result.code, again.code, requested) == (0, 0, {"alpha:135m"})
    assert "refused: x:e2b has 4.46B parameters" in result.stderr
    assert [entry["model"] for entry in again.json["refused"]] == ["x:e2b", "far:120b-cloud"]
    runs = recorded_runs(mlflow_url, "tip-bench-skip", "refused")
    assert sorted(run.params["model"] for run in runs) == ["far:120b-cloud", "x:e2b"]
    assert any("4.46B" in run.tags["reason"] for run in runs)
    assert len(recorded_runs(mlflow_url, "tip-bench-skip", "cell")) == 2


def test_skip_refused_with_nothing_left_is_a_usage_error() -> None:
    with ScriptedOllama([TOO_LARGE]) as server:
        message = usage_error("collect", *options(server, "http://127.0.0.1:9", "none", "x:e2b"), "--skip-refused")
    assert "4.46B" in message
    assert "--skip-refused" not in message


@pytest.mark.process
@pytest.mark.parametrize("wait", [(), ("--wait",)])
def test_an_ollama_unavailable_at_the_start_is_exit_1_at_once_or_after_the_wait(
    home: Path, wait: tuple[str, ...]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = tipbench("collect", "--ollama-url", url, "--server-wait-s", "1", *wait, home=home, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert ("waiting for Ollama, at most 1 s" in done.stderr) is bool(wait)
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "ollama serve" in done.stderr
    assert url in done.stderr
    assert "Traceback" not in done.stderr


def test_an_mlflow_that_is_unavailable_is_waited_for_and_then_exit_1() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with ScriptedOllama() as server:
        result = invoke("collect", *options(server, url, "away"), "--server-wait-s", "1")
        assert server.log.calls() == []
    assert (result.code, result.stdout) == (1, "")
    assert f"error: MLflow at {url}" in result.stderr


def test_failed_cells_are_reported_and_end_the_run_with_1(mlflow_url: str) -> None:
    with ScriptedOllama(script=[Fault("error_line", value=2, calls=(1,))]) as server:
        result = invoke("collect", *options(server, mlflow_url, "failing"))
        again = invoke("collect", *options(server, mlflow_url, "failing"), "--json")
    assert result.code == 1
    assert "2 generated now, 0 recorded before, 1 failed" in result.stdout
    assert "failed: alpha:135m/v1 " in result.stderr
    assert "run the same command again" in result.stderr
    assert (again.code, again.json["generated"], again.json["recorded_before"]) == (0, 1, 1)
    old = [run for run in recorded_runs(mlflow_url, "tip-bench-failing", "cell") if run.state == "failed"]
    assert [run.tags["superseded"] for run in old] == ["true"]


def test_a_model_of_another_client_is_evicted_only_with_the_option(mlflow_url: str) -> None:
    with ScriptedOllama(["alpha:135m", "beta:135m"]) as server:
        server.load_foreign("beta:135m")
        result = invoke("collect", *options(server, mlflow_url, "evict"))
        assert server.log.calls() == []
        evicted = invoke("collect", *options(server, mlflow_url, "evict"), "--evict")
    assert (result.code, evicted.code) == (1, 0)
    assert "beta:135m is in the Ollama server's memory" in result.stderr
    assert "--evict" in result.stderr


def test_the_settings_of_variables_and_file_reach_the_models(
    mlflow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tipbench.toml").write_text('temperature = 0.25\nnum_ctx = 2048\nmodels = "alpha:135m"\n')
    with ScriptedOllama() as server:
        for name, value in {
            "OLLAMA_HOST": server.url.removeprefix("http://"),
            "MLFLOW_TRACKING_URI": mlflow_url,
            "TIPBENCH_NUM_CTX": "3072",
            "TIPBENCH_EXPERIMENT": "tip-bench-sources",
        }.items():
            monkeypatch.setenv(name, value)
        result = invoke("collect", *SMALL)
        sent = server.log.calls()[0].options
    assert result.code == 0, result.stderr
    assert (sent["temperature"], sent["num_ctx"], sent["num_predict"]) == (0.25, 3072, 64)
    assert len(recorded_runs(mlflow_url, "tip-bench-sources", "cell")) == 2


def test_a_model_ollama_cannot_name_is_refused_and_can_be_skipped(mlflow_url: str) -> None:
    with ScriptedOllama() as server:
        server.add_faults(Fault("status", 500, model="a:b:c", path="/api/show"))
        given = options(server, mlflow_url, "unnameable", "alpha:135m", "a:b:c")
        message = usage_error("collect", *given)
        assert "a:b:c cannot be used" in message
        assert "--skip-refused" in message
        assert invoke("collect", *given, "--skip-refused").code == 0
