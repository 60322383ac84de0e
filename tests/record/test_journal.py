"""The journal: what was appended is there, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.errors import JournalError
from tipbench.record import journal as journal_module
from tipbench.record.journal import Journal, count_left_behind, journal_folder, left_behind
from tipbench.record.run import NewRun, RunKind


def run(name: str = "one", **changes: object) -> NewRun:
    fields: dict[str, object] = {
        "kind": RunKind.CELL, "record_id": f"id-{name}", "name": name, "start_ms": 1, "end_ms": 2, "cell_key": name,
        "params": {"model": "m"}, "metrics": {"latency_s": 0.5}, "tags": {"state": "pending"},
        "texts": {"artifact:raw.txt": "tip 😀\x00"}, "supersedes": ("old-1",),
    }  # fmt: skip
    return NewRun(**(fields | changes))  # type: ignore[arg-type]


def taken_over(folder: Path) -> list[NewRun]:
    found: list[NewRun] = []
    for journal in left_behind(folder):
        while (entry := journal.take(0)) is not None:
            found.append(journal.read(entry))
        journal.close()
    return found


@given(st.text(st.characters(), max_size=200))
def test_any_text_comes_back_as_it_was(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        original = run(texts={"artifact:raw.txt": text})
        journal.append([original])
        entry = journal.take(0)
        assert entry is not None
        assert journal.read(entry) == original
        journal.close()


def test_lone_surrogates_come_back_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run(texts={"artifact:raw.txt": "\ud83d alone"})])
    entry = journal.take(0)
    assert entry is not None
    assert journal.read(entry).texts == {"artifact:raw.txt": "\ud83d alone"}
    journal.close()


def test_what_was_kept_leaves_and_the_file_with_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b")])
    for _ in range(2):
        entry = journal.take(0)
        assert entry is not None
        journal.kept(entry)
    assert journal.outstanding() == 0
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_kept_is_found_by_the_next_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b"), run("c")])
    entry = journal.take(0)
    assert entry is not None
    journal.kept(entry)
    journal.close()
    assert count_left_behind([tmp_path]) == 2
    assert [found.name for found in taken_over(tmp_path)] == ["b", "c"]


def test_a_journal_in_use_is_left_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run()])
    code = (
        "import sys; from pathlib import Path; from tipbench.record.journal import left_behind;"
        "print(len(list(left_behind(Path(sys.argv[1])))))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert output == "0\n"
    journal.close()


def test_a_line_torn_by_a_crash_is_no_result(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("whole")])
    journal.append([run("torn")])
    journal.close()
    data = journal.path.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data)):
        journal.path.write_bytes(data[:cut])
        assert [found.name for found in taken_over(tmp_path)] == ["whole"]


def test_an_entry_put_back_comes_first_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([run("a"), run("b")])
    first = journal.take(0)
    assert first is not None
    journal.put_back(first)
    assert journal.take(0) == first
    journal.close()


def test_a_full_disk_stops_the_run_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append([run("before")])

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_module, "_write_all", full)
    with pytest.raises(JournalError, match=r"No space left on device.*make room"):
        journal.append([run("after")])
    monkeypatch.undo()
    journal.append([run("later")])
    journal.close()
    assert [found.name for found in taken_over(tmp_path)] == ["before", "later"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(blocked / "journal")


def test_a_long_run_does_not_grow_the_file_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 5000)
    journal = Journal(tmp_path)
    for n in range(100):
        journal.append([run(f"run-{n}")])
        entry = journal.take(0)
        assert entry is not None
        assert journal.read(entry).name == f"run-{n}"
        journal.kept(entry)
    assert journal.path.stat().st_size < 8000
    journal.close()


def test_each_server_and_experiment_has_its_own_folder(tmp_path: Path) -> None:
    folders = {journal_folder(tmp_path, server, experiment) for server in "ab" for experiment in "xy"}
    assert len(folders) == 4
