"""The raw loops to compare with, which only send chat requests, only log or only read, without retries."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import httpx

from report import NotMeasured
from work import LoggedRun

_JSON = {"content-type": "application/json"}


def chat_loop(ollama_url: str, chat_bodies: Mapping[str, Sequence[bytes]], concurrency: int) -> float:
    """Send all chat requests, model by model, and read each answer; returns the time of its end (epoch seconds)."""
    clients = [_client(ollama_url) for _ in range(concurrency)]
    try:
        for model, bodies in chat_bodies.items():
            _distribute(bodies, [partial(_chat, client) for client in clients])
            clients[0].post("/api/generate", json={"model": model, "keep_alive": 0}).raise_for_status()
        return time.time()
    finally:
        for client in clients:
            client.close()


def _chat(client: httpx.Client, body: bytes) -> None:
    with client.stream("POST", "/api/chat", content=body, headers=_JSON) as response:
        response.raise_for_status()
        for _chunk in response.iter_raw():
            pass


def read_loop(mlflow_url: str, experiment_id: str, expected_runs: int) -> float:
    """Read and parse every page of MLflow's search; returns the seconds it took."""
    began = time.perf_counter()
    n_runs, token = 0, ""
    body = {"experiment_ids": [experiment_id], "filter": "tags.kind = 'cell'", "max_results": 1000}
    with _client(mlflow_url) as client:
        while True:
            response = client.post("/api/2.0/mlflow/runs/search", json={**body, "page_token": token})
            page = json.loads(response.raise_for_status().content)
            n_runs += len(page.get("runs", []))
            token = page.get("next_page_token", "")
            if not token:
                break
    if n_runs != expected_runs:
        raise NotMeasured(f"MLflow returned {n_runs} runs of {expected_runs}.")
    return time.perf_counter() - began


def log_loop(mlflow_url: str, experiment: str, runs: Sequence[LoggedRun]) -> float:
    """Log one run after the other, with three requests each, over one connection; returns the seconds it took."""
    with _client(f"{mlflow_url}/api/2.0/mlflow/") as client:
        response = client.post("experiments/create", json={"name": experiment}).raise_for_status()
        experiment_id = response.json()["experiment_id"].encode()
        started = time.perf_counter()
        for run in runs:
            _log(client, experiment_id, run)
        return time.perf_counter() - started


def _log(client: httpx.Client, experiment_id: bytes, run: LoggedRun) -> None:
    body = run.create.replace(b"%EXPERIMENT%", experiment_id, 1)
    created = client.post("runs/create", content=body, headers=_JSON).raise_for_status()
    run_id = json.dumps(created.json()["run"]["info"]["run_id"]).encode()
    front = b'{"run_id":' + run_id + b","  # replaces the opening brace of the next two bodies
    client.post("runs/log-batch", content=front + run.batch[1:], headers=_JSON).raise_for_status()
    client.post("runs/update", content=front + run.end[1:], headers=_JSON).raise_for_status()


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, verify=False, timeout=300)  # noqa: S501 - loopback, no TLS


def _distribute(items: Iterable[bytes], workers: Sequence[Callable[[bytes], None]]) -> None:
    """Distribute the items over the workers, one thread each."""
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)

    def work(worker: Callable[[bytes], None]) -> None:
        with suppress(queue.Empty):
            while True:
                worker(waiting.get_nowait())

    with ThreadPoolExecutor(len(workers)) as threads:
        for ended in [threads.submit(work, worker) for worker in workers]:
            ended.result()
