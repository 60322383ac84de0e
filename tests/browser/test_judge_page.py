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
from support.panel_pages import TabOpener
from tipbench.judge.sheet_store import SheetStatus
from tipbench.plan.grid import PlannedCell
from tipbench.web.batch_store import Kind

MAX_PRESSES = 12  # for an item of three tips on three scales


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgingSite]:
    with judging_site(tmp_path_factory.mktemp("shared") / "home") as site:
        yield site


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[JudgingSite]:
    """A panel for one test, which may finish batches."""
    with judging_site(tmp_path / "home") as site:
        yield site


def finish_held_batch(batch: BatchPage) -> None:
    batch.page.get_by_role("button", name="Finish batch…").click()
    batch.finish()
    batch.page.get_by_role("heading", name="Not counted yet").wait_for()


# a whole batch


def test_a_batch_of_forty_is_judged_by_keyboard_alone(own_site: JudgingSite, open_tab: TabOpener) -> None:
    tab = open_tab(own_site.site, "judge")
    page = tab.page
    page.goto(f"{own_site.site.url}/judge?experiment={own_site.driver.experiment.name}")
    page.get_by_role("button", name="Start judging").press("Enter")
    page.wait_for_url("**/judge/batches/*")
    batch = BatchPage(tab, page.url.rpartition("/")[2].partition("#")[0])
    batch.wait_until_ready()
    filled = fill(own_site.stored_sheet(batch.sheet))["items"]
    for number, item in enumerate(filled, start=1):
        batch.wait_for_item(number)
        batch.score(item)
        batch.press("Control+Enter")
    page.get_by_role("heading", name="All items done").wait_for()
    batch.press("Enter")
    page.get_by_role("heading", name="Batch finished").wait_for()
    assert len(filled) == 40
    tips = sum(len(item["tips"]) for item in filled)
    assert batch.presses == 3 * tips + len(filled) + 1
    assert batch.presses / len(filled) <= MAX_PRESSES
    page.get_by_text("Your scores count").wait_for()
    page.locator("#drift").get_by_text("match the reference scores").wait_for()
    stored = own_site.stored_sheet(batch.sheet)
    assert stored.status is SheetStatus.APPLIED
    sent = {item["item"]: [tip["scores"] for tip in item["tips"]] for item in filled}
    assert {score.item: [dict(tip.scores) for tip in score.tips] for score in stored.scores.values()} == sent
    assert (tab.external_requests, tab.console_errors, tab.missing_resources) == ([], [], [])


def test_a_held_batch_is_revised_and_then_accepted_by_an_admin(own_site: JudgingSite, open_tab: TabOpener) -> None:
    sheet = own_site.open()
    own_site.submit(sheet, always(5), omit_last=1)
    batch = open_batch_page(open_tab, own_site.site, sheet)
    batch.score(fill(own_site.stored_sheet(sheet), always(5))["items"][-1])
    assert "reference scores" not in batch.page.locator("#desk").inner_text()  # the drift is not shown before the end
    batch.press("Control+Enter")
    batch.finish()
    batch.page.get_by_role("heading", name="Not counted yet").wait_for()
    batch.page.wait_for_load_state()
    assert batch.page.get_by_role("cell", name="too high").count() == 3
    batch.page.get_by_role("button", name="Revise my scores").click()
    batch.wait_until_ready()
    own_site.submit(sheet, always(4))  # in another tab
    batch.page.reload()
    batch.wait_until_ready()
    finish_held_batch(batch)
    admin = open_tab(own_site.site).page
    admin.goto(f"{own_site.site.url}/experiments/{own_site.driver.experiment.name}/judges")
    held = admin.locator(f"#held-{sheet}")
    held.get_by_label("Reason for accepting").fill("agreed in the team")
    held.get_by_role("button", name="Accept these scores").click()
    admin.locator(f"#batch-{sheet}").get_by_text("drift accepted").wait_for()
    batch.page.reload()
    batch.page.get_by_text("an admin accepted them: agreed in the team").wait_for()
    assert own_site.stored_sheet(sheet).status is SheetStatus.APPLIED


def test_a_batch_may_be_finished_early_and_continued(own_site: JudgingSite, open_tab: TabOpener) -> None:
    batch = open_batch_page(open_tab, own_site.site, own_site.open())
    batch.press(*"555555555", "Control+Enter", "4")
    batch.page.get_by_role("button", name="Finish batch…").click()
    batch.page.get_by_text("39 items are open").wait_for()
    batch.finish()
    batch.page.get_by_role("heading", name="Batch finished").wait_for()
    batch.page.get_by_text("Too few scores to compare").wait_for()
    batch.page.get_by_role("button", name="Reopen this one").click()
    batch.wait_until_ready()
    batch.wait_for_item(2)
    assert batch.scores()[:2] == [4, None]


