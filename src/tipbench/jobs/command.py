"""From a configuration to an order, and from a job to the words of its command. Secrets go another way: `private`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tipbench.addresses import identity_of, is_loopback, is_web_address, without_login
from tipbench.errors import UsageError
from tipbench.generate.engine import engine_of
from tipbench.jobs.job import JobKind, Order
from tipbench.plan.config import CollectConfig, check_experiment_name

WORDS = {JobKind.COLLECT: ("collect",), JobKind.JUDGE: ("judge", "run"), JobKind.SIMULATE: ("simulate",)}
JUDGE_OPTIONS = frozenset(
    {
        *("with", "experiment", "judge", "limit", "overlap", "all", "rejudge", "seed", "suite", "timeout_s", "batch"),
        *("accept_drift", "ollama_url", "max_model_b", "num_ctx", "evict", "allow_unknown_size", "wait", "mlflow_url"),
    }
)
_MOST_TEXT = 4000
_VARIABLES = {"ollama_url": "TIPBENCH_OLLAMA_URL", "mlflow_url": "TIPBENCH_MLFLOW_URL"}
_EMBEDDED = "the embedded model on this machine"


def collect_order(config: CollectConfig, *, started_by: str = "", runner: str = "local") -> Order:
    """The order for `tipbench collect` with exactly this configuration."""
    arguments, private = _apart(config.model_dump(mode="json"))
    return Order(
        JobKind.COLLECT,
        config.experiment,
        arguments,
        private,
        resources=_collect_resources(config),
        started_by=started_by,
        runner=runner,
    )


def judge_order(options: Mapping[str, Any], *, ollama_url: str, started_by: str = "", runner: str = "local") -> Order:
    """The order for `tipbench judge run`; `options` are its own by key, `ollama_url` the server without that option."""
    if unknown := sorted(set(options) - JUDGE_OPTIONS):
        raise UsageError(f"{unknown[0][:80]!r} is no option of `tipbench judge run`; see its --help.")
    with_ = options.get("with")
    if not isinstance(with_, str) or not with_.strip():
        raise UsageError(f"with takes rules, command:PROGRAM or ollama:MODEL (got {with_!r:.80}).")
    for key, value in options.items():
        if not isinstance(value, str | int | float | bool | None) or len(str(value)) > _MOST_TEXT:
            raise UsageError(f"{key} takes a text, a number or yes and no, of at most {_MOST_TEXT} characters.")
    try:
        experiment = check_experiment_name(str(options.get("experiment", "")))
    except ValueError as exc:
        raise UsageError(f"experiment: {exc}") from exc
    for key in _VARIABLES:
        if options.get(key) is not None and not is_web_address(str(options[key])):
            raise UsageError(f"{key} takes a web address such as http://host:port (got {str(options[key])[:80]!r}).")
    server = str(options.get("ollama_url") or ollama_url)
    resources = (f"Ollama at {identity_of(server)}",) if with_.startswith("ollama:") else ()
    arguments, private = _apart(options)
    return Order(JobKind.JUDGE, experiment, arguments, private, resources, started_by, runner)


def command_words(job: Order) -> tuple[str, ...]:
    """What stands after `tipbench`; each option is one word with its value, so that no value passes for an option."""
    words = list(WORDS[job.kind])
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


def _collect_resources(config: CollectConfig) -> tuple[str, ...]:
    """The locks that the collect will take, and this machine's memory: what the queue knows cannot fail on them."""
    engines = {engine_of(model) for model in config.model_names}
    server = f"Ollama at {identity_of(config.ollama_url)}"
    needed = [f"{model} for {config.experiment}" for model in config.model_names]
    if "embedded" in engines:
        needed.append(_EMBEDDED)
    if "ollama" in engines or ("embedded" in engines and is_loopback(config.ollama_url)):
        needed.append(server)
    return tuple(sorted(needed))


def _apart(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Options as they may be shown, and the addresses with a login as variables of the environment."""
    arguments, private = dict(options), {}
    for key, variable in _VARIABLES.items():
        url = options.get(key)
        if isinstance(url, str) and "@" in urlsplit(url).netloc:
            arguments[key] = without_login(url)
            private[variable] = url
    return arguments, private
