"""DAG `bench_collect`: a benchmark on demand, equivalent to `tipbench collect`, `judge export` and `compare`.

    plan → collect (a task per model, one at a time on each Ollama host) → export_for_judge → [wait_for_judge] → compare

The tasks are implemented in `tipbench.cli.airflow_tasks`, which is imported when they run, because Airflow parses this
file repeatedly. The trigger form is bench_params.json, which `airflow/form_fields.py` generates. Each
Ollama host needs a pool with one slot: `ollama`, or `ollama_NAME` for each host in the Airflow variable
`tipbench_ollama_hosts` (or in TIPBENCH_OLLAMA_HOSTS, or in tipbench.toml); see docs/operations.md.
"""  # noqa: INP001 - Airflow loads it by path

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import Param, TriggerRule, Variable, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

HOSTS_VARIABLE = "tipbench_ollama_hosts"
HOSTS_SETTING = "ollama_hosts"
PARAMS = json.loads(Path(__file__).with_name("bench_params.json").read_text("utf-8"))
RETRY = {"retries": 3, "retry_delay": timedelta(seconds=10)}
RETRY_COLLECT = {
    "retries": 3,
    "retry_delay": timedelta(seconds=30),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(minutes=10),
    "weight_rule": "absolute",
}
# The higher priority of an unload lets it run before the collect tasks of other runs in the same pool. With the weight
# rule `absolute`, the priority of a task does not depend on the number of tasks after it.
RETRY_UNLOAD = {**RETRY, "priority_weight": 2, "weight_rule": "absolute"}


def listed_hosts() -> dict[str, str]:
    """Return the Ollama hosts by name, from comma-separated NAME=URL; empty if runs use the server of their conf."""
    source, text = _hosts_text()
    hosts: dict[str, str] = {}
    for part in text.split(","):
        entry = part.strip()
        if not entry:
            continue
        name, _, url = entry.partition("=")
        shown = re.sub("//.*@", "//…@", entry)[:80]
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name) or not re.fullmatch(r"https?://[^@\s]+", url):
            raise ValueError(f"{source} takes NAME=URL without a login, as gpu-a=http://gpu-a:11434 (got {shown!r})")
        if name in hosts:
            raise ValueError(f"{source} has {name!r} twice; give each host a name of its own (got {shown!r})")
        hosts[name] = url
    return hosts


def _hosts_text() -> tuple[str, str]:
    """Return where the hosts are configured, and their text. An unreadable Airflow variable counts as unset."""
    if text := Variable.get(HOSTS_VARIABLE, default=""):
        return f"The Airflow variable {HOSTS_VARIABLE}", text
    if text := os.environ.get("TIPBENCH_OLLAMA_HOSTS"):
        return "TIPBENCH_OLLAMA_HOSTS", text
    # The home folder is found as in tipbench.settings.
    local_home = Path(".tipbench")
    data_home = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share", "tipbench")
    home = os.environ.get("TIPBENCH_HOME") or (local_home if local_home.is_dir() else data_home)
    for folder in (Path.cwd(), Path(home).expanduser()):
        file = folder / "tipbench.toml"
        try:
            value = tomllib.loads(file.read_text("utf-8")).get(HOSTS_SETTING)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as exc:
            raise ValueError(f"{file} cannot be read: {exc}. Correct it, or remove it.") from exc
        if value:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            return f"{HOSTS_SETTING} in {file}", text
    return "", ""


def task_id_of(kind: str, host: str) -> str:
    """Return the id of a host's task; `host` is empty if no hosts are listed."""
    return f"{kind}_on_{host}" if host else kind


def conf(context: Any) -> dict[str, Any]:
    """Return the run's conf with defaults; unknown keys are kept for the first task to reject."""
    return {**context["params"], **(context["dag_run"].conf or {})}


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a tipbench function; permanent errors fail the task without retries."""
    from tipbench.cli.airflow_tasks import print_event
    from tipbench.errors import MixedRubrics, MlflowError, NotEnoughData, TipbenchError, UsageError
    from tipbench.record.events import Failure

    try:
        return function(conf(get_current_context()), *arguments)
    except TipbenchError as exc:
        if function.__name__ != "collect_model":  # its command has already emitted the failure
            print_event(Failure(str(exc)))
        is_permanent = isinstance(exc, UsageError | NotEnoughData | MlflowError | MixedRubrics)
        error_class = AirflowFailException if is_permanent else AirflowException
        raise error_class(str(exc)) from exc


def result_of(task_id: str, map_index: int = -1) -> Any:
    """Return the result of a task of this run; None if it did not succeed."""
    return get_current_context()["ti"].xcom_pull(task_ids=task_id, map_indexes=map_index)


@task(**RETRY)
def plan(task_urls: dict[str, str | None]) -> dict[str, Any]:
    """Validate the conf, refuse models that may not run, and assign the others to collect tasks."""
    from tipbench.cli.airflow_tasks import plan_models

    return call(plan_models, task_urls)


@task(**RETRY)
def share(planned: dict[str, Any], task_id: str) -> list[str]:
    """Return the models of one collect task; a separate task, because Airflow maps over whole results only."""
    return list(planned[task_id])


@task(map_index_template="{{ task.op_kwargs['model'] }}", **RETRY_COLLECT)
def collect(model: str, ollama_url: str | None) -> dict[str, Any]:
    """Generate and record the missing cells of one model; a retry continues where it stopped."""
    from tipbench.cli.airflow_tasks import collect_model

    return call(collect_model, model, ollama_url)


@task(**RETRY_UNLOAD)
def unload(ollama_url: str | None) -> dict[str, Any]:
    """Unload the model that a killed collect left in the server's memory."""
    from tipbench.cli.airflow_tasks import unload_left_behind

    return call(unload_left_behind, ollama_url)


