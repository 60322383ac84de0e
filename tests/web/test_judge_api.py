"""Judging over HTTP: the same sheets and the same applying as by file; for a judge, blind and for itself only."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from support.judging import agreed, always, fill, fill_csv
from tipbench.files import ResourceLock
from tipbench.http import canonical_url
from tipbench.judge.drift import MIN_CONTROLS
from tipbench.judge.sheet import sheet_text
from tipbench.judge.sheet_file import sheet_csv
from tipbench.web import deps
from tipbench.web import judge_service as web_judging
from web.judge_client import driver_of, stored_sheet
from web.panels import API, EXPERIMENT, JUDGE, ServedPanel

SHEETS = f"{API}/judge/{EXPERIMENT}/sheets"
APPLY = f"{API}/judge/{EXPERIMENT}/apply"


def export_sheet(served: ServedPanel, token: str = "", **options: Any) -> dict[str, Any]:
    response = served.post(SHEETS, token=token, json=options)
    assert response.status_code == 201, response.text
    sheet: dict[str, Any] = response.json()
    return sheet


def fill_sheet(served: ServedPanel, sheet: dict[str, Any], rule: Any = agreed, **options: Any) -> dict[str, Any]:
    return fill(stored_sheet(served, sheet["sheet"]), rule, **options)


def apply_sheet(served: ServedPanel, raw: Any, query: str = "", token: str = "") -> Any:
    return served.post(f"{APPLY}{query}", token=token, json=raw)


# exporting and applying a sheet


def test_an_exported_sheet_is_the_file_that_judge_export_writes(served: ServedPanel) -> None:
    response = served.post(SHEETS, json={"judge": "anna", "limit": 6})
    judging = stored_sheet(served, response.json()["sheet"])
    assert response.text == sheet_text(judging.sheet)
    assert response.headers["content-disposition"].endswith(f'filename="sheet-{judging.sheet.id}.json"')


def test_a_sheet_may_be_exported_for_a_spreadsheet(served: ServedPanel) -> None:
    sheet = export_sheet(served, judge="anna", limit=6)["sheet"]
    response = served.post(SHEETS, json={"sheet": sheet, "format": "csv"})
    assert response.content.decode() == sheet_csv(stored_sheet(served, sheet).sheet)
    assert response.headers["content-type"] == "text/csv; charset=utf-8"


def test_a_sheet_is_written_again_byte_for_byte(served: ServedPanel) -> None:
    first = served.post(SHEETS, json={"judge": "anna", "limit": 6})
    again = served.post(SHEETS, json={"sheet": first.json()["sheet"]})
    assert again.content == first.content


def test_a_sheet_is_written_again_with_the_scores_given_so_far(served: ServedPanel) -> None:
    sheet = export_sheet(served, served.judge, all=True)
    raw = fill_sheet(served, sheet)
    apply_sheet(served, {**raw, "items": raw["items"][:5]}, token=served.judge)
    again = export_sheet(served, served.judge, sheet=sheet["sheet"], filled=True)
    assert again["items"][:5] == raw["items"][:5]
    assert again["items"][5:] == sheet["items"][5:]
    response = served.post(SHEETS, token=served.judge, json={"filled": True})
    assert (response.status_code, response.json()["error"]["path"]) == (422, "body.filled")


def test_the_body_of_an_export_may_be_left_out(served: ServedPanel) -> None:
    response = served.post(SHEETS)
    assert (response.status_code, response.json()["judge"]) == (201, None)


def test_a_filled_sheet_counts(served: ServedPanel) -> None:
    sheet = export_sheet(served, judge="anna", all=True)
    body = apply_sheet(served, fill_sheet(served, sheet)).json()
    assert (body["status"], body["unfinished"], body["errors"]) == ("applied", 0, [])
    assert body["applied"] == len(sheet["items"])
    assert served.get(f"{API}/experiments").json()["items"][0]["judged"] == 48


def test_a_filled_spreadsheet_counts_the_same(served: ServedPanel) -> None:
    sheet = export_sheet(served, judge="anna", limit=6)
    text = fill_csv(sheet_csv(stored_sheet(served, sheet["sheet"]).sheet), fill_sheet(served, sheet))
    response = served.post(APPLY, content=text.encode(), headers={"Content-Type": "text/csv; charset=utf-8"})
    assert (response.status_code, response.json()["status"]) == (200, "applied")


def test_a_dry_run_shows_the_changes_and_makes_none(served: ServedPanel) -> None:
    sheet = export_sheet(served, judge="anna", limit=6)
    before = driver_of(served).everything()
    body = apply_sheet(served, fill_sheet(served, sheet), "?dry_run=true").json()
    assert body["dry_run"] is True
    assert len(body["changes"]) == len(sheet["items"])
    assert driver_of(served).everything() == before


def test_scores_beyond_the_drift_limit_are_held_until_an_admin_accepts(served: ServedPanel) -> None:
    sheet = export_sheet(served, judge="anna", all=True)
    raw = fill_sheet(served, sheet, always(5))
    assert apply_sheet(served, raw).json()["status"] == "held"
    body = apply_sheet(served, raw, "?accept_drift=agreed%20in%20the%20team").json()
    assert (body["status"], body["drift_accepted"]) == ("applied", "agreed in the team")


def test_a_wrong_sheet_is_refused_whole_with_every_mistake(served: ServedPanel) -> None:
    sheet = export_sheet(served, judge="anna", limit=6)
    raw = fill_sheet(served, sheet)
    raw["items"][0]["tips"][0]["scores"]["tone"] = 9
    raw["items"][1]["tips"][1]["scores"]["tone"] = "x"
    response = apply_sheet(served, raw)
    body = response.json()
    assert served.error(response) == (422, "sheet_refused")
    assert (body["status"], body["applied"], len(body["errors"])) == ("refused", 0, 2)
    assert body["error"]["path"] == "body.scores.tone"
    assert body["errors"][0]["item"] == raw["items"][0]["item"]


def test_a_sheet_of_another_experiment_is_refused(served: ServedPanel) -> None:
    served.store.ensure_experiment("tip-bench-other")
    raw = fill_sheet(served, export_sheet(served, judge="anna", limit=6))
    response = served.post(f"{API}/judge/tip-bench-other/apply", json=raw)
    assert served.error(response) == (422, "sheet_refused")
    assert response.json()["errors"][0]["field"] == "experiment"


def test_an_invalid_sheet_is_refused(served: ServedPanel) -> None:
    for content, kind, code in [
        (b"", "application/json", "sheet_refused"),
        (b"{", "application/json", "sheet_refused"),
        (b"[1]", "application/json", "sheet_refused"),
        (b'{"a": 1, "a": 2}', "application/json", "sheet_refused"),
        (b"a,b\n1,2\n", "text/csv", "sheet_refused"),
        (b"\xff\xff", "text/csv", "sheet_refused"),
        (b"{}", "text/plain", "invalid"),
        (b"{}", "application/x-www-form-urlencoded", "invalid"),
    ]:
        response = served.post(APPLY, content=content, headers={"Content-Type": kind})
        assert served.error(response) == (422, code)


def test_an_invalid_option_is_named(served: ServedPanel) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"limit": 0}, "body.limit"),
        ({"overlap": 2}, "body.overlap"),
        ({"odd": 1}, "body.odd"),
        ({"judge": "rules"}, "body.judge"),
        ({"judge": "x\ny"}, "body.judge"),
        ({"format": "xml"}, "body.format"),
        ({"seed": -1}, "body.seed"),
    ]
    for options, place in cases:
        response = served.post(SHEETS, json=options)
        assert (response.status_code, response.json()["error"]["path"]) == (422, place)


def test_a_suite_outside_the_allowed_folders_is_rejected(served: ServedPanel) -> None:
    response = served.post(SHEETS, json={"suite": "/etc"})
    assert served.error(response) == (403, "not_allowed")


def test_an_unknown_sheet_is_not_found(served: ServedPanel) -> None:
    assert served.error(served.post(SHEETS, json={"sheet": "nowhere"})) == (404, "not_found")


def test_without_pending_cells_the_request_is_refused_with_the_reason(served: ServedPanel) -> None:
    driver_of(served).judged_by("anna", everything=True)
    assert served.error(served.post(SHEETS, json={"judge": "anna"})) == (409, "not_enough_data")


def test_a_focus_without_a_tie_is_refused(served: ServedPanel) -> None:
    assert served.error(served.post(SHEETS, json={"focus": True})) == (409, "not_enough_data")


def test_an_apply_waits_for_the_lock_and_then_fails_with_a_message(
    served: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is that of `judge apply` on the command line."""
    monkeypatch.setattr(deps, "JUDGING_WAIT_S", 0.0)
    raw = fill_sheet(served, export_sheet(served, judge="anna", limit=6))
    server = canonical_url(served.panel.mlflow.open().url)
    lock = ResourceLock(served.home, f"judging at {server}", "a test")
    lock.acquire(wait=False, report=lambda _text: None)
    assert served.error(apply_sheet(served, raw)) == (409, "in_use")
    lock.release()
    assert apply_sheet(served, raw).json()["status"] == "applied"


