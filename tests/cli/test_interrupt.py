"""Ctrl-C and SIGTERM: the model is unloaded, exit 130, and the next run continues."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from support.command import start_tipbench, tipbench_json
from support.experiments import recorded_runs
from support.polling import eventually
from support.scripted_ollama import Fault, ScriptedOllama

pytestmark = pytest.mark.process

CELLS = 6
FAST = 3  # calls that finish before the signal


@pytest.mark.parametrize(("number", "concurrency"), [(signal.SIGINT, "3"), (signal.SIGTERM, "1")])
def test_a_signal_in_mid_run_unloads_the_model_and_loses_nothing(
    number: signal.Signals, concurrency: str, home: Path, mlflow_url: str, tmp_path: Path
) -> None:
    experiment = f"tip-bench-{number.name.lower()}-{concurrency}"
    with ScriptedOllama(call_s=0.1) as server:
        server.add_faults(Fault("slow", 600, calls=tuple(range(FAST + 1, 100))))
        options = (
            *("collect", "--models", "alpha:135m", "--prompts", "v1"),
            *("--n-scenarios", str(CELLS), "--n-tips", "2", "--num-predict", "64"),
            *("--experiment", experiment, "--concurrency", concurrency),
            *("--ollama-url", server.url, "--mlflow-url", mlflow_url),
        )
        log = tmp_path / "collect.log"
        process = start_tipbench(*options, home=home, log=log)
        # The fast calls are recorded, and all threads wait for calls that take longer than the test.
        assert eventually(lambda: len(recorded_runs(mlflow_url, experiment, "cell")) == FAST, 180)
        assert eventually(lambda: len(server.log.calls(outcome="running")) == int(concurrency), 180)
        assert "alpha:135m" in server.resident
        process.send_signal(number)
        assert process.wait(180) == 130
        assert not server.resident

        output = log.read_text()
        assert "alpha:135m unloaded" in output
        assert output.splitlines()[-1] == "interrupted; the same command continues where this one stopped"
        assert "Traceback" not in output

        server.clear_faults()
        finished_before = len(server.log.calls(outcome="finished"))
        summary = tipbench_json(*options, home=home)
        finished = Counter(str(call.options["seed"]) for call in server.log.calls(outcome="finished"))
    assert (summary["cells"], summary["recorded_before"]) == (CELLS, finished_before)
    assert 0 < finished_before < CELLS
    assert (len(finished), set(finished.values())) == (CELLS, {1}), "a finished cell was generated again"
