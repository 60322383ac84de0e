"""Sessions: a cookie that cannot be forged, expires, and is invalid after the session's end."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.clock import Clock
from tipbench.errors import UsageError
from tipbench.sqlite import Database
from tipbench.web.auth import KEY_FILE, Sessions, load_key
from tipbench.web.database import FOLDER, panel_database
from web.test_tokens import property_settings

KEY = b"k" * 32


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(home: Path) -> Iterator[Database]:
    with contextlib.closing(panel_database(home)) as opened:
        yield opened


@pytest.fixture
def sessions(database: Database, clock: Clock) -> Sessions:
    return Sessions(KEY, database, life_s=100, clock=clock)


def test_a_sealed_session_authenticates_with_all_fields(sessions: Sessions) -> None:
    session = sessions.begin("token-1")
    assert sessions.authenticate(sessions.seal(session)) == session


def test_every_login_creates_a_new_session(sessions: Sessions) -> None:
    assert len({sessions.begin("token-1").id for _ in range(50)}) == 50


@property_settings
@given(text=st.text(max_size=700))
def test_text_without_our_signature_is_not_a_session(sessions: Sessions, text: str) -> None:
    assert sessions.authenticate(text) is None


@property_settings
@given(data=st.data())
def test_a_cookie_with_one_character_changed_is_refused(sessions: Sessions, data: st.DataObject) -> None:
    sealed = sessions.seal(sessions.begin("token-1"))
    at = data.draw(st.integers(0, len(sealed) - 1))
    other = data.draw(st.sampled_from("abcXYZ019-_.= é"))
    changed = sealed[:at] + other + sealed[at + 1 :]
    assert (sessions.authenticate(changed) is not None) == (changed == sealed)


def test_a_session_expires(sessions: Sessions, clock: Clock) -> None:
    sealed = sessions.seal(sessions.begin("token-1"))
    clock.now += 99
    assert sessions.authenticate(sealed)
    clock.now += 1
    assert sessions.authenticate(sealed) is None


def test_an_ended_session_stays_ended_after_a_restart(sessions: Sessions, database: Database, clock: Clock) -> None:
    session = sessions.begin("token-1")
    sessions.end(session)
    again = Sessions(KEY, database, life_s=100, clock=clock)
    assert again.authenticate(sessions.seal(session)) is None


def test_expired_entries_of_ended_sessions_are_removed(sessions: Sessions, database: Database, clock: Clock) -> None:
    for _ in range(20):
        sessions.end(sessions.begin("token-1"))
    clock.now += 200
    sessions.end(sessions.begin("token-1"))
    assert len(database.execute("SELECT id FROM ended_sessions")) == 1


def test_a_session_of_another_key_is_refused(sessions: Sessions, database: Database, clock: Clock) -> None:
    other = Sessions(b"o" * 32, database, life_s=100, clock=clock)
    assert sessions.authenticate(other.seal(other.begin("token-1"))) is None


def test_a_csrf_token_is_valid_for_its_session_only(sessions: Sessions) -> None:
    session, other = sessions.begin("token-1"), sessions.begin("token-1")
    assert sessions.is_csrf_token(session, sessions.csrf(session))
    assert not sessions.is_csrf_token(session, sessions.csrf(other))
    assert not any(sessions.is_csrf_token(session, text) for text in ("", "x", "é" * 43, "\ud800"))


def test_the_csrf_token_is_not_in_the_cookie(sessions: Sessions) -> None:
    session = sessions.begin("token-1")
    assert sessions.csrf(session) not in sessions.seal(session)


def test_the_session_key_is_created_once_and_private(home: Path) -> None:
    key = load_key(home)
    assert key == load_key(home)
    assert len(key) == 32
    assert stat.S_IMODE((home / FOLDER / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in (home / FOLDER).iterdir()] == [KEY_FILE]


def test_panels_that_start_together_share_one_key(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(load_key, [home] * 40))) == 1


def test_a_session_key_readable_by_others_is_rejected(home: Path) -> None:
    load_key(home)
    (home / FOLDER / KEY_FILE).chmod(0o644)
    with pytest.raises(UsageError, match=r"must not be readable by others \(mode 644\). Delete it"):
        load_key(home)


def test_a_truncated_session_key_is_rejected(home: Path) -> None:
    load_key(home)
    (home / FOLDER / KEY_FILE).write_bytes(b"short")
    with pytest.raises(UsageError, match="has 5 bytes instead of 32"):
        load_key(home)
