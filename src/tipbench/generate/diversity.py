"""Diversity of the tips in one answer. Does not import numpy, so that `collect` stays small and starts quickly.

distinct-2 is the share of unique bigrams among all bigrams of the tips (Li et al. 2016, "A Diversity-Promoting
Objective Function"). The similarity of two tips is the Jaccard index of their words and bigrams: words alone would
treat a reordered copy as identical, and bigrams alone would treat a paraphrase as new. The similarity excludes English
function words, which would make any two tips similar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from math import fsum

MAX_TIPS = 50  # later tips are ignored, because the number of pairs grows quadratically
MAX_WORDS = 200  # per tip; later words are ignored

_WORD = re.compile(r"\w+(?:['’]\w+)?")
_FUNCTION_WORDS = frozenset(
    """a about after again all also an and any are as at be because been before being but by can could did do does
    doing down each for from had has have having he her here hers him his how i if in into is it it's its just let
    me more most my no nor not now of off on once only or other our out over own same she should so some such than
    that the their them then there these they this those through to too under until up very was we were what when
    where which while who whom why will with would you your yours""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Diversity:
    """Two measures, each from 0 to 1."""

    distinct_2: float
    score: float  # 1 − mean similarity of two tips: 0 for copies, 1 for tips without a shared content word


def measure_diversity(tips: Sequence[str]) -> Diversity | None:
    """Return the diversity of the tips, or None below two. Their order does not matter."""
    if len(tips) < 2:
        return None
    bigrams: list[str] = []
    features: list[frozenset[str]] = []  # content words and bigrams of each tip
    for tip in tips[:MAX_TIPS]:
        text = " ".join(tip.split()).casefold()
        words = [match[0] for match in islice(_WORD.finditer(text), MAX_WORDS)]
        words = words or [text]  # a tip without letters or digits, such as an emoji
        content_words = [word for word in words if word not in _FUNCTION_WORDS] or words
        bigrams += _bigrams(words)
        features.append(frozenset(content_words + _bigrams(content_words)))
    distinct_2 = len(set(bigrams)) / len(bigrams)
    similarities = [len(first & second) / len(first | second) for first, second in combinations(features, 2)]
    mean_similarity = fsum(similarities) / len(similarities)
    return Diversity(distinct_2, score=1.0 - mean_similarity)


def _bigrams(words: list[str]) -> list[str]:
    """Return the bigrams, or a single word as it is, so that the result is never empty."""
    return [f"{first} {second}" for first, second in pairwise(words)] or words
