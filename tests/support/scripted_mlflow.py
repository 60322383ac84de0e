"""The part of MLflow's REST API that tipbench uses, in memory, with MLflow's limits, truncation and error codes.

A request takes about a millisecond instead of the real server's 20 to 80. `contracts/test_run_store.py` runs the same
suite on both, so a test can use this one unless it is about MLflow itself.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

VERSION = "3.17.2"
TAG_CHARS = 8000  # longer values are truncated without an error, as in MLflow
PARAM_CHARS = 6000
KEY_CHARS = 250
BATCH_LIMITS = {"params": 100, "tags": 100, "metrics": 1000}
_CLAUSE = re.compile(r"(attributes|tags|params)\.`?([^`]+?)`?\s*(!?=)\s*(?:'([^']*)'|\"([^\"]*)\")")

Json = dict[str, Any]


class ApiError(Exception):
    """An error response of MLflow."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class _Run:
    run_id: str
    experiment_id: str
    start_time: int
    number: int
    status: str = "RUNNING"
    end_time: int | None = None
    deleted: bool = False
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> Json:
        info: Json = {
            "run_id": self.run_id, "experiment_id": self.experiment_id, "status": self.status,
            "start_time": self.start_time, "lifecycle_stage": "deleted" if self.deleted else "active",
        }  # fmt: skip
        if self.end_time is not None:
            info["end_time"] = self.end_time
        metrics = [
            {"key": key, "value": value, "timestamp": timestamp, "step": step}
            for key, (step, timestamp, value) in self.metrics.items()
        ]
        data = {"params": _pairs(self.params), "metrics": metrics, "tags": _pairs(self.tags)}
        return {"info": info, "data": data}

    def value(self, entity: str, name: str) -> str | None:
        if entity == "attributes":
            return self.status if name == "status" else None
        return (self.tags if entity == "tags" else self.params).get(name)


@dataclass
class _Experiment:
    experiment_id: str
    name: str
    deleted: bool = False
    tags: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> Json:
        stage = "deleted" if self.deleted else "active"
        return {
            "experiment_id": self.experiment_id,
            "name": self.name,
            "lifecycle_stage": stage,
            "tags": _pairs(self.tags),
        }


class ScriptedMlflow:
    """Serves on a free port of 127.0.0.1 until closed, one request at a time."""

    def __init__(self) -> None:
        self._experiments: dict[str, _Experiment] = {}
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()
        self._http = _Server(self)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.close_connections()
        self._http.server_close()

    def answer(self, path: str, body: Json) -> Json:
        """The response to one request; raises ApiError where MLflow returns an error."""
        route = _ROUTES.get(path)
        if route is None:
            raise ApiError(404, "ENDPOINT_NOT_FOUND", path)
        with self._lock:
            return route(self, body)

    def _experiment_by_name(self, body: Json) -> Json:
        for experiment in self._experiments.values():
            if experiment.name == body["experiment_name"]:
                return {"experiment": experiment.to_json()}
        raise ApiError(404, "RESOURCE_DOES_NOT_EXIST", f"Could not find experiment {body['experiment_name']}")

    def _create_experiment(self, body: Json) -> Json:
        if any(experiment.name == body["name"] for experiment in self._experiments.values()):
            raise ApiError(400, "RESOURCE_ALREADY_EXISTS", f"Experiment(name={body['name']}) already exists.")
        created = _Experiment(str(len(self._experiments) + 1), body["name"])
        self._experiments[created.experiment_id] = created
        return {"experiment_id": created.experiment_id}

    def _search_experiments(self, body: Json) -> Json:
        active = [found.to_json() for found in reversed(self._experiments.values()) if not found.deleted]
        return _page(active, "experiments", body)

    def _tag_experiment(self, body: Json) -> Json:
        self._experiment(body["experiment_id"]).tags[body["key"]] = body["value"]
        return {}

    def _delete_experiment(self, body: Json) -> Json:
        self._experiment(body["experiment_id"]).deleted = True
        return {}

    def _create_run(self, body: Json) -> Json:
        experiment = self._experiment(body["experiment_id"])
        _check_batch({"tags": body.get("tags", ())})
        run = _Run(uuid.uuid4().hex, experiment.experiment_id, int(body.get("start_time", 0)), len(self._runs))
        run.tags.update(_truncate(body.get("tags", ()), TAG_CHARS))
        self._runs[run.run_id] = run
        return {"run": run.to_json()}

    def _get_run(self, body: Json) -> Json:
        return {"run": self._run(body["run_id"]).to_json()}

    def _log_batch(self, body: Json) -> Json:
        run = self._active(body["run_id"])
        _check_batch(body)
        params = _truncate(body.get("params", ()), PARAM_CHARS)
        for key, value in params.items():
            if run.params.get(key, value) != value:
                raise ApiError(400, "INVALID_PARAMETER_VALUE", f"Changing param values is not allowed: {key!r}")
        run.params.update(params)
        run.tags.update(_truncate(body.get("tags", ()), TAG_CHARS))
        for item in body.get("metrics", ()):
            entry = (int(item.get("step", 0)), int(item["timestamp"]), float(item["value"]))
            run.metrics[item["key"]] = max(entry, run.metrics.get(item["key"], entry))
        return {}

    def _set_tag(self, body: Json) -> Json:
        run = self._active(body["run_id"])
        run.tags.update(_truncate([body], TAG_CHARS))
        return {}

    def _delete_tag(self, body: Json) -> Json:
        run = self._active(body["run_id"])
        if body["key"] not in run.tags:
            raise ApiError(404, "RESOURCE_DOES_NOT_EXIST", f"No tag with name: {body['key']}")
        del run.tags[body["key"]]
        return {}

    def _update_run(self, body: Json) -> Json:
        run = self._active(body["run_id"])
        run.status = body.get("status", run.status)
        run.end_time = int(body["end_time"]) if "end_time" in body else run.end_time
        return {"run_info": run.to_json()["info"]}

    def _delete_run(self, body: Json) -> Json:
        self._active(body["run_id"]).deleted = True
        return {}

    def _search_runs(self, body: Json) -> Json:
        clauses = _clauses(body.get("filter", ""))
        wanted = [
            run
            for run in self._runs.values()
            if run.experiment_id in body["experiment_ids"] and not run.deleted and _matches(run, clauses)
        ]
        wanted.sort(key=lambda run: (run.start_time, run.number), reverse=True)
        return _page([run.to_json() for run in wanted], "runs", body)

    def _experiment(self, experiment_id: str) -> _Experiment:
        if experiment_id not in self._experiments:
            raise ApiError(404, "RESOURCE_DOES_NOT_EXIST", f"No Experiment with id={experiment_id} exists")
        return self._experiments[experiment_id]

    def _run(self, run_id: str) -> _Run:
        if run_id not in self._runs:
            raise ApiError(404, "RESOURCE_DOES_NOT_EXIST", f"Run with id={run_id} not found")
        return self._runs[run_id]

    def _active(self, run_id: str) -> _Run:
        run = self._run(run_id)
        if run.deleted:
            raise ApiError(
                400, "INVALID_PARAMETER_VALUE",
                f"The run {run_id} must be in the 'active' state. Current state is deleted.",
            )  # fmt: skip
        return run


