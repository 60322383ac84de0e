"""Rules judge: scores a tip on each scale with transparent text rules."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tipbench.errors import UsageError
from tipbench.judge.automatic import JudgeKind
from tipbench.judge.rules_text import (
    DAYPARTS,
    INSTRUCTION_VERBS,
    MIN_TASK_WEIGHT,
    PHRASES,
    WORDS,
    Card,
    Hook,
    ParsedTip,
    RoutineTime,
    Word,
    clause_verb,
    clock_times,
    opening,
    parse_card,
    parse_tip,
    unusable_reason,
)
from tipbench.judge.run import Unscored
from tipbench.judge.sheet import Item, ItemScore, TipScore, TipSheet
from tipbench.plan.rubric import CalibratedTip, Rubric
from tipbench.text import plural, shorten


@dataclass(frozen=True)
class Finding:
    """A score with its reasons."""

    score: int
    because: tuple[str, ...]


EVENING = 18  # hour; from then on, phrases such as "tonight" mean now
_DETERMINERS = frozenset({"the", "your", "this", "that", "her", "his", "their"})


@dataclass(frozen=True)
class Hooks:
    """The parts of the card that a tip refers to or contradicts."""

    tasks: tuple[str, ...]
    now: tuple[str, ...]  # routines and places at this hour
    joined: bool  # whether the tip links its action to one of them ("after your coffee …")
    personal: tuple[str, ...]  # other routines, preferences, people
    role_words: tuple[str, ...]  # words of the person's job and circumstances, too general for a hook
    hour: bool  # whether the tip names the time of day in general words
    against: tuple[str, ...]  # parts of the tip that contradict the card: passed routines and hours, ruled-out words
    later: tuple[str, ...]  # phrases that postpone the tip

    @property
    def count(self) -> int:
        return bool(self.tasks) + bool(self.now) + bool(self.personal)


def find_hooks(parsed: ParsedTip, card: Card) -> Hooks:
    """Find the parts of the card that the tip refers to or contradicts."""
    tasks = [task for task in card.tasks if _names_task(parsed, task)]
    taken = frozenset(word for task in tasks for word in task.weights)
    # A name inside a task's title, as in "Ada's form", is not a separate hook.
    people = [
        word
        for index, word in enumerate(parsed.words)
        if word.stem in card.people
        and not (word.stem in taken and any(later.stem in taken for later in parsed.words[index + 1 : index + 3]))
    ]
    unclaimed = (parsed.stems - taken) | {word.stem for word in people}
    routines = {when: [routine for routine in card.routines if routine.when is when] for when in RoutineTime}
    now = [routine for routine in routines[RoutineTime.NOW] if routine.weight_in(unclaimed) >= 1]
    now_words = frozenset(word for routine in now for word in routine.weights)
    passed = []  # routines of an earlier hour of which the tip has most words
    for routine in routines[RoutineTime.PASSED]:
        weight = routine.weight_in(unclaimed - now_words)
        if weight >= 1.5 and weight >= 0.6 * sum(routine.weights.values()):
            passed.append(routine)
    others = (*routines[RoutineTime.ANY], *routines[RoutineTime.LATER])
    personal = [routine for routine in others if routine.weight_in(unclaimed - now_words) >= 1]
    preferences = [preference for preference in card.wanted if preference.weight_in(unclaimed) >= 1]
    names_routine = any(routine.weight_in(unclaimed) for routine in routines[RoutineTime.NOW])
    dayparts = (DAYPARTS[word.lower] for word in parsed.words if word.lower in DAYPARTS)
    in_daypart = any(low * 60 <= card.minute <= high * 60 for low, high in dayparts)
    # A later clause that opens with 'leave' ends the action; it does not postpone it.
    kept = [clause for index, clause in enumerate(parsed.clauses) if not index or opening(clause) != "leave"]
    plain = f" {' '.join(word.lower for clause in kept for word in clause)} "
    postponing = PHRASES["later_days"] + (PHRASES["later_today"] if card.minute < EVENING * 60 else ())
    return Hooks(
        tasks=_texts(tasks),
        now=_texts(now),
        joined=any(_is_linked_to(clause, now_words) for clause in parsed.clauses),
        personal=(*_texts(personal), *_texts(preferences), *dict.fromkeys(word.text for word in people)),
        role_words=tuple(sorted(unclaimed & card.role_words)),
        hour=names_routine or bool(unclaimed & card.slot_words) or in_daypart,
        against=(*_texts(passed), *_ruled_out(parsed, card), *_passed_hours(parsed, card)),
        later=tuple(phrase for phrase in postponing if f" {phrase} " in plain),
    )


def _texts(hooks: Sequence[Hook]) -> tuple[str, ...]:
    return tuple(hook.text for hook in hooks)


def _names_task(parsed: ParsedTip, task: Hook) -> bool:
    """Return whether the tip has two of the task's words, or one distinctive word after 'the', 'your' or similar."""
    weight = task.weight_in(parsed.stems)
    if weight >= MIN_TASK_WEIGHT:
        return True
    if weight < 1:
        return False
    return any(
        task.weights.get(word.stem) == 1
        and _DETERMINERS & {before.lower for before in parsed.words[max(0, index - 3) : index]}
        for index, word in enumerate(parsed.words)
    )


