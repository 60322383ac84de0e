"""The DAG in one process, beside the real Airflow that all tests share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.real_airflow import ROOT, DagProgram, airflow_environment


@pytest.fixture(scope="session")
def dag_program(tmp_path_factory: pytest.TempPathFactory, mlflow_url: str, worker_home: Path) -> DagProgram:
    """With a database of its own, migrated, and the pool."""
    folder = tmp_path_factory.mktemp("dag")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW_", "TIPBENCH_", "MLFLOW_"))}
    environment = {
        **kept,
        "PYTHONPATH": str(ROOT / "src"),
        "AIRFLOW_HOME": str(folder / "home"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "MLFLOW_TRACKING_URI": mlflow_url,
        "TIPBENCH_HOME": str(worker_home),
    }
    for words in (("db", "migrate"), ("pools", "set", "ollama", "1", "one model at a time")):
        command = [str(airflow_environment() / "bin" / "airflow"), *words]
        subprocess.run(command, env=environment, capture_output=True, check=True)
    return DagProgram(environment, folder)
