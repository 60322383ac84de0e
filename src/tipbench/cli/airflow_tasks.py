"""Functions that the tasks of the DAG (dags/bench_dag.py) call.

Arguments and results are JSON, so each task can run on another machine. `conf` is the configuration of a DAG run: the
keys of CollectConfig and `wait_for_judge`. Missing URLs are taken from the worker's settings. The worker's other
settings are ignored, so that every task uses the same configuration. A *listed host* is one in `ollama_hosts`.

A collect task runs `python -m tipbench.cli.airflow_tasks collect …` as a child process. This is the `tipbench` command,
except that it also exits when its stdin closes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tipbench.cli.console import print_message
from tipbench.cli.options import open_or_start_mlflow, open_store
from tipbench.cli.progress import INTERRUPTED, LineProgress
from tipbench.errors import InvalidOption, LockHeld, NotEnoughData, ServerUnavailable, TipbenchError, UsageError
from tipbench.files import writable_home
from tipbench.generate.engine import ENGINES, engine_locks, engine_type_of, refusal_error
from tipbench.http import canonical_url, is_http_url, is_loopback, matching_server, strip_login
from tipbench.jobs.command import collect_request, command_arguments
from tipbench.jobs.folder import EVENTS_VARIABLE
from tipbench.plan.collect_config import URL_KEYS, WAIT_FOR_JUDGE, CollectConfig, make_config, split_wait_for_judge
from tipbench.record.events import Collected, Event, Failure, event_line, parse_line
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.generate.engine import ModelFacts
    from tipbench.judge.sheet import TipSheet
    from tipbench.plan.suite import Suite
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.plan import Plan
    from tipbench.record.store import Experiment

Conf = Mapping[str, Any]

_LOCK_TIMEOUT_S = 120.0  # a terminated collect needs time to unload its model
_MAX_JSON_BYTES = 16_000_000
_SUMMARY_KEYS = ("experiment", "cells", "generated", "recorded_before", "failed", "seconds")


def read_conf(conf: Conf, settings: Settings, *, uses_conf_ollama: bool = False) -> CollectConfig:
    """Validate a conf and return the configuration.

    Raises UsageError for unknown keys and for servers that the worker does not allow. The conf's Ollama server is
    checked only if `uses_conf_ollama` is set: a task on a listed host does not use it.
    """
    if unknown := sorted(set(conf) - set(CollectConfig.model_fields) - {WAIT_FOR_JUDGE}):
        raise UsageError(
            f"conf has unknown keys: {', '.join(unknown)[:200]}. "
            f"It takes {', '.join((*CollectConfig.model_fields, WAIT_FOR_JUDGE))}."
        )
    try:
        values, _ = split_wait_for_judge(conf)
    except InvalidOption as exc:
        raise UsageError(f"conf {exc.key} {exc.problem}") from exc
    given = {key: value for key, value in values.items() if value is not None}
    for key in URL_KEYS:
        if not given.get(key):
            given.pop(key, None)  # an empty URL counts as missing
        elif "@" in urlsplit(str(given[key])).netloc:
            raise UsageError(
                f"conf {key} has a login, but Airflow shows the conf of every run. Leave the login out, "
                "and set it in the worker's environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            )
    worker_urls = {key: settings.values[key] for key in URL_KEYS if key in settings.values}
    sources = {**settings.sources, **{key: f"conf {key}" for key in given}}
    config = make_config({**worker_urls, **given}, sources)
    for key in URL_KEYS:
        if key in given and (uses_conf_ollama or key != "ollama_url"):
            _check_server(getattr(config, key) or "", key, settings)
    return config


def _check_server(url: str, key: str, settings: Settings) -> None:
    """Raises UsageError unless the worker's settings allow the server."""
    list_key = "panel_mlflow_urls" if key == "mlflow_url" else "panel_urls"
    more_urls = settings.get_list(list_key)
    if key == "ollama_url":
        host_urls = [entry.partition("=")[2] for entry in settings.get_list("ollama_hosts")]  # entries are NAME=URL
        more_urls = (*host_urls, *more_urls)
    allowed = [server for server in settings.allowed_servers(key, more_urls) if is_http_url(server)]
    if matching_server(url, allowed) is None:
        names = ", ".join(dict.fromkeys(map(strip_login, allowed)))
        raise UsageError(
            f"conf {key} takes a server that the worker allows: {names} (got {url[:120]}). "
            f"Leave it out, or add it to {list_key} on the worker."
        )


