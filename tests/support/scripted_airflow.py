"""A scripted Airflow: the routes and states of the real one, and a DAG that runs the real collect command.

For tests of the runner without an installed Airflow, and for faults that a real one does not produce on demand.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from support.scripted_dag import Collecting, ScriptedDagRun

DAG = "bench_collect"
USER, PASSWORD = "bench", "a-password-for-tests"
Reply = tuple[int, Any]
_FAULTS = {"busy": (503, b"try later"), "html": (200, b"<html>another program</html>")}
_MAX_BODY_BYTES = 1_000_000


class ScriptedAirflow:
    """The server in a thread of this process. `fault` replaces every response: away, busy, html, or empty for none."""

    def __init__(self, home: Path, collecting: Collecting | None = None) -> None:
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
        self.lose_answers_to = ""  # a path whose next request is carried out without a response
        self.broken, self.broken_with = "", 500  # part of a path, and the status of its responses
        self.repeats = ""  # the beginning of a path whose requests are returned as an error
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
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
        if self.repeats and parts.path.startswith(self.repeats):
            return 400, {"you": [method, url, body, bearer]}
        if parts.path == "/auth/token":
            return self._log_in(body)
        if bearer not in self.tokens:
            ours = bearer.startswith("token-")
            return (401, {"detail": "Token Expired"}) if ours else (403, {"detail": "Invalid JWT token"})
        if self.broken and self.broken in parts.path:
            return self.broken_with, {"detail": "Something went wrong"}
        words = [unquote(word) for word in parts.path.removeprefix("/api/v2/").split("/")]
        if words[0] == "pools":
            return (200, {"name": words[1]}) if words[1] in self.pools else (404, {"detail": "no such pool"})
        if words[:1] != ["dags"] or words[1] != DAG or not self.has_dag:
            return 404, {"detail": f"The Dag with ID: `{words[1]}` was not found"}
        if len(words) == 2:
            return 200, {"dag_id": DAG, "is_paused": self.paused}
        if words[2] == "clearTaskInstances":
            self.runs[body["dag_run_id"]].clear(body["task_ids"])
            return 200, {"task_instances": []}
        if len(words) == 3 and method == "POST":
            return self._trigger(body)
        return self._of_run(method, words[3:], query, body)

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

    def _of_run(self, method: str, words: list[str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        run = self.runs.get(words[0])
        if run is None:
            return 404, {"detail": "The DagRun was not found"}
        if len(words) == 1:
            return self._run_itself(method, words[0], run)
        if len(words) == 2:
            found = [task.to_json() for task in run.tasks]
            start = int(query.get("offset", 0))
            return 200, {"task_instances": found[start : start + int(query["limit"])], "total_entries": len(found)}
        return self._of_task(method, run, words[2:], query, body)

    def _run_itself(self, method: str, run_id: str, run: ScriptedDagRun) -> Reply:
        if method == "DELETE":
            del self.runs[run_id]
            run.cancel()
            return 204, None
        if method == "PATCH" and not self.may_cancel:
            return 403, {"detail": "Forbidden"}
        if method == "PATCH":
            run.cancel()
        return 200, {"dag_run_id": run_id, "state": run.state}

    def _of_task(
        self, method: str, run: ScriptedDagRun, words: list[str], query: dict[str, str], body: dict[str, Any]
    ) -> Reply:
        if words[-1] == "hitlDetails":
            return run.judged(body) if method == "PATCH" else (200, {"options": ["Compare now", "Stop"]})
        task = run.task(words[0], int(query.get("map_index", -1)))
        if task is None or words[1] != "logs":
            return 404, {"detail": "not found"}
        if not query.get("token", run.key).startswith(run.key):
            return 400, {"detail": "Bad Signature. Please use only the tokens provided by the API."}
        lines = list(task.logs.get(int(words[2]), []))
        known = int(query["token"].rpartition("-")[2]) if "token" in query else None
        head = [{"event": "::group::Log message source details"}, {"event": "::endgroup::"}]
        content = ([] if known is not None else head) + [{"event": line} for line in lines[known or 0 :]]
        over = task.state != "running" or task.attempt != int(words[2])
        return 200, {"content": content, "continuation_token": None if over else f"{run.key}-{len(lines)}"}


def _handler(site: ScriptedAirflow) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Drop the access log."""

        def _serve(self) -> None:
            size = min(int(self.headers.get("content-length", 0)), _MAX_BODY_BYTES)
            body = json.loads(self.rfile.read(size) or b"{}")
            if site.fault == "away":
                self.close_connection = True
                return
            bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
            status, answer = site.answer(self.command, self.path, body, bearer)
            if site.lose_answers_to and urlsplit(self.path).path.endswith(site.lose_answers_to):
                site.lose_answers_to = ""
                self.close_connection = True
                return
            if site.fault in _FAULTS:
                self._write(*_FAULTS[site.fault])
            else:
                self._write(status, b"" if answer is None else json.dumps(answer).encode())

        do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - as the base class calls them

        def _write(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler
