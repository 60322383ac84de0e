"""The response of /api/chat: NDJSON in chunks over the time of the call, with faults."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from support.scripted.answers import huge_text, split
from support.scripted.faults import Fault
from support.scripted.log import Request
from support.scripted.wire import STREAM_END, STREAM_HEAD, Connection, chunk

_CUT_KINDS = ("error_line", "no_done", "reset_after", "hang_after", "garbage")
_TORN_BYTES = 7  # bytes held back by a torn write
_PIECES = 24  # objects of a streamed answer
_WRITES = 3  # spread over the time of the call


def now() -> str:
    """The current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def prompt_tokens(messages: Iterable[Mapping[str, object]]) -> int:
    """A fixed estimate: four characters per token, plus four tokens per message."""
    return sum(4 + (len(str(message.get("content"))) + 3) // 4 for message in messages)


@dataclass(frozen=True)
class Answer:
    """One answer before its faults are applied. `began` is on the monotonic clock, before any load."""

    model: str
    text: str
    call_s: float
    prompt_tokens: int
    load_s: float
    began: float
    thinks: bool
    faults: Mapping[str, Fault]
    done_reason: str = "stop"
    chunks: int = _PIECES

    def with_faults(self) -> Answer:
        """Return the answer with the faults that change its text or time."""
        text, call_s, reason, chunks = self.text, self.call_s, self.done_reason, self.chunks
        if huge := self.faults.get("huge"):
            text, chunks = huge_text(int(huge.value or 200_000)), max(chunks, 100)
        if "length" in self.faults:
            text, reason = text[: len(text) // 2], "length"
        if slow := self.faults.get("slow"):
            call_s = slow.value or 0.0
        return replace(self, text=text, call_s=call_s, done_reason=reason, chunks=chunks)

    def last_fields(self) -> dict[str, object]:
        """The fields of the object with `done`."""
        fields: dict[str, object] = {"done_reason": self.done_reason, "done": True}
        if "no_counters" in self.faults:
            return fields
        call_ns = max(int(self.call_s * 1e9), 20)
        counters = {
            "total_duration": int((time.monotonic() - self.began) * 1e9),
            "load_duration": int(self.load_s * 1e9),
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": call_ns // 10,
            "eval_count": -(-len(self.text) // 4),
            "eval_duration": call_ns - call_ns // 10,
        }
        return fields | {name: value for name, value in counters.items() if value}


class _StreamFormatter:
    """Formats the objects of one stream; all have the time at which it began."""

    def __init__(self, model: str) -> None:
        self._head = f'{{"model":{json.dumps(model)},"created_at":"{now()}","message":{{"role":"assistant","content":'

    def piece(self, text: str, thinking: str = "") -> bytes:
        extra = f',"thinking":{json.dumps(thinking, ensure_ascii=False)}' if thinking else ""
        line = f'{self._head}{json.dumps(text, ensure_ascii=False)}{extra}}},"done":false}}\n'
        return chunk(line.encode("utf-8", "replace"))

    def end(self, text: str, fields: Mapping[str, object]) -> bytes:
        line = f"{self._head}{json.dumps(text, ensure_ascii=False)}}},{json.dumps(fields)[1:]}\n"
        return chunk(line.encode("utf-8", "replace"))


class _Writer:
    """Writes to the client; with `torn` the last bytes of every write are sent with the next one."""

    def __init__(self, connection: Connection, *, torn: bool) -> None:
        self._connection = connection
        self._torn = torn
        self._held = b""

    async def write(self, data: bytes) -> None:
        data = self._held + data
        self._held = data[-_TORN_BYTES:] if self._torn else b""
        self._connection.write(data[:-_TORN_BYTES] if self._torn else data)
        await self._connection.drain()
        if self._torn:
            await asyncio.sleep(0.001)

    def finish(self, data: bytes) -> None:
        self._connection.write(self._held + data)


async def send_whole(answer: Answer, entry: Request, connection: Connection) -> None:
    """Send the answer as one JSON object, for `stream: false`."""
    answer, faults = answer.with_faults(), answer.faults
    await asyncio.sleep(answer.call_s)
    if "hang_after" in faults:
        await asyncio.Event().wait()
    if "reset_after" in faults:
        entry.outcome = "reset"
        connection.reset()
        return
    if "error_line" in faults:
        entry.status = 500
        connection.answer(500, {"error": "an error was encountered while running the model"})
        return
    incomplete = "no_done" in faults or "done_false" in faults
    fields: dict[str, object] = {"done": False} if incomplete else answer.last_fields()
    message = {"role": "assistant", "content": answer.text}
    connection.answer(200, {"model": answer.model, "created_at": now(), "message": message} | fields)


async def stream(answer: Answer, entry: Request, connection: Connection) -> None:
    """Send the answer as a stream of objects."""
    answer, faults = answer.with_faults(), answer.faults
    formatter, writer = _StreamFormatter(answer.model), _Writer(connection, torn="torn" in faults)
    if "done_false" in faults:
        await asyncio.sleep(answer.call_s)
        writer.finish(STREAM_HEAD + formatter.piece(answer.text) + STREAM_END)
        return
    pieces = [formatter.piece(text) for text in split(answer.text, answer.chunks)]
    cut = next((faults[kind] for kind in _CUT_KINDS if kind in faults), None)
    rest: list[bytes] = []
    if cut is not None:
        at = len(pieces) // 2 if cut.value is None else int(cut.value)
        pieces, rest = pieces[:at], pieces[at:]
    if answer.thinks or "thinking" in faults:
        pieces[:0] = [formatter.piece("", thought) for thought in ("Let me think", " about 🌿 this.")]
    ended = cut is None and "endless" not in faults
    await _write_slowly(answer, pieces, writer, end_with=formatter if ended else None)
    if "endless" in faults:
        await _write_endlessly(pieces or [formatter.piece("on and on ")], writer)
    if cut is not None:
        await _cut_off(cut.kind, rest, _end_of_stream(formatter, answer), writer, entry, connection)


def _end_of_stream(formatter: _StreamFormatter, answer: Answer) -> bytes:
    """The object with `done`, and the end of the body."""
    return formatter.end("", answer.last_fields()) + STREAM_END


async def _write_slowly(
    answer: Answer, pieces: list[bytes], writer: _Writer, *, end_with: _StreamFormatter | None
) -> None:
    """Write the pieces in a few groups, evenly over the time of the call; the end goes with the last group."""
    loop = asyncio.get_running_loop()
    began, n = loop.time(), _WRITES if answer.call_s > 0 else 1
    step = -(-len(pieces) // n) or 1
    data = STREAM_HEAD
    for i in range(n):
        data += b"".join(pieces[i * step : (i + 1) * step])
        wait = began + answer.call_s * (i + 1) / n - loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        if i == n - 1 and end_with is not None:
            writer.finish(data + _end_of_stream(end_with, answer))
        else:
            await writer.write(data)
        data = b""


async def _write_endlessly(pieces: list[bytes], writer: _Writer) -> None:
    while True:
        for piece in pieces:
            await writer.write(piece)
            await asyncio.sleep(0.002)


async def _cut_off(
    kind: str, rest: list[bytes], last: bytes, writer: _Writer, entry: Request, connection: Connection
) -> None:
    if kind == "error_line":
        error = {"error": "an error was encountered while running the model: unexpected EOF"}
        writer.finish(chunk(json.dumps(error).encode() + b"\n") + STREAM_END)
    elif kind == "no_done":
        writer.finish(STREAM_END)
    elif kind == "garbage":
        writer.finish(chunk(b"<html>502 \xff\xfe not JSON</html>\n") + b"".join(rest) + last)
    elif kind == "hang_after":
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(0.03)  # a RST discards the tokens that are not sent yet
        entry.outcome = "reset"
        connection.reset()
