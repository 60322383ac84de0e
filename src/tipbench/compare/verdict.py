"""The verdict as text: the leader, the rows tied with it, and the number of scenarios needed to decide."""

from __future__ import annotations

from dataclasses import dataclass

from tipbench.compare.duels import DuelTable
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import Ranking
from tipbench.compare.resampling import MIN_SCENARIOS
from tipbench.compare.statistics import Unknown
from tipbench.text import join_names, plural

_NAMED = 3
_LACKING = 5


@dataclass(frozen=True)
class VerdictFacts:
    """Facts for the verdict that are not part of the ranking."""

    unit: str = "scenario"  # what rows are averaged over
    row: str = "pair"  # what is ranked
    provisional: str | None = None  # source of the scores, if provisional
    hindrance: str | None = None  # why nothing can be ranked, regardless of scores


PLAIN = VerdictFacts()


def verdict_text(ranking: Ranking, duels: DuelTable | Unknown | None = None, telling: VerdictFacts = PLAIN) -> str:
    """Returns two or three sentences. The leader is selected from the same data, so no row is called worse than it."""
    sentences = [standing_sentence(ranking, telling), *_outlook(ranking, telling), *_unranked(ranking)]
    if isinstance(duels, DuelTable):
        sentences += _duels(duels)
    said = " ".join(sentences)
    return f"Provisional ({telling.provisional}): {said}" if telling.provisional else said


def standing_sentence(ranking: Ranking, telling: VerdictFacts = PLAIN) -> str:
    """Returns the sentence naming the leader and the rows tied with it, or why there is no leader."""
    leader, over = ranking.leader, f"over {plural(ranking.n_scenarios, telling.unit)}"
    if leader is None:
        return _nobody(ranking, telling)
    if sum(row.complete for row in ranking.rows) == 1:
        return f"{leader} is the only {telling.row} that can be ranked, {over}: there is nothing to compare it with."
    if ranking.decided:
        return f"{leader} leads {over}, and every other {telling.row} is separated from it."
    first = [row.pair for row in ranking.rows if row.rank == 1]
    if len(first) > 1:
        return _shared(ranking, first, over)
    if not ranking.tied:
        return f"{leader} leads {over}, but rows with other scenarios keep it from being decided."
    return f"{leader} leads {over}, but cannot be told apart from {join_names(ranking.tied, _NAMED)}."


def _shared(ranking: Ranking, first: list[Pair], over: str) -> str:
    names, leading = join_names(first, _NAMED), set(first)
    others = [pair for pair in ranking.tied if pair not in leading]
    if others:
        return f"{names} share the lead {over}, and cannot be told apart from {join_names(others, _NAMED)} either."
    return f"{names} share the lead {over}: by these scores they cannot be told apart."


def _nobody(ranking: Ranking, telling: VerdictFacts) -> str:
    gap, row = ranking.gap, telling.row
    if telling.hindrance:
        return f"Nothing can be ranked: {telling.hindrance}."
    if not ranking.rows:
        return "Nothing is recorded yet."
    if gap is None:
        return f"None of the {plural(len(ranking.rows), row)} is judged yet: nothing can be ranked."
    lacks = f"{gap.nearest} is nearest and lacks {join_names(gap.lacks, _LACKING)}"
    if gap.core:
        counting = plural(gap.core, "scenario")
        return f"No {row} is judged in all of the {counting} in which half of them are: {lacks}."
    return f"No scenario is judged for half of the {plural(gap.rows, row)}: {lacks}."


def _outlook(ranking: Ranking, telling: VerdictFacts) -> list[str]:
    if ranking.leader is None or ranking.decided or not ranking.tied:
        return []
    unit, needed = telling.unit, ranking.scenarios_needed
    if ranking.too_few:
        at_least = f"With {plural(ranking.n_scenarios, unit)} nothing can be decided, whatever the scores"
        if needed is None or needed <= MIN_SCENARIOS:
            return [f"{at_least}; it takes {MIN_SCENARIOS} or more."]
        return [f"{at_least}; to separate them all, if the differences are what they look like, takes about {needed}."]
    if needed is not None:
        return [f"If the differences are what they look like, about {plural(needed, unit)} would decide."]
    return ["How many more would decide cannot be told: some differences are nil."]


def _unranked(ranking: Ranking) -> list[str]:
    """Reports incomplete rows that score above the leader; they are not tested but must not be overlooked."""
    better = [
        row.pair for row in ranking.rows if not row.complete and row.to_leader is not None and row.to_leader.mean > 0
    ]
    names = join_names(better, _NAMED)
    return [f"Not judged everywhere, and so not ranked, but ahead where it is: {names}."] if better else []


def _duels(duels: DuelTable) -> list[str]:
    if duels.winner is not None:
        return [f"In the duels inside that group {duels.winner} wins; the ranks stay as they are."]
    if duels.absent:
        absent = f"{join_names(duels.absent, _NAMED)} {'has' if len(duels.absent) == 1 else 'have'}"
        return [f"The duels inside that group name no winner yet: {absent} not met the others."]
    return []
