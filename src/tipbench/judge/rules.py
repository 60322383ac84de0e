"""Rules judge: scores tips with text rules, without a model."""

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
from tipbench.judge.sheet import ItemScore, TipItem, TipScore, TipSheet
from tipbench.plan.rubric import CalibratedTip, Rubric
from tipbench.text import plural, shorten


@dataclass(frozen=True)
class Finding:
    """A score with its reasons."""

    score: int
    reasons: tuple[str, ...]


EVENING = 18  # hour from which phrases such as "tonight" mean now
_DETERMINERS = frozenset({"the", "your", "this", "that", "her", "his", "their"})


@dataclass(frozen=True)
class Hooks:
    """The parts of the card that a tip refers to or contradicts."""

    tasks: tuple[str, ...]
    now: tuple[str, ...]  # routines at this hour
    is_linked: bool  # whether the tip links its action to a routine in `now` ("after your coffee …")
    personal: tuple[str, ...]  # other routines, preferences, people
    role_words: tuple[str, ...]  # stems of words about the person's role, too general to count as hooks
    names_hour: bool  # whether the tip names the time of day in general words
    contradictions: tuple[str, ...]  # routines and times that are over, and words that the person rules out
    later: tuple[str, ...]  # phrases that postpone the tip

    @property
    def n_kinds(self) -> int:
        """To how many of three kinds of hooks the tip refers: `tasks`, `now` and `personal`."""
        return bool(self.tasks) + bool(self.now) + bool(self.personal)


def find_hooks(parsed: ParsedTip, card: Card) -> Hooks:
    """Find the hooks of a tip."""
    tasks = [task for task in card.tasks if _names_task(parsed, task)]
    task_stems = frozenset(stem for task in tasks for stem in task.weights)
    # A name inside a task's title, as in "Ada's form", is not a separate hook.
    people = []
    for index, word in enumerate(parsed.words):
        next_words = parsed.words[index + 1 : index + 3]
        in_title = word.stem in task_stems and any(following.stem in task_stems for following in next_words)
        if word.stem in card.people and not in_title:
            people.append(word)
    stems_outside_tasks = (parsed.stems - task_stems) | {word.stem for word in people}
    routines = {when: [routine for routine in card.routines if routine.when is when] for when in RoutineTime}
    now = _named(routines[RoutineTime.NOW], stems_outside_tasks)
    now_stems = frozenset(stem for routine in now for stem in routine.weights)
    passed = []  # routines of an earlier hour, if the tip has most of their words
    for routine in routines[RoutineTime.PASSED]:
        weight = routine.weight_in(stems_outside_tasks - now_stems)
        if weight >= 1.5 and weight >= 0.6 * sum(routine.weights.values()):
            passed.append(routine)
    other_routines = _named((*routines[RoutineTime.ANY], *routines[RoutineTime.LATER]), stems_outside_tasks - now_stems)
    preferences = _named(card.wanted, stems_outside_tasks)
    hints_at_routine = any(routine.weight_in(stems_outside_tasks) for routine in routines[RoutineTime.NOW])
    dayparts = (DAYPARTS[word.lower] for word in parsed.words if word.lower in DAYPARTS)
    in_daypart = any(first * 60 <= card.minute <= last * 60 for first, last in dayparts)
    return Hooks(
        tasks=_texts(tasks),
        now=_texts(now),
        is_linked=any(_is_linked_to(clause, now_stems) for clause in parsed.clauses),
        personal=(*_texts(other_routines), *_texts(preferences), *dict.fromkeys(word.text for word in people)),
        role_words=tuple(sorted(stems_outside_tasks & card.role_words)),
        names_hour=hints_at_routine or bool(stems_outside_tasks & card.slot_words) or in_daypart,
        contradictions=(*_texts(passed), *_ruled_out(parsed, card), *_passed_hours(parsed, card)),
        later=_postponing_phrases(parsed, card),
    )


def _named(hooks: Sequence[Hook], stems: frozenset[str]) -> list[Hook]:
    """Return the hooks of which enough words occur in `stems`: with a total weight of at least 1."""
    return [hook for hook in hooks if hook.weight_in(stems) >= 1]


def _texts(hooks: Sequence[Hook]) -> tuple[str, ...]:
    return tuple(hook.text for hook in hooks)


