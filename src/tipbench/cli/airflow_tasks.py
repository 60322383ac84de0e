"""Functions that the DAG's tasks call (dags/bench_dag.py): JSON in and out, so each can run on another machine.

`conf` is the configuration of a DAG run: the keys of CollectConfig and `wait_for_judge`. Missing URLs are taken from
the worker's settings; all other worker settings are ignored, so that every task uses the same configuration.

A collect task runs `python -m tipbench.cli.airflow_tasks collect …` as its child process: `tipbench`, which also exits
as on SIGTERM when its stdin closes.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tipbench.cli.console import print_message
from tipbench.cli.options import open_store, open_tracking_store
from tipbench.cli.progress import LineProgress
from tipbench.errors import InvalidOption, LockHeld, NotEnoughData, ServerUnavailable, TipbenchError, UsageError
from tipbench.files import writable_home
from tipbench.generate.engine import ENGINES, engine_locks, engine_of, refused_start
from tipbench.http import canonical_url, is_http_url, is_loopback, same_server, strip_login
from tipbench.jobs.command import collect_request, command_arguments
from tipbench.jobs.folder import EVENTS_VARIABLE
from tipbench.plan.config import ADDRESSES, WAIT_FOR_JUDGE, CollectConfig, make_config, split_wait_for_judge
from tipbench.record.events import Collected, Event, Failure, event_line, parse_line
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.generate.engine import ModelFacts
    from tipbench.judge.sheet_store import StoredSheet
    from tipbench.plan.suite import Suite
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.plan_check import Plan
    from tipbench.record.store import Experiment

Conf = Mapping[str, Any]

_LOCK_WAIT_S = 120.0  # a terminated collect needs time to unload its model
_POLL_S = 1.0


def read_conf(conf: Conf, settings: Settings, *, uses_ollama: bool = False) -> CollectConfig:
    """Validate a conf; raises UsageError naming every unknown key, or a server that the worker does not allow.

    With `uses_ollama` the conf's Ollama is checked too; otherwise it is not used, or the DAG lists its hosts.
    """
    if unknown := sorted(set(conf) - set(CollectConfig.model_fields) - {WAIT_FOR_JUDGE}):
        raise UsageError(
            f"conf has {'keys' if len(unknown) > 1 else 'a key'} that are unknown: {', '.join(unknown)[:200]}. "
            f"It takes {', '.join((*CollectConfig.model_fields, WAIT_FOR_JUDGE))}."
        )
    try:
        values, _ = split_wait_for_judge(conf)
    except InvalidOption as exc:
        raise UsageError(f"conf {exc.key} {exc.problem}") from exc
    for key in ADDRESSES:
        if "@" in urlsplit(str(conf.get(key) or "")).netloc:
            raise UsageError(
                f"conf {key} holds a login, and Airflow shows the conf of every run. Leave it out, "
                "and set it in the worker's environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            )
    configured = {key: settings.values[key] for key in ADDRESSES if key in settings.values}
    given = {
        key: value for key, value in values.items() if value is not None and not (key in ADDRESSES and value == "")
    }
    config = make_config({**configured, **given}, {**settings.sources, **{key: f"conf {key}" for key in given}})
    for key in ADDRESSES:
        if key in given and (uses_ollama or key != "ollama_url"):
            _check_server(getattr(config, key) or "", key, settings)
    return config


def _check_server(url: str, key: str, settings: Settings) -> None:
    """Raise UsageError unless a server of the conf is configured or listed on this worker."""
    list_key = "panel_mlflow_urls" if key == "mlflow_url" else "panel_urls"
    hosts = [entry.partition("=")[2] for entry in settings.listed("ollama_hosts")] if key == "ollama_url" else []
    servers = list(filter(is_http_url, settings.servers(key, (*hosts, *settings.listed(list_key)))))
    if same_server(url, servers) is None:
        names = ", ".join(dict.fromkeys(map(strip_login, servers)))
        raise UsageError(
            f"conf {key} takes a server that the worker allows: {names} (got {url[:120]}). "
            f"Leave it out, or add it to {list_key} on the worker."
        )


def unload_left_behind(conf: Conf, ollama_url: str | None) -> dict[str, Any]:
    """Unload the model that a crashed collect on this machine left in the server's memory; skips a server in use."""
    settings = load_settings()
    config = read_conf(conf, settings, uses_ollama=ollama_url is None)
    config = config.model_copy(update={"ollama_url": ollama_url or config.ollama_url})
    unloaded = None
    for name, lock in engine_locks(config, writable_home(settings.home), "an unload after a collect").items():
        try:
            lock.acquire(wait=True, report=lambda _text: None, poll_s=_POLL_S, timeout_s=_LOCK_WAIT_S)
        except LockHeld:
            print_message("another collect uses the server; it unloads the model itself")
            return {"unloaded": None, "in_use": True}
        try:
            left, engine = lock.left_behind, ENGINES[name]
            if left is not None and engine.unload and engine.server:
                engine.unload(getattr(config, engine.server), left.model, left.digest)
                lock.note_empty()
                unloaded = left.model
                print_message(f"{unloaded} unloaded")
        finally:
            lock.release()
    return {"unloaded": unloaded, "in_use": False}


