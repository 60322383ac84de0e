"""Finding the real Ollama, and counting its models in memory."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from support.real_ollama import OllamaMissingError, PsWatcher, cached_binary, find_binary, is_supported, ollama_binary
from support.scripted_ollama import ScriptedOllama


def ask(url: str, model: str, **more: object) -> dict[str, object]:
    options = {"num_predict": 2, "num_ctx": 512, "num_thread": 1}
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": False, "options": options}
    request = urllib.request.Request(f"{url}/api/chat", json.dumps(body | more).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def test_watcher_counts_two_models_of_the_scripted_server() -> None:
    with ScriptedOllama(["a:1b", "b:1b"]) as server, PsWatcher(server.url) as watcher:
        for model in ("a:1b", "b:1b"):
            ask(server.url, model)
        server.pause_listening()
        server.resume()
        ask(server.url, "a:1b")
    assert watcher.max_resident == server.log.max_resident == 2


def test_named_binary_that_is_not_ollama_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "ollama"
    fake.write_text("#!/bin/sh\necho ollama version is 0.32.1\n")
    fake.chmod(0o755)
    assert not is_supported(fake)
    monkeypatch.setenv("TIPBENCH_OLLAMA", str(fake))
    with pytest.raises(OllamaMissingError, match="TIPBENCH_OLLAMA"):
        find_binary()


def test_binary_on_the_path_or_in_the_cache_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIPBENCH_OLLAMA", raising=False)
    monkeypatch.setenv("TIPBENCH_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_binary() is None
    cached = cached_binary()
    cached.parent.mkdir()
    for path in (cached, tmp_path / "ollama"):
        path.write_text("#!/bin/sh\necho Warning: client version is 0.11.4\n")
        path.chmod(0o755)
        assert find_binary() == path


def test_without_a_binary_tests_are_skipped_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CI", "TIPBENCH_OLLAMA", "TIPBENCH_BUILD_OLLAMA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TIPBENCH_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(pytest.skip.Exception, match=r"python tests/support/real_ollama\.py"):
        ollama_binary()


def test_without_a_binary_and_without_go_ci_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIPBENCH_OLLAMA", raising=False)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("TIPBENCH_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="Go and a C compiler"):
        ollama_binary()
