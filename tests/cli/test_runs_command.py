"""`tipbench runs list / show` and `tipbench experiments`."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from invoke_command import invoke, usage_error

from support.command import tipbench
from support.mlflow_server import free_port
from support.scripted_ollama import Fault, ScriptedOllama, tips
from tipbench.record.mlflow import MlflowStore, find_mlflow
from tipbench.record.run import NewRun, RunKind

EXPERIMENT = "tip-bench-reading"
COMMANDS_OF_A_TERMINAL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\x00\ud800"
AWKWARD = """it's "quoted" \\ 100%"""


def reply(model: str, messages: Sequence[Mapping[str, object]], options: Mapping[str, object], nth: int) -> str:
    """Good answers of alpha; every answer of beta has terminal control characters."""
    if model.startswith("alpha"):
        return tips(model, messages, options, nth)
    return json.dumps([{"tip": f"Write {COMMANDS_OF_A_TERMINAL} for ten minutes.", "rationale": "why"}])


@pytest.fixture(scope="module")
def filled_mlflow(mlflow_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of an MLflow with eight cells of two models, one of them failed."""
    faults = [Fault("error_line", value=1, model="alpha:135m", calls=(2,))]
    with ScriptedOllama(["alpha:135m", "beta:135m"], faults, reply=reply) as server:
        done = tipbench(
            *("collect", "--models", "alpha:135m,beta:135m", "--prompts", "v1,v2-mentor", "--n-scenarios", "2"),
            *("--n-tips", "2", "--num-predict", "64", "--ollama-url", server.url, "--mlflow-url", mlflow_url),
            *("--experiment", EXPERIMENT),
            home=tmp_path_factory.mktemp("reading"),
            check=False,
        )
    assert done.returncode == 1, done.stderr
    return mlflow_url


@pytest.fixture(autouse=True)
def use_filled_mlflow(filled_mlflow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", filled_mlflow)
    monkeypatch.setenv("TIPBENCH_EXPERIMENT", EXPERIMENT)


def list_runs(*filters: str) -> list[dict[str, dict[str, str]]]:
    result = invoke("runs", "list", "--json", *filters)
    assert result.code == 0, result.stderr
    return list(result.json)


def test_a_list_as_json_has_every_cell_without_texts() -> None:
    runs = list_runs()
    assert len(runs) == 8
    assert set(runs[0]) == {"run_id", "state", "params", "metrics", "tags"}
    assert {run["params"]["model"] for run in runs} == {"alpha:135m", "beta:135m"}
    assert not any(key.startswith("artifact:") for run in runs for key in run["tags"])


def test_filters_choose_runs() -> None:
    for filters, count in [
        (("--model", "alpha:135m"), 4),
        (("--model", "alpha:135m", "--prompt", "v1"), 2),
        (("--scenario", "nurse@morning"), 4),
        (("--state", "failed"), 1),
        (("--state", "pending", "--model", "alpha:135m"), 3),
        (("--where", "model=beta:135m"), 4),
        (("--where", "params.prompt_version=v1", "--where", "judge_pending=true"), 3),
        (("--limit", "3"), 3),
        (("--model", "nosuch:1b"), 0),
        (("--model", AWKWARD), 0),
        (("--where", f"note={AWKWARD}"), 0),
        (("--where", "odd`key=1"), 0),
    ]:
        assert len(list_runs(*filters)) == count


def test_a_value_with_both_kinds_of_quotes_is_found(filled_mlflow: str) -> None:
    experiment = "tip-bench-quotes"
    with MlflowStore(filled_mlflow) as store:
        found = store.ensure_experiment(experiment)
        for number, model in enumerate([AWKWARD, "it's", 'say "x"', "plain"]):
            params = {"model": model, "prompt_version": "v1", "scenario": "a@b"}
            run = NewRun(RunKind.CELL, f"{number:032}", "x", 1, 2, cell_key=f"k{number}", params=params)
            store.record(found.experiment_id, run)
    for model in (AWKWARD, "it's", 'say "x"'):
        runs = list_runs("--experiment", experiment, "--model", model)
        assert [run["params"]["model"] for run in runs] == [model]


def test_the_table_has_short_ids_and_no_control_characters(filled_mlflow: str) -> None:
    result = invoke("runs", "list", "--model", "alpha:135m")
    lines = result.stdout.splitlines()
    assert lines[0].split()[:5] == ["run", "model", "prompt", "scenario", "state"]
    assert len(lines) == 2 + 4
    assert len(lines[2].split()[0]) == 8
    assert "\x1b" not in result.stdout


def test_csv_has_whole_ids_and_every_column() -> None:
    result = invoke("runs", "list", "--format", "csv", "--state", "failed")
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert len(row["run"]) == 32
    assert (row["model"], row["failure"], row["latency_s"]) == ("alpha:135m", "incomplete", "")
    assert len(row["model_digest"]) == 64


def test_a_flag_on_which_judges_differ_is_not_rounded(filled_mlflow: str) -> None:
    experiment = "tip-bench-flags"
    with MlflowStore(filled_mlflow) as store:
        found = store.ensure_experiment(experiment)
        for number, format_ok in enumerate([0.5, 1.0]):
            metrics = {"format_ok": format_ok, "n_candidates": 2.0}
            run = NewRun(RunKind.CELL, f"{number:032}", "x", number, 2, cell_key=f"k{number}", metrics=metrics)
            store.record(found.experiment_id, run)
    result = invoke("runs", "list", "--experiment", experiment, "--format", "csv")
    rows = csv.DictReader(io.StringIO(result.stdout))
    assert [(row["tips"], row["format_ok"]) for row in rows] == [("2", "1"), ("2", "0.5")]


def test_an_empty_list_reports_it_on_stderr() -> None:
    result = invoke("runs", "list", "--model", "nosuch:1b")
    assert (result.code, result.stdout) == (0, "")
    assert f"no run of {EXPERIMENT} matches" in result.stderr


def test_an_unknown_experiment_is_not_enough_data() -> None:
    result = invoke("runs", "list", "--experiment", "tip-bench-nosuch")
    assert (result.code, result.stdout) == (3, "")
    assert "Unknown experiment tip-bench-nosuch" in result.stderr
    assert "tipbench experiments" in result.stderr


def test_nothing_ever_recorded_is_not_enough_data(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    assert find_mlflow.__kwdefaults__ is not None
    monkeypatch.setitem(find_mlflow.__kwdefaults__, "usual_urls", ())
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    result = invoke("experiments")
    assert (result.code, result.stdout) == (3, "")
    assert "Nothing is recorded yet" in result.stderr
    assert not home.exists()


def test_an_mlflow_that_is_unavailable_ends_with_1() -> None:
    result = invoke("runs", "list", "--mlflow-url", f"http://127.0.0.1:{free_port()}")
    assert (result.code, result.stdout) == (1, "")
    assert "cannot be reached" in result.stderr


def test_show_prints_a_run_with_its_texts() -> None:
    run_id = str(list_runs("--model", "alpha:135m", "--state", "pending")[0]["run_id"])
    shown = invoke("runs", "show", run_id)
    assert shown.code == 0
    for part in ("params\n", "  model: alpha:135m\n", "metrics\n", "tags\n", "artifact:prompt.txt", "# system"):
        assert part in shown.stdout
    assert invoke("runs", "show", run_id[:8]).stdout == shown.stdout


def test_show_as_json_has_the_exact_texts() -> None:
    run = list_runs("--model", "beta:135m", "--limit", "1")[0]
    shown = invoke("runs", "show", str(run["run_id"]), "--json").json
    assert {key: value for key, value in shown.items() if key != "texts"} == run
    assert (
        json.loads(shown["texts"]["artifact:raw.txt"])[0]["tip"] == f"Write {COMMANDS_OF_A_TERMINAL} for ten minutes."
    )


@pytest.mark.process
def test_show_prints_an_answer_without_control_characters(home: Path, filled_mlflow: str) -> None:
    run_id = str(list_runs("--model", "beta:135m", "--limit", "1")[0]["run_id"])
    done = tipbench("runs", "show", run_id, "--mlflow-url", filled_mlflow, home=home)
    assert "owned" in done.stdout
    assert all(char.isprintable() or char == "\n" for char in done.stdout)


@pytest.mark.process
def test_show_as_json_of_a_lone_surrogate_is_valid_json(home: Path, filled_mlflow: str) -> None:
    with MlflowStore(filled_mlflow) as store:
        found = store.ensure_experiment("tip-bench-halves")
        texts = {"artifact:raw.txt": "half \ud800 and 🌿 \x00"}
        run_id = store.record(found.experiment_id, NewRun(RunKind.CELL, "0" * 32, "x", 1, 2, texts=texts))
    for encoding in ("utf-8", "ascii"):
        command = [sys.executable, "-m", "tipbench", "runs", "show", run_id, "--json", "--mlflow-url", filled_mlflow]
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env, check=True)
        assert json.loads(done.stdout)["texts"] == texts


def test_an_unknown_run_is_refused() -> None:
    for run_id in ["0" * 32, "../../health", "' OR 1=1"]:
        assert "No run begins with" in (message := usage_error("runs", "show", run_id)) or "Unknown run" in message


def test_an_ambiguous_id_prefix_is_refused() -> None:
    assert "8 runs begin with ''" in usage_error("runs", "show", "")


def test_experiments_are_listed_with_their_cells(filled_mlflow: str) -> None:
    rows = {row["experiment"]: row for row in invoke("experiments", "--json").json}
    assert rows[EXPERIMENT] | {"cells": 8, "pending": 7, "judged": 0, "failed": 1} == rows[EXPERIMENT]
    assert rows[EXPERIMENT]["url"].startswith(filled_mlflow)
    assert all(name.startswith("tip-bench-") for name in rows)
    table = invoke("experiments").stdout.splitlines()
    assert table[0].split() == ["experiment", "cells", "pending", "judged", "failed", "url"]
    assert any(line.split()[:5] == [EXPERIMENT, "8", "7", "0", "1"] for line in table)
    (row,) = [r for r in csv.DictReader(invoke("experiments", "--format", "csv").stdout.splitlines())
              if r["experiment"] == EXPERIMENT]  # fmt: skip
    assert row["pending"] == "7"


@pytest.mark.process
def test_a_reader_that_leaves_early_is_not_a_failure(filled_mlflow: str) -> None:
    """As in `tipbench runs list | head -1`, and with a closed stdout."""
    command = [sys.executable, "-m", "tipbench", "runs", "list", "--format", "csv", "--mlflow-url", filled_mlflow]
    reader, writer = os.pipe()
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    os.close(reader)
    assert process.communicate(timeout=180)[1] == b""
    assert process.returncode == 0
