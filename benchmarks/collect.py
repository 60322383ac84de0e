"""`tipbench collect` against two raw loops: one that only asks the same questions, one that only logs the same runs.

All three run on the same scripted Ollama and the same MLflow, in turn, round after round; see docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loops import ask_loop, log_loop
from process import run_collect
from report import Claim, NotMeasured, Progress, Result, minutes, say
from servers import ScriptedProcess, start_mlflow
from work import MODELS, LoggedRun, Work, asked, chats, heard, recorded_runs

_LOG_RUN_S = 0.07  # for the estimate: what MLflow on SQLite takes for a run
_START_S = 1.0
_MLFLOW_START_S = 15.0
_WARM_CELLS = 96


@dataclass(frozen=True)
class Scene:
    """Work to be measured, and whether the logging loop is a rival in it."""

    name: str
    work: Work
    logged: bool = True

    @property
    def ask_s(self) -> float:
        return self.work.cells * self.work.call_s / self.work.concurrency

    @property
    def log_s(self) -> float:
        return self.work.cells * _LOG_RUN_S

    @property
    def round_s(self) -> float:
        collect_s = max(self.ask_s, self.log_s) + _START_S
        return self.ask_s + collect_s + (self.log_s if self.logged else 0.0)


@dataclass(frozen=True)
class Scenes:
    """The three situations of the claims."""

    many: Scene
    few: Scene
    slow: Scene

    def __iter__(self) -> Iterator[Scene]:
        return iter((self.many, self.few, self.slow))


@dataclass(frozen=True)
class Collected:
    """One collect. `lead_s`: from its start to the first question; `journal_s`: from there to the last entry."""

    total_s: float
    lead_s: float
    journal_s: float
    cpu_s: float
    peak_bytes: int | None
    loads: dict[str, int]


@dataclass
class Round:
    """One round of a scene."""

    ask_s: float = 0.0
    log_s: float = 0.0
    collected: Collected | None = None

    @property
    def collect(self) -> Collected:
        assert self.collected is not None
        return self.collected

    @property
    def rival_s(self) -> float:
        """The larger of the two raw loops."""
        return max(self.ask_s, self.log_s)


def scenes(cells: int, slow_cells: int) -> Scenes:
    """The situations, with so many cells in the first and the last."""
    return Scenes(
        Scene(f"{cells} cells", Work(cells, 0.05, 8)),
        Scene("96 cells", Work(96, 0.05, 8)),
        Scene(f"{slow_cells} cells of 2 s", Work(slow_cells, 2.0, 1), logged=False),
    )


def estimate_s(plan: Scenes, rounds: int) -> float:
    """Roughly how long it will take."""
    return _MLFLOW_START_S + rounds * sum(scene.round_s for scene in plan)


def measure(plan: Scenes, rounds: int, note: str) -> Result:
    """Start the servers, measure round after round, stop the servers."""
    say(f"collect: {rounds} × ({', '.join(scene.name for scene in plan)}), about {minutes(estimate_s(plan, rounds))}")
    with tempfile.TemporaryDirectory(prefix="tipbench-bench-") as name, _mlflow(Path(name)) as mlflow_url:
        bench = _Bench(Path(name), mlflow_url, Progress(estimate_s(plan, rounds) - _MLFLOW_START_S))
        bench.warm_up()
        done: list[list[Round]] = [[] for _ in plan]
        for number in range(1, rounds + 1):
            for scene, measured in zip(plan, done, strict=True):
                say(f"round {number} of {rounds}: {scene.name}")
                measured.append(bench.round(scene, backwards=number % 2 == 0))
    shown = [{"scene": scene.name, **asdict(r)} for scene, measured in zip(plan, done, strict=True) for r in measured]
    return Result("collect", note, tuple(claims(plan, *done)), shown)


@contextmanager
def _mlflow(folder: Path) -> Iterator[str]:
    home = folder / "mlflow"
    home.mkdir()
    say("starting MLflow …")
    with start_mlflow(home) as server:
        yield server.url


class _Bench:
    """Measures one thing at a time. Remembers each scene's last recorded runs, for the logging loop to log."""

    def __init__(self, folder: Path, mlflow_url: str, progress: Progress) -> None:
        self._folder = folder
        self._mlflow_url = mlflow_url
        self._progress = progress
        self._experiments = 0
        self._runs: dict[str, list[LoggedRun]] = {}

    def warm_up(self) -> None:
        """A small collect that is not counted: files into the cache, MLflow's first requests out of the way."""
        self._collect(Work(_WARM_CELLS, 0.05, 8))

    def round(self, scene: Scene, *, backwards: bool) -> Round:
        """Everything once. Every second round runs backwards, so that none always runs first."""
        result = Round()

        def ask() -> float:
            result.ask_s = self._ask(scene.work)
            return result.ask_s

        def collect() -> float:
            result.collected, self._runs[scene.name] = self._collect(scene.work)
            return result.collect.total_s

        def log() -> float:
            result.log_s = log_loop(self._mlflow_url, self._fresh(), self._runs[scene.name])
            return result.log_s

        steps: list[tuple[str, float, Callable[[], float]]] = [
            ("raw httpx loop", scene.ask_s, ask),
            ("tipbench collect", max(scene.ask_s, scene.log_s) + _START_S, collect),
        ]
        if scene.logged:
            steps.append(("raw REST loop", scene.log_s, log))
        for name, expected_s, step in reversed(steps) if backwards else steps:
            self._progress.step(name, expected_s, step())
        return result

    def _ask(self, work: Work) -> float:
        questions = work.questions()
        with _ollama(work) as server:
            ended = ask_loop(server.url, questions, work.concurrency)
            log = server.log()
        _require_same(work, log)
        return ended - _first(log)

    def _collect(self, work: Work) -> tuple[Collected, list[LoggedRun]]:
        experiment = self._fresh()
        with tempfile.TemporaryDirectory(dir=self._folder) as folder, _ollama(work) as server:
            addresses = {"ollama_url": server.url, "mlflow_url": self._mlflow_url, "experiment": experiment}
            ended = run_collect(work.config | addresses, Path(folder), self._folder / "bytecode")
            log = server.log()
        _require_same(work, log)
        runs = recorded_runs(self._mlflow_url, experiment)
        if not len(runs) == ended.entries == work.cells:
            raise NotMeasured(f"{work.cells} cells, but {ended.entries} journal entries and {len(runs)} runs")
        first = _first(log)
        lead_s, journal_s = first - ended.started, ended.last_entry - first
        return Collected(ended.total_s, lead_s, journal_s, ended.cpu_s, ended.peak_bytes, log["loads"]), runs

    def _fresh(self) -> str:
        self._experiments += 1
        return f"tip-bench-bench-{self._experiments}"