def _names_task(parsed: ParsedTip, task: Hook) -> bool:
    """Return whether words of the tip name the task.

    Their total weight must be at least MIN_TASK_WEIGHT: that of a distinctive word (1) and a common one (0.5). One
    distinctive word is enough if 'the', 'your' or similar is among the three words before it.
    """
    weight = task.weight_in(parsed.stems)
    if weight >= MIN_TASK_WEIGHT:
        return True
    if weight < 1:
        return False
    return any(
        task.weights.get(word.stem) == 1
        and _DETERMINERS & {previous.lower for previous in parsed.words[max(0, index - 3) : index]}
        for index, word in enumerate(parsed.words)
    )


def _is_linked_to(clause: Sequence[Word], stems: frozenset[str]) -> bool:
    """Return whether one of the stems follows a word such as 'after', or a word such as 'in' that begins the clause."""
    for index, word in enumerate(clause):
        is_link = word.lower in WORDS["moments"] or (index == 0 and word.lower in WORDS["triggers"])
        if is_link and any(following.stem in stems for following in clause[index + 1 :]):
            return True
    return False


def _ruled_out(parsed: ParsedTip, card: Card) -> tuple[str, ...]:
    """Describe the first word in the tip that a preference of the person rules out, or return an empty tuple."""
    for preference in card.ruled_out:
        for index, word in enumerate(parsed.words):
            previous = {earlier.lower for earlier in parsed.words[max(0, index - 3) : index]}
            negated = previous & {"no", "not", "without", "than", "instead"}
            if preference.weights.get(word.stem) == 1 and not negated:
                return (f"{word.lower} (ruled out: {preference.text})",)
    return ()


def _passed_hours(parsed: ParsedTip, card: Card) -> tuple[str, ...]:
    """Return the tip's phrases and clock times that are over at this hour."""
    if card.minute < 12 * 60:
        phrases = parsed.find_phrases(("the night before", "last night"))
    else:
        phrases = parsed.find_phrases(PHRASES["morning_only"])
    times = [
        time
        for time in clock_times(parsed.raw, include_bare_hours=False)
        if time < card.minute - 60 and not 8 * 60 <= time < 12 * 60  # 8 to 12 may also mean the evening
    ]
    return (*phrases, *(f"{time // 60:02}:{time % 60:02}" for time in times))


def _postponing_phrases(parsed: ParsedTip, card: Card) -> tuple[str, ...]:
    # After the first clause, 'leave' ends the action and does not postpone it: '…, leave the rest for tomorrow'.
    clauses = [clause for index, clause in enumerate(parsed.clauses) if index == 0 or opening(clause) != "leave"]
    text = f" {' '.join(word.lower for clause in clauses for word in clause)} "
    phrases = PHRASES["later_days"]
    if card.minute < EVENING * 60:
        phrases += PHRASES["later_today"]
    return tuple(phrase for phrase in phrases if f" {phrase} " in text)


def relevance(hooks: Hooks) -> Finding:
    """Score relevance by the hooks. A tip that contradicts the card always scores 2."""
    reasons = [
        *(f"names the task '{text}'" for text in hooks.tasks[:2]),
        *(f"this hour: '{text}'" for text in hooks.now[:2]),
        *(f"about the person: '{text}'" for text in hooks.personal[:2]),
    ]
    if hooks.contradictions:
        return Finding(2, (f"against the card: {hooks.contradictions[0]}", *reasons))
    if hooks.tasks and hooks.now and (hooks.is_linked or hooks.personal):
        return Finding(5, (*reasons, "hour and task joined"))
    if hooks.n_kinds >= 2 or (hooks.n_kinds and hooks.names_hour):
        if hooks.names_hour:
            reasons.append("the hour in general words")
        return Finding(4, tuple(reasons))
    if hooks.n_kinds:
        return Finding(3, tuple(reasons))
    if hooks.role_words:
        return Finding(2, (f"only the person's job: {', '.join(hooks.role_words[:3])}",))
    if hooks.names_hour:
        return Finding(2, ("only the time of day",))
    return Finding(1, ("no hook",))


