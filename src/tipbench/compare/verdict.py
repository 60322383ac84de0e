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
    obstacle: str | None = None  # why nothing can be ranked, regardless of scores


PLAIN = VerdictFacts()


def verdict_text(ranking: Ranking, duels: DuelTable | Unknown | None = None, facts: VerdictFacts = PLAIN) -> str:
    """Returns two or three sentences. The leader is selected from the same data, so no row is called worse than it."""
    sentences = [standing_sentence(ranking, facts), *_outlook(ranking, facts), *_unranked(ranking)]
    if isinstance(duels, DuelTable):
        sentences += _duels(duels)
    text = " ".join(sentences)
    return f"Provisional ({facts.provisional}): {text}" if facts.provisional else text


def standing_sentence(ranking: Ranking, facts: VerdictFacts = PLAIN) -> str:
    """Returns the sentence naming the leader and the rows tied with it, or why there is no leader."""
    leader, over = ranking.leader, f"over {plural(ranking.n_scenarios, facts.unit)}"
    if leader is None:
        return _no_leader(ranking, facts)
    if sum(row.complete for row in ranking.rows) == 1:
        return f"{leader} is the only ranked {facts.row}, {over}: there is nothing to compare it with."
    if ranking.decided:
        return f"{leader} leads {over}; every other {facts.row} is clearly worse."
    first = [row.pair for row in ranking.rows if row.rank == 1]
    if len(first) > 1:
        return _shared(ranking, first, over)
    if not ranking.tied:
        return f"{leader} leads {over}, but some rows share too few scenarios with it to decide."
    return f"{leader} leads {over}, but is not clearly different from {join_names(ranking.tied, _NAMED)}."


def _shared(ranking: Ranking, first: list[Pair], over: str) -> str:
    names, leading = join_names(first, _NAMED), set(first)
    others = [pair for pair in ranking.tied if pair not in leading]
    if others:
        return f"{names} share the lead {over} and are not clearly different from {join_names(others, _NAMED)}."
    return f"{names} share the lead {over}: their mean scores are equal."


def _no_leader(ranking: Ranking, facts: VerdictFacts) -> str:
    gap, row = ranking.gap, facts.row
    if facts.obstacle:
        return f"Nothing can be ranked: {facts.obstacle}."
    if not ranking.rows:
        return "Nothing is recorded yet."
    if gap is None:
        return f"Not judged yet: {plural(len(ranking.rows), row)} without scores."
    missing = f"{gap.nearest} has most and lacks {join_names(gap.lacks, _LACKING)}"
    if gap.core:
        counting = plural(gap.core, "scenario")
        return f"No {row} is judged in all of the {counting} in which half of them are: {missing}."
    return f"No scenario is judged for half of the {plural(gap.rows, row)}: {missing}."


def _outlook(ranking: Ranking, facts: VerdictFacts) -> list[str]:
    if ranking.leader is None or ranking.decided or not ranking.tied:
        return []
    unit, needed = facts.unit, ranking.scenarios_needed
    if ranking.too_few:
        return [f"Too few {unit}s: {ranking.n_scenarios}; at least {MIN_SCENARIOS} needed."]
    if needed is not None:
        return [f"If the true differences are as observed, about {plural(needed, unit)} would decide."]
    return ["The number of scenarios needed cannot be estimated: some differences are zero."]


def _unranked(ranking: Ranking) -> list[str]:
    """Reports incomplete rows that score above the leader; they are not tested but must not be overlooked."""
    better = [
        row.pair for row in ranking.rows if not row.complete and row.to_leader is not None and row.to_leader.mean > 0
    ]
    names = join_names(better, _NAMED)
    return [f"Not ranked, because not judged in every scenario, but ahead where judged: {names}."] if better else []


def _duels(duels: DuelTable) -> list[str]:
    if duels.winner is not None:
        return [f"{duels.winner} wins the duels between the tied rows; duels do not change ranks."]
    if duels.absent:
        return [f"The duels between the tied rows have no winner yet: no duels of {join_names(duels.absent, _NAMED)}."]
    return []
