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
def dags(dag_program: DagProgram, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The DAG with each of these environments, from one process: importing Airflow takes seconds."""
    valid, broken, data = (tmp_path_factory.mktemp(name) for name in ("valid", "broken", "data"))
    (data / "tipbench").mkdir()
    quoted = ", ".join(f'"{entry}"' for entry in TWO_HOSTS.split(","))
    for folder in (valid, data / "tipbench"):
        (folder / "tipbench.toml").write_text(f"ollama_hosts = [{quoted}]\n", "utf-8")
    (broken / "tipbench.toml").write_text("ollama_hosts = gpu-a\n", "utf-8")
    environments = {
        "default": {},
        "two hosts": {HOSTS: TWO_HOSTS},
        "in the environment": {"TIPBENCH_OLLAMA_HOSTS": TWO_HOSTS},
        "in a file": {"TIPBENCH_HOME": str(valid)},
        "in the data folder": {"TIPBENCH_HOME": "", "XDG_DATA_HOME": str(data)},
        "named like tasks": {HOSTS: "collect=http://a:1,share=http://b:1,unload=http://c:1"},
        "without a name": {"TIPBENCH_OLLAMA_HOSTS": "http://gpu-a:11434"},
        "a name twice": {HOSTS: "gpu-a=http://a:1,gpu-a=http://b:1"},
        "with a login": {HOSTS: "gpu-a=http://me:secret@gpu-a:11434"},
        "in a broken file": {"TIPBENCH_HOME": str(broken)},
    }
    return dag_program("describe", json.dumps(environments))


@pytest.fixture(scope="module")
def dag(dags: Any) -> Any:
    return dags["default"]


def test_the_form_is_up_to_date() -> None:
    check = [sys.executable, str(ROOT / "airflow" / "form_fields.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_form_has_every_key_of_a_run_and_wait_for_judge() -> None:
    assert set(FORM) == {*CollectConfig.model_fields, "wait_for_judge"}
    assert FORM["skip_refused"]["default"] is True
    assert FORM["wait_for_judge"]["default"] is False


def test_every_default_of_the_form_fits_its_own_schema_and_makes_a_run() -> None:
    for field in FORM.values():
        schema = {key: value for key, value in field.items() if key not in ("default", "description")}
        jsonschema.validate(field["default"], schema)
    defaults = {key: field["default"] for key, field in FORM.items() if field["default"] is not None}
    assert CollectConfig.model_validate({key: defaults[key] for key in defaults if key != "wait_for_judge"})


def test_nothing_of_tipbench_is_imported_at_the_top_of_the_file() -> None:
    tree = ast.parse((ROOT / "dags" / "bench_dag.py").read_text("utf-8"))
    names = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert names
    assert not [name for name in names if "tipbench" in name]


def test_the_dag_loads_without_error_and_without_tipbench(dag: Any) -> None:
    assert dag["errors"] == {}
    assert dag["dags"] == ["bench_collect"]
    assert dag["tipbench"] == []


@pytest.mark.parametrize("environment", ["default", "two hosts", "in a file"])
def test_the_file_is_parsed_in_less_than_half_a_second(dags: Any, environment: str) -> None:
    assert dags[environment]["seconds"] < 0.5


def test_the_dag_runs_on_demand_and_is_not_paused_at_first(dag: Any) -> None:
    assert dag["schedule"] == "NullTimetable"
    assert dag["paused"] is False


def test_airflow_accepts_the_forms_own_defaults(dag: Any) -> None:
    assert dag["defaults"] == {key: field["default"] for key, field in FORM.items()}


def test_models_take_turns_in_the_pool_of_their_host(dag: Any) -> None:
    tasks = dag["tasks"]
    assert {name for name, task in tasks.items() if task["pool"] == "ollama"} == {"collect", "unload"}
    assert tasks["collect"]["kind"] == "DecoratedMappedOperator"
    assert tasks["collect"]["retries"] >= 2
    assert {name for name, task in tasks.items() if task["teardown"]} == {"unload", "outcome"}


def test_the_tasks_come_in_the_order_of_the_flow(dag: Any) -> None:
    after = {name: task["after"] for name, task in dag["tasks"].items()}
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


@pytest.mark.parametrize("environment", ["two hosts", "in the environment", "in a file", "in the data folder"])
def test_several_hosts_have_a_collect_an_unload_a_pool_and_a_queue_each(dags: Any, environment: str) -> None:
    tasks = dags[environment]["tasks"]
    for name in ("gpu-a", "gpu-b"):
        for kind in ("collect", "unload"):
            assert (tasks[f"{kind}_on_{name}"]["pool"], tasks[f"{kind}_on_{name}"]["queue"]) == (f"ollama_{name}", name)
    assert tasks["export_for_judge"]["after"] == ["collect_on_gpu-a", "collect_on_gpu-b"]


def test_a_host_may_have_the_name_of_a_task(dags: Any) -> None:
    assert {"share_on_collect", "share_on_share", "unload_on_unload"} <= set(dags["named like tasks"]["tasks"])


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("without a name", ["TIPBENCH_OLLAMA_HOSTS takes NAME=URL", "gpu-a=http://gpu-a:11434"]),
        ("a name twice", ["tipbench_ollama_hosts", "'gpu-a' twice", "a name of its own"]),
        ("with a login", ["without a login", "'gpu-a=http://…@gpu-a:11434'"]),
        ("in a broken file", ["tipbench.toml cannot be read", "line 1", "Correct it"]),
    ],
)
def test_an_invalid_list_of_hosts_is_an_import_error_with_a_fix(dags: Any, environment: str, words: list[str]) -> None:
    (error,) = dags[environment]["errors"].values()
    last = error.strip().splitlines()[-1]
    assert all(word in last for word in words), last
    assert "secret" not in error
