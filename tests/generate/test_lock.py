"""One collect per server: who holds the lock, who waits, and what a dead holder leaves."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tipbench.errors import LockHeld
from tipbench.generate.lock import ResourceLock

HOLD = """
import sys, time
from pathlib import Path
from tipbench.generate.lock import ResourceLock
lock = ResourceLock(Path(sys.argv[1]), "Ollama at here", "a collect into tip-bench-first")
lock.acquire(wait=False, report=print)
lock.note_loaded("qwen2.5:0.5b", "sha-q")
print("held", flush=True)
time.sleep(60)
"""


def other_process(home: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(home)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def lock(home: Path, resource: str = "Ollama at here") -> ResourceLock:
    return ResourceLock(home, resource, "a collect into tip-bench-second")


def test_the_second_is_told_who_holds_it(home: Path) -> None:
    with other_process(home) as first:
        try:
            with pytest.raises(LockHeld, match=rf"tip-bench-first \(process {first.pid} .*qwen2.5:0.5b.*--wait"):
                lock(home).acquire(wait=False, report=print)
        finally:
            first.kill()


def test_another_server_is_another_lock(home: Path) -> None:
    mine, other = lock(home), lock(home, "Ollama at there")
    mine.acquire(wait=False, report=print)
    other.acquire(wait=False, report=print)
    mine.release()
    other.release()


def test_a_killed_holder_frees_the_lock_and_leaves_the_name_of_its_model(home: Path) -> None:
    with other_process(home) as first:
        first.kill()
    mine = lock(home)
    mine.acquire(wait=False, report=print)
    assert mine.left_behind is not None
    assert (mine.left_behind.model, mine.left_behind.digest) == ("qwen2.5:0.5b", "sha-q")
    mine.release()


def test_a_holder_that_ended_in_order_leaves_nothing(home: Path) -> None:
    first = lock(home)
    first.acquire(wait=False, report=print)
    first.note_loaded("m", "sha")
    first.note_empty()
    first.release()
    second = lock(home)
    second.acquire(wait=False, report=print)
    assert second.left_behind is None
    second.release()


def test_waiting_takes_over_when_the_holder_leaves(home: Path) -> None:
    said: list[str] = []
    with other_process(home) as first:
        threading.Timer(0.4, first.kill).start()
        start = time.monotonic()
        mine = lock(home)
        mine.acquire(wait=True, report=said.append, poll_s=0.05)
        assert time.monotonic() - start > 0.3
    assert len(said) == 1
    assert "tip-bench-first" in said[0]
    mine.release()
