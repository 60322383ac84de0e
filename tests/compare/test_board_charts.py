"""The board's charts: every state has a shape, every row is there, and odd boards are drawn too."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET  # our own SVG
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.boards import HOSTILE, TWELVE, board
from tipbench.charts import DARK, LIGHT, save_chart, to_svg
from tipbench.compare.charts import (
    MEAN,
    NARROW,
    WIDE,
    PlotArea,
    Point,
    forest,
    forest_rows,
    front_of,
    heat_map,
    heat_map_means,
    ink_on,
    labels_of,
    pareto,
    place_labels,
    points_of,
    shade,
)
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.report import State, state_of

pytest.importorskip("altair")

CHARTS: tuple[Callable[..., Any], ...] = (forest, heat_map, pareto)


def gap(pair: Pair, scenario: str) -> bool:
    """One pair was not judged in the mornings and evenings, which leaves it four scenarios of eight."""
    return pair == Pair("gemma3:1b", "v1") and scenario.endswith(("morning", "evening"))


def svg_of(chart: Any) -> str:
    assert chart is not None
    return to_svg(chart)


def width_of(svg: str) -> float:
    return float(ET.fromstring(svg).attrib["width"])  # noqa: S314


@pytest.fixture(scope="module")
def plain() -> Leaderboard:
    return board()


@pytest.mark.parametrize("draw", CHARTS)
def test_each_chart_is_drawn_in_both_themes_and_fits_a_narrow_page(
    draw: Callable[..., Any], plain: Leaderboard
) -> None:
    assert LIGHT.background in to_svg(draw(plain, LIGHT), LIGHT)
    assert DARK.background in to_svg(draw(plain, DARK), DARK)
    assert width_of(to_svg(draw(plain, narrow=True))) <= NARROW + 14


def test_a_chart_is_also_a_png(plain: Leaderboard, tmp_path: Path) -> None:
    save_chart(forest(plain), tmp_path / "board.png")
    assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")


def test_a_forest_has_the_same_width_whatever_its_names(plain: Leaderboard) -> None:
    long = board([Pair("m" * 300 + str(at), "v1") for at in range(3)])
    assert width_of(to_svg(forest(long))) == width_of(to_svg(forest(plain))) == WIDE


@pytest.mark.parametrize("count", [1, 40])
def test_a_forest_has_a_row_for_every_pair_in_the_boards_order(count: int) -> None:
    made = board([Pair(f"model{at:02}", "v1") for at in range(count)])
    labels = [f"{standing.pair}" for standing in made.standings]
    assert [row["label"] for row in forest_rows(made)] == labels
    svg = to_svg(forest(made))
    assert all(f">{label}<" in svg for label in labels)


def test_the_state_of_a_row_is_visible_without_colour() -> None:
    made = board(missing=gap)
    states = {state_of(made, standing.pair) for standing in made.standings}
    assert states == set(State) - {State.REFERENCE}
    svg = to_svg(forest(made))
    legend = [path.split()[0] for path in re.findall(r'd="([^"]+)"[^>]*stroke-width="2"', svg)]
    assert len(set(legend)) >= 3
    for label in ("leader", "tied", "clearly worse", "not ranked"):
        assert f">{label}<" in svg
    hollow = re.findall(rf'fill="{LIGHT.background}"[^>]*stroke="{LIGHT.muted}"', svg)
    assert hollow


def test_the_shading_ends_where_rows_are_separated() -> None:
    made = board(missing=gap)
    shaded = [row["label"] for row in forest_rows(made) if row["shaded"]]
    assert shaded == [str(made.ranking.leader), *map(str, made.ranking.tied_ranked)]


def test_a_decided_board_shades_nothing() -> None:
    made = board(TWELVE[:2], lead=4, noise=0.3)
    assert made.ranking.decided
    assert not any(row["shaded"] for row in forest_rows(made))


def test_unjudged_rows_are_named_without_a_point() -> None:
    made = board(TWELVE[:3], missing=lambda _pair, _scenario: True)
    rows = forest_rows(made)
    assert [row["value"] for row in rows] == ["not judged"] * 3
    assert to_svg(forest(made)).count(">not judged<") == 3
    assert pareto(made) is None
    assert svg_of(heat_map(made))


def test_one_scenario_gives_a_dot_and_no_interval() -> None:
    made = board(TWELVE[:2], n=1)
    assert all(row["low"] is None and "no interval" in row["value"] for row in forest_rows(made))
    assert to_svg(forest(made))


def test_hostile_names_are_drawn_as_text() -> None:
    made = board([Pair(name, "v1") for name in HOSTILE])
    for draw in CHARTS[:3]:
        svg = to_svg(draw(made))
        ET.fromstring(svg)  # noqa: S314
        assert "<script" not in svg
        assert "<img" not in svg
        assert "x" * 200 not in svg


@settings(max_examples=10)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=60), st.text(min_size=1)), min_size=1, max_size=8, unique=True))
def test_short_names_are_short_and_no_two_alike(names: list[tuple[str, str]]) -> None:
    made = board([Pair(*name) for name in names], n=2)
    labels = list(labels_of(made, 30).values())
    assert len(set(labels)) == len(names)
    assert all(len(label) <= 40 for label in labels)


def test_both_ends_of_a_long_name_are_kept() -> None:
    made = board([Pair("hf.co/somebody/a-model-with-a-long-name-GGUF:Q4_K_M", "v2-mentor")])
    label = labels_of(made, 38)[made.standings[0].pair]
    assert label.startswith("hf.co/")
    assert label.endswith("Q4_K_M/v2-mentor")


def test_the_heat_map_has_every_mean_and_its_margins(plain: Leaderboard) -> None:
    made = plain
    models, prompts, means = heat_map_means(made)
    assert len(models) == 4
    assert len(prompts) == 3
    row = [means[models[0], prompt] for prompt in prompts]
    assert means[models[0], MEAN] == pytest.approx(sum(value or 0 for value in row) / 3)
    svg = svg_of(heat_map(made))
    assert all(f">{value:.2f}<" in svg for value in means.values() if value is not None)


def test_a_margin_with_an_incomplete_pair_is_unknown() -> None:
    _, _, means = heat_map_means(board(missing=gap))
    assert means["gemma3:1b", MEAN] is None
    assert means[MEAN, "v1"] is None
    assert means["llama3.2:3b", MEAN] is not None


def test_a_board_by_model_has_no_heat_map() -> None:
    made = board(by="model")
    assert heat_map(made) is None
    assert to_svg(forest(made))


@settings(max_examples=30)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
@given(share=st.floats(0, 1))
def test_a_number_has_enough_contrast_on_its_cell(theme: Any, share: float) -> None:
    fill = shade(theme, share, 0.0, 1.0)
    assert contrast(fill, ink_on(fill)) >= 4.5


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


points = st.lists(
    st.builds(
        Point,
        st.integers(0, 10**6).map(lambda at: Pair(str(at), "v1")),
        st.floats(0.01, 100),
        st.floats(2, 17),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
    unique_by=lambda point: point.pair,
)


@settings(max_examples=30)
@given(points)
def test_the_front_has_the_rows_that_no_other_beats_in_both(given_points: list[Point]) -> None:
    ranked = [point for point in given_points if point.is_ranked]
    front = front_of(given_points)
    for point in ranked:
        beaten = any(
            other.latency <= point.latency
            and other.composite >= point.composite
            and (other.latency, other.composite) != (point.latency, point.composite)
            for other in ranked
        )
        same = any((p.latency, p.composite) == (point.latency, point.composite) for p in front)
        assert same is not beaten


@settings(max_examples=30)
@given(points)
def test_labels_cover_neither_points_nor_each_other(given_points: list[Point]) -> None:
    area = PlotArea.for_points(given_points, 600, 340)
    placed = place_labels(area, given_points, dict.fromkeys(given_points, "a-model/v1"))
    seen = [(label["x"], label["y"], label["align"]) for label in placed]
    assert len(set(seen)) == len(seen)
    assert all(0 <= float(label["y"]) <= 340 for label in placed)


def test_slow_and_very_fast_models_fit_on_one_chart() -> None:
    made = board(latency={"qwen2.5:0.5b": 0.001, "qwen2.5:1.5b": 0.02, "gemma3:1b": 2.0, "llama3.2:3b": 30.0})
    assert PlotArea.for_points(points_of(made), 600, 340).log
    assert svg_of(pareto(made))


def test_a_latency_of_zero_is_drawn() -> None:
    assert svg_of(pareto(board(latency=dict.fromkeys(("qwen2.5:0.5b", "gemma3:1b"), 0.0))))


def test_equal_scores_are_drawn() -> None:
    made = board(lead=0, noise=0, n=4)
    for draw in CHARTS[:3]:
        assert to_svg(draw(made))


def test_a_filtered_board_has_the_filter_below_its_title(plain: Leaderboard) -> None:
    assert "only cells with suite=x; only anna" in svg_of(
        forest(board(where={"suite": "x"}, judge="anna"), titled=True)
    )
    assert "only" not in svg_of(forest(plain, titled=True))
