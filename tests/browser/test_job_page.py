"""The start form and a job's page in a real browser: live updates, cancel and retry; also without scripts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from support.panel_pages import TabOpener
from support.panel_site import Site, panel_site
from support.scripted_runner import ScriptedRunner
from tipbench.jobs.command import collect_request
from tipbench.jobs.job import Job, JobState, JobStatus
from tipbench.plan.collect_config import make_config
from tipbench.record import events
from tipbench.record.store import MemoryStore

if TYPE_CHECKING:
    from playwright.sync_api import Page

EMBEDDED, TEMPLATE = "embedded:smollm2:135m", "baseline:template"
TIMEOUT_MS = 240_000  # a busy machine takes several seconds per cell
NARROW = 360


@contextmanager
def site_with_job(home: Path, job_events: Sequence[events.Event]) -> Iterator[tuple[Site, Job]]:
    """A panel with one running job that emits the events appended to `job_events`."""
    runner = ScriptedRunner(ends=lambda _job: JobStatus(JobState.RUNNING), emitted=lambda _job: job_events)
    with panel_site(home, MemoryStore(), runner=runner) as site:
        job = site.panel.jobs.submit(collect_request(make_config({"models": "a:1b,b:1b"}))).job
        yield site, job


def fill_form(page: Page, models: Sequence[str], name: str, **numbers: int) -> None:
    """Fill in the form by its labels; the experiment's name is new in every test run."""
    for model in (EMBEDDED, TEMPLATE):
        page.get_by_role("checkbox", name=model).set_checked(model in models)
    page.get_by_label("Other models").fill("")
    for prompt in ("v2-mentor", "v3-few-shot"):
        page.get_by_role("checkbox", name=prompt).uncheck()
    page.get_by_label("Experiment", exact=True).fill(f"tip-bench-{name}-{uuid4().hex[:8]}")
    for label, value in {"Number of scenarios (0 = all)": 1, "Tips per answer": 1, **numbers}.items():
        page.get_by_label(label, exact=True).fill(str(value))


def open_form(site: Site, open_tab: TabOpener, **more: Any) -> Page:
    tab = open_tab(site, **more)
    tab.page.goto(f"{site.url}/run")
    return tab.page


def wait_for_end(page: Page) -> None:
    page.wait_for_selector("#live[data-ended=yes]", timeout=TIMEOUT_MS, state="attached")


def test_a_cancelled_job_can_be_retried(tmp_path: Path, open_tab: TabOpener) -> None:
    job_events: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4), cells(1)]
    with site_with_job(tmp_path / "home", job_events) as (site, job):
        page = open_tab(site).page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.locator("#connection[data-state=live]").wait_for()
        page.get_by_text("Cancel…").click()
        page.get_by_role("button", name="Yes, cancel the job").click()
        wait_for_end(page)
        page.locator(".job-state", has_text="Cancelled").wait_for()
        page.get_by_role("button", name="Retry").click()
        page.wait_for_url(lambda url: "/jobs/" in url and not url.endswith(job.id))
        page.get_by_role("link", name=job.id).wait_for()
        assert [each.retry_of for each in site.panel.jobs.store.page().items] == [job.id, None]


def test_a_double_click_on_start_starts_one_job(tmp_path: Path, open_tab: TabOpener) -> None:
    with panel_site(tmp_path / "home", MemoryStore()) as site:
        page = open_form(site, open_tab)
        fill_form(page, [TEMPLATE], "twice")
        page.get_by_role("button", name="Start", exact=True).dblclick()
        page.wait_for_url("**/jobs/*")
        wait_for_end(page)
        assert len(site.panel.jobs.store.page().items) == 1


def test_without_javascript_everything_works(tmp_path: Path, open_tab: TabOpener) -> None:
    finished = events.CellFinished(TEMPLATE, "v1", "x@1", 1, 1, 0, None, 40, 20.0)
    collected = events.Collected("x", 1, 0, 1, 0, (), 1.0)
    job_events: list[events.Event] = [events.BlockStarted(TEMPLATE, 1), finished, events.BlockFinished(TEMPLATE)]
    job_events += [collected, events.Exit(0)]
    with panel_site(tmp_path / "home", MemoryStore(), runner=ScriptedRunner(emitted=lambda _job: job_events)) as site:
        page = open_form(site, open_tab, java_script_enabled=False)
        fill_form(page, [TEMPLATE], "plain")
        page.get_by_role("button", name="Show plan").click()
        page.get_by_text("1 cell to generate").wait_for()
        page.get_by_role("button", name="Start", exact=True).click()
        page.wait_for_url("**/jobs/*")
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while not page.locator(".job-state", has_text="1 cell generated").count():
            assert time.monotonic() < deadline, page.locator("#live").inner_text()
            page.wait_for_timeout(100)
            page.reload()
        page.get_by_text("done, memory freed").wait_for()
        page.get_by_role("link", name="Leaderboard").wait_for()


