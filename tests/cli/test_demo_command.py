"""`tipbench demo` ignores the settings of real benchmarks."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from invoke_command import invoke, usage_error

from support.mlflow_server import free_port
from tipbench.cli import demo
from tipbench.cli.demo import is_default_server
from tipbench.plan.collect_config import make_config
from tipbench.settings import load_settings


def test_the_demo_runs_on_its_own_local_mlflow(
    home: Path, weights_home: Path, mlflow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir()
    (home / "models").symlink_to(weights_home / "models")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tipbench.toml").write_text('suite = "tips-32"\nprompts = "v1"\n')
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("TIPBENCH_N_SCENARIOS", "9")
    monkeypatch.setattr(demo, "local_mlflow", lambda _settings: mlflow_url)  # its start: test_mlflow_command
    monkeypatch.setitem(demo.DEMO_OPTIONS, "n_scenarios", 1)
    monkeypatch.setitem(demo.DEMO_OPTIONS, "num_predict", 16)
    result = invoke("demo")
    assert result.code == 0, result.stderr
    assert f"MLflow: {mlflow_url}\n" in result.stderr
    assert f"--experiment {demo.EXPERIMENT} --mlflow-url {mlflow_url}\n" in result.stderr
    runs = invoke("runs", "list", "--experiment", demo.EXPERIMENT, "--mlflow-url", mlflow_url, "--json").json
    assert {run["params"]["model"] for run in runs} == {"baseline:template", "embedded:smollm2:135m"}
    assert (len(runs), {run["params"]["suite"] for run in runs}) == (4, {"tips"})
    assert is_default_server(load_settings(), "http://127.0.0.1:1")


def test_the_configuration_is_the_defaults_and_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIPBENCH_SUITE", "tips-32")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team.example:5000")
    assert demo.demo_config(None) == make_config(demo.DEMO_OPTIONS)


def test_without_an_mlflow_the_demo_fails_before_it_downloads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch_with_progress", lambda _settings: pytest.fail("downloads"))
    dead = f"http://127.0.0.1:{free_port()}"
    result = invoke("demo", "--mlflow-url", dead)
    assert (result.code, dead in result.stderr) == (1, True)

    def not_installed(_package: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", not_installed)
    result = invoke("demo")
    assert (result.code, "mlflow" in result.stderr.lower()) == (1, True)


def test_an_invalid_address_is_refused_with_its_flag() -> None:
    assert usage_error("demo", "--mlflow-url", "file:///runs").startswith("error: --mlflow-url: ")
