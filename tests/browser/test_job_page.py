"""A run in a real browser: planned, started, watched live, cancelled and retried; and the same without scripts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from support.panel_pages import Visit
from support.panel_site import Site, panel_site
from support.paper_jobs import PaperRunner
from tipbench.jobs import events
from tipbench.jobs.command import collect_order
from tipbench.jobs.job import Job, JobState, Sighting
from tipbench.jobs.local import LocalRunner
from tipbench.plan.config import make_config
from tipbench.record.memory import MemoryStore

if TYPE_CHECKING:
    from playwright.sync_api import Page

EMBEDDED, TEMPLATE = "embedded:smollm2:135m", "baseline:template"
LONG_MS = 240_000  # a small machine with other work answers a cell in some seconds
NARROW = 360


@pytest.fixture
def site(tmp_path: Path, weights_home: Path, mlflow_url: str) -> Iterator[Site]:
    """A panel that runs real commands, with the embedded model at hand."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "models").symlink_to(weights_home / "models")
    environment = {"MLFLOW_TRACKING_URI": mlflow_url, "OLLAMA_HOST": "127.0.0.1:9"}
    with panel_site(home, MemoryStore(), environment, LocalRunner(home, grace_s=20)) as made:
        yield made
        _end_all(made)


@contextmanager
def paper_site(home: Path, story: Sequence[events.Event]) -> Iterator[tuple[Site, Job]]:
    """A panel with one job that runs and tells what `story` holds, as it grows."""
    runner = PaperRunner(ends=lambda _job: Sighting(JobState.RUNNING), told=lambda _job: story)
    with panel_site(home, MemoryStore(), runner=runner) as made:
        job = made.panel.jobs.submit(collect_order(make_config({"models": "a:1b,b:1b"}))).job
        yield made, job


def _end_all(site: Site) -> None:
    store = site.panel.jobs.store
    for job in store.in_states({JobState.QUEUED, JobState.RUNNING}):
        site.panel.jobs.cancel(job.id)
    deadline = time.monotonic() + 60
    while store.in_states({JobState.RUNNING}) and time.monotonic() < deadline:
        time.sleep(0.1)


def fill(page: Page, models: Sequence[str], name: str, **numbers: int) -> None:
    """The form, by its labels; the experiment is one that no other test has, nor this one when it is run once more."""
    for model in (EMBEDDED, TEMPLATE):
        page.get_by_role("checkbox", name=model).set_checked(model in models)
    page.get_by_label("Other models").fill("")
    for prompt in ("v2-mentor", "v3-few-shot"):
        page.get_by_role("checkbox", name=prompt).uncheck()
    page.get_by_label("Experiment", exact=True).fill(f"tip-bench-{name}-{uuid4().hex[:8]}")
    for label, value in {"Scenarios": 1, "Tips a cell": 1, **numbers}.items():
        page.get_by_label(label, exact=True).fill(str(value))


def open_form(site: Site, visit: Visit, **more: Any) -> Page:
    sight = visit(site, **more)
    sight.page.goto(f"{site.url}/run")
    return sight.page


def short_answers(page: Page, tokens: int) -> None:
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Longest answer, in tokens").fill(str(tokens))


def wait_ended(page: Page) -> None:
    page.wait_for_selector("#live[data-ended=yes]", timeout=LONG_MS, state="attached")


# with real commands


