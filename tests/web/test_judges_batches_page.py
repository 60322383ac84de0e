"""The judges' page on batches: who judges in the browser, held batches and decisions, and how to invite a judge."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from support.judging import always, fill
from tipbench.web.batch_items import BatchShape
from tipbench.web.panel.judges import MAX_CLOSED, batch_views
from web.judge_client import JudgeClient, batch_shape, driver_of, first_item, scored_tips, stored_sheet
from web.page_forms import HEADERS, PageForm
from web.panels import API, EXPERIMENT, HTML, JUDGE, ServedPanel, answered_store, serve_panel
from web.sample_pages import page_text

JUDGES = f"/experiments/{EXPERIMENT}/judges"


@pytest.fixture
def judge_client(served: ServedPanel) -> JudgeClient:
    return JudgeClient(served, served.judge)


def get_judges_page(served: ServedPanel, query: str = "") -> str:
    response = served.get(JUDGES + query, headers=HTML)
    assert response.status_code == 200, response.text
    return str(response.text)


def row_of(page: str, sheet: str) -> str:
    """Return the text of a batch's row."""
    found = re.search(rf'<tr[^>]* id="batch-{sheet}">(.*?)</tr>', page, re.DOTALL)
    assert found, f"no batch {sheet}"
    return page_text(found[1])


def post_form(served: ServedPanel, place: str, **fields: str) -> Any:
    return served.post(f"{JUDGES}/{place}", data=fields, headers=HTML)


def held_batch(judge_client: JudgeClient) -> str:
    body = judge_client.judge_batch(always(5))
    assert body["batch"]["status"] == "held"
    return str(body["batch"]["sheet"])


# batches by judge


def test_without_batches_the_page_shows_the_next_step(served: ServedPanel) -> None:
    assert "No batches yet." in page_text(get_judges_page(served))


def test_an_open_batch_shows_its_progress(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    size = len(judge_client.get_batch(sheet)["items"])
    judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item))
    page = get_judges_page(judge_client.served)
    assert f"open 1 of {size}" in row_of(page, sheet)
    assert f"{JUDGE} 0 open · 1 closed" not in page_text(page)
    assert f"{JUDGE} 1 open · 0 closed" in page_text(page)


def test_skips_are_counted_and_their_reasons_shown(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    judge_client.put(sheet, item["item"], 0, "skipped", reason="in <b>Finnish</b>")
    page = get_judges_page(judge_client.served)
    assert "1 skipped Item 1: in <b>Finnish</b>" in row_of(page, sheet)
    assert "in &lt;b&gt;Finnish&lt;/b&gt;" in page
    assert "1 open · 0 closed · 1 item skipped" in page_text(page)


def test_each_judge_has_the_median_time_of_an_item(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item), seconds=0.004)
    page = page_text(get_judges_page(judge_client.served))
    assert re.search(rf"{JUDGE} 1 open · 0 closed · median \S+ \w+ per item", page)