# live updates of a scripted job


def cells(done: int, total: int = 4, failed: int = 0) -> events.Event:
    return events.CellFinished("a:1b", "v1", f"x@{done}", done, total, failed, None, 40, 20.0)


def test_the_page_follows_the_job(tmp_path: Path, open_tab: TabOpener) -> None:
    job_events: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4)]
    with site_with_job(tmp_path / "home", job_events) as (site, job):
        page = open_tab(site).page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.locator("#connection[data-state=live]").wait_for()
        assert page.locator(".strip-row.is-loading").count() == 1
        job_events += [cells(1), cells(2)]
        page.get_by_text("2 of 4 cells", exact=True).wait_for()
        assert page.title().startswith("25 %")
        assert page.locator("#announce").text_content() == "Running, 25 % done."
        job_events += [cells(3)]
        page.get_by_text("3 of 4 cells", exact=True).wait_for()
        assert page.locator("#announce").text_content() == "Running, 25 % done."  # not every cell is read out
        job_events += [cells(4), events.BlockFinished("a:1b"), events.Waiting("Ollama", 60.0)]
        page.get_by_text("Waiting for Ollama").wait_for()
        page.get_by_text("done, memory freed").wait_for()


def test_times_are_local_with_their_zone_and_utc_on_hover(tmp_path: Path, open_tab: TabOpener) -> None:
    job_events: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4)]
    with site_with_job(tmp_path / "home", job_events) as (site, job):
        page = open_tab(site, timezone_id="Asia/Kolkata", locale="en-GB").page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.locator("#connection[data-state=live]").wait_for()
        job_events += [cells(1)]  # times that are added later too
        page.get_by_text("1 of 4 cells", exact=True).wait_for()
        created = page.locator("#live time").first
        local_time = datetime.fromtimestamp(job.created, timezone(timedelta(hours=5, minutes=30)))
        text, title = created.text_content() or "", created.get_attribute("title") or ""
    assert f"{local_time:%H:%M:%S} " in text
    assert re.search(r"GMT\+5:30|IST", text), text
    assert title.endswith(" UTC")


def test_nothing_jumps_or_closes_while_cells_come_in(tmp_path: Path, open_tab: TabOpener) -> None:
    job_events: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4), cells(1)]
    positions = "[...document.querySelectorAll('h1, h2, summary, .strip-row')].map(e => e.getBoundingClientRect().top)"
    with site_with_job(tmp_path / "home", job_events) as (site, job):
        page = open_tab(site, width=NARROW).page
        page.goto(f"{site.url}/jobs/{job.id}")
        page.locator("#connection[data-state=live]").wait_for()
        page.get_by_text("Cancel…").click()
        before = page.evaluate(positions)
        job_events += [cells(2), cells(3)]
        page.get_by_text("3 of 4 cells", exact=True).wait_for()
        assert page.evaluate(positions) == before
        assert page.get_by_role("button", name="Yes, cancel the job").is_visible()


def test_a_lost_connection_and_an_ended_session_are_shown(tmp_path: Path, open_tab: TabOpener) -> None:
    job_events: list[events.Event] = [events.Started("1"), events.BlockStarted("a:1b", 4)]
    with site_with_job(tmp_path / "home", job_events) as (site, job):
        page = open_tab(site).page
        page.route("**/events", lambda route: route.abort())
        page.goto(f"{site.url}/jobs/{job.id}")
        page.get_by_text("Connection lost, reconnecting").wait_for()
        job_events += [cells(1)]
        page.unroute("**/events")
        page.locator("#connection[data-state=live]").wait_for()
        page.get_by_text("1 of 4 cells", exact=True).wait_for()
        for token in site.panel.authenticator.tokens.all():
            site.panel.authenticator.tokens.revoke(token.id)
        job_events += [cells(2)]
        page.get_by_text("Your session has ended").wait_for()


def test_no_page_scrolls_sideways(tmp_path: Path, open_tab: TabOpener) -> None:
    name = "hf.co/an-organisation/a-model-with-a-name-that-never-ends-instruct-GGUF:Q4_K_M"
    messages = (events.Message(name * 5), events.Failure(name))
    job_events: list[events.Event] = [events.Started("1"), events.BlockStarted(name, 4), *messages]
    with site_with_job(tmp_path / "home", job_events) as (site, job):
        tab = open_tab(site)
        for path in ("/run", "/jobs", f"/jobs/{job.id}"):
            assert tab.go(path) == 200
            for width in (NARROW, 700, 1280):
                tab.page.set_viewport_size({"width": width, "height": 900})
                assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
