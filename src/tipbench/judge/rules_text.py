"""Parses tips and scenario cards for the rules judge. English only."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

_LISTS = tomllib.loads(files(__package__).joinpath("rules_words.toml").read_text("utf-8"))
WORDS: Mapping[str, frozenset[str]] = {name: frozenset(text.split()) for name, text in _LISTS["words"].items()}
PHRASES: Mapping[str, tuple[str, ...]] = {name: tuple(phrases) for name, phrases in _LISTS["phrases"].items()}
# Groups of related words. A preference with a word of a group also matches its other words, except common ones.
FAMILIES = tuple(frozenset(str(text).split()) for text in _LISTS["families"].values())
# First and last hour of each part of the day.
DAYPARTS: Mapping[str, tuple[int, int]] = {name: (first, last) for name, (first, last) in _LISTS["dayparts"].items()}
INSTRUCTION_VERBS = WORDS["step_verbs"] | WORDS["action_verbs"] | WORDS["vague_verbs"] | WORDS["pep_verbs"]
HOUR_NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

MAX_TIP_LENGTH = 4000  # characters; the rest of a tip is not parsed
MIN_TASK_WEIGHT = 1.5  # a tip names a task if the task's words in it have at least this total weight
_MAX_CARD_TEXT = 2000  # characters; the rest of each text of a card is not parsed

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_CLAUSE_END = re.compile(r"[,;()\[\]\n!?…]+|[.:](?!\d)|\s[-–—]+\s|[–—]")
_CLAUSE_WORDS = frozenset({"and", "then", "so", "but", "or"})
_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": " ", "”": " ", '"': " ", "`": " "})
# What replaces a symbol, by the symbol's Unicode category. Most emoji are "So".
_SYMBOLS = {"Cf": "", "So": " ", "Cs": " ", "Co": " ", "Cn": " "}
_HYPHENS = str.maketrans({"-": " ", "‐": " ", "‑": " "})
_HOURS = {name: hour for hour, name in enumerate(HOUR_NAMES, start=1)}
_ANY_HOUR = "|".join(HOUR_NAMES)
_CLOCK = re.compile(
    rf"\b(?P<hour>\d{{1,2}}):(?P<minute>\d{{2}})\b"
    rf"|\b(?P<minutes>half|quarter|twenty|ten|five) (?P<past_or_to>past|to) (?P<hour_name>{_ANY_HOUR})\b"
    r"|\b(?:at|by|from|to|until|till|about|the) "
    rf"(?P<bare_hour>{_ANY_HOUR})\b(?! (?:minute|second|hour|day|step|thing))"
)
_RANGE_END = re.compile(
    r" (?:to|until|till) (?:a )?\w+(?: (?:past|to) \w+)?"
)  # as in "from four to five", after "four"
_MINUTES = {"half": 30, "quarter": 15, "twenty": 20, "ten": 10, "five": 5}
# A tip may repeat these words.
_REPEATABLE = WORDS["function"] | WORDS["units"] | WORDS["stops"] | WORDS["sizes"]


@dataclass(frozen=True)
class Word:
    """One word of a tip or card."""

    text: str  # as written
    lower: str
    stem: str


@dataclass(frozen=True)
class ParsedTip:
    """A tip, split into words and clauses."""

    words: tuple[Word, ...]
    clauses: tuple[tuple[Word, ...], ...]
    plain: str  # lower-case words separated and surrounded by single spaces, for phrase lookup
    raw: str
    n_sentences: int  # at least 1

    @property
    def stems(self) -> frozenset[str]:
        return frozenset(word.stem for word in self.words)

    def find_phrases(self, phrases: Iterable[str]) -> list[str]:
        """Return the phrases that occur as whole words."""
        return [phrase for phrase in phrases if f" {phrase} " in self.plain]


def parse_tip(tip: str) -> ParsedTip:
    """Split a tip into words and clauses, ignoring emoji and markup."""
    raw = tip[:MAX_TIP_LENGTH]
    text = _without_symbols(unicodedata.normalize("NFC", raw).translate(_QUOTES))
    parts = [part for part in _CLAUSE_END.split(text) if part.strip()]
    clauses = [clause for part in parts for clause in _clauses(_words(part))]
    words = tuple(word for clause in clauses for word in clause)
    sentences = [part for part in re.split(r"[.!?](?=\s|$)", text) if part.strip()]
    plain = f" {' '.join(word.lower for word in words)} "
    return ParsedTip(words, tuple(clauses), plain, raw, n_sentences=max(1, len(sentences)))


@lru_cache(maxsize=8192)
def stem(word: str) -> str:
    """Return an approximate stem: the same for 'invoices' and 'invoicing', and for 'colour' and 'color'."""
    word = word.removesuffix("'s").removesuffix("'")
    if len(word) > 5:
        word = word.replace("our", "or").replace("isation", "ization")
        if word.endswith("wal"):  # as in 'renewal'
            word = word.removesuffix("al")
    if len(word) > 4 and word.endswith("ies"):
        word = word[:-3] + "y"
    elif len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        if len(word) > len(ending) + 2 and word.endswith(ending) and re.search("[aeiouy]", word[: -len(ending)]):
            word = word.removesuffix(ending)
            if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "ls":  # as in 'planning', not 'calling'
                word = word[:-1]
            break
    if len(word) > 5 and word.endswith("ise"):
        word = word[:-3] + "iz"
    return word.removesuffix("e") if len(word) > 3 else word


def unusable_reason(parsed: ParsedTip, verbs: frozenset[str]) -> str | None:
    """Return why the text is not a usable tip, or None."""
    words = [word.lower for word in parsed.words]
    if len(words) < 2:
        return "no sentence"
    characters = [character for character in parsed.raw if not character.isspace() and character not in ".,;:!?"]
    if sum(character.isalpha() for character in characters) < len(characters) * 0.6:
        return "mostly not letters"
    doubled = [word for word, following in pairwise(words) if word == following and word not in _REPEATABLE]
    has_imperative = any(clause_verb(clause, verbs) is not None for clause in parsed.clauses)
    if len(doubled) > 1 or (doubled and not has_imperative):
        return f"repeats '{doubled[0][:30]}'"
    content = [word for word in words if word not in _REPEATABLE]
    if len(content) >= 8 and len(set(content)) < len(content) * 0.45:
        return "the same words again and again"
    function_share = sum(word in WORDS["function"] for word in words) / len(words)
    if not has_imperative and function_share < 0.15 and len(words) >= 4:
        return "not English, or no sentence"
    # A word with an apostrophe may be a contraction with a verb, such as "it's".
    if not has_imperative and not any(word in verbs or word in WORDS["be_have"] or "'" in word for word in words):
        return "no verb"
    return None


def clause_verb(clause: Sequence[Word], verbs: frozenset[str]) -> int | None:
    """Return the index of the clause's imperative verb ('open …', 'please open …', 'you can open …'), or None."""
    start = _after_lead_ins(clause)
    if start < len(clause) and clause[start].lower in verbs:
        return start
    for index in range(start + 1, len(clause)):
        previous, word = clause[index - 1].lower, clause[index].lower
        words_before_to = {earlier.lower for earlier in clause[max(0, index - 4) : index - 1]}
        is_urged = previous == "to" and bool(words_before_to & WORDS["urges"])  # as in 'it is best to open …'
        if word in verbs and (previous in WORDS["modals"] or is_urged):
            return index
    return None


