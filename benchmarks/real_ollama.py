"""`tipbench collect` against a raw sequential loop, both on a real Ollama with three models of different blobs.

The loop sends the same 72 chat requests one after the other and unloads each model; it records nothing.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import httpx

from process import run_collect
from report import Claim, NotMeasured, Result, Size, count_rounds, median_s
from servers import PsWatcher, RealMlflow, RealOllama, shared_weights_home
from work import chat_bodies

MODELS = ("alpha:135m", "beta:135m", "gamma:135m")
OPTIONS = {"models": ",".join(MODELS), "n_tips": "2", "num_predict": "128", "num_ctx": "2048"}


def measure(size: Size) -> Result:
    """Measure on a real Ollama and a real MLflow."""
    gguf = next((shared_weights_home() / "models").glob("*.gguf"))
    loops: list[float] = []
    collects: list[float] = []
    loads: list[float] = []
    most_resident: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tipbench-bench-") as name:
        folder = Path(name)
        (folder / "mlflow").mkdir()
        (folder / "ollama").mkdir()
        with RealMlflow(folder / "mlflow") as mlflow, RealOllama(folder / "ollama") as ollama:
            ollama.create_three_models(gguf)
            bodies = chat_bodies(OPTIONS)
            _loop(ollama.url, bodies[MODELS[0]][:2])  # not counted: fills file caches
            for number in count_rounds("real-ollama", size.rounds):
                loops.append(sum(_loop(ollama.url, group) for group in bodies.values()))
                loads_before = ollama.loads
                with PsWatcher(ollama.url, interval_s=0.05) as watcher:
                    collects.append(_collect(folder, ollama.url, mlflow.url, number))
                loads.append(float(ollama.loads - loads_before))
                most_resident.append(float(watcher.max_resident))
    medians = f"{median_s(collects)}; raw sequential loop {median_s(loops)}"
    ratios = tuple(collect / loop for collect, loop in zip(collects, loops, strict=True))
    return Result(
        "real-ollama",
        (
            Claim("72 cells: whole process", 1.05, "×", ratios, medians),
            Claim("loads for three models", 3.0, "", tuple(loads), "by the server's log", exact=True),
            Claim("most models resident at once", 1.0, "", tuple(most_resident), "/api/ps, from outside", exact=True),
        ),
        [{"loop_s": loop, "collect_s": collect} for loop, collect in zip(loops, collects, strict=True)],
    )


def _loop(url: str, bodies: list[bytes]) -> float:
    """Send a model's requests, then unload it and wait until it is unloaded; returns the seconds it took."""
    began = time.perf_counter()
    with httpx.Client(base_url=url, trust_env=False, timeout=300) as client:
        for body in bodies:
            client.post("/api/chat", content=body, headers={"content-type": "application/json"}).raise_for_status()
        model = json.loads(bodies[0])["model"]
        client.post("/api/generate", json={"model": model, "keep_alive": 0}).raise_for_status()
        for _ in range(1000):
            if not client.get("/api/ps").json()["models"]:
                return time.perf_counter() - began
            time.sleep(0.01)
    raise NotMeasured(f"{model} was not unloaded within 10 s")


def _collect(folder: Path, ollama_url: str, mlflow_url: str, number: int) -> float:
    home = folder / f"collect-{number}"
    home.mkdir()
    options = {"ollama_url": ollama_url, "mlflow_url": mlflow_url, "experiment": f"tip-bench-real-{number}"}
    return run_collect(OPTIONS | options, home, folder / "bytecode").total_s
