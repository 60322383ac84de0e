"""The charts over HTTP: drawn once per revision, in the size predicted by the page, and without scripts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from support.boards import TWELVE, board
from tipbench.charts import DARK, LIGHT, to_svg
from tipbench.compare.charts import CHARTS as DRAWN
from tipbench.compare.charts import ChartKind, kinds_of
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.web.panel.leaderboard import chart_size
from web.board_pages import board_path, judged_panel
from web.judge_client import driver_of
from web.panels import ServedPanel

CHARTS = f"{board_path()}/charts"

LONG = Pair("hf.co/an-organisation/a-model-with-a-name-that-never-ends:Q4_K_M", "v" * 90)
BOARDS = {
    "two": board(TWELVE[:2]),
    "a gap": board(TWELVE[:5], missing=lambda pair, name: pair == TWELVE[1] and name.startswith("nurse")),
    "models": board(by="model"),
    "long names": board([LONG, *TWELVE[:2]]),
    "forty rows": board([Pair(f"m{at}:1b", prompt) for at in range(10) for prompt in ("v1", "v2", "v3", "v4")]),
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPanel]:
    """A panel that tests only read."""
    with judged_panel(tmp_path_factory.mktemp("board") / "home") as served:
        yield served


@pytest.fixture
def own_panel(home: Path) -> Iterator[ServedPanel]:
    """A panel of one test, which may change it."""
    with judged_panel(home) as served:
        yield served


def test_every_chart_is_a_picture_in_its_colours(judged: ServedPanel) -> None:
    for kind, theme, narrow in (("forest", LIGHT, "false"), ("heat", DARK, "true"), ("pareto", DARK, "false")):
        response = judged.get(f"{CHARTS}/{kind}.svg?theme={theme.name}&narrow={narrow}")
        assert response.headers["content-type"] == "image/svg+xml"
        assert ET.fromstring(response.text).tag.endswith("svg")  # noqa: S314 - our own
        assert f'fill="{theme.background}"' in response.text


def rendered_size(leaderboard: Leaderboard, kind: ChartKind, *, narrow: bool) -> tuple[float, float]:
    svg = to_svg(DRAWN[kind].draw(leaderboard, narrow=narrow))
    found = re.search(r'width="([\d.]+)" height="([\d.]+)"', svg)
    assert found
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("narrow", [False, True])
def test_the_predicted_size_is_close_to_the_real_one(name: str, narrow: bool) -> None:
    leaderboard = BOARDS[name]
    for kind in kinds_of(leaderboard):
        predicted, real = chart_size(kind, leaderboard, narrow=narrow), rendered_size(leaderboard, kind, narrow=narrow)
        for mine, theirs in zip(predicted, real, strict=True):
            assert mine == pytest.approx(theirs, rel=0.12, abs=16), (kind, predicted, real)


def test_a_chart_is_drawn_once_for_a_revision(own_panel: ServedPanel) -> None:
    charts = own_panel.panel.queries.charts
    first = own_panel.get(f"{CHARTS}/forest.svg").content
    assert own_panel.get(f"{CHARTS}/forest.svg").content == first
    assert charts.misses == 1
    own_panel.store.mark_changed(driver_of(own_panel).experiment.experiment_id)
    own_panel.get(f"{CHARTS}/forest.svg")
    assert charts.misses == 2


def test_every_query_has_its_own_chart(judged: ServedPanel) -> None:
    queries = ["", "?theme=dark", "?narrow=true", "?where=params.persona=nurse"]
    assert len({judged.get(f"{CHARTS}/forest.svg{query}").content for query in queries}) == len(queries)


def test_only_the_present_revision_may_be_kept_by_a_browser(judged: ServedPanel) -> None:
    experiment = judged.store.experiment(driver_of(judged).experiment.name)
    assert experiment is not None
    now = experiment.tags["tipbench.revision"]
    kept = judged.get(f"{CHARTS}/forest.svg?revision={now}").headers["cache-control"]
    others = [judged.get(f"{CHARTS}/forest.svg{query}").headers["cache-control"] for query in ("", "?revision=old")]
    assert (kept, others) == ("private, max-age=31536000, immutable", ["no-store", "no-store"])


def test_a_chart_opened_alone_can_run_nothing(judged: ServedPanel) -> None:
    policy = judged.get(f"{CHARTS}/forest.svg").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert policy.endswith("sandbox")


def test_names_in_a_chart_are_text(home: Path) -> None:
    with judged_panel(home, names={"alpha:135m": "<script>x</script>", "v1": '"><b onload=x>'}) as served:
        for kind in DRAWN:
            root = ET.fromstring(served.get(f"{CHARTS}/{kind}.svg").text)  # noqa: S314 - our own
            tags = {element.tag.rpartition("}")[2] for element in root.iter()}
            assert not tags & {"script", "b"}


def test_a_chart_that_a_board_does_not_have_is_not_found(judged: ServedPanel) -> None:
    assert judged.error(judged.get(f"{CHARTS}/heat.svg?by=model")) == (404, "not_found")


def test_an_unknown_chart_is_refused(judged: ServedPanel) -> None:
    for path in ["cake.svg", "forest.svg?theme=blue", "forest.svg?narrow=perhaps", "forest.svg?by=x"]:
        assert judged.error(judged.get(f"{CHARTS}/{path}"))[0] == 422


def test_without_the_extra_the_response_has_the_install_command(
    own_panel: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    response = own_panel.get(f"{CHARTS}/forest.svg")
    assert own_panel.error(response) == (400, "misused")
    assert "pip install" in response.json()["error"]["message"]
