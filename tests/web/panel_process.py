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
_ENDED = {str(state) for state in ENDED}


class PanelProcess:
    """A panel process on a home folder; `with` kills it and its running jobs at the end."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        self.home = home
        self._environment = {**os.environ, "TIPBENCH_HOME": str(home), "TIPBENCH_ADMIN_TOKEN": OPERATOR, **environment}
        self._files = home.parent / f"panel-{time.monotonic_ns()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.kill()
        for folder in (self.home / "jobs").glob("*/process.json"):
            process = JobFolder(self.home / "jobs", folder.parent.name).process
            if process is not None and is_alive(process):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    @property
    def stderr(self) -> str:
        return self._files.with_suffix(".err").read_text()

    def start(self) -> Self:
        """Start the process and wait until it responds."""
        with self._files.with_suffix(".err").open("wb") as err:
            command = [sys.executable, "-m", "tipbench", "panel", "--port", "0"]
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=err, env=self._environment, start_new_session=True
            )
        self._until(lambda: re.search(r"^panel: http://\S+/ ", self.stderr, re.MULTILINE))
        found = re.search(r"^panel: (http://\S+)/ ", self.stderr, re.MULTILINE)
        assert found is not None
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        self.client = httpx.Client(base_url=found[1], headers=headers, trust_env=False, timeout=60)
        self._until(self._answers)
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

    def wait_until(self, job_id: str, wanted: Callable[[Any], object], wait_s: float = 90) -> Any:
        """Poll until the job fulfils the condition."""
        deadline = time.monotonic() + wait_s
        while not wanted(now := self.job(job_id)):
            log = self.client.get(f"{API}/jobs/{job_id}/log").text
            assert time.monotonic() < deadline, f"{now}\n{log}\n{self.stderr}"
            time.sleep(0.05)
        return now

    def wait_for_end(self, job_id: str) -> Any:
        return self.wait_until(job_id, lambda now: now["job"]["state"] in _ENDED)

    def _answers(self) -> bool:
        try:
            return self.client.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def _until(self, wanted: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_S
        while not wanted():
            assert self.process is not None
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.05)


def generated_cells(now: Any) -> int:
    """Return the number of generated cells, over all models."""
    return sum(int(model["done"]) for model in now["progress"]["models"])
