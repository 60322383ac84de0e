"""The leaderboard's page: the board of the API for people, all of its state in the URL, and never an empty page."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from support.judging import SheetDriver, record_cells
from support.panel_site import panel_site
from tipbench.compare import html as board_html
from tipbench.compare import standings as standings_view
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.standings import Table
from tipbench.judge.export import ExportRequest as SheetOptions
from tipbench.judge.rules import RulesJudge
from tipbench.judge.run import run_judge
from tipbench.record.mlflow import MlflowStore
from tipbench.web.board_query import BoardUrl, parse_page_query, query_params
from tipbench.workflows.board import BoardQuery
from web.board_pages import Page, RenamingStore, add_judged_experiment, board_path, get_page, judged_panel, query_of
from web.judge_client import driver_of
from web.page_forms import PageForm
from web.panels import API, EXPERIMENT, HTML, ServedPanel, serve_panel

BOARD = board_path()
BASELINE = "alpha:135m/v1"
QUERIES = [
    "",
    f"baseline={BASELINE}",
    "where=params.persona=nurse",
    "where=params.persona=nurse&where=params.model=beta:1b",
    "judge=anna",
    "by=model",
    "by=prompt&baseline=v1",
    "cluster=persona",
    "provisional=true",
    f"where=params.suite=tips&where=params.temperature=0.7&judge=anna&cluster=persona&baseline={BASELINE}&sort=-latency_s",
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPanel]:
    """A panel that tests only read."""
    with judged_panel(tmp_path_factory.mktemp("board") / "home") as served:
        yield served


@pytest.fixture
def own_panel(home: Path) -> Iterator[ServedPanel]:
    """A panel of one test, which may change it."""
    with judged_panel(home, n_scenarios=2) as served:
        yield served


def board_of(served: ServedPanel, query: str = "") -> dict[str, object]:
    found: dict[str, object] = served.get(f"{API}/leaderboard/{EXPERIMENT}?{query}").json()
    return found


def shown_rows(page: Page) -> list[str]:
    """Return the pairs that the table's rows link to, in order."""
    rows = [dict(query_of(link)) for link in page.links(f"{BOARD}/pairs")]
    return [f"{row['model']}/{row['prompt']}" for row in rows]


def board_rows(board: dict[str, object]) -> list[str]:
    rows: list[dict[str, str]] = board["standings"]  # type: ignore[assignment]
    return [f"{row['model']}/{row['prompt_version']}" for row in rows]


def test_the_verdict_comes_before_the_tables(judged: ServedPanel) -> None:
    page, board = get_page(judged, BOARD), board_of(judged)
    verdict = board["verdict"]["text"]  # type: ignore[index]
    assert page.text.index(verdict) < page.text.index("Composite with") < page.text.index("Standings")


def test_the_rows_are_those_of_the_json_in_its_order(judged: ServedPanel) -> None:
    for query in QUERIES:
        if "sort" not in query and "provisional" not in query:
            assert shown_rows(get_page(judged, f"{BOARD}?{query}")) == board_rows(board_of(judged, query))


def test_every_link_to_the_board_has_the_same_query(judged: ServedPanel) -> None:
    for query in QUERIES:
        page = get_page(judged, f"{BOARD}?{query}")
        expected = {(name, value) for name, value in query_of(f"?{query}") if name != "sort"}
        own = f"{API}/leaderboard/{EXPERIMENT}"
        files = [link for name in ("report.html", "standings.csv", "board.md") for link in page.links(f"{own}/{name}")]
        urls = [*page.links(f"{BOARD}/pairs"), *page.chart_urls(), *files, *page.links(own)]
        assert len(files) == 3
        for url in urls:
            assert expected <= set(query_of(url)), url


def test_every_link_to_the_board_can_be_followed(judged: ServedPanel) -> None:
    for query in (QUERIES[0], QUERIES[-1]):
        page = get_page(judged, f"{BOARD}?{query}")
        links = {link for tag in page.all("a") if (link := tag.get("href", "")).startswith((BOARD, API))}
        followed = sorted(
            link for link in links if "/runs" not in link and "/judges" not in link and "report" not in link
        )
        assert followed
        for link in followed[:60]:
            assert judged.get(link, headers=HTML).status_code == 200, link


# the query in the URL

