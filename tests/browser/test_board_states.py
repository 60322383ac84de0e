"""The board page in each state of an experiment: summary card, next step, layout, and tasks by keyboard and touch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.accessibility import faults, load_faults
from support.board_states import PREFIX, board_states
from support.panel_pages import BrowserTab, TabOpener
from support.panel_site import Site, panel_site
from tipbench.web.panel.matrix import PHONE_PAIRS

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Locator, Page

# The beginning of each state's title, and texts of its page.
STATES = {
    "unjudged": ("Not judged yet", ("Judge now", "Run the rules judge")),
    "unusable": ("No usable answers", ("See the runs",)),
    "rules": ("For now: ", ("Judge now", "Its weakest answers", "People: 0 of 8 scenarios", "Rules: 8 of 8")),
    "first-batch": ("For now: ", ("Judge now", "People: 2 of 8 scenarios", "Rules: 8 of 8")),
    "held": ("Not judged yet", ("Review the held scores",)),
    "accepted": ("Too close to call: 6 pairs share the lead", ("accepted although too far off",)),
    "decided": ("Use large:3b/v1", ("Decide",)),
    "tied": ("Not decided: ", ("Among the tied, it is the fastest", "chance to decide")),
    "close": ("Too close to call: ", ("more scenarios would hardly decide", "the smallest")),
    "reference-ahead": ("Use none of them: baseline:template is better", ("Does not beat baseline:template: −",)),
}
MAX_TABS = 120


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One panel with an experiment for each state."""
    with panel_site(tmp_path_factory.mktemp("states") / "home", board_states()) as site:
        yield site


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


def board_path(state: str) -> str:
    return f"/experiments/{PREFIX}{state}"


@pytest.mark.parametrize("state", STATES)
def test_each_state_has_its_summary_card_and_next_step(
    open_tab: TabOpener, site: Site, axe: Axe, pictures: Path, state: str
) -> None:
    title, offers = STATES[state]
    tab = open_tab(site, width=1024)
    assert list(load_faults(tab, board_path(state))) == []
    card = tab.page.locator(".summary-card")
    assert card.get_by_role("heading").inner_text().startswith(title)
    assert card.locator(".summary-next").inner_text().startswith("Next: ")
    text = tab.page.locator("main").inner_text()
    assert [offer for offer in offers if offer not in text] == []
    for width, scheme in ((1360, "light"), (1024, "dark"), (360, "light")):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        tab.page.screenshot(path=pictures / f"{state}-{width}-{scheme}.png", full_page=True)
        assert tab.sideways_overflow() is None
    assert list(faults(axe, tab, every_viewport=state == "decided")) == []
    assert (tab.external_requests, tab.console_errors, tab.missing_resources) == ([], [], [])


def test_filters_without_a_match_can_be_removed(open_tab: TabOpener, site: Site, axe: Axe) -> None:
    tab = open_tab(site)
    tab.go(f"{board_path('decided')}?where=params.persona%3Dnobody")
    assert tab.page.get_by_role("heading", name="Nothing matches these filters").is_visible()
    assert list(faults(axe, tab)) == []
    tab.page.get_by_role("link", name="Remove all filters").click()
    tab.page.get_by_role("heading", name="Use large:3b/v1").wait_for()


@pytest.mark.parametrize(("state", "pairs", "scenarios"), [("large", 15, 32), ("wide", 60, 32)])
def test_large_boards_stay_small_and_whole(
    open_tab: TabOpener, site: Site, axe: Axe, pictures: Path, state: str, pairs: int, scenarios: int
) -> None:
    tab = open_tab(site, width=1360)
    for path in (board_path(state), f"{board_path(state)}/scenarios"):
        assert list(load_faults(tab, path)) == []
        tab.page.screenshot(path=pictures / f"{state}-{path.rpartition('/')[2]}.png", full_page=True)
        assert list(faults(axe, tab)) == []
    assert tab.page.locator(".matrix tbody tr").count() == scenarios
    assert tab.page.locator(".matrix thead th.pair").count() == pairs


def test_on_a_phone_the_matrix_is_a_list_that_does_not_scroll_sideways(
    open_tab: TabOpener, site: Site, axe: Axe
) -> None:
    tab = open_tab(site, width=360)
    assert list(load_faults(tab, f"{board_path('large')}/scenarios")) == []
    matrix = tab.page.locator(".matrix")
    assert matrix.evaluate("each => each.scrollWidth <= each.clientWidth")
    row = tab.page.locator(".matrix tbody tr").first
    assert "all 15 answers" in row.locator("th").inner_text()
    assert row.locator("td a:visible").count() == PHONE_PAIRS
    assert list(faults(axe, tab)) == []


def test_the_answers_to_a_scenario_have_a_url(open_tab: TabOpener, site: Site, axe: Axe) -> None:
    tab = open_tab(site)
    tab.page.goto(f"{site.url}{board_path('decided')}/scenarios")
    scenario = tab.page.locator(".matrix tbody th").nth(2).inner_text()
    tab.page.locator(".matrix tbody tr").nth(2).locator("td a").nth(1).click()
    tab.page.get_by_role("heading", name=scenario).wait_for()
    tab.page.wait_for_load_state()
    assert tab.page.locator(".side:target").get_attribute("id") == "a1"
    assert list(faults(axe, tab)) == []
    again = open_tab(site)
    again.page.goto(tab.page.url)
    assert again.page.locator("article.answer").count() == 6


