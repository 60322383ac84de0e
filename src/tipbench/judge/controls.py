"""Hidden items of a sheet: controls presented as answers, and repeats of items the judge has already scored."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import comb, exp, log
from typing import Any, NamedTuple

from tipbench.generate.parsing import Tip, is_overlong
from tipbench.judge.material import Candidate
from tipbench.judge.sheet import Item, SheetTip
from tipbench.judge.sheet_store import ItemKind, SheetEntry, control_id
from tipbench.plan.rubric import Control, Rubric, Scale
from tipbench.text import fingerprint

CONTROL_TIPS = 40  # per sheet; on smaller sheets, one per cell
MOST_REPEATS = 8
CELLS_FOR_A_REPEAT = 10

_WHOLE = 1000
_FIVE_STEPS = (150, 200, 300, 200, 150)  # of 1000 references; few enough threes to detect a judge who always scores 3
_CHOICES = 4  # spare controls considered per control needed; bounds the work on a very large pool


def compose(
    cells: Sequence[Candidate],
    suite_cards: Mapping[str, Mapping[str, Any]],
    controls: Sequence[Control],
    rubric: Rubric,
    *,
    shown: Collection[str],
    earlier: Sequence[Candidate],
    sheet_id: str,
    rng: random.Random,
) -> tuple[SheetEntry, ...]:
    """Returns the sheet's items in final order. `shown` has a control's id once per time this judge has seen it."""
    real = sorted(cells, key=lambda cell: cell.run_id)
    repeats = _choose_repeats(real, earlier, rng)
    pools = _pools(real, repeats, controls, Counter(shown), rng)
    plans = _plan(pools, min(CONTROL_TIPS, len(real)), rng)
    chosen = _choose_controls(pools, [sum(len(donor.tips) for donor in plan) for plan in plans], rubric)
    entries = [_entry(cell, ItemKind.CELL, suite_cards, rubric) for cell in real]
    entries += [_entry(cell, ItemKind.REPEAT, suite_cards, rubric) for cell in repeats]
    for donors, tips in zip(plans, chosen, strict=True):
        rng.shuffle(tips)
        rest = iter(tips)
        for donor in donors:
            entries.append(_control_entry(list(islice(rest, len(donor.tips))), donor, suite_cards, rubric))
    rng.shuffle(entries)
    ids = [fingerprint([sheet_id, rng.getrandbits(64), position], 12) for position in range(len(entries))]
    return tuple(replace(entry, item=replace(entry.item, id=id_)) for entry, id_ in zip(entries, ids, strict=True))


def _choose_repeats(real: Sequence[Candidate], earlier: Sequence[Candidate], rng: random.Random) -> list[Candidate]:
    """Samples earlier cells, about a tenth as many as real ones, from scenarios already on the sheet."""
    scenarios, taken = {cell.scenario for cell in real}, {cell.run_id for cell in real}
    fitting = {cell.run_id: cell for cell in earlier if cell.scenario in scenarios and cell.run_id not in taken}
    wanted = min(MOST_REPEATS, round(len(real) / 10)) if len(real) >= CELLS_FOR_A_REPEAT else 0
    return rng.sample([fitting[run_id] for run_id in sorted(fitting)], min(wanted, len(fitting)))


# Items


def _entry(cell: Candidate, kind: ItemKind, cards: Mapping[str, Mapping[str, Any]], rubric: Rubric) -> SheetEntry:
    return SheetEntry(_item(cell.scenario, cell.tips, cell.format_ok, cards, rubric), kind, cell.run_id)


def _control_entry(
    controls: Sequence[Control], donor: Candidate, cards: Mapping[str, Mapping[str, Any]], rubric: Rubric
) -> SheetEntry:
    tips = [
        Tip(control.tip, control.rationale if model.rationale else "")
        for control, model in zip(controls, donor.tips, strict=True)
    ]
    # A well-formed answer has every rationale; a user's control may lack one.
    format_ok = donor.format_ok and all(tip.rationale for tip in tips)
    return SheetEntry(
        _item(donor.scenario, tips, format_ok, cards, rubric),
        ItemKind.CONTROL,
        controls=tuple(map(control_id, controls)),
        references=tuple(control.scores for control in controls),
    )


def _item(
    scenario: str, tips: Sequence[Tip], format_ok: bool, cards: Mapping[str, Mapping[str, Any]], rubric: Rubric
) -> Item:
    seen = tuple(SheetTip(tip.tip, tip.rationale, is_overlong(tip.tip, rubric.word_limit)) for tip in tips)
    return Item("", cards[scenario], format_ok, seen)


# Number of control tips per scenario


@dataclass(frozen=True)
class _ScenarioPool:
    """A scenario of the sheet for which there are controls."""

    donors: Sequence[Candidate]
    most: int  # maximum number of control items
    controls: Sequence[Control]  # least often shown first, ties in random order
    seen: Sequence[int]  # times each was shown, ascending


class _Option(NamedTuple):
    """A number of control tips: the fewest earlier showings of the controls used, and the log number of ways."""

    again: int
    ways: float


def _pools(
    real: Sequence[Candidate],
    repeats: Sequence[Candidate],
    controls: Sequence[Control],
    seen: Mapping[str, int],
    rng: random.Random,
) -> list[_ScenarioPool]:
    donors, pools = defaultdict(list), defaultdict(list)
    for cell in real:
        if cell.tips:
            donors[cell.scenario].append(cell)
    for name, control in sorted({control_id(control): control for control in controls}.items()):
        pools[control.scenario].append((seen.get(name, 0), rng.random(), name, control))
    others = Counter(cell.scenario for cell in (*real, *repeats))
    return [
        _ScenarioPool(
            donors[scenario],
            others[scenario],
            [control for *_, control in sorted(pools[scenario], key=lambda drawn: drawn[:3])],
            sorted(times for times, *_ in pools[scenario]),
        )
        for scenario in sorted(donors.keys() & pools.keys())
    ]


def _plan(pools: Sequence[_ScenarioPool], wanted: int, rng: random.Random) -> list[list[Candidate]]:
    """Draws each scenario's donors: `wanted` tips in total, or else the next larger total, or else the largest."""
    largest = max((len(donor.tips) for pool in pools for donor in pool.donors), default=1)
    bound = wanted + largest - 1  # with more tips, some item would be superfluous
    draws = [_draws(pool, bound) for pool in pools]
    ways = [_ways(pool, drawn) for pool, drawn in zip(pools, draws, strict=True)]
    tables = [{0: _Option(0, 0.0)}]  # element i: totals possible with the last i scenarios
    for own in reversed(ways):
        tables.append(_combine(own, tables[-1], bound))
    enough = [tips for tips in tables[-1] if tips >= wanted]
    left = min(enough) if enough else max(tables[-1])
    plans = []
    for pool, drawn, own, rest in zip(pools, draws, ways, reversed(tables[:-1]), strict=True):
        fitting = {tips: _add(way, rest[left - tips]) for tips, way in own.items() if left - tips in rest}
        least = min(way.again for way in fitting.values())
        tips = _draw_one({tips: way.ways for tips, way in fitting.items() if way.again == least}, rng)
        plans.append(_draw_donors(pool, drawn, tips, rng))
        left -= tips
    return plans


