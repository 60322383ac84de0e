"""Turns: how much of the slow work one token may ask for at once, and how large it may be.

Exports, previews, applies and closes wait for each other and for MLflow, each in a thread; a filled sheet takes many
times its size in memory while it is read. So a token's next request waits here, on the event loop, with its body still
unread; and if that takes long it is sent away (429).
"""

from __future__ import annotations

from asyncio import Semaphore, timeout
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from tipbench.web.auth import Identity, recognise
from tipbench.web.errors import Busy

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

JUDGES_AT_ONCE = 1
ADMINS_AT_ONCE = 4
SHEETS_AT_ONCE = 2  # of everybody, that are read and worked on
JUDGES_BYTES = 8_000_000  # of a filled sheet; admins have the general limit
WAIT_S = 2.0  # for one's own request before: a second tab, or a client that is quicker than we tidy up
SHEET_WAIT_S = 20.0


class Turns:
    """Who is at work. Used on the event loop alone."""

    def __init__(self) -> None:
        self._sheets = Semaphore(SHEETS_AT_ONCE)
        self._judges: defaultdict[str, Semaphore] = defaultdict(lambda: Semaphore(JUDGES_AT_ONCE))
        self._admins: defaultdict[str, Semaphore] = defaultdict(lambda: Semaphore(ADMINS_AT_ONCE))

    @asynccontextmanager
    async def taken(self, who: Identity) -> AsyncIterator[None]:
        """A turn of this token's. Busy when those before it do not end."""
        places, most = (self._judges, JUDGES_AT_ONCE) if who.is_judge else (self._admins, ADMINS_AT_ONCE)
        refusal = (
            f"A token exports, previews, applies or closes {most} at a time; this one has {most} under way. "
            "Nothing was changed: send it again when that has ended."
        )
        async with _held(places[who.token_id], WAIT_S, refusal):
            yield

    @asynccontextmanager
    async def sheet(self) -> AsyncIterator[None]:
        """Room for one filled sheet in memory. Busy when it is not had for long."""
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


def turns_of(request: Request) -> Turns:
    """The application's own."""
    panel: Panel = request.app.state.panel
    return panel.turns


async def in_turn(request: Request, who: Annotated[Identity, Depends(recognise)]) -> AsyncIterator[None]:
    """One of a token's turns, and from here on a judge's limit for the body, which `Shield` keeps."""
    if who.is_judge:
        request.state.most_bytes = JUDGES_BYTES
    async with turns_of(request).taken(who):
        yield


async def sheet_room(request: Request) -> AsyncIterator[None]:
    """Room for the filled sheet that this request works on."""
    async with turns_of(request).sheet():
        yield


IN_TURN = Depends(in_turn)  # on a router it comes before authorisation, which reads the body for its CSRF token
SHEET_ROOM = Depends(sheet_room)
