"""The part of HTTP/1.1 that a server on loopback needs: keep-alive, chunked bodies, resets, disconnects."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
_REASONS = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request line and its body."""

    method: str
    path: str
    body: bytes


Handler = Callable[[HttpRequest, "Connection"], Awaitable[None]]


class Connection(asyncio.Protocol):
    """One client. Its requests are handled one after the other; a disconnect cancels the handler."""

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._all = connections
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.dropped = False  # by us, not by the client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._next()

    def eof_received(self) -> bool:
        self._cancel()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._all.discard(self)
        self._cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _next(self) -> None:
        try:
            request = self._parse()
        except ValueError as exc:
            self.answer(400, {"error": str(exc)})
            self.close()
            return
        if request is not None:
            self._task = asyncio.get_running_loop().create_task(self._handle(request))

    async def _handle(self, request: HttpRequest) -> None:
        try:
            await self._handler(request, self)
        finally:
            self._task = None
        if self._buffer and not self.closing:
            self._next()

    def _parse(self) -> HttpRequest | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise ValueError("request headers too long")
            return None
        line, *headers = self._buffer[:end].decode("latin-1").split("\r\n")
        parts = line.split(" ")
        if len(parts) != 3:
            raise ValueError("bad request line")
        length = 0
        for header in headers:
            name, _, value = header.partition(":")
            if name.lower() == "content-length":
                length = int(value)
            elif name.lower() == "transfer-encoding":
                raise ValueError("the scripted server needs a Content-Length")
        if not 0 <= length <= MAX_BODY:
            raise ValueError("request body too long")
        if len(self._buffer) < end + 4 + length:
            return None
        body = self._buffer[end + 4 : end + 4 + length]
        self._buffer = self._buffer[end + 4 + length :]
        return HttpRequest(parts[0], parts[1].partition("?")[0], body)

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def answer(self, status: int, body: object) -> None:
        """Send a complete response: JSON, or plain text for a str."""
        kind = "text/plain; charset=utf-8" if isinstance(body, str) else "application/json; charset=utf-8"
        data = (body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)).encode("utf-8", "replace")
        head = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}"
        self.write(head.encode() + b"\r\n\r\n" + data)

    def write(self, data: bytes) -> None:
        """Send bytes without waiting."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has read most of the bytes written."""
        await self._may_write.wait()

    def close(self) -> None:
        """Close the connection once the bytes written are sent."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Close the connection with a RST."""
        self.dropped = True
        if self._transport is None or self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
