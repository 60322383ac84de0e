"""The functions that Airflow's tasks call with a conf, and the plain values that they return."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invoke_command import invoke

from support.experiments import find_experiment, recorded_runs
from support.judging import SheetDriver
from support.scripted_ollama import Fault, ModelSpec, ScriptedOllama
from tipbench.cli.airflow_tasks import (
    ChildProcess,
    assign_models,
    choose_servers,
    collect_model,
    compare,
    export_for_judge,
    plan_models,
    read_conf,
    unload_left_behind,
)
from tipbench.compare.leaderboard import BOARD
from tipbench.errors import ModelRefused, NotEnoughData, OllamaUnavailable, TipbenchError, UsageError
from tipbench.plan.collect_config import make_config
from tipbench.record.events import Collected, Failure, event_line, parse_line
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun
from tipbench.settings import load_settings

ALPHA, BETA = "alpha:135m", "beta:135m"
ONE_HOST = {"collect": None}
DEAD = "http://127.0.0.1:1"
HOSTS = {"collect_on_a": "http://gpu-a:11434", "collect_on_b": "http://gpu-b:11434"}


@pytest.fixture
def ollama_two() -> Iterator[ScriptedOllama]:
    models: list[ModelSpec | str] = [ALPHA, BETA, ModelSpec("huge:70b", params=70_000_000_000)]
    with ScriptedOllama(models=models) as server:
        yield server


@pytest.fixture
def conf(mlflow_url: str, ollama_two: ScriptedOllama, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A conf with the servers that the worker's settings allow."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    monkeypatch.setenv("OLLAMA_HOST", ollama_two.url)
    monkeypatch.setenv("TIPBENCH_PANEL_URLS", DEAD)
    return {
        "models": [ALPHA, BETA],
        "prompts": "v1",
        "n_tips": 2,
        "n_scenarios": 2,
        "num_predict": 64,
        "server_wait_s": 0,
        "experiment": f"tip-bench-scheduled-{uuid4().hex[:8]}",
        "ollama_url": ollama_two.url,
        "mlflow_url": mlflow_url,
        "skip_refused": True,
        "wait_for_judge": False,
    }


def runs(conf: dict[str, Any], kind: str) -> list[StoredRun]:
    return recorded_runs(conf["mlflow_url"], conf["experiment"], kind)


def judge_cells(conf: dict[str, Any]) -> None:
    with MlflowStore(conf["mlflow_url"]) as store:
        SheetDriver(store, find_experiment(store, conf["experiment"])).judge_as("anna")


def scenarios_by_model(conf: dict[str, Any]) -> dict[str, int]:
    """The models of the newest board, with the number of scenarios in their rows."""
    newest = max(runs(conf, "leaderboard"), key=lambda run: run.start_ms)
    with MlflowStore(conf["mlflow_url"]) as store:
        board = json.loads(store.get(newest.run_id)[1][BOARD])
    return {row["model"]: row["n_scenarios"] for row in board["standings"]}


def collect_cells(conf: dict[str, Any]) -> dict[str, Any]:
    """Run the collect of the tasks with the command line; returns the conf."""
    names = ("prompts", "n_tips", "n_scenarios", "num_predict", "experiment", "ollama_url", "mlflow_url", "suite")
    options = [f"--{name.replace('_', '-')}={conf[name]}" for name in names if name in conf]
    result = invoke("collect", f"--models={','.join(conf['models'])}", *options)
    assert result.code == 0, result.stderr
    return conf


def test_models_may_be_a_list_or_a_text(conf: dict[str, Any]) -> None:
    as_list = read_conf(conf, load_settings())
    as_text = read_conf({**conf, "models": f"{ALPHA}, {BETA}"}, load_settings())
    assert as_list == as_text


def test_an_unknown_key_or_an_invalid_value_is_refused_by_its_key(conf: dict[str, Any]) -> None:
    for wrong, message in (
        ({"temprature": 0.1}, "temprature"),
        ({"n_tips": 0}, "conf n_tips"),
        ({"wait_for_judge": "yes"}, "wait_for_judge"),
    ):
        with pytest.raises(UsageError, match=message):
            read_conf({**conf, **wrong}, load_settings())


def test_a_login_in_an_address_is_refused_and_not_repeated(conf: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="login") as caught:
        read_conf({**conf, "mlflow_url": "http://me:secret@mlflow:5000"}, load_settings())
    assert "secret" not in str(caught.value)


def test_without_an_address_only_the_workers_address_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "gpu-box:11500")
    monkeypatch.setenv("TIPBENCH_N_TIPS", "9")
    config = read_conf({"ollama_url": None, "mlflow_url": None}, load_settings())
    assert config.ollama_url == "http://gpu-box:11500"
    assert config.n_tips == 5


def test_an_empty_address_in_a_form_counts_as_unset(conf: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "gpu-box:11500")
    assert read_conf({**conf, "ollama_url": ""}, load_settings()).ollama_url == "http://gpu-box:11500"
    with ScriptedOllama(models=[ALPHA]) as first, ScriptedOllama(models=[BETA]) as second:
        hosts = {"collect_on_a": first.url, "collect_on_b": second.url}
        assert plan_models({**conf, "ollama_url": ""}, hosts)["collect_on_b"] == [BETA]


def test_the_plan_gives_each_task_its_models(conf: dict[str, Any]) -> None:
    planned = plan_models(conf, ONE_HOST)
    assert planned["collect"] == [ALPHA, BETA]
    assert (planned["cells"], planned["to_generate"], planned["refused"]) == (4, 4, [])
    assert runs(conf, "cell") == []


def test_refused_and_missing_models_become_runs_with_their_reasons(conf: dict[str, Any]) -> None:
    for _ in range(2):
        planned = plan_models({**conf, "models": f"huge:70b,gone:1b,{ALPHA}"}, ONE_HOST)
    assert planned["collect"] == [ALPHA]
    assert len(runs(conf, "refused")) == 2, "a plan made again keeps a refusal once"
    reasons = {run.params["model"]: run.tags["reason"] for run in runs(conf, "refused")}
    assert "70.00B" in reasons["huge:70b"]
    assert "ollama pull gone:1b" in reasons["gone:1b"]


def test_with_no_model_left_the_plan_fails_and_records_the_reasons(conf: dict[str, Any]) -> None:
    with pytest.raises(ModelRefused, match="gone:1b"):
        plan_models({**conf, "models": "gone:1b"}, ONE_HOST)
    assert len(runs(conf, "refused")) == 1


def test_refusals_are_in_the_events_that_the_panel_reads(
    conf: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = plan_models({**conf, "models": f"gone:1b,{ALPHA}"}, ONE_HOST)
    events = [known[1] for line in capsys.readouterr().out.encode().splitlines() if (known := parse_line(line))]
    reasons = tuple(each["reason"] for each in planned["refused"])
    assert len(reasons) == 1
    assert events == [Collected(conf["experiment"], 0, 0, 0, 0, reasons)]


def test_without_skip_refused_one_refused_model_stops_the_run(conf: dict[str, Any]) -> None:
    with pytest.raises(ModelRefused, match="skip_refused"):
        plan_models({**conf, "models": f"gone:1b,{ALPHA}", "skip_refused": False}, ONE_HOST)


def test_two_names_of_one_model_are_collected_once(conf: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    alpha = ModelSpec(ALPHA)
    with ScriptedOllama(models=[alpha, ModelSpec("alias:135m", digest=alpha.manifest, blob=alpha.full)]) as server:
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        planned = plan_models({**conf, "models": f"{ALPHA},alias:135m", "ollama_url": server.url}, ONE_HOST)
    assert planned["collect"] == [ALPHA]


def test_a_server_that_the_worker_neither_configures_nor_lists_is_refused(
    conf: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, other in (("mlflow_url", "http://evil.example:5000"), ("ollama_url", "http://evil.example:11434")):
        with pytest.raises(UsageError, match=rf"conf {key} takes a server that the worker allows: .*evil\.example"):
            plan_models({**conf, key: other}, ONE_HOST)
        with pytest.raises(UsageError, match="evil"):
            collect_model({**conf, key: other}, ALPHA, None)
    with pytest.raises(UsageError, match="evil"):
        compare({**conf, "mlflow_url": "http://evil.example:5000"})
    monkeypatch.setenv("TIPBENCH_PANEL_URLS", "http://second.example:11434")
    monkeypatch.setenv("TIPBENCH_PANEL_MLFLOW_URLS", "http://second.example:5000")
    listed = {**conf, "ollama_url": "http://second.example:11434", "mlflow_url": "http://second.example:5000"}
    assert read_conf(listed, load_settings(), uses_conf_ollama=True).mlflow_url == "http://second.example:5000"


def test_an_unavailable_server_is_retried(conf: dict[str, Any]) -> None:
    with pytest.raises(OllamaUnavailable):
        plan_models({**conf, "ollama_url": DEAD}, ONE_HOST)
    with pytest.raises(OllamaUnavailable):
        plan_models({**conf, "ollama_url": None}, {"collect_on_a": DEAD, "collect_on_b": DEAD})


def test_each_host_gets_the_models_it_has(conf: dict[str, Any]) -> None:
    with ScriptedOllama(models=[ALPHA]) as first, ScriptedOllama(models=[BETA]) as second:
        hosts = {"collect_on_a": first.url, "collect_on_b": second.url}
        planned = plan_models({**conf, "ollama_url": None}, hosts)
    assert (planned["collect_on_a"], planned["collect_on_b"], planned["refused"]) == ([ALPHA], [BETA], [])


def test_models_that_all_hosts_have_are_distributed(conf: dict[str, Any]) -> None:
    with ScriptedOllama(models=[ALPHA, BETA]) as first, ScriptedOllama(models=[ALPHA, BETA]) as second:
        planned = plan_models({**conf, "ollama_url": None}, {"collect_on_a": first.url, "collect_on_b": second.url})
    assert {len(planned["collect_on_a"]), len(planned["collect_on_b"])} == {1}


def test_an_unavailable_host_is_skipped_when_the_others_have_every_model(conf: dict[str, Any]) -> None:
    with ScriptedOllama(models=[ALPHA, BETA]) as only:
        hosts = {"collect_on_a": DEAD, "collect_on_b": only.url}
        planned = plan_models({**conf, "ollama_url": None}, hosts)
    assert (planned["collect_on_a"], planned["collect_on_b"]) == ([], [ALPHA, BETA])


def test_a_model_that_only_an_unavailable_host_may_have_is_refused_and_the_others_run(conf: dict[str, Any]) -> None:
    with ScriptedOllama(models=[ALPHA]) as only:
        hosts = {"collect_on_a": DEAD, "collect_on_b": only.url}
        planned = plan_models({**conf, "ollama_url": None}, hosts)
        with pytest.raises(OllamaUnavailable):
            plan_models({**conf, "ollama_url": None, "skip_refused": False}, hosts)
    assert (planned["collect_on_a"], planned["collect_on_b"]) == ([], [ALPHA])
    (refused_run,) = runs(conf, "refused")
    assert refused_run.params["model"] == BETA
    assert DEAD in refused_run.tags["reason"]


def test_a_run_may_name_one_listed_host() -> None:
    config = make_config({"ollama_url": "http://gpu-b:11434/"})
    assert choose_servers(config, HOSTS, url_in_conf=True) == {"collect_on_b": "http://gpu-b:11434"}


def test_a_host_that_is_not_listed_is_refused() -> None:
    with pytest.raises(UsageError, match="ollama_hosts"):
        choose_servers(make_config({"ollama_url": "http://elsewhere:11434"}), HOSTS, url_in_conf=True)


def test_a_loopback_address_in_the_request_is_ignored() -> None:
    config = make_config({"ollama_url": "http://localhost:11434"})
    assert choose_servers(config, HOSTS, url_in_conf=True) == HOSTS


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.floats(0.1, 9.0), min_size=1, max_size=12))
def test_each_model_has_one_host_and_hosts_have_similar_loads(sizes: dict[str, float]) -> None:
    tasks = dict.fromkeys(sizes, ("x", "y"))
    assigned = assign_models(sizes, tasks)
    assert assigned.keys() == sizes.keys()
    loads = [sum(size for model, size in sizes.items() if assigned[model] == task) for task in ("x", "y")]
    assert abs(loads[0] - loads[1]) <= max(sizes.values()) + 1e-9
    assert assign_models(dict(reversed(sizes.items())), tasks) == assigned


@pytest.mark.process
def test_a_collect_prints_messages_and_events_by_line_and_returns_its_totals(
    conf: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
        result = collect_model(conf, ALPHA, None)
    assert (result["model"], result["cells"], result["generated"], result["failed"]) == (ALPHA, 2, 2, 0)
    assert all(text.endswith("\n") for text in written)
    lines = "".join(written).splitlines()
    events = [json.loads(line)["event"] for line in lines if line.startswith('{"at"')]
    assert events[0] == "started"
    assert events[-1] == "exit"
    assert events.count("cell_finished") == 2
    assert any(line.startswith("MLflow: ") for line in lines)
    again = collect_model(conf, ALPHA, None)
    assert (again["generated"], again["recorded_before"]) == (0, 2)
    results = [plan_models(conf, ONE_HOST), result, export_for_judge(conf), compare(conf)]
    assert str(home.parent) not in json.dumps(results), "no local path is passed on"


def test_output_of_a_command_is_not_parsed_as_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    forged = event_line(Failure("forged"), 1.0).decode().rstrip()
    child = ChildProcess([], {})
    child._read_message(forged.encode() + b"\n")
    child._read_message(b"a plain word\n")
    assert capsys.readouterr().out == f"| {forged}\na plain word\n"


@pytest.mark.process
def test_a_model_deleted_after_the_plan_is_not_retried(
    conf: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="gone:1b is not on the Ollama server"):
        collect_model(conf, "gone:1b", None)
    assert capsys.readouterr().out.count('"event": "failure"') == 1


@pytest.mark.process
def test_cells_that_fail_fail_the_task_while_the_good_ones_are_judged_and_ranked(
    conf: dict[str, Any], ollama_two: ScriptedOllama, capsys: pytest.CaptureFixture[str]
) -> None:
    ollama_two.add_faults(Fault("status", model=ALPHA, value=400, times=1))
    with pytest.raises(TipbenchError, match="1 of 2 cells failed") as caught:
        collect_model(conf, ALPHA, None)
    assert not isinstance(caught.value, UsageError)
    assert capsys.readouterr().out.count('"event": "failure"') == 1
    collect_cells({**conf, "models": [BETA]})
    result = export_for_judge(conf)
    assert (result["pending"], result["failed"]) == (3, 1)
    judge_cells(conf)
    compared = compare(conf)
    assert (compared["judged"], compared["pending"], compared["failed"]) == (3, 0, 1)
    assert scenarios_by_model(conf) == {ALPHA: 1, BETA: 2}
    assert collect_model(conf, ALPHA, None)["generated"] == 1, "another try makes up for the failed cell"
    result = export_for_judge(conf)
    assert (result["pending"], result["failed"]) == (1, 0)


@pytest.mark.process
def test_weights_of_a_dead_collect_are_unloaded(conf: dict[str, Any], home: Path, ollama_two: ScriptedOllama) -> None:
    ollama_two.load_foreign(ALPHA)
    leave_model_loaded(home, ollama_two.url, ModelSpec(ALPHA).manifest)
    assert unload_left_behind(conf, None)["unloaded"] == ALPHA
    assert ollama_two.resident == ()
    assert unload_left_behind(conf, None)["unloaded"] is None


def test_weights_of_another_client_stay_in_memory(conf: dict[str, Any], ollama_two: ScriptedOllama) -> None:
    ollama_two.load_foreign(BETA)
    assert unload_left_behind(conf, None) == {"unloaded": None, "in_use": False}
    assert len(ollama_two.resident) == 1


def leave_model_loaded(home: Path, url: str, digest: str) -> None:
    program = (
        "import os, sys; from pathlib import Path; from tipbench.http import canonical_url; "
        "from tipbench.files import ResourceLock\n"
        "lock = ResourceLock(Path(sys.argv[1]), f'Ollama at {canonical_url(sys.argv[2])}', 'a collect')\n"
        f"lock.acquire(wait=False, report=print); lock.note_loaded({ALPHA!r}, sys.argv[3]); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(home), url, digest], check=False)


def test_the_export_has_this_runs_pending_cells_only_and_is_found_again(conf: dict[str, Any]) -> None:
    collect_cells(conf)
    collect_cells({**conf, "models": [ALPHA], "prompts": "v2-mentor"})
    result = export_for_judge(conf)
    assert (result["pending"], result["judged"], result["experiment"]) == (4, 0, conf["experiment"])
    assert export_for_judge(conf) == result
    (sheet,) = runs(conf, "judging")
    assert sheet.tags["sheet"] == result["sheet"]
    assert sheet.metrics["n_cells"] == 4
    assert len(result["sha256"]) == 64
    compared = compare(conf)
    assert (compared["pending"], compared["judged"], compared["leader"]) == (4, 0, None)
    (board,) = runs(conf, "leaderboard")
    assert board.run_id == compared["board_run"]


def test_answers_of_an_older_build_of_a_model_are_not_this_runs(
    conf: dict[str, Any], ollama_two: ScriptedOllama
) -> None:
    own = collect_cells({**conf, "models": [ALPHA]})
    ollama_two.add_model(ModelSpec(ALPHA, digest="f" * 64))
    collect_cells(own)
    assert len(runs(conf, "cell")) == 4
    assert export_for_judge(own)["pending"] == 2


def test_an_export_without_answers_refers_to_the_logs(conf: dict[str, Any]) -> None:
    plan_models(conf, ONE_HOST)
    with pytest.raises(NotEnoughData, match="logs of the collect tasks"):
        export_for_judge(conf)


def test_compare_ranks_under_this_runs_conditions_and_counts_its_own_cells(conf: dict[str, Any]) -> None:
    collect_cells(conf)
    judge_cells(conf)
    collect_cells({**conf, "models": [ALPHA], "n_tips": 3})
    for models, judged in (([ALPHA, BETA], 4), ([BETA], 2)):
        result = compare({**conf, "models": models})
        assert (result["judged"], result["pending"]) == (judged, 0)
        assert scenarios_by_model(conf) == {ALPHA: 2, BETA: 2}


def test_a_suite_may_be_a_folder_and_cells_of_an_older_prompt_text_are_not_this_runs(
    conf: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "suite"
    (folder / "prompts").mkdir(parents=True)
    (folder / "suite.toml").write_text('name = "own"\ntitle = "Own"\nextends = "tips"\n', "utf-8")
    own = {**conf, "suite": str(folder), "prompts": "v9", "models": [ALPHA]}
    for text in ("Be kind.", "Be brief."):
        (folder / "prompts" / "v9.md").write_text(f"# system\n{text}\n# user\n{{{{ n_tips }}}} tips\n", "utf-8")
        with pytest.raises(NotEnoughData):
            export_for_judge(own)
        assert plan_models(own, ONE_HOST)["to_generate"] == 2
        collect_cells(own)
        assert export_for_judge(own)["pending"] == 2
    assert len(runs(conf, "cell")) == 4
