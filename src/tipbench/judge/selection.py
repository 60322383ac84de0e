"""Which cells go on a judge's sheet. Pure: equal input and seed give an equal choice, in whatever order it comes.

Whole scenarios go to one judge, so that a judge's severity cancels in paired differences. Their order: the caller's,
then those with controls, then those this judge has begun, then untouched ones, then those that others have begun;
within that at random, so that not every judge begins with the same scenario.

A limit that binds is shared out: `limit / (1 + overlap)` cells, rounded up, that nobody has scored, the rest for
agreement with other judges; what one part cannot use goes to the other. Each part takes whole scenarios while they
fit, then a random part of the next one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from tipbench.generate.parsing import Tip


@dataclass(frozen=True)
class Candidate:
    """A cell that could be judged, with the tips that count."""

    run_id: str
    scenario: str
    tips: tuple[Tip, ...]
    format_ok: bool
    scored_by: frozenset[str]


@dataclass(frozen=True)
class Wish:
    """What a judge asks for. Without a name, only cells that nobody has scored."""

    judge: str | None
    limit: int | None
    overlap: float = 0.2  # share of what others have scored that this judge shall have scored too
    everything: bool = False  # all that this judge has not scored


def choose_cells(
    candidates: Iterable[Candidate],
    wish: Wish,
    with_controls: Collection[str],
    rng: random.Random,
    first: Sequence[str] = (),
) -> list[Candidate]:
    """The cells of one sheet, scenario by scenario; `first` names scenarios that are wanted before others."""
    known = sorted(candidates, key=lambda cell: cell.run_id)
    order = _scenario_order(known, wish.judge, with_controls, rng, first)
    fresh = [cell for cell in known if not cell.scored_by]
    others = [cell for cell in known if wish.judge and cell.scored_by and wish.judge not in cell.scored_by]
    if wish.everything:
        return _first(_by_scenario([*fresh, *others], order), wish.limit, rng)
    groups = _by_scenario(fresh, order)
    by_others = [cell for cell in known if wish.judge and cell.scored_by - {wish.judge}]
    wanted = _rounded_up(wish.overlap * len(by_others)) - (len(by_others) - len(others))
    shared = _reaching(_by_scenario(others, order), wanted)
    if wish.limit is None:
        return _first(groups, None, rng) + _first(shared, None, rng)
    n_shared = sum(map(len, shared))
    due = _rounded_up(wish.limit / (1 + wish.overlap))
    room = min(len(fresh), max(due, wish.limit - n_shared))
    return _first(groups, room, rng) + _first(shared, wish.limit - room, rng)


def _scenario_order(
    known: Sequence[Candidate],
    judge: str | None,
    with_controls: Collection[str],
    rng: random.Random,
    first: Sequence[str],
) -> list[str]:
    wanted = {scenario: place for place, scenario in reversed(list(enumerate(first)))}
    own = {cell.scenario for cell in known if judge in cell.scored_by}
    begun = {cell.scenario for cell in known if cell.scored_by}
    scenarios = sorted({cell.scenario for cell in known})
    rng.shuffle(scenarios)

    def rank(scenario: str) -> tuple[int, bool, int]:
        begun_by = 0 if scenario in own else 2 if scenario in begun else 1
        return wanted.get(scenario, len(first)), scenario not in with_controls, begun_by

    return sorted(scenarios, key=rank)


def _by_scenario(cells: Iterable[Candidate], order: Sequence[str]) -> list[list[Candidate]]:
    groups: dict[str, list[Candidate]] = {scenario: [] for scenario in order}
    for cell in cells:
        groups[cell.scenario].append(cell)
    return [group for group in groups.values() if group]


def _reaching(groups: Sequence[list[Candidate]], wanted: int) -> list[list[Candidate]]:
    """As few whole scenarios, in order, as have the wanted number of cells."""
    return [group for at, group in enumerate(groups) if sum(map(len, groups[:at])) < wanted]


def _first(groups: Sequence[list[Candidate]], limit: int | None, rng: random.Random) -> list[Candidate]:
    """Whole scenarios while they fit, then part of the next."""
    chosen: list[Candidate] = []
    for group in groups:
        room = len(group) if limit is None else limit - len(chosen)
        chosen += group if len(group) <= room else _part(group, max(0, room), rng)
    return chosen


def _part(group: list[Candidate], size: int, rng: random.Random) -> list[Candidate]:
    return sorted(rng.sample(group, size), key=lambda cell: cell.run_id)


def _rounded_up(number: float) -> int:
    """0.07 * 100 is 7.000000000000001 to a computer, and still 7 cells."""
    return ceil(round(number, 9))
