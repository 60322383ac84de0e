"""The Engine port, the engine registry, and the size and memory checks before generation."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from tipbench.errors import ModelRefused, TipbenchError
from tipbench.files import ResourceLock
from tipbench.generate.residency import Evidence
from tipbench.plan.config import CollectConfig
from tipbench.plan.scenarios import Scenario


@dataclass(frozen=True)
class ModelFacts:
    """What an engine reports about a model before generation; None if unknown."""

    model: str
    engine: str
    engine_version: str
    host: str  # the machine that runs the model: tokens/s of two hosts cannot be compared
    digest: str
    params_b: float | None = None  # true parameter count, in billions
    quantization: str | None = None
    file_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    thinking: bool = False  # the model thinks unless this is disabled
    remote: bool = False  # runs on another machine, without local weights
    completes: bool = True  # False for embedding-only models


@dataclass(frozen=True)
class GenerationRequest:
    """One request to one model. `options` has every sampling option, including the seed."""

    model: str
    system: str
    user: str
    scenario: Scenario
    n_tips: int
    options: Mapping[str, float | int]
    timeout_s: float = 300.0
    last: bool = False  # the model's last call: its weights may be unloaded afterwards
    thinking: bool = False  # the model can think; disable it
    answer_schema: Mapping[str, Any] | None = None  # JSON Schema for the answer; ignored by engines without grammars
    cancel: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(frozen=True)
class Completion:
    """A complete answer. Times are in seconds; None if the engine does not report them."""

    text: str
    done_reason: str  # stop | length | aborted (the stream ended cleanly, but without `done`)
    wall_s: float
    latency_s: float | None = None  # excluding load
    load_s: float | None = None
    ttft_s: float | None = None  # to the first token, excluding load
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None
    truncated: bool = False  # the server truncated the prompt


class FailureKind(StrEnum):
    """Why a call returned no complete answer."""

    MISSING_MODEL = "missing_model"  # not (or no longer) on the server
    NOT_LOCAL = "not_local"  # would run on another machine
    BUSY = "busy"  # 503 after all retries
    LOAD_FAILED = "load_failed"  # 500 before the first token, twice
    PROMPT_TOO_LONG = "prompt_too_long"
    REJECTED = "rejected"  # any other 4xx: the request is invalid
    INCOMPLETE = "incomplete"  # an error after the first token, or an empty response
    RESET = "reset"  # the connection broke while the server stayed up
    TIMEOUT = "timeout"
    SERVER_GONE = "server_gone"  # not caused by the cell: the run pauses and retries
    CANCELLED = "cancelled"  # stopped by tipbench itself; never recorded


@dataclass(frozen=True)
class EngineFailure:
    """A call without a complete answer, as a value that is never scored; `partial` is the text received so far."""

    kind: FailureKind
    reason: str
    partial: str = ""
    wall_s: float = 0.0


class Engine(Protocol):
    """Generates answers; holds at most one model's weights at any time."""

    name: str

    def facts(self, model: str) -> ModelFacts:
        """Return a model's facts. Raises ModelRefused if it is missing, ServerUnavailable without its server."""
        ...

    def start(self) -> None:
        """Called once before any engine generates; raises ResidencyError if memory is not free."""
        ...

    def prepare(self, facts: ModelFacts) -> None:
        """Called before a model's first call; returns once no other weights are in memory, or raises ResidencyError."""
        ...

    def complete(self, request: GenerationRequest) -> Completion | EngineFailure:
        """Send one call; retries only failures that are not caused by the model. Thread-safe."""
        ...

    def release(self, model: str) -> None:
        """Called after a model's last call; returns once it is unloaded. Raises ResidencyError or ServerUnavailable."""
        ...

    def alive(self) -> bool:
        """Return whether the engine can answer calls; False pauses the run."""
        ...

    def abort(self) -> None:
        """Cancel the running calls from another thread; each returns CANCELLED."""
        ...

    def evidence(self) -> Evidence | None:
        """Return what was observed in memory so far; None for engines that do not share their memory."""
        ...

    def foreign_between(self, start: float, end: float) -> bool:
        """Return whether another client's model was in memory between two monotonic times."""
        ...

    def close(self) -> None: ...


class InProcessEngine:
    """Base of engines inside this process, where no other client can load a model."""

    def start(self) -> None:
        pass

    def prepare(self, facts: ModelFacts) -> None:
        pass

    def release(self, model: str) -> None:
        pass

    def alive(self) -> bool:
        return True

    def abort(self) -> None:
        pass  # these engines check `GenerationRequest.cancel` themselves

    def evidence(self) -> Evidence | None:
        return None

    def foreign_between(self, start: float, end: float) -> bool:  # noqa: ARG002 - there are no other clients
        return False

    def close(self) -> None:
        pass


