"""Writers: threads that send results from the journal to the store during generation."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Self

from tipbench.errors import MlflowError, MlflowUnavailable
from tipbench.record.events import Message, Observer, Recording, Resumed, Waiting
from tipbench.record.journal import Entry, Journal
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import RunStore
from tipbench.text import plural

N_THREADS = 2  # MLflow on SQLite writes one run at a time, in 40 to 80 ms, so more threads would only wait
_REVISION_EVERY_S = 5.0  # between updates of the experiment's revision, which invalidates readers' caches
_UNAVAILABLE_RETRY_S = 1.0
_JOIN_S = 2.0  # a thread may hang in a request; it is a daemon, and its result stays in the journal
_MAX_REJECTED_IN_A_ROW = 3  # then the collect stops, because MLflow seems to reject everything
_MAX_SERVER_ERRORS = 30  # for one result, before it can be skipped
_MIN_OTHERS_STORED = 3  # since a result's first error; then the result itself seems to be the cause
_POLL_S = 0.2


class Writers:
    """Sends the results in a journal to an experiment, in threads that run while the context manager is open."""

    def __init__(
        self, store: RunStore, experiment_id: str, journal: Journal, observer: Observer, *, draining: bool = False
    ) -> None:
        self._store = store
        self._experiment_id = experiment_id
        self._journal = journal
        self._observer = observer
        self._draining = draining  # the journal is a dead process's: MLflow may already have any of its results
        self._n_stored_at_first_failure: dict[str, int] = {}  # by record id
        self._server_errors: Counter[str] = Counter()  # by record id
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._unavailable_since: float | None = None
        self._unavailable_why = ""
        self._revision_set_at = time.monotonic()
        self._revision_outdated = True  # at first too: an earlier process may have died before it updated the revision
        self._n_stored = 0
        self._skipped: list[str] = []  # messages, one per skipped result
        self._rejected_in_a_row = 0
        self._error: Exception | None = None
        self._threads = [threading.Thread(target=self._run, name=f"writer-{n}", daemon=True) for n in range(N_THREADS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._journal.wake()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def raise_if_failed(self) -> None:
        """Raise the exception that stopped a thread, if any."""
        if isinstance(self._error, MlflowError):
            raise MlflowError(f"{self._error} {self._journal_note()}", status=self._error.status) from self._error
        if self._error is not None:
            raise self._error

    def finish(self, *, max_unavailable_s: float, max_total_s: float | None = None) -> None:
        """Wait until all results are stored.

        Raises MlflowUnavailable once MLflow has been unavailable for `max_unavailable_s`, or after `max_total_s`.
        Raises MlflowError if results were skipped, except those of a dead process, which a new collect does not need.
        """
        started, last_reported = time.monotonic(), -1
        while (left := self._journal.n_unstored() - len(self._skipped)) > 0:  # skipped ones stay in the journal
            self.raise_if_failed()
            if left != last_reported:
                self._observer(Recording(left))
                last_reported = left
            now = time.monotonic()
            since = self._unavailable_since  # read once: a thread may set it to None
            # The time before this call does not count.
            if since is not None and now - max(since, started) > max_unavailable_s:
                raise MlflowUnavailable(f"{self._unavailable_why} {self._journal_note()}")
            if max_total_s is not None and now - started > max_total_s:
                raise MlflowUnavailable(f"MLflow took longer than {max_total_s:g} s. {self._journal_note()}")
            self._journal.wait_for_change(_POLL_S)
        self.raise_if_failed()
        self._note_available()
        self._update_revision(force=True)
        if self._skipped and not self._draining:
            raise MlflowError(
                f"MLflow refused {len(self._skipped)} of the results: {self._skipped[0]}. {self._journal_note()}"
            )

    def _journal_note(self) -> str:
        left = self._journal.n_unstored()
        return (
            f"{plural(left, 'result is', 'results are')} safe in the journal at {self._journal.path.parent}; "
            "once MLflow is available, run the same command again."
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            entry = self._journal.take(_POLL_S)
            if entry is None:
                continue
            try:
                self._store_entry(entry)
            except Exception as exc:  # noqa: BLE001 - a thread has no caller: `raise_if_failed` raises it in the main thread
                self._error = exc
                self._journal.wake()
                return

    def _store_entry(self, entry: Entry) -> None:
        run = self._journal.read(entry)
        failed_before = entry.record_id in self._n_stored_at_first_failure
        # The run of a refused model has the same record id in each collect.
        may_exist = self._draining or failed_before or run.kind is RunKind.REFUSED
        try:
            self._store.record(self._experiment_id, run, may_exist=may_exist)
        except MlflowUnavailable as exc:
            self._retry_later(entry, str(exc))
        except MlflowError as exc:
            self._handle_error(entry, run, exc)
        else:
            self._journal.mark_stored(entry)
            with self._lock:
                self._n_stored += 1
                self._rejected_in_a_row = 0
            self._note_available()
            self._revision_outdated = True
            self._update_revision()

    def _retry_later(self, entry: Entry, why: str) -> None:
        with self._lock:
            self._n_stored_at_first_failure.setdefault(entry.record_id, self._n_stored)
            self._unavailable_why = why
            newly_unavailable = self._unavailable_since is None
            if newly_unavailable:
                self._unavailable_since = time.monotonic()
        self._journal.put_back(entry)
        if newly_unavailable:
            self._observer(Message(f"{why} Results are kept in the journal until MLflow is available.", warning=True))
            self._observer(Waiting("MLflow", limit_s=0))
        self._stop.wait(_UNAVAILABLE_RETRY_S)

    def _handle_error(self, entry: Entry, run: NewRun, exc: MlflowError) -> None:
        """Retry the result after a server error (5xx), skip it if MLflow rejects it (400), otherwise raise `exc`.

        After many server errors, the result is skipped if MLflow stores other results, or when draining. After several
        rejections in a row, `exc` is raised. A skipped result stays in the journal; when draining, a rejected one is
        moved to another file.
        """
        if exc.status >= 500:
            with self._lock:
                self._server_errors[entry.record_id] += 1
                n_stored_since = self._n_stored - self._n_stored_at_first_failure.get(entry.record_id, self._n_stored)
                others_succeed = n_stored_since >= _MIN_OTHERS_STORED
                failed_often = self._server_errors[entry.record_id] >= _MAX_SERVER_ERRORS
            give_up = failed_often and (others_succeed or self._draining)  # a drain can continue without the result
            if not give_up:
                self._retry_later(entry, str(exc))  # may be temporary, such as a locked database or a full disk
                return
        elif exc.status == 400:
            with self._lock:
                self._rejected_in_a_row += 1
                if self._rejected_in_a_row >= _MAX_REJECTED_IN_A_ROW:
                    raise exc
        else:
            raise exc
        if self._draining and exc.status == 400:
            refused_path = self._journal.set_aside(entry)
            location = f", now in {refused_path}"
        else:
            location = ", which stays in the journal"
            self._skipped.append(f"{run.name}: {exc}")
        self._observer(Message(f"MLflow refused {run.name}{location}: {exc}", warning=True))

    def _note_available(self) -> None:
        with self._lock:
            was_unavailable = self._unavailable_since is not None
            self._unavailable_since = None
        if was_unavailable:
            self._observer(Resumed("MLflow"))

    def _update_revision(self, *, force: bool = False) -> None:
        """Mark the experiment as changed if results were stored, at most every few seconds; with `force`, at once."""
        with self._lock:
            elapsed_s = time.monotonic() - self._revision_set_at
            due = self._revision_outdated and (force or elapsed_s > _REVISION_EVERY_S)
            if due:
                self._revision_outdated, self._revision_set_at = False, time.monotonic()
        if due:
            try:
                self._store.mark_changed(self._experiment_id)
            except (MlflowUnavailable, MlflowError):
                self._revision_outdated = True
