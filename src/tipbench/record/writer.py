"""Writers: threads that carry results from the journal to the store while generation goes on."""

from __future__ import annotations

import threading
import time
from typing import Self

from tipbench.errors import MlflowAway, MlflowRefused
from tipbench.record.events import Message, Observer, Recording, Resumed, Waiting
from tipbench.record.journal import Entry, Journal
from tipbench.record.run import RunKind
from tipbench.record.store import RunStore

WRITERS = 2  # MLflow on SQLite takes 80 ms a run however many ask; two keep it busy, more only queue
_REVISION_EVERY_S = 2.0
_AWAY_RETRY_S = 1.0


class Writers:
    """Drains one journal into one experiment. A context manager: leaving it stops the threads, keeps the journal."""

    def __init__(
        self, store: RunStore, experiment_id: str, journal: Journal, observer: Observer, *, maybe_there: bool = False
    ) -> None:
        self._store = store
        self._experiment_id = experiment_id
        self._journal = journal
        self._observer = observer
        self._maybe_there = maybe_there  # everything in this journal may have been kept by a process that died
        self._uncertain: set[str] = set()  # asked for, but never heard whether it was kept
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._touched = 0.0
        self._dirty = False
        self._error: Exception | None = None
        self.refused: list[str] = []  # results MLflow will not take; they stay in the journal
        self._threads = [threading.Thread(target=self._run, name=f"writer-{n}", daemon=True) for n in range(WRITERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._journal.wake()
        for thread in self._threads:
            thread.join(timeout=60)
        self._touch(force=True)

    def check(self) -> None:
        """Raise what stopped a writer, if anything did."""
        if self._error is not None:
            raise self._error

    def finish(self, wait_s: float, *, mention_limit: bool = True) -> None:
        """Wait until everything is kept. MlflowAway when the server stays away for `wait_s`."""
        told = -1
        while (left := self._left()) > 0:
            self.check()
            if left != told:
                self._observer(Recording(left))
                told = left
            away = self._away_since
            if away is not None and time.monotonic() - away > wait_s:
                limit = f" for {wait_s:g} s" if mention_limit else ""
                raise MlflowAway(
                    f"MLflow did not answer{limit}. {left} result{'s are' if left > 1 else ' is'} safe in the journal "
                    f"at {self._journal.path.parent}; run the same command again when MLflow is back."
                )
            self._journal.wait_for_change(0.2)
        self.check()
        self._touch(force=True)
        if self.refused:
            raise MlflowRefused(
                f"MLflow refused {len(self.refused)} results, which stay in the journal at {self._journal.path}: "
                f"{self.refused[0]}"
            )

    def _left(self) -> int:
        return self._journal.outstanding() - len(self.refused)

    def _run(self) -> None:
        while not self._stop.is_set():
            entry = self._journal.take(0.2)
            if entry is None:
                self._touch()
                continue
            try:
                self._keep(entry)
            except Exception as exc:  # noqa: BLE001 - a thread has no caller: `check` raises it in the main thread
                self._error = exc
                self._journal.put_back(entry)
                return

    def _keep(self, entry: Entry) -> None:
        run = self._journal.read(entry)
        maybe_there = self._maybe_there or entry.record_id in self._uncertain or run.kind is RunKind.REFUSED
        try:
            self._store.record(self._experiment_id, run, maybe_there=maybe_there)
        except MlflowAway as exc:
            self._try_later(entry, str(exc))
            return
        except MlflowRefused as exc:
            if exc.status >= 500:  # as when its database is locked or its disk full: it may pass
                self._try_later(entry, str(exc))
                return
            if exc.status != 400:
                raise
            self.refused.append(f"{run.name}: {exc}")  # this one only: the others may be fine
            return
        self._journal.kept(entry)
        self._note_back()
        self._dirty = True
        self._touch()

    def _try_later(self, entry: Entry, why: str) -> None:
        self._uncertain.add(entry.record_id)
        self._journal.put_back(entry)
        with self._lock:
            first = self._away_since is None
            if first:
                self._away_since = time.monotonic()
        if first:
            self._observer(Message(f"{why} Results go into the journal meanwhile.", warning=True))
            self._observer(Waiting("MLflow", 0))
        self._stop.wait(_AWAY_RETRY_S)

    def _note_back(self) -> None:
        with self._lock:
            was_away, self._away_since = self._away_since is not None, None
        if was_away:
            self._observer(Resumed("MLflow"))

    def _touch(self, *, force: bool = False) -> None:
        """Tell readers that their cache is old: at most every two seconds while writing, and at the end."""
        with self._lock:
            due = self._dirty and (force or time.monotonic() - self._touched > _REVISION_EVERY_S)
            if due:
                self._dirty, self._touched = False, time.monotonic()
        if due:
            try:
                self._store.touch(self._experiment_id)
            except (MlflowAway, MlflowRefused):
                self._dirty = True