def test_complete_drafts_are_offered_for_submission_at_the_end(own_site: JudgingSite, open_tab: TabOpener) -> None:
    batch = open_batch_page(open_tab, own_site.site, own_site.open())
    batch.press(*"555555555", "j", *"444444444")
    batch.page.get_by_role("button", name="Finish batch…").click()
    batch.page.get_by_text("2 drafts are complete and not submitted: 1, 2.").wait_for()
    batch.page.get_by_role("button", name="Submit these drafts too").click()
    batch.finish()
    batch.page.get_by_role("heading", name="Batch finished").wait_for()
    assert own_site.batch(batch.sheet)["batch"]["done"] == 2


# the keys


def test_a_digit_scores_the_framed_scale_and_moves_on_to_the_submit_button(batch: BatchPage) -> None:
    framed = batch.page.locator(".group.is-current .group-name")
    seen = []
    for digit in "123451234":
        seen.append(framed.inner_text().strip())
        batch.press(digit)
    assert [name.split()[-1] for name in seen] == ["relevance", "actionability", "tone"] * 3
    assert batch.scores() == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert batch.page.evaluate("document.activeElement.dataset.do") == "submit"
    assert batch.page.get_by_text("All scored: Ctrl+Enter submits it.").is_visible()


def test_arrows_change_tip_and_scale(batch: BatchPage) -> None:
    batch.press("ArrowDown", "ArrowRight", "4", "ArrowUp", "2")
    assert batch.scores() == [None, None, 2, None, 4, None, None, None, None]


def test_what_is_missing_is_shown_instead_of_submitted(batch: BatchPage) -> None:
    batch.press("3", "ArrowRight", "3", "3", "3", "3", "3", "3", "3", "Control+Enter")
    assert batch.number == 1
    assert batch.page.locator(".message").inner_text() == "One score is missing."
    batch.press("5", "Control+Enter")
    batch.wait_for_item(2)


def test_items_are_changed_by_letters_and_by_page_keys(batch: BatchPage) -> None:
    batch.press("j", "PageDown", "j", "k")
    assert batch.number == 3
    assert batch.page.url.endswith("#3")
    batch.press("PageUp")
    assert batch.page.title() == "2 of 40 · Judge · tipbench"


def test_shortcuts_are_off_while_typing(judging: JudgingSite, batch: BatchPage) -> None:
    batch.press("n")
    batch.page.keyboard.type("5 jokes? use fewer")
    batch.press("Escape", "2")
    batch.wait_for_state("Draft saved")
    answer = judging.answer(batch.sheet, 1)
    assert answer["tips"][0]["note"] == "5 jokes? use fewer"
    assert batch.scores() == [2] + [None] * 8
    batch.press("?")
    batch.press("4", "Escape")
    assert batch.scores() == [2] + [None] * 8


def test_the_help_shows_every_key(batch: BatchPage) -> None:
    batch.press("?")
    shown = batch.page.locator("#key-list").inner_text()
    assert all(words in shown for words in ("Undo", "Skip", "Disagree", "note", "Ctrl+Enter", "Next item"))


def test_flags_are_contested_and_reset(judging: JudgingSite, batch: BatchPage) -> None:
    batch.press("f", "ArrowDown", "o")
    batch.wait_for_state("Draft saved")
    assert judging.answer(batch.sheet, 1)["contested"] == ["format_ok", "tips.1.overlong"]
    assert batch.page.get_by_text("you disagree").count() == 2
    batch.press("f", "o")
    batch.wait_for_state("Not scored")
    assert judging.answer(batch.sheet, 1)["contested"] == []


def test_an_item_is_skipped_with_a_reason_and_taken_up_again(judging: JudgingSite, batch: BatchPage) -> None:
    batch.press("3", "s", "Enter")  # no reason, no skip
    assert batch.page.locator("#skip-dialog").is_visible()
    batch.page.keyboard.type("not a language I read")
    batch.press("Enter")
    batch.wait_for_item(2)
    assert batch.queue_state(1) == "skipped"
    batch.press("k")
    batch.wait_for_state("Skipped")
    assert (judging.answer(batch.sheet, 1)["state"], judging.answer(batch.sheet, 1)["reason"]) == (
        "skipped",
        "not a language I read",
    )
    batch.press("4")
    batch.wait_for_state("Draft saved")
    assert judging.answer(batch.sheet, 1)["state"] == "draft"


