"""Status: progress of judging, and the reliability of each judge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support import boards
from support.judging import SeededStore, SheetDriver, always, at_random, fill, record_cells, three_tips
from tipbench.cli.judge_status import history_lines
from tipbench.judge.charts import history_chart, history_rows
from tipbench.judge.export import ExportRequest
from tipbench.judge.rules import RulesJudge
from tipbench.judge.run import run_judge
from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetSummary, judging_status
from tipbench.plan.suite import load_suite
from tipbench.record.run import RunChange

CELLS = 24


@pytest.fixture
def driver() -> SheetDriver:
    store = SeededStore()
    return SheetDriver(store, record_cells(store, models=("alpha:135m",)))


def status(driver: SheetDriver) -> JudgingStatus:
    return judging_status(driver.store, driver.experiment)


def of(state: JudgingStatus, name: str) -> JudgeStatus:
    (found,) = [judge for judge in state.judges if judge.judge == name]
    return found


def counts(state: JudgingStatus) -> tuple[int, int, int, int]:
    return state.cells, state.pending, state.held, state.judged


def test_before_any_judging_everything_is_pending_and_drift_is_unknown(driver: SheetDriver) -> None:
    state = status(driver)
    assert counts(state) == (CELLS, CELLS, 0, 0)
    assert (state.judges, state.history, state.alpha, state.rubrics) == ((), (), {}, ())


def test_an_exported_sheet_counts_as_open_items(driver: SheetDriver) -> None:
    done = driver.export("anna")
    anna = of(status(driver), "anna")
    assert (anna.sheets, anna.open_items, anna.cells) == (1, len(done.stored.entries), 0)
    assert (anna.verdict, anna.error, anna.minutes_per_item, anna.self_exact) == (None, None, None, None)
    assert status(driver).history == (), "it has not come back"


def test_a_finished_sheet_has_no_open_items(driver: SheetDriver) -> None:
    raw = fill(driver.export("anna").stored)
    half = {**raw, "items": raw["items"][: len(raw["items"]) // 2]}
    driver.apply(half)
    assert of(status(driver), "anna").open_items == len(raw["items"]) - len(half["items"])
    driver.apply(half, final=True)
    assert of(status(driver), "anna").open_items == 0


def test_a_sheet_without_a_name_has_no_judge_until_it_is_applied(driver: SheetDriver) -> None:
    raw = fill(driver.export(None).stored)
    assert status(driver).judges == ()
    driver.apply(raw, judge="anna")
    assert of(status(driver), "anna").cells == CELLS


def test_what_is_applied_counts_and_the_judge_is_measured(driver: SheetDriver) -> None:
    driver.judged_by("anna")
    state = status(driver)
    assert counts(state) == (CELLS, 0, 0, CELLS)
    assert state.rubrics == ("tip-v1",)
    anna = of(state, "anna")
    assert (anna.cells, anna.held, anna.open_items, anna.verdict, anna.error) == (CELLS, 0, 0, "fine", 0.0)
    assert anna.minutes_per_item is not None
    assert 0 <= anna.minutes_per_item < 1
    assert state.twice == 0
    assert set(state.alpha.values()) == {None}, "one judge cannot agree with anybody"


def test_minutes_are_those_from_export_to_apply_for_each_item(driver: SheetDriver) -> None:
    judging = driver.export("anna").stored
    driver.apply(fill(judging))
    times = {"exported_at": "2026-03-01T10:00:00.000+00:00", "applied_at": "2026-03-01T12:00:00.000+00:00"}
    driver.store.update(judging.run_id, RunChange(tags=times, at_ms=1))
    assert of(status(driver), "anna").minutes_per_item == pytest.approx(120 / len(judging.entries))


def test_held_cells_are_pending_and_held_until_another_judge_has_scored_them(driver: SheetDriver) -> None:
    driver.judged_by("anna", always(5))
    state = status(driver)
    assert counts(state) == (CELLS, CELLS, CELLS, 0)
    anna = of(state, "anna")
    assert (anna.cells, anna.held, anna.verdict) == (0, CELLS, "beyond the limit")
    assert state.use_of_scores(anna) == "held"
    driver.judged_by("ben")
    assert counts(status(driver)) == (CELLS, 0, 0, CELLS)
    assert of(status(driver), "anna").held == CELLS


def test_the_use_of_a_judges_scores_depends_on_what_is_held_accepted_and_unchecked() -> None:
    judging = boards.judging()
    anna, ben, rules = judging.judges
    assert [judging.use_of_scores(each) for each in judging.judges] == ["count", "count, drift accepted", "provisional"]
    assert judging.use_of_scores(replace(ben, held=1)) == "partly held"
    assert judging.use_of_scores(replace(ben, held=1, cells=0)) == "held"
    assert judging.use_of_scores(replace(anna, unchecked=2)) == "count, unchecked"
    assert judging.use_of_scores(replace(rules, held=1)) == "provisional"
    assert judging.use_of_scores(replace(anna, cells=0)) == "none"  # has a sheet, and scored nothing yet


def test_a_judges_trends_cover_all_measured_sheets_and_are_in_the_json(driver: SheetDriver) -> None:
    driver.judged_by("anna")
    record_cells(driver.store, models=("beta:1b",))
    driver.judged_by("anna", always(4))
    trends = of(status(driver), "anna").trends
    assert trends is not None
    assert [(each.scale, each.sheets) for each in trends.sums] == [
        (scale, 2) for scale in load_suite("tips").rubric.scale_names
    ]
    assert trends.compression is not None
    assert trends.compression.value < 0
    (judge,) = status(driver).to_json()["judges"]
    assert judge["trends"] == trends.to_json()
    assert set(judge["trends"]) == {"sums", "fatigue", "compression"}


def test_agreement_of_two_judges_separates_similar_from_random() -> None:
    found = {}
    for name, rule in (("alike", None), ("random", at_random)):
        store = SeededStore()
        driver = SheetDriver(store, record_cells(store, models=("alpha:135m",)))
        one, two = (driver.export(judge, everything=True, seed=3).stored for judge in ("anna", "ben"))
        first = fill(one)
        driver.apply(first)
        second = fill(two, rule) if rule else _copied(first, fill(two))
        driver.apply(second, accept="to see")
        state = status(driver)
        assert state.twice == CELLS
        found[name] = state.alpha
    assert found["alike"] == dict.fromkeys(("relevance", "actionability", "tone"), 1.0)
    assert all(value is not None and abs(value) < 0.4 for value in found["random"].values())


def test_a_scale_that_a_stored_tip_lacks_is_left_out_of_the_agreement(driver: SheetDriver) -> None:
    for judge in ("anna", "ben"):
        driver.judged_by(judge, everything=True)
    before = status(driver).alpha
    driver.remove_score(next(iter(driver.cells())), "anna", "tone")
    after = status(driver).alpha
    assert after["tone"] not in (None, before["tone"])
    assert after == {**before, "tone": after["tone"]}


def _copied(source: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """The second sheet with the first one's scores wherever the tips are the same."""
    given = {tip["tip"]: tip["scores"] for item in source["items"] for tip in item["tips"]}
    for item in target["items"]:
        for tip in item["tips"]:
            tip["scores"] = given.get(tip["tip"], tip["scores"])
    return target


