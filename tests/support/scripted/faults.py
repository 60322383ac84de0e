"""What can go wrong on purpose, for which calls, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

EARLY = {
    "busy": "503, the queue is full",
    "missing": "404",
    "status": "the status in `value`, with an error body",
    "reset": "connection reset before the first byte",
    "hang": "no byte, until the client leaves",
    "delay": "answers `value` seconds later",
    "hold": "answers once the fault is cleared",
}
CHAT = {
    "prompt_too_long": "400 after the load",
    "truncated": "prompt_eval_count is num_ctx at most, here always",
    "truncated_half": "the same, half of num_ctx",
    "error_line": "after `value` tokens a line with `error`, then the end",
    "no_done": "after `value` tokens a clean end without `done`",
    "done_false": 'one object with the whole text and `"done": false`',
    "reset_after": "connection reset after `value` tokens",
    "hang_after": "silence after `value` tokens",
    "garbage": "after `value` tokens a line that is not JSON, then the rest",
    "no_counters": "the last object has no counters and durations",
    "thinking": "`thinking` fields before the answer",
    "endless": "tokens until the client leaves",
    "huge": "an answer of `value` bytes (200 000) with emoji and NULs",
    "length": "half the text, done_reason `length`",
    "slow": "the call takes `value` seconds",
    "torn": "every write ends in the middle of a line, or even of a character",
}
MEMORY = {
    "stuck": "the model stays in Stopping until the fault is cleared",
    "unload_delay": "an unload takes `value` seconds",
    "load_error": "a load fails: 500",
    "load_delay": "a load takes `value` seconds",
    "hide_loading": "a loading model is not in /api/ps",
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
    times: int | None = None  # at most so often
    path: str = "/api/chat"  # EARLY kinds work on every path

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no such fault: {self.kind!r}; there are {', '.join(KINDS)}")

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> Fault:
        """A fault from the body of POST /_script."""
        unknown = set(raw) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"no such field of a fault: {', '.join(sorted(unknown))}")
        values = dict(raw)
        if isinstance(calls := values.get("calls"), list):
            values["calls"] = tuple(calls)
        return cls(**values)  # type: ignore[arg-type]


class Script:
    """The faults in force. Used on the server's loop only."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._left: list[tuple[Fault, list[int]]] = []
        self.add(faults)

    def add(self, faults: Iterable[Fault]) -> None:
        """Puts faults in force; their `times` start at zero."""
        self._left += [(fault, [fault.times if fault.times is not None else -1]) for fault in faults]

    def clear(self, kind: str | None = None) -> None:
        """Takes all faults back, or those of one kind."""
        self._left = [(fault, left) for fault, left in self._left if kind is not None and fault.kind != kind]

    def holds(self, fault: Fault) -> bool:
        """Whether this very fault is still in force."""
        return any(own is fault for own, _ in self._left)

    def take(
        self, kinds: Iterable[str], path: str, model: str | None = None, nth_model: int = 0, nth_path: int = 0
    ) -> dict[str, Fault]:
        """The faults that strike now, by kind; each is counted as used once."""
        if not self._left:
            return {}
        struck: dict[str, Fault] = {}
        for fault, left in self._left:
            if fault.kind not in kinds or fault.kind in struck or left[0] == 0 or fault.path != path:
                continue
            if fault.model is not None and fault.model != model:
                continue
            if fault.calls and (nth_path if fault.model is None else nth_model) not in fault.calls:
                continue
            left[0] -= 1
            struck[fault.kind] = fault
        return struck

    def memory(self, kinds: Iterable[str], model: str, nth_model: int, nth_all: int) -> dict[str, Fault]:
        """The faults of one load or unload of a model."""
        return self.take(kinds, "/api/chat", model, nth_model, nth_all)
