"""A real Airflow with our DAG, a real MLflow and a scripted Ollama; one of each for the whole test session."""

from __future__ import annotations

import os
import shutil
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
    (folder / "models").mkdir(parents=True)
    for file in (weights_home / "models").iterdir():
        os.link(file, folder / "models" / file.name) if _same_disk(file, folder) else shutil.copy(
            file, folder / "models"
        )
    return folder


def _same_disk(file: Path, folder: Path) -> bool:
    return file.stat().st_dev == folder.stat().st_dev


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedOllama]:
    with ScriptedOllama(models=MODELS) as server:
        yield server


@pytest.fixture(scope="session")
def airflow_mlflow_url() -> Iterator[str]:
    """The scripted MLflow of the shared Airflow."""
    with ScriptedMlflow() as server:
        yield server.url


@pytest.fixture(scope="session")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, airflow_mlflow_url: str, worker_home: Path, scripted: ScriptedOllama
) -> Iterator[RealAirflow]:
    """Scheduler, API and all, started once: that takes a minute. A test that stops it starts it again."""
    own = {"MLFLOW_TRACKING_URI": airflow_mlflow_url, "TIPBENCH_HOME": str(worker_home), "OLLAMA_HOST": scripted.url}
    with RealAirflow(tmp_path_factory.mktemp("airflow"), own) as running:
        yield running
