"""The subprocess runner: a job is `python -m tipbench …` in a session of its own, which outlives whoever started it.

`python -m tipbench.jobs.local FOLDER WORDS…` is the inside half of `LocalRunner.start`: it leaves the caller's session,
writes down who it is while it holds the job's lock, and turns into the command. So a job is started once however many
ask for it and whenever one of them dies, and it never runs without being written down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tipbench.errors import NotStarted, TipbenchError
from tipbench.jobs.event_log import Ending, Recorded, read_ending, read_events
from tipbench.jobs.folder import JobFolder, Process
from tipbench.jobs.job import Job, JobState, LogTail, Sighting

GRACE_S = 90.0  # to break off calls, see the model leave memory and record what is finished
EVENTS_VARIABLE = "TIPBENCH_EVENTS"
_START_S = 60.0
_INTERRUPTED = 130
_PROC = Path("/proc")
_OURS_ALONE = ("_TOKEN", "_SECRET", "_PASSWORD", "_KEY")  # endings of TIPBENCH_ variables that are for the panel only


class LocalRunner:
    """Runs jobs on this machine. Knows nothing but what is on disk, so any process of this home may ask it."""

    name = "local"

    def __init__(
        self,
        home: Path,
        *,
        environment: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jobs = home / "jobs"
        self._home = home
        self._environment = dict(os.environ if environment is None else environment)
        self._grace_s = grace_s
        self._clock = clock

    def start(self, job: Job) -> None:
        """Start it, once; when this returns its process is written down."""
        folder = self._folder(job)
        folder.make()
        if folder.process is not None or folder.never:
            return
        trouble = self._launch(job, folder)
        with folder.alone():
            process = folder.process
            if process is None:
                folder.note_never()  # what was too slow to be waited for must not start after all
        if process is None or (trouble and not is_alive(process)):
            raise NotStarted(f"The command could not be started: {trouble or _last_line(folder)}")

    def _launch(self, job: Job, folder: JobFolder) -> str:
        """Run the inside half to its end, which comes when the command has begun; what went wrong, if anything."""
        from tipbench.jobs.command import command_words  # not needed inside, where every millisecond is waited for

        inside = [sys.executable, "-P", "-m", "tipbench.jobs.local", str(folder.path), *command_words(job)]
        try:
            with folder.log.open("ab") as log:
                status = subprocess.run(
                    inside,
                    env=self._variables(job, folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=_START_S,
                    check=False,
                ).returncode
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            return f"{exc!s:.300}"
        return "" if status == 0 else _last_line(folder)

    def observe(self, job: Job) -> Sighting:
        """How it is, from its process and from the exit it wrote."""
        folder = self._folder(job)
        process = folder.process
        if process is None:
            return self._not_started(folder)
        alive = is_alive(process)  # asked first: an exit is on disk before its process is gone
        ending = read_ending(folder.events)
        if ending is not None:
            return _ended(job, ending)
        if alive:
            return Sighting(JobState.RUNNING)
        if process.host != os.uname().nodename:
            return Sighting(JobState.LOST, reason=f"It was started on {process.host}, which cannot be seen from here.")
        if job.cancel_requested is not None:
            return Sighting(JobState.CANCELLED, reason="It was ended before it could say how far it was.")
        return Sighting(
            JobState.LOST,
            reason=f"Its process ({process.pid}) is gone without a word: killed, out of memory, or the machine was "
            "restarted. What is finished is kept; a retry continues.",
        )

    def cancel(self, job: Job) -> None:
        """SIGTERM to its process group, once; SIGKILL to all that is left of it after the grace period."""
        folder = self._folder(job)
        with folder.alone():
            if folder.process is None:
                folder.note_never()
                return
        process = folder.process
        if process is None or not is_alive(process) or read_ending(folder.events) is not None:
            return
        asked, now = folder.asked_at, self._clock()
        if asked is None:
            _signal_group(process.pid, signal.SIGTERM)
            folder.note_asked(now)  # afterwards: a second SIGTERM would only hurry it, a missing one would leave it
        elif now - asked > self._grace_s:
            below = descendants(process.pid)
            _signal_group(process.pid, signal.SIGKILL)
            for pid in below:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def events(self, job: Job, after: int = 0, limit: int = 500) -> Sequence[Recorded]:
        """What its command has reported since."""
        return read_events(self._folder(job).events, after, limit)

    def log(self, job: Job, most_bytes: int = 65_536) -> LogTail:
        """The end of what its command printed."""
        return self._folder(job).tail(most_bytes)

    def forget(self, job: Job) -> None:
        """Remove its folder, unless its process is still there and may write into it."""
        folder = self._folder(job)
        process = folder.process
        if process is not None and is_alive(process):
            raise TipbenchError(f"The process of {job.id} ({process.pid}) has not gone yet; its folder stays for now.")
        folder.remove()

    def _folder(self, job: Job) -> JobFolder:
        return JobFolder(self._jobs, job.id)

    def _not_started(self, folder: JobFolder) -> Sighting:
        if folder.never:
            return Sighting(JobState.CANCELLED, reason="It was cancelled before it was started.")
        return Sighting(JobState.LOST, reason=f"Nothing in {folder.path} tells of its process.")

    def _variables(self, job: Job, folder: JobFolder) -> dict[str, str]:
        """The panel's environment without what is the panel's own, and the job's secrets, which no list shows."""
        kept = {
            name: value
            for name, value in self._environment.items()
            if not (name.startswith("TIPBENCH_") and name.endswith(_OURS_ALONE))
        }
        mine = {"TIPBENCH_HOME": str(self._home), EVENTS_VARIABLE: str(folder.events), "PYTHONUNBUFFERED": "1"}
        return {**kept, **job.private, **mine}


