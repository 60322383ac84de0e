"""An attacker with a judge's token tries to find the controls, and does no better than chance.

The attacker sees every response and, in place of the time it takes, the number of reads and writes in MLflow, which is
more than a clock could tell. For each strategy the items with the most unusual observation are guessed, ties at random.

Bound: over all worlds the hits of a strategy stay within three standard deviations of those of blind guessing. Two
judges who lay their sheets side by side are out of scope: see docs/judging.md, what controls cannot prove.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import pytest

from support.judging import Desk, SeededStore, always, fill, honest, record_cells
from tipbench.errors import SheetsClosed
from tipbench.judge.duels import DuelRequest, export_duels
from tipbench.judge.sheet_store import ItemKind, StoredSheet
from tipbench.web.auth import Identity, Role
from tipbench.web.errors import Forbidden
from tipbench.web.judge_service import ApplyOptions, apply_sheet

WORLDS = 4
VARYING = ("applied", "held", "unfinished", "unchecked", "changed", "blank", "changes")  # the attacker's own doing
JUDGE = Identity("anna", Role.JUDGE, "token")


class CountingStore(SeededStore):
    """Counts the calls, as a clock would feel them."""

    calls: Counter[str]

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "update", "read", "search", "record"):
            object.__getattribute__(self, "__dict__").setdefault("calls", Counter())[name] += 1
        return object.__getattribute__(self, name)


class Attacker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = CountingStore()
        self.desk = Desk(self.store, record_cells(self.store, seed=seed, models=("alpha:135m",)))
        self.sheet: StoredSheet = self.desk.export("anna", seed=seed).stored
        self.items = [item.id for item in self.sheet.sheet.items]
        self.requests = 0

    def send(self, raw: Mapping[str, Any], *, dry_run: bool = False, final: bool = False) -> str:
        """Returns everything that is observed of a request, except what follows from the file alone."""
        self.requests += 1
        self.store.calls.clear()
        options = ApplyOptions(JUDGE, "anna", dry_run=dry_run, final=final)
        try:
            result = apply_sheet(self.store, self.desk.experiment.name, raw, options)
        except Forbidden as exc:
            return str(exc.code)
        seen = {key: value for key, value in result.items() if key not in VARYING}
        return f"{sorted(self.store.calls.items())} {seen}"

    def hits(self, suspicion: Mapping[str, float]) -> int:
        controls = {entry.item.id for entry in self.sheet.entries if entry.kind is ItemKind.CONTROL}
        ranked = sorted(self.items, key=lambda item: (-suspicion.get(item, 0.0), self.rng.random()))
        return len(controls & set(ranked[: len(controls)]))


def unusual(observed: Mapping[str, str]) -> dict[str, float]:
    """Rare observations are suspicious."""
    count = Counter(observed.values())
    return {item: -count[seen] for item, seen in observed.items()}


def by_previews(attacker: Attacker) -> dict[str, float]:
    raw = fill(attacker.sheet, honest)
    return unusual({item["item"]: attacker.send({**raw, "items": [item]}, dry_run=True) for item in raw["items"]})


def by_partial_fills(attacker: Attacker) -> dict[str, float]:
    """Each item alone on top of one finished item, with other scores each time: what moves when it is a control?"""
    raw = fill(attacker.sheet, honest)
    attacker.send({**raw, "items": raw["items"][:1]})
    observed = {}
    done = raw["items"][:1]
    for number, item in enumerate(raw["items"][1:], start=1):
        done = [*done, item]
        seen = attacker.send({**raw, "items": done})
        observed[item["item"]] = seen.replace(f"('get', {number + 3})", "('get', as many as items)")
    return unusual(observed)


def by_revisions(attacker: Attacker) -> dict[str, float]:
    raw, extreme = fill(attacker.sheet, honest), fill(attacker.sheet, always(5))
    attacker.send(raw, final=True)
    before = attacker.send(raw)
    observed = {}
    for at, item in enumerate(extreme["items"]):
        changed = {**raw, "items": [*raw["items"][:at], item, *raw["items"][at + 1 :]]}
        seen = attacker.send(changed)
        observed[item["item"]] = seen if seen != before else "same"
        if seen == "too_many_revisions":
            break
    return {item: float("held" in seen) for item, seen in observed.items()}


def by_duels(attacker: Attacker) -> dict[str, float]:
    runs = {run_id: (run.params["model"], "v1") for run_id, run in attacker.desk.cells().items()}
    attacker.requests += 1
    with pytest.raises(SheetsClosed):
        export_duels(attacker.store, attacker.desk.experiment, DuelRequest(runs, "any", "anna"))
    return {}


@pytest.mark.parametrize("strategy", [by_previews, by_partial_fills, by_revisions, by_duels])
def test_controls_are_found_no_better_than_by_chance(strategy: Callable[[Attacker], dict[str, float]]) -> None:
    hits, mean, variance, requests = 0, 0.0, 0.0, 0
    for seed in range(WORLDS):
        attacker = Attacker(seed)
        hits += attacker.hits(strategy(attacker))
        n = len(attacker.items)
        k = sum(entry.kind is ItemKind.CONTROL for entry in attacker.sheet.entries)
        mean += k * k / n
        variance += k * (k / n) * (1 - k / n) * (n - k) / (n - 1)
        requests += attacker.requests
    assert requests <= 2000
    assert hits <= mean + 3 * sqrt(variance), f"{hits} hits, {mean:.1f} by chance"


def test_such_an_attacker_finds_the_controls_where_they_show() -> None:
    """Else finding nothing would prove nothing."""
    attacker = Attacker(1)
    kinds = {entry.item.id: str(entry.kind) for entry in attacker.sheet.entries}
    controls = sum(kind == "control" for kind in kinds.values())
    assert attacker.hits(unusual(kinds)) == controls
