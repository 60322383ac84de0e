"""A scripted Ollama server: the real one's routes, memory and failures, without weights.

In process:   with ScriptedOllama(models=["a:1b", "b:1b"], script=[Fault("busy", times=2)]) as server: server.url
On its own:   cd tests && python -m support.scripted_ollama --port 0 --models a:1b,b:1b --call-s 0.05 --blobs distinct
              prints its URL on the first line and runs until stdin closes or SIGTERM comes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from support.scripted.answers import Reply, huge_text, requested_tips, tips
from support.scripted.faults import KINDS, Fault
from support.scripted.log import Log, Request, messages_hash
from support.scripted.models import ModelSpec
from support.scripted.runners import MemorySettings
from support.scripted.server import Server, Settings
from support.scripted.wire import Connection

__all__ = [
    "KINDS",
    "Fault",
    "Log",
    "MemorySettings",
    "ModelSpec",
    "Reply",
    "Request",
    "ScriptedOllama",
    "ScriptedProcess",
    "huge_text",
    "messages_hash",
    "requested_tips",
    "tips",
]

T = TypeVar("T")
HOST = "127.0.0.1"


class _Site:
    """The server on a port: listening, pausing, and the script that changes it while it runs."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._pauses: set[asyncio.Task[None]] = set()
        server.control = self.control

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        make = lambda: Connection(self.server.handle, self._connections)  # noqa: E731
        self._listener = await loop.create_server(make, HOST, self.port, backlog=512)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def pause(self, *, lose_models: bool) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.reset()
        await asyncio.sleep(0.01)  # until the handlers have noticed
        if lose_models:
            self.server.memory.lose_all()

    async def pause_for(self, seconds: float, *, lose_models: bool) -> None:
        await asyncio.sleep(0.05)  # the response to the stop request must be sent first
        await self.pause(lose_models=lose_models)
        await asyncio.sleep(seconds)
        await self.listen()

    async def close(self) -> None:
        for task in self._pauses:
            task.cancel()
        self.server.memory.close()
        await self.pause(lose_models=False)

    async def load_foreign(self, name: str, keep_alive_s: float | None) -> None:
        spec = self.server.library.find(name)
        if spec is None:
            spec = ModelSpec(name)
            self.server.library.add(spec)
        stay_s = float("inf") if keep_alive_s is None else keep_alive_s
        runner, _ = await self.server.memory.acquire(spec, 4096, stay_s)
        self.server.memory.release(runner)

    def unload_foreign(self, name: str) -> None:
        spec = self.server.library.find(name)
        if spec is not None:
            self.server.memory.expire(spec)

    async def control(self, body: Mapping[str, Any]) -> object:
        """POST /_script: keys clear, faults, set, models, load_foreign, unload_foreign, pause_s, lose_models."""
        known = {"clear", "faults", "set", "models", "load_foreign", "unload_foreign", "pause_s", "lose_models"}
        if unknown := set(body) - known:
            raise ValueError(f"no such key of a script: {', '.join(sorted(unknown))}")
        if clear := body.get("clear"):
            self.server.script.clear(None if clear is True else str(clear))
        self.server.script.add([Fault.from_json(raw) for raw in body.get("faults", ())])
        self.server.apply(**body.get("set", {}))
        for raw in body.get("models", ()):
            self.server.library.add(ModelSpec(**raw))
        if name := body.get("load_foreign"):
            await self.load_foreign(str(name), None)
        if name := body.get("unload_foreign"):
            self.unload_foreign(str(name))
        if seconds := body.get("pause_s"):
            pause = self.pause_for(float(seconds), lose_models=bool(body.get("lose_models")))
            task = asyncio.get_running_loop().create_task(pause)
            self._pauses.add(task)
            task.add_done_callback(self._pauses.discard)
        return {"ok": True}


