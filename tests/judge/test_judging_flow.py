"""Export and apply on a store in memory: who gets which cells, which scores count, what is stored."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.judging import (
    SeededStore,
    SheetDriver,
    always,
    at_random,
    fill,
    items_of,
    metrics_of,
    record_cells,
    three_tips,
)
from tipbench.errors import MlflowUnavailable, NotEnoughData, SheetRefused, UsageError
from tipbench.judge import run as running
from tipbench.judge import sheet_store
from tipbench.judge.export import ExportRequest
from tipbench.judge.rules import RulesJudge
from tipbench.judge.run import JudgeEnvironment, JudgeResult, Unscored, run_judge
from tipbench.judge.sheet import ItemScore, TipScore, TipSheet, sheet_text
from tipbench.judge.sheet_store import ItemKind, SheetStatus, find_sheet, stored_sheets
from tipbench.plan.design import design_tags, make_design
from tipbench.plan.grid import PlannedCell
from tipbench.plan.suite import load_suite
from tipbench.record.run import RunChange
from tipbench.record.store import Experiment

CELLS = 24  # enough for the 20 control tips that a verdict needs


@cache
def recorded_cells() -> tuple[SeededStore, Experiment]:
    store = SeededStore()
    return store, record_cells(store, models=("alpha:135m",))


def new_driver(store: SeededStore | None = None, **options: Any) -> SheetDriver:
    """A new driver with 24 answers, or with the cells that the options describe."""
    store = store or SeededStore()
    if options:
        return SheetDriver(store, record_cells(store, **{"models": ("alpha:135m",), **options}))
    store.copy_from(recorded_cells()[0])
    return SheetDriver(store, recorded_cells()[1])


@pytest.fixture
def driver() -> SheetDriver:
    return new_driver()


def clear_scores(item: dict[str, Any]) -> None:
    for tip in item["tips"]:
        tip["scores"] = dict.fromkeys(tip["scores"])


# Cells after an apply


def test_an_applied_sheet_leaves_nothing_pending_and_has_the_expected_numbers(driver: SheetDriver) -> None:
    done = driver.export()
    raw = fill(done.stored)
    applied = driver.apply(raw)
    assert (applied.status, applied.n_unfinished, applied.n_finished) == ("applied", 0, len(raw["items"]))
    assert driver.states() == {"judged": CELLS}
    expected = items_of(raw, done.stored)
    for run_id, run in driver.cells().items():
        numbers = metrics_of(expected[run_id])
        assert {name: run.metrics[name] for name in numbers} == pytest.approx(numbers)
        assert run.tags["judge_pending"] == "false"
        assert run.tags["judges"] == '["anna"]'
        assert run.tags["scores_rubric"] == load_suite("tips").rubric.tag


def test_applying_again_changes_nothing(driver: SheetDriver) -> None:
    raw = fill(driver.export().stored)
    driver.apply(raw)
    before, revision = driver.everything(), driver.store.experiments()[0].tags
    again = driver.apply(raw)
    assert again.changes == ()
    assert driver.everything() == before
    assert driver.store.experiments()[0].tags == revision


def test_a_dry_run_writes_nothing_and_shows_hidden_items_like_all_others(driver: SheetDriver) -> None:
    """If they were missing from the list, it would show the judge which items are hidden."""
    done = driver.export()
    before = driver.everything()
    applied = driver.apply(fill(done.stored), dry_run=True)
    assert driver.everything() == before
    assert [change.item for change in applied.changes] == [item.id for item in done.stored.sheet.items]
    assert {change.before for change in applied.changes} == {None}


def test_a_dry_run_does_not_show_scores_of_another_judge(driver: SheetDriver) -> None:
    driver.judge_as("anna", at_random)
    applied = driver.apply(fill(driver.export("ben", everything=True).stored), dry_run=True)
    assert {change.before for change in applied.changes} == {None}


def test_unfinished_items_stay_pending_until_the_sheet_is_further_filled(driver: SheetDriver) -> None:
    done = driver.export()
    raw = fill(done.stored)
    part = copy.deepcopy(raw)
    left = list(items_of(part, done.stored))[:10]
    for run_id in left:
        clear_scores(items_of(part, done.stored)[run_id])
    applied = driver.apply(part)
    assert applied.n_unfinished == 10
    assert {run_id for run_id, run in driver.cells().items() if run.state == "pending"} == set(left)
    assert driver.apply(raw).n_unfinished == 0
    assert driver.states() == {"judged": CELLS}
    assert all(scores.history == () for scores in driver.scores().values()), "nothing was revised"


@settings(max_examples=4)
@given(cuts=st.lists(st.integers(0, 35), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_sheet_applied_in_parts_ends_as_one_applied_at_once(cuts: list[int], seed: int) -> None:
    """The result does not depend on the parts, nor on whether the judge was held in between."""
    driver = new_driver()
    judging = driver.export(seed=seed).stored
    raw = fill(judging, seed=seed)
    for cut in sorted(cuts):
        part = copy.deepcopy(raw)
        for item in part["items"][cut:]:
            clear_scores(item)
        driver.apply(part)
    driver.apply(raw)
    for run_id, item in items_of(raw, judging).items():
        numbers = metrics_of(item)
        metrics = driver.cells()[run_id].metrics
        assert {name: metrics[name] for name in numbers} == pytest.approx(numbers)
    assert all(scores.history == () for scores in driver.scores().values())


def test_a_revised_score_counts_and_the_former_one_is_history(driver: SheetDriver) -> None:
    judging = driver.export().stored
    raw = fill(judging)
    driver.apply(raw)
    run_id, item = next(iter(items_of(raw, judging).items()))
    tip = item["tips"][0]
    former = tip["scores"]["tone"]
    tip["scores"]["tone"] = 1 + former % 5
    applied = driver.apply(raw)
    assert [change.item for change in applied.changes] == [item["item"]]
    assert driver.cells()[run_id].metrics["composite"] == pytest.approx(metrics_of(item)["composite"])
    histories = {run: scores.history for run, scores in driver.scores().items() if scores.history}
    assert list(histories) == [run_id]
    assert [given.tips[0].scores["tone"] for given in histories[run_id]] == [former]


def test_a_contested_flag_counts_and_the_next_judge_sees_the_computed_one(driver: SheetDriver) -> None:
    judging = driver.export().stored
    raw = fill(judging)
    run_id, item = next(iter(items_of(raw, judging).items()))
    assert item["format_ok"] is True
    item["format_ok"] = False
    driver.apply(raw)
    assert driver.cells()[run_id].metrics["composite"] == pytest.approx(metrics_of(item)["composite"])
    shown = driver.export("ben", everything=True).stored
    assert {entry.run_id: entry.item.format_ok for entry in shown.entries}[run_id] is True


# Held


def test_a_judge_with_constant_scores_is_held_and_the_cells_stay_pending(driver: SheetDriver) -> None:
    applied = driver.judge_as("anna", always(5))
    assert applied.held
    assert applied.to_json() | {"status": "held", "applied": 0, "held": applied.n_finished} == applied.to_json()
    assert driver.states() == {"pending": CELLS}
    assert all(scores.held["anna"].held for scores in driver.scores().values()), "stored, but not counted"
    assert {run.tags["held"] for run in driver.cells().values()} == {"true"}


def test_a_release_is_not_a_revision(driver: SheetDriver) -> None:
    judging = driver.export().stored
    raw = fill(judging, always(5))
    driver.apply(raw)
    applied = driver.apply(raw, accept="agreed in the team")
    assert (applied.status, applied.accepted) == ("applied", "agreed in the team")
    assert driver.states() == {"judged": CELLS}
    assert all(scores.history == () for scores in driver.scores().values())
    before = driver.everything()
    assert driver.apply(raw).status == "applied", "an accepted drift stays accepted"
    assert driver.everything() == before


def test_a_reason_without_drift_is_not_stored(driver: SheetDriver) -> None:
    judging = driver.export().stored
    driver.apply(fill(judging), accept="just in case")
    assert driver.apply(fill(judging, always(5))).held
    assert driver.states() == {"pending": CELLS}


def test_scores_that_counted_do_not_when_their_sheet_is_revised_beyond_the_limit(driver: SheetDriver) -> None:
    judging = driver.export().stored
    driver.apply(fill(judging))
    applied = driver.apply(fill(judging, always(1)))
    assert applied.held
    assert driver.states() == {"pending": CELLS}
    assert {change.after for change in applied.changes} == {None}
    assert driver.apply(fill(judging)).status == "applied"
    assert driver.states() == {"judged": CELLS}


def test_held_cells_wait_for_others_and_not_for_the_judge_who_must_revise(driver: SheetDriver) -> None:
    driver.judge_as("anna", always(5))
    with pytest.raises(NotEnoughData, match=rf"{CELLS} answers whose scores are held: revise their sheet"):
        driver.export("anna")
    assert driver.export("ben").n_cells == CELLS


# Which cells a judge gets


def test_a_second_judge_gets_whole_scenarios_of_the_others_and_alpha_appears(driver: SheetDriver) -> None:
    driver.judge_as("anna", seed=1)
    done = driver.export("ben")
    assert done.n_cells == 6, "a fifth of 24, rounded up to whole scenarios"
    scenarios = Counter(entry.item.card["id"] for entry in done.stored.entries if entry.kind is ItemKind.CELL)
    assert set(scenarios.values()) == {3}
    applied = driver.apply(fill(done.stored, at_random, seed=2), accept="to see")
    assert all(value is not None and -1 <= value < 0.5 for value in applied.alpha.values())


def test_several_judges_count_with_their_mean(driver: SheetDriver) -> None:
    sheets = {name: driver.export(name, everything=True).stored for name in ("anna", "ben", "eva")}
    raws = {name: fill(judging, seed=at) for at, (name, judging) in enumerate(sheets.items())}
    for raw in raws.values():
        driver.apply(raw)
    by_judge = [items_of(raws[name], sheets[name]) for name in sheets]
    for run_id, run in driver.cells().items():
        numbers = [metrics_of(items[run_id])["composite"] for items in by_judge]
        assert run.metrics["composite"] == pytest.approx(sum(numbers) / 3)
        assert json.loads(run.tags["judges"]) == ["anna", "ben", "eva"]


def test_a_held_judge_does_not_change_the_mean_of_the_others(driver: SheetDriver) -> None:
    judging = driver.export("anna").stored
    raw = fill(judging)
    driver.apply(raw)
    before = {run_id: run.metrics["composite"] for run_id, run in driver.cells().items()}
    assert driver.judge_as("ben", always(5), everything=True).held
    assert {run_id: run.metrics["composite"] for run_id, run in driver.cells().items()} == before
    assert driver.states() == {"judged": CELLS}


def test_everything_exports_all_cells_this_judge_has_not_scored(driver: SheetDriver) -> None:
    driver.judge_as("anna")
    assert driver.export("ben", everything=True).n_cells == CELLS
    with pytest.raises(NotEnoughData, match="`--all` includes answers scored by others"):
        driver.export(None)
    with pytest.raises(NotEnoughData, match="Nothing in tip-bench-judging is pending for anna"):
        driver.export("anna", everything=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_sheets_fill_scenarios_in_the_order_of_the_design(driver: SheetDriver, seed: int) -> None:
    order = [scenario.id for scenario in load_suite("tips").scenarios][::-1]
    driver.store.tag_experiment(driver.experiment.experiment_id, design_tags(make_design(order)))
    experiment = driver.store.experiment(driver.experiment.name)
    assert experiment is not None
    judging = SheetDriver(driver.store, experiment).export("anna", limit=6, seed=seed).stored
    scenarios = {entry.item.card["id"] for entry in judging.entries if entry.kind is ItemKind.CELL}
    assert scenarios == set(order[: len(scenarios)])
    assert len(scenarios) < 8


def test_a_limit_fills_whole_scenarios_and_the_next_sheet_has_the_rest(driver: SheetDriver) -> None:
    first = driver.export(limit=21)
    assert first.n_cells == 21
    driver.apply(fill(first.stored))
    assert driver.states() == {"judged": 21, "pending": 3}
    assert driver.export().n_cells == 3


def test_a_small_limit_is_exceeded_by_whole_scenarios_until_the_judge_can_be_checked(driver: SheetDriver) -> None:
    small = driver.export("anna", limit=4)
    assert (small.enough_controls, small.n_added) == (True, small.n_cells - 4)
    scenarios = Counter(entry.item.card["id"] for entry in small.stored.entries if entry.kind is ItemKind.CELL)
    assert set(scenarios.values()) == {CELLS // 8}, "whole scenarios"
    assert small.n_cells < CELLS, "no more than needed"


def test_a_suite_with_few_controls_exports_what_the_limit_allows(tmp_path: Path) -> None:
    folder = warm_suite(tmp_path, controls=1)
    driver = new_driver(suite=load_suite(str(folder)))
    small = driver.export("anna", limit=4, suite=str(folder))
    assert (small.n_cells, small.n_added, small.enough_controls) == (4, 0, False)


def test_the_same_seed_gives_the_same_items_in_the_same_order() -> None:
    one, two, other = (new_driver().export(None, seed=seed).stored for seed in (7, 7, 8))
    texts = [[item.tips for item in judging.sheet.items] for judging in (one, two, other)]
    assert texts[0] == texts[1] != texts[2]
    assert not {item.id for item in one.sheet.items} & {item.id for item in two.sheet.items}


def test_a_recorded_sheet_is_exported_again_with_the_same_bytes_after_its_apply(driver: SheetDriver) -> None:
    for judge in ("anna", None):
        judging = driver.export(judge, everything=judge is not None).stored
        for _ in range(2):
            found = find_sheet(driver.store, driver.experiment, judging.sheet.id)
            assert found is not None
            assert sheet_text(found.sheet) == sheet_text(judging.sheet)
            assert found.entries == judging.entries
            driver.apply(fill(judging, judge=judge or "ben"), dry_run=judge == "anna")


# A sheet without a judge


def test_a_sheet_without_a_name_belongs_to_the_first_who_fills_it(driver: SheetDriver) -> None:
    raw = fill(driver.export(None).stored)
    with pytest.raises(SheetRefused, match="judge"):
        driver.apply(raw)
    driver.apply(raw, judge="ben", dry_run=True)
    assert driver.apply(raw, judge="anna").judge == "anna", "a dry run takes nothing into possession"
    assert driver.apply(raw).judge == "anna", "and from now on it is known whose it is"
    before = driver.everything()
    with pytest.raises(SheetRefused, match="whose sheet this is"):
        driver.apply(raw, judge="ben")
    assert driver.everything() == before


def test_a_sheet_is_refused_under_another_name_than_it_was_exported_for(driver: SheetDriver) -> None:
    raw = fill(driver.export("anna").stored, judge="ben")
    with pytest.raises(SheetRefused, match="expected 'anna', whose sheet this is; found 'ben'"):
        driver.apply(raw)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("experiment", "tip-bench-other", "an experiment of this MLflow"),
        ("experiment", "../../etc", "the name in the exported file"),
        ("sheet", "0" * 12, "a sheet exported from tip-bench-judging"),
        ("format", "tipbench-duel/9", "'tipbench-sheet/1'"),
    ],
)
def test_a_sheet_of_unknown_origin_is_refused(driver: SheetDriver, key: str, value: object, message: str) -> None:
    raw = {**fill(driver.export().stored), key: value}
    with pytest.raises(SheetRefused, match=message) as refused:
        driver.apply(raw)
    assert len(str(refused.value)) < 600


# Hidden items


def test_repeated_answers_measure_only_the_judge(driver: SheetDriver) -> None:
    driver.judge_as("anna")
    record_cells(driver.store, models=("gamma:3b",))
    judging = driver.export("anna").stored
    repeats = [entry for entry in judging.entries if entry.kind is ItemKind.REPEAT]
    assert len(repeats) == 2
    before = {entry.run_id: driver.everything()[entry.run_id or ""] for entry in repeats}
    applied = driver.apply(fill(judging, seed=9))
    assert applied.self_agreement is not None
    assert applied.self_agreement.n == 6
    assert {entry.run_id: driver.everything()[entry.run_id or ""] for entry in repeats} == before


def test_a_judge_sees_no_control_twice_while_fresh_ones_are_left() -> None:
    driver = new_driver(models=("alpha:135m", "beta:1b"))
    one = driver.export("anna", limit=24).stored
    driver.apply(fill(one))
    two = driver.export("anna").stored
    controls = [control for judging in (one, two) for entry in judging.entries for control in entry.controls]
    assert len(controls) >= 48
    assert len(set(controls)) == len(controls)


def test_a_control_seen_in_another_experiment_is_not_fresh(driver: SheetDriver) -> None:
    elsewhere = SheetDriver(driver.store, record_cells(driver.store, experiment="tip-bench-elsewhere"))
    first = {control for entry in driver.export().stored.entries for control in entry.controls}
    second = {control for entry in elsewhere.export().stored.entries for control in entry.controls}
    other = {control for entry in driver.export("ben", seed=2).stored.entries for control in entry.controls}
    assert first
    assert second
    assert not first & second
    assert other == first  # the same answers for another judge, so the same controls


# Provisional judges


def run_rules(driver: SheetDriver) -> JudgeResult:
    return run_judge(driver.store, driver.experiment, RulesJudge(), ExportRequest(seed=1))


def test_the_rules_judge_scores_provisionally_and_changes_no_score_of_people(driver: SheetDriver) -> None:
    result = run_rules(driver)
    assert (result.applied.status, result.unscored) == ("applied", ())
    runs = driver.cells().values()
    assert driver.states() == {"pending": CELLS}
    assert {run.tags["judge_pending"] for run in runs} == {"true"}
    assert {run.tags["provisional_judge"] for run in runs} == {"rules"}
    assert all({"provisional_composite", "provisional_tone"} <= run.metrics.keys() for run in runs)
    assert not any("composite" in run.metrics for run in runs)
    assert driver.export("anna").n_cells == CELLS


def test_provisional_scores_and_scores_of_people_are_separate_in_any_order() -> None:
    ends = []
    for order in (("rules", "anna"), ("anna", "rules")):
        driver = new_driver()
        for name in order:
            if name == "rules":
                run_rules(driver)
            else:
                driver.judge_as("anna", seed=3)
        ends.append(driver)
    for driver in ends:
        assert driver.states() == {"judged": CELLS}
        for run in driver.cells().values():
            assert run.tags["judges"] == '["anna"]'
            assert {"composite", "provisional_composite"} <= run.metrics.keys()


def test_the_rules_judge_is_never_held_and_has_nothing_to_do_twice(driver: SheetDriver) -> None:
    assert run_rules(driver).applied.status == "applied"
    with pytest.raises(NotEnoughData, match=f"is pending for rules: all {CELLS} answers are scored") as nothing:
        run_rules(driver)
    assert "--all" not in str(nothing.value), "it takes everything anyway"


# Excluded cells


def test_cells_of_scenarios_the_suite_does_not_have_are_left_out_and_counted() -> None:
    driver = new_driver(suite=load_suite("tips-32"), models=("alpha:135m",), prompts="v1")
    done = driver.export(suite="tips")
    assert (done.n_cells, done.n_unknown) == (8, 24)
    assert driver.export().n_cells == 32, "without --suite it is the one they were collected with"


def test_a_suite_without_any_of_the_scenarios_is_refused(tmp_path: Path) -> None:
    suite = warm_suite(tmp_path, date="2031-01-06")
    with pytest.raises(NotEnoughData, match=rf"None of the {CELLS} cells .* Pass the suite they were collected with"):
        new_driver().export(suite=str(suite))


def test_cells_of_a_suite_that_is_not_built_in_need_its_folder(tmp_path: Path) -> None:
    driver = new_driver(suite=load_suite(str(warm_suite(tmp_path))))
    with pytest.raises(UsageError, match=r"collected with the suite 'warm', which is not built in\. Pass its folder"):
        driver.export()


def test_answers_of_a_replaced_model_are_left_out(driver: SheetDriver) -> None:
    record_cells(driver.store, models=("alpha:135m",), build="2", start_ms=9_000)
    judging = driver.export().stored
    runs = driver.cells()
    digests = Counter(runs[entry.run_id].params["model_digest"] for entry in judging.entries if entry.run_id)
    assert digests == {"sha256:alpha:135m/2": CELLS}


def test_an_experiment_without_cells_is_refused_with_the_next_step() -> None:
    store = SeededStore()
    with pytest.raises(NotEnoughData, match=r"no answered cells yet\. Run `tipbench collect` first"):
        SheetDriver(store, store.ensure_experiment("tip-bench-empty")).export()


# Another rubric


WARM = """+++
id = "warm-v1"
word_limit = {limit}

