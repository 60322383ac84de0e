"""Closing a batch: applied, held, revised, accepted or sent back; and what works without MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.judging import always, by_hand, fill, items_of
from tipbench.record.store import MemoryStore
from web.batching import Clerk, desk_of, first_item, given, kept, refused, whole_tips
from web.panels import API, EXPERIMENT, JUDGE, Served, answered, serving

APPLY = f"{API}/judge/{EXPERIMENT}/apply"


@pytest.fixture
def clerk(served: Served) -> Clerk:
    return Clerk(served, served.judge)


@pytest.fixture
def admin(served: Served) -> Clerk:
    return Clerk(served, served.admin)


# closing


def test_a_closed_batch_counts(clerk: Clerk) -> None:
    body = clerk.judged()
    batch, outcome = body["batch"], body["outcome"]
    assert (batch["status"], outcome["status"], outcome["unfinished"]) == ("applied", "applied", 0)
    assert outcome["applied"] == batch["items"] == batch["done"]
    assert outcome["drift"]["verdict"] == "fine"
    assert {scale["scale"] for scale in outcome["drift"]["scales"]} == {"relevance", "actionability", "tone"}
    judging, cells = kept(clerk.served, batch["sheet"]), desk_of(clerk.served).cells()
    for run_id, item in items_of(fill(judging), judging).items():
        assert {name: cells[run_id].metrics[name] for name in by_hand(item)} == pytest.approx(by_hand(item))


def test_closing_again_answers_the_same_and_changes_nothing(clerk: Clerk) -> None:
    body = clerk.judged(limit=6)
    before = desk_of(clerk.served).everything()
    assert clerk.close(body["batch"]["sheet"]).json() == body
    assert desk_of(clerk.served).everything() == before


def test_unfinished_and_skipped_items_stay_pending(clerk: Clerk, admin: Clerk) -> None:
    sheet = clerk.open(limit=12)["sheet"]
    raw = fill(kept(clerk.served, sheet))
    clerk.answer(raw, but=2)
    clerk.put(sheet, raw["items"][-1]["item"], 0, "skipped", reason="I wrote\n this one")
    clerk.put(sheet, raw["items"][-2]["item"], 0, "draft", **given(raw["items"][-2]))
    body = clerk.close(sheet).json()
    assert (body["outcome"]["applied"], body["outcome"]["unfinished"]) == (len(raw["items"]) - 2, 2)
    assert body["outcome"]["drift"]["verdict"] == "fine", "finishing checks the drift"
    assert not kept(clerk.served, sheet).answers.keys() & {item["item"] for item in raw["items"][-2:]}
    skips = admin.whole(sheet)["skips"]
    assert [(skip["item"], skip["reason"]) for skip in skips] == [(raw["items"][-1]["item"], "I wrote this one")]


def test_a_skipped_item_does_not_hide_the_drift_from_the_judge(clerk: Clerk) -> None:
    sheet = clerk.open()["sheet"]
    raw = fill(kept(clerk.served, sheet))
    clerk.answer(raw, but=1)
    clerk.put(sheet, raw["items"][-1]["item"], 0, "skipped", reason="I wrote this one")
    drift = clerk.close(sheet).json()["outcome"]["drift"]
    assert [scale["scale"] for scale in drift["scales"]] == ["relevance", "actionability", "tone"]
    assert drift["n_controls"] is None  # a count would reveal whether the skipped item was a control
    assert all(scale["bias"] == round(scale["bias"], 1) for scale in drift["scales"])


def test_a_batch_finished_with_one_item_shows_the_verdict_alone(clerk: Clerk) -> None:
    sheet = clerk.open()["sheet"]
    raw = fill(kept(clerk.served, sheet))
    clerk.answer(raw, but=len(raw["items"]) - 1)
    outcome = clerk.close(sheet).json()["outcome"]
    assert (outcome["drift"], outcome["self_agreement"]) == ({"verdict": "unknown"}, None)
    page = clerk.served.get(f"/judge/batches/{sheet}", token=clerk.served.judge).text
    assert "with few items filled, is shown without numbers" in page


def test_finishing_with_an_open_item_gives_the_verdict_and_later_changes_only_its_state(clerk: Clerk) -> None:
    sheet = clerk.open()["sheet"]
    raw = fill(kept(clerk.served, sheet))
    for item in raw["items"]:
        for tip in item["tips"]:
            tip["scores"]["tone"] = 5
    clerk.answer(raw, but=1)
    outcome = clerk.close(sheet).json()["outcome"]
    assert (outcome["status"], outcome["unfinished"], outcome["self_agreement"]) == ("held", 1, None)
    tone = outcome["drift"]["scales"][-1]
    assert (tone["scale"], tone["n"], tone["beyond"]) == ("tone", None, True)
    assert tone["bias"] == round(tone["bias"], 1) > 0
    assert outcome["drift"]["n_controls"] is None, "a count would reveal whether the open item is a control"
    clerk.ask("POST", f"/{sheet}/reopen")
    clerk.put(sheet, raw["items"][-1]["item"], 0, "submitted", **given(raw["items"][-1]))
    assert clerk.close(sheet).json()["outcome"]["drift"] == {"verdict": "held"}


def test_a_batch_with_nothing_submitted_is_not_closed(clerk: Clerk) -> None:
    sheet, item = first_item(clerk)
    clerk.put(sheet, item["item"], 0, "draft", tips=whole_tips(item))
    assert clerk.served.error(clerk.close(sheet)) == (409, "not_enough_data")
    assert clerk.whole(sheet)["batch"]["status"] == "open"


def test_a_closed_batch_rejects_changes_until_it_is_reopened(clerk: Clerk) -> None:
    sheet = clerk.judged(limit=6)["batch"]["sheet"]
    item = clerk.whole(sheet)["items"][0]
    for response in (clerk.put(sheet, item["item"], 1), clerk.undo(sheet, item["item"], 1)):
        assert clerk.served.error(response) == (409, "batch_closed")
    assert clerk.ask("POST", f"/{sheet}/reopen").json()["batch"]["status"] == "open"
    assert clerk.put(sheet, item["item"], 1, "submitted", tips=whole_tips(item)).status_code == 200
    assert clerk.close(sheet).json()["outcome"]["changed"] == 1


def test_scores_beyond_the_limit_are_held_and_revised_by_their_judge(clerk: Clerk) -> None:
    body = clerk.judged(always(5))
    sheet = body["batch"]["sheet"]
    assert (body["batch"]["status"], body["outcome"]["applied"]) == ("held", 0)
    assert body["outcome"]["drift"]["verdict"] == "beyond the limit"
    assert {run.state for run in desk_of(clerk.served).cells().values()} == {"pending"}
    clerk.ask("POST", f"/{sheet}/reopen")
    clerk.answer(fill(kept(clerk.served, sheet)))
    body = clerk.close(sheet).json()
    assert (body["batch"]["status"], body["outcome"]["held"]) == ("applied", 0)


def test_revisions_by_file_and_by_batch_are_limited_together(clerk: Clerk) -> None:
    sheet = clerk.judged(always(1), limit=6)["batch"]["sheet"]
    for score in (2, 1, 2, 1, 2):
        file = {**fill(kept(clerk.served, sheet), always(score)), "judge": JUDGE}
        assert clerk.served.post(APPLY, token=clerk.token, json=file).status_code == 200
    clerk.ask("POST", f"/{sheet}/reopen")
    assert clerk.served.error(clerk.close(sheet)) == (403, "too_many_revisions")


def test_an_admin_accepts_a_held_batch_with_a_reason(clerk: Clerk, admin: Clerk) -> None:
    sheet = clerk.judged(always(5))["batch"]["sheet"]
    for _ in range(2):
        body = admin.ask("POST", f"/{sheet}/accept", json={"reason": "agreed in the team"}).json()
        assert (body["batch"]["status"], body["batch"]["accepted"]) == ("applied", "agreed in the team")
    outcome = clerk.whole(sheet)["batch"]["outcome"]
    assert (outcome["status"], outcome["drift_accepted"], outcome["held"]) == ("applied", "agreed in the team", 0)
    assert kept(clerk.served, sheet).status == "applied"


def test_an_admin_returns_a_held_batch_with_a_note(clerk: Clerk, admin: Clerk) -> None:
    sheet = clerk.judged(always(5))["batch"]["sheet"]
    for _ in range(2):
        response = admin.ask("POST", f"/{sheet}/return", json={"note": "Please look at tone again."})
        assert response.json()["batch"]["status"] == "open"
    batch = clerk.open()
    assert (batch["sheet"], batch["note"]) == (sheet, "Please look at tone again.")
    assert clerk.close(sheet).json()["batch"]["note"] is None


def test_only_a_held_batch_is_accepted_or_returned(clerk: Clerk, admin: Clerk) -> None:
    sheet = clerk.judged(limit=6)["batch"]["sheet"]
    for path, body in (("accept", {"reason": "x"}), ("return", {"note": "x"})):
        assert clerk.served.error(admin.ask("POST", f"/{sheet}/{path}", json=body)) == (409, "not_held")
        assert clerk.served.error(clerk.ask("POST", f"/{sheet}/{path}", json=body)) == (403, "forbidden")
        key = next(iter(body))
        for wrong in ({}, {key: ""}, {key: "  "}, {key: "x" * 3000}, {key: 1}):
            assert refused(admin, admin.ask("POST", f"/{sheet}/{path}", json=wrong)) == (422, "invalid", f"body.{key}")


def test_a_drift_that_was_accepted_elsewhere_shows(clerk: Clerk) -> None:
    sheet = clerk.judged(always(5))["batch"]["sheet"]
    desk = desk_of(clerk.served)
    desk.apply(fill(kept(clerk.served, sheet), always(5), judge=JUDGE), accept="on the command line")
    batch = clerk.ask("GET").json()["items"][0]
    assert (batch["status"], batch["accepted"]) == ("applied", "on the command line")


def test_a_batch_whose_sheet_was_applied_by_file_can_be_closed(clerk: Clerk) -> None:
    sheet = clerk.open(limit=6)["sheet"]
    raw = fill(kept(clerk.served, sheet))
    assert clerk.served.post(APPLY, token=clerk.token, json=raw).json()["status"] == "applied"
    assert clerk.close(sheet).json()["outcome"]["applied"] == len(raw["items"])


def test_a_batch_whose_sheet_was_applied_by_file_has_the_files_result(clerk: Clerk) -> None:
    sheet = clerk.open(limit=6)["sheet"]
    raw = fill(kept(clerk.served, sheet))
    clerk.served.post(APPLY, token=clerk.token, json=raw)
    batch = clerk.ask("GET").json()["items"][0]
    assert (batch["status"], batch["outcome"]["applied"]) == ("applied", len(raw["items"]))
    assert batch["outcome"]["by_file"] is True
    assert clerk.open(limit=6)["sheet"] != sheet
    clerk.ask("POST", f"/{sheet}/reopen")
    assert clerk.whole(sheet)["batch"]["status"] == "open"  # the judge's last change counts


def test_opening_continues_with_a_new_sheet_if_the_open_one_was_applied_by_file(clerk: Clerk) -> None:
    sheet = clerk.open(limit=6)["sheet"]
    clerk.served.post(APPLY, token=clerk.token, json=fill(kept(clerk.served, sheet)))
    assert clerk.open(limit=6)["sheet"] != sheet


def test_a_file_does_not_end_a_batch_with_answers(clerk: Clerk) -> None:
    sheet, item = first_item(clerk)
    clerk.put(sheet, item["item"], 0, "draft", tips=whole_tips(item))
    clerk.served.post(APPLY, token=clerk.token, json=fill(kept(clerk.served, sheet)))
    whole = clerk.whole(sheet)
    assert (whole["batch"]["status"], whole["items"][0]["answer"]["state"]) == ("open", "draft")


def test_answers_withdrawn_after_a_close_still_count(clerk: Clerk) -> None:
    body = clerk.judged(limit=6)
    sheet = body["batch"]["sheet"]
    first, second = clerk.whole(sheet)["items"][:2]
    clerk.ask("POST", f"/{sheet}/reopen")
    clerk.put(sheet, first["item"], 1, "skipped", reason="not mine")
    clerk.put(sheet, second["item"], 1, "empty")
    outcome = clerk.close(sheet).json()["outcome"]
    assert (outcome["blank"], outcome["unfinished"], outcome["changed"]) == (2, 0, 0)
    assert outcome["applied"] == body["outcome"]["applied"]


def test_deleting_old_jobs_deletes_no_answers_of_judges(home: Path) -> None:
    store, _ = answered()
    with serving(home, store, {"TIPBENCH_JOBS_KEEP_DAYS": "0.0000001"}) as served:
        clerk = Clerk(served, served.judge)
        sheet, item = first_item(clerk)
        clerk.answer(fill(kept(served, sheet)), but=1)
        last = clerk.whole(sheet)["items"][-1]
        clerk.put(sheet, last["item"], 0, "draft", tips=whole_tips(last))
        clerk.close(sheet)
        clerk.open(limit=6)
        assert clerk.whole(sheet)["batch"]["draft"] == 1
        assert len(clerk.ask("GET", f"/{sheet}/items/{item['item']}/history").json()["items"]) == 1


# without MLflow


def test_without_mlflow_drafts_are_kept_and_nothing_is_lost(clerk: Clerk) -> None:
    store = clerk.served.store
    assert isinstance(store, MemoryStore)
    sheet = clerk.open(limit=6)["sheet"]
    raw = fill(kept(clerk.served, sheet))
    store.away = True
    assert clerk.open()["sheet"] == sheet
    clerk.answer(raw)
    assert clerk.ask("GET").json()["items"][0]["done"] == len(raw["items"])
    assert clerk.served.error(clerk.close(sheet)) == (503, "mlflow_away")
    assert clerk.whole(sheet)["batch"]["status"] == "open"
    store.away = False
    assert clerk.close(sheet).json()["outcome"]["applied"] == len(raw["items"])


def test_without_mlflow_a_new_batch_has_to_wait(clerk: Clerk) -> None:
    store = clerk.served.store
    assert isinstance(store, MemoryStore)
    store.away = True
    assert clerk.served.error(clerk.ask("POST")) == (503, "mlflow_away")


def test_a_held_batch_is_shown_as_last_known_without_mlflow(clerk: Clerk) -> None:
    store = clerk.served.store
    assert isinstance(store, MemoryStore)
    sheet = clerk.judged(always(5))["batch"]["sheet"]
    store.away = True
    assert clerk.whole(sheet)["batch"]["status"] == "held"
