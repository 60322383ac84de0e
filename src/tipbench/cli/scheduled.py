"""What the tasks of a scheduler call (dags/bench_dag.py): plain JSON in and out, so that each may run on another box.

A `conf` is what a run was triggered with: the keys of CollectConfig and `wait_for_judge`. Where it names no address,
that of the worker counts; nothing else is taken from the worker's own settings, so every task means the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tipbench.errors import LockHeld, NotEnoughData, UsageError
from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig, make_config
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.generate.lock import ResourceLock
    from tipbench.jobs import events as wire
    from tipbench.judge.judging import Judging
    from tipbench.record.events import Event
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.store import Experiment

Conf = Mapping[str, Any]

_ADDRESSES = ("ollama_url", "mlflow_url")
_LOCK_WAIT_S = 120.0  # a collect that was told to end needs a while to see its model gone
_POLL_S = 1.0


def read_conf(conf: Conf, settings: Settings) -> CollectConfig:
    """The configuration of a run; UsageError names every key that does not belong there."""
    if unknown := sorted(set(conf) - set(CollectConfig.model_fields) - {WAIT_FOR_JUDGE}):
        raise UsageError(
            f"conf has {'keys' if len(unknown) > 1 else 'a key'} that no run knows: {', '.join(unknown)[:200]}. "
            f"It takes {', '.join((*CollectConfig.model_fields, WAIT_FOR_JUDGE))}."
        )
    if not isinstance(conf.get(WAIT_FOR_JUDGE, False), bool):
        raise UsageError(f"conf {WAIT_FOR_JUDGE} takes true or false (got {str(conf[WAIT_FOR_JUDGE])[:80]!r}).")
    for key in _ADDRESSES:
        if "@" in urlsplit(str(conf.get(key) or "")).netloc:
            raise UsageError(
                f"conf {key} holds a login, and a scheduler shows what a run was triggered with. Leave it out there, "
                "and set it in the worker's environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            )
    own = {key: settings.values[key] for key in _ADDRESSES if key in settings.values}
    empty = {key for key in conf if conf[key] is None or (key in _ADDRESSES and conf[key] == "")}
    given = {key: value for key, value in conf.items() if key not in empty | {WAIT_FOR_JUDGE}}
    return make_config({**own, **given}, {**settings.sources, **{key: f"conf {key}" for key in given}})


def unload_left_behind(conf: Conf, ollama_url: str | None) -> dict[str, Any]:
    """Free what a collect of this box that died has left in the server's memory; a running one is left alone."""
    from tipbench.addresses import identity_of
    from tipbench.cli.console import say
    from tipbench.cli.session import writable_home
    from tipbench.generate.lock import ResourceLock

    settings = load_settings()
    url = ollama_url or read_conf(conf, settings).ollama_url
    lock = ResourceLock(writable_home(settings), f"Ollama at {identity_of(url)}", "an unload after a collect")
    if not _taken(lock):
        say("another collect uses the server; it frees what it finds there itself")
        return {"unloaded": None, "in_use": True}
    try:
        left = lock.left_behind
        if left is not None:
            _unload(url, left.model, left.digest)
            lock.note_empty()
            say(f"{left.model} unloaded")
    finally:
        lock.release()
    return {"unloaded": left.model if left else None, "in_use": False}


def _taken(lock: ResourceLock) -> bool:
    """Whether the lock could be had in time."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            lock.acquire(wait=False, report=lambda _text: None)
        except LockHeld:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _unload(url: str, model: str, digest: str) -> None:
    from tipbench.generate.ollama_rest import OllamaRest
    from tipbench.generate.residency import wait_until_gone

    rest = OllamaRest(url)
    try:
        if any(each.digest == digest for each in rest.resident() or ()):
            rest.unload(model)
        wait_until_gone(rest, digest)
    finally:
        rest.close()


def print_event(event: wire.Event) -> None:
    """Among the words of a task's log, as the panel reads it there."""
    from tipbench.jobs.events import event_line

    print(event_line(event, time.time()).decode().rstrip(), flush=True)