_ROUTES: Mapping[str, Callable[[ScriptedMlflow, Json], Json]] = {
    "experiments/get-by-name": ScriptedMlflow._experiment_by_name,
    "experiments/create": ScriptedMlflow._create_experiment,
    "experiments/search": ScriptedMlflow._search_experiments,
    "experiments/delete": ScriptedMlflow._delete_experiment,
    "experiments/set-experiment-tag": ScriptedMlflow._tag_experiment,
    "runs/create": ScriptedMlflow._create_run,
    "runs/get": ScriptedMlflow._get_run,
    "runs/log-batch": ScriptedMlflow._log_batch,
    "runs/set-tag": ScriptedMlflow._set_tag,
    "runs/delete-tag": ScriptedMlflow._delete_tag,
    "runs/update": ScriptedMlflow._update_run,
    "runs/delete": ScriptedMlflow._delete_run,
    "runs/search": ScriptedMlflow._search_runs,
}


def _pairs(values: Mapping[str, str]) -> list[Json]:
    return [{"key": key, **({"value": value} if value else {})} for key, value in values.items()]


def _truncate(items: Any, limit: int) -> dict[str, str]:
    return {item["key"]: item.get("value", "")[:limit] for item in items}


def _check_batch(body: Json) -> None:
    for name, limit in BATCH_LIMITS.items():
        items = body.get(name, ())
        if len(items) > limit:
            raise ApiError(400, "INVALID_PARAMETER_VALUE", f"A batch has at most {limit} {name}, got {len(items)}.")
        for item in items:
            if not 0 < len(item["key"]) <= KEY_CHARS:
                raise ApiError(400, "INVALID_PARAMETER_VALUE", f"Key of {len(item['key'])} characters in {name}.")


def _page(items: list[Json], name: str, body: Json) -> Json:
    start, size = int(body.get("page_token") or 0), int(body.get("max_results", 1000))
    page: Json = {name: items[start : start + size]} if items[start : start + size] else {}
    if start + size < len(items):
        page["next_page_token"] = str(start + size)
    return page


def _clauses(text: str) -> list[tuple[str, str, bool, str]]:
    clauses, at = [], 0
    while at < len(text):
        found = _CLAUSE.match(text, at)
        if found is None:
            raise ApiError(400, "INVALID_PARAMETER_VALUE", f"Invalid clause(s) in filter string: {text[at:]!r}")
        entity, name, operator, single, double = found.groups()
        clauses.append((entity, name, operator == "=", single if single is not None else double))
        at = found.end()
        if text.startswith(" AND ", at):
            at += len(" AND ")
    return clauses


def _matches(run: _Run, clauses: list[tuple[str, str, bool, str]]) -> bool:
    # As in SQL, a tag that the run does not have satisfies neither = nor !=.
    for entity, name, equal, wanted in clauses:
        value = run.value(entity, name)
        if value is None or (value == wanted) is not equal:
            return False
    return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, mlflow: ScriptedMlflow) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mlflow = mlflow
        self._open: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: some tests kill a client in the middle of a request."""

    def close_connections(self) -> None:
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    server: _Server

    def do_POST(self) -> None:
        address = urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        if address.path in ("/health", "/version"):
            self._send(200, (VERSION if address.path == "/version" else "OK").encode(), "text/plain")
            return
        path = address.path.removeprefix("/api/2.0/mlflow/")
        try:
            body = json.loads(content) if content else dict(parse_qsl(address.query))
            status, answer = 200, self.server.mlflow.answer(path, body)
        except ApiError as exc:
            status, answer = exc.status, {"error_code": exc.code, "message": str(exc)}
        except (ValueError, KeyError, TypeError) as exc:
            status, answer = 400, {"error_code": "BAD_REQUEST", "message": repr(exc)}
        self._send(status, json.dumps(answer).encode(), "application/json")

    do_GET = do_POST  # noqa: N815

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass
