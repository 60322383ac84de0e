"""The report's strip on the judging: who judged, how far they agree, and how far from the agreed scores they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tipbench.compare.html_parts import Column, facts, table
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.markup import Html, element, joined
from tipbench.compare.report import interval, number, percent
from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetHistory


def judging_part(board: Leaderboard, judging: JudgingStatus | None) -> Html | None:
    """None when nothing is known of the judging."""
    if judging is None:
        return None
    twice = f"{judging.twice} of {judging.judged}"
    if judging.judged:
        twice += f" ({percent(judging.twice / judging.judged)})"
    alpha = "; ".join(f"{name} {number(value) or 'unknown'}" for name, value in judging.alpha.items())
    filtered = "whole experiment, whatever the board is filtered by" if board.where or board.judge else None
    strip = facts(
        [
            ("of", filtered),
            ("rubric", board.rubric_tag or None),
            ("answers", f"{judging.judged} judged ({judging.floored} at the floor), {judging.pending} pending"),
            ("judged twice", twice),
            ("agreement", f"Krippendorff's alpha: {alpha}" if judging.twice and alpha else "unknown: nobody overlaps"),
        ]
    )
    said = "Judges score blind, and hidden control tips with agreed scores measure how far each is off."
    return joined(element("p", said), strip, _judges(judging), _biases(judging))


def _judges(judging: JudgingStatus) -> Html:
    columns = [
        Column("judge", text=True, head=True), Column("scores", text=True), Column("answers"),
        Column("drift", text=True), Column("error on controls"), Column("same score again"),
    ]  # fmt: skip
    rows = [_judge(judge) for judge in judging.judges]
    return table("Who judged. The error is the mean distance from the agreed scores, in points.", columns, rows)


def _judge(judge: JudgeStatus) -> list[str | None]:
    return [
        judge.judge,
        "provisional" if judge.provisional else "count",
        f"{judge.cells}" + (f" ({judge.held} held)" if judge.held else ""),
        judge.drift or "unknown",
        number(judge.error),
        percent(judge.self_exact),
    ]


def _biases(judging: JudgingStatus) -> Html | None:
    newest: dict[str, SheetHistory] = {}
    for sheet in judging.history:
        if (sheet.drift or {}).get("scales"):
            newest[sheet.judge] = sheet
    if not newest:
        return None
    names = list(dict.fromkeys(scale["scale"] for sheet in newest.values() for scale in _scales(sheet)))
    columns = [Column("judge", text=True, head=True), *(Column(name) for name in names)]
    rows = [
        [judge, *(_bias({scale["scale"]: scale for scale in _scales(sheet)}.get(name)) for name in names)]
        for judge, sheet in newest.items()
    ]
    return table("Bias on hidden controls, by scale: points too high (+) or too low (−), with interval.", columns, rows)


def _scales(sheet: SheetHistory) -> list[Mapping[str, Any]]:
    return list((sheet.drift or {}).get("scales", []))


def _bias(scale: Mapping[str, Any] | None) -> str | None:
    if scale is None or scale["bias"] is None:
        return None
    low, high = scale["interval"] or (None, None)
    ends = interval(low, high, "+.2f")
    limit = ", beyond the limit" if scale["beyond"] else ""
    return f"{number(scale['bias'], '+.2f')}{f' ({ends})' if ends else ''}{limit}"