_names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=60).filter(str.strip)
_rows = st.builds(Pair, _names, _names.filter(lambda name: "/" not in name))
_queries = st.builds(
    BoardQuery,
    where=st.dictionaries(st.sampled_from(["params.model", "suite", "a tag"]), _names, max_size=3).map(
        lambda found: tuple(found.items())
    ),
    judge=st.sampled_from([None, "anna", "שלום <b>", "o'neill & co"]),
    by=st.none(),
    cluster=st.sampled_from([None, "persona"]),
    baseline=st.none() | _rows.filter(lambda row: str(row) == str(row).strip()),
)


@given(_queries)
def test_a_board_query_round_trips_through_the_url(ask: BoardQuery) -> None:
    query = urlencode(query_params(ask)).encode()
    assert parse_page_query(Request({"type": "http", "query_string": query, "headers": []})) == ask


@given(_queries)
def test_the_url_without_a_filter_has_all_others(ask: BoardQuery) -> None:
    url = BoardUrl("tip-bench-x", ask)
    whole = list(query_params(ask))
    for active in url.active_filters():
        left = query_of(active.url_without)
        assert len(left) == len(whole) - 1
        assert set(left) < set(whole)


def test_the_filter_of_provisional_scores_names_no_kind_of_judge() -> None:
    (active,) = BoardUrl("tip-bench-x", BoardQuery(provisional=True)).active_filters()
    assert (active.label, active.value) == ("scores", "provisional")


def test_empty_fields_of_a_form_are_ignored(judged: ServedPanel) -> None:
    response = judged.get(f"{BOARD}?where=&judge=&baseline=&where=suite%3Dtips", headers=HTML)
    assert (response.status_code, response.headers["location"]) == (303, f"{BOARD}?where=suite%3Dtips")


def test_the_baseline_form_keeps_the_filters(judged: ServedPanel) -> None:
    html = judged.get(f"{BOARD}?where=params.persona%3Dnurse&judge=anna&sort=-rank", headers=HTML).text
    (part,) = re.findall(r'<form class="baseline-form".*?</form>', html, re.DOTALL)
    form = PageForm(part, BOARD)
    sent = form.body(baseline=BASELINE)
    page = get_page(judged, f"{BOARD}?{sent}")
    assert {"params.persona=nurse", "anna", "-rank", BASELINE} <= {value for _, value in query_of(f"?{sent}")}
    assert "baseline: alpha:135m/v1" in page.text
    assert "to baseline" in page.text


def test_the_filter_form_offers_what_is_recorded_and_shows_what_is_chosen(judged: ServedPanel) -> None:
    page = get_page(judged, f"{BOARD}?where=params.persona%3Dnurse&exclude=beta:1b&exclude=*/v1")
    assert "params.persona=nurse" in {each["value"] for each in page.all("option") if "selected" in each}
    boxes = {each["value"]: "checked" in each for each in page.all("input", name="keep")}
    assert boxes == {
        "alpha:135m": True,
        "beta:1b": False,
        "*/v1": False,
        "*/v2-mentor": True,
        "*/v3-few-shot": True,
    }


def test_unchecked_models_and_prompts_are_left_out_by_the_url(judged: ServedPanel) -> None:
    sent = f"{BOARD}?choosing=true&keep=alpha:135m&keep=*/v1&keep=*/v2-mentor&sort=-composite"
    there = judged.get(sent, headers=HTML).headers["location"]
    left_out = [("exclude", "*/v3-few-shot"), ("exclude", "beta:1b"), ("sort", "-composite")]
    assert sorted(query_of(there)) == left_out
    board: Any = board_of(judged, urlsplit(there).query)
    rows = {(row["model"], row["prompt_version"]) for row in board["standings"]}
    assert rows == {("alpha:135m", "v1"), ("alpha:135m", "v2-mentor")}
    assert "without: v3-few-shot" in get_page(judged, there).text


def test_a_baseline_that_is_not_a_row_is_dropped_with_a_message(judged: ServedPanel) -> None:
    page = get_page(judged, f"{BOARD}?baseline=no/pair")
    assert "The pair no/pair is not on this board" in page.text
    assert len(shown_rows(page)) == 6


def test_ranking_models_drops_a_baseline_that_is_a_pair(judged: ServedPanel) -> None:
    page = get_page(judged, f"{BOARD}?baseline={BASELINE}")
    (link,) = [each for each in page.links(BOARD) if ("by", "model") in query_of(each)]
    assert "baseline" not in dict(query_of(link))


