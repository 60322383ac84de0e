"""The judges' page: status of judging, drift, open sheets, and accepting held ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from support.judging import EXPERIMENT, always, honest
from tipbench.errors import MlflowError
from tipbench.judge.charts import MAX_POINTS, drift_chart, drift_points, drift_sentence
from tipbench.judge.sheet_store import find_sheet
from tipbench.judge.status import SheetSummary
from tipbench.web.panel.judges import alpha_words, drift_summary
from web.judge_client import driver_of
from web.panels import API, HTML, ServedPanel
from web.sample_pages import SamplePages, page_text, serve_sample_pages

JUDGES = f"/experiments/{EXPERIMENT}/judges"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplePages]:
    with serve_sample_pages(tmp_path_factory.mktemp("judges") / "home") as pages:
        yield pages


def get_judges_page(served: ServedPanel, query: str = "") -> str:
    response = served.get(JUDGES + query, headers=HTML)
    assert response.status_code == 200, response.text
    return str(response.text)


def post_form(served: ServedPanel, place: str, fields: dict[str, str], **options: Any) -> Any:
    return served.post(f"{JUDGES}/{place}", data=fields, headers=HTML, **options)


def held_sheet(served: ServedPanel, judge: str = "carla") -> str:
    applied = driver_of(served).judge_as(judge, always(5), everything=True)
    assert applied.held
    return applied.sheet


# content


def test_the_numbers_are_those_of_the_api(pages: SamplePages) -> None:
    page = pages.get("judges").text
    found = re.search(r'href="([^"]+)">JSON', page)
    assert found
    state = pages.served.get(unescape(found[1])).json()
    text = page_text(page)
    assert f"{state['judged']} answers of {state['cells']} judged, {state['floored']} with no usable answer" in text
    assert f"pending {state['pending'] - state['held']} judged twice or more {state['twice']}" in text
    for judge in state["judges"]:
        assert judge["judge"] in text


def test_each_judge_has_a_verdict_in_words(pages: SamplePages) -> None:
    text = page_text(pages.get("judges").text)
    assert "anna on the hidden controls ✓ fine No drift" in text
    assert "ben on the hidden controls ! too far off" in text
    assert re.search(r"Relevance is scored \d\.\d\d too high, more than chance explains\.", text)
    assert "rules on the hidden controls" in text


def test_a_held_judge_comes_first_with_the_decision_open_and_never_as_counted(pages: SamplePages) -> None:
    page = pages.get("judges").text
    text = page_text(page)
    assert text.index("Needs your decision") < text.index("Judging status")
    card = page_text(page.split('id="held"')[1].split('id="standing"')[0])
    assert re.search(rf"ben {pages.content.held_sheet} \S held", card)
    assert "Reason for accepting" in card
    assert "<details" not in page.split('id="held"')[1].split('id="standing"')[0]
    rows = re.findall(r'<th scope="row"><bdi>(\w+)</bdi>.*?data-label="Scores">(.*?)</td>', page, re.DOTALL)
    shown = [(name, page_text(scores)) for name, scores in rows]
    assert shown[0][0] == "ben"
    assert shown[0][1].endswith("held")
    assert dict(shown)["anna"].endswith("count")
    assert shown[-1][1].endswith("provisional")


def test_a_judges_trends_over_all_sheets_are_shown(pages: SamplePages) -> None:
    text = page_text(pages.get("judges").text)
    assert re.search(r"Over all sheets .*relevance, mean of 1 sheet [+−]\d\.\d\d sums [+±]\d", text)
    assert "error growth over a sheet" in text


def test_agreement_is_given_in_numbers_and_words(pages: SamplePages) -> None:
    text = page_text(pages.get("judges").text)
    assert "Krippendorff's alpha over the" in text
    assert re.search(r"relevance [−\d.]+ (good|fair|weak)", text)


def test_every_judge_and_scale_has_a_chart_in_both_themes(pages: SamplePages) -> None:
    page = pages.get("judges").text
    light = [unescape(each) for each in re.findall(r'<img src="([^"]*drift\.svg[^"]*)"', page)]
    dark = [unescape(each) for each in re.findall(r'srcset="([^"]*drift\.svg[^"]*)"', page)]
    assert len(light) == len(dark) == 9
    assert all(f"{one}&theme=dark" == other for one, other in zip(light, dark, strict=True))
    pictures = [pages.served.get(url) for url in (light[0], dark[0])]
    assert [each.headers["content-type"] for each in pictures] == ["image/svg+xml"] * 2
    assert pictures[0].content != pictures[1].content
    for each in pictures:
        assert ET.fromstring(each.content).get("width") == "320"  # noqa: S314 - we have drawn it
    assert re.search(r'width="320" height="160"', page)


def test_a_chart_of_an_unknown_judge_is_not_found(pages: SamplePages) -> None:
    assert pages.get("judges", "drift.svg", query="?judge=nobody&scale=tone").status_code == 404
    assert pages.get("judges", "drift.svg", query="?judge=anna&scale=odd").status_code == 404
    assert pages.get("judges", "drift.svg", query="?judge=anna&scale=tone&theme=odd").status_code == 422
    assert pages.get("judges", "drift.svg").status_code == 422


def test_every_sheet_is_listed_with_its_state(pages: SamplePages) -> None:
    text = page_text(pages.get("judges").text)
    assert re.search(rf"{pages.content.held_sheet} ben \S held Decide", text)
    assert re.search(rf"{pages.content.open_sheet} ben ↗ exported 0 of \d+", text)


def test_without_answers_the_page_shows_how_to_collect(empty: ServedPanel) -> None:
    empty.store.ensure_experiment("tip-bench-new")
    page = empty.get("/experiments/tip-bench-new/judges", headers=HTML).text
    assert "No answers to judge yet" in page
    assert 'href="/run">Start a run' in page


def test_without_judges_the_page_shows_the_next_step(served: ServedPanel) -> None:
    text = page_text(get_judges_page(served))
    assert "No scores count yet." in text
    assert "No sheets yet." in text


# exporting sheets


def test_an_exported_sheet_has_the_requested_format(served: ServedPanel) -> None:
    response = post_form(served, "export", {"judge": "anna", "limit": "6", "overlap": "20", "format": "csv"})
    assert response.status_code == 303
    page = get_judges_page(served, response.headers["location"].removeprefix(JUDGES).partition("#")[0])
    link = re.search(r'class="button primary small" href="([^"]+)"[^>]*>Download CSV', page)
    assert link
    file = served.get(link[1])
    assert file.headers["content-disposition"].startswith('attachment; filename="sheet-')
    assert file.headers["content-type"].startswith("text/csv")
    assert '"row"' in file.text or "row," in file.text


def test_a_download_has_the_bytes_of_the_api(served: ServedPanel) -> None:
    applied = driver_of(served).judge_as("anna", limit=6)
    for filled in (False, True):
        for form in ("json", "csv"):
            download = served.get(f"{JUDGES}/sheets/{applied.sheet}.{form}?filled={str(filled).lower()}")
            body = {"sheet": applied.sheet, "filled": filled, "format": form}
            assert download.content == served.post(f"{API}/judge/{EXPERIMENT}/sheets", json=body).content
            assert download.headers["content-disposition"].startswith("attachment")


def test_the_options_of_the_form_are_those_of_the_sheet(served: ServedPanel) -> None:
    driver_of(served).judge_as("anna", everything=True)
    response = post_form(served, "export", {"judge": "ben", "limit": "21", "all": "true", "format": "json"})
    sheet = re.search(r"made=(\w+)", response.headers["location"])
    assert sheet
    judging = find_sheet(served.store, driver_of(served).experiment, sheet[1])
    assert judging is not None
    assert (judging.owner, sum(entry.kind == "cell" for entry in judging.entries)) == ("ben", 21)


def test_an_invalid_field_is_reported_at_its_place(served: ServedPanel) -> None:
    cases: list[tuple[dict[str, str], str, str]] = [
        ({"limit": "0"}, "limit", "greater than or equal to 1"),
        ({"limit": "many"}, "limit", "valid integer"),
        ({"overlap": "120"}, "overlap", "A share from 0 to 100 %"),
        ({"overlap": "<b>"}, "overlap", "&lt;b&gt;"),
        ({"overlap": "nan"}, "overlap", "A share from 0 to 100 %"),
        ({"judge": "rules"}, "judge", "rules"),
        ({"format": "xml"}, "format", "json"),
    ]
    for fields, field, words in cases:
        response = post_form(served, "export", {"judge": "anna", **fields})
        assert response.status_code == 422
        error = re.search(rf'id="{field}-error">(.*?)</p>', response.text, re.DOTALL)
        assert error
        assert words in error[1]
        assert f'value="{fields.get("judge", "anna")}"' in response.text
        assert driver_of(served).everything().keys() == driver_of(served).cells().keys()


def test_without_pending_cells_the_page_shows_it(served: ServedPanel) -> None:
    driver_of(served).judge_as("anna", everything=True)
    response = post_form(served, "export", {"judge": "anna"})
    assert response.status_code == 409
    assert "No sheet created" in response.text
    assert "all 48 answers are scored" in response.text


def test_a_focus_without_a_tie_is_reported(served: ServedPanel) -> None:
    response = post_form(served, "export", {"focus": "true"})
    assert (response.status_code, "focus needs judged cells" in response.text) == (409, True)


def test_an_unknown_sheet_is_not_found(served: ServedPanel) -> None:
    assert served.get(f"{JUDGES}/sheets/nowhere.json", headers=HTML).status_code == 404
    assert served.get(f"{JUDGES}/sheets/nowhere.xml", headers=HTML).status_code in (404, 422)


# held sheets


def test_a_held_sheet_counts_once_a_reason_is_given(served: ServedPanel) -> None:
    sheet = held_sheet(served)
    response = post_form(served, "accept", {"sheet": sheet, "reason": "she was <b>right</b>"})
    assert response.status_code == 303
    page = get_judges_page(served, f"?accepted={sheet}")
    assert f"The scores of sheet {sheet} count now" in page
    assert "she was &lt;b&gt;right&lt;/b&gt;" in page
    assert all(run.state == "judged" for run in driver_of(served).cells().values())


def test_a_held_sheet_is_not_accepted_without_a_reason(served: ServedPanel) -> None:
    sheet = held_sheet(served)
    for reason in ("", "  ", "two\nlines"):
        response = post_form(served, "accept", {"sheet": sheet, "reason": reason})
        assert response.status_code == 422
        assert "a reason on one line" in response.text
    assert all(run.state == "pending" for run in driver_of(served).cells().values())


def test_only_a_held_sheet_is_accepted(served: ServedPanel) -> None:
    applied = driver_of(served).judge_as("anna", limit=6)
    response = post_form(served, "accept", {"sheet": applied.sheet, "reason": "why not"})
    assert (response.status_code, "there is no drift to accept" in response.text) == (422, True)


# automatic judges


def test_an_error_of_mlflow_while_starting_a_judge_is_shown_as_a_conflict(
    served: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise MlflowError("MLflow returned an error.", status=0)

    monkeypatch.setattr("tipbench.web.panel.judges.start_judge", fail)
    page = post_form(served, "run", {"with": "rules"})
    assert page.status_code == 409
    assert "MLflow returned an error." in page.text


def test_the_rules_judge_is_started_as_one_job_by_several_clicks(served: ServedPanel) -> None:
    key = re.search(r'name="key" value="([\w-]+)"', get_judges_page(served))
    assert key
    locations = {
        post_form(served, "run", {"with": "rules", "key": key[1]}).headers["location"]
        for _ in range(3)
    }  # fmt: skip
    assert len(locations) == 1
    job = served.get(f"{API}/jobs").json()["items"]
    assert [(each["kind"], each["experiment"]) for each in job] == [("judge", EXPERIMENT)]


def test_a_local_model_may_judge(served: ServedPanel) -> None:
    response = post_form(served, "run", {"with": "ollama", "model": "alpha:135m"})
    assert (response.status_code, response.headers["location"].startswith("/jobs/")) == (303, True)


def test_an_invalid_automatic_judge_is_reported_on_the_page(served: ServedPanel) -> None:
    cases: list[dict[str, str]] = [{"with": "command:sh"}, {"with": "command"}, {"with": "ollama", "model": ""}]
    for fields in cases:
        response = post_form(served, "run", fields)
        assert response.status_code in (403, 422)
        assert "Request failed" in response.text
        assert served.get(f"{API}/jobs").json()["items"] == []


# words and charts for numbers


def test_an_alpha_is_described_in_words() -> None:
    cases: list[tuple[float | None, str]] = [(0.9, "good"), (0.7, "fair"), (0.2, "weak"), (None, "unknown")]
    for alpha, begins in cases:
        assert alpha_words(alpha).startswith(begins)


def test_a_verdict_without_numbers_has_no_details() -> None:
    assert drift_summary({"verdict": "fine"}) == []
    assert drift_summary(None) == []


def test_the_newest_points_are_drawn_and_unknown_ones_left_out() -> None:
    def sheet(number: int, bias: float | None, judge: str = "anna") -> SheetSummary:
        ends = None if bias is None else [bias - 0.5, bias + 0.5]
        scale = {"scale": "tone", "bias": bias, "interval": ends, "error": 0.5, "beyond": number == 3}
        drift = {"verdict": "fine", "scales": [scale]}
        return SheetSummary(f"s{number}", judge, "2026-05-04T10:00:00+00:00", "applied", False, 5, 5, drift, None)

    history = [sheet(0, None), sheet(1, 0.2, "ben"), *(sheet(n, 0.1) for n in range(2, MAX_POINTS + 10))]
    points = drift_points(history, "anna", "tone", provisional=False)
    assert (len(points), points[-1].sheet) == (MAX_POINTS, f"s{MAX_POINTS + 9}")
    assert drift_points(history, "anna", "tone", provisional=True) == []
    assert len(drift_chart(points).to_dict()["layer"]) == 3
    assert "bias +0.10 (−0.40 to +0.60)".replace("−", "-") in drift_sentence(points)


def test_the_chart_changes_after_a_sheet_is_applied(served: ServedPanel) -> None:
    driver = driver_of(served)
    driver.judge_as("anna", honest, limit=8)
    path = f"{JUDGES}/drift.svg?judge=anna&scale=tone"
    first = served.get(path).text
    assert served.get(path).text == first
    driver.judge_as("anna", honest, limit=8, seed=2)
    assert served.get(path).text != first
