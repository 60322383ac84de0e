"""How a batch ended, in words for its judge: how close to the agreed scores, never on which items. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tipbench.web.panel.showing import bias_words, counted, number, percent

_DECIMALS = 1  # of a bias that a judge is told


@dataclass(frozen=True)
class ScaleWords:
    """One scale."""

    name: str
    words: str  # "0.4 too high"
    error: float | None
    beyond: bool


@dataclass(frozen=True)
class OutcomeView:
    """The drift card."""

    verdict: str  # fine, beyond the limit, unknown
    summary: str
    scales: tuple[ScaleWords, ...]
    sentences: tuple[str, ...]
    itself: str | None  # agreement with the judge's earlier self
    left: int  # items without scores
    kept: int  # items that were taken back here and keep their earlier scores
    by_file: bool  # its scores came as a file, none from here

    @property
    def beyond(self) -> bool:
        """Whether there is a scale to read again."""
        return any(scale.beyond for scale in self.scales)


_SUMMARIES = {
    "fine": "Your scores are as close to the agreed ones as an attentive judge's are.",
    "beyond the limit": "Your scores are further from the agreed ones than chance explains.",
    "unknown": "Too little is scored to say how close your scores are.",
}


def outcome_view(batch: Mapping[str, Any]) -> OutcomeView:
    """Of a closed batch, as the API tells it."""
    told = batch["outcome"] or {}
    drift = told.get("drift") or {}
    verdict = drift.get("verdict", "unknown")
    return OutcomeView(
        verdict=verdict,
        summary=_SUMMARIES.get(verdict, _SUMMARIES["unknown"]),
        scales=tuple(_scale(scale) for scale in drift.get("scales", ()) if scale["bias"] is not None),
        sentences=tuple(_duel_sentences(told) if batch["kind"] == "duel" else drift_sentences(drift)),
        itself=_itself(told.get("self_agreement")),
        left=told.get("unfinished", batch["items"] - batch["done"]),
        kept=told.get("blank", 0),
        by_file=bool(told.get("by_file")),
    )


def _scale(scale: Mapping[str, Any]) -> ScaleWords:
    return ScaleWords(scale["scale"], bias_words(scale["bias"], _DECIMALS), scale["error"], bool(scale["beyond"]))


def drift_sentences(drift: Mapping[str, Any]) -> Iterator[str]:
    """What is beyond the limit over all scales together."""
    if drift.get("error_beyond"):
        yield (
            f"Taken one by one, your scores are {number(drift['error'], 1)} points away from the agreed ones; "
            f"the limit is {number(drift['error_limit'], 1)}."
        )
    if drift.get("contrast_beyond"):
        yield (
            "Good and poor tips get scores that are too much alike: where the agreed scores are 1 point apart, yours "
            f"are {number(drift['contrast'] + 0.0, 1)} apart; the limit is {number(drift['contrast_limit'], 1)}."
        )


def _itself(agreement: Mapping[str, Any] | None) -> str | None:
    if not agreement or not agreement.get("n"):
        return None
    return (
        f"{counted(agreement['n'], 'tip')} you had scored before came again: {percent(agreement['exact'])} of "
        "these scores are the same as the first time."
    )


def _duel_sentences(told: Mapping[str, Any]) -> Iterator[str]:
    both, same = told.get("judged_in_both_orders"), told.get("same_in_both_orders")
    if both:
        yield (
            f"{counted(both, 'duel')} came in both orders; in {number(same)} of them you said the same whichever side "
            "came first."
        )
