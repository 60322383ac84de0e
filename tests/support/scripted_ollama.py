"""A scripted Ollama server: the real one's routes, memory and failures, without weights.

In process:   with ScriptedOllama(models=["a:1b", "b:1b"], script=[Fault("busy", times=2)]) as server: server.url
As a process: cd tests && python -m support.scripted_ollama a:1b,b:1b 0.05
              (models and seconds per call) prints its URL on the first line and runs until stdin closes
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from support.scripted.answers import Reply, huge_text, requested_tips, tips
from support.scripted.durations import NEVER
from support.scripted.faults import Fault
from support.scripted.log import Log, Request, messages_hash
from support.scripted.models import ModelSpec
from support.scripted.runners import MemorySettings
from support.scripted.server import Server, Settings
from support.scripted.wire import Connection

__all__ = [
    "Fault",
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


class _Endpoint:
    """A server on a port; it can stop and resume listening."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = 0  # the first listen chooses it
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None

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

    async def close(self) -> None:
        self.server.memory.close()
        await self.pause(lose_models=False)

    async def load_foreign(self, name: str) -> None:
        spec = self.server.library.find(name)
        if spec is None:
            spec = ModelSpec(name)
            self.server.library.add(spec)
        self.server.memory.release(await self.server.memory.acquire(spec, 4096, NEVER))

    def unload_foreign(self, name: str) -> None:
        spec = self.server.library.find(name)
        if spec is not None:
            self.server.memory.expire(spec)


class ScriptedOllama:
    """The server in a thread of this process. Its methods may be called from any thread."""

    def __init__(
        self,
        models: Sequence[ModelSpec | str] = ("alpha:135m",),
        script: Sequence[Fault] = (),
        *,
        reply: Reply = tips,
        call_s: float = 0.0,
        memory: MemorySettings | None = None,
    ) -> None:
        self._server = Server(models, Settings(call_s, reply, memory or MemorySettings()), script)
        self._endpoint = _Endpoint(self._server)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-ollama", daemon=True)

    def start(self) -> Self:
        """Start the thread; returns once the server listens."""
        self._thread.start()
        self._run(self._endpoint.listen())
        return self

    def stop(self) -> None:
        """Drop every connection and end the thread."""
        if self._loop.is_closed():
            return
        self._run(self._endpoint.close())
        self._run(_cancel_all_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._endpoint.port}"

    @property
    def log(self) -> Log:
        return self._server.log

    @property
    def resident(self) -> tuple[str, ...]:
        """The models in memory, whether /api/ps lists them or not."""
        return self.log.resident

    def add_faults(self, *faults: Fault) -> None:
        self._run_function(lambda: self._server.script.add(faults))

    def clear_faults(self, kind: str | None = None) -> None:
        """Clear all faults, or those of one kind."""
        self._run_function(lambda: self._server.script.clear(kind))

    def set(self, **changes: object) -> None:
        """Change settings: call_s, reply, or a field of MemorySettings."""
        self._run_function(lambda: self._server.apply(**changes))

    def add_model(self, spec: ModelSpec) -> None:
        """Add a model, or move the tag of an existing one."""
        self._run_function(lambda: self._server.library.add(spec))

    def load_foreign(self, name: str) -> None:
        """Load a model as another client would, until unload_foreign; returns once it is loaded."""
        self._run(self._endpoint.load_foreign(name))

    def unload_foreign(self, name: str) -> None:
        """Unload a model of another client."""
        self._run_function(lambda: self._endpoint.unload_foreign(name))

    def pause_listening(self, *, lose_models: bool = False) -> None:
        """Close the port and reset every connection; `lose_models` also drops the models, as a crash does."""
        self._run(self._endpoint.pause(lose_models=lose_models))

    def resume(self) -> None:
        """Listen on the same port again."""
        self._run(self._endpoint.listen())

    def _run_function(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self._run(run())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(60)


async def _cancel_all_tasks() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class ScriptedProcess:
    """The server in a separate process, so that its CPU time is not counted as the caller's."""

    def __init__(self, models: Sequence[str], *, call_s: float = 0.0) -> None:
        self._command = [sys.executable, "-m", "support.scripted_ollama", ",".join(models), str(call_s)]
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

    def log(self) -> dict[str, Any]:
        """The server's log as JSON."""
        with urllib.request.urlopen(f"{self.url}/_log", timeout=30) as response:
            return dict(json.load(response))

    def set(self, **changes: object) -> None:
        """Change settings, as `ScriptedOllama.set` does."""
        urllib.request.urlopen(f"{self.url}/_set", json.dumps(changes).encode(), timeout=30).close()


async def _serve(models: Sequence[str], call_s: float) -> None:
    endpoint = _Endpoint(Server(models, Settings(call_s), ()))
    await endpoint.listen()
    sys.stdout.write(f"http://{HOST}:{endpoint.port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await endpoint.close()
    await _cancel_all_tasks()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1].split(","), float(sys.argv[2])))
