"""A batch and a file end in the same scores: by page, JSON and CSV, and after crashes at any write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.judging import MODELS, Rule, SheetDriver, agreed, always, by_hand, fill, items_of, record_cells
from tipbench.judge.apply import SheetApplier
from tipbench.judge.check import check_sheet
from tipbench.judge.sheet_file import sheet_csv
from tipbench.judge.sheet_store import StoredSheet
from tipbench.record.store import MemoryStore
from web.judge_client import JudgeClient, driver_of, item_body, stored_sheet
from web.panels import API, EXPERIMENT, JUDGE, ServedPanel, answered_store, copy_store, serve_panel

APPLY = f"{API}/judge/{EXPERIMENT}/apply"


@pytest.fixture
def judge_client(served: ServedPanel) -> JudgeClient:
    return JudgeClient(served, served.judge)


def _results(served: ServedPanel, judging: StoredSheet) -> dict[str, Any]:
    """Return all metrics and states, the scores and the drift."""
    driver, stored = driver_of(served), stored_sheet(served, judging.sheet.id)
    scores = {run_id: [given.tips for given in found.counted] for run_id, found in driver.scores().items()}
    cells = {run_id: (run.metrics, run.state) for run_id, run in driver.cells().items()}
    return {"cells": cells, "scores": scores, "drift": stored.drift, "status": stored.status, "sheet": stored.scores}


def _judge_by_page(served: ServedPanel, _judging: StoredSheet, raw: dict[str, Any]) -> Any:
    judge_client = JudgeClient(served, served.judge)
    assert judge_client.open()["sheet"] == raw["sheet"]
    judge_client.submit(raw)
    return judge_client.close(raw["sheet"]).json()["outcome"]


def _judge_by_json(served: ServedPanel, _judging: StoredSheet, raw: dict[str, Any]) -> Any:
    return served.post(APPLY, token=served.judge, json=raw).json()


def _judge_by_csv(served: ServedPanel, judging: StoredSheet, raw: dict[str, Any]) -> Any:
    finished = check_sheet(raw, judging.sheet).finished
    text = sheet_csv(judging.sheet, finished)
    return served.post(APPLY, token=served.judge, content=text.encode(), headers={"Content-Type": "text/csv"}).json()


@pytest.mark.parametrize(("rule", "status"), [(agreed, "applied"), (always(5), "held")], ids=["applied", "held"])
def test_the_same_answers_by_page_json_and_csv_give_the_same_scores(home: Path, rule: Rule, status: str) -> None:
    first = answered_store()
    experiment = first.experiment(EXPERIMENT)
    assert experiment is not None
    judging = SheetDriver(first, experiment).export(JUDGE, everything=True, seed=1).stored
    raw = fill(judging, rule)
    raw["items"][0]["format_ok"] = not raw["items"][0]["format_ok"]
    raw["items"][1]["tips"][0] |= {"note": "=1+1, said\nthe judge", "overlong": True}
    results = []
    for judge_by in (_judge_by_page, _judge_by_json, _judge_by_csv):
        with serve_panel(home / judge_by.__name__, copy_store(first)) as served:
            results.append((judge_by(served, judging, raw), _results(served, judging)))
    assert results[0] == results[1] == results[2]
    assert results[0][0]["status"] == status


# crashes


class ProcessKilled(Exception):
    """The process was killed."""


class KilledStore(MemoryStore):
    """Raises ProcessKilled at the n-th write, before or after executing it."""

    writes_left: int | None = None
    fails_after_write = False

    def _step(self, write: Any) -> Any:
        if self.writes_left is None:
            return write()
        self.writes_left -= 1
        if self.writes_left == 0 and not self.fails_after_write:
            raise ProcessKilled
        done = write()
        if self.writes_left == 0:
            raise ProcessKilled
        return done

    def update(self, *args: Any, **options: Any) -> Any:
        return self._step(lambda: super(KilledStore, self).update(*args, **options))

    def mark_changed(self, *args: Any, **options: Any) -> Any:
        return self._step(lambda: super(KilledStore, self).mark_changed(*args, **options))

    def record(self, *args: Any, **options: Any) -> Any:
        return self._step(lambda: super(KilledStore, self).record(*args, **options))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_panel_killed_between_any_two_steps_of_a_close_completes_it_by_closing_again(home: Path, after: bool) -> None:
    for step in range(1, 40):
        store = KilledStore()
        record_cells(store, models=MODELS[:1], n_scenarios=2, prompts="v1")
        with serve_panel(home / f"{step}", store) as served:
            judge_client = JudgeClient(served, served.judge)
            sheet = judge_client.open()["sheet"]
            raw = fill(stored_sheet(served, sheet))
            judge_client.submit(raw)
            store.writes_left, store.fails_after_write = step, after
            killed = close_or_be_killed(judge_client, sheet)
        store.writes_left = None
        with serve_panel(home / f"{step}", store) as served:
            judge_client = JudgeClient(served, served.judge)
            assert judge_client.get_batch(sheet)["batch"]["status"] == ("open" if killed else "applied")
            outcome = judge_client.close(sheet).json()["outcome"]
            assert (outcome["status"], outcome["applied"]) == ("applied", len(raw["items"]))
            cells, scores = driver_of(served).cells(), driver_of(served).scores()
            for run_id, item in items_of(raw, stored_sheet(served, sheet)).items():
                assert {name: cells[run_id].metrics[name] for name in by_hand(item)} == pytest.approx(by_hand(item))
                assert [given.judge for given in scores[run_id].counted] == [JUDGE]
        if not killed:
            assert step > 3
            return
    pytest.fail("closing has no end")


def close_or_be_killed(judge_client: JudgeClient, sheet: str) -> bool:
    """Close a batch; return whether the panel was killed meanwhile."""
    response = judge_client.close(sheet)
    assert response.status_code in (200, 500)
    return bool(response.status_code == 500)


def test_a_panel_killed_between_apply_and_note_completes_the_close_by_closing_again(
    judge_client: JudgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = judge_client.open(limit=6)["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    judge_client.submit(raw)
    store = judge_client.served.app.state.batches._store

    def kill(*_args: Any) -> Any:
        raise ProcessKilled

    with monkeypatch.context() as patch:
        patch.setattr(store, "close", kill)
        assert judge_client.close(sheet).status_code == 500
    assert stored_sheet(judge_client.served, sheet).status == "applied"
    before = driver_of(judge_client.served).everything()
    assert judge_client.close(sheet).json()["outcome"]["applied"] == len(raw["items"])
    assert driver_of(judge_client.served).everything() == before


def test_a_panel_killed_between_export_and_note_finds_the_sheet_again(
    judge_client: JudgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = judge_client.served.app.state.batches._store

    def kill(*_args: Any) -> Any:
        raise ProcessKilled

    with monkeypatch.context() as patch:
        patch.setattr(store, "add", kill)
        assert judge_client.request("POST").status_code == 500
    sheet = judge_client.open()["sheet"]
    runs = judge_client.served.store.search(
        driver_of(judge_client.served).experiment.experiment_id, where={"kind": "judging"}
    )
    assert [run.tags["sheet"] for run in runs] == [sheet]


def test_what_is_saved_while_a_close_applies_is_counted_too(
    judge_client: JudgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = judge_client.open(limit=6)["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    judge_client.submit(raw, omit_last=1)
    last, run = raw["items"][-1], SheetApplier.run
    late = [last]

    def run_slowly(self: SheetApplier, **options: Any) -> Any:
        while late:
            assert judge_client.put(sheet, last["item"], 0, "submitted", **item_body(late.pop())).status_code == 200
        return run(self, **options)

    monkeypatch.setattr(SheetApplier, "run", run_slowly)
    outcome = judge_client.close(sheet).json()["outcome"]
    assert (outcome["applied"], outcome["unfinished"]) == (len(raw["items"]), 0)


def test_a_close_that_never_catches_up_is_reported(judge_client: JudgeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = judge_client.open(limit=6)["sheet"]
    raw = fill(stored_sheet(judge_client.served, sheet))
    judge_client.submit(raw)
    first, run = raw["items"][0], SheetApplier.run
    versions = iter(range(1, 100))

    def run_slowly(self: SheetApplier, **options: Any) -> Any:
        judge_client.put(sheet, first["item"], next(versions), "submitted", **item_body(first))
        return run(self, **options)

    monkeypatch.setattr(SheetApplier, "run", run_slowly)
    assert judge_client.served.error(judge_client.close(sheet)) == (409, "conflict")
    assert judge_client.get_batch(sheet)["batch"]["status"] == "open"
