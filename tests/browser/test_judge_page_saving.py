"""No score is lost by a reload, a killed panel, a lost connection, another tab or device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from fastapi import FastAPI

from support.judge_page import BatchPage, JudgingSite, judging_site, open_batch_page, open_in_new_tab
from support.judging import record_cells
from support.mlflow_server import free_port
from support.panel_pages import TabOpener
from support.panel_site import Site
from tipbench.record.mlflow import MlflowStore
from web.panel_process import PanelProcess
from web.panels import OPERATOR

if TYPE_CHECKING:
    from playwright.sync_api import Route


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgingSite]:
    with judging_site(tmp_path_factory.mktemp("shared") / "home", n_scenarios=4) as site:
        yield site


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[JudgingSite]:
    """A panel for one test, which may finish batches."""
    with judging_site(tmp_path / "home", n_scenarios=4) as site:
        yield site


def test_a_reload_in_the_middle_of_a_draft_loses_nothing(judging: JudgingSite, batch: BatchPage) -> None:
    batch.press("j", "3", "4", "5", "2")
    batch.page.reload()  # at once, before any request is sent
    batch.wait_until_ready()
    batch.wait_for_item(2)
    assert batch.scores()[:5] == [3, 4, 5, 2, None]
    batch.wait_for_state("Draft saved")
    assert judging.answer(batch.sheet, 2)["tips"][1]["scores"]["relevance"] == 2
    assert batch.unsent_count() == 0


def test_without_a_connection_judging_continues(judging: JudgingSite, batch: BatchPage) -> None:
    batch.page.context.set_offline(True)
    batch.press(*"333333333", "Control+Enter")
    batch.page.get_by_text("The panel is unreachable").wait_for()
    batch.wait_for_item(2)
    batch.press("4", "4")
    batch.wait_for_state("saved in this browser")
    assert (batch.queue_state(1), batch.unsent_count()) == ("submitted", 2)
    batch.page.context.set_offline(False)
    batch.wait_for_state("Draft saved")
    batch.page.get_by_text("The panel is unreachable").wait_for(state="hidden")
    assert (judging.answer(batch.sheet, 1)["state"], batch.unsent_count()) == ("submitted", 0)


def test_a_batch_is_not_finished_while_something_is_unsaved(judging: JudgingSite, batch: BatchPage) -> None:
    batch.page.context.set_offline(True)
    batch.press(*"333333333", "Control+Enter")
    batch.page.get_by_role("button", name="Finish batch…").click()
    batch.finish()
    batch.page.get_by_text("Your scores are saved in this browser; finish once it is reachable.").wait_for()
    assert judging.batch(batch.sheet)["batch"]["status"] == "open"


def test_a_lost_response_is_not_a_conflict(judging: JudgingSite, batch: BatchPage) -> None:
    lost: list[int] = []

    def drop_response(route: Route) -> None:
        if route.request.method != "PUT" or len(lost) >= 2:
            return route.fallback()
        lost.append(route.fetch().status)
        return route.abort()

    batch.page.route("**/items/*", drop_response)
    batch.press("3")
    batch.wait_for_state("saved in this browser")
    batch.press("4")  # another score before the next attempt
    batch.page.locator(".save-state", has_text="Draft saved").wait_for()
    assert lost == [200, 409] or lost == [200, 200]
    answer = judging.answer(batch.sheet, 1)
    assert answer["tips"][0]["scores"] == {"relevance": 3, "actionability": 4, "tone": None}
    assert batch.page.locator(".conflict").is_hidden()


def test_two_devices_do_not_overwrite_each_other(judging: JudgingSite, batch: BatchPage, open_tab: TabOpener) -> None:
    other = open_batch_page(open_tab, judging.site, batch.sheet)
    score_on_both(batch, other, 1)
    assert batch.queue_state(1) == "conflict"
    assert relevance(judging, batch.sheet, 1) == 2
    batch.page.reload()
    batch.wait_until_ready()
    batch.wait_for_state("Conflict")
    box = batch.page.locator(".conflict").inner_text()
    assert "relevance 5" in box
    assert "relevance 2" in box
    batch.page.get_by_role("button", name="Take the other").click()
    batch.wait_for_state("Draft saved")
    assert (batch.scores()[0], relevance(judging, batch.sheet, 1)) == (2, 2)
    with batch.page.expect_response(lambda response: response.request.method != "GET"):
        batch.press("u")  # restores the score that was given up
    batch.wait_for_state("Draft saved")
    assert (batch.scores()[0], relevance(judging, batch.sheet, 1)) == (5, 5)

    batch.press("j")
    other.press("j")
    score_on_both(batch, other, 2)
    batch.page.get_by_role("button", name="Keep mine").click()
    batch.wait_for_state("Draft saved")
    assert (batch.scores()[0], relevance(judging, batch.sheet, 2)) == (5, 5)


def score_on_both(batch: BatchPage, other: BatchPage, number: int) -> None:
    """Score the same item differently on two devices, so that they conflict."""
    for device, score, state in ((other, "2", "Draft saved"), (batch, "5", "Conflict")):
        device.wait_for_item(number)
        device.press(score)
        device.wait_for_state(state)


def relevance(judging: JudgingSite, sheet: str, number: int) -> int:
    """Return the stored score of an item's first tip."""
    found: int = judging.answer(sheet, number)["tips"][0]["scores"]["relevance"]
    return found