def test_repeated_answers_give_the_share_of_equal_scores(driver: SheetDriver) -> None:
    driver.judged_by("anna")
    record_cells(driver.store, models=("gamma:3b",))
    driver.judged_by("anna", seed=8)
    share = of(status(driver), "anna").self_exact
    assert share is not None
    assert 0 <= share <= 1
    assert of(status(driver), "anna").sheets == 2


def test_floored_answers_are_judged_and_counted_apart() -> None:
    store = SeededStore()
    first = load_suite("tips").scenarios[0].id
    driver = SheetDriver(
        store,
        record_cells(
            store,
            models=("alpha:135m",),
            write=lambda cell, rng: "No." if cell.scenario.id == first else three_tips(cell, rng),
        ),
    )
    state = status(driver)
    assert counts(state) == (CELLS, 21, 0, 3)
    assert state.floored == 3


def test_provisional_judges_are_listed_separately_after_people(driver: SheetDriver) -> None:
    run_judge(driver.store, driver.experiment, RulesJudge(), ExportRequest(seed=1))
    driver.judged_by("zoe")
    state = status(driver)
    assert [(judge.judge, judge.provisional, judge.cells) for judge in state.judges] == [
        ("zoe", False, CELLS),
        ("rules", True, CELLS),
    ]
    assert [(sheet.judge, sheet.provisional) for sheet in state.history] == [("rules", True), ("zoe", False)]


