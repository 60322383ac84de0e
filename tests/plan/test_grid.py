"""The grid: complete, ordered by model, and keyed by exactly what reaches the model."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.errors import UsageError
from tipbench.plan.collect_config import CollectConfig, make_config
from tipbench.plan.grid import (
    ModelIdentity,
    PlannedCell,
    cell_seed,
    cells_by_model,
    choose_scenarios,
    conditions_of,
    plan_grid,
    scenarios_warning,
)
from tipbench.plan.suite import load_suite

TIPS = load_suite("tips")
MODELS = [ModelIdentity("a:1b", "sha-a"), ModelIdentity("b:1b", "sha-b")]


def grid(models: list[ModelIdentity] = MODELS, /, **changes: object) -> list[PlannedCell]:
    return plan_grid(TIPS, make_config(changes), models)


def keys(**changes: object) -> set[str]:
    return {cell.key for cell in grid(**changes)}


def test_the_grid_is_the_full_product() -> None:
    cells = grid(repeats=2)
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 3 * 8 * 2


def test_four_models_and_three_prompts_have_48_cells_with_at_most_four_scenarios() -> None:
    cells = grid([ModelIdentity(f"{name}:1b", f"sha-{name}") for name in "abcd"], n_scenarios=4)
    assert len({cell.key for cell in cells}) == 48
    assert len({cell.scenario.id for cell in cells}) == 4


def test_each_model_is_one_block() -> None:
    assert [(model, len(cells)) for model, cells in cells_by_model(grid())] == [("a:1b", 24), ("b:1b", 24)]


def test_two_names_of_one_digest_count_once() -> None:
    alias = [ModelIdentity("a:1b", "same"), ModelIdentity("alias:1b", "same")]
    assert {cell.cell.model for cell in grid(alias)} == {"a:1b"}


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.1}, {"num_ctx": 8192}, {"num_predict": 64}, {"seed": 1}, {"n_tips": 3}, {"diversity": True}],
)
def test_settings_that_reach_the_model_change_every_key(change: dict[str, object]) -> None:
    assert not keys() & keys(**change)


@pytest.mark.parametrize(
    "change",
    [{"concurrency": 8}, {"timeout_s": 5}, {"ollama_url": "http://other:1"}, {"experiment": "tip-bench-x"}],
)
def test_settings_that_do_not_reach_the_model_change_no_key(change: dict[str, object]) -> None:
    assert keys() == keys(**change)


def test_more_repeats_prompts_or_scenarios_keep_the_old_keys() -> None:
    small = keys(prompts="v1", n_scenarios=3)
    assert small < keys(n_scenarios=3) < keys() < keys(repeats=2)


def test_a_key_depends_on_the_digest_and_not_on_the_name() -> None:
    renamed = [ModelIdentity("renamed:1b", "sha-a"), ModelIdentity("b:1b", "sha-b")]
    moved = [ModelIdentity("a:1b", "sha-a2"), MODELS[1]]
    assert {cell.key for cell in grid(renamed)} == keys()
    assert len({cell.key for cell in grid(moved)} & keys()) == 24


def test_the_rubric_and_the_controls_change_no_key() -> None:
    other = dataclasses.replace(TIPS, rubric=dataclasses.replace(TIPS.rubric, id="other"), controls=())
    assert {cell.key for cell in plan_grid(other, CollectConfig(), MODELS)} == keys()


def test_models_share_their_seeds_and_cells_do_not() -> None:
    seeds = [cell.options["seed"] for cell in grid()]
    assert seeds[:24] == seeds[24:]
    assert len(set(seeds)) == 24


@given(st.integers(0, 2**31 - 1), st.text(max_size=20), st.text(max_size=20), st.integers(1, 100))
def test_a_cell_seed_is_valid_for_every_engine(seed: int, scenario: str, prompt: str, repeat: int) -> None:
    assert 0 <= cell_seed(seed, scenario, prompt, repeat) < 2**31


def test_cells_of_tips_have_the_same_keys_in_tips_32() -> None:
    larger = {cell.key for cell in plan_grid(load_suite("tips-32"), CollectConfig(), MODELS)}
    assert keys() < larger


def test_an_unknown_prompt_is_refused_with_the_available_ones() -> None:
    with pytest.raises(UsageError, match=r"no prompt v9; it has v1, v2-mentor, v3-few-shot"):
        grid(prompts="v1,v9")


def test_more_scenarios_than_there_are_means_all_with_a_warning() -> None:
    assert choose_scenarios(TIPS, 9) == TIPS.scenarios
    assert "has 8 scenarios, fewer than n_scenarios 9" in (scenarios_warning(TIPS, 9) or "")
    assert scenarios_warning(TIPS, 8) is None


def test_the_warning_suggests_the_larger_suite_only_to_users_of_the_smaller() -> None:
    assert "tips-32 has more" in (scenarios_warning(TIPS, 99) or "")
    assert "has more" not in (scenarios_warning(load_suite("tips-32"), 99) or "")


def test_conditions_depend_only_on_settings_that_reach_the_model() -> None:
    base = conditions_of(CollectConfig(), TIPS)
    different: list[dict[str, object]] = [{"n_tips": 3}, {"temperature": 0.1}, {"diversity": True}, {"num_ctx": 8192}]
    equal: list[dict[str, object]] = [{"suite": "tips-32"}, {"concurrency": 4}, {"timeout_s": 9}, {"models": "x"}]
    for change in different:
        assert conditions_of(make_config(change), TIPS) != base
    for change in equal:
        assert conditions_of(make_config(change), TIPS) == base
    other_sampling = dataclasses.replace(TIPS, sampling={**TIPS.sampling, "top_k": 50})
    assert conditions_of(CollectConfig(), other_sampling) != base


REFERENCE = ModelIdentity("baseline:template", "sha-t", has_prompt=False)


def test_model_without_a_prompt_has_one_cell_per_scenario() -> None:
    cells = grid([MODELS[0], REFERENCE])
    own = [cell for cell in cells if cell.cell.model == REFERENCE.name]
    assert (len(cells), len(own)) == (24 + 8, 8)
    assert {cell.cell.prompt for cell in own} == {"none"}
    assert {cell.rendered.system + cell.rendered.user for cell in own} == {""}


@pytest.mark.parametrize(
    ("change", "same"),
    [({"prompts": "v1"}, True), ({"n_tips": 3}, False), ({"diversity": True}, False), ({"temperature": 0.1}, False)],
)
def test_key_without_a_prompt_depends_on_the_other_requested_values(change: dict[str, object], same: bool) -> None:
    before, after = ({cell.key for cell in grid([REFERENCE], **options)} for options in ({}, change))
    assert (before == after) if same else not before & after
