"""The journal: appended results survive crashes and full disks."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tipbench.errors import JournalError
from tipbench.record import journal as journal_module
from tipbench.record.journal import Entry, Journal, count_unstored, journal_folder, journalled_keys, orphaned_journals
from tipbench.record.run import NewRun, RunKind


def run(name: str = "one", **changes: object) -> NewRun:
    fields: dict[str, object] = {
        "kind": RunKind.CELL, "record_id": f"id-{name}", "name": name, "start_ms": 1, "end_ms": 2, "cell_key": name,
        "params": {"model": "m"}, "metrics": {"latency_s": 0.5}, "tags": {"state": "pending"},
        "texts": {"artifact:raw.txt": "tip 😀\x00"}, "supersedes": ("old-1",),
    }  # fmt: skip
    return NewRun(**(fields | changes))  # type: ignore[arg-type]


def take_entry(journal: Journal) -> Entry:
    entry = journal.take(0)
    assert entry is not None
    return entry


def take_orphaned(folder: Path) -> list[NewRun]:
    found: list[NewRun] = []
    for journal in orphaned_journals(folder):
        while (entry := journal.take(0)) is not None:
            found.append(journal.read(entry))
        journal.close()
    return found


@given(st.text(st.characters(), max_size=200))
def test_any_text_round_trips(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        original = run(texts={"artifact:raw.txt": text})
        journal.append([original])
        assert journal.read(take_entry(journal)) == original
        journal.close()


def test_lone_surrogates_round_trip(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run(texts={"artifact:raw.txt": "\ud83d alone"})])
    assert journal.read(take_entry(journal)).texts == {"artifact:raw.txt": "\ud83d alone"}
    journal.close()


def test_stored_entries_are_removed_and_then_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b")])
    for _ in range(2):
        journal.mark_stored(take_entry(journal))
    assert journal.n_unstored() == 0
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_entries_not_stored_are_found_by_the_next_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b"), run("c")])
    journal.mark_stored(take_entry(journal))
    journal.close()
    assert count_unstored([tmp_path]) == 2
    assert [found.name for found in take_orphaned(tmp_path)] == ["b", "c"]


@pytest.mark.process
def test_a_journal_in_use_is_unchanged(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run()])
    code = (
        "import sys; from pathlib import Path; from tipbench.record.journal import orphaned_journals;"
        "print(len(list(orphaned_journals(Path(sys.argv[1])))))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert output == "0\n"
    journal.close()


def test_a_line_torn_by_a_crash_is_not_a_result(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("whole")])
    journal.append([run("torn")])
    journal.close()
    data = journal.path.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data)):
        journal.path.write_bytes(data[:cut])
        assert [found.name for found in take_orphaned(tmp_path)] == ["whole"]


def test_a_full_disk_stops_the_run_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append([run("before")])
    monkeypatch.setattr(journal_module, "_write_all", failing_write(DISK_FULL))
    with pytest.raises(JournalError, match=r"No space left on device.*free some space"):
        journal.append([run("after")])
    monkeypatch.undo()
    journal.append([run("later")])
    journal.close()
    assert [found.name for found in take_orphaned(tmp_path)] == ["before", "later"]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(blocked / "journal")


def test_a_long_run_does_not_grow_the_file_indefinitely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 5000)
    journal = Journal(tmp_path)
    for n in range(100):
        journal.append([run(f"run-{n}")])
        entry = take_entry(journal)
        assert journal.read(entry).name == f"run-{n}"
        journal.mark_stored(entry)
    assert journal.path.stat().st_size < 8000
    journal.close()


def test_each_server_and_experiment_has_its_own_folder(tmp_path: Path) -> None:
    folders = {journal_folder(tmp_path, server, experiment) for server in "ab" for experiment in "xy"}
    assert len(folders) == 4


def failing_write(error: BaseException, written: int = 20) -> Callable[[int, bytes], NoReturn]:
    """A write that fails after some bytes."""

    def write(fd: int, data: bytes) -> NoReturn:
        os.write(fd, data[:written])
        raise error

    return write


DISK_FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("written", [0, 20, 10_000])
def test_an_interrupted_append_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    journal = Journal(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "_write_all", failing_write(KeyboardInterrupt(), written))
        with pytest.raises(KeyboardInterrupt):
            journal.append([run("interrupted")])
    assert journal.n_unstored() == 0
    assert journal.path.stat().st_size == 0
    journal.append([run("next")])
    assert journal.read(take_entry(journal)).name == "next"
    journal.close()


def is_interrupted_at(line: int, action: Callable[[], object]) -> bool:
    """Run the action with a KeyboardInterrupt before the n-th line of journal.py; False if fewer lines run."""
    seen, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
        nonlocal seen
        if frame.f_code.co_filename != journal_module.__file__:
            return None
        seen += event == "line"
        if seen == line:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("act", ["append", "mark_stored"])
def test_an_interrupt_at_any_line_leaves_file_and_queue_in_agreement(tmp_path: Path, act: str) -> None:
    for line in itertools.count(1):
        journal = Journal(tmp_path / f"{line}")
        journal.append([run("a"), run("b")])
        first = take_entry(journal)
        doing = partial(journal.append, [run("c")]) if act == "append" else partial(journal.mark_stored, first)
        interrupted = is_interrupted_at(line, doing)
        journal.append([run("d")])
        queue = [journal.read(entry).name for entry in iter(lambda: journal.take(0), None)]  # noqa: B023
        assert queue in (["b", "d"], ["b", "c", "d"])
        first_is_unstored = act == "append" or journal.n_unstored() == 3
        assert journal.n_unstored() == len(queue) + first_is_unstored
        journal.close()
        assert [found.name for found in take_orphaned(tmp_path / f"{line}")] == ["a"] * first_is_unstored + queue
        if not interrupted:
            break
    assert line > 10


SIGNALLED_PROGRAM = """
import os, signal, sys
from pathlib import Path
from tipbench.record.journal import Journal
from tipbench.record.run import NewRun, RunKind

