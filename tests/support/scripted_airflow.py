"""A scripted Airflow: the routes and states of the real one, and a DAG that runs the real collect command.

For tests of the runner without an installed Airflow, and for faults that a real one does not produce on demand.
"""

from __future__ import annotations

import json
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tipbench.jobs.command import command_arguments
from tipbench.jobs.job import JobKind, JobRequest
from tipbench.plan.collect_config import split_names

DAG = "bench_collect"
USER, PASSWORD = "bench", "a-password-for-tests"
Reply = tuple[int, Any]
_FAULTS = {"busy": (503, b"try later"), "html": (200, b"<html>another program</html>")}
_MAX_BODY_BYTES = 1_000_000
CollectFunction = Callable[[str, list[str]], int]  # model, log → exit code
_UNMAPPED_TASKS = ("plan", "export_for_judge", "wait_for_judge", "compare", "outcome")


class ScriptedAirflow:
    """The server in a thread of this process. `fault` replaces every response: away, busy, html, or empty for none."""

    def __init__(self, home: Path, collecting: CollectFunction | None = None) -> None:
        """`collecting` replaces the real command: it writes to the log and returns an exit code."""
        self.home = home
        self.collecting = collecting
        self.fault = ""
        self.paused = False
        self.pause_on_trigger = False
        self.has_dag = True
        self.may_cancel = True
        self.pools = {"ollama"}
        self.tokens: set[str] = set()
        self.logins = 0
        self.requests: list[tuple[str, str]] = []
        self.runs: dict[str, ScriptedDagRun] = {}
        self.lost_response_path = ""  # a path whose next request is carried out without a response
        self.failing_path, self.failing_status = "", 500  # part of a path, and the status of its responses
        self.echoed_path = ""  # the beginning of a path whose requests are returned in an error response
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        for run in self.runs.values():
            run.cancel()
        for run in self.runs.values():
            run.join()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def count(self, method: str, part: str) -> int:
        """The number of requests with this method whose path contains `part`."""
        return sum(method == each and part in path for each, path in self.requests)

    def answer(self, method: str, url: str, body: dict[str, Any], bearer: str) -> Reply:
        """The response that the real Airflow would send."""
        parts = urlsplit(url)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        self.requests.append((method, parts.path))
        if self.echoed_path and parts.path.startswith(self.echoed_path):
            return 400, {"you": [method, url, body, bearer]}
        if parts.path == "/auth/token":
            return self._log_in(body)
        if bearer not in self.tokens:
            is_ours = bearer.startswith("token-")
            return (401, {"detail": "Token Expired"}) if is_ours else (403, {"detail": "Invalid JWT token"})
        if self.failing_path and self.failing_path in parts.path:
            return self.failing_status, {"detail": "Something went wrong"}
        segments = [unquote(segment) for segment in parts.path.removeprefix("/api/v2/").split("/")]
        if segments[0] == "pools":
            return (200, {"name": segments[1]}) if segments[1] in self.pools else (404, {"detail": "no such pool"})
        if segments[:1] != ["dags"] or segments[1] != DAG or not self.has_dag:
            return 404, {"detail": f"The Dag with ID: `{segments[1]}` was not found"}
        if len(segments) == 2:
            return 200, {"dag_id": DAG, "is_paused": self.paused}
        if segments[2] == "clearTaskInstances":
            self.runs[body["dag_run_id"]].clear(body["task_ids"])
            return 200, {"task_instances": []}
        if len(segments) == 3 and method == "POST":
            return self._trigger(body)
        return self._answer_for_run(method, segments[3:], query, body)

    def _log_in(self, body: dict[str, Any]) -> Reply:
        self.logins += 1
        if (body.get("username"), body.get("password")) != (USER, PASSWORD):
            return 401, {"detail": "Invalid credentials"}
        token = f"token-{self.logins}"
        self.tokens.add(token)
        return 201, {"access_token": token}

    def _trigger(self, body: dict[str, Any]) -> Reply:
        run_id, conf = body["dag_run_id"], body["conf"]
        self.paused = self.paused or self.pause_on_trigger
        if not isinstance(conf.get("n_tips", 1), int):
            return 400, {"detail": "Invalid input for param n_tips"}
        with self._lock:
            if run_id in self.runs:
                return 409, {"detail": {"reason": "Unique constraint violation"}}
            self.runs[run_id] = ScriptedDagRun(self, conf)
        self.runs[run_id].start()
        return 200, {"dag_run_id": run_id, "state": "queued"}

    def _answer_for_run(self, method: str, segments: list[str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        run = self.runs.get(segments[0])
        if run is None:
            return 404, {"detail": "The DagRun was not found"}
        if len(segments) == 1:
            return self._answer_for_whole_run(method, segments[0], run)
        if len(segments) == 2:
            found = [task.to_json() for task in run.tasks]
            start = int(query.get("offset", 0))
            return 200, {"task_instances": found[start : start + int(query["limit"])], "total_entries": len(found)}
        return self._answer_for_task(method, run, segments[2:], query, body)

    def _answer_for_whole_run(self, method: str, run_id: str, run: ScriptedDagRun) -> Reply:
        if method == "DELETE":
            del self.runs[run_id]
            run.cancel()
            return 204, None
        if method == "PATCH" and not self.may_cancel:
            return 403, {"detail": "Forbidden"}
        if method == "PATCH":
            run.cancel()
        return 200, {"dag_run_id": run_id, "state": run.state}

    def _answer_for_task(
        self, method: str, run: ScriptedDagRun, segments: list[str], query: dict[str, str], body: dict[str, Any]
    ) -> Reply:
        if segments[-1] == "hitlDetails":
            return run.answer_gate(body) if method == "PATCH" else (200, {"options": ["Compare now", "Stop"]})
        task = run.task(segments[0], int(query.get("map_index", -1)))
        if task is None or segments[1] != "logs":
            return 404, {"detail": "not found"}
        if not query.get("token", run.key).startswith(run.key):
            return 400, {"detail": "Bad Signature. Please use only the tokens provided by the API."}
        lines = list(task.logs.get(int(segments[2]), []))
        known = int(query["token"].rpartition("-")[2]) if "token" in query else None
        head = [{"event": "::group::Log message source details"}, {"event": "::endgroup::"}]
        content = ([] if known is not None else head) + [{"event": line} for line in lines[known or 0 :]]
        over = task.state != "running" or task.attempt != int(segments[2])
        return 200, {"content": content, "continuation_token": None if over else f"{run.key}-{len(lines)}"}


def _make_handler(airflow: ScriptedAirflow) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Drop the access log."""

        def _serve(self) -> None:
            size = min(int(self.headers.get("content-length", 0)), _MAX_BODY_BYTES)
            body = json.loads(self.rfile.read(size) or b"{}")
            if airflow.fault == "away":
                self.close_connection = True
                return
            bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
            status, answer = airflow.answer(self.command, self.path, body, bearer)
            if airflow.lost_response_path and urlsplit(self.path).path.endswith(airflow.lost_response_path):
                airflow.lost_response_path = ""
                self.close_connection = True
                return
            if airflow.fault in _FAULTS:
                self._write(*_FAULTS[airflow.fault])
            else:
                self._write(status, b"" if answer is None else json.dumps(answer).encode())

        do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - as the base class calls them

        def _write(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


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


class ScriptedDagRun:
    """A DAG run on its own thread: plan, one collect per model, export, wait for the judge, compare."""

    def __init__(self, airflow: ScriptedAirflow, conf: Mapping[str, Any]) -> None:
        self.conf = dict(conf)
        self._airflow = airflow
        self.key = secrets.token_hex(4)
        self.state = "queued"
        self._cancelled, self._answered = threading.Event(), threading.Event()
        self._process: subprocess.Popen[str] | None = None
        models = split_names(self.conf["models"])
        self._collects = [ScriptedTask("collect", at, model, "ollama") for at, model in enumerate(models)]
        self._others = {name: ScriptedTask(name) for name in _UNMAPPED_TASKS}
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

    def answer_gate(self, body: Mapping[str, Any]) -> tuple[int, Any]:
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
            if (task.task_id, task.map_index) in named or (follows and task.task_id in _UNMAPPED_TASKS):
                task.state, follows = None, True
        self.state = "queued"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._wait_until(lambda: not self._airflow.paused)
        self.state = "running"
        self._run_unmapped("plan", "planned")
        for task in self._collects:
            if task.state is None:
                self._collect(task)
        self._run_unmapped("export_for_judge", "exported")
        if self.conf.get("wait_for_judge") and not self._cancelled.is_set():
            self._others["wait_for_judge"].begin()
            self._others["wait_for_judge"].state = "awaiting_input"
            self._wait_until(self._answered.is_set)
        self._run_unmapped("wait_for_judge", "", skip=not self.conf.get("wait_for_judge"))
        self._run_unmapped("compare", "compared")
        failed = any(task.state == "failed" for task in self._collects)
        self._run_unmapped("outcome", "a model failed" if failed else "all models are collected")
        if failed:
            self._others["outcome"].state = "failed"
        self.state = "failed" if failed or self._cancelled.is_set() else "success"

    def _run_unmapped(self, name: str, log_line: str, *, skip: bool = False) -> None:
        task = self._others[name]
        if task.state not in (None, "awaiting_input"):
            return
        if skip or self._cancelled.is_set():
            task.state = "skipped"
            return
        log = task.logs[task.attempt] if task.state else task.begin()
        log.append(log_line)
        task.state = "success"

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition or the cancellation, at most two minutes."""
        deadline = time.monotonic() + 120
        while not condition() and not self._cancelled.is_set() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _collect(self, task: ScriptedTask) -> None:
        task.state = "scheduled"
        self._wait_until(lambda: task.pool in self._airflow.pools)
        if self._cancelled.is_set():
            task.state = "skipped"
            return
        log = task.begin()
        collecting = self._airflow.collecting or self._command
        code = collecting(task.model or "", log)
        task.state = "failed" if code else "success"

    def _command(self, model: str, log: list[str]) -> int:
        options = {**self.conf, "models": model, "skip_refused": False}
        options.pop("wait_for_judge", None)
        arguments = command_arguments(JobRequest(JobKind.COLLECT, options["experiment"], options))
        reading, writing = os.pipe()
        with subprocess.Popen(
            [sys.executable, "-m", "tipbench", *arguments],
            env={
                **os.environ,
                "TIPBENCH_HOME": str(self._airflow.home / "worker"),
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
            printing = threading.Thread(target=_copy_lines, args=(self._process.stdout, log), daemon=True)
            printing.start()
            with os.fdopen(reading, encoding="utf-8") as events:
                _copy_lines(events, log)
            printing.join(60)
            code = self._process.wait(60)
        self._process = None
        return code


def _copy_lines(stream: Any, log: list[str]) -> None:
    for line in stream:
        log.append(line.rstrip("\n"))  # noqa: PERF401 - the log is read while it grows
