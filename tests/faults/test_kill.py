"""kill -9 at twenty random moments: nothing finished is lost, nothing finished is generated again."""

from __future__ import annotations

import hashlib
import json
import random
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

from support.command import start_tipbench, tipbench
from support.scripted_ollama import ScriptedProcess
from tipbench.plan.suite import load_suite
from tipbench.record.mlflow import MlflowStore

MODELS = ("alpha:135m", "beta:135m")
CELLS = 48
KILLS = 20


def test_a_collect_killed_twenty_times_ends_complete(home: Path, mlflow_url: str, tmp_path: Path) -> None:
    rng, name = random.Random(20), f"tip-bench-kill-{uuid4().hex[:8]}"
    with ScriptedProcess(MODELS, call_s=0.45) as server:
        options = (
            "collect", "--models", ",".join(MODELS), "--ollama-url", server.url, "--mlflow-url", mlflow_url,
            "--experiment", name, "--n-tips", "2", "--num-predict", "64",
        )  # fmt: skip
        kills = _kill_often(options, home, rng, tmp_path / "collect.log")
        tipbench(*options, home=home)
        log = server.log()

    assert kills == KILLS
    with MlflowStore(mlflow_url) as store:
        experiment = store.experiment(name)
        assert experiment is not None
        everything = list(store.search(experiment.experiment_id, where={"kind": "cell"}, half_written=True))
        texts = {run.run_id: store.get(run.run_id)[1] for run in everything}
    assert [run.status for run in everything] == ["FINISHED"] * CELLS
    assert len({run.tags["cell_key"] for run in everything}) == CELLS
    for run in everything:
        _check_texts(texts[run.run_id], run.metrics)
    assert log["max_resident"] == 1
    _check_nothing_finished_was_asked_again(log["requests"], everything)
    assert list((home / "journal").rglob("*.jsonl")) == []


def _kill_often(options: tuple[str, ...], home: Path, rng: random.Random, log: Path) -> int:
    """Start and kill; early in the run, late, and while it is starting. Stops short only if the grid is done."""
    kills = 0
    for _ in range(KILLS):
        process = start_tipbench(*options, home=home, log=log)
        try:
            process.wait(rng.uniform(0.4, 1.8))
        except Exception:  # noqa: BLE001 - still running, as hoped
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        else:
            raise AssertionError(f"the collect ended before it could be killed:\n{log.read_text()[-2000:]}")
    return kills


def _check_texts(texts: dict[str, str], metrics: Any) -> None:
    """Reading them checked the hashes of long texts; the answer must also agree with what was measured of it."""
    tips = json.loads(texts["artifact:candidates.json"])
    assert json.loads(texts["artifact:raw.txt"]) == tips
    assert len(tips) == metrics["n_candidates"] == 2
    assert hashlib.sha256(texts["artifact:rubric.md"].encode()).hexdigest() == load_suite("tips").rubric.sha256


def _check_nothing_finished_was_asked_again(requests: list[dict[str, Any]], runs: list[Any]) -> None:
    """A cell's question after its recorded answer had ended would be a cell generated twice."""
    ended = {(run.params["model"], int(run.tags["cell_seed"])): run.end_ms / 1000 for run in runs}
    chats = [request for request in requests if request["path"] == "/api/chat"]
    assert len(chats) >= CELLS
    for request in chats:
        key = (request["model"], request["options"]["seed"])
        # 50 ms: an answer is journalled some milliseconds after it ended; a kill in between leaves it unfinished
        assert request["started"] <= ended[key] + 0.05, f"{key} was asked again after it was finished"
