"""Files that commands write besides their result: refused before the work when they cannot be, written whole."""

from __future__ import annotations

import os
from pathlib import Path

from tipbench.errors import UsageError


def check_file(path: Path, flag: str) -> None:
    """UsageError when nothing can be written there."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UsageError(f"{flag} takes a file; {path} {what}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path} cannot be written: no permission. Choose another file.")


def write_file(path: Path, text: str, flag: str, otherwise: str = "Choose another file.") -> None:
    """The text in a file, all of it or nothing; `otherwise` says what to do when that fails."""
    from tipbench.generate.durable import write_whole

    try:
        write_whole(path, text.encode("utf-8", "backslashreplace"))
    except OSError as exc:
        raise UsageError(f"{flag} {path} could not be written: {exc.strerror}. {otherwise}") from exc