def test_history_is_oldest_first_with_accepted_drift(driver: SheetDriver) -> None:
    raw = fill(driver.export("anna").stored, always(5))
    driver.apply(raw, accept="agreed")
    driver.judged_by("ben", everything=True)
    assert [(sheet.judge, sheet.status, sheet.accepted) for sheet in status(driver).history] == [
        ("anna", "applied", "agreed"),
        ("ben", "applied", None),
    ]


# The history, drawn


@pytest.fixture
def history(driver: SheetDriver) -> tuple[SheetSummary, ...]:
    """A sheet beyond the limit, one that is fine, and one too small for a verdict."""
    driver.judged_by("anna", always(5))
    driver.judged_by("ben", everything=True)
    driver.judged_by("eva", limit=3, everything=True)
    return status(driver).history


def test_the_terminal_shows_a_strip_for_each_sheet_and_scale(history: tuple[SheetSummary, ...]) -> None:
    lines = history_lines(history)
    strips = [line for line in lines if "●" in line]
    assert len(strips) == 3 * 3
    assert sum("too far off" in line for line in strips) == 3
    assert [line.split("  ")[-1] for line in lines if "●" not in line] == [
        "too far off, held",
        "fine, applied",
        "fine, applied",
    ]


@pytest.mark.parametrize(("bias", "at"), [(-9.0, 0), (0.0, 12), (50.0, 24)])
def test_a_strip_has_its_dot_where_the_bias_is_and_never_outside(
    bias: float, at: int, history: tuple[SheetSummary, ...]
) -> None:
    scale = {"scale": "tone", "bias": bias, "interval": [bias - 30, bias + 30], "beyond": False}
    sheet = replace(history[0], drift={"verdict": "fine", "scales": [scale]})
    strip = history_lines((sheet,))[1].split()[1]
    assert len(strip) == 25
    assert strip.index("●") == at


def test_a_sheet_without_any_control_has_no_dot(history: tuple[SheetSummary, ...]) -> None:
    scale = {"scale": "tone", "bias": None, "interval": None, "beyond": False}
    sheets = [replace(history[0], drift=drift) for drift in (None, {"verdict": "unknown", "scales": [scale]})]
    assert history_lines((sheets[0],)) == history_lines((sheets[1],))[:1]
    assert history_lines((sheets[1],))[1].split() == ["tone", "unknown"]
    assert history_rows(sheets) == []


def test_the_chart_has_a_row_for_each_sheet_and_scale(history: tuple[SheetSummary, ...]) -> None:
    rows = history_rows(history)
    assert len(rows) == 9
    assert {row["verdict"] for row in rows if row["judge"] == "anna"} == {"beyond the limit"}
    assert all(row["low"] <= row["bias"] <= row["high"] for row in rows)
    assert len({row["sheet"] for row in rows}) == 3


def test_the_chart_is_drawn_without_data(history: tuple[SheetSummary, ...]) -> None:
    pytest.importorskip("altair")
    from tipbench.charts import to_svg

    svg = to_svg(history_chart(history))
    assert all(name in svg for name in ("anna", "ben", "eva", "relevance", "actionability", "tone"))
    assert to_svg(history_chart([replace(history[0], drift=None)])).startswith("<svg")
