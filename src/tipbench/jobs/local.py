"""Subprocess runner: a job is `python -m tipbench …` in a separate session, so that it outlives its parent.

`LocalRunner.start` runs this module as a launcher, `python -m tipbench.jobs.local FOLDER ARGUMENTS…`. The launcher
forks a child, which holds the job's lock, saves its own pid and start time, and becomes the command by exec. So a job
is started at most once, even with concurrent or crashing callers, and never runs without being recorded.
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

from tipbench.errors import JobStartError, TipbenchError
from tipbench.jobs.folder import EVENTS_VARIABLE, JobFolder, Process, read_events, read_result
from tipbench.jobs.job import Job, JobState, JobStatus, LogTail, RecordedEvent
from tipbench.jobs.progress import refused_text

GRACE_S = 90.0  # between SIGTERM and SIGKILL; the command needs it to unload its model and record cells
_LAUNCH_TIMEOUT_S = 60.0
_INTERRUPTED = 130  # exit code of an interrupted command
_PROC = Path("/proc")
_SECRET_SUFFIXES = ("_TOKEN", "_SECRET", "_PASSWORD", "_KEY")  # of TIPBENCH_ variables that jobs must not inherit


class LocalRunner:
    """Runs jobs on this machine; all state is on disk, so any process that shares the home folder can use it."""

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
        """Start the job, unless it was started before or its start is forbidden.

        The pid of a started job is saved before this method returns. Raises JobStartError if the command cannot start.
        """
        folder = self._folder(job)
        folder.make()
        if folder.process is not None or folder.start_forbidden:
            return
        error = self._run_launcher(job, folder)
        with folder.locked():
            process = folder.process
            if process is None:
                folder.forbid_start()  # a launch that timed out must not start later
        # The pid is saved before exec, so a process that is dead after an error may never have run the command.
        if process is None or (error and not is_alive(process)):
            raise JobStartError(f"The command could not be started: {error or _last_line(folder)}")

    def _run_launcher(self, job: Job, folder: JobFolder) -> str:
        """Run the launcher. Returns its error, or an empty string."""
        from tipbench.jobs.command import command_arguments  # not imported in the launcher, to keep it fast

        environment = {
            name: value
            for name, value in self._environment.items()
            if not (name.startswith("TIPBENCH_") and name.endswith(_SECRET_SUFFIXES))
        }
        environment |= job.private  # the secrets that this job needs
        environment |= {"TIPBENCH_HOME": str(self._home), EVENTS_VARIABLE: str(folder.events_file)}
        environment["PYTHONUNBUFFERED"] = "1"
        launcher = [sys.executable, "-P", "-m", "tipbench.jobs.local", str(folder.path), *command_arguments(job)]
        try:
            with folder.log_file.open("ab") as log:
                status = subprocess.run(
                    launcher,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=_LAUNCH_TIMEOUT_S,
                    check=False,
                ).returncode
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            return str(exc)[:300]
        return "" if status == 0 else _last_line(folder)

    def observe(self, job: Job) -> JobStatus:
        """Return the job's status from its process and its exit event."""
        folder = self._folder(job)
        process = folder.process
        if process is None and folder.start_forbidden:
            return JobStatus(JobState.CANCELLED, reason="Cancelled before it was started.")
        if process is None:
            return JobStatus(JobState.LOST, reason=f"No process recorded in {folder.path}.")
        alive = is_alive(process)  # before the result is read: a process writes its exit event before it ends
        result = read_result(folder.events_file)
        if result is not None:
            exit_code, collected = result.exit_code, result.collected
            links = {"mlflow": collected.url} if collected and collected.url else {}
            if exit_code == 0:
                return JobStatus(JobState.SUCCEEDED, exit_code, refused_text(collected), links)
            if job.cancel_requested is not None:
                return JobStatus(JobState.CANCELLED, exit_code, "Cancelled; finished cells are kept.", links)
            default_reason = "Interrupted; a retry continues." if exit_code == _INTERRUPTED else "See the log."
            return JobStatus(JobState.FAILED, exit_code, result.failure_reason or default_reason, links)
        if alive:
            return JobStatus(JobState.RUNNING)
        if process.host != os.uname().nodename:
            return JobStatus(
                JobState.LOST, reason=f"It was started on {process.host}, which cannot be observed from this machine."
            )
        if job.cancel_requested is not None:
            return JobStatus(
                JobState.CANCELLED, reason="Cancelled; its process ended without an exit code. Finished cells are kept."
            )
        return JobStatus(
            JobState.LOST,
            reason=f"Its process ({process.pid}) ended without an exit code: killed, out of memory, or the "
            "machine was restarted. Finished cells are kept; a retry continues.",
        )

    def cancel(self, job: Job) -> None:
        """Send SIGTERM to the process group at the first call; forbid the start of a job without a process.

        A call after the grace period, which begins with SIGTERM, sends SIGKILL to the group and all descendants.
        """
        folder = self._folder(job)
        with folder.locked():
            process = folder.process
            if process is None:
                folder.forbid_start()
                return
        if not is_alive(process) or read_result(folder.events_file) is not None:
            return
        cancel_sent, now = folder.cancel_sent_at, self._clock()
        if cancel_sent is None:
            _signal_group(process.pid, signal.SIGTERM)
            folder.save_cancel_sent(now)  # saved last: after a crash in between, SIGTERM is sent twice instead of never
        elif now - cancel_sent > self._grace_s:
            pids = descendants(process.pid)  # before the kill: orphans get another parent
            _signal_group(process.pid, signal.SIGKILL)
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def events(self, job: Job, after: int = 0, limit: int = 500) -> Sequence[RecordedEvent]:
        return read_events(self._folder(job).events_file, after, limit)

    def log(self, job: Job, max_bytes: int = 65_536) -> LogTail:
        return self._folder(job).tail(max_bytes)

    def forget(self, job: Job) -> None:
        """Remove the job's folder. Raises TipbenchError while its process is alive."""
        folder = self._folder(job)
        process = folder.process
        if process is not None and is_alive(process):
            raise TipbenchError(f"The process of {job.id} ({process.pid}) is still running; its folder is kept.")
        folder.remove()

    def _folder(self, job: Job) -> JobFolder:
        return JobFolder(self._jobs, job.id)


