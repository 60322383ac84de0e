"""The judge page at 360 px by touch; and light, dark, wide and narrow: no axe-core violation, shift or overflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.accessibility import NARROW, WIDE, faults, load_faults
from support.judge_page import BatchPage, JudgingSite, judging_site, open_batch_page
from support.judging import always
from support.panel_pages import TabOpener
from tipbench.web.batch_store import Kind

if TYPE_CHECKING:
    from axe_playwright_python.sync_playwright import Axe

FINGER = 44  # px
BOXES = """[...document.querySelectorAll('.score, .tip-text, .desk-actions .button, .queue-item, h1, .brief')]
    .map(each => each.getBoundingClientRect()).map(box => [box.x, box.y, box.width, box.height])"""


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgingSite]:
    with judging_site(tmp_path_factory.mktemp("touch") / "home") as site:
        yield site


@pytest.fixture
def phone(judging: JudgingSite, open_tab: TabOpener) -> BatchPage:
    batch = open_batch_page(open_tab, judging.site, judging.open(), width=NARROW, has_touch=True, is_mobile=True)
    batch.page.set_viewport_size({"width": NARROW, "height": 740})
    return batch


# by touch


def test_an_item_is_judged_by_touch_alone(judging: JudgingSite, phone: BatchPage) -> None:
    number = phone.number
    groups = phone.page.locator(".group")
    for index in range(groups.count()):
        groups.nth(index).get_by_role("radio").nth(index % 5).tap()
    assert phone.scores() == [index % 5 + 1 for index in range(groups.count())]
    phone.page.locator(".submit").tap()
    phone.wait_for_item(number + 1)
    phone.page.locator(".queue-item").nth(number - 1).tap()
    phone.wait_for_state("Submitted")
    assert judging.answer(phone.sheet, number)["state"] == "submitted"


def test_every_target_is_wide_enough_for_a_finger(phone: BatchPage) -> None:
    phone.page.locator(".brief").tap()
    script = """[...document.querySelectorAll('#desk button')].filter(each => each.checkVisibility())
        .map(each => [each.textContent, each.getBoundingClientRect()])
        .filter(([, box]) => Math.min(box.width, box.height) < 44).map(([text]) => text)"""
    small = [text for text in phone.page.evaluate(script) if text not in ("Finish batch…", "Show full rubric")]
    assert small == []
    assert phone.page.locator(".score").first.bounding_box()["width"] >= FINGER  # type: ignore[index]


def test_the_bar_and_the_scales_wording_stay_in_sight(phone: BatchPage) -> None:
    for _ in range(2):
        for part in (".submit", ".brief", ".queue-item[aria-current]", ".scenario summary"):
            box = phone.page.locator(part).bounding_box()
            assert box is not None
            assert box["y"] >= 0
            assert box["y"] + box["height"] <= 740
        phone.page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        phone.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_the_rubric_opens_over_the_page_and_scores(phone: BatchPage) -> None:
    phone.page.locator(".brief").tap()
    step = phone.page.locator(".step").nth(3)
    assert step.is_visible()
    step.tap()
    assert 4 in phone.scores()
    phone.press("u")


def test_skipping_by_touch_takes_a_ready_reason(judging: JudgingSite, phone: BatchPage) -> None:
    number = phone.number
    phone.page.get_by_role("button", name="Skip").tap()
    phone.page.get_by_role("button", name="The text is garbled").tap()
    phone.page.get_by_role("button", name="Skip", exact=True).tap()
    phone.wait_for_item(number + 1)
    assert phone.queue_state(number) == "skipped"


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_nothing_jumps_while_scores_come_in(judging: JudgingSite, open_tab: TabOpener, width: int) -> None:
    batch = open_batch_page(open_tab, judging.site, judging.open(), width=width)
    batch.page.locator("[data-do=next]").first.wait_for(state="attached")
    batch.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    before = batch.page.evaluate(BOXES)
    batch.page.locator(".score").nth(2).dispatch_event("click")
    batch.page.evaluate("scrollTo(0, 0)")
    batch.wait_for_state("Draft saved")
    assert batch.page.evaluate(BOXES) == before
    batch.press("u")
    batch.wait_for_state("Not scored")


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_nothing_jumps_when_the_script_shows_the_batch(judging: JudgingSite, open_tab: TabOpener, width: int) -> None:
    tab = open_tab(judging.site, "judge", width=width)
    assert list(load_faults(tab, f"/judge/batches/{judging.open()}", until="#desk:not([hidden])")) == []


# accessibility


def test_the_page_has_no_violation(judging: JudgingSite, open_tab: TabOpener, axe: Axe) -> None:
    batch = open_batch_page(open_tab, judging.site, judging.open())
    batch.press("3", "4", "f", "o")
    wrong = [f"batch {fault}" for fault in faults(axe, batch.tab, every_viewport=True)]
    for key, name in (("?", "keys"), ("s", "skip"), ("n", "note")):
        batch.press(key)
        wrong += [f"{name} {fault}" for fault in faults(axe, batch.tab)]
        batch.press("Escape")
    batch.page.get_by_role("button", name="Finish batch…").click()
    wrong += [f"finish {fault}" for fault in faults(axe, batch.tab)]
    assert wrong == []


def test_a_conflict_has_no_violation(judging: JudgingSite, open_tab: TabOpener, axe: Axe) -> None:
    sheet = judging.open()
    batch, other = (open_batch_page(open_tab, judging.site, sheet) for _ in range(2))
    for device, digit in ((other, "2"), (batch, "5")):
        device.page.locator(".queue-item").nth(9).click()
        device.press(digit)
        device.wait_for_state("Draft saved" if device is other else "Conflict")
    assert list(faults(axe, batch.tab)) == []


@pytest.mark.parametrize("width", [360, 1024])
def test_the_buttons_of_a_duel_are_in_sight_and_cover_no_text(tmp_path: Path, open_tab: TabOpener, width: int) -> None:
    with judging_site(tmp_path / "home") as judging:
        judging.driver.judged_by("anna", everything=True)
        batch = open_batch_page(open_tab, judging.site, judging.open(Kind.DUEL, limit=4), width=width)
        batch.page.set_viewport_size({"width": width, "height": 640})
        buttons = batch.page.locator(".choice-button")
        assert buttons.count() == 3
        for button in buttons.all():
            box = button.bounding_box()
            assert box is not None
            assert box["y"] + box["height"] <= 640
        last = batch.page.locator(".side-tip").last
        last.scroll_into_view_if_needed()
        batch.page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        end, bar = last.bounding_box(), batch.page.locator(".choices-bar").bounding_box()
        assert end is not None
        assert bar is not None
        assert end["y"] + end["height"] <= bar["y"]


def test_duels_have_no_violation(tmp_path: Path, open_tab: TabOpener, axe: Axe) -> None:
    with judging_site(tmp_path / "home") as judging:
        judging.driver.judged_by("anna", everything=True)
        batch = open_batch_page(open_tab, judging.site, judging.open(Kind.DUEL, limit=4))
        batch.press("a", "k")
        assert list(faults(axe, batch.tab)) == []


def test_the_end_of_a_batch_has_no_violation(tmp_path: Path, open_tab: TabOpener, axe: Axe) -> None:
    with judging_site(tmp_path / "home") as judging:
        sheet = judging.open()
        judging.submit(sheet, always(5))
        batch = open_batch_page(open_tab, judging.site, sheet)
        batch.page.get_by_role("button", name="Finish batch…").click()
        batch.finish()
        batch.page.get_by_role("heading", name="Not counted yet").wait_for()
        wrong = list(faults(axe, batch.tab))
        batch.tab.go(f"/judge?experiment={judging.driver.experiment.name}")
        wrong += faults(axe, batch.tab)
        assert wrong == []