# A number followed by one of these words is not a size: "five minutes", "two and".
_NOT_SIZED = WORDS["units"] | (WORDS["function"] - {"of"})
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
    has_trigger: bool  # whether the tip begins with the moment to start
    duration: str | None
    size: str | None  # a number of things, such as "one line"
    stop: str | None  # when to stop
    unspecific_object: str | None  # such as "a task"

    @property
    def has_action(self) -> bool:
        return bool(self.steps or self.actions)

    @property
    def has_start(self) -> bool:
        return bool(self.steps) or self.has_trigger


def find_instructions(parsed: ParsedTip, card: Card) -> Instructions:
    """Find the instructions in a tip."""
    verbs: dict[str, list[str]] = {"step": [], "action": [], "direction": [], "none": []}  # by kind
    first_action: int | None = None  # index of the first clause with a step or an action
    for index, clause in enumerate(parsed.clauses):
        verb_index = clause_verb(clause, card.instruction_verbs)
        if verb_index is None:
            continue
        if any(word.lower in WORDS["negations"] for word in clause[max(0, verb_index - 3) : verb_index]):
            continue
        kind = _verb_kind(clause, verb_index, card)
        verbs[kind].append(clause[verb_index].lower)
        if first_action is None and kind in {"step", "action"}:
            first_action = index
    action_clauses = parsed.clauses[first_action:] if first_action is not None else ()
    words = [word for clause in action_clauses for word in clause]
    sizes = (
        f"{word.lower} {following.lower}"
        for word, following in pairwise(words)
        if word.lower in WORDS["sizes"] and following.lower not in _NOT_SIZED
    )
    stops = (
        " ".join(word.lower for word in clause[:6])
        for index, clause in enumerate(action_clauses)
        if WORDS["stops"] & {word.lower for word in clause} or (index > 0 and opening(clause) in WORDS["stop_verbs"])
    )
    # Durations over 60 are ignored. Those in words, which have no group `n`, are shorter.
    durations = (match for match in _DURATION.finditer(parsed.plain) if 0 < int(match["n"] or 1) <= 60)
    return Instructions(
        steps=tuple(verbs["step"]),
        actions=tuple(verbs["action"]),
        directions=tuple(verbs["direction"]),
        has_trigger=first_action is not None and first_action > 0 and parsed.clauses[0][0].lower in WORDS["triggers"],
        duration=next((match.group().strip() for match in durations), None),
        size=next(sizes, None),
        stop=next(stops, None),
        unspecific_object=next(iter(parsed.find_phrases(PHRASES["unspecific_objects"])), None),
    )


def _verb_kind(clause: Sequence[Word], index: int, card: Card) -> str:
    """Return the kind of the verb at this index: "step", "action", "direction" or "none"."""
    verb, rest = clause[index].lower, [word.lower for word in clause[index + 1 :]]
    main_verb_index = _find_main_verb(verb, rest)
    if main_verb_index is not None:
        return _verb_kind(clause, index + 1 + main_verb_index, card)
    # As in "take care" or "make progress".
    if verb in WORDS["light_verbs"] and set(rest[:4]) & WORDS["vague_objects"] and not set(rest) & WORDS["units"]:
        return "direction"
    if verb in {"use", "spend"} and not set(rest) & WORDS["units"]:
        return "direction"
    first_two_words = " ".join((verb, *rest[:1]))
    if first_two_words in PHRASES["step_pairs"] or verb in WORDS["step_verbs"]:
        return "step"
    if verb in {"stop", "remember"}:
        return "none"
    if verb in WORDS["action_verbs"] or verb in card.task_verbs:
        return "action"
    return "direction" if verb in WORDS["vague_verbs"] else "none"


def _find_main_verb(verb: str, rest: Sequence[str]) -> int | None:
    """Return the index in `rest` of the main verb, as in 'try to open' or 'use the break to reflect', or None."""
    if verb in {"try", "remember", "start", "begin", "decide", "aim"} and rest[:1] == ["to"]:
        return 1 if len(rest) > 1 and rest[1] in INSTRUCTION_VERBS else None
    if verb in WORDS["time_verbs"]:
        for index, (word, following) in enumerate(pairwise(rest)):
            if word == "to" and following in INSTRUCTION_VERBS:
                return index + 1
    return None


