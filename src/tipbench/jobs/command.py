"""Builds job requests from options, and command lines from jobs; secrets are in environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tipbench.generate.engine import engine_resources
from tipbench.http import strip_login
from tipbench.jobs.job import JobKind, JobRequest
from tipbench.judge.automatic import JudgeChoice, JudgeKind
from tipbench.plan.config import ADDRESSES, CollectConfig, make_config
from tipbench.simulate.simulation import EXPERIMENT as SIMULATIONS
from tipbench.simulate.simulation import SimulationConfig
from tipbench.workflows.judging import check_judge_options

COMMANDS = {JobKind.COLLECT: ("collect",), JobKind.JUDGE: ("judge", "run"), JobKind.SIMULATE: ("simulate",)}
PROGRAM_VARIABLE = "TIPBENCH_JUDGE_COMMAND"  # read by `--with command`; a command line may contain secrets
_VARIABLES = {key: f"TIPBENCH_{key.upper()}" for key in ADDRESSES}  # for addresses with a login


def collect_request(config: CollectConfig, *, started_by: str = "", runner: str = "local") -> JobRequest:
    """Return the request for `tipbench collect` with this configuration."""
    arguments, private = _split_secrets(config.model_dump(mode="json"))
    # The locks that the collect will acquire, and memory, so that jobs that need the same ones run one after the other.
    needed = {*(f"{model} for {config.experiment}" for model in config.model_names), *engine_resources(config)}
    resources = tuple(sorted(needed))
    return JobRequest(JobKind.COLLECT, config.experiment, arguments, private, resources, started_by, runner)


def judge_request(
    options: Mapping[str, Any], *, ollama_url: str, program: str | None = None, started_by: str = ""
) -> JobRequest:
    """Return the request for `tipbench judge run` with these valid options, by key.

    `ollama_url` is the default server. `program` is the command that `with: command` runs; it is never shown. Raises
    InvalidOption if an option does not apply to the judge.
    """
    judge, experiment = JudgeChoice.parse(options.get("with")), str(options["experiment"])
    judge.with_program(program)
    check_judge_options(judge, options)
    needed = {f"judge {options.get('judge') or judge} in {experiment}"}  # a judge runs once at a time per experiment
    if judge.kind is JudgeKind.MODEL:
        server = options.get("ollama_url") or ollama_url
        needed |= engine_resources(make_config({"models": judge.target, "ollama_url": server}))
    arguments, private = _split_secrets(options)
    if program and judge == JudgeChoice(JudgeKind.COMMAND):
        private[PROGRAM_VARIABLE] = program
    return JobRequest(JobKind.JUDGE, experiment, arguments, private, tuple(sorted(needed)), started_by)


def simulate_request(config: SimulationConfig, *, mlflow_url: str | None = None, started_by: str = "") -> JobRequest:
    """Return the request for `tipbench simulate`; one simulation runs at a time, besides other jobs."""
    options = {**config.model_dump(mode="json", exclude_defaults=True), "world": config.world.value}
    arguments, private = _split_secrets({**options, "mlflow_url": mlflow_url})
    return JobRequest(JobKind.SIMULATE, SIMULATIONS, arguments, private, ("simulations on this machine",), started_by)


def command_arguments(job: JobRequest) -> tuple[str, ...]:
    """Return the arguments after `tipbench`, as `--option=value`, so that no value is parsed as an option."""
    words = list(COMMANDS[job.kind])
    for key, value in job.arguments.items():
        flag = "--" + key.replace("_", "-")
        if value is None or _VARIABLES.get(key) in job.private:
            continue
        if value is True:
            words.append(flag)
        elif value is False:
            words += [f"--no-{flag[2:]}"] if job.kind is JobKind.COLLECT else []
        else:
            words.append(f"{flag}={value}")
    return tuple(words)


def _split_secrets(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split options into arguments without credentials, and environment variables with the URLs that have some."""
    arguments, private = dict(options), {}
    for key, variable in _VARIABLES.items():
        url = options.get(key)
        if isinstance(url, str) and "@" in urlsplit(url).netloc:
            arguments[key] = strip_login(url)
            private[variable] = url
    return arguments, private
