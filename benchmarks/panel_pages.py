"""The panel on a large experiment: cold, warm, and right after a sheet was applied, against MLflow's own search."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loops import read_loop
from report import Claim, NotMeasured, Progress, Result, say
from servers import Desk, fill, record_cells, start_mlflow
from tipbench.record.mlflow import MlflowStore

EXPERIMENT = "tip-bench-bench-panel"
PLACES = {  # name → path; what people open, and what their programs read
    "experiments page": "/",
    "experiments JSON": "/api/bench/experiments",
    "leaderboard page": f"/experiments/{EXPERIMENT}",
    "leaderboard JSON": f"/api/bench/leaderboard/{EXPERIMENT}",
}
COLD = "leaderboard page"
WARM_LIMIT_MS = 50.0
WARM_SHARE = 0.05  # × MLflow's search: the same on a busy machine, which slows both down
COLD_LIMIT = 1.1  # × MLflow's search
_WARM_ASKS = 9
_SHEET_CELLS = 24
_START_S = 60.0
_ROUND_S = 40.0
_TOKEN = "a-token-of-the-benchmark-and-of-nothing-else"  # noqa: S105


@dataclass
class Round:
    """Seconds of one round; `warm` by place, each the median of several requests."""

    search_s: float = 0.0
    cold_s: float = 0.0
    applied_s: float = 0.0
    seen: bool = False  # whether the first answer after the apply knew the new judge
    warm: dict[str, float] = field(default_factory=dict)


def measure(rounds: int, runs: int, note: str) -> Result:
    """Record and judge the runs once; then ask a freshly started panel, round after round."""
    models = [f"model-{number}:1b" for number in range(runs // 24)]
    cells = 24 * len(models)
    say(f"panel: {rounds} × ({cells} runs: MLflow's search, a cold panel, a warm one, a sheet applied)")
    with (
        tempfile.TemporaryDirectory(prefix="tipbench-bench-") as name,
        start_mlflow(Path(name)) as mlflow,
        MlflowStore(mlflow.url) as store,
    ):
        bench = _Bench(Path(name) / "home", mlflow.url, _furnished(store, models), cells)
        progress = Progress(rounds * _ROUND_S)
        done = []
        for number in range(1, rounds + 1):
            began = time.perf_counter()
            done.append(bench.round(f"judge-{number}"))
            progress.step(f"round {number} of {rounds}", _ROUND_S, time.perf_counter() - began)
    return Result("panel", note, tuple(claims(cells, done)), [vars(each) for each in done])


def claims(cells: int, rounds: list[Round]) -> Iterator[Claim]:
    """The promises: what is warm answers at once, what has changed shows at once, and cold costs one reading."""
    search = statistics.median(each.search_s for each in rounds)
    for place in PLACES:
        values = tuple(1000 * each.warm[place] for each in rounds)
        shares = tuple(each.warm[place] / each.search_s for each in rounds)
        told = f"{statistics.median(shares):.4f} × MLflow's search of {search:.2f} s"
        yield Claim(f"{cells} runs: {place}, warm", WARM_LIMIT_MS, "ms", values, told)
        if place == COLD:
            yield Claim(f"{cells} runs: {place}, warm, to MLflow's search", WARM_SHARE, "×", shares, told)
    for what, attribute in (("cold", "cold_s"), ("after a sheet was applied", "applied_s")):
        seconds = [getattr(each, attribute) for each in rounds]
        ratios = tuple(value / each.search_s for value, each in zip(seconds, rounds, strict=True))
        told = f"{statistics.median(seconds):.2f} s; MLflow's search {search:.2f} s"
        yield Claim(f"{cells} runs: {COLD}, {what}", COLD_LIMIT, "×", ratios, told)
    shown = tuple(float(each.seen) for each in rounds)
    yield Claim("a sheet applied on the command line is in the next answer", 1.0, "", shown, "every round", exact=True)


def _furnished(store: MlflowStore, models: list[str]) -> Desk:
    say(f"  recording {24 * len(models)} cells and judging them")
    desk = Desk(store, record_cells(store, models=models, experiment=EXPERIMENT))
    if desk.judged_by("anna", everything=True).status != "applied":
        raise NotMeasured("The first judge's sheet was held.")
    return desk


class _Bench:
    """One thing at a time: everything is measured from outside, over HTTP, as a browser would see it."""

    def __init__(self, home: Path, mlflow_url: str, desk: Desk, cells: int) -> None:
        home.mkdir()
        self._home = home
        self._mlflow_url = mlflow_url
        self._desk = desk
        self._cells = cells
        settings = {"TIPBENCH_HOME": str(home), "TIPBENCH_ADMIN_TOKEN": _TOKEN, "MLFLOW_TRACKING_URI": mlflow_url}
        self._environment = {**os.environ, **settings}

    def round(self, judge: str) -> Round:
        """Search, cold, warm, apply, and what the panel says then."""
        sheet = self._home / f"{judge}.json"
        judging = self._desk.export(judge, everything=True, limit=_SHEET_CELLS).stored
        sheet.write_text(json.dumps(fill(judging)), encoding="utf-8")
        result = Round(search_s=read_loop(self._mlflow_url, self._desk.experiment.experiment_id, self._cells))
        with self._panel() as client:
            result.cold_s, _ = _ask(client, PLACES[COLD])
            for place, path in PLACES.items():
                _ask(client, path)
                result.warm[place] = statistics.median(_ask(client, path)[0] for _ in range(_WARM_ASKS))
            self._apply(sheet)
            result.applied_s, page = _ask(client, PLACES[COLD])
            _, board = _ask(client, PLACES["leaderboard JSON"])
        result.seen = judge in page and judge in json.loads(board)["judges"]
        return result

    def _apply(self, sheet: Path) -> None:
        command = [sys.executable, "-m", "tipbench", "judge", "apply", str(sheet), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._environment)
        if done.returncode != 0:
            raise NotMeasured(f"tipbench judge apply ended with {done.returncode}: {done.stderr[-400:]}")

    @contextmanager
    def _panel(self) -> Iterator[httpx.Client]:
        """A panel of its own process, as an operator starts it, and a client that keeps its connection."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tipbench", "panel", "--port", "0"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            headers: Mapping[str, str] = {"Authorization": f"Bearer {_TOKEN}", "Accept": "text/html,*/*"}
            with httpx.Client(base_url=_address(process), headers=headers, trust_env=False, timeout=120) as client:
                _until_it_answers(client)
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    """Where it says it listens; what it says afterwards is read too, or it would wait for us."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("panel: "):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line.split()[1]
    raise NotMeasured(f"tipbench panel did not start. It said:\n{''.join(said)[-2000:]}")


def _until_it_answers(client: httpx.Client) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            if client.get("/healthz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise NotMeasured(f"The panel did not answer within {_START_S:g} s.")


def _ask(client: httpx.Client, path: str) -> tuple[float, str]:
    """Until the last byte is here: a little more than the server's own time."""
    began = time.perf_counter()
    answer: Any = client.get(path)
    took = time.perf_counter() - began
    if answer.status_code != 200:
        raise NotMeasured(f"GET {path} answered {answer.status_code}: {answer.text[:300]}")
    return took, answer.text
