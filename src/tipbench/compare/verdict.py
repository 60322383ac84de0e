"""The verdict in words: who leads, who cannot be told apart from it, and what it would take to know."""

from __future__ import annotations

from dataclasses import dataclass

from tipbench.compare.duels import DuelTable
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import Ranking
from tipbench.compare.resampling import MIN_SCENARIOS
from tipbench.compare.statistics import Unknown
from tipbench.compare.words import counted, listed

_NAMED = 3
_LACKING = 5


@dataclass(frozen=True)
class Telling:
    """What the ranking alone does not say."""

    unit: str = "scenario"  # what a row's numbers are means over
    row: str = "pair"  # what is ranked
    provisional: str | None = None  # by whom, where the scores are
    hindrance: str | None = None  # why nothing can be ranked, whatever is judged


PLAIN = Telling()


def verdict_text(ranking: Ranking, duels: DuelTable | Unknown | None = None, telling: Telling = PLAIN) -> str:
    """Two or three sentences. A leader was chosen by looking, so others 'cannot be told apart', never 'are worse'."""
    sentences = [standing_sentence(ranking, telling), *_outlook(ranking, telling), *_unranked(ranking)]
    if isinstance(duels, DuelTable):
        sentences += _duels(duels)
    said = " ".join(sentences)
    return f"Provisional ({telling.provisional}): {said}" if telling.provisional else said


def standing_sentence(ranking: Ranking, telling: Telling = PLAIN) -> str:
    """Who leads, and who cannot be told apart; or why nobody does."""
    leader, over = ranking.leader, f"over {counted(ranking.n_scenarios, telling.unit)}"
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
    return f"{leader} leads {over}, but cannot be told apart from {listed(ranking.tied, _NAMED)}."


def _shared(ranking: Ranking, first: list[Pair], over: str) -> str:
    names, leading = listed(first, _NAMED), set(first)
    others = [pair for pair in ranking.tied if pair not in leading]
    if others:
        return f"{names} share the lead {over}, and cannot be told apart from {listed(others, _NAMED)} either."
    return f"{names} share the lead {over}: by these scores they cannot be told apart."


def _nobody(ranking: Ranking, telling: Telling) -> str:
    gap, row = ranking.gap, telling.row
    if telling.hindrance:
        return f"Nothing can be ranked: {telling.hindrance}."
    if not ranking.rows:
        return "Nothing is recorded yet."
    if gap is None:
        return f"None of the {counted(len(ranking.rows), row)} is judged yet: nothing can be ranked."
    lacks = f"{gap.nearest} is nearest and lacks {listed(gap.lacks, _LACKING)}"
    if gap.core:
        counting = counted(gap.core, "scenario")
        return f"No {row} is judged in all of the {counting} in which half of them are: {lacks}."
    return f"No scenario is judged for half of the {counted(gap.rows, row)}: {lacks}."


def _outlook(ranking: Ranking, telling: Telling) -> list[str]:
    if ranking.leader is None or ranking.decided or not ranking.tied:
        return []
    unit, needed = telling.unit, ranking.scenarios_needed
    if ranking.too_few:
        at_least = f"With {counted(ranking.n_scenarios, unit)} nothing can be decided, whatever the scores"
        if needed is None or needed <= MIN_SCENARIOS:
            return [f"{at_least}; it takes {MIN_SCENARIOS} or more."]
        return [f"{at_least}; to separate them all, if the differences are what they look like, takes about {needed}."]
    if needed is not None:
        return [f"If the differences are what they look like, about {counted(needed, unit)} would decide."]
    return ["How many more would decide cannot be told: some differences are nil."]


def _unranked(ranking: Ranking) -> list[str]:
    """An incomplete row is in no test; but one that looks better must not be overlooked."""
    better = [
        row.pair for row in ranking.rows if not row.complete and row.to_leader is not None and row.to_leader.mean > 0
    ]
    names = listed(better, _NAMED)
    return [f"Not judged everywhere, and so not ranked, but ahead where it is: {names}."] if better else []


def _duels(duels: DuelTable) -> list[str]:
    if duels.winner is not None:
        return [f"In the duels inside that group {duels.winner} wins; the ranks stay as they are."]
    if duels.absent:
        have = "has" if len(duels.absent) == 1 else "have"
        return [
            f"The duels inside that group name no winner yet: {listed(duels.absent, _NAMED)} {have} not met the others."
        ]
    return []
