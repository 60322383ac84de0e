"""The DAG file: loads without error and fast, with a complete form, one pool per host, and the right order."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from support.real_airflow import ROOT, DagProgram
from tipbench.plan.config import CollectConfig

FORM = json.loads((ROOT / "dags" / "bench_params.json").read_text("utf-8"))
TWO_HOSTS = "gpu-a=http://gpu-a:11434,gpu-b=http://gpu-b:11434"


@pytest.fixture(scope="module")
def told(dag_program: DagProgram) -> Any:
    return dag_program("describe")


def test_the_form_is_up_to_date() -> None:
    check = [sys.executable, str(ROOT / "docs" / "dag_params.py"), "--check"]
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


def test_the_dag_loads_without_error_and_without_tipbench(told: Any) -> None:
    assert told["errors"] == {}
    assert told["dags"] == ["bench_collect"]
    assert told["tipbench"] == []


def test_the_file_parses_in_well_under_a_second(told: Any) -> None:
    assert told["seconds"] < 0.5


def test_it_runs_on_demand_and_is_not_paused_at_first(told: Any) -> None:
    assert told["schedule"] == "NullTimetable"
    assert told["paused"] is False
    assert told["defaults"]["skip_refused"] is True


def test_models_take_turns_in_the_pool_of_their_host(told: Any) -> None:
    tasks = told["tasks"]
    assert {name for name, task in tasks.items() if task["pool"] == "ollama"} == {"collect", "unload"}
    assert tasks["collect"]["kind"] == "DecoratedMappedOperator"
    assert tasks["collect"]["retries"] >= 2
    assert {name for name, task in tasks.items() if task["teardown"]} == {"unload", "outcome"}


def test_the_tasks_come_in_the_order_of_the_flow(told: Any) -> None:
    after = {name: task["after"] for name, task in told["tasks"].items()}
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


def test_several_hosts_have_a_collect_an_unload_a_pool_and_a_queue_each(dag_program: DagProgram) -> None:
    tasks = dag_program("describe", AIRFLOW_VAR_TIPBENCH_OLLAMA_HOSTS=TWO_HOSTS)["tasks"]
    for name in ("gpu-a", "gpu-b"):
        for kind in ("collect", "unload"):
            assert (tasks[f"{kind}_on_{name}"]["pool"], tasks[f"{kind}_on_{name}"]["queue"]) == (f"ollama_{name}", name)
    assert tasks["export_for_judge"]["after"] == ["collect_on_gpu-a", "collect_on_gpu-b"]


def test_the_hosts_may_stand_in_tipbench_toml(dag_program: DagProgram, tmp_path: Path) -> None:
    listed = ", ".join(f'"{entry}"' for entry in TWO_HOSTS.split(","))
    (tmp_path / "tipbench.toml").write_text(f"ollama_hosts = [{listed}]\n", "utf-8")
    tasks = dag_program("describe", TIPBENCH_HOME=str(tmp_path))["tasks"]
    assert {"collect_on_gpu-a", "collect_on_gpu-b"} <= set(tasks)


def test_a_host_without_a_name_is_an_import_error_that_says_how_to_write_it(dag_program: DagProgram) -> None:
    (error,) = dag_program("describe", AIRFLOW_VAR_TIPBENCH_OLLAMA_HOSTS="http://gpu-a:11434")["errors"].values()
    assert "gpu-a=http://gpu-a:11434" in error
