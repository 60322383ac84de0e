"""Closing a batch: applied, held, revised, accepted or sent back; and what works without MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.judging import always, fill, items_of, metrics_of
from tipbench.record.store import MemoryStore
from web.judge_client import JudgeClient, driver_of, error_of, first_item, item_body, scored_tips, stored_sheet
from web.panels import API, EXPERIMENT, JUDGE, ServedPanel, answered_store, serve_panel

APPLY = f"{API}/judge/{EXPERIMENT}/apply"


@pytest.fixture
def judge_client(served: ServedPanel) -> JudgeClient:
    return JudgeClient(served, served.judge)


@pytest.fixture
def admin(served: ServedPanel) -> JudgeClient:
    return JudgeClient(served, served.admin)


# closing a batch


def test_a_closed_batch_counts(judge_client: JudgeClient) -> None:
    body = judge_client.judge_batch()
    batch, outcome = body["batch"], body["outcome"]
    assert (batch["status"], outcome["status"], outcome["unfinished"]) == ("applied", "applied", 0)
    assert outcome["applied"] == batch["items"] == batch["done"]
    assert outcome["drift"]["verdict"] == "fine"
    assert {scale["scale"] for scale in outcome["drift"]["scales"]} == {"relevance", "actionability", "tone"}
    judging, cells = stored_sheet(judge_client.served, batch["sheet"]), driver_of(judge_client.served).cells()
    for run_id, item in items_of(fill(judging), judging).items():
        assert {name: cells[run_id].metrics[name] for name in metrics_of(item)} == pytest.approx(metrics_of(item))


def test_closing_again_answers_the_same_and_changes_nothing(judge_client: JudgeClient) -> None:
    body = judge_client.judge_batch(limit=6)
    before = driver_of(judge_client.served).everything()
    assert judge_client.close(body["batch"]["sheet"]).json() == body
    assert driver_of(judge_client.served).everything() == before


def test_unfinished_and_skipped_items_stay_pending(judge_client: JudgeClient, admin: JudgeClient) -> None:
    sheet = judge_client.open(limit=12)["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    judge_client.submit(raw, omit_last=2)
    judge_client.put(sheet, raw["items"][-1]["item"], 0, "skipped", reason="I wrote\n this one")
    judge_client.put(sheet, raw["items"][-2]["item"], 0, "draft", **item_body(raw["items"][-2]))
    body = judge_client.close(sheet).json()
    assert (body["outcome"]["applied"], body["outcome"]["unfinished"]) == (len(raw["items"]) - 2, 2)
    assert body["outcome"]["drift"]["verdict"] == "fine", "finishing checks the drift"
    assert not stored_sheet(judge_client.served, sheet).scores.keys() & {item["item"] for item in raw["items"][-2:]}
    skips = admin.get_batch(sheet)["skips"]
    assert [(skip["item"], skip["reason"]) for skip in skips] == [(raw["items"][-1]["item"], "I wrote this one")]


def test_a_skipped_item_does_not_hide_the_drift_from_the_judge(judge_client: JudgeClient) -> None:
    sheet = judge_client.open()["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    judge_client.submit(raw, omit_last=1)
    judge_client.put(sheet, raw["items"][-1]["item"], 0, "skipped", reason="I wrote this one")
    drift = judge_client.close(sheet).json()["outcome"]["drift"]
    assert [scale["scale"] for scale in drift["scales"]] == ["relevance", "actionability", "tone"]
    assert drift["n_controls"] is None  # a count would reveal whether the skipped item was a control
    assert all(scale["bias"] == round(scale["bias"], 1) for scale in drift["scales"])


def test_a_batch_finished_with_one_item_shows_the_verdict_alone(judge_client: JudgeClient) -> None:
    sheet = judge_client.open()["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    judge_client.submit(raw, omit_last=len(raw["items"]) - 1)
    outcome = judge_client.close(sheet).json()["outcome"]
    assert (outcome["drift"], outcome["self_agreement"]) == ({"verdict": "unknown"}, None)
    page = judge_client.served.get(f"/judge/batches/{sheet}", token=judge_client.served.judge).text
    assert "No numbers are shown: the sheet was finished before, or has few items filled." in page


def test_finishing_with_an_open_item_gives_the_verdict_and_later_changes_only_its_state(
    judge_client: JudgeClient,
) -> None:
    sheet = judge_client.open()["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    for item in raw["items"]:
        for tip in item["tips"]:
            tip["scores"]["tone"] = 5
    judge_client.submit(raw, omit_last=1)
    outcome = judge_client.close(sheet).json()["outcome"]
    assert (outcome["status"], outcome["unfinished"], outcome["self_agreement"]) == ("held", 1, None)
    tone = outcome["drift"]["scales"][-1]
    assert (tone["scale"], tone["n"], tone["beyond"]) == ("tone", None, True)
    assert tone["bias"] == round(tone["bias"], 1) > 0
    assert outcome["drift"]["n_controls"] is None, "a count would reveal whether the open item is a control"
    judge_client.request("POST", f"/{sheet}/reopen")
    judge_client.put(sheet, raw["items"][-1]["item"], 0, "submitted", **item_body(raw["items"][-1]))
    assert judge_client.close(sheet).json()["outcome"]["drift"] == {"verdict": "held"}


def test_a_batch_with_nothing_submitted_is_not_closed(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    judge_client.put(sheet, item["item"], 0, "draft", tips=scored_tips(item))
    assert judge_client.served.error(judge_client.close(sheet)) == (409, "not_enough_data")
    assert judge_client.get_batch(sheet)["batch"]["status"] == "open"


def test_a_closed_batch_rejects_changes_until_it_is_reopened(judge_client: JudgeClient) -> None:
    sheet = judge_client.judge_batch(limit=6)["batch"]["sheet"]
    item = judge_client.get_batch(sheet)["items"][0]
    for response in (judge_client.put(sheet, item["item"], 1), judge_client.undo(sheet, item["item"], 1)):
        assert judge_client.served.error(response) == (409, "batch_closed")
    assert judge_client.request("POST", f"/{sheet}/reopen").json()["batch"]["status"] == "open"
    assert judge_client.put(sheet, item["item"], 1, "submitted", tips=scored_tips(item)).status_code == 200
    assert judge_client.close(sheet).json()["outcome"]["changed"] == 1


def test_scores_beyond_the_limit_are_held_and_revised_by_their_judge(judge_client: JudgeClient) -> None:
    body = judge_client.judge_batch(always(5))
    sheet = body["batch"]["sheet"]
    assert (body["batch"]["status"], body["outcome"]["applied"]) == ("held", 0)
    assert body["outcome"]["drift"]["verdict"] == "beyond the limit"
    assert {run.state for run in driver_of(judge_client.served).cells().values()} == {"pending"}
    judge_client.request("POST", f"/{sheet}/reopen")
    judge_client.submit(fill(stored_sheet(judge_client.served, sheet)))
    body = judge_client.close(sheet).json()
    assert (body["batch"]["status"], body["outcome"]["held"]) == ("applied", 0)


def test_revisions_by_file_and_by_batch_are_limited_together(judge_client: JudgeClient) -> None:
    sheet = judge_client.judge_batch(always(1), limit=6)["batch"]["sheet"]
    for score in (2, 1, 2, 1, 2):
        file = {**fill(stored_sheet(judge_client.served, sheet), always(score)), "judge": JUDGE}
        assert judge_client.served.post(APPLY, token=judge_client.token, json=file).status_code == 200
    judge_client.request("POST", f"/{sheet}/reopen")
    assert judge_client.served.error(judge_client.close(sheet)) == (403, "too_many_revisions")


def test_an_admin_accepts_a_held_batch_with_a_reason(judge_client: JudgeClient, admin: JudgeClient) -> None:
    sheet = judge_client.judge_batch(always(5))["batch"]["sheet"]
    for _ in range(2):
        body = admin.request("POST", f"/{sheet}/accept", json={"reason": "agreed in the team"}).json()
        assert (body["batch"]["status"], body["batch"]["accepted"]) == ("applied", "agreed in the team")
    outcome = judge_client.get_batch(sheet)["batch"]["outcome"]
    assert (outcome["status"], outcome["drift_accepted"], outcome["held"]) == ("applied", "agreed in the team", 0)
    assert stored_sheet(judge_client.served, sheet).status == "applied"


def test_an_admin_returns_a_held_batch_with_a_note(judge_client: JudgeClient, admin: JudgeClient) -> None:
    sheet = judge_client.judge_batch(always(5))["batch"]["sheet"]
    for _ in range(2):
        response = admin.request("POST", f"/{sheet}/return", json={"note": "Please look at tone again."})
        assert response.json()["batch"]["status"] == "open"
    batch = judge_client.open()
    assert (batch["sheet"], batch["note"]) == (sheet, "Please look at tone again.")
    assert judge_client.close(sheet).json()["batch"]["note"] is None


def test_only_a_held_batch_is_accepted_or_returned(judge_client: JudgeClient, admin: JudgeClient) -> None:
    sheet = judge_client.judge_batch(limit=6)["batch"]["sheet"]
    for path, body in (("accept", {"reason": "x"}), ("return", {"note": "x"})):
        assert judge_client.served.error(admin.request("POST", f"/{sheet}/{path}", json=body)) == (409, "not_held")
        assert judge_client.served.error(judge_client.request("POST", f"/{sheet}/{path}", json=body)) == (
            403,
            "forbidden",
        )
        key = next(iter(body))
        for wrong in ({}, {key: ""}, {key: "  "}, {key: "x" * 3000}, {key: 1}):
            assert error_of(admin, admin.request("POST", f"/{sheet}/{path}", json=wrong)) == (
                422,
                "invalid",
                f"body.{key}",
            )


def test_a_drift_that_was_accepted_elsewhere_shows(judge_client: JudgeClient) -> None:
    sheet = judge_client.judge_batch(always(5))["batch"]["sheet"]
    driver = driver_of(judge_client.served)
    driver.apply(fill(stored_sheet(judge_client.served, sheet), always(5), judge=JUDGE), accept="on the command line")
    batch = judge_client.request("GET").json()["items"][0]
    assert (batch["status"], batch["accepted"]) == ("applied", "on the command line")


def test_a_batch_whose_sheet_was_applied_by_file_can_be_closed(judge_client: JudgeClient) -> None:
    sheet = judge_client.open(limit=6)["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    assert judge_client.served.post(APPLY, token=judge_client.token, json=raw).json()["status"] == "applied"
    assert judge_client.close(sheet).json()["outcome"]["applied"] == len(raw["items"])


def test_a_batch_whose_sheet_was_applied_by_file_has_the_files_result(judge_client: JudgeClient) -> None:
    sheet = judge_client.open(limit=6)["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    judge_client.served.post(APPLY, token=judge_client.token, json=raw)
    batch = judge_client.request("GET").json()["items"][0]
    assert (batch["status"], batch["outcome"]["applied"]) == ("applied", len(raw["items"]))
    assert batch["outcome"]["by_file"] is True
    assert judge_client.open(limit=6)["sheet"] != sheet
    judge_client.request("POST", f"/{sheet}/reopen")
    assert judge_client.get_batch(sheet)["batch"]["status"] == "open"  # the judge's last change counts


def test_opening_continues_with_a_new_sheet_if_the_open_one_was_applied_by_file(judge_client: JudgeClient) -> None:
    sheet = judge_client.open(limit=6)["sheet"]
    judge_client.served.post(APPLY, token=judge_client.token, json=fill(stored_sheet(judge_client.served, sheet)))
    assert judge_client.open(limit=6)["sheet"] != sheet


def test_a_file_does_not_end_a_batch_with_answers(judge_client: JudgeClient) -> None:
    sheet, item = first_item(judge_client)
    judge_client.put(sheet, item["item"], 0, "draft", tips=scored_tips(item))
    judge_client.served.post(APPLY, token=judge_client.token, json=fill(stored_sheet(judge_client.served, sheet)))
    whole = judge_client.get_batch(sheet)
    assert (whole["batch"]["status"], whole["items"][0]["answer"]["state"]) == ("open", "draft")


def test_answers_withdrawn_after_a_close_still_count(judge_client: JudgeClient) -> None:
    body = judge_client.judge_batch(limit=6)
    sheet = body["batch"]["sheet"]
    first, second = judge_client.get_batch(sheet)["items"][:2]
    judge_client.request("POST", f"/{sheet}/reopen")
    judge_client.put(sheet, first["item"], 1, "skipped", reason="not mine")
    judge_client.put(sheet, second["item"], 1, "empty")
    outcome = judge_client.close(sheet).json()["outcome"]
    assert (outcome["blank"], outcome["unfinished"], outcome["changed"]) == (2, 0, 0)
    assert outcome["applied"] == body["outcome"]["applied"]


def test_deleting_old_jobs_deletes_no_answers_of_judges(home: Path) -> None:
    with serve_panel(home, answered_store(), {"TIPBENCH_JOBS_KEEP_DAYS": "0.0000001"}) as served:
        judge_client = JudgeClient(served, served.judge)
        sheet, item = first_item(judge_client)
        judge_client.submit(fill(stored_sheet(served, sheet)), omit_last=1)
        last = judge_client.get_batch(sheet)["items"][-1]
        judge_client.put(sheet, last["item"], 0, "draft", tips=scored_tips(last))
        judge_client.close(sheet)
        judge_client.open(limit=6)
        assert judge_client.get_batch(sheet)["batch"]["draft"] == 1
        assert len(judge_client.request("GET", f"/{sheet}/items/{item['item']}/history").json()["items"]) == 1


# without MLflow


def test_without_mlflow_drafts_are_kept_and_nothing_is_lost(judge_client: JudgeClient) -> None:
    store = judge_client.served.store
    assert isinstance(store, MemoryStore)
    sheet = judge_client.open(limit=6)["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    store.away = True
    assert judge_client.open()["sheet"] == sheet
    judge_client.submit(raw)
    assert judge_client.request("GET").json()["items"][0]["done"] == len(raw["items"])
    assert judge_client.served.error(judge_client.close(sheet)) == (503, "mlflow_away")
    assert judge_client.get_batch(sheet)["batch"]["status"] == "open"
    store.away = False
    assert judge_client.close(sheet).json()["outcome"]["applied"] == len(raw["items"])


def test_without_mlflow_a_new_batch_has_to_wait(judge_client: JudgeClient) -> None:
    store = judge_client.served.store
    assert isinstance(store, MemoryStore)
    store.away = True
    assert judge_client.served.error(judge_client.request("POST")) == (503, "mlflow_away")


def test_a_held_batch_is_shown_as_last_known_without_mlflow(judge_client: JudgeClient) -> None:
    store = judge_client.served.store
    assert isinstance(store, MemoryStore)
    sheet = judge_client.judge_batch(always(5))["batch"]["sheet"]
    store.away = True
    assert judge_client.get_batch(sheet)["batch"]["status"] == "held"
