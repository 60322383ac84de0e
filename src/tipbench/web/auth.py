"""Authentication and authorisation: tokens, sessions, identities, role checks."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from fastapi.security import APIKeyCookie, HTTPBearer
from starlette.concurrency import run_in_threadpool

from tipbench.errors import TipbenchError, UsageError
from tipbench.files import convert_home_errors, create_private
from tipbench.judge.check import normalize_name, unmet_name_requirement
from tipbench.sqlite import Database, Row
from tipbench.text import iso
from tipbench.web.database import panel_folder
from tipbench.web.errors import Forbidden, TooManyAttempts, Unauthorised
from tipbench.web.forms import read_form
from tipbench.web.login_limiter import LoginLimiter
from tipbench.web.security import Hosts, client_key

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

log = logging.getLogger("tipbench.web")
EVERYBODY = "*"  # as a judge's name: all judges
MAX_TOKEN_LENGTH = 256
MAX_LIFE_S = 10 * 366 * 86400  # ten years
_TOKEN_ID_BYTES = 6
_LAST_USED_INTERVAL_S = 60  # minimum time between two updates of a token's last_used
_TOKEN_PATTERN = re.compile(r"tipbench_([0-9a-f]{12})_[A-Za-z0-9_-]{43}", re.ASCII)
_LIFETIME_PATTERN = re.compile(r"([1-9][0-9]{0,5})([mhdw])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DUMMY_HASH = hashlib.sha256(b"no token has this hash").hexdigest()
_COLUMNS = "id, role, name, created, expires, revoked, last_used"


class Role(StrEnum):
    """Role of a token."""

    ADMIN = "admin"  # full access
    JUDGE = "judge"  # only its own sheets and batches, blind
    APP = "app"  # only the policy server; the panel rejects it everywhere


@dataclass(frozen=True)
class Token:
    """A stored token, without its secret. Times are whole Unix seconds; None means never."""

    id: str
    role: Role
    name: str
    created: int
    expires: int | None = None
    revoked: int | None = None
    last_used: int | None = None

    def state(self, now: float) -> str:
        """Return `active`, `expired` or `revoked`."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the token as JSON values, with times in ISO 8601."""
        times = ("created", "expires", "revoked", "last_used")
        return {
            "id": self.id,
            "role": str(self.role),
            "name": self.name,
            "state": self.state(now),
            **{name: iso(getattr(self, name)) for name in times},
        }


class TokenStore:
    """Tokens of one home folder; changes by other processes take effect immediately."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self.clock = clock

    def create(self, role: Role, name: str, *, life_s: int | None) -> tuple[Token, str]:
        """Create a token and return it with its secret, which is not stored and cannot be retrieved later."""
        name = normalize_token_name(name, role)
        now = int(self.clock())
        expires = None if life_s is None else now + life_s
        token = Token(secrets.token_hex(_TOKEN_ID_BYTES), role, name, created=now, expires=expires)
        secret = f"tipbench_{token.id}_{secrets.token_urlsafe(32)}"
        self._database.execute(
            "INSERT INTO tokens (id, sha256, role, name, created, expires) VALUES (?, ?, ?, ?, ?, ?)",
            (token.id, digest(secret), str(role), name, token.created, token.expires),
        )
        return token, secret

    def same_judge_ids(self, token: Token) -> list[str]:
        """Return the ids of this judge's other active tokens; empty if it is not a judge's token.

        Tokens with the same name are one judge's, because scores are stored by name.
        """
        if token.role is not Role.JUDGE:
            return []
        same_judge = (other for other in self.all() if (other.role, other.name) == (Role.JUDGE, token.name))
        return [other.id for other in same_judge if other.id != token.id and self.is_active(other)]

    def find(self, secret: str) -> Token | None:
        """Return the active token with this secret, or None."""
        rows: list[Row] = []
        match = _TOKEN_PATTERN.fullmatch(secret)
        if match:
            statement = f"SELECT sha256, {_COLUMNS} FROM tokens WHERE id = ?"  # noqa: S608 - columns are fixed
            rows = self._database.execute(statement, (match[1],))
        token, stored_hash = None, _DUMMY_HASH
        if rows:
            stored_hash, *columns = rows[0]
            token = _read_token(columns)
        # For an unknown id, compare with a dummy, so that response times do not reveal which ids exist.
        is_same = hmac.compare_digest(digest(secret), stored_hash)
        if not is_same or token is None or not self.is_active(token):
            return None
        now = int(self.clock())
        if token.last_used is None or now - token.last_used >= _LAST_USED_INTERVAL_S:
            try:
                self._database.execute("UPDATE tokens SET last_used = ? WHERE id = ?", (now, token.id))
            except TipbenchError as exc:  # the token is valid, even if the disk is full
                log.warning("the use of token %s could not be stored: %s", token.id, exc)
        return token

    def get(self, token_id: str) -> Token | None:
        """Return the token with this id in any state, or None."""
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM tokens WHERE id = ?", (token_id,))  # noqa: S608
        return _read_token(rows[0]) if rows else None

    def all(self) -> list[Token]:
        """Return all tokens, including expired and revoked ones, oldest first."""
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM tokens ORDER BY created, id")  # noqa: S608
        return [_read_token(row) for row in rows]

    def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if it is unknown or already revoked."""
        statement = "UPDATE tokens SET revoked = ? WHERE id = ? AND revoked IS NULL RETURNING id"
        return bool(self._database.execute(statement, (int(self.clock()), token_id)))

    def has_admin(self) -> bool:
        """Whether the store has an active admin token."""
        return any(token.role is Role.ADMIN and self.is_active(token) for token in self.all())

    def is_active(self, token: Token) -> bool:
        return token.state(self.clock()) == "active"


