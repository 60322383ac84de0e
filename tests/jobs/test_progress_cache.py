"""The cache of progress: every event is applied once and in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from support.scripted_runner import ScriptedRunner
from tipbench.errors import ServerUnavailable
from tipbench.jobs.job import Job, JobKind, JobState, RecordedEvent
from tipbench.jobs.progress import ProgressCache, ProgressSnapshot
from tipbench.record.events import Message

JOB = Job(JobKind.COLLECT, "tip-bench-a", {}, id="one", state=JobState.RUNNING, created=0)


@dataclass
class CountingRunner(ScriptedRunner):
    """A runner whose jobs emit `lines` messages; it counts the events that it returns."""

    lines: int = 1200
    returned: int = 0
    unavailable: bool = False

    def events(self, _job: Job, after: int = 0, limit: int = 500) -> Sequence[RecordedEvent]:
        if self.unavailable:
            raise ServerUnavailable("not here")
        numbers = range(after // 10 + 1, self.lines + 1)[:limit]
        with self._lock:
            self.returned += len(numbers)
        return [RecordedEvent(10 * number, "", Message(f"line {number}")) for number in numbers]


@pytest.fixture
def runner() -> CountingRunner:
    return CountingRunner()


def last_message(snapshot: ProgressSnapshot) -> str:
    return snapshot.progress.messages[-1].text if snapshot.progress.messages else ""


def test_every_event_is_applied_once(runner: CountingRunner) -> None:
    cache = ProgressCache(lambda _job: runner)
    assert (cache.current(JOB).cursor, last_message(cache.current(JOB))) == (12_000, "line 1200")
    runner.lines = 1203
    assert last_message(cache.current(JOB)) == "line 1203"
    assert runner.returned == 1203


def test_progress_at_an_earlier_cursor_is_returned(runner: CountingRunner) -> None:
    cache = ProgressCache(lambda _job: runner)
    assert [last_message(cache.at(JOB, cursor)) for cursor in (0, 9, 10, 6_005, 12_000, 10**9)] == [
        *("", "", "line 1", "line 600", "line 1200", "line 1200")
    ]


def test_the_cached_progress_is_returned_while_the_runner_is_unavailable(runner: CountingRunner) -> None:
    cache = ProgressCache(lambda _job: runner)
    cache.current(JOB)
    runner.unavailable = True
    assert last_message(cache.current(JOB)) == "line 1200"
    assert ProgressCache(lambda _job: runner).current(JOB) == ProgressSnapshot()


def test_concurrent_readers_get_the_same_progress(runner: CountingRunner) -> None:
    cache, seen = ProgressCache(lambda _job: runner), []
    threads = [threading.Thread(target=lambda: seen.append(cache.current(JOB))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 8
    assert len(set(map(last_message, seen))) == 1


def test_memory_is_bounded(runner: CountingRunner) -> None:
    cache = ProgressCache(lambda _job: runner, max_jobs=3)
    for number in range(10):
        cache.current(replace(JOB, id=str(number)))
    assert list(cache._snapshots) == ["7", "8", "9"]
