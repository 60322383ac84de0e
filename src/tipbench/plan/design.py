"""The design of an experiment: its scenarios in order, and the looks at which its leaderboard may decide.

A look (interim analysis) tests the leaderboard before all scenarios are judged. With more looks, it is more likely that
one of them finds a lead by chance. So the number of looks is fixed before the first score, and the more looks, the
smaller the significance level of each (Pocock 1977): together they are wrong in at most 5 % of experiments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

DESIGN_TAG = "tipbench.design"
LEVELS = (0.05, 0.0294, 0.0221, 0.0182)  # Pocock's level of each look in a design of one, two, three or four looks
_MAX_LOOKS = len(LEVELS)
_LOOK_INTERVAL = 8  # scenarios between two looks
MIN_SCENARIOS = 6  # the smallest p of a sign-flip test with n scenarios is 2 / 2ⁿ: below 0.05 from n = 6

_MAX_TAG_CHARS = 1500  # well below MLflow's limit for an experiment's tag, 5000
_MAX_PARTS = 999  # a part's number in the name of its tag has three digits

LooksOption = Literal["auto", "one"]


@dataclass(frozen=True)
class Design:
    """Scenarios in the order in which they are judged; there is a look after each number of scenarios in `looks`."""

    scenarios: tuple[str, ...]
    looks: tuple[int, ...]  # ascending
    level: float  # significance level of each look

    def to_json(self) -> dict[str, Any]:
        """Return the value of the experiment tag."""
        return {"scenarios": list(self.scenarios), "looks": list(self.looks), "level": self.level}


def make_design(scenarios: Iterable[str], option: LooksOption = "auto") -> Design:
    """Return the design for these scenarios: a look after every 8 and after the last.

    For more than 32 scenarios, four looks at about equal distances. With the option "one", one look after the last.
    """
    order = tuple(dict.fromkeys(scenarios))
    n = len(order)
    looks: tuple[int, ...]
    if option == "one" or n <= _LOOK_INTERVAL:
        looks = (n,)
    elif n <= _LOOK_INTERVAL * _MAX_LOOKS:
        looks = (*range(_LOOK_INTERVAL, n, _LOOK_INTERVAL), n)
    else:
        looks = tuple(ceil(n * number / _MAX_LOOKS) for number in range(1, _MAX_LOOKS + 1))
    return Design(order, looks, level=LEVELS[len(looks) - 1])


def extend_design(before: Design | None, scenarios: Iterable[str], option: LooksOption) -> Design:
    """Return the design with these scenarios added at the end; the same object if none are new."""
    wanted = tuple(scenarios)
    if before is None:
        return make_design(wanted, option)
    if set(wanted) <= set(before.scenarios):
        return before
    # With "auto", a design of this size has several looks.
    was_option_one = len(before.looks) == 1 and len(before.scenarios) > _LOOK_INTERVAL
    return make_design((*before.scenarios, *wanted), "one" if was_option_one else option)


def design_tags(design: Design) -> dict[str, str]:
    """Return the experiment tags of a design; a long list of scenarios continues in numbered tags."""
    text = json.dumps(design.to_json(), ensure_ascii=False, separators=(",", ":"))
    parts = [text[start : start + _MAX_TAG_CHARS] for start in range(0, len(text), _MAX_TAG_CHARS)]
    if len(parts) == 1:
        return {DESIGN_TAG: text}
    return {DESIGN_TAG: json.dumps({"parts": len(parts)})} | {
        f"{DESIGN_TAG}.{number:03}": part for number, part in enumerate(parts, start=1)
    }


def read_design(tags: Mapping[str, str]) -> Design | None:
    """Return the design in an experiment's tags; None if it is missing or invalid, because anyone may edit tags."""
    try:
        raw = json.loads(tags[DESIGN_TAG])
        if "parts" in raw:
            numbers = range(1, min(raw["parts"], _MAX_PARTS) + 1)
            raw = json.loads("".join(tags.get(f"{DESIGN_TAG}.{number:03}", "") for number in numbers))
        scenarios = tuple(str(scenario) for scenario in raw["scenarios"])
        looks = tuple(int(look) for look in raw["looks"])
        design = Design(scenarios, looks, float(raw["level"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    is_ascending = list(looks) == sorted(set(looks))
    are_looks_valid = looks and is_ascending and looks[0] > 0 and looks[-1] == len(scenarios)
    is_level_valid = 0 < design.level <= LEVELS[0]
    return design if are_looks_valid and is_level_valid else None


def least_scenarios(level: float) -> int:
    """Return the smallest number of shared scenarios with which a sign-flip test can reach this level."""
    n = MIN_SCENARIOS
    while 2 / 2**n > level:
        n += 1
    return n
