"""Client for Ollama's native REST API: one request per call; only `complete` retries."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import httpx

from tipbench.errors import ModelRefused, OllamaError, OllamaUnavailable, TipbenchError
from tipbench.generate.engine import Completion, EngineFailure, FailureKind, GenerationRequest
from tipbench.generate.residency import Resident
from tipbench.http import TOO_MANY_FILES_ADVICE, http_client, is_too_many_files, is_unreachable, tls_for

_BUSY_TRIES = 6
_RETRY_WAIT_S = 0.5  # doubled for each further retry of a busy server
_RESET_TRIES = 3
_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
_PROBE_TIMEOUT = httpx.Timeout(2.0)
_NOT_COMPRESSED = {"Accept-Encoding": "identity"}  # because `iter_raw` does not decompress
_MAX_CHARS = 8_000_000  # of an answer or a line; only a broken server exceeds it
_MAX_BODY_BYTES = 64_000_000  # of a response that is not streamed
_MAX_ERROR_BYTES = 65_536  # of an error response
_MAX_MESSAGE_CHARS = 2000  # of an error message shown to users
_PROMPT_TOO_LONG = ("context", "too long", "truncate", "exceed")  # words in the server's error


class Ending(Enum):
    """How a chat call ended."""

    DONE = auto()  # the last object has `done`
    CLEAN_END = auto()  # the stream ended normally, but without `done`
    ERROR_LINE = auto()  # {"error": …} after status 200
    GARBAGE = auto()  # the stream is not NDJSON, or is too long
    STATUS = auto()  # a status other than 200
    REFUSED = auto()  # connection refused or host unreachable
    RESET = auto()  # the connection was reset, or failed for another reason
    TIMEOUT = auto()
    CANCELLED = auto()


@dataclass
class Chat:
    """Result of one chat call. Times are in seconds since the request was sent."""

    ending: Ending = Ending.CLEAN_END
    status: int = 0  # HTTP status; 0 without a response
    error: str = ""
    text: str = ""
    done_object: Mapping[str, Any] = field(default_factory=dict)  # the object with `done` and the server's counters
    first_token_s: float | None = None
    wall_s: float = 0.0  # until the end of the call


@dataclass(frozen=True)
class _Retry:
    """A failed call that is repeated after `wait_s` seconds."""

    wait_s: float


class OllamaApi:
    """Thread-safe client for one server. Each thread that calls `chat` has its own connection."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._tls = tls_for(url)
        self._client = self._new_client()  # for everything but chats
        self._local = threading.local()
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()

    def version(self) -> str:
        content = _json_object(self._send("GET", "/api/version"))
        return str(content.get("version", "unknown"))[:100]

    def tags(self) -> list[dict[str, Any]]:
        """Return an entry for each model on the server; see `entry_name`."""
        models = _json_object(self._send("GET", "/api/tags")).get("models")
        if not isinstance(models, list):
            return []
        return [model for model in models if isinstance(model, dict)]

    def show(self, model: str) -> dict[str, Any] | None:
        """Return the details of a model; None if it is missing. Raises ModelRefused if the server rejects it."""
        response = self._send("POST", "/api/show", {"model": model})
        if response.status_code == 404:
            return None
        if response.status_code != 200 and (message := _error_message(response.content)):
            raise ModelRefused(
                f"{model} cannot be used: Ollama at {self.url} answers {response.status_code}, {message!r}. "
                "Check the name; `ollama list` shows the installed models."
            )
        return _json_object(response)

    def alive(self) -> bool:
        """Return whether the server responds; raises TipbenchError if no more files can be opened."""
        try:
            return self._client.get("/api/version", timeout=_PROBE_TIMEOUT).status_code == 200
        except httpx.HTTPError as exc:
            self._raise_if_too_many_files(exc)
            return False

    def resident(self) -> tuple[Resident, ...] | None:
        """Return the models in memory; None if the server does not return them."""
        try:
            response = self._client.get("/api/ps", timeout=_PROBE_TIMEOUT)
            if response.status_code != 200:
                return None
            models = response.json()["models"]
            if models is None:  # null means that the memory is empty
                return ()
            return tuple(Resident(entry_name(model), str(model.get("digest"))) for model in models)
        except (httpx.HTTPError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return None

    def unload(self, name: str) -> None:
        """Ask the server to unload a model. Does not wait for it, and ignores a failed request."""
        try:
            self._client.post("/api/generate", json={"model": name, "keep_alive": 0}, timeout=_TIMEOUT)
        except httpx.HTTPError as exc:
            self._raise_if_too_many_files(exc)

    def complete(self, request: GenerationRequest, body: Mapping[str, Any]) -> Completion | EngineFailure:
        """Call `chat` with this body, and retry while the server is busy or the connection breaks."""
        failed_tries: Counter[str] = Counter()
        while True:
            chat = self.chat(body, timeout_s=request.timeout_s, cancel=request.cancel)
            result = self._result_or_retry(chat, request, failed_tries)
            if not isinstance(result, _Retry):
                return result
            if request.cancel.wait(result.wait_s):
                return _failure(FailureKind.CANCELLED, chat, "stopped")

    def _result_or_retry(
        self, chat: Chat, request: GenerationRequest, failed_tries: Counter[str]
    ) -> Completion | EngineFailure | _Retry:
        """Return the result of a call, or a `_Retry`. `failed_tries` counts the failed calls by reason."""

        def may_retry(reason: str, max_tries: int) -> bool:
            """Count a failed try, and return whether there may be another one."""
            failed_tries[reason] += 1
            return failed_tries[reason] < max_tries

        if chat.ending is Ending.CLEAN_END:  # retry once; the second time, the text is the answer
            if may_retry("clean end", 2):
                return _Retry(0.0)
            if not chat.text:
                return _failure(FailureKind.INCOMPLETE, chat, "the answer ended before its first token, twice")
        if chat.ending in (Ending.DONE, Ending.CLEAN_END):
            if chat.done_object.get("remote_model") or chat.done_object.get("remote_host"):
                remote = str(chat.done_object.get("remote_host"))[:200]
                return _failure(FailureKind.NOT_LOCAL, chat, f"computed on another server: {remote}")
            return read_completion(chat, request)
        if chat.ending is Ending.CANCELLED:
            return _failure(FailureKind.CANCELLED, chat, "stopped")
        if chat.ending in (Ending.REFUSED, Ending.RESET, Ending.TIMEOUT):
            if chat.ending is Ending.REFUSED or not self.alive():
                reason = f"Ollama at {self.url} is unavailable: {chat.error}"
                return _failure(FailureKind.SERVER_GONE, chat, reason)
            if chat.ending is Ending.TIMEOUT:
                return _failure(FailureKind.TIMEOUT, chat, chat.error)
            if chat.status == 0 and may_retry("reset", _RESET_TRIES):  # no response yet
                return _Retry(_RETRY_WAIT_S)
            return _failure(FailureKind.RESET, chat, f"the connection broke: {chat.error}")
        if chat.ending in (Ending.ERROR_LINE, Ending.GARBAGE):
            return _failure(FailureKind.INCOMPLETE, chat, f"the answer was cut off: {chat.error}")
        # The only ending left is STATUS.
        if chat.status in (502, 504) and not self.alive():
            return _failure(FailureKind.SERVER_GONE, chat, f"{chat.status}: {chat.error}")
        if chat.status in (429, 502, 503, 504):
            if may_retry("busy", _BUSY_TRIES):
                jitter = random.uniform(0.8, 1.2)  # noqa: S311
                return _Retry(_RETRY_WAIT_S * 2.0 ** (failed_tries["busy"] - 1) * jitter)
            return _failure(FailureKind.BUSY, chat, f"still {chat.status} after {_BUSY_TRIES} tries: {chat.error}")
        if chat.status >= 500:
            if may_retry("load", 2):
                return _Retry(_RETRY_WAIT_S)
            return _failure(FailureKind.LOAD_FAILED, chat, f"{chat.status} twice: {chat.error}")
        kind = FailureKind.REJECTED
        if chat.status == 404:
            kind = FailureKind.MISSING_MODEL
        elif chat.status in (401, 403):
            kind = FailureKind.NOT_LOCAL  # a local model needs no authentication
        elif chat.status == 400 and any(word in chat.error.casefold() for word in _PROMPT_TOO_LONG):
            kind = FailureKind.PROMPT_TOO_LONG
        return _failure(kind, chat, f"{chat.status}: {chat.error}")

    def chat(self, body: Mapping[str, Any], *, timeout_s: float, cancel: threading.Event) -> Chat:
        """Stream one answer. Server and network errors are returned, not raised.

        Raises TipbenchError if no more files can be opened.
        """
        connection = self._take_connection()
        started = time.monotonic()
        chat = Chat()
        try:
            # If `cancel` was set before this connection was busy, `abort_calls` may have skipped it.
            if not cancel.is_set():
                self._stream(connection, body, chat, started=started, timeout_s=timeout_s, cancel=cancel)
        except httpx.TimeoutException as exc:
            chat.ending, chat.error = Ending.TIMEOUT, f"no answer within {timeout_s:g} s ({type(exc).__name__})"
        except httpx.ConnectError as exc:
            self._raise_if_too_many_files(exc)
            chat.ending = Ending.REFUSED if is_unreachable(exc) else Ending.RESET
            chat.error = str(exc)
        except httpx.HTTPError as exc:
            chat.ending, chat.error = Ending.RESET, f"{type(exc).__name__}: {exc}"
        finally:
            connection.busy = False
        if cancel.is_set() and chat.ending is not Ending.DONE:
            chat.ending = Ending.CANCELLED
        chat.wall_s = time.monotonic() - started
        return chat

    def abort_calls(self) -> None:
        """Close the connections of all running calls. The server then stops generating."""
        with self._lock:
            for connection in self._connections:
                if connection.busy:
                    connection.shut_down()

    def close_idle_connections(self) -> None:
        """Close idle connections. Those of finished threads would otherwise stay open until `close`."""
        with self._lock:
            idle = {connection for connection in self._connections if not connection.busy}
            self._connections -= idle
        for connection in idle:
            connection.client.close()

    def close(self) -> None:
        self._client.close()
        with self._lock:
            for connection in self._connections:
                connection.client.close()
            self._connections.clear()

    def _new_client(self) -> httpx.Client:
        return http_client(self.url, self._tls, base_url=self.url, timeout=_TIMEOUT)

    def _take_connection(self) -> _Connection:
        """Mark this thread's connection as busy and return it. Creates it if it is missing or was closed."""
        with self._lock:
            connection: _Connection | None = getattr(self._local, "connection", None)
            if connection is None or connection not in self._connections:
                connection = self._local.connection = _Connection(self._new_client())
                self._connections.add(connection)
            connection.busy = True
        return connection

    def _raise_if_too_many_files(self, exc: httpx.HTTPError) -> None:
        if is_too_many_files(exc):
            raise TipbenchError(f"Ollama at {self.url} could not be reached: {TOO_MANY_FILES_ADVICE}.") from exc

    def _stream(
        self,
        connection: _Connection,
        body: Mapping[str, Any],
        chat: Chat,
        *,
        started: float,
        timeout_s: float,
        cancel: threading.Event,
    ) -> None:
        deadline = started + timeout_s
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        with connection.client.stream(
            "POST",
            "/api/chat",
            json=body,
            timeout=timeout,
            headers=_NOT_COMPRESSED,
            extensions={"trace": connection.trace},
        ) as response:
            chat.status = response.status_code
            if chat.status != 200:
                chat.ending = Ending.STATUS
                content = b""
                for chunk in response.iter_raw():
                    content += chunk
                    if len(content) > _MAX_ERROR_BYTES:
                        break
                excerpt = content[:200].decode(errors="replace")
                chat.error = _error_message(content) or excerpt or f"status {chat.status}"
                return
            reader = _AnswerReader(chat, started)
            for chunk in response.iter_raw():
                reader.feed(chunk)
                is_late = time.monotonic() > deadline
                # After DONE, read to the stream's end so that the connection can be reused, but not past the deadline.
                if chat.ending is Ending.DONE and not is_late:
                    continue
                if reader.ended or cancel.is_set():
                    break
                if is_late:
                    reader.set_ending(Ending.TIMEOUT, f"the answer did not end within {timeout_s:g} s")
                    break
            reader.finish()

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.HTTPError as exc:
            self._raise_if_too_many_files(exc)
            raise OllamaUnavailable(
                f"Ollama at {self.url} does not respond ({type(exc).__name__}). Start it with `ollama serve`, "
                "or set its address with --ollama-url or OLLAMA_HOST."
            ) from exc


class _Connection:
    """A client with one connection. Another thread can shut down its socket to end a blocked read."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.busy = False
        self._network_stream: Any = None

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Trace callback of httpx: store the network stream of a new connection."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._network_stream = info["return_value"]

    def shut_down(self) -> None:
        if self._network_stream is None:
            return
        sock = self._network_stream.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):  # already closed
                sock.shutdown(socket.SHUT_RDWR)


class _AnswerReader:
    """Parses the NDJSON lines of a stream, and stores the answer and its ending in `chat`."""

    def __init__(self, chat: Chat, started: float) -> None:
        self._chat = chat
        self._started = started
        self._rest = b""  # the incomplete last line
        self._pieces: list[str] = []  # of the answer
        self._n_chars = 0
        self.ended = False

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not self.ended and line.strip():
                self._parse_line(line)
        if len(self._rest) > _MAX_CHARS:
            self.set_ending(Ending.GARBAGE, "a line without end")

    def finish(self) -> None:
        """Parse the last line, and store the answer."""
        if self._rest.strip() and not self.ended:
            self._parse_line(self._rest)
        self._chat.text = "".join(self._pieces)

    def set_ending(self, ending: Ending, error: str = "") -> None:
        self._chat.ending, self._chat.error = ending, error
        self.ended = True

    def _parse_line(self, line: bytes) -> None:
        try:
            part = json.loads(line)
            error = str(part.get("error") or "")[:_MAX_MESSAGE_CHARS]
        except (ValueError, RecursionError, AttributeError):
            self.set_ending(Ending.GARBAGE, f"not a JSON object: {line[:80]!r}")
            return
        if error:
            self.set_ending(Ending.ERROR_LINE, error)
            return
        message = part.get("message")
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str) and content:
            if self._chat.first_token_s is None:
                self._chat.first_token_s = time.monotonic() - self._started
            self._pieces.append(content)
            self._n_chars += len(content)
            if self._n_chars > _MAX_CHARS:
                self.set_ending(Ending.GARBAGE, f"an answer of more than {_MAX_CHARS} characters")
                return
        if part.get("done") is True:
            self._chat.done_object = part
            self.set_ending(Ending.DONE)


def read_completion(chat: Chat, request: GenerationRequest) -> Completion:
    """Build the completion of a finished call; a counter missing in the response is unknown, not zero."""
    counters = chat.done_object
    load_s, generation_s = _seconds(counters.get("load_duration")), _seconds(counters.get("eval_duration"))
    output_tokens, prompt_tokens = read_count(counters.get("eval_count")), read_count(counters.get("prompt_eval_count"))
    total_s = _seconds(counters.get("total_duration"))
    if total_s is None:
        total_s = chat.wall_s

    def without_load(seconds: float) -> float:
        return max(0.0, seconds - (load_s or 0.0))

    done_reason = "aborted"
    if chat.ending is Ending.DONE:
        done_reason = str(chat.done_object.get("done_reason") or "stop")
    n_words = len(request.system.split()) + len(request.user.split())
    # The server truncated the prompt if it counts fewer tokens than we sent words, or if the prompt fills the context.
    truncated = prompt_tokens is not None and (prompt_tokens < n_words or prompt_tokens >= request.options["num_ctx"])
    return Completion(
        text=chat.text,
        done_reason=done_reason[:100],
        latency_s=without_load(total_s),
        load_s=load_s,
        ttft_s=None if chat.first_token_s is None else without_load(chat.first_token_s),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_s=output_tokens / generation_s if output_tokens and generation_s else None,
        truncated=truncated,
    )


def _failure(kind: FailureKind, chat: Chat, reason: str) -> EngineFailure:
    return EngineFailure(kind, reason, chat.text)


def _seconds(nanoseconds: object) -> float | None:
    number = _number(nanoseconds)
    return number / 1e9 if number is not None else None


def read_count(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None else None


def _number(value: object) -> float | None:
    """Return a number of a response; None if it is missing, negative or too large, such as 1e999."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 <= value < 2**63 else None


def entry_name(entry: Mapping[str, Any]) -> str:
    """Return the model's name in an entry of `/api/tags` or `/api/ps`."""
    return str(entry.get("name") or entry.get("model"))


def _json_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a response. Raises OllamaError if it is an error or not from Ollama."""
    try:
        value = response.json() if len(response.content) <= _MAX_BODY_BYTES else None
    except (ValueError, RecursionError):
        value = None
    if response.status_code != 200 and (message := _error_message(response.content)):
        raise OllamaError(f"Ollama answered {response.request.url} with {response.status_code}: {message}")
    if response.status_code != 200 or not isinstance(value, dict):
        raise OllamaError(
            f"{response.request.url} answered {response.status_code} {response.text[:120]!r}, which is not an "
            "Ollama response. Check --ollama-url or OLLAMA_HOST."
        )
    return value


def _error_message(body: bytes) -> str:
    """Return the message of an error response; empty if the body does not have Ollama's error format."""
    try:
        message = json.loads(body)["error"] if len(body) <= _MAX_ERROR_BYTES else ""
    except (ValueError, RecursionError, KeyError, TypeError):
        return ""
    return message[:_MAX_MESSAGE_CHARS].strip() if isinstance(message, str) else ""