def opening(clause: Sequence[Word]) -> str:
    """Return the clause's first word after lead-ins such as 'please', or an empty string."""
    start = _after_lead_ins(clause)
    return clause[start].lower if start < len(clause) else ""


def _after_lead_ins(clause: Sequence[Word]) -> int:
    """Return the index of the first word after lead-ins and numbers, or the clause's length if there is none."""
    for index, word in enumerate(clause):
        if word.lower not in WORDS["lead_ins"] and not word.lower.isdigit():
            return index
    return len(clause)


class RoutineTime(Enum):
    """When a routine takes place, relative to the slot."""

    NOW = "now"
    PASSED = "passed"
    LATER = "later"
    ANY = "any time"


@dataclass(frozen=True)
class Hook:
    """A part of a card that a tip may refer to, with the weight of each of its words."""

    text: str
    weights: Mapping[str, float]  # by stem
    when: RoutineTime = RoutineTime.ANY  # of a routine

    def weight_in(self, stems: frozenset[str]) -> float:
        """Return the total weight of the hook's words that are in `stems`."""
        return sum(weight for word, weight in self.weights.items() if word in stems)


@dataclass(frozen=True)
class Card:
    """A parsed scenario card."""

    names: frozenset[str]  # stems of the persona's name
    tasks: tuple[Hook, ...]
    task_verbs: frozenset[str]  # the first words of the tasks' titles
    instruction_verbs: frozenset[str]  # all verbs that may begin an instruction
    routines: tuple[Hook, ...]
    wanted: tuple[Hook, ...]  # from the preferences
    ruled_out: tuple[Hook, ...]  # from the preferences
    people: frozenset[str]  # stems of other people's names
    role_words: frozenset[str]  # stems of role and circumstances
    slot_words: frozenset[str]  # stems of the slot's label
    vocabulary: frozenset[str]  # stems of all texts except preferences; they never count as hype or jargon
    minute: int  # of the day


