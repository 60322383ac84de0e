"""Builds job requests from options, and command lines from jobs. Secrets are passed in environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tipbench.generate.engine import engine_resources
from tipbench.http import strip_login
from tipbench.jobs.job import JobKind, JobRequest
from tipbench.judge.automatic import JudgeChoice, JudgeKind
from tipbench.plan.collect_config import URL_KEYS, CollectConfig, make_config
from tipbench.simulate.simulation import EXPERIMENT as SIMULATIONS
from tipbench.simulate.simulation import SimulationConfig
from tipbench.workflows.judging import check_judge_options

COMMANDS = {JobKind.COLLECT: ("collect",), JobKind.JUDGE: ("judge", "run"), JobKind.SIMULATE: ("simulate",)}
PROGRAM_VARIABLE = "TIPBENCH_JUDGE_COMMAND"  # the program of `judge run --with command`, which may contain secrets
_URL_VARIABLES = {key: f"TIPBENCH_{key.upper()}" for key in URL_KEYS}  # for URLs that have a login


def collect_request(config: CollectConfig, *, started_by: str = "", runner: str = "local") -> JobRequest:
    """Return the request for `tipbench collect` with this configuration."""
    arguments, private = _split_secrets(config.model_dump(mode="json"))
    # Jobs that share a resource run one after the other. A collect has a resource for each model (as it has a
    # lock in `record/collect.py`), and its engines' resources: the servers, and this machine for the embedded model.
    model_resources = {f"{model} for {config.experiment}" for model in config.model_names}
    resources = tuple(sorted(model_resources | engine_resources(config)))
    return JobRequest(JobKind.COLLECT, config.experiment, arguments, private, resources, started_by, runner)


def judge_request(
    options: Mapping[str, Any], *, ollama_url: str, program: str | None = None, started_by: str = ""
) -> JobRequest:
    """Return the request for `tipbench judge run`. Raises InvalidOption if an option does not apply to the judge.

    `options` are valid values by key. `ollama_url` is the default server. `program` is what `with: command` runs; it is
    never shown.
    """
    judge = JudgeChoice.parse(options.get("with"))
    experiment = str(options["experiment"])
    judge.with_program(program)  # raises InvalidOption if the program is missing
    check_judge_options(judge, options)
    judge_name = options.get("judge") or judge
    resources = {f"judge {judge_name} in {experiment}"}  # one job per judge and experiment at a time
    if judge.kind is JudgeKind.MODEL:
        server = options.get("ollama_url") or ollama_url
        resources |= engine_resources(make_config({"models": judge.target, "ollama_url": server}))
    arguments, private = _split_secrets(options)
    # `command:PROGRAM` (with a target) has its own program, in `arguments`.
    if program and judge.kind is JudgeKind.COMMAND and not judge.target:
        private[PROGRAM_VARIABLE] = program
    return JobRequest(JobKind.JUDGE, experiment, arguments, private, tuple(sorted(resources)), started_by)


def simulate_request(config: SimulationConfig, *, mlflow_url: str | None = None, started_by: str = "") -> JobRequest:
    """Return the request for `tipbench simulate`. Only one simulation runs at a time."""
    options = config.model_dump(mode="json", exclude_defaults=True)
    options |= {"world": config.world.value, "mlflow_url": mlflow_url}
    arguments, private = _split_secrets(options)
    return JobRequest(JobKind.SIMULATE, SIMULATIONS, arguments, private, ("simulations on this machine",), started_by)


def command_arguments(job: JobRequest) -> tuple[str, ...]:
    """Return the arguments after `tipbench`. In the form `--option=value`, no value is parsed as an option."""
    words = list(COMMANDS[job.kind])
    for key, value in job.arguments.items():
        option = key.replace("_", "-")
        is_in_environment = _URL_VARIABLES.get(key) in job.private
        if value is None or is_in_environment:
            continue
        if value is True:
            words.append(f"--{option}")
        elif value is False:
            # The flags of `judge run` are False by default and have no `--no-` form; `simulate` has no flags.
            if job.kind is JobKind.COLLECT:
                words.append(f"--no-{option}")
        else:
            words.append(f"--{option}={value}")
    return tuple(words)


def _split_secrets(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options without the logins in URLs, and environment variables for the URLs that have one."""
    arguments, private = dict(options), {}
    for key, variable in _URL_VARIABLES.items():
        url = options.get(key)
        if isinstance(url, str) and "@" in urlsplit(url).netloc:
            arguments[key] = strip_login(url)
            private[variable] = url
    return arguments, private
