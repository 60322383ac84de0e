"""`tipbench runs list / show` and `tipbench experiments`: reading back what was recorded."""

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
from invoke_command import invoke, refused

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
def reading(mlflow_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An experiment with eight cells of two models, one of them failed; the URL of its MLflow."""
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
def use_reading(reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", reading)
    monkeypatch.setenv("TIPBENCH_EXPERIMENT", EXPERIMENT)


def listed(*filters: str) -> list[dict[str, dict[str, str]]]:
    ended = invoke("runs", "list", "--json", *filters)
    assert ended.code == 0, ended.stderr
    return list(ended.json)


def test_a_list_as_json_has_every_cell_without_texts() -> None:
    runs = listed()
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
        assert len(listed(*filters)) == count


def test_a_value_with_both_kinds_of_quotes_is_found(reading: str) -> None:
    experiment = "tip-bench-quotes"
    with MlflowStore(reading) as store:
        found = store.ensure_experiment(experiment)
        for number, model in enumerate([AWKWARD, "it's", 'say "x"', "plain"]):
            params = {"model": model, "prompt_version": "v1", "scenario": "a@b"}
            run = NewRun(RunKind.CELL, f"{number:032}", "x", 1, 2, cell_key=f"k{number}", params=params)
            store.record(found.experiment_id, run)
    for model in (AWKWARD, "it's", 'say "x"'):
        runs = listed("--experiment", experiment, "--model", model)
        assert [run["params"]["model"] for run in runs] == [model]


def test_a_table_is_for_people(reading: str) -> None:
    ended = invoke("runs", "list", "--model", "alpha:135m")
    lines = ended.stdout.splitlines()
    assert lines[0].split()[:5] == ["run", "model", "prompt", "scenario", "state"]
    assert len(lines) == 2 + 4
    assert len(lines[2].split()[0]) == 8
    assert "\x1b" not in ended.stdout


def test_csv_has_whole_ids_and_every_column() -> None:
    ended = invoke("runs", "list", "--format", "csv", "--state", "failed")
    (row,) = csv.DictReader(io.StringIO(ended.stdout))
    assert len(row["run"]) == 32
    assert (row["model"], row["failure"], row["latency_s"]) == ("alpha:135m", "incomplete", "")
    assert len(row["model_digest"]) == 64


def test_a_flag_on_which_judges_differ_is_not_rounded(reading: str) -> None:
    experiment = "tip-bench-flags"
    with MlflowStore(reading) as store:
        found = store.ensure_experiment(experiment)
        for number, format_ok in enumerate([0.5, 1.0]):
            metrics = {"format_ok": format_ok, "n_candidates": 2.0}
            run = NewRun(RunKind.CELL, f"{number:032}", "x", number, 2, cell_key=f"k{number}", metrics=metrics)
            store.record(found.experiment_id, run)
    ended = invoke("runs", "list", "--experiment", experiment, "--format", "csv")
    rows = csv.DictReader(io.StringIO(ended.stdout))
    assert [(row["tips"], row["format_ok"]) for row in rows] == [("2", "1"), ("2", "0.5")]


def test_an_empty_list_reports_it_on_stderr() -> None:
    ended = invoke("runs", "list", "--model", "nosuch:1b")
    assert (ended.code, ended.stdout) == (0, "")
    assert f"no run of {EXPERIMENT} matches" in ended.stderr


def test_an_unknown_experiment_is_not_enough_data() -> None:
    ended = invoke("runs", "list", "--experiment", "tip-bench-nosuch")
    assert (ended.code, ended.stdout) == (3, "")
    assert "Unknown experiment tip-bench-nosuch" in ended.stderr
    assert "tipbench experiments" in ended.stderr


def test_nothing_ever_recorded_is_not_enough_data(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    assert find_mlflow.__kwdefaults__ is not None
    monkeypatch.setitem(find_mlflow.__kwdefaults__, "usual_urls", ())
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    ended = invoke("experiments")
    assert (ended.code, ended.stdout) == (3, "")
    assert "Nothing is recorded yet" in ended.stderr
    assert not home.exists()


def test_an_mlflow_that_is_unavailable_ends_with_1() -> None:
    ended = invoke("runs", "list", "--mlflow-url", f"http://127.0.0.1:{free_port()}")
    assert (ended.code, ended.stdout) == (1, "")
    assert "cannot be reached" in ended.stderr


def test_show_prints_a_run_with_its_texts() -> None:
    run_id = str(listed("--model", "alpha:135m", "--state", "pending")[0]["run_id"])
    shown = invoke("runs", "show", run_id)
    assert shown.code == 0
    for part in ("params\n", "  model: alpha:135m\n", "metrics\n", "tags\n", "artifact:prompt.txt", "# system"):
        assert part in shown.stdout
    assert invoke("runs", "show", run_id[:8]).stdout == shown.stdout


def test_show_as_json_has_the_exact_texts() -> None:
    run = listed("--model", "beta:135m", "--limit", "1")[0]
    shown = invoke("runs", "show", str(run["run_id"]), "--json").json
    assert {key: value for key, value in shown.items() if key != "texts"} == run
    assert (
        json.loads(shown["texts"]["artifact:raw.txt"])[0]["tip"] == f"Write {COMMANDS_OF_A_TERMINAL} for ten minutes."
    )


@pytest.mark.process
def test_show_prints_an_answer_without_control_characters(home: Path, reading: str) -> None:
    run_id = str(listed("--model", "beta:135m", "--limit", "1")[0]["run_id"])
    done = tipbench("runs", "show", run_id, "--mlflow-url", reading, home=home)
    assert "owned" in done.stdout
    assert all(char.isprintable() or char == "\n" for char in done.stdout)


@pytest.mark.process
def test_show_as_json_of_a_lone_surrogate_is_valid_json(home: Path, reading: str) -> None:
    with MlflowStore(reading) as store:
        found = store.ensure_experiment("tip-bench-halves")
        texts = {"artifact:raw.txt": "half \ud800 and 🌿 \x00"}
        run_id = store.record(found.experiment_id, NewRun(RunKind.CELL, "0" * 32, "x", 1, 2, texts=texts))
    for encoding in ("utf-8", "ascii"):
        command = [sys.executable, "-m", "tipbench", "runs", "show", run_id, "--json", "--mlflow-url", reading]
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env, check=True)
        assert json.loads(done.stdout)["texts"] == texts


def test_an_unknown_run_is_refused() -> None:
    for run_id in ["0" * 32, "../../health", "' OR 1=1"]:
        assert "No run begins with" in (message := refused("runs", "show", run_id)) or "Unknown run" in message


def test_an_ambiguous_id_prefix_is_refused() -> None:
    assert "8 runs begin with ''" in refused("runs", "show", "")


def test_experiments_are_listed_with_their_cells(reading: str) -> None:
    rows = {row["experiment"]: row for row in invoke("experiments", "--json").json}
    assert rows[EXPERIMENT] | {"cells": 8, "pending": 7, "judged": 0, "failed": 1} == rows[EXPERIMENT]
    assert rows[EXPERIMENT]["url"].startswith(reading)
    assert all(name.startswith("tip-bench-") for name in rows)
    table = invoke("experiments").stdout.splitlines()
    assert table[0].split() == ["experiment", "cells", "pending", "judged", "failed", "url"]
    assert any(line.split()[:5] == [EXPERIMENT, "8", "7", "0", "1"] for line in table)
    (row,) = [r for r in csv.DictReader(invoke("experiments", "--format", "csv").stdout.splitlines())
              if r["experiment"] == EXPERIMENT]  # fmt: skip
    assert row["pending"] == "7"


@pytest.mark.process
def test_a_reader_that_leaves_early_is_not_a_failure(reading: str) -> None:
    """As in `tipbench runs list | head -1`, and with a closed stdout."""
    command = [sys.executable, "-m", "tipbench", "runs", "list", "--format", "csv", "--mlflow-url", reading]
    reader, writer = os.pipe()
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    os.close(reader)
    assert process.communicate(timeout=180)[1] == b""
    assert process.returncode == 0
