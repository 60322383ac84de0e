"""One contract for the scripted Ollama and the real one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from support.ollama_client import (
    MESSAGES,
    A,
    B,
    chat,
    get,
    leave_early,
    number,
    plain_client,
    post,
    resident,
    until_empty,
)
from support.polling import eventually
from support.real_ollama import RealOllama, renamed_copy
from support.scripted_ollama import MemorySettings, ModelSpec, ScriptedOllama


@dataclass(frozen=True)
class OllamaServer:
    """A server under contract. Its model `twin` has alpha's blob."""

    url: str
    twin: str = "twin:135m"


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[OllamaServer]:
    models = [ModelSpec(A, blob="one"), ModelSpec(B, blob="two"), ModelSpec("twin:135m", blob="one")]
    with ScriptedOllama(models, memory=MemorySettings(load_s=0.2)) as server:
        yield OllamaServer(server.url)


@pytest.fixture(scope="module")
def real_server(ollama: RealOllama, gguf: Path) -> OllamaServer:
    ollama.create("twin:135m", renamed_copy(gguf, "alpha"))
    return OllamaServer(ollama.url)


@pytest.fixture(params=["scripted", pytest.param("real", marks=pytest.mark.real)])
def server(request: pytest.FixtureRequest) -> OllamaServer:
    server: OllamaServer = request.getfixturevalue(f"{request.param}_server")
    for name in resident(server.url):
        post(server.url, "/api/generate", model=name, keep_alive=0)
    assert until_empty(server.url)
    return server


SHORT = {"num_predict": 2, "num_ctx": 512, "num_thread": 1}  # its threads busy-wait, so two are slow on a busy machine


