"""Read routes: experiments, runs, one run; paged, filtered, and current after every write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.judging import SheetDriver, record_cells
from tipbench.record.reader import run_json
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import Experiment, MemoryStore
from tipbench.web.queries import CACHED_EXPERIMENTS, COUNTS, SNAPSHOTS
from web.judge_client import driver_of
from web.panels import API, EXPERIMENT, ServedPanel, serve_panel

RUNS = f"{API}/runs/{EXPERIMENT}"


def all_pages(served: ServedPanel, path: str, limit: int) -> list[dict[str, Any]]:
    """Read every item, page by page."""
    items: list[dict[str, Any]] = []
    following = ""
    for _ in range(100):
        body = served.get(f"{path}{'&' if '?' in path else '?'}limit={limit}{following}").json()
        items += body["items"]
        if body["next"] is None:
            return items
        following = f"&next={body['next']}"
    raise AssertionError("the list has no end")


def test_experiments_are_listed_with_their_cells_by_state(served: ServedPanel) -> None:
    body = served.get(f"{API}/experiments").json()
    counts = {"cells": 48, "pending": 48, "judged": 0, "failed": 0, "provisional": 0, "held": 0}
    (row,) = body["items"]
    assert body["next"] is None
    assert {key: row[key] for key in ("experiment", *counts)} == {"experiment": EXPERIMENT, **counts}
    assert (row["leader"], row["url"], len(row["models"])) == (None, None, 2)


def test_experiments_with_other_names_are_not_listed(served: ServedPanel) -> None:
    served.store.ensure_experiment("somebody-elses")
    assert len(served.get(f"{API}/experiments").json()["items"]) == 1
    assert served.error(served.get(f"{API}/runs/somebody-elses")) == (422, "invalid")


def test_without_recorded_runs_the_list_is_empty(empty: ServedPanel) -> None:
    assert empty.get(f"{API}/experiments").json() == {"items": [], "next": None}


def test_without_any_mlflow_the_list_is_empty_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tipbench.record.mlflow.MlflowHttp.is_mlflow", lambda _http: False)
    with serve_panel(home, find_mlflow=True) as served:
        assert served.get(f"{API}/experiments").json() == {"items": [], "next": None}
        assert served.get("/readyz", token=None).json() == {"status": "ready", "mlflow": "none yet"}
        assert served.error(served.get(f"{API}/leaderboard/{EXPERIMENT}")) == (409, "not_enough_data")


def test_runs_come_page_by_page_each_once(served: ServedPanel) -> None:
    items = all_pages(served, RUNS, 7)
    assert len(items) == len({item["run_id"] for item in items}) == 48


def test_a_run_in_a_list_is_as_the_command_line_prints_it(served: ServedPanel) -> None:
    expected = {run.run_id: run_json(run) for run in driver_of(served).cells().values()}
    for item in served.get(f"{RUNS}?limit=500").json()["items"]:
        wanted = expected[item["run_id"]]
        assert {key: item[key] for key in wanted} == wanted
        assert not any(tag.startswith("artifact:") for tag in item["tags"])


def test_runs_are_filtered(served: ServedPanel) -> None:
    for query, count in [
        ("model=alpha:135m", 24),
        ("model=alpha:135m&prompt=v1", 8),
        ("scenario=nurse@morning", 6),
        ("state=pending", 48),
        ("state=judged", 0),
        ("where=params.suite=tips", 48),
        ("where=model=beta:1b&where=prompt=v1", 8),
        ("kind=collection", 0),
    ]:
        body = served.get(f"{RUNS}?limit=500&{query}").json()
        assert (len(body["items"]), body["total"], body["next"]) == (count, count, None)


def test_an_invalid_query_is_refused_with_its_place(served: ServedPanel) -> None:
    for query, place in [
        ("limit=0", "query.limit"),
        ("limit=501", "query.limit"),
        ("next=nonsense", "query.next"),
        ("where=novalue", "query.where"),
        ("where=model=a&where=model=b", "query.where"),
        ("model=a&where=model=b", "query.where"),
        ("kind=odd", "query.kind"),
        ("&".join(["where=a=b"] * 21), "query.where"),
    ]:
        response = served.get(f"{RUNS}?{query}")
        assert (response.status_code, response.json()["error"]["path"]) == (422, place)


def test_a_superseded_run_is_shown_only_on_request(served: ServedPanel) -> None:
    experiment = driver_of(served).experiment
    old = NewRun(
        RunKind.CELL, "r1", "old", 1, 2, ok=False, cell_key="k", tags={"state": "failed", "superseded": "true"}
    )
    served.store.record(experiment.experiment_id, old)
    served.store.mark_changed(experiment.experiment_id)
    assert served.get(RUNS).json()["total"] == 48
    assert served.get(f"{RUNS}?superseded=true").json()["total"] == 49


def test_one_run_has_all_its_texts(served: ServedPanel) -> None:
    run_id = served.get(f"{RUNS}?limit=1").json()["items"][0]["run_id"]
    body = served.get(f"{RUNS}/{run_id}").json()
    run, texts = served.store.get(run_id)
    assert body["texts"] == texts
    assert {"artifact:prompt.txt", "artifact:raw.txt", "artifact:candidates.json"} <= set(body["texts"])
    assert (body["run_id"], body["state"], body["status"]) == (run_id, "pending", "FINISHED")
    assert body["params"] == dict(run.params)


def test_a_run_of_another_experiment_is_not_found_here(served: ServedPanel) -> None:
    other = served.store.ensure_experiment("tip-bench-other")
    run_id = served.store.record(other.experiment_id, NewRun(RunKind.CELL, "r", "n", 1, 2))
    assert served.error(served.get(f"{RUNS}/{run_id}")) == (404, "not_found")
    assert served.get(f"{API}/runs/tip-bench-other/{run_id}").status_code == 200


def test_an_unknown_run_is_not_found(served: ServedPanel) -> None:
    assert served.error(served.get(f"{RUNS}/{'0' * 32}")) == (404, "not_found")


def test_model_output_is_returned_unchanged(served: ServedPanel) -> None:
    experiment = driver_of(served).experiment
    text = "half a character \ud800, \x00, <script>, \u202e and 😀"
    run = NewRun(RunKind.CELL, "odd", "odd", 1, 2, tags={"state": "pending"}, texts={"artifact:raw.txt": text})
    run_id = served.store.record(experiment.experiment_id, run)
    served.store.mark_changed(experiment.experiment_id)
    response = served.get(f"{RUNS}/{run_id}")
    assert response.json()["texts"]["artifact:raw.txt"] == text
    assert response.headers["content-type"] == "application/json"


def test_an_experiments_name_may_have_slashes_spaces_and_special_characters(home: Path) -> None:
    store = MemoryStore()
    name = "tip-bench-a/b c?d&e#ü"
    found = store.ensure_experiment(name)
    run_id = store.record(found.experiment_id, NewRun(RunKind.CELL, "r", "n", 1, 2, tags={"state": "pending"}))
    quoted = "tip-bench-a%2Fb%20c%3Fd%26e%23%C3%BC"
    with serve_panel(home, store) as served:
        assert served.get(f"{API}/runs/{quoted}").json()["items"][0]["run_id"] == run_id
        assert served.get(f"{API}/runs/{quoted}/{run_id}").json()["run_id"] == run_id
        assert served.get(f"{API}/experiments").json()["items"][0]["experiment"] == name


class CountingStore(MemoryStore):
    """Counts the reads of runs."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str | None] = []  # of the runs read; a list, because pages read in two threads

    @property
    def reads(self) -> int:
        return len(self.kinds)

    def _matching_runs(self, experiment_id: str, where: Any, *args: Any, **options: Any) -> Any:
        self.kinds.append(where.get("kind"))
        return super()._matching_runs(experiment_id, where, *args, **options)