def test_a_finished_item_is_opened_again_by_a_new_score(judging: JudgingSite, batch: BatchPage) -> None:
    batch.press(*"333333333", "Control+Enter", "k")
    batch.wait_for_state("Submitted")
    batch.press("5")
    batch.wait_for_state("Draft saved")
    batch.press("Control+Enter", "k")
    batch.wait_for_state("Submitted")
    answer = judging.answer(batch.sheet, 1)
    assert (answer["state"], answer["tips"][0]["scores"]["relevance"]) == ("submitted", 5)


# undo


def test_undo_works_step_by_step_across_items(judging: JudgingSite, batch: BatchPage) -> None:
    batch.press(*"333333334", "Control+Enter", "2", "u")
    assert (batch.number, batch.scores()) == (2, [None] * 9)
    batch.press("u")  # the submit
    assert batch.number == 1
    batch.wait_for_state("Draft saved")
    batch.press("u")
    assert batch.scores() == [3] * 8 + [None]
    batch.press("1", "Control+Enter", "k")
    batch.wait_for_state("Submitted")
    assert judging.answer(batch.sheet, 1)["tips"][2]["scores"]["tone"] == 1


def test_undo_continues_after_a_reload(batch: BatchPage) -> None:
    batch.press("3", "4")
    batch.wait_for_state("Draft saved")
    batch.page.reload()
    batch.wait_until_ready()
    batch.press("u")
    assert batch.scores() == [3] + [None] * 8


def test_undo_on_another_device_uses_the_servers_history(
    judging: JudgingSite, batch: BatchPage, open_tab: TabOpener
) -> None:
    batch.press("3")
    batch.wait_for_state("Draft saved")
    with batch.page.expect_response(lambda response: response.request.method == "PUT"):
        batch.press("4")
    batch.wait_for_state("Draft saved")
    other = open_batch_page(open_tab, judging.site, batch.sheet)
    other.press("u")
    other.page.get_by_text("Undone.").wait_for()
    assert other.scores() == [3] + [None] * 8


# model output, and duels


def test_model_output_is_plain_text_on_the_page(tmp_path: Path, open_tab: TabOpener) -> None:
    texts = iter(list(HOSTILE.values()) * 20)

    def write(_cell: PlannedCell, _rng: random.Random) -> str:
        return json.dumps([{"tip": next(texts), "rationale": next(texts)} for _ in range(3)])

    with judging_site(tmp_path / "home", write=write, n_scenarios=4) as judging:
        batch = open_batch_page(open_tab, judging.site, judging.open())
        items = judging.batch(batch.sheet)["items"]
        for _ in items:
            assert batch.tab.injected_elements() == []
            assert batch.tab.sideways_overflow() is None
            batch.press("j")
        assert len(items) > 10
        assert (batch.tab.external_requests, batch.tab.console_errors, batch.tab.missing_resources) == ([], [], [])


def test_duels_are_judged_by_one_key_each(own_site: JudgingSite, open_tab: TabOpener) -> None:
    own_site.driver.judged_by("anna", everything=True)
    sheet = own_site.open(Kind.DUEL, limit=6)
    batch = open_batch_page(open_tab, own_site.site, sheet)
    size = len(own_site.batch(sheet)["items"])
    batch.press("a", "ArrowRight", "t", "u", "b")
    batch.press(*"a" * (size - 3))
    batch.page.get_by_role("heading", name="All items done").wait_for()
    assert batch.presses == size + 2
    batch.finish()
    batch.page.get_by_role("heading", name="Batch finished").wait_for()
    answers = [item["answer"]["winner"] for item in own_site.batch(sheet)["items"]]
    assert answers == ["a", "b", "b", *"a" * (size - 3)]
    assert (batch.tab.external_requests, batch.tab.console_errors, batch.tab.missing_resources) == ([], [], [])


def test_without_javascript_the_page_offers_judging_by_file(judging: JudgingSite, open_tab: TabOpener) -> None:
    page = open_tab(judging.site, "judge", java_script_enabled=False).page
    page.goto(f"{judging.site.url}/judge/batches/{judging.open()}")
    page.get_by_text("Judging in the browser needs JavaScript").wait_for()
    page.get_by_role("link", name="download it, fill it in, upload it").click()
    page.get_by_role("button", name="Download sheet").wait_for()
