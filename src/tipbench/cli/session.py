"""What commands open: MLflow by settings, the surroundings of a collect."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tipbench.cli.console import say
from tipbench.errors import LocalServerError, NotEnoughData, TipbenchError
from tipbench.generate.home import in_home
from tipbench.settings import Settings, mlflow_pages

if TYPE_CHECKING:
    from tipbench.generate.sizing import Memory
    from tipbench.plan.config import CollectConfig
    from tipbench.record.collect import Keeper, Surroundings
    from tipbench.record.events import Observer
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.store import Experiment


def open_keeper(settings: Settings, url: str | None) -> Keeper:
    """The MLflow to write to; the local one is started when there is no other."""
    from tipbench.record.collect import Keeper
    from tipbench.record.tracking import find_tracking

    tracking = find_tracking(url, writable_home(settings), start=True, report=say)
    store = _store(settings, tracking.url)
    return Keeper(store, tracking.identity, tracking.how.removeprefix("MLflow at "), store.close)


def local_mlflow(settings: Settings) -> str:
    """The address of the local MLflow, started when it does not run; no other server is considered."""
    from tipbench.record.tracking import find_tracking

    return find_tracking(None, writable_home(settings), start=True, report=say, local_only=True).url


def leads_to(settings: Settings, url: str) -> bool:
    """Whether a command without --mlflow-url reads from the server at `url`."""
    from tipbench.record.tracking import find_tracking

    try:
        usual = find_tracking(settings.get("mlflow_url"), settings.home, start=False, report=say)
        return usual.identity == find_tracking(url, settings.home, start=False, report=say).identity
    except TipbenchError:
        return False


def journal_of(settings: Settings, url: str | None, experiment: str) -> Path:
    """The folder where results for an experiment wait until MLflow has them."""
    from tipbench.record.journal import journal_folder
    from tipbench.record.tracking import find_tracking

    tracking = find_tracking(url or settings.get("mlflow_url"), settings.home, start=False, report=say)
    return journal_folder(settings.home, tracking.identity, experiment)


@contextmanager
def open_store(settings: Settings, url: str | None) -> Iterator[MlflowStore]:
    """The MLflow to read from; the local one is started when it has data. NotEnoughData when there never was any."""
    from tipbench.record.local_mlflow import LocalMlflow
    from tipbench.record.tracking import find_tracking

    wanted = url or settings.get("mlflow_url")
    has_data = LocalMlflow(settings.home).has_data()
    try:
        tracking = find_tracking(wanted, settings.home, start=has_data, report=say)
    except LocalServerError as exc:
        if has_data:
            raise
        raise NotEnoughData(
            "Nothing is recorded yet: no MLflow answers on localhost:5000, and the local one was never used. "
            "`tipbench demo` or `tipbench collect` makes the first experiment; --mlflow-url names another server."
        ) from exc
    if not wanted:
        say(f"reading from {tracking.how}")
    store = _store(settings, tracking.url)
    try:
        yield store
    finally:
        store.close()


def existing_experiment(store: MlflowStore, name: str) -> Experiment:
    """The experiment of that name; NotEnoughData when nothing was ever recorded under it."""
    experiment = store.experiment(name)
    if experiment is None:
        raise NotEnoughData(
            f"There is no experiment {name} in MLflow at {store.url}. `tipbench experiments` lists what there is; "
            "`tipbench collect` makes one."
        )
    return experiment


def surroundings(settings: Settings, config: CollectConfig, observer: Observer) -> Surroundings:
    """What a collect needs from outside."""
    from tipbench.record.collect import Surroundings

    return Surroundings(
        home=writable_home(settings),
        open_keeper=lambda: open_keeper(settings, config.mlflow_url),
        free_memory=lambda model: free_memory_for(model, config),
        observer=observer,
    )


def writable_home(settings: Settings) -> Path:
    """The home folder, made when missing; UsageError where nothing can be written."""
    home = settings.home
    with in_home(home, "cannot be made"):
        home.mkdir(parents=True, exist_ok=True)
    with in_home(home, "is not writable"):
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return home


def free_memory_for(model: str, config: CollectConfig) -> Memory:
    """This machine's free memory, where the model is computed here; unknown where it is not."""
    from tipbench.addresses import is_loopback
    from tipbench.generate.engine import engine_of
    from tipbench.generate.machine import free_memory
    from tipbench.generate.sizing import Memory

    elsewhere = engine_of(model) == "ollama" and not is_loopback(config.ollama_url)
    return Memory() if elsewhere else free_memory()


def _store(settings: Settings, url: str) -> MlflowStore:
    from tipbench.record.mlflow import MlflowStore

    return MlflowStore(
        url,
        username=settings.get("mlflow_username"),
        password=settings.get("mlflow_password"),
        token=settings.get("mlflow_token"),
        pages_url=mlflow_pages(settings, url),
    )
