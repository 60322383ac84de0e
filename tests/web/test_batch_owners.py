"""Owners of batches: each judge sees only its own, blind; what an admin may see; duels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.judged import judge_at
from support.judging import MODELS, always, fill, honest, record_cells
from tipbench.judge.duels import Winner, duel_json, find_duel
from tipbench.record.store import MemoryStore
from tipbench.web.auth import Identity, Role
from tipbench.web.batches import batch_service_of
from tipbench.web.errors import Forbidden
from web.batching import Clerk, desk_of, first_item, kept, text_of
from web.furnished_panel import HTML, words_of
from web.panels import API, EXPERIMENT, JUDGE, Served, serving


@pytest.fixture
def clerk(served: Served) -> Clerk:
    return Clerk(served, served.judge)


@pytest.fixture
def admin(served: Served) -> Clerk:
    return Clerk(served, served.admin)


# whose it is


def test_a_judge_sees_only_its_own_batches(clerk: Clerk) -> None:
    other = Clerk.named(clerk.served, "anna")
    sheet, item = first_item(other)
    own = clerk.open()["sheet"]
    assert [batch["sheet"] for batch in clerk.ask("GET").json()["items"]] == [own]
    assert clerk.served.error(clerk.ask("GET", "?judge=anna")) == (403, "forbidden")
    tried = [
        clerk.ask("GET", f"/{sheet}"),
        clerk.put(sheet, item["item"], 0),
        clerk.undo(sheet, item["item"], 0),
        clerk.ask("GET", f"/{sheet}/items/{item['item']}/history"),
        clerk.close(sheet),
        clerk.ask("POST", f"/{sheet}/reopen"),
    ]
    nowhere = clerk.ask("GET", f"/{'0' * 12}")
    assert {clerk.served.error(response) for response in tried} == {clerk.served.error(nowhere)} == {(404, "not_found")}


def test_a_judge_named_like_a_wildcard_sees_only_its_own_batches(clerk: Clerk) -> None:
    clerk.open()
    desk, star = batch_service_of(clerk.served.app), Identity("*", Role.JUDGE, "made before such names were refused")
    assert desk.page(star, EXPERIMENT).items == []
    with pytest.raises(Forbidden):
        desk.page(star, EXPERIMENT, "*")


def test_an_admin_sees_counts_and_status_of_others_and_no_score(clerk: Clerk, admin: Clerk) -> None:
    sheet = clerk.judged(always(5), but=1)["batch"]["sheet"]
    for query in (f"?judge={JUDGE}", "?judge=*"):
        (batch,) = admin.ask("GET", query).json()["items"]
        assert (batch["sheet"], batch["outcome"], batch["status"]) == (sheet, None, "held")
    assert admin.ask("GET").json()["items"] == []
    assert set(admin.whole(sheet)) == {"batch", "skips"}
    item = clerk.whole(sheet)["items"][0]["item"]
    for response in (admin.put(sheet, item, 1), admin.undo(sheet, item, 1), admin.close(sheet)):
        assert admin.served.error(response) == (403, "forbidden")


def test_an_admin_judges_blind_under_the_own_name(clerk: Clerk, admin: Clerk) -> None:
    body = admin.judged(limit=6)
    assert body["batch"]["judge"] == "boss"
    assert "alpha" not in body["outcome"]


def test_judging_under_the_name_of_a_provisional_judge_is_refused(served: Served) -> None:
    rules = Clerk.named(served, "rules", Role.ADMIN)
    assert served.error(rules.ask("POST")) == (403, "forbidden")


def test_a_batch_of_another_experiment_is_not_found_under_this_one(clerk: Clerk) -> None:
    sheet = clerk.open()["sheet"]
    response = clerk.served.get(f"{API}/judge/tip-bench-other/batches/{sheet}", token=clerk.token)
    assert clerk.served.error(response) == (404, "not_found")


# blindness


def test_no_response_of_any_route_reveals_models_or_controls_to_a_judge(clerk: Clerk) -> None:
    """All responses to a judge, errors included, are searched for models, prompts, runs and keys."""
    served, desk = clerk.served, desk_of(clerk.served)
    other = Clerk.named(served, "anna")
    theirs, their_item = first_item(other)
    answers = [clerk.ask("POST"), clerk.ask("POST"), clerk.ask("GET"), clerk.ask("GET", "?judge=*")]
    sheet = answers[0].json()["batch"]["sheet"]
    raw = fill(kept(served, sheet), always(5))
    item = raw["items"][0]["item"]
    answers += [
        clerk.ask("GET", f"/{sheet}"),
        clerk.put(sheet, item, 0, "draft"),
        clerk.put(sheet, item, 0, "skipped", reason="no"),
        clerk.put(sheet, item, 1, "submitted"),
        clerk.undo(sheet, item, 1),
        clerk.undo(sheet, item, 2),
        clerk.ask("GET", f"/{sheet}/items/{item}/history"),
        clerk.ask("GET", f"/{theirs}"),
        clerk.put(theirs, their_item["item"], 0),
        clerk.close(sheet),
        clerk.ask("POST", f"/{sheet}/accept", json={"reason": "x"}),
        clerk.ask("POST", f"/{sheet}/return", json={"note": "x"}),
    ]
    clerk.answer(raw)
    answers += [
        clerk.close(sheet),
        clerk.close(sheet),
        clerk.ask("POST", f"/{sheet}/reopen"),
        clerk.ask("GET", f"/{sheet}"),
    ]
    clerk.answer(fill(kept(served, sheet), honest))
    answers += [clerk.close(sheet), clerk.ask("GET"), clerk.ask("POST", json={"kind": "duel"})]
    store = served.store
    assert isinstance(store, MemoryStore)
    store.away = True
    answers += [clerk.ask("POST"), clerk.ask("GET"), clerk.ask("GET", f"/{sheet}")]
    store.away = False
    judging = kept(served, sheet)
    controls = [control for entry in judging.entries for control in entry.controls]
    names = [
        *MODELS,
        "v1@",
        "v2-mentor",
        "v3-few-shot",
        *desk.cells(),
        judging.run_id,
        *controls,
        '"behind"',
        '"references"',
    ]
    for response in answers:
        assert [name for name in names if name in text_of(response)] == [], response.request.url
        assert "anna" not in response.text or response.status_code == 403


def test_nothing_that_unblinds_is_in_the_panels_own_database(clerk: Clerk) -> None:
    sheet = clerk.judged()["batch"]["sheet"]
    desk, judging = desk_of(clerk.served), kept(clerk.served, sheet)
    content = b"".join(path.read_bytes() for path in (clerk.served.home / "panel").iterdir())
    names = [*MODELS, "v2-mentor", "v3-few-shot", *desk.cells(), judging.run_id]
    assert [name for name in names if name.encode() in content] == []


# duels


@pytest.fixture
def tied(home: Path) -> Iterator[Clerk]:
    """Everything is scored the same, so everything is tied."""
    store = MemoryStore()
    record_cells(store)
    with serving(home, store) as served:
        judge_at(desk_of(served), lambda run, number: 3 + (len(run.params["scenario"]) + number) % 2)
        yield Clerk(served, served.judge)


def test_duels_are_judged_like_any_batch(tied: Clerk) -> None:
    batch = tied.open(kind="duel")
    body = tied.whole(batch["sheet"])
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
    experiment = desk_of(tied.served).experiment
    found = find_duel(tied.served.store, experiment.experiment_id, EXPERIMENT, batch["sheet"])
    assert found is not None
    assert {answer.winner for answer in found.answers.values()} == {"a"}


def test_open_duels_are_continued_and_close_the_sheets(tied: Clerk) -> None:
    duel = tied.open(kind="duel")["sheet"]
    response = tied.ask("POST", "", json={"kind": "sheet"})
    assert tied.served.error(response) == (409, "sheets_closed")
    assert tied.open(kind="duel")["sheet"] == duel


def test_a_duel_is_refused_while_a_sheet_is_open(tied: Clerk) -> None:
    tied.open(kind="sheet")
    assert tied.served.error(tied.ask("POST", "", json={"kind": "duel"})) == (409, "sheets_closed")


def test_a_duel_that_is_taken_back_keeps_its_winner_and_is_counted(tied: Clerk) -> None:
    sheet = tied.open(kind="duel", limit=4)["sheet"]
    items = [item["item"] for item in tied.whole(sheet)["items"]]
    for item in items:
        tied.put(sheet, item, 0, "submitted", winner="a")
    tied.close(sheet)
    tied.ask("POST", f"/{sheet}/reopen")
    tied.put(sheet, items[0], 1, "empty")
    outcome = tied.close(sheet).json()["outcome"]
    assert (outcome["blank"], outcome["unfinished"], outcome["changed"]) == (1, 0, 0)


def test_the_preview_of_filled_duels_shows_new_and_old_winners(tied: Clerk) -> None:
    served, sheet = tied.served, tied.open(kind="duel", limit=4)["sheet"]
    found = find_duel(served.store, desk_of(served).experiment.experiment_id, EXPERIMENT, sheet)
    assert found is not None
    items = [item.id for item in found.sheet.items]
    apply = f"{API}/judge/{EXPERIMENT}/apply"
    assert served.post(apply, token=tied.token, json=duel_json(found.sheet, {items[0]: Winner.A})).status_code == 200
    raw = duel_json(found.sheet, {items[0]: Winner.B, items[1]: Winner.TIE})
    data = {"csrf": served.log_in(tied.token), "experiment": EXPERIMENT}
    page = served.post(
        "/judge/preview", token=None, headers=HTML, data=data, files={"sheet": ("duels.json", json.dumps(raw))}
    )
    assert f"{items[0]} a → b" in words_of(page.text)
    assert f"{items[1]} open → tie" in words_of(page.text)


def test_without_javascript_duels_offer_no_scoring_sheet(tied: Clerk) -> None:
    path = tied.open(kind="duel")["links"]["page"]
    page = tied.served.get(path, token=tied.token, headers=HTML).text
    assert "Judging in the browser needs JavaScript" in page
    assert "as a file" not in page


def test_without_duels_a_judge_does_not_learn_who_leads(served: Served) -> None:
    desk = desk_of(served)
    judge_at(
        desk, lambda run, _number: 5 if run.params["model"] == MODELS[0] and run.params["prompt_version"] == "v1" else 1
    )
    response = Clerk(served, served.judge).ask("POST", json={"kind": "duel"})
    assert served.error(response) == (409, "not_enough_data")
    assert [name for name in (*MODELS, "v1", "leads") if name in response.text] == []
