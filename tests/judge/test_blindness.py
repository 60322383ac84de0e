"""Blindness: apart from the tips' own text, a sheet reveals neither the model of an item nor which is a control.

A nearest-centroid classifier learns on one half of many sheets and guesses on the other. Every test shows first that
the classifier sees a leak when there is one.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import sqrt
from statistics import median
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from support.judging import SeededStore, SheetDriver, always, fill, honest, record_cells
from tipbench.cli.judge import show_applied
from tipbench.errors import MlflowError
from tipbench.generate.parsing import Tip
from tipbench.judge.apply import SheetApplier
from tipbench.judge.check import MAX_NOTE, check_sheet
from tipbench.judge.controls import JudgeHistory, compose
from tipbench.judge.drift import MIN_CONTROLS
from tipbench.judge.export import ExportRequest, choose_cells
from tipbench.judge.material import EligibleCell
from tipbench.judge.sheet import Sheet, TipSheet, sheet_json, sheet_text
from tipbench.judge.sheet_store import ItemKind, SheetEntry, StoredSheet, control_id, stored_sheets
from tipbench.plan.rubric import Control
from tipbench.plan.suite import load_suite
from tipbench.record.run import RunChange, StoredRun
from tipbench.record.store import RunStore
from tipbench.text import fingerprint

SUITE = load_suite("tips")
CARDS = {scenario.id: scenario.to_card() for scenario in SUITE.scenarios}
MODELS = ("zebrafish-one:1b", "quokka-two:3b", "axolotl-three:2b", "pangolin-four:4b")
PROMPTS = ("v1-marmalade", "v2-trombone", "v3-rhubarb")
WORDS = ("open", "the list", "write", "one line", "stop", "after", "ten minutes", "call Petra", "put", "kettle", "away")
SHEETS = 60


def candidates(rng: random.Random) -> list[EligibleCell]:
    """96 answers of four models; their text and format come from one distribution."""
    return [
        _answer(f"{model}/{prompt}/{scenario}", scenario, rng)
        for model in MODELS
        for prompt in PROMPTS
        for scenario in CARDS
    ]


def _answer(run_id: str, scenario: str, rng: random.Random) -> EligibleCell:
    size = rng.choices([5, 4, 3, 2], [8, 1, 2, 1])[0]
    reasons = rng.random() < 0.8
    tips = tuple(Tip(" ".join(rng.choices(WORDS, k=9)), "It helps." if reasons else "") for _ in range(size))
    return EligibleCell(run_id, scenario, tips, size == 5 and reasons and rng.random() < 0.9, frozenset())


def controls(per_scenario: int = 12) -> list[Control]:
    rng = random.Random(5)
    return [
        Control(scenario, f"{number} {' '.join(rng.choices(WORDS, k=8))}", "It helps.", _scores(rng), "agreed")
        for scenario in CARDS
        for number in range(per_scenario)
    ]


def _scores(rng: random.Random) -> Mapping[str, int]:
    return {name: rng.randint(1, 5) for name in SUITE.rubric.scale_names}


@cache
def make_entries(seed: int, given: tuple[EligibleCell, ...] | None = None) -> tuple[SheetEntry, ...]:
    rng = random.Random(seed)
    given = given or tuple(candidates(random.Random(seed + 1000)))
    chosen = choose_cells(given, ExportRequest("ann"), set(CARDS), rng)
    earlier = [replace(cell, run_id=f"earlier/{cell.run_id}") for cell in candidates(random.Random(seed + 2000))[::5]]
    return compose(
        chosen,
        CARDS,
        controls(),
        SUITE.rubric,
        JudgeHistory(scored=earlier),
        sheet_id=fingerprint(seed, 12),
        rng=rng,
    )


def as_sheet(entries: Sequence[SheetEntry], seed: int = 0) -> TipSheet:
    items = tuple(entry.item for entry in entries)
    return Sheet(fingerprint(seed, 12), "tip-bench-blind", "ann", SUITE.rubric, items, "")


def features(sheet: TipSheet) -> npt.NDArray[np.float64]:
    """One row per item, with everything that the file shows of it except the words of its tips."""
    items = sheet_json(sheet)["items"]
    return np.array([[at / len(items), *item_features(item)] for at, item in enumerate(items)])


def item_features(item: Mapping[str, Any]) -> list[float]:
    name, digest = item["item"], item["sha256"]
    reasons = [bool(tip["rationale"]) for tip in item["tips"]]
    return [
        *(int(name, 16) / 16 ** len(name), len(name), int(name[0], 16), int(name[-1], 16), int(name, 16) % 7),
        *(int(digest[:12], 16) / 16**12, int(digest[0], 16), int(digest[-1], 16)),
        *(len(item), item["format_ok"], len(reasons), any(reasons), all(reasons), sum(reasons)),
    ]


LabelledItems = tuple[npt.NDArray[np.float64], list[str]]


def classify(sheets: Sequence[LabelledItems]) -> tuple[int, int]:
    """Right guesses and all guesses on the second half of the sheets by the class centres of the first half."""
    half = len(sheets) // 2
    seen = np.concatenate([rows for rows, _ in sheets[:half]])
    labels = np.array([label for _, given in sheets[:half] for label in given])
    middle, spread = seen.mean(axis=0), seen.std(axis=0) + 1e-9
    classes = sorted(set(labels))
    centres = np.array([((seen[labels == label] - middle) / spread).mean(axis=0) for label in classes])
    right = total = 0
    for rows, given in sheets[half:]:
        scaled = (rows - middle) / spread
        distances = ((scaled[:, None, :] - centres[None]) ** 2).sum(axis=2)
        right += sum(classes[guess] == label for guess, label in zip(distances.argmin(axis=1), given, strict=True))
        total += len(given)
    return right, total


def better_than_chance(right: int, total: int, classes: int) -> bool:
    """Whether guessing is right so often less than once in a thousand times (normal bound of the binomial)."""
    chance = 1 / classes
    return right > total * chance + 3.1 * sqrt(total * chance * (1 - chance))


def label_models(entries: Sequence[SheetEntry]) -> LabelledItems:
    rows = features(as_sheet(entries))
    real = [(at, entry.run_id) for at, entry in enumerate(entries) if entry.kind is ItemKind.CELL and entry.run_id]
    return rows[[at for at, _ in real]], [run_id.split("/")[0] for _, run_id in real]


def label_kinds(entries: Sequence[SheetEntry]) -> LabelledItems:
    """The control items and as many others, drawn at random, so that chance is one half."""
    rows = features(as_sheet(entries))
    hidden = [at for at, entry in enumerate(entries) if entry.kind is ItemKind.CONTROL]
    others = [at for at, entry in enumerate(entries) if entry.kind is not ItemKind.CONTROL]
    picked = random.Random(entries[0].item.id).sample(others, len(hidden))
    return rows[hidden + picked], ["control"] * len(hidden) + ["other"] * len(picked)


def hit_rate(
    label: Callable[[Sequence[SheetEntry]], LabelledItems], leak: Callable[[Sequence[SheetEntry]], Sequence[SheetEntry]]
) -> float:
    right, total = classify([label(leak(make_entries(seed))) for seed in range(20)])
    return right / total


def test_ids_order_and_flags_do_not_reveal_the_model() -> None:
    right, total = classify([label_models(make_entries(seed)) for seed in range(SHEETS)])
    assert total == 96 * SHEETS // 2
    assert not better_than_chance(right, total, len(MODELS)), f"{right} of {total}"


def test_ids_order_and_flags_do_not_reveal_controls() -> None:
    right, total = classify([label_kinds(make_entries(seed)) for seed in range(SHEETS)])
    assert total >= 16 * SHEETS // 2
    assert not better_than_chance(right, total, 2), f"{right} of {total}"


def test_the_classifier_sees_a_model_in_the_order() -> None:
    assert hit_rate(label_models, lambda entries: sorted(entries, key=lambda entry: entry.run_id or "")) > 0.4


def test_the_classifier_sees_a_model_in_the_ids() -> None:
    def leak(entries: Sequence[SheetEntry]) -> Sequence[SheetEntry]:
        names = [fingerprint((e.run_id or "").split("/")[0], 2) + e.item.id[2:] for e in entries]
        return [replace(e, item=replace(e.item, id=name)) for e, name in zip(entries, names, strict=True)]

    assert hit_rate(label_models, leak) > 0.4


def test_the_classifier_sees_controls_that_are_always_in_the_requested_form() -> None:
    def leak(entries: Sequence[SheetEntry]) -> Sequence[SheetEntry]:
        return [replace(e, item=replace(e.item, format_ok=True)) if e.kind is ItemKind.CONTROL else e for e in entries]

    assert hit_rate(label_kinds, leak) > 0.6


def test_run_ids_with_another_name_but_the_same_order_give_the_same_bytes() -> None:
    cells = candidates(random.Random(1))
    ranks = {run_id: f"{rank:04}" for rank, run_id in enumerate(sorted(cell.run_id for cell in cells))}
    renamed = tuple(replace(cell, run_id=ranks[cell.run_id]) for cell in cells)
    assert sheet_text(as_sheet(make_entries(3, renamed))) == sheet_text(as_sheet(make_entries(3, tuple(cells))))


def test_each_model_is_anywhere_on_a_sheet_with_equal_chance() -> None:
    places = np.concatenate(
        [
            [at / len(entries) for at, e in enumerate(entries) if (e.run_id or "").startswith(MODELS[0])]
            for entries in map(make_entries, range(SHEETS))
        ]
    )
    assert abs(places.mean() - 0.5) < 3.3 * sqrt(1 / 12 / len(places))


def test_no_name_of_a_model_prompt_run_or_control_is_in_the_file() -> None:
    for seed in range(5):
        entries = make_entries(seed)
        text = sheet_text(as_sheet(entries, seed)).casefold()
        names = [*MODELS, *PROMPTS, *(model.split(":")[0] for model in MODELS), *map(control_id, controls())]
        names += [entry.run_id for entry in entries if entry.run_id]
        names += [fingerprint(name, 8) for name in names]
        assert [name for name in names if name.casefold() in text] == []


def test_the_file_does_not_show_which_items_are_controls() -> None:
    text = sheet_text(as_sheet(make_entries(0)))
    items = sheet_json(as_sheet(make_entries(0)))["items"]
    assert len({tuple(sorted(item)) for item in items}) == 1
    assert not any(f'"{word}"' in text for word in ("behind", "control", "repeat", "references", "run_id"))


# The output of apply


@cache
def filled_sheet() -> tuple[SheetDriver, StoredSheet, dict[str, Any]]:
    """A filled sheet with new answers, answers that this judge has scored before, and controls."""
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store, models=("alpha:135m",)))
    for judge in ("anna", "ben"):
        driver.judge_as(judge, everything=True)
    record_cells(store, models=("beta:1b",))
    driver.judge_as("ben", everything=True)
    judging = driver.export("anna", everything=True).stored
    assert {entry.kind for entry in judging.entries} == set(ItemKind)
    return driver, judging, fill(judging, honest)


def output_of(driver: SheetDriver, raw: dict[str, Any], capsys: pytest.CaptureFixture[str], *, dry_run: bool) -> str:
    """The whole output of an apply without the judge's own scores."""
    applied = driver.apply(raw, dry_run=dry_run)
    show_applied(replace(applied, changes=()))
    outputs = applied.to_json()
    changes, changed = outputs.pop("changes", None), outputs.pop("changed")
    assert changes is None or len(changes) == changed
    return (json.dumps(outputs) + capsys.readouterr().out).replace(applied.sheet, "the sheet")