def engine_of(model: str) -> str:
    """Return the engine of a model name: its prefix if it is `embedded` or `baseline`, else Ollama."""
    prefix, _, _ = model.partition(":")
    return prefix if prefix in ("embedded", "baseline") else "ollama"


_OVERHEAD = 1.1  # compute buffers, on top of weights and context


@dataclass(frozen=True)
class Memory:
    """Free memory of the machine that runs the model, in bytes; None if unknown."""

    ram: int | None = None
    vram: int | None = None


def rejection_reason(facts: ModelFacts, *, max_model_b: float, allow_unknown_size: bool) -> str | None:
    """Return why a model may not run, with the limit; None if it may."""
    if facts.remote:
        return f"{facts.model} is a cloud model: it runs on another server. Choose a model with local weights."
    if not facts.completes:
        return f"{facts.model} cannot complete text (its capabilities lack `completion`). Choose a chat model."
    if facts.params_b is None:
        if allow_unknown_size:
            return None
        return (
            f"{facts.model} has an unknown parameter count; the limit is {max_model_b:g}B. "
            "Choose another model, or pass --allow-unknown-size."
        )
    if facts.params_b > max_model_b:
        return (
            f"{facts.model} has {facts.params_b:.2f}B parameters; the limit is {max_model_b:g}B. "
            "Choose a smaller model or raise --max-model-b."
        )
    return None


def memory_needed(facts: ModelFacts, *, num_ctx: int, concurrency: int = 1) -> int | None:
    """Estimate the bytes for weights and context; None if the file size is unknown."""
    if facts.file_bytes is None:
        return None
    context = (facts.kv_bytes_per_token or 0) * num_ctx * concurrency
    return int((facts.file_bytes + context) * _OVERHEAD)


def memory_warning(facts: ModelFacts, needed: int | None, free: Memory) -> str | None:
    """Return a warning if a model is unlikely to fit; None if it fits or too little is known."""
    room = max((space for space in (free.ram, free.vram) if space is not None), default=None)
    if needed is None or room is None or needed <= room:
        return None
    return (
        f"{facts.model} needs about {needed / 2**30:.1f} GiB with its context; only {room / 2**30:.1f} GiB are free. "
        "Expect slow answers or failed loads; free memory or lower --num-ctx."
    )


_MEMINFO = Path("/proc/meminfo")


def free_memory() -> Memory:
    """Return the free RAM and VRAM of this machine; None where unavailable."""
    return Memory(ram=_free_ram(), vram=_free_vram())


def _free_ram() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_vram() -> int | None:
    """Return the largest free memory of one NVIDIA card; other vendors' tools differ too much to rely on."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        return max(int(line) for line in output.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


@dataclass(frozen=True)
class EngineDependencies:
    """Dependencies for building engines."""

    config: CollectConfig
    home: Path
    report: Callable[[str], None]
    lock: ResourceLock | None = None  # on the Ollama server; None for a dry run


def _ollama(needs: EngineDependencies) -> Engine:
    from tipbench.generate.ollama import MemoryPolicy, OllamaEngine

    config = needs.config
    rule = MemoryPolicy(unload=config.unload, evict=config.evict, wait_s=config.server_wait_s)
    return OllamaEngine(config.ollama_url, rule=rule, lock=needs.lock, report=needs.report)


def _embedded(needs: EngineDependencies) -> Engine:
    from tipbench.generate.llamacpp import LlamaCppEngine

    return LlamaCppEngine(needs.home, num_ctx=needs.config.num_ctx)


def _template(_needs: EngineDependencies) -> Engine:
    from tipbench.generate.template import TemplateEngine

    return TemplateEngine()


ENGINES: Mapping[str, Callable[[EngineDependencies], Engine]] = {
    "ollama": _ollama,
    "embedded": _embedded,
    "baseline": _template,
}


def build_engines(models: Iterable[str], needs: EngineDependencies) -> dict[str, Engine]:
    """Build one engine of each kind that the models need."""
    kinds = dict.fromkeys(engine_of(model) for model in models)
    return {kind: ENGINES[kind](needs) for kind in kinds}


def model_facts(engines: Mapping[str, Engine], config: CollectConfig) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    """Return the facts of allowed models, and the reason for each refused one. Raises ServerUnavailable."""
    allowed: dict[str, ModelFacts] = {}
    refused: dict[str, str] = {}
    for model in config.model_names:
        try:
            facts = engines[engine_of(model)].facts(model)
        except ModelRefused as exc:
            refused[model] = str(exc)
            continue
        reason = rejection_reason(facts, max_model_b=config.max_model_b, allow_unknown_size=config.allow_unknown_size)
        if reason is None:
            allowed[model] = facts
        else:
            refused[model] = reason
    return allowed, refused


def close_engines(engines: Mapping[str, Engine], report: Callable[[str], None]) -> None:
    """Close all engines; errors are reported, not raised."""
    for engine in engines.values():
        try:
            engine.close()
        except TipbenchError as exc:
            report(str(exc))
