"""The job store: no job is lost or duplicated, and every transition is legal, also with concurrent callers."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from support.threads import in_threads
from tipbench.errors import JobConflict, JobNotFound, UsageError
from tipbench.jobs.job import (
    ENDED,
    TRANSITIONS,
    Job,
    JobKind,
    JobRequest,
    JobState,
    path_between,
)
from tipbench.jobs.store import JobFilter, JobStore
from tipbench.jobs.supervisor import retry

REQUEST = JobRequest(
    JobKind.COLLECT,
    "tip-bench-a",
    {"models": "a:1b", "n_tips": 3, "temperature": 0.7, "evict": False, "mlflow_url": None},
    {"TIPBENCH_MLFLOW_URL": "http://anna:secret@box"},
    ("Ollama at http://localhost:11434",),
    started_by="admin",
)
RUNNING, LOST = JobState.RUNNING, JobState.LOST


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "jobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[JobStore]:
    with JobStore(path) as opened:
        yield opened


def move_through(store: JobStore, job: Job, *states: JobState) -> Job:
    for state in states:
        found = store.move(job.id, store.get(job.id).state, state)
        assert found is not None
        job = found
    return job


def test_a_request_round_trips(store: JobStore) -> None:
    job, new = store.add(REQUEST, "key-1")
    assert new
    assert (job.state, job.key, job.started, job.ended) == (JobState.QUEUED, "key-1", None, None)
    for name in ("kind", "experiment", "arguments", "private", "resources", "started_by", "runner", "retry_of"):
        assert getattr(job, name) == getattr(REQUEST, name)
    assert store.get(job.id) == job


def test_an_accepted_job_survives_the_process(path: Path) -> None:
    with JobStore(path) as store:
        job = store.add(REQUEST, "key-1")[0]
        move_through(store, job, RUNNING, LOST)
    with JobStore(path) as store:
        assert store.get(job.id).state is LOST
        assert store.add(REQUEST, "key-1")[1] is False


def test_the_same_key_and_request_give_the_same_job(store: JobStore) -> None:
    first, _ = store.add(REQUEST, "key-1")
    move_through(store, first, RUNNING)
    again, new = store.add(replace(REQUEST, started_by="ben"), "key-1")
    assert (again.id, new, again.state) == (first.id, False, RUNNING)


def test_the_same_key_with_another_request_is_refused(store: JobStore) -> None:
    first, _ = store.add(REQUEST, "key-1")
    for other in (
        replace(REQUEST, arguments={**REQUEST.arguments, "n_tips": 4}),
        replace(REQUEST, experiment="tip-bench-b"),
        replace(REQUEST, private={}),
        replace(REQUEST, kind=JobKind.JUDGE),
    ):
        with pytest.raises(JobConflict, match=f"belongs to job {first.id}"):
            store.add(other, "key-1")
    assert len(store.page().items) == 1


def test_without_a_key_every_request_is_a_new_job(store: JobStore) -> None:
    assert len({store.add(REQUEST)[0].id for _ in range(20)}) == 20


def test_an_invalid_key_is_refused(store: JobStore) -> None:
    for key in ["", "  ", "x" * 201, "a\nb", "a\x00"]:
        with pytest.raises(UsageError, match="1 to 200 printable characters"):
            store.add(REQUEST, key)


def test_the_same_key_on_two_panels_makes_one_job(path: Path) -> None:
    def add(_: int) -> tuple[str, bool]:
        with JobStore(path) as store:
            job, new = store.add(REQUEST, "key-1")
            return job.id, new

    created = in_threads(8, add)
    assert len({job_id for job_id, _ in created}) == 1
    assert sum(new for _, new in created) == 1


def test_many_panels_can_create_the_store_at_once(tmp_path: Path) -> None:
    def add(path: Path, _: int) -> str:
        with JobStore(path) as store:
            return store.add(REQUEST)[0].id

    for number in range(20):
        assert len(set(in_threads(8, partial(add, tmp_path / str(number) / "jobs.db")))) == 8


def test_of_several_callers_that_move_a_job_one_succeeds(path: Path) -> None:
    with JobStore(path) as store:
        job = store.add(REQUEST)[0]

        def move(_: int) -> bool:
            with JobStore(path) as mine:
                return mine.move(job.id, JobState.QUEUED, RUNNING) is not None

        assert sorted(in_threads(8, move)) == [False] * 7 + [True]
        assert store.get(job.id).state is RUNNING


DAY_S = 86_400.0


@pytest.fixture
def store_with_clock(path: Path) -> Iterator[tuple[JobStore, Callable[[float], None]]]:
    """A store, and a function that advances its clock by days."""
    now = [1_000_000.0]
    with JobStore(path, clock=lambda: now[0]) as opened:
        yield opened, lambda days: now.__setitem__(0, now[0] + days * DAY_S)


def test_a_job_is_found_by_its_key(store: JobStore) -> None:
    job, _ = store.add(REQUEST, "key-1")
    assert store.by_key("key-1") == job
    assert store.by_key("key-2") is None


def test_only_jobs_that_ended_long_ago_are_expired(store_with_clock: tuple[JobStore, Callable[[float], None]]) -> None:
    store, pass_days = store_with_clock
    old = [store.add(REQUEST)[0] for _ in range(4)]
    move_through(store, old[0], RUNNING, JobState.SUCCEEDED)
    move_through(store, old[1], RUNNING)
    move_through(store, old[2], RUNNING, LOST)
    pass_days(80)
    young = move_through(store, store.add(REQUEST)[0], RUNNING, JobState.FAILED)
    assert store.expired(90 * DAY_S) == []
    pass_days(11)
    assert [job.id for job in store.expired(90 * DAY_S)] == [old[0].id, old[2].id]
    pass_days(80)
    assert [job.id for job in store.expired(90 * DAY_S)] == [old[0].id, old[2].id, young.id]
    assert len(store.expired(90 * DAY_S, limit=1)) == 1


def test_a_lost_job_may_be_removed_unless_it_has_come_back(store: JobStore) -> None:
    gone, back = (move_through(store, store.add(REQUEST)[0], RUNNING, LOST) for _ in range(2))
    move_through(store, back, RUNNING)
    assert store.remove(gone.id)
    assert not store.remove(back.id)


def test_a_retried_job_is_kept_as_long_as_its_retry(store_with_clock: tuple[JobStore, Callable[[float], None]]) -> None:
    store, pass_days = store_with_clock
    old = move_through(store, store.add(REQUEST)[0], RUNNING, JobState.FAILED)
    pass_days(91)
    again = retry(store, old.id).job
    assert store.expired(90 * DAY_S) == []
    assert store.remove(old.id) is False
    move_through(store, again, RUNNING, JobState.SUCCEEDED)
    pass_days(91)
    assert [job.id for job in store.expired(90 * DAY_S)] == [again.id]
    assert store.remove(again.id)
    assert [job.id for job in store.expired(90 * DAY_S)] == [old.id]
    assert store.remove(old.id)
    assert store.page().items == ()


def test_an_active_job_cannot_be_removed(store: JobStore) -> None:
    for states in [(), (RUNNING,), (RUNNING, JobState.WAITING)]:
        job = move_through(store, store.add(REQUEST)[0], *states)
        assert store.remove(job.id) is False
        assert store.get(job.id) == job


def test_the_key_of_a_removed_job_can_be_used_again(store: JobStore) -> None:
    job = move_through(store, store.add(REQUEST, "key-1")[0], RUNNING, JobState.SUCCEEDED)
    assert store.remove(job.id)
    assert store.remove(job.id) is False
    again, new = store.add(REQUEST, "key-1")
    assert new
    assert again.id != job.id


def test_a_job_that_does_not_exist_is_missing(store: JobStore) -> None:
    with pytest.raises(JobNotFound, match="Unknown job 'nosuch'"):
        store.get("nosuch")
    with pytest.raises(JobNotFound):
        store.request_cancel("nosuch")


def test_the_list_is_newest_first_and_pages_are_complete(store: JobStore) -> None:
    created = [store.add(REQUEST)[0].id for _ in range(25)]
    ids, after, pages = [], None, 0
    while pages == 0 or after is not None:
        page = store.page(limit=10, after=after)
        ids += [job.id for job in page.items]
        after, pages = page.next, pages + 1
        store.add(REQUEST)  # new jobs do not move the pages
    assert (ids, pages) == (created[::-1], 3)


def test_the_list_can_be_filtered(store: JobStore) -> None:
    judge = store.add(replace(REQUEST, kind=JobKind.JUDGE))[0]
    other = store.add(replace(REQUEST, experiment="tip-bench-b"))[0]
    move_through(store, other, RUNNING)
    store.add(REQUEST)
    assert [job.id for job in store.page(JobFilter(kind=JobKind.JUDGE)).items] == [judge.id]
    assert [job.id for job in store.page(JobFilter(experiment="tip-bench-b")).items] == [other.id]
    assert [job.id for job in store.page(JobFilter(state=RUNNING)).items] == [other.id]
    assert store.page(JobFilter(state=RUNNING, kind=JobKind.JUDGE)).items == ()
    assert store.counts()[JobState.QUEUED] == 2


def test_an_unknown_page_token_is_refused(store: JobStore) -> None:
    for limit, after in [(0, None), (501, None), (10, "x"), (10, "-1"), (10, "9" * 30), (10, "¹")]:
        with pytest.raises(UsageError):
            store.page(limit=limit, after=after)


def test_a_queued_job_is_cancelled_at_once(store: JobStore) -> None:
    job = store.request_cancel(store.add(REQUEST)[0].id)
    assert job.state is JobState.CANCELLED
    assert job.ended is not None
    assert store.claim(job.id) is None
    assert store.request_cancel(job.id) == job


def test_a_cancel_of_a_starting_job_is_saved(store: JobStore) -> None:
    job = store.add(REQUEST)[0]
    assert store.claim(job.id) is not None
    cancelled = store.request_cancel(job.id)
    assert (cancelled.state, cancelled.cancel_requested is not None) == (JobState.QUEUED, True)
    assert store.claim(job.id) is None


def test_an_ended_job_cannot_be_cancelled(store: JobStore) -> None:
    job = move_through(store, store.add(REQUEST)[0], RUNNING, JobState.SUCCEEDED)
    with pytest.raises(JobConflict, match="has already succeeded"):
        store.request_cancel(job.id)


def test_a_retry_is_a_new_job_that_names_the_old_one(store: JobStore) -> None:
    old = move_through(store, store.add(REQUEST, "key-1")[0], RUNNING, JobState.FAILED)
    created = retry(store, old.id, started_by="ben")
    assert created.new
    assert (created.job.retry_of, created.job.started_by, created.job.state) == (old.id, "ben", JobState.QUEUED)
    assert (created.job.arguments, created.job.private) == (old.arguments, old.private)
    assert created.job.key is None


def test_a_double_click_on_retry_makes_one_retry_at_a_time(store: JobStore) -> None:
    old = move_through(store, store.add(REQUEST)[0], RUNNING, JobState.FAILED)
    first = retry(store, old.id)
    assert retry(store, old.id).job.id == first.job.id
    move_through(store, first.job, RUNNING, JobState.FAILED)
    assert retry(store, old.id).new


def test_a_running_or_succeeded_job_is_not_retried(store: JobStore) -> None:
    for states in [(), (RUNNING,), (RUNNING, JobState.WAITING), (RUNNING, JobState.SUCCEEDED)]:
        job = move_through(store, store.add(REQUEST)[0], *states)
        with pytest.raises(JobConflict, match="can be retried"):
            retry(store, job.id)


def test_every_state_has_its_transitions_and_final_states_have_none() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert {state for state, targets in TRANSITIONS.items() if not targets} == ENDED
    assert TRANSITIONS[JobState.LOST] == {RUNNING}
    assert {state for state, targets in TRANSITIONS.items() if LOST in targets} == {RUNNING}


def test_the_path_between_two_states_has_only_legal_transitions() -> None:
    for old, new in itertools.product(JobState, repeat=2):
        path = path_between(old, new)
        for before, after in zip((old, *path), path, strict=False):
            assert after in TRANSITIONS[before]
        if old is new or old in ENDED or new is JobState.QUEUED:
            assert path == ()
        else:
            assert path[-1] is new


class StoreMachine(RuleBasedStateMachine):
    """After any operations in any order, the store agrees with a plain dictionary."""

    jobs: Bundle[str] = Bundle("jobs")

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "jobs.db"
        self.store = JobStore(self.path)
        self.expected: dict[str, JobState] = {}
        self.claimed: set[str] = set()
        self.cancelled: set[str] = set()
        self.keys: dict[str, tuple[int, str]] = {}

    @rule(target=jobs, key=st.sampled_from("abc"), n_tips=st.integers(1, 2))
    def add(self, key: str, n_tips: int) -> str:
        request = replace(REQUEST, arguments={"n_tips": n_tips})
        if key in self.keys and self.keys[key][0] != n_tips:
            with pytest.raises(JobConflict):
                self.store.add(request, key)
            return self.keys[key][1]
        job, new = self.store.add(request, key)
        assert new == (key not in self.keys)
        self.keys.setdefault(key, (n_tips, job.id))
        assert self.keys[key][1] == job.id
        self.expected.setdefault(job.id, JobState.QUEUED)
        return job.id

    @rule(job=jobs, old=st.sampled_from(JobState), new=st.sampled_from(JobState))
    def move(self, job: str, old: JobState, new: JobState) -> None:
        if new not in TRANSITIONS[old]:
            with pytest.raises(JobConflict):
                self.store.move(job, old, new)
            return
        done = self.store.move(job, old, new, reason="because")
        assert (done is not None) == (self.expected[job] is old)
        if done is not None:
            self.expected[job] = new
            assert (done.ended is not None) == (new in ENDED)

    @rule(job=jobs)
    def claim(self, job: str) -> None:
        claimable = self.expected[job] is JobState.QUEUED and job not in self.cancelled
        assert (self.store.claim(job) is not None) == claimable
        if claimable:
            self.claimed.add(job)

    @rule(job=jobs)
    def cancel(self, job: str) -> None:
        state = self.expected[job]
        if state in ENDED - {JobState.CANCELLED}:
            with pytest.raises(JobConflict):
                self.store.request_cancel(job)
            return
        self.store.request_cancel(job)
        if state is JobState.QUEUED and job not in self.claimed:
            self.expected[job] = JobState.CANCELLED
        self.cancelled.add(job)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = JobStore(self.path)

    @invariant()
    def agrees(self) -> None:
        found = {job.id: job.state for job in self.store.page(limit=200).items}
        assert found == self.expected

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
