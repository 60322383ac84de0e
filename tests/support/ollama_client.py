"""A plain Ollama client for tests of servers, without checks."""

from __future__ import annotations

import json
import socket
import ssl
import time
from dataclasses import dataclass

import httpx

from support.polling import eventually

MESSAGES = [
    {"role": "system", "content": "You are a coach."},
    {"role": "user", "content": "Write exactly 2 short tips."},
]
A, B = "alpha:135m", "beta:135m"
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # loading certificates is slow


def plain_client(timeout: float = 60.0) -> httpx.Client:
    return httpx.Client(trust_env=False, timeout=timeout, verify=_NO_CERTIFICATES)


@dataclass
class ChatResult:
    """A received response: its parsed lines, the invalid ones, and the name of the error that ended it."""

    status: int
    lines: list[dict[str, object]]
    invalid_lines: list[str]
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(str(line["message"]["content"]) for line in self.lines if "message" in line)  # type: ignore[index]

    @property
    def last(self) -> dict[str, object]:
        return self.lines[-1]


def chat(url: str, model: str = A, *, timeout: float = 60.0, **more: object) -> ChatResult:
    """Send a request to /api/chat and return the response."""
    got = ChatResult(0, [], [])
    body = {"model": model, "messages": MESSAGES} | more
    try:
        with (
            plain_client(timeout) as client,
            client.stream("POST", f"{url}/api/chat", json=body) as answer,
        ):
            got.status = answer.status_code
            buffer = b""
            for data in answer.iter_bytes():
                buffer += data
                while b"\n" in buffer:
                    line, buffer = buffer.split(b"\n", 1)
                    _keep(line, got)
            if buffer:
                _keep(buffer, got)
    except httpx.HTTPError as exc:
        got.error = type(exc).__name__
    return got


def _keep(line: bytes, got: ChatResult) -> None:
    try:
        got.lines.append(json.loads(line))
    except ValueError:
        got.invalid_lines.append(repr(line))


def post(url: str, path: str, **body: object) -> httpx.Response:
    with plain_client() as client:
        return client.post(f"{url}{path}", json=body)


def get(url: str, path: str) -> dict[str, object]:
    """The JSON object at a path. Retries a 500: a real Ollama may return one from /api/ps while it unloads a model."""
    with plain_client() as client:
        for _ in range(10):
            response = client.get(f"{url}{path}")
            if response.status_code != 500:
                break
            time.sleep(0.05)
    return dict(response.json())


def resident(url: str) -> list[str]:
    """The names in /api/ps."""
    models = get(url, "/api/ps")["models"]
    assert isinstance(models, list)
    return [model["name"] for model in models]


def until_empty(url: str, wait_s: float = 60.0) -> bool:
    """Wait until /api/ps is empty; returns False after `wait_s` seconds."""
    return eventually(lambda: not resident(url), wait_s)


def leave_early(url: str, after_s: float) -> None:
    """Send a chat request and disconnect before the response."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": A, "messages": MESSAGES}).encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        time.sleep(after_s)


def number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
