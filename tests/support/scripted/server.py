"""Ollama's routes on scripted models."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.scripted import chat
from support.scripted.answers import Reply, tips
from support.scripted.durations import BadDurationError, keep_alive_seconds
from support.scripted.faults import CHAT, EARLY, Fault, Script
from support.scripted.log import Log, Request, messages_hash
from support.scripted.models import Library, ModelSpec, full_name
from support.scripted.runners import LoadError, Memory, MemorySettings
from support.scripted.wire import Connection, HttpRequest

Body = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How the server behaves without faults."""

    call_s: float = 0.0  # from loaded to the last byte
    reply: Reply = tips
    memory: MemorySettings = field(default_factory=MemorySettings)


class RefusedError(Exception):
    """A response other than 200."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class Server:
    """The routes and their state. Used on one event loop."""

    def __init__(self, models: Sequence[ModelSpec | str], settings: Settings, faults: Sequence[Fault]) -> None:
        self.log = Log()
        self.library = Library(models)
        self.script = Script(faults)
        self.settings = settings
        self.memory = Memory(settings.memory, self.script, self.log)
        self._nth_path: Counter[str] = Counter()
        self._nth_model: Counter[str] = Counter()
        self._gets: dict[str, Callable[[], object]] = {
            "/": lambda: "Ollama is running",
            "/api/version": lambda: {"version": "0.11.4"},
            "/api/tags": lambda: {"models": [spec.tags_entry() for spec in self.library.all()]},
            "/api/ps": lambda: {"models": self.memory.ps_entries()},
            "/_log": self.log.as_json,
        }
        self._posts: dict[str, Callable[[Body, Request, Connection], Awaitable[None]]] = {
            "/api/show": self._show,
            "/api/generate": self._generate,
            "/api/chat": self._chat,
            "/_set": self._set,
        }

    def apply(self, **changes: object) -> None:
        """Change settings at run time, including those of MemorySettings."""
        memory = {name: changes.pop(name) for name in list(changes) if hasattr(self.settings.memory, name)}
        memory_settings = replace(self.settings.memory, **memory)  # type: ignore[arg-type]
        self.settings = replace(self.settings, memory=memory_settings, **changes)  # type: ignore[arg-type]
        self.memory.settings = self.settings.memory

    async def handle(self, http: HttpRequest, connection: Connection) -> None:
        """Log a request and respond to it."""
        entry = Request(http.path, time.time())
        if not http.path.startswith("/_"):
            self.log.requests.append(entry)
        try:
            await self._route(http, entry, connection)
        except RefusedError as exc:
            entry.status = exc.status
            connection.answer(exc.status, {"error": str(exc)})
        except asyncio.CancelledError:
            entry.outcome = "dropped" if connection.dropped else "aborted"
            raise
        except Exception as exc:  # noqa: BLE001 - a reply function of a test may raise anything: the test must see it
            entry.status = 500
            connection.answer(500, {"error": f"the scripted server failed: {exc!r}"})
        finally:
            entry.finished = time.time()
        if entry.outcome == "running":
            entry.outcome = "finished"

    async def _route(self, http: HttpRequest, entry: Request, connection: Connection) -> None:
        table: dict[str, Any] = self._gets if http.method in ("GET", "HEAD") else self._posts
        if http.path not in table:
            known = http.path in self._gets or http.path in self._posts
            entry.status = 405 if known else 404
            connection.answer(entry.status, "405 method not allowed" if known else "404 page not found")
            return
        body = _parse(http.body) if table is self._posts else {}
        self._describe(entry, body)
        if await self._fail_early(entry, connection):
            return
        entry.status = 200
        if table is self._gets:
            connection.answer(200, self._gets[http.path]())
        else:
            await self._posts[http.path](body, entry, connection)

    def _describe(self, entry: Request, body: Body) -> None:
        self._nth_path[entry.path] += 1
        name = body.get("model") or body.get("name")
        if isinstance(name, str) and name:
            spec = self.library.find(name)
            entry.model = spec.full if spec else full_name(name)
            key = f"{entry.path} {entry.model}"
            self._nth_model[key] += 1
            entry.nth = self._nth_model[key]
        entry.keep_alive = body.get("keep_alive")
        options = body.get("options")
        entry.options = options if isinstance(options, dict) else {}
        entry.messages = messages_hash(body["messages"]) if body.get("messages") else ""
        entry.body = body

    async def _fail_early(self, entry: Request, connection: Connection) -> bool:
        """Apply the faults that precede a response; returns whether there is none to send."""
        faults = self.script.take(EARLY, entry.path, entry.model, entry.nth, self._nth_path[entry.path])
        while "hold" in faults and self.script.is_active(faults["hold"]):
            await asyncio.sleep(0.01)
        if "reset" in faults:
            entry.outcome = "reset"
            connection.reset()
            return True
        if "hang" in faults:
            await asyncio.Event().wait()
        if "busy" in faults:
            raise RefusedError(503, "server busy, please try again.  maximum pending requests exceeded")
        if "missing" in faults:
            raise RefusedError(404, f'model "{entry.model}" not found, try pulling it first')
        if "status" in faults:
            raise RefusedError(int(faults["status"].value or 500), "scripted error")
        return False

    def _keep_alive(self, body: Body) -> float | None:
        try:
            return keep_alive_seconds(body.get("keep_alive"))
        except BadDurationError as exc:
            raise RefusedError(400, str(exc)) from exc

    def _find(self, body: Body, missing: str) -> ModelSpec:
        name = str(body.get("model") or body.get("name") or "")
        spec = self.library.find(name)
        if spec is None:
            raise RefusedError(404, missing.format(name))
        return spec

    async def _show(self, body: Body, entry: Request, connection: Connection) -> None:
        if not entry.model:
            raise RefusedError(400, "model is required")
        connection.answer(200, self._find(body, "model '{}' not found").show_response())

    async def _generate(self, body: Body, entry: Request, connection: Connection) -> None:
        keep_alive = self._keep_alive(body)
        spec = self._find(body, "model '{}' not found")
        if body.get("prompt"):
            raise RefusedError(501, "the scripted server generates on /api/chat only")
        base = {"model": body["model"], "created_at": chat.now(), "response": "", "done": True}
        if keep_alive is not None and int(min(keep_alive, 9e9)) == 0:
            self.memory.expire(spec)
            connection.answer(200, base | {"done_reason": "unload"})
            return
        runner = await self._acquire(spec, entry, keep_alive)
        try:
            connection.answer(200, base | {"created_at": chat.now(), "done_reason": "load"})
        finally:
            if runner is not None:
                self.memory.release(runner)

    async def _chat(self, body: Body, entry: Request, connection: Connection) -> None:
        keep_alive = self._keep_alive(body)
        if not entry.model:
            raise RefusedError(400, "model is required")
        spec = self._find(body, 'model "{}" not found, try pulling it first')
        empty = {"model": body["model"], "message": {"role": "assistant", "content": ""}, "done": True}
        if not body.get("messages") and keep_alive is not None and int(min(keep_alive, 9e9)) == 0:
            self.memory.expire(spec)
            connection.answer(200, empty | {"created_at": chat.now(), "done_reason": "unload"})
            return
        if "completion" not in spec.capabilities:
            raise RefusedError(400, f'"{body["model"]}" does not support chat')
        if body.get("think") and "thinking" not in spec.capabilities:
            raise RefusedError(400, f"registry.ollama.ai/library/{spec.full} does not support thinking")
        faults = self.script.take(CHAT, entry.path, entry.model, entry.nth, self._nth_path[entry.path])
        began = time.monotonic()
        runner = await self._acquire(spec, entry, keep_alive)
        try:
            if not body.get("messages"):
                connection.answer(200, empty | {"created_at": chat.now(), "done_reason": "load"})
                return
            await self._answer(spec, body, entry, connection, faults, began)
        finally:
            if runner is not None:
                self.memory.release(runner)

    async def _acquire(self, spec: ModelSpec, entry: Request, keep_alive: float | None) -> Any:
        if spec.remote_model:
            return None
        began = time.monotonic()
        num_ctx = entry.options.get("num_ctx", 4096)
        try:
            return await self.memory.acquire(spec, num_ctx if isinstance(num_ctx, int) else 4096, keep_alive)
        except LoadError as exc:
            raise RefusedError(500, str(exc)) from exc
        finally:
            entry.load_s = time.monotonic() - began

    async def _answer(
        self,
        spec: ModelSpec,
        body: Body,
        entry: Request,
        connection: Connection,
        faults: dict[str, Fault],
        began: float,
    ) -> None:
        prompt_tokens = chat.prompt_tokens(body["messages"])
        num_ctx = entry.options.get("num_ctx", 4096)
        limit = int(num_ctx) if isinstance(num_ctx, int | float) else 4096
        if "prompt_too_long" in faults:
            raise RefusedError(400, "the input length exceeds the context length")
        if "truncated" in faults or "truncated_half" in faults or prompt_tokens > limit:
            prompt_tokens = limit // 2 if "truncated_half" in faults else limit
        answer = chat.Answer(
            model=str(body["model"]),
            text=self.settings.reply(spec.full, body["messages"], entry.options, entry.nth),
            call_s=self.settings.call_s,
            prompt_tokens=prompt_tokens,
            load_s=entry.load_s or 0.0,
            began=began,
            thinks="thinking" in spec.capabilities and body.get("think") is not False,
            faults=faults,
        )
        if body.get("stream") is False:
            await chat.send_whole(answer, entry, connection)
        else:
            await chat.stream(answer, entry, connection)

    async def _set(self, body: Body, _entry: Request, connection: Connection) -> None:
        self.apply(**body)
        connection.answer(200, {})


def _parse(data: bytes) -> Body:
    if not data:
        raise RefusedError(400, "missing request body")
    try:
        body = json.loads(data)
    except ValueError as exc:
        raise RefusedError(400, f"invalid JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise RefusedError(400, "json: cannot unmarshal into Go value of type api.ChatRequest")
    return body
