"""The panel on a large experiment: cold, warm, and after a sheet was applied, against MLflow's own search."""

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

import httpx

from loops import read_loop
from report import Claim, NotMeasured, Result, Size, count_rounds, median_s, say
from servers import RealMlflow, SheetDriver, fill, record_cells
from tipbench.record.mlflow import MlflowStore

EXPERIMENT = "tip-bench-bench-panel"
PATHS = {
    "experiments page": "/",
    "experiments JSON": "/api/bench/experiments",
    "leaderboard page": f"/experiments/{EXPERIMENT}",
    "leaderboard JSON": f"/api/bench/leaderboard/{EXPERIMENT}",
}
COLD_PAGE = "leaderboard page"
WARM_LIMIT_MS = 50.0
COLD_LIMIT = 1.1  # times MLflow's search
_WARM_REQUESTS = 9
_SHEET_CELLS = 24
_START_TIMEOUT_S = 60.0
_TOKEN = "a-token-for-the-panel-benchmark-only"  # noqa: S105


@dataclass
class Round:
    """Seconds of one round; `warm` by the names of PATHS, each the median of several requests."""

    search_s: float = 0.0
    cold_s: float = 0.0
    applied_s: float = 0.0
    current: bool = False  # whether the first responses after the apply have the new judge
    warm: dict[str, float] = field(default_factory=dict)


def measure(size: Size) -> Result:
    """Record and judge the runs once; then start a new panel in each round and request its pages."""
    models = [f"model-{number}:1b" for number in range(size.cells // 24)]
    cells = 24 * len(models)
    with (
        tempfile.TemporaryDirectory(prefix="tipbench-bench-") as name,
        RealMlflow(Path(name)) as mlflow,
        MlflowStore(mlflow.url) as store,
    ):
        say(f"panel: recording {cells} cells and judging them")
        driver = SheetDriver(store, record_cells(store, models=models, experiment=EXPERIMENT))
        if driver.judged_by("anna", everything=True).status != "applied":
            raise NotMeasured("The first judge's sheet was held.")
        bench = _Bench(Path(name) / "home", mlflow.url, driver, cells)
        rounds = [bench.round(f"judge-{number}") for number in count_rounds("panel", size.rounds)]
    return Result("panel", tuple(claims(cells, rounds)), [vars(each) for each in rounds])


def claims(cells: int, rounds: list[Round]) -> Iterator[Claim]:
    """The claims: a warm page responds quickly, a cold one takes one reading, and a change is shown at once."""
    search = f"MLflow's search {median_s(each.search_s for each in rounds)}"
    for name in PATHS:
        values = tuple(1000 * each.warm[name] for each in rounds)
        share = statistics.median(each.warm[name] / each.search_s for each in rounds)
        yield Claim(f"{cells} runs: {name}, warm", WARM_LIMIT_MS, "ms", values, f"{share:.4f} × {search}")
    for state, attribute in (("cold", "cold_s"), ("after a sheet was applied", "applied_s")):
        seconds = [getattr(each, attribute) for each in rounds]
        ratios = tuple(value / each.search_s for value, each in zip(seconds, rounds, strict=True))
        yield Claim(f"{cells} runs: {COLD_PAGE}, {state}", COLD_LIMIT, "×", ratios, f"{median_s(seconds)}; {search}")
    current = tuple(float(each.current) for each in rounds)
    yield Claim(
        "a sheet applied on the command line is in the next answer", 1.0, "", current, "every round", exact=True
    )


class _Bench:
    """Measures over HTTP, as a browser would."""

    def __init__(self, home: Path, mlflow_url: str, driver: SheetDriver, cells: int) -> None:
        home.mkdir()
        self._home = home
        self._mlflow_url = mlflow_url
        self._driver = driver
        self._cells = cells
        settings = {"TIPBENCH_HOME": str(home), "TIPBENCH_ADMIN_TOKEN": _TOKEN, "MLFLOW_TRACKING_URI": mlflow_url}
        self._environment = {**os.environ, **settings}

    def round(self, judge: str) -> Round:
        """Measure MLflow's search, a cold panel, a warm one, and the first responses after a sheet was applied."""
        sheet = self._home / f"{judge}.json"
        judging = self._driver.export(judge, everything=True, limit=_SHEET_CELLS).stored
        sheet.write_text(json.dumps(fill(judging)), encoding="utf-8")
        result = Round(search_s=read_loop(self._mlflow_url, self._driver.experiment.experiment_id, self._cells))
        with self._panel() as client:
            result.cold_s, _ = _get(client, PATHS[COLD_PAGE])
            for name, path in PATHS.items():
                _get(client, path)
                result.warm[name] = statistics.median(_get(client, path)[0] for _ in range(_WARM_REQUESTS))
            self._apply(sheet)
            result.applied_s, page = _get(client, PATHS[COLD_PAGE])
            _, board = _get(client, PATHS["leaderboard JSON"])
        result.current = judge in page and judge in json.loads(board)["judges"]
        return result

    def _apply(self, sheet: Path) -> None:
        command = [sys.executable, "-m", "tipbench", "judge", "apply", str(sheet), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._environment)
        if done.returncode != 0:
            raise NotMeasured(f"tipbench judge apply exited with {done.returncode}: {done.stderr[-400:]}")

    @contextmanager
    def _panel(self) -> Iterator[httpx.Client]:
        """Start `tipbench panel`; yields a client that keeps its connection."""
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
                _wait_until_healthy(client)
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    """The address that the panel prints. A thread reads its later output, so that the pipe does not fill up."""
    assert process.stderr is not None
    output = []
    for line in process.stderr:
        output.append(line)
        if line.startswith("panel: "):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line.split()[1]
    raise NotMeasured(f"tipbench panel did not start:\n{''.join(output)[-2000:]}")


def _wait_until_healthy(client: httpx.Client) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if client.get("/healthz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise NotMeasured(f"The panel did not respond within {_START_TIMEOUT_S:g} s.")


def _get(client: httpx.Client, path: str) -> tuple[float, str]:
    """The seconds until the last byte, and the body."""
    began = time.perf_counter()
    response = client.get(path)
    took = time.perf_counter() - began
    if response.status_code != 200:
        raise NotMeasured(f"GET {path} returned {response.status_code}: {response.text[:300]}")
    return took, response.text
