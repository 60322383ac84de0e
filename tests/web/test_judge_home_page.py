"""The judge's page without scripts: export a blind sheet, preview and apply the same file."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest

from support.judging import agreed, always, fill, fill_csv
from tipbench.web.auth import Role
from web.judge_client import stored_sheet
from web.panels import EXPERIMENT, HTML, JUDGE, ServedPanel


@pytest.fixture
def judge(served: ServedPanel) -> ServedPanel:
    """A judge's browser."""
    served.log_in(served.judge)
    return served


def csrf_of(served: ServedPanel) -> str:
    page = served.get("/judge", token=None, headers=HTML)
    found = re.search(r'name="csrf" value="([^"]+)"', page.text)
    assert found
    return found[1]


def download_sheet(served: ServedPanel, **fields: str) -> Any:
    data = {"csrf": csrf_of(served), "experiment": EXPERIMENT, "format": "json", "limit": "40", **fields}
    return served.post("/judge/sheet", token=None, headers=HTML, data=data)


def upload_sheet(
    served: ServedPanel, content: str | bytes, *, experiment: str = EXPERIMENT, name: str = "sheet.json"
) -> Any:
    data = {"csrf": csrf_of(served), "experiment": experiment}
    return served.post("/judge/preview", token=None, headers=HTML, data=data, files={"sheet": (name, content)})


def test_the_page_names_the_effort_of_a_new_batch(judge: ServedPanel) -> None:
    page = judge.get(f"/judge?experiment={EXPERIMENT}", token=None, headers=HTML).text
    assert "about 360 scores: 40 items of 3 tips, 3 scales" in page


def apply_url(page: str) -> str:
    found = re.search(r'action="(/judge/uploads/[0-9a-f]{32}/apply\?[^"]*)"', page)
    assert found
    return unescape(found[1])


def apply_upload(served: ServedPanel, url: str) -> Any:
    response = served.post(url, token=None, headers=HTML, data={"csrf": csrf_of(served)})
    assert response.status_code == 303, response.text
    return served.get(response.headers["location"], token=None, headers=HTML)


def test_the_page_has_a_field_for_the_experiment_and_lists_none(judge: ServedPanel) -> None:
    page = judge.get("/judge", token=None, headers=HTML)
    assert page.status_code == 200
    assert JUDGE in page.text
    assert EXPERIMENT not in page.text


def test_an_unknown_experiment_is_reported_at_its_field(judge: ServedPanel) -> None:
    for name in ["tip-bench-nowhere", "nonsense", "<b>", "tip-bench-" + "x" * 150]:
        page = judge.get("/judge", token=None, headers=HTML, params={"experiment": name})
        assert page.status_code == 404
        assert re.search(r'id="experiment"[^>]*aria-invalid="true"', page.text)
        assert "<b>" not in page.text


def test_a_sheet_is_fetched_as_a_file_and_the_same_again(judge: ServedPanel) -> None:
    first, again = download_sheet(judge), download_sheet(judge)
    assert first.headers["content-disposition"].startswith("attachment")
    assert first.json()["judge"] == JUDGE
    assert again.content == first.content


def test_a_sheet_may_be_fetched_for_a_spreadsheet(judge: ServedPanel) -> None:
    sheet = download_sheet(judge, format="csv")
    assert sheet.headers["content-type"] == "text/csv; charset=utf-8"


def test_an_invalid_option_is_reported_at_its_field(judge: ServedPanel) -> None:
    for field, value in [("limit", "0"), ("limit", "many"), ("limit", "9" * 30), ("format", "xls")]:
        page = download_sheet(judge, **{field: value})
        assert page.status_code == 422
        assert re.search(rf'id="{field}"[^>]*aria-invalid="true"', page.text)


