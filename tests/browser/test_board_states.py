"""The board page in each state of an experiment: summary card, next step, layout, and tasks by keyboard and touch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.accessibility import faults, load_faults
from support.board_states import PREFIX, board_states
from support.panel_pages import PageView, Visit
from support.panel_site import Site, panel_site
from tipbench.web.panel.matrix import PHONE_PAIRS

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Locator, Page

# Of each state: the beginning of its title, and what its page offers.
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
    with panel_site(tmp_path_factory.mktemp("states") / "home", board_states()) as made:
        yield made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


def board_of(state: str) -> str:
    return f"/experiments/{PREFIX}{state}"


@pytest.mark.parametrize("state", STATES)
def test_each_state_has_its_card_and_next_step(visit: Visit, site: Site, axe: Axe, pictures: Path, state: str) -> None:
    title, offers = STATES[state]
    view = visit(site, width=1024)
    assert list(load_faults(view, board_of(state))) == []
    card = view.page.locator(".summary-card")
    assert card.get_by_role("heading").inner_text().startswith(title)
    assert card.locator(".summary-next").inner_text().startswith("Next: ")
    text = view.page.locator("main").inner_text()
    assert [offer for offer in offers if offer not in text] == []
    for width, scheme in ((1360, "light"), (1024, "dark"), (360, "light")):
        view.page.set_viewport_size({"width": width, "height": 900})
        view.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        view.page.screenshot(path=pictures / f"{state}-{width}-{scheme}.png", full_page=True)
        assert view.scrolls_sideways() is None
    assert list(faults(axe, view, narrow_too=state == "decided")) == []
    assert (view.outside, view.console, view.missing) == ([], [], [])


def test_no_match_has_its_page_with_a_way_back(visit: Visit, site: Site, axe: Axe) -> None:
    view = visit(site)
    view.go(f"{board_of('decided')}?where=params.persona%3Dnobody")
    assert view.page.get_by_role("heading", name="Nothing matches these filters").is_visible()
    assert list(faults(axe, view)) == []
    view.page.get_by_role("link", name="Remove all filters").click()
    view.page.get_by_role("heading", name="Use large:3b/v1").wait_for()


@pytest.mark.parametrize(("state", "pairs", "scenarios"), [("large", 15, 32), ("wide", 60, 32)])
def test_large_boards_stay_small_and_whole(
    visit: Visit, site: Site, axe: Axe, pictures: Path, state: str, pairs: int, scenarios: int
) -> None:
    view = visit(site, width=1360)
    for path in (board_of(state), f"{board_of(state)}/scenarios"):
        assert list(load_faults(view, path)) == []
        view.page.screenshot(path=pictures / f"{state}-{path.rpartition('/')[2]}.png", full_page=True)
        assert list(faults(axe, view)) == []
    assert view.page.locator(".matrix tbody tr").count() == scenarios
    assert view.page.locator(".matrix thead th.pair").count() == pairs


def test_on_a_phone_the_matrix_is_a_list_that_does_not_scroll_sideways(visit: Visit, site: Site, axe: Axe) -> None:
    view = visit(site, width=360)
    assert list(load_faults(view, f"{board_of('large')}/scenarios")) == []
    box = view.page.locator(".matrix")
    assert box.evaluate("each => each.scrollWidth <= each.clientWidth")
    row = view.page.locator(".matrix tbody tr").first
    assert "all 15 answers" in row.locator("th").inner_text()
    assert row.locator("td a:visible").count() == PHONE_PAIRS
    assert list(faults(axe, view)) == []


def test_the_answers_to_a_scenario_have_an_address(visit: Visit, site: Site, axe: Axe) -> None:
    view = visit(site)
    view.page.goto(f"{site.url}{board_of('decided')}/scenarios")
    scenario = view.page.locator(".matrix tbody th").nth(2).inner_text()
    view.page.locator(".matrix tbody tr").nth(2).locator("td a").nth(1).click()
    view.page.get_by_role("heading", name=scenario).wait_for()
    view.page.wait_for_load_state()
    assert view.page.locator(".side:target").get_attribute("id") == "a1"
    assert list(faults(axe, view)) == []
    again = visit(site)
    again.page.goto(view.page.url)
    assert again.page.locator("article.answer").count() == 6


def test_the_matrix_is_one_stop_for_the_tab_key_and_moves_with_arrows(visit: Visit, site: Site) -> None:
    view = visit(site)
    view.page.goto(f"{site.url}{board_of('decided')}/scenarios")
    view.page.locator(".matrix tbody a").first.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        view.page.keyboard.press(key)
    place = "[document.activeElement.closest('tr').rowIndex, document.activeElement.closest('td, th').cellIndex]"
    assert view.page.evaluate(place) == [2, 3]  # the mean has no link and is passed over
    stops = "[...document.querySelectorAll('.matrix tbody a')].filter(each => each.tabIndex === 0).length"
    assert view.page.evaluate(stops) == 1
    view.page.keyboard.press("Enter")
    view.page.wait_for_url("**/scenarios?scenario=*#a1")


@dataclass
class Hand:
    """Uses pages by keyboard only or by touch only, and counts the clicks."""

    view: PageView
    touch: bool
    clicks: int = 0

    @property
    def page(self) -> Page:
        return self.view.page

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
        self.page.goto(self.view.origin)
        self.use(self.page.get_by_role("link", name=PREFIX + state, exact=True))
        self.page.wait_for_url(f"**{board_of(state)}")
        self.clicks = 0


@pytest.fixture(params=["keyboard", "touch"])
def hand(request: pytest.FixtureRequest, visit: Visit, site: Site) -> Hand:
    touch = request.param == "touch"
    return Hand(visit(site, width=360 if touch else 1280, has_touch=touch), touch)


def test_which_pair_to_use_is_in_sight_on_the_board(hand: Hand) -> None:
    hand.open_board("decided")
    box = hand.page.get_by_role("heading", name="Use large:3b/v1").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 740  # the height of a small phone
    assert hand.clicks == 0


def test_all_answers_to_one_scenario_take_two_clicks(hand: Hand) -> None:
    hand.open_board("decided")
    hand.use(hand.page.get_by_role("link", name="Scenarios"))
    hand.page.wait_for_url("**/scenarios")
    hand.use(hand.page.locator(".matrix tbody a").first)
    hand.page.wait_for_url("**/scenarios?scenario=*")
    assert (hand.page.locator("article.answer").count(), hand.clicks) == (6, 2)


def test_the_next_item_to_judge_takes_one_click(hand: Hand) -> None:
    hand.open_board("unjudged")
    hand.use(hand.page.get_by_role("button", name="Judge now"))
    hand.page.wait_for_url("**/judge/batches/*")
    hand.page.locator("#desk:not([hidden])").wait_for()
    assert (hand.page.locator(".group").first.is_visible(), hand.clicks) == (True, 1)


def test_the_worst_answer_of_the_leader_takes_two_clicks(hand: Hand) -> None:
    hand.open_board("tied")
    hand.use(hand.page.get_by_role("link", name="Its weakest answers"))
    hand.page.wait_for_url("**/runs?*")
    scores = [float(text) for text in hand.page.locator("td[data-label=Composite]").all_inner_texts()]
    assert scores == sorted(scores)
    hand.use(hand.page.locator(".runs tbody th a").first)
    hand.page.locator(".headline").wait_for()
    assert (hand.page.locator(".headline dd").first.inner_text(), hand.clicks) == (f"{scores[0]:.2f}", 2)


def test_a_decision_takes_three_clicks_and_is_shown_on_the_board(hand: Hand) -> None:
    reason = f"Leads clearly, and is fast enough: {'touch' if hand.touch else 'keyboard'}."
    hand.open_board("decided")
    hand.use(hand.page.locator(".decide > summary"))
    hand.use(hand.page.get_by_label("Reason"), text=reason)
    hand.use(hand.page.get_by_role("button", name="Record the decision"))
    hand.page.locator(".alert", has_text="Decided for large:3b/v1").filter(has_text=reason).wait_for()
    assert hand.clicks == 3


def test_on_a_phone_a_row_opens_for_the_rest_and_sorting_keeps_the_place(visit: Visit, site: Site) -> None:
    view = visit(site, width=360)
    view.page.goto(site.url + board_of("large"))
    row = view.page.locator(".standings tbody tr").nth(3)
    shown = "row => [...row.querySelectorAll('td')].filter(each => each.offsetParent).map(each => each.dataset.label)"
    assert row.evaluate(shown) == ["rank", "composite", "standing"]
    row.get_by_label("More of").check()
    assert {"P(best)", "latency", "tone", "tokens/s"} <= set(row.evaluate(shown))
    view.page.set_viewport_size({"width": 1360, "height": 900})
    head = view.page.get_by_role("columnheader", name="composite").get_by_role("link")
    # The place at the click itself: the wider page may still be laid out, and a click scrolls to its link.
    view.page.evaluate("addEventListener('click', () => sessionStorage.setItem('clicked', scrollY), true)")
    with view.page.expect_navigation():
        head.click()
    before, after = view.page.evaluate("[Number(sessionStorage.getItem('clicked')), scrollY]")
    assert before > 0
    assert abs(after - before) < 3
