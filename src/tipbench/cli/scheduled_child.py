"""`tipbench` as the child of a task: ends like after a polite kill, once, when its stdin closes.

    python -m tipbench.cli.scheduled_child collect --models …

Nobody writes into that pipe. The task closes it when it is told to end, and the kernel does when the task is gone.
"""

from __future__ import annotations

import os
import signal
import threading


def main() -> None:
    """Run the command line beside somebody who watches the pipe."""
    threading.Thread(target=_watch, daemon=True).start()
    from tipbench.cli.main import main as tipbench

    tipbench()


def _watch() -> None:
    while os.read(0, 1):
        pass
    # To this thread of all: a signal that another one takes does not wake up a call that waits.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


if __name__ == "__main__":
    main()
