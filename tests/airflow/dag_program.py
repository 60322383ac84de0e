"""Run by Airflow's own Python: describes the DAG or runs it in one process; writes JSON to TIPBENCH_OUTPUT.

python dag_program.py describe '{"default": {}, "two hosts": {"TIPBENCH_OLLAMA_HOSTS": "a=http://a:1,b=http://b:1"}}'
python dag_program.py run '{"models": "baseline:template"}'
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

DAG = "bench_collect"


def _load_dags() -> Any:
    bag_class = importlib.import_module("airflow.dag_processing.dagbag").DagBag
    return bag_class(dag_folder=os.environ["AIRFLOW__CORE__DAGS_FOLDER"])


def describe(environments: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Describe the DAG with each of these sets of environment variables."""
    importlib.import_module("airflow.sdk")
    importlib.import_module("airflow.providers.standard.operators.hitl")
    original = dict(os.environ)
    description = {}
    for name, extra in environments.items():
        os.environ.clear()
        os.environ.update(original, **extra)
        description[name] = _describe_dag()
    return description


def _describe_dag() -> dict[str, Any]:
    """Import errors, and the properties of each task."""
    seconds = min(_parse_seconds() for _ in range(3))
    bag = _load_dags()
    dag = bag.dags.get(DAG)
    return {
        "errors": bag.import_errors,
        "seconds": seconds,
        "tipbench": sorted(name for name in sys.modules if name.partition(".")[0] == "tipbench"),
        "dags": sorted(bag.dags),
        "params": sorted(dag.params) if dag else [],
        "defaults": dag.params.validate() if dag else {},
        "schedule": type(dag.timetable).__name__ if dag else "",
        "paused": dag.is_paused_upon_creation if dag else None,
        "tasks": {task.task_id: _describe_task(task) for task in dag.tasks} if dag else {},
    }


def _parse_seconds() -> float:
    began = time.perf_counter()
    with suppress(ValueError):  # some tests set an invalid list of hosts
        runpy.run_path(str(Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"]) / "bench_dag.py"))
    return time.perf_counter() - began


def _describe_task(task: Any) -> dict[str, Any]:
    return {
        "kind": type(task).__name__,
        "pool": task.pool,
        "queue": task.queue,
        "after": sorted(task.upstream_task_ids),
        "rule": str(task.trigger_rule),
        "retries": task.retries,
        "teardown": task.is_teardown,
    }


def run(conf: dict[str, Any]) -> dict[str, Any]:
    """`dag.test()`: every task of the DAG in this process."""
    bag = _load_dags()
    dag = bag.dags[DAG]
    importlib.import_module("airflow.models.serialized_dag")
    done = dag.test(run_conf=conf)
    states = [
        {"task": ti.task_id, "map_index": ti.map_index, "state": str(ti.state), "tries": ti.try_number}
        for ti in done.get_task_instances()
    ]
    return {"state": str(done.state), "tasks": states, "xcoms": _find_xcoms(done.run_id)}


def _find_xcoms(run_id: str) -> list[dict[str, Any]]:
    """Every XCom of the run."""
    model = importlib.import_module("airflow.models.xcom").XComModel
    create_session = importlib.import_module("airflow.utils.session").create_session
    with create_session() as session:
        found = session.query(model).filter(model.dag_id == DAG, model.run_id == run_id)
        return [{"task": each.task_id, "key": each.key, "value": each.value} for each in found]


if __name__ == "__main__":
    command, value = sys.argv[1], json.loads(sys.argv[2])
    output = describe(value) if command == "describe" else run(value)
    Path(os.environ["TIPBENCH_OUTPUT"]).write_text(json.dumps(output), "utf-8")
