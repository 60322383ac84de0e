"""No score is lost by a reload, a dead panel, a lost connection, another tab or device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI

from support.judge_page import BatchPage, JudgingSite, another_tab, judging_site, open_batch_page
from support.judging import record_cells
from support.mlflow_server import free_port
from support.panel_pages import Visit
from support.panel_site import Site
from tipbench.record.mlflow import MlflowStore

if TYPE_CHECKING:
    from playwright.sync_api import Route

START_S = 60.0
TOKEN = "an-operators-own-token-of-32-or-more"


@pytest.fixture(scope="module")
def building(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgingSite]:
    with judging_site(tmp_path_factory.mktemp("building") / "home", n_scenarios=4) as made:
        yield made


@pytest.fixture
def judging(building: JudgingSite) -> JudgingSite:
    """A shared panel with a new judge; its tests finish no batch."""
    return building.newcomer()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[JudgingSite]:
    """A panel for one test, which may finish batches."""
    with judging_site(tmp_path / "home", n_scenarios=4) as made:
        yield made


@pytest.fixture
def at(judging: JudgingSite, visit: Visit) -> BatchPage:
    """A judge with a new batch."""
    return open_batch_page(visit, judging.site, judging.open())


def test_a_reload_in_the_middle_of_a_draft_loses_nothing(judging: JudgingSite, at: BatchPage) -> None:
    at.press("j", "3", "4", "5", "2")
    at.page.reload()  # at once: not even a request is out
    at.ready()
    at.wait_for_item(2)
    assert at.scores()[:5] == [3, 4, 5, 2, None]
    at.expect_state("Draft saved")
    assert judging.answer(at.sheet, 2)["tips"][1]["scores"]["relevance"] == 2
    assert at.n_unsent() == 0


def test_without_a_connection_judging_continues(judging: JudgingSite, at: BatchPage) -> None:
    at.page.context.set_offline(True)
    at.press(*"333333333", "Control+Enter")
    at.page.get_by_text("The panel is unreachable").wait_for()
    at.wait_for_item(2)
    at.press("4", "4")
    at.expect_state("saved in this browser")
    assert (at.mark(1), at.n_unsent()) == ("submitted", 2)
    at.page.context.set_offline(False)
    at.expect_state("Draft saved")
    at.page.get_by_text("The panel is unreachable").wait_for(state="hidden")
    assert (judging.answer(at.sheet, 1)["state"], at.n_unsent()) == ("submitted", 0)


def test_a_batch_is_not_finished_while_something_is_unsaved(judging: JudgingSite, at: BatchPage) -> None:
    at.page.context.set_offline(True)
    at.press(*"333333333", "Control+Enter")
    at.page.get_by_role("button", name="Finish batch…").click()
    at.finish()
    at.page.get_by_text("Your scores are saved in this browser; finish once it is reachable.").wait_for()
    assert judging.whole(at.sheet)["batch"]["status"] == "open"


def test_a_lost_response_is_not_a_conflict(judging: JudgingSite, at: BatchPage) -> None:
    lost: list[int] = []

    def swallow(route: Route) -> None:
        if route.request.method != "PUT" or len(lost) >= 2:
            return route.fallback()
        lost.append(route.fetch().status)
        return route.abort()

    at.page.route("**/items/*", swallow)
    at.press("3")
    at.expect_state("saved in this browser")
    at.press("4")  # another score before the next attempt
    at.page.locator(".save-state", has_text="Draft saved").wait_for()
    assert lost == [200, 409] or lost == [200, 200]
    answer = judging.answer(at.sheet, 1)
    assert answer["tips"][0]["scores"] == {"relevance": 3, "actionability": 4, "tone": None}
    assert at.page.locator(".conflict").is_hidden()


def test_two_devices_do_not_overwrite_each_other(judging: JudgingSite, at: BatchPage, visit: Visit) -> None:
    other = open_batch_page(visit, judging.site, at.sheet)
    conflict(at, other, 1)
    assert at.mark(1) == "conflict"
    assert relevance(judging, at.sheet, 1) == 2
    at.page.reload()
    at.ready()
    at.expect_state("Conflict")
    box = at.page.locator(".conflict").inner_text()
    assert "relevance 5" in box
    assert "relevance 2" in box
    at.page.get_by_role("button", name="Take the other").click()
    at.expect_state("Draft saved")
    assert (at.scores()[0], relevance(judging, at.sheet, 1)) == (2, 2)
    with at.page.expect_response(lambda response: response.request.method != "GET"):
        at.press("u")  # what was given up comes back
    at.expect_state("Draft saved")
    assert (at.scores()[0], relevance(judging, at.sheet, 1)) == (5, 5)

    at.press("j")
    other.press("j")
    conflict(at, other, 2)
    at.page.get_by_role("button", name="Keep mine").click()
    at.expect_state("Draft saved")
    assert (at.scores()[0], relevance(judging, at.sheet, 2)) == (5, 5)


def conflict(at: BatchPage, other: BatchPage, number: int) -> None:
    """Two devices score the same item."""
    for each, score, state in ((other, "2", "Draft saved"), (at, "5", "Conflict")):
        each.wait_for_item(number)
        each.press(score)
        each.expect_state(state)


def relevance(judging: JudgingSite, sheet: str, number: int) -> int:
    """The stored score of an item's first tip."""
    found: int = judging.answer(sheet, number)["tips"][0]["scores"]["relevance"]
    return found


