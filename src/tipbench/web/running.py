"""Starting jobs for somebody who asks over the network: checked first, so that what is queued can be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Header

from tipbench.errors import UsageError
from tipbench.jobs.airflow import AirflowRunner
from tipbench.jobs.command import PROGRAM_VARIABLE, collect_order, judge_order
from tipbench.jobs.job import Job
from tipbench.jobs.queue import Submitted
from tipbench.jobs.sqlite import MOST_KEY
from tipbench.judge.checking import name_fault, tidy_name
from tipbench.judge.command import default_name
from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig
from tipbench.plan.grid import suite_for
from tipbench.web.errors import Forbidden, Invalid, checked
from tipbench.web.queries import existing
from tipbench.web.shapes import JudgeWish

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

COMMAND = "command"
LEFT_TO_AIRFLOW = frozenset({"ollama_url", "skip_refused"})  # unless a run names them
_LONGEST = 16_000  # of one option: a command line has its limits
_RULES = ("ollama_url", "mlflow_url", "suite", "max_model_b", "num_ctx", "evict", "allow_unknown_size", "wait")
_NAMED = ("ollama_url", "mlflow_url", "suite")  # what the operator has to allow

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=MOST_KEY,
        pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$",
        description="Made up by the caller for one order: sent again, it gives the same job and starts nothing.",
        examples=["9c1d5d6e-8f0a-4f3e-a4c5-6b1f0a7d2e10"],
    ),
]


@dataclass(frozen=True)
class Where:
    """Who carries a run out, None for the usual one; in Airflow it may wait for the judge before it compares.

    `named` are the keys of the configuration that somebody chose: of the others Airflow's workers have their own.
    """

    runner: str | None = None
    wait_for_judge: bool = False
    named: frozenset[str] = frozenset()


def start_run(
    panel: Panel, config: CollectConfig, *, started_by: str, key: str | None = None, where: Where | None = None
) -> Submitted:
    """Queue a collect. `config` comes from `panel.allowed.config`; SuiteError or UsageError when the suite lacks it."""
    where = where or Where()
    runner = _runner(panel, where)
    for name, value in config.model_dump().items():
        if isinstance(value, str) and len(value) > _LONGEST:
            raise Invalid(f"{name} has at most {_LONGEST} characters (got {len(value)}).", path=f"body.{name}")
    suite_for(config)
    order = collect_order(config, started_by=started_by, runner=runner)
    if runner == AirflowRunner.name:
        order = replace(order, arguments=_for_airflow(order.arguments, where))
    return panel.jobs.submit(order, key=key)


def _for_airflow(arguments: Mapping[str, Any], where: Where) -> dict[str, Any]:
    """Without the panel's own server, which may be another one seen from a worker, unless the run names it."""
    left = LEFT_TO_AIRFLOW - where.named
    kept = {key: value for key, value in arguments.items() if key not in left}
    return kept | ({WAIT_FOR_JUDGE: True} if where.wait_for_judge else {})


def _runner(panel: Panel, where: Where) -> str:
    runner = where.runner or panel.jobs.usual
    if runner not in panel.jobs.runners:
        there = ", ".join(panel.jobs.runners)
        raise Invalid(
            f"runner is one of those configured here: {there} (got {runner[:40]!r}). TIPBENCH_AIRFLOW_URL adds "
            "Airflow.",
            path="query.runner",
        )
    if where.wait_for_judge and runner != AirflowRunner.name:
        raise Invalid(
            "wait_for_judge belongs to Airflow, whose run compares at its end; here a run ends when it is recorded. "
            "Leave it out, or choose runner=airflow.",
            path="query.wait_for_judge",
        )
    return runner


def start_judge(
    panel: Panel, experiment: str, raw: Mapping[str, Any], *, started_by: str, key: str | None = None
) -> Submitted:
    """Queue a `judge run` of an experiment that is there. Invalid or Forbidden names the wrong option."""
    wish = checked(JudgeWish, raw, "body")
    asked = wish.model_dump(by_alias=True, exclude_defaults=True)
    rule = panel.allowed.config({name: asked[name] for name in _RULES if name in asked})
    if wish.judge is not None and (fault := name_fault(wish.judge)):
        raise Invalid(f"judge takes {fault} (got {wish.judge[:80]!r}).", path="body.judge")
    _check_named(wish.with_)
    program = _program(panel) if wish.with_ == COMMAND else None
    options = {**asked, "with": wish.with_, "experiment": experiment, "mlflow_url": rule.mlflow_url}
    if wish.judge is not None:
        options["judge"] = tidy_name(wish.judge)
    if wish.with_.startswith("ollama:"):
        options["ollama_url"] = rule.ollama_url
    with panel.tracker.named(rule.mlflow_url) as opened:
        existing(opened.store, experiment)
    try:
        order = judge_order(options, ollama_url=rule.ollama_url, program=program, started_by=started_by)
    except UsageError as exc:
        raise Invalid(str(exc), path="body") from exc
    return panel.jobs.submit(order, key=key)


def retry_job(panel: Panel, job_id: str, *, started_by: str, key: str | None = None) -> Submitted:
    """A new job like an old one, as long as the operator still allows what that one named.

    The operator's judging program is the one of today: Forbidden when there is none any more.
    """
    old = panel.jobs.store.get(job_id)
    panel.allowed.config({name: old.arguments[name] for name in _NAMED if old.arguments.get(name) is not None})
    return panel.jobs.retry(job_id, started_by=started_by, key=key, changes=_with_todays_program(panel, old))


def _with_todays_program(panel: Panel, old: Job) -> Mapping[str, Any]:
    """What changes about a job that runs the operator's program, also one whose options still held its words."""
    if str(old.arguments.get("with", "")).partition(":")[0] != COMMAND:
        return {}
    return {
        "arguments": {**old.arguments, "with": COMMAND},
        "private": {**old.private, PROGRAM_VARIABLE: _program(panel)},
    }


def _check_named(wanted: str) -> None:
    """A program runs on this machine with all our rights, so only the operator says which."""
    if wanted.startswith(f"{COMMAND}:"):
        raise Forbidden(
            'A program cannot be named over HTTP. Send "command" for the one that TIPBENCH_JUDGE_COMMAND names.',
            code="not_allowed",
            path="body.with",
        )


def _program(panel: Panel) -> str:
    """The operator's command line, which may hold secrets. Forbidden when there is none that could be run."""
    program = panel.settings.get("judge_command")
    if not program:
        raise Forbidden(
            "No judging program is configured. The operator names one in TIPBENCH_JUDGE_COMMAND; rules and "
            "ollama:MODEL need none.",
            code="not_allowed",
            path="body.with",
        )
    try:
        default_name(program)
    except UsageError:  # its message would show the command line
        raise Forbidden(
            "TIPBENCH_JUDGE_COMMAND is no command line that can be read. The operator looks at its quotes.",
            code="not_allowed",
            path="body.with",
        ) from None
    return program
