"""Functions of the judge programs: fill a sheet as an honest judge would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Sheet = dict[str, Any]


def read() -> Sheet:
    return dict(json.load(sys.stdin))


def fill(sheet: Sheet, score: int = 3, note: str = "") -> Sheet:
    for item in sheet["items"]:
        fill_item(item, score, note)
    return sheet


def fill_item(item: dict[str, Any], score: int = 3, note: str = "") -> None:
    for tip in item["tips"]:
        tip["scores"] = dict.fromkeys(tip["scores"], score)
        tip["note"] = note


def write(sheet: Sheet) -> None:
    json.dump(sheet, sys.stdout)


def count_call(log: str, sheet: Sheet) -> int:
    """Records a call with its number of items; returns the number of calls so far."""
    with Path(log).open("a") as file:
        file.write(f"{len(sheet['items'])}\n")
    return len(Path(log).read_text().splitlines())
