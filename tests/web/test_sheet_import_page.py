"""A filled sheet by the browser: uploaded, previewed, and then applied unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.judging import EXPERIMENT, SheetDriver, always, fill, fill_csv, record_cells
from tipbench.judge.export import ExportResult
from tipbench.judge.sheet_file import sheet_csv
from tipbench.web import deps, judge_service
from tipbench.web.judge_service import (
    ADMINS_QUOTA,
    JUDGES_QUOTA,
    MAX_UPLOADS,
    UPLOAD_LIFE_S,
    UploadQuota,
    UploadStore,
    uploads_of,
)
from web.judge_client import driver_of
from web.panels import HTML, ServedPanel, serve_panel
from web.sample_pages import page_text

JUDGES = f"/experiments/{EXPERIMENT}/judges"
IMPORT = f"{JUDGES}/import"


def upload(served: ServedPanel, content: bytes | dict[str, Any], name: str = "sheet.json", **options: Any) -> Any:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    fields = options.pop("fields", {})
    return served.post(IMPORT, files={"file": (name, body)}, data=fields, headers=HTML, **options)


def preview_of(served: ServedPanel, content: bytes | dict[str, Any], **options: Any) -> tuple[str, Any]:
    sent = upload(served, content, **options)
    assert sent.status_code == 303, sent.text
    place = str(sent.headers["location"])
    return place, served.get(place, headers=HTML)


def confirm(served: ServedPanel, place: str, page: str, **fields: str) -> Any:
    digest = re.search(r'name="sha256" value="(\w+)"', page)
    assert digest, page
    return served.post(place, data={"sha256": digest[1], **fields}, headers=HTML)


@pytest.fixture
def exported(served: ServedPanel) -> ExportResult:
    return driver_of(served).export("anna", limit=6)


def test_the_preview_shows_every_change_and_writes_nothing(served: ServedPanel, exported: ExportResult) -> None:
    raw, before = fill(exported.stored), driver_of(served).everything()
    _, page = preview_of(served, raw)
    assert page.status_code == 200
    for item in raw["items"]:
        assert item["item"] in page.text
    assert f"items that change {len(raw['items'])}" in page_text(page.text)
    assert driver_of(served).everything() == before


def test_the_previewed_file_is_the_one_applied(served: ServedPanel, exported: ExportResult) -> None:
    raw = fill(exported.stored)
    place, page = preview_of(served, raw)
    response = confirm(served, place, page.text)
    assert (response.status_code, response.headers["location"]) == (303, place)
    done = served.get(place, headers=HTML).text
    assert f"{len(raw['items'])} items of sheet {raw['sheet']} by anna count now" in page_text(done)
    judged = [run for run in driver_of(served).cells().values() if run.state == "judged"]
    assert len(judged) == exported.n_cells


def test_an_old_and_a_new_score_stand_side_by_side(served: ServedPanel, exported: ExportResult) -> None:
    raw = fill(exported.stored)
    for tip in raw["items"][0]["tips"]:
        tip["scores"]["tone"] = 3
    driver_of(served).apply(raw)
    for tip in raw["items"][0]["tips"]:
        tip["scores"]["tone"] = 4
    _, page = preview_of(served, raw)
    assert "3.00 → 4.00" in page_text(page.text)
    assert "items that change 1 " in page_text(page.text)


def test_a_file_without_changes_is_reported(served: ServedPanel, exported: ExportResult) -> None:
    raw = fill(exported.stored)
    driver_of(served).apply(raw)
    _, page = preview_of(served, raw)
    assert "This file has no changes" in page.text


def test_unfinished_items_are_counted_and_stay_pending(served: ServedPanel, exported: ExportResult) -> None:
    raw = fill(exported.stored)
    raw["items"][0]["tips"][0]["scores"]["tone"] = None
    place, page = preview_of(served, raw)
    assert "unfinished, stay pending 1 " in page_text(page.text)
    confirm(served, place, page.text)
    assert "unfinished, still pending 1 " in page_text(served.get(place, headers=HTML).text)


def test_a_spreadsheet_is_accepted_too(served: ServedPanel, exported: ExportResult) -> None:
    text = fill_csv(sheet_csv(exported.stored.sheet), fill(exported.stored), delimiter=";")
    place, page = preview_of(served, text.encode("utf-8-sig"), name="sheet.csv")
    assert confirm(served, place, page.text).status_code == 303
    assert sum(run.state == "judged" for run in driver_of(served).cells().values()) == exported.n_cells


def test_the_judge_of_an_unnamed_sheet_is_given_with_the_file(served: ServedPanel) -> None:
    raw = fill(driver_of(served).export(None, limit=6).stored)
    _, refused = preview_of(served, raw)
    assert refused.status_code == 422
    place, page = preview_of(served, raw, fields={"judge": "dora"})
    confirm(served, place, page.text)
    assert "by dora count now" in page_text(served.get(place, headers=HTML).text)


def test_every_mistake_is_listed_with_its_place(served: ServedPanel, exported: ExportResult) -> None:
    raw, before = fill(exported.stored), driver_of(served).everything()
    raw["items"][0]["tips"][0]["scores"]["tone"] = 9
    raw["items"][1]["tips"][2]["tip"] = "<script>alert(1)</script>"
    _, page = preview_of(served, raw)
    text = page_text(page.text)
    assert page.status_code == 422
    assert "2 errors" in text
    assert f"{raw['items'][0]['item']} 1 scores.tone expected a whole number from 1 to 5" in text
    assert f"{raw['items'][1]['item']} 3 tip expected the text as exported" in text
    assert "<script>alert(1)" not in page.text
    assert driver_of(served).everything() == before


def test_an_invalid_sheet_is_refused_with_a_sentence(served: ServedPanel) -> None:
    for content, words in [
        (b"{", "not valid JSON"),
        (b"[1]", "expected an object"),
        (b'{"a": 1, "a": 2}', "expected each key once"),
        (b"\xff\xfe\x00", "UTF-16"),
        (b"\xc3(", "UTF-8"),
        (b"hello", "expected a sheet"),
        (b"a,b\n1,2\n", "expected a sheet"),
        (b"[" * 100_000, "more deeply than any sheet"),
        (b"{}", "experiment"),
        (b'{"format": "tipbench-sheet/1", "experiment": "tip-bench-other", "sheet": "x"}', "as in the URL"),
    ]:
        _, page = preview_of(served, content)
        assert page.status_code == 422
        assert words in page_text(page.text)
        assert "nothing was changed" in page.text


def test_without_a_file_the_form_shows_an_error(served: ServedPanel) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "Choose the filled sheet first"),
        ({"file": ("e.json", b"")}, "empty"),
    ]
    for files, words in cases:
        response = served.post(IMPORT, files=files, data={"judge": ""}, headers=HTML)
        assert response.status_code == 422
        assert words in response.text


def test_a_reserved_name_is_reported_at_its_field(served: ServedPanel, exported: ExportResult) -> None:
    response = upload(served, fill(exported.stored), fields={"judge": "rules"})
    assert response.status_code == 422
    assert re.search(r'name="judge"[^>]*aria-invalid="true"', response.text)


def test_a_broken_form_is_a_client_error(served: ServedPanel) -> None:
    for kind, body in [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"--c\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: odd\r\n\r\nx\r\n--b--\r\n"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 30),
        ("text/plain", b"x"),
        ("application/x-www-form-urlencoded", b"file=x"),
    ]:
        response = served.post(IMPORT, content=body, headers={"Content-Type": kind, **HTML})
        assert response.status_code == 422


def test_a_file_that_is_too_large_is_refused_with_a_sentence(
    served: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tipbench.web import security

    monkeypatch.setattr(security, "MAX_SHEET_BYTES", 2_000_000)
    assert upload(served, b"{" + b" " * 1_500_000).status_code == 303
    response = upload(served, b"{" + b" " * 2_000_000)
    assert response.status_code == 413
    assert "at most 2 MB" in response.text


def test_beyond_the_limit_the_scores_are_held_unless_a_reason_is_given(served: ServedPanel) -> None:
    raw = fill(driver_of(served).export("anna", everything=True).stored, always(5))
    place, page = preview_of(served, raw)
    assert "too high" not in page.text, "a preview has no verdict"
    confirm(served, place, page.text)
    held = page_text(served.get(place, headers=HTML).text)
    assert "The scores are saved but do not count yet" in held
    assert re.search(r"Relevance is scored \d\.\d+ too high", held)
    place, page = preview_of(served, raw)
    confirm(served, place, page.text, reason="the references were wrong")
    assert "drift accepted the references were wrong" in page_text(served.get(place, headers=HTML).text)
    assert all(run.state == "judged" for run in driver_of(served).cells().values())


def test_confirming_twice_applies_once(served: ServedPanel, exported: ExportResult) -> None:
    place, page = preview_of(served, fill(exported.stored))
    confirm(served, place, page.text)
    after = driver_of(served).everything()
    assert confirm(served, place, page.text).status_code == 303
    assert driver_of(served).everything() == after


def test_another_file_than_the_previewed_one_is_not_applied(served: ServedPanel, exported: ExportResult) -> None:
    before = driver_of(served).everything()
    place, _ = preview_of(served, fill(exported.stored))
    for digest in ("", "0" * 64, "é"):
        response = served.post(place, data={"sha256": digest}, headers=HTML)
        assert (response.status_code, "another file" in response.text) == (409, True)
    assert driver_of(served).everything() == before


def test_an_upload_belongs_to_its_sender_and_experiment(served: ServedPanel, exported: ExportResult) -> None:
    from tipbench.web.auth import Role

    _, other = served.panel.authenticator.tokens.create(Role.ADMIN, "second", life_s=3600)
    place, page = preview_of(served, fill(exported.stored))
    record_cells(served.store, experiment="tip-bench-other", n_scenarios=1)
    assert served.get(place, token=other, headers=HTML).status_code == 404
    assert served.get(place.replace(EXPERIMENT, "tip-bench-other"), headers=HTML).status_code == 404
    digest = re.search(r'name="sha256" value="(\w+)"', page.text)
    assert digest
    assert served.post(place, token=other, data={"sha256": digest[1]}, headers=HTML).status_code == 404


def test_after_a_restart_the_file_must_be_uploaded_again(
    served: ServedPanel, exported: ExportResult, home: Path
) -> None:
    place, page = preview_of(served, fill(exported.stored))
    served.app.state.uploads = UploadStore()
    response = served.get(place, headers=HTML)
    assert (response.status_code, "Upload the file again" in response.text) == (404, True)
    assert confirm(served, place, page.text).status_code == 404


def test_a_browser_sends_its_token_within_the_form(served: ServedPanel, exported: ExportResult) -> None:
    csrf, raw = served.log_in(served.admin), fill(exported.stored)
    assert upload(served, raw, token=None).status_code == 403
    assert upload(served, raw, token=None, fields={"csrf": "0" * len(csrf)}).status_code == 403
    assert upload(served, raw, token=None, fields={"csrf": csrf}).status_code == 303


def test_a_files_name_is_shown_as_text(served: ServedPanel, exported: ExportResult) -> None:
    _, page = preview_of(served, fill(exported.stored), name="<img src=x onerror=alert(1)>\u202e.json")
    assert "<img src=x" not in page.text
    assert "&lt;img src=x onerror=alert(1)&gt;" in page.text


def test_during_another_apply_the_page_shows_to_try_again(
    served: ServedPanel, exported: ExportResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tipbench.files import ResourceLock
    from tipbench.http import canonical_url

    monkeypatch.setattr(deps, "JUDGING_WAIT_S", 0.0)
    place, page = preview_of(served, fill(exported.stored))
    server = canonical_url(served.panel.mlflow.open().url)
    lock = ResourceLock(served.home, f"judging at {server}", "a test")
    lock.acquire(wait=False, report=lambda _text: None)
    response = confirm(served, place, page.text)
    assert (response.status_code, "try again shortly" in response.text) == (409, True)
    lock.release()
    assert confirm(served, place, page.text).status_code == 303


def test_duels_of_an_unknown_sheet_are_refused(served: ServedPanel) -> None:
    raw = {"format": "tipbench-duel/1", "sheet": "nowhere", "experiment": EXPERIMENT, "items": []}
    _, page = preview_of(served, raw)
    assert page.status_code == 422


def test_an_import_works_on_a_real_mlflow(home: Path, mlflow_url: str) -> None:
    from tipbench.record.mlflow import MlflowStore

    name = "tip-bench-import/ü 1"
    store = MlflowStore(mlflow_url)
    experiment = record_cells(store, experiment=name, n_scenarios=2, models=("alpha:135m",), prompts="v1,v2-mentor")
    raw = fill(SheetDriver(store, experiment).export("anna").stored)
    here = "/experiments/tip-bench-import%2F%C3%BC%201"
    try:
        with serve_panel(home, find_mlflow=True, environment={"MLFLOW_TRACKING_URI": mlflow_url}) as served:
            files = {"file": ("sheet.json", json.dumps(raw).encode())}
            place = served.post(f"{here}/judges/import", files=files, headers=HTML).headers["location"]
            page = served.get(place, headers=HTML)
            assert page.status_code == 200, page.text
            assert confirm(served, place, page.text).status_code == 303
            assert "Applied" in served.get(place, headers=HTML).text
            assert "4 answers of 4 judged" in page_text(served.get(f"{here}/judges", headers=HTML).text)
            runs = served.get(f"{here}/runs?state=judged", headers=HTML).text
            run = re.search(r"/runs/([0-9a-f]{32})", runs)
            assert run
            shown = served.get(f"{here}/runs/{run[1]}", headers=HTML).text
            assert "anna" in page_text(shown)
            assert f'href="{experiment.run_url(run[1])}"' in shown
    finally:
        store.close()


# uploads awaiting confirmation


def test_uploads_expire() -> None:
    now = [0.0]
    uploads = UploadStore(lambda: now[0])
    upload = uploads.add("me", "tip-bench-a", "x.json", b"{}")
    now[0] = UPLOAD_LIFE_S - 1
    assert uploads.find(upload.id, "me", "tip-bench-a") == upload
    now[0] = UPLOAD_LIFE_S + 1
    assert uploads.find(upload.id, "me", "tip-bench-a") is None
    assert len(uploads) == 0


def test_uploads_are_bounded_in_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = UploadStore()
    added = [uploads.add(f"judge {n}", "tip-bench-a", "x", b"12345") for n in range(MAX_UPLOADS + 5)]
    assert len(uploads) == MAX_UPLOADS
    assert uploads.find(added[0].id, "judge 0", "tip-bench-a") is None
    monkeypatch.setattr(judge_service, "MAX_UPLOAD_BYTES", 12)
    newest = uploads.add("me", "tip-bench-a", "x", b"1234567")
    assert len(uploads) == 2
    large = uploads.add("me", "tip-bench-a", "x", b"1" * 100)
    assert uploads.find(large.id, "me", "tip-bench-a") == large
    assert uploads.find(newest.id, "me", "tip-bench-a") is None


def test_uploads_of_one_token_evict_only_its_own() -> None:
    cases: list[UploadQuota] = [JUDGES_QUOTA, ADMINS_QUOTA]
    for quota in cases:
        uploads = UploadStore()
        first = uploads.add("me", "tip-bench-a", "x", b"1")
        others = [uploads.add("you", "tip-bench-a", "x", b"1", quota=quota) for _ in range(quota.max_files + 3)]
        assert len(uploads) == 1 + quota.max_files
        assert uploads.find(first.id, "me", "tip-bench-a") == first
        assert uploads.find(others[2].id, "you", "tip-bench-a") is None


def test_one_tokens_uploads_are_bounded_in_size() -> None:
    uploads = UploadStore()
    added = [uploads.add("me", "tip-bench-a", "x", b"12345", quota=UploadQuota(9, 12)) for _ in range(3)]
    assert [uploads.find(each.id, "me", "tip-bench-a") is not None for each in added] == [False, True, True]


def test_an_applied_upload_frees_its_content() -> None:
    uploads = UploadStore()
    upload = uploads.add("me", "tip-bench-a", "x", b"12345")
    uploads.save_outcome(upload, {"status": "applied"})
    found = uploads.find(upload.id, "me", "tip-bench-a")
    assert found is not None
    assert (found.content, found.outcome) == (b"", {"status": "applied"})


def test_an_upload_with_a_judges_token_is_not_kept(served: ServedPanel, exported: ExportResult) -> None:
    assert upload(served, fill(exported.stored), token=served.judge).status_code == 403
    assert len(uploads_of(served.app)) == 0