def test_a_run_is_planned_started_and_watched_to_its_end(site: Site, visit: Visit) -> None:
    sight = visit(site, "nobody")
    page = sight.page
    page.goto(f"{site.url}/run")  # leads to the login, and from there back
    page.get_by_role("textbox", name="Token").fill(site.admin)
    page.get_by_role("button", name="Log in").click()
    fill(page, [TEMPLATE, EMBEDDED], "browser", Scenarios=2)
    short_answers(page, 24)
    page.get_by_role("button", name="Show plan").click()
    page.get_by_text("4 cells to generate").wait_for()
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/jobs/*")
    page.evaluate("document.body.dataset.same = 'yes'")
    page.locator("#connection[data-state=live]").wait_for()
    wait_ended(page)
    page.locator("#connection[data-state=ended]").wait_for()
    assert page.evaluate("document.body.dataset.same") == "yes"  # never loaded anew
    assert page.title().startswith("Succeeded · collect tip-bench-browser-")
    assert page.locator(".strip-row.is-empty").count() == 2
    assert page.locator(".job-state", has_text="4 cells generated").is_visible()
    assert page.get_by_text("2 of 2 cells").count() == 2
    assert page.locator("#header-chip").count() == 0
    assert (sight.outside, sight.said) == ([], [])


def test_a_job_is_cancelled_in_its_middle_and_retried(site: Site, visit: Visit) -> None:
    page = open_form(site, visit)
    fill(page, [EMBEDDED], "cancel", **{"Scenarios": 8, "Tips a cell": 5})
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/jobs/*")
    first = page.url
    page.locator(".strip-row.is-generating").wait_for(timeout=LONG_MS)
    page.get_by_text("Cancel…").click()
    page.get_by_role("button", name="Yes, cancel the job").click()
    wait_ended(page)
    assert page.url == first
    page.locator(".job-state", has_text="Cancelled; what is finished is kept.").wait_for()
    page.get_by_role("button", name="Retry").click()
    page.wait_for_url(lambda url: "/jobs/" in url and url != first)
    assert page.get_by_role("link", name=first.rpartition("/")[2]).is_visible()
    jobs = site.panel.jobs.store.page().items
    assert [job.retry_of for job in jobs] == [first.rpartition("/")[2], None]


def test_a_double_click_on_start_starts_one_job(site: Site, visit: Visit) -> None:
    page = open_form(site, visit)
    fill(page, [TEMPLATE], "twice")
    page.get_by_role("button", name="Start", exact=True).dblclick()
    page.wait_for_url("**/jobs/*")
    wait_ended(page)
    assert len(site.panel.jobs.store.page().items) == 1


def test_without_javascript_everything_works(site: Site, visit: Visit) -> None:
    page = open_form(site, visit, java_script_enabled=False)
    fill(page, [TEMPLATE], "plain")
    page.get_by_role("button", name="Show plan").click()
    page.get_by_text("1 cell to generate").wait_for()
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/jobs/*")
    deadline = time.monotonic() + LONG_MS / 1000
    while not page.locator(".job-state", has_text="1 cell generated").count():
        assert time.monotonic() < deadline, page.locator("#live").inner_text()
        page.wait_for_timeout(300)
        page.reload()
    assert page.get_by_text("done, verified empty").is_visible()
    assert page.get_by_role("link", name="Leaderboard").is_visible()


# what the script does, with a job on paper


def cells(done: int, total: int = 4, failed: int = 0) -> events.Event:
    return events.CellFinished("a:1b", "v1", f"x@{done}", done, total, failed, None, 40, 20.0)


def test_the_page_follows_the_job(tmp_path: Path, visit: Visit) -> None:
    story: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4)]
    with paper_site(tmp_path / "home", story) as (site, job):
        page = visit(site).page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.locator("#connection[data-state=live]").wait_for()
        assert page.locator(".strip-row.is-loading").count() == 1
        story += [cells(1), cells(2)]
        page.get_by_text("2 of 4 cells", exact=True).wait_for()
        assert page.title().startswith("25 %")
        assert page.locator("#announce").text_content() == "Running, 25 % done."
        story += [cells(3)]
        page.get_by_text("3 of 4 cells", exact=True).wait_for()
        assert page.locator("#announce").text_content() == "Running, 25 % done."  # not every cell is read out
        story += [cells(4), events.BlockFinished("a:1b"), events.Waiting("Ollama", 60.0)]
        page.get_by_text("Waiting for Ollama").wait_for()
        assert page.get_by_text("done, verified empty").is_visible()


def test_nothing_jumps_while_cells_come_in(tmp_path: Path, visit: Visit) -> None:
    story: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4), cells(1)]
    places = "[...document.querySelectorAll('h1, h2, summary, .strip-row')].map(e => e.getBoundingClientRect().top)"
    with paper_site(tmp_path / "home", story) as (site, job):
        page = visit(site, width=NARROW).page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.locator("#connection[data-state=live]").wait_for()
        before = page.evaluate(places)
        story += [cells(2), cells(3)]
        page.get_by_text("3 of 4 cells", exact=True).wait_for()
        assert page.evaluate(places) == before


def test_times_are_the_readers_own_with_their_zone_and_utc_on_hover(tmp_path: Path, visit: Visit) -> None:
    story: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4)]
    with paper_site(tmp_path / "home", story) as (site, job):
        page = visit(site, timezone_id="Asia/Kolkata", locale="en-GB").page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.locator("#connection[data-state=live]").wait_for()
        story += [cells(1)]  # the parts that come later too
        page.get_by_text("1 of 4 cells", exact=True).wait_for()
        asked = page.locator("#live time").first
        there = datetime.fromtimestamp(job.created, timezone(timedelta(hours=5, minutes=30)))
        text, title = asked.text_content() or "", asked.get_attribute("title") or ""
    assert f"{there:%H:%M} " in text
    assert re.search(r"GMT\+5:30|IST", text), text
    assert title.endswith(" UTC")


def test_an_open_question_stays_open_while_the_page_changes(tmp_path: Path, visit: Visit) -> None:
    story: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4)]
    with paper_site(tmp_path / "home", story) as (site, job):
        page = visit(site).page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.get_by_text("Cancel…").click()
        story += [cells(1)]
        page.get_by_text("1 of 4 cells", exact=True).wait_for()
        assert page.get_by_role("button", name="Yes, cancel the job").is_visible()


def test_a_lost_connection_is_told_and_found_again(tmp_path: Path, visit: Visit) -> None:
    story: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4)]
    with paper_site(tmp_path / "home", story) as (site, job):
        page = visit(site).page
        page.route("**/events", lambda route: route.abort())
        page.goto(f"{site.url}/jobs/{job.id}")
        page.get_by_text("Connection lost, trying again").wait_for()
        story += [cells(1)]
        page.unroute("**/events")
        page.locator("#connection[data-state=live]").wait_for()
        page.get_by_text("1 of 4 cells", exact=True).wait_for()


def test_a_session_that_has_ended_is_told(tmp_path: Path, visit: Visit) -> None:
    story: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4)]
    with paper_site(tmp_path / "home", story) as (site, job):
        page = visit(site).page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.locator("#connection[data-state=live]").wait_for()
        for token in site.panel.guard.tokens.all():
            site.panel.guard.tokens.revoke(token.id)
        story += [cells(1)]
        page.get_by_text("Your session has ended").wait_for()


@pytest.mark.parametrize("width", [NARROW, 700, 1280])
@pytest.mark.parametrize("path", ["/run", "/jobs", "/jobs/{id}"])
def test_no_page_scrolls_sideways(tmp_path: Path, visit: Visit, path: str, width: int) -> None:
    name = "hf.co/an-organisation/a-model-with-a-name-that-never-ends-instruct-GGUF:Q4_K_M"
    told = (events.Message(name * 5), events.Failure(name))
    story: list[events.Event] = [events.Started("1"), events.BlockStarted(name, 4), *told]
    with paper_site(tmp_path / "home", story) as (site, job):
        sight = visit(site, width=width)
        assert sight.go(path.format(id=job.id)) == 200
        assert sight.page.evaluate("document.documentElement.scrollWidth") <= width
