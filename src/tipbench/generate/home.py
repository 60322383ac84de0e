"""The home folder when it cannot be used: what is wrong with it, and what to do, in one sentence for every file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tipbench.errors import TipbenchError, UsageError

_MISUSED = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
        *(errno.ELOOP, errno.ENAMETOOLONG),
    }
)  # the folder is the wrong one; anything else (a full disk, a broken one) is bad luck
_ELSEWHERE = "Set TIPBENCH_HOME to a folder that you may write to."
_NEXT_STEP = {
    errno.ENOSPC: "Make room there, or set TIPBENCH_HOME to a folder on another disk.",
    errno.EDQUOT: "Make room there, or set TIPBENCH_HOME to a folder on another disk.",
    errno.EMFILE: "Allow more open files, as with `ulimit -n 4096`, or lower --concurrency.",
    errno.ENFILE: "Close other programs: the whole machine has too many files open.",
}


@contextmanager
def in_home(place: Path, what: str) -> Iterator[None]:
    """Whatever the disk refuses inside becomes a sentence about the home folder; `what` is as in "cannot be made"."""
    try:
        yield
    except OSError as exc:
        kind = UsageError if exc.errno in _MISUSED else TipbenchError
        raise kind(
            f"tipbench keeps journals, locks and weights in its home folder, but {place} {what}: "
            f"{exc.strerror or exc}. {_NEXT_STEP.get(exc.errno or 0, _ELSEWHERE)}"
        ) from exc
