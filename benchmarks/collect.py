"""`tipbench collect` against two raw loops: one only sends the same chat requests, one only logs the same runs.

All three use the same scripted Ollama and the same MLflow, in turn, round after round; see docs/benchmarks.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loops import chat_loop, log_loop
from process import run_collect
from report import Claim, NotMeasured, Result, Size, count_rounds, median_s, say
from servers import RealMlflow, ScriptedProcess
from work import MODELS, LoggedRun, Work, chat_bodies, count_chats, count_logged_chats, logged_chats, recorded_runs

_FEW_CELLS = 96
_SLOW_CELLS = 24


@dataclass(frozen=True)
class Collected:
    """One collect."""

    total_s: float
    lead_s: float  # from the start to the first chat request
    journal_s: float  # from the first chat request to the last journal entry
    cpu_s: float
    peak_bytes: int | None
    loads: dict[str, int]


@dataclass(frozen=True)
class Round:
    """One round with one grid."""

    chat_s: float
    log_s: float
    collect: Collected

    @property
    def slower_loop_s(self) -> float:
        return max(self.chat_s, self.log_s)


def measure(size: Size) -> Result:
    """Measure a large grid, a small one, and one whose slow calls are sent one at a time, all on one MLflow."""
    many: list[Round] = []
    few: list[Round] = []
    slow: list[Round] = []
    slow_work = Work(_SLOW_CELLS, call_s=2.0, concurrency=1)
    grids = ((Work(size.cells), many), (Work(_FEW_CELLS), few), (slow_work, slow))
    with tempfile.TemporaryDirectory(prefix="tipbench-bench-") as name:
        folder = Path(name)
        (folder / "mlflow").mkdir()
        with RealMlflow(folder / "mlflow") as mlflow:
            bench = _Bench(folder, mlflow.url)
            bench.collect(Work(_FEW_CELLS))  # not counted: fills file caches and the bytecode folder
            for number in count_rounds("collect", size.rounds):
                for work, rounds in grids:
                    rounds.append(bench.round(work, backwards=number % 2 == 0))
    values = [{"cells": work.cells, **asdict(each)} for work, rounds in grids for each in rounds]
    return Result("collect", tuple(claims(size.cells, many, few, slow)), values)


class _Bench:
    """Runs the loops and the collect of a grid. Keeps the runs of its last collect for the logging loop."""

    def __init__(self, folder: Path, mlflow_url: str) -> None:
        self._folder = folder
        self._mlflow_url = mlflow_url
        self._experiments = 0
        self._runs: dict[int, list[LoggedRun]] = {}

    def round(self, work: Work, *, backwards: bool) -> Round:
        """Run both loops and a collect. Every second round runs backwards, so that neither loop always runs first."""
        if backwards:
            log_s, collected, chat_s = self.log(work), self.collect(work), self.chat(work)
        else:
            chat_s, collected, log_s = self.chat(work), self.collect(work), self.log(work)
        say(f"  {work.cells} cells: httpx {chat_s:.1f} s, tipbench {collected.total_s:.1f} s, REST {log_s:.1f} s")
        return Round(chat_s, log_s, collected)

    def chat(self, work: Work) -> float:
        bodies = chat_bodies(work.config)
        with ScriptedProcess(MODELS, call_s=work.call_s) as server:
            ended = chat_loop(server.url, bodies, work.concurrency)
            log = server.log()
        _check_chats(work, log)
        return ended - _first_chat(log)

    def log(self, work: Work) -> float:
        return log_loop(self._mlflow_url, self._new_experiment(), self._runs[work.cells])

    def collect(self, work: Work) -> Collected:
        experiment = self._new_experiment()
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as folder,
            ScriptedProcess(MODELS, call_s=work.call_s) as server,
        ):
            options = {"ollama_url": server.url, "mlflow_url": self._mlflow_url, "experiment": experiment}
            process = run_collect(work.config | options, Path(folder), self._folder / "bytecode")
            log = server.log()
        _check_chats(work, log)
        runs = self._runs[work.cells] = recorded_runs(self._mlflow_url, experiment)
        if len(runs) != work.cells or process.entries != work.cells:
            raise NotMeasured(f"{work.cells} cells, but {process.entries} journal entries and {len(runs)} runs")
        first_chat = _first_chat(log)
        lead_s, journal_s = first_chat - process.started, process.last_entry - first_chat
        return Collected(process.total_s, lead_s, journal_s, process.cpu_s, process.peak_bytes, log["loads"])

    def _new_experiment(self) -> str:
        self._experiments += 1
        return f"tip-bench-bench-{self._experiments}"


def _first_chat(log: dict[str, Any]) -> float:
    return min(float(chat["started"]) for chat in logged_chats(log))


def _check_chats(work: Work, log: dict[str, Any]) -> None:
    """Raise NotMeasured unless exactly the grid's chat requests were sent, so that loop and tipbench compare."""
    bodies = [body for group in chat_bodies(work.config).values() for body in group]
    if count_logged_chats(log) != count_chats(bodies):
        raise NotMeasured(f"not the grid's chat requests: {len(logged_chats(log))} logged, {len(bodies)} expected")


def claims(n: int, many: list[Round], few: list[Round], slow: list[Round]) -> list[Claim]:
    """The claims about the grids, with a value per round."""
    peaks = [r.collect.peak_bytes / 1e6 for r in many if r.collect.peak_bytes is not None]
    loads = [float(r.collect.loads.get(model, 0)) for r in (*many, *few, *slow) for model in MODELS]
    return [
        Claim(
            f"{n} cells: first request to last journal entry",
            1.10,
            "×",
            tuple(r.collect.journal_s / r.chat_s for r in many),
            f"{median_s(r.collect.journal_s for r in many)}; raw httpx loop {median_s(r.chat_s for r in many)}",
        ),
        Claim(
            f"{n} cells: whole process",
            1.15,
            "×",
            tuple(r.collect.total_s / r.slower_loop_s for r in many),
            f"{median_s(r.collect.total_s for r in many)}; {_loops(many)}",
        ),
        Claim(
            f"{_FEW_CELLS} cells: whole process, on top of the slower raw loop",
            0.5,
            "s",
            tuple(r.collect.total_s - r.slower_loop_s for r in few),
            f"{median_s(r.collect.total_s for r in few)}, {median_s(r.collect.lead_s for r in few)} of it before "
            f"the first request; {_loops(few)}",
        ),
        Claim(
            f"{_SLOW_CELLS} cells of 2 s, one at a time: whole process",
            1.02,
            "×",
            tuple(r.collect.total_s / r.chat_s for r in slow),
            f"{median_s(r.collect.total_s for r in slow)}; raw httpx loop {median_s(r.chat_s for r in slow)}",
        ),
        Claim(
            f"{n} cells: CPU of the process per cell",
            15.0,
            "ms",
            tuple(r.collect.cpu_s / n * 1000 for r in many),
            f"{median_s(r.collect.cpu_s for r in many)} in all",
        ),
        Claim(f"{n} cells: peak memory", 90.0, "MB", tuple(peaks), "VmHWM" if peaks else "no /proc here"),
        Claim("loads per model, every collect", 1.0, "", tuple(loads), f"{len(loads)} blocks", exact=True),
    ]


def _loops(rounds: Sequence[Round]) -> str:
    return f"raw loops {median_s(r.chat_s for r in rounds)} httpx, {median_s(r.log_s for r in rounds)} REST"
