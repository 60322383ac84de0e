"""An attacker with a judge's token tries to find the controls, and does no better than chance.

The attacker sees every response and, in place of the time it takes, the number of reads and writes in MLflow and their
size, which is more than a clock could show. A second account lets the attacker compare the sheets of two judges, or
change what MLflow stores of an answer; duplicates are answers that a second home has recorded again. For each strategy,
the items with the most suspicious observation are guessed, ties at random.

Bound: over all worlds the hits of a strategy stay within three standard deviations of those of blind guessing.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from statistics import fmean, median
from typing import Any

import pytest

from support.judging import SeededStore, SheetDriver, always, fill, honest, record_cells
from tipbench.errors import SheetsClosed
from tipbench.judge.check import MAX_NOTE
from tipbench.judge.duels import DuelRequest, export_duels
from tipbench.judge.export import ExportRequest
from tipbench.judge.sheet import TipItem
from tipbench.judge.sheet_store import ItemKind, StoredSheet, stored_sheets
from tipbench.record.run import RunChange, StoredRun
from tipbench.web.auth import Identity, Role
from tipbench.web.errors import Forbidden
from tipbench.web.judge_service import ApplyOptions, apply_sheet, get_or_export_sheet
from tipbench.workflows.judging import SheetRequest

pytestmark = pytest.mark.simulation
WORLDS = 6
# These fields of a result follow from the attacker's own file.
CHOSEN_BY_ATTACKER = ("applied", "held", "unfinished", "unchecked", "changed", "blank", "changes")
MODELS = ("alpha:135m", "beta:1b")
TIMER_RESOLUTION = 0.05  # smaller differences in reads and writes are far below the variation of an apply's time


class CountingStore(SeededStore):
    """Counts the calls, the values they write and the characters of their texts, in place of their duration."""

    calls: Counter[str]
    size = 0

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        run, found = super().get(run_id)
        self.size += sum(map(len, found.values()))
        return run, found

    def update(self, run_id: str, change: RunChange) -> None:
        before = super().get(run_id)[1]  # MLflow's client reads a run before it changes it
        self.size += sum(map(len, [*before.values(), *change.texts.values()]))
        self.calls.update(tags=len(change.tags), metrics=len(change.metrics), texts=len(change.texts))
        super().update(run_id, change)

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "update", "read", "search", "record"):
            object.__getattribute__(self, "__dict__").setdefault("calls", Counter())[name] += 1
        return object.__getattribute__(self, name)


class Attacker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = CountingStore()
        self.seed = seed
        self.driver = SheetDriver(self.store, record_cells(self.store, seed=seed, models=MODELS))
        self.sheets: list[StoredSheet] = []  # whose items are guessed
        self.requests = 0
        self.sheet = self.export("anna")

    def export(self, judge: str, *, everything: bool = False, limit: int | None = None) -> StoredSheet:
        """Returns a sheet as a judge's token gets it, apart from the seed."""
        self.requests += 1
        request = ExportRequest(judge=judge, everything=everything, limit=limit, seed=self.rng.getrandbits(32))
        self.sheets.append(
            get_or_export_sheet(self.store, self.driver.experiment.name, SheetRequest(request, by_judge=True))
        )
        return self.sheets[-1]

    def reload_sheet(self, sheet: StoredSheet) -> StoredSheet:
        """Returns the sheet as it is stored now."""
        where = self.driver.experiment
        return next(each for each in stored_sheets(self.store, where) if each.sheet.id == sheet.sheet.id)

    def fill_half(self, share: float = 0.5) -> None:
        """Scores the first part of the first sheet, and leaves the rest open."""
        raw = fill(self.sheet, honest)
        self.send({**raw, "items": raw["items"][: round(share * len(raw["items"]))]})

    def send_alone(self, raw: Mapping[str, Any], item: Any, *, final: bool = False) -> tuple[str, int]:
        """Sends one item of a sheet, undone afterwards, and returns what is observed and the size of all texts.

        Thus every item can be the first one; without the undo each would need its own sheet.
        """
        before = CountingStore()
        before.copy_from(self.store)
        self.store.size = 0
        seen = self.send({**raw, "items": [item]}, final=final)
        self.store.copy_from(before)
        return seen, self.store.size

    def send(self, raw: Mapping[str, Any], *, dry_run: bool = False, final: bool = False, judge: str = "anna") -> str:
        """Returns everything that is observed of a request, except what follows from the file alone."""
        self.requests += 1
        self.store.calls.clear()
        options = ApplyOptions(Identity(judge, Role.JUDGE, "token"), judge, dry_run=dry_run, final=final)
        try:
            result = apply_sheet(self.store, self.driver.experiment.name, raw, options)
        except Forbidden as exc:
            return str(exc.code)
        seen = {key: value for key, value in result.items() if key not in CHOSEN_BY_ATTACKER}
        return f"{sorted(self.store.calls.items())} {seen}"

    def count_hits(self, suspicion: Mapping[str, float]) -> tuple[int, float, float]:
        """Returns the controls found on the suspected sheets, and mean and variance when guessing blindly there."""
        found, mean, variance = 0, 0.0, 0.0
        for sheet in self.sheets:
            items = [entry.item.id for entry in sheet.entries]
            if suspicion and suspicion.keys().isdisjoint(items):
                continue
            controls = {entry.item.id for entry in sheet.entries if entry.kind is ItemKind.CONTROL}
            ranked = sorted(items, key=lambda item: (-suspicion.get(item, 0.0), self.rng.random()))
            n, k = len(items), len(controls)
            found += len(controls & set(ranked[:k]))
            mean += k * k / n
            variance += k * (k / n) * (1 - k / n) * (n - k) / (n - 1)
        return found, mean, variance


