"""The models in memory: loading, keep_alive and unloading, as in Ollama's scheduler."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from support.scripted.faults import Script
from support.scripted.log import Log
from support.scripted.models import ModelSpec

_DEFAULT_KEEP_ALIVE_S = 300.0
_FOREVER_S = 292.4 * 365 * 86400  # Ollama shows "never" as Go's longest duration


class LoadError(Exception):
    """The runner died while loading."""


@dataclass(frozen=True)
class MemorySettings:
    """How long loading and unloading take. The defaults are those of a small model on a real server, or faster."""

    load_s: float = 0.05
    unload_s: float = 0.01


@dataclass(eq=False)
class Runner:
    """One set of weights, listed under the name that loaded it."""

    spec: ModelSpec
    num_ctx: int
    keep_alive_s: float
    users: int = 0
    loading: bool = True
    evicting: bool = False  # no new users: it is unloaded as soon as it is idle
    stopping: bool = False
    expires_at: float = math.inf
    timer: asyncio.TimerHandle | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def ps_entry(self) -> dict[str, object]:
        """Its entry in /api/ps."""
        now = time.time()
        at = self.expires_at if self.stopping or not self.users else now + self.keep_alive_s
        expires = datetime.fromtimestamp(min(at, now + _FOREVER_S), UTC)
        return {
            "name": self.spec.full,
            "model": self.spec.full,
            "size": self.spec.size_bytes + 48_000 * self.num_ctx,
            "digest": self.spec.manifest,
            "details": self.spec.details(),
            "expires_at": expires.isoformat().replace("+00:00", "Z"),
            "size_vram": 0,
            "context_length": self.num_ctx,
        }


class Memory:
    """The resident runners, by blob. Used on the server's loop only."""

    def __init__(self, settings: MemorySettings, script: Script, log: Log) -> None:
        self.settings = settings
        self._script = script
        self._log = log
        self._runners: dict[str, Runner] = {}
        self._unload_tasks: set[asyncio.Task[None]] = set()

    def ps_entries(self) -> list[dict[str, object]]:
        """The entries of /api/ps, the one that stays longest first."""
        entries = (runner.ps_entry() for runner in self._runners.values())
        return sorted(entries, key=lambda entry: str(entry["expires_at"]), reverse=True)

    async def acquire(self, spec: ModelSpec, num_ctx: int, keep_alive: float | None) -> Runner:
        """Return a loaded runner for one request, which ends with `release`."""
        while True:
            runner = self._runners.get(spec.blob_sha)
            if runner is None:
                return await self._load(spec, num_ctx, keep_alive)
            if runner.stopping or runner.evicting:
                await runner.gone.wait()
            elif runner.loading:
                await runner.ready.wait()
            elif runner.num_ctx != num_ctx:
                runner.evicting = True
                if runner.users <= 0:
                    self._stop(runner)
            else:
                runner.users += 1
                runner.keep_alive_s = runner.keep_alive_s if keep_alive is None else keep_alive
                return runner

    def release(self, runner: Runner) -> None:
        """End a request: keep_alive begins, or the unload."""
        runner.users -= 1
        if runner.users > 0 or runner.stopping or self._runners.get(runner.spec.blob_sha) is not runner:
            return
        if runner.keep_alive_s <= 0 or runner.evicting:
            self._stop(runner)
            return
        runner.expires_at = time.time() + runner.keep_alive_s
        if runner.keep_alive_s < math.inf:
            self._set_timer(runner, runner.keep_alive_s)

    def expire(self, spec: ModelSpec) -> None:
        """Unload a model at once, or as soon as it is idle."""
        runner = self._runners.get(spec.blob_sha)
        if runner is None or runner.stopping:
            return
        runner.keep_alive_s = 0.0
        runner.expires_at = time.time()
        if runner.users <= 0 and not runner.loading:
            self._stop(runner)

    def lose_all(self) -> None:
        """Drop all models, as when the server process dies."""
        for runner in list(self._runners.values()):
            self._remove(runner)

    def close(self) -> None:
        """Cancel every pending unload and timer."""
        for task in self._unload_tasks:
            task.cancel()
        for runner in self._runners.values():
            if runner.timer is not None:
                runner.timer.cancel()

    async def _load(self, spec: ModelSpec, num_ctx: int, keep_alive: float | None) -> Runner:
        name = spec.full
        runner = Runner(spec, num_ctx, _DEFAULT_KEEP_ALIVE_S if keep_alive is None else keep_alive, users=1)
        self._runners[spec.blob_sha] = runner
        self._log.loads[name] += 1
        self._log_resident_models()
        faults = self._script.take(("load_error",), "/api/chat", name, self._log.loads[name], self._log.loads.total())
        loaded = False
        try:
            await asyncio.sleep(self.settings.load_s)
            loaded = not faults
        finally:
            runner.loading = False
            if not loaded:
                self._remove(runner)
            runner.ready.set()
        if not loaded:
            raise LoadError("llama runner process has terminated: exit status 2")
        return runner

    def _set_timer(self, runner: Runner, after_s: float) -> None:
        # A timer that fires too early is set again. So only a shorter keep_alive needs a new one, and not every call.
        loop = asyncio.get_running_loop()
        if runner.timer is not None:
            if runner.timer.when() <= loop.time() + after_s:
                return
            runner.timer.cancel()
        runner.timer = loop.call_later(after_s, self._on_timer, runner)

    def _on_timer(self, runner: Runner) -> None:
        runner.timer = None
        left = runner.expires_at - time.time()
        if runner.users > 0 or runner.stopping:
            return
        if left > 0.0005:
            if left < math.inf:
                self._set_timer(runner, left)
            return
        self._stop(runner)

    def _stop(self, runner: Runner) -> None:
        runner.stopping = True
        runner.expires_at = min(runner.expires_at, time.time())
        task = asyncio.get_running_loop().create_task(self._unload(runner))
        self._unload_tasks.add(task)
        task.add_done_callback(self._unload_tasks.discard)

    async def _unload(self, runner: Runner) -> None:
        name = runner.spec.full
        nth, nth_all = self._log.unloads[name] + 1, self._log.unloads.total() + 1
        stuck = self._script.take(("stuck",), "/api/chat", name, nth, nth_all).get("stuck")
        while stuck is not None and self._script.is_active(stuck):
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.settings.unload_s)
        self._remove(runner)

    def _remove(self, runner: Runner) -> None:
        if runner.timer is not None:
            runner.timer.cancel()
        if self._runners.get(runner.spec.blob_sha) is runner:
            del self._runners[runner.spec.blob_sha]
            self._log.unloads[runner.spec.full] += 1
            self._log_resident_models()
        runner.stopping = True
        runner.gone.set()

    def _log_resident_models(self) -> None:
        self._log.set_resident([runner.spec.full for runner in self._runners.values()])
