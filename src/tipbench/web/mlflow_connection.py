"""MLflow connection of the panel: located on first use, and again when the server is unreachable."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tipbench.record.collect import TrackingStore
from tipbench.record.mlflow import find_tracking
from tipbench.record.store import RunStore
from tipbench.settings import Settings
from tipbench.workflows.judging import judging_lock

JUDGING_WAIT_S = 20.0  # for another apply to finish
log = logging.getLogger("tipbench.web")


class MlflowConnection:
    """Opens the configured store, or returns `store` if given. Thread-safe."""

    def __init__(self, settings: Settings, store: RunStore | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._given = TrackingStore(store, "given", "given", "http://given.invalid") if store is not None else None
        self._opened: TrackingStore | None = None
        self._url = ""
        self._doubtful = False
        self._mine: list[TrackingStore] = []

    def open(self) -> TrackingStore:
        """Return the store. Raises NotEnoughData if no MLflow is available and nothing was ever recorded."""
        if self._given is not None:
            return self._given
        with self._lock:
            if self._opened is None or self._doubtful:
                access = self._settings.mlflow
                tracking = access.find(report=log.info)
                if self._opened is None or tracking.url != self._url:
                    self._opened, self._url = access.connect(tracking), tracking.url
                    self._mine.append(self._opened)
                self._doubtful = False
            return self._opened

    def doubt(self) -> None:
        """Locate the server again on the next `open`; the local one may have restarted on another port."""
        self._doubtful = True

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for store in self._mine:
                store.close()
            self._mine.clear()
            self._opened = None

    @contextmanager
    def named(self, url: str | None) -> Iterator[TrackingStore]:
        """Open the server at `url` for the duration of the context; None is the configured one."""
        if url is None or self._given is not None or url == self._settings.get("mlflow_url"):
            yield self.open()
            return
        access = self._settings.mlflow
        with access.connect(find_tracking(url, self._settings.home, start=False, report=log.info)) as opened:
            yield opened

    @contextmanager
    def judging_lock(self) -> Iterator[None]:
        """Lock the writing of scores, for panel and command line. Raises LockHeld after JUDGING_WAIT_S."""
        with judging_lock(self._settings.home, self.open().url, wait_s=JUDGING_WAIT_S):
            yield
