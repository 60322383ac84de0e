"""Who asks, and whether they may: a bearer token for programs, a cookie for people.

Authorisation hangs on routers (`ADMINS_ONLY`, `JUDGES_TOO`), never in a handler. A change made with a cookie needs the
session's CSRF token as well; a bearer token is never sent by a browser of its own accord, so it needs none.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from fastapi.security import APIKeyCookie, HTTPBearer
from starlette.concurrency import run_in_threadpool

from tipbench.web.errors import Forbidden, TooManyAttempts, Unauthorised
from tipbench.web.forms import form_value
from tipbench.web.hosts import Hosts
from tipbench.web.limits import Attempts, client_key
from tipbench.web.sessions import COOKIE, Session, Sessions
from tipbench.web.tokens import LONGEST_TOKEN, Role, TokenStore, digest

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_ENVIRONMENT = "environment-"  # how the id of TIPBENCH_ADMIN_TOKEN begins
_WRONG = "This token is not known, has expired or was revoked. `tipbench token create` makes one."

# For the OpenAPI document alone: what they read is read again in `recognise`.
_bearer = HTTPBearer(auto_error=False, scheme_name="token", description="A token of `tipbench token create`.")
_cookie = APIKeyCookie(
    name=COOKIE,
    auto_error=False,
    scheme_name="session",
    description=f"The cookie of POST /login. Changes need the header {CSRF_HEADER} too.",
)


@dataclass(frozen=True)
class Identity:
    """Somebody we know. `session` is there when they came with a cookie."""

    name: str
    role: Role
    token_id: str
    session: Session | None = None

    @property
    def is_judge(self) -> bool:
        """A judge sees nothing that unblinds."""
        return self.role is Role.JUDGE


class Guard:
    """Recognises tokens and cookies."""

    def __init__(
        self, tokens: TokenStore, sessions: Sessions, attempts: Attempts, admin_token: str | None = None
    ) -> None:
        self.tokens = tokens
        self.sessions = sessions
        self._attempts = attempts
        self._admin = digest(admin_token) if admin_token else None

    def by_token(self, secret: str, client: str) -> Identity:
        """Whose token it is. Wrong ones have to wait, longer each time.

        A generated token cannot be guessed, so a right one is never made to wait for what others did wrong; the
        operator's own may be weak, so it is not even looked at before its time has come.
        """
        if len(secret) > LONGEST_TOKEN:
            secret = ""
        token = self.tokens.find(secret)
        if token is not None:
            return Identity(token.name, token.role, token.id)
        wait_s = self._attempts.admit(client)
        if wait_s > 0:
            raise TooManyAttempts(wait_s)
        if self._admin is None or not hmac.compare_digest(digest(secret), self._admin):
            raise Unauthorised(_WRONG, path="header.authorization")
        self._attempts.forgive(client)
        return self._operator()

    def by_cookie(self, value: str) -> Identity | None:
        """Whose session it is, as long as its token is active."""
        session = self.sessions.recognise(value)
        if session is None:
            return None
        if session.token_id.startswith(_ENVIRONMENT):
            operator = self._operator() if self._admin else None
            known = operator is not None and hmac.compare_digest(operator.token_id, session.token_id)
            return Identity("operator", Role.ADMIN, session.token_id, session) if known else None
        token = self.tokens.get(session.token_id)
        if token is None or token.state(self.tokens.clock()) != "active":
            return None
        return Identity(token.name, token.role, token.id, session)

    def _operator(self) -> Identity:
        """The id changes with the token, so a new one ends the sessions of the old."""
        return Identity("operator", Role.ADMIN, f"{_ENVIRONMENT}{(self._admin or '')[:16]}")


async def recognise(
    request: Request, _token: Annotated[object, Depends(_bearer)], _session: Annotated[object, Depends(_cookie)]
) -> Identity:
    """Who asks, by the headers alone: the body is unread. Raises Unauthorised."""
    panel: Panel = request.app.state.panel
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorised("Authorization is 'Bearer TOKEN'.", path="header.authorization")
        return await run_in_threadpool(panel.guard.by_token, secret.strip(), client_of(request))
    found = await run_in_threadpool(panel.guard.by_cookie, session_cookie(request))
    if found is None:
        raise Unauthorised("A token is needed: send 'Authorization: Bearer TOKEN', or log in at /login.")
    return found


async def identify(request: Request, identity: Annotated[Identity, Depends(recognise)]) -> Identity:
    """Who asks. Raises Unauthorised, and Forbidden for a change with a cookie but without its CSRF token."""
    if identity.session is not None and request.method not in SAFE:
        await _check_csrf(request, request.app.state.panel, identity)
    request.state.identity = identity
    return identity


def require_admin(identity: Annotated[Identity, Depends(identify)]) -> Identity:
    """An admin."""
    if identity.is_judge:
        raise Forbidden("A judge's token may judge, on sheets and batches of its own, and nothing else.")
    return identity


def require_judge(identity: Annotated[Identity, Depends(identify)]) -> Identity:
    """Anybody who may judge: judges, and admins."""
    return identity


ADMINS_ONLY = Depends(require_admin)
JUDGES_TOO = Depends(require_judge)


def client_of(request: Request) -> str:
    """Who tries, for the slow-down."""
    return client_key(request.client.host if request.client else None)


def session_cookie(request: Request) -> str:
    """The session's cookie as it came; empty without one."""
    return request.cookies.get(cookie_name(request), "")


def cookie_name(request: Request) -> str:
    """Over TLS the name itself keeps other hosts of the domain from setting it."""
    return f"__Host-{COOKIE}" if request.url.scheme == "https" else COOKIE


def check_origin(request: Request, hosts: Hosts) -> None:
    """A browser says where a change comes from; it must be a page of ours. Programs say nothing."""
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "same-origin")
    foreign = origin is not None and not hosts.same_origin(origin, request.headers.get("host", ""))
    if foreign or site not in ("same-origin", "none"):
        raise Forbidden(
            f"This change comes from another site ({(origin or site)[:80]}). Make it on the panel's own pages.",
            code="foreign_origin",
            path="header.origin",
        )


async def _check_csrf(request: Request, panel: Panel, identity: Identity) -> None:
    check_origin(request, panel.options.hosts)
    given = request.headers.get(CSRF_HEADER) or await form_value(request, CSRF_FIELD)
    if identity.session is None or not panel.guard.sessions.csrf_fits(identity.session, given or ""):
        raise Forbidden(
            f"A change made with a cookie needs the session's token in the header {CSRF_HEADER} or the form's field "
            f"{CSRF_FIELD}. Load the page again and repeat it.",
            code="csrf",
            path=f"header.{CSRF_HEADER.lower()}",
        )
