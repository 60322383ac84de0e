"""`tipbench mlflow up / status / down` on the real server, and commands that find it by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.mlflow_server import require_mlflow

pytestmark = [pytest.mark.process, pytest.mark.real]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    command = [sys.executable, "-m", "tipbench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)


def test_the_local_server_is_started_found_and_stopped(home: Path) -> None:
    require_mlflow()
    quiet = run("mlflow", "status")
    assert quiet.stdout.startswith("not running; ")
    try:
        up = run("mlflow", "up")
        url = up.stdout.strip()
        assert url.startswith("http://127.0.0.1:")
        assert "Starting the local MLflow" in up.stderr
        assert run("mlflow", "up").stdout == up.stdout
        status = json.loads(run("mlflow", "status", "--json").stdout)
        assert status | {"running": True, "healthy": True, "url": url, "home": str(home)} == status

        collected = run("collect", "--models", "baseline:template", "--n-scenarios", "1")
        if f"MLflow: local MLflow at {url}\n" in collected.stderr:
            assert len(json.loads(run("runs", "list", "--mlflow-url", url, "--json").stdout)) == 1
        else:
            assert "(found on the usual port)" in collected.stderr, "only an MLflow on the usual port comes before ours"
    finally:
        down = run("mlflow", "down")
    assert down.stderr == "the local MLflow is stopped\n"
    assert run("mlflow", "down").stderr == "the local MLflow is not running\n"
