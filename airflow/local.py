"""Run a local Airflow for development and tests, with separate home, pools, users and port. Stop it with Ctrl-C.

    python airflow/local.py --environment .airflow/venv --home .airflow

Runs with any Python 3.11; Airflow is installed in `--environment` (created by `make airflow`). Once it is ready, one
line of JSON on stdout has its URL and users, and a message on stderr shows the next steps. Passwords are random and
stored in the home folder, readable only by its owner. All ports are bound to localhost.
"""  # noqa: INP001 - a script, not a package

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[1]
USERS = {"admin": "admin", "bench": "op"}  # name → role; the panel triggers as `bench`
DAG = "bench_collect"
# In shutdown order: the scheduler first, so that its tasks can still report to the API server. No log server, which
# would listen on all interfaces, and no triggerer, which the DAG does not need.
COMPONENTS = (("scheduler", "--skip-serve-logs"), ("dag-processor",), ("api-server",))
HEALTH_CHECKS = ("metadatabase", "scheduler", "dag_processor")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 60.0  # an Airflow that has just started may need more than 10 s for a request on a busy machine
STOP_TIMEOUT_S = 20.0  # per component; a terminated collect needs some seconds to unload its model


def main() -> int:
    """Set up Airflow, run it, and shut it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--environment", type=Path, required=True, help="Virtual environment that holds Airflow.")
    parser.add_argument("--home", type=Path, required=True, help="Folder for its database, logs and passwords.")
    parser.add_argument("--dags", type=Path, default=REPOSITORY / "dags", help="Folder of DAGs.")
    parser.add_argument("--port", type=int, default=0, help="Port of the web server; 0 takes a free one.")
    options = parser.parse_args()
    home = options.home.resolve()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in SIGNALS:
        signal.signal(number, _interrupted)
    with (home / "lock").open("w") as lock:
        venv = options.environment.resolve()
        _check_and_lock(home, venv, lock)
        port = _available_port(options.port)
        environment = airflow_environment(home, venv, options.dags.resolve(), port)
        file = home / "passwords.json"
        stored_passwords: dict[str, str] = json.loads(file.read_text("utf-8")) if file.exists() else {}
        passwords = {name: stored_passwords.get(name) or secrets.token_urlsafe(18) for name in USERS}
        _write_privately(file, json.dumps(passwords))
        try:
            _set_up(environment)
            _serve(home, environment, passwords)
        except KeyboardInterrupt:
            return 130


def _check_and_lock(home: Path, venv: Path, lock: IO[str]) -> None:
    """Check that Airflow is installed, and lock the home. Raises SystemExit with what to do."""
    if not (venv / "bin" / "airflow").exists():
        raise SystemExit(f"There is no Airflow in {venv}. Install it with: make airflow-environment")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"An Airflow already runs in {home}. Stop it with Ctrl-C, or give another --home.") from None


def _available_port(port: int) -> int:
    """Return the port, or a free one for 0. Raises SystemExit if it is taken; Airflow's error is less clear."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: reuse a port just closed
        try:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
        except OSError as exc:
            raise SystemExit(
                f"Airflow cannot listen on port {port}: {exc.strerror}. Choose another: make airflow AIRFLOW_PORT=8081"
            ) from None


def airflow_environment(home: Path, venv: Path, dags: Path, port: int) -> dict[str, str]:
    """Return this process's environment with other settings of Airflow; Airflow variables (AIRFLOW_VAR_) are kept."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW_") or "_VAR_" in key}
    url = f"http://127.0.0.1:{port}"
    source = str(REPOSITORY / "src")
    secret = home / "jwt.secret"
    if not secret.exists():
        _write_privately(secret, secrets.token_urlsafe(64))
    no_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    return inherited | {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(path for path in (source, os.environ.get("PYTHONPATH", "")) if path),
        "PYTHONUNBUFFERED": "1",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home / 'airflow.db'}",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{name}:{role}" for name, role in USERS.items()),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API_AUTH__JWT_SECRET": secret.read_text("utf-8"),
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
        "AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL": "0",
        "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        # Airflow's components send requests to each other.
        **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, ("127.0.0.1", "localhost", no_proxy)))),
    }


def _set_up(environment: Mapping[str, str]) -> None:
    """Migrate the database and serialize the DAG; without this, Airflow takes minutes to find a new file."""
    for words in (("db", "migrate"), ("dags", "reserialize")):
        _print(f"airflow {' '.join(words)} …")
        done = subprocess.run(
            ["airflow", *words], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            _print(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            raise SystemExit(f"`airflow {' '.join(words)}` ended with {done.returncode}; its last output is above.")


def _serve(home: Path, environment: Mapping[str, str], passwords: Mapping[str, str]) -> NoReturn:
    """Run until a component exits, startup times out, or Ctrl-C."""
    url = environment["AIRFLOW__API__BASE_URL"]
    log = home / "airflow.log"
    since = datetime.now(UTC)
    components: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with log.open("ab") as stream:
            for name, *options in COMPONENTS:
                components[name] = subprocess.Popen(
                    ["airflow", name, *options],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,  # so that Ctrl-C reaches only this process
                )
        if _wait_until_healthy(f"{url}/api/v2/monitor/health", components.values()):
            api = Api(url, "admin", passwords["admin"])
            _await_dag(api, since)
            # One slot per pool of the DAG, so that each Ollama host runs one model at a time.
            needed = {task["pool"] for task in api(f"/api/v2/dags/{DAG}/tasks")["tasks"]}
            for pool in sorted(needed - {pool["name"] for pool in api("/api/v2/pools?limit=100")["pools"]}):
                description = "One model at a time on this Ollama host"
                api("/api/v2/pools", {"name": pool, "slots": 1, "description": description})
            _print_next_steps(home, environment, passwords)
            while _running(components.values()):
                time.sleep(0.2)
        ended = [name for name, component in components.items() if component.poll() is not None]
        problem = f"Airflow's {ended[0]} has exited" if ended else f"Airflow is not healthy after {START_TIMEOUT_S:g} s"
        _print(log.read_text("utf-8", "replace")[-4000:])
        raise SystemExit(f"{problem}; the end of {log} is above.")
    finally:
        _stop(components.values())


def _running(components: Collection[subprocess.Popen[bytes]]) -> bool:
    return all(component.poll() is None for component in components)


def _wait_until_healthy(url: str, components: Collection[subprocess.Popen[bytes]]) -> bool:
    """Return True once database, scheduler and DAG processor are healthy; False if they time out or exit."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while _running(components) and time.monotonic() < deadline:
        try:
            health = _json(urllib.request.Request(url))  # noqa: S310 - our own address
            if all((health.get(name) or {}).get("status") == "healthy" for name in HEALTH_CHECKS):
                return True
        except (OSError, ValueError):
            pass
        time.sleep(0.5)
    return False