def create_token(store: TokenStore, role: str, name: str, lifetime: str) -> dict[str, Any]:
    """Create a token and return its JSON, with its secret. Raises UsageError if the name or lifetime is invalid."""
    token, secret = store.create(Role(role), name, life_s=parse_lifetime(lifetime))
    return {**token.to_json(store.clock()), "token": secret, "same_judge": store.same_judge_ids(token)}


def digest(secret: str) -> str:
    """Return the SHA-256 hash under which a secret is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def normalize_token_name(name: str, role: Role) -> str:
    """Return the normalised name of a token. Raises UsageError if it is invalid."""
    if requirement := unmet_name_requirement(name, allow_reserved_name=role is not Role.JUDGE):
        raise UsageError(f"A token's name must be {requirement} (got {name[:80]!r}).")
    if normalize_name(name) == EVERYBODY:
        raise UsageError(f"A token's name must not be {EVERYBODY}, which means all judges. Choose another.")
    return normalize_name(name)


def parse_lifetime(text: str) -> int | None:
    """Parse a lifetime such as 90m, 12h, 30d or 8w into seconds, and `never` into None. Raises UsageError."""
    word = text.strip().lower()
    if word == "never":
        return None
    match = _LIFETIME_PATTERN.fullmatch(word)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= MAX_LIFE_S:
        raise UsageError(f"A lifetime must be like 12h, 30d or 8w, at most 10 years, or never (got {text[:40]!r}).")
    return seconds


def _read_token(row: Iterable[Any]) -> Token:
    token_id, role, *rest = row
    return Token(token_id, Role(role), *rest)


KEY_FILE = "session.key"
COOKIE = "tipbench_session"
MAX_COOKIE_LENGTH = 600
_KEY_BYTES = 32
_SESSION_ID_BYTES = 24


@dataclass(frozen=True)
class Session:
    """A login session. Times are whole Unix seconds."""

    id: str
    token_id: str
    issued: int
    expires: int


class Sessions:
    """Creates, validates and ends sessions stored in signed cookies."""

    def __init__(self, key: bytes, database: Database, *, life_s: int, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._database = database
        self._life_s = life_s
        self._clock = clock

    def begin(self, token_id: str) -> Session:
        """Create a session. It always has a new id, to prevent session fixation."""
        now = int(self._clock())
        return Session(secrets.token_urlsafe(_SESSION_ID_BYTES), token_id, now, now + self._life_s)

    def seal(self, session: Session) -> str:
        """Return the value of the session's cookie, with its signature."""
        fields = [session.id, session.token_id, session.issued, session.expires]
        body = _base64url(json.dumps(fields, separators=(",", ":")).encode())
        return f"{body}.{_base64url(self._sign(b'session', body.encode()))}"

    def authenticate(self, value: str) -> Session | None:
        """Return the session of a cookie value. None if the signature is invalid or the session expired or ended."""
        body, _, signature = value.partition(".")
        if len(value) > MAX_COOKIE_LENGTH or not value.isascii():  # compare_digest raises for non-ASCII text
            return None
        if not hmac.compare_digest(_base64url(self._sign(b"session", body.encode())), signature):
            return None
        try:
            padding = "=" * (-len(body) % 4)  # removed by `_base64url`
            fields = json.loads(base64.urlsafe_b64decode(body + padding))
            session_id, token_id, issued, expires = fields
            session = Session(str(session_id), str(token_id), int(issued), int(expires))
        except (ValueError, TypeError):
            return None
        if session.expires <= self._clock():
            return None
        ended = self._database.execute("SELECT 1 FROM ended_sessions WHERE id = ?", (session.id,))
        return None if ended else session

    def end(self, session: Session) -> None:
        """End a session; all copies of its cookie become invalid."""
        self._database.execute("DELETE FROM ended_sessions WHERE expires <= ?", (int(self._clock()),))
        self._database.execute("INSERT OR IGNORE INTO ended_sessions VALUES (?, ?)", (session.id, session.expires))

    def csrf(self, session: Session) -> str:
        """Return the CSRF token required for changes made with this session's cookie."""
        return _base64url(self._sign(b"csrf", session.id.encode()))

    def is_csrf_token(self, session: Session, text: str) -> bool:
        return hmac.compare_digest(self.csrf(session).encode(), text.encode("utf-8", "surrogatepass"))

    def _sign(self, purpose: bytes, message: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b"\0" + message, hashlib.sha256)


