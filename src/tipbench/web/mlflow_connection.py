"""MLflow connection of the panel: located on first use, and again when the server is unreachable."""

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
from tipbench.record.mlflow import MlflowStore, Tracking, find_tracking
from tipbench.record.store import RunStore
from tipbench.settings import Settings, mlflow_login, mlflow_pages

log = logging.getLogger("tipbench.web")


@dataclass(frozen=True)
class OpenStore:
    """A store, with its identity for journals and locks."""

    store: RunStore
    identity: str
    place: str  # URL without credentials, for display


class MlflowConnection:
    """Opens the configured store, or returns `store` if given. Thread-safe."""

    def __init__(self, settings: Settings, store: RunStore | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._given = OpenStore(store, "given", "http://given.invalid") if store is not None else None
        self._opened: OpenStore | None = None
        self._url = ""
        self._doubtful = False
        self._mine: list[MlflowStore] = []

    def open(self) -> OpenStore:
        """Return the store. Raises NotEnoughData if no MLflow is available and nothing was ever recorded."""
        if self._given is not None:
            return self._given
        with self._lock:
            if self._opened is None or self._doubtful:
                self._opened = self._found()
                self._doubtful = False
            return self._opened

    def doubt(self) -> None:
        """Locate the server again on the next `open`; the local one may have restarted on another port."""
        self._doubtful = True

    def journal(self, opened: OpenStore, experiment: str) -> Path:
        """Return the folder of results not yet sent to MLflow."""
        return journal_folder(self._settings.home, opened.identity, experiment)

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for store in self._mine:
                store.close()
            self._mine.clear()
            self._opened = None

    @contextmanager
    def named(self, url: str | None) -> Iterator[OpenStore]:
        """Open the server at `url` for the duration of the context; None is the configured one."""
        if url is None or self._given is not None or url == self._settings.get("mlflow_url"):
            yield self.open()
            return
        opened, store = self._connected(find_tracking(url, self._settings.home, start=False, report=log.info))
        try:
            yield opened
        finally:
            store.close()

    def _found(self) -> OpenStore:
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
                "Nothing is recorded yet: no MLflow responds on localhost:5000, and the local one has no data. "
                "Start a run, or set MLFLOW_TRACKING_URI to the server that has the data."
            ) from exc

    def _connected(self, tracking: Tracking) -> tuple[OpenStore, MlflowStore]:
        pages, login = mlflow_pages(self._settings, tracking.url), mlflow_login(self._settings, tracking.url)
        store = MlflowStore(tracking.url, pages_url=pages, **login)
        return OpenStore(store, tracking.identity, store.url), store
