"""The client of Ollama: unavailable servers, refused models, and connections that are closed when idle."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from support.mlflow_server import free_port
from support.polling import eventually
from support.scripted_ollama import Fault, ScriptedOllama
from tipbench.errors import ModelRefused, OllamaError, OllamaUnavailable
from tipbench.generate.ollama_api import Chat, Ending, OllamaApi, _AnswerReader

BODY: dict[str, Any] = {"model": "alpha:135m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture
def server() -> Iterator[ScriptedOllama]:
    with ScriptedOllama(["alpha:135m"]) as running:
        yield running


@pytest.fixture
def api(server: ScriptedOllama) -> Iterator[OllamaApi]:
    with closing(OllamaApi(server.url)) as client:
        yield client


def chat(api: OllamaApi) -> Chat:
    return api.chat(BODY, timeout_s=10, cancel=threading.Event())


# Models that the server rejects


def test_an_invalid_name_is_refused_with_ollamas_message(server: ScriptedOllama, api: OllamaApi) -> None:
    for status in [400, 500]:
        server.clear_faults()
        server.add_faults(Fault("status", status, path="/api/show"))
        with pytest.raises(ModelRefused, match=rf"^a:b:c cannot be used: .*{status}, '\w") as caught:
            api.show("a:b:c")
        assert "--ollama-url" not in str(caught.value)


def test_an_error_of_ollama_does_not_blame_the_url(server: ScriptedOllama, api: OllamaApi) -> None:
    server.add_faults(Fault("status", 500, path="/api/tags"))
    with pytest.raises(OllamaError, match="/api/tags with 500: ") as caught:
        api.tags()
    assert "--ollama-url" not in str(caught.value)


def test_a_response_of_another_program_blames_the_url() -> None:
    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 500 Oh\r\ncontent-length: 5\r\nconnection: close\r\n\r\n<htm>")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        with (
            closing(OllamaApi(f"http://127.0.0.1:{listening.getsockname()[1]}")) as api,
            pytest.raises(OllamaError, match="Check --ollama-url"),
        ):
            api.show("alpha:135m")
        thread.join()


# Connections


def test_connections_of_ended_threads_are_closed(api: OllamaApi) -> None:
    threads = [threading.Thread(target=chat, args=(api,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connections = set(api._connections)
    api.close_idle_connections()
    assert (len(connections), len(api._connections)) == (4, 0)
    assert all(each.client.is_closed for each in connections)


def test_a_thread_whose_connection_was_dropped_gets_another(api: OllamaApi) -> None:
    assert chat(api).ending is Ending.DONE
    api.close_idle_connections()
    assert chat(api).ending is Ending.DONE
    assert chat(api).ending is Ending.DONE
    assert len(api._connections) == 1


def test_a_connection_in_use_is_not_dropped() -> None:
    held = [Fault("hold")]
    with ScriptedOllama(["alpha:135m"], held) as server, closing(OllamaApi(server.url)) as api:
        ended: list[Chat] = []
        thread = threading.Thread(target=lambda: ended.append(chat(api)))
        thread.start()
        assert eventually(lambda: bool(server.log.calls()))
        api.close_idle_connections()
        server.clear_faults()
        thread.join()
    assert ended[0].ending is Ending.DONE


def test_a_call_cancelled_before_it_starts_sends_no_request(server: ScriptedOllama, api: OllamaApi) -> None:
    cancel = threading.Event()
    cancel.set()
    assert api.chat(BODY, timeout_s=10, cancel=cancel).ending is Ending.CANCELLED
    assert server.log.calls() == []


# Unavailable servers


def test_a_closed_port_is_an_unavailable_server() -> None:
    with closing(OllamaApi(f"http://127.0.0.1:{free_port()}")) as api:
        assert chat(api).ending is Ending.REFUSED
        assert not api.alive()
        with pytest.raises(OllamaUnavailable):
            api.version()


def test_an_unresolvable_host_is_an_unavailable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with closing(OllamaApi("http://missing.invalid:11434")) as api:
        assert chat(api).ending is Ending.REFUSED


WITHOUT_FILES = """
import encodings.idna, os, sys, threading
from tipbench.errors import ServerUnavailable, TipbenchError
from tipbench.generate.ollama_api import OllamaApi
rest = OllamaApi(sys.argv[1])
try:
    while True:
        os.dup(0)
except OSError:
    pass
ask = {"model": "alpha:135m", "messages": []}
for call in (rest.alive, rest.version, lambda: rest.chat(ask, timeout_s=5, cancel=threading.Event())):
    try:
        call()
        print("no error")
    except TipbenchError as exc:
        print("unavailable" if isinstance(exc, ServerUnavailable) else exc)
"""


@pytest.mark.process
def test_too_many_open_files_are_not_an_unavailable_server(server: ScriptedOllama) -> None:
    for host in ["127.0.0.1", "localhost"]:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_FILES, server.url.replace("127.0.0.1", host)],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        lines = done.stdout.splitlines()
        assert len(lines) == 3
        assert all(
            "could not be reached" in line and "ulimit -n" in line and "--concurrency" in line for line in lines
        ), lines


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"done": ' + b"9" * 5000 + b"}", b'{"a": ' * 100_000])
def test_a_line_that_cannot_be_parsed_is_garbage(line: bytes) -> None:
    chat = Chat()
    reader = _AnswerReader(chat, 0.0)
    reader.feed(line + b"\n")
    assert chat.ending is Ending.GARBAGE
