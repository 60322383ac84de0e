"""The lines of a journal: a result, with the version of its format, or the note that one was kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from tipbench.record.run import NewRun, RunKind

FORMAT = 1  # the key "v" of a result; without it a line is of version 1

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "kind": str, "record_id": str, "name": str, "start_ms": int, "end_ms": int, "ok": bool,
    "cell_key": (str, NoneType), "params": dict, "metrics": dict, "tags": dict, "texts": dict, "supersedes": list,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Where a record that MLflow does not have yet stands in the file."""

    record_id: str
    offset: int
    length: int
    cell_key: str | None = None  # of a finished cell; None for failures and other kinds of run


@dataclass(frozen=True)
class Foreign:
    """A line that another version of tipbench wrote, and how that shows."""

    how: str


@dataclass
class Contents:
    """What a journal holds: its entries that were not kept, in order, and the bytes of its whole lines."""

    open: dict[str, Entry] = field(default_factory=dict)
    size: int = 0
    foreign: str | None = None  # how the first line of another version shows, if there is one


def put_line(run: NewRun) -> bytes:
    """The line of a result. It begins with the kind of run, by which benchmarks count."""
    return _ENCODER.encode({"put": vars(run), "v": FORMAT}).encode() + b"\n"


def kept_line(record_id: str) -> bytes:
    """The note that MLflow has a result."""
    return _ENCODER.encode({"kept": record_id}).encode() + b"\n"


def entry_of(run: NewRun, offset: int, length: int) -> Entry:
    """The entry of a result whose line stands there."""
    return Entry(run.record_id, offset, length, run.cell_key if run.ok else None)


def read_lines(lines: Iterable[bytes]) -> Contents:
    """Read a journal from its beginning."""
    found = Contents()
    for line in lines:
        if not line.endswith(b"\n"):
            break  # torn: its process died while writing it
        said = parse_line(line)
        if isinstance(said, NewRun):
            found.open[said.record_id] = entry_of(said, found.size, len(line))
        elif isinstance(said, str):
            found.open.pop(said, None)
        elif isinstance(said, Foreign):
            found.foreign = found.foreign or said.how
        found.size += len(line)
    return found


def parse_line(line: bytes) -> NewRun | str | Foreign | None:
    """A result, the record id of a kept one, or None for what is no line of any version."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    version = value.get("v", FORMAT)
    if version != FORMAT:
        return Foreign(f"version {str(version)[:40]}")
    if isinstance(value.get("kept"), str):
        return str(value["kept"])
    return _run_of(value.get("put"))


def _run_of(fields: Any) -> NewRun | Foreign:
    if not isinstance(fields, dict):
        return Foreign(f"version {FORMAT}, but neither a result nor a note")
    if unknown := fields.keys() - _FIELDS.keys():
        return Foreign(f"version {FORMAT} with unknown fields: {', '.join(sorted(unknown))[:80]}")
    if missing := _FIELDS.keys() - fields.keys():
        return Foreign(f"version {FORMAT} without the fields {', '.join(sorted(missing))}")
    if wrong := [name for name, kind in _FIELDS.items() if not isinstance(fields[name], kind)]:
        return Foreign(f"version {FORMAT} with other values in {', '.join(wrong)}")
    if fields["kind"] not in set(RunKind):
        return Foreign(f"version {FORMAT} with an unknown kind of run, {fields['kind'][:40]!r}")
    return NewRun(**{**fields, "kind": RunKind(fields["kind"]), "supersedes": tuple(fields["supersedes"])})
