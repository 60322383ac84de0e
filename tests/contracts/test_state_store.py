"""The contract of stores of policy state: documents by user and name, replaced atomically."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tipbench.serve.event_log import open_database
from tipbench.serve.state import TALLIES
from tipbench.serve.state_store import STORE_KINDS, FileStore, StateStore, open_state

A, B = "a" * 32, "b" * 32


@pytest.fixture(params=STORE_KINDS)
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StateStore]:
    with closing(open_database(tmp_path)) as database:
        yield open_state(tmp_path, request.param, database, database)


def test_a_saved_document_is_loaded_and_none_deletes_it(store: StateStore) -> None:
    store.save({(B, "egreedy/v1"): b"{}", (A, "linucb"): b"1", (A, TALLIES): b"\x00\xff"})
    assert list(store.users()) == [A, B]
    store.save({(A, "linucb"): b"2", (B, "egreedy/v1"): None, (B, "egreedy/v2"): None})
    assert store.load(A) == {"linucb": b"2", TALLIES: b"\x00\xff"}
    assert store.load(B) == {}
    assert list(store.users()) == [A]


def test_a_document_set_aside_is_gone_from_the_store(store: StateStore) -> None:
    store.save({(A, "egreedy/v1"): b"half a docum", (B, "egreedy/v1"): b"whole"})
    place = store.set_aside(A, "egreedy/v1")
    assert store.load(A) == {}
    assert "corrupt" in place
    assert store.load(B) == {"egreedy/v1": b"whole"}


def test_an_erase_deletes_all_files_of_the_user_including_those_set_aside(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.save({(A, "egreedy/v1"): b"half a docum", (A, TALLIES): b"whole", (B, "egreedy/v1"): b"whole"})
    store.set_aside(A, "egreedy/v1")
    store.erase(A)
    assert not list(tmp_path.glob(f"{A}*"))
    assert store.load(B) == {"egreedy/v1": b"whole"}
