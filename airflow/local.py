"""A local Airflow for trying the DAG out, and for the tests: its own folder, pools, users and ports. Ends with Ctrl-C.

    python airflow/local.py --environment .airflow/venv --home .airflow

Runs with any Python 3.11; Airflow itself lives in `--environment` (`make airflow` makes it). When it answers, one line
of JSON on stdout tells where and for whom. Passwords are made by chance and kept in the home, readable by its owner.
"""  # noqa: INP001 - a script, not a package

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
USERS = {"admin": "admin", "bench": "op"}  # name → role; the panel triggers as `bench`
HOSTS_VARIABLE = "tipbench_ollama_hosts"
START_S = 300.0
STOP_S = 30.0


def main() -> int:
    """Set up what is missing, run it, and see it end."""
    asked = _arguments()
    home = asked.home.resolve()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment = settings(home, asked.environment.resolve(), asked.dags.resolve(), asked.port or _free_port())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    passwords = _passwords(home)
    try:
        _set_up(home, environment)
        return _serve(home, environment, passwords)
    except KeyboardInterrupt:
        return 130


def settings(home: Path, environment: Path, dags: Path, port: int) -> dict[str, str]:
    """The variables Airflow runs with: ours, without its own that may lie about."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW_") or "_VAR_" in key}
    url = f"http://127.0.0.1:{port}"
    source = str(REPOSITORY / "src")
    return ours | {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part),
        "PYTHONUNBUFFERED": "1",
        "AIRFLOW_HOME": str(home),
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
        "AIRFLOW__API_AUTH__JWT_SECRET": _secret(home / "jwt.secret"),
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(_free_port()),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(_free_port()),
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
        "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        **dict.fromkeys(("NO_PROXY", "no_proxy"), _without_proxy()),
    }


def _set_up(home: Path, environment: Mapping[str, str]) -> None:
    """Database, pools, and the DAG made known: without reserialising, Airflow takes minutes to see a new file."""
    pools = home / "pools.json"
    pools.write_text(json.dumps(_pools(environment)), "utf-8")
    for words in (("db", "migrate"), ("pools", "import", str(pools)), ("dags", "reserialize")):
        _say(f"airflow {' '.join(words[:2])} …")
        done = subprocess.run(
            ["airflow", *words], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            _say(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            raise SystemExit(f"`airflow {' '.join(words)}` ended with {done.returncode}; its last words are above.")


def _pools(environment: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """One slot for each Ollama host: at most one model of ours is in its memory. Named as the DAG names them."""
    listed = environment.get(f"AIRFLOW_VAR_{HOSTS_VARIABLE.upper()}") or environment.get("TIPBENCH_OLLAMA_HOSTS", "")
    names = [entry.partition("=")[0].strip() for entry in listed.split(",") if entry.strip()]
    pools = [f"ollama_{name}" for name in names] or ["ollama"]
    about = "One model at a time on this Ollama host"
    return {pool: {"slots": 1, "description": about, "include_deferred": False} for pool in pools}


def _serve(home: Path, environment: Mapping[str, str], passwords: Mapping[str, str]) -> int:
    url = environment["AIRFLOW__API__BASE_URL"]
    with (home / "airflow.log").open("ab") as log:
        process = subprocess.Popen(
            ["airflow", "standalone"],
            env=environment,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        if not _healthy(f"{url}/api/v2/monitor/health", process):
            _say((home / "airflow.log").read_text("utf-8", "replace")[-4000:])
            raise SystemExit(
                f"Airflow did not come up within {START_S:g} s; the end of {home / 'airflow.log'} is above."
            )
        _say(f"Airflow at {url}: user admin, password in {home / 'passwords.json'}; Ctrl-C ends it")
        print(json.dumps({"url": url, "users": {name: passwords[name] for name in USERS}}), flush=True)
        return process.wait()
    finally:
        _end(process)


def _healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether scheduler, database and DAG processor all say so, in time."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(url, timeout=5.0) as response:
                told = json.load(response)
            if all((told.get(part) or {}).get("status") == "healthy" for part in ("metadatabase", "scheduler")):
                return True
        except (OSError, ValueError, urllib.error.URLError):
            pass
        time.sleep(0.5)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group, politely at first: Airflow's parts are processes of their own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + STOP_S / 2
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
    process.wait()


def _passwords(home: Path) -> dict[str, str]:
    file = home / "passwords.json"
    known: dict[str, str] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    passwords = {name: known.get(name) or secrets.token_urlsafe(18) for name in USERS}
    _write_privately(file, json.dumps(passwords))
    return passwords


def _secret(file: Path) -> str:
    if not file.exists():
        _write_privately(file, secrets.token_urlsafe(32))
    return file.read_text("utf-8")


def _write_privately(file: Path, text: str) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)


def _without_proxy() -> str:
    """Airflow's parts talk to each other over HTTP; a proxy has no business there."""
    own = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    return ",".join(part for part in ("127.0.0.1", "localhost", own) if part)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--environment", type=Path, required=True, help="Virtual environment that holds Airflow.")
    parser.add_argument("--home", type=Path, required=True, help="Folder for its database, logs and passwords.")
    parser.add_argument("--dags", type=Path, default=REPOSITORY / "dags", help="Folder of DAGs.")
    parser.add_argument("--port", type=int, default=0, help="Port of the web server; 0 takes a free one.")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