def places_of_each_kind(judging: StoredSheet) -> list[int]:
    """The places of three items of each kind."""
    return [
        place
        for behind in ItemKind
        for place in [at for at, entry in enumerate(judging.entries) if entry.kind is behind][:3]
    ]


def single_item(raw: dict[str, Any], at: int) -> dict[str, Any]:
    return {**raw, "items": [raw["items"][at]]}


def flip_scores(raw: dict[str, Any], at: int) -> dict[str, Any]:
    other = copy.deepcopy(raw)
    for tip in other["items"][at]["tips"]:
        tip["scores"] = {name: 1 if score > 2 else 5 for name, score in tip["scores"].items()}
    return other


def test_a_single_finished_item_does_not_reveal_whether_it_is_a_control(capsys: pytest.CaptureFixture[str]) -> None:
    driver, judging, raw = filled_sheet()
    outputs = {output_of(driver, single_item(raw, at), capsys, dry_run=True) for at in places_of_each_kind(judging)}
    assert len(outputs) == 1


def test_a_real_apply_of_one_item_does_not_reveal_it_either(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = set()
    driver, judging, raw = filled_sheet()
    assert isinstance(driver.store, SeededStore)
    for behind in ItemKind:
        store = SeededStore()
        store.copy_from(driver.store)
        at = next(at for at, entry in enumerate(judging.entries) if entry.kind is behind)
        outputs.add(output_of(replace(driver, store=store), single_item(raw, at), capsys, dry_run=False))
    assert len(outputs) == 1


def test_a_changed_item_on_a_full_sheet_changes_only_the_verdict_of_a_dry_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver, judging, raw = filled_sheet()
    outputs: dict[str, set[str]] = {}
    for at in places_of_each_kind(judging):
        text = output_of(driver, flip_scores(raw, at), capsys, dry_run=True)
        outputs.setdefault(json.loads(text.splitlines()[0].partition("}sheet")[0] + "}")["status"], set()).add(text)
    assert {len(texts) for texts in outputs.values()} == {1}
    assert not any(re.search(r"\d\.\d", text) for texts in outputs.values() for text in texts)


def test_the_first_verdict_has_rounded_numbers_and_comes_with_the_whole_sheet() -> None:
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store))
    judging = driver.export("anna").stored
    raw = fill(judging, honest)
    for part in (10, len(raw["items"]) - 1):
        unfinished = driver.apply({**raw, "items": raw["items"][:part]}).to_json()
        assert (unfinished["status"], unfinished["drift"], unfinished["unchecked"]) == ("applied", None, part)
        assert (unfinished["self_agreement"], unfinished["alpha"]) == (None, {})
    whole = driver.apply(raw)
    assert whole.drift is not None
    drift = whole.to_json()["drift"]
    assert drift["error"] == round(drift["error"], 1) != whole.drift.error
    assert (drift["n_controls"], whole.to_json()["unchecked"]) == (whole.drift.n_controls, 0)
    assert all(scale["bias"] == round(scale["bias"], 1) for scale in drift["scales"])
    _, texts = driver.store.get(judging.run_id)
    assert json.loads(texts["artifact:drift.json"])["error"] == whole.drift.error, "exact where it is kept"


