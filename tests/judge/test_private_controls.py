"""Controls made from judged tips: several judges agree, and the result is a valid controls file."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.judging import SeededStore, SheetDriver, agreed, at_random, fill, record_cells
from tipbench.judge.controls import agreed_controls, controls_toml
from tipbench.judge.material import read_cells
from tipbench.plan.suite import load_suite

SUITE = load_suite("tips")


@pytest.fixture(scope="module")
def judged() -> SheetDriver:
    """Two judges who score nearly everything alike."""
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store, models=("alpha:135m",)))
    for judge in ("anna", "ben"):
        raw: dict[str, Any] = fill(driver.export(judge, everything=True, seed=1).stored, agreed, seed=1)
        for item in raw["items"]:
            for tip in item["tips"]:
                relevance = 1 + len(tip["tip"]) % 5
                tip["scores"] = {
                    "relevance": relevance,
                    "actionability": 3,
                    "tone": min(5, relevance + (judge == "ben")),
                }
        driver.apply(raw, accept="these scores are the test's own")
    return driver


def test_tips_that_judges_agree_on_become_controls_with_the_lower_median(judged: SheetDriver, tmp_path: Path) -> None:
    cells = read_cells(judged.store, judged.experiment.experiment_id)
    controls = agreed_controls(cells, SUITE.rubric, per_scenario=4)
    assert Counter(control.scenario for control in controls) == dict.fromkeys((s.id for s in SUITE.scenarios), 4)
    assert {control.scores["relevance"] for control in controls} >= {1, 5}, "spread over the range"
    assert all(control.scores["tone"] == control.scores["relevance"] for control in controls), "the lower median"
    (tmp_path / "suite.toml").write_text('name = "own"\ntitle = "Own"\nextends = "tips"\n')
    (tmp_path / "controls.toml").write_text(controls_toml(controls, SUITE.rubric))
    loaded = {control.tip for control in load_suite(str(tmp_path)).controls}
    assert {control.tip for control in controls} <= loaded


def test_disagreement_too_few_judges_and_known_tips_are_left_out(judged: SheetDriver) -> None:
    cells = read_cells(judged.store, judged.experiment.experiment_id)
    assert agreed_controls(cells, SUITE.rubric, min_judges=3) == []
    every = [tip.tip for cell in cells for tip in cell.tips]
    assert agreed_controls(cells, SUITE.rubric, exclude=every) == []
    driver = SheetDriver(SeededStore(), judged.experiment)
    driver.store.copy_from(judged.store)  # type: ignore[attr-defined]
    raw = fill(driver.export("carla", everything=True, seed=2).stored, at_random)
    driver.apply(raw, accept="at random")
    noisy = agreed_controls(read_cells(driver.store, driver.experiment.experiment_id), SUITE.rubric, min_judges=3)
    assert len(noisy) < len(agreed_controls(cells, SUITE.rubric, per_scenario=1000))


def test_any_text_of_a_tip_round_trips_through_the_file() -> None:
    from dataclasses import replace

    odd = replace(SUITE.controls[0], tip='Say "stop"\\now\n– then 😀 \x7f', rationale="")
    (read,) = tomllib.loads(controls_toml([odd], SUITE.rubric))["controls"]
    assert (read["tip"], read["rationale"]) == (odd.tip, "")


def test_every_scenario_of_the_large_suite_has_five_controls_over_the_range() -> None:
    suite = load_suite("tips-32")
    count = Counter(control.scenario for control in suite.controls)
    assert len(count) == 32
    assert min(count.values()) >= 5
    own = [control for control in suite.controls if control.scenario not in {s.id for s in SUITE.scenarios}]
    for scale in suite.rubric.scales:
        steps = Counter(control.scores[scale.name] for control in own)
        assert all(steps[step] >= 0.09 * len(own) for step in range(scale.min, scale.max + 1)), (scale.name, steps)
