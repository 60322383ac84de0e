"""SIGKILL before and after each write of a collect and of an apply: nothing is lost, mixed or done twice."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command import start_tipbench, tipbench
from support.experiments import find_experiment
from support.judging import SheetDriver, fill, items_of, metrics_of, record_cells
from support.polling import eventually
from support.scripted_mlflow import Json, ScriptedMlflow
from support.scripted_ollama import Request, ScriptedOllama
from tipbench.judge.scores import SCORES, read_scores
from tipbench.judge.sheet_store import StoredSheet
from tipbench.plan.suite import load_suite
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun

pytestmark = pytest.mark.process

MODELS = ("alpha:135m", "beta:135m")
CELLS = 24
EXPERIMENT = "tip-bench-kill"
COLLECT_WRITES = (("experiments/create", 1), ("runs/create", 2), ("runs/log-batch", 2), ("runs/update", 2))


class KillingMlflow(ScriptedMlflow):
    """Kills its client at a chosen request, before the request takes effect or after it."""

    def __init__(self) -> None:
        super().__init__()
        self._client: subprocess.Popen[bytes] | None = None
        self._kill_at, self._after, self._started = ("", 0), False, threading.Event()
        self._requests: Counter[str] = Counter()

    def run_and_kill(self, *arguments: str, home: Path, log: Path, at: tuple[str, int], after: bool) -> None:
        """Run a command and kill it at the nth request to a path; `at` is (path, n)."""
        self._requests.clear()
        self._started.clear()
        self._kill_at, self._after = at, after
        self._client = start_tipbench(*arguments, home=home, log=log)
        self._started.set()
        code = self._client.wait(120)
        self._kill_at = ("", 0)
        assert code == -signal.SIGKILL, f"{at} was never reached:\n{log.read_text()[-2000:]}"

    def answer(self, path: str, body: Json) -> Json:
        self._requests[path] += 1
        killing = (path, self._requests[path]) == self._kill_at
        if killing and not self._after:
            self._kill()
        answer = super().answer(path, body)
        if killing and self._after:
            self._kill()
        return answer

    def _kill(self) -> None:
        assert self._started.wait(60)
        assert self._client is not None
        self._client.send_signal(signal.SIGKILL)
        self._client.wait()
        raise ConnectionError  # ends the request without a response


@pytest.fixture
def mlflow() -> Iterator[KillingMlflow]:
    with KillingMlflow() as server:
        yield server


def test_a_collect_killed_at_each_step_ends_complete(home: Path, mlflow: KillingMlflow, tmp_path: Path) -> None:
    with ScriptedOllama(MODELS, call_s=0.05) as server:
        options = (
            "collect", "--models", ",".join(MODELS), "--ollama-url", server.url, "--mlflow-url", mlflow.url,
            "--experiment", EXPERIMENT, "--n-tips", "2", "--num-predict", "64", "--n-scenarios", "4",
        )  # fmt: skip
        for path, nth in COLLECT_WRITES:
            for after in (False, True):
                mlflow.run_and_kill(*options, home=home, log=tmp_path / "log", at=(path, nth), after=after)
        _kill_in_mid_answer(options, home, server)
        tipbench(*options, home=home)
        chats, max_resident = server.log.calls(), server.log.max_resident

    with MlflowStore(mlflow.url) as store:
        experiment_id = find_experiment(store, EXPERIMENT).experiment_id
        runs = list(store.search(experiment_id, where={"kind": "cell"}, include_half_written=True))
        texts = {run.run_id: store.get(run.run_id)[1] for run in runs}
    assert [run.status for run in runs] == ["FINISHED"] * CELLS
    assert len({run.tags["cell_key"] for run in runs}) == CELLS
    for run in runs:
        _check_texts(texts[run.run_id], run.metrics)
    assert max_resident == 1
    _check_no_finished_cell_was_requested_again(chats, runs)
    assert list((home / "journal").rglob("*.jsonl")) == []


def _kill_in_mid_answer(options: tuple[str, ...], home: Path, server: ScriptedOllama) -> None:
    server.set(call_s=0.5)
    process = start_tipbench(*options, home=home)
    assert eventually(lambda: bool(server.log.calls(outcome="running")) or process.poll() is not None)
    assert process.poll() is None, "every cell is finished: none is left to kill in mid-answer"
    process.kill()
    process.wait()
    server.set(call_s=0.05)


def _check_texts(texts: dict[str, str], metrics: Any) -> None:
    """Check the texts against each other and the metrics; reading them has checked the hashes of long texts."""
    tips = json.loads(texts["artifact:candidates.json"])
    assert json.loads(texts["artifact:raw.txt"]) == tips
    assert len(tips) == metrics["n_candidates"] == 2
    assert hashlib.sha256(texts["artifact:rubric.md"].encode()).hexdigest() == load_suite("tips").rubric.sha256


def _check_no_finished_cell_was_requested_again(chats: list[Request], runs: list[StoredRun]) -> None:
    """Check that no chat request of a cell came after the end of its recorded answer."""
    ended = {(run.params["model"], int(run.tags["cell_seed"])): (run.end_ms or 0) / 1000 for run in runs}
    assert len(chats) >= CELLS
    for chat in chats:
        key = (str(chat.model), int(str(chat.options["seed"])))
        # 50 ms: an answer is journalled some milliseconds after it ended; a kill in between leaves it unfinished
        assert chat.started <= ended[key] + 0.05, f"{key} was requested again after it was finished"


def test_an_apply_killed_at_each_step_is_all_or_nothing_for_each_item(
    home: Path, mlflow: KillingMlflow, tmp_path: Path
) -> None:
    file = tmp_path / "sheet.json"
    options = ("judge", "apply", str(file), "--mlflow-url", mlflow.url)
    with MlflowStore(mlflow.url) as store:
        driver = SheetDriver(store, record_cells(store, experiment=EXPERIMENT, prompts="v1", n_scenarios=6))
        stored_sheet = driver.export("anna", seed=1).stored
        versions: list[dict[str, Any]] = []
        for seed in (1, 2):  # new scores, then revised ones
            versions.append(fill(stored_sheet, seed=seed))
            file.write_text(json.dumps(versions[-1]))
            for nth, after in ((1, False), (1, True), (4, False)):
                at = ("runs/log-batch", nth)
                mlflow.run_and_kill(*options, home=home, log=tmp_path / "log", at=at, after=after)
                _check_nothing_is_mixed(driver, stored_sheet, versions)
            tipbench(*options, home=home)
        runs, scores, last = driver.cells(), driver.scores(), items_of(versions[-1], stored_sheet)
    assert len(runs) == 12
    for run_id, run in runs.items():
        assert (run.state, run.tags["judge_pending"], run.tags["held"]) == ("judged", "false", "false")
        numbers = metrics_of(last[run_id])
        assert {name: run.metrics[name] for name in numbers} == pytest.approx(numbers)
        history = [[dict(tip.scores) for tip in given.tips] for given in scores[run_id].history]
        assert history == [_scores(versions[0], stored_sheet, run_id)], "each version once, in order"


def _check_nothing_is_mixed(driver: SheetDriver, stored_sheet: StoredSheet, versions: list[dict[str, Any]]) -> None:
    """Check that each cell has the scores of one version: the one being applied or the one before."""
    found = driver.store.read(driver.experiment.experiment_id, where={"kind": "cell"}, texts=[SCORES])
    for run, texts in found:
        given = read_scores(texts.get(SCORES)).applied.get("anna")
        if given is None:
            assert (run.state, len(versions)) == ("pending", 1)
            assert "composite" not in run.metrics
            continue
        tips = [dict(tip.scores) for tip in given.tips]
        item = next(items_of(raw, stored_sheet)[run.run_id] for raw in reversed(versions)
                    if _scores(raw, stored_sheet, run.run_id) == tips)  # fmt: skip
        assert run.state == "judged"
        assert run.metrics["composite"] == pytest.approx(metrics_of(item)["composite"])


def _scores(raw: dict[str, Any], stored_sheet: StoredSheet, run_id: str) -> list[dict[str, int]]:
    return [tip["scores"] for tip in items_of(raw, stored_sheet)[run_id]["tips"]]
