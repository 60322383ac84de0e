"""The subprocess runner: identifying processes, ending them, and the environment of their command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.polling import eventually
from support.scripted_ollama import ScriptedOllama
from tipbench.errors import JobStartError, UsageError
from tipbench.jobs import local
from tipbench.jobs.command import collect_request
from tipbench.jobs.folder import EventWriter, JobFolder, Process
from tipbench.jobs.job import Job, JobState
from tipbench.jobs.local import LocalRunner, descendants, is_alive, process_start
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record.events import Collected, Exit


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process, with another one below it that has left its group."""
    script = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '60'], start_new_session=True); "
        "print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    below = descendants(process.pid)
    yield process
    for pid in (*below, process.pid):
        if process_start(pid) is not None:
            os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def here(pid: int) -> Process:
    return Process(pid, process_start(pid) or "", os.uname().nodename)


def accepted(home: Path, **values: Any) -> Job:
    with JobStore(home / "jobs" / "jobs.db") as store:
        return store.add(collect_request(make_config({"models": "baseline:template", **values})))[0]


@pytest.mark.process
def test_a_process_is_identified_by_its_start_time_and_not_only_its_pid(sleeper: subprocess.Popen[bytes]) -> None:
    process = here(sleeper.pid)
    assert is_alive(process)
    assert not is_alive(replace(process, start=here(os.getpid()).start))
    assert not is_alive(replace(process, host="another-box"))
    assert is_alive(here(os.getpid()))


def test_a_job_that_succeeds_without_a_refused_model_names_it(home: Path) -> None:
    job = accepted(home)
    folder = JobFolder(home / "jobs", job.id)
    folder.make()
    folder.save_process(replace(here(os.getpid()), start="ended"))
    writer = EventWriter(folder.events_file)
    writer.write(Collected("tip-bench-x", 2, 0, 2, 0, refused=("big:9b has 9.00B parameters.",)))
    writer.write(Exit(0))
    writer.close()
    seen = LocalRunner(home).observe(job)
    assert (seen.state, seen.exit_code) == (JobState.SUCCEEDED, 0)
    assert "big:9b has 9.00B parameters." in seen.reason


def test_a_job_of_another_host_is_lost(home: Path) -> None:
    job = accepted(home)
    folder = JobFolder(home / "jobs", job.id)
    folder.make()
    folder.save_process(replace(here(os.getpid()), host="another-box"))
    cancelled = replace(job, cancel_requested=1.0)
    LocalRunner(home).cancel(cancelled)
    seen = LocalRunner(home).observe(cancelled)
    assert seen.state is JobState.LOST
    assert "another-box" in seen.reason


@pytest.mark.process
def test_a_zombie_process_is_not_alive() -> None:
    process = subprocess.Popen(["sleep", "60"])
    known = here(process.pid)
    assert is_alive(known)
    os.kill(process.pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(known))
    process.wait()


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps")
def test_a_system_without_proc_uses_ps(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "_PROC", tmp_path / "no-proc")
    known = here(sleeper.pid)
    assert known.start
    assert is_alive(known)
    assert process_start(2**22 + 1) is None
    sleeper.kill()
    assert eventually(lambda: not is_alive(known))


@pytest.mark.process
def test_descendant_processes_are_found_in_any_process_group(sleeper: subprocess.Popen[bytes]) -> None:
    below = descendants(sleeper.pid)
    assert len(below) == 1
    assert os.getpgid(below[0]) != os.getpgid(sleeper.pid)


@pytest.mark.process
def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_period(home: Path, mlflow_url: str) -> None:
    with ScriptedOllama(call_s=5) as server:
        job = accepted(home, models="alpha:135m", ollama_url=server.url, mlflow_url=mlflow_url)
        now = [1000.0]
        runner = LocalRunner(home, grace_s=20, clock=lambda: now[0])
        runner.start(job)
        process = JobFolder(home / "jobs", job.id).process
        assert process is not None
        assert eventually(lambda: bool(server.log.calls()))
        os.kill(process.pid, signal.SIGSTOP)  # it ignores SIGTERM
        cancelled = replace(job, cancel_requested=1.0)
        runner.cancel(cancelled)
        now[0] += 19
        runner.cancel(cancelled)
        assert runner.observe(cancelled).state is JobState.RUNNING
        now[0] += 2
        LocalRunner(home, grace_s=20, clock=lambda: now[0]).cancel(cancelled)  # the panel may be another one by then
        assert eventually(lambda: runner.observe(cancelled).state is not JobState.RUNNING)
        killed = runner.observe(cancelled)
        assert (killed.state, "without an exit code" in killed.reason) == (JobState.CANCELLED, True)
        assert runner.observe(job).state is JobState.LOST, "without a request to cancel it counts as lost"


