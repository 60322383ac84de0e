"""MLflow stores and the collect environment, opened from settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tipbench.cli.console import print_message
from tipbench.errors import LocalServerError, NotEnoughData, TipbenchError
from tipbench.files import writable_home
from tipbench.http import is_loopback
from tipbench.settings import Settings, mlflow_login, mlflow_pages

if TYPE_CHECKING:
    from tipbench.generate.engine import Memory
    from tipbench.plan.config import CollectConfig
    from tipbench.record.collect import CollectEnvironment, TrackingStore
    from tipbench.record.events import Observer
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.store import Experiment


def open_tracking_store(settings: Settings, url: str | None) -> TrackingStore:
    """Open the MLflow to write to; starts the local one if there is no other."""
    from tipbench.record.collect import TrackingStore
    from tipbench.record.mlflow import find_tracking

    tracking = find_tracking(url, writable_home(settings.home), start=True, report=print_message)
    store = _store(settings, tracking.url)
    return TrackingStore(store, tracking.identity, tracking.how.removeprefix("MLflow at "), store.close)


def local_mlflow(settings: Settings) -> str:
    """Return the URL of the local MLflow, starting it if needed; ignores other servers."""
    from tipbench.record.mlflow import find_tracking

    return find_tracking(None, writable_home(settings.home), start=True, report=print_message, local_only=True).url


def is_default_server(settings: Settings, url: str) -> bool:
    """Return whether a command without --mlflow-url reads from the server at `url`."""
    from tipbench.record.mlflow import find_tracking

    try:
        usual = find_tracking(settings.get("mlflow_url"), settings.home, start=False, report=print_message)
        return usual.identity == find_tracking(url, settings.home, start=False, report=print_message).identity
    except TipbenchError:
        return False


def journal_of(settings: Settings, url: str | None, experiment: str) -> Path:
    """Return the folder of an experiment's results that are not yet recorded in MLflow."""
    from tipbench.record.journal import journal_folder
    from tipbench.record.mlflow import find_tracking

    tracking = find_tracking(url or settings.get("mlflow_url"), settings.home, start=False, report=print_message)
    return journal_folder(settings.home, tracking.identity, experiment)


@contextmanager
def open_store(settings: Settings, url: str | None) -> Iterator[MlflowStore]:
    """Open the MLflow to read from; starts the local one if it has data. Raises NotEnoughData if there is none."""
    from tipbench.record.local_mlflow import LocalMlflow
    from tipbench.record.mlflow import find_tracking

    wanted = url or settings.get("mlflow_url")
    has_data = LocalMlflow(settings.home).has_data()
    try:
        tracking = find_tracking(wanted, settings.home, start=has_data, report=print_message)
    except LocalServerError as exc:
        if has_data:
            raise
        raise NotEnoughData(
            "Nothing is recorded yet: no MLflow responds on localhost:5000, and the local one has no data. "
            "`tipbench demo` or `tipbench collect` creates the first experiment; --mlflow-url selects another server."
        ) from exc
    if not wanted:
        print_message(f"reading from {tracking.how}")
    store = _store(settings, tracking.url)
    try:
        yield store
    finally:
        store.close()


def existing_experiment(store: MlflowStore, name: str) -> Experiment:
    """Return the experiment. Raises NotEnoughData if it does not exist."""
    experiment = store.experiment(name)
    if experiment is None:
        raise NotEnoughData(
            f"Unknown experiment {name} in MLflow at {store.url}. `tipbench experiments` lists the recorded ones; "
            "`tipbench collect` creates one."
        )
    return experiment


def collect_environment(settings: Settings, config: CollectConfig, observer: Observer) -> CollectEnvironment:
    """Return the environment of a collect."""
    from tipbench.record.collect import CollectEnvironment

    return CollectEnvironment(
        home=writable_home(settings.home),
        open_store=lambda: open_tracking_store(settings, config.mlflow_url),
        free_memory=lambda model: free_memory_for(model, config),
        observer=observer,
    )


def free_memory_for(model: str, config: CollectConfig) -> Memory:
    """Return this machine's free memory; unknown if the model runs on another machine."""
    from tipbench.generate.engine import Memory, engine_of, free_memory

    elsewhere = engine_of(model) == "ollama" and not is_loopback(config.ollama_url)
    return Memory() if elsewhere else free_memory()


def _store(settings: Settings, url: str) -> MlflowStore:
    from tipbench.record.mlflow import MlflowStore

    return MlflowStore(url, pages_url=mlflow_pages(settings, url), **mlflow_login(settings, url))
