from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.mlflow_server import free_port, require_mlflow
from tipbench.errors import LocalMlflowError, MlflowUnavailable, TipbenchError, UsageError
from tipbench.http import canonical_url
from tipbench.record import local_mlflow
from tipbench.record.local_mlflow import LocalMlflow
from tipbench.record.mlflow import MlflowServer, MlflowStore, find_mlflow
from tipbench.record.run import NewRun, RunKind

pytestmark = pytest.mark.real

# Starts in a tenth of a second, and like MLflow: with a second process that does the work.
STAND_IN = """
    import http.server, os, signal, subprocess, sys

    def serve(port):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"OK" if self.path == "/health" else b"?")

            def log_message(self, *args):
                pass

        http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()

    if sys.argv[1] == "serve":
        if "stubborn" in os.listdir():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve(int(sys.argv[2]))
    print("a line of the log", sys.argv[1:], flush=True)
    with open("starts", "a") as starts:
        starts.write("x")
    if "stubborn" in os.listdir():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = sys.argv[sys.argv.index("--port") + 1]
    sys.exit(subprocess.run([sys.executable, __file__, "serve", port]).returncode)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose name needs escaping in a URL."""
    return tmp_path / "ho?me %20's"


@pytest.fixture(autouse=True)
def _free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use ports that the system assigns: another local MLflow on this machine may use those of tipbench."""
    monkeypatch.setattr(local_mlflow, "PORTS", ())


@pytest.fixture
def local(home: Path, tmp_path: Path) -> Iterator[LocalMlflow]:
    script = tmp_path / "fake_mlflow.py"
    script.write_text(textwrap.dedent(STAND_IN))
    local = LocalMlflow(home, command=[sys.executable, str(script)])
    yield local
    local.down()


def failing(home: Path, code: str) -> LocalMlflow:
    return LocalMlflow(home, command=[sys.executable, "-c", code])


def quiet(_: str) -> None:
    pass


@pytest.mark.real
def test_the_real_server_starts_keeps_data_and_port_and_stops(home: Path) -> None:
    require_mlflow()
    local, lines = LocalMlflow(home), list[str]()
    assert not local.has_data()
    try:
        url = local.up(report=lines.append)
        assert lines[0].startswith("Starting the local MLflow")
        assert local.has_data()
        assert (local.folder / "mlflow.db").stat().st_mode & 0o077 == 0  # it has the keys of blind sheets
        with MlflowStore(url) as store:
            experiment = store.ensure_experiment("tip-bench-auto")
            run = NewRun(RunKind.CELL, "r", "a run", 1, 2)
            run_id = store.record(experiment.experiment_id, run)
            status = local.status()
            assert (status.running, status.healthy, status.url) == (True, True, url)
            assert status.version
            # The process that was started dies; the one that does the work still counts as running.
            assert status.pid
            os.kill(status.pid, signal.SIGKILL)
            assert local.status().healthy
            assert local.down()
            assert not local.status().running
            with pytest.raises(MlflowUnavailable):
                store.experiments()
            assert local.up(report=quiet) == url
            assert store.get(run_id)[0].status == "FINISHED"
    finally:
        local.down()
    assert not local.status().running


def test_nothing_runs_before_the_first_start(local: LocalMlflow) -> None:
    status = local.status()
    assert (status.running, status.healthy, status.url, status.pid) == (False, False, None, None)
    assert not local.down()
    assert not local.folder.exists()


def test_a_second_up_starts_no_second_server(local: LocalMlflow, home: Path) -> None:
    assert local.up(report=quiet) == LocalMlflow(home).up(report=quiet)
    assert (local.folder / "starts").read_text() == "x"


def test_two_concurrent_ups_start_one_server(local: LocalMlflow) -> None:
    urls: list[str] = []
    threads = [threading.Thread(target=lambda: urls.append(local.up(report=quiet))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(urls) == 3
    assert len(set(urls)) == 1
    assert (local.folder / "starts").read_text() == "x"


def test_the_port_stays_when_it_is_free(local: LocalMlflow) -> None:
    first = local.up(report=quiet)
    assert local.down()
    assert local.status().url == first
    assert local.up(report=quiet) == first


def test_another_port_is_taken_when_the_last_is_not_free(local: LocalMlflow) -> None:
    first = local.up(report=quiet)
    local.down()
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
        assert local.up(report=quiet) != first


def test_a_port_taken_at_the_last_moment_is_replaced(local: LocalMlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    real = local_mlflow._free_port
    with socket.create_server(("127.0.0.1", 0)) as rival:
        port = int(rival.getsockname()[1])
        monkeypatch.setattr(local_mlflow, "_free_port", lambda last, taken: real(last, taken) if taken else port)
        assert local.up(report=quiet) != f"http://127.0.0.1:{port}"


def test_a_process_that_reuses_the_pid_of_a_dead_server_is_not_stopped(local: LocalMlflow) -> None:
    local.up(report=quiet)
    local.down()
    facts = local.folder / "server.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "pid": os.getpid()}))
    assert not local.status().running
    assert not local.down()


def test_a_server_that_ignores_sigterm_is_killed(local: LocalMlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_mlflow, "STOP_S", 0.3)
    local.folder.mkdir(parents=True)
    (local.folder / "stubborn").touch()
    local.up(report=quiet)
    assert local.down()
    assert not local.status().running


def test_the_server_does_not_see_the_settings_of_another_mlflow(
    local: LocalMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_STATIC_PREFIX", "/elsewhere")
    assert "MLFLOW_STATIC_PREFIX" not in local_mlflow._environment()
    assert local_mlflow._environment()["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_a_server_that_dies_during_the_start_shows_the_end_of_its_log(home: Path) -> None:
    local = failing(home, "print('first'); import sys; sys.exit('no space left on device')")
    with pytest.raises(LocalMlflowError, match="no space left on device"):
        local.up(report=quiet)
    assert not local.status().running


def test_the_log_of_an_earlier_start_is_not_blamed(home: Path) -> None:
    with pytest.raises(LocalMlflowError, match="old trouble"):
        failing(home, "print('old trouble')").up(report=quiet)
    with pytest.raises(LocalMlflowError) as caught:
        failing(home, "print('new trouble')").up(report=quiet)
    assert "old trouble" not in str(caught.value)


def test_a_server_that_never_responds_is_given_up_and_can_be_stopped(home: Path) -> None:
    local = failing(home, "import time; time.sleep(60)")
    with pytest.raises(LocalMlflowError, match=r"did not respond within 0\.5 s"):
        local.up(wait_s=0.5, report=quiet)
    assert local.status().running
    assert not local.status().healthy
    assert local.down()


def test_a_missing_mlflow_names_the_extra(home: Path) -> None:
    with pytest.raises(LocalMlflowError, match=r"pip install 'tipbench\[local\]'"):
        LocalMlflow(home, command=[sys.executable, "-S", "-E", "-m", "mlflow"]).up(report=quiet)


def test_a_missing_program_is_an_error_with_its_name(home: Path) -> None:
    with pytest.raises(LocalMlflowError, match="No such file"):
        LocalMlflow(home, command=["/nonexistent/mlflow"]).up(report=quiet)


@pytest.mark.parametrize("line", ["Detected out-of-date database schema (found version 1)", "Can't locate revision 2"])
def test_a_database_of_another_version_names_the_upgrade(home: Path, line: str) -> None:
    with pytest.raises(LocalMlflowError, match=r"mlflow db upgrade sqlite:///mlflow\.db"):
        failing(home, f"import sys; sys.exit({line!r})").up(report=quiet)


def test_a_damaged_server_json_does_not_prevent_a_start(local: LocalMlflow) -> None:
    local.folder.mkdir(parents=True)
    for content in ("", "[]", '{"port": "x", "pid": []}', "\x00"):
        (local.folder / "server.json").write_text(content)
        assert not local.status().running
    assert local.up(report=quiet).startswith("http://127.0.0.1:")


# Which server is used


def find(url: str | None, home: Path, *usual: str, start: bool = False) -> MlflowServer:
    return find_mlflow(url, home, start=start, report=quiet, usual_urls=usual)


def test_a_store_without_rest_is_refused(home: Path) -> None:
    for url in ["file:./mlruns", "sqlite:///mlflow.db", "databricks"]:
        with pytest.raises(UsageError, match="REST"):
            find(url, home)


def test_a_named_server_is_used_whether_it_responds_or_not(home: Path) -> None:
    url = f"http://MLflow.example:80/{'mlflow/'}"
    found = find(url, home)
    assert (found.identity, found.description) == (
        "http://mlflow.example:80/mlflow",
        "MLflow at http://mlflow.example/mlflow",
    )


def test_a_password_is_kept_for_use_and_not_shown(home: Path) -> None:
    found = find("http://ann:secret@mlflow.example", home)
    assert "secret" in found.url
    assert "secret" not in found.description + found.identity


def test_one_server_has_one_identity() -> None:
    for url in ["http://127.0.0.1:5000/", "http://LOCALHOST:5000", "http://u:p@[::1]:5000/#/experiments"]:
        assert canonical_url(url) == "http://localhost:5000"


def test_an_mlflow_on_the_usual_port_is_found(home: Path, mlflow_url: str) -> None:
    closed = f"http://127.0.0.1:{free_port()}"
    found = find(None, home, closed, mlflow_url)
    assert found == MlflowServer(
        mlflow_url, canonical_url(mlflow_url), f"MLflow at {mlflow_url} (found on the usual port)"
    )


def test_another_program_on_the_usual_port_is_not_taken_for_mlflow(
    home: Path, local: LocalMlflow, tmp_path: Path
) -> None:
    other = local.up(report=quiet)  # the fake server responds with "?" to every request
    with pytest.raises(LocalMlflowError, match="tipbench mlflow up"):
        find(None, tmp_path / "other", other)


def test_a_port_that_never_responds_takes_a_second_at_most(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LocalMlflowError, match="--mlflow-url"):
            find(None, home, url, url + "/mlflow")


def test_the_running_local_server_is_found_and_known_by_its_home(local: LocalMlflow, home: Path) -> None:
    url = local.up(report=quiet)
    assert find(None, home) == MlflowServer(url, f"local:{home.resolve()}", f"local MLflow at {url}")


def test_the_local_server_keeps_its_identity_when_named_running_or_not(local: LocalMlflow, home: Path) -> None:
    url = local.up(report=quiet).replace("127.0.0.1", "localhost")
    assert find(url, home).identity == f"local:{home.resolve()}"
    local.down()
    assert find(url, home).identity == f"local:{home.resolve()}"


def test_another_program_on_the_port_of_the_local_server_is_ignored(home: Path, mlflow_url: str) -> None:
    (home / "mlflow").mkdir(parents=True)
    facts = {"port": int(mlflow_url.rpartition(":")[2])}
    (home / "mlflow" / "server.json").write_text(json.dumps(facts))
    assert find(mlflow_url, home).identity == canonical_url(mlflow_url)


def test_the_local_server_is_started_on_request(
    local: LocalMlflow, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tipbench.record.mlflow.LocalMlflow", lambda _: local)
    found = find(None, home, start=True)
    assert found.description == f"local MLflow at {found.url} (started by tipbench)"
    assert local.status().healthy


# A home that cannot be used


def test_a_file_in_place_of_the_folder_is_a_usage_error(local: LocalMlflow, home: Path) -> None:
    home.mkdir()
    (home / "mlflow").touch()
    assert not local.status().running
    assert not local.has_data()
    with pytest.raises(UsageError, match=r"mlflow cannot be created: File exists\. Set TIPBENCH_HOME"):
        local.up(report=quiet)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("starting.lock", "cannot be opened"),
        ("server.json", "cannot be written"),
        ("server.log", "cannot be (read|written)"),
    ],
)
def test_a_file_that_may_not_be_written_is_named(home: Path, name: str, what: str) -> None:
    (home / "mlflow" / name).mkdir(parents=True)
    with pytest.raises(UsageError, match=rf"{what}: Is a directory\. Set TIPBENCH_HOME"):
        LocalMlflow(home, command=[sys.executable, "-c", ""]).up(report=quiet)


def test_a_full_disk_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tipbench.files.os.fsync", fail)
    with pytest.raises(TipbenchError, match=r"No space left on device\. Free some space"):
        LocalMlflow(home, command=[sys.executable, "-c", ""]).up(report=quiet)
