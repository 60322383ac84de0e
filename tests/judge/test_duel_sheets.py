"""Duels from export to compare, on a store in memory: blind, in both orders, all or nothing."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.judged import judge_at
from support.judging import SeededStore, SheetDriver, record_cells
from tipbench.compare.cells import CellFilter, read_board_cells
from tipbench.compare.duels import DuelTable
from tipbench.compare.leaderboard import BoardOptions, duels_of, make_board, with_duels
from tipbench.compare.matrix import Pair
from tipbench.errors import NotEnoughData, SheetRefused, SheetsClosed
from tipbench.generate.parsing import Tip
from tipbench.judge.duels import (
    FORMAT,
    Contender,
    DuelApplyResult,
    DuelExport,
    DuelRequest,
    apply_duels,
    choose_match_ups,
    duel_json,
    duel_text,
    export_duels,
    find_duel,
    find_match_ups,
    order_showings,
    read_duels,
)
from tipbench.judge.sheet import sheet_text
from tipbench.judge.sheet_store import KEY, find_sheet, stored_sheets
from tipbench.judge.status import judging_status
from tipbench.plan.grid import PlannedCell
from tipbench.record.run import RunChange, StoredRun

MODELS = ("unmistakable-alpha:135m", "unmistakable-beta:1b", "unmistakable-gamma:2b")


def level(run: StoredRun, number: int) -> int:
    """Gamma is bad; alpha and beta tie, with a little noise."""
    if run.params["model"].startswith("unmistakable-gamma"):
        return 1
    return 3 + random.Random(f"{run.params['model']} {run.params['scenario']}").randint(0, 1)


@pytest.fixture(scope="module")
def judged() -> SheetDriver:
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store, models=MODELS, prompts="v1"))
    judge_at(driver, level)
    return driver


@pytest.fixture
def driver(judged: SheetDriver) -> SheetDriver:
    """A copy of the judged cells, so that each test has its own."""
    store = SeededStore()
    assert isinstance(judged.store, SeededStore)
    store.copy_from(judged.store)
    return SheetDriver(store, judged.experiment)


def request(driver: SheetDriver, **over: Any) -> DuelRequest:
    cells = read_board_cells(driver.store, driver.experiment.experiment_id, CellFilter())
    ranking = make_board("x", cells, BoardOptions()).ranking
    assert ranking.leader is not None
    among = {ranking.leader, *ranking.tied}
    assert {pair.model for pair in among} == set(MODELS[:2]), "the world of these tests: two that tie"
    runs = {cell.run.run_id: (cell.pair.model, cell.pair.prompt) for cell in cells.cells if cell.pair in among}
    values: dict[str, Any] = {"judge": "anna", "seed": 3, **over}
    return DuelRequest(runs, cells.rubric, **values)


def export(driver: SheetDriver, **over: Any) -> DuelExport:
    return export_duels(driver.store, driver.experiment, request(driver, **over))


def filled(done: DuelExport, winner: Callable[[str, str], str | None]) -> dict[str, Any]:
    """The rule gets the models of a and b."""
    raw: dict[str, Any] = json.loads(duel_text(done.stored.sheet))
    for item in raw["items"]:
        a, b = (done.stored.pairs[run_id][0] for run_id in done.stored.sides[item["item"]])
        item["winner"] = winner(a, b)
    return raw


def beta_wins(a: str, b: str) -> str:
    return "a" if "beta" in a else "b"


def apply(driver: SheetDriver, raw: dict[str, Any], **options: Any) -> DuelApplyResult:
    judge = options.pop("judge", None)
    return apply_duels(driver.store, raw, judge=judge, **options)


def kept(driver: SheetDriver) -> dict[str, Any]:
    runs = driver.store.search(driver.experiment.experiment_id, where={})
    return {run.run_id: driver.store.get(run.run_id) for run in runs}


# The file


def test_the_duel_file_has_the_documented_format(driver: SheetDriver) -> None:
    raw = duel_json(export(driver).stored.sheet)
    assert set(raw) == {"format", "sheet", "experiment", "judge", "instructions", "rubric", "items"}
    assert (raw["format"], raw["judge"], set(raw["rubric"])) == (FORMAT, "anna", {"id", "sha256", "text"})
    assert set(raw["items"][0]) == {"item", "sha256", "scenario", "a", "b", "winner"}
    assert set(raw["items"][0]["a"][0]) == {"tip", "rationale"}
    assert {item["winner"] for item in raw["items"]} == {None}


def test_only_tied_pairs_are_compared_in_both_orders(driver: SheetDriver) -> None:
    done = export(driver)
    sides = list(done.stored.sides.values())
    assert len(sides) == 2 * 8, "two pairs, eight scenarios, both orders"
    assert {model for model, _ in done.stored.pairs.values()} == set(MODELS[:2])
    assert Counter(frozenset(two) for two in sides) == dict.fromkeys(map(frozenset, sides), 2)
    assert all((b, a) in sides for a, b in sides)
    assert (done.n_pairs, done.n_scenarios) == (2, 8)


def test_the_file_does_not_reveal_the_pairs(driver: SheetDriver) -> None:
    done = export(driver)
    text = duel_text(done.stored.sheet)
    for secret in ("unmistakable", '"v1"', *done.stored.pairs, done.stored.run_id):
        assert secret not in text
    assert len({len(item.id) for item in done.stored.sheet.items}) == 1


def test_the_same_bytes_are_written_again(driver: SheetDriver) -> None:
    sheet = export(driver).stored.sheet
    again = find_duel(driver.store, driver.experiment, sheet.id)
    assert again is not None
    assert duel_text(again.sheet) == duel_text(sheet)


def test_a_seed_gives_the_same_order(driver: SheetDriver) -> None:
    one, two, other = (export(driver, seed=seed).stored for seed in (5, 5, 6))
    assert list(one.sides.values()) == list(two.sides.values()) != list(other.sides.values())
    assert set(one.sides).isdisjoint(two.sides), "ids do not reveal the seed either"


def test_duels_and_sheets_are_not_mixed_up(driver: SheetDriver) -> None:
    before = judging_status(driver.store, driver.experiment)
    sheet = export(driver).stored.sheet
    assert find_sheet(driver.store, driver.experiment, sheet.id) is None
    (ordinary,) = stored_sheets(driver.store, driver.experiment)
    assert find_duel(driver.store, driver.experiment, ordinary.sheet.id) is None
    after = judging_status(driver.store, driver.experiment)
    assert [judge.duels for judge in after.judges] == [1]
    assert replace(after, judges=before.judges) == before


def test_answers_without_a_tip_are_left_out() -> None:
    def write(cell: PlannedCell, rng: random.Random) -> str:
        from support.judging import three_tips

        silent = cell.cell.model == MODELS[0] and cell.cell.scenario.endswith("morning")
        return "I cannot." if silent else three_tips(cell, rng)

    store = SeededStore()
    driver = SheetDriver(store, record_cells(store, models=MODELS[:2], prompts="v1", write=write))
    judge_at(driver, level)
    cells = read_board_cells(store, driver.experiment.experiment_id, CellFilter())
    runs = {cell.run.run_id: (cell.pair.model, cell.pair.prompt) for cell in cells.cells}
    done = export_duels(store, driver.experiment, DuelRequest(runs, cells.rubric, seed=3))
    assert done.n_without_tips > 0
    assert all(item.a and item.b for item in done.stored.sheet.items)
    assert done.n_scenarios == 8 - done.n_without_tips


# Applying


def test_applied_duels_are_read_back(driver: SheetDriver) -> None:
    done = export(driver)
    applied = apply(driver, filled(done, beta_wins))
    assert (applied.n_finished, applied.n_unfinished) == (16, 0)
    assert (applied.in_both_orders, applied.same_in_both_orders) == (8, 8)
    duels = read_duels(driver.store, driver.experiment)
    assert len(duels) == 16
    assert {duel.pairs["ab".index(str(duel.winner))][0] for duel in duels} == {MODELS[1]}
    assert {duel.judge for duel in duels} == {"anna"}


def test_applying_again_changes_nothing(driver: SheetDriver) -> None:
    raw = filled(export(driver), beta_wins)
    apply(driver, raw)
    before = kept(driver)
    assert apply(driver, raw).changes == ()
    assert kept(driver) == before


def test_a_dry_run_writes_nothing_and_shows_the_changes(driver: SheetDriver) -> None:
    raw = filled(export(driver), beta_wins)
    before = kept(driver)
    applied = apply(driver, raw, dry_run=True)
    assert kept(driver) == before
    assert {change.before for change in applied.changes} == {None}
    assert len(applied.changes) == 16


def test_unfinished_items_stay_open_and_may_be_filled_later(driver: SheetDriver) -> None:
    done = export(driver)
    raw = filled(done, beta_wins)
    part = copy.deepcopy(raw)
    for item in part["items"][:10]:
        item["winner"] = None
    assert (apply(driver, part).n_unfinished, len(read_duels(driver.store, driver.experiment))) == (10, 6)
    assert apply(driver, raw).n_unfinished == 0
    assert apply(driver, part).n_unfinished == 0, "what is emptied keeps what it had"
    assert len(read_duels(driver.store, driver.experiment)) == 16


def test_a_revised_item_keeps_its_history(driver: SheetDriver) -> None:
    done = export(driver)
    apply(driver, filled(done, beta_wins))
    raw = filled(done, beta_wins)
    raw["items"][4]["winner"] = "TIE "
    (change,) = apply(driver, raw).changes
    assert change.after == "tie"
    found = find_duel(driver.store, driver.experiment, done.stored.sheet.id)
    assert found is not None
    (former,) = found.replaced
    assert (former.item, former.winner) == (change.item, change.before)


def test_a_preference_for_the_first_position_is_reported(driver: SheetDriver) -> None:
    applied = apply(driver, filled(export(driver), lambda _a, _b: "a"))
    assert (applied.in_both_orders, applied.same_in_both_orders) == (8, 0)


def test_no_cell_is_touched(driver: SheetDriver) -> None:
    before = driver.cells()
    apply(driver, filled(export(driver), beta_wins))
    assert driver.cells() == before


def test_a_file_without_a_judge_gets_the_name_of_the_option(driver: SheetDriver) -> None:
    raw = filled(export(driver, judge=None), beta_wins)
    with pytest.raises(SheetRefused, match="judge's name"):
        apply(driver, raw)
    assert apply(driver, raw, judge="ben").judge == "ben"
    with pytest.raises(SheetRefused, match="whose sheet this is"):
        apply(driver, raw, judge="cleo")


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a winner that is none": (lambda raw: raw["items"][0].update(winner="c"), "winner: expected 'a', 'b' or 'tie'"),
    "another text": (lambda raw: raw["items"][1]["a"][0].update(tip="Mine!"), "tip 1, a.tip: expected the text"),
    "a tip less": (lambda raw: raw["items"][1]["b"].pop(), "b: expected the answer's 3 tips; found 2"),
    "sides exchanged": (lambda raw: raw["items"][0].update(a=raw["items"][0]["b"]), "a.tip"),
    "another hash": (lambda raw: raw["items"][2].update(sha256="0" * 64), "sha256"),
    "an item twice": (lambda raw: raw["items"].append(raw["items"][0]), "each item once"),
    "a foreign item": (lambda raw: raw["items"].append({"item": "zzz"}), "an item of sheet"),
    "another sheet": (lambda raw: raw.update(sheet="0" * 12), "a sheet exported from"),
    "another experiment": (lambda raw: raw.update(experiment="tip-bench-none"), "an experiment of this MLflow"),
    "another judge": (lambda raw: raw.update(judge="ben"), "whose sheet this is"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_refuses_the_whole_file_and_is_named(driver: SheetDriver, name: str) -> None:
    spoil, message = MISTAKES[name]
    raw = filled(export(driver), beta_wins)
    spoil(raw)
    before = kept(driver)
    with pytest.raises(SheetRefused) as caught:
        apply(driver, raw)
    assert message in str(caught.value)
    assert kept(driver) == before


def test_every_mistake_is_listed(driver: SheetDriver) -> None:
    raw = filled(export(driver), lambda _a, _b: "left")
    with pytest.raises(SheetRefused) as caught:
        apply(driver, raw)
    assert len(caught.value.problems) == 16


# Who has had what


def test_a_judge_does_not_get_the_same_duels_again(driver: SheetDriver) -> None:
    apply(driver, filled(export(driver), beta_wins))
    with pytest.raises(NotEnoughData, match="judged by anna, in both orders"):
        export(driver)
    assert len(export(driver, judge="ben").stored.sheet.items) == 16
    with pytest.raises(NotEnoughData, match="by a judge"):
        export(driver, judge=None)


def test_half_judged_comparisons_are_exported_again(driver: SheetDriver) -> None:
    done = export(driver)
    raw = filled(done, beta_wins)
    for item in raw["items"][:3]:
        item["winner"] = None
    apply(driver, raw)
    assert len(export(driver).stored.sheet.items) == 6


def test_repeated_duels_of_a_judge_count_once(driver: SheetDriver) -> None:
    first, second = export(driver), export(driver)
    apply(driver, filled(first, beta_wins))
    apply(driver, filled(second, lambda _a, _b: "tie"))
    duels = read_duels(driver.store, driver.experiment)
    assert (len(duels), {str(duel.winner) for duel in duels}) == (16, {"tie"})


@pytest.mark.parametrize(
    ("limit", "items"),
    [
        (3, 2),
        (16, 16),
        (100, 16),
    ],
)
def test_a_limit_counts_both_orders(driver: SheetDriver, limit: int, items: int) -> None:
    assert len(export(driver, limit=limit).stored.sheet.items) == items


# With the board


def test_duels_are_shown_with_the_board_and_do_not_change_it(driver: SheetDriver) -> None:
    cells = read_board_cells(driver.store, driver.experiment.experiment_id, CellFilter())
    before = make_board(driver.experiment.name, cells, BoardOptions())
    assert with_duels(driver.store, driver.experiment, before, cells).duels is None
    apply(driver, filled(export(driver), beta_wins))
    board = with_duels(driver.store, driver.experiment, before, cells)
    assert isinstance(board.duels, DuelTable)
    assert board.duels.winner == Pair(MODELS[1], "v1")
    assert board.ranking == before.ranking
    assert "wins the duels" in board.verdict


def test_duels_of_answers_that_are_not_on_the_board_do_not_count(driver: SheetDriver) -> None:
    apply(driver, filled(export(driver), beta_wins))
    cells = read_board_cells(driver.store, driver.experiment.experiment_id, CellFilter())
    assert len(duels_of(driver.store, driver.experiment, cells)) == 16
    assert duels_of(driver.store, driver.experiment, replace(cells, cells=cells.cells[:0])) == []
    assert duels_of(driver.store, driver.experiment, replace(cells, rubric="other@0")) == []
    assert duels_of(driver.store, driver.experiment, replace(cells, cell_filter=CellFilter(judge="ben"))) == []


def test_a_duel_of_a_pair_with_itself_does_not_count(driver: SheetDriver) -> None:
    """As in a key that was changed by hand."""
    done = export(driver)
    apply(driver, filled(done, beta_wins))
    _, texts = driver.store.get(done.stored.run_id)
    key = json.loads(texts[KEY])
    item, (a, _) = next(iter(key["items"].items()))
    key["items"][item] = [a, a]
    driver.store.update(done.stored.run_id, RunChange(texts={KEY: json.dumps(key)}, at_ms=1))
    cells = read_board_cells(driver.store, driver.experiment.experiment_id, CellFilter())
    duels = duels_of(driver.store, driver.experiment, cells)
    assert len(duels) == 15
    assert all(duel.first != duel.second for duel in duels)


def test_duels_of_pairs_that_no_longer_tie_are_left_out(driver: SheetDriver) -> None:
    apply(driver, filled(export(driver), beta_wins))
    cells = read_board_cells(driver.store, driver.experiment.experiment_id, CellFilter())
    board = make_board(driver.experiment.name, cells, BoardOptions())
    board = replace(board, ranking=replace(board.ranking, tied=(Pair(MODELS[2], "v1"),)))
    assert with_duels(driver.store, driver.experiment, board, cells).duels is None


# Who meets whom


def contenders(pairs: int, scenarios: int) -> list[Contender]:
    return [
        Contender(f"{pair}-{scenario}", (f"m{pair}", "v1"), f"s{scenario:02}", "0", (Tip(f"{pair} {scenario}"),))
        for pair in range(pairs)
        for scenario in range(scenarios)
    ]


@settings(max_examples=30)
@given(st.integers(2, 5), st.integers(1, 6), st.integers(0, 9))
def test_both_orders_of_a_comparison_are_far_apart(pairs: int, scenarios: int, seed: int) -> None:
    found = find_match_ups(contenders(pairs, scenarios))
    shows = [(a.run_id, b.run_id) for a, b in order_showings(found, random.Random(seed))]
    assert len(shows) == len(set(shows)) == 2 * len(found)
    assert all(abs(shows.index((b, a)) - at) >= 0.75 * len(found) for at, (a, b) in enumerate(shows))


@settings(max_examples=30)
@given(st.permutations(range(12)))
def test_the_order_of_answers_does_not_change_the_comparisons(order: list[int]) -> None:
    all_ = contenders(3, 4)
    assert find_match_ups([all_[at] for at in order]) == find_match_ups(all_)


def test_answers_of_the_same_repeat_are_compared() -> None:
    two = [
        replace(each, run_id=f"{each.run_id}-{repeat}", repeat=repeat) for each in contenders(2, 1) for repeat in "01"
    ]
    assert [each.one.repeat == each.other.repeat for each in find_match_ups(two)] == [True, True]


def test_a_limit_takes_whole_scenarios_first() -> None:
    found = find_match_ups(contenders(3, 6))
    chosen = choose_match_ups(found, 7, random.Random(1))
    counts = Counter(each.scenario for each in chosen)
    assert sorted(counts.values()) == [1, 3, 3]


def test_a_small_limit_spreads_the_comparisons_over_scenarios() -> None:
    chosen = choose_match_ups(find_match_ups(contenders(6, 8)), 20, random.Random(1))
    assert sorted(Counter(each.scenario for each in chosen).values()) == [2, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("limit", [4, 20, 60])
def test_no_pair_is_drawn_more_often_than_another(limit: int) -> None:
    found = find_match_ups(contenders(6, 8))
    shown: Counter[str] = Counter()
    for seed in range(400):
        for each in choose_match_ups(found, limit, random.Random(seed)):
            shown.update((each.one.pair[0], each.other.pair[0]))
    expected = 400 * limit * 2 / 6
    assert all(abs(count - expected) < 0.1 * expected for count in shown.values()), shown


# Sheets first, then duels


def test_a_duel_closes_the_judges_sheets(driver: SheetDriver) -> None:
    export(driver)
    with pytest.raises(SheetsClosed, match="anna has opened duels"):
        driver.export("anna", everything=True)
    own = next(stored_sheets(driver.store, driver.experiment, "anna"))
    raw = json.loads(sheet_text(own.sheet, own.scores))
    raw["items"][0]["tips"][0]["scores"] = {"relevance": 1, "actionability": 1, "tone": 1}
    with pytest.raises(SheetsClosed, match="closes their sheets"):
        driver.apply(raw)
    assert driver.export("ben", everything=True).n_cells, "other judges go on"


def test_a_duel_is_refused_while_a_sheet_is_open(driver: SheetDriver) -> None:
    open_ = driver.export("carla", everything=True).stored
    with pytest.raises(SheetsClosed, match=rf"carla has the open sheet {open_.sheet.id}"):
        export(driver, judge="carla")
    unnamed = filled(export(driver, judge=None), lambda _a, _b: "a")
    with pytest.raises(SheetsClosed, match="open sheet"):
        apply_duels(driver.store, {**unnamed, "judge": "carla"})
    driver.apply(json.loads(sheet_text(open_.sheet)), judge="carla", final=True)
    assert export(driver, judge="carla").stored.sheet.items, "finishing the sheet opens the way to duels"
