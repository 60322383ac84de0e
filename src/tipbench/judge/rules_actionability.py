"""Actionability by rules: what a tip tells to do, how it starts, how long it takes, how big it is, when it stops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tipbench.judge import rules_words as words
from tipbench.judge.rules_finding import Finding
from tipbench.judge.rules_relevance import Hooks
from tipbench.judge.rules_text import Card, Reading, Word, clause_verb, opening

_NOT_COUNTED = words.UNITS | words.FUNCTION - {"of"}
_DURATION = re.compile(
    r" (?:(?P<n>\d{1,3})|one|two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty(?: five)?|thirty|a few)"
    r"(?: more| quiet| full| short)? (?:min|mins|minutes?|sec|secs|seconds?)(?= )"
    r"| timer(?= )| half an hour(?= )| quarter of an hour(?= )"
)


@dataclass(frozen=True)
class Moves:
    """What a tip tells to do."""

    steps: tuple[str, ...]  # visible first moves
    actions: tuple[str, ...]
    directions: tuple[str, ...]
    trigger: bool
    duration: str | None
    size: str | None
    stop: str | None
    open_object: str | None

    @property
    def real(self) -> bool:
        return bool(self.steps or self.actions)

    @property
    def start(self) -> bool:
        return bool(self.steps) or self.trigger


def find_moves(reading: Reading, card: Card) -> Moves:
    """What the tip's clauses tell to do."""
    found: dict[str, list[str]] = {"step": [], "action": [], "direction": [], "none": []}
    first: int | None = None
    for index, clause in enumerate(reading.clauses):
        at = clause_verb(clause, card.orders)
        if at is None or _negated(clause, at):
            continue
        kind = _kind(clause, at, card)
        found[kind].append(clause[at].lower)
        first = index if first is None and kind in {"step", "action"} else first
    after = reading.clauses[first:] if first is not None else ()
    return Moves(
        steps=tuple(found["step"]),
        actions=tuple(found["action"]),
        directions=tuple(found["direction"]),
        trigger=bool(first) and reading.clauses[0][0].lower in words.TRIGGERS,
        duration=_duration(reading),
        size=_size([word for clause in after for word in clause]),
        stop=_stop(after),
        open_object=next(iter(reading.has(words.OPEN_OBJECTS)), None),
    )


def _negated(clause: Sequence[Word], at: int) -> bool:
    return any(word.lower in words.NEGATIONS for word in clause[max(0, at - 3) : at])


def _kind(clause: Sequence[Word], at: int, card: Card) -> str:
    verb, rest = clause[at].lower, [word.lower for word in clause[at + 1 :]]
    onward = _onward(verb, rest)
    if onward is not None:
        return _kind(clause, at + 1 + onward, card)
    if verb in words.LIGHT_VERBS and set(rest[:4]) & words.VAGUE_OBJECTS and not set(rest) & words.UNITS:
        return "direction"
    if verb in {"use", "spend"} and not set(rest) & words.UNITS:
        return "direction"
    if f"{verb} {rest[0] if rest else ''}" in words.STEP_PAIRS or verb in words.STEP_VERBS:
        return "step"
    if verb in {"stop", "remember"}:
        return "none"
    if verb in words.ACTION_VERBS or verb in card.task_verbs:
        return "action"
    return "direction" if verb in words.VAGUE_VERBS else "none"


def _onward(verb: str, rest: Sequence[str]) -> int | None:
    """Where the verb that counts stands: 'try to open', 'use the break to reflect'."""
    if verb in {"try", "remember", "start", "begin", "decide", "aim"} and rest[:1] == ["to"]:
        return 1 if len(rest) > 1 and rest[1] in words.ORDERS else None
    if verb in words.TIME_VERBS:
        return next((i + 1 for i, w in enumerate(rest[:-1]) if w == "to" and rest[i + 1] in words.ORDERS), None)
    return None


def _duration(reading: Reading) -> str | None:
    """The first that is no longer than an hour."""
    fitting = (found for found in _DURATION.finditer(reading.plain) if 0 < int(found["n"] or 1) <= 60)
    return next((found.group().strip() for found in fitting), None)


def _size(after: Sequence[Word]) -> str | None:
    for word, following in pairwise(after):
        if word.lower in words.SIZES and following.lower not in _NOT_COUNTED:
            return f"{word.lower} {following.lower}"
    return None


def _stop(after: Sequence[Sequence[Word]]) -> str | None:
    for index, clause in enumerate(after):
        if words.STOPS & {word.lower for word in clause} or (index and opening(clause) in words.STOP_VERBS):
            return " ".join(word.lower for word in clause[:6])
    return None


def actionability(moves: Moves, hooks: Hooks) -> Finding:
    """The step for the moves of a tip; the hooks tell whether it is about now, and about one thing."""
    if not moves.real:
        direction = moves.directions[:1]
        return Finding(2, (f"direction only: {direction[0]}",)) if direction else Finding(1, ("nothing to do",))
    because = [f"action: {', '.join((*moves.steps, *moves.actions)[:3])}"]
    because += ["start"] if moves.start else []
    because += [f"duration: {moves.duration}"] if moves.duration else []
    because += [f"size: {moves.size}"] if moves.size else []
    because += [f"stop: {moves.stop}"] if moves.stop else []
    if moves.open_object and not hooks.tasks:
        return Finding(3, (*because, f"leaves open what: {moves.open_object}"))
    if len(hooks.tasks) > 2:
        return Finding(2, ("lists several tasks and chooses none",))
    if hooks.later or hooks.against:
        return Finding(3, (*because, f"not now: {(*hooks.later, *hooks.against)[0]}"))
    if moves.start and moves.duration and moves.stop:
        return Finding(5, tuple(because))
    several = len(moves.steps) + len(moves.actions) > 1
    marks = moves.start + bool(moves.size) + bool(moves.stop) + several
    return Finding(4 if moves.duration or marks >= 2 else 3, tuple(because))
