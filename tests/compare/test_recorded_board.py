"""A board is kept as a run: once while it stays the same, again when it changes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from worlds import known

from support.boards import board
from tipbench.compare.leaderboard import BOARD, record_board
from tipbench.record.run import StoredRun
from tipbench.record.store import MemoryStore

EXPERIMENT = "tip-bench-test"


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    made.ensure_experiment(EXPERIMENT)
    return made


def kept(store: MemoryStore) -> list[StoredRun]:
    return list(store.search("1", where={"kind": "leaderboard"}))


def revision(store: MemoryStore) -> str | None:
    (experiment,) = store.experiments()
    return experiment.tags.get("tipbench.revision")


def test_the_same_board_is_recorded_once(store: MemoryStore) -> None:
    first = record_board(store, "1", board())
    assert record_board(store, "1", board()) == first
    assert [run.run_id for run in kept(store)] == [first]


def test_a_changed_board_is_recorded_in_addition_to_the_old_one(store: MemoryStore) -> None:
    ids = {record_board(store, "1", each) for each in (board(), board(seed=6), board(judges=("anna",)), board())}
    assert ids == {run.run_id for run in kept(store)}
    assert len(ids) == 3


def test_only_a_new_board_invalidates_readers_caches(store: MemoryStore) -> None:
    record_board(store, "1", board())
    first = known(revision(store))
    record_board(store, "1", board())
    assert revision(store) == first
    record_board(store, "1", board(seed=6))
    assert revision(store) != first


def test_the_run_has_the_whole_board_and_what_mlflow_can_list(store: MemoryStore) -> None:
    shown = board()
    run, texts = store.get(record_board(store, "1", shown))
    assert json.loads(texts[BOARD]) == shown.to_json()
    leader = shown.standings[0]
    assert run.tags["leader"] == str(leader.pair)
    assert (run.tags["provisional"], json.loads(run.tags["judges"])) == ("false", ["anna", "ben"])
    assert run.tags["mlflow.note.content"] == shown.verdict
    assert run.params == {"rubric": shown.rubric, "conditions": "c1"}
    assert run.metrics == {
        "pairs": 12.0,
        "scenarios": 8.0,
        "decided": float(shown.ranking.decided),
        "tied": float(len(shown.ranking.tied)),
        "leader_composite": known(leader.result.estimate).mean,
    }


def test_a_board_without_scores_is_recorded_without_numbers(store: MemoryStore) -> None:
    empty = board(missing=lambda _pair, _scenario: True)
    run, _ = store.get(record_board(store, "1", replace(empty, judges=())))
    assert (run.tags["leader"], run.params["rubric"]) == ("none", "none")
    assert "leader_composite" not in run.metrics
