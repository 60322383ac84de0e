"""The rules judge: scores a tip by transparent text rules. English only, provisional, and measured like any judge.

It is the one judge that knows its scales by name: it scores relevance, actionability and tone from 1 to 5 and
refuses any other rubric. docs/rules-judge.md has the rules in words and how far off they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.errors import UsageError
from tipbench.judge.filler import Unscored
from tipbench.judge.rules_actionability import actionability, find_moves
from tipbench.judge.rules_finding import Finding
from tipbench.judge.rules_relevance import find_hooks, relevance
from tipbench.judge.rules_text import Card, broken, read, read_card
from tipbench.judge.rules_tone import tone
from tipbench.judge.sheet import Item, ItemScore, Sheet, TipScore
from tipbench.plan.rubric import CalibratedTip, Rubric

SCALES = ("relevance", "actionability", "tone")
LOWEST, HIGHEST = 1, 5
NOTE_LIMIT = 200


@dataclass(frozen=True)
class Explanation:
    """The scores of one tip with their reasons, by scale."""

    findings: Mapping[str, Finding]

    @property
    def scores(self) -> dict[str, int]:
        return {scale: finding.score for scale, finding in self.findings.items()}

    @property
    def note(self) -> str:
        """The reasons in a line of at most NOTE_LIMIT characters, a third for each scale."""
        parts = (f"{scale} {found.score}: {', '.join(found.because)}" for scale, found in self.findings.items())
        return "; ".join(_shortened(part, NOTE_LIMIT // len(SCALES) - 2) for part in parts)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def score_tip(card: Mapping[str, Any], tip: str) -> dict[str, int]:
    """The scores of one tip for a scenario's card."""
    return explain_tip(card, tip).scores


def explain_tip(card: Mapping[str, Any], tip: str) -> Explanation:
    """The scores of one tip with the findings behind each."""
    return _explain(read_card(card), tip)


class RulesJudge:
    """A Filler that needs nobody: every item gets scores, flags stay as computed, the note says why."""

    name = "rules"
    provisional = True

    def fill(self, sheet: Sheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """One score for every item; UsageError at once if the rubric has other scales."""
        check_rubric(sheet.rubric)
        report(f"rules: {len(sheet.items)} items by text rules, which know English only; the scores are provisional.")
        return (_fill_item(item) for item in sheet.items)


def check_rubric(rubric: Rubric) -> None:
    """UsageError unless the rubric has exactly the scales that the rules know."""
    seen = {scale.name: (scale.min, scale.max) for scale in rubric.scales}
    if seen != dict.fromkeys(SCALES, (LOWEST, HIGHEST)):
        shown = ", ".join(f"{name} {low}-{high}" for name, (low, high) in seen.items())
        raise UsageError(
            f"The rules judge scores {', '.join(SCALES)} from {LOWEST} to {HIGHEST} and nothing else; the rubric "
            f"{rubric.id} has {shown}. Judge by hand, or with command: or ollama:."
        )


def _fill_item(item: Item) -> ItemScore:
    card = read_card(item.scenario)
    explained = [(_explain(card, tip.tip), tip.overlong) for tip in item.tips]
    return ItemScore(item.id, item.format_ok, tuple(TipScore(e.scores, overlong, e.note) for e, overlong in explained))


def rules_error(
    examples: Sequence[CalibratedTip], cards: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """Per scale how far the rules are from the agreed scores: n, bias, mean absolute error, share within one step.

    `cards` has the card of each scenario by its id. What has no example is None.
    """
    read_cards = {scenario: read_card(cards[scenario]) for scenario in {example.scenario for example in examples}}
    scored = [(_explain(read_cards[example.scenario], example.tip).scores, example.scores) for example in examples]
    off = {scale: [own[scale] - agreed[scale] for own, agreed in scored if scale in agreed] for scale in SCALES}
    return {scale: _summary(differences) for scale, differences in off.items()}


def _summary(off: Sequence[int]) -> dict[str, float | None]:
    n = len(off)
    if not n:
        return {"n": 0, "bias": None, "error": None, "within_one": None}
    return {
        "n": n,
        "bias": sum(off) / n,
        "error": sum(map(abs, off)) / n,
        "within_one": sum(abs(difference) <= 1 for difference in off) / n,
    }


def _explain(card: Card, tip: str) -> Explanation:
    reading = read(tip)
    why = broken(reading, card.orders)
    if why:
        return Explanation(dict.fromkeys(SCALES, Finding(LOWEST, (f"broken text: {why}",))))
    hooks = find_hooks(reading, card)
    moves = find_moves(reading, card)
    return Explanation(
        {
            "relevance": relevance(hooks),
            "actionability": actionability(moves, hooks),
            "tone": tone(reading, card, hooks, moves),
        }
    )
