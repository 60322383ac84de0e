"""Apply with concurrent changes: other sheets and machines, deleted runs, blank files, acceptances."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.judging import SeededStore, SheetDriver, always, fill, items_of, record_cells
from tipbench.errors import MlflowError
from tipbench.judge.apply import SheetApplier
from tipbench.judge.scores import NO_SCORES, SCORES, scores_text
from tipbench.judge.sheet import sheet_json
from tipbench.judge.sheet_store import FILLED, ItemKind, SheetStatus, StoredSheet, find_sheet
from tipbench.record.run import RunChange

CELLS = 24


class BusyStore(SeededStore):
    """Calls a function right before one change of a run, as another machine might."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[str], None] | None = None

    def update(self, run_id: str, change: RunChange) -> None:
        """As `SeededStore.update`, after the change of the other machine."""
        other, self.meanwhile = self.meanwhile, None
        if other is not None:
            other(run_id)
        super().update(run_id, change)


@pytest.fixture
def store() -> BusyStore:
    return BusyStore()


@pytest.fixture
def driver(store: BusyStore) -> SheetDriver:
    return SheetDriver(store, record_cells(store, models=("alpha:135m",)))


def states(driver: SheetDriver) -> Counter[str | None]:
    return Counter(run.state for run in driver.cells().values())


def blank(judging: StoredSheet) -> dict[str, Any]:
    return dict(json.loads(json.dumps(sheet_json(judging.sheet))))


def read(driver: SheetDriver, judging: StoredSheet) -> StoredSheet:
    found = find_sheet(driver.store, driver.experiment, judging.sheet.id)
    assert found is not None
    return found


# Other sheets of the same judge


def test_a_held_sheet_does_not_change_scores_of_another(driver: SheetDriver) -> None:
    one, two = (driver.export("anna").stored for _ in range(2))
    driver.apply(fill(one))
    before = {run_id: run.metrics["composite"] for run_id, run in driver.cells().items()}
    assert driver.apply(fill(two, always(3))).held
    assert states(driver) == {"judged": CELLS}
    assert {run.tags["held"] for run in driver.cells().values()} == {"true"}
    assert {run_id: run.metrics["composite"] for run_id, run in driver.cells().items()} == before
    driver.apply(fill(two, always(3)), accept="agreed")
    assert {run.metrics["composite"] for run in driver.cells().values()} == {11.0}
    assert {run.tags["held"] for run in driver.cells().values()} == {"false"}


def test_a_sheet_held_counted_and_held_again_equals_one_held_from_the_start(driver: SheetDriver) -> None:
    one, two = (driver.export("anna").stored for _ in range(2))
    driver.apply(fill(one))
    before = {run_id: (run.state, run.metrics["composite"]) for run_id, run in driver.cells().items()}
    for rule, accept in ((always(3), None), (always(3), "yes"), (always(1), None)):
        driver.apply(fill(two, rule), accept=accept)
    assert {run_id: (run.state, run.metrics["composite"]) for run_id, run in driver.cells().items()} == before


# Two machines


def test_scores_written_by_another_machine_during_an_apply_are_not_lost(driver: SheetDriver, store: BusyStore) -> None:
    """Ben's whole sheet is applied after anna's apply has read every cell and before it writes the first."""
    anna, ben = (driver.export(name, everything=True).stored for name in ("anna", "ben"))

    def meanwhile(_run_id: str) -> None:
        driver.apply(fill(ben, seed=2))

    store.meanwhile = meanwhile
    driver.apply(fill(anna))
    assert {frozenset(scores.applied) for scores in driver.scores().values()} == {frozenset(("anna", "ben"))}
    assert {run.tags["judges"] for run in driver.cells().values()} == {'["anna", "ben"]'}