def parse_card(card: Mapping[str, Any]) -> Card:
    """Parse a scenario's card, as returned by `Scenario.to_card`."""

    def limited(value: object) -> str:
        return str(value)[:_MAX_CARD_TEXT]

    persona, slot = card["persona"], card["slot"]
    clock_hour, _, clock_minute = str(slot["time"]).partition(":")
    minute = int(clock_hour) * 60 + int(clock_minute)
    names = frozenset(word.stem for word in _words(limited(persona["name"])))
    titles = [limited(task["title"]) for task in persona["tasks"]]
    habits = [limited(habit) for habit in persona["habits"]]
    about = limited(persona["about"])
    preferences = [_split_preference(limited(preference)) for preference in persona["preferences"]]
    parts_with_time = [part for part in re.split(r"[.;]|, then", about) if clock_times(part.lower())]
    routines = [*habits, *parts_with_time]
    people = _proper_names([about, *habits, *(wanted for wanted, _ in preferences)]) - names
    task_verbs = frozenset(word.lower for title in titles for word in _words(title)[:1])

    def task_hook(title: str) -> Hook:
        verb = frozenset(word.stem for word in _words(title)[:1])  # a title begins with its verb
        # A proper name in the title identifies the task, unless it is in `people` (collected from the other texts).
        names_in_title = dict.fromkeys(_proper_names([title]) - people, MIN_TASK_WEIGHT)
        return Hook(title, _weights(title, people, verb) | names_in_title)

    def routine_hook(routine: str) -> Hook:
        weights = _weights(_CLOCK.sub(" ", routine.lower()), _VERBS, people)
        return Hook(routine.strip(), weights, _routine_time(routine.lower(), minute))

    return Card(
        names=names,
        tasks=tuple(map(task_hook, titles)),
        task_verbs=task_verbs,
        instruction_verbs=INSTRUCTION_VERBS | task_verbs,
        routines=tuple(map(routine_hook, routines)),
        wanted=tuple(_preference_hook(wanted) for wanted, _ in preferences if wanted),
        ruled_out=tuple(_preference_hook(ruled_out) for _, ruled_out in preferences if ruled_out),
        people=people,
        role_words=_content_stems(f"{persona['role']} {about}"),
        slot_words=_content_stems(str(slot["label"])) - {stem(word) for word in DAYPARTS},
        vocabulary=frozenset(
            word.stem for part in (*titles, *habits, about, str(persona["role"])) for word in _words(part)
        ),
        minute=minute,
    )


def _without_symbols(text: str) -> str:
    return "".join(_SYMBOLS.get(unicodedata.category(character), character) for character in text)


def _words(text: str) -> list[Word]:
    words = _WORD.findall(text.translate(_QUOTES | _HYPHENS))
    return [Word(word, word.lower(), stem(word.lower())) for word in words]


def _clauses(words: Sequence[Word]) -> Iterator[tuple[Word, ...]]:
    """Begin a new clause at each 'and', 'then' or similar word."""
    current: list[Word] = []
    for word in words:
        if word.lower in _CLAUSE_WORDS and current:
            yield tuple(current)
            current = []
        current.append(word)
    if current:
        yield tuple(current)


# These words are frequent in any advice, so they do not refer to the card.
_IGNORED = frozenset(
    stem(word) for word in WORDS["function"] | WORDS["hours"] | WORDS["units"] | WORDS["stops"] | set(HOUR_NAMES)
)
_COMMON = frozenset(stem(word) for word in WORDS["common"])
_VERBS = frozenset(stem(word) for word in WORDS["step_verbs"] | WORDS["action_verbs"])
_CALENDAR = frozenset(stem(word) for word in WORDS["calendar"])


def _content_stems(text: str) -> frozenset[str]:
    """Return the stems of words of at least three characters that are neither common nor ignored."""
    return frozenset(word.stem for word in _words(text) if len(word.lower) > 2) - _IGNORED - _COMMON


