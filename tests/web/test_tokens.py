"""Tokens: shown once, kept as hashes, valid until they expire or are revoked."""

from __future__ import annotations

import contextlib
import hmac
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.clock import Clock
from tipbench.errors import UsageError
from tipbench.web.auth import MAX_LIFE_S, Role, TokenStore, parse_lifetime
from tipbench.web.database import FILE, FOLDER, panel_database

SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
property_settings = settings(suppress_health_check=SUPPRESSED, deadline=None)


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def tokens(home: Path, clock: Clock) -> Iterator[TokenStore]:
    with contextlib.closing(panel_database(home)) as database:
        yield TokenStore(database, clock)


def test_a_token_is_found_by_its_secret_only(tokens: TokenStore) -> None:
    token, secret = tokens.create(Role.JUDGE, "anna", life_s=60)
    assert tokens.find(secret) is not None
    assert tokens.find(secret.upper()) is None
    assert tokens.find(token.id) is None


def test_a_token_is_valid_even_if_its_use_cannot_be_stored(tokens: TokenStore, clock: Clock) -> None:
    """As on a full disk."""
    token, secret = tokens.create(Role.JUDGE, "anna", life_s=None)
    tokens._database.execute(
        "CREATE TRIGGER full BEFORE UPDATE ON tokens BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
    )
    assert tokens.find(secret) == token


@property_settings
@given(text=st.text(max_size=120))
def test_no_other_text_is_a_token(tokens: TokenStore, text: str) -> None:
    tokens.create(Role.ADMIN, "anna", life_s=None)
    assert tokens.find(text) is None


@property_settings
@given(data=st.data())
def test_a_token_with_one_character_changed_is_another(tokens: TokenStore, data: st.DataObject) -> None:
    _, secret = tokens.create(Role.ADMIN, "anna", life_s=None)
    at = data.draw(st.integers(0, len(secret) - 1))
    other = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_ é"))
    changed = secret[:at] + other + secret[at + 1 :]
    assert (tokens.find(changed) is not None) == (changed == secret)


def test_two_tokens_never_share_id_or_secret(tokens: TokenStore) -> None:
    created = [tokens.create(Role.JUDGE, "anna", life_s=60) for _ in range(50)]
    assert len({token.id for token, _ in created}) == len({secret for _, secret in created}) == 50


def test_a_tokens_secret_is_not_stored(tokens: TokenStore, home: Path) -> None:
    _, secret = tokens.create(Role.ADMIN, "anna", life_s=None)
    kept = b"".join(path.read_bytes() for path in (home / FOLDER).iterdir())
    assert secret.encode() not in kept
    assert secret.split("_", 2)[2].encode() not in kept


def test_the_token_database_is_private(tokens: TokenStore, home: Path) -> None:
    assert stat.S_IMODE((home / FOLDER / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE((home / FOLDER).stat().st_mode) == 0o700


def test_an_expired_token_is_not_found(tokens: TokenStore, clock: Clock) -> None:
    token, secret = tokens.create(Role.JUDGE, "anna", life_s=60)
    clock.now += 59
    assert tokens.find(secret) is not None
    clock.now += 1
    assert tokens.find(secret) is None
    assert token.state(clock.now) == "expired"


def test_a_token_revoked_by_another_process_is_rejected_immediately(tokens: TokenStore, home: Path) -> None:
    token, secret = tokens.create(Role.JUDGE, "anna", life_s=None)
    with contextlib.closing(panel_database(home)) as database:
        assert TokenStore(database).revoke(token.id)
    assert tokens.find(secret) is None


def test_revoking_a_revoked_or_unknown_token_has_no_effect(tokens: TokenStore) -> None:
    token, _ = tokens.create(Role.JUDGE, "anna", life_s=None)
    assert [tokens.revoke(token.id), tokens.revoke(token.id), tokens.revoke("nobody")] == [True, False, False]


def test_the_last_use_is_stored_once_a_minute(tokens: TokenStore, clock: Clock) -> None:
    token, secret = tokens.create(Role.JUDGE, "anna", life_s=None)
    seen = []
    for seconds in (0, 30, 40):
        clock.now += seconds
        tokens.find(secret)
        found = tokens.get(token.id)
        seen.append(found and found.last_used)
    assert seen == [1_000_000, 1_000_000, 1_000_070]


def test_secrets_are_compared_in_constant_time(tokens: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known id, an unknown one and no token at all go through the same comparison of the same length."""
    _, secret = tokens.create(Role.ADMIN, "anna", life_s=None)
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def spied(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr("tipbench.web.auth.hmac.compare_digest", spied)
    for text in (secret, secret[:-1] + "x", "tipbench_" + "0" * 12 + "_" + "a" * 43, "", "nonsense"):
        tokens.find(text)
    assert compared == [(64, 64)] * 5


def test_only_an_active_admin_token_counts_as_admin(tokens: TokenStore, clock: Clock) -> None:
    tokens.create(Role.JUDGE, "anna", life_s=None)
    assert not tokens.has_admin()
    tokens.create(Role.ADMIN, "boss", life_s=10)
    assert tokens.has_admin()
    clock.now += 10
    assert not tokens.has_admin()


def test_a_judge_token_needs_a_valid_name(tokens: TokenStore) -> None:
    for name in ["", "  ", "a\nb", "x" * 61, "rules", "ollama:llama3", " * "]:
        with pytest.raises(UsageError, match="A token's name must"):
            tokens.create(Role.JUDGE, name, life_s=None)


def test_a_lifetime_is_parsed() -> None:
    cases: list[tuple[str, int | None]] = [
        ("90m", 5400),
        ("12h", 43200),
        ("30d", 2592000),
        ("8w", 4838400),
        (" Never ", None),
    ]
    for text, seconds in cases:
        assert parse_lifetime(text) == seconds


@given(st.text(max_size=12))
def test_a_lifetime_is_bounded_or_rejected(text: str) -> None:
    with contextlib.suppress(UsageError):
        seconds = parse_lifetime(text)
        assert seconds is None or 0 < seconds <= MAX_LIFE_S


def test_an_invalid_lifetime_is_rejected() -> None:
    for text in ["", "0d", "-1d", "1.5h", "30", "d", "99999w", "1y", "٣d"]:
        with pytest.raises(UsageError, match="A lifetime must be"):
            parse_lifetime(text)