def load_key(home: Path) -> bytes:
    """Return the key that signs cookies. Creates it on first use, readable by its owner only. Raises UsageError."""
    path = panel_folder(home) / KEY_FILE
    with convert_home_errors(path, "cannot be read"):
        if not path.exists():
            # Does not replace an existing file: if two panels start at the same time, both use the same key.
            create_private(path, secrets.token_bytes(_KEY_BYTES))
        mode, key = path.stat().st_mode, path.read_bytes()
    if mode & 0o077:
        raise UsageError(
            f"{path} signs the panel's sessions and must not be readable by others (mode {mode & 0o777:o}). "
            "Delete it: the panel creates a new one, and all users have to log in again."
        )
    if len(key) != _KEY_BYTES:
        raise UsageError(
            f"{path} has {len(key)} bytes instead of {_KEY_BYTES}. Delete it: the panel creates a new one."
        )
    return key


def _base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OPERATOR_PREFIX = "environment-"  # begins the token id of TIPBENCH_ADMIN_TOKEN, which is not in the TokenStore
_REJECTED = "The token is invalid, expired or revoked. Create one with `tipbench token create`."

# For the OpenAPI document only; `authenticate` reads the credentials itself.
_bearer = HTTPBearer(auto_error=False, scheme_name="token", description="A token created with `tipbench token create`.")
_cookie = APIKeyCookie(
    name=COOKIE,
    auto_error=False,
    scheme_name="session",
    description=f"The session cookie set by POST /login. Changes also need the header {CSRF_HEADER}.",
)


@dataclass(frozen=True)
class Identity:
    """An authenticated client. `session` is None if it authenticated with a token."""

    name: str
    role: Role
    token_id: str
    session: Session | None = None

    @property
    def is_judge(self) -> bool:
        """Whether the role is judge: pages must keep a judge blind."""
        return self.role is Role.JUDGE


# Roles that a server rejects, with the error message.
PANEL_REFUSED_ROLES = {Role.APP: "An app's token may call the policy server (`tipbench serve`) and nothing else."}
POLICY_SERVER_REFUSED_ROLES = {
    Role.JUDGE: "A judge's token may judge and nothing else; `tipbench token create --role app` creates one for apps."
}


class TokenGuard:
    """Authenticates tokens. `refused` maps rejected roles to the error message."""

    def __init__(
        self, tokens: TokenStore, limiter: LoginLimiter, admin_token: str | None, refused: Mapping[Role, str]
    ) -> None:
        self.tokens = tokens
        self._limiter = limiter
        self._admin_hash = digest(admin_token) if admin_token else None
        self._refused = refused

    def by_token(self, secret: str, client: str) -> Identity:
        """Authenticate a token. Raises Unauthorised, Forbidden for a refused role, or TooManyAttempts.

        The rate limit applies to invalid tokens only, so that failed attempts of others do not lock out a valid client.
        Its purpose is to limit load and log messages; tokens are too long to be guessed anyway.
        """
        if len(secret) > MAX_TOKEN_LENGTH:
            secret = ""  # rejected below like every invalid token, without hashing a long text
        token = self.tokens.find(secret)
        if token is not None:
            if token.role in self._refused:
                raise Forbidden(self._refused[token.role])
            return Identity(token.name, token.role, token.id)
        if self._admin_hash is not None and hmac.compare_digest(digest(secret), self._admin_hash):
            return self._operator(self._admin_hash)
        wait_s = self._limiter.count_failure(client)
        if wait_s > 0:
            raise TooManyAttempts(wait_s)
        raise Unauthorised(_REJECTED, path="header.authorization")

    @staticmethod
    def _operator(admin_hash: str) -> Identity:
        """Return the operator's identity. A new TIPBENCH_ADMIN_TOKEN changes its token id and so ends old sessions."""
        return Identity("operator", Role.ADMIN, f"{_OPERATOR_PREFIX}{admin_hash[:16]}")


