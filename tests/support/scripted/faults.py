"""Scripted faults: their kinds, the calls they apply to, and how often they occur."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EARLY = {
    "busy": "503, the queue is full",
    "missing": "404",
    "status": "the status in `value`, with an error body",
    "reset": "connection reset before the first byte",
    "hang": "no byte until the client disconnects",
    "hold": "answers once the fault is cleared",
}
CHAT = {
    "prompt_too_long": "400 after the load",
    "truncated": "prompt_eval_count is always num_ctx",
    "truncated_half": "prompt_eval_count is always half of num_ctx",
    "error_line": "after `value` tokens a line with `error`, then the end",
    "no_done": "after `value` tokens a clean end without `done`",
    "done_false": 'one object with the whole text and `"done": false`',
    "reset_after": "connection reset after `value` tokens",
    "hang_after": "no more bytes after `value` tokens",
    "garbage": "after `value` tokens a line that is not JSON, then the rest",
    "no_counters": "the last object has no counters and durations",
    "thinking": "`thinking` fields before the answer",
    "endless": "tokens until the client disconnects",
    "huge": "an answer of `value` bytes (200 000) with emoji and NULs",
    "length": "half the text, done_reason `length`",
    "slow": "the call takes `value` seconds",
    "torn": "every write ends in the middle of a line, or even of a character",
}
MEMORY = {
    "stuck": "the model stays in Stopping until the fault is cleared",
    "load_error": "a load fails: 500",
}
KINDS = EARLY | CHAT | MEMORY


@dataclass(frozen=True)
class Fault:
    """One fault. `calls` counts from 1: the calls of `path`, or the loads or unloads for a MEMORY kind; if `model`
    is given, that model's."""

    kind: str
    value: float | None = None
    model: str | None = None
    calls: tuple[int, ...] = ()  # empty: every call
    times: int | None = None  # the maximum number of occurrences
    path: str = "/api/chat"  # EARLY kinds work on every path

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no such fault: {self.kind!r}; there are {', '.join(KINDS)}")


class Script:
    """The active faults. Used on the server's loop only."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._active: list[tuple[Fault, list[int]]] = []  # with the number of occurrences left, -1: no limit
        self.add(faults)

    def add(self, faults: Iterable[Fault]) -> None:
        """Activate faults."""
        self._active += [(fault, [fault.times if fault.times is not None else -1]) for fault in faults]

    def clear(self, kind: str | None = None) -> None:
        """Remove all faults, or those of one kind."""
        self._active = [(fault, left) for fault, left in self._active if kind is not None and fault.kind != kind]

    def is_active(self, fault: Fault) -> bool:
        """Return whether this very fault is still active."""
        return any(own is fault for own, _ in self._active)

    def take(
        self, kinds: Iterable[str], path: str, model: str | None, nth_model: int, nth_path: int
    ) -> dict[str, Fault]:
        """Return the faults of this call by kind, and count each as used once."""
        taken: dict[str, Fault] = {}
        for fault, left in self._active:
            if fault.kind not in kinds or fault.kind in taken or left[0] == 0 or fault.path != path:
                continue
            if fault.model is not None and fault.model != model:
                continue
            if fault.calls and (nth_path if fault.model is None else nth_model) not in fault.calls:
                continue
            left[0] -= 1
            taken[fault.kind] = fault
        return taken