@pytest.fixture
def counting_panel(home: Path) -> Any:
    store = CountingStore()
    found: Experiment = record_cells(store)
    store.mark_changed(found.experiment_id)
    with serve_panel(home, store) as served:
        yield served, store


PAGES = (f"{API}/experiments", RUNS, f"{RUNS}?model=alpha:135m", f"{API}/leaderboard/{EXPERIMENT}")


def test_a_page_that_nothing_has_changed_is_not_read_again(counting_panel: tuple[ServedPanel, CountingStore]) -> None:
    served, store = counting_panel
    first = [served.get(path).json() for path in PAGES]
    store.kinds.clear()
    assert [served.get(path).json() for path in PAGES] == first
    assert store.reads == 0


def test_filters_and_boards_share_one_read_of_the_cells(counting_panel: tuple[ServedPanel, CountingStore]) -> None:
    served, store = counting_panel
    served.get(RUNS)
    store.kinds.clear()
    for query in ("model=alpha:135m", "state=pending", "prompt=v1", "where=suite=x"):
        served.get(f"{RUNS}?{query}")
    assert store.reads == 0
    served.get(f"{API}/leaderboard/{EXPERIMENT}")
    served.get(f"{API}/leaderboard/{EXPERIMENT}?by=model")
    assert store.reads <= 4  # duels and the rubric's text, not the cells