def test_no_score_or_note_of_an_open_batch_is_shown(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    judge_client.put(sheet, item["item"], 0, "draft", tips=scored_tips(item, note="an unmistakable note"))
    page = get_judges_page(judge_client.served)
    assert "an unmistakable note" not in page
    assert item["item"] not in page


def test_a_closed_batch_is_shown_as_a_sheet_too(judge_client: JudgeClient) -> None:
    sheet = judge_client.judge_batch()["batch"]["sheet"]
    page = get_judges_page(judge_client.served)
    assert "closed" in row_of(page, sheet)
    assert f'href="#batch-{sheet}">in the browser' in page


def test_the_page_has_the_batches_of_the_api(judge_client: JudgeClient) -> None:
    judge_client.judge_batch(limit=6)
    JudgeClient.create(judge_client.served, "anna").open()
    page = get_judges_page(judge_client.served)
    link = re.search(r'href="([^"]+/batches\?judge=\*)">JSON', page)
    assert link
    batches = judge_client.served.get(unescape(link[1])).json()["items"]
    assert len(batches) == 2
    assert {batch["sheet"] for batch in batches} == set(re.findall(r' id="batch-(\w+)"', page))


def test_a_judges_odd_name_is_shown_as_text(served: ServedPanel) -> None:
    JudgeClient.create(served, "x<img src=y>").open()
    assert "x&lt;img src=y&gt;" in get_judges_page(served)


# held batches


def test_a_held_batch_shows_the_reason_and_both_actions(judge_client: JudgeClient) -> None:
    sheet = held_batch(judge_client)
    page = get_judges_page(judge_client.served)
    assert row_of(page, sheet).count("held Decide") == 1
    decision = page_text(re.split(rf'id="held-{sheet}"', page)[1].split("</section>")[0])
    assert re.search(r"is scored \d\.\d\d too high, more than chance explains\.", decision)
    assert "Accept these scores" in decision
    assert "Return the batch" in decision
    assert page.count(f'value="{sheet}"') == 2  # once for each way, and not among the sheets again


def test_a_held_batch_counts_once_it_is_accepted(judge_client: JudgeClient) -> None:
    sheet = held_batch(judge_client)
    response = post_form(judge_client.served, "accept", sheet=sheet, reason="she was <b>right</b>")
    assert response.status_code == 303
    page = get_judges_page(judge_client.served, f"?accepted={sheet}")
    assert f"The scores of sheet {sheet} count now" in page
    assert "drift accepted she was <b>right</b>" in row_of(page, sheet)
    batch = judge_client.get_batch(sheet)["batch"]
    assert (batch["status"], batch["accepted"]) == ("applied", "she was <b>right</b>")
    assert stored_sheet(judge_client.served, sheet).accepted == "she was <b>right</b>"


def test_a_returned_batch_is_open_with_the_note(judge_client: JudgeClient) -> None:
    sheet = held_batch(judge_client)
    form = PageForm(get_judges_page(judge_client.served), f"{JUDGES}/return")
    body = form.body(note="Look at tone again.\r\nThen close it.")
    response = judge_client.served.post(f"{JUDGES}/return", content=body, headers=HEADERS)
    assert response.status_code == 303
    page = get_judges_page(judge_client.served, f"?returned={sheet}")
    assert f"Batch {sheet} is open again" in page
    assert judge_client.get_batch(sheet)["batch"]["status"] == "open"
    assert "returned Look at tone again. Then close it." in row_of(page, sheet)


def test_a_decision_without_a_reason_changes_nothing(judge_client: JudgeClient) -> None:
    cases: list[tuple[str, dict[str, str], str]] = [
        ("accept", {"reason": "  "}, "on one line"),
        ("accept", {"reason": "two\nlines"}, "on one line"),
        ("accept", {"reason": "x" * 1001}, "at most 1000 characters"),
        ("return", {"note": " "}, "note must say what to revise"),
        ("return", {"note": "x" * 2001}, "at most 2000 characters"),
    ]
    sheet = held_batch(judge_client)
    for place, fields, words in cases:
        response = post_form(judge_client.served, place, sheet=sheet, **fields)
        assert response.status_code == 422
        assert words in response.text
        assert f'id="held-{sheet}"' in response.text
        assert judge_client.get_batch(sheet)["batch"]["status"] == "held"


def test_only_a_held_batch_is_decided_on(judge_client: JudgeClient) -> None:
    sheet = judge_client.open()["sheet"]
    for place, word in (("accept", "reason"), ("return", "note")):
        response = post_form(judge_client.served, place, sheet=sheet, **{word: "why not"})
        assert (response.status_code, "only a held one is accepted or sent back" in response.text) == (409, True)


def test_a_batch_that_its_judge_is_revising_is_not_accepted(judge_client: JudgeClient) -> None:
    sheet = held_batch(judge_client)
    assert judge_client.request("POST", f"/{sheet}/reopen").status_code == 200
    assert post_form(judge_client.served, "accept", sheet=sheet, reason="why not").status_code == 409
    assert stored_sheet(judge_client.served, sheet).accepted is None


def test_a_sheet_held_by_file_is_accepted_and_cannot_be_returned(served: ServedPanel) -> None:
    driver = driver_of(served)
    sheet = driver.apply(fill(driver.export("carla", everything=True).stored, always(5))).sheet
    assert f'id="batch-{sheet}"' not in get_judges_page(served)
    assert post_form(served, "return", sheet=sheet, note="again").status_code == 404
    assert post_form(served, "accept", sheet=sheet, reason="agreed").status_code == 303
    assert stored_sheet(served, sheet).accepted == "agreed"


def test_scores_held_by_file_after_their_batch_was_applied_are_accepted(judge_client: JudgeClient) -> None:
    served = judge_client.served
    sheet = str(judge_client.judge_batch()["batch"]["sheet"])
    for score in (5, 1):  # the second file is held after the first one was accepted with the same reason
        assert driver_of(served).apply(fill(stored_sheet(served, sheet), always(score))).held
        assert f'id="held-{sheet}"' in get_judges_page(served)
        for _ in range(2):  # as by a double click
            assert post_form(served, "accept", sheet=sheet, reason="agreed").status_code == 303
        assert stored_sheet(served, sheet).acceptance_of(stored_sheet(served, sheet).scores) == "agreed"
        assert f'id="held-{sheet}"' not in get_judges_page(served)


def test_a_batch_of_another_experiment_is_not_decided_on_here(judge_client: JudgeClient) -> None:
    sheet = held_batch(judge_client)
    judge_client.served.store.ensure_experiment("tip-bench-other")
    place = "/experiments/tip-bench-other/judges/return"
    assert judge_client.served.post(place, data={"sheet": sheet, "note": "x"}, headers=HTML).status_code == 404
    assert judge_client.get_batch(sheet)["batch"]["status"] == "held"


# links for judges


def test_the_address_for_a_judge_is_whole_and_leads_to_the_experiment(served: ServedPanel) -> None:
    found = re.search(r'id="judge-link"[^>]*>([^<]+)<', get_judges_page(served))
    assert found
    assert unescape(found[1]) == f"http://localhost/judge?experiment={EXPERIMENT}"
    response = served.get(unescape(found[1]), token=served.judge, headers=HTML)
    assert (response.status_code, EXPERIMENT in response.text) == (200, True)


def test_an_odd_name_of_an_experiment_survives_in_the_address(empty: ServedPanel) -> None:
    name = "tip-bench-may/2026 ?#%&ä"
    empty.store.ensure_experiment(name)
    page = empty.get(f"/experiments/{quote(name, safe='')}/judges", headers=HTML)
    assert (page.status_code, "No answers to judge yet" in page.text) == (200, True)


def test_without_a_program_the_page_shows_how_to_configure_one(served: ServedPanel) -> None:
    page = get_judges_page(served)
    assert "TIPBENCH_JUDGE_COMMAND" in page
    assert 'value="command"' not in page
    assert 'href="/settings#new"' in page


def test_the_operators_program_is_started_once_and_shown_without_its_secrets(home: Path) -> None:
    command = "/opt/agents/scribe --key a-secret-of-the-operator"
    with serve_panel(home, answered_store(), {"TIPBENCH_JUDGE_COMMAND": command}) as served:
        page = get_judges_page(served)
        assert "Run scribe" in page
        assert "a-secret-of-the-operator" not in page
        assert "/opt/agents" not in page
        key = re.search(r'name="key" value="([\w-]+-program)"', page)
        assert key
        started = [post_form(served, "run", **{"with": "command", "key": key[1]}) for _ in range(2)]
        assert [response.status_code for response in started] == [303, 303]
        (job,) = served.get(f"{API}/jobs").json()["items"]
        assert (job["kind"], job["experiment"], job["arguments"]["with"]) == ("judge", EXPERIMENT, "command")
        shown = [served.get(f"{API}/jobs/{job['id']}").text, served.get(f"/jobs/{job['id']}", headers=HTML).text]
        assert not any(secret in text for text in shown for secret in ("a-secret-of-the-operator", "/opt/agents"))


def test_a_program_that_cannot_be_read_breaks_no_page(home: Path) -> None:
    with serve_panel(home, answered_store(), {"TIPBENCH_JUDGE_COMMAND": 'scribe "half'}) as served:
        assert "Run the program" in get_judges_page(served)


# the list


def batch(number: int, status: str, judge: str = "anna", skipped: int = 0) -> BatchShape:
    return batch_shape(sheet=f"s{number}", judge=judge, status=status, skipped=skipped)


def test_judges_with_a_held_batch_come_first_and_so_do_held_batches() -> None:
    batches = [batch(1, "applied", "ben"), batch(2, "open"), batch(3, "held", "zoe"), batch(4, "open", "zoe")]
    found = batch_views(batches, lambda _sheet: (), {"zoe": 0.5})
    assert [(each["judge"], [view.sheet for view, _ in each["batches"]]) for each in found] == [
        ("zoe", ["s3", "s4"]),
        ("anna", ["s2"]),
        ("ben", ["s1"]),
    ]
    assert [each["minutes_per_item"] for each in found] == [0.5, None, None]


def test_old_closed_batches_are_counted_and_not_listed() -> None:
    batches = [batch(number, "applied") for number in range(MAX_CLOSED + 3)] + [batch(99, "held")]
    (found,) = batch_views(batches, lambda _sheet: (), {})
    assert (len(found["batches"]), found["left_out"], found["count"]["applied"]) == (MAX_CLOSED + 1, 3, MAX_CLOSED + 3)


def test_reasons_are_read_only_if_something_was_skipped() -> None:
    requested: list[str] = []

    def skips(sheet: str) -> list[dict[str, Any]]:
        requested.append(sheet)
        return [{"item": "i", "number": 1, "reason": "why", "updated": None}]

    (found,) = batch_views([batch(1, "open", skipped=1), batch(2, "open")], skips, {})
    assert (requested, found["skipped"]) == (["s1"], 1)
