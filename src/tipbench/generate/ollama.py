"""Engine for an Ollama server, with one model at a time in its memory. `ollama_api` sends the requests."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from tipbench.errors import ModelRefused, OllamaError
from tipbench.files import ResourceLock
from tipbench.generate.engine import Completion, EngineFailure, GenerationRequest, ModelFacts, check_options
from tipbench.generate.ollama_api import OllamaApi, entry_name, read_count
from tipbench.generate.residency import (
    UNLOAD_TIMEOUT_S,
    Evidence,
    Monitor,
    Resident,
    ensure_empty,
    wait_until_empty,
    wait_until_gone,
)
from tipbench.http import is_loopback

KEEP_WARM_S = 60  # how long a model stays loaded after a call; short, so that a killed collect soon frees its memory
_INTERRUPT_WAIT_S = 15.0  # for a model to be unloaded after Ctrl-C


class OllamaEngine:
    """Engine that uses Ollama's native streaming API."""

    name = "ollama"

    def __init__(
        self,
        url: str,
        *,
        unload: Literal["model", "call"] = "model",  # after each model or after each call
        evict: bool = False,
        wait_s: float = 300.0,  # for memory to become free
        lock: ResourceLock | None = None,
        report: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self._api = OllamaApi(url)
        self._unload_each_call = unload == "call"
        self._evict = evict
        self._wait_s = wait_s
        self._lock = lock
        self._monitor = Monitor(
            self._api.resident,
            report_foreign=lambda name: report(
                f"another client loaded {name} on {self._api.url}: cells generated at the same time are marked"
            ),
        )
        self._cancelled = threading.Event()
        self._current: ModelFacts | None = None  # of the model that may be in memory
        self._released_at: float | None = None  # of the previous model, until its handover is recorded
        self._version: str | None = None

    # Model facts

    def facts(self, model: str) -> ModelFacts:
        if self._version is None:
            self._version = self._api.version()
        url = self._api.url
        shown = self._api.show(model)
        if shown is None:
            raise ModelRefused(f"{model} is not on the Ollama server at {url}. Get it with `ollama pull {model}`.")
        entry = find_entry(self._api.tags(), model)
        host = platform.node() if is_loopback(url) else (urlsplit(url).hostname or url)
        return read_facts(model, shown, entry, version=self._version, host=host)

    def list_models(self) -> list[str]:
        """Return the names of the server's models, sorted."""
        return sorted(entry_name(entry) for entry in self._api.tags())

    # Memory

    def start(self) -> None:
        leftover_digest = None
        if self._lock is not None and self._lock.dead_holder is not None:
            leftover_digest = self._lock.dead_holder.digest
        ensure_empty(self._api, leftover_digest=leftover_digest, evict=self._evict, wait_s=self._wait_s)
        if self._lock is not None:
            self._lock.note_unloaded()
        self._monitor.start()

    def prepare(self, facts: ModelFacts) -> None:
        current_digest = find_entry(self._api.tags(), facts.model).get("digest")
        if current_digest != facts.digest:
            raise OllamaError(_model_changed_message(facts.model))
        if self._evict:
            for resident in self._api.resident() or ():
                self._api.unload(resident.name)
        wait_until_empty(self._api, wait_s=self._wait_s)
        self._record_handover()
        if self._lock is not None:
            self._lock.note_loaded(facts.model, facts.digest)
        self._current = facts
        self._monitor.expect(Resident(full_name(facts.model), facts.digest))

    def release(self, model: str) -> None:
        if self._current is None:
            return
        released_at = time.monotonic()
        if self._api.resident() != ():  # not empty, or unknown
            self._api.unload(model)
        timeout_s = _INTERRUPT_WAIT_S if self._cancelled.is_set() else UNLOAD_TIMEOUT_S
        still_resident = wait_until_gone(self._api, self._current.digest, timeout_s=timeout_s)
        self._released_at = released_at
        if still_resident == ():  # otherwise `prepare` records the handover, once the memory is empty
            self._record_handover()
        self._monitor.expect(None)
        if self._lock is not None:
            self._lock.note_unloaded()
        self._current = None
        self._api.close_idle_connections()

    def _record_handover(self) -> None:
        """Record the time since the previous model's release. The memory must be empty."""
        if self._released_at is not None:
            self._monitor.record_handover(time.monotonic() - self._released_at)
            self._released_at = None

    def evidence(self) -> Evidence:
        return self._monitor.evidence()

    def foreign_between(self, start: float, end: float) -> bool:
        return self._monitor.foreign_between(start, end)

    # Calls

    def alive(self) -> bool:
        return self._api.alive()

    def abort(self) -> None:
        self._cancelled.set()
        self._api.abort_calls()

    def close(self) -> None:
        self._monitor.stop()
        self._api.close()

    def complete(self, request: GenerationRequest) -> Completion | EngineFailure:
        if self._unload_each_call and self._current is not None and self.alive():
            # Wait until the model of the previous call is unloaded. Not if the server is down: waiting would raise an
            # exception, but the call below returns an EngineFailure.
            wait_until_gone(self._api, self._current.digest)
        result = self._api.complete(request, self._body(request))
        if self._monitor.tag_moved:
            raise OllamaError(_model_changed_message(request.model))
        return result

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        check_options(request.options)
        messages = [{"role": "user", "content": request.user}]
        if request.system:
            messages.insert(0, {"role": "system", "content": request.system})
        unload_after_call = self._unload_each_call or request.last
        body: dict[str, Any] = {
            "model": request.model,
            "messages": messages,
            "stream": True,
            "truncate": False,  # newer servers then reject a prompt that is too long; older ones truncate it silently
            "keep_alive": 0 if unload_after_call else KEEP_WARM_S,
            "options": dict(request.options),
        }
        if request.disable_thinking:
            body["think"] = False
        if request.answer_schema is not None:
            body["format"] = dict(request.answer_schema)
        return body


def _model_changed_message(model: str) -> str:
    return (
        f"{model} has changed since the run was planned: its tag was moved on the server. Finished cells are kept; run "
        "the same command again to collect the new model."
    )


def find_entry(entries: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """Return a model's entry in the server's list of models, empty if it is missing."""
    wanted = full_name(model)
    for entry in entries:
        if full_name(entry_name(entry)) == wanted:
            return entry
    return {}


def full_name(model: str) -> str:
    """Normalise a model name: in lower case, with its tag, by default `:latest`."""
    _, _, base_name = model.rpartition("/")  # before the last slash, a colon may precede a registry's port
    tagged = model if ":" in base_name else f"{model}:latest"
    return tagged.casefold()


def read_facts(
    model: str, shown: Mapping[str, Any], entry: Mapping[str, Any], *, version: str, host: str
) -> ModelFacts:
    """Build a model's facts from the responses of `/api/show` and `/api/tags`."""

    def section(name: str) -> dict[str, Any]:
        value = shown.get(name)
        return value if isinstance(value, dict) else {}

    info = section("model_info")
    parameters = read_count(info.get("general.parameter_count"))
    projector_parameters = read_count(section("projector_info").get("general.parameter_count")) or 0  # vision models
    quantization = section("details").get("quantization_level")
    capabilities = shown.get("capabilities")
    if not isinstance(capabilities, list):
        capabilities = None  # older servers do not report them
    remote = any(source.get(key) for source in (shown, entry) for key in ("remote_model", "remote_host"))
    digest = str(entry.get("digest") or "")
    if not digest and not remote:  # remote models are refused later, with another reason
        raise ModelRefused(f"{model} is not in the Ollama server's list of models, so it cannot be pinned by digest.")
    return ModelFacts(
        model=model,
        engine="ollama",
        engine_version=version,
        host=host,
        digest=digest,
        params_b=(parameters + projector_parameters) / 1e9 if parameters else None,
        quantization=str(quantization) if quantization else None,
        file_bytes=read_count(entry.get("size")) or None,
        kv_bytes_per_token=_kv_bytes_per_token(info),
        can_think="thinking" in (capabilities or ()),
        remote=remote,
        completes=capabilities is None or "completion" in capabilities,
    )


def _kv_bytes_per_token(info: Mapping[str, Any]) -> int | None:
    """Return the size of one token in the KV cache, with 16-bit floats."""
    architecture = info.get("general.architecture")

    def number(name: str) -> int | None:
        return read_count(info.get(f"{architecture}.{name}")) or None

    layers, heads = number("block_count"), number("attention.head_count")
    kv_heads = number("attention.head_count_kv") or heads
    key_length = number("attention.key_length")
    embedding_length = number("embedding_length")
    if key_length is None and embedding_length and heads:
        key_length = embedding_length // heads
    if not (layers and kv_heads and key_length):
        return None
    keys_and_values, bytes_per_float = 2, 2
    return keys_and_values * bytes_per_float * layers * kv_heads * key_length


def unload(url: str, model: str, digest: str) -> None:
    """Unload a model that a killed process left in the server's memory, and wait until it is gone."""
    api = OllamaApi(url)
    try:
        if any(resident.digest == digest for resident in api.resident() or ()):
            api.unload(model)
        wait_until_gone(api, digest)
    finally:
        api.close()