def run(name):
    return NewRun(RunKind.CELL, "id-" + name, name, 1, 2, cell_key=name)

real = os.fsync
def fsync(fd):
    real(fd)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))

signal.signal(signal.SIGTERM, signal.default_int_handler)
journal = Journal(Path(sys.argv[1]))
journal.append([run("before")])
os.fsync = fsync
try:
    journal.append([run("interrupted")])
except KeyboardInterrupt:
    print("interrupted")
os.fsync = real
journal.append([run("after")])
while (entry := journal.take(0)) is not None:
    print(journal.read(entry).name)
journal.close()
"""


@pytest.mark.process
@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_a_signal_inside_fsync_leaves_a_journal_that_continues(tmp_path: Path, signal: str) -> None:
    command = [sys.executable, "-c", SIGNALLED_PROGRAM, str(tmp_path), signal]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["interrupted", "before", "after"]
    assert [found.name for found in take_orphaned(tmp_path)] == ["before", "after"]


@pytest.mark.parametrize(("error", "raised"), [(DISK_FULL, JournalError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_no_line_is_appended_after_a_half_line_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    journal = Journal(tmp_path)
    journal.append([run("before")])

    def stuck(_fd: int, _size: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "_write_all", failing_write(error))
        broken.setattr(os, "ftruncate", stuck)
        with pytest.raises(raised, match=r"No space left" if raised is JournalError else None):
            journal.append([run("half")])
    with pytest.raises(JournalError, match=r"half a line.*Run the same command again"):
        journal.append([run("after")])
    with pytest.raises(JournalError, match="half a line"):
        journal.mark_stored(take_entry(journal))
    journal.close()
    assert [found.name for found in take_orphaned(tmp_path)] == ["before"]


@pytest.mark.parametrize(("error", "raised"), [(DISK_FULL, JournalError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_note_that_cannot_be_written_leaves_its_entry_to_the_next_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a")])
    size = journal.path.stat().st_size
    entry = take_entry(journal)
    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "_write_all", failing_write(error, 5))
        with pytest.raises(raised):
            journal.mark_stored(entry)
    assert journal.path.stat().st_size == size
    assert (journal.n_unstored(), journal.take(0)) == (1, None)
    journal.append([run("b")])
    journal.close()
    assert [found.name for found in take_orphaned(tmp_path)] == ["a", "b"]


def test_a_closed_journal_accepts_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.append([run()])


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.mark.parametrize("drains", ["removes", "holds"])
def test_a_drain_that_locks_a_new_journal_first_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drains: str
) -> None:
    real, drained = fcntl.flock, list[Journal]()

    def flock(fd: int, how: int) -> None:
        if not drained:
            monkeypatch.setattr(fcntl, "flock", real)
            drained.extend(orphaned_journals(tmp_path))
            if drains == "removes":
                drained[0].close()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    journal = Journal(tmp_path)
    drained[0].close()
    assert list(tmp_path.iterdir()) == [journal.path]
    journal.append([run("safe")])
    journal.close()
    assert [found.name for found in take_orphaned(tmp_path)] == ["safe"]


def test_a_journal_that_its_owner_removes_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [Journal(tmp_path), Journal(tmp_path)]
    before, real = open_files(), fcntl.flock

    def flock(fd: int, how: int) -> None:
        for owner in owners:
            owner.close()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert list(orphaned_journals(tmp_path)) == []
    assert open_files() == before - 2


def test_a_lock_that_fails_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()

    def flock(_fd: int, _how: int) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(JournalError, match="No locks available"):
        Journal(tmp_path)
    assert open_files() == before


def test_a_drain_skips_the_file_of_a_running_owner(tmp_path: Path) -> None:
    owner = Journal(tmp_path)
    before = open_files()
    assert list(orphaned_journals(tmp_path)) == []
    assert (owner.path.exists(), open_files()) == (True, before)
    owner.close()


def test_a_line_begins_with_its_kind_and_ends_with_its_version_and_checksum(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run()])
    line = journal.path.read_bytes()
    assert line.startswith(b'{"put":{"kind":"cell"')
    assert re.search(rb',"v":1,"sum":"[0-9a-f]{8}"\}\n$', line)
    journal.close()


def test_a_line_without_a_version_is_read_as_version_1(tmp_path: Path) -> None:
    write_old_line(tmp_path, lambda line: line.pop("v"))
    assert take_orphaned(tmp_path) == [run()]


def write_old_line(folder: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> Path:
    """Write the journal of an ended process with one line, changed and without a checksum."""
    journal = Journal(folder)
    journal.append([run()])
    journal.close()
    line = json.loads(journal.path.read_bytes())
    del line["sum"]
    change(line)
    journal.path.write_text(json.dumps(line) + "\n")
    return journal.path


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda line: line.update(v=2), "version 2"),
        (lambda line: line.update(v={"major": 3}), "version .*major"),
        (lambda line: (line.update(v=2), line.pop("put")), "version 2"),
        (lambda line: line.pop("put"), "version 1, but neither"),
        (lambda line: line["put"].update(novel=1), "version 1 with unknown fields: novel"),
        (lambda line: line["put"].pop("texts"), "version 1 without the fields texts"),
        (lambda line: line["put"].update(kind="dream"), "version 1 with an unknown kind of run, 'dream'"),
        (lambda line: line["put"].update(texts="all"), "version 1 with values of other types in texts"),
    ],
)
def test_a_journal_of_another_version_is_refused_and_left_as_it_is(
    tmp_path: Path, change: Callable[[dict[str, dict[str, object]]], object], seen: str
) -> None:
    path = write_old_line(tmp_path, change)
    content, before = path.read_bytes(), open_files()
    with pytest.raises(JournalError, match=rf"{path.name}.*{seen}.*reads version 1.*move the file away"):
        list(orphaned_journals(tmp_path))
    assert (path.read_bytes(), open_files()) == (content, before)
    assert journalled_keys(tmp_path) == set()


def test_an_entry_put_back_comes_after_all_others(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b")])
    journal.put_back(take_entry(journal))
    assert [journal.read(take_entry(journal)).name for _ in range(2)] == ["b", "a"]
    journal.close()


def test_a_result_set_aside_is_kept_next_to_the_journal_and_not_drained_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b")])
    lines = journal.path.read_bytes()
    paths = {journal.set_aside(take_entry(journal)) for _ in range(2)}
    assert journal.n_unstored() == 0
    journal.close()
    assert paths == set(tmp_path.iterdir()) == {journal.path.with_name(f"{journal.path.name}.refused")}
    assert paths.pop().read_bytes() == lines
    assert take_orphaned(tmp_path) == []


@pytest.mark.parametrize(("error", "raised"), [(DISK_FULL, JournalError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_result_that_cannot_be_set_aside_stays_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b")])
    rejected = journal.set_aside(take_entry(journal))
    line = rejected.read_bytes()
    entry = take_entry(journal)
    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "_write_all", failing_write(error))
        with pytest.raises(raised):
            journal.set_aside(entry)
    assert (journal.n_unstored(), rejected.read_bytes()) == (1, line)
    journal.close()


def test_a_torn_line_does_not_swallow_the_next_one_set_aside(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run()])
    journal.path.with_name(f"{journal.path.name}.refused").write_bytes(b'{"put":{"ki')
    lines = journal.path.read_bytes()
    assert journal.set_aside(take_entry(journal)).read_bytes().splitlines(keepends=True)[-1] == lines
    journal.close()


def test_the_keys_of_finished_cells_are_found_in_open_and_abandoned_journals(tmp_path: Path) -> None:
    dead, alive = Journal(tmp_path), Journal(tmp_path)
    dead.append([run("a"), run("stored"), run("failed", ok=False), run("other", kind=RunKind.REFUSED, cell_key=None)])
    alive.append([run("b")])
    dead.put_back(take_entry(dead))
    dead.mark_stored(take_entry(dead))
    dead.close()
    with dead.path.open("ab") as file:
        file.write(b'not json\n{"put":{"kind":"cell","record_id":"torn')
    assert journalled_keys(tmp_path) == {"a", "b"}
    alive.close()


def test_a_missing_folder_or_file_has_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert journalled_keys(tmp_path / "never made") == set()
    journal = Journal(tmp_path)
    journal.append([run()])
    journal.close()
    vanished = [tmp_path / "0-vanished.jsonl", journal.path]
    monkeypatch.setattr(Path, "glob", lambda _folder, _pattern: iter(vanished))
    assert journalled_keys(tmp_path) == {"one"}
    assert count_unstored([tmp_path]) == 1


class JournalOperations(RuleBasedStateMachine):
    """After any operations in any order, the journal holds exactly what was appended and not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory()
        self.folder = Path(self.home.name)
        self.journal = Journal(self.folder)
        self.unstored: set[str] = set()
        self.entries: list[Entry] = []  # taken, neither stored nor put back
        self.count = 0

    def new_runs(self, n: int) -> list[NewRun]:
        self.count += n
        return [run(f"{k}", texts={"artifact:raw.txt": "x" * k}) for k in range(self.count - n, self.count)]

    @rule(n=st.integers(0, 3))
    def append(self, n: int) -> None:
        runs = self.new_runs(n)
        self.journal.append(runs)
        self.unstored |= {each.record_id for each in runs}

    @rule(error=st.sampled_from([DISK_FULL, KeyboardInterrupt()]), written=st.integers(0, 900), n=st.integers(1, 3))
    def broken_append(self, error: BaseException, written: int, n: int) -> None:
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(journal_module, "_write_all", failing_write(error, written))
            with pytest.raises((JournalError, KeyboardInterrupt)):
                self.journal.append(self.new_runs(n))

    @rule()
    def interrupted_sync(self) -> None:
        def fsync(_fd: int) -> NoReturn:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(os, "fsync", fsync)
            with pytest.raises(KeyboardInterrupt):
                self.journal.append(self.new_runs(1))

    @rule()
    def take(self) -> None:
        if (entry := self.journal.take(0)) is not None:
            assert self.journal.read(entry).record_id == entry.record_id
            self.entries.append(entry)

    @precondition(lambda self: self.entries)
    @rule()
    def put_back(self) -> None:
        self.journal.put_back(self.entries.pop())

    @precondition(lambda self: self.entries)
    @rule(compact=st.sampled_from([0, journal_module._COMPACT_BYTES]))
    def mark_stored(self, compact: int) -> None:
        entry = self.entries.pop()
        with pytest.MonkeyPatch.context() as small:
            small.setattr(journal_module, "_COMPACT_BYTES", compact)
            self.journal.mark_stored(entry)
        self.unstored.discard(entry.record_id)

    @precondition(lambda self: self.entries)
    @rule(error=st.sampled_from([DISK_FULL, KeyboardInterrupt()]), written=st.integers(0, 40))
    def broken_mark_stored(self, error: BaseException, written: int) -> None:
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(journal_module, "_write_all", failing_write(error, written))
            with pytest.raises((JournalError, KeyboardInterrupt)):
                self.journal.mark_stored(self.entries[-1])

    @rule(torn=st.sampled_from([b"", b"{", b'{"put":{"kind":"cell"']))
    def reopen(self, torn: bytes) -> None:
        self.journal.close()
        if self.journal.path.exists():
            with self.journal.path.open("ab") as file:
                file.write(torn)
        self.journal = next(orphaned_journals(self.folder), None) or Journal(self.folder)
        self.entries = []

    @invariant()
    def holds_what_it_should(self) -> None:
        assert self.journal.n_unstored() == len(self.unstored) == count_unstored([self.folder])
        assert {f"id-{key}" for key in journalled_keys(self.folder)} == self.unstored

    def teardown(self) -> None:
        self.journal.close()
        assert {found.record_id for found in take_orphaned(self.folder)} == self.unstored
        self.home.cleanup()


