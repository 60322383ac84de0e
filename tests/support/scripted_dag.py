"""A run of the scripted Airflow's DAG: plan, one collect for each model (the real command), export, wait, compare."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from tipbench.jobs.command import command_arguments
from tipbench.jobs.job import JobKind, JobRequest
from tipbench.plan.config import split_names

Collecting = Callable[[str, list[str]], int]  # model, log → exit code
_SIMPLE = ("plan", "export_for_judge", "wait_for_judge", "compare", "outcome")


@dataclass
class ScriptedTask:
    """A task, or one instance of a mapped task. `logs` are by attempt."""

    task_id: str
    map_index: int = -1
    model: str | None = None
    pool: str = "default_pool"
    state: str | None = None
    attempt: int = 0
    started: str | None = None
    logs: dict[int, list[str]] = field(default_factory=dict)

    def begin(self) -> list[str]:
        """Start a new attempt and return its log."""
        self.attempt += 1
        self.state, self.started = "running", datetime.now(UTC).isoformat()
        return self.logs.setdefault(self.attempt, [])

    def to_json(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id, "map_index": self.map_index, "state": self.state, "try_number": self.attempt,
            "start_date": self.started, "pool": self.pool, "rendered_map_index": self.model,
        }  # fmt: skip


class Site(Protocol):
    """The part of the scripted Airflow that a run uses."""

    home: Path
    paused: bool
    pools: set[str]
    collecting: Collecting | None


class ScriptedDagRun:
    """A DAG run on its own thread."""

    def __init__(self, site: Site, conf: Mapping[str, Any]) -> None:
        self.conf = dict(conf)
        self._site = site
        self.key = secrets.token_hex(4)
        self.state = "queued"
        self._cancelled, self._answered = threading.Event(), threading.Event()
        self._process: subprocess.Popen[str] | None = None
        models = split_names(self.conf["models"])
        self._collects = [ScriptedTask("collect", at, model, "ollama") for at, model in enumerate(models)]
        self._others = {name: ScriptedTask(name) for name in _SIMPLE}
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def tasks(self) -> list[ScriptedTask]:
        plan, *rest = self._others.values()
        return [plan, *self._collects, *rest]

    def task(self, task_id: str, map_index: int) -> ScriptedTask | None:
        return next((t for t in self.tasks if (t.task_id, t.map_index) == (task_id, map_index)), None)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)

    def cancel(self) -> None:
        """Send SIGTERM to the running task and start no other, as when a run is set to failed."""
        self._cancelled.set()
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def judged(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Respond to the task that waits for the judge."""
        if self._answered.is_set():
            return 409, {"detail": "has already been updated"}
        if body.get("chosen_options") != ["Compare now"]:
            return 400, {"detail": "Invalid options"}
        self._answered.set()
        return 200, {"chosen_options": body["chosen_options"]}

    def clear(self, task_ids: list[Any]) -> None:
        """Run these tasks again, and the ones after them."""
        self.join()
        named = {tuple(each) if isinstance(each, list) else (each, -1) for each in task_ids}
        follows = False
        for task in self.tasks:
            if (task.task_id, task.map_index) in named or (follows and task.task_id in _SIMPLE):
                task.state, follows = None, True
        self.state = "queued"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._until(lambda: not self._site.paused)
        self.state = "running"
        self._simple("plan", "planned")
        for task in self._collects:
            if task.state is None:
                self._collect(task)
        self._simple("export_for_judge", "exported")
        if self.conf.get("wait_for_judge") and not self._cancelled.is_set():
            self._others["wait_for_judge"].begin()
            self._others["wait_for_judge"].state = "awaiting_input"
            self._until(self._answered.is_set)
        self._simple("wait_for_judge", "", skip=not self.conf.get("wait_for_judge"))
        self._simple("compare", "compared")
        failed = any(task.state == "failed" for task in self._collects)
        self._simple("outcome", "a model failed" if failed else "all models are collected")
        if failed:
            self._others["outcome"].state = "failed"
        self.state = "failed" if failed or self._cancelled.is_set() else "success"

    def _simple(self, name: str, words: str, *, skip: bool = False) -> None:
        task = self._others[name]
        if task.state not in (None, "awaiting_input"):
            return
        if skip or self._cancelled.is_set():
            task.state = "skipped"
            return
        (task.logs[task.attempt] if task.state else task.begin()).append(words)
        task.state = "success"

    def _until(self, wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not wanted() and not self._cancelled.is_set() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _collect(self, task: ScriptedTask) -> None:
        task.state = "scheduled"
        self._until(lambda: task.pool in self._site.pools)
        if self._cancelled.is_set():
            task.state = "skipped"
            return
        log = task.begin()
        collecting = self._site.collecting or self._command
        code = collecting(task.model or "", log)
        task.state = "failed" if code else "success"

    def _command(self, model: str, log: list[str]) -> int:
        options = {**self.conf, "models": model, "skip_refused": False}
        options.pop("wait_for_judge", None)
        words = command_arguments(JobRequest(JobKind.COLLECT, options["experiment"], options))
        reading, writing = os.pipe()
        with subprocess.Popen(
            [sys.executable, "-m", "tipbench", *words],
            env={
                **os.environ,
                "TIPBENCH_HOME": str(self._site.home / "worker"),
                "TIPBENCH_EVENTS": f"/dev/fd/{writing}",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[writing],
            start_new_session=True,
        ) as self._process:
            os.close(writing)
            if self._cancelled.is_set():
                self.cancel()
            printing = threading.Thread(target=_lines, args=(self._process.stdout, log), daemon=True)
            printing.start()
            with os.fdopen(reading, encoding="utf-8") as events:
                _lines(events, log)
            printing.join(60)
            code = self._process.wait(60)
        self._process = None
        return code


def _lines(stream: Any, log: list[str]) -> None:
    for line in stream:
        log.append(line.rstrip("\n"))  # noqa: PERF401 - the log is read while it grows
