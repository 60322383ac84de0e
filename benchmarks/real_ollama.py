"""`tipbench collect` against a bare sequential loop, both on a real Ollama with three different sets of weights.

The loop asks the same 72 questions one after the other and unloads each model; it records nothing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from process import run_collect
from report import Claim, NotMeasured, Progress, Result, say
from servers import PsWatcher, RealOllama, shared_weights_home, start_mlflow
from tipbench.plan.config import CollectConfig
from tipbench.plan.grid import ModelIdentity, blocks, plan_grid
from tipbench.plan.suite import load_suite
from work import question

MODELS = ("alpha:135m", "beta:135m", "gamma:135m")
OPTIONS = {"models": ",".join(MODELS), "n_tips": "2", "num_predict": "128", "num_ctx": "2048"}
_LOOP_S = 85.0  # for the estimate: two idle cores


def measure(rounds: int, note: str) -> Result:
    """Start a real Ollama and a real MLflow, measure round after round, stop both."""
    say(f"real ollama: {rounds} × 72 cells on three models")
    gguf = next((shared_weights_home() / "models").glob("*.gguf"))
    loops: list[float] = []
    collects: list[float] = []
    loads: list[float] = []
    resident: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tipbench-bench-") as name:
        folder = Path(name)
        (folder / "mlflow").mkdir()
        (folder / "ollama").mkdir()
        with start_mlflow(folder / "mlflow") as mlflow, RealOllama(folder / "ollama") as ollama:
            ollama.three_models(gguf)
            progress = Progress(2 * rounds * _LOOP_S)
            _loop(ollama.url, questions()[MODELS[0]][:2])  # files into the cache; not counted
            for number in range(1, rounds + 1):
                say(f"round {number} of {rounds}")
                loops.append(_timed_loop(ollama.url))
                progress.step("bare loop", _LOOP_S, loops[-1])
                before = ollama.loads
                with PsWatcher(ollama.url, interval_s=0.05) as watcher:
                    collects.append(_collect(folder, ollama.url, mlflow.url, number))
                loads.append(float(ollama.loads - before))
                resident.append(float(watcher.max_resident))
                progress.step("tipbench collect", _LOOP_S, collects[-1])
    shown = [{"loop_s": a, "collect_s": b} for a, b in zip(loops, collects, strict=True)]
    medians = f"{statistics.median(collects):.1f} s; bare loop {statistics.median(loops):.1f} s"
    ratios = tuple(b / a for a, b in zip(loops, collects, strict=True))
    return Result(
        "real ollama",
        note,
        (
            Claim("72 cells: whole process", 1.05, "×", ratios, medians),
            Claim("loads for three models", 3.0, "", tuple(loads), "by the server's log", exact=True),
            Claim("most models resident at once", 1.0, "", tuple(resident), "/api/ps, from outside", exact=True),
        ),
        shown,
    )


def questions() -> dict[str, list[bytes]]:
    """For each model the bodies that tipbench sends for it."""
    config = CollectConfig.model_validate(OPTIONS)
    cells = plan_grid(load_suite(config.suite), config, [ModelIdentity(model, model) for model in MODELS])
    return {model: [question(cell) for cell in group] for model, group in blocks(cells)}


def _timed_loop(url: str) -> float:
    return sum(_loop(url, bodies) for bodies in questions().values())


def _loop(url: str, bodies: list[bytes]) -> float:
    """Ask one after the other, then unload and wait until it is gone. The seconds it took."""
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
    where = {"ollama_url": ollama_url, "mlflow_url": mlflow_url, "experiment": f"tip-bench-real-{number}"}
    return run_collect(OPTIONS | where, home, folder / "bytecode").total_s
