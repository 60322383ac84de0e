"""`tipbench` as the child process of an Airflow task: exits as on SIGTERM when its stdin closes.

    python -m tipbench.cli.airflow_child collect --models …

Nothing is written to that pipe. The task closes it when it is terminated, and the kernel when the task has died.
"""

from __future__ import annotations

import os
import signal
import threading


def main() -> None:
    """Run the command line with a thread that watches stdin."""
    threading.Thread(target=_watch, daemon=True).start()
    from tipbench.cli.main import main as tipbench

    tipbench()


def _watch() -> None:
    while os.read(0, 1):
        pass
    # To the main thread: a signal delivered to another thread does not interrupt the main thread's blocking call.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


if __name__ == "__main__":
    main()