def actionability(instructions: Instructions, hooks: Hooks) -> Finding:
    """Score actionability by the instructions, and by whether the tip applies now and chooses a task."""
    if not instructions.has_action:
        if instructions.directions:
            return Finding(2, (f"direction only: {instructions.directions[0]}",))
        return Finding(1, ("nothing to do",))
    verbs = (*instructions.steps, *instructions.actions)
    reasons = [f"action: {', '.join(verbs[:3])}"]
    if instructions.has_start:
        reasons.append("start")
    details = {"duration": instructions.duration, "size": instructions.size, "stop": instructions.stop}
    reasons += [f"{name}: {text}" for name, text in details.items() if text]
    if instructions.unspecific_object and not hooks.tasks:
        return Finding(3, (*reasons, f"does not say what: {instructions.unspecific_object}"))
    if len(hooks.tasks) > 2:
        return Finding(2, ("lists several tasks and chooses none",))
    if hooks.later or hooks.contradictions:
        return Finding(3, (*reasons, f"not now: {(*hooks.later, *hooks.contradictions)[0]}"))
    if instructions.has_start and instructions.duration and instructions.stop:
        return Finding(5, tuple(reasons))
    n_details = instructions.has_start + bool(instructions.size) + bool(instructions.stop) + (len(verbs) > 1)
    return Finding(4 if instructions.duration or n_details >= 2 else 3, tuple(reasons))


_FIRST_EMOJI = "\u2300"  # symbols with lower code points, such as ™ and °, are not emoji


def tone(parsed: ParsedTip, card: Card, hooks: Hooks, instructions: Instructions) -> Finding:
    """Score tone by the wording. Faults such as jargon, and symbols such as exclamation marks, lower the score."""
    faults = _tone_faults(parsed, card)
    exclamations = parsed.raw.count("!") + parsed.raw.count("！")
    emoji = sum(character >= _FIRST_EMOJI and unicodedata.category(character) == "So" for character in parsed.raw)
    symbols: dict[str, int] = {}  # weight by description
    if exclamations:
        symbols[plural(exclamations, "exclamation mark")] = min(exclamations, 2)
    if emoji:
        symbols[f"{emoji} emoji"] = min(emoji, 2)
    base, base_reason = _base_tone(parsed, card, hooks, instructions)
    reasons = (*faults, *symbols, base_reason)
    fault_weight, symbol_weight = sum(faults.values()), sum(symbols.values())
    if fault_weight >= 3 or (fault_weight >= 2 and (symbol_weight >= 2 or not instructions.has_action)):
        return Finding(1, reasons)
    if fault_weight + symbol_weight >= 2:
        return Finding(2, reasons)
    if fault_weight + symbol_weight:
        return Finding(min(base, 3), reasons)
    return Finding(base, (base_reason,))


def _tone_faults(parsed: ParsedTip, card: Card) -> dict[str, int]:
    """Return the weight of each fault in the wording, by description."""
    words = {word.lower for word in parsed.words if word.stem not in card.vocabulary}
    faults = {f"{name}: {word}": 1 for name in ("hype", "jargon") for word in sorted(words & WORDS[name])}
    for name, phrase_list, weight in (
        ("slogan", "slogans", 1),
        ("cheering", "cheers", 1),
        ("lecture", "lecture", 1),
        ("scolding", "scold", 2),
    ):
        faults |= {f"{name}: {phrase}": weight for phrase in parsed.find_phrases(PHRASES[phrase_list])}
    capitals = [word.text for word in parsed.words if len(word.text) > 3 and word.text.isupper()]
    return faults | {f"capitals: {text[:20]}": 1 for text in capitals[:3]}


def _base_tone(parsed: ParsedTip, card: Card, hooks: Hooks, instructions: Instructions) -> tuple[int, str]:
    """Return the score that the tip gets if it has no faults and no symbols, and the reason."""
    addressed = {"you", "your", "yourself"} & {word.lower for word in parsed.words}
    n_words = len(parsed.words)
    if not addressed and _is_about_person(parsed, card):
        return 3, "about the person, not to them"
    if n_words < 9:
        return 3, "curt"
    if parsed.find_phrases(PHRASES["stiff"]) or n_words / parsed.n_sentences > 34:
        return 3, "stiff or wordy"
    if not instructions.has_action and not hooks.n_kinds:
        return 3, "flat"
    if parsed.find_phrases(PHRASES["pressure"]):
        return 4, "calm, with some pressure or praise"
    if hooks.n_kinds and instructions.has_start and (instructions.size or instructions.duration or instructions.stop):
        return 5, "calm and specific"
    return 4, "calm, a little general"


