"""A real Airflow for tests, in a separate environment, because its dependencies conflict with tipbench's.

TIPBENCH_AIRFLOW names the virtual environment; the default is `airflow` in the tests' cache, where `.ci/run` makes it.
Airflow is started by airflow/local.py, as by `make airflow`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from support.real_ollama import cache_dir

ROOT = Path(__file__).resolve().parents[2]
DAG = "bench_collect"
ENDED = frozenset({"success", "failed"})
START_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 150.0  # airflow/local.py may need 120: killed before that, it would leave parts of Airflow behind
REQUEST_TIMEOUT_S = 60.0
_ENVIRONMENT = os.environ.get("TIPBENCH_AIRFLOW")  # read on import: in tests the TIPBENCH_ variables are not set


def airflow_environment() -> Path:
    """The virtual environment with Airflow. Without one the test is skipped, on CI it fails."""
    folder = Path(_ENVIRONMENT) if _ENVIRONMENT else cache_dir() / "airflow"
    if not (folder / "bin" / "airflow").exists():
        reason = f"there is no Airflow in {folder}: make airflow-environment AIRFLOW_VENV={folder}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


def unique_name(name: str) -> str:
    """Return a name that is unique on a shared server, so that a test can be repeated."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


class RealAirflow:
    """Airflow with tipbench's DAG, started by airflow/local.py; it can be started again."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.url = ""
        self.passwords: dict[str, str] = {}
        self._environment = dict(environment)
        self._port = 0
        self._tokens: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None

    @property
    def password(self) -> str:
        """The password of the user `bench`, who may trigger runs and respond to them."""
        return self.passwords["bench"]

    def start(self) -> Self:
        """Start it unless it runs already; returns once it is healthy."""
        if self._process is not None and self._process.poll() is None:
            return self
        self.stop()  # closes the output of a process that ended by itself
        command = [sys.executable, str(ROOT / "airflow" / "local.py"), "--environment", str(airflow_environment())]
        command += ["--home", str(self.folder / "airflow"), "--dags", str(ROOT / "dags"), "--port", str(self._port)]
        with (self.folder / "setup.log").open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            output = json.loads(self._first_line(self._process))
        except BaseException:
            self.stop()
            raise
        self.url, self.passwords = output["url"], output["users"]
        self._port = int(self.url.rpartition(":")[2])
        return self

    def _first_line(self, process: subprocess.Popen[str]) -> str:
        lines: queue.Queue[str] = queue.Queue()
        stdout = process.stdout
        assert stdout is not None
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        try:
            line = lines.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            line = ""
        if not line:
            pytest.fail(f"Airflow did not start:\n{(self.folder / 'setup.log').read_text('utf-8', 'replace')[-4000:]}")
        return line

    def stop(self) -> None:
        """End all its processes: local.py ends its process group, and is killed if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client(self, user: str = "bench") -> httpx.Client:
        """A client logged in as `bench` or `admin`."""
        if user not in self._tokens:
            body = {"username": user, "password": self.passwords[user]}
            response = httpx.post(f"{self.url}/auth/token", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
            assert response.status_code == 201, response.text
            self._tokens[user] = response.json()["access_token"]
        headers = {"Authorization": f"Bearer {self._tokens[user]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False)

    def trigger(self, run_id: str, conf: Mapping[str, Any]) -> None:
        """Start a DAG run."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf)}
        with self.client() as client:
            answer = client.post(f"/api/v2/dags/{DAG}/dagRuns", json=body)
        assert answer.status_code == 200, answer.text

    @contextmanager
    def without_pool(self, name: str = "ollama") -> Iterator[Callable[[], None]]:
        """Delete the pool; the yielded function creates it again, as the end of the block does."""
        with self.client("admin") as admin, ExitStack() as stack:

            def make() -> None:
                pool = {"name": name, "slots": 1, "description": "one model at a time"}
                assert admin.post("/api/v2/pools", json=pool).status_code in (201, 409)

            assert admin.delete(f"/api/v2/pools/{name}").status_code == 204
            stack.callback(make)
            yield make

    @contextmanager
    def paused(self) -> Iterator[Callable[[], None]]:
        """Pause the DAG; the yielded function resumes it, as the end of the block does."""
        with self.client("admin") as admin, ExitStack() as stack:

            def pause(*, is_paused: bool = False) -> None:
                assert admin.patch(f"/api/v2/dags/{DAG}", json={"is_paused": is_paused}).status_code == 200

            pause(is_paused=True)
            stack.callback(pause)
            yield pause

    def end_runs(self) -> None:
        """Fail every active run and wait for its end: it would occupy the pool that others wait for."""
        run_ids = [str(run["dag_run_id"]) for run in self._runs("", state=["queued", "running"], limit=100)["dag_runs"]]
        with self.client() as client:
            for run_id in run_ids:
                client.patch(f"/api/v2/dags/{DAG}/dagRuns/{run_id}", json={"state": "failed"}).raise_for_status()
        for run_id in run_ids:
            self.wait_for(run_id, ENDED)

    def _runs(self, path: str, **params: Any) -> Any:
        with self.client() as client:
            answer = client.get(f"/api/v2/dags/{DAG}/dagRuns{path}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def run_state(self, run_id: str) -> str:
        """The state of a DAG run: queued, running, success or failed."""
        return str(self._runs(f"/{run_id}")["state"])

    def tasks(self, run_id: str) -> list[dict[str, Any]]:
        """The run's task instances from Airflow's API."""
        return list(self._runs(f"/{run_id}/taskInstances", limit=100)["task_instances"])

    def task_states(self, run_id: str) -> dict[str, str]:
        """The state by task; a mapped task has its model in its name: `collect baseline:template`."""
        return {
            " ".join(part for part in (each["task_id"], each.get("rendered_map_index")) if part): str(each["state"])
            for each in self.tasks(run_id)
        }

    def return_value(self, run_id: str, task_id: str, map_index: int = -1) -> Any:
        """The return value of a task."""
        path = f"/api/v2/dags/{DAG}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/return_value"
        with self.client() as client:
            answer = client.get(path, params={"map_index": map_index, "deserialize": True})
        return answer.json().get("value") if answer.status_code == 200 else None

    def wait_for(self, run_id: str, states: frozenset[str], within_s: float = 300.0) -> str:
        """Wait until the run has one of these states and return it; fails with the tasks' states after `within_s`."""
        deadline = time.monotonic() + within_s
        while (state := self.run_state(run_id)) not in states:
            if time.monotonic() > deadline:
                pytest.fail(f"{run_id} is {state} after {within_s:g} s: {self.task_states(run_id)}")
            time.sleep(1.0)
        return state

    def expect_state(self, run_id: str, expected: str, within_s: float = 300.0) -> None:
        """Wait for the end of the run; fails with states and logs if it did not end in the expected state."""
        if (state := self.wait_for(run_id, ENDED, within_s)) == expected:
            return
        report = [f"{run_id} ended as {state}, expected {expected}: {self.task_states(run_id)}"]
        for each in self.tasks(run_id):
            if each["state"] not in ("success", "skipped", "removed"):
                log = self.logs(run_id, each["task_id"], max(each["try_number"], 1), each["map_index"])
                report.append(f"== {each['task_id']} ({each['state']}, try {each['try_number']}):\n{log[-3000:]}")
        scheduler = (self.folder / "airflow" / "airflow.log").read_text("utf-8", "replace")
        report += [line for line in scheduler.splitlines() if run_id in line][-30:]
        pytest.fail("\n".join(report))

    def wait_for_task(self, run_id: str, task: str, states: frozenset[str], within_s: float = 300.0) -> str:
        """Wait until a task, named as in `task_states`, has one of these states and return it."""
        deadline = time.monotonic() + within_s
        while (state := self.task_states(run_id).get(task, "")) not in states:
            if time.monotonic() > deadline:
                pytest.fail(f"{task} of {run_id} is {state!r} after {within_s:g} s: {self.task_states(run_id)}")
            time.sleep(0.5)
        return state

    def logs(self, run_id: str, task_id: str, attempt: int = 1, map_index: int = -1) -> str:
        """The log of one attempt of a task."""
        path = f"/api/v2/dags/{DAG}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{attempt}"
        with self.client() as client:
            return client.get(path, params={"map_index": map_index, "full_content": True}).text


@dataclass(frozen=True)
class DagProgram:
    """Runs dag_program.py with Airflow's Python; `run` runs other commands of Airflow's environment."""

    environment: Mapping[str, str]
    folder: Path

    def __call__(self, *arguments: str, **environment: str) -> Any:
        output = self.folder / "output.json"
        program = ROOT / "tests" / "airflow" / "dag_program.py"
        self.run("python", str(program), *arguments, environment={**environment, "TIPBENCH_OUTPUT": str(output)})
        return json.loads(output.read_text("utf-8"))

    def run(
        self, command: str, *arguments: str, within_s: float = 500.0, environment: Mapping[str, str] | None = None
    ) -> None:
        """Run a command of Airflow's environment; fails with its last output if it does not succeed in time."""
        log = self.folder / "program.log"
        problem = f"did not end within {within_s:g} s"
        with log.open("w", encoding="utf-8") as stream, suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [airflow_environment() / "bin" / command, *arguments],
                env={**self.environment, **(environment or {})},
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=within_s,
                check=False,
            )
            if done.returncode == 0:
                return
            problem = f"ended with {done.returncode}"
        pytest.fail(f"{command} {' '.join(arguments)} {problem}:\n{log.read_text('utf-8', 'replace')[-6000:]}")
