"""Which MLflow is used: the one that was named, else one that answers on its usual port, else our own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tipbench.addresses import identity_of
from tipbench.errors import LocalServerError
from tipbench.record.local_mlflow import LocalMlflow
from tipbench.record.mlflow_http import MlflowHttp

USUAL = ("http://localhost:5000", "http://localhost:5000/mlflow")
PROBE_S = 1.0


@dataclass(frozen=True)
class Tracking:
    """The tracking server in use. `identity` stays when the local server's port changes; journals go by it."""

    url: str  # may hold a login; never print it
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
    """The server to use; our own is started when `start` and there is no other. Raises LocalServerError without one.

    With `local_only` an MLflow on the usual port is left alone.
    """
    local = LocalMlflow(home)
    if url:
        return _named(url, local, home)
    if not local_only and (found := _answering(usual)):
        return Tracking(found, identity_of(found), f"MLflow at {found} (found there)")
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
        same = status.url is not None and identity_of(status.url) == identity_of(http.url)
        # With our server down, somebody else's may answer on its port.
        if same and (status.running or not http.is_mlflow()):
            return Tracking(url, _local_identity(home), f"local MLflow at {http.url}")
        return Tracking(url, identity_of(http.url), f"MLflow at {http.url}")
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