def _ended(job: Job, ending: Ending) -> Sighting:
    links = {"mlflow": ending.url} if ending.url else {}
    if ending.code == 0:
        return Sighting(JobState.SUCCEEDED, 0, links=links)
    if job.cancel_requested is not None:
        return Sighting(JobState.CANCELLED, ending.code, "Cancelled; what is finished is kept.", links)
    said = "Interrupted from outside; a retry continues." if ending.code == _INTERRUPTED else ""
    return Sighting(JobState.FAILED, ending.code, ending.failure or said or "The log tells why.", links)


def _last_line(folder: JobFolder) -> str:
    lines = [line for line in folder.tail(4096).text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it left no message."


# Processes


def process_start(pid: int) -> str | None:
    """When a process started, in the system's own words; None when there is none, or only its remains."""
    if (_PROC / "self" / "stat").exists():
        return _start_from_proc(pid)
    told = subprocess.run(["ps", "-p", str(pid), "-o", "stat=,lstart="], capture_output=True, text=True, check=False)
    state, _, start = told.stdout.strip().partition(" ")
    return None if not start or state.startswith("Z") else start.strip()


def _start_from_proc(pid: int) -> str | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":  # ended, and its parent has not asked how
        return None
    boot = ""  # the number of ticks since a start of the machine tells little without which start it was
    with suppress(OSError):
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text("utf-8", "replace").strip()
    return f"{boot} {fields[19]}"


def is_alive(process: Process) -> bool:
    """Whether this very process still runs, not another that got its number."""
    return process.host == os.uname().nodename and process_start(process.pid) == process.start


def descendants(pid: int) -> list[int]:
    """The processes below it, in whatever group they are; none where the system does not tell."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text("utf-8", "replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = [pid]
    for parent in found:  # grows while it is walked
        found += children.get(parent, [])
    return found[1:]


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


# Inside


def _become_command(path: Path, words: Sequence[str]) -> int:
    """Fork, and wait until the child has become the command (its end of the pipe closes by itself) or cannot."""
    reading, writing = os.pipe()
    if os.fork() > 0:
        os.close(writing)
        with os.fdopen(reading, "rb") as told:
            trouble = told.read()
        sys.stderr.write(trouble.decode("utf-8", "replace"))
        return 1 if trouble else 0
    try:
        os.setsid()
        _exec_once(JobFolder(path.parent, path.name), words)
    except BaseException as exc:  # noqa: BLE001 - whatever it is, the parent tells it
        os.write(writing, f"{type(exc).__name__}: {exc}\n".encode())
    finally:
        os._exit(1)


def _exec_once(folder: JobFolder, words: Sequence[str]) -> None:
    with folder.alone():
        if folder.process is not None or folder.never:
            return
        start = process_start(os.getpid())
        if start is None:
            raise OSError("this system does not tell when a process started; /proc or ps is needed")
        folder.note_process(Process(os.getpid(), start, os.uname().nodename))
        # The lock is let go by the exec itself.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "tipbench", *words])  # noqa: S606


if __name__ == "__main__":
    sys.exit(_become_command(Path(sys.argv[1]), sys.argv[2:]))
