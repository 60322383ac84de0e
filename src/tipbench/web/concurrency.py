"""Per-token concurrency limits for slow requests."""

from __future__ import annotations

from asyncio import Semaphore, timeout
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from tipbench.web.auth import Identity, authenticate
from tipbench.web.errors import Busy

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

JUDGES_AT_ONCE = 1
ADMINS_AT_ONCE = 4
SHEETS_AT_ONCE = 2  # filled sheets in memory, over all tokens
JUDGES_BYTES = 8_000_000  # maximum size of a judge's filled sheet; admins have the general limit
WAIT_S = 2.0  # for the token's previous request: a second tab, or a client faster than our cleanup
SHEET_WAIT_S = 20.0


class ConcurrencyLimits:
    """Semaphores per token and for filled sheets. Not thread-safe: use on the event loop only."""

    def __init__(self) -> None:
        self._sheets = Semaphore(SHEETS_AT_ONCE)
        self._judges: defaultdict[str, Semaphore] = defaultdict(lambda: Semaphore(JUDGES_AT_ONCE))
        self._admins: defaultdict[str, Semaphore] = defaultdict(lambda: Semaphore(ADMINS_AT_ONCE))

    @asynccontextmanager
    async def taken(self, who: Identity) -> AsyncIterator[None]:
        """Hold one of the token's slots. Raises Busy if none becomes free within WAIT_S."""
        places, most = (self._judges, JUDGES_AT_ONCE) if who.is_judge else (self._admins, ADMINS_AT_ONCE)
        refusal = (
            f"A token exports, previews, applies or closes {most} at a time; this one has {most} under way. "
            "Nothing was changed: send it again when that has ended."
        )
        async with _held(places[who.token_id], WAIT_S, refusal):
            yield

    @asynccontextmanager
    async def sheet(self) -> AsyncIterator[None]:
        """Hold a slot for one filled sheet in memory. Raises Busy after SHEET_WAIT_S."""
        refusal = "The panel is busy with other filled sheets. Nothing was changed: send it again shortly."
        async with _held(self._sheets, SHEET_WAIT_S, refusal):
            yield


@asynccontextmanager
async def _held(places: Semaphore, wait_s: float, refusal: str) -> AsyncIterator[None]:
    try:
        async with timeout(wait_s):
            await places.acquire()
    except TimeoutError as exc:
        raise Busy(refusal) from exc
    try:
        yield
    finally:
        places.release()


def concurrency_limits(request: Request) -> ConcurrencyLimits:
    """Return the application's concurrency limits."""
    panel: Panel = request.app.state.panel
    return panel.turns


async def limit_concurrency(request: Request, who: Annotated[Identity, Depends(authenticate)]) -> AsyncIterator[None]:
    """Hold one of the token's slots; lower a judge's body limit, which `SecurityMiddleware` enforces."""
    if who.is_judge:
        request.state.most_bytes = JUDGES_BYTES
    async with concurrency_limits(request).taken(who):
        yield


async def sheet_room(request: Request) -> AsyncIterator[None]:
    """Hold a slot for the request's filled sheet."""
    async with concurrency_limits(request).sheet():
        yield


# Set on a router, it runs before authorisation, which reads the body for its CSRF token.
LIMIT_CONCURRENCY = Depends(limit_concurrency)
LIMIT_SHEETS = Depends(sheet_room)
