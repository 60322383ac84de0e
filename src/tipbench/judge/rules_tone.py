"""Tone by rules: loud words and marks, and the manner in which the person is spoken to."""

from __future__ import annotations

import unicodedata

from tipbench.judge import rules_words as words
from tipbench.judge.rules_actionability import Moves
from tipbench.judge.rules_finding import Finding
from tipbench.judge.rules_relevance import Hooks
from tipbench.judge.rules_text import Card, Reading

_EMOJI_FROM = "\u2300"  # below are ™, ° and the like


def tone(reading: Reading, card: Card, hooks: Hooks, moves: Moves) -> Finding:
    """The step the manner allows, lowered by what is loud."""
    loud, marks = _loud_words(reading, card), _marks(reading)
    base, why = _manner(reading, card, hooks, moves)
    weight = sum(loud.values())
    because = (*loud, *marks, why)
    if weight >= 3 or (weight >= 2 and (sum(marks.values()) >= 2 or not moves.real)):
        return Finding(1, because)
    slips = weight + sum(marks.values())
    if slips >= 2:
        return Finding(2, because)
    return Finding(min(base, 3), because) if slips else Finding(base, (why,))


def _loud_words(reading: Reading, card: Card) -> dict[str, int]:
    lowers = {word.lower for word in reading.words if word.stem not in card.said}
    found: dict[str, int] = {f"hype: {word}": 1 for word in sorted(lowers & words.HYPE)}
    found |= {f"jargon: {word}": 1 for word in sorted(lowers & words.JARGON)}
    found |= {f"slogan: {phrase}": 1 for phrase in reading.has(words.SLOGANS)}
    found |= {f"cheering: {phrase}": 1 for phrase in reading.has(words.CHEERS)}
    found |= {f"lecture: {phrase}": 1 for phrase in reading.has(words.LECTURE)}
    found |= {f"scolding: {phrase}": 2 for phrase in reading.has(words.SCOLD)}
    shouted = [word.text for word in reading.words if len(word.text) > 3 and word.text.isupper()]
    return found | {f"capitals: {text[:20]}": 1 for text in shouted[:3]}


def _marks(reading: Reading) -> dict[str, int]:
    exclamations = reading.raw.count("!") + reading.raw.count("！")
    emoji = sum(character >= _EMOJI_FROM and unicodedata.category(character) == "So" for character in reading.raw)
    found = {f"{exclamations} exclamation mark{'s' * (exclamations > 1)}": min(exclamations, 2)} if exclamations else {}
    return found | ({f"{emoji} emoji": min(emoji, 2)} if emoji else {})


def _manner(reading: Reading, card: Card, hooks: Hooks, moves: Moves) -> tuple[int, str]:
    """The best step the wording allows, before what is loud in it."""
    spoken_to = {"you", "your", "yourself"} & {word.lower for word in reading.words}
    length = len(reading.words)
    if not spoken_to and _about_them(reading, card):
        return 3, "about the person, not to them"
    if length < 9:
        return 3, "curt"
    if reading.has(words.STIFF) or length / reading.sentences > 34:
        return 3, "stiff or wordy"
    if not moves.real and not hooks.count:
        return 3, "flat"
    if reading.has(words.PRESSURE):
        return 4, "calm, with a word of pressure or praise"
    if hooks.count and moves.start and (moves.size or moves.duration or moves.stop):
        return 5, "calm and specific"
    return 4, "calm, a little general"


def _about_them(reading: Reading, card: Card) -> bool:
    """The persona's name inside a clause; a pronoun, their trade or the writer himself as its subject."""
    named = any(len(clause) > 1 and card.names & {word.stem for word in clause} for clause in reading.clauses)
    subjects = {clause[0].lower for clause in reading.clauses}
    trade = any(
        len(clause) > 1 and clause[0].stem in card.trade and clause[1].lower in words.MODALS
        for clause in reading.clauses
    )
    return named or trade or bool(subjects & {"she", "he", "they", "i", "i'm"})
