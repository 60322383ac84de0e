"""Owners of batches: each judge sees only its own, blind; what an admin may see; duels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.judged import judge_at
from support.judging import MODELS, always, record_cells
from tipbench.judge.duels import duel_json, find_duel
from tipbench.record.store import MemoryStore
from tipbench.web.auth import Identity, Role
from tipbench.web.batches import batch_service_of
from tipbench.web.errors import Forbidden
from web.judge_client import JudgeClient, driver_of, first_item, stored_sheet
from web.panels import API, EXPERIMENT, HTML, JUDGE, ServedPanel, serve_panel
from web.sample_pages import page_text


@pytest.fixture
def judge_client(served: ServedPanel) -> JudgeClient:
    return JudgeClient(served, served.judge)


@pytest.fixture
def admin(served: ServedPanel) -> JudgeClient:
    return JudgeClient(served, served.admin)


# owners


def test_a_judge_sees_only_its_own_batches(judge_client: JudgeClient) -> None:
    other = JudgeClient.create(judge_client.served, "anna")
    sheet, item = first_item(other)
    own = judge_client.open()["sheet"]
    assert [batch["sheet"] for batch in judge_client.request("GET").json()["items"]] == [own]
    assert judge_client.served.error(judge_client.request("GET", "?judge=anna")) == (403, "forbidden")
    tried = [
        judge_client.request("GET", f"/{sheet}"),
        judge_client.put(sheet, item["item"], 0),
        judge_client.undo(sheet, item["item"], 0),
        judge_client.request("GET", f"/{sheet}/items/{item['item']}/history"),
        judge_client.close(sheet),
        judge_client.request("POST", f"/{sheet}/reopen"),
    ]
    nowhere = judge_client.request("GET", f"/{'0' * 12}")
    assert (
        {judge_client.served.error(response) for response in tried}
        == {judge_client.served.error(nowhere)}
        == {(404, "not_found")}
    )


def test_a_judge_named_like_a_wildcard_sees_only_its_own_batches(judge_client: JudgeClient) -> None:
    judge_client.open()
    driver, star = (
        batch_service_of(judge_client.served.app),
        Identity("*", Role.JUDGE, "made before such names were refused"),
    )
    assert driver.page(star, EXPERIMENT).items == []
    with pytest.raises(Forbidden):
        driver.page(star, EXPERIMENT, "*")


def test_an_admin_sees_counts_and_status_of_others_and_no_score(judge_client: JudgeClient, admin: JudgeClient) -> None:
    sheet = judge_client.judge_batch(always(5), omit_last=1)["batch"]["sheet"]
    for query in (f"?judge={JUDGE}", "?judge=*"):
        (batch,) = admin.request("GET", query).json()["items"]
        assert (batch["sheet"], batch["outcome"], batch["status"]) == (sheet, None, "held")
    assert admin.request("GET").json()["items"] == []
    assert set(admin.get_batch(sheet)) == {"batch", "skips"}
    item = judge_client.get_batch(sheet)["items"][0]["item"]
    for response in (admin.put(sheet, item, 1), admin.undo(sheet, item, 1), admin.close(sheet)):
        assert admin.served.error(response) == (403, "forbidden")


def test_an_admin_judges_blind_under_their_own_name(judge_client: JudgeClient, admin: JudgeClient) -> None:
    body = admin.judge_batch(limit=6)
    assert body["batch"]["judge"] == "boss"
    assert "alpha" not in body["outcome"]


def test_judging_under_the_name_of_a_provisional_judge_is_refused(served: ServedPanel) -> None:
    rules = JudgeClient.create(served, "rules", Role.ADMIN)
    assert served.error(rules.request("POST")) == (403, "forbidden")


def test_a_batch_of_another_experiment_is_not_found_under_this_one(judge_client: JudgeClient) -> None:
    sheet = judge_client.open()["sheet"]
    response = judge_client.served.get(f"{API}/judge/tip-bench-other/batches/{sheet}", token=judge_client.token)
    assert judge_client.served.error(response) == (404, "not_found")


# blindness


def test_nothing_that_unblinds_is_in_the_panels_own_database(judge_client: JudgeClient) -> None:
    sheet = judge_client.judge_batch()["batch"]["sheet"]
    driver, judging = driver_of(judge_client.served), stored_sheet(judge_client.served, sheet)
    content = b"".join(path.read_bytes() for path in (judge_client.served.home / "panel").iterdir())
    names = [*MODELS, "v2-mentor", "v3-few-shot", *driver.cells(), judging.run_id]
    assert [name for name in names if name.encode() in content] == []


# duels


@pytest.fixture
def tied(home: Path) -> Iterator[JudgeClient]:
    """A judge's client and a board on which all pairs tie."""
    store = MemoryStore()
    record_cells(store)
    with serve_panel(home, store) as served:
        judge_at(driver_of(served), lambda run, number: 3 + (len(run.params["scenario"]) + number) % 2)
        yield JudgeClient(served, served.judge)


