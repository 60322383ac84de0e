"""`tipbench panel` as a subprocess that tests can call, kill and restart."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import ENDED
from tipbench.jobs.local import is_alive
from web.panels import API, OPERATOR

START_S = 120.0
JOB_S = 120.0


class PanelProcess:
    """A panel process on a home folder; `with` kills it and its running jobs at the end."""

    def __init__(self, home: Path, environment: Mapping[str, str], *, port: int = 0) -> None:
        self.home = home
        self._port = port
        self._environment = {**os.environ, "TIPBENCH_HOME": str(home), "TIPBENCH_ADMIN_TOKEN": OPERATOR, **environment}
        self._files = home.parent / f"panel-{time.monotonic_ns()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.kill()
        kill_jobs(self.home)

    @property
    def stderr(self) -> str:
        return self._files.with_suffix(".err").read_text()

    def start(self) -> Self:
        """Start the process and wait until it responds."""
        with self._files.with_suffix(".err").open("wb") as err:
            command = [sys.executable, "-m", "tipbench", "panel", "--port", str(self._port)]
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=err, env=self._environment, start_new_session=True
            )
        self._poll(lambda: re.search(r"^panel: http://\S+/ ", self.stderr, re.MULTILINE))
        found = re.search(r"^panel: (http://\S+)/ ", self.stderr, re.MULTILINE)
        assert found is not None
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        self.client = httpx.Client(base_url=found[1], headers=headers, trust_env=False, timeout=60)
        self._poll(self._is_ready)
        return self

    def kill(self) -> None:
        """Send SIGKILL to the process and its session, which does not include its jobs."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.client.close()

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; return the exit code and the duration."""
        assert self.process is not None
        began = time.monotonic()
        self.process.terminate()
        return self.process.wait(60), time.monotonic() - began

    def run(self, key: str | None = None, **config: Any) -> Any:
        """Start a run and return its job."""
        headers = {} if key is None else {"Idempotency-Key": key}
        response = self.client.post(f"{API}/run", json=config, headers=headers)
        assert response.status_code == 202, response.text
        return response.json()["job"]

    def job(self, job_id: str) -> Any:
        return self.client.get(f"{API}/jobs/{job_id}").json()

    def wait_until(self, job_id: str, is_reached: Callable[[Any], object]) -> Any:
        """Wait until the job fulfils the condition, and return it."""
        try:
            return wait_for_job(self.client.get, job_id, is_reached)
        except AssertionError as exc:
            exc.add_note(self.stderr)
            raise

    def wait_for_end(self, job_id: str) -> Any:
        return self.wait_until(job_id, has_ended)

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def _poll(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.05)


def wait_for_job(get: Callable[[str], Any], job_id: str, is_reached: Callable[[Any], object]) -> Any:
    """Poll a job with a client's `get` until it fulfils the condition, and return it."""
    deadline = time.monotonic() + JOB_S
    while not is_reached(job := get(f"{API}/jobs/{job_id}").json()):
        assert time.monotonic() < deadline, f"{job}\n{get(f'{API}/jobs/{job_id}/log').text}"
        time.sleep(0.05)
    return job


def has_ended(job: Any) -> bool:
    return job["job"]["state"] in {str(state) for state in ENDED}


def generated_cells(job: Any) -> int:
    """Return the number of generated cells, over all models."""
    return sum(int(model["done"]) for model in job["progress"]["models"])


def kill_jobs(home: Path) -> None:
    """Kill the running jobs of a home folder."""
    for file in (home / "jobs").glob("*/process.json"):
        process = JobFolder(home / "jobs", file.parent.name).process
        if process is not None and is_alive(process):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
