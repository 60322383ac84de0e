"""The rivals: the shortest honest loops that only ask, only log or only read. No retries, nothing kept."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import httpx

from report import NotMeasured
from work import LoggedRun

_JSON = {"content-type": "application/json"}
_Item = TypeVar("_Item")


def ask_loop(ollama_url: str, questions: Mapping[str, Sequence[bytes]], concurrency: int) -> float:
    """Ask every question, model by model, each answer streamed to its end. Returns when it ended (epoch seconds)."""
    clients = [_client(ollama_url) for _ in range(concurrency)]
    try:
        for model, bodies in questions.items():
            _share(bodies, [partial(_ask, client) for client in clients])
            clients[0].post("/api/generate", json={"model": model, "keep_alive": 0}).raise_for_status()
        return time.time()
    finally:
        for client in clients:
            client.close()


def read_loop(mlflow_url: str, experiment_id: str, runs: int) -> float:
    """Every page of MLflow's own search, read to its end and parsed; the seconds it took."""
    began = time.perf_counter()
    seen, token = 0, ""
    body = {"experiment_ids": [experiment_id], "filter": "tags.kind = 'cell'", "max_results": 1000}
    with _client(mlflow_url) as client:
        while True:
            asked = {**body, "page_token": token} if token else body
            answer = client.post("/api/2.0/mlflow/runs/search", json=asked)
            page = json.loads(answer.raise_for_status().content)
            seen += len(page.get("runs", []))
            token = page.get("next_page_token", "")
            if not token:
                break
    if seen != runs:
        raise NotMeasured(f"MLflow handed out {seen} runs of {runs}.")
    return time.perf_counter() - began


def _ask(client: httpx.Client, body: bytes) -> None:
    with client.stream("POST", "/api/chat", content=body, headers=_JSON) as response:
        response.raise_for_status()
        for _chunk in response.iter_raw():
            pass


def log_loop(mlflow_url: str, experiment: str, runs: Sequence[LoggedRun]) -> float:
    """Log run after run with three requests each over one connection. Returns the seconds it took."""
    with _client(f"{mlflow_url}/api/2.0/mlflow/") as client:
        answer = client.post("experiments/create", json={"name": experiment}).raise_for_status()
        experiment_id = answer.json()["experiment_id"].encode()
        started = time.perf_counter()
        for run in runs:
            _log(client, experiment_id, run)
        return time.perf_counter() - started


def _log(client: httpx.Client, experiment_id: bytes, run: LoggedRun) -> None:
    body = run.create.replace(b"%EXPERIMENT%", experiment_id, 1)
    created = client.post("runs/create", content=body, headers=_JSON).raise_for_status()
    front = b'{"run_id":' + json.dumps(created.json()["run"]["info"]["run_id"]).encode() + b","
    client.post("runs/log-batch", content=front + run.batch[1:], headers=_JSON).raise_for_status()
    client.post("runs/update", content=front + run.end[1:], headers=_JSON).raise_for_status()


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, verify=False, timeout=300)  # noqa: S501 - loopback, no TLS


def _share(items: Iterable[_Item], workers: Sequence[Callable[[_Item], None]]) -> None:
    """Let the workers, one thread each, do all items; raises what one of them raised."""
    waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    trouble: list[BaseException] = []

    def work(do: Callable[[_Item], None]) -> None:
        try:
            while not trouble:
                do(waiting.get_nowait())
        except queue.Empty:
            return
        except Exception as exc:  # noqa: BLE001 - a thread has no caller: raised below
            trouble.append(exc)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if trouble:
        raise trouble[0]
