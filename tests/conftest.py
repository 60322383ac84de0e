"""Fixtures for shared servers and folders, and the markers of the tests."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from support.browser import browser
from support.mlflow_server import RealMlflow
from support.real_ollama import RealOllama
from support.scripted_mlflow import ScriptedMlflow
from support.shared_airflow import airflow, airflow_mlflow_url, scripted_ollama, worker_home
from support.weights import shared_weights_home

__all__ = ["airflow", "airflow_mlflow_url", "browser", "scripted_ollama", "worker_home"]

# A session that gets SIGTERM still stops its servers. A session in the background would ignore SIGINT, and so would
# the processes that tests interrupt.
signal.signal(signal.SIGTERM, signal.default_int_handler)
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run; `HYPOTHESIS_PROFILE=explore` looks for new ones.
settings.register_profile("tipbench", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tipbench"))
# Hypothesis also draws literals of our modules that are loaded, so the examples would depend on the tests run before.
providers.is_local_module_file = lambda _: False  # type: ignore[attr-defined,assignment]

_KEPT = ("TIPBENCH_TEST_CACHE", "TIPBENCH_OLLAMA", "TIPBENCH_BUILD_OLLAMA", "TIPBENCH_CHROMIUM")


# Fixtures that start a real server, browser or model.
REAL = {"airflow", "browser", "gguf", "ollama", "real_mlflow_url", "weights_home", "worker_home"}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a real server, browser or model, and group them so that one process starts each of these.

    The long groups come first: models and servers, in one group so that no two models run at once; the browser; and
    Airflow, which waits more than it computes. Every other file is a separate group.
    """
    for item in items:
        if REAL & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real)
        if _starts_a_server(item):
            item.add_marker(pytest.mark.server)
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _ORDER.get(_group(item), len(_ORDER)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that pytest-xdist uses the groups: without them every server would start several times."""
    if session.config.getoption("loadgroup", default=False):
        assert all("@" in item.nodeid for item in session.items), "pytest-xdist does not keep groups together"


_ORDER = {"servers": 0, "browser": 1, "airflow": 2, "compare/test_simulation": 3, "web/test_attacker": 4}
_SERVERS = ("http.server", "support.scripted", "support.airflow_site", "support.panel_site", "support.policy_site",
            "web.panels", "web.hook_receiver")  # fmt: skip


def _starts_a_server(item: pytest.Item) -> bool:
    """Whether a test's fixtures or its module's imports start a scripted server or one of tipbench's."""
    starting = {"mlflow_url", "scripted", "scripted_ollama", "served", "empty"}
    if starting & set(getattr(item, "fixturenames", ())) or item.get_closest_marker("server"):
        return True
    imported = vars(getattr(item, "module", None) or object).values()
    return any(str(getattr(each, "__module__", "")).startswith(_SERVERS) for each in imported)


def _group(item: pytest.Item) -> str:
    if chosen := item.get_closest_marker("xdist_group"):
        return str(chosen.args[0])
    for part in ("browser", "airflow"):
        if part in getattr(item, "fixturenames", ()) or item.path.parent.name == part:
            return part
    return "servers" if item.get_closest_marker("real") else f"{item.path.parent.name}/{item.path.stem}"


@pytest.fixture(autouse=True)
def _no_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail tests that start a server without the marker `server`, `real` or `process`: `make quick` starts none."""
    if not any(request.node.get_closest_marker(name) for name in ("server", "real", "process")):

        def listen(*_: object) -> None:
            raise AssertionError("this test starts a server: mark it with pytest.mark.server")

        monkeypatch.setattr(socket.socket, "listen", listen)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remove the user's settings from the environment and set the home to a temporary folder."""
    for name in list(os.environ):
        if name.startswith(("TIPBENCH_", "MLFLOW_", "OLLAMA_")) and name not in _KEPT:
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    monkeypatch.setenv("TIPBENCH_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def mlflow_url() -> Iterator[str]:
    """A scripted MLflow for one test file, in which experiments need unique names."""
    with ScriptedMlflow() as server:
        yield server.url


@pytest.fixture(scope="session")
def real_mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real MLflow server, for tests of MLflow itself and of the whole product."""
    with RealMlflow(tmp_path_factory.mktemp("mlflow")) as server:
        yield server.url


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
        server.create_three_models(gguf)
        yield server
