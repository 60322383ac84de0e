"""DAG `bench_collect`: one benchmark on demand, the same as `tipbench collect`, `judge export` and `compare`.

    plan → collect (a task per model, one at a time on each Ollama host) → export_for_judge → [wait_for_judge] → compare

Translation only: what the tasks do is in `tipbench.cli.scheduled*`, imported when they run, because this file is
parsed again and again. Its form comes from bench_params.json beside it (`make docs` writes that). Each Ollama host
needs a pool of one slot: `ollama`, or `ollama_NAME` for each of the hosts in the Airflow variable
`tipbench_ollama_hosts` (or in TIPBENCH_OLLAMA_HOSTS, or in tipbench.toml); see docs/operations.md.
"""  # noqa: INP001 - Airflow loads it by its path

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
ANSWER = "Compare now"
PARAMS = json.loads(Path(__file__).with_name("bench_params.json").read_text("utf-8"))
AGAIN = {"retries": 3, "retry_delay": timedelta(seconds=10)}
CONTINUED = {
    "retries": 3,
    "retry_delay": timedelta(seconds=30),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(minutes=10),
}


def listed_hosts() -> dict[str, str]:
    """The Ollama hosts by name, as NAME=URL with commas between; none for the one server of each run's conf."""
    text = Variable.get(HOSTS_VARIABLE, default="") or os.environ.get("TIPBENCH_OLLAMA_HOSTS") or _hosts_of_file()
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    hosts = {}
    for entry in entries:
        name, _, url = entry.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name) or not url.startswith(("http://", "https://")):
            raise ValueError(f"{HOSTS_VARIABLE} takes NAME=URL, as gpu-a=http://gpu-a:11434 (got {entry[:80]!r})")
        hosts[name] = url
    if len(hosts) != len(entries):
        raise ValueError(f"{HOSTS_VARIABLE} has a name twice; give each host one of its own (got {text[:200]!r})")
    return hosts


def _hosts_of_file() -> str:
    for folder in (Path.cwd(), Path(os.environ.get("TIPBENCH_HOME", "."))):
        file = folder / "tipbench.toml"
        if file.is_file() and (value := tomllib.loads(file.read_text("utf-8")).get(HOSTS_SETTING)):
            return ",".join(value) if isinstance(value, list) else str(value)
    return ""


def conf(context: Any) -> dict[str, Any]:
    """What this run was triggered with, defaults included and unknown keys kept, for the first task to refuse."""
    return {**context["params"], **(context["dag_run"].conf or {})}


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of the package; what trying again cannot mend fails at once."""
    from tipbench.cli.scheduled_collect import failure_line
    from tipbench.errors import NotEnoughData, TipbenchError, UsageError

    try:
        return function(conf(get_current_context()), *arguments)
    except TipbenchError as exc:
        if function.__name__ != "collect_model":  # whose command has told it already
            print(failure_line(str(exc)), flush=True)
        kind = AirflowFailException if isinstance(exc, UsageError | NotEnoughData) else AirflowException
        raise kind(str(exc)) from exc


def pulled(task_id: str, map_index: int = -1) -> Any:
    """What a task of this run has returned; None when it did not succeed."""
    return get_current_context()["ti"].xcom_pull(task_ids=task_id, map_indexes=map_index)


@task(**AGAIN)
def plan(hosts: dict[str, str | None]) -> dict[str, Any]:
    """Check the conf, refuse what may not run, spread the models over the hosts."""
    from tipbench.cli.scheduled_plan import plan_models

    return call(plan_models, hosts)


@task(**AGAIN)
def share(planned: dict[str, Any], task_id: str) -> list[str]:
    """The models of one host: tasks can be mapped over the whole of what a task returned, not over a part of it."""
    return list(planned[task_id])


@task(map_index_template="{{ task.op_kwargs['model'] }}", **CONTINUED)
def collect(model: str, ollama_url: str | None) -> dict[str, Any]:
    """Generate and record what is missing of one model; another try continues where this one stops."""
    from tipbench.cli.scheduled_collect import collect_model

    return call(collect_model, model, ollama_url)


@task(**AGAIN)
def unload(ollama_url: str | None) -> dict[str, Any]:
    """Free what a killed collect has left in the server's memory."""
    from tipbench.cli.scheduled import unload_left_behind

    return call(unload_left_behind, ollama_url)