class ScriptedOllama:
    """The server in a thread of this process. Its methods may be called from any thread."""

    def __init__(
        self,
        models: Sequence[ModelSpec | str] = ("alpha:135m",),
        script: Sequence[Fault] = (),
        *,
        reply: Reply = tips,
        call_s: float = 0.0,
        chunks: int = 24,
        writes: int = 3,
        version: str = "0.11.4",
        port: int = 0,
        memory: MemorySettings | None = None,
    ) -> None:
        settings = Settings(version, call_s, chunks, writes, reply, memory or MemorySettings())
        self._server = Server(models, settings, script)
        self._site = _Site(self._server, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-ollama", daemon=True)

    def start(self) -> Self:
        """Listens when it returns."""
        self._thread.start()
        self._do(self._site.listen())
        return self

    def stop(self) -> None:
        """Drops every connection and ends the thread."""
        if self._loop.is_closed():
            return
        self._do(self._site.close())
        self._do(_settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._site.port}"

    @property
    def log(self) -> Log:
        return self._server.log

    @property
    def resident(self) -> tuple[str, ...]:
        """The models whose weights are in memory now, listed or not."""
        return self.log.timeline[-1][1] if self.log.timeline else ()

    def add_faults(self, *faults: Fault) -> None:
        """Puts faults in force."""
        self._call(lambda: self._server.script.add(faults))

    def clear_faults(self, kind: str | None = None) -> None:
        """Takes all faults back, or those of one kind."""
        self._call(lambda: self._server.script.clear(kind))

    def set(self, **changes: object) -> None:
        """Changes settings: call_s, chunks, writes, reply, version, or a field of MemorySettings."""
        self._call(lambda: self._server.apply(**changes))

    def add_model(self, spec: ModelSpec) -> None:
        """Adds a model, or moves the tag of one that is there."""
        self._call(lambda: self._server.library.add(spec))

    def load_foreign(self, name: str, keep_alive_s: float | None = None) -> None:
        """Another client loads a model, which stays so long (None: until unload_foreign). Returns when loaded."""
        self._do(self._site.load_foreign(name, keep_alive_s))

    def unload_foreign(self, name: str) -> None:
        """The other client lets its model go."""
        self._call(lambda: self._site.unload_foreign(name))

    def pause_listening(self, *, lose_models: bool = False) -> None:
        """Closes the port and resets every connection; with lose_models the weights go too, as in a crash."""
        self._do(self._site.pause(lose_models=lose_models))

    def resume(self) -> None:
        """Listens on the same port again."""
        self._do(self._site.listen())

    def _call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self._do(run())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(60)


async def _settle() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class ScriptedProcess:
    """The server in a separate process, so that its work is not measured with the caller's."""

    def __init__(self, models: Sequence[str], *, call_s: float = 0.0, options: Sequence[str] = ()) -> None:
        self._command = [sys.executable, "-m", "support.scripted_ollama", "--port", "0", "--models", ",".join(models)]
        self._command += ["--call-s", str(call_s), *options]
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        folder = Path(__file__).resolve().parent.parent
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, cwd=folder, text=True, **pipes)  # type: ignore[call-overload]
        assert self._process is not None
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(f"the scripted server did not start: {' '.join(self._command)}")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=10)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self, *, brief: bool = False) -> dict[str, Any]:
        """The server's log as JSON."""
        with urllib.request.urlopen(f"{self.url}/_log{'?brief=1' if brief else ''}", timeout=30) as answer:
            return dict(json.load(answer))

    def script(self, **body: object) -> None:
        """Changes faults and settings at run time; the keys are those of _Site.control."""
        request = urllib.request.Request(f"{self.url}/_script", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=30):
            pass


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="support.scripted_ollama", description="A scripted Ollama server.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--models", default="alpha:135m", help="comma-separated names")
    parser.add_argument("--blobs", choices=("distinct", "shared"), default="distinct")
    parser.add_argument("--call-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.05)
    parser.add_argument("--unload-s", type=float, default=0.01)
    parser.add_argument("--max-loaded", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--writes", type=int, default=3)
    parser.add_argument("--version", default="0.11.4")
    parser.add_argument("--script", default="[]", help="JSON list of faults")
    return parser.parse_args()


async def _serve(args: argparse.Namespace) -> None:
    blob = "shared" if args.blobs == "shared" else ""
    models = [ModelSpec(name, blob=blob) for name in args.models.split(",") if name]
    memory = MemorySettings(args.load_s, args.unload_s, max_loaded=args.max_loaded, parallel=args.parallel)
    settings = Settings(args.version, args.call_s, args.chunks, args.writes, memory=memory)
    site = _Site(Server(models, settings, [Fault.from_json(raw) for raw in json.loads(args.script)]), args.port)
    await site.listen()
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)

    def watch_stdin() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=watch_stdin, daemon=True).start()
    sys.stdout.write(f"http://{HOST}:{site.port}\n")
    sys.stdout.flush()
    await over.wait()
    await site.close()
    await _settle()


if __name__ == "__main__":
    asyncio.run(_serve(_arguments()))
