"""A fake of the command `airflow`: records its calls, and serves the REST API that airflow/local.py uses.

FAKE_BROKEN_DAG reports a DAG that cannot be read; FAKE_EXIT names a part that ends by itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

POOLS = ("ollama_gpu-a", "ollama_gpu-b")
LONG_AGO, SOON = "2026-01-01T00:00:00Z", "2999-01-01T00:00:00Z"
HEALTHY = {part: {"status": "healthy"} for part in ("metadatabase", "scheduler", "dag_processor")}


def record_call(*words: str) -> None:
    """Append to the list of calls, in one write: three processes share the file."""
    with (Path(os.environ["AIRFLOW_HOME"]) / "calls").open("a", encoding="utf-8") as file:
        file.write(f"{' '.join(words)}\n")


class AirflowApi(BaseHTTPRequestHandler):
    """The used part of Airflow's REST API. The DAG is parsed again after its first request."""

    parsed_at: ClassVar = [LONG_AGO]

    def do_GET(self) -> None:
        parsed_at = self.parsed_at[-1]
        pools = POOLS if parsed_at == SOON else ("ollama",)
        if self.path == "/api/v2/dags/bench_collect":
            self.parsed_at.append(SOON)
        broken = [{"filename": "bench_dag.py", "stack_trace": "ValueError: the list of hosts is wrong"}]
        responses = {
            "/api/v2/monitor/health": HEALTHY,
            "/api/v2/importErrors": {"import_errors": broken if os.environ.get("FAKE_BROKEN_DAG") else []},
            "/api/v2/dags/bench_collect": {"last_parsed_time": parsed_at},
            "/api/v2/dags/bench_collect/tasks": {
                "tasks": [{"pool": pool} for pool in ("default_pool", *pools, *pools)]
            },
            "/api/v2/pools": {"pools": [{"name": "default_pool"}, {"name": POOLS[0]}]},
        }
        self._respond(200, responses[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/auth/token":
            return self._respond(201, {"access_token": f"of-{body['username']}"})
        record_call("made", body["name"], str(body["slots"]), "by", self.headers["Authorization"])
        return self._respond(201, body)

    def _respond(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def end(*_: object) -> None:
    record_call("ended", sys.argv[1])
    os._exit(0)


def main() -> None:
    record_call(*sys.argv[1:])
    if sys.argv[1] in ("db", "dags") or sys.argv[1] == os.environ.get("FAKE_EXIT"):
        return
    signal.signal(signal.SIGTERM, end)
    if sys.argv[1] == "api-server":
        HTTPServer(("127.0.0.1", int(os.environ["AIRFLOW__API__PORT"])), AirflowApi).serve_forever()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