def test_a_board_page_reads_cells_sheets_and_decisions_once(counting_panel: tuple[ServedPanel, CountingStore]) -> None:
    served, store = counting_panel
    driver_of(served).judged_by("anna", everything=True)
    store.kinds.clear()
    page = served.get(f"/experiments/{EXPERIMENT}", headers={"Accept": "text/html"})
    assert "anna" in page.text
    assert sorted(map(str, store.kinds)) == ["cell", "decision", "judging"]


def test_changes_by_another_process_show_at_once(served: ServedPanel) -> None:
    driver = driver_of(served)
    assert [served.get(path).status_code for path in PAGES] == [200] * 4
    driver.judged_by("anna", everything=True)  # as `judge apply` on the command line does, past the panel
    assert served.get(f"{API}/experiments").json()["items"][0]["judged"] == 48
    assert served.get(f"{RUNS}?state=judged&limit=500").json()["total"] == 48
    board = served.get(f"{API}/leaderboard/{EXPERIMENT}").json()
    assert board["judges"] == ["anna"]
    assert served.get(f"{API}/judges/{EXPERIMENT}").json()["judged"] == 48


def test_memory_is_bounded_for_any_number_of_queries(served: ServedPanel) -> None:
    queries = served.panel.queries
    for number in range(300):
        served.get(f"{API}/leaderboard/{EXPERIMENT}?where=params.suite=tips&where=n{number}=x")
        served.panel.queries.small_cache.get(number, "r", lambda: None)
    assert len(queries.small_cache) <= 256
    assert len(queries.snapshots) <= SNAPSHOTS


def test_the_list_of_experiments_evicts_no_snapshot_that_it_loads(home: Path) -> None:
    store = CountingStore()
    names = [f"tip-bench-{number}" for number in range(CACHED_EXPERIMENTS)]
    for name in names:
        SheetDriver(store, record_cells(store, experiment=name)).judged_by("anna", everything=True)
    with serve_panel(home, store) as served:
        rows = served.get(f"{API}/experiments").json()["items"]
        store.kinds.clear()
        for name in names:
            served.get(f"{API}/runs/{name}")
            served.get(f"{API}/runs/{name}?kind=judging")
    assert None not in [row["leader"] for row in rows]
    assert store.reads == 0


def test_more_experiments_than_a_cache_usually_holds_are_counted_once(home: Path) -> None:
    store = CountingStore()
    for number in range(COUNTS + 5):
        store.mark_changed(store.ensure_experiment(f"tip-bench-{number:03}").experiment_id)
    with serve_panel(home, store) as served:
        first = served.get(f"{API}/experiments").json()
        store.kinds.clear()
        assert served.get(f"{API}/experiments").json() == first
    assert (len(first["items"]), store.reads) == (COUNTS + 5, 0)


def test_experiments_come_in_pages_and_by_name(home: Path) -> None:
    store = MemoryStore()
    for name in ("b2", "a1", "c", "B1", "a2"):
        store.ensure_experiment(f"tip-bench-{name}")
    with serve_panel(home, store) as served:
        names = [each["experiment"].removeprefix("tip-bench-") for each in all_pages(served, f"{API}/experiments", 2)]
        found = served.get(f"{API}/experiments?q=%20BENCH-b").json()["items"]
        wrong = served.get(f"{API}/experiments?next=x")
    assert names == ["B1", "a1", "a2", "b2", "c"]
    assert [each["experiment"] for each in found] == ["tip-bench-B1", "tip-bench-b2"]
    assert (wrong.status_code, wrong.json()["error"]["path"]) == (422, "query.next")