def test_a_revision_returns_the_verdict_alone() -> None:
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store))
    judging = driver.export("anna").stored
    raw = fill(judging, honest)
    assert driver.apply({**raw, "items": raw["items"][:-1]}, final=True).to_json()["drift"]["verdict"] == "fine"
    assert driver.apply(raw).to_json()["drift"] == {"verdict": "ok"}, "a later item is a revision"
    assert driver.apply(fill(judging, always(5))).to_json()["drift"] == {"verdict": "held"}
    assert next(stored_sheets(store, driver.experiment, "anna")).revisions == 2
    assert driver.apply(fill(judging, always(5)), accept="agreed").to_json()["drift"] == {"verdict": "ok"}


def test_a_sheet_finished_with_few_items_returns_the_verdict_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Pooled with earlier sheets, the numbers would move exactly when the single item is a control."""
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store))
    driver.judge_as("anna", honest)
    record_cells(store, models=("gamma:2b", "delta:4b"))
    judging = driver.export("anna").stored
    raw, extreme = fill(judging, honest), fill(judging, always(5))
    for kind in ItemKind:
        copied = SeededStore()
        copied.copy_from(store)
        other = replace(driver, store=copied)
        done = other.apply(single_item(extreme, places_of_kind(judging, kind)[0]), final=True)
        shown = done.to_json()
        assert (shown["drift"], shown["self_agreement"], shown["alpha"]) == ({"verdict": "ok"}, None, {})
        assert "deleted" not in shown
        show_applied(done)
        assert "Finished with few items filled" in capsys.readouterr().out
        stored = next(stored_sheets(copied, driver.experiment, "anna"))
        assert stored.drift is not None
        assert stored.drift["error"] is not None, "admins see the numbers"
        assert other.apply(raw).to_json()["drift"] == {"verdict": "ok"}, "numbers come with the first verdict or never"


def test_numbers_need_20_control_tips_of_the_sheet_or_all_items() -> None:
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store))
    driver.judge_as("anna")
    record_cells(store, models=("gamma:2b", "delta:4b"))
    judging = driver.export("anna").stored
    tips = {entry.item.id: len(entry.controls) for entry in judging.entries}
    raw = fill(judging)
    controls = [item for item in raw["items"] if tips[item["item"]]]
    others = [item for item in raw["items"] if not tips[item["item"]]]
    enough = next(n for n in range(len(controls)) if sum(tips[item["item"]] for item in controls[:n]) >= MIN_CONTROLS)
    for n, numbers in ((enough - 1, False), (enough, True)):
        copied = SeededStore()
        copied.copy_from(store)
        done = replace(driver, store=copied).apply({**raw, "items": [*controls[:n], *others]}, final=True)
        assert ("error" in done.to_json()["drift"]) is numbers
    small = driver.export("ben", limit=4).stored
    assert "error" in driver.apply(fill(small)).to_json()["drift"], "the whole sheet is filled"


def test_a_preview_reads_only_the_sheet_and_has_no_verdict() -> None:
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store))
    judging = driver.export("anna").stored
    raw = fill(judging, always(5))
    work = SheetApplier(
        cast("RunStore", object()), driver.experiment, judging, check_sheet(raw, judging.sheet, judge="anna")
    )
    preview = work.run(dry_run=True).to_json()
    assert (preview["drift"], preview["status"], preview["changed"]) == (None, "applied", len(raw["items"]))
    assert "deleted" not in preview


# The requests of an apply to MLflow, whose duration a judge can measure


class MeasuringStore(SeededStore):
    """Records the calls with the size of what they send, because a call's duration depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.characters = 0

    def _note(self, call: str, texts: Mapping[str, str]) -> None:
        self.calls.append(call)
        self.characters += sum(map(len, texts.values()))

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """As `SeededStore.read`; MLflow sends all texts of a run, not only those that are wanted."""
        for run, found in super().read(experiment_id, where=where, texts=texts, limit=limit):
            self._note("read", super().get(run.run_id)[1])
            yield run, found

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        """As `SeededStore.get`, measured."""
        run, texts = super().get(run_id)
        self._note("get", texts)
        return run, texts

    def update(self, run_id: str, change: RunChange) -> None:
        """As `SeededStore.update`; the MLflow client reads a run before it changes it."""
        texts = super().get(run_id)[1]
        sent = f"{len(change.tags)} tags, {len(change.metrics)} metrics, {len(change.texts)} texts"
        self._note(f"update {sent}", change.texts)
        self.characters += sum(map(len, texts.values()))
        super().update(run_id, change)