def _is_linked_to(clause: Sequence[Word], routine: frozenset[str]) -> bool:
    """Return whether a word such as 'after' or 'when' in the clause is followed by a word of the routine."""
    for index, word in enumerate(clause):
        opens = word.lower in WORDS["moments"] or (index == 0 and word.lower in WORDS["triggers"])
        if opens and any(later.stem in routine for later in clause[index + 1 :]):
            return True
    return False


def _ruled_out(parsed: ParsedTip, card: Card) -> tuple[str, ...]:
    """Return the first word that the person's preferences rule out."""
    for preference in card.ruled_out:
        for index, word in enumerate(parsed.words):
            before = {earlier.lower for earlier in parsed.words[max(0, index - 3) : index]}
            excused = before & {"no", "not", "without", "than", "instead"}
            if preference.weights.get(word.stem) == 1 and not excused:
                return (f"{word.lower} (ruled out: {preference.text})",)
    return ()


def _passed_hours(parsed: ParsedTip, card: Card) -> tuple[str, ...]:
    morning = parsed.has(PHRASES["morning_only"]) if card.minute >= 12 * 60 else []
    night = parsed.has(("the night before", "last night")) if card.minute < 12 * 60 else []
    clock = [
        time
        for time in clock_times(parsed.raw, bare=False)
        if time < card.minute - 60 and not 8 * 60 <= time < 12 * 60  # 8 to 12 may also mean the evening
    ]
    return (*morning, *night, *(f"{time // 60:02}:{time % 60:02}" for time in clock))


def relevance(hooks: Hooks) -> Finding:
    """Score relevance by the hooks; a contradiction of the card outweighs them all."""
    because = [
        *(f"names the task '{text}'" for text in hooks.tasks[:2]),
        *(f"this hour: '{text}'" for text in hooks.now[:2]),
        *(f"about the person: '{text}'" for text in hooks.personal[:2]),
    ]
    if hooks.against:
        return Finding(2, (f"against the card: {hooks.against[0]}", *because))
    if hooks.tasks and hooks.now and (hooks.joined or hooks.personal):
        return Finding(5, (*because, "joined"))
    if hooks.count >= 2 or (hooks.count and hooks.hour):
        return Finding(4, tuple(because) + (("the hour in general words",) if hooks.hour else ()))
    if hooks.count:
        return Finding(3, tuple(because))
    if hooks.role_words:
        return Finding(2, (f"only the person's job: {', '.join(hooks.role_words[:3])}",))
    if hooks.hour:
        return Finding(2, ("only the time of day",))
    return Finding(1, ("no hook",))


# Words after a number that do not make it a size.
_NOT_COUNTED = WORDS["units"] | (WORDS["function"] - {"of"})
_DURATION = re.compile(
    r" (?:(?P<n>\d{1,3})|one|two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty(?: five)?|thirty|a few)"
    r"(?: more| quiet| full| short)? (?:min|mins|minutes?|sec|secs|seconds?)(?= )"
    r"| timer(?= )| half an hour(?= )| quarter of an hour(?= )"
)