class Authenticator(TokenGuard):
    """Authenticates the panel's tokens and session cookies."""

    def __init__(
        self, tokens: TokenStore, sessions: Sessions, limiter: LoginLimiter, admin_token: str | None = None
    ) -> None:
        super().__init__(tokens, limiter, admin_token, PANEL_REFUSED_ROLES)
        self.sessions = sessions

    def by_cookie(self, value: str) -> Identity | None:
        """Authenticate a session cookie. Returns None if the session is invalid or its token is not active."""
        session = self.sessions.authenticate(value)
        if session is None:
            return None
        if session.token_id.startswith(_OPERATOR_PREFIX):
            if self._admin_hash is None:
                return None
            operator = self._operator(self._admin_hash)
            is_same = hmac.compare_digest(operator.token_id, session.token_id)
            return replace(operator, session=session) if is_same else None
        token = self.tokens.get(session.token_id)
        if token is None or not self.tokens.is_active(token):
            return None
        # Refused roles are not checked again: only a login with `by_token`, which refuses them, begins a session.
        return Identity(token.name, token.role, token.id, session)


async def authenticate(
    request: Request, _token: Annotated[object, Depends(_bearer)], _session: Annotated[object, Depends(_cookie)]
) -> Identity:
    """Authenticate by the headers, before the body is read. Raises Unauthorised, Forbidden or TooManyAttempts."""
    panel: Panel = request.app.state.panel
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorised("The header must be 'Authorization: Bearer TOKEN'.", path="header.authorization")
        return await run_in_threadpool(panel.authenticator.by_token, secret.strip(), client_of(request))
    identity = await run_in_threadpool(panel.authenticator.by_cookie, session_cookie(request))
    if identity is None:
        raise Unauthorised("Missing credentials: send 'Authorization: Bearer TOKEN', or log in at /login.")
    return identity


async def admit_request(
    request: Request, identity: Annotated[Identity, Depends(authenticate)]
) -> AsyncIterator[Identity]:
    """Check the CSRF token of an authenticated request. A judge's requests wait for a concurrency slot.

    Raises Busy, or Forbidden for a change with a session cookie but without its CSRF token.
    """
    panel: Panel = request.app.state.panel
    async with panel.concurrency.request(identity):
        if identity.session is not None and request.method not in SAFE_METHODS:
            check_origin(request, panel.options.hosts)
            csrf = request.headers.get(CSRF_HEADER)
            if not csrf:
                form = await read_form(request)
                csrf = form.get(CSRF_FIELD)
            if not panel.authenticator.sessions.is_csrf_token(identity.session, csrf or ""):
                raise Forbidden(
                    f"A change with a session cookie needs the CSRF token in the header {CSRF_HEADER} or the form "
                    f"field {CSRF_FIELD}. Reload the page and try again.",
                    code="csrf",
                    path=f"header.{CSRF_HEADER.lower()}",
                )
        request.state.identity = identity
        yield identity


def require_admin(identity: Annotated[Identity, Depends(admit_request)]) -> Identity:
    """Require the role admin. Raises Forbidden for judges; the role app is rejected by `authenticate`."""
    if identity.is_judge:
        raise Forbidden("A judge's token may judge, on sheets and batches of its own, and nothing else.")
    return identity


def require_judge(identity: Annotated[Identity, Depends(admit_request)]) -> Identity:
    """Require the role judge or admin; `authenticate` rejects all other roles."""
    return identity


ADMINS_ONLY = Depends(require_admin)
JUDGES_TOO = Depends(require_judge)


def client_of(request: Request) -> str:
    """Return the client's key for the login rate limit."""
    return client_key(request.client.host if request.client else None)


def session_cookie(request: Request) -> str:
    """Return the raw session cookie; empty if missing."""
    return request.cookies.get(cookie_name(request), "")


def cookie_name(request: Request) -> str:
    """Return the session cookie's name. Over TLS, `__Host-` prevents other hosts of the domain from setting it."""
    return f"__Host-{COOKIE}" if request.url.scheme == "https" else COOKIE


def check_origin(request: Request, hosts: Hosts) -> None:
    """Raise Forbidden for a cross-site request. Non-browser clients send neither `Origin` nor `Sec-Fetch-Site`."""
    origin = request.headers.get("origin")
    fetch_site = request.headers.get("sec-fetch-site", "same-origin")
    is_foreign = origin is not None and not hosts.same_origin(origin, request.headers.get("host", ""))
    if is_foreign or fetch_site not in ("same-origin", "none"):  # none: started by the user, not by a page
        raise Forbidden(
            f"The request comes from another site ({(origin or fetch_site)[:80]}). Use the panel's own pages.",
            code="foreign_origin",
            path="header.origin",
        )
