"""Parts of a board as scripts read them: plain values, None where unknown."""

from __future__ import annotations

from typing import Any

from tipbench.compare.attribution import Attribution
from tipbench.compare.duels import DuelTable
from tipbench.compare.matrix import Pair
from tipbench.compare.statistics import Difference, Estimate, Unknown


def pair_json(pair: Pair | None) -> dict[str, str] | None:
    """A pair as scripts read it."""
    return None if pair is None else {"model": pair.model, "prompt_version": pair.prompt}


def difference_json(difference: Difference | None) -> dict[str, float | None] | None:
    """A difference as scripts read it."""
    if difference is None:
        return None
    return {name: getattr(difference, name) for name in ("mean", "ci_low", "ci_high", "p")}


def attribution_json(found: Attribution | Unknown) -> dict[str, float | None] | None:
    """Shares of the sum of squares, summing to 1; None for a side with one member, which has nothing to be told."""
    return None if isinstance(found, Unknown) else found.shares()


def attribution_details(found: Attribution | Unknown) -> dict[str, Any]:
    """What it rests on, marginal means, interaction flags, the persona's share; or why there is no attribution."""
    if isinstance(found, Unknown):
        return {"reason": found.reason}
    sides = {"models": found.models, "prompts": found.prompts}
    return {
        "n_scenarios": found.n_scenarios,
        "without": list(found.without),
        **{
            side: [{"name": each.name, **_estimate(each.estimate)} for each in marginals]
            for side, marginals in sides.items()
        },
        "interactions": [
            {"prompt_version": flag.prompt, "helps": list(flag.helps), "hurts": list(flag.hurts)}
            for flag in found.flags
        ],
        "persona": found.persona.share if found.persona else None,
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"mean": estimate.mean, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}


def duels_json(table: DuelTable | Unknown | None) -> dict[str, Any] | None:
    """The duels beside the board; they never change it."""
    if table is None or isinstance(table, Unknown):
        return None
    return {
        "standings": [
            {
                **(pair_json(each.pair) or {}),
                "strength": each.strength.value,
                "ci_low": each.strength.ci_low,
                "ci_high": each.strength.ci_high,
                "points": each.points,
                "duels": each.duels,
                "n_scenarios": each.n_scenarios,
            }
            for each in table.standings
        ],
        "winner": pair_json(table.winner),
        "absent": [pair_json(pair) for pair in table.absent],
    }
