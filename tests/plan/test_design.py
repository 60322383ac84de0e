"""The design: looks and levels of an experiment, and how tags store it."""

from __future__ import annotations

import pytest

from tipbench.plan.design import (
    DESIGN_TAG,
    Design,
    design_tags,
    extend_design,
    least_scenarios,
    make_design,
    read_design,
)


def names(n: int) -> list[str]:
    return [f"persona{at}@morning" for at in range(n)]


@pytest.mark.parametrize(
    ("n", "looks", "level"),
    [
        (4, (4,), 0.05),
        (8, (8,), 0.05),
        (12, (8, 12), 0.0294),
        (16, (8, 16), 0.0294),
        (20, (8, 16, 20), 0.0221),
        (32, (8, 16, 24, 32), 0.0182),
        (50, (13, 25, 38, 50), 0.0182),
        (500, (125, 250, 375, 500), 0.0182),
    ],
)
def test_looks_are_every_eight_scenarios_and_at_most_four(n: int, looks: tuple[int, ...], level: float) -> None:
    design = make_design(names(n))
    assert (design.looks, design.level) == (looks, level)
    single = make_design(names(n), "one")
    assert (single.looks, single.level) == ((n,), 0.05)


@pytest.mark.parametrize(("level", "least"), [(0.05, 6), (0.0294, 7), (0.0221, 7), (0.0182, 7)])
def test_seven_scenarios_are_needed_where_six_cannot_be_significant(level: float, least: int) -> None:
    assert least_scenarios(level) == least


@pytest.mark.parametrize("n", [8, 500])
def test_design_is_read_back_from_tags_within_the_limit_of_mlflow(n: int) -> None:
    design = make_design(names(n))
    tags = design_tags(design)
    assert max(len(value) for value in tags.values()) <= 5000
    assert read_design({**tags, "tipbench.revision": "x"}) == design
    if n > 8:
        del tags[f"{DESIGN_TAG}.002"]
        assert read_design(tags) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "[" * 100_000),
        '{"scenarios": ["a"], "looks": [2], "level": 0.05}',
        '{"scenarios": ["a"], "looks": [Infinity], "level": 0.05}',
        '{"scenarios": 1, "looks": [1]}',
    ],
)
def test_tag_that_is_not_a_design_is_ignored(text: str) -> None:
    assert read_design({DESIGN_TAG: text}) is None
    assert read_design({}) is None


def test_added_scenarios_follow_those_of_the_design() -> None:
    first = make_design(names(8))
    assert extend_design(first, names(6), "auto") is first
    more = extend_design(first, [*names(12)[4:], *names(4)], "auto")
    assert more == make_design(names(12))
    assert extend_design(None, names(12), "one") == Design(tuple(names(12)), (12,), 0.05)
    assert extend_design(make_design(names(12), "one"), names(16), "auto").looks == (16,)
