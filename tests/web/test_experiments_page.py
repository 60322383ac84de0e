"""The front page: progress and next step of each experiment; an unavailable MLflow is a notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.judging import record_cells
from tipbench.errors import MlflowUnavailable
from tipbench.record.store import MemoryStore
from tipbench.web.panel.experiments import MIN_FOR_SEARCH, row_of
from web.judge_client import driver_of
from web.panels import API, EXPERIMENT, HTML, ServedPanel, serve_panel


def get_front_page(served: ServedPanel, query: str = "") -> str:
    response = served.get(f"/{query}", headers=HTML)
    assert response.status_code == 200
    return str(response.text)


def experiment_counts(**more: Any) -> dict[str, Any]:
    nothing = {"cells": 0, "judged": 0, "pending": 0, "failed": 0, "provisional": 0, "held": 0, "models": []}
    return {"experiment": "tip-bench-a/b", **nothing, "changed": None, "leader": None, "url": None, **more}


def test_the_page_shows_every_experiment_with_its_cells(served: ServedPanel) -> None:
    page = get_front_page(served)
    assert f'href="/experiments/{EXPERIMENT}"' in page
    assert 'aria-label="0 judged, 48 pending of 48 cells"' in page
    assert f'href="{API}/experiments"' in page


def test_the_page_shows_applied_scores_at_once(served: ServedPanel) -> None:
    get_front_page(served)
    driver_of(served).judged_by("anna", everything=True)
    page = get_front_page(served)
    assert "48 judged, 0 pending" in page
    row = served.get(f"{API}/experiments").json()["items"][0]
    assert {row["leader"]["model"], *row["models"]} == set(row["models"])
    assert row["changed"].endswith("Z")
    assert f"<bdi>{row['leader']['model']}/{row['leader']['prompt_version']}</bdi>" in page


def test_each_experiment_shows_its_next_step() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        (experiment_counts(), "Start a run", "/run?experiment=tip-bench-a%2Fb"),
        (experiment_counts(cells=3, pending=2, judged=1), "Judge 2 answers", "/judge?experiment=tip-bench-a%2Fb"),
        (experiment_counts(cells=3, failed=1, judged=2), "Run 1 failed cell again", "/run?experiment=tip-bench-a%2Fb"),
        (experiment_counts(cells=3, pending=2, held=1), "Review 1 held sheet", "/experiments/tip-bench-a%2Fb/judges"),
        (experiment_counts(cells=3, judged=3), "Show the leaderboard", "/experiments/tip-bench-a%2Fb"),
    ]
    for found, step, url in cases:
        row = row_of(found)
        assert (row["step"], row["step_url"]) == (step, url)


def test_an_empty_panel_shows_the_first_step(empty: ServedPanel) -> None:
    page = get_front_page(empty)
    assert "No experiments yet" in page
    assert "tipbench demo" in page
    assert 'href="/run"' in page


def test_an_unavailable_mlflow_is_a_notice(home: Path) -> None:
    class Away(MemoryStore):
        def experiments(self) -> Any:
            raise MlflowUnavailable("MLflow at http://localhost:5000 does not answer.")

    with serve_panel(home, Away()) as served:
        page = get_front_page(served)
    assert "MLflow at http://localhost:5000 does not answer." in page
    assert "Try again" in page


def test_an_unusual_name_is_text_with_a_working_link(home: Path) -> None:
    store, name = MemoryStore(), 'tip-bench-<b>"a/b?c#d\u05d0'
    record_cells(store, experiment=name)
    with serve_panel(home, store) as served:
        page = get_front_page(served)
    assert "<b>" not in page
    assert 'href="/experiments/tip-bench-%3Cb%3E%22a%2Fb%3Fc%23d%D7%90"' in page


def test_many_experiments_can_be_searched(home: Path) -> None:
    store = MemoryStore()
    for number in range(MIN_FOR_SEARCH):
        store.ensure_experiment(f"tip-bench-{number:02}")
    with serve_panel(home, store) as served:
        assert 'type="search"' in get_front_page(served)
        page = get_front_page(served, "?q=-03")
        assert "tip-bench-03" in page
        assert "tip-bench-04" not in page
        assert f'href="{API}/experiments?q=-03"' in page
        assert "No experiment matches" in get_front_page(served, "?q=<i>")
