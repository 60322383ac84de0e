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
    "weight_rule": "absolute",
}
FIRST = {**AGAIN, "priority_weight": 2, "weight_rule": "absolute"}  # before the collects of another run in its pool


def listed_hosts() -> dict[str, str]:
    """The Ollama hosts by name, as NAME=URL with commas between; none for the one server of each run's conf."""
    place, text = _hosts_text()
    hosts: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, url = entry.partition("=")
        seen = re.sub("//.*@", "//…@", entry)[:80]
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name) or not re.fullmatch(r"https?://[^@\s]+", url):
            raise ValueError(f"{place} takes NAME=URL without a login, as gpu-a=http://gpu-a:11434 (got {seen!r})")
        if name in hosts:
            raise ValueError(f"{place} has {name!r} twice; give each host a name of its own (got {seen!r})")
        hosts[name] = url
    return hosts


def _hosts_text() -> tuple[str, str]:
    """Where the hosts stand, and what stands there. A variable that Airflow cannot read counts as none."""
    if text := Variable.get(HOSTS_VARIABLE, default=""):
        return f"The Airflow variable {HOSTS_VARIABLE}", text
    if text := os.environ.get("TIPBENCH_OLLAMA_HOSTS"):
        return "TIPBENCH_OLLAMA_HOSTS", text
    for folder in (Path.cwd(), Path(os.environ.get("TIPBENCH_HOME", ".")).expanduser()):
        file = folder / "tipbench.toml"
        try:
            given = tomllib.loads(file.read_text("utf-8")).get(HOSTS_SETTING)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as exc:
            raise ValueError(f"{file} cannot be read: {exc}. Correct it, or remove it.") from exc
        if given:
            return f"{HOSTS_SETTING} in {file}", ",".join(map(str, given)) if isinstance(given, list) else str(given)
    return "", ""


def name_of(kind: str, host: str) -> str:
    """The id of a host's task of this kind; where no hosts are listed there is one of each."""
    return f"{kind}_on_{host}" if host else kind


def conf(context: Any) -> dict[str, Any]:
    """What this run was triggered with, defaults included and unknown keys kept, for the first task to refuse."""
    return {**context["params"], **(context["dag_run"].conf or {})}


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of the package; what trying again cannot mend fails at once."""
    from tipbench.cli.scheduled import print_event
    from tipbench.errors import MixedRubrics, MlflowRefused, NotEnoughData, TipbenchError, UsageError
    from tipbench.jobs.events import Failure

    try:
        return function(conf(get_current_context()), *arguments)
    except TipbenchError as exc:
        if function.__name__ != "collect_model":  # whose command has told it already
            print_event(Failure(str(exc)))
        final = isinstance(exc, UsageError | NotEnoughData | MlflowRefused | MixedRubrics)
        raise (AirflowFailException if final else AirflowException)(str(exc)) from exc


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


@task(**FIRST)
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
            f"Not collected in full: {', '.join(missing)}; the logs of these tasks say why. Cleared, they continue."
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
    """Parks the run, without a slot, until somebody answers: for its own runs the panel does when all is judged."""
    exported = "ti.xcom_pull(task_ids='export_for_judge')"
    return HITLOperator(
        task_id="wait_for_judge",
        subject=f"{{{{ {exported}['pending'] }}}} answers of {{{{ {exported}['experiment'] }}}} wait for a judge",
        body=(
            f"Judge in the panel{{% if {exported}['sheet'] %}}, or: tipbench judge export "
            f"--sheet {{{{ {exported}['sheet'] }}}} --experiment {{{{ {exported}['experiment'] }}}} --out FILE, fill "
            "it in, and tipbench judge apply FILE{% endif %}. The panel answers here for a run that it started, when "
            "nothing is pending any more; whoever answers compares what is judged by then."
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
    max_active_runs=500,  # a run that waits for its judge is an active one; the pool keeps two off one server
    params={key: Param(**given) for key, given in PARAMS.items()},
    doc_md=__doc__,
    tags=["tipbench"],
)
def bench_collect() -> None:
    """Put the tasks together: a collect with its unload for each host, each in its host's pool and queue."""
    hosts: dict[str, str | None] = dict(listed_hosts()) or {"": None}
    addresses = {name_of("collect", host): url for host, url in hosts.items()}
    planned = plan(addresses)
    collected = []
    for host, url in hosts.items():
        place = {"pool": f"ollama_{host}", "queue": host} if host else {"pool": "ollama"}
        task_id = name_of("collect", host)
        models = share.override(task_id=name_of("share", host))(planned, task_id)
        collecting = collect.override(task_id=task_id, **place).partial(ollama_url=url).expand(model=models)
        collecting >> unload.override(task_id=name_of("unload", host), **place)(url).as_teardown()
        collected.append(collecting)
    exported = export_for_judge()
    compared = compare()
    collected >> exported >> judge_gate() >> compared
    exported >> compared
    [*collected, compared] >> outcome(list(addresses)).as_teardown(on_failure_fail_dagrun=True)


bench_collect()
