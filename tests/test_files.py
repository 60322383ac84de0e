"""Atomic writes, and locks: the holder, waiting, and the record of a killed holder."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tipbench.errors import LockHeld, TipbenchError, UsageError
from tipbench.files import ResourceLock, try_lock, writable_home, write_atomic

HOLD_LOCK = """
import sys, time
from pathlib import Path
from tipbench.files import ResourceLock
lock = ResourceLock(Path(sys.argv[1]), "Ollama at here", "a collect into tip-bench-first")
lock.acquire(wait=False, report=print)
lock.note_loaded("qwen2.5:0.5b", "sha-q")
print("held", flush=True)
time.sleep(60)
"""


def hold_lock_in_other_process(home: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(home)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def make_lock(home: Path, resource: str = "Ollama at here") -> ResourceLock:
    return ResourceLock(home, resource, "a collect into tip-bench-second")


@pytest.mark.process
def test_a_second_process_gets_the_holder_of_the_lock(home: Path) -> None:
    with hold_lock_in_other_process(home) as first:
        try:
            with pytest.raises(LockHeld, match=rf"tip-bench-first \(process {first.pid} .*qwen2.5:0.5b.*--wait"):
                make_lock(home).acquire(wait=False, report=print)
        finally:
            first.kill()


def test_another_server_is_another_lock(home: Path) -> None:
    lock, other = make_lock(home), make_lock(home, "Ollama at there")
    lock.acquire(wait=False, report=print)
    other.acquire(wait=False, report=print)
    lock.release()
    other.release()


@pytest.mark.process
def test_a_killed_holder_frees_the_lock_and_leaves_the_name_of_its_model(home: Path) -> None:
    with hold_lock_in_other_process(home) as first:
        first.kill()
    lock = make_lock(home)
    lock.acquire(wait=False, report=print)
    assert lock.dead_holder is not None
    assert (lock.dead_holder.model, lock.dead_holder.digest) == ("qwen2.5:0.5b", "sha-q")
    lock.release()


def test_a_holder_that_exited_normally_leaves_nothing(home: Path) -> None:
    first = make_lock(home)
    first.acquire(wait=False, report=print)
    first.note_loaded("m", "sha")
    first.note_unloaded()
    first.release()
    second = make_lock(home)
    second.acquire(wait=False, report=print)
    assert second.dead_holder is None
    second.release()


@pytest.mark.process
def test_waiting_ends_with_the_holders_name_after_the_timeout(home: Path) -> None:
    lock, other = make_lock(home), make_lock(home)
    lock.acquire(wait=False, report=print)
    with pytest.raises(LockHeld, match="in use by"):
        other.acquire(wait=True, report=print, timeout_s=0.05)
    lock.release()
    assert not other.acquire(wait=True, report=print, timeout_s=0.05)
    other.release()


def test_waiting_takes_over_when_the_holder_leaves(home: Path) -> None:
    messages: list[str] = []
    with hold_lock_in_other_process(home) as first:

        def report(text: str) -> None:
            messages.append(text)
            first.kill()

        lock = make_lock(home)
        assert lock.acquire(wait=True, report=report)
    assert len(messages) == 1
    assert "tip-bench-first" in messages[0]
    lock.release()


def lock_path(home: Path) -> Path:
    return home / "locks" / f"{hashlib.sha256(b'Ollama at here').hexdigest()[:16]}.lock"


def test_a_file_in_place_of_the_folder_is_a_usage_error(home: Path) -> None:
    home.mkdir()
    (home / "locks").touch()
    with pytest.raises(UsageError, match=r"locks cannot be created: File exists\. Set TIPBENCH_HOME"):
        make_lock(home).acquire(wait=False, report=print)


def test_a_lock_file_that_may_not_be_opened_is_a_usage_error(home: Path) -> None:
    lock_path(home).mkdir(parents=True)
    with pytest.raises(UsageError, match="cannot be opened: Is a directory"):
        make_lock(home).acquire(wait=False, report=print)


def test_a_full_disk_is_reported_and_the_lock_is_released(home: Path) -> None:
    lock_path(home).parent.mkdir(parents=True)
    lock_path(home).symlink_to("/dev/full")
    with pytest.raises(TipbenchError, match=r"No space left on device\. Free some space") as caught:
        make_lock(home).acquire(wait=False, report=print)
    assert caught.value.exit_code == 1
    lock_path(home).unlink()
    again = make_lock(home)
    again.acquire(wait=False, report=print)
    again.release()


def test_a_disk_that_fills_up_later_is_reported(home: Path) -> None:
    lock = make_lock(home)
    lock.acquire(wait=False, report=print)
    with Path("/dev/full").open("r+b") as full:
        os.dup2(full.fileno(), lock._fd or -1)
    with pytest.raises(TipbenchError, match="No space left"):
        lock.note_loaded("m", "sha")
    lock.release()


def test_a_lock_is_shared_by_readers_and_exclusive_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as one, path.open("rb") as two:
        assert try_lock(one.fileno(), path, shared=True)
        assert try_lock(two.fileno(), path, shared=True)
        assert not try_lock(one.fileno(), path)


def test_an_atomic_write_that_fails_leaves_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_the_home_is_private_with_any_umask(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir(mode=0o755)
    former = os.umask(0)
    try:
        for home in (new, old):
            assert stat.S_IMODE(writable_home(home).stat().st_mode) == 0o700
    finally:
        os.umask(former)