class TestContract:
    def test_tags_and_show_have_digest_size_and_true_parameter_count(self, server: OllamaServer) -> None:
        tags = get(server.url, "/api/tags")["models"]
        assert isinstance(tags, list)
        by_name = {model["name"]: model for model in tags}
        assert {A, B, server.twin} <= set(by_name)
        assert all(len(model["digest"]) == 64 and model["size"] > 90_000_000 for model in tags)
        shown = post(server.url, "/api/show", model=A).json()
        assert shown["model_info"]["general.parameter_count"] == 134_515_008
        assert shown["model_info"]["llama.block_count"] == 30
        assert shown["capabilities"] == ["completion"]
        assert shown["details"]["parameter_size"] == "134.52M"

    def test_keep_alive_of_zero_unloads_after_the_answer(self, server: OllamaServer) -> None:
        for keep_alive in (0, "0s"):
            assert chat(server.url, keep_alive=keep_alive, options=SHORT).last["done"] is True
            assert until_empty(server.url)

    def test_keep_alive_sets_when_the_model_expires(self, server: OllamaServer) -> None:
        for keep_alive, stay_s in ((None, 300), (60, 60), ("10m", 600), ("1h30m", 5400)):
            chat(server.url, options=SHORT, keep_alive=keep_alive)
            assert _wait_for_expiry_in(server.url, stay_s)

    def test_negative_keep_alive_means_never(self, server: OllamaServer) -> None:
        for keep_alive in (-1, "-1m", -2.5):
            chat(server.url, keep_alive=keep_alive, options=SHORT)
            assert eventually(lambda: _expires_in(server.url) > 100 * 365 * 86400)

    def test_invalid_keep_alive_is_refused(self, server: OllamaServer) -> None:
        wrong: list[object] = [True, "", "soon", [], "5 min", "300", "-1", "1.5"]
        for keep_alive in wrong:
            answer = post(server.url, "/api/chat", model=A, messages=MESSAGES, keep_alive=keep_alive)
            assert answer.status_code == 400
            assert keep_alive not in ("300", "-1", "1.5") or "missing unit" in answer.json()["error"]
        assert resident(server.url) == []

    def test_model_is_unloaded_when_its_keep_alive_is_over(self, server: OllamaServer) -> None:
        chat(server.url, keep_alive="2s", options=SHORT)
        assert resident(server.url) == [A]
        assert until_empty(server.url)

    def test_later_call_without_keep_alive_keeps_the_last_one(self, server: OllamaServer) -> None:
        chat(server.url, keep_alive="1h", options=SHORT)
        chat(server.url, options=SHORT)
        assert _wait_for_expiry_in(server.url, 3600)

    def test_explicit_unload_answers_at_once_and_empties_memory(self, server: OllamaServer) -> None:
        chat(server.url, options=SHORT)
        answer = post(server.url, "/api/generate", model=A, keep_alive=0)
        assert (answer.status_code, answer.json()["done_reason"]) == (200, "unload")
        assert until_empty(server.url)

    def test_unload_of_a_model_that_is_not_loaded_succeeds(self, server: OllamaServer) -> None:
        assert post(server.url, "/api/generate", model=A, keep_alive=0).json()["done_reason"] == "unload"
        assert resident(server.url) == []

    def test_empty_prompt_loads(self, server: OllamaServer) -> None:
        answer = post(server.url, "/api/generate", model=B, keep_alive=60)
        assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")
        assert resident(server.url) == [B]

    def test_load_duration_is_longer_when_the_model_is_loaded(self, server: OllamaServer) -> None:
        cold, warm = (number(chat(server.url, options=SHORT).last["load_duration"]) for _ in range(2))
        assert cold > 2 * warm > 0

    def test_ps_entry_has_the_known_fields(self, server: OllamaServer) -> None:
        chat(server.url, options=SHORT)
        entries = get(server.url, "/api/ps")["models"]
        tags = get(server.url, "/api/tags")["models"]
        assert isinstance(entries, list)
        assert isinstance(tags, list)
        fields = {"name", "model", "size", "digest", "details", "expires_at", "size_vram", "context_length"}
        assert set(entries[0]) == fields
        assert entries[0]["context_length"] == 512
        assert entries[0]["digest"] == next(model["digest"] for model in tags if model["name"] == A)

    def test_only_the_last_object_of_a_stream_has_counters(self, server: OllamaServer) -> None:
        lines = chat(server.url, options=SHORT).lines
        assert len(lines) > 1
        assert all(set(line) == {"model", "created_at", "message", "done"} for line in lines[:-1])
        durations = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
        counts = {"prompt_eval_count", "eval_count"}
        assert set(lines[-1]) == {"model", "created_at", "message", "done_reason", "done"} | durations | counts
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]

    def test_answer_without_streaming_is_one_object(self, server: OllamaServer) -> None:
        answer = post(server.url, "/api/chat", model=A, messages=MESSAGES, stream=False, options=SHORT)
        assert answer.json()["done"] is True
        assert answer.json()["message"]["content"]

    def test_missing_model_is_404_with_an_error(self, server: OllamaServer) -> None:
        for path in ("/api/chat", "/api/generate", "/api/show"):
            answer = post(server.url, path, model="nobody:1b", messages=MESSAGES)
            assert answer.status_code == 404
            assert answer.json()["error"]

    def test_invalid_bodies_and_unsupported_thinking_are_400(self, server: OllamaServer) -> None:
        with plain_client() as client:
            assert client.post(f"{server.url}/api/chat", content=b"garbage").status_code == 400
            assert client.post(f"{server.url}/api/chat", content=b"").status_code == 400
        assert post(server.url, "/api/chat", model="", messages=MESSAGES).status_code == 400
        assert post(server.url, "/api/chat", model=A, messages=MESSAGES, think=True).status_code == 400

    def test_unknown_paths_are_404_and_wrong_methods_405(self, server: OllamaServer) -> None:
        with plain_client() as client:
            assert client.get(f"{server.url}/api/nothing").status_code == 404
            assert client.post(f"{server.url}/api/ps").status_code == 405
            assert client.get(f"{server.url}/").text == "Ollama is running"

    def test_two_blobs_are_resident_together(self, server: OllamaServer) -> None:
        chat(server.url, A, options=SHORT)
        chat(server.url, B, options=SHORT)
        assert sorted(resident(server.url)) == [A, B]

    def test_two_names_of_one_blob_share_the_runner(self, server: OllamaServer) -> None:
        cold, warm = chat(server.url, A, options=SHORT), chat(server.url, server.twin, options=SHORT)
        assert len(resident(server.url)) == 1
        assert resident(server.url)[0] in (A, server.twin)
        assert number(warm.last["load_duration"]) < number(cold.last["load_duration"]) / 2
        post(server.url, "/api/generate", model=server.twin, keep_alive=0)
        assert until_empty(server.url)

    def test_another_context_length_reloads(self, server: OllamaServer) -> None:
        chat(server.url, options=SHORT)
        again = chat(server.url, options=SHORT | {"num_ctx": 1024})
        assert number(again.last["load_duration"]) > 0.15e9
        assert len(resident(server.url)) == 1

    def test_prompt_longer_than_the_context_is_cut_silently(self, server: OllamaServer) -> None:
        long = [{"role": "user", "content": "word " * 1000}]
        assert chat(server.url, messages=long, options=SHORT | {"num_ctx": 128}).last["prompt_eval_count"] == 128

    def test_client_that_leaves_during_the_load_leaves_nothing_behind(self, server: OllamaServer) -> None:
        leave_early(server.url, 0.1)
        assert until_empty(server.url)


def _wait_for_expiry_in(url: str, seconds: float) -> bool:
    """Wait for this time of expiry: the real server sets it a moment after it has sent the answer."""
    return eventually(lambda: abs(_expires_in(url) - seconds) < 10)


def _expires_in(url: str) -> float:
    models = get(url, "/api/ps")["models"]
    assert isinstance(models, list)
    text = models[0]["expires_at"]
    return datetime.fromisoformat(text[:19] + "+00:00").timestamp() - time.time()