def test_two_tabs_of_one_browser_stay_in_sync(judging: JudgingSite, batch: BatchPage) -> None:
    other = open_in_new_tab(batch)
    batch.press("4")
    other.page.locator(".group.is-scored").first.wait_for()
    assert other.scores()[0] == 4
    other.press("ArrowRight", "3")
    other.wait_for_state("Draft saved")
    batch.page.wait_for_function("document.querySelectorAll('.group.is-scored').length === 2")
    assert judging.answer(batch.sheet, 1)["tips"][0]["scores"] == {"relevance": 4, "actionability": 3, "tone": None}


def test_unsent_answers_of_a_closed_tab_are_sent_by_the_next(judging: JudgingSite, batch: BatchPage) -> None:
    batch.page.context.set_offline(True)
    batch.press("4", "5")
    batch.wait_for_state("saved in this browser")
    page = batch.page.context.new_page()
    batch.page.close()
    page.context.set_offline(False)
    batch.tab.page = page
    page.goto(f"{judging.site.url}/judge/batches/{batch.sheet}")
    batch.wait_until_ready()
    batch.wait_for_state("Draft saved")
    assert batch.scores()[:2] == [4, 5]


def test_an_ended_session_is_shown_and_nothing_is_lost(judging: JudgingSite, batch: BatchPage) -> None:
    tokens = judging.site.panel.authenticator.tokens
    for token in tokens.all():
        if token.name == judging.judge:
            tokens.revoke(token.id)
    batch.press("4")
    batch.page.get_by_text("Your session has ended").wait_for()
    assert (batch.unsent_count(), batch.save_state) == (1, "!\nSession ended: saved in this browser")


def test_a_batch_closed_on_another_device_is_reported(own_site: JudgingSite, open_tab: TabOpener) -> None:
    batch = open_batch_page(open_tab, own_site.site, own_site.open())
    other = open_batch_page(open_tab, own_site.site, batch.sheet)
    other.press(*"333333333", "Control+Enter")
    other.page.get_by_role("button", name="Finish batch…").click()
    other.finish()
    other.page.get_by_role("heading", name="Batch finished").wait_for()
    batch.press("j", "5")
    batch.page.get_by_text("This batch was closed in another tab").wait_for()
    batch.page.get_by_role("button", name="Reload the page").click()
    batch.page.get_by_role("button", name="Reopen this one").click()
    batch.wait_until_ready()
    batch.wait_for_item(2)
    batch.wait_for_state("Draft saved")
    assert own_site.answer(batch.sheet, 2)["tips"][0]["scores"]["relevance"] == 5


# a killed panel


def test_a_panel_killed_in_the_middle_of_a_draft_loses_nothing(
    home: Path, mlflow_url: str, open_tab: TabOpener
) -> None:
    experiment, port = f"tip-bench-killed-{uuid4().hex[:8]}", free_port()
    with MlflowStore(mlflow_url) as store:
        record_cells(store, experiment=experiment, models=("alpha:135m",), prompts="v1", n_scenarios=2)
    batches = f"/api/bench/judge/{experiment}/batches"
    with PanelProcess(home, {"MLFLOW_TRACKING_URI": mlflow_url}, port=port) as panel:
        sheet = panel.client.post(batches, json={}).json()["batch"]["sheet"]
        site = Site(f"http://127.0.0.1:{port}", FastAPI(), OPERATOR, OPERATOR, home)
        batch = open_batch_page(open_tab, site, sheet)
        batch.press("3", "4")
        batch.wait_for_state("Draft saved")
        batch.press("5")
        panel.kill()
        batch.press("2", "1")
        batch.wait_for_state("Offline: saved in this browser")
        panel.start()
        batch.page.locator(".save-state", has_text="Draft saved").wait_for()
        first = panel.client.get(f"{batches}/{sheet}").json()["items"][0]["answer"]
        assert [tip["scores"] for tip in first["tips"]][:2] == [
            {"relevance": 3, "actionability": 4, "tone": 5},
            {"relevance": 2, "actionability": 1, "tone": None},
        ]
        batch.page.reload()
        batch.wait_until_ready()
        assert batch.scores()[:6] == [3, 4, 5, 2, 1, None]