@dataclass(frozen=True)
class Instructions:
    """The instructions in a tip."""

    steps: tuple[str, ...]  # verbs of a visible first step, such as open or write
    actions: tuple[str, ...]  # other verbs of something to do
    directions: tuple[str, ...]  # verbs that only give a direction, such as focus
    trigger: bool  # whether it begins with the moment to start
    duration: str | None
    size: str | None
    stop: str | None  # when to stop
    unnamed_object: str | None  # such as "something"

    @property
    def has_action(self) -> bool:
        return bool(self.steps or self.actions)

    @property
    def has_start(self) -> bool:
        return bool(self.steps) or self.trigger


def find_instructions(parsed: ParsedTip, card: Card) -> Instructions:
    """Find the instructions in the tip's clauses."""
    found: dict[str, list[str]] = {"step": [], "action": [], "direction": [], "none": []}
    first: int | None = None
    for index, clause in enumerate(parsed.clauses):
        at = clause_verb(clause, card.instruction_verbs)
        if at is None or any(word.lower in WORDS["negations"] for word in clause[max(0, at - 3) : at]):
            continue
        kind = _kind(clause, at, card)
        found[kind].append(clause[at].lower)
        first = index if first is None and kind in {"step", "action"} else first
    after = parsed.clauses[first:] if first is not None else ()
    words = [word for clause in after for word in clause]
    sizes = (
        f"{word.lower} {following.lower}"
        for word, following in pairwise(words)
        if word.lower in WORDS["sizes"] and following.lower not in _NOT_COUNTED
    )
    stops = (
        " ".join(word.lower for word in clause[:6])
        for index, clause in enumerate(after)
        if WORDS["stops"] & {word.lower for word in clause} or (index and opening(clause) in WORDS["stop_verbs"])
    )
    durations = (
        match for match in _DURATION.finditer(parsed.plain) if 0 < int(match["n"] or 1) <= 60
    )  # at most an hour
    return Instructions(
        steps=tuple(found["step"]),
        actions=tuple(found["action"]),
        directions=tuple(found["direction"]),
        trigger=first is not None and first > 0 and parsed.clauses[0][0].lower in WORDS["triggers"],
        duration=next((match.group().strip() for match in durations), None),
        size=next(sizes, None),
        stop=next(stops, None),
        unnamed_object=next(iter(parsed.has(PHRASES["open_objects"])), None),
    )


def _kind(clause: Sequence[Word], at: int, card: Card) -> str:
    """Return whether the verb at this index gives a step, an action, only a direction, or none of these."""
    verb, rest = clause[at].lower, [word.lower for word in clause[at + 1 :]]
    main_verb = _main_verb(verb, rest)
    if main_verb is not None:
        return _kind(clause, at + 1 + main_verb, card)
    if verb in WORDS["light_verbs"] and set(rest[:4]) & WORDS["vague_objects"] and not set(rest) & WORDS["units"]:
        return "direction"
    if verb in {"use", "spend"} and not set(rest) & WORDS["units"]:
        return "direction"
    if f"{verb} {rest[0] if rest else ''}" in PHRASES["step_pairs"] or verb in WORDS["step_verbs"]:
        return "step"
    if verb in {"stop", "remember"}:
        return "none"
    if verb in WORDS["action_verbs"] or verb in card.task_verbs:
        return "action"
    return "direction" if verb in WORDS["vague_verbs"] else "none"


def _main_verb(verb: str, rest: Sequence[str]) -> int | None:
    """Return the offset of the main verb, as in 'try to open' or 'use the break to reflect', or None."""
    if verb in {"try", "remember", "start", "begin", "decide", "aim"} and rest[:1] == ["to"]:
        return 1 if len(rest) > 1 and rest[1] in INSTRUCTION_VERBS else None
    if verb in WORDS["time_verbs"]:
        return next((i + 1 for i, w in enumerate(rest[:-1]) if w == "to" and rest[i + 1] in INSTRUCTION_VERBS), None)
    return None