def test_the_matrix_is_one_tab_stop_and_arrow_keys_move_in_it(open_tab: TabOpener, site: Site) -> None:
    tab = open_tab(site)
    tab.page.goto(f"{site.url}{board_path('decided')}/scenarios")
    tab.page.locator(".matrix tbody a").first.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        tab.page.keyboard.press(key)
    position = "[document.activeElement.closest('tr').rowIndex, document.activeElement.closest('td, th').cellIndex]"
    assert tab.page.evaluate(position) == [2, 3]  # the mean has no link and is passed over
    stops = "[...document.querySelectorAll('.matrix tbody a')].filter(each => each.tabIndex === 0).length"
    assert tab.page.evaluate(stops) == 1
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/scenarios?scenario=*#a1")


@dataclass
class InputDevice:
    """Uses pages by keyboard only or by touch only, and counts the clicks."""

    tab: BrowserTab
    touch: bool
    clicks: int = 0

    @property
    def page(self) -> Page:
        return self.tab.page

    def use(self, target: Locator, *, text: str | None = None) -> None:
        """Activate a link or button, or type `text` into a field."""
        self.clicks += 1
        if self.touch:
            target.tap()
        else:
            for _ in range(MAX_TABS):
                if target.evaluate("each => each === document.activeElement"):
                    break
                self.page.keyboard.press("Tab")
            else:
                pytest.fail(f"not reached by the tab key: {target}")
            if text is None:
                self.page.keyboard.press("Enter")
        if text is not None:
            self.page.keyboard.type(text)

    def open_board(self, state: str) -> None:
        """Open a board from the list of experiments and start counting clicks."""
        self.page.goto(self.tab.origin)
        self.use(self.page.get_by_role("link", name=PREFIX + state, exact=True))
        self.page.wait_for_url(f"**{board_path(state)}")
        self.clicks = 0


@pytest.fixture(params=["keyboard", "touch"])
def device(request: pytest.FixtureRequest, open_tab: TabOpener, site: Site) -> InputDevice:
    touch = request.param == "touch"
    return InputDevice(open_tab(site, width=360 if touch else 1280, has_touch=touch), touch)


def test_the_recommended_pair_is_visible_without_scrolling(device: InputDevice) -> None:
    device.open_board("decided")
    heading_box = device.page.get_by_role("heading", name="Use large:3b/v1").bounding_box()
    assert heading_box is not None
    assert heading_box["y"] + heading_box["height"] < 740  # the height of a small phone
    assert device.clicks == 0


def test_all_answers_to_one_scenario_take_two_clicks(device: InputDevice) -> None:
    device.open_board("decided")
    device.use(device.page.get_by_role("link", name="Scenarios"))
    device.page.wait_for_url("**/scenarios")
    device.use(device.page.locator(".matrix tbody a").first)
    device.page.wait_for_url("**/scenarios?scenario=*")
    assert (device.page.locator("article.answer").count(), device.clicks) == (6, 2)


def test_the_next_item_to_judge_takes_one_click(device: InputDevice) -> None:
    device.open_board("unjudged")
    device.use(device.page.get_by_role("button", name="Judge now"))
    device.page.wait_for_url("**/judge/batches/*")
    device.page.locator("#desk:not([hidden])").wait_for()
    assert (device.page.locator(".group").first.is_visible(), device.clicks) == (True, 1)


def test_the_worst_answer_of_the_leader_takes_two_clicks(device: InputDevice) -> None:
    device.open_board("tied")
    device.use(device.page.get_by_role("link", name="Its weakest answers"))
    device.page.wait_for_url("**/runs?*")
    scores = [float(text) for text in device.page.locator("td[data-label=Composite]").all_inner_texts()]
    assert scores == sorted(scores)
    device.use(device.page.locator(".runs tbody th a").first)
    device.page.locator(".headline").wait_for()
    assert (device.page.locator(".headline dd").first.inner_text(), device.clicks) == (f"{scores[0]:.2f}", 2)


def test_a_decision_takes_three_clicks_and_is_shown_on_the_board(device: InputDevice) -> None:
    reason = f"Leads clearly, and is fast enough: {'touch' if device.touch else 'keyboard'}."
    device.open_board("decided")
    device.use(device.page.locator(".decide > summary"))
    device.use(device.page.get_by_label("Reason"), text=reason)
    device.use(device.page.get_by_role("button", name="Record the decision"))
    device.page.locator(".alert", has_text="Decided for large:3b/v1").filter(has_text=reason).wait_for()
    assert device.clicks == 3


def test_on_a_phone_a_row_expands_and_sorting_keeps_the_scroll_position(open_tab: TabOpener, site: Site) -> None:
    tab = open_tab(site, width=360)
    tab.page.goto(site.url + board_path("large"))
    row = tab.page.locator(".standings tbody tr").nth(3)
    shown = "row => [...row.querySelectorAll('td')].filter(each => each.offsetParent).map(each => each.dataset.label)"
    assert row.evaluate(shown) == ["rank", "composite", "standing"]
    row.get_by_label("More of").check()
    assert {"P(best)", "latency", "tone", "tokens/s"} <= set(row.evaluate(shown))
    tab.page.set_viewport_size({"width": 1360, "height": 900})
    head = tab.page.get_by_role("columnheader", name="composite").get_by_role("link")
    # The position at the click itself: the wider page may still be laid out, and a click scrolls to its link.
    tab.page.evaluate("addEventListener('click', () => sessionStorage.setItem('clicked', scrollY), true)")
    with tab.page.expect_navigation():
        head.click()
    before, after = tab.page.evaluate("[Number(sessionStorage.getItem('clicked')), scrollY]")
    assert before > 0
    assert abs(after - before) < 3
