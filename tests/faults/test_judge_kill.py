"""kill -9 at ten random moments of applying 48 items, new and revised: all or nothing for each, and nothing twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.command import start_tipbench, tipbench
from support.judging import Desk, by_hand, fill, items_of, record_cells
from tipbench.judge.judging import Judging
from tipbench.judge.scores import SCORES, read_scores
from tipbench.record.mlflow import MlflowStore

KILLS = 10
CELLS = 48


def test_an_apply_killed_ten_times_ends_complete(home: Path, mlflow_url: str, tmp_path: Path) -> None:
    rng = random.Random(10)
    with MlflowStore(mlflow_url) as store:
        desk = Desk(store, record_cells(store, experiment=f"tip-bench-judge-kill-{uuid4().hex[:8]}"))
        judging = desk.export("anna").judging
        file = tmp_path / "sheet.json"
        options = ("judge", "apply", str(file), "--mlflow-url", mlflow_url)
        versions = [fill(judging, seed=1)]
        file.write_text(json.dumps(versions[0]))
        began = time.monotonic()
        tipbench(*options, "--dry-run", home=home)
        reading_s = time.monotonic() - began

        kills = 0
        for _ in range(4 * KILLS):
            if _killed(options, home, rng.uniform(0.7 * reading_s, reading_s + 1.0), tmp_path / "log"):
                kills += 1
                _check_nothing_is_mixed(desk, judging, versions)
            else:  # it was through before the kill: from now on the judge revises
                versions.append(fill(judging, seed=len(versions) + 1))
                file.write_text(json.dumps(versions[-1]))
            if kills == KILLS:
                break
        assert kills == KILLS, (tmp_path / "log").read_text()[-2000:]
        tipbench(*options, home=home)

        runs, scores, last = desk.cells(), desk.scores(), items_of(versions[-1], judging)
    assert len(runs) == CELLS
    for run_id, run in runs.items():
        assert (run.state, run.tags["judge_pending"], run.tags["held"]) == ("judged", "false", "false")
        numbers = by_hand(last[run_id])
        assert {name: run.metrics[name] for name in numbers} == pytest.approx(numbers)
        history = [[dict(tip.scores) for tip in given.tips] for given in scores[run_id].history]
        assert history == [_scores(version, judging, run_id) for version in versions[:-1]], (
            "each version once, in order"
        )


def _killed(options: tuple[str, ...], home: Path, after_s: float, log: Path) -> bool:
    """Start and kill; False when it had ended well before."""
    process = start_tipbench(*options, home=home, log=log)
    try:
        code = process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    assert code == 0, log.read_text()[-2000:]
    return False


def _check_nothing_is_mixed(desk: Desk, judging: Judging, versions: list[dict[str, Any]]) -> None:
    """Each cell is as the version under way says, or as the one before; never something in between."""
    found = desk.store.read(desk.experiment.experiment_id, where={"kind": "cell"}, texts=[SCORES])
    for run, texts in found:
        given = read_scores(texts.get(SCORES)).judges.get("anna")
        if given is None:
            assert (run.state, len(versions)) == ("pending", 1)
            assert "composite" not in run.metrics
            continue
        tips = [dict(tip.scores) for tip in given.tips]
        item = next(items_of(raw, judging)[run.run_id] for raw in reversed(versions[-2:])
                    if _scores(raw, judging, run.run_id) == tips)  # fmt: skip
        assert run.state == "judged"
        assert run.metrics["composite"] == pytest.approx(by_hand(item)["composite"])


def _scores(raw: dict[str, Any], judging: Judging, run_id: str) -> list[dict[str, int]]:
    return [tip["scores"] for tip in items_of(raw, judging)[run_id]["tips"]]
