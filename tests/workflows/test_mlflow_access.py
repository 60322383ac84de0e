"""Which MLflow server is opened."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tipbench.workflows.mlflow import MlflowAccess


def test_the_configured_server_is_used_for_recording_unless_another_is_named(home: Path, mlflow_url: str) -> None:
    """`tipbench simulate` used to ignore MLFLOW_TRACKING_URI, and started a local server."""
    away = "http://127.0.0.1:9"
    with closing(MlflowAccess(home, url=mlflow_url).open_or_start(report=print)) as mlflow:
        assert mlflow.url == mlflow_url
    with closing(MlflowAccess(home, url=away).open_or_start(mlflow_url, report=print)) as mlflow:
        assert mlflow.url == mlflow_url