def test_an_invalid_query_is_refused_like_in_the_api(judged: ServedPanel) -> None:
    for query in ["by=judge", "cluster=all", "where=x", "judge=anna&provisional=true", "baseline=x"]:
        page, response = judged.get(f"{BOARD}?{query}"), judged.get(f"{API}/leaderboard/{EXPERIMENT}?{query}")
        assert judged.error(page)[0] == judged.error(response)[0] == 422
        assert page.json()["error"]["path"] == response.json()["error"]["path"]


# sorting


def test_a_column_sorts_by_the_url_in_both_directions(judged: ServedPanel) -> None:
    better = get_page(judged, f"{BOARD}?sort=-composite")
    worse = get_page(judged, f"{BOARD}?sort=composite")
    assert (
        len(better.all("th", **{"aria-sort": "descending"})) == len(worse.all("th", **{"aria-sort": "ascending"})) == 1
    )
    values = {f"{row['model']}/{row['prompt_version']}": row["composite"] for row in board_of(judged)["standings"]}  # type: ignore[attr-defined]
    assert [values[name] for name in shown_rows(better)] == sorted(values.values(), reverse=True)
    assert [values[name] for name in shown_rows(worse)] == sorted(values.values())


def test_the_head_of_a_sorted_column_leads_to_the_other_order(judged: ServedPanel) -> None:
    page = get_page(judged, f"{BOARD}?sort=-composite&judge=anna")
    turned = [link for link in page.links(BOARD) if ("sort", "composite") in query_of(link)]
    assert [query_of(link) for link in turned] == [[("judge", "anna"), ("sort", "composite")]]


def test_an_invalid_order_is_ignored_with_a_message(judged: ServedPanel) -> None:
    page = get_page(judged, f"{BOARD}?sort=-beauty")
    assert shown_rows(page) == board_rows(board_of(judged))
    assert "there is no such column" in page.text


def test_rows_without_a_number_are_flagged_and_last_in_either_order(home: Path) -> None:
    with judged_panel(home) as served:
        record_cells(served.store, models=("late:1b",), start_ms=2_000)
        served.store.mark_changed(driver_of(served).experiment.experiment_id)
        for sort in ("composite", "-composite"):
            page = get_page(served, f"{BOARD}?sort={sort}")
            assert all(name.startswith("late:1b") for name in shown_rows(page)[-3:])
        titles = {each.get("title") for each in page.all("span")}
        assert "too few scenarios judged in common with the leader, so not ranked" in titles
        assert "not ranked" in page.text


# content


def test_the_summary_of_the_judging_names_judges_agreement_and_rubric(own_panel: ServedPanel) -> None:
    driver_of(own_panel).judged_by("ben", seed=2)
    text = get_page(own_panel, BOARD).text
    for words in ("Judging", "anna", "ben", "judged twice", "Krippendorff", "bias: tone", "tip-v1 ("):
        assert words in text


def test_attribution_and_numbers_of_the_heat_map_are_text_too(judged: ServedPanel) -> None:
    text = get_page(judged, BOARD).text
    for words in ("What explains the differences", "unexplained", "Table"):
        assert words in text


def test_charts_have_sizes_and_alternative_texts(judged: ServedPanel) -> None:
    page = get_page(judged, BOARD)
    images = [each for each in page.all("img") if "/charts/" in each["src"]]
    assert len(images) == 3
    for image in images:
        assert int(image["width"]) > 200 < int(image["height"]) + 100
        assert len(image["alt"]) > 60
    assert all(source["width"] and source["height"] for source in page.all("source"))


def test_the_page_does_not_wait_for_its_charts(own_panel: ServedPanel) -> None:
    get_page(own_panel, BOARD)
    assert own_panel.panel.queries.charts.misses == 0