def test_scores_overwritten_by_another_machine_are_written_again(driver: SheetDriver, store: BusyStore) -> None:
    """The other machine has read a cell before our change of it and writes it back afterwards."""
    judging = driver.export("anna").stored
    first, second, *_ = items_of(fill(judging), judging)
    undone: list[str] = []

    def meanwhile(run_id: str) -> None:
        store.meanwhile = meanwhile
        if run_id == second and not undone:
            undone.append(first)
            texts = {SCORES: scores_text(NO_SCORES)}
            SeededStore.update(store, first, RunChange(texts=texts, at_ms=1))

    store.meanwhile = meanwhile
    driver.apply(fill(judging))
    assert undone == [first]
    assert all("anna" in scores.applied for scores in driver.scores().values())


# Deleted runs


class ForgetfulStore(SeededStore):
    """Shows deleted runs and rejects changes of them, as MLflow does."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: set[str] = set()

    def update(self, run_id: str, change: RunChange) -> None:
        """As `SeededStore.update`, unless deleted."""
        if run_id in self.deleted:
            raise MlflowError(f"The run {run_id} must be in the 'active' state. Current state is deleted.")
        super().update(run_id, change)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_deleted_answer_is_skipped_and_reported_and_the_rest_is_applied(forgotten: bool) -> None:
    store = ForgetfulStore()
    driver = SheetDriver(store, record_cells(store, models=("alpha:135m",)))
    judging = driver.export("anna").stored
    gone = next(entry.run_id for entry in judging.entries if entry.kind is ItemKind.CELL and entry.run_id)
    if forgotten:
        del store._runs[gone]
    else:
        store.deleted.add(gone)
    applied = driver.apply(fill(judging))
    assert (applied.status, applied.n_deleted, applied.to_json()["deleted"]) == ("applied", 1, 1)
    assert "1 answer was deleted in MLflow; its scores are kept with the sheet" in applied.sentences()
    assert {run.state for run_id, run in driver.cells().items() if run_id != gone} == {"judged"}
    assert len(read(driver, judging).scores) == len(judging.entries)


def test_a_repeated_answer_that_was_deleted_is_left_out_of_the_judges_consistency() -> None:
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store, models=("alpha:135m",)))
    driver.judged_by("anna")
    record_cells(store, models=("gamma:3b",))
    judging = driver.export("anna").stored
    gone, other = (entry.run_id for entry in judging.entries if entry.kind is ItemKind.REPEAT)
    assert gone
    assert other
    del store._runs[gone]
    applied = driver.apply(fill(judging))
    assert applied.self_agreement is not None
    assert applied.self_agreement.n == 3, "the tips of the answer that was not deleted"


def test_a_repeated_tip_that_lost_a_score_is_left_out_of_the_judges_consistency(driver: SheetDriver) -> None:
    driver.judged_by("anna")
    record_cells(driver.store, models=("gamma:3b",))
    judging = driver.export("anna").stored
    repeat = next(entry.run_id for entry in judging.entries if entry.kind is ItemKind.REPEAT)
    assert repeat
    driver.remove_score(repeat, "anna", "tone")
    applied = driver.apply(fill(judging))
    assert applied.self_agreement is not None
    assert applied.self_agreement.n == 5, "of 6 repeated tips"


# Nothing finished, blank items


def test_an_empty_sheet_writes_nothing_and_has_no_owner(driver: SheetDriver) -> None:
    judging = driver.export(None).stored
    before, revision = driver.everything(), driver.store.experiments()[0].tags
    assert driver.apply(blank(judging), judge="anan").n_finished == 0
    assert driver.everything() == before
    assert driver.store.experiments()[0].tags == revision
    assert driver.apply(fill(judging), judge="anna").judge == "anna"


def test_blank_items_with_counted_scores_are_reported(driver: SheetDriver) -> None:
    judging = driver.export().stored
    raw = fill(judging)
    driver.apply(raw)
    for item in raw["items"][:3]:
        for tip in item["tips"]:
            tip["scores"] = dict.fromkeys(tip["scores"])
    applied = driver.apply(raw)
    assert (applied.n_blank, applied.n_unfinished, applied.changes) == (3, 0, ())
    assert "3 items are blank in the file; their earlier scores are kept" in applied.sentences()


# What an acceptance is for


def test_an_acceptance_survives_a_new_note_and_other_scores(driver: SheetDriver) -> None:
    judging = driver.export().stored
    raw = fill(judging, always(3))
    driver.apply(raw, accept="team agreed")
    raw["items"][0]["tips"][0]["note"] = "a typo mended"
    applied = driver.apply(raw)
    assert (applied.status, applied.accepted) == (SheetStatus.APPLIED, "team agreed")
    other = copy.deepcopy(raw)
    other["items"][0]["format_ok"] = not other["items"][0]["format_ok"]
    assert driver.apply(other).held, "a flag is part of what was accepted"
    assert (read(driver, judging).acceptance, read(driver, judging).accepted) == ("team agreed", None)
    assert driver.apply(raw).accepted == "team agreed", "these exact scores were accepted before"
    assert states(driver) == {"judged": CELLS}


def test_replaced_scores_stay_with_the_sheet(driver: SheetDriver) -> None:
    judging = driver.export().stored
    raw = fill(judging)
    driver.apply(raw)
    item = raw["items"][5]
    former = copy.deepcopy(item)
    item["tips"][0]["scores"]["tone"] = 1 + item["tips"][0]["scores"]["tone"] % 5
    driver.apply(raw)
    item["tips"][0]["note"] = "why"
    driver.apply(raw)
    _, texts = driver.store.get(judging.run_id)
    kept = json.loads(texts[FILLED])
    assert kept["items"].keys() == {each["item"] for each in raw["items"]}
    assert [each["item"] for each in kept["history"]] == [item["item"]] * 2
    assert [tip["scores"] for tip in kept["history"][0]["tips"]] == [tip["scores"] for tip in former["tips"]]
    assert all(each["at"] for each in kept["history"])
    assert read(driver, judging).replaced[0].score.item == item["item"]


# Progress


def test_progress_counts_hidden_items_like_all_others(driver: SheetDriver) -> None:
    judging = driver.export("anna").stored
    seen: list[tuple[int, int]] = []
    applier = SheetApplier.for_file(driver.store, fill(judging))
    applier.run(progress=lambda done, of: seen.append((done, of)))
    total = len(judging.entries)
    assert total > CELLS
    assert seen == [(done, total) for done in range(1, total + 1)]


# Small sheets


def small_drivers(count: int) -> list[SheetDriver]:
    """Experiments whose sheets have six control tips each."""
    store = SeededStore()
    return [
        SheetDriver(
            store, record_cells(store, models=("alpha:135m",), experiment=f"tip-bench-{n}", n_scenarios=2, seed=n)
        )
        for n in range(count)
    ]


def test_small_sheets_of_a_judge_are_pooled_and_only_the_newest_is_held() -> None:
    drivers = small_drivers(4)
    applied = [driver.judged_by("anna", always(5), seed=n) for n, driver in enumerate(drivers)]
    drifts = [result.drift for result in applied if result.drift]
    assert [str(result.status) for result in applied] == ["applied", "applied", "applied", "held"]
    assert [str(drift.verdict) for drift in drifts] == ["unknown", "unknown", "unknown", "beyond the limit"]
    assert (drifts[-1].sheets, drifts[-1].n_controls) == (4, 24)


def test_small_sheets_of_other_judges_and_held_ones_are_not_pooled() -> None:
    drivers = small_drivers(5)
    for driver in drivers[:3]:
        driver.judged_by("anna", always(5))
    careful = drivers[3].judged_by("ben").drift
    assert careful is not None
    assert (careful.sheets, str(careful.verdict)) == (1, "unknown")
    assert drivers[3].judged_by("anna", always(5), everything=True).held
    after = drivers[4].judged_by("anna").drift
    assert after is not None
    assert after.sheets == 4  # three counted ones and its own, without the held one