def rarity(observed: Mapping[str, str]) -> dict[str, float]:
    """Return how rare each observation is; rare ones are suspicious."""
    count = Counter(observed.values())
    return {item: -count[seen] for item, seen in observed.items()}


def by_previews(attacker: Attacker) -> dict[str, float]:
    raw = fill(attacker.sheet, honest)
    return rarity({item["item"]: attacker.send({**raw, "items": [item]}, dry_run=True) for item in raw["items"]})


def by_partial_fills(attacker: Attacker) -> dict[str, float]:
    """Each item alone on top of one finished item, with other scores each time: what changes for a control?"""
    raw = fill(attacker.sheet, honest)
    attacker.send({**raw, "items": raw["items"][:1]})
    observed = {}
    done = raw["items"][:1]
    for number, item in enumerate(raw["items"][1:], start=1):
        done = [*done, item]
        seen = attacker.send({**raw, "items": done})
        observed[item["item"]] = seen.replace(f"('get', {number + 4})", "('get', as many as items)")
    return rarity(observed)


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


def by_pooled_numbers(attacker: Attacker) -> dict[str, float]:
    """Finishes further sheets with a single item, to be pooled with the first one: what changes for a control?"""
    attacker.send(fill(attacker.sheet, honest), final=True)
    record_cells(attacker.store, seed=attacker.seed, models=("gamma:2b",))
    raw = fill(attacker.export("anna"), always(5))
    return rarity({item["item"]: attacker.send_alone(raw, item, final=True)[0] for item in raw["items"]})


def by_long_notes_of_an_accomplice(attacker: Attacker) -> dict[str, float]:
    """Ben, who has the same answers, makes them larger with notes, revised often: what stays small for a control?"""
    raw = fill(attacker.export("ben"), honest)
    raw["items"] = raw["items"][:-1]  # no verdict yet
    for number in range(3):
        for tip in (tip for item in raw["items"] for tip in item["tips"]):
            tip["note"] = str(number) * MAX_NOTE
        attacker.send(raw, judge="ben")
    raw = fill(attacker.sheet, honest)
    sizes = {item["item"]: attacker.send_alone(raw, item)[1] for item in raw["items"]}
    usual = median(sizes.values())
    return {item: max(0.0, (1 - TIMER_RESOLUTION) * usual - size) for item, size in sizes.items()}