def actionability(instructions: Instructions, hooks: Hooks) -> Finding:
    """Score actionability by the instructions; the hooks show whether the tip applies now and to a single task."""
    if not instructions.has_action:
        direction = instructions.directions[:1]
        return Finding(2, (f"direction only: {direction[0]}",)) if direction else Finding(1, ("nothing to do",))
    because = [f"action: {', '.join((*instructions.steps, *instructions.actions)[:3])}"]
    because += ["start"] if instructions.has_start else []
    details = {"duration": instructions.duration, "size": instructions.size, "stop": instructions.stop}
    because += [f"{name}: {text}" for name, text in details.items() if text]
    if instructions.unnamed_object and not hooks.tasks:
        return Finding(3, (*because, f"does not say what: {instructions.unnamed_object}"))
    if len(hooks.tasks) > 2:
        return Finding(2, ("lists several tasks and chooses none",))
    if hooks.later or hooks.against:
        return Finding(3, (*because, f"not now: {(*hooks.later, *hooks.against)[0]}"))
    if instructions.has_start and instructions.duration and instructions.stop:
        return Finding(5, tuple(because))
    several_actions = len(instructions.steps) + len(instructions.actions) > 1
    marks = instructions.has_start + bool(instructions.size) + bool(instructions.stop) + several_actions
    return Finding(4 if instructions.duration or marks >= 2 else 3, tuple(because))


_EMOJI_FROM = "\u2300"  # symbols below, such as ™ and °, are not emoji


def tone(parsed: ParsedTip, card: Card, hooks: Hooks, instructions: Instructions) -> Finding:
    """Score tone by the wording, lowered for hype, jargon, scolding, exclamation marks and emoji."""
    faults = _tone_faults(parsed, card)
    exclamations = parsed.raw.count("!") + parsed.raw.count("！")
    emoji = sum(character >= _EMOJI_FROM and unicodedata.category(character) == "So" for character in parsed.raw)
    marks = {plural(exclamations, "exclamation mark"): min(exclamations, 2)} if exclamations else {}
    marks |= {f"{emoji} emoji": min(emoji, 2)} if emoji else {}
    base, why = _base_tone(parsed, card, hooks, instructions)
    weight = sum(faults.values())
    because = (*faults, *marks, why)
    if weight >= 3 or (weight >= 2 and (sum(marks.values()) >= 2 or not instructions.has_action)):
        return Finding(1, because)
    slips = weight + sum(marks.values())
    if slips >= 2:
        return Finding(2, because)
    return Finding(min(base, 3), because) if slips else Finding(base, (why,))


def _tone_faults(parsed: ParsedTip, card: Card) -> dict[str, int]:
    """Return the wording that lowers the tone score, with its weight."""
    lowers = {word.lower for word in parsed.words if word.stem not in card.vocabulary}
    found = {f"{name}: {word}": 1 for name in ("hype", "jargon") for word in sorted(lowers & WORDS[name])}
    for name, phrases, weight in (
        ("slogan", "slogans", 1),
        ("cheering", "cheers", 1),
        ("lecture", "lecture", 1),
        ("scolding", "scold", 2),
    ):
        found |= {f"{name}: {phrase}": weight for phrase in parsed.has(PHRASES[phrases])}
    shouted = [word.text for word in parsed.words if len(word.text) > 3 and word.text.isupper()]
    return found | {f"capitals: {text[:20]}": 1 for text in shouted[:3]}


def _base_tone(parsed: ParsedTip, card: Card, hooks: Hooks, instructions: Instructions) -> tuple[int, str]:
    """Return the highest tone score the wording allows, before deductions, with the reason."""
    addressed = {"you", "your", "yourself"} & {word.lower for word in parsed.words}
    length = len(parsed.words)
    if not addressed and _is_about_person(parsed, card):
        return 3, "about the person, not to them"
    if length < 9:
        return 3, "curt"
    if parsed.has(PHRASES["stiff"]) or length / parsed.sentences > 34:
        return 3, "stiff or wordy"
    if not instructions.has_action and not hooks.count:
        return 3, "flat"
    if parsed.has(PHRASES["pressure"]):
        return 4, "calm, with some pressure or praise"
    if hooks.count and instructions.has_start and (instructions.size or instructions.duration or instructions.stop):
        return 5, "calm and specific"
    return 4, "calm, a little general"


