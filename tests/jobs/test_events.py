"""Events on disk: read back even after truncation, damage or additions of another version."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.jobs.folder import EventWriter, read_events, read_result
from tipbench.record import events as wire
from tipbench.record.events import (
    EVENT_TYPES,
    MAX_LINE_BYTES,
    MAX_TEXT_CHARS,
    event_json,
    event_line,
    parse_line,
    strip_logins,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=60).filter(lambda text: strip_logins(text) == text)
EVENTS = st.one_of(
    st.builds(wire.Message, TEXT, st.booleans()),
    st.builds(wire.BlockStarted, TEXT, st.integers(0, 10**6), st.integers(0, 10**6)),
    st.builds(
        wire.CellFinished,
        *(TEXT, TEXT, TEXT),
        done=st.integers(0, 10**6),
        total=st.integers(0, 10**6),
        failure=st.none() | TEXT,
        tokens_per_s=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ),
    st.builds(wire.Waiting, TEXT, st.floats(0, 1e6)),
    st.builds(wire.Evidence, *[st.integers(0, 99)] * 2, st.floats(0, 1e6), st.integers(0, 9), foreign=st.tuples(TEXT)),
    st.builds(wire.Judging, TEXT, *[st.integers(0, 99)] * 3),
    st.builds(wire.Exit, st.integers(-64, 255)),
)


def write_events(path: Path, *events: wire.Event) -> Path:
    writer = EventWriter(path)
    for event in events:
        writer.write(event)
    writer.close()
    return path


def read_back(path: Path, after: int = 0) -> list[wire.Event]:
    return [each.event for each in read_events(path, after)]


def test_the_vocabulary_names_every_event_once() -> None:
    assert set(EVENT_TYPES.values()) == set(get_args(wire.Event))
    assert all("event" not in {field.name for field in fields(kind)} for kind in EVENT_TYPES.values())


@given(EVENTS, st.floats(0, 4e9))
def test_an_event_round_trips(event: wire.Event, at: float) -> None:
    parsed = parse_line(event_line(event, at))
    assert parsed is not None
    assert parsed[1] == event


@given(st.lists(EVENTS, max_size=8), st.integers(0, 400))
def test_an_incomplete_line_is_not_read_yet(events: list[wire.Event], cut: int) -> None:
    content = b"".join(event_line(event, 0) for event in events)
    part = content[:cut]
    path = Path(os.environ["TIPBENCH_HOME"]).with_name("part.jsonl")
    path.write_bytes(part)
    first = read_events(path)
    assert [each.event for each in first] == events[: part.count(b"\n")]
    path.write_bytes(content)
    rest = read_back(path, first[-1].cursor if first else 0)
    assert [each.event for each in first] + rest == events


@given(st.lists(EVENTS, max_size=5), st.binary(max_size=80), st.integers(-10, 2000))
def test_damaged_lines_and_invalid_cursors_never_raise_or_hide_later_events(
    events: list[wire.Event], noise: bytes, after: int
) -> None:
    path = Path(os.environ["TIPBENCH_HOME"]).with_name("noise.jsonl")
    lines = [event_line(event, 0) for event in events]
    path.write_bytes(noise + b"\n" + b"".join(lines))
    assert read_back(path)[-len(events) :] == events if events else True
    assert all(event in events for event in read_back(path, max(after, len(noise) + 1)))
    read_result(path)


def test_a_line_that_is_not_an_event_is_skipped() -> None:
    for line in [
        *(b"", b"\n", b"{", b"null", b"[1]", b'"x"', b"{}", b'{"at": "x"}', b'{"at": 1, "event": "nosuch"}'),
        *(b'{"at": "x", "event": []}', b'{"at": "x", "event": "exit", "code": "many"}', b"[" * 50_000),
        b'{"at": "x", "event": "message", "text": "' + b"x" * MAX_LINE_BYTES + b'"}',
    ]:
        assert parse_line(line) is None


def test_fields_of_a_later_version_are_ignored() -> None:
    line = b'{"at": "2030-01-01T00:00:00Z", "event": "exit", "code": 0, "new": {"x": [1]}}\n'
    assert parse_line(line) == ("2030-01-01T00:00:00Z", wire.Exit(0))


def test_a_line_over_the_size_limit_is_skipped(tmp_path: Path) -> None:
    path = write_events(tmp_path / "e", wire.Message("before"))
    with path.open("ab") as file:
        file.write(b"x" * (3 * MAX_LINE_BYTES) + b"\n")
    write_events(path, wire.Exit(0))
    assert read_back(path) == [wire.Message("before"), wire.Exit(0)]


def test_texts_are_truncated_and_contain_no_login() -> None:
    plain = event_json(wire.Message("see http://anna:p@w@box:5000/x and https://tok@y " + "z" * 5000))
    assert plain["text"].startswith("see http://box:5000/x and https://y z")
    assert len(plain["text"]) == MAX_TEXT_CHARS


def test_a_number_that_json_does_not_have_is_unknown() -> None:
    for value in [float("inf"), float("nan")]:
        cell = wire.CellFinished("m", "p", "s", 1, 2, tokens_per_s=value)
        assert json.loads(event_line(cell, 0))["tokens_per_s"] is None


def test_a_lone_surrogate_round_trips() -> None:
    parsed = parse_line(event_line(wire.Message("tip \ud83d"), 0))
    assert parsed is not None
    assert str(parsed[1]).encode()


def test_a_line_torn_by_a_full_disk_is_skipped_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e"
    writer = EventWriter(path)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        real(fd, data[:10])
        raise OSError(28, "No space left on device")

    writer.write(wire.Message("first"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        writer.write(wire.Message("torn"))
    writer.write(wire.Message("second"))
    writer.write(wire.Exit(1), durable=True)
    writer.close()
    writer.write(wire.Message("too late"))
    assert read_back(path) == [wire.Message("first"), wire.Message("second"), wire.Exit(1)]


def test_several_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "e"
    writer = EventWriter(path)

    def write(name: str) -> None:
        for number in range(200):
            writer.write(wire.Message(f"{name} {number} {'x' * 200}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(read_events(path, limit=10_000)) == 800
    assert path.read_bytes().count(b"\n") == 800


@pytest.mark.parametrize(
    ("events", "ending"),
    [
        ([], None),
        ([wire.Message("x")], None),
        ([wire.Exit(0)], (0, "", None)),
        ([wire.Failure("no MLflow"), wire.Exit(1)], (1, "no MLflow", None)),
        ([wire.Collected("e", 8, 0, 8, 3, url="u"), wire.Exit(1)], (1, "3 of 8 cells failed; a retry", "u")),
        ([wire.Judged("s", "anna", 40, 0, True, False), wire.Exit(1)], (1, "The scores of anna are held", None)),
        ([wire.Judged("s", "anna", 38, 2, False, False), wire.Exit(1)], (1, "2 items have no score", None)),
        ([wire.Message("x" * 1999)] * 100 + [wire.Failure("late"), wire.Exit(2)], (2, "late", None)),
    ],
)
def test_the_result_is_the_exit_code_and_the_failure(
    events: list[Any], ending: tuple[int, str, str] | None, tmp_path: Path
) -> None:
    found = read_result(write_events(tmp_path / "e", *events))
    if ending is None:
        assert found is None
    else:
        assert found is not None
        assert (found.exit_code, found.collected and found.collected.url) == (ending[0], ending[2])
        assert found.failure_reason.startswith(ending[1])


def test_a_file_that_is_not_there_holds_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "nosuch") == []
    assert read_result(tmp_path / "nosuch") is None
