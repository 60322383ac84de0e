"""Small sheets for tests, exported and filled in, under the built-in rubric or one of other scales."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tipbench.judge.sheet import Sheet, SheetTip, TipItem, TipSheet, instructions, sheet_json
from tipbench.plan.rubric import Rubric, parse_rubric
from tipbench.plan.suite import Suite, load_suite

OTHER_SCALES = """+++
id = "warmth-v2"
word_limit = 25

[[scales]]
name = "warmth"
min = 0
max = 10
about = "Would a friend say it?"
steps = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]

[[scales]]
name = "note"
min = 1
max = 3
about = "Is it worth a note? A name that is also a key of the sheet."
steps = ["No.", "Perhaps.", "Yes."]

[weights]
warmth = 1
note = 3
format_ok = 0
overlong = -2

[floor]
warmth = 0
note = 1
format_ok = 0
overlong = 0
+++

# Warmth

Score what is there.
"""


@cache
def tips_suite() -> Suite:
    return load_suite("tips")


@cache
def other_rubric() -> Rubric:
    return parse_rubric(OTHER_SCALES, Path("rubric.md"))


def small_sheet(
    *,
    items: int = 3,
    tips: int = 2,
    judge: str | None = "anna",
    rubric: Rubric | None = None,
    text: str = "",
) -> TipSheet:
    """A sheet whose tips have a line break, quotes, an emoji and a formula in them; `text` is appended to each."""
    suite = tips_suite()
    rubric = rubric or suite.rubric
    return Sheet(
        id="s7f3a9c",
        experiment="tip-bench-small",
        judge=judge,
        rubric=rubric,
        items=tuple(
            TipItem(
                id=f"i{number:03d}",
                card=suite.scenarios[number % len(suite.scenarios)].to_card(),
                format_ok=number % 2 == 0,
                tips=tuple(
                    SheetTip(
                        tip=f'=Set a timer; then, "{number}.{n}":\nwrite one line 😀{text}',
                        rationale=f"-it is short, {n}{text}",
                        overlong=n == 1,
                    )
                    for n in range(tips)
                ),
            )
            for number in range(items)
        ),
        instructions=instructions(rubric),
    )


def filled(sheet: TipSheet, *, judge: str | None = "anna", step: int = 0) -> dict[str, Any]:
    """The sheet as plain JSON with every score given: the scale's lowest plus `step`, going up from tip to tip."""
    raw: dict[str, Any] = json.loads(json.dumps(sheet_json(sheet)))
    raw["judge"] = judge
    for item in raw["items"]:
        for number, tip in enumerate(item["tips"]):
            tip["scores"] = {
                scale.name: scale.min + (step + number) % (scale.max - scale.min + 1) for scale in sheet.rubric.scales
            }
    return raw
