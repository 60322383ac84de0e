"""Batches over HTTP: opened, read, items saved and undone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

from support.judging import fill, record_cells
from tipbench.record.store import MemoryStore
from web.judge_client import (
    BATCHES,
    GOOD,
    JudgeClient,
    blank_scores,
    driver_of,
    error_of,
    first_item,
    scored_tips,
    stored_sheet,
)
from web.panels import API, EXPERIMENT, JUDGE, ServedPanel, serve_panel

APPLY = f"{API}/judge/{EXPERIMENT}/apply"
WRONG: list[tuple[dict[str, Any], str]] = [  # what is sent, and the place that is named
    ({"state": "submitted"}, "body.tips.0.scores.relevance"),
    ({"state": "submitted", "tips": [{"scores": {**GOOD, "tone": None}}] * 3}, "body.tips.0.scores.tone"),
    (
        {"state": "submitted", "tips": [{"scores": GOOD}, {"scores": {**GOOD, "tone": 9}}, {}]},
        "body.tips.1.scores.tone",
    ),
    ({"tips": [{"scores": {"tone": 0}}] * 3}, "body.tips.0.scores.tone"),
    ({"tips": [{"scores": {"wit": 3}}] * 3}, "body.tips.0.scores.wit"),
    ({"tips": [{"scores": {"tone": 3.5}}] * 3}, "body.tips.0.scores.tone"),
    ({"tips": [{"scores": {"tone": "3"}}] * 3}, "body.tips.0.scores.tone"),
    ({"tips": [{"scores": {"tone": True}}] * 3}, "body.tips.0.scores.tone"),
    ({"tips": [{}]}, "body.tips"),
    ({"tips": [{}] * 300}, "body.tips"),
    ({"tips": [{"overlong": "yes"}] * 3}, "body.tips.0.overlong"),
    ({"tips": [{"note": "x" * 4001}] * 3}, "body.tips.0.note"),
    ({"format_ok": 1}, "body.format_ok"),
    ({"winner": "a"}, "body.winner"),
    ({"state": "skipped"}, "body.reason"),
    ({"state": "skipped", "reason": " \n "}, "body.reason"),
    ({"state": "skipped", "reason": "x" * 501}, "body.reason"),
    ({"state": "done"}, "body.state"),
    ({"version": -1}, "body.version"),
    ({"version": "0"}, "body.version"),
    ({"version": None}, "body.version"),
    ({"seconds": -1}, "body.seconds"),
    ({"seconds": 1e9}, "body.seconds"),
    ({"run_id": "x"}, "body.run_id"),
]


@pytest.fixture
def judge_client(served: ServedPanel) -> JudgeClient:
    return JudgeClient(served, served.judge)


@pytest.fixture
def admin(served: ServedPanel) -> JudgeClient:
    return JudgeClient(served, served.admin)


# opening a batch


def test_a_batch_is_a_sheet_of_about_forty_items_under_the_judges_name(judge_client: JudgeClient) -> None:
    response = judge_client.request("POST")
    batch = response.json()["batch"]
    assert (response.status_code, response.json()["new"]) == (201, True)
    assert (batch["judge"], batch["experiment"], batch["kind"], batch["status"]) == (JUDGE, EXPERIMENT, "sheet", "open")
    assert 35 <= batch["items"] == batch["empty"] <= 45
    judging = stored_sheet(judge_client.served, batch["sheet"])
    assert (judging.owner, len(judging.entries)) == (JUDGE, batch["items"])


def test_a_returning_judge_continues_the_open_batch(judge_client: JudgeClient) -> None:
    first = judge_client.open()
    response = judge_client.request("POST", json={"limit": 3})
    assert (response.status_code, response.json()["new"]) == (200, False)
    assert response.json()["batch"]["sheet"] == first["sheet"]


def test_a_sheet_that_was_fetched_as_a_file_is_the_batch(judge_client: JudgeClient) -> None:
    sheet = judge_client.served.post(
        f"{API}/judge/{EXPERIMENT}/sheets", token=judge_client.token, json={"limit": 6}
    ).json()["sheet"]
    assert judge_client.open()["sheet"] == sheet


def test_a_judge_who_opens_twice_at_once_gets_one_batch(judge_client: JudgeClient) -> None:
    sheets: list[str] = []
    threads = [threading.Thread(target=lambda: sheets.append(judge_client.open()["sheet"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(sheets), len(set(sheets))) == (4, 1)


def test_the_same_key_gives_the_same_batch_also_once_it_is_closed(judge_client: JudgeClient) -> None:
    key = {"Idempotency-Key": "k1"}
    sheet = judge_client.request("POST", headers=key, json={"limit": 6}).json()["batch"]["sheet"]
    judge_client.submit(fill(stored_sheet(judge_client.served, sheet)))
    assert judge_client.close(sheet).json()["batch"]["status"] == "applied"
    assert judge_client.request("POST", headers=key).json()["batch"]["sheet"] == sheet
    assert judge_client.open(limit=6)["sheet"] != sheet
    response = judge_client.request("POST", headers=key, json={"kind": "duel"})
    assert error_of(judge_client, response) == (409, "key_used", "header.idempotency-key")


def test_without_pending_cells_the_request_is_refused_with_the_reason(judge_client: JudgeClient) -> None:
    driver_of(judge_client.served).judged_by(JUDGE, everything=True)
    assert judge_client.served.error(judge_client.request("POST")) == (409, "not_enough_data")


def test_an_invalid_option_is_named(judge_client: JudgeClient) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kind": "essay"}, "body.kind"),
        ({"limit": 0}, "body.limit"),
        ({"limit": 10**6}, "body.limit"),
        ({"limit": True}, "body.limit"),
        ({"seed": 1}, "body.seed"),
    ]
    for body, place in cases:
        assert error_of(judge_client, judge_client.request("POST", json=body)) == (422, "invalid", place)


def test_an_unknown_experiment_is_not_found(judge_client: JudgeClient) -> None:
    for method in ("POST", "GET"):
        response = judge_client.served.request(method, f"{API}/judge/other/batches", token=judge_client.token)
        assert error_of(judge_client, response) == (422, "invalid", "path.experiment")
    response = judge_client.served.post(f"{API}/judge/tip-bench-none/batches", token=judge_client.token)
    assert judge_client.served.error(response) == (404, "not_found")


def test_an_experiment_may_have_an_unusual_name(home: Path) -> None:
    store, name = MemoryStore(), "tip-bench-a/batches/b ?#%ü"
    record_cells(store, experiment=name)
    with serve_panel(home, store) as served:
        url = f"{API}/judge/{quote(name, safe='')}/batches"
        batch = served.post(url, token=served.judge).json()["batch"]
        assert batch["experiment"] == name
        assert served.get(batch["links"]["self"], token=served.judge).json()["batch"]["sheet"] == batch["sheet"]


# reading a batch


def test_a_new_batch_shows_the_sheet_without_answers(judge_client: JudgeClient) -> None:
    sheet = judge_client.open()["sheet"]
    body, judging = judge_client.get_batch(sheet), stored_sheet(judge_client.served, sheet)
    assert [item["item"] for item in body["items"]] == [item.id for item in judging.sheet.items]
    item, shown = judging.sheet.items[0], body["items"][0]
    assert shown["scenario"] == item.card
    assert [tip["tip"] for tip in shown["tips"]] == [tip.tip for tip in item.tips]
    assert shown["answer"] == {
        "version": 0,
        "state": "empty",
        "format_ok": item.format_ok,
        "tips": [{"scores": blank_scores(body), "overlong": tip.overlong, "note": ""} for tip in item.tips],
        "contested": [],
        "reason": "",
        "seconds": 0.0,
        "updated": None,
        "can_undo": False,
    }


def test_the_rubric_comes_with_the_wording_of_each_step_and_its_anchors(judge_client: JudgeClient) -> None:
    rubric = judge_client.get_batch(judge_client.open()["sheet"])["rubric"]
    assert [step["score"] for step in rubric["scales"][0]["steps"]] == [1, 2, 3, 4, 5]
    assert all(step["text"] for scale in rubric["scales"] for step in scale["steps"])
    assert len(rubric["anchors"]) >= 12
    assert rubric["flags"] == ["format_ok", "overlong"]


def test_responses_are_as_documented(judge_client: JudgeClient) -> None:
    document = judge_client.served.app.openapi()
    base = f"{API}/judge/{{experiment}}/batches"

    def fits(response: Any, path: str, method: str) -> None:
        content = document["paths"][path][method]["responses"][str(response.status_code)]["content"]
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        jsonschema.validate(response.json(), schema)

    fits(judge_client.request("POST"), base, "post")
    fits(judge_client.request("POST"), base, "post")
    sheet, item = first_item(judge_client)
    saved = judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item))
    fits(saved, f"{base}/{{sheet}}/items/{{item}}", "put")
    fits(judge_client.put(sheet, item["item"], 0, "draft"), f"{base}/{{sheet}}/items/{{item}}", "put")
    fits(judge_client.request("GET"), base, "get")
    fits(judge_client.request("GET", f"/{sheet}"), f"{base}/{{sheet}}", "get")
    fits(judge_client.undo(sheet, item["item"], 1), f"{base}/{{sheet}}/items/{{item}}/undo", "post")
    fits(
        judge_client.request("GET", f"/{sheet}/items/{item['item']}/history"),
        f"{base}/{{sheet}}/items/{{item}}/history",
        "get",
    )
    judge_client.put(sheet, item["item"], 2, "submitted", tips=scored_tips(item))
    fits(judge_client.close(sheet), f"{base}/{{sheet}}/close", "post")
    fits(judge_client.request("POST", f"/{sheet}/reopen"), f"{base}/{{sheet}}/reopen", "post")
    fits(judge_client.served.get(f"{BATCHES}/{sheet}"), f"{base}/{{sheet}}", "get")


# saving items


def test_saved_answers_survive_a_restart(home: Path) -> None:
    store = MemoryStore()
    record_cells(store)
    with serve_panel(home, store) as served:
        sheet, item = first_item(JudgeClient(served, served.judge))
        tips = [{"scores": {"tone": 2}, "note": "hm\r\nwell"}] * len(item["tips"])
        JudgeClient(served, served.judge).put(sheet, item["item"], 0, tips=tips, format_ok=not item["format_ok"])
    with serve_panel(home, store) as served:
        answer = JudgeClient(served, served.judge).get_batch(sheet)["items"][0]["answer"]
    assert (answer["version"], answer["state"], answer["contested"]) == (1, "draft", ["format_ok"])
    assert answer["tips"][0]["scores"] == {"relevance": None, "actionability": None, "tone": 2}
    assert answer["tips"][0]["note"] == "hm\nwell"


def test_a_flag_may_be_contested_and_left_as_computed(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    tips = scored_tips(item)
    tips[1] |= {"overlong": not item["tips"][1]["overlong"]}
    answer = judge_client.put(sheet, item["item"], 0, "submitted", tips=tips).json()["answer"]
    assert answer["contested"] == ["tips.1.overlong"]
    assert answer["format_ok"] == item["format_ok"]


def test_the_counts_of_a_batch_follow_its_items(judge_client: JudgeClient) -> None:
    sheet = judge_client.open()["sheet"]
    items = judge_client.get_batch(sheet)["items"]
    judge_client.put(sheet, items[0]["item"], 0, "submitted", tips=scored_tips(items[0]))
    judge_client.put(sheet, items[1]["item"], 0, "draft")
    batch = judge_client.put(sheet, items[2]["item"], 0, "skipped", reason="I wrote it").json()["batch"]
    assert (batch["done"], batch["draft"], batch["skipped"], batch["empty"]) == (1, 1, 1, len(items) - 3)
    batch = judge_client.put(sheet, items[1]["item"], 1, "empty").json()["batch"]
    assert (batch["draft"], batch["empty"]) == (0, len(items) - 2)


def test_a_second_tab_gets_the_answers_of_the_first(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    first = judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item)).json()
    response = judge_client.put(sheet, item["item"], 0, "draft")
    assert error_of(judge_client, response) == (409, "conflict", "body.version")
    assert response.json()["detail"] == {"item": item["item"], "answer": first["answer"]}
    assert judge_client.get_batch(sheet)["items"][0]["answer"] == first["answer"]


def test_a_request_whose_response_was_lost_may_be_repeated(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    for seconds in (1, 2):
        body = judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item), seconds=seconds).json()
        assert body["answer"]["version"] == 1
    assert len(judge_client.request("GET", f"/{sheet}/items/{item['item']}/history").json()["items"]) == 1


def test_a_wrong_field_is_named_and_nothing_is_stored(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    for body, place in WRONG:
        response = judge_client.request(
            "PUT", f"/{sheet}/items/{item['item']}", json={"version": 0, "state": "draft", **body}
        )
        assert error_of(judge_client, response)[:2] == (422, "invalid"), body
        assert response.json()["error"]["path"].startswith(place), body
    assert judge_client.get_batch(sheet)["items"][0]["answer"]["version"] == 0


def test_a_lone_surrogate_in_a_note_is_accepted(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    body = b'{"version": 0, "state": "draft", "tips": [{"note": "\\ud800\\u0000"}, {}, {}]}'
    headers = {"Content-Type": "application/json"}
    response = judge_client.request("PUT", f"/{sheet}/items/{item['item']}", content=body, headers=headers)
    assert response.status_code in (200, 422)
    assert judge_client.get_batch(sheet)["items"]


def test_an_unknown_item_is_not_found(judge_client: JudgeClient) -> None:
    sheet, _ = first_item(judge_client)
    assert error_of(judge_client, judge_client.put(sheet, "f" * 12, 0)) == (404, "not_found", "path.item")
    assert error_of(judge_client, judge_client.put("f" * 12, "f" * 12, 0)) == (404, "not_found", "path.sheet")
    assert judge_client.served.error(judge_client.put("F-..", "f" * 12, 0)) == (422, "invalid")


def test_undo_restores_the_previous_answer(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    judge_client.put(sheet, item["item"], 0, "draft", tips=scored_tips(item, note="first"))
    judge_client.put(sheet, item["item"], 1, "submitted", tips=scored_tips(item, note="second"))
    body = judge_client.undo(sheet, item["item"], 2).json()
    assert (body["answer"]["state"], body["answer"]["tips"][0]["note"], body["answer"]["version"]) == (
        "draft",
        "first",
        3,
    )
    body = judge_client.undo(sheet, item["item"], 3).json()
    assert (body["answer"]["state"], body["answer"]["can_undo"]) == ("empty", False)
    assert judge_client.served.error(judge_client.undo(sheet, item["item"], 4)) == (409, "nothing_to_undo")
    stale = judge_client.undo(sheet, item["item"], 1)
    assert (judge_client.served.error(stale), stale.json()["detail"]["answer"]["version"]) == ((409, "conflict"), 4)


def test_every_version_of_an_item_is_kept(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    judge_client.put(sheet, item["item"], 0, "draft")
    judge_client.put(sheet, item["item"], 1, "skipped", reason="later")
    judge_client.undo(sheet, item["item"], 2)
    steps = judge_client.request("GET", f"/{sheet}/items/{item['item']}/history").json()["items"]
    assert [(step["version"], step["state"]) for step in steps] == [(3, "draft"), (2, "skipped"), (1, "draft")]


def test_time_is_bounded_by_the_clock_of_the_server(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    body = judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item), seconds=80_000).json()
    assert body["answer"]["seconds"] < 60
    assert body["batch"]["seconds"] == body["answer"]["seconds"]


def test_the_median_time_of_an_item_is_there_for_the_judges_page(judge_client: JudgeClient) -> None:
    sheet = judge_client.open()["sheet"]
    database = judge_client.served.app.state.batches._store._database
    database.execute("UPDATE batches SET opened = opened - 1000")
    for number, item in enumerate(judge_client.get_batch(sheet)["items"][:3], start=1):
        body = judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item), seconds=60 * number).json()
    assert body["batch"]["minutes_per_item"] == pytest.approx(2.0)
    assert judge_client.served.app.state.batches.minutes_per_item(EXPERIMENT) == {JUDGE: pytest.approx(2.0)}


# paging


def test_batches_come_in_pages_those_last_worked_on_first(served: ServedPanel) -> None:
    sheets = [JudgeClient.create(served, name).open()["sheet"] for name in ("anna", "ben", "carla")]
    admin = JudgeClient(served, served.admin)
    first = admin.request("GET", "?judge=*&limit=2").json()
    rest = admin.request("GET", f"?judge=*&limit=2&next={first['next']}").json()
    assert [batch["sheet"] for batch in first["items"] + rest["items"]] == sheets[::-1]
    assert rest["next"] is None
    assert error_of(admin, admin.request("GET", "?next=nonsense")) == (422, "invalid", "query.next")


def test_the_steps_of_an_item_come_in_pages(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    for version in range(3):
        judge_client.put(sheet, item["item"], version, tips=[{"note": f"{version}"}, {}, {}])
    place = f"/{sheet}/items/{item['item']}/history?limit=2"
    first = judge_client.request("GET", place).json()
    rest = judge_client.request("GET", f"{place}&next={first['next']}").json()
    assert [step["version"] for step in first["items"] + rest["items"]] == [3, 2, 1]
    assert rest["next"] is None
