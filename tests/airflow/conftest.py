"""Fixtures: the DAG in one process, and the real Airflow that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.real_airflow import ROOT, DagProgram, RealAirflow


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark all tests here: they need a real Airflow, and their waits of minutes end before this timeout."""
    item.add_marker(pytest.mark.real)
    item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture
def airflow(airflow: RealAirflow) -> Iterator[RealAirflow]:
    """The shared Airflow, running. The test's runs are ended after it, because they would delay the next test."""
    yield airflow.start()
    airflow.end_runs()


@pytest.fixture(scope="session")
def mlflow_url(airflow_mlflow_url: str) -> str:
    """The MLflow that the shared Airflow's worker uses."""
    return airflow_mlflow_url


@pytest.fixture(scope="session")
def dag_program(tmp_path_factory: pytest.TempPathFactory, real_mlflow_url: str, worker_home: Path) -> DagProgram:
    """The program with its own migrated Airflow database and the pool."""
    folder = tmp_path_factory.mktemp("dag")
    base = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW_", "TIPBENCH_", "MLFLOW_"))}
    environment = {
        **base,
        "PYTHONPATH": str(ROOT / "src"),
        "AIRFLOW_HOME": str(folder / "home"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "MLFLOW_TRACKING_URI": real_mlflow_url,
        "TIPBENCH_HOME": str(worker_home),
    }
    program = DagProgram(environment, folder)
    for arguments in (("db", "migrate"), ("pools", "set", "ollama", "1", "one model at a time")):
        program.run("airflow", *arguments)
    return program
