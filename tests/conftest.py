"""Servers and folders that tests share. Each is real, started once and stopped at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.browser import browser
from support.mlflow_server import mlflow_url
from support.real_ollama import RealOllama
from support.shared_airflow import airflow, needs_airflow, scripted, worker_home
from support.weights import shared_weights_home

__all__ = ["airflow", "browser", "mlflow_url", "scripted", "worker_home"]

# A killed session still stops its servers. One started in the background would ignore SIGINT, and so would the
# processes that tests interrupt.
signal.signal(signal.SIGTERM, signal.default_int_handler)
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("tipbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tipbench")

_KEPT = ("TIPBENCH_TEST_CACHE", "TIPBENCH_OLLAMA", "TIPBENCH_BUILD_OLLAMA", "TIPBENCH_CHROMIUM")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs the real Airflow comes last: a gigabyte and a busy scheduler beside everything else would be felt."""
    items.sort(key=needs_airflow)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_share(item)))


def _share(item: pytest.Item) -> str:
    """Who runs it where two processes share the work (`-n 2 --dist loadgroup`): each has servers of its own."""
    if needs_airflow(item):
        return "airflow"
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return "panel" if folder in ("browser", "flow", "jobs", "web") else "core"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the user's settings, and none writes outside its own folder."""
    for name in list(os.environ):
        if name.startswith(("TIPBENCH_", "MLFLOW_", "OLLAMA_")) and name not in _KEPT:
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    monkeypatch.setenv("TIPBENCH_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def weights_home() -> Path:
    """A home folder with the embedded model's weights."""
    return shared_weights_home()


@pytest.fixture(scope="session")
def gguf(weights_home: Path) -> Path:
    return next((weights_home / "models").glob("*.gguf"))


@pytest.fixture(scope="session")
def ollama(tmp_path_factory: pytest.TempPathFactory, gguf: Path) -> Iterator[RealOllama]:
    """A real Ollama with three models of three different blobs: `alpha:135m`, `beta:135m`, `gamma:135m`."""
    with RealOllama(tmp_path_factory.mktemp("ollama")) as server:
        server.three_models(gguf)
        yield server
