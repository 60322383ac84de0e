"""Hostile texts in all user content: no script runs, no request leaves the panel, and all is shown as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import httpx
import pytest

from support.accessibility import NARROW, WIDE
from support.hostile import HOSTILE, hostile_names
from support.panel_pages import FurnishedPanel, PageView, Visit, after_forms, shown_as_text
from tipbench.plan.collect_config import EXPERIMENT_PREFIX

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WAKE = """document.querySelectorAll('main *').forEach(each => {
    for (const kind of ['mouseover', 'focus', 'pointerenter']) each.dispatchEvent(new Event(kind)) })"""
SENT = (
    HOSTILE["out of an attribute"] + HOSTILE["handler in an attribute"] + HOSTILE["constructor"],
    HOSTILE["end of the text area"],
    HOSTILE["javascript address"],
)


def harm(view: PageView) -> list[str]:
    """Return everything forbidden that a page has done."""
    return [
        *(f"requested {url}" for url in view.outside),
        *(f"logged {line}" for line in view.console),
        *(f"broken {url}" for url in view.missing),
        *(f"planted {element}" for element in view.planted()),
    ]


def test_what_a_page_runs_or_requests_is_detected(visit: Visit, hostile: FurnishedPanel) -> None:
    """The detection sees both what the content security policy blocks and what it does not."""
    view = visit(hostile.site)
    view.go("/jobs")
    planted = json.dumps(HOSTILE["image that fails"] + HOSTILE["stylesheet"])
    with view.page.expect_console_message(lambda line: "Content Security Policy" in line.text):
        view.page.evaluate(f"document.querySelector('main').insertAdjacentHTML('beforeend', {planted})")
    noticed = harm(view)
    assert sum(each.startswith("planted") for each in noticed) == 2
    assert any("Content Security Policy" in each for each in noticed)
    assert not any(each.startswith("logged dialog") for each in noticed)


def test_no_page_runs_requests_or_is_stretched_by_what_it_shows(visit: Visit, hostile: FurnishedPanel) -> None:
    view = visit(hostile.site)
    found, known = [], ("logged Failed to load resource: the server responded with a status of 404",)
    for name, path in hostile.pages.items():
        status = view.go(path)
        assert status in (200, 404), (name, status)
        view.page.evaluate(WAKE)
        found += [f"{name}: {each}" for each in harm(view) if status == 200 or not each.startswith(known)]
        view.forget()
        for width in (NARROW, 700, WIDE):
            view.page.set_viewport_size({"width": width, "height": 900})
            found += [f"{name}: {out}" for out in [view.scrolls_sideways()] if out]
    assert found == []


def test_values_of_a_submitted_form_are_text(visit: Visit, hostile: FurnishedPanel, tmp_path: Path) -> None:
    view = visit(hostile.site)
    found = []
    for name in after_forms(view, hostile, tmp_path):
        found += [f"{name}: {each}" for each in harm(view) if "status of 4" not in each and not _refused(each)]
        view.forget()
    assert found == []


def _refused(line: str) -> bool:
    """A rejected form is a page with an error status, which is expected."""
    return line.startswith(("broken 422", "broken 409", "broken 400"))


@pytest.mark.parametrize("given", SENT, ids=["markup", "end of the text area", "javascript address"])
def test_values_of_the_url_are_text(visit: Visit, hostile: FurnishedPanel, given: str) -> None:
    view = visit(hostile.site)
    here = hostile.pages["leaderboard"]
    pages = {
        "/": {"q": given}, "/login": {"next": f"/{given}"}, "/run": {"models": given, "experiment": given},
        "/jobs": {"experiment": given}, "/judge": {"experiment": given}, f"/{quote(given)}": {},
        f"{here}/runs": {"model": given, "where": f"params.model={given}"}, f"{here}/judges": {"made": given},
        here: {"judge": given[:60], "where": f"x={given}"}, f"{here}/pairs": {"model": given, "prompt": given},
    }  # fmt: skip
    for path, query in pages.items():
        status = view.go(f"{path}?{urlencode(query)}")
        assert status < 500, path
        missing = ("logged Failed to load resource: the server responded with a status of 4", "broken 404")
        assert [each for each in harm(view) if not each.startswith(missing)] == [], path
        view.forget()


def test_tips_rationales_and_notes_are_shown_exactly(visit: Visit, hostile: FurnishedPanel) -> None:
    view = visit(hostile.site)
    driver = hostile.content.driver
    wanted = {(place, printed(text)) for place in ("tip", "rationale", "note") for text in HOSTILE.values()}
    for run_id, scores in driver.scores().items():
        tips = json.loads(driver.store.get(run_id)[1].get("artifact:candidates.json", "[]"))
        there = {(place, printed(tip[place])): tip[place] for tip in tips for place in ("tip", "rationale")}
        notes = [tip.note for given in scores.applied.values() for tip in given.tips]
        there |= {("note", printed(note)): note for note in notes}
        new = wanted & there.keys()
        if new:
            assert view.go(f"{hostile.pages['runs']}/{run_id}") == 200
            page = view.text()
            assert [key for key in new if not shown_as_text(there[key], page)] == []
            wanted -= new
    assert wanted == set()
    assert harm(view) == []


def printed(text: str) -> str:
    """Return the printable part of a text, which parsing does not change; notes have a maximum length."""
    return "".join(each for each in text[:3900] if each.isprintable()).strip()


def test_every_name_in_a_list_is_shown_as_it_is(visit: Visit, hostile: FurnishedPanel) -> None:
    view = visit(hostile.site)
    experiments = tuple(EXPERIMENT_PREFIX + name for name in hostile_names(180))
    assert _missing(view, hostile.pages["experiments"], experiments) == []
    assert _missing(view, hostile.pages["settings"], hostile_names(60)) == []
    assert _missing(view, f"{hostile.pages['runs']}?limit=200", hostile_names(190)) == []
    assert _missing(view, f"{hostile.pages['refused models']}&limit=200", hostile_names(60)) == []
    assert harm(view) == []


def _missing(view: PageView, path: str, names: tuple[str, ...]) -> list[str]:
    """Return the names that no page of a list shows."""
    left, pages = list(names), 0
    while left and pages < 10:
        assert view.go(path) == 200
        text = view.text()
        left, pages = [name for name in left if not shown_as_text(name, text)], pages + 1
        following = view.page.locator("a[href*='next=']").last
        if following.count() == 0:
            break
        path = str(following.get_attribute("href"))
    return left


def test_a_chart_opened_by_itself_runs_nothing(visit: Visit, hostile: FurnishedPanel) -> None:
    view = visit(hostile.site)
    view.go(hostile.pages["leaderboard"])
    charts = view.page.locator("picture img, picture source").evaluate_all(
        "found => found.map(each => each.getAttribute('src') || each.getAttribute('srcset').split(' ')[0])"
    )
    assert len(charts) >= 2
    for chart in charts:
        assert view.go(str(chart)) == 200
        assert view.page.evaluate("document.querySelectorAll('script, foreignObject, [onload]').length") == 0
    assert view.console == []
    assert view.outside == []


def test_the_report_runs_nothing_either(browser: Browser, hostile: FurnishedPanel, tmp_path: Path) -> None:
    url = f"{hostile.site.url}/api/bench/leaderboard/{hostile.pages['leaderboard'].removeprefix('/experiments/')}"
    headers = {"Authorization": f"Bearer {hostile.site.admin}"}
    response = httpx.get(f"{url}/report.html", headers=headers, timeout=120, trust_env=False)
    assert response.status_code == 200
    file = tmp_path / "report.html"
    file.write_bytes(response.content)
    context = browser.new_context()
    view = PageView(context.new_page(), "")
    view.page.on("request", lambda request: view.outside.append(request.url))
    view.listen()
    view.page.goto(file.as_uri(), wait_until="networkidle")
    view.unfold()
    text = view.text()
    planted = [each for each in view.planted() if not each.startswith(("<meta", "<g ", "<path ", "<text ", "<svg"))]
    context.close()
    assert [each[:60] for each in HOSTILE.values() if not shown_as_text(each, text)] == []
    assert (view.console, planted) == ([], [])
    assert [url for url in view.outside if not url.startswith("file:")] == []