@cache
def measured_sheet() -> tuple[MeasuringStore, SheetDriver, StoredSheet]:
    store = MeasuringStore()
    driver = SheetDriver(store, record_cells(store, models=("alpha:135m",)))
    return store, driver, driver.export("anna").stored


Note = Callable[[int], str]
NOTES: tuple[Note, ...] = (lambda number: str(number) * MAX_NOTE, lambda number: "n" * (MAX_NOTE - 1) + str(number))


def revise(driver: SheetDriver, judging: StoredSheet, place: int, note: Note, *, rescore: bool, times: int = 8) -> None:
    """Apply one item several times, each time with other long notes, and with other scores if `rescore`."""
    raw = single_item(fill(judging, honest), place)
    for number in range(times):
        for tip in raw["items"][0]["tips"]:
            tip["note"] = note(number)
            tip["scores"]["tone"] = 1 + number % 2 if rescore else 3
        assert driver.apply(raw).drift is None


@pytest.mark.parametrize("rescore", [False, True])
@pytest.mark.parametrize("note", NOTES, ids=("other notes", "other ends of notes"))
def test_revising_a_control_takes_the_same_work_in_mlflow_as_revising_an_answer(note: Note, rescore: bool) -> None:
    base, driver, judging = measured_sheet()
    first_cell = next(at for at, entry in enumerate(judging.entries) if entry.kind is ItemKind.CELL)
    work: list[list[str]] = []
    sizes = []
    for kind in (ItemKind.CELL, ItemKind.CONTROL):
        for place in [at for at, entry in enumerate(judging.entries) if entry.kind is kind and at != first_cell][:2]:
            store = MeasuringStore()
            store.copy_from(base)
            copied = replace(driver, store=store)
            # the run that controls would read instead
            revise(copied, judging, first_cell, note, rescore=rescore)
            revise(copied, judging, place, note, rescore=rescore)
            store.calls, store.characters = [], 0
            revise(copied, judging, place, note, rescore=rescore, times=1)
            work.append(sorted(store.calls))
            sizes.append(store.characters)
    assert all(each == work[0] for each in work)
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("rescore", [False, True])
def test_another_judges_notes_and_scores_do_not_make_the_work_for_an_answer_differ_from_a_control(
    rescore: bool,
) -> None:
    """An accomplice scores all answers, or half of them, before: with long notes, often, and like the judge.

    Sizes are compared where all answers but one are scored: runs with an accomplice's notes are larger than others.
    """
    base, driver, judging = measured_sheet()
    places = [at for kind in (ItemKind.CELL, ItemKind.CONTROL) for at in places_of_kind(judging, kind)[:4]]
    work, sizes = [], []
    for share in (1, 2):
        store = MeasuringStore()
        store.copy_from(base)
        ben = replace(driver, store=store)
        other = ben.export("ben").stored
        raw = fill(other, always(3))
        raw["items"] = raw["items"][:-1:share]
        for number in range(8):
            for tip in (tip for item in raw["items"] for tip in item["tips"]):
                tip["note"] = str(number) * MAX_NOTE
                tip["scores"]["tone"] = 1 + number % 2 if rescore else 3
            assert ben.apply(raw).drift is None
        for place in places:
            copied = MeasuringStore()
            copied.copy_from(store)
            replace(driver, store=copied).apply(single_item(fill(judging, always(3)), place))
            work.append(sorted(copied.calls))
            if share == 1:
                sizes.append(copied.characters)
    assert all(each == work[0] for each in work)
    assert median(sizes[:4]) == pytest.approx(median(sizes[4:]), rel=0.05)


def places_of_kind(judging: StoredSheet, kind: ItemKind) -> list[int]:
    return [place for place, entry in enumerate(judging.entries) if entry.kind is kind]


def test_the_number_of_deleted_answers_comes_with_the_first_verdict_only() -> None:
    class DeletingStore(SeededStore):
        def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
            if run_id in deleted:
                raise MlflowError("no such run", code="RESOURCE_DOES_NOT_EXIST")
            return super().get(run_id)

    deleted: set[str] = set()
    store = DeletingStore()
    driver = SheetDriver(store, record_cells(store, models=("alpha:135m",)))
    judging = driver.export("anna").stored
    deleted.update(entry.run_id for entry in judging.entries if entry.run_id and entry.kind is ItemKind.CELL)
    raw = fill(judging, honest)
    for part in (raw["items"][:1], raw["items"][:-1]):
        assert "deleted" not in driver.apply({**raw, "items": part}).to_json()
    assert driver.apply({**raw, "items": []}, final=True).to_json()["deleted"] > 0
    assert "deleted" not in driver.apply(raw).to_json(), "a later item is a revision"
