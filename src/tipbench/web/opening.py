"""Which MLflow the panel works with: found when it is first needed, and looked for again when it no longer answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tipbench.errors import LocalServerError, NotEnoughData
from tipbench.record.journal import journal_folder
from tipbench.record.local_mlflow import LocalMlflow
from tipbench.record.mlflow import MlflowStore
from tipbench.record.store import RunStore
from tipbench.record.tracking import Tracking, find_tracking
from tipbench.settings import Settings, mlflow_pages

log = logging.getLogger("tipbench.web")


@dataclass(frozen=True)
class Opened:
    """A store, and who it is for journals and locks."""

    store: RunStore
    identity: str
    place: str  # as it may be shown: an address without a login


class Tracker:
    """Opens the store of the settings, or hands out the one it was given. Thread-safe."""

    def __init__(self, settings: Settings, store: RunStore | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._given = Opened(store, "given", "http://given.invalid") if store is not None else None
        self._opened: Opened | None = None
        self._url = ""
        self._doubtful = False
        self._mine: list[MlflowStore] = []

    def open(self) -> Opened:
        """The store to use. NotEnoughData when there is no MLflow and never was one."""
        if self._given is not None:
            return self._given
        with self._lock:
            if self._opened is None or self._doubtful:
                self._opened = self._found()
                self._doubtful = False
            return self._opened

    def doubt(self) -> None:
        """It did not answer: the local server may have come back on another port, so look again next time."""
        self._doubtful = True

    def journal(self, opened: Opened, experiment: str) -> Path:
        """Where results for an experiment wait until MLflow has them."""
        return journal_folder(self._settings.home, opened.identity, experiment)

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for store in self._mine:
                store.close()
            self._mine.clear()
            self._opened = None

    @contextmanager
    def named(self, url: str | None) -> Iterator[Opened]:
        """The server that a run's configuration names, for as long as it is needed; without a name the usual one."""
        if url is None or self._given is not None or url == self._settings.get("mlflow_url"):
            yield self.open()
            return
        opened, store = self._connected(find_tracking(url, self._settings.home, start=False, report=log.info))
        try:
            yield opened
        finally:
            store.close()

    def _found(self) -> Opened:
        tracking = self._tracking()
        if self._opened is not None and tracking.url == self._url:
            return self._opened
        opened, store = self._connected(tracking)
        self._url = tracking.url
        self._mine.append(store)
        return opened

    def _tracking(self) -> Tracking:
        home, wanted = self._settings.home, self._settings.get("mlflow_url")
        has_data = LocalMlflow(home).has_data()
        try:
            return find_tracking(wanted, home, start=has_data, report=log.info)
        except LocalServerError as exc:
            if has_data:
                raise
            raise NotEnoughData(
                "Nothing is recorded yet: no MLflow answers on localhost:5000, and the local one was never used. "
                "Start a run, or set MLFLOW_TRACKING_URI to the server that has the data."
            ) from exc

    def _connected(self, tracking: Tracking) -> tuple[Opened, MlflowStore]:
        get = self._settings.get
        store = MlflowStore(
            tracking.url,
            username=get("mlflow_username"),
            password=get("mlflow_password"),
            token=get("mlflow_token"),
            pages_url=mlflow_pages(self._settings, tracking.url),
        )
        return Opened(store, tracking.identity, store.url), store