def print_event(event: Event) -> None:
    """Print an event to the task's log, where the panel reads it."""
    print(event_line(event, time.time()).decode().rstrip(), flush=True)


def log_event(event: Event) -> None:
    """Print a line about an event to the task's log."""
    LineProgress()(event)


@contextmanager
def _recorded(conf: Conf) -> Iterator[tuple[CollectConfig, MlflowStore, Experiment]]:
    """Open the configuration, store and experiment of a DAG run."""
    from tipbench.record.collect import retry_while_unavailable
    from tipbench.workflows.mlflow import existing_experiment

    settings = load_settings()
    config = read_conf(conf, settings)
    with open_store(settings, config.mlflow_url) as store:
        wait_s = config.server_wait_s
        yield (
            config,
            store,
            retry_while_unavailable(lambda: existing_experiment(store, config.experiment), "MLflow", wait_s, log_event),
        )


def pending_cells(conf: Conf) -> int:
    """Return how many cells of the run wait for a judge."""
    from tipbench.record.plan_check import configured_cells
    from tipbench.record.reader import count_states

    with _recorded(conf) as (config, store, experiment):
        return count_states(configured_cells(store, experiment.experiment_id, config)).pending


def export_for_judge(conf: Conf) -> dict[str, Any]:
    """Export a sheet of the run's pending cells to MLflow; returns its id and the cell counts."""
    from tipbench.judge.sheet import sheet_text
    from tipbench.record.plan_check import configured_cells
    from tipbench.record.reader import count_states
    from tipbench.record.run import RunState

    with _recorded(conf) as (config, store, experiment):
        runs = configured_cells(store, experiment.experiment_id, config)
        now = count_states(runs)
        if not now.pending + now.judged:
            raise NotEnoughData(
                f"{experiment.name} has no results of this run: {now.failed} cells failed, none succeeded. "
                "See the logs of the collect tasks."
            )
        pending = frozenset(run.run_id for run in runs if run.state == RunState.PENDING)
        judging = _sheet(store, experiment, config, pending) if pending else None
        print_message(f"{experiment.name}: {now.judged} cells judged, {now.pending} pending, {now.failed} failed")
        if judging is not None:
            print_message(f"sheet {judging.sheet.id}: tipbench judge export --experiment {experiment.name} --sheet "
                f"{judging.sheet.id} --out FILE, or judge in the panel")  # fmt: skip
        return {
            "experiment": experiment.name,
            "sheet": judging.sheet.id if judging else None,
            "sha256": hashlib.sha256(sheet_text(judging.sheet).encode()).hexdigest() if judging else None,
            "pending": now.pending,
            "judged": now.judged,
            "failed": now.failed,
            "url": experiment.url,
        }


def _sheet(
    store: MlflowStore, experiment: Experiment, config: CollectConfig, pending: frozenset[str]
) -> StoredSheet | None:
    """Return a sheet of exactly these cells, from an earlier attempt or new; None if none can be exported."""
    from tipbench.judge.export import ExportRequest, export_sheet
    from tipbench.judge.sheet_store import ItemKind, SheetStatus, stored_sheets

    for stored in stored_sheets(store, experiment.experiment_id, experiment.name):
        untouched = stored.status is SheetStatus.EXPORTED and stored.owner is None and not stored.provisional
        if untouched and {entry.run_id for entry in stored.entries if entry.kind is ItemKind.CELL} == pending:
            return stored
    try:
        return export_sheet(store, experiment, ExportRequest(only=pending, suite=config.suite)).stored
    except NotEnoughData as exc:
        print_message(f"no sheet was exported: {exc}")
        return None