def _last_line(folder: JobFolder) -> str:
    lines = [line for line in folder.tail(4096).text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message."


# Processes


def process_start(pid: int) -> str | None:
    """Return a process's start time in a system-specific format; None if it does not exist or is a zombie."""
    if not (_PROC / "self" / "stat").exists():
        command = ["ps", "-p", str(pid), "-o", "stat=,lstart="]
        ps = subprocess.run(command, capture_output=True, text=True, check=False)
        state, _, start = ps.stdout.strip().partition(" ")
        return None if not start or state.startswith("Z") else start.strip()
    try:
        fields = _read_stat(_PROC / str(pid) / "stat")
    except OSError:
        return None
    state, start_ticks = fields[0], fields[19]  # fields 3 and 22 of the file
    if state in ("Z", "X"):  # zombie or dead
        return None
    boot_id = ""  # a start time is in ticks since boot, so it is unique only together with the boot id
    with suppress(OSError):
        boot_id = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text("utf-8", "replace").strip()
    return f"{boot_id} {start_ticks}"


def _read_stat(path: Path) -> list[str]:
    """Return the fields after the program's name, which may contain spaces and parentheses; see proc_pid_stat(5)."""
    _, _, fields = path.read_text("utf-8", "replace").rpartition(")")
    return fields.split()


def is_alive(process: Process) -> bool:
    """Return whether the process is still running. A reused pid is detected by its start time."""
    return process.host == os.uname().nodename and process_start(process.pid) == process.start


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants, in any process group. Empty on systems without /proc."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            _, parent_pid, *_ = _read_stat(entry)
            children.setdefault(int(parent_pid), []).append(int(entry.parent.name))
    pids = list(children.get(pid, []))
    for parent in pids:  # grows during iteration
        pids += children.get(parent, [])
    return pids


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


# Launcher


def _launch_command(path: Path, arguments: Sequence[str]) -> int:
    """Start the command in a forked child, and return the launcher's exit code.

    The child writes an error to a pipe; a successful exec closes the pipe. The child does nothing if the job was
    already started or its start is forbidden.
    """
    read_fd, write_fd = os.pipe()
    is_parent = os.fork() > 0
    if is_parent:
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as pipe:
            error = pipe.read()
        sys.stderr.write(error.decode("utf-8", "replace"))
        return 1 if error else 0
    try:
        os.setsid()
        folder = JobFolder(path.parent, path.name)
        with folder.locked():
            if folder.process is None and not folder.start_forbidden:
                start = process_start(os.getpid())
                if start is None:
                    raise OSError("this system does not report when a process started; /proc or ps is needed")  # noqa: TRY301
                folder.save_process(Process(os.getpid(), start, os.uname().nodename))
                # exec releases the lock.
                os.execv(sys.executable, [sys.executable, "-P", "-m", "tipbench", *arguments])  # noqa: S606
    except BaseException as exc:  # noqa: BLE001 - the parent reports it
        os.write(write_fd, f"{type(exc).__name__}: {exc}\n".encode())
    finally:
        os._exit(1)  # also if there was nothing to do: the launcher reads the pipe and ignores the exit code


if __name__ == "__main__":
    sys.exit(_launch_command(Path(sys.argv[1]), sys.argv[2:]))
