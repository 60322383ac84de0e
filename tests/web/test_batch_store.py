"""Batches on disk: versions, undo, conflicts, repeats, time and keeping; as properties of any history."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.clock import Clock
from tipbench.web import batch_store
from tipbench.web.batch_items import canonical_json
from tipbench.web.batch_store import (
    MAX_KEYS,
    MAX_VERSIONS,
    Batch,
    BatchStore,
    ItemJudgement,
    Kind,
    State,
    Status,
    VersionConflict,
)
from tipbench.web.database import FILE, FOLDER, VERSION, panel_database
from tipbench.web.errors import Conflict

SHEET = "a" * 12
BLANK = "{}"
BATCH = Batch(SHEET, "here", "tip-bench-x", "anna", Kind.SHEET, 3)
EMPTY = ItemJudgement(State.EMPTY, BLANK)


class OpenBatch:
    """An open batch in a store in a new folder, with the store's clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock(1_000.0)
        self.database = panel_database(folder)
        self.store = BatchStore(self.database, self.clock)
        self.store.add(BATCH, '{"items":[]}')

    def put(
        self, version: int, text: str = "x", *, item: str = "i1", state: State = State.DRAFT, s: float = 0.0
    ) -> Any:
        return self.store.put(SHEET, item, version, ItemJudgement(state, text), s)

    def undo(self, version: int, item: str = "i1") -> Any:
        return self.store.undo(SHEET, item, version, BLANK)

    @property
    def batch(self) -> Batch:
        found = self.store.get(SHEET)
        assert found is not None
        return found


@pytest.fixture
def open_batch(tmp_path: Path) -> Any:
    open_batch = OpenBatch(tmp_path / "store")
    yield open_batch
    open_batch.database.close()


# the database