def compare(conf: Conf) -> dict[str, Any]:
    """Rank the cells judged under this run's conditions, save the leaderboard in MLflow and return cell counts."""
    from tipbench.cli.compare import show_board
    from tipbench.compare.cells import CellFilter
    from tipbench.compare.leaderboard import read_leaderboard, record_board
    from tipbench.record.plan_check import config_conditions, configured_cells
    from tipbench.record.reader import count_states

    with _recorded(conf) as (config, store, experiment):
        now = count_states(configured_cells(store, experiment.experiment_id, config))
        own = CellFilter({"conditions": config_conditions(config)})  # others may be recorded while the run waits
        board, _read = read_leaderboard(store, experiment, own)
        show_board(board)
        print_message(f"of this run: {now.judged} cells judged, {now.pending} pending, {now.failed} failed")
        run_id = record_board(store, experiment.experiment_id, board)
        verdict = board.to_json()["verdict"]
        return {
            "experiment": experiment.name,
            "board_run": run_id,
            "verdict": verdict["text"],
            "leader": verdict["leader"],
            "decided": verdict["decided"],
            "provisional": board.provisional,
            "pending": now.pending,
            "judged": now.judged,
            "failed": now.failed,
            "url": experiment.url,
        }


Hosts = Mapping[str, str | None]  # collect task id → URL; None for the server of the configuration


@dataclass(frozen=True)
class ModelSurvey:
    """Models found on the servers: facts and possible tasks of accepted ones, reasons for refused ones."""

    facts: Mapping[str, ModelFacts]
    places: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str]


def plan_models(conf: Conf, hosts: Hosts) -> dict[str, Any]:
    """Assign models to collect tasks; refused and missing models are recorded in MLflow with a reason."""
    from tipbench.plan.grid import suite_for

    settings = load_settings()
    config = read_conf(conf, settings, uses_ollama=None in hosts.values())
    servers = choose_hosts(config, hosts, named=bool(conf.get("ollama_url")))
    suite = suite_for(config)
    found = _survey(config, servers, settings)
    stop = refused_start(found.facts, found.refused, config, " Set skip_refused to run the others.")
    if stop is not None and not config.skip_refused:
        raise stop
    made = _recorded_plan(config, suite, found, settings)
    if stop is not None:
        raise stop
    reasons = tuple(found.refused.values())
    for reason in reasons:
        print_message(f"refused: {reason}")
    if reasons:  # for the panel's summary of the run
        print_event(Collected(config.experiment, cells=0, recorded_before=0, generated=0, failed=0, refused=reasons))
    sizes = {model: facts.params_b or 0.0 for model, facts in found.facts.items() if model not in made.aliases}
    given = assign_models(sizes, found.places)
    shares = {task: given.get(task, []) for task in hosts}
    for task, models in shares.items():
        print_message(f"{task}: {', '.join(models) or 'nothing'}")
    return {
        "experiment": config.experiment,
        **shares,
        "refused": [{"model": model, "reason": reason} for model, reason in found.refused.items()],
        "cells": len(made.cells),
        "to_generate": len(made.missing),
    }


def choose_hosts(config: CollectConfig, hosts: Hosts, *, named: bool) -> dict[str, str]:
    """Return the servers that a run can use, by task. If hosts are listed, the conf's URL must be one of them.

    An unlisted loopback URL refers to the client that triggered the run, not to a worker, and is ignored.
    """
    if None in hosts.values():
        return dict.fromkeys(hosts, config.ollama_url)
    listed = {task: str(url) for task, url in hosts.items()}
    if not named:
        return listed
    wanted = {task: url for task, url in listed.items() if canonical_url(url) == canonical_url(config.ollama_url)}
    if not wanted and not is_loopback(config.ollama_url):
        raise UsageError(
            f"conf ollama_url takes one of the listed hosts: {', '.join(listed.values())} (got {config.ollama_url}). "
            "Leave it out to use all of them, or add the host to ollama_hosts."
        )
    return wanted or listed


