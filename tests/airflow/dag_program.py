"""Run by Airflow's own Python: tells what the DAG is, or runs the whole of it in one process; JSON into TIPBENCH_TOLD.

python dag_program.py describe
python dag_program.py run '{"models": "baseline:template"}'
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

DAG = "bench_collect"


def _bag() -> Any:
    kind = importlib.import_module("airflow.dag_processing.dagbag").DagBag
    return kind(dag_folder=os.environ["AIRFLOW__CORE__DAGS_FOLDER"])


def describe() -> dict[str, Any]:
    """Import errors, and of each task what matters."""
    importlib.import_module("airflow.sdk")
    importlib.import_module("airflow.providers.standard.operators.hitl")
    seconds = min(_parsing() for _ in range(3))
    bag = _bag()
    dag = bag.dags.get(DAG)
    return {
        "errors": bag.import_errors,
        "seconds": seconds,
        "tipbench": sorted(name for name in sys.modules if name.partition(".")[0] == "tipbench"),
        "dags": sorted(bag.dags),
        "params": sorted(dag.params) if dag else [],
        "defaults": dag.params.dump() if dag else {},
        "schedule": type(dag.timetable).__name__ if dag else "",
        "paused": dag.is_paused_upon_creation if dag else None,
        "tasks": {task.task_id: _task(task) for task in dag.tasks} if dag else {},
    }


def _parsing() -> float:
    began = time.perf_counter()
    with suppress(ValueError):  # a list of hosts that is wrong on purpose
        runpy.run_path(str(Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"]) / "bench_dag.py"))
    return time.perf_counter() - began


def _task(task: Any) -> dict[str, Any]:
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
    bag = _bag()
    dag = bag.dags[DAG]
    importlib.import_module("airflow.models.serialized_dag")
    done = dag.test(run_conf=conf)
    states = [
        {"task": ti.task_id, "map_index": ti.map_index, "state": str(ti.state), "tries": ti.try_number}
        for ti in done.get_task_instances()
    ]
    return {"state": str(done.state), "tasks": states}


if __name__ == "__main__":
    told = describe() if sys.argv[1] == "describe" else run(json.loads(sys.argv[2]))
    Path(os.environ["TIPBENCH_TOLD"]).write_text(json.dumps(told), "utf-8")
