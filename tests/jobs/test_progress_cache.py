"""The cache of progress: every event is applied once and in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tipbench.errors import ServerUnavailable
from tipbench.jobs.job import Job, JobKind, JobState, JobStatus, LogTail, RecordedEvent
from tipbench.jobs.progress import ProgressCache, ProgressSnapshot
from tipbench.record.events import Message

JOB = Job(JobKind.COLLECT, "tip-bench-a", {}, id="one", state=JobState.RUNNING, created=0)


@dataclass
class Telling:
    """A runner whose jobs emit one message after the other; it counts requested events."""

    name: str = "local"
    lines: int = 0
    given: int = 0
    away: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def events(self, _job: Job, after: int = 0, limit: int = 500) -> Sequence[RecordedEvent]:
        if self.away:
            raise ServerUnavailable("not here")
        found = [RecordedEvent(10 * n, "", Message(f"line {n}")) for n in range(after // 10 + 1, self.lines + 1)][
            :limit
        ]
        with self.lock:
            self.given += len(found)
        return found

    def start(self, _job: Job) -> None:
        """Nothing."""

    def observe(self, _job: Job) -> JobStatus:
        return JobStatus(JobState.RUNNING)

    def cancel(self, _job: Job) -> None:
        """Nothing."""

    def log(self, _job: Job, max_bytes: int = 65_536) -> LogTail:
        return LogTail("", max_bytes, cut=False)

    def forget(self, _job: Job) -> None:
        """Nothing."""


@pytest.fixture
def telling() -> Telling:
    return Telling(lines=1200)


def last(snapshot: ProgressSnapshot) -> str:
    return snapshot.progress.messages[-1].text if snapshot.progress.messages else ""


def test_every_event_is_applied_once(telling: Telling) -> None:
    cache = ProgressCache(lambda _job: telling)
    assert (cache.current(JOB).cursor, last(cache.current(JOB))) == (12_000, "line 1200")
    telling.lines = 1203
    assert last(cache.current(JOB)) == "line 1203"
    assert telling.given == 1203


def test_progress_at_an_earlier_cursor_is_returned(telling: Telling) -> None:
    cache = ProgressCache(lambda _job: telling)
    assert [last(cache.at(JOB, cursor)) for cursor in (0, 9, 10, 6_005, 12_000, 10**9)] == [
        *("", "", "line 1", "line 600", "line 1200", "line 1200")
    ]


def test_the_cached_progress_is_returned_while_the_runner_is_unavailable(telling: Telling) -> None:
    cache = ProgressCache(lambda _job: telling)
    cache.current(JOB)
    telling.away = True
    assert last(cache.current(JOB)) == "line 1200"
    assert ProgressCache(lambda _job: telling).current(JOB) == ProgressSnapshot()


def test_concurrent_readers_get_the_same_progress(telling: Telling) -> None:
    cache, seen = ProgressCache(lambda _job: telling), []
    threads = [threading.Thread(target=lambda: seen.append(cache.current(JOB))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 8
    assert len(set(map(last, seen))) == 1


def test_memory_is_bounded(telling: Telling) -> None:
    from dataclasses import replace

    cache = ProgressCache(lambda _job: telling, size=3)
    for number in range(10):
        cache.current(replace(JOB, id=str(number)))
    assert list(cache._snapshots) == ["7", "8", "9"]
