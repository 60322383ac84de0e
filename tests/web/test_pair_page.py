"""The page of one row: scenarios by difference, and both answers with their runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from support.judging import SheetDriver, record_cells
from tipbench.compare.matrix import Pair
from tipbench.plan.grid import PlannedCell
from tipbench.record.run import NewRun, RunKind
from tipbench.web.api.models import PairShape
from tipbench.web.board_query import Outcome, RowResult, ScenarioComparison, pair_view
from tipbench.web.panel.pair import outcome_text
from tipbench.workflows.board import BoardQuery
from web.board_pages import Page, board_path, get_page, judged_panel, query_of
from web.judge_client import driver_of
from web.panels import API, EXPERIMENT, HTML, ServedPanel

PAIRS = f"{board_path()}/pairs"
ROW = {"model": "beta:1b", "prompt": "v1"}
OTHER = "beta:1b/v2-mentor"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPanel]:
    """A panel that tests only read."""
    with judged_panel(tmp_path_factory.mktemp("board") / "home") as served:
        yield served


def view_of(served: ServedPanel, **query: str) -> dict[str, Any]:
    found: dict[str, Any] = served.get(f"{API}/leaderboard/{EXPERIMENT}/pairs?{urlencode({**ROW, **query})}").json()
    PairShape.model_validate(found)
    return found


def page_of(served: ServedPanel, **query: str) -> Page:
    return get_page(served, f"{PAIRS}?{urlencode({**ROW, **query})}")


def leader_of(served: ServedPanel) -> dict[str, str]:
    found = served.get(f"{API}/leaderboard/{EXPERIMENT}").json()["verdict"]["leader"]
    return {"model": found["model"], "prompt": found["prompt_version"]}


def test_scenarios_are_ordered_by_difference_with_the_largest_loss_first(judged: ServedPanel) -> None:
    found = view_of(judged)
    differences = [each["difference"] for each in found["scenarios"]]
    assert differences == sorted(differences)
    assert len(differences) == 8
    assert found["wins"] + found["losses"] + found["even"] == 8


def test_a_difference_is_that_of_the_composites_and_their_mean_that_of_the_board(judged: ServedPanel) -> None:
    found = view_of(judged)
    gaps = [each["own"]["composite"] - each["reference"]["composite"] for each in found["scenarios"]]
    assert gaps == [each["difference"] for each in found["scenarios"]]
    assert found["difference"]["mean"] == pytest.approx(sum(gaps) / len(gaps))


def test_the_page_has_the_scenarios_of_the_json_in_its_order(judged: ServedPanel) -> None:
    names = [each["scenario"] for each in view_of(judged)["scenarios"]]
    shown = [text for text in page_of(judged).texts if text in names]
    assert shown == names


def test_the_order_is_in_the_url(judged: ServedPanel) -> None:
    cases: list[tuple[str, Any]] = [("wins", lambda each: -each["difference"]), ("name", lambda each: each["scenario"])]
    for order, key in cases:
        found = view_of(judged)["scenarios"]
        names = [each["scenario"] for each in sorted(found, key=lambda each: (key(each), each["scenario"]))]
        assert [text for text in page_of(judged, order=order).texts if text in names] == names


@pytest.mark.parametrize(
    "query", [{}, {"by": "model", "prompt": "*"}, {"by": "prompt", "model": "*"}, {"cluster": "persona"}]
)
def test_every_answer_is_that_of_its_run(home: Path, query: dict[str, str]) -> None:
    with judged_panel(home, repeats=2, n_scenarios=4) as served:
        runs, found = driver_of(served).cells(), view_of(served, **query)
        seen = set()
        for meeting in found["scenarios"]:
            for answer in (*meeting["own"]["answers"], *meeting["reference"]["answers"]):
                params = runs[answer["run_id"]].params
                shown_params = (answer["model"], answer["prompt_version"], answer["repeat"])
                assert (params["model"], params["prompt_version"], params["repeat"]) == shown_params
                assert params["scenario"] == meeting["scenario"]
                assert runs[answer["run_id"]].metrics["composite"] == answer["composite"]
                texts = json.loads(served.store.get(answer["run_id"])[1]["artifact:candidates.json"])
                assert [tip["tip"] for tip in answer["tips"]] == [tip["tip"] for tip in texts]
                seen.add(answer["run_id"])
        assert len(seen) == 2 * 4 * 2 * (3 if "model" in query.get("by", "") else 2 if "by" in query else 1)


def test_every_answer_leads_to_the_page_of_its_run(judged: ServedPanel) -> None:
    found, page = view_of(judged), page_of(judged)
    for meeting in found["scenarios"]:
        for answer in (*meeting["own"]["answers"], *meeting["reference"]["answers"]):
            assert page.links(f"{board_path()}/runs/{answer['run_id']}")


def test_a_row_is_compared_with_the_leader(judged: ServedPanel) -> None:
    reference = view_of(judged)["reference"]
    leader = leader_of(judged)
    assert reference == {"model": leader["model"], "prompt_version": leader["prompt"], "role": "leader"}


def test_the_leader_is_compared_with_the_second_row(judged: ServedPanel) -> None:
    board = judged.get(f"{API}/leaderboard/{EXPERIMENT}").json()["standings"]
    found = view_of(judged, **leader_of(judged))
    assert found["reference"]["role"] == "runner-up"
    assert found["reference"]["prompt_version"] == board[1]["prompt_version"]
    assert found["difference"]["mean"] == -board[1]["diff_to_leader"]["mean"] >= 0


def test_a_chosen_baseline_replaces_the_leader(judged: ServedPanel) -> None:
    found = view_of(judged, baseline=OTHER)
    assert found["reference"] == {"model": "beta:1b", "prompt_version": "v2-mentor", "role": "baseline"}
    page = page_of(judged, baseline=OTHER)
    assert "against the baseline," in page.text
    assert [each["value"] for each in page.all("option") if "selected" in each] == [OTHER]


def test_the_baseline_itself_is_compared_with_the_leader(judged: ServedPanel) -> None:
    assert view_of(judged, baseline="beta:1b/v1")["reference"]["role"] == "leader"


def test_links_keep_the_board_query(judged: ServedPanel) -> None:
    page = page_of(judged, judge="anna", where="params.persona=nurse", order="wins")
    expected = {("judge", "anna"), ("where", "params.persona=nurse")}
    for link in [*page.links(PAIRS), *page.links(board_path())]:
        if query_of(link):
            assert expected <= set(query_of(link)), link
    carried = {(each["name"], each["value"]) for each in page.all("input", type="hidden")}
    assert {*expected, ("model", "beta:1b"), ("prompt", "v1"), ("order", "wins")} <= carried


def test_a_board_by_model_shows_the_answers_of_all_prompts(judged: ServedPanel) -> None:
    page = page_of(judged, by="model", prompt="*")
    for prompt in ("v1", "v2-mentor", "v3-few-shot"):
        assert f"beta:1b/{prompt}" in page.texts


@pytest.mark.parametrize(
    ("difference", "outcome", "label"),
    [
        (0.0051, "win", "wins"),
        (0.0049, "tie", "tie"),
        (0.0, "tie", "tie"),
        (-0.0049, "tie", "tie"),
        (-0.0051, "loss", "loses"),
        (None, None, "not both judged"),
    ],
)
def test_a_difference_shown_as_zero_is_a_tie_in_label_and_counts(
    difference: float | None, outcome: Outcome | None, label: str, judged: ServedPanel
) -> None:
    side = RowResult(12.0, ())
    comparison = ScenarioComparison("nurse@evening", None, side, side, difference)
    assert outcome_text(comparison)["outcome"] == label
    experiment = driver_of(judged).experiment
    view = pair_view(judged.panel.queries, judged.store, experiment, BoardQuery(), Pair(**ROW))
    outcomes: tuple[Outcome, ...] = ("win", "loss", "tie")
    counts = {each: replace(view, comparisons=(comparison,)).count(each) for each in outcomes}
    assert counts == {each: int(each == outcome) for each in outcomes}


def test_the_card_is_that_of_the_newest_answer_even_if_a_newer_version_failed(home: Path) -> None:
    with judged_panel(home) as served:
        driver = driver_of(served)
        row = {"model": ROW["model"], "prompt_version": ROW["prompt"]}
        old = next(cell for cell in driver.cells().values() if row.items() <= cell.params.items())
        tags = {"kind": "cell", "conditions": old.tags["conditions"], "prompt_hash": old.tags["prompt_hash"]}
        # The hash sorts before all others, and the suite has no such version.
        failed = NewRun(
            RunKind.CELL,
            "failed",
            "failed",
            9_000,
            9_001,
            ok=False,
            cell_key="new version",
            params=old.params,
            tags={**tags, "state": "failed", "scenario_hash": "0"},
        )
        served.store.record(driver.experiment.experiment_id, failed)
        served.store.mark_changed(driver.experiment.experiment_id)
        experiment = driver_of(served).experiment
        view = pair_view(served.panel.queries, served.store, experiment, BoardQuery(), Pair(**ROW))
        (comparison,) = [each for each in view.comparisons if each.scenario == old.params["scenario"]]
        assert len(comparison.own.answers) == 2
        assert comparison.card is not None


def test_many_scenarios_come_page_by_page(home: Path) -> None:
    with judged_panel(home, suite="tips-32", models=("beta:1b",)) as served:
        first = page_of(served)
        (link,) = [each["href"] for each in first.all("a", rel="next")]
        second = get_page(served, link)
        assert (len(first.all("details")), len(second.all("details"))) == (20, 12)
        assert not second.all("a", rel="next")
        assert "This page of the list is empty" in page_of(served, page="9").text


def test_unjudged_answers_are_shown_without_numbers(served: ServedPanel) -> None:
    page = page_of(served)
    assert "not judged" in page.text
    assert len(page.all("details")) == 8


def test_model_output_is_shown_as_text(home: Path) -> None:
    hostile = ["<script>alert(1)</script>", "\u202etxet desrever", "</p></li><img src=x onerror=alert(2)>"]

    def write(_cell: PlannedCell, _rng: random.Random) -> str:
        return json.dumps([{"tip": tip, "rationale": tip} for tip in hostile])

    with judged_panel(home, write=write, n_scenarios=2) as served:
        page = page_of(served)
        assert len(page.all("script")) == 2
        assert not any("onerror" in found for _, found in page.elements)
        assert "⟨U+202E⟩txet desrever" in page.texts
        assert "<script>alert(1)</script>" in page.texts


def test_a_row_that_is_not_on_the_board_is_not_found(judged: ServedPanel) -> None:
    for path in (f"{PAIRS}?model=no&prompt=v1", f"{API}/leaderboard/{EXPERIMENT}/pairs?model=no&prompt=v1"):
        assert judged.error(judged.get(path)) == (404, "not_found")


def test_without_a_row_the_page_opens_the_leaders_row(judged: ServedPanel) -> None:
    leader = judged.get(f"{API}/leaderboard/{EXPERIMENT}").json()["verdict"]["leader"]
    there = judged.get(PAIRS, headers=HTML).headers["location"]
    assert query_of(there) == [("model", leader["model"]), ("prompt", leader["prompt_version"])]


def test_an_unknown_page_or_order_is_invalid(judged: ServedPanel) -> None:
    for query in ["model=a&prompt=b&page=0", "model=a&prompt=b&order=x"]:
        response = judged.get(f"{PAIRS}?{query}", headers={})
        assert response.status_code == 422


def test_a_row_with_only_stale_runs_is_shown_empty(home: Path) -> None:
    with judged_panel(home) as served:
        store, experiment = served.store, driver_of(served).experiment
        record_cells(store, start_ms=5_000, build="2", models=("beta:1b",), n_scenarios=1)
        store.mark_changed(experiment.experiment_id)
        assert SheetDriver(store, experiment).cells()
        response = served.get(f"{PAIRS}?{urlencode({'model': 'beta:1b', 'prompt': 'v1'})}", headers=HTML)
        assert response.status_code == 200
