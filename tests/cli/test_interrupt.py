"""Ctrl-C and SIGTERM: the model is unloaded, exit 130, and the next run continues."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from support.command import start_tipbench, tipbench_json
from support.scripted_ollama import ScriptedOllama

pytestmark = pytest.mark.process

CELLS = 6


@pytest.mark.parametrize(("number", "concurrency"), [(signal.SIGINT, "3"), (signal.SIGTERM, "1")])
def test_a_signal_in_mid_run_unloads_the_model_and_loses_nothing(
    number: signal.Signals, concurrency: str, home: Path, mlflow_url: str, tmp_path: Path
) -> None:
    with ScriptedOllama(call_s=0.5) as server:
        options = (
            *(
                "collect",
                "--models",
                "alpha:135m",
                "--prompts",
                "v1",
                "--n-scenarios",
                str(CELLS),
                "--n-tips",
                "2",
                "--num-predict",
                "64",
            ),
            *("--experiment", f"tip-bench-{number.name.lower()}-{concurrency}", "--concurrency", concurrency),
            *("--ollama-url", server.url, "--mlflow-url", mlflow_url),
        )
        log = tmp_path / "collect.log"
        process = start_tipbench(*options, home=home, log=log)
        _until_mid_call(server)
        assert "alpha:135m" in server.resident
        process.send_signal(number)
        assert process.wait(30) == 130
        assert not server.resident

        output = log.read_text()
        assert "alpha:135m unloaded" in output
        assert output.splitlines()[-1] == "interrupted; the same command continues where this one stopped"
        assert "Traceback" not in output

        finished_before = len(server.log.calls(outcome="finished"))
        summary = tipbench_json(*options, home=home)
        finished = Counter(str(call.options["seed"]) for call in server.log.calls(outcome="finished"))
    assert (summary["cells"], summary["recorded_before"]) == (CELLS, finished_before)
    assert 0 < finished_before < CELLS
    assert (len(finished), set(finished.values())) == (CELLS, {1}), "a finished cell was generated again"


def _until_mid_call(server: ScriptedOllama) -> None:
    """Some calls are finished, and those under way have been so for a while."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        calls = server.log.calls()
        running = [time.time() - call.started for call in calls if call.outcome == "running"]
        if running and len(calls) > len(running) and min(running) > 0.15 and max(running) < 0.35:
            return
        time.sleep(0.01)
    raise AssertionError("no call was ever in its middle")
