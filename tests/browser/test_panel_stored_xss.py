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
from support.panel_pages import BrowserTab, SamplePanel, TabOpener, is_shown, submit_forms
from tipbench.plan.collect_config import EXPERIMENT_PREFIX

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DISPATCH_EVENTS = """document.querySelectorAll('main *').forEach(each => {
    for (const kind of ['mouseover', 'focus', 'pointerenter']) each.dispatchEvent(new Event(kind)) })"""
SUBMITTED = (
    HOSTILE["out of an attribute"] + HOSTILE["handler in an attribute"] + HOSTILE["constructor"],
    HOSTILE["end of the text area"],
    HOSTILE["javascript address"],
)


def violations(tab: BrowserTab) -> list[str]:
    """Return every forbidden request, message and element of a page."""
    return [
        *(f"requested {url}" for url in tab.external_requests),
        *(f"logged {line}" for line in tab.console_errors),
        *(f"broken {url}" for url in tab.missing_resources),
        *(f"injected {element}" for element in tab.injected_elements()),
    ]


def test_forbidden_requests_and_elements_are_detected(open_tab: TabOpener, hostile_panel: SamplePanel) -> None:
    """The detection sees both what the content security policy blocks and what it does not."""
    tab = open_tab(hostile_panel.site)
    tab.go("/jobs")
    injected = json.dumps(HOSTILE["image that fails"] + HOSTILE["stylesheet"])
    with tab.page.expect_console_message(lambda line: "Content Security Policy" in line.text):
        tab.page.evaluate(f"document.querySelector('main').insertAdjacentHTML('beforeend', {injected})")
    found = violations(tab)
    assert sum(each.startswith("injected") for each in found) == 2
    assert any("Content Security Policy" in each for each in found)
    assert not any(each.startswith("logged dialog") for each in found)


def test_hostile_texts_run_nothing_request_nothing_and_fit_the_page(
    open_tab: TabOpener, hostile_panel: SamplePanel
) -> None:
    tab = open_tab(hostile_panel.site)
    found, known = [], ("logged Failed to load resource: the server responded with a status of 404",)
    for name, path in hostile_panel.pages.items():
        status = tab.go(path)
        assert status in (200, 404), (name, status)
        tab.page.evaluate(DISPATCH_EVENTS)
        found += [f"{name}: {each}" for each in violations(tab) if status == 200 or not each.startswith(known)]
        tab.clear_records()
        for width in (NARROW, 700, WIDE):
            tab.page.set_viewport_size({"width": width, "height": 900})
            found += [f"{name}: {out}" for out in [tab.sideways_overflow()] if out]
    assert found == []


def test_values_of_a_submitted_form_are_text(open_tab: TabOpener, hostile_panel: SamplePanel, tmp_path: Path) -> None:
    tab = open_tab(hostile_panel.site)
    found = []
    for name in submit_forms(tab, hostile_panel, tmp_path):
        found += [
            f"{name}: {each}" for each in violations(tab) if "status of 4" not in each and not _is_rejected_form(each)
        ]
        tab.clear_records()
    assert found == []


def _is_rejected_form(line: str) -> bool:
    """Whether a form was rejected, which is expected: its page has an error status."""
    return line.startswith(("broken 422", "broken 409", "broken 400"))


@pytest.mark.parametrize("given", SUBMITTED, ids=["markup", "end of the text area", "javascript address"])
def test_values_of_the_url_are_text(open_tab: TabOpener, hostile_panel: SamplePanel, given: str) -> None:
    tab = open_tab(hostile_panel.site)
    here = hostile_panel.pages["leaderboard"]
    pages = {
        "/": {"q": given}, "/login": {"next": f"/{given}"}, "/run": {"models": given, "experiment": given},
        "/jobs": {"experiment": given}, "/judge": {"experiment": given}, f"/{quote(given)}": {},
        f"{here}/runs": {"model": given, "where": f"params.model={given}"}, f"{here}/judges": {"made": given},
        here: {"judge": given[:60], "where": f"x={given}"}, f"{here}/pairs": {"model": given, "prompt": given},
    }  # fmt: skip
    for path, query in pages.items():
        status = tab.go(f"{path}?{urlencode(query)}")
        assert status < 500, path
        missing = ("logged Failed to load resource: the server responded with a status of 4", "broken 404")
        assert [each for each in violations(tab) if not each.startswith(missing)] == [], path
        tab.clear_records()


