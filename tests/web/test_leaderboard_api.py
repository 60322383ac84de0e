"""The leaderboard over HTTP: the object of `compare --format json`, its options, and its downloads."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from support.judging import SheetDriver
from tipbench.compare.cells import CellFilter
from tipbench.compare.html import CSP as REPORT_CSP
from tipbench.compare.leaderboard import read_leaderboard
from tipbench.compare.matrix import Pair
from web.panels import API, EXPERIMENT, ServedPanel, answered_store, serve_panel

BOARD = f"{API}/leaderboard/{EXPERIMENT}"


@pytest.fixture
def judged(home: Path) -> Any:
    """All cells judged by anna, some by ben too."""
    store = answered_store()
    found = store.ensure_experiment(EXPERIMENT)
    driver = SheetDriver(store, found)
    driver.judged_by("anna", everything=True)
    driver.judged_by("ben", seed=2)
    with serve_panel(home, store) as served:
        yield served


def board_of(served: ServedPanel, cell_filter: CellFilter = CellFilter(), **options: Any) -> Any:  # noqa: B008 - frozen
    experiment = served.store.experiment(EXPERIMENT)
    assert experiment is not None
    board, _ = read_leaderboard(served.store, experiment, cell_filter, **options)
    return board.to_json()


def test_the_board_is_the_object_that_compare_prints(judged: ServedPanel) -> None:
    assert judged.get(BOARD).json() == board_of(judged)


def test_a_board_can_show_one_judges_scores(judged: ServedPanel) -> None:
    assert judged.get(f"{BOARD}?judge=ben").json() == board_of(judged, CellFilter(judge="ben"))


def test_a_baseline_adds_the_differences_to_it(judged: ServedPanel) -> None:
    pair = Pair("alpha:135m", "v1")
    got = judged.get(f"{BOARD}?baseline=alpha:135m/v1").json()
    assert got == board_of(judged, baseline=pair)
    assert any(row["diff_to_baseline"] for row in got["standings"])


def test_models_or_prompts_can_be_ranked(judged: ServedPanel) -> None:
    cases: list[Any] = ["model", "prompt"]
    for by in cases:
        assert judged.get(f"{BOARD}?by={by}").json() == board_of(judged, by=by)


def test_among_models_a_models_name_alone_is_a_baseline(judged: ServedPanel) -> None:
    got = judged.get(f"{BOARD}?by=model&baseline=alpha:135m").json()
    assert got["baseline"] == {"model": "alpha:135m", "prompt_version": "*"}


def test_rows_may_be_clustered_by_persona(judged: ServedPanel) -> None:
    assert judged.get(f"{BOARD}?cluster=persona").json() == board_of(judged, cluster="persona")


def test_a_filter_works_as_in_compare(judged: ServedPanel) -> None:
    wanted = board_of(judged, CellFilter({"params.persona": "nurse", "params.model": "alpha:135m"}))
    assert judged.get(f"{BOARD}?where=params.persona=nurse&where=model=alpha:135m").json() == wanted


def test_reading_a_board_writes_nothing(judged: ServedPanel) -> None:
    experiment = judged.store.experiment(EXPERIMENT)
    assert experiment is not None
    before = len(list(judged.store.search(experiment.experiment_id, where={})))
    for path in (BOARD, f"{BOARD}/standings.csv", f"{BOARD}?by=model"):
        judged.get(path)
    assert len(list(judged.store.search(experiment.experiment_id, where={}))) == before
    assert judged.store.experiment(EXPERIMENT) == experiment


def test_an_impossible_board_is_refused_with_a_message(judged: ServedPanel) -> None:
    cases: list[tuple[str, int, str | None]] = [
        ("baseline=noslash", 422, "query.baseline"),
        ("baseline=no/pair", 400, None),
        ("by=judge", 422, "query.by"),
        ("cluster=scenario", 422, "query.cluster"),
        ("judge=anna&provisional=true", 422, "query.judge"),
        ("judge=rules", 422, "query.judge"),
        ("judge=nobody", 409, None),
        ("where=kind=judging", 400, None),
        ("where=params.model=nobody", 409, None),
        ("provisional=perhaps", 422, "query.provisional"),
    ]
    for query, status, place in cases:
        response = judged.get(f"{BOARD}?{query}")
        assert judged.error(response)[0] == status
        assert response.json()["error"]["path"] == place


def test_an_experiment_without_cells_has_no_board_yet(empty: ServedPanel) -> None:
    empty.store.ensure_experiment("tip-bench-new")
    assert empty.error(empty.get(f"{API}/leaderboard/tip-bench-new")) == (409, "not_enough_data")
    assert empty.error(empty.get(f"{API}/leaderboard/tip-bench-none")) == (404, "not_found")


def test_the_table_is_downloaded_under_a_plain_name(judged: ServedPanel) -> None:
    response = judged.get(f"{BOARD}/standings.csv?baseline=alpha:135m/v1")
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert [row["model"] for row in rows] == [row["model"] for row in board_of(judged)["standings"]]
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    assert response.headers["content-disposition"] == f'attachment; filename="{EXPERIMENT}.csv"'


def test_the_report_is_downloaded_and_never_a_page_of_ours(judged: ServedPanel) -> None:
    response = judged.get(f"{BOARD}/report.html")
    assert response.status_code == 200
    assert response.text.startswith("<!doctype html>")
    assert response.headers["content-disposition"] == f'attachment; filename="{EXPERIMENT}.html"'
    policy = response.headers["content-security-policy"]
    assert policy.startswith(REPORT_CSP)
    assert "sandbox" in policy
    assert "frame-ancestors 'none'" in policy


def test_a_report_is_drawn_once_for_a_revision(judged: ServedPanel) -> None:
    first = judged.get(f"{BOARD}/report.html").text
    misses = judged.panel.queries.large_cache.misses
    assert judged.get(f"{BOARD}/report.html").text == first
    assert judged.panel.queries.large_cache.misses == misses


def test_a_file_name_is_safe_in_headers_and_file_systems() -> None:
    from tipbench.web.errors import attachment

    header = attachment('tip-bench-a/b"\r\nX: y;é', "csv")["Content-Disposition"]
    assert header == 'attachment; filename="tip-bench-a-b-X-y.csv"'
    assert attachment("...", "csv") == {"Content-Disposition": 'attachment; filename="tipbench.csv"'}
