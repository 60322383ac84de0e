"""The tip catalogue: a TOML file with the candidates for requests that have none."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from tipbench.errors import UsageError
from tipbench.plan.toml_file import Line, Schema, TomlText
from tipbench.serve.request import MAX_CANDIDATES, Candidate

_HEADER = """\
# Tips for `tipbench serve --catalogue FILE`. Edit freely: remove tips, correct a category, add tips of your own.
# tip_id must be unique; composite (2 to 17), slot_hour (of the day), effort_min (minutes) and scores may be left out.
"""


class CatalogueTip(Schema):
    """A tip with the values that policies use."""

    tip_id: Annotated[str, Field(min_length=1, max_length=128)]
    tip: Line  # one line of text
    category: Annotated[str, Field(min_length=1, max_length=64)]
    composite: Annotated[float, Field(ge=2, le=17)] | None = None
    slot_hour: Annotated[float, Field(ge=0, lt=24)] | None = None  # hour of the day; None suits any hour
    effort_min: Annotated[float, Field(ge=0)] | None = None  # minutes
    scores: dict[str, float] = Field(default_factory=dict)  # by scale of the rubric; policies do not use them


class CatalogueFile(Schema):
    """The content of a catalogue file: its tips and where they come from."""

    format: Literal["tipbench-catalogue/1"] = "tipbench-catalogue/1"
    experiment: str | None = None
    pair: str | None = None
    rubric: str | None = None
    provisional: bool = False  # scored by rules or a model
    tips: Annotated[list[CatalogueTip], Field(min_length=1)]

    def to_toml(self) -> str:
        """Return the text of the file, without values that are None."""
        lines = [_HEADER, *_assignments(self.model_dump(exclude={"tips"}))]
        for tip in self.tips:
            lines += ["", "[[tips]]", *_assignments(tip.model_dump())]
        return "\n".join(lines) + "\n"


class Catalogue:
    """The tips of a catalogue file, as candidates for a time of day."""

    def __init__(self, tips: Sequence[CatalogueTip]) -> None:
        self.texts = {tip.tip_id: tip.tip for tip in tips}
        self.scores: dict[str, dict[str, float]] = defaultdict(dict)  # by scale and tip id
        for tip in tips:
            for scale, score in tip.scores.items():
                self.scores[scale][tip.tip_id] = score
        self._by_slot: dict[float | None, list[Candidate]] = defaultdict(list)
        for tip in sorted(tips, key=lambda tip: (-(tip.composite or 0.0), tip.tip_id)):
            candidate = tip.model_dump(exclude={"tip", "scores"}, exclude_none=True)
            self._by_slot[tip.slot_hour].append(cast("Candidate", candidate))

    def candidates(self, hour: float) -> list[Candidate]:
        """Return the MAX_CANDIDATES tips with the nearest slot hours; those of one slot are ordered by composite."""

        def distance(slot: float | None) -> float:
            if slot is None:
                return 0.0
            hours = abs(slot - hour) % 24
            return min(hours, 24 - hours)

        slots = sorted(self._by_slot, key=lambda slot: (distance(slot), slot or 0.0))
        nearest_first = (candidate for slot in slots for candidate in self._by_slot[slot])
        return list(islice(nearest_first, MAX_CANDIDATES))


def load_catalogue(path: Path) -> Catalogue:
    """Read a catalogue file; raises UsageError with the line and reason if it is invalid."""
    if not path.is_file():
        raise UsageError(f"--catalogue takes a file; there is none at {path}. `tipbench catalogue build` writes one.")
    text = TomlText.read(path)
    tips = text.parse(CatalogueFile).tips
    seen: set[str] = set()
    for index, tip in enumerate(tips):
        if tip.tip_id in seen:
            raise text.error(("tips", index, "tip_id"), f"'tip_id' must be unique; {tip.tip_id!r} is there twice.")
        seen.add(tip.tip_id)
    return Catalogue(tips)


def _assignments(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the values as TOML lines; a nested dictionary gets dotted keys."""
    # A TOML value is written as in JSON, except that DEL is escaped too.
    for name, value in values.items():
        key = prefix + (name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name))
        if isinstance(value, dict):
            yield from _assignments(value, f"{key}.")
        elif value is not None:
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
