"""Relevance by rules: which tasks, routines, wishes and people of the card a tip takes up, and what it goes against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tipbench.judge import rules_words as words
from tipbench.judge.rules_finding import Finding
from tipbench.judge.rules_text import NAMED, Card, Hook, Reading, When, Word, clock_times, opening

_POINTERS = frozenset({"the", "your", "this", "that", "her", "his", "their"})


@dataclass(frozen=True)
class Hooks:
    """What of the card a tip takes up, and what it goes against."""

    tasks: tuple[str, ...]
    now: tuple[str, ...]  # routines and places of this hour
    joined: bool  # one of them is the moment the tip hangs on
    personal: tuple[str, ...]  # other routines, wishes, people
    near: tuple[str, ...]  # trade, kind of day
    hour: bool  # the hour in general words
    against: tuple[str, ...]
    later: tuple[str, ...]  # words that put it off

    @property
    def count(self) -> int:
        return bool(self.tasks) + bool(self.now) + bool(self.personal)


def find_hooks(reading: Reading, card: Card) -> Hooks:
    """What of the card the tip takes up."""
    stems = reading.stems
    tasks = [task for task in card.tasks if _names_task(reading, task)]
    taken = frozenset(word for task in tasks for word in task.weights)
    people = _people(reading, card, taken)
    free = stems - taken | {word.stem for word in people}
    routines = {when: [r for r in card.routines if r.when is when and r.weight_in(free) >= 1] for when in When}
    now = routines[When.NOW]
    own = frozenset(word for routine in now for word in routine.weights)
    passed = [routine for routine in card.routines if routine.when is When.PASSED and _retells(routine, free - own)]
    personal = [hook for hook in (*routines[When.ANY], *routines[When.LATER]) if hook.weight_in(free - own) >= 1]
    wishes = [wish for wish in card.wanted if wish.weight_in(free) >= 1]
    return Hooks(
        tasks=_texts(tasks),
        now=_texts(now),
        joined=any(_hangs_on(clause, own) for clause in reading.clauses),
        personal=(*_texts(personal), *_texts(wishes), *dict.fromkeys(word.text for word in people)),
        near=tuple(sorted(free & card.trade)),
        hour=_names_hour(reading, card, free),
        against=(*_texts(passed), *_against_wishes(reading, card), *_passed_hours(reading, card)),
        later=_later(reading, card),
    )


def _people(reading: Reading, card: Card, taken: frozenset[str]) -> list[Word]:
    named = [index for index, word in enumerate(reading.words) if word.stem in card.people]
    return [reading.words[index] for index in named if not _in_title(reading, index, taken)]


def _in_title(reading: Reading, index: int, taken: frozenset[str]) -> bool:
    """Part of a task's name, as in 'Ada's form', and so no hook besides the task."""
    return reading.words[index].stem in taken and any(w.stem in taken for w in reading.words[index + 1 : index + 3])


def _retells(routine: Hook, stems: frozenset[str]) -> bool:
    weight = routine.weight_in(stems)
    return weight >= 1.5 and weight >= 0.6 * sum(routine.weights.values())


def _texts(hooks: Sequence[Hook]) -> tuple[str, ...]:
    return tuple(hook.text for hook in hooks)


def _names_task(reading: Reading, task: Hook) -> bool:
    """Two of its words, or one that is its own with 'the' or 'your' before it."""
    weight = task.weight_in(reading.stems)
    return weight >= NAMED or (
        weight >= 1 and any(_pointed_at(reading.words, i, task) for i in range(len(reading.words)))
    )


def _pointed_at(all_words: Sequence[Word], index: int, task: Hook) -> bool:
    before = {word.lower for word in all_words[max(0, index - 3) : index]}
    return task.weights.get(all_words[index].stem) == 1 and bool(before & _POINTERS)


def _hangs_on(clause: Sequence[Word], routine: frozenset[str]) -> bool:
    for index, word in enumerate(clause):
        opens = word.lower in words.MOMENTS or (index == 0 and word.lower in words.TRIGGERS)
        if opens and any(later.stem in routine for later in clause[index + 1 :]):
            return True
    return False


def _names_hour(reading: Reading, card: Card, free: frozenset[str]) -> bool:
    parts = (words.DAYPARTS[word.lower] for word in reading.words if word.lower in words.DAYPARTS)
    touched = any(routine.when is When.NOW and routine.weight_in(free) for routine in card.routines)
    return touched or bool(free & card.label) or any(low * 60 <= card.minute <= high * 60 for low, high in parts)


def _against_wishes(reading: Reading, card: Card) -> tuple[str, ...]:
    found = []
    for wish in card.ruled_out:
        for index, word in enumerate(reading.words):
            before = {earlier.lower for earlier in reading.words[max(0, index - 3) : index]}
            excused = before & {"no", "not", "without", "than", "instead"}
            if wish.weights.get(word.stem) == 1 and not excused:
                found.append(f"{word.lower} (ruled out: {wish.text})")
    return tuple(found[:1])


def _passed_hours(reading: Reading, card: Card) -> tuple[str, ...]:
    morning = reading.has(words.MORNING_ONLY) if card.minute >= 12 * 60 else []
    night = reading.has(("the night before", "last night")) if card.minute < 12 * 60 else []
    clock = [
        time for time in clock_times(reading.raw, bare=False) if time < card.minute - 60 and not _either_half(time)
    ]
    return (*morning, *night, *(f"{time // 60:02}:{time % 60:02}" for time in clock))


def _later(reading: Reading, card: Card) -> tuple[str, ...]:
    """Words that put the tip off; what comes after the action may be left for later, which ends it."""
    phrases = words.LATER_DAYS + (words.LATER_TODAY if card.minute < words.EVENING * 60 else ())
    kept = [clause for index, clause in enumerate(reading.clauses) if not index or opening(clause) != "leave"]
    plain = f" {' '.join(word.lower for clause in kept for word in clause)} "
    return tuple(phrase for phrase in phrases if f" {phrase} " in plain)


def _either_half(time: int) -> bool:
    """From eight to noon: may as well be meant for the evening."""
    return 8 * 60 <= time < 12 * 60


def relevance(hooks: Hooks) -> Finding:
    """The step for the hooks of a tip; what goes against the card outweighs them all."""
    because = [
        *(f"names the task '{text}'" for text in hooks.tasks[:2]),
        *(f"this hour: '{text}'" for text in hooks.now[:2]),
        *(f"of the person: '{text}'" for text in hooks.personal[:2]),
    ]
    if hooks.against:
        return Finding(2, (f"against the card: {hooks.against[0]}", *because))
    if hooks.tasks and hooks.now and (hooks.joined or hooks.personal):
        return Finding(5, (*because, "joined"))
    if hooks.count >= 2 or (hooks.count and hooks.hour):
        return Finding(4, tuple(because) + (("the hour in general words",) if hooks.hour else ()))
    if hooks.count:
        return Finding(3, tuple(because))
    if hooks.near or hooks.hour:
        return Finding(2, (f"near: {', '.join(hooks.near[:3]) or 'the time of day'}",))
    return Finding(1, ("no hook",))
