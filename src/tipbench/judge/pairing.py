"""Who meets whom in the duels, and in which order. Pure: equal input and seed give equal duels."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from tipbench.generate.parsing import Tip

Name = tuple[str, str]  # model and prompt version of a pair


@dataclass(frozen=True)
class Contender:
    """One answer of one pair."""

    run_id: str
    name: Name
    scenario: str
    repeat: str
    tips: tuple[Tip, ...]


@dataclass(frozen=True)
class MatchUp:
    """Two answers to one scenario, of two pairs."""

    one: Contender
    other: Contender

    @property
    def scenario(self) -> str:
        return self.one.scenario

    @property
    def runs(self) -> frozenset[str]:
        return frozenset({self.one.run_id, self.other.run_id})

    def has(self, name: Name) -> bool:
        """Whether one of the two is of this pair."""
        return name in (self.one.name, self.other.name)


def match_ups(contenders: Iterable[Contender], done: Collection[frozenset[str]] = ()) -> list[MatchUp]:
    """Every two answers to one scenario (and repeat) of different pairs, without those that are done."""
    places: dict[tuple[str, str], list[Contender]] = defaultdict(list)
    for contender in sorted(contenders, key=lambda each: (each.scenario, each.repeat, each.name, each.run_id)):
        places[contender.scenario, contender.repeat].append(contender)
    found = [MatchUp(*two) for there in places.values() for two in combinations(there, 2)]
    return [each for each in found if each.one.name != each.other.name and each.runs not in done]


def choose_match_ups(found: Sequence[MatchUp], leader: Name, limit: int | None, rng: random.Random) -> list[MatchUp]:
    """At most `limit` of them: whole scenarios first, in random order, the leader's before others.

    Where not even two whole scenarios fit, the leader's come first in every scenario: one scenario has no error bar.
    """
    scenarios = sorted({each.scenario for each in found})
    rng.shuffle(scenarios)
    place = {scenario: at for at, scenario in enumerate(scenarios)}
    whole = sum(place[each.scenario] < 2 for each in found)
    few = limit is not None and limit < whole

    def order(each: MatchUp) -> tuple[int, int]:
        turn, behind = place[each.scenario], int(not each.has(leader))
        return (behind, turn) if few else (turn, behind)

    return sorted(found, key=order)[:limit]


def in_both_orders(chosen: Sequence[MatchUp], rng: random.Random) -> list[tuple[Contender, Contender]]:
    """Each match-up twice with its sides exchanged, at least three quarters of all match-ups apart."""
    order = list(chosen)
    rng.shuffle(order)
    first = [(each.one, each.other) if rng.random() < 0.5 else (each.other, each.one) for each in order]
    block = max(1, len(order) // 4)
    second: list[tuple[Contender, Contender]] = []
    for start in range(0, len(first), block):
        part = [(b, a) for a, b in first[start : start + block]]
        rng.shuffle(part)
        second += part
    return first + second