def unload_left_behind(conf: Conf, ollama_url: str | None) -> dict[str, Any]:
    """Unload the model that a crashed collect on this machine left in memory. Skips a server that is in use."""
    settings = load_settings()
    config = read_conf(conf, settings, uses_conf_ollama=ollama_url is None)
    config = config.model_copy(update={"ollama_url": ollama_url or config.ollama_url})
    unloaded = None
    for name, lock in engine_locks(config, writable_home(settings.home), "an unload after a collect").items():
        try:
            lock.acquire(wait=True, report=lambda _text: None, timeout_s=_LOCK_TIMEOUT_S)
        except LockHeld:
            print_message("another collect uses the server; it unloads the model itself")
            return {"unloaded": None, "in_use": True}
        try:
            leftover = lock.dead_holder
            engine = ENGINES[name]
            server_url = engine.server_url(config)
            if leftover is not None and engine.unload and server_url:
                engine.unload(server_url, leftover.model, leftover.digest)
                lock.note_unloaded()
                unloaded = leftover.model
                print_message(f"{unloaded} unloaded")
        finally:
            lock.release()
    return {"unloaded": unloaded, "in_use": False}


def print_event(event: Event) -> None:
    """Print an event to the task's log, from which the panel reads it."""
    print(event_line(event, time.time()).decode().rstrip(), flush=True)


@contextmanager
def _open_conf_experiment(conf: Conf) -> Iterator[tuple[CollectConfig, MlflowStore, Experiment]]:
    from tipbench.workflows.mlflow import existing_experiment

    settings = load_settings()
    config = read_conf(conf, settings)
    with open_store(settings, config.mlflow_url) as store:
        yield config, store, _with_retries(config, lambda: existing_experiment(store, config.experiment))


def _with_retries(config: CollectConfig, read_experiment: Callable[[], Experiment]) -> Experiment:
    """Return the experiment; retries while MLflow is unavailable, for at most `server_wait_s`."""
    from tipbench.record.collect import retry_while_unavailable

    return retry_while_unavailable(read_experiment, "MLflow", config.server_wait_s, LineProgress())


def count_pending(conf: Conf) -> int:
    """Return the number of pending cells of the DAG run."""
    from tipbench.record.plan import configured_cells
    from tipbench.record.reader import count_states

    with _open_conf_experiment(conf) as (config, store, experiment):
        return count_states(configured_cells(store, experiment.experiment_id, config)).pending


def export_for_judge(conf: Conf) -> dict[str, Any]:
    """Export a sheet of the DAG run's pending cells to MLflow. Returns its id and the cell counts."""
    from tipbench.judge.sheet import sheet_text
    from tipbench.record.plan import configured_cells
    from tipbench.record.reader import count_states
    from tipbench.record.run import RunState

    with _open_conf_experiment(conf) as (config, store, experiment):
        runs = configured_cells(store, experiment.experiment_id, config)
        counts = count_states(runs)
        if not counts.pending + counts.judged:
            raise NotEnoughData(
                f"{experiment.name} has no results of this run: {counts.failed} cells failed, none succeeded. "
                "See the logs of the collect tasks."
            )
        pending_ids = frozenset(run.run_id for run in runs if run.state == RunState.PENDING)
        sheet = _find_or_export_sheet(store, experiment, config, pending_ids) if pending_ids else None
        print_message(
            f"{experiment.name}: {counts.judged} cells judged, {counts.pending} pending, {counts.failed} failed"
        )
        if sheet is not None:
            command = f"tipbench judge export --experiment {experiment.name} --sheet {sheet.id} --out FILE"
            print_message(f"sheet {sheet.id}: {command}, or judge in the panel")
        return {
            "experiment": experiment.name,
            "sheet": sheet.id if sheet else None,
            "sha256": hashlib.sha256(sheet_text(sheet).encode()).hexdigest() if sheet else None,
            "pending": counts.pending,
            "judged": counts.judged,
            "failed": counts.failed,
            "url": experiment.url,
        }


