"""Builds the tip catalogue of the policy server from a judged experiment."""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from tipbench.compare.answers import ScenarioAnswers, read_answers
from tipbench.compare.cells import CellFilter, find_rubric
from tipbench.compare.gate import check_on_board
from tipbench.compare.leaderboard import read_leaderboard
from tipbench.compare.matrix import Pair
from tipbench.errors import NotEnoughData
from tipbench.plan.rubric import Rubric
from tipbench.plan.toml_file import MAX_LINE
from tipbench.record.store import Experiment, RunStore
from tipbench.serve.catalogue import CatalogueFile, CatalogueTip
from tipbench.text import one_line

CATEGORIES: Mapping[str, tuple[str, ...]] = {  # words of each category
    "break": ("break", "breath", "breathe", "drink", "pause", "rest", "stretch", "tea", "walk", "water"),
    "contact": ("answer", "ask", "call", "email", "mail", "message", "phone", "reply", "send", "text"),
    "focus": ("block", "distraction", "focus", "mute", "notification", "quiet", "single", "silence", "timer", "turn"),
    "planning": ("calendar", "choose", "decide", "list", "note", "pick", "plan", "prioritize", "rank", "tomorrow"),
    "start": ("begin", "draft", "first", "line", "open", "outline", "sentence", "set", "start", "write"),
    "tidy": ("clean", "clear", "desk", "file", "inbox", "label", "put", "receipt", "sort", "tidy"),
}
GENERAL = "general"
_NUMBER_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_NUMBERS = {word: i for i, word in enumerate(_NUMBER_WORDS, start=1)} | {"a": 1, "an": 1, "fifteen": 15, "twenty": 20}
# "half an hour" and "a quarter of an hour" are not one hour.
_DURATION = re.compile(rf"(?<!half )(?<!of )\b(\d{{1,3}}|{'|'.join(_NUMBERS)})[ -](second|minute|min|hour)s?\b")
_MINUTES_PER_UNIT = {"second": 1 / 60, "minute": 1, "min": 1, "hour": 60}
_MIN_COMPOSITE, _MAX_COMPOSITE = 2.0, 17.0  # range of the rubric `tip-v1`, which policies expect


def build_catalogue(store: RunStore, experiment: Experiment, pair: Pair) -> CatalogueFile:
    """Return the catalogue of the pair's scored tips, best first.

    Overlong tips and answers with an invalid format are omitted. The scores are those that the leaderboard counts;
    composites are scaled from the range of their rubric to that of `tip-v1`. A text that occurs in several answers is
    one tip with the mean of its scores. Raises NotEnoughData if there are no tips.
    """
    board, board_cells = read_leaderboard(store, experiment, CellFilter())
    check_on_board(board_cells, pair)
    runs = (cell.run for cell in board_cells.cells)
    rubric = find_rubric(store, experiment.experiment_id, board_cells.rubric, runs)
    answers = read_answers(store, experiment, board, board_cells)
    tips = _catalogue_tips(answers, pair, rubric) if rubric is not None else []
    if not tips:
        raise NotEnoughData(
            f"{pair} has no scored tip in {experiment.name} with a valid format and within the word limit. "
            "Judge it first: `tipbench judge export`, `tipbench judge apply`."
        )
    return CatalogueFile(
        experiment=experiment.name,
        pair=str(pair),
        rubric=board_cells.rubric,
        provisional=board_cells.provisional,
        tips=sorted(tips, key=lambda tip: (-(tip.composite or 0.0), tip.tip_id)),  # all have a composite
    )


def category_of(tip: str) -> str:
    """Return the category with the most words in the tip, GENERAL if the tip has no word of any category.

    Plural and -ing forms of the words count too. On a tie, the first category of CATEGORIES is returned.
    """
    words = re.findall(r"[a-z]+", tip.lower())
    counts: dict[str, int] = {}
    for name, stems in CATEGORIES.items():
        forms = {stem + ending for stem in stems for ending in ("", "s", "es", "ing")}
        counts[name] = sum(word in forms for word in words)
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else GENERAL


def effort_of(tip: str) -> float | None:
    """Return the first duration in the tip, rounded up to minutes; None if the tip has no duration."""
    match = _DURATION.search(tip.lower())
    if match is None:
        return None
    number_text, unit = match.groups()
    number = _NUMBERS[number_text] if number_text in _NUMBERS else int(number_text)
    return float(math.ceil(number * _MINUTES_PER_UNIT[unit]))


def _catalogue_tips(answers: tuple[ScenarioAnswers, ...], pair: Pair, rubric: Rubric) -> list[CatalogueTip]:
    scores_by_text: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    hours_by_text: dict[str, set[float | None]] = defaultdict(set)
    for scenario in answers:
        for answer in scenario.answers:
            if answer.pair != pair or not answer.format_ok:
                continue
            for tip in answer.tips:
                text = one_line(tip.tip).encode("utf-8", "backslashreplace").decode()  # escapes lone surrogates
                has_valid_length = 0 < len(text) <= MAX_LINE
                if has_valid_length and tip.scores and not tip.overlong:
                    scores_by_text[text].append(tip.scores)
                    hours_by_text[text].add(_slot_hour(scenario.card))
    return [_catalogue_tip(text, scores, hours_by_text[text], rubric) for text, scores in scores_by_text.items()]


def _catalogue_tip(
    text: str, scores: list[Mapping[str, float]], hours: set[float | None], rubric: Rubric
) -> CatalogueTip:
    """Return a tip; `scores` and `hours` are from the answers in which its text occurs."""
    low, high = rubric.composite_range
    fractions = [(rubric.composite(each, format_ok=True, overlong=False) - low) / (high - low) for each in scores]
    composites = [_MIN_COMPOSITE + (_MAX_COMPOSITE - _MIN_COMPOSITE) * fraction for fraction in fractions]
    return CatalogueTip(
        tip_id=hashlib.sha256(text.encode()).hexdigest()[:12],
        tip=text,
        category=category_of(text),
        composite=round(fmean(composites), 4),
        slot_hour=next(iter(hours)) if len(hours) == 1 else None,  # None suits any hour
        effort_min=effort_of(text),
        scores={scale: round(fmean(each[scale] for each in scores), 4) for scale in sorted(rubric.scale_names)},
    )


def _slot_hour(card: Mapping[str, Any] | None) -> float | None:
    """Return the time of the scenario's slot in hours, such as 9.5 for 09:30. None if the suite is not available."""
    if card is None:
        return None
    hour, minute = str(card["slot"]["time"]).split(":")
    return int(hour) + int(minute) / 60