def by_scores_of_an_accomplice(attacker: Attacker) -> dict[str, float]:
    """Ben gives all answers the scores that anna gives later: what is written again for a control?"""
    raw = fill(attacker.export("ben"), always(3))
    attacker.send({**raw, "items": raw["items"][:-1]}, judge="ben")
    raw = fill(attacker.sheet, always(3))
    return rarity({item["item"]: attacker.send_alone(raw, item)[0] for item in raw["items"]})


def by_duels(attacker: Attacker) -> dict[str, float]:
    runs = {run_id: (run.params["model"], "v1") for run_id, run in attacker.driver.cells().items()}
    attacker.requests += 1
    with pytest.raises(SheetsClosed):
        export_duels(attacker.store, attacker.driver.experiment, DuelRequest(runs, "any", "anna"))
    return {}


def texts(item: TipItem) -> tuple[str, ...]:
    return tuple(tip.tip for tip in item.tips)


def by_absence(attacker: Attacker) -> dict[str, float]:
    """Suspect what is only on some of the sheets."""
    seen = Counter(texts(item) for sheet in attacker.sheets for item in sheet.sheet.items)
    return {item.id: -seen[texts(item)] for sheet in attacker.sheets for item in sheet.sheet.items}


def by_presence(attacker: Attacker) -> dict[str, float]:
    """Suspect what is on several of the sheets."""
    return {item: -suspicion for item, suspicion in by_absence(attacker).items()}


def _by_items_on_the_next_sheet(attacker: Attacker, *, scored: bool) -> dict[str, float]:
    """Suspect the items that the judge has scored, or left open, on the first sheet and that come again."""
    scored_items, suspicion = attacker.reload_sheet(attacker.sheet).scores, by_presence(attacker)
    own = (entry.item.id for entry in attacker.sheet.entries)
    return {item: suspicion[item] - 1 for item in own if (item in scored_items) is scored}


def by_scored_items_that_come_again(attacker: Attacker) -> dict[str, float]:
    return _by_items_on_the_next_sheet(attacker, scored=True)


def by_open_items_that_come_again(attacker: Attacker) -> dict[str, float]:
    return _by_items_on_the_next_sheet(attacker, scored=False)


def by_open_items_that_do_not_come_again(attacker: Attacker) -> dict[str, float]:
    return {item: 1 - again for item, again in by_open_items_that_come_again(attacker).items()}


def by_recurring_tips(attacker: Attacker) -> dict[str, float]:
    """Suspect tips that are in several different answers."""
    answers = {texts(item) for sheet in attacker.sheets for item in sheet.sheet.items}
    count = Counter(tip for answer in answers for tip in answer)
    return {item.id: max(count[tip] for tip in texts(item)) for s in attacker.sheets for item in s.sheet.items}


def second_account_at_once(attacker: Attacker) -> None:
    """Both judges have the same open answers."""
    attacker.export("ben")


def second_account_with_part_of_it(attacker: Attacker) -> None:
    attacker.export("ben", limit=20)
    attacker.export("cleo", limit=30)


def second_account_afterwards(attacker: Attacker) -> None:
    """The second judge gets a fifth of what the first has scored, and what a new collect has added."""
    attacker.send(fill(attacker.sheet, honest), final=True)
    record_cells(attacker.store, seed=attacker.seed, models=("gamma:2b",))
    attacker.export("ben")


def second_account_with_everything(attacker: Attacker) -> None:
    attacker.send(fill(attacker.sheet, honest), final=True)
    record_cells(attacker.store, seed=attacker.seed, models=("gamma:2b",))
    attacker.export("ben", everything=True)


def second_sheet(attacker: Attacker) -> None:
    """The judge's own next sheet, with some earlier answers on it."""
    attacker.send(fill(attacker.sheet, honest), final=True)
    record_cells(attacker.store, seed=attacker.seed, models=("gamma:2b",))
    attacker.export("anna")


def second_account_after_half(attacker: Attacker) -> None:
    """The second judge gets what the first has left open, and a part of what the first has scored."""
    attacker.fill_half()
    attacker.export("ben")


