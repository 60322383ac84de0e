"""The desk for jobs: one query or change for each thing that the JSON and the pages do with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from tipbench.errors import ServerAway, UsageError
from tipbench.jobs import queue
from tipbench.jobs.airflow import AirflowRunner
from tipbench.jobs.book import Book, Told
from tipbench.jobs.events import without_logins
from tipbench.jobs.job import Job, JobState, LogTail, Order, Runner
from tipbench.jobs.local import LocalRunner
from tipbench.jobs.queue import Submitted, Supervisor, places
from tipbench.jobs.sqlite import JobStore, Which
from tipbench.settings import Settings
from tipbench.web.errors import Invalid
from tipbench.web.runners import usual_runner

KEEP_DAYS = 90.0
_MOST_DAYS = 36_500.0
_DAY_S = 86_400.0
_LOOKS = 3


@dataclass(frozen=True)
class JobView:
    """A job, its place in the queue (1 is next; None when it does not wait) and what it has told so far."""

    job: Job
    place: int | None
    told: Told

    def to_json(self) -> dict[str, Any]:
        """As GET /api/bench/jobs/{id} answers."""
        return {
            "job": job_json(self.job),
            "place": self.place,
            "progress": self.told.progress.to_json(),
            "cursor": self.told.cursor,
        }


@dataclass(frozen=True)
class JobPage:
    """Some jobs, newest first, with their places in the queue; `next` is the mark of those that follow."""

    jobs: tuple[Job, ...]
    places: Mapping[str, int]
    next: str | None

    def to_json(self) -> dict[str, Any]:
        """As GET /api/bench/jobs answers."""
        items = [{**job_json(job), "place": self.places.get(job.id)} for job in self.jobs]
        return {"items": items, "next": self.next}


@dataclass(frozen=True)
class JobDesk:
    """The list of jobs, who carries them out, and who looks after them. Thread-safe."""

    store: JobStore
    runners: Mapping[str, Runner]
    supervisor: Supervisor
    book: Book
    usual: str = LocalRunner.name  # who runs what names nobody

    @classmethod
    def of(cls, settings: Settings, runners: Mapping[str, Runner]) -> Self:
        """The desk of a home folder; `runners` by name carry jobs out."""
        jobs = settings.home / "jobs"
        keep_s, usual = keep_seconds(settings), usual_runner(settings, runners)
        store = JobStore(jobs / "jobs.db")
        supervisor = Supervisor(store, runners, jobs / "supervisor.lock", keep_s=keep_s)
        return cls(store, runners, supervisor, Book(supervisor.runner_of), usual)

    def close(self) -> None:
        """Stop looking after jobs; they run on."""
        self.supervisor.close()
        self.store.close()
        for runner in self.runners.values():
            if isinstance(runner, AirflowRunner):
                runner.close()

    def submit(self, order: Order, *, key: str | None = None) -> Submitted:
        """Put an order into the queue; with a key, at most once."""
        submitted = queue.submit(self.store, order, key=key)
        self.supervisor.wake()
        return submitted

    def cancel(self, job_id: str) -> Job:
        """Have a job ended. JobConflict when it has ended otherwise, JobMissing when there is none."""
        job = queue.cancel(self.store, job_id)
        self.supervisor.wake()
        return job

    def retry(
        self, job_id: str, *, started_by: str, key: str | None = None, changes: Mapping[str, Any] | None = None
    ) -> Submitted:
        """A new job like the old one but for `changes`. JobConflict unless that failed, was cancelled or is lost."""
        submitted = queue.retry(self.store, job_id, started_by=started_by, key=key, changes=changes)
        self.supervisor.wake()
        return submitted

    def view(self, job_id: str) -> JobView:
        """One job with all that is known of it. JobMissing when there is none."""
        job, place = self.placed(job_id)
        return JobView(job, place, self.book.told(job))

    def placed(self, job_id: str) -> tuple[Job, int | None]:
        """A job and its place in the queue at the same moment; None when it does not wait."""
        for _ in range(_LOOKS):
            job = self.store.get(job_id)
            place = self.places().get(job_id) if job.state is JobState.QUEUED else None
            if place is not None or job.state is not JobState.QUEUED:
                break  # else it began in between
        return job, place

    def listed(self, which: Which, *, limit: int, after: str | None = None) -> JobPage:
        """A page of the list. Invalid when `after` is not what an earlier page gave."""
        try:
            page = self.store.page(which, limit=limit, after=after)
        except UsageError as exc:
            message = "next is what the page before gave; leave it out for the first page."
            raise Invalid(message, path="query.next") from exc
        return JobPage(page.items, self.places(), page.next)

    def places(self) -> dict[str, int]:
        """The place of every job that waits."""
        return places(self.store.in_states({JobState.QUEUED}))

    def log(self, job_id: str, most_bytes: int) -> LogTail:
        """The end of what it printed. JobMissing when there is no such job."""
        job = self.store.get(job_id)
        try:
            return self.supervisor.runner_of(job).log(job, most_bytes)
        except ServerAway as exc:
            return LogTail(f"{exc}\n", 0, cut=False)


def job_json(job: Job) -> dict[str, Any]:
    """A job as it is shown: PRODUCT's keys, and more beside them."""
    shown = job.to_json()
    return {
        **shown,
        "reason": without_logins(job.reason) or None,
        "links": {**job_links(job), **shown["links"]},
    }


def job_links(job: Job) -> dict[str, str]:
    """Where to go from a job, on this server."""
    own, experiment = f"/api/bench/jobs/{job.id}", quote(job.experiment, safe="")
    return {
        "self": own,
        "events": f"{own}/events",
        "log": f"{own}/log",
        "page": f"/jobs/{job.id}",
        "experiment": f"/experiments/{experiment}",
        "leaderboard": f"/api/bench/leaderboard/{experiment}",
    }


def keep_seconds(settings: Settings) -> float | None:
    """How long ended jobs are kept; None is for ever. UsageError when the setting is no number of days."""
    text = settings.get("jobs_keep_days") or str(KEEP_DAYS)
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days <= _MOST_DAYS:
        raise UsageError(f"jobs_keep_days is a number of days from 0 (keep all) to {_MOST_DAYS:g} (got {text[:40]!r}).")
    return days * _DAY_S or None
