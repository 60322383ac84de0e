"""What has come back of a sheet, item by item, as it is kept with the sheet; what was replaced is history."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.judge.scores import read_tip_score, tip_score_json
from tipbench.judge.sheet import ItemScore
from tipbench.plan.fingerprint import fingerprint


@dataclass(frozen=True)
class Replaced:
    """An answer that a later one has replaced."""

    given: ItemScore
    at: str  # when it was replaced


def answers_text(answers: Mapping[str, ItemScore], history: Sequence[Replaced] = ()) -> str:
    """What came back, as kept with the sheet."""
    value = {
        "items": {item: _score_json(score) for item, score in sorted(answers.items())},
        "history": [{"item": each.given.item, "at": each.at, **_score_json(each.given)} for each in history],
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_answers(text: str | None) -> tuple[dict[str, ItemScore], tuple[Replaced, ...]]:
    """What `answers_text` wrote; nothing when nothing has come back."""
    if text is None:
        return {}, ()
    raw = json.loads(text)
    history = tuple(Replaced(_score(each["item"], each), each["at"]) for each in raw["history"])
    return {item: _score(item, given) for item, given in raw["items"].items()}, history


def merged(
    before: Mapping[str, ItemScore], history: Sequence[Replaced], finished: Sequence[ItemScore], at: str
) -> tuple[dict[str, ItemScore], tuple[Replaced, ...]]:
    """The answers with what has come now in place, and the history with what that replaced."""
    new = {score.item: score for score in finished}
    replaced = [Replaced(given, at) for item, given in before.items() if new.get(item, given) != given]
    return {**before, **new}, (*history, *replaced)


def scores_mark(answers: Mapping[str, ItemScore]) -> str:
    """A fingerprint of the scores and flags alone: a note changes nothing that could drift."""
    return fingerprint(
        {
            item: [score.format_ok, [[dict(tip.scores), tip.overlong] for tip in score.tips]]
            for item, score in answers.items()
        },
        32,
    )


def _score_json(score: ItemScore) -> dict[str, Any]:
    return {"format_ok": score.format_ok, "tips": [tip_score_json(tip) for tip in score.tips]}


def _score(item: str, raw: Mapping[str, Any]) -> ItemScore:
    return ItemScore(item, bool(raw["format_ok"]), tuple(read_tip_score(tip) for tip in raw["tips"]))
