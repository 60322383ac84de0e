"""Chooses the MLflow server: the configured one, else one on the usual port, else the local one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tipbench.errors import LocalServerError
from tipbench.http import canonical_url
from tipbench.record.local_mlflow import LocalMlflow
from tipbench.record.mlflow_http import MlflowHttp

USUAL = ("http://localhost:5000", "http://localhost:5000/mlflow")
PROBE_S = 1.0


@dataclass(frozen=True)
class Tracking:
    """The tracking server in use. `identity` is stable if the local server's port changes; journals depend on it."""

    url: str  # may contain a login; never print it
    identity: str
    how: str  # for people, as in "local MLflow at http://127.0.0.1:5123 (started by tipbench)"


def find_tracking(
    url: str | None,
    home: Path,
    *,
    start: bool,
    report: Callable[[str], None],
    usual: tuple[str, ...] = USUAL,
    local_only: bool = False,
) -> Tracking:
    """Return the server to use; starts the local one if there is no other and `start` is set.

    With `local_only` an MLflow on the usual port is ignored. Raises LocalServerError if there is no server.
    """
    local = LocalMlflow(home)
    if url:
        return _named(url, local, home)
    if not local_only and (found := _answering(usual)):
        return Tracking(found, canonical_url(found), f"MLflow at {found} (found there)")
    status = local.status()
    if status.running and status.healthy and status.url:
        return Tracking(status.url, _local_identity(home), f"local MLflow at {status.url}")
    if not start:
        raise LocalServerError(
            f"No MLflow answers on {usual[0] if usual else 'its usual port'}, and the local one is not running. "
            "Start it with `tipbench mlflow up`, or give --mlflow-url."
        )
    mine = local.up(report=report)
    return Tracking(mine, _local_identity(home), f"local MLflow at {mine} (started by tipbench)")


def _named(url: str, local: LocalMlflow, home: Path) -> Tracking:
    http = MlflowHttp(url, timeout_s=PROBE_S)
    try:
        status = local.status()
        same = status.url is not None and canonical_url(status.url) == canonical_url(http.url)
        # If the local server is down, another server may use its port.
        if same and (status.running or not http.is_mlflow()):
            return Tracking(url, _local_identity(home), f"local MLflow at {http.url}")
        return Tracking(url, canonical_url(http.url), f"MLflow at {http.url}")
    finally:
        http.close()


def _answering(urls: tuple[str, ...]) -> str | None:
    deadline = time.monotonic() + PROBE_S
    for url in urls:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        http = MlflowHttp(url, timeout_s=left)
        try:
            if http.is_mlflow():
                return url
        finally:
            http.close()
    return None


def _local_identity(home: Path) -> str:
    return f"local:{home.resolve()}"
