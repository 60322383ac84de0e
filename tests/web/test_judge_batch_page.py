"""The pages around a batch without scripts: access, content, and blindness."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.judging import agreed, always, fill
from tipbench.web.batches import batch_service_of
from tipbench.web.panel.judge import batch_result, bias_words
from tipbench.web.panel.pages import assets
from web.judge_client import JudgeClient, batch_shape, scored_tips, stored_sheet
from web.page_forms import HEADERS, PageForm
from web.panels import API, EXPERIMENT, HTML, JUDGE, ServedPanel


@pytest.fixture
def judge(served: ServedPanel) -> ServedPanel:
    """A judge's browser."""
    served.log_in(served.judge)
    return served


def get_page(served: ServedPanel, path: str) -> Any:
    return served.get(path, token=None, headers=HTML)


def get_judging_page(served: ServedPanel) -> str:
    return str(get_page(served, f"/judge?experiment={EXPERIMENT}").text)


def submit_form(served: ServedPanel, page: str, action: str, **fields: str) -> Any:
    """Fill and submit a form of a page as a browser does."""
    body = PageForm(page, action).body(**fields)
    return served.post(action, token=None, headers=HEADERS, content=body)


def open_batch(served: ServedPanel, **fields: str) -> str:
    """Open a batch with the first button; return its path."""
    response = submit_form(served, get_judging_page(served), "/judge/batches", **{"kind": "sheet", **fields})
    assert response.status_code == 303, response.text
    return str(response.headers["location"])


def judge_and_close(served: ServedPanel, rule: Any, *, omit_last: int = 0) -> str:
    """Judge a batch by a rule and close it; return its path."""
    path = open_batch(served)
    sheet, judge_client = path.rpartition("/")[2], JudgeClient(served, served.judge)
    judge_client.submit(fill(stored_sheet(served, sheet), rule), omit_last=omit_last)
    assert judge_client.close(sheet).status_code == 200
    return path


def test_judging_starts_and_continues_with_one_button(judge: ServedPanel) -> None:
    assert "Start judging" in get_judging_page(judge)
    first = open_batch(judge)
    again = get_judging_page(judge)
    assert "Continue judging" in again
    assert "0 of 40 items done" in again
    assert open_batch(judge) == first


def test_the_page_is_a_frame_without_any_item(judge: ServedPanel) -> None:
    path = open_batch(judge)
    page = get_page(judge, path)
    assert page.status_code == 200
    items = JudgeClient(judge, judge.judge).get_batch(path.rpartition("/")[2])["items"]
    assert not [tip for item in items for tip in item["tips"] if tip["tip"] in page.text]
    assert f'data-url="/api/bench/judge/{EXPERIMENT}/batches/{path.rpartition("/")[2]}"' in page.text


def test_scripts_never_make_markup_of_text() -> None:
    own = {name: content.decode() for name, content in assets().content.items() if name.startswith("judge/")}
    assert len(own) > 10
    wrong = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|https?://"
    )
    assert not [name for name, content in own.items() if wrong.search(content)]


def test_a_batch_that_counts_shows_how_close_the_judge_is(judge: ServedPanel) -> None:
    page = get_page(judge, judge_and_close(judge, agreed)).text
    assert "Your scores count" in page
    assert "match the reference scores" in page
    assert page.count("even") >= 3
    assert "control" not in page.lower()


def test_a_held_batch_shows_the_reason_and_is_revised(judge: ServedPanel) -> None:
    path = judge_and_close(judge, always(5))
    page = get_page(judge, path).text
    assert "Not counted yet" in page
    assert " too high</td>" in page
    assert "One of your batches is held" in get_judging_page(judge)
    assert submit_form(judge, page, f"{path}/reopen").headers["location"] == path
    assert 'id="desk"' in get_page(judge, path).text


def test_a_revised_batch_shows_the_verdict_and_no_number_of_the_drift(judge: ServedPanel) -> None:
    path = judge_and_close(judge, agreed, omit_last=1)
    page = get_page(judge, path).text
    assert "1 item is open" in page
    assert "Typical distance" in page
    submit_form(judge, page, f"{path}/reopen")
    JudgeClient(judge, judge.judge).close(path.rpartition("/")[2])
    page = get_page(judge, path).text
    assert "match the reference scores" in page
    assert "Typical distance" not in page


def test_an_unfinished_batch_that_is_held_names_the_scales_beyond_the_limit(judge: ServedPanel) -> None:
    page = get_page(judge, judge_and_close(judge, always(5), omit_last=1)).text
    assert "the scales marked below" in page
    assert " too high</td>" in page


def test_withdrawn_scores_that_still_count_are_shown(judge: ServedPanel) -> None:
    path = judge_and_close(judge, agreed)
    sheet, judge_client = path.rpartition("/")[2], JudgeClient(judge, judge.judge)
    submit_form(judge, get_page(judge, path).text, f"{path}/reopen")
    assert "keep their scores if you skip or clear them" in get_page(judge, path).text
    item = judge_client.get_batch(sheet)["items"][0]["item"]
    judge_client.put(sheet, item, 1, "skipped", reason="not mine")
    judge_client.close(sheet)
    page = get_page(judge, path).text
    assert "1 item keeps its earlier scores; they still count." in page
    assert "open. Reopen" not in page


def test_a_first_batch_does_not_mention_earlier_scores(judge: ServedPanel) -> None:
    assert "keep their scores" not in get_page(judge, open_batch(judge)).text


