"""The DAG file: loads without error and fast, with a complete form, one pool per host, and the right order."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from support.real_airflow import ROOT, DagProgram
from tipbench.plan.collect_config import CollectConfig

FORM = json.loads((ROOT / "dags" / "bench_params.json").read_text("utf-8"))
HOSTS = "AIRFLOW_VAR_TIPBENCH_OLLAMA_HOSTS"
TWO_HOSTS = "gpu-a=http://gpu-a:11434,gpu-b=http://gpu-b:11434"


@pytest.fixture(scope="module")
def parsed(dag_program: DagProgram, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The DAG in each of these environments, in one process: what takes time is to import Airflow."""
    listed, broken, data = (tmp_path_factory.mktemp(name) for name in ("listed", "broken", "data"))
    (data / "tipbench").mkdir()
    quoted = ", ".join(f'"{entry}"' for entry in TWO_HOSTS.split(","))
    for folder in (listed, data / "tipbench"):
        (folder / "tipbench.toml").write_text(f"ollama_hosts = [{quoted}]\n", "utf-8")
    (broken / "tipbench.toml").write_text("ollama_hosts = gpu-a\n", "utf-8")
    environments = {
        "usual": {},
        "two hosts": {HOSTS: TWO_HOSTS},
        "of the environment": {"TIPBENCH_OLLAMA_HOSTS": TWO_HOSTS},
        "of a file": {"TIPBENCH_HOME": str(listed)},
        "of the data folder": {"TIPBENCH_HOME": "", "XDG_DATA_HOME": str(data)},
        "named like tasks": {HOSTS: "collect=http://a:1,share=http://b:1,unload=http://c:1"},
        "without a name": {"TIPBENCH_OLLAMA_HOSTS": "http://gpu-a:11434"},
        "a name twice": {HOSTS: "gpu-a=http://a:1,gpu-a=http://b:1"},
        "with a login": {HOSTS: "gpu-a=http://me:secret@gpu-a:11434"},
        "of a broken file": {"TIPBENCH_HOME": str(broken)},
    }
    return dag_program("describe", json.dumps(environments))


@pytest.fixture(scope="module")
def described(parsed: Any) -> Any:
    return parsed["usual"]


def test_the_form_is_up_to_date() -> None:
    check = [sys.executable, str(ROOT / "airflow" / "form_fields.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_form_has_every_key_of_a_run_and_wait_for_judge() -> None:
    assert set(FORM) == {*CollectConfig.model_fields, "wait_for_judge"}
    assert FORM["skip_refused"]["default"] is True
    assert FORM["wait_for_judge"]["default"] is False


def test_every_default_of_the_form_fits_its_own_schema_and_makes_a_run() -> None:
    for given in FORM.values():
        schema = {key: value for key, value in given.items() if key not in ("default", "description")}
        jsonschema.validate(given["default"], schema)
    defaults = {key: given["default"] for key, given in FORM.items() if given["default"] is not None}
    assert CollectConfig.model_validate({key: defaults[key] for key in defaults if key != "wait_for_judge"})


def test_nothing_of_tipbench_is_imported_at_the_top_of_the_file() -> None:
    tree = ast.parse((ROOT / "dags" / "bench_dag.py").read_text("utf-8"))
    names = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert names
    assert not [name for name in names if "tipbench" in name]


def test_the_dag_loads_without_error_and_without_tipbench(described: Any) -> None:
    assert described["errors"] == {}
    assert described["dags"] == ["bench_collect"]
    assert described["tipbench"] == []


@pytest.mark.parametrize("listed", ["usual", "two hosts", "of a file"])
def test_the_file_parses_in_well_under_a_second(parsed: Any, listed: str) -> None:
    assert parsed[listed]["seconds"] < 0.5


def test_it_runs_on_demand_and_is_not_paused_at_first(described: Any) -> None:
    assert described["schedule"] == "NullTimetable"
    assert described["paused"] is False


def test_airflow_accepts_the_forms_own_defaults(described: Any) -> None:
    assert described["defaults"] == {key: given["default"] for key, given in FORM.items()}


def test_models_take_turns_in_the_pool_of_their_host(described: Any) -> None:
    tasks = described["tasks"]
    assert {name for name, task in tasks.items() if task["pool"] == "ollama"} == {"collect", "unload"}
    assert tasks["collect"]["kind"] == "DecoratedMappedOperator"
    assert tasks["collect"]["retries"] >= 2
    assert {name for name, task in tasks.items() if task["teardown"]} == {"unload", "outcome"}


def test_the_tasks_come_in_the_order_of_the_flow(described: Any) -> None:
    after = {name: task["after"] for name, task in described["tasks"].items()}
    assert after == {
        "plan": [],
        "share": ["plan"],
        "collect": ["share"],
        "unload": ["collect"],
        "export_for_judge": ["collect"],
        "wait_for_judge": ["export_for_judge"],
        "compare": ["export_for_judge", "wait_for_judge"],
        "outcome": ["collect", "compare"],
    }


@pytest.mark.parametrize("listed", ["two hosts", "of the environment", "of a file", "of the data folder"])
def test_several_hosts_have_a_collect_an_unload_a_pool_and_a_queue_each(parsed: Any, listed: str) -> None:
    tasks = parsed[listed]["tasks"]
    for name in ("gpu-a", "gpu-b"):
        for kind in ("collect", "unload"):
            assert (tasks[f"{kind}_on_{name}"]["pool"], tasks[f"{kind}_on_{name}"]["queue"]) == (f"ollama_{name}", name)
    assert tasks["export_for_judge"]["after"] == ["collect_on_gpu-a", "collect_on_gpu-b"]


def test_a_host_may_have_the_name_of_a_task(parsed: Any) -> None:
    assert {"share_on_collect", "share_on_share", "unload_on_unload"} <= set(parsed["named like tasks"]["tasks"])


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("without a name", ["TIPBENCH_OLLAMA_HOSTS takes NAME=URL", "gpu-a=http://gpu-a:11434"]),
        ("a name twice", ["tipbench_ollama_hosts", "'gpu-a' twice", "a name of its own"]),
        ("with a login", ["without a login", "'gpu-a=http://…@gpu-a:11434'"]),
        ("of a broken file", ["tipbench.toml cannot be read", "line 1", "Correct it"]),
    ],
)
def test_an_unreadable_list_of_hosts_is_an_import_error_with_a_fix(parsed: Any, listed: str, words: list[str]) -> None:
    (error,) = parsed[listed]["errors"].values()
    last = error.strip().splitlines()[-1]
    assert all(word in last for word in words), last
    assert "secret" not in error