def _is_about_person(parsed: ParsedTip, card: Card) -> bool:
    """Return whether a clause names the persona, or its subject is 'I', 'she', 'he', 'they' or the persona's role."""
    named = any(len(clause) > 1 and card.names & {word.stem for word in clause} for clause in parsed.clauses)
    subjects = {clause[0].lower for clause in parsed.clauses}
    role_is_subject = any(
        len(clause) > 1 and clause[0].stem in card.role_words and clause[1].lower in WORDS["modals"]
        for clause in parsed.clauses
    )
    return named or role_is_subject or bool(subjects & {"she", "he", "they", "i", "i'm"})


SCALES = ("relevance", "actionability", "tone")
MIN_SCORE, MAX_SCORE = 1, 5
MAX_NOTE_LENGTH = 200


@dataclass(frozen=True)
class Explanation:
    """The findings for one tip, by scale."""

    findings: Mapping[str, Finding]

    @property
    def scores(self) -> dict[str, int]:
        return {scale: finding.score for scale, finding in self.findings.items()}

    @property
    def note(self) -> str:
        """The reasons in one line of at most MAX_NOTE_LENGTH characters; each scale gets an equal part."""
        parts = (f"{scale} {found.score}: {', '.join(found.because)}" for scale, found in self.findings.items())
        return "; ".join(shorten(part, MAX_NOTE_LENGTH // len(SCALES) - 2) for part in parts)


def explain_tip(card: Mapping[str, Any], tip: str) -> Explanation:
    """Return the scores of a tip, each with its reasons."""
    return _explain(parse_card(card), tip)


class RulesJudge:
    """An AutomaticJudge without a model: scores every item, keeps the computed flags, gives the reasons in the note."""

    name = str(JudgeKind.RULES)
    provisional = True

    def fill(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """Return an iterator over all items' scores. Raises UsageError immediately if the rubric's scales differ."""
        check_rubric(sheet.rubric)
        report(f"rules: {len(sheet.items)} items by text rules, for English only; the scores are provisional.")

        def score(item: Item) -> ItemScore:
            card = parse_card(item.scenario)
            explained = [(_explain(card, tip.tip), tip.overlong) for tip in item.tips]
            tips = tuple(TipScore(found.scores, overlong, found.note) for found, overlong in explained)
            return ItemScore(item.id, item.format_ok, tips)

        return map(score, sheet.items)


def check_rubric(rubric: Rubric) -> None:
    """Raise UsageError unless the rubric has exactly the scales supported by the rules."""
    seen = {scale.name: (scale.min, scale.max) for scale in rubric.scales}
    if seen != dict.fromkeys(SCALES, (MIN_SCORE, MAX_SCORE)):
        shown = ", ".join(f"{name} {low}-{high}" for name, (low, high) in seen.items())
        raise UsageError(
            f"The rules judge scores {', '.join(SCALES)} from {MIN_SCORE} to {MAX_SCORE} and nothing else; the rubric "
            f"{rubric.id} has {shown}. Judge by hand, or with command: or ollama:."
        )


def rules_error(
    examples: Sequence[CalibratedTip], cards: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """Return the rules' error against reference scores per scale: n, bias, mean absolute error, share within one step.

    `cards` maps scenario ids to cards. Without examples for a scale, its values are None and n is 0.
    """
    parsed = {scenario: parse_card(cards[scenario]) for scenario in {example.scenario for example in examples}}
    scored = [(_explain(parsed[example.scenario], example.tip).scores, example.scores) for example in examples]
    errors: dict[str, dict[str, float | None]] = {}
    for scale in SCALES:
        off = [own[scale] - reference[scale] for own, reference in scored if scale in reference]
        n = len(off)
        errors[scale] = {
            "n": n,
            "bias": sum(off) / n if n else None,
            "error": sum(map(abs, off)) / n if n else None,
            "within_one": sum(abs(difference) <= 1 for difference in off) / n if n else None,
        }
    return errors


def _explain(card: Card, tip: str) -> Explanation:
    parsed = parse_tip(tip)
    reason = unusable_reason(parsed, card.instruction_verbs)
    if reason:
        return Explanation(dict.fromkeys(SCALES, Finding(MIN_SCORE, (f"broken text: {reason}",))))
    hooks = find_hooks(parsed, card)
    instructions = find_instructions(parsed, card)
    return Explanation(
        {
            "relevance": relevance(hooks),
            "actionability": actionability(instructions, hooks),
            "tone": tone(parsed, card, hooks, instructions),
        }
    )