[[scales]]
name = "warmth"
min = 0
max = 10
about = "Would a friend say it?"
steps = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]

[[scales]]
name = "short"
min = -1
max = 1
about = "Is it short?"
steps = ["No.", "Middling.", "Yes."]

[weights]
warmth = 0.5
short = 3
format_ok = 0
overlong = -4

[floor]
warmth = 2
short = -1
format_ok = 0
overlong = 1
+++

# Warmth

Score what is there.
"""


def warm_suite(folder: Path, *, limit: int = 25, date: str = "", controls: int = 10) -> Path:
    """The scenarios of `tips` under a rubric of other scales, ranges, weights and floor."""
    rng = random.Random(4)
    day = f"date = {date}\n" if date else ""
    folder.joinpath("suite.toml").write_text(f'name = "warm"\ntitle = "Warm"\nextends = "tips"\n{day}')
    folder.joinpath("rubric.md").write_text(WARM.format(limit=limit))
    tables = [
        f'[[controls]]\nscenario = "{scenario.id}"\ntip = "Warm tip {n} of {scenario.id}."\nrationale = "It is."\n'
        f'scores = {{ warmth = {rng.randint(0, 10)}, short = {rng.randint(-1, 1)} }}\nwhy = "Because."\n'
        for scenario in load_suite("tips").scenarios
        for n in range(controls)
    ]
    if controls:
        folder.joinpath("controls.toml").write_text("\n".join(tables))
    return folder


def fill_warm(judging: Any, shift: int = 0, seed: int = 1) -> dict[str, Any]:
    """The sheet with scores near the references of the controls, at random elsewhere, and always on the scale."""
    rng = random.Random(seed)
    raw: dict[str, Any] = json.loads(sheet_text(judging.sheet))
    for entry, item in zip(judging.entries, raw["items"], strict=True):
        for at, tip in enumerate(item["tips"]):
            for scale in judging.sheet.rubric.scales:
                agreed = (
                    entry.agreed_scores[at][scale.name] if entry.agreed_scores else rng.randint(scale.min, scale.max)
                )
                tip["scores"][scale.name] = min(scale.max, max(scale.min, agreed + shift))
    return raw


def test_composite_ranges_and_drift_come_from_the_rubric(tmp_path: Path) -> None:
    folder = warm_suite(tmp_path)
    driver = new_driver(suite=load_suite(str(folder)))
    judging = driver.export(suite=str(folder)).stored
    raw = fill_warm(judging)
    off = copy.deepcopy(raw)
    off["items"][0]["tips"][0]["scores"]["short"] = 2
    with pytest.raises(SheetRefused, match=r"scores\.short: expected a whole number from -1 to 1, or null; found 2"):
        driver.apply(off)
    assert driver.apply(fill_warm(judging, shift=4)).held, "drift is measured on any scale"
    assert driver.apply(raw).verdict == "ok"
    for run_id, item in items_of(raw, judging).items():
        tips = [tip["scores"] for tip in item["tips"]]
        metrics = driver.cells()[run_id].metrics
        overlong = [4.0 * tip["overlong"] for tip in item["tips"]]
        composites = [tip["warmth"] / 2 + 3 * tip["short"] - minus for tip, minus in zip(tips, overlong, strict=True)]
        assert metrics["composite"] == pytest.approx(sum(composites) / 3)
        assert metrics["warmth"] == pytest.approx(sum(tip["warmth"] for tip in tips) / 3)
        assert "relevance" not in metrics


def test_without_controls_the_verdict_is_unknown_and_the_scores_count(tmp_path: Path) -> None:
    folder = warm_suite(tmp_path, controls=0)
    driver = new_driver(suite=load_suite(str(folder)))
    judging = driver.export(suite=str(folder)).stored
    assert {entry.kind for entry in judging.entries} == {ItemKind.CELL}
    applied = driver.apply(fill_warm(judging, shift=10))
    assert (applied.status, applied.verdict) == ("applied", "unknown")


def answer_without_tips(_cell: PlannedCell, _rng: random.Random) -> str:
    return "Sorry, no."


def driver_with_floored_cells() -> tuple[SheetDriver, int]:
    """Answers without a tip in one scenario, and their number."""
    first = load_suite("tips").scenarios[0].id
    return new_driver(write=lambda cell, rng: "No." if cell.scenario.id == first else three_tips(cell, rng)), 3


def test_answers_without_a_tip_are_on_no_sheet() -> None:
    driver, floored = driver_with_floored_cells()
    assert driver.states() == {"judged": floored, "pending": CELLS - floored}
    done = driver.export()
    assert done.n_cells == CELLS - floored
    assert all(entry.item.tips for entry in done.stored.entries)


def test_under_another_rubric_all_scores_and_floors_are_new(tmp_path: Path) -> None:
    driver, floored = driver_with_floored_cells()
    driver.judge_as("anna")
    folder = warm_suite(tmp_path, limit=3)
    left_alone = driver.export("ben", suite=str(folder))
    assert left_alone.n_other_rubric == CELLS
    done = driver.export("anna", suite=str(folder), rejudge=True)
    assert (done.n_cells, done.n_other_rubric) == (CELLS - floored, 0)
    assert len(done.stored.outdated_floors) == floored
    raw = fill_warm(done.stored)
    assert all(tip["overlong"] for item in items_of(raw, done.stored).values() for tip in item["tips"])
    driver.apply(raw)
    warm = load_suite(str(folder)).rubric
    for run_id, run in driver.cells().items():
        _, texts = driver.store.get(run_id)
        assert run.state == "judged"
        assert run.tags["scores_rubric"] == warm.tag
        assert texts["artifact:rubric.md"] == warm.text
        if run.tags.get("floored") == "true":
            assert run.metrics["composite"] == warm.floor_composite == 0.5 * 2 - 3 - 4
        else:
            assert [given.rubric for given in driver.scores()[run_id].history] == [load_suite("tips").rubric.tag]
            assert run.metrics["overlong"] == 1.0


def test_floors_alone_can_be_computed_again(tmp_path: Path) -> None:
    driver = new_driver(write=answer_without_tips)
    with pytest.raises(NotEnoughData):
        driver.export()
    folder = warm_suite(tmp_path)
    with pytest.raises(
        NotEnoughData, match=rf"{CELLS} answers without a usable tip were rescored under warm-v1\. Nothing"
    ):
        driver.export(suite=str(folder), rejudge=True)
    assert {run.metrics["composite"] for run in driver.cells().values()} == {-6.0}
    assert not find_sheets(driver)
    with pytest.raises(NotEnoughData, match=r"^Nothing in"):
        driver.export(suite=str(folder), rejudge=True)


def test_floors_wait_for_scores_that_count(tmp_path: Path) -> None:
    """Neither a provisional judge, nor a sheet of which nothing is finished, may move a board to another rubric."""
    driver, _ = driver_with_floored_cells()
    driver.judge_as("anna")
    folder = str(warm_suite(tmp_path))
    run_judge(
        driver.store, driver.experiment, ScriptedJudge(score=1), ExportRequest(suite=folder, rejudge=True, seed=1)
    )
    judging = driver.export("anna", suite=folder, rejudge=True).stored
    driver.apply(json.loads(sheet_text(judging.sheet)))
    assert {run.tags["scores_rubric"].split("@")[0] for run in driver.cells().values()} == {"tip-v1"}
    driver.apply(fill_warm(judging))
    assert {run.tags["scores_rubric"].split("@")[0] for run in driver.cells().values()} == {"warm-v1"}


def test_two_rubrics_are_never_mixed_in_one_mean(tmp_path: Path) -> None:
    driver = new_driver()
    old = driver.export("anna").stored
    driver.apply(fill(old))
    folder = warm_suite(tmp_path)
    new = driver.export("ben", suite=str(folder), rejudge=True).stored
    driver.apply(fill_warm(new))
    composites = {run_id: run.metrics["composite"] for run_id, run in driver.cells().items()}
    assert {run.tags["judges"] for run in driver.cells().values()} == {'["ben"]'}
    driver.apply(fill(old, seed=77))
    assert {run_id: run.metrics["composite"] for run_id, run in driver.cells().items()} == composites
    assert {run.tags["scores_rubric"].split("@")[0] for run in driver.cells().values()} == {"warm-v1"}


def test_when_the_new_scores_are_held_the_old_ones_count_with_their_own_rubric(tmp_path: Path) -> None:
    driver = new_driver()
    driver.judge_as("anna")
    before = {run_id: run.metrics["composite"] for run_id, run in driver.cells().items()}
    folder = warm_suite(tmp_path)
    new = driver.export("ben", suite=str(folder), rejudge=True).stored
    driver.apply(fill_warm(new))
    driver.apply(fill_warm(new, shift=5))
    assert {run_id: run.metrics["composite"] for run_id, run in driver.cells().items()} == before
    tips = load_suite("tips").rubric
    assert {run.tags["scores_rubric"] for run in driver.cells().values()} == {tips.tag}
    assert {driver.store.get(run_id)[1]["artifact:rubric.md"] for run_id in before} == {tips.text}


def test_a_later_sheet_of_the_same_judge_is_not_undone_by_an_earlier_one(tmp_path: Path) -> None:
    driver = new_driver()
    early, late = (export_at(driver, at) for at in ("2031-01-01T00:00:00.000+00:00", "2031-01-02T00:00:00.000+00:00"))
    driver.apply(fill(late, seed=2, judge="anna"))
    before = driver.cells()
    driver.apply(fill(early, seed=1, judge="anna"))
    assert driver.cells() == before


def export_at(driver: SheetDriver, exported: str) -> Any:
    """A sheet without a name, exported at a certain time."""
    judging = driver.export(None).stored
    driver.store.update(judging.run_id, RunChange(tags={"exported_at": exported}, at_ms=1))
    return judging


# Crashes


class DisconnectingStore(SeededStore):
    """Loses its connection before the n-th change of a run, or half-way through it."""

    def __init__(self) -> None:
        super().__init__()
        self.updates_left: int | None = None
        self.only_texts = False

    def update(self, run_id: str, change: RunChange) -> None:
        """As `SeededStore.update`, until the connection is lost."""
        if self.updates_left is not None:
            if self.updates_left <= 0:
                if self.only_texts:
                    super().update(run_id, RunChange(texts=change.texts, at_ms=change.at_ms))
                raise MlflowUnavailable("The store is gone.")
            self.updates_left -= 1
        super().update(run_id, change)


@pytest.mark.parametrize(("survived", "only_texts"), [(0, False), (1, True), (7, False), (CELLS, True)])
def test_an_apply_that_dies_is_completed_by_the_next(survived: int, only_texts: bool) -> None:
    store = DisconnectingStore()
    driver = new_driver(store)
    judging = driver.export().stored
    raw = fill(judging)
    store.updates_left, store.only_texts = survived, only_texts
    with pytest.raises(MlflowUnavailable):
        driver.apply(raw)
    store.updates_left = None
    driver.apply(raw)
    assert driver.states() == {"judged": CELLS}
    for run_id, item in items_of(raw, judging).items():
        assert driver.cells()[run_id].metrics["composite"] == pytest.approx(metrics_of(item)["composite"])
    assert all(scores.history == () for scores in driver.scores().values())


# Automatic judges


class ScriptedJudge:
    """A judge with constant scores that stops at a given item and records the number of requested items."""

    provisional = True

    def __init__(self, *, dies_after: int | None = None, skips: int = 0, score: int = 3) -> None:
        self.name = "script"
        self._score = score
        self.requested: list[int] = []
        self._dies_after = dies_after
        self._skips = skips

    def fill(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:  # noqa: ARG002
        """One outcome for every item."""
        self.requested.append(len(sheet.items))
        for at, item in enumerate(sheet.items):
            if at == self._dies_after:
                raise KeyboardInterrupt
            if at < self._skips:
                yield Unscored(item.id, "no answer came")
            else:
                scores = dict.fromkeys(sheet.rubric.scale_names, self._score)
                yield ItemScore(item.id, item.format_ok, tuple(TipScore(scores, tip.overlong) for tip in item.tips))


def counted_judge(**options: Any) -> ScriptedJudge:
    judge = ScriptedJudge(**options)
    judge.provisional = False
    return judge


def run_scripted(
    driver: SheetDriver, judge: ScriptedJudge, messages: list[str] | None = None, **options: Any
) -> JudgeResult:
    report: Callable[[str], None] = (messages if messages is not None else []).append
    accept = options.pop("accept", None)
    return run_judge(
        driver.store,
        driver.experiment,
        judge,
        ExportRequest(seed=1),
        accept=accept,
        environment=JudgeEnvironment(report, **options),
    )


def test_a_judge_that_was_interrupted_continues_its_sheet(driver: SheetDriver) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_scripted(driver, ScriptedJudge(dies_after=15))
    assert not any("provisional_composite" in run.metrics for run in driver.cells().values())
    messages: list[str] = []
    judge = ScriptedJudge()
    result = run_scripted(driver, judge, messages)
    assert result.continued
    assert judge.requested == [len(find_sheets(driver)[0].entries) - 15]
    counts = f"15 of {result.applied.n_finished} items are scored"
    assert messages == [f"continuing the sheet {result.applied.sheet}: {counts}"]
    assert {run.metrics["provisional_composite"] for run in driver.cells().values()} == {11.0}


def find_sheets(driver: SheetDriver) -> list[Any]:
    return list(stored_sheets(driver.store, driver.experiment))


def test_items_without_a_score_are_reported_with_the_reason_and_retried_next_time(driver: SheetDriver) -> None:
    result = run_scripted(driver, ScriptedJudge(skips=5))
    assert [each.reason for each in result.unscored] == ["no answer came"] * 5
    assert result.to_json()["unfinished"] == 5
    missing = [run for run in driver.cells().values() if "provisional_composite" not in run.metrics]
    assert 0 < len(missing) <= 5
    assert not run_scripted(driver, ScriptedJudge()).unscored
    assert all("provisional_composite" in run.metrics for run in driver.cells().values())


def test_progress_counts_to_the_total_and_only_scores_are_written(driver: SheetDriver) -> None:
    seen: list[tuple[int, int, int]] = []
    entered: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            entered.append("in")
            assert not any("provisional_composite" in run.metrics for run in driver.cells().values())

        def __exit__(self, *_: object) -> None:
            entered.append("out")

    result = run_scripted(driver, ScriptedJudge(skips=2), progress=lambda *numbers: seen.append(numbers), lock=Lock)
    total = result.applied.n_finished + 2
    assert seen[-1] == (total - 2, 2, total)
    assert entered == ["in", "out"]


def test_an_automatic_judge_that_counts_is_held_if_it_drifts(driver: SheetDriver) -> None:
    judge = counted_judge()
    result = run_scripted(driver, judge)
    assert result.applied.held
    assert result.applied.status is SheetStatus.HELD
    assert driver.states() == {"pending": CELLS}
    judge = counted_judge()
    again = rf"held.* To accept the scores of the sheet {result.applied.sheet}: the same command with --accept-drift"
    with pytest.raises(NotEnoughData, match=again):
        run_scripted(driver, judge)
    assert judge.requested == []
    assert run_scripted(driver, judge, accept="a test").applied.accepted == "a test"
    assert judge.requested == [], "what was scored before is taken as it is"
    assert driver.states() == {"judged": CELLS}


@pytest.mark.parametrize(("survived", "provisional"), [(1, True), (12, False)])
def test_an_interrupted_apply_of_a_run_is_completed_by_the_next_run(survived: int, provisional: bool) -> None:
    store = DisconnectingStore()
    driver = new_driver(store)
    judge = ScriptedJudge()
    judge.provisional = provisional
    store.updates_left = survived + 1  # the scores are saved first
    with pytest.raises(MlflowUnavailable):
        run_scripted(driver, judge, accept=None if provisional else "a test")
    store.updates_left = None
    messages: list[str] = []
    result = run_scripted(driver, judge, messages)
    assert judge.requested == [result.applied.n_finished], "nothing was scored twice"
    assert messages == [f"the sheet {result.applied.sheet} was only partly applied: finishing it now"]
    name = "provisional_composite" if provisional else "composite"
    assert {run.metrics[name] for run in driver.cells().values()} == {11.0}
    assert result.continued
    with pytest.raises(NotEnoughData):
        run_scripted(driver, judge)


def test_pending_cells_are_judged_after_completing_an_interrupted_run() -> None:
    store = DisconnectingStore()
    driver = new_driver(store)
    store.updates_left = 10
    with pytest.raises(MlflowUnavailable):
        run_scripted(driver, ScriptedJudge())
    store.updates_left = None
    record_cells(store, models=("gamma:3b",), prompts="v1")
    judge = ScriptedJudge()
    run_scripted(driver, judge)
    assert len(judge.requested) == 1
    assert judge.requested[0] < CELLS
    assert all("provisional_composite" in run.metrics for run in driver.cells().values())


def test_an_accepted_sheet_is_applied_and_nothing_else_is_judged_under_its_reason(driver: SheetDriver) -> None:
    held = run_scripted(driver, counted_judge()).applied.sheet
    record_cells(driver.store, models=("gamma:3b",))
    judge = counted_judge()
    result = run_scripted(driver, judge, accept="we looked at them")
    assert (result.applied.sheet, result.applied.accepted, judge.requested) == (held, "we looked at them", [])
    assert driver.states() == {"judged": CELLS, "pending": CELLS}


# MLflow is unavailable while a judge runs


class JudgeDuringOutage(ScriptedJudge):
    """Makes MLflow unavailable from one item until another."""

    def __init__(self, store: SeededStore, away_at: int, back_at: int | None) -> None:
        super().__init__()
        self._store, self._away_at, self._back_at = store, away_at, back_at

    def fill(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """As `ScriptedJudge.fill`."""
        for at, outcome in enumerate(super().fill(sheet, report)):
            if at in (self._away_at, self._back_at):
                self._store.away = at == self._away_at
            yield outcome


def test_an_mlflow_that_is_unavailable_for_a_while_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SAVE_INTERVAL_S", 0.0)
    store = SeededStore()
    driver = new_driver(store)
    messages: list[str] = []
    result = run_scripted(driver, JudgeDuringOutage(store, 5, 20), messages)
    assert result.applied.n_unfinished == 0
    assert sum("Judging continues" in line for line in messages) == 1
    assert all("provisional_composite" in run.metrics for run in driver.cells().values())


def test_an_mlflow_that_stays_unavailable_loses_no_score(tmp_path: Path) -> None:
    store = SeededStore()
    driver = new_driver(store)

    def save_to_file(sheet: str, text: str) -> Path:
        path = tmp_path / f"{sheet}.json"
        path.write_text(text)
        return path

    with pytest.raises(MlflowUnavailable, match=r"items are scored; .* `tipbench judge apply .*\.json`") as away:
        run_scripted(driver, JudgeDuringOutage(store, 5, None), save_to_file=save_to_file)
    (path,) = tmp_path.iterdir()
    assert str(path) in str(away.value)
    store.away = False
    assert driver.apply(json.loads(path.read_text())).n_unfinished == 0
    assert all("provisional_composite" in run.metrics for run in driver.cells().values())


# Messages of an export


def test_an_export_warns_of_too_few_controls_and_of_excluded_cells(driver: SheetDriver) -> None:
    assert driver.export("anna").enough_controls
    assert driver.export("anna").n_other_conditions == 0
    record_cells(driver.store, temperature=0.1, start_ms=9_000, models=("alpha:135m",))
    assert driver.export("anna").n_other_conditions == CELLS


def test_a_sheet_keeps_its_instructions_when_a_later_version_has_others(
    driver: SheetDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging = driver.export().stored
    before = sheet_text(judging.sheet)
    monkeypatch.setattr(sheet_store, "instructions", lambda _rubric: "Do it quite differently.")
    (found,) = find_sheets(driver)
    assert sheet_text(found.sheet) == before
