"""The Airflow runner: a job is a run of the DAG. What is known of it lies in the job's folder, as for a local one.

Airflow is asked now and then, by whoever looks first; everybody else reads what was written down. So a page costs no
call, Airflow may be away for a while, and a panel that starts again goes on where the last one stopped.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from tipbench.addresses import is_web_address
from tipbench.errors import AirflowAway, AirflowRefused, NotEnoughData, NotStarted, TipbenchError
from tipbench.generate.home import in_home
from tipbench.generate.lock import try_lock
from tipbench.jobs import events as wire
from tipbench.jobs.airflow_dag import (
    COMPARE,
    DEFAULT_POOL,
    FAILED,
    PARKED,
    UNSTARTED,
    WAIT,
    AirflowDag,
    SeenRun,
    TaskInstance,
)
from tipbench.jobs.airflow_rest import AirflowRest
from tipbench.jobs.airflow_story import Kept, Story, read_kept, write_kept
from tipbench.jobs.event_log import Recorded, read_events
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import ENDED as JOB_ENDED
from tipbench.jobs.job import Job, JobKind, JobState, LogTail, Sighting

POLL_S = 2.0
PARKED_POLLS = 5  # a run that is parked is looked at so much more seldom
CHECK_S = 15.0  # between two looks for what holds a run up: a missing pool, a paused DAG, cells that wait for a judge
GRACE_S = 120.0  # after which Airflow is asked again to end a run
SETTLE_S = 15.0  # for the last lines of a log to arrive after the end of its task
_CANCELLED_CODE = 130
_FORBIDDEN = 403
_NAMED_FAILURES = 3
_ANSWERED = "Every cell is judged; Airflow goes on with the comparison."


class Records(Protocol):
    """What the runner must know of MLflow."""

    def address(self, job: Job) -> str:
        """The server that the job's workers use. NotEnoughData when there is none."""
        ...

    def pending(self, job: Job) -> int:
        """How many of the cells that the job asked for still wait for a judge."""
        ...


