"""LlamaCppEngine: runs llama.cpp inside this process, with the package xllamacpp."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import platform
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tipbench.errors import ModelRefused
from tipbench.generate.engine import (
    Completion,
    EngineFailure,
    FailureKind,
    GenerationRequest,
    InProcessEngine,
    ModelFacts,
    check_options,
)
from tipbench.generate.weights import EMBEDDED_MODELS, EmbeddedModel, is_fetched, weights_path

_SAMPLERS = ("penalties", "top_k", "top_p", "min_p", "temperature")  # in llama.cpp's default order
_BATCH = 128  # prompt tokens between two checks of the timeout and of `cancel`
_RANDOM_SEED = 0xFFFFFFFF  # makes llama.cpp choose a seed
_QUEUE_POLL_S = 0.2


class LlamaCppEngine(InProcessEngine):
    """Runs one request at a time; all engines of a process share one set of weights.

    `num_ctx` is the largest context of a request. The model is reloaded when the context or the threads change.
    """

    name = "embedded"

    def __init__(self, home: Path, *, num_ctx: int, threads: int | None = None) -> None:
        self._home = home
        self._num_ctx = num_ctx
        # By default, one core stays free, because llama.cpp's threads busy-wait.
        self._threads = threads or max(1, _usable_cores() - 1)

    def facts(self, model: str) -> ModelFacts:
        """Return the facts without loading the model."""
        embedded = self._embedded_model(model)
        return ModelFacts(
            model=model,
            engine=self.name,
            engine_version=_library_version(model),
            host=platform.node(),
            digest=embedded.sha256,
            params_b=embedded.params_b,
            quantization=embedded.quantization,
            file_bytes=embedded.size,
            kv_bytes_per_token=embedded.kv_bytes_per_token,
        )

    def list_models(self) -> list[str]:
        return list(EMBEDDED_MODELS)

    def complete(self, request: GenerationRequest) -> Completion | EngineFailure:
        """Generate one answer. The timeout does not include the time in the queue and the time to load the model."""
        payload = _payload(request, self._num_ctx)
        if not _SHARED_MODEL.acquire(request.cancel):
            return EngineFailure(FailureKind.CANCELLED, "cancelled while waiting")
        try:
            return self._generate_answer(request, payload)
        finally:
            if request.last:
                _SHARED_MODEL.unload()
            _SHARED_MODEL.lock.release()

    def release(self, model: str = "") -> None:  # noqa: ARG002  at most one model is loaded
        """Unload the weights, also if another engine of this process loaded them. Waits for a running call."""
        with _SHARED_MODEL.lock:
            _SHARED_MODEL.unload()

    def close(self) -> None:
        self.release()

    def _embedded_model(self, model: str) -> EmbeddedModel:
        """Raises ModelRefused if the model is unknown or its weights are missing."""
        embedded = EMBEDDED_MODELS.get(model)
        if embedded is None:
            raise ModelRefused(f"{model} is not an embedded model. Choose one of: {', '.join(EMBEDDED_MODELS)}.")
        if not is_fetched(self._home, embedded):
            path = weights_path(self._home, embedded)
            raise ModelRefused(
                f"{model} needs its weights, and {path} is missing or not the right file. Run `tipbench models fetch`."
            )
        return embedded

    def _generate_answer(self, request: GenerationRequest, payload: dict[str, Any]) -> Completion | EngineFailure:
        try:
            embedded = self._embedded_model(request.model)
            num_ctx = min(int(request.options["num_ctx"]), embedded.context_length)
            load_s = _SHARED_MODEL.load(weights_path(self._home, embedded), num_ctx, self._threads, request.model)
        except ModelRefused as exc:
            return EngineFailure(FailureKind.MISSING_MODEL, str(exc))
        except RuntimeError as exc:
            return EngineFailure(FailureKind.LOAD_FAILED, f"llama.cpp: {exc}")
        stream = _Stream(request)
        try:
            _run_in_thread(_SHARED_MODEL.server, payload, stream)
        except RuntimeError as exc:
            return stream.failure(FailureKind.REJECTED, f"llama.cpp: {exc}")
        return stream.outcome(load_s)


class _SharedModel:
    """The only llama.cpp server of this process, with the only weights in memory. Callers must hold `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.server: Any = None
        self._loaded: tuple[Path, int, int] | None = None  # path, num_ctx, threads

    def acquire(self, cancel: threading.Event) -> bool:
        """Wait for the lock. Returns False if the request is cancelled first."""
        while not cancel.is_set():
            if self.lock.acquire(timeout=_QUEUE_POLL_S):
                return True
        return False

    def load(self, path: Path, num_ctx: int, threads: int, model: str) -> float:
        """Load the weights, unless they are loaded, and return the seconds that it took. Unloads other weights first.

        Blocks all threads, because the library holds the GIL.
        """
        wanted = (path, num_ctx, threads)
        if self._loaded == wanted:
            return 0.0
        self.unload()
        _library_version(model)  # only for its error if the library is not installed
        library = importlib.import_module("xllamacpp")
        started = time.monotonic()
        self.server = library.Server(_parameters(library, path, num_ctx, threads))
        self._loaded = wanted
        return time.monotonic() - started

    def unload(self) -> None:
        if self.server is not None:
            self._loaded = None
            self.server = None
            gc.collect()


_SHARED_MODEL = _SharedModel()


class _Stream:
    """Callback that collects the chunks of an answer. Returns True to stop the generation."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._started = time.monotonic()
        self._first_token_at: float | None = None
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._timings: Mapping[str, Any] = {}
        self._error: Mapping[str, Any] | None = None
        self._stop_kind: FailureKind | None = None  # set if the generation is stopped early
        self._exception: Exception | None = None
        self.abandoned = False  # the caller was interrupted

    def __call__(self, chunk: dict[str, Any]) -> bool:
        try:
            self._error = chunk.get("error", self._error)
            self._timings = chunk.get("timings", self._timings)
            for choice in chunk.get("choices", ()):
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                if text := choice["delta"].get("content"):
                    self._first_token_at = self._first_token_at or time.monotonic()
                    self._texts.append(text)
        except Exception as exc:  # noqa: BLE001  xllamacpp would swallow it, so `outcome` raises it
            self._exception = exc
        if self._finish_reason is None:  # otherwise the answer is complete and is kept
            if self._request.cancel.is_set():
                self._stop_kind = FailureKind.CANCELLED
            elif time.monotonic() - self._started > self._request.timeout_s:
                self._stop_kind = FailureKind.TIMEOUT
        return self._exception is not None or self.abandoned or self._stop_kind is not None

    def outcome(self, load_s: float) -> Completion | EngineFailure:
        now = time.monotonic()
        if self._exception is not None:
            raise self._exception
        if self._stop_kind is FailureKind.TIMEOUT:
            return self.failure(self._stop_kind, f"no complete answer within {self._request.timeout_s:g} s")
        if self._stop_kind is not None:
            return self.failure(self._stop_kind, "cancelled")
        if self._error is not None:
            code = self._error.get("code")
            kind = FailureKind.INCOMPLETE
            if self._error.get("type") == "exceed_context_size_error":
                kind = FailureKind.PROMPT_TOO_LONG
            elif isinstance(code, int) and 400 <= code < 500:
                kind = FailureKind.REJECTED
            return self.failure(kind, f"llama.cpp: {self._error.get('message', self._error)}")
        if self._finish_reason is None:
            return self.failure(FailureKind.INCOMPLETE, "llama.cpp ended without a reason")
        timings = self._timings
        prompt_tokens = None
        if "prompt_n" in timings:
            prompt_tokens = timings["prompt_n"] + timings.get("cache_n", 0)
        output_tokens = timings.get("predicted_n")
        # llama.cpp measures the rate from the first token on, so one token has no rate.
        has_rate = output_tokens is not None and output_tokens > 1
        return Completion(
            text="".join(self._texts),
            done_reason="length" if self._finish_reason == "length" else "stop",
            latency_s=now - self._started,
            load_s=load_s,
            ttft_s=None if self._first_token_at is None else self._first_token_at - self._started,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            tokens_per_s=timings.get("predicted_per_second") if has_rate else None,
        )

    def failure(self, kind: FailureKind, reason: str) -> EngineFailure:
        return EngineFailure(kind, reason, partial="".join(self._texts))


def _run_in_thread(server: Any, payload: dict[str, Any], stream: _Stream) -> None:
    """Generate in a separate thread, because xllamacpp would swallow a Ctrl-C in the caller's thread.

    Waits for an event before Thread.join(): an interrupted join() would mark the thread as finished. The process could
    then exit while llama.cpp still calls back, and crash.
    """
    errors: list[RuntimeError] = []
    done = threading.Event()

    def work() -> None:
        try:
            server.handle_chat_completions(payload, stream)
        except RuntimeError as exc:
            errors.append(exc)
        finally:
            done.set()

    worker = threading.Thread(target=work, name="tipbench-embedded")
    worker.start()
    try:
        done.wait()
    except BaseException:
        stream.abandoned = True
        done.wait()
        raise
    finally:
        worker.join()  # the thread references the weights until it ends
    if errors:
        raise errors[0]


def _payload(request: GenerationRequest, max_ctx: int) -> dict[str, Any]:
    check_options(request.options)
    options = request.options
    if options["num_ctx"] > max_ctx:
        raise ValueError(f"num_ctx may be at most the engine's {max_ctx}; it is {options['num_ctx']}")
    return {
        "messages": [{"role": "system", "content": request.system}, {"role": "user", "content": request.user}],
        "max_tokens": options["num_predict"],
        "temperature": options["temperature"],
        "top_k": options["top_k"],
        "top_p": options["top_p"],
        "min_p": options["min_p"],
        "repeat_penalty": options["repeat_penalty"],
        "repeat_last_n": 64,  # the default of llama.cpp and Ollama
        "samplers": _SAMPLERS,
        "seed": int(options["seed"]) % _RANDOM_SEED,  # so never _RANDOM_SEED itself
        "cache_prompt": False,  # a cached prefix is computed in different batches, which may change the answer
        "stream": True,
        "return_progress": True,  # calls back during prompt processing too, so that the request can be cancelled
    }


def _parameters(library: Any, path: Path, num_ctx: int, threads: int) -> Any:
    parameters = library.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = num_ctx
    parameters.n_parallel = 1
    parameters.n_batch = parameters.n_ubatch = _BATCH
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.n_gpu_layers = 0
    parameters.fit_params = False  # True would shrink the context when memory is short
    # With flash attention, the answer depends on the number of threads. Without it, generation is not slower.
    parameters.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.reasoning_format = library.common_reasoning_format.COMMON_REASONING_FORMAT_NONE
    parameters.force_pure_content_parser = True
    parameters.cache_prompt = False
    parameters.cache_ram_mib = 0
    parameters.n_ctx_checkpoints = 0
    parameters.warmup = False
    parameters.verbosity = -1
    # xllamacpp always opens a port on the loopback interface. A random key prevents access by others.
    parameters.api_keys = [secrets.token_urlsafe(32)]
    parameters.n_threads_http = 1
    return parameters


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _library_version(model: str) -> str:
    """Return the version of xllamacpp; raises ModelRefused if it is not installed."""
    try:
        return importlib.metadata.version("xllamacpp")
    except importlib.metadata.PackageNotFoundError as exc:
        raise ModelRefused(
            f"{model} needs the package xllamacpp, which is not installed. "
            "Run `pip install 'tipbench[embedded]'`, or choose other models."
        ) from exc
