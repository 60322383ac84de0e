"""The scripted Ollama: its routes, memory and faults."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ollama_client import (
    MESSAGES,
    A,
    B,
    ChatResult,
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
from support.scripted.durations import NEVER, BadDurationError, go_duration, keep_alive_seconds
from support.scripted_ollama import (
    Fault,
    MemorySettings,
    ModelSpec,
    ScriptedOllama,
    ScriptedProcess,
    huge_text,
    messages_hash,
    requested_tips,
    tips,
)
from support.threads import in_threads


@pytest.fixture
def server() -> Iterator[ScriptedOllama]:
    with ScriptedOllama([A, B], memory=MemorySettings(load_s=0.02)) as server:
        yield server


class TestAnswers:
    def test_default_answer_is_the_requested_array_and_repeats_itself(self, server: ScriptedOllama) -> None:
        first, second = chat(server.url).text, chat(server.url).text
        assert first == second
        assert [set(tip) for tip in json.loads(first)] == [{"tip", "rationale"}] * 2

    def test_model_and_seed_change_the_answer(self, server: ScriptedOllama) -> None:
        texts = {chat(server.url, model, options={"seed": seed}).text for model in (A, B) for seed in (1, 2)}
        assert len(texts) == 4

    @pytest.mark.parametrize(
        ("prompt", "n"),
        [
            ("Write 5 tips", 5),
            ("3 tasks are open. Give exactly 7 short JSON objects", 7),
            ("Help", 3),
            ("99 tips", 50),
            ("1 tip as an example. Now write 4 tips of 40 words", 4),
        ],
    )
    def test_number_of_tips_is_read_from_the_prompt(self, prompt: str, n: int) -> None:
        messages = [{"role": "user", "content": prompt}]
        assert requested_tips(messages) == n
        made = [tip["tip"] for tip in json.loads(tips(A, messages, {}, 1))]
        assert len(set(made)) == n

    def test_custom_reply_gets_model_messages_options_and_count(self) -> None:
        def reply(model: str, messages: object, options: Mapping[str, object], nth: int) -> str:
            return f"{model} {len(messages)} {options['seed']} {nth}"  # type: ignore[arg-type]

        with ScriptedOllama([A], reply=reply) as server:
            assert [chat(server.url, options={"seed": 9}).text for _ in range(2)] == [f"{A} 2 9 1", f"{A} 2 9 2"]

    def test_reply_that_raises_is_a_500(self) -> None:
        def reply(*_: object) -> str:
            raise KeyError("x")

        with ScriptedOllama([A], reply=reply) as server:
            assert chat(server.url).status == 500

    def test_call_streams_during_its_set_time(self) -> None:
        with ScriptedOllama([A], call_s=0.2, memory=MemorySettings(load_s=0)) as server:
            began, last = time.monotonic(), chat(server.url).last
            assert 0.2 <= time.monotonic() - began < 30
            assert number(last["eval_duration"]) == pytest.approx(0.18e9, rel=0.01)


class TestMemory:
    def test_model_is_still_listed_while_it_unloads(self, server: ScriptedOllama) -> None:
        server.set(unload_s=2)
        chat(server.url, keep_alive=0)
        assert resident(server.url) == [A]
        assert until_empty(server.url)

    def test_second_model_is_resident_next_to_one_that_unloads(self, server: ScriptedOllama) -> None:
        server.set(unload_s=2)
        chat(server.url, A, keep_alive=0)
        chat(server.url, B, keep_alive=0)
        assert server.log.max_resident == 2

    def test_concurrent_first_calls_load_once(self, server: ScriptedOllama) -> None:
        in_threads(8, lambda _: chat(server.url))
        assert server.log.loads == {A: 1}
        assert eventually(lambda: len(server.log.calls(A, outcome="finished")) == 8)

    def test_unload_waits_for_running_calls(self, server: ScriptedOllama) -> None:
        server.set(call_s=2)
        thread = threading.Thread(target=chat, args=(server.url,))
        thread.start()
        assert eventually(lambda: resident(server.url) == [A])
        post(server.url, "/api/generate", model=A, keep_alive=0)
        assert resident(server.url) == [A]
        thread.join()
        assert until_empty(server.url)

    def test_keep_alive_can_be_shortened_and_extended(self, server: ScriptedOllama) -> None:
        chat(server.url, keep_alive="10m")
        chat(server.url, keep_alive="100ms")
        assert until_empty(server.url)
        chat(server.url, keep_alive="150ms")
        chat(server.url, keep_alive="10m")
        time.sleep(0.4)
        assert resident(server.url) == [A]

    def test_stuck_model_stays_until_the_fault_is_cleared(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("stuck", model=A))
        chat(server.url, keep_alive=0)
        assert not until_empty(server.url, 0.3)
        server.clear_faults()
        assert until_empty(server.url)

    def test_foreign_model_appears_and_leaves(self, server: ScriptedOllama) -> None:
        chat(server.url, A)
        server.load_foreign("foreign:7b")
        assert sorted(resident(server.url)) == [A, "foreign:7b"]
        server.unload_foreign("foreign:7b")
        assert eventually(lambda: resident(server.url) == [A])


class TestFaults:
    def test_busy_fault_occurs_the_given_number_of_times(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("busy", times=2))
        assert [chat(server.url).status for _ in range(3)] == [503, 503, 200]

    def test_load_error_occurs_only_when_the_model_is_loaded(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("load_error", times=1))
        assert [chat(server.url).status for _ in range(3)] == [500, 200, 200]
        assert server.log.loads == {A: 2}

    def test_missing_and_status_faults_set_the_status(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("missing", model=A), Fault("status", 418, model=B))
        assert (chat(server.url, A).status, chat(server.url, B).status) == (404, 418)

    def test_prompt_too_long_is_a_400(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("prompt_too_long"))
        assert chat(server.url).status == 400

    @pytest.mark.parametrize(("kind", "count"), [("truncated", 1000), ("truncated_half", 500)])
    def test_truncation_is_silent(self, server: ScriptedOllama, kind: str, count: int) -> None:
        server.add_faults(Fault(kind))
        last = chat(server.url, options={"num_ctx": 1000}).last
        assert (last["done"], last["prompt_eval_count"]) == (True, count)

    def test_error_line_in_mid_stream(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("error_line", 3))
        result = chat(server.url)
        assert (result.status, result.error, len(result.lines)) == (200, "", 4)
        assert set(result.last) == {"error"}

    def test_clean_end_without_done(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("no_done", 5))
        result = chat(server.url)
        assert (result.error, [line["done"] for line in result.lines]) == ("", [False] * 5)

    def test_done_false_in_a_single_object(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("done_false"))
        result = chat(server.url)
        assert [line["done"] for line in result.lines] == [False]
        assert json.loads(result.text)
        whole = post(server.url, "/api/chat", model=A, messages=MESSAGES, stream=False).json()
        assert whole["done"] is False

    def test_reset_before_the_first_byte(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("reset", times=1))
        assert chat(server.url).error == "ReadError"
        assert server.log.requests[-1].outcome == "reset"
        assert chat(server.url).last["done"] is True

    def test_reset_after_some_tokens(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("reset_after", 4))
        result = chat(server.url)
        assert (result.status, len(result.lines), result.error) == (200, 4, "ReadError")

    def test_hang_before_the_first_byte(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("hang"))
        assert chat(server.url, timeout=0.2).error == "ReadTimeout"
        assert eventually(lambda: server.log.requests[-1].outcome == "aborted")

    def test_held_call_is_answered_once_the_fault_is_cleared(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("hold", calls=(1,)))
        with pytest.raises(httpx.ReadTimeout), plain_client(0.2) as client:
            client.post(f"{server.url}/api/chat", json={"model": A, "messages": MESSAGES})
        server.add_faults(Fault("hold", calls=(2,)))
        ended: list[ChatResult] = []
        thread = threading.Thread(target=lambda: ended.append(chat(server.url)))
        thread.start()
        assert eventually(lambda: len(server.log.calls()) == 2)
        server.clear_faults("hold")
        thread.join()
        assert ended[0].last["done"] is True

    def test_hang_in_mid_stream_frees_the_model_when_the_client_leaves(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("hang_after", 2))
        result = chat(server.url, timeout=1, keep_alive=0)
        assert (result.status, len(result.lines), result.error) == (200, 2, "ReadTimeout")
        assert until_empty(server.url)
        assert server.log.calls()[-1].outcome == "aborted"

    def test_fault_of_another_path_hangs_only_there(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("hang", path="/api/ps", calls=(2,)))
        assert chat(server.url, keep_alive=0).status == 200
        resident(server.url)
        with plain_client(0.2) as client, pytest.raises(httpx.ReadTimeout):
            client.get(f"{server.url}/api/ps")
        assert until_empty(server.url)

    def test_missing_counters(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("no_counters"))
        assert set(chat(server.url).last) == {"model", "created_at", "message", "done", "done_reason"}

    def test_garbage_line_between_good_ones(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("garbage", 2))
        result = chat(server.url)
        assert len(result.invalid_lines) == 1
        assert result.last["done"] is True

    def test_thinking_comes_before_the_answer_unless_switched_off(self) -> None:
        with ScriptedOllama([ModelSpec(A, capabilities=("completion", "thinking")), B]) as server:
            server.add_faults(Fault("thinking", model=B))
            assert [_thinks(chat(server.url, A)), _thinks(chat(server.url, A, think=False))] == [True, False]
            assert _thinks(chat(server.url, B, think=False))

    def test_endless_stream_ends_with_the_client(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("endless"))
        with (
            plain_client() as client,
            client.stream("POST", f"{server.url}/api/chat", json={"model": A, "messages": MESSAGES}) as answer,
        ):
            lines = answer.iter_lines()
            assert all('"done":false' in next(lines) for _ in range(100))
        assert eventually(lambda: server.log.calls()[-1].outcome == "aborted")

    def test_huge_answer_arrives_whole(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("huge"))
        text = chat(server.url).text
        assert text == huge_text()
        assert len(text.encode()) >= 200_000
        assert {"\x00", "🌿"} <= set(text)

    def test_a_response_split_into_pieces_is_the_same(self, server: ScriptedOllama) -> None:
        plain = chat(server.url).text
        server.add_faults(Fault("torn"))
        assert chat(server.url).text == plain

    def test_length_cuts_the_answer_and_reports_it(self, server: ScriptedOllama) -> None:
        plain = chat(server.url).text
        server.add_faults(Fault("length"))
        cut = chat(server.url)
        assert cut.last["done_reason"] == "length"
        assert cut.text == plain[: len(plain) // 2]

    def test_fault_of_the_nth_call_of_a_model(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("busy", model=B, calls=(2,)))
        assert [chat(server.url, model).status for model in (A, B, A, B, B)] == [200, 200, 200, 503, 200]

    def test_unknown_fault_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no such fault"):
            Fault("wobble")

    def test_server_that_stops_listening_comes_back_on_its_port(self, server: ScriptedOllama) -> None:
        server.add_faults(Fault("slow", 5, times=1))
        ended: list[ChatResult] = []
        thread = threading.Thread(target=lambda: ended.append(chat(server.url)))
        thread.start()
        assert eventually(lambda: server.resident == (A,))
        server.pause_listening(lose_models=True)
        thread.join()
        assert ended[0].error == "ReadError"
        assert chat(server.url).error == "ConnectError"
        server.resume()
        assert resident(server.url) == []
        assert chat(server.url).last["done"] is True
        assert server.log.calls()[0].outcome == "dropped"


def _thinks(result: ChatResult) -> bool:
    return any("thinking" in line["message"] for line in result.lines if isinstance(line.get("message"), dict))  # type: ignore[operator]


class TestModels:
    def test_cloud_and_projector_are_shown(self) -> None:
        cloud = ModelSpec("big:cloud", params=None, remote_model="big", remote_host="https://cloud.example")
        sighted = ModelSpec("eyes:4b", params=4_000_000_000, projector_params=460_000_000)
        with ScriptedOllama([cloud, sighted]) as server:
            shown = post(server.url, "/api/show", model="big:cloud").json()
            assert (shown["remote_model"], shown["remote_host"]) == ("big", "https://cloud.example")
            assert "general.parameter_count" not in shown["model_info"]
            seen = post(server.url, "/api/show", model="eyes:4b").json()
            assert seen["projector_info"]["general.parameter_count"] == 460_000_000
            assert seen["details"]["parameter_size"] == "4.0B"
            assert chat(server.url, "big:cloud").last["done"] is True
            assert server.log.max_resident == 0

    def test_name_without_tag_means_latest(self) -> None:
        with ScriptedOllama(["plain"]) as server:
            assert chat(server.url, "PLAIN:latest").lines[0]["model"] == "PLAIN:latest"
            assert resident(server.url) == ["plain:latest"]

    def test_moved_tag_has_another_digest(self, server: ScriptedOllama) -> None:
        before = get(server.url, "/api/tags")["models"]
        server.add_model(ModelSpec(A, digest="f" * 64))
        after = get(server.url, "/api/tags")["models"]
        assert isinstance(before, list)
        assert isinstance(after, list)
        assert [a["digest"] != b["digest"] for a, b in zip(before, after, strict=True)] == [True, False]


class TestLog:
    def test_requests_are_logged_with_their_content(self, server: ScriptedOllama) -> None:
        chat(server.url, A, keep_alive="2m", options={"seed": 7})
        assert eventually(lambda: server.log.calls(A)[0].outcome != "running")  # the log is written after the answer
        request = server.log.calls(A)[0]
        assert (request.keep_alive, request.options, request.nth) == ("2m", {"seed": 7}, 1)
        assert (request.messages, request.status, request.outcome) == (messages_hash(MESSAGES), 200, "finished")
        assert request.finished is not None
        assert request.started < request.finished

    def test_client_that_leaves_is_logged_as_aborted(self, server: ScriptedOllama) -> None:
        server.set(call_s=2.0)
        leave_early(server.url, 0.1)
        assert eventually(lambda: server.log.calls()[-1].outcome == "aborted")


class TestProcess:
    def test_process_serves_logs_and_changes_settings(self) -> None:
        with ScriptedProcess([A, B], call_s=5) as server:
            server.set(call_s=0.2)
            began = time.monotonic()
            assert [chat(server.url, model).status for model in (A, B)] == [200, 200]
            assert time.monotonic() - began >= 0.4
            assert eventually(lambda: [each["outcome"] for each in server.log()["requests"]] == ["finished"] * 2)
            log = server.log()
            assert (log["loads"], log["max_resident"]) == ({A: 1, B: 1}, 2)

    def test_call_costs_less_than_a_millisecond_of_cpu(self) -> None:
        if not Path("/proc/self/stat").exists():
            pytest.skip("needs /proc to read another process's CPU time")
        with ScriptedProcess([A]) as server:
            _send_chats(server.url, 50)
            before = _cpu_s(server.pid)
            _send_chats(server.url, 1000)
            assert (_cpu_s(server.pid) - before) / 1000 < 0.001


def _send_chats(url: str, n: int) -> None:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": A, "messages": MESSAGES}).encode()
    with socket.create_connection((host, int(port))) as client:
        for _ in range(n):
            client.sendall(b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += client.recv(65536)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class TestDurations:
    @given(st.integers(0, 10_000), st.integers(0, 59), st.integers(0, 999))
    def test_parts_of_a_go_duration_add_up(self, hours: int, minutes: int, millis: int) -> None:
        assert go_duration(f"{hours}h{minutes}m{millis}ms") == pytest.approx(hours * 3600 + minutes * 60 + millis / 1e3)

    @given(st.text(max_size=8))
    def test_any_text_is_a_duration_or_refused(self, text: str) -> None:
        with suppress(BadDurationError):
            assert keep_alive_seconds(text) is not None

    def test_fraction_of_a_number_is_dropped(self) -> None:
        assert keep_alive_seconds(0.9) == 0
        assert keep_alive_seconds("-0.5s") == NEVER