def opened_by(pid: int) -> set[str]:
    """The files of a process; it may close some while we look."""
    opened = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.add(str(link.readlink()))
    return opened


@pytest.mark.process
def test_the_command_leads_a_new_session_and_inherits_no_open_file(home: Path, mlflow_url: str, tmp_path: Path) -> None:
    with ScriptedOllama(call_s=1) as server, (tmp_path / "ours").open("wb") as ours:
        os.set_inheritable(ours.fileno(), True)
        job = accepted(home, models="alpha:135m", ollama_url=server.url, mlflow_url=mlflow_url, n_scenarios=1)
        LocalRunner(home).start(job)
        process = JobFolder(home / "jobs", job.id).process
        assert process is not None
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        assert str(tmp_path / "ours") not in opened_by(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        assert eventually(lambda: not is_alive(process))


@pytest.mark.process
def test_the_command_gets_the_panels_settings_but_not_its_secrets(home: Path) -> None:
    environment = {
        **os.environ,
        "TIPBENCH_ADMIN_TOKEN": "panel-secret-1",
        "TIPBENCH_WEBHOOK_SECRET": "panel-secret-2",
        "MLFLOW_TRACKING_TOKEN": "needed",
        "TIPBENCH_SEED": "7",
    }
    job = accepted(home, mlflow_url="http://anna:login-secret@127.0.0.1:9", server_wait_s=20)
    runner = LocalRunner(home, environment=environment)
    runner.start(job)
    process = JobFolder(home / "jobs", job.id).process
    assert process is not None
    assert eventually(lambda: b"tipbench\0collect" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    given = Path(f"/proc/{process.pid}/environ").read_bytes()
    words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    os.killpg(process.pid, signal.SIGKILL)
    assert b"panel-secret" not in given
    assert b"MLFLOW_TRACKING_TOKEN=needed" in given
    assert b"TIPBENCH_SEED=7" in given
    assert b"login-secret" in given
    assert b"login-secret" not in words
    assert b"--models=baseline:template" in words


def test_a_command_that_cannot_be_started_gives_the_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = accepted(home)
    monkeypatch.setattr(sys, "executable", str(home / "nosuch-python"))
    with pytest.raises(JobStartError, match="nosuch-python"):
        LocalRunner(home).start(job)
    monkeypatch.undo()
    LocalRunner(home).start(job)  # too late: it was reported as failed
    assert JobFolder(home / "jobs", job.id).process is None


def test_a_folder_that_cannot_be_written_is_reported_in_a_sentence(home: Path) -> None:
    job = accepted(home)
    (home / "jobs" / job.id).write_text("a file in its place")
    with pytest.raises(UsageError, match="cannot be created"):
        LocalRunner(home).start(job)


def test_an_invalid_id_has_no_folder(tmp_path: Path) -> None:
    for job_id in ("", "..", "a/b", "/etc", "x" * 65, "a\n", "-rf"):
        with pytest.raises(UsageError, match="letters, digits and dashes"):
            JobFolder(tmp_path, job_id)


def test_the_tail_of_a_log_holds_no_control_characters_and_no_login(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "a-job")
    folder.make()
    folder.log_file.write_bytes(b"x" * 1000 + b"\nred \x1b[31m and http://anna:pw@box/x\n\xff half\n")
    tail = folder.tail(60)
    assert tail.text == "red  [31m and http://box/x\n\N{REPLACEMENT CHARACTER} half\n"
    assert tail.cut
    assert len(folder.tail(10**12).text) < 1100


def test_a_damaged_process_file_counts_as_none(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "a-job")
    folder.make()
    for content in (b"", b"{", b"[]", b'{"pid": "x", "start": "", "host": ""}', b'{"pid": 1}', b"\xff"):
        (folder.path / "process.json").write_bytes(content)
        assert folder.process is None


def test_a_tail_of_any_length_contains_no_part_of_a_login(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "job")
    folder.make()
    for text in ("MLflow: http://anna:hunter2@box/mlflow", "MLflow: http://anna:hunter2@box/mlflow\n"):
        folder.log_file.write_text(text)
        for most in range(1, 60):
            tail = folder.tail(most)
            assert not any(part in tail.text for part in ("hunter2", "ter2@", "2@", "anna"))
            assert tail.cut is (most < len(text))