def test_a_started_batch_shows_that_its_sheet_was_applied_by_file(judge: ServedPanel) -> None:
    path = open_batch(judge)
    sheet, judge_client = path.rpartition("/")[2], JudgeClient(judge, judge.judge)
    assert "already applied" not in get_page(judge, path).text
    item = judge_client.get_batch(sheet)["items"][0]
    judge_client.put(sheet, item["item"], 0, "draft", tips=scored_tips(item))
    judge.post(f"{API}/judge/{EXPERIMENT}/apply", token=judge.judge, json=fill(stored_sheet(judge, sheet)))
    page = get_page(judge, path).text
    assert "This sheet was already applied" in page
    assert 'id="desk"' in page


def test_a_batch_whose_sheet_was_applied_by_file_shows_it(judge: ServedPanel) -> None:
    path = open_batch(judge)
    raw = fill(stored_sheet(judge, path.rpartition("/")[2]))
    judge.post(f"{API}/judge/{EXPERIMENT}/apply", token=judge.judge, json=raw)
    page = get_page(judge, path).text
    assert "This sheet was uploaded as a file" in page
    assert "match the reference scores" in page
    assert "earlier scores" not in page


def test_the_page_of_a_returned_batch_has_the_admins_note(judge: ServedPanel) -> None:
    path = judge_and_close(judge, always(5))
    boss = judge.panel.authenticator.by_token(judge.admin, "here")
    batch_service_of(judge.app).send_back(boss, path.rpartition("/")[2], "Look at <b>tone</b> again.")
    assert "Look at &lt;b&gt;tone&lt;/b&gt; again." in get_page(judge, path).text


def test_an_accepted_batch_shows_the_reason(judge: ServedPanel) -> None:
    path = judge_and_close(judge, always(5))
    boss = judge.panel.authenticator.by_token(judge.admin, "here")
    batch_service_of(judge.app).accept(boss, path.rpartition("/")[2], "agreed in the <team>")
    page = get_page(judge, path).text
    assert "Your scores count" in page
    assert "agreed in the &lt;team&gt;" in page


def test_another_judge_finds_no_such_batch(judge: ServedPanel) -> None:
    path = open_batch(judge)
    other = JudgeClient.create(judge, "somebody-else")
    for response in (judge.get(path, token=other.token), judge.post(f"{path}/reopen", token=other.token)):
        assert judge.error(response) == (404, "not_found")


def test_an_admin_sees_the_progress_of_a_judge_and_the_reasons_for_skips(judge: ServedPanel) -> None:
    path = open_batch(judge)
    sheet, judge_client = path.rpartition("/")[2], JudgeClient(judge, judge.judge)
    item = judge_client.get_batch(sheet)["items"][2]["item"]
    assert judge_client.put(sheet, item, 0, "skipped", reason="not <b>mine</b>").status_code == 200
    page = judge.get(path, headers=HTML).text
    assert f"A batch of <bdi>{JUDGE}</bdi>" in page
    assert "Item 3: <bdi>not &lt;b&gt;mine&lt;/b&gt;</bdi>" in page
    assert 'id="desk"' not in page


def test_an_admin_judges_a_batch_under_their_own_name(served: ServedPanel) -> None:
    served.log_in(served.admin)
    assert 'id="desk"' in get_page(served, open_batch(served)).text


def test_without_a_tie_duels_are_refused_with_a_message(judge: ServedPanel) -> None:
    response = submit_form(judge, get_judging_page(judge), "/judge/batches", kind="duel")
    assert response.status_code == 409
    assert "Nothing to judge now" in response.text


def test_an_invalid_experiment_is_reported_at_its_field(judge: ServedPanel) -> None:
    for name in ["tip-bench-nowhere", "nonsense", ""]:
        response = submit_form(judge, get_judging_page(judge), "/judge/batches", experiment=name, kind="sheet")
        assert response.status_code == 404
        assert re.search(r'id="experiment"[^>]*aria-invalid="true"', response.text)


def test_a_wrong_kind_is_refused(judge: ServedPanel) -> None:
    response = submit_form(judge, get_judging_page(judge), "/judge/batches", kind="<b>")
    assert response.status_code == 422
    assert "<b>" not in response.text


def test_an_unknown_batch_is_not_found_or_refused(judge: ServedPanel) -> None:
    for sheet in ["nonsense!", "0" * 65, "0" * 12]:
        assert get_page(judge, f"/judge/batches/{sheet}").status_code in (404, 422)


def test_a_bias_is_described_in_words() -> None:
    for bias, words in [(0.42, "0.4 too high"), (-0.31, "0.3 too low"), (0.04, "even"), (-0.0, "even")]:
        assert bias_words(bias, 1) == words
    assert bias_words(-1.25) == "1.25 too low"
    assert bias_words(None) == "unknown"


def test_duels_show_how_often_the_order_did_not_matter() -> None:
    for n_both, n_same, sentence in [
        (3, 2, "3 duels were shown in both orders; you chose the same answer both times in 2 of 3."),
        (1, 1, "1 duel was shown in both orders; you chose the same answer both times in 1 of 1."),
    ]:
        outcome = {"judged_in_both_orders": n_both, "same_in_both_orders": n_same, "drift": None}
        view = batch_result(batch_shape(kind="duel", items=6, done=6, outcome=outcome))
        assert view.sentences == (sentence,)


def test_repeat_consistency_is_shown() -> None:
    outcome = {"drift": {"verdict": "fine"}, "self_agreement": {"n": 9, "exact": 0.8, "scales": []}}
    view = batch_result(batch_shape(kind="sheet", items=40, done=40, outcome=outcome))
    assert view.repeat_consistency is not None
    assert "80\u00a0%" in view.repeat_consistency
