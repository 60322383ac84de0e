"""What commands open: MLflow by settings, the surroundings of a collect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tipbench.errors import NotEnoughData
from tipbench.settings import Settings

from .console import say

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

    tracking = find_tracking(url, settings.home, start=True, report=say)
    return Keeper(_store(settings, tracking.url), tracking.identity, tracking.how)


@contextmanager
def open_store(settings: Settings, url: str | None) -> Iterator[MlflowStore]:
    """The MLflow to read from; the local one is started when it has data and is not running."""
    from tipbench.record.local_mlflow import LocalMlflow
    from tipbench.record.tracking import find_tracking

    wanted = url or settings.get("mlflow_url")
    tracking = find_tracking(wanted, settings.home, start=LocalMlflow(settings.home).has_data(), report=say)
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
        home=settings.home,
        open_keeper=lambda: open_keeper(settings, config.mlflow_url),
        free_memory=lambda model: free_memory_for(model, config),
        observer=observer,
    )


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
    )
