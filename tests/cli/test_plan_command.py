"""`tipbench plan`: what a collect would do, without doing it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from invoke_command import invoke

from support.mlflow_server import free_port
from support.requests import planned
from support.scripted_ollama import Fault, ModelSpec, ScriptedOllama
from tipbench.generate.template import TemplateEngine
from tipbench.http import canonical_url
from tipbench.record.journal import Journal, journal_folder
from tipbench.record.mlflow import find_mlflow
from tipbench.record.run import NewRun, RunKind

SMALL = ("--n-scenarios", "2", "--n-tips", "2", "--num-predict", "64")


@pytest.fixture
def no_usual_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing answers on MLflow's usual port."""
    assert find_mlflow.__kwdefaults__ is not None
    monkeypatch.setitem(find_mlflow.__kwdefaults__, "usual_urls", ())


@pytest.mark.usefixtures("no_usual_mlflow")
def test_a_plan_on_a_fresh_machine_starts_no_mlflow_and_writes_nothing(home: Path) -> None:
    with ScriptedOllama(["alpha:135m", "beta:135m"]) as server:
        ended = invoke("plan", "--models", "alpha:135m,beta:135m", "--ollama-url", server.url)
        assert server.log.calls() == []
    assert (ended.code, ended.stderr) == (0, "")
    assert not home.exists()
    lines = ended.stdout.splitlines()
    assert lines[0] == "tip-bench-auto: suite tips, 8 scenarios, 3 prompts, 5 tips per answer, rubric tip-v1"
    assert lines[2].split() == ["model", "parameters", "memory", "cells", "recorded", "missing", "time"]
    assert lines[4].split()[-2].startswith("~"), "an estimate, as nothing was measured"
    assert lines[4].split()[:7] == ["alpha:135m", "135M", "202", "MiB", "24", "0", "24"]
    assert lines[-2].startswith("48 cells, 0 recorded, 48 to generate; about ")


@pytest.mark.usefixtures("no_usual_mlflow")
def test_a_plan_needs_no_ollama_for_models_without_it() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    ended = invoke("plan", "--models", "baseline:template", "--ollama-url", nowhere, "--json")
    assert ended.code == 0
    assert ended.json["to_generate"] == 8
    assert ended.json["looks"] == [8]


def test_a_plan_counts_journal_entries_as_done(home: Path, mlflow_url: str) -> None:
    cells = planned("baseline:template", TemplateEngine().facts("baseline:template").digest)
    journal = Journal(journal_folder(home, canonical_url(mlflow_url), "tip-bench-waiting"))
    journal.append([finished(cell.key) for cell in cells[:3]])
    journal.close()
    options = ("--models", "baseline:template", "--mlflow-url", mlflow_url, "--experiment", "tip-bench-waiting")
    assert "8 cells, 3 recorded, 5 to generate" in invoke("plan", *options).stdout
    assert "3 finished cells in the journal" in invoke("plan", *options).stdout
    assert invoke("plan", *options, "--json").json["journalled"] == 3


def finished(key: str) -> NewRun:
    return NewRun(RunKind.CELL, uuid.uuid4().hex, "a cell", 1, 2, cell_key=key)


def test_a_plan_counts_recorded_and_failed_cells(mlflow_url: str) -> None:
    with ScriptedOllama(["alpha:135m", "beta:135m"], [Fault("error_line", value=1, calls=(1,))]) as server:
        servers = ("--ollama-url", server.url, "--mlflow-url", mlflow_url, "--experiment", "tip-bench-planned")
        before = invoke("plan", "--models", "alpha:135m,beta:135m", *servers, *SMALL)
        invoke("collect", "--models", "alpha:135m", *servers, *SMALL)
        after = invoke("plan", "--models", "alpha:135m,beta:135m", *servers, *SMALL)
        as_json = invoke("plan", "--models", "alpha:135m,beta:135m", *servers, *SMALL, "--json").json
        other = invoke("plan", "--models", "alpha:135m", *servers, *SMALL, "--seed", "7", "--json").json
    assert "12 cells, 0 recorded, 12 to generate; " in before.stdout
    assert "12 cells, 5 recorded, 7 to generate (1 of them failed before); " in after.stdout
    assert [(model["model"], model["recorded"]) for model in as_json["models"]] == [("alpha:135m", 5), ("beta:135m", 0)]
    assert (as_json["recorded"], as_json["to_generate"], as_json["failed_before"]) == (5, 7, 1)
    assert other["recorded"] == 0


