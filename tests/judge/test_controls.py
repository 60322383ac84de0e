"""Controls of a sheet: enough of them, similar to answers, unused ones first, references over the whole range."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tipbench.generate.parsing import Tip, is_overlong
from tipbench.judge.controls import JudgeHistory, compose
from tipbench.judge.material import EligibleCell
from tipbench.judge.sheet_store import ItemKind, SheetEntry, control_id
from tipbench.plan.rubric import Control, Rubric, Scale
from tipbench.plan.suite import load_suite

RUBRIC = load_suite("tips").rubric
SCENARIOS = [f"persona{number}@slot" for number in range(8)]
TARGET_SHARES = {1: 0.15, 2: 0.20, 3: 0.30, 4: 0.20, 5: 0.15}


@dataclass(frozen=True)
class Material:
    """The answers and controls from which a sheet is composed."""

    cells: Sequence[EligibleCell]
    controls: Sequence[Control]
    shown: Sequence[str] = ()
    earlier: Sequence[EligibleCell] = ()
    rubric: Rubric = RUBRIC

    def sheet(self, seed: int = 0) -> tuple[SheetEntry, ...]:
        cards = {scenario: {"id": scenario} for scenario in SCENARIOS}
        return compose(
            self.cells,
            cards,
            self.controls,
            self.rubric,
            JudgeHistory(shown=self.shown, scored=self.earlier),
            sheet_id="sheet-1",
            rng=random.Random(seed),
        )


def answer(run_id: str, scenario: str, size: int = 5, *, format_ok: bool = True, why: str = "So.") -> EligibleCell:
    tips = tuple(Tip(f"{run_id} says {number}", why) for number in range(size))
    return EligibleCell(run_id, scenario, tips, format_ok, frozenset())


def grid(per_scenario: int = 12, size: int = 5, name: str = "run") -> list[EligibleCell]:
    return [answer(f"{name}-{s}-{number}", s, size) for s in SCENARIOS for number in range(per_scenario)]


def pool(per_scenario: int = 10, seed: int = 0, rubric: Rubric = RUBRIC) -> list[Control]:
    rng = random.Random(seed)

    def scores() -> Mapping[str, int]:
        drawn = {scale.name: range(scale.min, scale.max + 1) for scale in rubric.scales}
        return {name: rng.choices(steps, [2, 3, 4, 3, 2][: len(steps)])[0] for name, steps in drawn.items()}

    return [
        Control(scenario, f"control {number} of {scenario}", "Because.", scores(), "agreed")
        for scenario in SCENARIOS
        for number in range(per_scenario)
    ]


def controls_in(entries: Sequence[SheetEntry]) -> list[SheetEntry]:
    return [entry for entry in entries if entry.kind is ItemKind.CONTROL]


def control_ids(entries: Sequence[SheetEntry]) -> list[str]:
    return [control for entry in entries for control in entry.controls]


@st.composite
def materials(draw: st.DrawFn) -> Material:
    rng = random.Random(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cells = [
        answer(f"run{number}", rng.choice(SCENARIOS), rng.choice(sizes), format_ok=rng.random() < 0.5)
        for number in range(draw(st.integers(0, 90)))
    ]
    kept = [control for control in pool(12) if rng.random() < draw(st.sampled_from([0.0, 0.3, 1.0]))]
    shown = [control_id(control) for control in kept for _ in range(rng.choice([0, 0, 1, 3]))]
    earlier = [answer(f"old{number}", rng.choice(SCENARIOS), 5) for number in range(draw(st.integers(0, 12)))]
    return Material(cells, kept, shown, earlier)


def possible_totals(material: Material, entries: Sequence[SheetEntry]) -> set[int]:
    """All numbers of control tips that the rules allow for this sheet, by enumeration."""
    others = Counter(entry.item.card["id"] for entry in entries if entry.kind is not ItemKind.CONTROL)
    totals = {0}
    for scenario in SCENARIOS:
        sizes = {len(cell.tips) for cell in material.cells if cell.scenario == scenario}
        most = sum(control.scenario == scenario for control in material.controls)
        own = reached = {0}
        for _ in range(others[scenario]):
            own = {tips + size for tips in own for size in sizes if tips + size <= most}
            reached = reached | own
        totals = {one + other for one in totals for other in reached}
    return totals


@settings(max_examples=12)
@given(materials(), st.integers(0, 99))
def test_a_sheet_has_the_wanted_number_of_control_tips_or_the_most_possible(material: Material, seed: int) -> None:
    entries = material.sheet(seed)
    cells = len(material.cells)
    tips = sum(len(cell.tips) for cell in material.cells) / max(1, cells)
    expected = max(min(40, cells), round(min(10, cells / 4) * tips))
    totals = possible_totals(material, entries)
    assert len(control_ids(entries)) == min((t for t in totals if t >= expected), default=max(totals))


@settings(max_examples=12)
@given(materials(), st.integers(0, 99))
def test_every_cell_is_on_the_sheet_once_and_every_control_at_most_once(material: Material, seed: int) -> None:
    entries = material.sheet(seed)
    assert Counter(e.run_id for e in entries if e.kind is ItemKind.CELL) == Counter(c.run_id for c in material.cells)
    assert set(Counter(control_ids(entries)).values()) <= {1}


@settings(max_examples=12)
@given(materials(), st.integers(0, 99))
def test_no_scenario_has_more_control_items_than_others(material: Material, seed: int) -> None:
    entries = material.sheet(seed)
    controls = Counter(entry.item.card["id"] for entry in controls_in(entries))
    items = Counter(entry.item.card["id"] for entry in entries)
    assert all(2 * controls[scenario] <= items[scenario] for scenario in items)


@settings(max_examples=12)
@given(materials(), st.integers(0, 99))
def test_a_control_item_looks_like_some_answer_of_its_scenario(material: Material, seed: int) -> None:
    looks = {(cell.scenario, len(cell.tips), cell.format_ok) for cell in material.cells}
    for entry in controls_in(material.sheet(seed)):
        assert (entry.item.card["id"], len(entry.item.tips), entry.item.format_ok) in looks


@settings(max_examples=12)
@given(materials(), st.integers(0, 99))
def test_the_key_names_the_controls_and_their_references_in_the_items_order(material: Material, seed: int) -> None:
    known = {control_id(control): control for control in material.controls}
    for entry in controls_in(material.sheet(seed)):
        behind = [known[name] for name in entry.controls]
        assert [control.tip for control in behind] == [tip.tip for tip in entry.item.tips]
        assert [control.scores for control in behind] == list(entry.agreed_scores)
        assert {control.scenario for control in behind} == {entry.item.card["id"]}
        assert entry.run_id is None


@settings(max_examples=12)
@given(materials(), st.integers(0, 99))
def test_in_a_scenario_no_control_is_shown_again_before_one_shown_less_often(material: Material, seed: int) -> None:
    times = Counter(material.shown)
    used = set(control_ids(material.sheet(seed)))
    for scenario in SCENARIOS:
        own = [control_id(control) for control in material.controls if control.scenario == scenario]
        taken, unused = [name for name in own if name in used], [name for name in own if name not in used]
        assert not taken or not unused or max(times[name] for name in taken) <= min(times[name] for name in unused)


@settings(max_examples=12)
@given(materials(), st.integers(0, 99), st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(material: Material, seed: int, shuffle: random.Random) -> None:
    mixed = Material(
        shuffle.sample(material.cells, len(material.cells)),
        shuffle.sample(material.controls, len(material.controls)),
        shuffle.sample(material.shown, len(material.shown)),
        shuffle.sample(material.earlier, len(material.earlier)),
    )
    assert mixed.sheet(seed) == material.sheet(seed)


@settings(max_examples=12)
@given(materials(), st.integers(0, 99))
def test_repeats_are_the_judges_own_earlier_answers_in_scenarios_of_the_sheet(material: Material, seed: int) -> None:
    repeats = [entry.run_id for entry in material.sheet(seed) if entry.kind is ItemKind.REPEAT]
    scenarios = {cell.scenario for cell in material.cells}
    fitting = {cell.run_id for cell in material.earlier if cell.scenario in scenarios}
    cells = len(material.cells)
    assert set(repeats) <= fitting
    assert len(set(repeats)) == len(repeats) == (min(8, round(cells / 10), len(fitting)) if cells >= 10 else 0)


def test_an_earlier_answer_already_on_the_sheet_is_not_a_repeat() -> None:
    cells = grid()
    assert all(entry.kind is not ItemKind.REPEAT for entry in Material(cells, [], earlier=cells).sheet())


@pytest.mark.parametrize(("size", "tips", "items"), [(5, 50, 10), (3, 42, 14), (20, 60, 3)])
def test_a_full_sheet_hides_ten_control_answers_and_forty_control_tips_or_more(
    size: int, tips: int, items: int
) -> None:
    entries = Material(grid(size=size), pool(20)).sheet()
    assert (len(control_ids(entries)), len(controls_in(entries))) == (tips, items)


@pytest.mark.parametrize(("cells", "tips"), [(0, 0), (10, 15), (20, 25), (39, 50), (96, 50)])
def test_fewer_cells_hide_fewer_controls_in_proportion(cells: int, tips: int) -> None:
    assert len(control_ids(Material(grid()[::-1][:cells], pool(20)).sheet())) == tips


def test_a_suite_without_controls_gives_a_sheet_without_them() -> None:
    assert len(Material(grid(), []).sheet()) == 96


def test_a_control_given_twice_counts_once() -> None:
    controls = pool(2)
    entries = Material(grid(size=1), [*controls, *controls]).sheet()
    assert len(control_ids(entries)) == len(set(control_ids(entries))) == 16


@pytest.mark.parametrize(("size", "per_scenario"), [(5, 15), (3, 12)])
def test_two_sheets_of_forty_share_no_control(size: int, per_scenario: int) -> None:
    for seed in range(3):
        material = Material(grid(size=size), pool(per_scenario))
        once = control_ids(material.sheet(seed))
        assert not set(once) & set(control_ids(replace(material, shown=once).sheet(seed + 1)))


def test_after_unused_controls_those_shown_least_often_are_used() -> None:
    material, times = Material(grid(), pool()), Counter[str]()
    for seed in range(8):
        material = replace(material, shown=list(times.elements()))
        times.update(control_ids(material.sheet(seed)))
    assert set(times.values()) == {5}  # eight sheets of 50 from 80


def test_unused_controls_of_one_scenario_precede_used_ones_of_another() -> None:
    controls = pool(5)
    seen = [control_id(control) for control in controls if control.scenario in SCENARIOS[:4]]
    entries = Material(grid()[:96:4], controls, shown=seen).sheet()
    assert len(control_ids(entries)) == 30
    assert len(set(control_ids(entries)) & set(seen)) == 10  # 20 fresh ones are not enough for six answers


def test_controls_have_a_rationale_only_where_their_donor_has_one() -> None:
    cells = [answer(f"run{number}", SCENARIOS[0], why="", format_ok=False) for number in range(20)]
    assert {tip.rationale for entry in controls_in(Material(cells, pool()).sheet()) for tip in entry.item.tips} == {""}


def test_a_control_without_rationale_never_claims_the_exact_form() -> None:
    controls = [replace(control, rationale="") for control in pool()]
    assert {entry.item.format_ok for entry in controls_in(Material(grid(), controls).sheet())} == {False}


def test_overlong_follows_the_rubrics_word_limit_for_cells_and_controls() -> None:
    controls = [replace(control, tip=f"{control.tip} " + "word " * (n % 2 * 60)) for n, control in enumerate(pool())]
    tips = [tip for entry in Material(grid(), controls).sheet() for tip in entry.item.tips]
    assert {tip.overlong for tip in tips} == {True, False}
    assert all(tip.overlong == is_overlong(tip.tip, RUBRIC.word_limit) for tip in tips)


def shares(entries: Sequence[SheetEntry], scale: str) -> dict[int, float]:
    counted = Counter(scores[scale] for entry in entries for scores in entry.agreed_scores)
    return {step: count / counted.total() for step, count in counted.items()}


def deviations(entries: Sequence[SheetEntry]) -> Iterator[float]:
    for scale in RUBRIC.scale_names:
        found = shares(entries, scale)
        yield from (abs(found.get(step, 0) - share) for step, share in TARGET_SHARES.items())


@pytest.mark.parametrize("size", [5, 3])
def test_references_of_a_sheet_cover_the_range(size: int) -> None:
    for seed in range(10):
        assert max(deviations(Material(grid(size=size), pool(12, seed)).sheet(seed))) <= 0.06


def test_the_second_sheet_from_a_balanced_pool_covers_the_range_too() -> None:
    steps = [1] * 12 + [2] * 16 + [3] * 24 + [4] * 16 + [5] * 12
    columns = [random.Random(seed).sample(steps, 80) for seed in range(3)]
    scores = [dict(zip(RUBRIC.scale_names, row, strict=True)) for row in zip(*columns, strict=True)]
    controls = [replace(control, scores=given) for control, given in zip(pool(), scores, strict=True)]
    material = Material(grid(), controls)
    second = replace(material, shown=control_ids(material.sheet(1))).sheet(2)
    assert max(deviations(second)) <= 0.06


def test_another_rubric_with_other_scales_works_the_same() -> None:
    scales = (Scale("clarity", 0, 2, "Clear?", ("no", "partly", "yes")), Scale("kind", -1, 0, "Kind?", ("no", "yes")))
    rubric = replace(RUBRIC, scales=scales, word_limit=3)
    entries = Material(grid(), pool(12, rubric=rubric), rubric=rubric).sheet()
    assert shares(entries, "clarity") == pytest.approx({0: 2 / 7, 1: 3 / 7, 2: 2 / 7}, abs=0.03)
    assert shares(entries, "kind") == pytest.approx({-1: 0.5, 0: 0.5}, abs=0.03)


def test_item_ids_are_opaque_and_of_equal_length() -> None:
    ids = [entry.item.id for entry in Material(grid(), pool()).sheet()]
    assert len(set(ids)) == len(ids)
    assert all(len(name) == 12 and set(name) <= set("0123456789abcdef") for name in ids)


def test_a_very_large_pool_is_processed_in_time() -> None:
    material = Material(grid(per_scenario=50, size=20), pool(400))
    begun = time.process_time()
    assert len(control_ids(material.sheet())) == 60
    assert time.process_time() - begun < 30