def test_duels_are_judged_like_any_batch(tied: JudgeClient) -> None:
    batch = tied.open(kind="duel")
    body = tied.get_batch(batch["sheet"])
    assert (batch["kind"], batch["items"]) == ("duel", 40)
    item = body["items"][0]
    assert {"a", "b", "scenario"} < set(item)
    assert (item["answer"]["winner"], item["answer"]["state"]) == (None, "empty")
    bodies: list[dict[str, Any]] = [{"winner": "c"}, {"tips": [{}]}, {"format_ok": True}]
    for wrong in bodies:
        response = tied.put(batch["sheet"], item["item"], 0, "draft", **wrong)
        assert response.json()["error"]["path"] == f"body.{next(iter(wrong))}"
    response = tied.put(batch["sheet"], item["item"], 0, "submitted")
    assert response.json()["error"]["path"] == "body.winner"
    for each in body["items"]:
        assert tied.put(batch["sheet"], each["item"], 0, "submitted", winner="a").status_code == 200
    outcome = tied.close(batch["sheet"]).json()["outcome"]
    assert (outcome["status"], outcome["applied"], outcome["judged_in_both_orders"]) == ("applied", 40, 20)
    experiment = driver_of(tied.served).experiment
    found = find_duel(tied.served.store, experiment, batch["sheet"])
    assert found is not None
    assert {choice.winner for choice in found.choices.values()} == {"a"}


def test_open_duels_are_continued_and_close_the_sheets(tied: JudgeClient) -> None:
    duel = tied.open(kind="duel")["sheet"]
    response = tied.request("POST", "", json={"kind": "sheet"})
    assert tied.served.error(response) == (409, "sheets_closed")
    assert tied.open(kind="duel")["sheet"] == duel


def test_a_duel_is_refused_while_a_sheet_is_open(tied: JudgeClient) -> None:
    tied.open(kind="sheet")
    assert tied.served.error(tied.request("POST", "", json={"kind": "duel"})) == (409, "sheets_closed")


def test_a_duel_that_is_taken_back_keeps_its_winner_and_is_counted(tied: JudgeClient) -> None:
    sheet = tied.open(kind="duel", limit=4)["sheet"]
    items = [item["item"] for item in tied.get_batch(sheet)["items"]]
    for item in items:
        tied.put(sheet, item, 0, "submitted", winner="a")
    tied.close(sheet)
    tied.request("POST", f"/{sheet}/reopen")
    tied.put(sheet, items[0], 1, "empty")
    outcome = tied.close(sheet).json()["outcome"]
    assert (outcome["blank"], outcome["unfinished"], outcome["changed"]) == (1, 0, 0)


def test_the_preview_of_filled_duels_shows_new_and_old_winners(tied: JudgeClient) -> None:
    served, sheet = tied.served, tied.open(kind="duel", limit=4)["sheet"]
    found = find_duel(served.store, driver_of(served).experiment, sheet)
    assert found is not None
    items = [item.id for item in found.sheet.items]
    raw = duel_json(found.sheet)
    raw["items"][0]["winner"] = "a"
    assert served.post(f"{API}/judge/{EXPERIMENT}/apply", token=tied.token, json=raw).status_code == 200
    raw["items"][0]["winner"], raw["items"][1]["winner"] = "b", "tie"
    data = {"csrf": served.log_in(tied.token), "experiment": EXPERIMENT}
    page = served.post(
        "/judge/preview", token=None, headers=HTML, data=data, files={"sheet": ("duels.json", json.dumps(raw))}
    )
    assert f"{items[0]} a → b" in page_text(page.text)
    assert f"{items[1]} open → tie" in page_text(page.text)


def test_without_javascript_duels_offer_no_scoring_sheet(tied: JudgeClient) -> None:
    path = tied.open(kind="duel")["links"]["page"]
    page = tied.served.get(path, token=tied.token, headers=HTML).text
    assert "Judging in the browser needs JavaScript" in page
    assert "as a file" not in page


def test_without_duels_a_judge_does_not_learn_who_leads(served: ServedPanel) -> None:
    driver = driver_of(served)
    judge_at(
        driver,
        lambda run, _number: 5 if run.params["model"] == MODELS[0] and run.params["prompt_version"] == "v1" else 1,
    )
    response = JudgeClient(served, served.judge).request("POST", json={"kind": "duel"})
    assert served.error(response) == (409, "not_enough_data")
    assert [name for name in (*MODELS, "v1", "leads") if name in response.text] == []