def _weights(text: str, *weak: frozenset[str]) -> dict[str, float]:
    """Return weights by stem: 0.5 for common words, numbers, single letters and stems in `weak`, otherwise 1."""
    weights = {}
    for word in _words(text):
        if word.stem not in _IGNORED:
            is_common = word.stem in _COMMON or word.lower.isdigit() or len(word.lower) == 1
            is_weak = is_common or any(word.stem in stems for stems in weak)
            weights[word.stem] = 0.5 if is_weak else 1.0
    return weights


def _preference_hook(text: str) -> Hook:
    weights = _weights(text, _VERBS)
    for family in FAMILIES:
        if any(word.lower in family and word.stem not in _COMMON for word in _words(text)):
            weights.update({stem(word): 1.0 for word in family})
    return Hook(text.strip(), weights)


def _split_preference(text: str) -> tuple[str, str]:
    """Split a preference into the wanted part and the ruled-out part; either may be empty."""
    if re.match(r"(?i)(no|not|never|without)\b", text):
        return "", text
    wanted, *rest = re.split(r"(?i)\b(?:over|rather than|instead of|not)\b", text, maxsplit=1)
    return wanted, "".join(rest)


def _proper_names(texts: Iterable[str]) -> frozenset[str]:
    """Return stems of capitalised words that do not begin a sentence, except weekdays, months, "Mr" and the like.

    Words in capitals only, such as abbreviations, are no names.
    """
    sentences = (sentence for text in texts for sentence in re.split(r"[.!?]\s", text))
    words = (word for sentence in sentences for word in _words(sentence)[1:])
    return frozenset(word.stem for word in words if word.text[0].isupper() and not word.text.isupper()) - _CALENDAR


def clock_times(text: str, *, include_bare_hours: bool = True) -> list[int]:
    """Return the clock times in a text, as minutes of the day.

    A bare hour has no minutes, as in 'at three'. Hours in words are p.m. from twelve to four, and a.m. otherwise. But
    if a range would then end before its start, as in 'from nine to five', its end is p.m.
    """
    times = []
    words = _without_symbols(text.lower()).replace("-", " ").split()  # an emoji may be inside "half past seven"
    plain = " ".join(words)
    previous_time, previous_end = 0, 0
    for match in _CLOCK.finditer(plain):
        time = _clock_time(match)
        is_range_end = not match["hour"] and _RANGE_END.fullmatch(plain, previous_end, match.end())
        if is_range_end and time < previous_time < time + 12 * 60:
            time += 12 * 60
        if include_bare_hours or not match["bare_hour"]:
            times.append(time)
        previous_time, previous_end = time, match.end()
    return times


def _clock_time(match: re.Match[str]) -> int:
    """Return the minute of the day of a match of _CLOCK."""
    if match["hour"]:
        return (int(match["hour"]) % 24) * 60 + int(match["minute"]) % 60
    minutes = _MINUTES[match["minutes"]] if match["minutes"] else 0
    if match["past_or_to"] == "to":  # as in 'quarter to nine'
        minutes = -minutes
    hour = _HOURS[match["hour_name"] or match["bare_hour"]] % 12
    if hour < 5:
        hour += 12  # in the afternoon
    return hour * 60 + minutes


def _routine_time(text: str, minute: int) -> RoutineTime:
    """Return when a routine takes place, relative to this minute of the day; up to an hour away is NOW."""
    words = _WORD.findall(text)
    times = clock_times(text)
    # "eight" may be in the morning or in the evening.
    evenings = [time + 12 * 60 for time in times if 5 * 60 <= time < 12 * 60 and "until" not in words]
    dayparts = [(first * 60, last * 60) for first, last in (DAYPARTS[word] for word in words if word in DAYPARTS)]
    spans = list(dayparts)
    if len(times) == 2 and "to" in words:
        spans.append((times[0], times[1]))
    elif "until" in words:
        ends = [time + 12 * 60 if time < 6 * 60 else time for time in times]  # "until five" is in the afternoon
        spans += [(end - 4 * 60, end) for end in ends]  # the start is unknown; four hours are assumed
    is_near = any(abs(time - minute) <= 60 for time in (*times, *evenings))
    if is_near or any(first <= minute <= last for first, last in spans):
        return RoutineTime.NOW
    if not times and not dayparts:
        return RoutineTime.ANY
    # Only "eight" and later may also be in the evening here, so at noon a routine "at six" has passed.
    late_evenings = [time for time in evenings if time >= 20 * 60]
    latest = max([*times, *late_evenings, *(last for _, last in dayparts)])
    return RoutineTime.PASSED if latest < minute else RoutineTime.LATER