def _draws(pool: _ScenarioPool, bound: int) -> list[dict[int, float]]:
    """Returns, as element k, the log probability of each total number of tips when k donors are drawn."""
    most = min(bound, len(pool.controls))
    sizes = Counter(len(donor.tips) for donor in pool.donors)
    draws = [{0: 0.0}]
    while len(draws) <= pool.most and draws[-1]:
        logs: dict[int, list[float]] = defaultdict(list)
        for total, chance in draws[-1].items():
            for size, donors in sizes.items():
                if total + size <= most:
                    logs[total + size].append(chance + log(donors / len(pool.donors)))
        draws.append({total: _log_sum(terms) for total, terms in logs.items()})
    return draws


def _ways(pool: _ScenarioPool, draws: Sequence[Mapping[int, float]]) -> dict[int, _Option]:
    ways = {}
    for tips in sorted({total for drawn in draws for total in drawn}):
        chance = _log_sum([drawn[tips] for drawn in draws if tips in drawn])
        sure, free = _by_freshness(pool, tips)
        ways[tips] = _Option(sum(pool.seen[:tips]), chance + log(comb(free, tips - sure)))
    return ways


def _by_freshness(pool: _ScenarioPool, tips: int) -> tuple[int, int]:
    """Returns how many of the `tips` least shown controls are fixed, and how many tie for the remaining ones."""
    if not tips:
        return 0, 0
    limit = pool.seen[tips - 1]
    return sum(times < limit for times in pool.seen), sum(times == limit for times in pool.seen)