def test_a_plan_of_a_finished_grid_reports_it(mlflow_url: str) -> None:
    options = ("--models", "baseline:template", "--mlflow-url", mlflow_url, "--experiment", "tip-bench-whole", *SMALL)
    assert invoke("collect", *options).code == 0
    assert "\n2 cells, all recorded; nothing to generate\n" in invoke("plan", *options).stdout


def test_a_plan_without_its_mlflow_warns_and_counts_nothing() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ended = invoke("plan", "--models", "baseline:template", "--mlflow-url", url)
    assert ended.code == 0
    assert "8 cells, 0 recorded" in ended.stdout
    assert f"warning: MLflow at {url}" in ended.stderr


@pytest.mark.usefixtures("no_usual_mlflow")
def test_a_plan_shows_refused_models_and_exits_2_unless_they_are_skipped() -> None:
    with ScriptedOllama(["alpha:135m", ModelSpec("x:e2b", params=4_460_000_000)]) as server:
        options = ("plan", "--models", "alpha:135m,x:e2b", "--ollama-url", server.url)
        ended = invoke(*options, "--json")
        skipping = invoke(*options, "--skip-refused")
        alone = invoke("plan", "--models", "x:e2b", "--ollama-url", server.url, "--skip-refused")
    assert (ended.code, skipping.code, alone.code) == (2, 0, 2)
    assert [refusal["model"] for refusal in ended.json["refused"]] == ["x:e2b"]
    assert "refused: x:e2b has 4.46B parameters; the limit is 4B" in skipping.stderr
    assert "24 cells" in skipping.stdout
    assert alone.stdout == "nothing to generate: every model is refused\n"


@pytest.mark.usefixtures("no_usual_mlflow")
def test_without_any_requested_model_plan_and_collect_list_the_installed_ones_with_the_command() -> None:
    with ScriptedOllama(["alpha:135m", "beta:135m", ModelSpec("x:e2b", params=4_460_000_000)]) as server:
        for command in ("plan", "collect"):
            ended = invoke(command, "--ollama-url", server.url, "--n-tips", "3")
            assert ended.code == 2
            assert "Installed and within the limit: alpha:135m, beta:135m." in ended.stderr
            suggested = ended.stderr.strip().splitlines()[-1].split()
            assert suggested[:2] == ["tipbench", command]
        assert invoke("plan", *suggested[2:]).code == 0


@pytest.mark.usefixtures("no_usual_mlflow")
def test_a_plan_shows_what_its_scenarios_can_decide_and_how_long_judging_takes() -> None:
    with ScriptedOllama(["alpha:135m", "beta:135m"]) as server:
        options = ("plan", "--models", "alpha:135m,beta:135m", "--ollama-url", server.url)
        few = invoke(*options, "--n-scenarios", "2").stdout
        eight = invoke(*options, "--json").json["outlook"]
        more = invoke(*options, "--suite", "tips-32", "--n-scenarios", "99")
    assert "2 scenarios cannot decide; at least 6 are needed. Judging 12 answers takes about 10 min." in few
    assert (eight["scenarios"], eight["pairs"], eight["answers"]) == (8, 6, 48)
    assert 2.5 < eight["detectable"] < 4
    assert "32 scenarios find differences of about 1." in more.stdout
    assert "warning: The suite tips-32 has 32 scenarios, fewer than n_scenarios 99" in more.stderr


@pytest.mark.usefixtures("no_usual_mlflow")
def test_a_plan_warns_of_a_model_that_barely_fits() -> None:
    with ScriptedOllama([ModelSpec("huge:3b", params=3_000_000_000, size_bytes=2**50)]) as server:
        ended = invoke("plan", "--models", "huge:3b", "--ollama-url", server.url)
    assert ended.code == 0
    assert "warning: huge:3b needs about" in ended.stderr


def test_a_plan_without_its_ollama_fails_immediately() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ended = invoke("plan", "--ollama-url", url)
    assert (ended.code, ended.stdout) == (1, "")
    assert url in ended.stderr


@pytest.mark.usefixtures("no_usual_mlflow")
def test_a_cap_on_scenarios_covers_every_persona_first() -> None:
    shown = invoke("plan", "--models", "baseline:template", "--n-scenarios", "4", "--json").json
    assert len({scenario.partition("@")[0] for scenario in shown["scenarios"]}) == 4
