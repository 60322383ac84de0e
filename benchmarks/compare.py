"""The leaderboard's statistics, and `tipbench compare` against a loop that only reads the same runs from MLflow."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from loops import read_loop
from report import Claim, NotMeasured, Result, Size, count_rounds, median_s, say
from servers import RealMlflow, record_cells
from tipbench.compare.attribution import attribute
from tipbench.compare.matrix import Pair, Score, ScoreMatrix, score_matrix
from tipbench.compare.ranking import rank
from tipbench.judge.export import ExportRequest
from tipbench.judge.rules import RulesJudge
from tipbench.judge.run import JudgeEnvironment, run_judge
from tipbench.record.mlflow import MlflowStore

EXPERIMENT = "tip-bench-bench-compare"
SMALL, LARGE = (12, 32), (200, 500)  # pairs, scenarios


def measure(size: Size) -> Result:
    """Measure the statistics on random scores, then the whole command on recorded runs."""
    small = tuple(_rank_s(_matrix(*SMALL)) for _ in range(size.rounds))
    large = tuple(_rank_s(_matrix(*LARGE)) for _ in range(size.rounds))
    with tempfile.TemporaryDirectory(prefix="tipbench-bench-") as name, RealMlflow(Path(name)) as mlflow:
        models = [f"model-{number}:1b" for number in range(size.cells // 24)]
        cells = 24 * len(models)
        with MlflowStore(mlflow.url) as store:
            say(f"  recording {cells} cells and letting the rules judge score them")
            experiment = record_cells(store, models=models, experiment=EXPERIMENT)
            run_judge(store, experiment, RulesJudge(), ExportRequest(), environment=JudgeEnvironment(say))
        loops, commands = [], []
        for _ in count_rounds("compare", size.rounds):
            loops.append(read_loop(mlflow.url, experiment.experiment_id, cells))
            commands.append(_command_s(mlflow.url, Path(name)))
    ratios = tuple(command / loop for command, loop in zip(commands, loops, strict=True))
    medians = f"{median_s(commands)}; raw reading loop {median_s(loops)}"
    return Result(
        "compare",
        (
            Claim("12 pairs × 32 scenarios, 10 000 flips and resamples", 0.3, "s", small, "rank and attribution"),
            Claim("200 pairs × 500 scenarios", 5.0, "s", large, "rank and attribution"),
            Claim(f"{cells} runs: whole command", 1.3, "×", ratios, medians),
        ),
        [{"loop_s": loop, "compare_s": command} for loop, command in zip(loops, commands, strict=True)],
    )


def _matrix(pairs: int, scenarios: int) -> ScoreMatrix:
    rng = np.random.default_rng(7)
    base, lead = rng.normal(10, 2, scenarios), rng.normal(0, 0.5, pairs)
    models = max(1, pairs // 3)
    names = [Pair(f"model-{at % models}", f"v{at // models}") for at in range(pairs)]
    return score_matrix(
        Score(pair, f"s{row}", f"p{row % 8}", float(base[row] + lead[at] + rng.normal(0, 1.4)))
        for at, pair in enumerate(names)
        for row in range(scenarios)
    )


def _rank_s(matrix: ScoreMatrix) -> float:
    began = time.perf_counter()
    rank(matrix)
    attribute(matrix)
    return time.perf_counter() - began


def _command_s(url: str, home: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "tipbench", "compare", EXPERIMENT, "--mlflow-url", url, "--json"]
    done = subprocess.run(
        command, capture_output=True, check=False, env={**os.environ, "TIPBENCH_HOME": str(home / "home")}
    )
    if done.returncode != 0:
        raise NotMeasured(f"tipbench compare exited with {done.returncode}: {done.stderr.decode()[-400:]}")
    return time.perf_counter() - began