def _ollama(work: Work) -> ScriptedProcess:
    return ScriptedProcess(MODELS, call_s=work.call_s)


def _first(log: dict[str, Any]) -> float:
    return min(float(chat["started"]) for chat in chats(log))


def _require_same(work: Work, log: dict[str, Any]) -> None:
    """Both sides must have asked the very same questions, else the comparison means nothing."""
    bodies = [body for group in work.questions().values() for body in group]
    if heard(log) != asked(bodies):
        raise NotMeasured(f"not the questions of the grid: {len(chats(log))} were heard, {len(bodies)} expected")


def claims(plan: Scenes, many: list[Round], few: list[Round], slow: list[Round]) -> list[Claim]:
    """The promises of `make bench`, each a value per round."""
    n = plan.many.work.cells
    peaks = [r.collect.peak_bytes / 1e6 for r in many if r.collect.peak_bytes is not None]
    loads = [float(r.collect.loads.get(model, 0)) for r in (*many, *few, *slow) for model in MODELS]
    return [
        Claim(
            f"{plan.many.name}: first question to last journal entry",
            1.10,
            "×",
            tuple(r.collect.journal_s / r.ask_s for r in many),
            f"{_mid(r.collect.journal_s for r in many)}; raw httpx loop {_mid(r.ask_s for r in many)}",
        ),
        Claim(
            f"{plan.many.name}: whole process",
            1.15,
            "×",
            tuple(r.collect.total_s / r.rival_s for r in many),
            f"{_mid(r.collect.total_s for r in many)}; {_rivals(many)}",
        ),
        Claim(
            f"{plan.few.name}: whole process, on top of the slower raw loop",
            0.5,
            "s",
            tuple(r.collect.total_s - r.rival_s for r in few),
            f"{_mid(r.collect.total_s for r in few)}, {_mid(r.collect.lead_s for r in few)} of it before the first "
            f"question; {_rivals(few)}",
        ),
        Claim(
            f"{plan.slow.name}, one at a time: whole process",
            1.02,
            "×",
            tuple(r.collect.total_s / r.ask_s for r in slow),
            f"{_mid(r.collect.total_s for r in slow)}; raw httpx loop {_mid(r.ask_s for r in slow)}",
        ),
        Claim(
            f"{plan.many.name}: CPU of the process per cell",
            15.0,
            "ms",
            tuple(r.collect.cpu_s / n * 1000 for r in many),
            f"{_mid(r.collect.cpu_s for r in many)} in all",
        ),
        Claim(f"{plan.many.name}: peak memory", 90.0, "MB", tuple(peaks), "VmHWM" if peaks else "no /proc here"),
        Claim("loads per model, every collect", 1.0, "", tuple(loads), f"{len(loads)} blocks", exact=True),
    ]


def _rivals(rounds: Sequence[Round]) -> str:
    return f"raw loops {_mid(r.ask_s for r in rounds)} httpx, {_mid(r.log_s for r in rounds)} REST"


def _mid(values: Iterator[float]) -> str:
    return f"{statistics.median(values):.2f} s"