def test_two_tabs_of_one_browser_stay_in_sync(judging: JudgingSite, at: BatchPage) -> None:
    other = another_tab(at)
    at.press("4")
    other.page.locator(".group.is-scored").first.wait_for()
    assert other.scores()[0] == 4
    other.press("ArrowRight", "3")
    other.expect_state("Draft saved")
    at.page.wait_for_function("document.querySelectorAll('.group.is-scored').length === 2")
    assert judging.answer(at.sheet, 1)["tips"][0]["scores"] == {"relevance": 4, "actionability": 3, "tone": None}


def test_unsent_answers_of_a_closed_tab_are_sent_by_the_next(judging: JudgingSite, at: BatchPage) -> None:
    at.page.context.set_offline(True)
    at.press("4", "5")
    at.expect_state("saved in this browser")
    page = at.page.context.new_page()
    at.page.close()
    page.context.set_offline(False)
    at.view.page = page
    page.goto(f"{judging.site.url}/judge/batches/{at.sheet}")
    at.ready()
    at.expect_state("Draft saved")
    assert at.scores()[:2] == [4, 5]


def test_an_ended_session_is_shown_and_nothing_is_lost(judging: JudgingSite, at: BatchPage) -> None:
    tokens = judging.site.panel.authenticator.tokens
    for token in tokens.all():
        if token.name == judging.judge:
            tokens.revoke(token.id)
    at.press("4")
    at.page.get_by_text("Your session has ended").wait_for()
    assert (at.n_unsent(), at.save_state) == (1, "!\nSession ended: saved in this browser")


def test_a_batch_closed_on_another_device_is_reported(own: JudgingSite, visit: Visit) -> None:
    at = open_batch_page(visit, own.site, own.open())
    other = open_batch_page(visit, own.site, at.sheet)
    other.press(*"333333333", "Control+Enter")
    other.page.get_by_role("button", name="Finish batch…").click()
    other.finish()
    other.page.get_by_role("heading", name="Batch finished").wait_for()
    at.press("j", "5")
    at.page.get_by_text("This batch was closed in another tab").wait_for()
    at.page.get_by_role("button", name="Reload the page").click()
    at.page.get_by_role("button", name="Reopen this one").click()
    at.ready()
    at.wait_for_item(2)
    at.expect_state("Draft saved")
    assert own.answer(at.sheet, 2)["tips"][0]["scores"]["relevance"] == 5


# a panel that dies


@contextmanager
def running_panel(home: Path, port: int, mlflow_url: str) -> Iterator[httpx.Client]:
    """`tipbench panel` as a subprocess, ended by SIGKILL."""
    environment = {"TIPBENCH_HOME": str(home), "TIPBENCH_ADMIN_TOKEN": TOKEN, "MLFLOW_TRACKING_URI": mlflow_url}
    process = subprocess.Popen(
        [sys.executable, "-m", "tipbench", "panel", "--port", str(port)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=60) as client:
        try:
            _until_it_answers(client)
            yield client
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _until_it_answers(client: httpx.Client) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with suppress(httpx.TransportError):
            if client.get("/healthz").status_code == 200:
                return
        assert time.monotonic() < deadline, "the panel did not start"
        time.sleep(0.1)


def test_a_panel_killed_in_the_middle_of_a_draft_loses_nothing(home: Path, mlflow_url: str, visit: Visit) -> None:
    experiment, port = f"tip-bench-killed-{uuid4().hex[:8]}", free_port()
    with MlflowStore(mlflow_url) as store:
        record_cells(store, experiment=experiment, models=("alpha:135m",), prompts="v1", n_scenarios=2)
    batches = f"/api/bench/judge/{experiment}/batches"
    with running_panel(home, port, mlflow_url) as client:
        sheet = client.post(batches, json={}).json()["batch"]["sheet"]
        site = Site(f"http://127.0.0.1:{port}", FastAPI(), TOKEN, TOKEN, home)
        at = open_batch_page(visit, site, sheet)
        at.press("3", "4")
        at.expect_state("Draft saved")
        at.press("5")
    at.press("2", "1")  # the panel is gone
    at.expect_state("Offline: saved in this browser")
    with running_panel(home, port, mlflow_url) as client:
        at.page.locator(".save-state", has_text="Draft saved").wait_for()
        first: Any = client.get(f"{batches}/{sheet}").json()["items"][0]["answer"]
        assert [tip["scores"] for tip in first["tips"]][:2] == [
            {"relevance": 3, "actionability": 4, "tone": 5},
            {"relevance": 2, "actionability": 1, "tone": None},
        ]
        at.page.reload()
        at.ready()
        assert at.scores()[:6] == [3, 4, 5, 2, 1, None]
