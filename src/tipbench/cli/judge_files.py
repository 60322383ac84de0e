"""The files of `tipbench judge`: where a sheet may be written, and where a filled one is read from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tipbench.cli.console import say
from tipbench.cli.writing import check_file
from tipbench.errors import SheetRefused, UsageError

STREAM = "-"  # stdout, or stdin
_MOST_KEPT = 1000


def is_stream(path: Path) -> bool:
    """Whether a file is stdout or stdin."""
    return str(path) == STREAM


def check_target(path: Path) -> None:
    """Refuse what cannot be written, before anything is done."""
    if is_stream(path):
        return
    check_file(path, "--out")
    if path.exists() and not path.is_file():
        raise UsageError(f"--out {path} is no ordinary file; take another file.")


def _worth_keeping(path: Path) -> bool:
    """Whether somebody could miss it: anything but an empty file, and a sheet or duels without a mark in them."""
    from tipbench.judge.sheet_files import read_sheet_file

    if not path.exists() or path.stat().st_size == 0:
        return False
    try:
        return _is_filled(read_sheet_file(path))
    except (SheetRefused, UsageError, KeyError, TypeError, AttributeError):
        return True


def _keep_aside(path: Path) -> None:
    """Give a file that would be overwritten another name: nobody's hour of work is lost to an export."""
    if not _worth_keeping(path):
        return
    names = (path.with_name(f"{path.name}.{number}.old") for number in range(1, _MOST_KEPT))
    free = next((name for name in names if not name.exists()), None)
    if free is None:
        raise UsageError(f"{path} and {_MOST_KEPT - 1} older ones are there; take another file, or clear some away.")
    path.rename(free)
    say(f"{path} was there already; it is now {free}")


def _is_filled(raw: dict[str, Any]) -> bool:
    """KeyError, TypeError or AttributeError for what is neither a sheet nor a file of duels."""
    from tipbench.judge.duel_sheet import FORMAT as DUELS
    from tipbench.judge.sheet import FORMAT

    if raw["format"] == DUELS:
        return any(item["winner"] is not None for item in raw["items"])
    if raw["format"] != FORMAT:
        raise KeyError(raw["format"])
    tips = [tip for item in raw["items"] for tip in item["tips"]]
    return any(tip.get("note") or any(score is not None for score in tip["scores"].values()) for tip in tips)


def read_filled(path: Path) -> dict[str, Any]:
    """A filled sheet from a file, or from stdin."""
    from tipbench.judge.sheet_files import MAX_BYTES, parse_sheet, read_sheet_file

    if is_stream(path):
        return parse_sheet(sys.stdin.buffer.read(MAX_BYTES + 1))
    return read_sheet_file(path)


def write_text(path: Path, text: str, otherwise: str) -> None:
    """A sheet into a file, whole or not at all, or to stdout; `otherwise` says what to do when that fails."""
    from tipbench.cli.writing import write_file

    if is_stream(path):
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))  # half a character becomes its JSON escape
        sys.stdout.buffer.flush()
        return
    _keep_aside(path)
    write_file(path, text, "--out", otherwise)
