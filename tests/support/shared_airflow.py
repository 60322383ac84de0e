"""A real Airflow with tipbench's DAG, a scripted MLflow and a scripted Ollama, one each per test session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.real_airflow import RealAirflow
from support.scripted_mlflow import ScriptedMlflow
from support.scripted_ollama import ModelSpec, ScriptedOllama

MODELS = ("alpha:135m", "beta:135m", ModelSpec("huge:70b", params=70_000_000_000))


@pytest.fixture(scope="session")
def worker_home(tmp_path_factory: pytest.TempPathFactory, weights_home: Path) -> Path:
    """The home of tipbench on the worker, with the embedded model's weights."""
    folder = tmp_path_factory.mktemp("worker") / "home"
    folder.mkdir()
    (folder / "models").symlink_to(weights_home / "models")
    return folder


@pytest.fixture(scope="session")
def scripted_ollama() -> Iterator[ScriptedOllama]:
    with ScriptedOllama(models=MODELS) as server:
        yield server


@pytest.fixture(scope="session")
def airflow_mlflow_url() -> Iterator[str]:
    """The scripted MLflow of the shared Airflow."""
    with ScriptedMlflow() as server:
        yield server.url


@pytest.fixture(scope="session")
def airflow(
    tmp_path_factory: pytest.TempPathFactory,
    airflow_mlflow_url: str,
    worker_home: Path,
    scripted_ollama: ScriptedOllama,
) -> Iterator[RealAirflow]:
    """The whole Airflow, whose start takes a minute. A test that stops it starts it again."""
    environment = {
        "MLFLOW_TRACKING_URI": airflow_mlflow_url,
        "TIPBENCH_HOME": str(worker_home),
        "OLLAMA_HOST": scripted_ollama.url,
    }
    with RealAirflow(tmp_path_factory.mktemp("airflow"), environment) as running:
        yield running
