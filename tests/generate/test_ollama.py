"""OllamaEngine against a scripted server: every way a call can end, classified and retried where appropriate."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from support.polling import eventually
from support.requests import ask, expect_completion, expect_failure
from support.scripted_ollama import Fault, ModelSpec, ScriptedOllama
from tipbench.errors import ModelRefused, OllamaError, OllamaUnavailable, ResidencyError
from tipbench.generate import ollama, ollama_api
from tipbench.generate.engine import OPTIONS, FailureKind, refusal_reason
from tipbench.generate.ollama import OllamaEngine, find_entry, read_facts
from tipbench.generate.ollama_api import Chat, Ending, read_completion
from tipbench.plan.collect_config import CollectConfig


@pytest.fixture
def server() -> Iterator[ScriptedOllama]:
    with ScriptedOllama(["alpha:135m", "beta:135m"]) as running:
        yield running


@pytest.fixture
def engine(server: ScriptedOllama, monkeypatch: pytest.MonkeyPatch) -> Iterator[OllamaEngine]:
    monkeypatch.setattr(ollama_api, "_RETRY_WAIT_S", 0.01)
    built = OllamaEngine(server.url, wait_s=5)
    yield built
    built.close()


def count_chats(server: ScriptedOllama) -> int:
    return sum(request.path == "/api/chat" for request in server.log.requests)


def test_a_complete_answer_has_its_measurements(engine: OllamaEngine, server: ScriptedOllama) -> None:
    server.set(call_s=0.1)
    start = time.monotonic()
    result = expect_completion(engine.complete(ask()))
    assert result.text.startswith("[")
    assert result.done_reason == "stop"
    assert result.load_s is not None
    assert result.latency_s is not None
    assert 0.05 < result.latency_s < time.monotonic() - start + 0.05
    assert result.tokens_per_s
    assert result.prompt_tokens
    assert not result.truncated


def test_every_option_is_sent_and_the_model_is_kept_warm_for_a_short_time(
    engine: OllamaEngine, server: ScriptedOllama
) -> None:
    engine.complete(ask())
    engine.complete(ask(last=True))
    first, last = (request for request in server.log.requests if request.path == "/api/chat")
    assert set(first.options) == set(OPTIONS)
    assert (first.keep_alive, last.keep_alive) == (ollama.KEEP_WARM_S, 0)


def test_an_option_that_ollama_would_ignore_is_a_bug(engine: OllamaEngine) -> None:
    wrong = dataclasses.replace(ask(), options={"temperatur": 1.0})
    with pytest.raises(ValueError, match="temperatur"):
        engine.complete(wrong)


@pytest.mark.parametrize(
    ("fault", "kind", "calls"),
    [
        (Fault("missing"), FailureKind.MISSING_MODEL, 1),
        (Fault("busy"), FailureKind.BUSY, 6),
        (Fault("load_error"), FailureKind.LOAD_FAILED, 2),
        (Fault("prompt_too_long"), FailureKind.PROMPT_TOO_LONG, 1),
        (Fault("status", 400), FailureKind.REJECTED, 1),
        (Fault("status", 401), FailureKind.NOT_LOCAL, 1),
        (Fault("error_line", 3), FailureKind.INCOMPLETE, 1),
        (Fault("garbage", 3), FailureKind.INCOMPLETE, 1),
        (Fault("reset"), FailureKind.RESET, 3),
        (Fault("reset_after", 3), FailureKind.RESET, 1),
        (Fault("no_done", 0), FailureKind.INCOMPLETE, 2),
    ],
)
def test_failures_are_classified_and_retried_only_where_it_helps(
    engine: OllamaEngine, server: ScriptedOllama, fault: Fault, kind: FailureKind, calls: int
) -> None:
    server.add_faults(fault)
    failure = expect_failure(engine.complete(ask()))
    assert failure.kind is kind
    assert failure.reason
    assert count_chats(server) == calls


@pytest.mark.parametrize("fault", [Fault("busy", times=2), Fault("load_error", times=1), Fault("reset", times=2)])
def test_a_transient_error_is_retried_successfully(engine: OllamaEngine, server: ScriptedOllama, fault: Fault) -> None:
    server.add_faults(fault)
    assert expect_completion(engine.complete(ask())).done_reason == "stop"


def test_text_before_an_error_is_kept(engine: OllamaEngine, server: ScriptedOllama) -> None:
    server.add_faults(Fault("error_line", 3))
    assert expect_failure(engine.complete(ask())).partial


@pytest.mark.parametrize("fault", ["no_done", "done_false"])
def test_an_end_without_done_is_retried_once_then_accepted(
    engine: OllamaEngine, server: ScriptedOllama, fault: str
) -> None:
    server.add_faults(Fault(fault, 5))
    result = expect_completion(engine.complete(ask()))
    assert result.done_reason == "aborted"
    assert result.text
    assert count_chats(server) == 2


def test_an_end_without_done_followed_by_a_complete_answer_is_discarded(
    engine: OllamaEngine, server: ScriptedOllama
) -> None:
    server.add_faults(Fault("no_done", 5, times=1))
    assert expect_completion(engine.complete(ask())).done_reason == "stop"


@pytest.mark.parametrize("fault", ["hang", "hang_after", "endless"])
def test_a_call_that_does_not_end_in_time_is_a_timeout(
    engine: OllamaEngine, server: ScriptedOllama, fault: str
) -> None:
    server.add_faults(Fault(fault, 3))
    start = time.monotonic()
    assert expect_failure(engine.complete(ask(timeout_s=0.7))).kind is FailureKind.TIMEOUT
    assert time.monotonic() - start < 60
    assert count_chats(server) == 1


def test_an_unavailable_server_is_not_a_failure_of_the_cell(engine: OllamaEngine, server: ScriptedOllama) -> None:
    server.pause_listening()
    assert expect_failure(engine.complete(ask())).kind is FailureKind.SERVER_GONE
    assert not engine.alive()
    server.resume()
    assert engine.alive()
    expect_completion(engine.complete(ask()))


def test_a_server_killed_in_mid_answer_is_not_a_failure_of_the_cell(
    engine: OllamaEngine, server: ScriptedOllama
) -> None:
    server.add_faults(Fault("hang_after", 3))

    def stop_server() -> None:
        assert eventually(lambda: bool(server.log.calls()))
        server.pause_listening()

    killing = threading.Thread(target=stop_server)
    killing.start()
    assert expect_failure(engine.complete(ask())).kind is FailureKind.SERVER_GONE
    killing.join()


@pytest.mark.parametrize("fault", [None, Fault("hang")])
def test_abort_ends_a_call_at_once_even_before_its_first_byte(
    engine: OllamaEngine, server: ScriptedOllama, fault: Fault | None
) -> None:
    server.set(call_s=20.0)
    if fault is not None:
        server.add_faults(fault)
    request = ask()

    def cancel() -> None:
        assert eventually(lambda: bool(server.log.calls()))
        request.cancel.set()
        engine.abort()

    stopping = threading.Thread(target=cancel)
    stopping.start()
    start = time.monotonic()
    assert expect_failure(engine.complete(request)).kind is FailureKind.CANCELLED
    assert time.monotonic() - start < 15
    stopping.join()


@pytest.mark.parametrize("fault", ["truncated", "truncated_half"])
def test_a_silently_truncated_prompt_is_detected(engine: OllamaEngine, server: ScriptedOllama, fault: str) -> None:
    server.add_faults(Fault(fault))
    assert expect_completion(engine.complete(ask(num_ctx=256, num_predict=64))).truncated


def test_missing_counters_are_unknown_and_not_zero(engine: OllamaEngine, server: ScriptedOllama) -> None:
    server.add_faults(Fault("no_counters"))
    result = expect_completion(engine.complete(ask()))
    assert (result.prompt_tokens, result.output_tokens, result.tokens_per_s, result.load_s) == (None,) * 4
    assert result.latency_s is not None
    assert not result.truncated


def test_thinking_is_not_part_of_the_answer(engine: OllamaEngine, server: ScriptedOllama) -> None:
    server.add_faults(Fault("thinking"))
    assert expect_completion(engine.complete(ask())).text.startswith("[")


def test_a_huge_answer_with_nuls_arrives_whole(engine: OllamaEngine, server: ScriptedOllama) -> None:
    server.add_faults(Fault("huge", 200_000), Fault("torn"))
    text = expect_completion(engine.complete(ask())).text
    assert len(text.encode()) >= 200_000
    assert "\x00" in text


def test_a_call_cut_short_has_reason_length(engine: OllamaEngine, server: ScriptedOllama) -> None:
    server.add_faults(Fault("length"))
    assert expect_completion(engine.complete(ask())).done_reason == "length"


def test_one_connection_serves_many_calls(engine: OllamaEngine, server: ScriptedOllama) -> None:
    for _ in range(5):
        expect_completion(engine.complete(ask()))
    taken = engine._api._take_connection()
    (connection,) = taken.client._transport._pool.connections  # type: ignore[attr-defined]
    assert "Request Count: 5" in repr(connection)


def test_the_size_is_the_true_parameter_count_and_not_from_the_name(
    server: ScriptedOllama, engine: OllamaEngine
) -> None:
    server.add_model(ModelSpec("x:e2b", params=4_460_000_000))
    server.add_model(ModelSpec("small:9b", params=500_000_000, projector_params=100_000_000))
    large, small = engine.facts("x:e2b"), engine.facts("small:9b")
    assert large.params_b == pytest.approx(4.46)
    assert small.params_b == pytest.approx(0.6)
    config = CollectConfig(max_model_b=4.0)
    assert "4.46B parameters; the limit is 4B" in (refusal_reason(large, config) or "")
    assert refusal_reason(small, config) is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ModelSpec("m:1b", params=None), "unknown parameter count"),
        (ModelSpec("m:1b", remote_model="gpt", remote_host="https://cloud"), "cloud model"),
        (ModelSpec("m:1b", capabilities=("embedding",)), "cannot complete"),
    ],
)
def test_an_unsupported_model_is_refused_with_its_reason(
    server: ScriptedOllama, engine: OllamaEngine, spec: ModelSpec, reason: str
) -> None:
    server.add_model(spec)
    assert reason in (refusal_reason(engine.facts("m:1b"), CollectConfig()) or "")


def test_a_thinking_model_is_set_not_to_think(server: ScriptedOllama, engine: OllamaEngine) -> None:
    server.add_model(ModelSpec("deep:1b", capabilities=("completion", "thinking")))
    assert engine.facts("deep:1b").can_think
    assert engine._body(dataclasses.replace(ask(), disable_thinking=True))["think"] is False
    assert "think" not in engine._body(ask())


def test_a_missing_model_is_refused_with_the_pull_command(engine: OllamaEngine) -> None:
    with pytest.raises(ModelRefused, match=r"Get it with `ollama pull nosuch:1b`\.$"):
        engine.facts("nosuch:1b")


def test_a_name_without_a_tag_means_latest() -> None:
    listed = [{"name": "m:latest", "digest": "1"}, {"name": "hub/m:latest", "digest": "2"}]
    assert find_entry(listed, "m")["digest"] == "1"
    assert find_entry(listed, "hub/M")["digest"] == "2"
    assert find_entry(listed, "m:1b") == {}


def test_no_server_and_another_server_are_different_errors(mlflow_url: str) -> None:
    with (
        closing(OllamaEngine("http://127.0.0.1:9")) as unreachable,
        pytest.raises(OllamaUnavailable, match="ollama serve"),
    ):
        unreachable.facts("m")
    with closing(OllamaEngine(mlflow_url)) as other, pytest.raises(OllamaError, match="not an Ollama response"):
        other.facts("m")


def test_the_next_model_waits_until_the_last_one_is_gone(server: ScriptedOllama, engine: OllamaEngine) -> None:
    server.set(unload_s=0.3)
    engine.start()
    for model in ("alpha:135m", "beta:135m"):
        engine.prepare(engine.facts(model))
        expect_completion(engine.complete(ask(model, last=True)))
        engine.release(model)
    evidence = engine.evidence()
    assert (evidence.most_resident, evidence.handovers) == (1, 2)
    assert min(evidence.handover_s) > 0.1
    assert server.log.max_resident == 1
    assert dict(server.log.loads) == {"alpha:135m": 1, "beta:135m": 1}


def test_a_model_that_does_not_unload_ends_the_run_instead_of_loading_a_second(
    server: ScriptedOllama, engine: OllamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama, "UNLOAD_TIMEOUT_S", 0.5)
    engine.prepare(engine.facts("alpha:135m"))
    expect_completion(engine.complete(ask()))
    server.add_faults(Fault("stuck"))
    with pytest.raises(ResidencyError, match="unloading hangs"):
        engine.release("alpha:135m")
    server.clear_faults()
    assert server.log.max_resident == 1


def test_unload_call_loads_for_every_call(server: ScriptedOllama) -> None:
    engine = OllamaEngine(server.url, unload="call", wait_s=5)
    server.set(unload_s=0.05)
    engine.prepare(engine.facts("alpha:135m"))
    for _ in range(3):
        expect_completion(engine.complete(ask()))
    engine.release("alpha:135m")
    assert not server.resident
    engine.close()
    assert dict(server.log.loads) == {"alpha:135m": 3}


def test_a_foreign_model_in_mid_run_is_reported_and_its_time_is_marked(server: ScriptedOllama) -> None:
    messages: list[str] = []
    engine = OllamaEngine(server.url, wait_s=5, evict=True, report=messages.append)
    engine.start()
    engine.prepare(engine.facts("alpha:135m"))
    expect_completion(engine.complete(ask()))
    start = time.monotonic()
    server.load_foreign("beta:135m")
    assert eventually(lambda: bool(messages))
    assert engine.foreign_between(start, time.monotonic())
    engine.release("alpha:135m")
    assert server.resident == ("beta:135m",), "our model is gone; a foreign one is not waited for yet"
    engine.prepare(engine.facts("alpha:135m"))
    assert not server.resident, "it is evicted before the next model"
    evidence = engine.evidence()
    engine.close()
    assert (evidence.most_resident, evidence.handovers) == (2, 1)
    assert evidence.foreign == ("beta:135m",)
    assert len(messages) == 1
    assert "beta:135m" in messages[0]


def test_a_tag_moved_before_its_block_is_not_generated_under_its_old_digest(
    server: ScriptedOllama, engine: OllamaEngine
) -> None:
    facts = engine.facts("alpha:135m")
    server.add_model(ModelSpec("alpha:135m", blob="retrained"))
    with pytest.raises(OllamaError, match="its tag was moved"):
        engine.prepare(facts)


@pytest.mark.parametrize("invalid", [float("inf"), float("nan"), 10**400, -1, True, "12", None])
def test_invalid_counters_are_unknown(invalid: object) -> None:
    counters = ("total_duration", "load_duration", "eval_duration", "eval_count", "prompt_eval_count")
    chat = Chat(ending=Ending.DONE, text="[]", done_object=dict.fromkeys(counters, invalid), wall_s=2.0)
    done = read_completion(chat, ask())
    assert (done.latency_s, done.load_s, done.prompt_tokens, done.output_tokens, done.tokens_per_s) == (
        2.0,
        None,
        None,
        None,
        None,
    )


@pytest.mark.parametrize("invalid", [None, 1, "x", [1], [[]]])
def test_a_description_of_unknown_shape_has_no_details(invalid: object) -> None:
    names = ("details", "model_info", "projector_info")
    shown = {**dict.fromkeys(names, invalid), "capabilities": 7}
    facts = read_facts("m:1b", shown, {"digest": "d", "size": "big"}, version="0", host="here")
    assert (facts.params_b, facts.quantization, facts.file_bytes, facts.kv_bytes_per_token) == (None,) * 4
    assert facts.completes