def test_a_database_of_the_first_version_gets_the_new_tables_and_keeps_its_tokens(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    raw = sqlite3.connect(folder / FILE)
    raw.executescript(
        "CREATE TABLE tokens (id TEXT PRIMARY KEY, sha256 TEXT NOT NULL, role TEXT NOT NULL, name TEXT NOT NULL,"
        " created INTEGER NOT NULL, expires INTEGER, revoked INTEGER, last_used INTEGER) STRICT;"
        "CREATE TABLE ended_sessions (id TEXT PRIMARY KEY, expires INTEGER NOT NULL) STRICT;"
        "INSERT INTO tokens (id, sha256, role, name, created) VALUES ('t', 'h', 'judge', 'anna', 1);"
        "PRAGMA user_version = 1;"
    )
    raw.close()
    for _ in range(2):  # the second time there is nothing left to do
        database = panel_database(tmp_path)
        assert [*database.execute("SELECT name FROM tokens")[0]] == ["anna"]
        assert database.execute("PRAGMA user_version")[0][0] == VERSION
        BatchStore(database).add(BATCH, "{}")
        database.close()


@pytest.mark.process
def test_saved_judgements_survive_a_kill(tmp_path: Path) -> None:
    """A process that dies right after a save loses nothing."""
    script = (
        "import os, sys; from pathlib import Path; from tipbench.web.database import panel_database\n"
        "from tipbench.web.batch_store import *\n"
        "s = BatchStore(panel_database(Path(sys.argv[1])))\n"
        f"s.add(Batch('{SHEET}', 'here', 'tip-bench-x', 'anna', Kind.SHEET, 3), '{{}}')\n"
        f"s.put('{SHEET}', 'i1', 0, ItemJudgement(State.DRAFT, 'kept'), 1.0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=dict(os.environ), timeout=60)  # noqa: PLW1510
    assert done.returncode == -9
    database = panel_database(tmp_path)
    stored = BatchStore(database).items(SHEET)["i1"]
    assert (stored.version, stored.judgement.content) == (1, "kept")
    database.close()


# versions


def test_every_change_increments_the_version(open_batch: OpenBatch) -> None:
    assert [open_batch.put(version, f"x{version}").version for version in range(4)] == [1, 2, 3, 4]


def test_two_tabs_do_not_overwrite_each_other(open_batch: OpenBatch) -> None:
    open_batch.put(0, "first tab")
    with pytest.raises(VersionConflict) as refused:
        open_batch.put(0, "second tab")
    assert refused.value.current is not None
    assert refused.value.current.judgement.content == "first tab"
    assert open_batch.store.items(SHEET)["i1"].judgement.content == "first tab"


def test_a_repeated_request_is_kept_once(open_batch: OpenBatch) -> None:
    open_batch.clock.now += 100
    first = open_batch.put(0, "x", s=10)
    assert open_batch.put(0, "x", s=10) == first
    assert len(open_batch.store.history(SHEET, "i1")) == 1


def test_an_unknown_version_is_a_conflict(open_batch: OpenBatch) -> None:
    with pytest.raises(VersionConflict):
        open_batch.put(7)


def test_a_repeat_after_the_close_is_answered_and_anything_new_is_refused(open_batch: OpenBatch) -> None:
    first = open_batch.put(0, "x")
    assert open_batch.store.close(open_batch.batch, Status.APPLIED, {}) is not None
    assert open_batch.put(0, "x") == first
    with pytest.raises(Conflict, match="closed"):
        open_batch.put(1, "y")
    with pytest.raises(Conflict, match="closed"):
        open_batch.undo(1)


def test_a_batch_that_has_changed_is_not_closed(open_batch: OpenBatch) -> None:
    seen = open_batch.batch
    open_batch.put(0)
    assert open_batch.store.close(seen, Status.APPLIED, {}) is None
    assert open_batch.batch.status is Status.OPEN
    assert open_batch.store.close(open_batch.batch, Status.HELD, {"held": 1}) is not None
    assert (open_batch.batch.status, open_batch.batch.outcome) == (Status.HELD, {"held": 1})


# undo


def test_undo_can_be_repeated_to_the_beginning(open_batch: OpenBatch) -> None:
    for version, text in enumerate(("a", "b", "c")):
        open_batch.put(version, text)
    assert [open_batch.undo(version).judgement.content for version in (3, 4, 5)] == ["b", "a", BLANK]
    with pytest.raises(Conflict, match="no earlier version"):
        open_batch.undo(6)


def test_a_repeated_undo_goes_back_once(open_batch: OpenBatch) -> None:
    open_batch.put(0, "a")
    open_batch.put(1, "b")
    assert open_batch.undo(2) == open_batch.undo(2)
    assert open_batch.store.items(SHEET)["i1"].judgement.content == "a"


def test_saving_the_same_judgement_again_is_not_an_undo_step(open_batch: OpenBatch) -> None:
    open_batch.put(0, "a")
    open_batch.put(1, "b")
    open_batch.put(2, "b")
    assert open_batch.undo(3).judgement.content == "a"


def test_without_a_judgement_there_is_nothing_to_undo(open_batch: OpenBatch) -> None:
    with pytest.raises(Conflict, match="no earlier version"):
        open_batch.undo(0)


def test_the_number_of_steps_of_an_item_is_limited(open_batch: OpenBatch) -> None:
    open_batch.database.execute("PRAGMA synchronous = OFF")
    for version in range(MAX_VERSIONS + 5):
        open_batch.put(version, f"x{version}")
    assert len(open_batch.store.history(SHEET, "i1")) == MAX_VERSIONS


def test_the_oldest_steps_of_a_batch_are_deleted_over_the_size_limit(
    open_batch: OpenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_HISTORY_BYTES", 10)
    for version, content in enumerate(["éé", "bbbb", "cccc"]):
        open_batch.put(version, content)
    assert [stored.judgement.content for stored in open_batch.store.history(SHEET, "i1")] == ["cccc", "bbbb"]
    assert open_batch.store.items(SHEET)["i1"].judgement.content == "cccc"


def test_judgements_are_stored_exactly_and_a_lone_surrogate_as_its_escape() -> None:
    content = {"note": "Grüße 🌿 \\ \ud83c"}
    assert canonical_json(content) == '{"note":"Grüße 🌿 \\\\ \\ud83c"}'
    assert json.loads(canonical_json(content)) == content


# time


def test_seconds_add_up_within_the_time_since_the_batch_was_opened(open_batch: OpenBatch) -> None:
    open_batch.clock.now += 60
    assert open_batch.put(0, "a", s=40).seconds == 40
    assert open_batch.put(0, "b", item="i2", s=40).seconds == 20
    assert open_batch.put(1, "c", s=86_400).seconds == 40
    open_batch.clock.now += 5
    assert open_batch.put(2, "d", s=86_400).seconds == 45


def test_a_clock_set_back_does_not_reduce_the_time(open_batch: OpenBatch) -> None:
    open_batch.clock.now -= 500
    assert open_batch.put(0, "a", s=40).seconds == 0


# batches and idempotency keys


def test_the_open_batch_is_that_of_the_judge_the_kind_and_the_server(open_batch: OpenBatch) -> None:
    store = open_batch.store
    assert store.find_open("tip-bench-x", "anna", Kind.SHEET) == open_batch.batch
    assert store.find_open("tip-bench-x", "anna", Kind.SHEET, "here") == open_batch.batch
    for other in (
        ("tip-bench-y", "anna", Kind.SHEET),
        ("tip-bench-x", "ben", Kind.SHEET),
        ("tip-bench-x", "anna", Kind.DUEL),
    ):
        assert store.find_open(*other) is None
    assert store.find_open("tip-bench-x", "anna", Kind.SHEET, "elsewhere") is None


def test_of_two_open_batches_the_one_last_worked_on_is_continued(open_batch: OpenBatch) -> None:
    open_batch.clock.now += 1
    open_batch.store.add(replace(BATCH, sheet="b" * 12), "{}")
    open_batch.clock.now += 1
    open_batch.put(0)
    found = open_batch.store.find_open("tip-bench-x", "anna", Kind.SHEET)
    assert found is not None
    assert found.sheet == SHEET


def test_a_key_finds_its_batch_and_old_keys_are_deleted(open_batch: OpenBatch) -> None:
    open_batch.database.execute("PRAGMA synchronous = OFF")
    for number in range(MAX_KEYS + 1):
        open_batch.clock.now += 1
        open_batch.store.save_key("anna", f"k{number}", SHEET)
    assert open_batch.store.find_by_key("anna", f"k{MAX_KEYS}") == open_batch.batch
    assert open_batch.store.find_by_key("anna", "k0") is None
    assert open_batch.store.find_by_key("ben", "k5") is None


def test_reopening_keeps_the_judgements_and_the_result_of_the_last_close(open_batch: OpenBatch) -> None:
    open_batch.put(0, "done", state=State.SUBMITTED)
    open_batch.store.close(open_batch.batch, Status.HELD, {"held": 1})
    batch = open_batch.store.reopen(SHEET, note="look again")
    assert batch is not None
    assert (batch.status, batch.note, batch.outcome, batch.closed) == (Status.OPEN, "look again", {"held": 1}, None)
    assert open_batch.put(1, "better", state=State.SUBMITTED).version == 2


class BatchMachine(RuleBasedStateMachine):
    """Any sequence of saves, undos, repeats and stale requests on three items, against stacks of judgements."""

    items = st.sampled_from(["i1", "i2", "i3"])
    judgement = st.builds(
        ItemJudgement, st.sampled_from(list(State)), st.sampled_from(["a", "b", "c"]), st.sampled_from(["", "r"])
    )

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.open_batch = OpenBatch(Path(self._folder.name))
        self.open_batch.database.execute("PRAGMA synchronous = OFF")
        self.stack: dict[str, list[ItemJudgement]] = {}
        self.version: dict[str, int] = {}
        self.last: tuple[Any, ...] = ()
        self.changes = 0

    @initialize()
    def begin(self) -> None:
        self.stack = {item: [EMPTY] for item in ("i1", "i2", "i3")}
        self.version = dict.fromkeys(self.stack, 0)

    @rule(item=items, judgement=judgement, seconds=st.floats(0, 50), passed=st.floats(0, 30))
    def put(self, item: str, judgement: ItemJudgement, seconds: float, passed: float) -> None:
        self.open_batch.clock.now += passed
        seen = self.version[item]
        stored = self.open_batch.store.put(SHEET, item, seen, judgement, seconds)
        assert (stored.version, stored.judgement) == (seen + 1, judgement)
        self.version[item] += 1
        self.changes += 1
        if seen == 0 or self.stack[item][-1] != judgement:
            self.stack[item].append(judgement)
        self.last = ("put", item, seen, judgement, seconds)

    @rule(item=items)
    def undo(self, item: str) -> None:
        seen = self.version[item]
        if len(self.stack[item]) == 1:
            with pytest.raises(Conflict, match="no earlier version"):
                self.open_batch.undo(seen, item)
            return
        self.stack[item].pop()
        assert self.open_batch.undo(seen, item).judgement == self.stack[item][-1]
        self.version[item] += 1
        self.changes += 1
        self.last = ("undo", item, seen)

    @precondition(lambda self: self.last)
    @rule()
    def repeat(self) -> None:
        what, item, seen, *rest = self.last
        before = self.open_batch.store.items(SHEET)[item]
        again = (
            self.open_batch.undo(seen, item) if what == "undo" else self.open_batch.store.put(SHEET, item, seen, *rest)
        )
        assert again == before

    @rule(item=items, judgement=judgement, off=st.integers(-5, 5).filter(bool))
    def stale(self, item: str, judgement: ItemJudgement, off: int) -> None:
        seen, current = self.version[item] + off, self.open_batch.store.items(SHEET).get(item)
        if off == -1 and current is not None and current.judgement == judgement:
            return  # identical to a repeat
        with pytest.raises(VersionConflict):
            self.open_batch.store.put(SHEET, item, seen, judgement, 0.0)

    @rule()
    def restart(self) -> None:
        self.open_batch.database.close()
        clock = self.open_batch.clock
        self.open_batch.database = panel_database(Path(self._folder.name))
        self.open_batch.database.execute("PRAGMA synchronous = OFF")
        self.open_batch.store = BatchStore(self.open_batch.database, clock)

    @invariant()
    def stored_judgements_are_those_saved(self) -> None:
        stored = self.open_batch.store.items(SHEET)
        assert {item: each.version for item, each in stored.items()} == {i: v for i, v in self.version.items() if v}
        assert all(each.judgement == self.stack[item][-1] for item, each in stored.items())
        assert self.open_batch.batch.revision == self.changes
        assert (
            sum(each.seconds for each in stored.values())
            <= self.open_batch.clock.now - self.open_batch.batch.opened + 1e-6
        )

    @invariant()
    def history_is_whole(self) -> None:
        for item, version in self.version.items():
            steps = self.open_batch.store.history(SHEET, item)
            assert [step.version for step in steps] == list(range(version, 0, -1))

    def teardown(self) -> None:
        self.open_batch.database.close()
        self._folder.cleanup()


BatchMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestHistories = BatchMachine.TestCase
