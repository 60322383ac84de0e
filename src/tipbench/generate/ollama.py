"""OllamaEngine: model facts, calls with retries, and one model in the server's memory at a time."""

from __future__ import annotations

import platform
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from tipbench.errors import ModelRefused, OllamaError
from tipbench.files import ResourceLock
from tipbench.generate.engine import Completion, EngineFailure, FailureKind, GenerationRequest, ModelFacts
from tipbench.generate.ollama_api import Chat, Ending, OllamaApi
from tipbench.generate.residency import (
    STUCK_DEADLINE_S,
    Evidence,
    Monitor,
    Resident,
    require_empty,
    wait_until_empty,
    wait_until_gone,
)
from tipbench.http import is_loopback

KEEP_WARM_S = 60  # between two calls of a block; short, so that a killed collect does not hold memory for long
_BUSY_TRIES = 6
_BUSY_FIRST_WAIT_S = 0.5
_RESET_TRIES = 3
_INTERRUPT_WAIT_S = 15.0
_OPTIONS = frozenset(
    {"num_ctx", "num_predict", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"}
)  # Ollama silently ignores unknown options, so exactly these are sent


@dataclass(frozen=True)
class MemoryPolicy:
    """How the server's memory is kept to one model: when to unload, whether to evict, and how long to wait."""

    unload: Literal["model", "call"] = "model"
    evict: bool = False
    wait_s: float = 300.0


class OllamaEngine:
    """Engine for one Ollama server, using its native streaming API."""

    name = "ollama"

    def __init__(
        self,
        url: str,
        *,
        rule: MemoryPolicy | None = None,
        lock: ResourceLock | None = None,
        report: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self._rest = OllamaApi(url)
        self._rule = rule or MemoryPolicy()
        self._lock = lock
        self._report = report
        self._monitor = Monitor(self._rest.resident, report_foreign=self._report_foreign)
        self._cancelled = threading.Event()
        self._current: ModelFacts | None = None
        self._handover_began: float | None = None
        self._version: str | None = None

    # Model facts

    def facts(self, model: str) -> ModelFacts:
        if self._version is None:
            self._version = self._rest.version()
        shown = self._rest.show(model)
        if shown is None:
            raise ModelRefused(f"{model} is not on the Ollama server at {self._rest.url}. Get it: ollama pull {model}")
        entry = find_entry(self._rest.tags(), model)
        return read_facts(model, shown, entry, version=self._version, host=compute_host(self._rest.url))

    def list_models(self) -> list[str]:
        """Return the names of the server's models, sorted."""
        return sorted(str(entry.get("name") or entry.get("model")) for entry in self._rest.tags())

    # Memory

    def start(self) -> None:
        left = self._lock.left_behind if self._lock is not None else None
        leftovers = frozenset({left.digest}) if left is not None else frozenset[str]()
        require_empty(self._rest, leftovers=leftovers, evict=self._rule.evict, wait_s=self._rule.wait_s)
        if self._lock is not None:
            self._lock.note_empty()
        self._monitor.start()

    def prepare(self, facts: ModelFacts) -> None:
        listed = find_entry(self._rest.tags(), facts.model).get("digest")
        if listed != facts.digest:
            raise OllamaError(_moved(facts.model))
        self._evict_foreign()
        wait_until_empty(self._rest, wait_s=self._rule.wait_s)
        self._close_handover()
        if self._lock is not None:
            self._lock.note_loaded(facts.model, facts.digest)
        self._current = facts
        self._monitor.expect(Resident(full_name(facts.model), facts.digest))

    def release(self, model: str) -> None:
        if self._current is None:
            return
        began = time.monotonic()
        if self._rest.resident() != ():
            self._rest.unload(model)
        stuck_s = _INTERRUPT_WAIT_S if self._cancelled.is_set() else STUCK_DEADLINE_S
        listed = wait_until_gone(self._rest, self._current.digest, stuck_s=stuck_s)
        self._handover_began = began
        if listed == ():
            self._close_handover()
        self._monitor.expect(None)
        if self._lock is not None:
            self._lock.note_empty()
        self._current = None
        self._rest.drop_idle_lines()

    def _close_handover(self) -> None:
        """Record a handover once the memory is empty after a model."""
        if self._handover_began is not None:
            self._monitor.handed_over(time.monotonic() - self._handover_began)
            self._handover_began = None

    def evidence(self) -> Evidence:
        return self._monitor.evidence()

    def foreign_between(self, start: float, end: float) -> bool:
        """Return whether another client's model was in memory between two monotonic times."""
        return self._monitor.foreign_between(start, end)

    def _evict_foreign(self) -> None:
        if self._rule.evict:
            for model in self._rest.resident() or ():
                self._rest.unload(model.name)

    def _report_foreign(self, name: str) -> None:
        self._report(f"another client loaded {name} on {self._rest.url}: cells generated at the same time are marked")

    # Calls

    def alive(self) -> bool:
        return self._rest.alive()

    def abort(self) -> None:
        self._cancelled.set()
        self._rest.cut_lines()

    def close(self) -> None:
        self._monitor.stop()
        self._rest.close()

    def complete(self, request: GenerationRequest) -> Completion | EngineFailure:
        if self._rule.unload == "call" and self._current is not None and self.alive():
            wait_until_gone(self._rest, self._current.digest)  # the previous call must have freed its memory
        result = self._send_with_retries(request)
        if self._monitor.moved:
            raise OllamaError(_moved(request.model))
        return result

    def _send_with_retries(self, request: GenerationRequest) -> Completion | EngineFailure:
        body = self._body(request)
        tried = _Tries()
        while True:
            chat = self._rest.chat(body, timeout_s=request.timeout_s, cancel=request.cancel)
            verdict = self._classify(chat, request, tried)
            if not isinstance(verdict, _Again):
                return verdict
            if request.cancel.wait(verdict.wait_s):
                return EngineFailure(FailureKind.CANCELLED, "stopped", chat.text, chat.wall_s)

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        unknown = set(request.options) ^ _OPTIONS
        if unknown:
            raise ValueError(f"options sent to Ollama must be exactly {sorted(_OPTIONS)}; differs in {sorted(unknown)}")
        messages = [{"role": "user", "content": request.user}]
        if request.system:
            messages.insert(0, {"role": "system", "content": request.system})
        free = request.last or self._rule.unload == "call"
        body: dict[str, Any] = {
            "model": request.model,
            "messages": messages,
            "stream": True,
            "truncate": False,  # newer servers then reject a prompt that is too long; older ones truncate it silently
            "keep_alive": 0 if free else KEEP_WARM_S,
            "options": dict(request.options),
        }
        if request.thinking:
            body["think"] = False
        if request.answer_schema is not None:
            body["format"] = dict(request.answer_schema)
        return body

    def _classify(self, chat: Chat, request: GenerationRequest, tried: _Tries) -> Completion | EngineFailure | _Again:
        """Convert the end of a call into a result or a retry; retries only what is not caused by the model."""
        if chat.ending is Ending.DONE:
            return _remote_failure(chat) or read_completion(chat, request)
        if chat.ending is Ending.CLEAN_END:
            return self._clean_end(chat, request, tried)
        if chat.ending is Ending.CANCELLED:
            return _failure(FailureKind.CANCELLED, chat, "stopped")
        if chat.ending in (Ending.REFUSED, Ending.RESET, Ending.TIMEOUT):
            return self._broken(chat, tried)
        if chat.ending is Ending.STATUS:
            return self._status(chat, tried)
        return _failure(FailureKind.INCOMPLETE, chat, f"the answer was cut off: {chat.error}")

    def _clean_end(self, chat: Chat, request: GenerationRequest, tried: _Tries) -> Completion | EngineFailure | _Again:
        if tried.take("clean end", 1):
            return _Again()
        if not chat.text:
            return _failure(FailureKind.INCOMPLETE, chat, "the answer ended before its first token, twice")
        return read_completion(chat, request)

    def _broken(self, chat: Chat, tried: _Tries) -> EngineFailure | _Again:
        if chat.ending is Ending.REFUSED or not self.alive():
            return _failure(FailureKind.SERVER_GONE, chat, f"Ollama at {self._rest.url} is unavailable: {chat.error}")
        if chat.ending is Ending.TIMEOUT:
            return _failure(FailureKind.TIMEOUT, chat, chat.error)
        if chat.before_first_byte and tried.take("reset", _RESET_TRIES - 1):
            return _Again(_BUSY_FIRST_WAIT_S)
        return _failure(FailureKind.RESET, chat, f"the connection broke: {chat.error}")

    def _status(self, chat: Chat, tried: _Tries) -> EngineFailure | _Again:
        if chat.status in (502, 504) and not self.alive():
            return _failure(FailureKind.SERVER_GONE, chat, f"{chat.status}: {chat.error}")
        if chat.status in (429, 502, 503, 504):
            if tried.take("busy", _BUSY_TRIES - 1):
                return _Again(_BUSY_FIRST_WAIT_S * 2 ** (tried.count("busy") - 1) * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            return _failure(FailureKind.BUSY, chat, f"still {chat.status} after {_BUSY_TRIES} tries: {chat.error}")
        if chat.status >= 500:
            if tried.take("load", 1):
                return _Again(_BUSY_FIRST_WAIT_S)
            return _failure(FailureKind.LOAD_FAILED, chat, f"{chat.status} twice: {chat.error}")
        return _failure(_refusal_kind(chat), chat, f"{chat.status}: {chat.error}")


@dataclass(frozen=True)
class _Again:
    wait_s: float = 0.0


class _Tries:
    """Counts retries, separately for each kind."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def take(self, kind: str, most: int) -> bool:
        if self.count(kind) >= most:
            return False
        self._used[kind] = self.count(kind) + 1
        return True

    def count(self, kind: str) -> int:
        return self._used.get(kind, 0)


def read_completion(chat: Chat, request: GenerationRequest) -> Completion:
    """Build the completion of a finished call; a counter missing in the response is unknown, not zero."""
    last = chat.last
    total, load = _seconds(last, "total_duration"), _seconds(last, "load_duration")
    evaluated = _seconds(last, "eval_duration")
    output, prompt = _count(last, "eval_count"), _count(last, "prompt_eval_count")
    reason = str(last.get("done_reason") or "stop") if chat.ending is Ending.DONE else "aborted"
    return Completion(
        text=chat.text,
        done_reason=reason[:100],
        wall_s=chat.wall_s,
        latency_s=max(0.0, (total if total is not None else chat.wall_s) - (load or 0.0)),
        load_s=load,
        ttft_s=max(0.0, chat.first_token_s - (load or 0.0)) if chat.first_token_s is not None else None,
        prompt_tokens=prompt,
        output_tokens=output,
        tokens_per_s=output / evaluated if output and evaluated else None,
        truncated=was_truncated(request, prompt),
    )


def was_truncated(request: GenerationRequest, prompt_tokens: int | None) -> bool:
    """Return whether the server truncated the prompt: it filled the context, or has fewer tokens than words."""
    if prompt_tokens is None:
        return False
    words = len(request.system.split()) + len(request.user.split())
    return prompt_tokens >= request.options["num_ctx"] or prompt_tokens < words


def _moved(model: str) -> str:
    return (
        f"{model} is not what it was when the run was planned: its tag was moved on the server. What was finished is "
        "kept; run the same command again to collect the model as it is now."
    )


def _refusal_kind(chat: Chat) -> FailureKind:
    if chat.status == 404:
        return FailureKind.MISSING_MODEL
    if chat.status in (401, 403):
        return FailureKind.NOT_LOCAL  # a local model needs no authentication
    text = chat.error.casefold()
    too_long = chat.status == 400 and any(word in text for word in ("context", "too long", "truncate", "exceed"))
    return FailureKind.PROMPT_TOO_LONG if too_long else FailureKind.REJECTED


def _remote_failure(chat: Chat) -> EngineFailure | None:
    if chat.last.get("remote_model") or chat.last.get("remote_host"):
        return _failure(FailureKind.NOT_LOCAL, chat, f"computed on another server: {chat.last.get('remote_host')}")
    return None


def _failure(kind: FailureKind, chat: Chat, reason: str) -> EngineFailure:
    return EngineFailure(kind, reason, chat.text, chat.wall_s)


def _seconds(last: Mapping[str, Any], key: str) -> float | None:
    value = _number(last.get(key))
    return value / 1e9 if value is not None else None


def _count(last: Mapping[str, Any], key: str) -> int | None:
    value = _number(last.get(key))
    return int(value) if value is not None else None


def _number(value: object) -> float | None:
    """Return a number of a response; None if it is missing, negative or too large, such as 1e999 or 400 digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 <= value < 2**63 else None


def find_entry(catalogue: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """Return the server's list entry of a model, empty if missing; a name without a tag means :latest."""
    wanted = full_name(model)
    for entry in catalogue:
        if full_name(str(entry.get("name") or entry.get("model"))) == wanted:
            return entry
    return {}


def full_name(model: str) -> str:
    """Normalise a model name for comparison: with its tag, in lower case."""
    return (model if ":" in model.rpartition("/")[2] else f"{model}:latest").casefold()


def read_facts(
    model: str, shown: Mapping[str, Any], entry: Mapping[str, Any], *, version: str, host: str
) -> ModelFacts:
    """Parse `/api/show` and `/api/tags`; the size is the actual parameter count, never derived from the name."""
    details = shown.get("details") or {}
    info = shown.get("model_info") or {}
    projector = shown.get("projector_info") or {}
    capabilities = shown.get("capabilities")
    count = _positive(info.get("general.parameter_count"))
    extra = _positive(projector.get("general.parameter_count")) or 0
    remote = any(source.get(key) for source in (shown, entry) for key in ("remote_model", "remote_host"))
    digest = str(entry.get("digest") or "")
    if not digest and not remote:
        raise ModelRefused(f"{model} is not in the Ollama server's list of models, so it cannot be pinned by digest.")
    return ModelFacts(
        model=model,
        engine="ollama",
        engine_version=version,
        host=host,
        digest=digest,
        params_b=(count + extra) / 1e9 if count else None,
        quantization=details.get("quantization_level") or None,
        file_bytes=_positive(entry.get("size")),
        kv_bytes_per_token=_kv_bytes_per_token(info),
        thinking="thinking" in (capabilities or ()),
        remote=remote,
        completes=capabilities is None or "completion" in capabilities,
    )


def compute_host(url: str) -> str:
    """Return the machine that runs the model: this one for a loopback address."""
    return platform.node() if is_loopback(url) else (urlsplit(url).hostname or url)


def _kv_bytes_per_token(info: Mapping[str, Any]) -> int | None:
    """Return the bytes of one token's keys and values in 16-bit floats, summed over the layers."""
    architecture = info.get("general.architecture")

    def number(name: str) -> int | None:
        return _positive(info.get(f"{architecture}.{name}"))

    layers, heads = number("block_count"), number("attention.head_count")
    kv_heads = number("attention.head_count_kv") or heads
    width = number("attention.key_length")
    embedding = number("embedding_length")
    if width is None and embedding and heads:
        width = embedding // heads
    return 2 * 2 * layers * kv_heads * width if layers and kv_heads and width else None


def _positive(value: object) -> int | None:
    return int(_number(value) or 0) or None
