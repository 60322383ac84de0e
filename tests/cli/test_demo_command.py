"""`tipbench demo` is on its own: what is set up for real benchmarks does not change it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoking import invoke, refused

from support.mlflow_server import require_mlflow
from tipbench.cli import demo
from tipbench.cli.session import leads_to, local_mlflow
from tipbench.plan.config import make_config
from tipbench.record.local_mlflow import LocalMlflow
from tipbench.settings import load_settings


def test_the_demo_runs_on_its_own_local_mlflow(
    home: Path, weights_home: Path, mlflow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_mlflow()
    home.mkdir()
    (home / "models").symlink_to(weights_home / "models")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tipbench.toml").write_text('suite = "tips-32"\nprompts = "v1"\n')
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    monkeypatch.setenv("TIPBENCH_N_SCENARIOS", "1")
    monkeypatch.setitem(demo.DEMO, "models", "baseline:template")
    try:
        ended = invoke("demo")
        own = local_mlflow(load_settings())
        listed = invoke("runs", "list", "--experiment", demo.EXPERIMENT, "--mlflow-url", own, "--json")
        assert leads_to(load_settings(), mlflow_url)
    finally:
        LocalMlflow(home).down()
    assert ended.code == 0, ended.stderr
    assert f"MLflow: local MLflow at {own}\n" in ended.stderr
    assert f"--experiment {demo.EXPERIMENT} --mlflow-url {own}\n" in ended.stderr
    runs = json.loads(listed.stdout)
    assert (len(runs), {run["params"]["suite"] for run in runs}) == (12, {"tips"})


def test_the_configuration_is_the_defaults_and_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIPBENCH_SUITE", "tips-32")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team.example:5000")
    assert demo.demo_config(None) == make_config(demo.DEMO)


def test_an_address_that_is_none_is_named_by_its_flag() -> None:
    assert refused("demo", "--mlflow-url", "file:///runs").startswith("error: --mlflow-url: ")