def tell(event: Event) -> None:
    """A line about a wait, in the task's log."""
    from tipbench.cli.progress import Lines

    Lines()(event)


@contextmanager
def _recorded(conf: Conf) -> Iterator[tuple[CollectConfig, MlflowStore, Experiment]]:
    """The configuration of a run, and the experiment it was recorded in."""
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.record.collect import patiently

    settings = load_settings()
    config = read_conf(conf, settings)
    with open_store(settings, config.mlflow_url) as store:
        wait_s = config.server_wait_s
        yield config, store, patiently(lambda: existing_experiment(store, config.experiment), "MLflow", wait_s, tell)


def export_for_judge(conf: Conf) -> dict[str, Any]:
    """A sheet of the run's cells that wait for a judge, kept in MLflow; what is returned names it and holds no path."""
    from tipbench.cli.console import say
    from tipbench.record.asked import asked_cells, counted
    from tipbench.record.run import RunState

    with _recorded(conf) as (config, store, experiment):
        runs = asked_cells(store, experiment.experiment_id, config)
        now = counted(runs)
        if not now.pending + now.judged:
            raise NotEnoughData(
                f"{experiment.name} has no answers of this run: {now.failed} cells failed, none succeeded. "
                "The logs of the collect tasks say why."
            )
        pending = frozenset(run.run_id for run in runs if run.state == RunState.PENDING)
        judging = _sheet(store, experiment, config, pending) if pending else None
        say(f"{experiment.name}: {now.judged} cells judged, {now.pending} pending, {now.failed} failed")
        if judging is not None:
            say(f"sheet {judging.sheet.id}: tipbench judge export --experiment {experiment.name} --sheet "
                f"{judging.sheet.id} --out FILE, or judge in the panel")  # fmt: skip
        return {
            "experiment": experiment.name,
            "sheet": judging.sheet.id if judging else None,
            "sha256": _digest(judging) if judging else None,
            "pending": now.pending,
            "judged": now.judged,
            "failed": now.failed,
            "url": experiment.url,
        }


def _sheet(
    store: MlflowStore, experiment: Experiment, config: CollectConfig, pending: frozenset[str]
) -> Judging | None:
    """The sheet of exactly these cells: the one a try before this one made, else a new one; None when none can be."""
    from tipbench.cli.console import say
    from tipbench.judge.exporting import Request, export_sheet
    from tipbench.judge.judging import SheetStatus, judgings
    from tipbench.judge.key import Behind

    for there in judgings(store, experiment.experiment_id, experiment.name):
        untouched = there.status is SheetStatus.EXPORTED and there.owner is None and not there.provisional
        if untouched and {entry.run_id for entry in there.entries if entry.behind is Behind.CELL} == pending:
            return there
    try:
        return export_sheet(store, experiment, Request(only=pending, suite=config.suite)).judging
    except NotEnoughData as exc:
        say(f"no sheet was made: {exc}")
        return None


def _digest(judging: Judging) -> str:
    import hashlib

    from tipbench.judge.sheet import sheet_text

    return hashlib.sha256(sheet_text(judging.sheet).encode()).hexdigest()


def compare(conf: Conf) -> dict[str, Any]:
    """Rank what is judged under this run's conditions, keep the board in MLflow, and say how much is pending."""
    from tipbench.cli.compare import show_board
    from tipbench.cli.console import say
    from tipbench.compare.cells import Question
    from tipbench.compare.keeping import keep_board
    from tipbench.compare.reading import read_leaderboard
    from tipbench.record.asked import asked_cells, asked_conditions, counted

    with _recorded(conf) as (config, store, experiment):
        now = counted(asked_cells(store, experiment.experiment_id, config))
        own = Question({"conditions": asked_conditions(config)})  # while a judge is awaited, others may come
        board, _read = read_leaderboard(store, experiment, own)
        show_board(board)
        say(f"of this run: {now.judged} cells judged, {now.pending} pending, {now.failed} failed")
        run_id = keep_board(store, experiment.experiment_id, board)
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