def second_sheet_after_half(attacker: Attacker) -> None:
    """The judge's own next sheet never has what was left open on the first."""
    attacker.fill_half(0.6)
    record_cells(attacker.store, seed=attacker.seed, models=("gamma:2b",))
    attacker.export("anna")


def duplicates_before(attacker: Attacker) -> None:
    """A second home has recorded every answer again: on the second sheet, some would be there twice."""
    record_cells(attacker.store, seed=attacker.seed, models=MODELS, start_ms=2_000)
    attacker.export("ben")


def duplicates_afterwards(attacker: Attacker) -> None:
    """After the first sheet is scored a second home records the same answers again, and some more."""
    attacker.send(fill(attacker.sheet, honest), final=True)
    record_cells(attacker.store, seed=attacker.seed, models=(*MODELS, "gamma:2b"), start_ms=2_000)
    attacker.export("anna", everything=True)


PREPARATIONS = (
    second_account_at_once,
    second_account_with_part_of_it,
    second_account_afterwards,
    second_account_with_everything,
    second_account_after_half,
    second_sheet,
    second_sheet_after_half,
    duplicates_before,
    duplicates_afterwards,
)


COMPARISONS = (
    by_absence,
    by_presence,
    by_recurring_tips,
    by_scored_items_that_come_again,
    by_open_items_that_come_again,
    by_open_items_that_do_not_come_again,
)


def check_bound(attackers: Sequence[Attacker], strategy: Callable[[Attacker], dict[str, float]]) -> None:
    parts = [attacker.count_hits(strategy(attacker)) for attacker in attackers]
    hits, mean, variance = map(sum, zip(*parts, strict=True))
    assert sum(attacker.requests for attacker in attackers) <= 2000
    assert hits <= mean + 3 * sqrt(variance), f"{strategy.__name__}: {hits} hits, {mean:.1f} by chance"


@pytest.mark.parametrize(
    "strategy",
    [
        by_previews,
        by_partial_fills,
        by_pooled_numbers,
        by_revisions,
        by_duels,
        by_long_notes_of_an_accomplice,
        by_scores_of_an_accomplice,
    ],
)
def test_one_account_finds_controls_no_better_than_by_chance(
    strategy: Callable[[Attacker], dict[str, float]],
) -> None:
    check_bound([Attacker(seed) for seed in range(WORLDS)], strategy)


@pytest.mark.parametrize("prepare", PREPARATIONS)
def test_several_sheets_compared_reveal_controls_no_better_than_chance(prepare: Callable[[Attacker], None]) -> None:
    attackers = [Attacker(seed) for seed in range(WORLDS)]
    for attacker in attackers:
        prepare(attacker)
    for strategy in COMPARISONS:
        check_bound(attackers, strategy)


def test_long_notes_do_not_make_a_change_of_a_control_slower_than_of_an_answer() -> None:
    """Notes on all items enlarge what is stored with the sheet, but nothing that depends on the kind of an item."""
    attacker = Attacker(1)
    raw = fill(attacker.sheet, honest)
    for item in raw["items"]:
        for tip in item["tips"]:
            tip["note"] = "n" * MAX_NOTE
    raw["items"] = raw["items"][:-1]  # no verdict yet
    attacker.send(raw)
    kinds = {entry.item.id: entry.kind for entry in attacker.sheet.entries}
    sizes: dict[ItemKind, list[int]] = defaultdict(list)
    for item in raw["items"]:
        scores = item["tips"][0]["scores"]
        scores["tone"] = scores["tone"] % 5 + 1
        attacker.store.size = 0
        attacker.send(raw)
        sizes[kinds[item["item"]]].append(attacker.store.size)
    assert fmean(sizes[ItemKind.CONTROL]) == pytest.approx(fmean(sizes[ItemKind.CELL]), rel=0.1)


def test_the_attacker_finds_controls_that_are_visible() -> None:
    """Shows that the attacker's strategies can find controls."""
    attacker = Attacker(1)
    kinds = {entry.item.id: str(entry.kind) for entry in attacker.sheet.entries}
    controls = sum(kind == "control" for kind in kinds.values())
    assert attacker.count_hits(rarity(kinds))[0] == controls