@task(trigger_rule=TriggerRule.ALL_DONE, **RETRY)
def export_for_judge() -> dict[str, Any]:
    """Export a sheet of pending cells to MLflow, even if some models failed."""
    from tipbench.cli.airflow_tasks import export_for_judge as export

    if result_of("plan") is None:
        raise AirflowFailException("There is nothing to judge: the plan failed; see its log.")
    return call(export)


@task(trigger_rule=TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS, **RETRY)
def compare() -> dict[str, Any]:
    """Compute the leaderboard of judged cells, and count pending ones."""
    from tipbench.cli.airflow_tasks import compare as rank

    return call(rank)


@task(**RETRY)
def outcome(collect_tasks: list[str]) -> str:
    """Fail if any task failed, so that an incomplete run does not end as a success; runs after all other tasks.

    It is a teardown task, because a cancelled run skips other tasks that have not started, and would end as a success.
    """
    planned = result_of("plan")
    if planned is None:
        raise AirflowFailException("The plan failed; see its log.")
    missing = [
        model
        for task_id in collect_tasks
        for index, model in enumerate(planned[task_id])
        if result_of(task_id, index) is None
    ]
    if missing:
        raise AirflowFailException(
            f"Not collected in full: {', '.join(missing)}; see the logs of these tasks. Clear them to continue."
        )
    if result_of("compare") is None:
        raise AirflowFailException("Everything is collected, but nothing was compared; see the logs.")
    return f"{sum(len(planned[task_id]) for task_id in collect_tasks)} models collected and compared"


def skip_unneeded_wait(context: Any) -> None:
    """Skip the wait unless the conf sets `wait_for_judge` and some cells are pending."""
    if not conf(context)["wait_for_judge"]:
        raise AirflowSkipException("wait_for_judge is false: comparing what is judged so far.")
    if not context["ti"].xcom_pull(task_ids="export_for_judge")["pending"]:
        raise AirflowSkipException("Nothing waits for a judge.")
    if context["ti"].try_number > 1:
        # If the response arrives before the process of this task has ended, Airflow fails the task and retries it.
        from tipbench.cli.airflow_tasks import count_pending

        if not count_pending(conf(context)):
            raise AirflowSkipException("Nothing waits for a judge any more.")


def wait_operator() -> HITLOperator:
    """Return the task that waits for a response without using a slot; the panel sends it for runs that it started."""
    exported = "ti.xcom_pull(task_ids='export_for_judge')"
    return HITLOperator(
        task_id="wait_for_judge",
        subject=f"{{{{ {exported}['pending'] }}}} answers of {{{{ {exported}['experiment'] }}}} wait for a judge",
        body=(
            f"Judge in the panel{{% if {exported}['sheet'] %}}, or: tipbench judge export "
            f"--sheet {{{{ {exported}['sheet'] }}}} --experiment {{{{ {exported}['experiment'] }}}} --out FILE, fill "
            "it in, and tipbench judge apply FILE{% endif %}. For a run that the panel started, the panel chooses the "
            "option here when nothing is pending any more. Choosing it earlier compares what is judged so far."
        ),
        options=["Compare now"],
        pre_execute=skip_unneeded_wait,
        **RETRY,
    )


@dag(
    dag_id="bench_collect",
    description="Collect with every model, export a sheet for judging, compare.",
    schedule=None,
    catchup=False,
    is_paused_upon_creation=False,
    max_active_runs=500,  # runs waiting for a judge count as active; pools limit each server to one collect
    params={key: Param(**fields) for key, fields in PARAMS.items()},
    doc_md=__doc__,
    tags=["tipbench"],
)
def bench_collect() -> None:
    """Define the tasks: a collect and an unload per host, in the host's pool and queue."""
    hosts: dict[str, str | None] = dict(listed_hosts()) or {"": None}  # one host without a name: that of the run's conf
    task_urls = {task_id_of("collect", host): url for host, url in hosts.items()}
    planned = plan(task_urls)
    collect_tasks = []
    for host, url in hosts.items():
        slot = {"pool": f"ollama_{host}", "queue": host} if host else {"pool": "ollama"}
        task_id = task_id_of("collect", host)
        models = share.override(task_id=task_id_of("share", host))(planned, task_id)
        collect_task = collect.override(task_id=task_id, **slot).partial(ollama_url=url).expand(model=models)
        collect_task >> unload.override(task_id=task_id_of("unload", host), **slot)(url).as_teardown()
        collect_tasks.append(collect_task)
    exported = export_for_judge()
    compared = compare()
    collect_tasks >> exported >> wait_operator() >> compared
    exported >> compared
    [*collect_tasks, compared] >> outcome(list(task_urls)).as_teardown(on_failure_fail_dagrun=True)


bench_collect()