def _find_or_export_sheet(
    store: MlflowStore, experiment: Experiment, config: CollectConfig, pending_ids: frozenset[str]
) -> TipSheet | None:
    """Return a sheet of exactly these cells, if possible one that an earlier attempt of the task exported.

    None if it cannot be exported.
    """
    from tipbench.judge.export import ExportRequest, export_sheet
    from tipbench.judge.sheet_store import ItemKind, SheetStatus, stored_sheets

    for stored in stored_sheets(store, experiment):
        is_untouched = stored.status is SheetStatus.EXPORTED and stored.owner is None and not stored.provisional
        cell_ids = {entry.run_id for entry in stored.entries if entry.kind is ItemKind.CELL}
        if is_untouched and cell_ids == pending_ids:
            return stored.sheet
    try:
        return export_sheet(store, experiment, ExportRequest(only=pending_ids, suite=config.suite)).stored.sheet
    except NotEnoughData as exc:
        print_message(f"no sheet was exported: {exc}")
        return None


def compare(conf: Conf) -> dict[str, Any]:
    """Rank the judged cells with the DAG run's conditions. Saves the board in MLflow; returns verdict and counts."""
    from tipbench.cli.compare import show_board
    from tipbench.compare.cells import CellFilter
    from tipbench.compare.leaderboard import read_leaderboard, record_board
    from tipbench.plan.grid import conditions_of, suite_for
    from tipbench.record.plan import configured_cells
    from tipbench.record.reader import count_states

    with _open_conf_experiment(conf) as (config, store, experiment):
        counts = count_states(configured_cells(store, experiment.experiment_id, config))
        # Cells with other conditions may have been recorded while the run waited for a judge.
        conditions = conditions_of(config, suite_for(config))
        board, _ = read_leaderboard(store, experiment, CellFilter({"conditions": conditions}))
        show_board(board)
        print_message(f"of this run: {counts.judged} cells judged, {counts.pending} pending, {counts.failed} failed")
        run_id = record_board(store, experiment.experiment_id, board)
        verdict = board.to_json()["verdict"]
        return {
            "experiment": experiment.name,
            "board_run": run_id,
            "verdict": verdict["text"],
            "leader": verdict["leader"],
            "decided": verdict["decided"],
            "provisional": board.provisional,
            "pending": counts.pending,
            "judged": counts.judged,
            "failed": counts.failed,
            "url": experiment.url,
        }


# URL of the Ollama server by collect task. Without listed hosts there is one task, with None: the configured URL.
TaskUrls = Mapping[str, str | None]


@dataclass(frozen=True)
class ModelSurvey:
    """The accepted and the refused models of a DAG run. All keys are model names."""

    facts: Mapping[str, ModelFacts]  # of accepted models
    tasks: Mapping[str, tuple[str, ...]]  # the collect tasks that can run an accepted model
    refused: Mapping[str, str]  # with the reason