class Api:
    """Minimal REST client; much faster than Airflow's command line."""

    def __init__(self, url: str, name: str, password: str) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        token = self("/auth/token", {"username": name, "password": password})["access_token"]
        self._headers["Authorization"] = f"Bearer {token}"

    def __call__(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return _json(urllib.request.Request(self._url + path, data, self._headers))  # noqa: S310 - our own address


def _json(request: urllib.request.Request) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=REQUEST_TIMEOUT_S) as response:
        return json.load(response)


def _await_dag(api: Api, since: datetime) -> None:
    """Wait until the DAG processor has parsed the file; unlike `dags reserialize`, it reads Airflow variables."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        errors = api("/api/v2/importErrors")["import_errors"]
        if errors:
            _print(errors[0]["stack_trace"])
            raise SystemExit(f"Airflow cannot read {errors[0]['filename']}; see above. Correct it and start again.")
        if datetime.fromisoformat(api(f"/api/v2/dags/{DAG}")["last_parsed_time"]) > since:
            return
        time.sleep(0.5)
    raise SystemExit(f"Airflow's DAG processor did not parse {DAG} within {START_TIMEOUT_S:g} s; see airflow.log.")


def _print_next_steps(home: Path, environment: Mapping[str, str], passwords: Mapping[str, str]) -> None:
    """Write panel.env and airflow.env. Print how to use them to stderr, and the URL and users as JSON to stdout."""
    url, panel_env, airflow_env = environment["AIRFLOW__API__BASE_URL"], home / "panel.env", home / "airflow.env"
    exported = {key: value for key, value in environment.items() if key.startswith("AIRFLOW_")}
    exported |= {key: environment[key] for key in ("PATH", "PYTHONPATH")}
    _write_privately(airflow_env, "".join(f"export {key}={shlex.quote(value)}\n" for key, value in exported.items()))
    variables = {"URL": url, "USERNAME": "bench", "PASSWORD": passwords["bench"]}
    _write_privately(panel_env, "".join(f"export TIPBENCH_AIRFLOW_{key}={value}\n" for key, value in variables.items()))
    _print(
        f"Airflow: {url} (press Ctrl-C to stop); user admin, password in {_shown(home / 'passwords.json')}\n"
        f"A panel that uses it, in another terminal: . {_shown(panel_env)} && make panel\n"
        f"A run from the command line: . {_shown(airflow_env)} && airflow dags trigger {DAG}"
    )
    print(json.dumps({"url": url, "users": {name: passwords[name] for name in USERS}}), flush=True)


def _stop(components: Collection[subprocess.Popen[bytes]]) -> None:
    """Stop components one by one with SIGTERM, then SIGKILL; terminated collects unload their models."""
    _ignore_signals()
    for component in components:
        if not _signal_and_wait(component, signal.SIGTERM):
            _signal_and_wait(component, signal.SIGKILL)


def _interrupted(*_: object) -> NoReturn:
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    """Ignore further signals, so that a second Ctrl-C does not interrupt the shutdown."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _signal_and_wait(component: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a component's process group. Returns whether all its processes end before the timeout."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    try:
        os.killpg(component.pid, number)
        while time.monotonic() < deadline:
            component.poll()
            os.killpg(component.pid, 0)
            time.sleep(0.1)
    except ProcessLookupError:
        return True
    return False


def _write_privately(file: Path, text: str) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)


def _shown(path: Path) -> Path:
    """Return a path relative to the working directory, if possible."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
