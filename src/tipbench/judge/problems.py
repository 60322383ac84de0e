"""What is wrong with a filled sheet, one problem at a time, and the refusal that lists them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tipbench.errors import SheetRefused

MAX_PROBLEMS = 1000
MAX_LISTED = 20
MAX_SHOWN = 120


@dataclass(frozen=True)
class Problem:
    """One mistake in a filled sheet, and where it stands."""

    item: str | None
    tip: int | None  # counted from 1
    field: str
    seen: str  # as `shown` writes it
    expected: str
    row: int | None = None  # of a spreadsheet

    @property
    def message(self) -> str:
        places = [
            f"row {self.row}" if self.row is not None else "",
            f"item {self.item}" if self.item is not None else "",
            f"tip {self.tip}" if self.tip is not None else "",
            self.field,
        ]
        return f"{', '.join(filter(None, places))}: expected {self.expected}; found {self.seen}."

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the message."""
        return {**vars(self), "message": self.message}


class _Short(reprlib.Repr):
    """Names constants as JSON does, and never writes out an integer of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxother, self.maxlevel, self.maxdict, self.maxlist = 70, 70, 2, 3, 3

    def repr_bool(self, value: bool, _level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802 - found by the type's name
        return "null"

    def repr_int(self, value: int, _level: int) -> str:
        return repr(value) if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"


def shown(value: object) -> str:
    """A value on one short line, with nothing in it that a terminal would act upon."""
    text = _Short().repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def refusal(problems: Iterable[Problem]) -> SheetRefused:
    """The refusal that lists the first problems, one a line, and carries the first thousand."""
    found = list(islice(problems, MAX_PROBLEMS + 1))
    kept = found[:MAX_PROBLEMS]
    count = f"more than {len(kept)} problems" if len(found) > len(kept) else f"{len(kept)} problems"
    head = (
        f"The sheet has {'1 problem' if len(found) == 1 else count}; nothing was applied. Correct and apply it again:"
    )
    lines = [head, *(f"  {problem.message}" for problem in kept[:MAX_LISTED])]
    if len(kept) > MAX_LISTED:
        lines.append(f"  and {len(kept) - MAX_LISTED} more" + (" at least" if len(found) > len(kept) else ""))
    return SheetRefused("\n".join(lines), kept)
