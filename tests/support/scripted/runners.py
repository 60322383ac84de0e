"""Which weights are in memory: loading, keep_alive, unloading, as Ollama's scheduler does it."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from support.scripted.faults import Script
from support.scripted.log import Log
from support.scripted.models import ModelSpec

_FOREVER_S = 292.4 * 365 * 86400  # what Ollama lists for "never": Go's longest duration


class LoadError(Exception):
    """The runner died while loading."""


@dataclass(frozen=True)
class MemorySettings:
    """Times in seconds. The defaults are those of a small model on a real server, or faster."""

    load_s: float = 0.05
    unload_s: float = 0.01
    keep_alive_s: float = 300.0  # for requests without keep_alive
    max_loaded: int = 3  # OLLAMA_MAX_LOADED_MODELS; 0: no limit
    parallel: int = 0  # OLLAMA_NUM_PARALLEL; 0: no limit
    hide_loading: bool = False
    newest_name: bool = False  # of two names of one blob, list the one used last


@dataclass(eq=False)
class Runner:
    """One set of weights, listed under the name that loaded it."""

    spec: ModelSpec
    num_ctx: int
    stay_s: float
    slots: asyncio.Semaphore | None
    users: int = 0
    loading: bool = True
    evicting: bool = False  # no new users: it goes as soon as it is idle
    stopping: bool = False
    expires_at: float = math.inf
    timer: asyncio.TimerHandle | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def listed(self) -> dict[str, object]:
        """Its entry in /api/ps."""
        now = time.time()
        at = self.expires_at if self.stopping or not self.users else now + self.stay_s
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
        self._hidden: set[str] = set()
        self._stops: set[asyncio.Task[None]] = set()

    def listed(self) -> list[dict[str, object]]:
        """What /api/ps shows, the longest stay first."""
        shown = [r for r in self._runners.values() if not (r.loading and r.spec.blob_sha in self._hidden)]
        return sorted((r.listed() for r in shown), key=lambda entry: str(entry["expires_at"]), reverse=True)

    async def acquire(self, spec: ModelSpec, num_ctx: int, keep_alive: float | None) -> tuple[Runner, bool]:
        """A runner for one request, and whether it had to be loaded for it. Give it back with `release`."""
        while True:
            runner = self._runners.get(spec.blob_sha)
            if runner is None:
                if await self._made_room():
                    return await self._load(spec, num_ctx, keep_alive), True
            elif runner.stopping or runner.evicting:
                await runner.gone.wait()
            elif runner.loading:
                await runner.ready.wait()
            elif runner.num_ctx != num_ctx:
                self._evict(runner)
            else:
                self._use(runner, spec, keep_alive)
                return runner, False

    def release(self, runner: Runner) -> None:
        """The request is over: the stay begins, or the unload."""
        runner.users -= 1
        if runner.users > 0 or runner.stopping or self._runners.get(runner.spec.blob_sha) is not runner:
            return
        if runner.stay_s <= 0 or runner.evicting:
            self._stop(runner)
            return
        runner.expires_at = time.time() + runner.stay_s
        if runner.stay_s < math.inf:
            self._arm(runner, runner.stay_s)

    def expire(self, spec: ModelSpec) -> None:
        """The explicit unload: only marks, and acts when the model is idle."""
        runner = self._runners.get(spec.blob_sha)
        if runner is None or runner.stopping:
            return
        runner.stay_s = 0.0
        runner.expires_at = time.time()
        if runner.users <= 0 and not runner.loading:
            self._stop(runner)

    def lose_all(self) -> None:
        """The server process died, and its weights with it."""
        for runner in list(self._runners.values()):
            self._remove(runner)

    def close(self) -> None:
        """Stops every pending unload and timer."""
        for task in self._stops:
            task.cancel()
        for runner in self._runners.values():
            if runner.timer is not None:
                runner.timer.cancel()

    async def _made_room(self) -> bool:
        limit = self.settings.max_loaded
        if not limit or len(self._runners) < limit:
            return True
        going = min(self._runners.values(), key=lambda r: (not r.stopping, r.users > 0 or r.loading, r.stay_s))
        if going.loading:
            await going.ready.wait()
        self._evict(going)
        await going.gone.wait()
        return False

    async def _load(self, spec: ModelSpec, num_ctx: int, keep_alive: float | None) -> Runner:
        settings, name = self.settings, spec.full
        stay_s = settings.keep_alive_s if keep_alive is None else keep_alive
        slots = asyncio.Semaphore(settings.parallel) if settings.parallel else None
        runner = Runner(spec, num_ctx, stay_s, slots, users=1)
        self._runners[spec.blob_sha] = runner
        self._log.loads[name] += 1
        self._note()
        nth, nth_all = self._log.loads[name], self._log.loads.total()
        strikes = self._script.memory(("load_delay", "load_error", "hide_loading"), name, nth, nth_all)
        if settings.hide_loading or "hide_loading" in strikes:
            self._hidden.add(spec.blob_sha)
        slow = strikes.get("load_delay")
        loaded = False
        try:
            await asyncio.sleep(slow.value or 0.0 if slow else settings.load_s)
            loaded = "load_error" not in strikes
        finally:
            self._hidden.discard(spec.blob_sha)
            runner.loading = False
            if not loaded:
                self._remove(runner)
            runner.ready.set()
        if not loaded:
            raise LoadError("llama runner process has terminated: exit status 2")
        return runner

    def _use(self, runner: Runner, spec: ModelSpec, keep_alive: float | None) -> None:
        runner.users += 1
        if keep_alive is not None:
            runner.stay_s = keep_alive
        if self.settings.newest_name and runner.spec.full != spec.full:
            runner.spec = spec
            self._note()

    def _evict(self, runner: Runner) -> None:
        runner.evicting = True
        if runner.users <= 0 and not runner.stopping:
            self._stop(runner)

    def _arm(self, runner: Runner, after_s: float) -> None:
        # A timer that fires too early looks again, so only a shorter stay needs a new one: cheaper than one a call.
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
                self._arm(runner, left)
            return
        self._stop(runner)

    def _stop(self, runner: Runner) -> None:
        runner.stopping = True
        runner.expires_at = min(runner.expires_at, time.time())
        task = asyncio.get_running_loop().create_task(self._unload(runner))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _unload(self, runner: Runner) -> None:
        name = runner.spec.full
        nth, nth_all = self._log.unloads[name] + 1, self._log.unloads.total() + 1
        strikes = self._script.memory(("unload_delay", "stuck"), name, nth, nth_all)
        slow, stuck = strikes.get("unload_delay"), strikes.get("stuck")
        while stuck is not None and self._script.holds(stuck):
            await asyncio.sleep(0.02)
        await asyncio.sleep(slow.value or 0.0 if slow else self.settings.unload_s)
        self._remove(runner)

    def _remove(self, runner: Runner) -> None:
        if runner.timer is not None:
            runner.timer.cancel()
        if self._runners.get(runner.spec.blob_sha) is runner:
            del self._runners[runner.spec.blob_sha]
            self._log.unloads[runner.spec.full] += 1
            self._note()
        runner.stopping = True
        runner.gone.set()

    def _note(self) -> None:
        self._log.resident([runner.spec.full for runner in self._runners.values()])
