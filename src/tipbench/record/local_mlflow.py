"""The local MLflow server: start, find and stop it.

The server counts as running while its log file is locked. The saved process id proves nothing: another process could
have reused it. All processes of the server inherit the lock with their standard output, so it is released when the
last of them exits.
`LocalMlflow.up` starts the server with `python -m tipbench.record.local_mlflow FILE COMMAND…`; FILE is `server.json`.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tipbench.errors import LocalMlflowError
from tipbench.files import convert_home_errors, make_folder, try_lock, write_atomic

HOST = "127.0.0.1"
PORTS = range(5123, 5173)
STOP_S = 15.0  # between SIGTERM and SIGKILL
POLL_S = 0.1
MAX_LOG_BYTES = 5_000_000  # a larger log is deleted at the next start
N_TAIL_LINES = 12  # of the log, shown in errors
_TAIL_BYTES = 20_000  # read from the end of the log to get these lines


@dataclass(frozen=True)
class ServerStatus:
    """Status of the local server; `url`, `version` and `started` refer to its last start."""

    running: bool
    healthy: bool
    folder: Path
    log: Path
    url: str | None = None
    pid: int | None = None
    version: str | None = None
    started: float | None = None  # Unix timestamp


class LocalMlflow:
    """One MLflow server on a SQLite file under `home`, shared by every tipbench command with that home."""

    def __init__(self, home: Path, *, command: Sequence[str] | None = None) -> None:
        """Manage the server under `home`. Tests replace MLflow with another program by `command`."""
        self.folder = home / "mlflow"
        self._command = command
        self._log = self.folder / "server.log"
        self._info_path = self.folder / "server.json"
        self._database = self.folder / "mlflow.db"

    def has_data(self) -> bool:
        """Return whether the database exists."""
        return self._database.exists()

    def status(self) -> ServerStatus:
        """Return whether the server runs, and where."""
        info = _read_info(self._info_path)
        running = self._running()
        port = info.get("port")
        return ServerStatus(
            running=running,
            healthy=running and port is not None and _healthy(port),
            folder=self.folder,
            log=self._log,
            url=None if port is None else f"http://{HOST}:{port}",
            pid=info.get("pid") if running else None,
            version=info.get("version"),
            started=info.get("started"),
        )

    def up(self, *, wait_s: float = 120.0, report: Callable[[str], None]) -> str:
        """Return the URL of the server, started if necessary and ready for requests."""
        try:
            version = "unknown" if self._command is not None else importlib.metadata.version("mlflow")
        except importlib.metadata.PackageNotFoundError:
            raise _not_installed() from None
        make_folder(self.folder, private=True)
        with convert_home_errors(self._database, "cannot be made private"):  # it contains the keys of blind sheets
            for path in self.folder.glob("mlflow.db*"):
                path.chmod(0o600)
        deadline = time.monotonic() + wait_s
        with self._locked(deadline, report):
            if self._running():
                # 0, because the position in the log file where this server's output begins is unknown.
                return self._wait_until_healthy(deadline, wait_s, report, log_start=0)
            taken: set[int] = set()
            while True:
                port = _free_port(_read_info(self._info_path).get("port"), taken)
                log_start = self._launch(port, version)
                try:
                    return self._wait_until_healthy(deadline, wait_s, report, log_start=log_start)
                except _PortTakenError:
                    taken.add(port)

    def down(self) -> bool:
        """Stop all processes of the server; returns False if it was not running."""
        if not self._running():
            return False
        with self._locked(time.monotonic() + STOP_S, lambda _: None):
            pid = _read_info(self._info_path).get("pid")
            if pid is None:
                raise LocalMlflowError(
                    f"The local MLflow runs, but {self._info_path} does not name its process. "
                    f"End the process that has {self._log} open."
                )
            for signal_, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 5.0)):
                deadline = time.monotonic() + seconds
                try:
                    # While the log is locked, a process of the group is alive, so the group id cannot have been reused.
                    if self._running():
                        os.killpg(pid, signal_)
                except ProcessLookupError:
                    pass
                except PermissionError as exc:
                    raise LocalMlflowError(f"The local MLflow (process {pid}) belongs to another user.") from exc
                while self._running() and time.monotonic() <= deadline:
                    time.sleep(POLL_S)
                if not self._running():
                    return True
        raise LocalMlflowError(f"The local MLflow (process group {pid}) does not end, even after SIGKILL.")

    def _running(self) -> bool:
        with convert_home_errors(self._log, "cannot be read"):
            try:
                log = self._log.open("rb")
            except (FileNotFoundError, NotADirectoryError):
                return False
        with log:
            # Shared, so that two concurrent checks do not take each other for the server.
            return not try_lock(log.fileno(), self._log, shared=True)

    @contextmanager
    def _locked(self, deadline: float, report: Callable[[str], None]) -> Iterator[None]:
        """Serialise commands that start or stop the server."""
        path = self.folder / "starting.lock"
        with convert_home_errors(path, "cannot be opened"):
            lock = path.open("wb")
        with lock:
            reported = False
            while not try_lock(lock.fileno(), path):
                if not reported:
                    report("Waiting for another tipbench that is starting or stopping the local MLflow …")
                    reported = True
                if time.monotonic() > deadline:
                    raise LocalMlflowError(
                        "Another tipbench is still starting or stopping the local MLflow. Try again later."
                    )
                time.sleep(POLL_S)
            yield

    def _launch(self, port: int, version: str) -> int:
        """Start the server in the background. Return the position in the log file where its output begins."""
        info = {"url": f"http://{HOST}:{port}", "port": port, "version": version, "started": time.time()}
        with convert_home_errors(self._info_path, "cannot be written"):
            _write_info(self._info_path, info)
        with convert_home_errors(self._log, "cannot be written"):
            if self._log.exists() and self._log.stat().st_size > MAX_LOG_BYTES:
                self._log.unlink()
            log = self._log.open("ab")
        command = [
            *(sys.executable, "-m", "tipbench.record.local_mlflow", str(self._info_path)),
            *(self._command or (sys.executable, "-m", "mlflow")),
            *("server", "--host", HOST, "--port", str(port), "--workers", "1"),
            # Relative to the folder: a database URL cannot contain a path with a question mark or a percent sign.
            *("--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", "./artifacts"),
            *("--uvicorn-opts", "--no-access-log"),
        ]
        with log:
            log_start = log.tell()
            deadline = time.monotonic() + 5.0
            while not try_lock(log.fileno(), self._log):  # a concurrent status check may hold the lock briefly
                if time.monotonic() > deadline:
                    raise LocalMlflowError(f"Another program has {log.name} locked; is a server still ending?")
                time.sleep(POLL_S)
            try:
                launched = subprocess.run(  # ends once `_become_server` has forked the server
                    command,
                    cwd=self.folder,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    check=False,
                    umask=0o077,
                )
            except OSError as exc:
                raise LocalMlflowError(f"The local MLflow could not be started: {exc}.") from exc
        if launched.returncode != 0:
            raise LocalMlflowError(f"The local MLflow could not be started.\n{self._log_tail(log_start)}")
        return log_start

    def _wait_until_healthy(
        self, deadline: float, wait_s: float, report: Callable[[str], None], *, log_start: int
    ) -> str:
        began = time.monotonic()
        next_report = began
        port = _read_info(self._info_path).get("port")
        while self._running():
            if port is not None and _healthy(port):
                return f"http://{HOST}:{port}"
            now = time.monotonic()
            if now > deadline:
                raise LocalMlflowError(
                    f"The local MLflow did not respond within {wait_s:g} s (log: {self._log}). It is still starting: "
                    "try again, or stop it with `tipbench mlflow down`."
                )
            if now >= next_report:
                report(f"Starting the local MLflow on port {port} … {now - began:.0f} s")
                next_report = now + 5.0
            time.sleep(POLL_S)
        raise self._start_error(log_start)

    def _start_error(self, log_start: int) -> LocalMlflowError:
        tail = self._log_tail(log_start)
        if "address already in use" in tail.lower():
            return _PortTakenError(f"The port of the local MLflow is taken.\n{tail}")
        if "No module named mlflow" in tail or "No module named 'mlflow'" in tail:
            return _not_installed()
        if "out-of-date database schema" in tail or "Can't locate revision" in tail:
            return LocalMlflowError(
                f"The database in {self.folder} was made by another version of MLflow. If by an older one, keep a copy "
                f"and run: cd {shlex.quote(str(self.folder))} && mlflow db upgrade sqlite:///mlflow.db . "
                "If by a newer one, install that version, or use another TIPBENCH_HOME."
            )
        return LocalMlflowError(f"The local MLflow ended while it was starting. The end of {self._log}:\n{tail}")

    def _log_tail(self, log_start: int) -> str:
        with convert_home_errors(self._log, "cannot be read"), self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(log_start, size - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-N_TAIL_LINES:])


class _PortTakenError(LocalMlflowError):
    """Another process took the port first; the next port is tried."""


def _not_installed() -> LocalMlflowError:
    return LocalMlflowError(
        "The local MLflow cannot be started: the package mlflow is not installed. Run pip install 'tipbench[local]', "
        "or give the address of a running server with --mlflow-url."
    )


def _environment() -> dict[str, str]:
    """Return the server's environment, without the caller's settings of MLflow, such as its database."""
    # PYTHONWARNINGS=error would turn warnings of MLflow into exceptions.
    environment = {key: value for key, value in os.environ.items() if "MLFLOW" not in key and key != "PYTHONWARNINGS"}
    return environment | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # no file in the folder can shadow a module
    }


def _free_port(last: int | None, taken: set[int]) -> int:
    """Return a free port, preferably the last one, so that links keep working."""
    any_port = 0  # the operating system chooses
    preferred = [last] if last else []
    for port in (*preferred, *PORTS, any_port):
        if port in taken:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            _host, free_port = probe.getsockname()
            return int(free_port)
    raise LocalMlflowError(f"No port is free on {HOST} for the local MLflow.")


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().read(100).strip() == b"OK"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _read_info(path: Path) -> dict[str, Any]:
    """Return the valid values of server.json; empty if it cannot be read."""
    types = {"port": int, "pid": int, "version": str, "started": float}
    try:
        info = json.loads(path.read_text("utf-8"))
        return {key: info[key] for key, type_ in types.items() if isinstance(info.get(key), type_)}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_info(path: Path, info: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(info, indent=1) + "\n").encode())


def _become_server(path: Path, command: Sequence[str]) -> None:
    """Fork, leave the caller's session, save the process id and exec the server. The lock is held all the time."""
    read_end, write_end = os.pipe()  # both are closed by exec
    if os.fork() > 0:
        os.close(write_end)
        # Returns when the child closes its write end, after saving its process id (so that `down` finds it), or dies.
        os.read(read_end, 1)
        os._exit(0)
    os.setsid()
    _write_info(path, {**json.loads(path.read_text("utf-8")), "pid": os.getpid()})
    os.close(write_end)
    os.execvp(command[0], list(command))  # noqa: S606


if __name__ == "__main__":
    _become_server(Path(sys.argv[1]), sys.argv[2:])
