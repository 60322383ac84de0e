"""The Engine protocol, the registry of engines, and checks of a model's size and memory."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from tipbench.errors import ModelRefused, TipbenchError
from tipbench.files import ResourceLock
from tipbench.generate.residency import Evidence
from tipbench.http import canonical_url, is_loopback
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.scenarios import Scenario


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model, known before it is used; None if unknown."""

    model: str
    engine: str
    engine_version: str
    host: str  # runs the model; tokens/s of two hosts cannot be compared
    digest: str
    params_b: float | None = None  # true parameter count, in billions
    quantization: str | None = None
    file_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    can_think: bool = False  # thinks before it answers unless `disable_thinking` is set
    remote: bool = False  # a cloud model, without local weights
    completes: bool = True  # False for embedding-only models


OPTIONS = frozenset({"num_ctx", "num_predict", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"})


def check_options(options: Iterable[str]) -> None:
    """Raise ValueError unless these are `OPTIONS`: Ollama ignores unknown ones, and uses defaults for missing ones."""
    if differing := set(options) ^ OPTIONS:
        raise ValueError(f"options sent to a model must be exactly {sorted(OPTIONS)}; differs in {sorted(differing)}")


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
    disable_thinking: bool = False  # set for models that can think
    answer_schema: Mapping[str, Any] | None = None  # JSON Schema; ignored by engines that cannot enforce it
    cancel: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(frozen=True)
class Completion:
    """A complete answer. Times are in seconds; None if the engine does not report them."""

    text: str
    done_reason: str  # stop | length | aborted (the stream ended cleanly, but without `done`)
    latency_s: float | None = None  # excluding load
    load_s: float | None = None
    ttft_s: float | None = None  # time to the first token, excluding load
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
    SERVER_GONE = "server_gone"  # not caused by the cell: the collect pauses and retries
    CANCELLED = "cancelled"  # stopped by tipbench itself; never recorded


@dataclass(frozen=True)
class EngineFailure:
    """A call that returned no complete answer; never scored. `partial` is the text received so far."""

    kind: FailureKind
    reason: str
    partial: str = ""


class Engine(Protocol):
    """Generates answers; holds at most one model's weights at any time."""

    name: str

    def facts(self, model: str) -> ModelFacts:
        """Return a model's facts. Raises ModelRefused for a missing model, ServerUnavailable for a missing server."""
        ...

    def list_models(self) -> list[str]:
        """Return the names of its models. Raises ServerUnavailable."""
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
        """Return whether the engine can answer calls; False pauses the collect."""
        ...

    def abort(self) -> None:
        """Cancel the running calls from another thread; each returns CANCELLED."""
        ...

    def evidence(self) -> Evidence | None:
        """Return which models were seen in the server's memory so far; None for an engine without a server."""
        ...

    def foreign_between(self, start: float, end: float) -> bool:
        """Return whether another client's model was in memory between two monotonic times."""
        ...

    def close(self) -> None: ...


class InProcessEngine:
    """Base class of engines in this process, where no other client can load a model."""

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


_OVERHEAD = 1.1  # a rough factor for compute buffers


@dataclass(frozen=True)
class FreeMemory:
    """Free memory of the machine that runs the model, in bytes; None if unknown."""

    ram: int | None = None
    vram: int | None = None


def refusal_reason(facts: ModelFacts, config: CollectConfig) -> str | None:
    """Return why a model may not run, with the limit; None if it may."""
    if facts.remote:
        return f"{facts.model} is a cloud model: it runs on another server. Choose a model with local weights."
    if not facts.completes:
        return f"{facts.model} cannot complete text (its capabilities lack `completion`). Choose a chat model."
    if facts.params_b is None:
        if config.allow_unknown_size:
            return None
        return (
            f"{facts.model} has an unknown parameter count; the limit is {config.max_model_b:g}B. "
            "Choose another model, or pass --allow-unknown-size."
        )
    if facts.params_b > config.max_model_b:
        return (
            f"{facts.model} has {facts.params_b:.2f}B parameters; the limit is {config.max_model_b:g}B. "
            "Choose a smaller model or raise --max-model-b."
        )
    return None


def memory_needed(facts: ModelFacts, *, num_ctx: int, concurrency: int = 1) -> int | None:
    """Estimate the bytes for weights and context; None if the file size is unknown."""
    if facts.file_bytes is None:
        return None
    context = (facts.kv_bytes_per_token or 0) * num_ctx * concurrency
    return int((facts.file_bytes + context) * _OVERHEAD)


def memory_warning(facts: ModelFacts, needed: int | None, free: FreeMemory) -> str | None:
    """Return a warning if a model probably fits in neither RAM nor VRAM; None if it fits or a size is unknown."""
    available = max((size for size in (free.ram, free.vram) if size is not None), default=None)
    if needed is None or available is None or needed <= available:
        return None
    return (
        f"{facts.model} needs about {needed / 2**30:.1f} GiB with its context; "
        f"only {available / 2**30:.1f} GiB are free. "
        "Expect slow answers or failed loads; free memory or lower --num-ctx."
    )


def free_memory(model: str, config: CollectConfig) -> FreeMemory:
    """Return the free RAM and VRAM for a model; unknown if it runs on another machine.

    VRAM is that of the NVIDIA card with the most free memory; other vendors' tools differ too much to rely on.
    """
    if not engine_type_of(model).runs_here(config):
        return FreeMemory()
    ram = vram = None
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                ram = int(line.split()[1]) * 1024
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            output = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
            vram = max(int(line) for line in output.split()) * 2**20
    return FreeMemory(ram, vram)


@dataclass(frozen=True)
class EngineDependencies:
    """The arguments of `EngineType.build`."""

    config: CollectConfig
    home: Path
    report: Callable[[str], None]
    locks: Mapping[str, ResourceLock] = field(default_factory=dict)  # by engine name; empty for a dry run


@dataclass(frozen=True)
class EngineType:
    """Properties of an engine, known without building it. Other modules test these, never the engine's name."""

    name: str  # the prefix of its models' names
    build: Callable[[EngineDependencies], Engine]
    label: str  # in messages and lock names
    is_reference: bool = False  # True: has no model; compared with, never ranked
    has_prompt: bool = True  # False: answers do not depend on the prompt
    holds_weights: bool = True  # False: needs almost no memory and time
    server: str | None = None  # key of the setting with its server's URL; None: runs inside tipbench
    needs_lock: bool = False  # True: only one collect or model judge may use it at a time
    # Called with (URL, model, digest); unloads what a killed process left loaded.
    unload: Callable[[str, str, str], None] | None = None

    def server_url(self, config: CollectConfig) -> str | None:
        """Return the URL of its server, or None if it has none."""
        return getattr(config, self.server) if self.server else None

    def runs_here(self, config: CollectConfig) -> bool:
        """Return whether its models run on this machine."""
        url = self.server_url(config)
        return url is None or is_loopback(url)

    def resource(self, config: CollectConfig) -> str:
        """Return the name of what two jobs must not use at once: the server, or this engine on this machine."""
        url = self.server_url(config)
        return f"{self.label} on this machine" if url is None else f"{self.label} at {canonical_url(url)}"


def _build_ollama(dependencies: EngineDependencies) -> Engine:
    from tipbench.generate.ollama import OllamaEngine

    config = dependencies.config
    return OllamaEngine(
        config.ollama_url,
        unload=config.unload,
        evict=config.evict,
        wait_s=config.server_wait_s,
        lock=dependencies.locks.get("ollama"),
        report=dependencies.report,
    )


def _unload_ollama(url: str, model: str, digest: str) -> None:
    from tipbench.generate.ollama import unload

    unload(url, model, digest)


def _build_embedded(dependencies: EngineDependencies) -> Engine:
    from tipbench.generate.llamacpp import LlamaCppEngine

    return LlamaCppEngine(dependencies.home, num_ctx=dependencies.config.num_ctx)


def _build_template(_dependencies: EngineDependencies) -> Engine:
    from tipbench.generate.template import TemplateEngine

    return TemplateEngine()


_OLLAMA = EngineType("ollama", _build_ollama, "Ollama", server="ollama_url", needs_lock=True, unload=_unload_ollama)
ENGINES: dict[str, EngineType] = {
    each.name: each
    for each in (
        EngineType("embedded", _build_embedded, "the embedded model"),
        EngineType(
            "baseline", _build_template, "the template", is_reference=True, has_prompt=False, holds_weights=False
        ),
        _OLLAMA,
    )
}


def engine_type_of(model: str) -> EngineType:
    """Return the engine type named by the prefix of a model's name; Ollama for all other names."""
    prefix, _, _ = model.partition(":")
    return ENGINES.get(prefix, _OLLAMA)


def engine_types(models: Iterable[str]) -> list[EngineType]:
    """Return the engine types that the models need, each once."""
    return list(dict.fromkeys(map(engine_type_of, models)))


def engine_locks(config: CollectConfig, home: Path, purpose: str) -> dict[str, ResourceLock]:
    """Return the locks of the configured models' engines, by engine name; not yet acquired."""
    types = engine_types(config.model_names)
    return {each.name: ResourceLock(home, each.resource(config), purpose) for each in types if each.needs_lock}


def engine_resources(config: CollectConfig) -> set[str]:
    """Return the resources that the configured models occupy; each is for one job at a time.

    An embedded model shares memory with the servers on this machine, so it occupies them, too.
    """
    types = engine_types(config.model_names)
    # An engine with a lock occupies its resource even if it holds no weights.
    occupying = {each for each in types if each.needs_lock or each.holds_weights}
    if any(each.server is None for each in occupying):
        occupying |= {each for each in ENGINES.values() if each.server is not None and each.runs_here(config)}
    return {each.resource(config) for each in occupying}


def build_engines(models: Iterable[str], dependencies: EngineDependencies) -> dict[str, Engine]:
    """Build the engines that the models need, by name."""
    return {each.name: each.build(dependencies) for each in engine_types(models)}


def model_facts(engines: Mapping[str, Engine], config: CollectConfig) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    """Return the facts of accepted models, and the reason for each refused one. Raises ServerUnavailable."""
    accepted: dict[str, ModelFacts] = {}
    refused: dict[str, str] = {}
    for model in config.model_names:
        found = _look_up(engines[engine_type_of(model).name], model, config)
        if found.refusal is not None:
            refused[model] = found.refusal
        elif found.facts is not None:
            accepted[model] = found.facts
    return accepted, refused


def refusal_error(
    accepted: Mapping[str, ModelFacts], refused: Mapping[str, str], config: CollectConfig, hint: str = ""
) -> ModelRefused | None:
    """Return the error if refused models stop a collect, else None. `hint` is added if other models are accepted."""
    if not refused or (config.skip_refused and accepted):
        return None
    return ModelRefused(" ".join(refused.values()) + (hint if accepted else ""))


@dataclass(frozen=True)
class AvailableModel:
    """A model that an engine offers. It may still be refused, and then have no facts."""

    model: str
    engine: str
    facts: ModelFacts | None
    refusal: str | None  # why it may not run

    def to_json(self) -> dict[str, object]:
        """Return plain values for `tipbench models list --json`."""
        keys = ("params_b", "quantization", "file_bytes", "digest")
        facts = {key: getattr(self.facts, key, None) for key in keys}
        return {"model": self.model, "engine": self.engine, **facts, "refusal": self.refusal}


@dataclass(frozen=True)
class Availability:
    """Models, and the errors of engines that could not list theirs."""

    models: tuple[AvailableModel, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def accepted(self) -> tuple[str, ...]:
        """The names of the models that may run."""
        return tuple(each.model for each in self.models if each.refusal is None)


def available_models(config: CollectConfig, home: Path, engines: Iterable[EngineType] | None = None) -> Availability:
    """Return the models of these engines (default: all), with the servers and limits of `config`."""
    models: list[AvailableModel] = []
    errors: list[str] = []
    for engine_type in ENGINES.values() if engines is None else engines:
        engine = engine_type.build(EngineDependencies(config, home, report=errors.append))
        try:
            for name in engine.list_models():
                models.append(_look_up(engine, name, config))  # noqa: PERF401 - keeps those before an error
        except TipbenchError as exc:
            errors.append(str(exc))
        finally:
            close_engines({engine.name: engine}, errors.append)
    return Availability(tuple(models), tuple(errors))


def _look_up(engine: Engine, model: str, config: CollectConfig) -> AvailableModel:
    try:
        facts = engine.facts(model)
    except ModelRefused as exc:
        return AvailableModel(model, engine.name, facts=None, refusal=str(exc))
    return AvailableModel(model, engine.name, facts, refusal_reason(facts, config))


def close_engines(engines: Mapping[str, Engine], report: Callable[[str], None]) -> None:
    """Close all engines; errors are reported, not raised."""
    for engine in engines.values():
        try:
            engine.close()
        except TipbenchError as exc:
            report(str(exc))