TestJournalOperations = JournalOperations.TestCase
TestJournalOperations.settings = settings(max_examples=15, stateful_step_count=30)


def test_a_changed_byte_is_never_read_as_a_result() -> None:
    line = journal_module.result_line(run(texts={"artifact:raw.txt": "An answer."}))
    for at in range(len(line) - 1):
        for byte in (*range(line[at]), *range(line[at] + 1, 256)):
            changed = line[:at] + bytes([byte]) + line[at + 1 :]
            assert byte == ord("\n") or not isinstance(
                journal_module.parse_line(changed), NewRun | journal_module.StoredMark
            ), changed


@pytest.mark.parametrize("compact", [0, journal_module._COMPACT_BYTES])
def test_damaged_lines_are_counted_and_their_file_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compact: int
) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", compact)
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b")])
    os.close(journal._fd)  # as after a crash: nothing is marked, and the lock is gone
    journal.path.write_bytes(journal.path.read_bytes().replace(b'"name":"a"', b'"name":"x"'))
    (found,) = orphaned_journals(tmp_path)
    assert (found.n_damaged_lines, [entry.name for entry in [found.read(take_entry(found))]]) == (1, ["b"])
    for entry in list(found._unstored.values()):
        found.mark_stored(entry)
    found.close()
    assert list(tmp_path.iterdir()) == [found.damaged_path]
    assert b'"name":"x"' in found.damaged_path.read_bytes()
    assert list(orphaned_journals(tmp_path)) == []


def test_lines_without_a_checksum_are_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a")])
    os.close(journal._fd)
    journal.path.write_bytes(re.sub(rb',"sum":"[0-9a-f]{8}"', b"", journal.path.read_bytes()))
    assert [each.name for each in take_orphaned(tmp_path)] == ["a"]
