"""Looks for cells that have begun to wait for a judge, whoever collected them, and keeps a message for each batch.

One small question to MLflow now and then: which experiments there are, with their revisions. Only one that has changed
and come to rest is looked into.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from tipbench.errors import MlflowAway, TipbenchError
from tipbench.jobs.job import JobKind, JobState
from tipbench.jobs.sqlite import JobStore
from tipbench.plan.config import check_experiment_name
from tipbench.record.reading import cells
from tipbench.record.run import RunState
from tipbench.record.store import Experiment
from tipbench.record.tracking import find_tracking
from tipbench.settings import Settings
from tipbench.times import iso
from tipbench.web.hook_store import HookStore, Message, Watched
from tipbench.web.opening import Opened, Tracker
from tipbench.web.snapshots import revision

PENDING = "cells.pending"
TEST = "test"
RESTLESS_S = 600.0  # an experiment that never comes to rest is looked into all the same
log = logging.getLogger("tipbench.web")


def message_of(event: str, now: float, experiment: str | None, **counts: int) -> Message:
    """What the receiver reads. Links are paths on the panel: where that is, the receiver's own token came with.

    Nothing in it tells which models or prompts wait: the receiver is a judge.
    """
    id_ = secrets.token_hex(16)
    payload: dict[str, Any] = {
        "event": event,
        "id": id_,
        "time": iso(now),
        "experiment": experiment,
        **counts,
        "links": {} if experiment is None else _links(experiment),
    }
    return Message(id_, event, experiment, json.dumps(payload))


def _links(experiment: str) -> dict[str, str]:
    place = f"/api/bench/judge/{quote(experiment, safe='', errors='backslashreplace')}"
    return {"sheets": f"{place}/sheets", "apply": f"{place}/apply"}


def _ours(name: str) -> bool:
    """Whether the panel has pages and addresses for it."""
    try:
        check_experiment_name(name)
    except ValueError:
        return False
    return True


def answering(settings: Settings, tracker: Tracker, *, given: bool) -> Callable[[], Opened]:
    """Opens the MLflow that answers now. It never starts the local one: who has stopped it, wants it stopped."""

    def opened() -> Opened:
        if not given:
            find_tracking(settings.get("mlflow_url"), settings.home, start=False, report=log.debug)
        return tracker.open()

    return opened


class Watch:
    """What has become pending. `look` does one round; `due` says whether it is time. For one thread."""

    def __init__(
        self,
        store: HookStore,
        jobs: JobStore,
        opened: Callable[[], Opened],
        *,
        every_s: float,
        clock: Callable[[], float] = time.time,
        away: Callable[[], None] = lambda: None,
    ) -> None:
        """`away` is told when MLflow no longer answers where it was."""
        self._store, self._jobs, self._opened = store, jobs, opened
        self._every_s, self._clock, self._away = every_s, clock, away
        self._next = 0.0
        self._collecting: set[str] = set()  # experiments into which a job of this panel collects now
        self._ended: set[str] = set()  # and those whose job has just ended
        self._restless: dict[Watched, tuple[str, float]] = {}  # the revision last seen, and since when it changes
        self.looked: float | None = None
        self.problem: str | None = None

    def due(self) -> bool:
        """Whether it is time to look; at once after a collect of this panel has ended, or waits for the judge."""
        running = self._jobs.in_states({JobState.RUNNING})
        now = {job.experiment for job in running if job.kind is JobKind.COLLECT}
        ended = self._collecting - now
        self._collecting, self._ended = now, (self._ended | ended) - now
        return bool(ended) or self._clock() >= self._next

    def look(self) -> None:
        """Keep a message for every experiment with new pending cells. A failure is kept in `problem`."""
        self._next = self._clock() + self._every_s
        problems: list[TipbenchError] = []
        try:
            opened = self._opened()
            for experiment in opened.store.experiments():
                if _ours(experiment.name):
                    problems += self._safely(opened, experiment)
        except MlflowAway as exc:
            self._away()
            problems.append(exc)
        except TipbenchError as exc:
            problems.append(exc)
        if not problems:
            self._ended.clear()
            self.looked = self._clock()
        self._tell(str(problems[0]) if problems else None)

    def _safely(self, opened: Opened, experiment: Experiment) -> list[TipbenchError]:
        """One experiment's trouble is its own, unless MLflow is away."""
        try:
            self._consider(opened, experiment)
        except MlflowAway:
            raise
        except TipbenchError as exc:
            return [exc]
        return []

    def _consider(self, opened: Opened, experiment: Experiment) -> None:
        watched, now = Watched(opened.identity, experiment.experiment_id), revision(experiment) or ""
        if experiment.name in self._collecting:
            return  # its end is near, and tells of all at once
        if self._store.revision(watched) == now:
            self._restless.pop(watched, None)
            return
        if experiment.name not in self._ended and not self._at_rest(watched, now):
            return
        self._restless.pop(watched, None)
        found = cells(opened.store, experiment.experiment_id, {"state": str(RunState.PENDING)})
        pending = {run.run_id for run in found}
        new = pending - self._store.told(watched)
        counts = {"pending": len(pending), "new": len(new)}
        message = message_of(PENDING, self._clock(), experiment.name, **counts) if new else None
        self._store.note(watched, now, pending, message)

    def _at_rest(self, watched: Watched, revision_now: str) -> bool:
        """Whether nobody has written since the last look: a collect elsewhere is told of once, at its end."""
        before, since = self._restless.get(watched, (None, self._clock()))
        self._restless[watched] = (revision_now, since)
        return before == revision_now or self._clock() - since >= RESTLESS_S

    def _tell(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            log.warning("webhook: cannot look for pending cells: %s", problem)
        self.problem = problem
