"""A batch judged in a real browser, by keyboard alone: scored, contested, skipped, undone, held and revised."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hostile import HOSTILE
from support.judge_page import BatchPage, JudgingSite, judging_site, open_batch_page
from support.judging import always, fill
from support.panel_pages import Visit
from tipbench.judge.sheet_store import SheetStatus
from tipbench.plan.grid import PlannedCell
from tipbench.web.batch_store import Kind

MAX_PRESSES = 12  # for an item of three tips on three scales


@pytest.fixture(scope="module")
def building(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgingSite]:
    with judging_site(tmp_path_factory.mktemp("building") / "home") as made:
        yield made


@pytest.fixture
def judging(building: JudgingSite) -> JudgingSite:
    """A shared panel with a new judge; its tests finish no batch."""
    return building.newcomer()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[JudgingSite]:
    """A panel for one test, which may finish batches."""
    with judging_site(tmp_path / "home") as made:
        yield made


@pytest.fixture
def at(judging: JudgingSite, visit: Visit) -> BatchPage:
    """A judge with a new batch."""
    return open_batch_page(visit, judging.site, judging.open())


def finished_and_held(at: BatchPage) -> None:
    at.page.get_by_role("button", name="Finish batch…").click()
    at.finish()
    at.page.get_by_role("heading", name="Not counted yet").wait_for()


# the whole way


def test_a_batch_of_forty_is_judged_by_keyboard_alone(own: JudgingSite, visit: Visit) -> None:
    view = visit(own.site, "judge")
    page = view.page
    page.goto(f"{own.site.url}/judge?experiment={own.driver.experiment.name}")
    page.get_by_role("button", name="Start judging").press("Enter")
    page.wait_for_url("**/judge/batches/*")
    at = BatchPage(view, page.url.rpartition("/")[2].partition("#")[0])
    at.ready()
    filled = fill(own.judging(at.sheet))["items"]
    for number, item in enumerate(filled, start=1):
        at.wait_for_item(number)
        at.score(item)
        at.press("Control+Enter")
    page.get_by_role("heading", name="All items done").wait_for()
    at.press("Enter")
    page.get_by_role("heading", name="Batch finished").wait_for()
    assert len(filled) == 40
    tips = sum(len(item["tips"]) for item in filled)
    assert at.presses == 3 * tips + len(filled) + 1
    assert at.presses / len(filled) <= MAX_PRESSES
    page.get_by_text("Your scores count").wait_for()
    page.locator("#drift").get_by_text("match the reference scores").wait_for()
    kept = own.judging(at.sheet)
    assert kept.status is SheetStatus.APPLIED
    given = {item["item"]: [tip["scores"] for tip in item["tips"]] for item in filled}
    assert {score.item: [dict(tip.scores) for tip in score.tips] for score in kept.scores.values()} == given
    assert (view.outside, view.console, view.missing) == ([], [], [])


def test_a_held_batch_is_revised_and_then_accepted_by_an_admin(own: JudgingSite, visit: Visit) -> None:
    sheet = own.open()
    own.submit(sheet, always(5), but=1)
    at = open_batch_page(visit, own.site, sheet)
    at.score(fill(own.judging(sheet), always(5))["items"][-1])
    assert "reference scores" not in at.page.locator("#desk").inner_text()  # the drift is not shown before the end
    at.press("Control+Enter")
    at.finish()
    at.page.get_by_role("heading", name="Not counted yet").wait_for()
    at.page.wait_for_load_state()
    assert at.page.get_by_role("cell", name="too high").count() == 3
    at.page.get_by_role("button", name="Revise my scores").click()
    at.ready()
    own.submit(sheet, always(4))  # in another tab
    at.page.reload()
    at.ready()
    finished_and_held(at)
    admin = visit(own.site).page
    admin.goto(f"{own.site.url}/experiments/{own.driver.experiment.name}/judges")
    held = admin.locator(f"#held-{sheet}")
    held.get_by_label("Reason for accepting").fill("agreed in the team")
    held.get_by_role("button", name="Accept these scores").click()
    admin.locator(f"#batch-{sheet}").get_by_text("drift accepted").wait_for()
    at.page.reload()
    at.page.get_by_text("an admin accepted them: agreed in the team").wait_for()
    assert own.judging(sheet).status is SheetStatus.APPLIED


def test_a_batch_may_be_finished_early_and_continued(own: JudgingSite, visit: Visit) -> None:
    at = open_batch_page(visit, own.site, own.open())
    at.press(*"555555555", "Control+Enter", "4")
    at.page.get_by_role("button", name="Finish batch…").click()
    at.page.get_by_text("39 items are open").wait_for()
    at.finish()
    at.page.get_by_role("heading", name="Batch finished").wait_for()
    at.page.get_by_text("Too few scores to compare").wait_for()
    at.page.get_by_role("button", name="Reopen this one").click()
    at.ready()
    at.wait_for_item(2)
    assert at.scores()[:2] == [4, None]


def test_complete_drafts_are_offered_for_submission_at_the_end(own: JudgingSite, visit: Visit) -> None:
    at = open_batch_page(visit, own.site, own.open())
    at.press(*"555555555", "j", *"444444444")
    at.page.get_by_role("button", name="Finish batch…").click()
    at.page.get_by_text("2 drafts are complete and not submitted: 1, 2.").wait_for()
    at.page.get_by_role("button", name="Submit these drafts too").click()
    at.finish()
    at.page.get_by_role("heading", name="Batch finished").wait_for()
    assert own.whole(at.sheet)["batch"]["done"] == 2


# the keys


def test_a_digit_scores_the_framed_scale_and_moves_on_to_the_submit_button(at: BatchPage) -> None:
    framed = at.page.locator(".group.is-current .group-name")
    seen = []
    for digit in "123451234":
        seen.append(framed.inner_text().strip())
        at.press(digit)
    assert [name.split()[-1] for name in seen] == ["relevance", "actionability", "tone"] * 3
    assert at.scores() == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert at.page.evaluate("document.activeElement.dataset.do") == "submit"
    assert at.page.get_by_text("All scored: Ctrl+Enter submits it.").is_visible()


def test_arrows_change_tip_and_scale(at: BatchPage) -> None:
    at.press("ArrowDown", "ArrowRight", "4", "ArrowUp", "2")
    assert at.scores() == [None, None, 2, None, 4, None, None, None, None]


def test_what_is_missing_is_shown_instead_of_submitted(at: BatchPage) -> None:
    at.press("3", "ArrowRight", "3", "3", "3", "3", "3", "3", "3", "Control+Enter")
    assert at.number == 1
    assert at.page.locator(".message").inner_text() == "One score is missing."
    at.press("5", "Control+Enter")
    at.wait_for_item(2)


def test_items_are_changed_by_letters_and_by_page_keys(at: BatchPage) -> None:
    at.press("j", "PageDown", "j", "k")
    assert at.number == 3
    assert at.page.url.endswith("#3")
    at.press("PageUp")
    assert at.page.title() == "2 of 40 · Judge · tipbench"


def test_shortcuts_are_off_while_typing(judging: JudgingSite, at: BatchPage) -> None:
    at.press("n")
    at.page.keyboard.type("5 jokes? use fewer")
    at.press("Escape", "2")
    at.expect_state("Draft saved")
    answer = judging.answer(at.sheet, 1)
    assert answer["tips"][0]["note"] == "5 jokes? use fewer"
    assert at.scores() == [2] + [None] * 8
    at.press("?")
    at.press("4", "Escape")
    assert at.scores() == [2] + [None] * 8


def test_the_help_shows_every_key(at: BatchPage) -> None:
    at.press("?")
    shown = at.page.locator("#key-list").inner_text()
    assert all(words in shown for words in ("Undo", "Skip", "Disagree", "note", "Ctrl+Enter", "Next item"))


def test_flags_are_contested_and_reset(judging: JudgingSite, at: BatchPage) -> None:
    at.press("f", "ArrowDown", "o")
    at.expect_state("Draft saved")
    assert judging.answer(at.sheet, 1)["contested"] == ["format_ok", "tips.1.overlong"]
    assert at.page.get_by_text("you disagree").count() == 2
    at.press("f", "o")
    at.expect_state("Not scored")
    assert judging.answer(at.sheet, 1)["contested"] == []


def test_an_item_is_skipped_with_a_reason_and_taken_up_again(judging: JudgingSite, at: BatchPage) -> None:
    at.press("3", "s", "Enter")  # no reason, no skip
    assert at.page.locator("#skip-dialog").is_visible()
    at.page.keyboard.type("not a language I read")
    at.press("Enter")
    at.wait_for_item(2)
    assert at.mark(1) == "skipped"
    at.press("k")
    at.expect_state("Skipped")
    assert (judging.answer(at.sheet, 1)["state"], judging.answer(at.sheet, 1)["reason"]) == (
        "skipped",
        "not a language I read",
    )
    at.press("4")
    at.expect_state("Draft saved")
    assert judging.answer(at.sheet, 1)["state"] == "draft"


def test_a_finished_item_is_opened_again_by_a_new_score(judging: JudgingSite, at: BatchPage) -> None:
    at.press(*"333333333", "Control+Enter", "k")
    at.expect_state("Submitted")
    at.press("5")
    at.expect_state("Draft saved")
    at.press("Control+Enter", "k")
    at.expect_state("Submitted")
    answer = judging.answer(at.sheet, 1)
    assert (answer["state"], answer["tips"][0]["scores"]["relevance"]) == ("submitted", 5)


# undo


def test_undo_works_step_by_step_across_items(judging: JudgingSite, at: BatchPage) -> None:
    at.press(*"333333334", "Control+Enter", "2", "u")
    assert (at.number, at.scores()) == (2, [None] * 9)
    at.press("u")  # the submit
    assert at.number == 1
    at.expect_state("Draft saved")
    at.press("u")
    assert at.scores() == [3] * 8 + [None]
    at.press("1", "Control+Enter", "k")
    at.expect_state("Submitted")
    assert judging.answer(at.sheet, 1)["tips"][2]["scores"]["tone"] == 1


def test_undo_continues_after_a_reload(at: BatchPage) -> None:
    at.press("3", "4")
    at.expect_state("Draft saved")
    at.page.reload()
    at.ready()
    at.press("u")
    assert at.scores() == [3] + [None] * 8


def test_undo_on_another_device_uses_the_servers_history(judging: JudgingSite, at: BatchPage, visit: Visit) -> None:
    at.press("3")
    at.expect_state("Draft saved")
    with at.page.expect_response(lambda response: response.request.method == "PUT"):
        at.press("4")
    at.expect_state("Draft saved")
    other = open_batch_page(visit, judging.site, at.sheet)
    other.press("u")
    other.page.get_by_text("Undone.").wait_for()
    assert other.scores() == [3] + [None] * 8


# what models write, and duels


def test_model_output_is_plain_text_on_the_page(tmp_path: Path, visit: Visit) -> None:
    texts = iter(list(HOSTILE.values()) * 20)

    def write(_cell: PlannedCell, _rng: random.Random) -> str:
        return json.dumps([{"tip": next(texts), "rationale": next(texts)} for _ in range(3)])

    with judging_site(tmp_path / "home", write=write, n_scenarios=4) as judging:
        at = open_batch_page(visit, judging.site, judging.open())
        items = judging.whole(at.sheet)["items"]
        for _ in items:
            assert at.view.planted() == []
            assert at.view.scrolls_sideways() is None
            at.press("j")
        assert len(items) > 10
        assert (at.view.outside, at.view.console, at.view.missing) == ([], [], [])


def test_duels_are_judged_by_one_key_each(own: JudgingSite, visit: Visit) -> None:
    own.driver.judged_by("anna", everything=True)
    sheet = own.open(Kind.DUEL, limit=6)
    at = open_batch_page(visit, own.site, sheet)
    size = len(own.whole(sheet)["items"])
    at.press("a", "ArrowRight", "t", "u", "b")
    at.press(*"a" * (size - 3))
    at.page.get_by_role("heading", name="All items done").wait_for()
    assert at.presses == size + 2
    at.finish()
    at.page.get_by_role("heading", name="Batch finished").wait_for()
    answers = [item["answer"]["winner"] for item in own.whole(sheet)["items"]]
    assert answers == ["a", "b", "b", *"a" * (size - 3)]
    assert (at.view.outside, at.view.console, at.view.missing) == ([], [], [])


def test_without_javascript_the_page_offers_judging_by_file(judging: JudgingSite, visit: Visit) -> None:
    page = visit(judging.site, "judge", java_script_enabled=False).page
    page.goto(f"{judging.site.url}/judge/batches/{judging.open()}")
    page.get_by_text("Judging in the browser needs JavaScript").wait_for()
    page.get_by_role("link", name="download it, fill it in, upload it").click()
    page.get_by_role("button", name="Download sheet").wait_for()
