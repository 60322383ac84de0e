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
from servers import CELLS_PER_MODEL, record_cells, start_mlflow
from tipbench.compare.attribution import attribute
from tipbench.compare.matrix import Pair, Score, ScoreMatrix, score_matrix
from tipbench.compare.ranking import rank
from tipbench.judge.export import ExportRequest
from tipbench.judge.rules import RulesJudge
from tipbench.judge.run import JudgeEnvironment, run_judge
from tipbench.record.mlflow import MlflowStore

EXPERIMENT = "tip-bench-bench-compare"


def measure(size: Size) -> Result:
    """Measure the statistics on random scores, then the whole command on recorded runs."""
    small = tuple(_timed(_matrix(n_pairs=12, n_scenarios=32)) for _ in range(size.rounds))
    large = tuple(_timed(_matrix(n_pairs=200, n_scenarios=500)) for _ in range(size.rounds))
    with tempfile.TemporaryDirectory(prefix="tipbench-bench-") as name, start_mlflow(Path(name)) as mlflow:
        models = [f"model-{number}:1b" for number in range(size.cells // CELLS_PER_MODEL)]
        cells = CELLS_PER_MODEL * len(models)
        with MlflowStore(mlflow.url) as store:
            say(f"  recording {cells} cells and letting the rules judge score them")
            experiment = record_cells(store, models=models, experiment=EXPERIMENT)
            run_judge(store, experiment, RulesJudge(), ExportRequest(), environment=JudgeEnvironment(say))
        loops, commands = [], []
        for _ in count_rounds("compare", size.rounds):
            loops.append(read_loop(mlflow.url, experiment.experiment_id, cells))
            commands.append(_command(mlflow.url, Path(name)))
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


def _matrix(n_pairs: int, n_scenarios: int) -> ScoreMatrix:
    rng = np.random.default_rng(7)
    scenario_means, pair_effects = rng.normal(10, 2, n_scenarios), rng.normal(0, 0.5, n_pairs)
    n_models = n_pairs // 3
    pairs = [Pair(f"model-{i % n_models}", f"v{i // n_models}") for i in range(n_pairs)]
    return score_matrix(
        Score(pair, f"s{j}", f"p{j % 8}", float(scenario_means[j] + pair_effects[i] + rng.normal(0, 1.4)))
        for i, pair in enumerate(pairs)
        for j in range(n_scenarios)
    )


def _timed(matrix: ScoreMatrix) -> float:
    began = time.perf_counter()
    rank(matrix)
    attribute(matrix)
    return time.perf_counter() - began


def _command(url: str, home: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "tipbench", "compare", EXPERIMENT, "--mlflow-url", url, "--json"]
    done = subprocess.run(
        command, capture_output=True, check=False, env={**os.environ, "TIPBENCH_HOME": str(home / "home")}
    )
    if done.returncode != 0:
        raise NotMeasured(f"tipbench compare exited with {done.returncode}: {done.stderr.decode()[-400:]}")
    return time.perf_counter() - began
