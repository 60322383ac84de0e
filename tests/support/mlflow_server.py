"""A real MLflow server for tests, on a free port, with its data in a folder of the test run."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

import pytest

START_TIMEOUT_S = 120.0


class RealMlflow:
    """`mlflow server` in its own process group, on SQLite under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the server; returns once it responds."""
        require_mlflow()
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
                    *("--workers", "1", "--backend-store-uri", "sqlite:///mlflow.db"),
                    *("--artifacts-destination", "./artifacts", "--uvicorn-opts", "--no-access-log"),
                ],
                cwd=self.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all its processes."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if _group_alive(process.pid):
                os.killpg(process.pid, number)
            deadline = time.monotonic() + 10.0
            while time.monotonic() < deadline:
                process.poll()
                if not _group_alive(process.pid):
                    process.wait()
                    return
                time.sleep(0.05)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _responds(f"{self.url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "server.log").read_text("utf-8", "replace")
                pytest.fail(f"mlflow server did not start:\n{log[-3000:]}")
            time.sleep(0.1)


def require_mlflow() -> None:
    """Skip the test without MLflow; on CI it fails."""
    if importlib.util.find_spec("mlflow") is None:
        reason = "mlflow is not installed: pip install 'tipbench[local]'"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _responds(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _environment() -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if "MLFLOW" not in key}
    return inherited | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
