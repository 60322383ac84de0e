"""python killed_writer.py sqlite|files: kills a service at each line that writes, and checks what it leaves.

A child process learns one reward and writes the state; at the nth line of the code that writes it kills itself. Another
child opens the store again: it must have the old state or the new one, the new one if the reward was acknowledged, and
a rebuild from the log must give the same bytes. Prints {"steps", "old", "new"}. Works in memory where it can: a killed
process loses nothing that it has written, synced or not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from support.serving import learn, reward_request, score_request, serving
from tipbench import files, sqlite
from tipbench.serve import state_store
from tipbench.serve.event_log import open_store
from tipbench.serve.maintenance import rebuild_state

WRITES = {
    files.__file__: {"write_atomic", "_synced_copy", "sync_folder"},
    sqlite.__file__: {"transaction", "_run", "_write"},
    state_store.__file__: {"save"},
}
OLD, NEW, TOO_FAR = 10, 11, 12


class Killer:
    """Kills this process at the nth line of the functions that write."""

    def __init__(self, step: int) -> None:
        self._left = step
        self._lock = threading.Lock()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name not in WRITES.get(frame.f_code.co_filename, ()):
            return None
        if event == "line":
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def in_child(work: Callable[..., int], *values: object) -> int:
    """Run the function in a child; returns its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work(*values)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def write(home: Path, state: str, step: int, acknowledged: Path) -> int:
    killer = Killer(step)
    threading.settrace(killer.trace)
    with serving(home, state=state) as service:
        sys.settrace(killer.trace)
        reward = service.reward(None, reward_request("open"))
        assert reward.committed is not None
        reward.committed.result()
        acknowledged.touch()
        service.flush()
        sys.settrace(None)
    return TOO_FAR


def check(home: Path, state: str, acknowledged: Path) -> int:
    with serving(home, state=state) as service:
        n = service.stats("egreedy/v1", "u1")["n"]
        repeated = service.reward(None, reward_request("open")).body
        assert n in (3, 4), n
        assert n == 4 or not acknowledged.exists(), "an acknowledged reward was lost"
        assert repeated["applied"] == (n == 3), repeated
        service.flush()
        key = service.keys.user("u1")
    left = documents(home, state, key)
    assert json.loads(left["egreedy/v1"])["n"] == 4
    rebuild_state(home, state=state)
    assert documents(home, state, key) == left
    return NEW if n == 4 else OLD


def documents(home: Path, state: str, key: str) -> dict[str, bytes]:
    with closing(open_store(home)) as database:
        return state_store.open_state(home, state, database, database).load(key)


def prepare(home: Path, state: str) -> int:
    with serving(home, state=state) as service:
        learn(service, "egreedy/v1", 3)
        service.score("egreedy/v1", score_request(event_id="open"))
    return 0


def main(folder: Path, state: str) -> None:
    original, home, acknowledged = folder / "original", folder / "home", folder / "acknowledged"
    assert in_child(prepare, original, state) == 0
    outcomes = {OLD: 0, NEW: 0}
    for step in count(1):
        shutil.rmtree(home, ignore_errors=True)
        acknowledged.unlink(missing_ok=True)
        shutil.copytree(original, home)
        status = in_child(write, home, state, step, acknowledged)
        if status == TOO_FAR:
            break
        assert status == -signal.SIGKILL, f"step {step}: the writer ended with {status}"
        found = in_child(check, home, state, acknowledged)
        assert found in outcomes, f"step {step}: the check ended with {found}"
        outcomes[found] += 1
    print(json.dumps({"steps": sum(outcomes.values()), "old": outcomes[OLD], "new": outcomes[NEW]}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as in_memory:  # noqa: S108
        main(Path(in_memory), sys.argv[1])
