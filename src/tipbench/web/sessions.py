"""Sessions: a browser that has logged in. A signed cookie says which token it came with; what ended stays ended.

The cookie holds no secret and no rights: both are looked up by the token's id on every request, so a revoked token
ends its sessions at once. The signature keeps strangers from making one up.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tipbench.errors import UsageError
from tipbench.generate.durable import sync_folder
from tipbench.generate.home import in_home
from tipbench.web.database import Database, panel_folder

KEY_FILE = "session.key"
COOKIE = "tipbench_session"
LONGEST_COOKIE = 600
_KEY_BYTES = 32
_ID_BYTES = 24


@dataclass(frozen=True)
class Session:
    """One login. Times are whole seconds since 1970."""

    id: str
    token_id: str
    issued: int
    expires: int


class Sessions:
    """Begins, recognises and ends sessions."""

    def __init__(self, key: bytes, database: Database, *, life_s: int, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._database = database
        self._life_s = life_s
        self._clock = clock

    def begin(self, token_id: str) -> Session:
        """A new session, with an id that was never used before: whoever planted an old one gains nothing."""
        now = int(self._clock())
        return Session(secrets.token_urlsafe(_ID_BYTES), token_id, now, now + self._life_s)

    def seal(self, session: Session) -> str:
        """The cookie's value."""
        said = [session.id, session.token_id, session.issued, session.expires]
        body = _encoded(json.dumps(said, separators=(",", ":")).encode())
        return f"{body}.{_encoded(self._sign(b'session', body.encode()))}"

    def recognise(self, value: str) -> Session | None:
        """The session of a cookie that we sealed, while it has neither expired nor ended."""
        body, _, signature = value.partition(".")
        if len(value) > LONGEST_COOKIE or not value.isascii():
            return None
        if not hmac.compare_digest(_encoded(self._sign(b"session", body.encode())), signature):
            return None
        session = _read(body)
        if session is None or session.expires <= self._clock() or self._has_ended(session):
            return None
        return session

    def end(self, session: Session) -> None:
        """Log out: the cookie is worth nothing from now on, wherever a copy of it may be."""
        self._database.rows("DELETE FROM ended_sessions WHERE expires <= ?", (int(self._clock()),))
        self._database.rows("INSERT OR IGNORE INTO ended_sessions VALUES (?, ?)", (session.id, session.expires))

    def csrf(self, session: Session) -> str:
        """What every change made with this session's cookie must bring along; only our own pages know it."""
        return _encoded(self._sign(b"csrf", session.id.encode()))

    def csrf_fits(self, session: Session, given: str) -> bool:
        """Whether it is this session's."""
        return hmac.compare_digest(self.csrf(session).encode(), given.encode("utf-8", "surrogatepass"))

    def _has_ended(self, session: Session) -> bool:
        return bool(self._database.rows("SELECT 1 FROM ended_sessions WHERE id = ?", (session.id,)))

    def _sign(self, purpose: bytes, message: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b"\0" + message, hashlib.sha256)


def load_key(home: Path) -> bytes:
    """The key that cookies are signed with; made on first use, for the owner's eyes only."""
    path = panel_folder(home) / KEY_FILE
    with in_home(path, "cannot be read"):
        if not path.exists():
            _make_key(path)
        mode, key = path.stat().st_mode, path.read_bytes()
    if mode & 0o077:
        raise UsageError(
            f"{path} signs the panel's sessions and may be read by others (mode {mode & 0o777:o}). "
            "Delete it: the panel makes a new one, and everybody logs in again."
        )
    if len(key) != _KEY_BYTES:
        raise UsageError(f"{path} has {len(key)} bytes instead of {_KEY_BYTES}. Delete it: the panel makes a new one.")
    return key


def _make_key(path: Path) -> None:
    """Written beside and linked into place: of two panels that start at once both use the first one's key, whole."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(fresh, path)
        except FileExistsError:
            return
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


def _read(body: str) -> Session | None:
    try:
        said = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        session_id, token_id, issued, expires = said
        return Session(str(session_id), str(token_id), int(issued), int(expires))
    except (ValueError, TypeError, binascii.Error):
        return None


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
