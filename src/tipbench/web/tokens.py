"""Tokens: who may use the panel. Kept as hashes, shown once, valid until they expire or are revoked.

A token is 256 random bits, so a plain SHA-256 keeps it safe: nobody can try them all, and there is no dictionary to
try first. A slow hash would only hand strangers a way to keep the processor busy.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tipbench.errors import UsageError
from tipbench.judge.checking import name_fault, tidy_name
from tipbench.times import iso
from tipbench.web.database import Database

EVERYBODY = "*"  # where a name is asked for
LONGEST_TOKEN = 256
LONGEST_LIFE_S = 10 * 366 * 86400
_ID_BYTES = 6
_NOTE_USE_S = 60  # how often the time of the last use is written down
_TOKEN = re.compile(r"tipbench_([0-9a-f]{12})_[A-Za-z0-9_-]{43}", re.ASCII)
_LIFE = re.compile(r"([1-9][0-9]{0,5})([mhdw])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NOBODY = hashlib.sha256(b"nobody has this token").hexdigest()
_COLUMNS = "id, role, name, created, expires, revoked, last_used"


class Role(StrEnum):
    """What a token allows."""

    ADMIN = "admin"  # everything
    JUDGE = "judge"  # export and apply sheets of one's own; nothing that unblinds


@dataclass(frozen=True)
class Token:
    """A token as it is kept; times are whole seconds since 1970, None is never. The secret itself is not here."""

    id: str
    role: Role
    name: str
    created: int
    expires: int | None = None
    revoked: int | None = None
    last_used: int | None = None

    def state(self, now: float) -> str:
        """active, expired or revoked."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"

    def to_json(self, now: float) -> dict[str, Any]:
        """Plain values, times in ISO form."""
        times = ("created", "expires", "revoked", "last_used")
        return {
            "id": self.id,
            "role": str(self.role),
            "name": self.name,
            "state": self.state(now),
            **{name: iso(getattr(self, name)) for name in times},
        }


class TokenStore:
    """The tokens of one home folder; a change made elsewhere counts at once."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self.clock = clock

    def create(self, role: Role, name: str, *, life_s: int | None) -> tuple[Token, str]:
        """A new token and its secret, which cannot be had again."""
        name = checked_name(name, role)
        now = int(self.clock())
        token = Token(secrets.token_hex(_ID_BYTES), role, name, now, None if life_s is None else now + life_s)
        secret = f"tipbench_{token.id}_{secrets.token_urlsafe(32)}"
        self._database.rows(
            "INSERT INTO tokens (id, sha256, role, name, created, expires) VALUES (?, ?, ?, ?, ?, ?)",
            (token.id, digest(secret), str(role), name, token.created, token.expires),
        )
        return token, secret

    def find(self, secret: str) -> Token | None:
        """The token of this secret while it is active."""
        match = _TOKEN.fullmatch(secret)
        rows = self._database.rows(f"SELECT sha256, {_COLUMNS} FROM tokens WHERE id = ?", (match[1],)) if match else []  # noqa: S608 - columns are fixed
        known = str(rows[0][0]) if rows else _NOBODY
        # Compared also where there is nothing to compare with: an unknown id must not answer sooner.
        same = hmac.compare_digest(digest(secret), known)
        token = _token(rows[0][1:]) if rows else None
        if not same or token is None or token.state(self.clock()) != "active":
            return None
        self._note_use(token)
        return token

    def get(self, token_id: str) -> Token | None:
        """The token of this id, in whatever state."""
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM tokens WHERE id = ?", (token_id,))  # noqa: S608
        return _token(rows[0]) if rows else None

    def all(self) -> list[Token]:
        """Every token ever made, oldest first."""
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM tokens ORDER BY created, id")  # noqa: S608
        return [_token(row) for row in rows]

    def revoke(self, token_id: str) -> bool:
        """End a token now; False when it was revoked before or never was."""
        statement = "UPDATE tokens SET revoked = ? WHERE id = ? AND revoked IS NULL RETURNING id"
        return bool(self._database.rows(statement, (int(self.clock()), token_id)))

    def has_admin(self) -> bool:
        """Whether somebody could log in as admin with a token of this store."""
        now = self.clock()
        return any(token.role is Role.ADMIN and token.state(now) == "active" for token in self.all())

    def _note_use(self, token: Token) -> None:
        now = int(self.clock())
        if token.last_used is None or now - token.last_used >= _NOTE_USE_S:
            self._database.rows("UPDATE tokens SET last_used = ? WHERE id = ?", (now, token.id))


def digest(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def checked_name(name: str, role: Role) -> str:
    """A token's name as it is kept; a judge's is the name the scores are kept under. UsageError when it is none."""
    if fault := name_fault(name, allow_reserved=role is Role.ADMIN):
        raise UsageError(f"A token's name is {fault} (got {name[:80]!r}).")
    if tidy_name(name) == EVERYBODY:
        raise UsageError(f"A token's name is not {EVERYBODY}, which stands for everybody. Choose another.")
    return tidy_name(name)


def read_life(text: str) -> int | None:
    """How long a token shall live, in seconds: 90m, 12h, 30d, 8w; never is None. UsageError for anything else."""
    word = text.strip().lower()
    if word == "never":
        return None
    match = _LIFE.fullmatch(word)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= LONGEST_LIFE_S:
        raise UsageError(
            f"A token expires after a time like 12h, 30d or 8w, at most 10 years, or never (got {text[:40]!r})."
        )
    return seconds


def _token(row: tuple[Any, ...]) -> Token:
    token_id, role, name, created, expires, revoked, last_used = row
    return Token(token_id, Role(role), name, created, expires, revoked, last_used)
