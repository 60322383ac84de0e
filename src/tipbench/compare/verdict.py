"""The verdict in words: who leads, who cannot be told apart from it, and what it would take to know."""

from __future__ import annotations

from tipbench.compare.duels import DuelTable
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import Ranking
from tipbench.compare.resampling import MIN_SCENARIOS
from tipbench.compare.statistics import Unknown

_NAMED = 3


def verdict_text(ranking: Ranking, duels: DuelTable | Unknown | None = None, *, clusters: str = "scenarios") -> str:
    """Two or three sentences. A leader was chosen by looking, so others 'cannot be told apart', never 'are worse'."""
    sentences = [_standing(ranking, clusters), *_outlook(ranking, clusters), *_unranked(ranking)]
    if isinstance(duels, DuelTable) and duels.winner is not None:
        sentences.append(f"In the duels inside that group {duels.winner} wins; the ranks stay as they are.")
    return " ".join(sentences)


def _standing(ranking: Ranking, clusters: str) -> str:
    complete = sum(row.complete for row in ranking.rows)
    if ranking.leader is None:
        return _nobody(ranking, clusters)
    over = f"over {ranking.n_scenarios} {clusters}"
    if complete == 1:
        return f"{ranking.leader} is the only pair that can be ranked, {over}: there is nothing to compare it with."
    if ranking.decided:
        return f"{ranking.leader} leads {over}, and every other pair is separated from it."
    if not ranking.tied:
        return f"{ranking.leader} leads {over}, but rows with other scenarios keep it from being decided."
    return f"{ranking.leader} leads {over}, but cannot be told apart from {_named(ranking.tied)}."


def _nobody(ranking: Ranking, clusters: str) -> str:
    if not ranking.rows:
        return "Nothing is recorded yet."
    judged = [row for row in ranking.rows if row.estimate is not None]
    if not judged:
        return f"None of the {len(ranking.rows)} pairs is judged yet: nothing can be ranked."
    return (
        f"No pair is judged in all of the {ranking.n_scenarios} {clusters} in which half of them are: "
        f"{len(ranking.rows) - len(judged)} of {len(ranking.rows)} have no score at all."
    )


def _outlook(ranking: Ranking, clusters: str) -> list[str]:
    if ranking.leader is None or ranking.decided or not ranking.tied:
        return []
    if ranking.too_few:
        at_least = f"With {ranking.n_scenarios} {clusters} nothing can be decided, whatever the scores"
        needed = ranking.scenarios_needed
        if needed is None or needed <= MIN_SCENARIOS:
            return [f"{at_least}; it takes {MIN_SCENARIOS} or more."]
        return [f"{at_least}; to separate them all, if the differences are what they look like, takes about {needed}."]
    if ranking.scenarios_needed is not None:
        return [
            f"If the differences are what they look like, about {ranking.scenarios_needed} {clusters} would decide."
        ]
    return ["How many more would decide cannot be told: some differences are nil."]


def _unranked(ranking: Ranking) -> list[str]:
    """An incomplete row is in no test; but one that looks better must not be overlooked."""
    better = tuple(
        row.pair for row in ranking.rows if not row.complete and row.to_leader is not None and row.to_leader.mean > 0
    )
    return [f"Not judged everywhere, and so not ranked, but ahead where it is: {_named(better)}."] if better else []


def _named(pairs: tuple[Pair, ...]) -> str:
    shown = [str(pair) for pair in pairs[:_NAMED]]
    more = len(pairs) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]