def test_without_the_charts_extra_the_page_has_the_install_command(
    judged: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    page = get_page(judged, BOARD)
    assert page.chart_urls() == []
    assert 'pip install "tipbench[charts]"' in page.text
    assert not page.links(f"{API}/leaderboard/{EXPERIMENT}/report.html")


def test_a_page_that_nothing_has_changed_is_not_read_again(judged: ServedPanel) -> None:
    get_page(judged, BOARD)
    assert isinstance(judged.store, RenamingStore)
    before = judged.store.read_count
    for query in ("", "?sort=rank", ""):
        get_page(judged, BOARD + query)
    assert judged.store.read_count == before


def test_the_table_is_made_once_for_a_revision_and_an_order(
    own_panel: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str | None] = []

    def standings_table(board: Leaderboard, sort: str | None) -> Table:
        computed.append(sort)
        return standings_view.standings_table(board, sort)

    monkeypatch.setattr(board_html, "standings_table", standings_table)
    for query in ("", "", "?sort=-rank", "", "?sort=-rank"):
        get_page(own_panel, BOARD + query)
    assert computed == [None, "-rank"]
    own_panel.store.mark_changed(driver_of(own_panel).experiment.experiment_id)
    get_page(own_panel, BOARD)
    assert computed == [None, "-rank", None]


def test_a_cached_page_contains_nothing_of_its_user(own_panel: ServedPanel) -> None:
    tokens = []
    for _ in range(2):
        token = own_panel.log_in(own_panel.admin)
        page = own_panel.get(BOARD, token=None, headers=HTML).text
        assert token in page
        tokens.append(token)
    assert tokens[0] not in page
    assert not any(
        token in str(entry.value) for entry in own_panel.panel.queries.tables._entries.values() for token in tokens
    )


def test_a_sheet_applied_elsewhere_shows_at_once(own_panel: ServedPanel) -> None:
    get_page(own_panel, BOARD)
    driver_of(own_panel).judged_by("ben", seed=2)
    assert "anna, ben" in get_page(own_panel, BOARD).text


def test_the_page_has_its_revision_and_the_url_to_poll(own_panel: ServedPanel) -> None:
    (fresh,) = get_page(own_panel, BOARD).all("div", id="fresh")
    assert own_panel.get(fresh["data-url"]).json() == {"experiment": EXPERIMENT, "revision": fresh["data-revision"]}
    own_panel.store.mark_changed(driver_of(own_panel).experiment.experiment_id)
    assert own_panel.get(fresh["data-url"]).json()["revision"] != fresh["data-revision"]


def test_the_markdown_download_is_what_compare_prints(judged: ServedPanel) -> None:
    response = judged.get(f"{API}/leaderboard/{EXPERIMENT}/board.md?by=model")
    assert response.headers["content-type"] == "text/markdown; charset=utf-8"
    assert response.headers["content-disposition"] == f'attachment; filename="{EXPERIMENT}.md"'
    assert response.text.startswith(f"## {EXPERIMENT}")


# little or no data


def test_an_experiment_without_cells_shows_how_to_start(empty: ServedPanel) -> None:
    empty.store.ensure_experiment("tip-bench-new")
    page = get_page(empty, "/experiments/tip-bench-new")
    assert "Nothing recorded yet" in page.text
    assert "/run?experiment=tip-bench-new" in page.links("/run")


def test_filters_that_match_nothing_can_be_taken_back(judged: ServedPanel) -> None:
    page = get_page(judged, f"{BOARD}?where=params.model%3Dnobody&judge=anna")
    assert "No cells match" in page.text
    left = [dict(query_of(link)) for link in page.links(BOARD)]
    assert {"judge": "anna"} in left
    assert {"where": "params.model=nobody"} in left
    assert {} in left


def test_without_judged_cells_both_options_are_shown(served: ServedPanel) -> None:
    page = get_page(served, BOARD)
    assert "Not judged yet" in page.text
    assert f"tipbench judge run --with rules --experiment {EXPERIMENT}" in page.text
    assert page.links(f"{BOARD}/judges")
    assert page.chart_urls() == []
    assert len(shown_rows(page)) == 6


def test_provisional_scores_are_marked_as_such(served: ServedPanel) -> None:
    driver = driver_of(served)
    run_judge(driver.store, driver.experiment, RulesJudge(), SheetOptions())
    page = get_page(served, BOARD)
    assert "provisional" in page.texts
    assert "Provisional (scored by rules)" in page.text


def test_a_judge_whose_scores_do_not_count_is_not_an_error(judged: ServedPanel) -> None:
    assert "No score of nobody counts here" in get_page(judged, f"{BOARD}?judge=nobody").text


def test_an_unknown_experiment_is_not_found(judged: ServedPanel) -> None:
    assert judged.error(judged.get("/experiments/tip-bench-none"))[0] == 404


# unusual names

LONG = "hf.co/an-organisation/" + "a-model-with-a-name-that-never-ends-" * 5 + ":Q4_K_M"
MODELS = ("<script>alert(1)</script>", "a?b=c&d#e;f%2Fg+h"), (LONG, "\u202eright to left\u202c שלום")
PROMPTS = ("\"'><img src=x onerror=alert(2)>", "v1/with/slashes", "100 % \\ «q» `x`"), ("p" * 200, "שלום עולם", "a/b/c")


@pytest.mark.parametrize(("models", "prompts"), list(zip(MODELS, PROMPTS, strict=True)), ids=["markup", "long"])
def test_unusual_models_and_prompts_are_text_with_working_links(
    home: Path, models: tuple[str, ...], prompts: tuple[str, ...]
) -> None:
    usual = ("alpha:135m", "beta:1b", "v1", "v2-mentor", "v3-few-shot")
    with judged_panel(home, names=dict(zip(usual, models + prompts, strict=True))) as served:
        page = get_page(served, BOARD)
        assert len(page.all("script")) == 2
        assert all("onerror" not in found for _, found in page.elements)
        links = page.links(f"{BOARD}/pairs")
        assert {(dict(query_of(link))["model"], dict(query_of(link))["prompt"]) for link in links} == set(
            product(models, prompts)
        )
        for link in links:
            assert served.get(link, headers=HTML).status_code == 200
        option = next(each["value"] for each in page.all("option") if each["value"] == f"{models[0]}/{prompts[0]}")
        chosen = get_page(served, f"{BOARD}?{urlencode({'baseline': option})}")
        assert "to baseline" in chosen.text


def test_unusual_experiment_names_have_a_page_with_working_links(home: Path) -> None:
    store = RenamingStore()
    names = [
        f"tip-bench-{name}" for name in ("a/pairs/x", "q\"u'o<b>te</b>", "שלום & co", "x" * 180, "q?#;+", "a/../x")
    ]
    for name in names:
        add_judged_experiment(store, name, models=("alpha:135m",), n_scenarios=2)
    with serve_panel(home, store) as served:
        for name in names:
            path = board_path(name)
            page = get_page(served, path)
            for link in [*page.links(path), *page.links(f"{path}/pairs"), page.chart_urls()[0]]:
                assert served.get(link).status_code == 200, link


def test_a_name_with_an_escape_in_it_is_not_decoded_twice(home: Path) -> None:
    """On a real server: the client in this process decodes paths once more than servers do."""
    name, store = "tip-bench-per%2Fcent", RenamingStore()
    store.mark_changed(record_cells(store, experiment=name, models=("alpha:135m",), n_scenarios=2).experiment_id)
    with panel_site(home, store) as site:
        response = httpx.get(f"{site.url}{board_path(name)}", headers={"Authorization": f"Bearer {site.admin}"})
        assert "Not judged yet: 3 pairs without scores." in Page(response).text


@pytest.mark.parametrize("judge", ["<script>x</script>", 'o\'neill & "co"/שלום'])
def test_unusual_judge_names_can_be_selected(home: Path, judge: str) -> None:
    with judged_panel(home, judge=judge, n_scenarios=2) as served:
        driver_of(served).judged_by("ben", seed=2)
        page = get_page(served, BOARD)
        assert judge in {each["value"] for each in page.all("option")}
        chosen = get_page(served, f"{BOARD}?{urlencode({'judge': judge})}")
        assert judge in json.loads(served.get(chosen.links(f"{API}/leaderboard/{EXPERIMENT}")[0]).text)["judges"]


def test_the_pages_work_on_a_real_mlflow(home: Path, mlflow_url: str) -> None:
    name = f"tip-bench-pages/{uuid.uuid4().hex[:8]}"
    with MlflowStore(mlflow_url) as store:
        found = record_cells(store, experiment=name, models=("alpha:135m",), n_scenarios=3)
        store.mark_changed(found.experiment_id)
        with serve_panel(home, store) as served:
            assert "Not judged yet" in get_page(served, board_path(name)).text
            SheetDriver(store, found).judged_by("anna", everything=True)
            page = get_page(served, board_path(name))
            assert "anna" in page.text
            assert page.all("a", href=f"{mlflow_url}/#/experiments/{found.experiment_id}/runs")
            for link in [*page.links(f"{board_path(name)}/pairs"), page.chart_urls()[0]]:
                assert served.get(link).status_code == 200