def test_tips_rationales_and_notes_are_shown_exactly(open_tab: TabOpener, hostile_panel: SamplePanel) -> None:
    tab = open_tab(hostile_panel.site)
    driver = hostile_panel.content.driver
    wanted = {(place, printable(text)) for place in ("tip", "rationale", "note") for text in HOSTILE.values()}
    for run_id, scores in driver.scores().items():
        tips = json.loads(driver.store.get(run_id)[1].get("artifact:candidates.json", "[]"))
        stored_texts = {(place, printable(tip[place])): tip[place] for tip in tips for place in ("tip", "rationale")}
        notes = [tip.note for given in scores.applied.values() for tip in given.tips]
        stored_texts |= {("note", printable(note)): note for note in notes}
        new = wanted & stored_texts.keys()
        if new:
            assert tab.go(f"{hostile_panel.pages['runs']}/{run_id}") == 200
            page = tab.text()
            assert [key for key in new if not is_shown(stored_texts[key], page)] == []
            wanted -= new
    assert wanted == set()
    assert violations(tab) == []


def printable(text: str) -> str:
    """Return the printable part of a text, which parsing does not change; notes have a maximum length."""
    return "".join(each for each in text[:3900] if each.isprintable()).strip()


def test_every_name_in_a_list_is_shown_as_it_is(open_tab: TabOpener, hostile_panel: SamplePanel) -> None:
    tab = open_tab(hostile_panel.site)
    experiments = tuple(EXPERIMENT_PREFIX + name for name in hostile_names(180))
    assert _names_not_shown(tab, hostile_panel.pages["experiments"], experiments) == []
    assert _names_not_shown(tab, hostile_panel.pages["settings"], hostile_names(60)) == []
    assert _names_not_shown(tab, f"{hostile_panel.pages['runs']}?limit=200", hostile_names(190)) == []
    assert _names_not_shown(tab, f"{hostile_panel.pages['refused models']}&limit=200", hostile_names(60)) == []
    assert violations(tab) == []


def _names_not_shown(tab: BrowserTab, path: str, names: tuple[str, ...]) -> list[str]:
    """Return the names that no page of a list shows."""
    left, pages = list(names), 0
    while left and pages < 10:
        assert tab.go(path) == 200
        text = tab.text()
        left, pages = [name for name in left if not is_shown(name, text)], pages + 1
        following = tab.page.locator("a[href*='next=']").last
        if following.count() == 0:
            break
        path = str(following.get_attribute("href"))
    return left


def test_a_chart_opened_alone_runs_nothing(open_tab: TabOpener, hostile_panel: SamplePanel) -> None:
    tab = open_tab(hostile_panel.site)
    tab.go(hostile_panel.pages["leaderboard"])
    charts = tab.page.locator("picture img, picture source").evaluate_all(
        "found => found.map(each => each.getAttribute('src') || each.getAttribute('srcset').split(' ')[0])"
    )
    assert len(charts) >= 2
    for chart in charts:
        assert tab.go(str(chart)) == 200
        assert tab.page.evaluate("document.querySelectorAll('script, foreignObject, [onload]').length") == 0
    assert tab.console_errors == []
    assert tab.external_requests == []


def test_the_report_runs_nothing(browser: Browser, hostile_panel: SamplePanel, tmp_path: Path) -> None:
    experiment = hostile_panel.pages["leaderboard"].removeprefix("/experiments/")
    url = f"{hostile_panel.site.url}/api/bench/leaderboard/{experiment}"
    headers = {"Authorization": f"Bearer {hostile_panel.site.admin}"}
    response = httpx.get(f"{url}/report.html", headers=headers, timeout=120, trust_env=False)
    assert response.status_code == 200
    file = tmp_path / "report.html"
    file.write_bytes(response.content)
    context = browser.new_context()
    tab = BrowserTab(context.new_page(), "")
    tab.page.on("request", lambda request: tab.external_requests.append(request.url))
    tab.listen()
    tab.page.goto(file.as_uri(), wait_until="networkidle")
    tab.expand_all()
    text = tab.text()
    injected = [
        each for each in tab.injected_elements() if not each.startswith(("<meta", "<g ", "<path ", "<text ", "<svg"))
    ]
    context.close()
    assert [each[:60] for each in HOSTILE.values() if not is_shown(each, text)] == []
    assert (tab.console_errors, injected) == ([], [])
    assert [url for url in tab.external_requests if not url.startswith("file:")] == []