class AirflowRunner:
    """Runs collects as DAG runs. What it knows is on disk: any process of this home may ask it."""

    name = "airflow"

    def __init__(
        self,
        home: Path,
        rest: AirflowRest,
        records: Records,
        *,
        poll_s: float = POLL_S,
        check_s: float = CHECK_S,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jobs = home / "jobs"
        self._dag = AirflowDag(rest)
        self._rest = rest
        self._records = records
        self._poll_s, self._check_s, self._settle_s = poll_s, check_s, settle_s
        self._clock = clock
        self._asleep, self._asleep_until = "", 0.0

    def close(self) -> None:
        """Close the connections to Airflow; its runs go on."""
        self._rest.close()

    # Starting and ending

    def start(self, job: Job) -> None:
        """Trigger the DAG, once; a retry of a job whose run failed has the failed tasks of that run done again."""
        if job.kind is not JobKind.COLLECT:
            raise NotStarted(f"Airflow runs collects; a {job.kind} runs on the panel's own machine.")
        folder = self._folder(job)
        with folder.alone():
            kept = read_kept(folder)
            if kept.triggered or folder.never:
                return
            if not self._resumed(job, folder, kept):
                self._trigger(job, folder, kept)
            kept.triggered = True
            story = Story(folder, kept, self._clock)
            story.tell(wire.Started("airflow"))
            story.log("airflow", f"run {kept.run_id} for {job.experiment}: {self._dag.page_of(kept.run_id)}")
            if job.private:
                story.tell_once(
                    "A login in an address is not sent to Airflow, which shows what it is sent; its workers use their "
                    "own (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)."
                )
            story.save()

    def _trigger(self, job: Job, folder: JobFolder, kept: Kept) -> None:
        conf = conf_of(job, self._address(job))
        self._check_awake()
        kept.run_id = run_id_of(job)
        write_kept(folder, kept)  # before it is asked: the answer may never come
        self._dag.trigger(kept.run_id, conf, f"tipbench job {job.id}")

    def _check_awake(self) -> None:
        """The queue tries again and again, and Airflow need not be asked each time."""
        if self._clock() < self._asleep_until:
            raise AirflowAway(self._asleep)
        try:
            self._dag.check_awake()
        except AirflowAway as exc:
            self._asleep, self._asleep_until = str(exc), self._clock() + self._poll_s
            raise

    def _address(self, job: Job) -> str:
        try:
            return self._records.address(job)
        except NotEnoughData as exc:
            raise NotStarted(
                "A run in Airflow needs an MLflow that its workers and the panel reach, and there is none yet. "
                "Set MLFLOW_TRACKING_URI, or start one with `tipbench mlflow up`, and retry."
            ) from exc

    def _resumed(self, job: Job, folder: JobFolder, kept: Kept) -> bool:
        """Whether the job goes on in the run of the one it retries, of which some tasks failed."""
        if job.retry_of is None or kept.run_id == run_id_of(job):
            return False
        old = read_kept(JobFolder(self._jobs, job.retry_of))
        if old.state is not JobState.FAILED or not old.run_id:
            return False
        seen = self._dag.look(old.run_id)
        if seen is None or (not seen.ended and kept.run_id != old.run_id):
            return False
        failed = [task for task in seen.tasks if task.state in FAILED]
        if not failed and kept.run_id != old.run_id:
            return False
        if kept.run_id != old.run_id:
            kept.run_id, kept.base = old.run_id, {task.key: task.try_number for task in seen.tasks}
            write_kept(folder, kept)
        if failed and seen.ended:
            self._dag.clear(kept.run_id, failed)
        return True

    def cancel(self, job: Job) -> None:
        """Have Airflow fail the run: its tasks are ended politely, its teardown unloads. Again after a while."""
        folder = self._folder(job)
        with folder.alone():
            kept = read_kept(folder)
            if not kept.run_id:
                folder.note_never()
                return
        if kept.state in JOB_ENDED:
            return
        asked, now = folder.asked_at, self._clock()
        if asked is not None and now - asked < GRACE_S:
            return
        seen = self._dag.look(kept.run_id)
        if seen is None and not kept.triggered:
            folder.note_never()
        elif seen is not None and not seen.ended:
            try:
                self._dag.cancel(kept.run_id)
            except AirflowRefused as exc:  # it has ended, or gone, in between: the next look tells
                if exc.status == _FORBIDDEN:
                    self._warn(folder, f"{exc} Cancel the run in Airflow, or give our user the role op.")
            folder.note_asked(now)

    def _warn(self, folder: JobFolder, text: str) -> None:
        with _turn(folder) as mine:
            if mine:
                story = Story(folder, read_kept(folder), self._clock)
                story.tell_once(text)
                story.save()

    def forget(self, job: Job) -> None:
        """Remove its folder; Airflow keeps its own history. Not while the run goes on."""
        folder = self._folder(job)
        kept = read_kept(folder)
        if kept.triggered and kept.state not in JOB_ENDED | {JobState.LOST}:  # which Airflow does not have any more
            raise TipbenchError(f"The DAG run of {job.id} has not gone yet; its folder stays for now.")
        folder.remove()

    # Looking

    def observe(self, job: Job) -> Sighting:
        """How it is: as Airflow says, or said a moment ago."""
        folder = self._folder(job)
        kept = read_kept(folder)
        if not kept.triggered:
            return self._not_triggered(job, folder, kept)
        if kept.state in JOB_ENDED or self._clock() - kept.looked < self._patience(job, kept):
            return kept.sighting
        return self._look(job, folder)

    def events(self, job: Job, after: int = 0, limit: int = 500) -> Sequence[Recorded]:
        """What its tasks have reported since."""
        self._refresh(job)
        return read_events(self._folder(job).events, after, limit)

    def log(self, job: Job, most_bytes: int = 65_536) -> LogTail:
        """The end of what its tasks printed."""
        self._refresh(job)
        return self._folder(job).tail(most_bytes)

    def _refresh(self, job: Job) -> None:
        """Look, unless a supervisor does so anyway; trouble is its to tell, and nobody else waits for an end of it."""
        folder = self._folder(job)
        kept = read_kept(folder)
        due = self._clock() - kept.looked >= 2 * self._patience(job, kept) and not self._rest.in_trouble
        if kept.triggered and kept.state not in JOB_ENDED and due:
            with suppress(TipbenchError):
                self._look(job, folder)

    def _patience(self, job: Job, kept: Kept) -> float:
        """How long what was seen holds: a run that waits for a judge, or is gone, may do so for weeks."""
        parked = kept.state in (JobState.WAITING, JobState.LOST) and job.cancel_requested is None
        return self._poll_s * (PARKED_POLLS if parked else 1)

    def _not_triggered(self, job: Job, folder: JobFolder, kept: Kept) -> Sighting:
        if folder.never:
            return Sighting(JobState.CANCELLED, reason="It was cancelled before it was started.")
        if kept.run_id and self._dag.look(kept.run_id) is not None:
            self.start(job)  # its trigger arrived, and the answer did not
            return Sighting(JobState.RUNNING)
        return Sighting(JobState.LOST, reason=f"Nothing in {folder.path} tells of its DAG run.")

    def _look(self, job: Job, folder: JobFolder) -> Sighting:
        with _turn(folder) as mine:
            kept = read_kept(folder)
            if not mine or kept.state in JOB_ENDED:
                return kept.sighting
            story = Story(folder, kept, self._clock)
            seen = self._dag.look(kept.run_id)
            sighting = self._missing(job, kept) if seen is None else self._seen(job, folder, story, seen)
            if sighting.state in JOB_ENDED:
                story.close(sighting)
            kept.looked = self._clock()
            kept.see(sighting)
            story.save()
            return sighting

    def _missing(self, job: Job, kept: Kept) -> Sighting:
        if job.cancel_requested is not None:
            return Sighting(JobState.CANCELLED, _CANCELLED_CODE, "Cancelled; Airflow has no such run any more.")
        reason = f"Airflow has no run {kept.run_id} any more. What is finished is kept; a retry continues."
        return Sighting(JobState.LOST, reason=reason, links=kept.links)

    def _seen(self, job: Job, folder: JobFolder, story: Story, seen: SeenRun) -> Sighting:
        story.read_logs(self._dag, seen)
        links = _links(self._dag, story.kept)
        if seen.ended and self._settled(story.kept, seen):
            asked = folder.asked_at is not None or job.cancel_requested is not None  # the answer may have been lost
            return _ending(seen, story.kept, links, asked=asked)
        waiting = seen.task(WAIT)
        if waiting is not None and waiting.state in PARKED:
            reason = self._await_judge(job, story, waiting)
            return Sighting(JobState.RUNNING if reason == _ANSWERED else JobState.WAITING, reason=reason, links=links)
        return Sighting(JobState.RUNNING, reason=self._held_up(story, seen), links=links)

    def _settled(self, kept: Kept, seen: SeenRun) -> bool:
        """Whether the collects have said how they ended; their logs may arrive after them, or never."""
        collects = [task for task in seen.tasks if task.collects and task.state in ("success", "failed")]
        told = [kept.tallies.get(task.key) for task in collects if task.try_number > kept.base.get(task.key, 0)]
        if all(tally is not None and tally.exit_code is not None for tally in told):
            return True
        kept.ended_since = kept.ended_since or self._clock()
        return self._clock() - kept.ended_since >= self._settle_s

    def _await_judge(self, job: Job, story: Story, waiting: TaskInstance) -> str:
        """Why it waits; when no cell of the job is pending any more, by whatever road, Airflow is told to go on."""
        if not self._check_due(story.kept):
            return story.kept.reason
        try:
            number = self._records.pending(job)
        except TipbenchError as exc:  # MLflow's absence is not Airflow's
            return f"Whether its cells are judged cannot be seen: {exc}"
        if number:
            return f"{number} {'cell waits' if number == 1 else 'cells wait'} for a judge."
        try:
            self._dag.answer(story.kept.run_id, waiting)
        except AirflowRefused as exc:
            return f"Every cell is judged, and Airflow does not take that from us: {exc} Answer it in Airflow."
        if story.kept.reason != _ANSWERED:  # else it takes Airflow a while
            story.tell(wire.Message(_ANSWERED))
        return _ANSWERED

    def _held_up(self, story: Story, seen: SeenRun) -> str:
        """What keeps a run from going on, if it is something people can mend."""
        idle = not any(task.state == "running" for task in seen.tasks)
        if not idle or not self._check_due(story.kept):
            return story.kept.reason if idle and story.kept.state is JobState.RUNNING else ""
        reason = ""
        with suppress(AirflowRefused):  # who may not see pools cannot tell
            reason = self._hindrance(seen)
        if reason:
            story.tell_once(reason)
        return reason

    def _hindrance(self, seen: SeenRun) -> str:
        unstarted = [task for task in seen.tasks if task.state in UNSTARTED]
        for pool in self._dag.missing_pools({task.pool for task in unstarted} - {DEFAULT_POOL}):
            return (
                f"Airflow has no pool {pool}, so its tasks never begin. Make it with one slot: "
                f"`airflow pools set {pool} 1 tipbench`; the run then goes on by itself."
            )
        if seen.state == "queued" and self._dag.is_paused():
            return f"The DAG {self._dag.dag_id} is paused in Airflow; unpause it there, and the run begins."
        return ""

    def _check_due(self, kept: Kept) -> bool:
        if self._clock() - kept.checked < self._check_s:
            return False
        kept.checked = self._clock()
        return True

    def _folder(self, job: Job) -> JobFolder:
        return JobFolder(self._jobs, job.id)


def run_id_of(job: Job) -> str:
    """The id of a job's own DAG run: the same however often it is triggered."""
    return f"tipbench__{job.id}"


def conf_of(job: Job, mlflow_url: str) -> dict[str, Any]:
    """The conf of the DAG run. What the job does not say is left to the worker's settings and the DAG's defaults."""
    return {key: value for key, value in job.arguments.items() if value is not None} | {"mlflow_url": mlflow_url}


def _links(dag: AirflowDag, kept: Kept) -> dict[str, str]:
    urls = [tally.collected.url for tally in kept.tallies.values() if tally.collected is not None]
    mlflow = next((url for url in urls if url and is_web_address(url)), kept.links.get("mlflow"))
    return {"airflow": dag.page_of(kept.run_id), **({"mlflow": mlflow} if mlflow else {})}


def _ending(seen: SeenRun, kept: Kept, links: dict[str, str], *, asked: bool) -> Sighting:
    compared = seen.task(COMPARE)
    if asked and (compared is None or compared.state != "success"):
        return Sighting(JobState.CANCELLED, _CANCELLED_CODE, "Cancelled; what is finished is kept.", links)
    failed = [task for task in seen.tasks if task.state == "failed"]
    if seen.state == "success" and not any(task.collects for task in failed):
        return Sighting(JobState.SUCCEEDED, 0, links=links)
    codes = [tally.exit_code for tally in kept.tallies.values() if tally.exit_code]
    return Sighting(JobState.FAILED, codes[0] if codes else 1, _why(failed, kept), links)


def _why(failed: Sequence[TaskInstance], kept: Kept) -> str:
    """The first causes: of all that generate, else of what failed first; what only follows from it is left out."""
    told = [(task, kept.tallies[task.key].failure) for task in failed if task.key in kept.tallies]
    causes = [(task, why) for task, why in told if why and task.collects]
    causes = causes or [(task, why) for task, why in told if why][:1]
    if not causes:
        names = ", ".join(task.title for task in failed[:_NAMED_FAILURES]) or "A task"
        return f"{names} failed in Airflow; the log tells why."
    if len(causes) == 1:
        return causes[0][1]
    shown = "; ".join(f"{task.rendered_map_index or task.title}: {why}" for task, why in causes[:_NAMED_FAILURES])
    more = len(causes) - _NAMED_FAILURES
    return f"{shown}; and {more} more" if more > 0 else shown


@contextmanager
def _turn(folder: JobFolder) -> Iterator[bool]:
    """True to one at a time; who comes meanwhile need not ask Airflow as well."""
    path = folder.path / "turn"
    with in_home(path, "cannot be opened"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield try_lock(fd, path, fcntl.LOCK_EX)
    finally:
        os.close(fd)