def assign_models(sizes: Mapping[str, float], places: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Assign each model to one of its places, balancing total size; the result is deterministic.

    Uses model size instead of the remaining work, so that a continued run keeps each model on its host.
    """
    load: dict[str, float] = {}
    share: dict[str, str] = {}
    for model in sorted(sizes, key=lambda name: (-sizes[name], name)):
        task = min(places[model], key=lambda place: (load.get(place, 0.0), places[model].index(place)))
        load[task] = load.get(task, 0.0) + sizes[model]
        share[model] = task
    return {task: [model for model in sizes if share[model] == task] for task in dict.fromkeys(share.values())}


def _survey(config: CollectConfig, servers: Mapping[str, str], settings: Settings) -> ModelSurvey:
    """Query each server for its models; models that need no server run with the first task.

    A model that only an unavailable server may have is refused. Raises ServerUnavailable, for Airflow to try again, if
    all servers are unavailable, or for such a model if `skip_refused` is off.
    """
    local = [model for model in config.model_names if engine_of(model).server is None]
    remote = [model for model in config.model_names if model not in local]
    found: list[tuple[str, dict[str, ModelFacts]]] = []  # by task
    reasons: dict[str, list[str]] = {model: [] for model in config.model_names}
    unavailable: list[ServerUnavailable] = []
    queries = [(next(iter(servers)), config.ollama_url, local)] if local else []
    queries += [(task, url, remote) for task, url in servers.items() if remote]
    for task, url, models in queries:
        try:
            accepted, refused = _query(config.model_copy(update={"ollama_url": url}), models, settings)
        except ServerUnavailable as exc:
            accepted, refused = {}, dict.fromkeys(models, str(exc))
            unavailable.append(exc)
        found.append((task, accepted))
        for model, reason in refused.items():
            reasons[model].append(reason)
    facts = {model: known for _, accepted in reversed(found) for model, known in accepted.items()}  # of the first task
    missing = [model for model in config.model_names if model not in facts]
    if unavailable and (len(unavailable) == len(servers) or (set(remote) & set(missing) and not config.skip_refused)):
        raise unavailable[0]
    for error in unavailable:
        print_message(f"warning: {error} The other servers run its models.")
    return ModelSurvey(
        facts={model: facts[model] for model in config.model_names if model in facts},
        places={
            model: tuple(task for task, known in found if model in known and known[model].digest == facts[model].digest)
            for model in facts
        },
        refused={model: " ".join(dict.fromkeys(reasons[model])) for model in missing},
    )


def _query(
    config: CollectConfig, models: Iterable[str], settings: Settings
) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    from tipbench.generate.engine import EngineDependencies, build_engines, close_engines, model_facts

    selected = config.model_copy(update={"models": ",".join(models)})
    engines = build_engines(selected.model_names, EngineDependencies(selected, settings.home, print_message))
    try:
        return model_facts(engines, selected)
    finally:
        close_engines(engines, print_message)


def _recorded_plan(config: CollectConfig, suite: Suite, found: ModelSurvey, settings: Settings) -> Plan:
    """Record refusals, and plan against the cells already recorded."""
    from tipbench.generate.engine import free_memory
    from tipbench.plan.grid import conditions_of
    from tipbench.record.collect import retry_while_unavailable
    from tipbench.record.plan_check import make_plan, read_recorded
    from tipbench.record.summary import refused_run

    with open_tracking_store(settings, config.mlflow_url) as tracking:
        print_message(f"MLflow: {tracking.how}")
        store = tracking.store
        experiment = retry_while_unavailable(
            lambda: store.ensure_experiment(config.experiment), "MLflow", config.server_wait_s, log_event
        )
        for model, reason in found.refused.items():
            run = refused_run(model, reason, int(time.time() * 1000))
            store.record(experiment.experiment_id, run, maybe_there=True)
        if found.refused:
            store.touch(experiment.experiment_id)
        recorded = read_recorded(store, experiment.experiment_id, conditions_of(config, suite))
    return make_plan(suite, config, found.facts, found.refused, recorded, lambda m: free_memory(m, config))


_USAGE_ERROR = 2
_INTERRUPTED = 130
_MOST_JSON = 16_000_000
_SUMMARY_KEYS = ("experiment", "cells", "generated", "recorded_before", "failed", "seconds")


def collect_model(conf: Conf, model: str, ollama_url: str | None) -> dict[str, Any]:
    """Collect missing cells of one model. Raises UsageError for permanent errors, TipbenchError for retryable ones."""
    settings = load_settings()
    config = read_conf(conf, settings, uses_ollama=ollama_url is None)
    changed = {"models": model, "skip_refused": False, "wait": False} | (
        {"ollama_url": ollama_url} if ollama_url else {}
    )
    order = collect_request(config.model_copy(update=changed))
    child = ChildProcess([*command_arguments(order), "--json"], order.private)
    code = child.run()
    summary: dict[str, Any] = {}
    with suppress(ValueError, TypeError):
        summary = dict(json.loads(child.printed))
    if code == 0 and summary:
        return {"model": model} | {key: summary.get(key) for key in _SUMMARY_KEYS}
    reason = _reason(child, code, summary)
    if not child.failure:
        print_event(Failure(reason))
    raise (UsageError if code == _USAGE_ERROR else TipbenchError)(reason)


def _reason(child: ChildProcess, code: int, summary: Mapping[str, Any]) -> str:
    if child.failure:
        return child.failure
    if summary.get("failed"):
        first = next(iter(summary.get("failures") or ()), "")
        return f"{summary['failed']} of {summary.get('cells')} cells failed; the first: {first}"
    if code in (_INTERRUPTED, -signal.SIGTERM):
        return "The collect was stopped; finished cells are kept, and the next attempt continues."
    if code < 0:
        return f"The collect was ended by signal {-code}; finished cells are kept, and the next attempt continues."
    return f"The collect ended with {code}: {child.last_line or 'no message'}"


class ChildProcess:
    """Runs the command as a child process; prints its stderr and events line by line, and stores its stdout."""

    def __init__(self, words: list[str], private: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-P", "-m", __name__, *words]
        self._private = dict(private)
        self.printed = b""
        self.failure = ""
        self.last_line = ""

    def run(self) -> int:
        """Run the command and return its exit code; negative for a signal."""
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as events:
            try:
                process = subprocess.Popen(
                    self._command,
                    env=os.environ | self._private | {EVENTS_VARIABLE: f"/dev/fd/{writing}", "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            assert process.stdin is not None  # noqa: S101 - PIPE is passed to Popen
            assert process.stdout is not None  # noqa: S101
            assert process.stderr is not None  # noqa: S101
            with process, _closed_on_exit(process.stdin):
                readers = [
                    threading.Thread(target=_each_line, args=(stream, take), daemon=True)
                    for stream, take in ((process.stderr, self._read_message), (events, self._read_event))
                ]
                for reader in readers:
                    reader.start()
                self.printed = process.stdout.read(_MOST_JSON)
                code = process.wait()
                for reader in readers:
                    reader.join(timeout=5.0)  # do not wait for a grandchild that keeps the pipe open
                return code

    def _read_message(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self.last_line = text or self.last_line
        _log(f"| {text}" if parse_line(line) is not None else text)  # prefix output that could be parsed as an event

    def _read_event(self, line: bytes) -> None:
        _log(line.decode("ascii", "replace").rstrip())
        known = parse_line(line)
        if known is not None and isinstance(known[1], Failure):
            self.failure = known[1].text


def _log(line: str) -> None:
    """Write a line in one call: two threads write, and `print` writes the newline separately."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _each_line(stream: IO[bytes], take: Callable[[bytes], None]) -> None:
    with suppress(ValueError, OSError):  # the stream was closed after the join timeout
        for line in stream:
            take(line)


@contextmanager
def _closed_on_exit(pipe: IO[bytes]) -> Iterator[None]:
    """Close the pipe on SIGTERM or any exception, so that the child exits gracefully."""
    if threading.current_thread() is not threading.main_thread():
        with pipe:
            yield
        return
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: pipe.close())
    try:
        with pipe:
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Run the command line with a thread that watches stdin.

    Nothing is written to that pipe. The task closes it when it is terminated, and the kernel when the task has died.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        # To the main thread: a signal delivered to another thread does not interrupt the main thread's blocking call.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    from tipbench.cli.main import main as tipbench

    tipbench()


if __name__ == "__main__":
    main()