def plan_models(conf: Conf, task_urls: TaskUrls) -> dict[str, Any]:
    """Assign models to collect tasks. With `skip_refused`, refused models are recorded in MLflow with the reason."""
    from tipbench.plan.grid import suite_for

    settings = load_settings()
    without_hosts = None in task_urls.values()
    config = read_conf(conf, settings, uses_conf_ollama=without_hosts)
    servers = choose_servers(config, task_urls, url_in_conf=bool(conf.get("ollama_url")))
    suite = suite_for(config)
    survey = _survey_models(config, servers, settings)
    # An error if a model is refused; with skip_refused, only if all are.
    refusal = refusal_error(survey.facts, survey.refused, config, hint=" Set skip_refused to run the others.")
    if refusal is not None and not config.skip_refused:
        raise refusal
    plan = _record_refusals_and_plan(config, suite, survey, settings)  # refusals are recorded even if no model is left
    if refusal is not None:  # skip_refused is set, but all models are refused
        raise refusal
    reasons = tuple(survey.refused.values())
    for reason in reasons:
        print_message(f"refused: {reason}")
    if reasons:  # the panel merges this event with those of the collect tasks, which count the cells
        print_event(Collected(config.experiment, cells=0, recorded_before=0, generated=0, failed=0, refused=reasons))
    # An alias is another name of a planned model. An unknown size counts as 0.
    sizes = {model: facts.params_b or 0.0 for model, facts in survey.facts.items() if model not in plan.aliases}
    task_of = assign_models(sizes, survey.tasks)
    models_of = {task: [model for model in sizes if task_of[model] == task] for task in task_urls}
    for task, models in models_of.items():
        print_message(f"{task}: {', '.join(models) or 'nothing'}")
    return {
        "experiment": config.experiment,
        **models_of,
        "refused": [{"model": model, "reason": reason} for model, reason in survey.refused.items()],
        "cells": len(plan.cells),
        "to_generate": len(plan.missing),
    }


def choose_servers(config: CollectConfig, task_urls: TaskUrls, *, url_in_conf: bool) -> dict[str, str]:
    """Return the URLs of the servers that a DAG run can use, by collect task.

    If hosts are listed, the conf's Ollama URL must be one of them. An unlisted loopback URL is ignored: it refers to
    the client that triggered the run, not to a worker.
    """
    if None in task_urls.values():  # no hosts are listed
        return dict.fromkeys(task_urls, config.ollama_url)
    listed = {task: str(url) for task, url in task_urls.items()}
    if not url_in_conf:
        return listed
    chosen = {task: url for task, url in listed.items() if canonical_url(url) == canonical_url(config.ollama_url)}
    if not chosen and not is_loopback(config.ollama_url):
        raise UsageError(
            f"conf ollama_url takes one of the listed hosts: {', '.join(listed.values())} (got {config.ollama_url}). "
            "Leave it out to use all of them, or add the host to ollama_hosts."
        )
    return chosen or listed