def test_two_concurrent_applies_are_both_applied(served: ServedPanel) -> None:
    sheets = [fill_sheet(served, export_sheet(served, judge=name, limit=6)) for name in ("anna", "ben")]
    responses: list[Any] = []
    threads = [threading.Thread(target=lambda raw=raw: responses.append(apply_sheet(served, raw))) for raw in sheets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [response.json()["status"] for response in responses] == ["applied", "applied"]


# a judge's token


def test_a_judge_gets_a_sheet_under_its_own_name(served: ServedPanel) -> None:
    assert export_sheet(served, served.judge, limit=6)["judge"] == JUDGE


def test_a_judge_gets_no_sheet_under_another_name(served: ServedPanel) -> None:
    response = served.post(SHEETS, token=served.judge, json={"judge": "anna"})
    assert served.error(response) == (403, "forbidden")


def test_a_judge_may_not_request_options_that_reveal_controls(served: ServedPanel) -> None:
    cases: list[dict[str, Any]] = [
        {"seed": 1},
        {"focus": True},
        {"suite": "tips"},
        {"overlap": 1.0},
        {"rejudge": True},
        {"odd": 1},
    ]
    for options in cases:
        assert served.error(served.post(SHEETS, token=served.judge, json=options)) == (403, "forbidden")


def test_a_second_request_of_a_judge_gets_the_open_sheet(served: ServedPanel) -> None:
    """With many open sheets a judge would see which tips repeat: the controls."""
    first = export_sheet(served, served.judge, limit=6)
    assert export_sheet(served, served.judge, limit=10) == first
    apply_sheet(served, fill_sheet(served, first), token=served.judge)
    assert export_sheet(served, served.judge, limit=6)["sheet"] != first["sheet"]


def test_a_judge_who_has_done_little_of_a_sheet_gets_it_again(served: ServedPanel) -> None:
    first = export_sheet(served, served.judge, limit=12)
    apply_sheet(served, _fill_items(served, first, 1), token=served.judge)
    assert export_sheet(served, served.judge, limit=12, all=True)["sheet"] == first["sheet"]


def test_items_a_judge_left_out_are_not_on_the_next_sheet(served: ServedPanel) -> None:
    """Texts on both sheets would be answers, and all others of the first sheet controls."""
    first = export_sheet(served, served.judge, limit=24)
    apply_sheet(served, _fill_items(served, first, 2 * len(first["items"]) // 3), token=served.judge)
    second = export_sheet(served, served.judge, limit=24)
    assert second["sheet"] != first["sheet"]
    kept_first = stored_sheet(served, first["sheet"])
    left = {entry.run_id for entry in kept_first.unscored if entry.run_id}
    assert left
    assert left.isdisjoint(entry.run_id for entry in stored_sheet(served, second["sheet"]).entries)


def test_a_judge_may_not_request_a_sheet_too_small_to_measure_drift(
    served: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_judging, "MIN_ANSWERS", MIN_CONTROLS)
    assert served.error(served.post(SHEETS, token=served.judge, json={"limit": 19})) == (422, "invalid")
    batches = served.post(f"{API}/judge/{EXPERIMENT}/batches", token=served.judge, json={"limit": 19})
    assert served.error(batches) == (422, "invalid")
    assert export_sheet(served, served.judge, limit=20)["judge"] == JUDGE
    assert export_sheet(served, judge="anna", limit=19)["judge"] == "anna"


def test_a_judges_preview_is_the_same_whether_the_scores_would_be_held_or_not(served: ServedPanel) -> None:
    """A preview is not recorded: with the drift in it, a judge could find every control by trying."""
    sheet = export_sheet(served, served.judge, limit=40)
    previews = []
    for rule in (agreed, always(5)):
        preview = apply_sheet(served, fill_sheet(served, sheet, rule), "?dry_run=true", served.judge).json()
        assert len(preview.pop("changes")) == len(sheet["items"])
        previews.append(preview)
    assert previews[0] == previews[1]
    assert previews[0]["drift"] is None
    assert apply_sheet(served, fill_sheet(served, sheet, always(5)), token=served.judge).json()["status"] == "held"


def test_a_judge_may_revise_a_sheet_a_few_times_then_only_an_admin(served: ServedPanel) -> None:
    sheet = export_sheet(served, served.judge, limit=6)
    for score in (1, 2, 1, 2, 1, 2):
        assert apply_sheet(served, fill_sheet(served, sheet, always(score)), token=served.judge).status_code == 200
    once_more = fill_sheet(served, sheet, always(3))
    assert served.error(apply_sheet(served, once_more, token=served.judge)) == (403, "too_many_revisions")
    assert (
        apply_sheet(served, fill_sheet(served, sheet, always(2)), token=served.judge).status_code == 200
    )  # changes nothing
    assert apply_sheet(served, {**once_more, "judge": JUDGE}).status_code == 200


def _fill_items(served: ServedPanel, sheet: dict[str, Any], count: int) -> dict[str, Any]:
    """Fill the first `count` items of a sheet."""
    raw = fill_sheet(served, json.loads(json.dumps(sheet)))
    return {**raw, "items": [*raw["items"][:count], *sheet["items"][count:]]}


def test_two_concurrent_requests_of_a_judge_get_one_sheet(served: ServedPanel) -> None:
    sheets: list[str] = []
    threads = [
        threading.Thread(target=lambda: sheets.append(export_sheet(served, served.judge, limit=6)["sheet"]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sheets) == 4
    assert len(set(sheets)) == 1


def test_a_judge_cannot_get_another_judges_sheet(served: ServedPanel) -> None:
    other = export_sheet(served, judge="anna", limit=6)["sheet"]
    nowhere = served.post(SHEETS, token=served.judge, json={"sheet": "nowhere"})
    theirs = served.post(SHEETS, token=served.judge, json={"sheet": other})
    assert served.error(theirs) == served.error(nowhere) == (404, "not_found")


def test_a_judge_applies_its_own_sheet(served: ServedPanel) -> None:
    raw = fill_sheet(served, export_sheet(served, served.judge, all=True))
    body = apply_sheet(served, raw, token=served.judge).json()
    assert (body["status"], body["judge"]) == ("applied", JUDGE)


def test_a_judge_cannot_apply_another_judges_sheet(served: ServedPanel) -> None:
    before = driver_of(served).everything()
    raw = fill_sheet(served, export_sheet(served, judge="anna", limit=6))
    assert served.error(apply_sheet(served, raw, token=served.judge)) == (422, "sheet_refused")
    assert set(driver_of(served).scores()) == set(driver_of(served).cells())
    assert {run: texts for run, (_, texts) in before.items() if "artifact:scores.json" in texts} == {}


def test_a_judge_cannot_apply_under_another_name(served: ServedPanel) -> None:
    raw = fill_sheet(served, export_sheet(served, limit=6), judge="anna")
    assert served.error(apply_sheet(served, raw, "?judge=anna", token=served.judge)) == (403, "forbidden")
    assert served.error(apply_sheet(served, raw, token=served.judge)) == (422, "sheet_refused")


def test_a_judge_cannot_accept_its_own_drift(served: ServedPanel) -> None:
    raw = fill_sheet(served, export_sheet(served, served.judge, all=True), always(5))
    assert apply_sheet(served, raw, token=served.judge).json()["status"] == "held"
    response = apply_sheet(served, raw, "?accept_drift=because", token=served.judge)
    assert served.error(response) == (403, "forbidden")


def test_a_judge_learns_of_the_drift_only_when_the_sheet_is_whole(served: ServedPanel) -> None:
    sheet = export_sheet(served, served.judge, all=True)
    raw = fill_sheet(served, sheet)
    part = {**raw, "items": raw["items"][:-1]}
    for token in (served.judge, served.admin):
        early = apply_sheet(served, part, token=token).json()
        assert (early["status"], early["drift"], early["self_agreement"]) == ("applied", None, None)
        assert early["unchecked"] == len(part["items"])
    assert "scales" in apply_sheet(served, part, "?final=true", token=served.judge).json()["drift"]
    assert apply_sheet(served, raw, token=served.judge).json()["drift"] == {"verdict": "ok"}


def test_admins_see_the_status_of_judging(served: ServedPanel) -> None:
    driver_of(served).judged_by("anna", everything=True)
    body = served.get(f"{API}/judges/{EXPERIMENT}").json()
    assert (body["judged"], [judge["judge"] for judge in body["judges"]]) == (48, ["anna"])


def test_duels_of_an_unknown_sheet_are_refused(served: ServedPanel) -> None:
    raw = {"format": "tipbench-duel/1", "sheet": "nowhere", "experiment": EXPERIMENT, "items": []}
    assert served.error(apply_sheet(served, raw)) == (422, "sheet_refused")
    assert served.error(apply_sheet(served, raw, "?accept_drift=x")) == (422, "invalid")
