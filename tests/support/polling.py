"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(check: Callable[[], bool], wait_s: float = 60.0) -> bool:
    """Poll until the check is true; returns False after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