@task(trigger_rule=TriggerRule.ALL_DONE, **AGAIN)
def export_for_judge() -> dict[str, Any]:
    """A sheet of what waits for a judge, kept in MLflow; a model that failed does not keep the others waiting."""
    from tipbench.cli.scheduled import export_for_judge as export

    if pulled("plan") is None:
        raise AirflowFailException("There is nothing to judge: the plan failed; its log says why.")
    return call(export)


@task(trigger_rule=TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS, **AGAIN)
def compare() -> dict[str, Any]:
    """The leaderboard of what is judged, and how much is pending."""
    from tipbench.cli.scheduled import compare as rank

    return call(rank)


@task
def outcome(collecting: list[str]) -> str:
    """Fails when anything did, after everything else is done: so a run that lacks a model is not called a success.

    A teardown, because a cancelled run skips all other tasks that have not begun, and would end as a success.
    """
    planned = pulled("plan")
    if planned is None:
        raise AirflowFailException("The plan failed; its log says why.")
    missing = [
        model
        for task_id in collecting
        for index, model in enumerate(planned[task_id])
        if pulled(task_id, index) is None
    ]
    if missing:
        raise AirflowFailException(
            f"Not collected: {', '.join(missing)}; the logs of these tasks say why. Cleared, they continue."
        )
    if pulled("compare") is None:
        raise AirflowFailException("Everything is collected, but nothing was compared; the logs say why.")
    return f"{sum(len(planned[task_id]) for task_id in collecting)} models collected and compared"


def only_when_asked(context: Any) -> None:
    """The gate is open unless the conf asks for a judge, and something waits for one."""
    if not conf(context)["wait_for_judge"]:
        raise AirflowSkipException("wait_for_judge is false: comparing what is judged by now.")
    if not context["ti"].xcom_pull(task_ids="export_for_judge")["pending"]:
        raise AirflowSkipException("Nothing waits for a judge.")


def judge_gate() -> HITLOperator:
    """Parks the run, without a slot, until somebody answers: the panel does when nothing is pending any more."""
    exported = "ti.xcom_pull(task_ids='export_for_judge')"
    return HITLOperator(
        task_id="wait_for_judge",
        subject=f"{{{{ {exported}['pending'] }}}} answers of {{{{ {exported}['experiment'] }}}} wait for a judge",
        body=(
            f"Judge in the panel, or: tipbench judge export --sheet {{{{ {exported}['sheet'] }}}} "
            f"--experiment {{{{ {exported}['experiment'] }}}} --out FILE, fill it in, and tipbench judge apply FILE. "
            "The panel answers here when nothing is pending any more; whoever answers before that compares what is "
            "judged by then."
        ),
        options=[ANSWER],
        pre_execute=only_when_asked,
    )


@dag(
    dag_id="bench_collect",
    description="Collect with every model, hand out for judging, compare.",
    schedule=None,
    catchup=False,
    is_paused_upon_creation=False,
    params={key: Param(**given) for key, given in PARAMS.items()},
    doc_md=__doc__,
    tags=["tipbench"],
)
def bench_collect() -> None:
    """Put the tasks together: a collect with its unload for each host, each in its host's pool and queue."""
    hosts: dict[str, str | None] = dict(listed_hosts()) or {"": None}
    ids = {name: f"collect_on_{name}" if name else "collect" for name in hosts}
    planned = plan({ids[name]: url for name, url in hosts.items()})
    collected = []
    for name, url in hosts.items():
        place = {"pool": f"ollama_{name}", "queue": name} if name else {"pool": "ollama"}
        models = share.override(task_id=ids[name].replace("collect", "share"))(planned, ids[name])
        collecting = collect.override(task_id=ids[name], **place).partial(ollama_url=url).expand(model=models)
        collecting >> unload.override(task_id=ids[name].replace("collect", "unload"), **place)(url).as_teardown()
        collected.append(collecting)
    exported = export_for_judge()
    compared = compare()
    collected >> exported >> judge_gate() >> compared
    exported >> compared
    [*collected, compared] >> outcome(list(ids.values())).as_teardown(on_failure_fail_dagrun=True)


bench_collect()
