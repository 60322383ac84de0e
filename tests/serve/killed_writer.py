"""python killed_writer.py sqlite|files reward|reset|erase|import: kills a writer at each line, checks what it leaves.

A child process changes the state of a user and kills itself at the nth line of the code that writes. Another child
opens the store again: it must have the old state or the new one, and the new one if the change was acknowledged. A
rebuild from the log must give the same bytes. Prints {"steps", "old", "new"}. The store is in memory if possible: a
killed process loses nothing that it has written, synced or not.
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
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from support.serving import learn, open_service, reward_request, score_request
from tipbench import files, sqlite
from tipbench.errors import EventConflict, EventNotFound
from tipbench.serve import state_store
from tipbench.serve.event_log import open_database, read_entries
from tipbench.serve.state_store import export_state, import_state, rebuild_state

WRITES = {
    files.__file__: {"write_atomic", "_temporary_file", "sync_folder"},
    sqlite.__file__: {"transaction", "_run", "_write"},
    state_store.__file__: {"save", "erase"},
}
OLD, NEW, NOT_KILLED = 10, 11, 12
LEARNED = {"reward": 4, "reset": 0, "erase": 0, "import": 2}  # rewards after the change; there are 3 before


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


def write(home: Path, state: str, change: str, step: int, acknowledged: Path) -> int:
    killer = Killer(step)
    threading.settrace(killer.trace)
    if change == "import":
        sys.settrace(killer.trace)
        import_state(home, home / "exported", store_kind=state)
        acknowledged.touch()
        sys.settrace(None)
        return NOT_KILLED
    with open_service(home, store_kind=state) as service:
        sys.settrace(killer.trace)
        if change == "reward":
            reward = service.reward(None, reward_request("open"))
            assert reward.committed is not None
            reward.committed.result()
        else:
            service.reset("u1", erase=change == "erase")
        acknowledged.touch()
        service.flush()
        sys.settrace(None)
    return NOT_KILLED


def check(home: Path, state: str, change: str, acknowledged: Path) -> int:
    with open_service(home, store_kind=state) as service:
        n = service.stats("egreedy/v1", "u1")["n"]
        assert n in (3, LEARNED[change]), n
        assert n == LEARNED[change] or not acknowledged.exists(), "an acknowledged change was lost"
        _, tallies = service.snapshot("egreedy/v1", service.keys.hash_user_id("u1"))
        assert sum(tally.seen for tally in tallies.by_category.values()) == n, "half of the change was made"
        repeated = "conflict"
        with suppress(EventConflict):
            try:
                repeated = "learned" if service.reward(None, reward_request("open")).body["applied"] else "known"
            except EventNotFound:
                repeated = "unknown"
        new = {"reward": "known", "reset": "conflict", "erase": "unknown", "import": "learned"}[change]
        assert repeated == ("learned" if n == 3 else new), repeated
        service.flush()
        key = service.keys.hash_user_id("u1")
        if change == "erase" and n == 0:
            assert [entry.kind for entry in read_entries(service.log.database, user=key)] == ["reset"]
    left = load_documents(home, state, key)
    rebuild_state(home, store_kind=state)
    assert load_documents(home, state, key) == left
    return NEW if n == LEARNED[change] else OLD


def load_documents(home: Path, state: str, key: str) -> dict[str, bytes]:
    with closing(open_database(home)) as database:
        return state_store.open_state(home, state, database, database).load(key)


def prepare(home: Path, state: str) -> int:
    with open_service(home, store_kind=state) as service:
        learn(service, "egreedy/v1", 2)
        export_state(home, home / "exported", store_kind=state)
        learn(service, "egreedy/v1", 1, prefix="x")
        service.score("egreedy/v1", score_request(event_id="open"))
    return 0


def main(folder: Path, state: str, change: str) -> None:
    original, home, acknowledged = folder / "original", folder / "home", folder / "acknowledged"
    assert in_child(prepare, original, state) == 0
    outcomes = {OLD: 0, NEW: 0}
    for step in count(1):
        shutil.rmtree(home, ignore_errors=True)
        acknowledged.unlink(missing_ok=True)
        shutil.copytree(original, home)
        status = in_child(write, home, state, change, step, acknowledged)
        if status == NOT_KILLED:
            break
        assert status == -signal.SIGKILL, f"step {step}: the writer ended with {status}"
        found = in_child(check, home, state, change, acknowledged)
        assert found in outcomes, f"step {step}: the check ended with {found}"
        outcomes[found] += 1
    print(json.dumps({"steps": sum(outcomes.values()), "old": outcomes[OLD], "new": outcomes[NEW]}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as in_memory:  # noqa: S108
        main(Path(in_memory), sys.argv[1], sys.argv[2])