def _is_about_person(parsed: ParsedTip, card: Card) -> bool:
    """Return whether a clause names the persona, or its subject is their role, 'I', 'she', 'he' or 'they'."""
    # A clause of one word, as in 'Ada, open …', speaks to the person.
    is_named = any(len(clause) > 1 and card.names & {word.stem for word in clause} for clause in parsed.clauses)
    subjects = {clause[0].lower for clause in parsed.clauses}
    role_is_subject = any(
        len(clause) > 1 and clause[0].stem in card.role_words and clause[1].lower in WORDS["modals"]
        for clause in parsed.clauses
    )
    return is_named or role_is_subject or bool(subjects & {"she", "he", "they", "i", "i'm"})


SCALES = ("relevance", "actionability", "tone")
MIN_SCORE, MAX_SCORE = 1, 5
MAX_NOTE_LENGTH = 200  # characters


@dataclass(frozen=True)
class Explanation:
    """The findings for one tip, by scale."""

    findings: Mapping[str, Finding]

    @property
    def scores(self) -> dict[str, int]:
        return {scale: finding.score for scale, finding in self.findings.items()}

    @property
    def note(self) -> str:
        """The reasons in one line. Each scale gets an equal part of MAX_NOTE_LENGTH."""
        parts = (f"{scale} {finding.score}: {', '.join(finding.reasons)}" for scale, finding in self.findings.items())
        separator = "; "
        max_part_length = MAX_NOTE_LENGTH // len(SCALES) - len(separator)
        return separator.join(shorten(part, max_part_length) for part in parts)


def explain_tip(card: Card, tip: str) -> Explanation:
    """Return the scores of a tip, each with its reasons."""
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


class RulesJudge:
    """An AutomaticJudge that scores by text rules. It keeps the flags and writes the reasons into the notes."""

    name = str(JudgeKind.RULES)
    provisional = True

    def fill(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """Score the items one by one. Raises UsageError at once for an unsupported rubric."""
        check_rubric(sheet.rubric)
        report(f"rules: {len(sheet.items)} items by text rules, for English only; the scores are provisional.")

        def score(item: TipItem) -> ItemScore:
            card = parse_card(item.card)
            tips = []
            for tip in item.tips:
                explanation = explain_tip(card, tip.tip)
                tips.append(TipScore(explanation.scores, tip.overlong, explanation.note))
            return ItemScore(item.id, item.format_ok, tuple(tips))

        return map(score, sheet.items)


def check_rubric(rubric: Rubric) -> None:
    """Raise UsageError unless the rubric has exactly the scales that the rules support."""
    ranges = {scale.name: (scale.min, scale.max) for scale in rubric.scales}
    if ranges != dict.fromkeys(SCALES, (MIN_SCORE, MAX_SCORE)):
        shown = ", ".join(f"{name} {low}-{high}" for name, (low, high) in ranges.items())
        raise UsageError(
            f"The rules judge scores {', '.join(SCALES)} from {MIN_SCORE} to {MAX_SCORE} and nothing else; the rubric "
            f"{rubric.id} has {shown}. Judge by hand, or use --with command:PROGRAM or --with ollama:MODEL."
        )


def rules_error(
    examples: Sequence[CalibratedTip], cards: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """Return the error of the rules against the examples' agreed scores, by scale. `cards` is by scenario id.

    `n` is the number of examples, `bias` the mean error, `error` the mean absolute error, and `within_one` the share of
    scores at most one step off. Without examples for a scale, `n` is 0 and the others are None.
    """
    parsed_cards = {scenario: parse_card(cards[scenario]) for scenario in {example.scenario for example in examples}}
    scored = [(explain_tip(parsed_cards[example.scenario], example.tip).scores, example.scores) for example in examples]
    errors: dict[str, dict[str, float | None]] = {}
    for scale in SCALES:
        differences = [scores[scale] - agreed[scale] for scores, agreed in scored if scale in agreed]
        n = len(differences)
        errors[scale] = {
            "n": n,
            "bias": sum(differences) / n if n else None,
            "error": sum(map(abs, differences)) / n if n else None,
            "within_one": sum(abs(difference) <= 1 for difference in differences) / n if n else None,
        }
    return errors