def _combine(own: Mapping[int, _Option], rest: Mapping[int, _Option], bound: int) -> dict[int, _Option]:
    found: dict[int, list[_Option]] = defaultdict(list)
    for tips, way in own.items():
        for more, other in rest.items():
            if tips + more <= bound:
                found[tips + more].append(_add(way, other))
    combined = {}
    for tips, ways in found.items():
        least = min(way.again for way in ways)
        combined[tips] = _Option(least, _log_sum([way.ways for way in ways if way.again == least]))
    return combined


def _add(one: _Option, other: _Option) -> _Option:
    return _Option(one.again + other.again, one.ways + other.ways)


def _draw_donors(
    pool: _ScenarioPool, draws: Sequence[Mapping[int, float]], tips: int, rng: random.Random
) -> list[Candidate]:
    """Draws donors with `tips` tips in total, with the probabilities of independent draws."""
    items = _draw_one({count: drawn[tips] for count, drawn in enumerate(draws) if tips in drawn}, rng)
    donors = []
    for count in range(items, 0, -1):
        rest = draws[count - 1]
        fitting = {at: rest[tips - len(d.tips)] for at, d in enumerate(pool.donors) if tips - len(d.tips) in rest}
        donors.append(pool.donors[_draw_one(fitting, rng)])
        tips -= len(donors[-1].tips)
    return donors


def _draw_one(logs: Mapping[int, float], rng: random.Random) -> int:
    top = max(logs.values())
    return rng.choices(list(logs), [exp(value - top) for value in logs.values()])[0]


def _log_sum(logs: Sequence[float]) -> float:
    top = max(logs)
    return top + log(sum(exp(value - top) for value in logs))


# Choice of controls


def _choose_controls(pools: Sequence[_ScenarioPool], tips: Sequence[int], rubric: Rubric) -> list[list[Control]]:
    """Chooses `tips` least shown controls per place, balancing all references towards their targets."""
    groups = []
    for pool, count in zip(pools, tips, strict=True):
        sure, free = _by_freshness(pool, count)
        spare = pool.controls[count : min(sure + free, count + _CHOICES * count)]
        groups.append((list(pool.controls[:count]), sure, list(spare)))
    balance = _Balance(rubric.scales, [control for chosen, *_ in groups for control in chosen])
    while sum(balance.improve(*group) for group in groups):
        pass
    return [chosen for chosen, *_ in groups]


class _Balance:
    """Excess of references over their targets per scale and step, in thousandths of a control (exact integers)."""

    def __init__(self, scales: Sequence[Scale], controls: Sequence[Control]) -> None:
        self._names = [scale.name for scale in scales]
        self._excess = {
            (scale.name, step): -len(controls) * share
            for scale in scales
            for step, share in enumerate(_target(scale), scale.min)
        }
        for control in controls:
            self._add(control, _WHOLE)

    def improve(self, inside: list[Control], sure: int, outside: list[Control]) -> int:
        """Swaps controls, except the first `sure`, where that reduces the squared distance; returns the count."""
        exchanged = 0
        for i in range(sure, len(inside)):
            for o in range(len(outside)):
                if self._growth(inside[i], outside[o]) < 0:
                    self._add(inside[i], -_WHOLE)
                    self._add(outside[o], _WHOLE)
                    inside[i], outside[o] = outside[o], inside[i]
                    exchanged += 1
        return exchanged

    def _growth(self, out: Control, into: Control) -> int:
        """Returns the change in squared distance caused by a swap, divided by 2 * _WHOLE."""
        return sum(
            self._excess[name, into.scores[name]] - self._excess[name, out.scores[name]] + _WHOLE
            for name in self._names
            if into.scores[name] != out.scores[name]
        )

    def _add(self, control: Control, amount: int) -> None:
        for name in self._names:
            self._excess[name, control.scores[name]] += amount


def _target(scale: Scale) -> tuple[int, ...]:
    """Returns each step's target share of references in thousandths: most in the middle, enough at the ends."""
    steps = scale.max - scale.min + 1
    if steps == len(_FIVE_STEPS):
        return _FIVE_STEPS
    heights = [2 + min(step, steps - 1 - step) for step in range(steps)]
    return tuple(round(_WHOLE * height / sum(heights)) for height in heights)
