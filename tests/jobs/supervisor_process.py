"""A supervisor process for tests to kill: python supervisor_process.py HOME; prints `leads` once it leads."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tipbench.jobs.local import LocalRunner
from tipbench.jobs.store import JobStore
from tipbench.jobs.supervisor import Supervisor


def main(home: Path) -> None:
    """Supervise until killed, or for ten minutes."""
    deadline = time.monotonic() + 600
    with (
        JobStore(home / "jobs" / "jobs.db") as store,
        Supervisor(store, {"local": LocalRunner(home)}, home / "jobs" / "supervisor.lock", tick_s=0.05) as supervisor,
    ):
        while time.monotonic() < deadline and not supervisor.holds_lock:
            time.sleep(0.01)
        print("leads", flush=True)
        while time.monotonic() < deadline:
            time.sleep(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
