"""The list of runs: filters in the URL, pages, and the same content as its JSON and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from support.hostile import HOSTILE, MARK, hostile_texts
from tipbench.record.store import MemoryStore
from tipbench.web.queries import RunFilters, filters_of
from web.panels import HTML, ServedPanel, serve_panel
from web.sample_pages import SamplePages, page_text, serve_sample_pages

_LINK = re.compile(r'href="([^"]*/runs/[0-9a-f]{32}[^"]*)"')


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplePages]:
    with serve_sample_pages(tmp_path_factory.mktemp("runs") / "home") as pages:
        yield pages


def ids_on(html: str) -> list[str]:
    return [re.sub(r".*/runs/([0-9a-f]{32}).*", r"\1", link) for link in _LINK.findall(html)]


def listed_ids(pages: SamplePages, query: str = "") -> list[str]:
    response = pages.get("runs", query=query)
    assert response.status_code == 200, response.text
    return ids_on(response.text)


def json_of(pages: SamplePages, html: str) -> Any:
    found = re.search(r'href="([^"]+)">JSON', html)
    assert found
    return pages.served.get(unescape(found[1])).json()


def test_every_run_has_a_line_with_its_numbers(pages: SamplePages) -> None:
    text = page_text(pages.get("runs").text)
    for word in ("Composite", "Format", "Overlong", "Latency", "Tokens/s", "qwen2.5:0.5b", "v2-mentor", "✓ judged"):
        assert word in text
    assert len(listed_ids(pages)) == 50


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ("state=failed", lambda run: run["state"] == "failed"),
        ("model=gemma3:1b", lambda run: run["params"]["model"] == "gemma3:1b"),
        ("prompt=v1", lambda run: run["params"]["prompt_version"] == "v1"),
        ("scenario=nurse@morning", lambda run: run["params"]["scenario"] == "nurse@morning"),
        ("persona=nurse", lambda run: run["params"]["persona"] == "nurse"),
        ("judge_pending=true", lambda run: run["tags"]["judge_pending"] == "true"),
        ("kind=judging", lambda run: run["tags"]["kind"] == "judging"),
        ("where=floored=true", lambda run: run["tags"]["floored"] == "true"),
        ("where=params.host=box&where=state=pending", lambda run: run["state"] == "pending"),
    ],
)
def test_a_filter_in_the_url_applies_to_the_page_and_its_json(pages: SamplePages, query: str, holds: Any) -> None:
    page = pages.get("runs", query=f"?{query}")
    items = json_of(pages, page.text)["items"]
    assert items
    assert all(holds(run) for run in items)
    assert ids_on(page.text) == [run["run_id"] for run in items]


def test_active_filters_are_shown_and_can_be_removed(pages: SamplePages) -> None:
    page = pages.get("runs", query="?state=failed&model=newcomer:3b&where=conditions=x&superseded=true").text
    assert "state = failed" in page
    assert re.search(
        r'class="chip" href="[^"]*\?model=newcomer%3A3b&amp;superseded=true&amp;where=conditions%3Dx"', page
    )
    assert '<option value="newcomer:3b" selected>' in page


def test_an_empty_field_of_the_form_is_not_in_the_url(pages: SamplePages) -> None:
    response = pages.get("runs", query="?state=&model=gemma3:1b&prompt=&where=&where=+&kind=cell&judge_pending=")
    assert (response.status_code, response.headers["location"]) == (303, pages.path("runs") + "?model=gemma3%3A1b")


def test_the_pages_together_are_the_whole_list(pages: SamplePages) -> None:
    total, query, found = json_of(pages, pages.get("runs").text)["total"], "?limit=20", []
    for _ in range(20):
        page = pages.get("runs", query=query).text
        found += ids_on(page)
        following = re.search(r'href="[^"]*/runs(\?[^"]*)" rel="next"', page)
        if not following:
            break
        query = unescape(following[1])
    assert len(found) == len(set(found)) == total


def test_a_superseded_run_is_listed_only_on_request(pages: SamplePages) -> None:
    old = pages.content.runs["superseded"]
    assert old not in listed_ids(pages, "?limit=500")
    assert old in listed_ids(pages, "?limit=500&superseded=true")


def test_stale_held_and_provisional_runs_are_marked(pages: SamplePages) -> None:
    page = pages.get("runs", query="?limit=500&superseded=true").text
    text = page_text(page)
    assert [word for word in ("↺ stale", "‖ held", "↷ superseded") if word not in text] == []
    rules = pages.get("runs", query="?where=provisional_judge=rules&state=judged").text
    assert "prov." not in rules


def test_a_provisional_composite_is_marked_as_not_counting(home: Path) -> None:
    from support.judging import EXPERIMENT
    from tipbench.judge.export import ExportRequest
    from tipbench.judge.rules import RulesJudge
    from tipbench.judge.run import run_judge
    from web.panels import answered_store

    store = answered_store()
    experiment = store.ensure_experiment(EXPERIMENT)
    run_judge(store, experiment, RulesJudge(), ExportRequest())
    with serve_panel(home, store) as served:
        page = served.get(f"/experiments/{EXPERIMENT}/runs", headers=HTML).text
    assert page.count("provisional: not counted") == 48


def test_the_csv_has_every_run_that_matches(pages: SamplePages) -> None:
    page = pages.get("runs", query="?model=gemma3:1b&limit=5").text
    found = re.search(r'href="([^"]*runs\.csv[^"]*)"', page)
    assert found
    response = pages.served.get(unescape(found[1]))
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert response.headers["content-disposition"] == 'attachment; filename="tip-bench-may-2026--runs.csv"'
    assert {row["model"] for row in rows} == {"gemma3:1b"}
    assert len(rows) == json_of(pages, page)["total"] == 24
    assert float(rows[0]["latency_s"]) > 0


def test_a_name_is_never_a_formula_in_the_csv(home: Path) -> None:
    from support.judging import EXPERIMENT, record_cells

    store = MemoryStore()
    store.mark_changed(record_cells(store, models=("=1+1",), n_scenarios=1).experiment_id)
    with serve_panel(home, store) as served:
        text = served.get(f"/api/bench/runs/{EXPERIMENT}/runs.csv").text
    assert ",'=1+1," in text


def test_without_matches_the_next_step_is_shown(pages: SamplePages) -> None:
    page = pages.get("runs", query="?model=nowhere").text
    assert "No run matches" in page
    assert f'href="{pages.path("runs")}">All runs' in page
    assert '<option value="nowhere" selected>' in page


def test_an_experiment_without_cells_shows_how_to_start(home: Path) -> None:
    store = MemoryStore()
    store.ensure_experiment("tip-bench-new")
    with serve_panel(home, store) as served:
        page = served.get("/experiments/tip-bench-new/runs", headers=HTML).text
        other = served.get("/experiments/tip-bench-new/runs?kind=decision", headers=HTML).text
    assert 'href="/run">Start a run' in page
    assert "No run of the kind “decision”" in other


@pytest.mark.parametrize(
    "query",
    ["?state=odd", "?kind=odd", "?limit=0", "?limit=501", "?limit=x", "?next=odd", "?where=odd", "?superseded=maybe",
     "?judge_pending=odd", "?state=judged&where=state=failed", "?model=" + "x" * 251, "?" + "where=a=b&" * 21],
)  # fmt: skip
def test_an_invalid_query_gets_an_error_page(pages: SamplePages, query: str) -> None:
    response = pages.get("runs", query=query)
    assert response.status_code == 422
    assert response.headers["content-type"].startswith("text/html")


def test_runs_of_other_kinds_show_their_subject(pages: SamplePages) -> None:
    assert "27.4B parameters" in pages.get("runs", query="?kind=refused").text
    assert "most models resident at once: 1" in pages.get("runs", query="?kind=collection").text


def test_an_unknown_experiment_has_an_error_page(served: ServedPanel) -> None:
    response = served.get("/experiments/tip-bench-never/runs", headers=HTML)
    assert (response.status_code, "There is no experiment" in response.text) == (404, True)


def injected_elements(html: str) -> list[str]:
    """Return elements created by unescaped text."""
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(tag for name, _ in attrs if name == MARK)

    Reader().feed(html)
    return found


def test_names_and_texts_are_shown_as_text(home: Path, tmp_path: Path) -> None:
    with serve_sample_pages(home, "tip-bench-<img data-xss src=x>", hostile_texts(tmp_path / "suite")) as pages:
        htmls = [
            pages.get("runs", query=query).text for query in ("?limit=500&superseded=true", "?kind=refused&limit=99")
        ]
        htmls += [pages.run(sort) for sort in pages.content.runs] + [pages.get("judges").text]
    for page in htmls:
        assert injected_elements(page) == []
        assert not re.search(r"[\u202a-\u202e\u2066-\u2069\u200b\x00\x1b]", page)
    assert HOSTILE["template of the server"].partition("{%")[0] in "".join(htmls)


def test_filters_round_trip_through_the_url() -> None:
    filters = RunFilters(model="a&b=c", where=["x=1", "params.y= z"], superseded=True, judge_pending=False, limit=7)
    from urllib.parse import parse_qs

    read = {name: values if name == "where" else values[0] for name, values in parse_qs(filters.query()).items()}
    assert filters_of(read) == filters
    assert RunFilters().query() == ""