def assign_models(sizes: Mapping[str, float], possible_tasks: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the task of each model, chosen from its possible tasks so that the tasks have similar total sizes.

    A model counts with its full size even if its cells are recorded, so that a continued run keeps each model on its
    host.
    """
    totals: dict[str, float] = {}
    assigned: dict[str, str] = {}
    for model in sorted(sizes, key=lambda name: (-sizes[name], name)):
        task = min(possible_tasks[model], key=lambda name: totals.get(name, 0.0))
        totals[task] = totals.get(task, 0.0) + sizes[model]
        assigned[model] = task
    return assigned


def _survey_models(config: CollectConfig, servers: Mapping[str, str], settings: Settings) -> ModelSurvey:
    """Query each server for its models. Models that need no server are assigned to the first task.

    A model that no available server accepts is refused. Raises ServerUnavailable, so that Airflow retries, if no server
    is available. Without `skip_refused`, one unavailable server is enough if a model that needs a server is refused.
    """
    from tipbench.generate.engine import EngineDependencies, build_engines, close_engines, model_facts

    local_models = [model for model in config.model_names if engine_type_of(model).server is None]
    remote_models = [model for model in config.model_names if model not in local_models]
    accepted: dict[str, dict[str, ModelFacts]] = {model: {} for model in config.model_names}  # model → task → facts
    reasons: dict[str, list[str]] = {model: [] for model in config.model_names}
    unavailable: list[ServerUnavailable] = []
    queries = []  # (task, URL of its server, models to look up)
    if local_models:
        first_task, *_ = servers
        queries.append((first_task, config.ollama_url, local_models))  # the URL is not used
    queries += [(task, url, remote_models) for task, url in servers.items() if remote_models]
    for task, url, models in queries:
        server_config = config.model_copy(update={"ollama_url": url, "models": ",".join(models)})
        dependencies = EngineDependencies(server_config, settings.home, print_message)
        engines = build_engines(server_config.model_names, dependencies)
        try:
            facts, refused = model_facts(engines, server_config)
        except ServerUnavailable as exc:
            facts, refused = {}, dict.fromkeys(models, str(exc))
            unavailable.append(exc)
        finally:
            close_engines(engines, print_message)
        for model, reason in refused.items():
            reasons[model].append(reason)
        for model in facts:
            accepted[model][task] = facts[model]
    refused_models = [model for model in config.model_names if not accepted[model]]
    all_unavailable = len(unavailable) == len(servers)
    remote_is_refused = any(model in refused_models for model in remote_models)
    if unavailable and (all_unavailable or (remote_is_refused and not config.skip_refused)):
        raise unavailable[0]
    for error in unavailable:
        print_message(f"warning: {error} The other servers run its models.")
    # A model's facts are those of the first server that accepts it. A server with other weights must not run the model.
    first_facts = {model: next(iter(facts.values())) for model, facts in accepted.items() if facts}
    return ModelSurvey(
        facts=first_facts,
        tasks={
            model: tuple(task for task, facts in accepted[model].items() if facts.digest == first_facts[model].digest)
            for model in first_facts
        },
        refused={model: " ".join(dict.fromkeys(reasons[model])) for model in refused_models},
    )


def _record_refusals_and_plan(config: CollectConfig, suite: Suite, survey: ModelSurvey, settings: Settings) -> Plan:
    from tipbench.generate.engine import free_memory
    from tipbench.plan.grid import conditions_of
    from tipbench.record.plan import make_plan, read_recorded
    from tipbench.record.summary import refused_run

    with open_or_start_mlflow(settings, config.mlflow_url) as mlflow:
        print_message(f"MLflow: {mlflow.description}")
        store = mlflow.store
        experiment = _with_retries(config, lambda: store.ensure_experiment(config.experiment))
        now_ms = int(time.time() * 1000)
        for model, reason in survey.refused.items():
            # An earlier attempt of the task may have recorded the refusal.
            store.record(experiment.experiment_id, refused_run(model, reason, now_ms), may_exist=True)
        if survey.refused:
            store.mark_changed(experiment.experiment_id)
        recorded = read_recorded(store, experiment.experiment_id, conditions_of(config, suite))
    return make_plan(suite, config, survey.facts, survey.refused, recorded, lambda model: free_memory(model, config))


def collect_model(conf: Conf, model: str, ollama_url: str | None) -> dict[str, Any]:
    """Collect a model's missing cells. Raises UsageError if a retry cannot help, else another TipbenchError."""
    config = read_conf(conf, load_settings(), uses_conf_ollama=ollama_url is None)
    # A refused model fails the task. So does a server in use: Airflow retries later instead of occupying a worker.
    overrides = {"models": model, "skip_refused": False, "wait": False, "ollama_url": ollama_url or config.ollama_url}
    request = collect_request(config.model_copy(update=overrides))
    # `private` has the environment variables with secrets.
    child = ChildProcess([*command_arguments(request), "--json"], environment=request.private)
    code = child.run()
    summary: dict[str, Any] = {}
    with suppress(ValueError, TypeError):  # a failed command may print no summary
        summary = dict(json.loads(child.stdout))
    if code == 0 and summary:
        return {"model": model} | {key: summary.get(key) for key in _SUMMARY_KEYS}
    reason = child.failure
    if not reason:  # the command ended without a Failure event
        if summary.get("failed"):
            first_failure = next(iter(summary.get("failures") or ()), "")
            reason = f"{summary['failed']} of {summary.get('cells')} cells failed; the first: {first_failure}"
        elif code in (INTERRUPTED, -signal.SIGTERM):
            reason = "The collect was stopped; finished cells are kept, and the next attempt continues."
        elif code < 0:
            reason = (
                f"The collect was ended by signal {-code}; finished cells are kept, and the next attempt continues."
            )
        else:
            reason = f"The collect ended with {code}: {child.last_line or 'no message'}"
        print_event(Failure(reason))
    if code == UsageError.exit_code:
        raise UsageError(reason)
    raise TipbenchError(reason)


class ChildProcess:
    """Runs `tipbench` as a child process. Prints its stderr and events line by line, and stores its stdout."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        # -P: a module in the working folder must not replace an installed one.
        self._command = [sys.executable, "-P", "-m", __name__, *arguments]
        self._environment = dict(environment)
        self.stdout = b""
        self.failure = ""  # text of the last Failure event
        self.last_line = ""  # of stderr

    def run(self) -> int:
        """Run the command and return its exit code, or the negative number of the signal that ended it."""
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb") as events:
            try:
                own_variables = {EVENTS_VARIABLE: f"/dev/fd/{write_fd}", "PYTHONUNBUFFERED": "1"}
                process = subprocess.Popen(
                    self._command,
                    env=os.environ | self._environment | own_variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(write_fd,),
                    start_new_session=True,  # a signal to the task's process group must not end it
                )
            finally:
                os.close(write_fd)
            assert process.stdin and process.stdout and process.stderr  # noqa: PT018, S101 - they are pipes
            with process, _closed_on_exit(process.stdin):
                readers = [
                    threading.Thread(target=_read_lines, args=(stream, handle), daemon=True)
                    for stream, handle in ((process.stderr, self._read_message), (events, self._read_event))
                ]
                for reader in readers:
                    reader.start()
                self.stdout = process.stdout.read(_MAX_JSON_BYTES)
                code = process.wait()
                for reader in readers:
                    reader.join(timeout=5.0)  # seconds; a grandchild may keep the pipe open
                return code

    def _read_message(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self.last_line = text or self.last_line
        is_event = parse_line(line) is not None
        _log(f"| {text}" if is_event else text)  # the panel must not parse a message as an event

    def _read_event(self, line: bytes) -> None:
        _log(line.decode("ascii", "replace").rstrip())
        match parse_line(line):
            case (_, Failure(text)):
                self.failure = text


def _log(line: str) -> None:
    """Write a line in one call. `print` writes the newline separately, and two threads write."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _read_lines(stream: IO[bytes], handle: Callable[[bytes], None]) -> None:
    with suppress(ValueError, OSError):  # the stream was closed after the join timeout
        for line in stream:
            handle(line)


@contextmanager
def _closed_on_exit(pipe: IO[bytes]) -> Iterator[None]:
    """Close the pipe on SIGTERM and on exit from the context, so that the child exits gracefully."""
    previous_handler = signal.signal(signal.SIGTERM, lambda _number, _frame: pipe.close())
    try:
        with pipe:
            yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def main() -> None:
    """Run the command line, and exit as on SIGTERM when stdin closes.

    Stdin is a pipe without content. A terminated task closes the pipe; if the task dies, the kernel closes it.
    """

    def watch_stdin() -> None:
        while os.read(0, 1):
            pass
        # To the main thread: a signal to another thread would not interrupt the main thread's blocking call.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    threading.Thread(target=watch_stdin, daemon=True).start()
    from tipbench.cli.main import main as tipbench

    tipbench()


if __name__ == "__main__":
    main()