def test_the_preview_writes_nothing_and_the_same_file_is_applied(judge: ServedPanel) -> None:
    sheet = download_sheet(judge).json()["sheet"]
    raw = fill(stored_sheet(judge, sheet), agreed)
    page = upload_sheet(judge, json.dumps(raw))
    assert page.status_code == 200
    assert "Nothing is saved yet" in page.text
    assert not stored_sheet(judge, sheet).scores
    done = apply_upload(judge, apply_url(page.text))
    assert "Received and complete" in done.text
    assert len(stored_sheet(judge, sheet).scores) == len(raw["items"])


def test_applying_twice_changes_nothing(judge: ServedPanel) -> None:
    sheet = download_sheet(judge).json()["sheet"]
    url = apply_url(upload_sheet(judge, json.dumps(fill(stored_sheet(judge, sheet)))).text)
    first = apply_upload(judge, url)
    scores = stored_sheet(judge, sheet).scores
    assert apply_upload(judge, url).text.count("Received") == first.text.count("Received")
    assert stored_sheet(judge, sheet).scores == scores


def test_a_spreadsheet_is_applied_too(judge: ServedPanel) -> None:
    text = download_sheet(judge, format="csv").content.decode()
    found = re.search(r"sheet-([0-9a-z-]+)\.csv", download_sheet(judge, format="csv").headers["content-disposition"])
    assert found
    filled = fill_csv(text, fill(stored_sheet(judge, found[1])))
    page = upload_sheet(judge, filled, name="scored.csv")
    assert "scored.csv" in page.text
    assert "Received" in apply_upload(judge, apply_url(page.text)).text


def test_a_sheet_beyond_the_limit_is_held_and_the_next_step_is_shown(judge: ServedPanel) -> None:
    sheet = download_sheet(judge).json()["sheet"]
    page = upload_sheet(judge, json.dumps(fill(stored_sheet(judge, sheet), always(5))))
    done = apply_upload(judge, apply_url(page.text)).text
    assert "Not counted yet" in done
    assert "too far off" in done


def test_mistakes_are_listed_and_nothing_is_stored(judge: ServedPanel) -> None:
    sheet = download_sheet(judge).json()["sheet"]
    raw = fill(stored_sheet(judge, sheet))
    raw["items"][0]["tips"][0]["scores"]["tone"] = 9
    raw["items"][1]["tips"][0]["scores"]["tone"] = "<script>"
    page = upload_sheet(judge, json.dumps(raw))
    assert page.status_code == 422
    assert "2 errors" in page.text
    assert "<script>" not in page.text.replace('<script type="module"', "")
    assert not stored_sheet(judge, sheet).scores


def test_an_invalid_sheet_is_refused_with_a_message(judge: ServedPanel) -> None:
    for content in [b"nonsense", b"\xff\xfe\x00", b"{", b"[]", b"{}"]:
        page = upload_sheet(judge, content)
        assert page.status_code == 422
        assert "Nothing was saved" in page.text


def test_a_missing_file_is_reported_at_its_field(judge: ServedPanel) -> None:
    page = upload_sheet(judge, b"")
    assert page.status_code == 422
    assert re.search(r'id="sheet"[^>]*aria-invalid="true"', page.text)


def test_an_upload_belongs_to_its_sender(judge: ServedPanel) -> None:
    sheet = download_sheet(judge).json()["sheet"]
    url = apply_url(upload_sheet(judge, json.dumps(fill(stored_sheet(judge, sheet)))).text)
    _, other = judge.panel.authenticator.tokens.create(Role.JUDGE, "somebody-else", life_s=60)
    assert judge.error(judge.post(url, token=other)) == (404, "not_found")
    assert judge.error(judge.post(url)) == (404, "not_found")
    assert not stored_sheet(judge, sheet).scores


def test_an_admin_also_judges_blind_under_their_own_name(served: ServedPanel) -> None:
    served.log_in(served.admin)
    sheet = download_sheet(served).json()
    assert sheet["judge"] == "boss"
    assert download_sheet(served).json() == sheet
