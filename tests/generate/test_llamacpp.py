"""The embedded engine on its real weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from support.requests import expect_completion, expect_failure
from tipbench.errors import ModelRefused
from tipbench.generate import llamacpp
from tipbench.generate.engine import FailureKind, GenerationRequest
from tipbench.generate.llamacpp import LlamaCppEngine
from tipbench.generate.weights import SMOLLM2, weights_path
from tipbench.plan.suite import load_suite

SCENARIO = load_suite("tips").scenarios[0]
OPTIONS: dict[str, float | int] = {
    "num_ctx": 1024, "num_predict": 8, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0,
    "repeat_penalty": 1.1, "seed": 42,
}  # fmt: skip
ASK = GenerationRequest(
    model=SMOLLM2.name, system="You are a calm coach.", user="Give me one tip for a quiet morning.",
    scenario=SCENARIO, n_tips=1, options=OPTIONS,
)  # fmt: skip


def options(**changes: float) -> dict[str, float | int]:
    return {**OPTIONS, **changes}


@pytest.fixture(scope="module")
def home(weights_home: Path) -> Path:
    return weights_home


@pytest.fixture(scope="module")
def engine(home: Path) -> Iterator[LlamaCppEngine]:
    engine = LlamaCppEngine(home, num_ctx=4096, threads=1)
    yield engine
    engine.close()


# --- facts


def test_facts_come_from_the_file_without_loading_it(home: Path) -> None:
    engine = LlamaCppEngine(home, num_ctx=4096)
    engine.release(SMOLLM2.name)
    facts = engine.facts(SMOLLM2.name)
    assert (facts.engine, facts.host) == ("embedded", platform.node())
    assert facts.engine_version == importlib.metadata.version("xllamacpp")
    assert (facts.digest, facts.file_bytes) == (SMOLLM2.sha256, weights_path(home).stat().st_size)
    assert (facts.params_b, facts.quantization, facts.kv_bytes_per_token) == (0.134515008, "Q4_1", 23_040)
    assert llamacpp._SHARED_MODEL.server is None


def test_an_unknown_embedded_model_is_refused_with_the_known_names(engine: LlamaCppEngine) -> None:
    with pytest.raises(ModelRefused, match=r"embedded:gpt is not an embedded model\. Choose one of: embedded:smollm2"):
        engine.facts("embedded:gpt")


def test_missing_weights_name_the_command_that_fetches_them(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"Run `tipbench models fetch`"):
        LlamaCppEngine(tmp_path, num_ctx=4096).facts(SMOLLM2.name)


def test_a_request_without_weights_is_a_failure_and_not_an_exception(tmp_path: Path) -> None:
    failure = expect_failure(LlamaCppEngine(tmp_path, num_ctx=4096).complete(ASK))
    assert failure.kind is FailureKind.MISSING_MODEL
    assert "models fetch" in failure.reason


def test_a_missing_xllamacpp_names_the_extra_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelRefused, match=r"pip install 'tipbench\[embedded\]'"):
        LlamaCppEngine(home, num_ctx=4096).facts(SMOLLM2.name)


# --- answers


def test_an_answer_has_its_measurements(engine: LlamaCppEngine) -> None:
    engine.release(ASK.model)
    first, second = expect_completion(engine.complete(ASK)), expect_completion(engine.complete(ASK))
    assert first.text
    assert first.load_s is not None
    assert first.load_s > 0
    assert second.load_s == 0
    for done in (first, second):
        assert done.prompt_tokens is not None
        assert 20 < done.prompt_tokens < 60
        assert done.output_tokens is not None
        assert 0 < done.output_tokens <= 8
        assert done.tokens_per_s is not None
        assert done.tokens_per_s > 0
        assert done.latency_s is not None
        assert done.ttft_s is not None
        assert 0 < done.ttft_s <= done.latency_s


def test_an_answer_cut_at_the_limit_has_reason_length(engine: LlamaCppEngine) -> None:
    done = expect_completion(engine.complete(replace(ASK, options=options(num_predict=3))))
    assert (done.done_reason, done.output_tokens) == ("length", 3)


def test_an_answer_that_ends_normally_has_reason_stop(engine: LlamaCppEngine) -> None:
    ask = replace(ASK, user="Say only: yes", options=options(temperature=0, num_predict=200))
    assert expect_completion(engine.complete(ask)).done_reason == "stop"


def test_another_seed_gives_another_answer(engine: LlamaCppEngine) -> None:
    texts = {expect_completion(engine.complete(replace(ASK, options=options(seed=seed)))).text for seed in (1, 2, 3)}
    assert len(texts) > 1


def test_the_number_of_threads_does_not_change_the_answer(home: Path) -> None:
    over_512_tokens = "Give 3 tips as JSON. " + "Write report by Friday priority 2 age three days. " * 46
    ask = replace(ASK, user=over_512_tokens, options=options(num_predict=4))  # shorter ones never differed
    texts = {expect_completion(LlamaCppEngine(home, num_ctx=1024, threads=n).complete(ask)).text for n in (1, 2)}
    assert len(texts) == 1


def test_every_seed_gives_a_repeatable_answer(engine: LlamaCppEngine) -> None:
    for seed in (0xFFFFFFFF, -1, 2**40):
        ask = replace(ASK, options=options(seed=seed, temperature=1.5, num_predict=8))
        assert expect_completion(engine.complete(ask)).text == expect_completion(engine.complete(ask)).text


def test_a_text_that_is_not_unicode_is_rejected(engine: LlamaCppEngine) -> None:
    assert expect_failure(engine.complete(replace(ASK, user="\ud800"))).kind is FailureKind.REJECTED


def test_options_that_the_engine_cannot_send_are_a_bug(engine: LlamaCppEngine) -> None:
    with pytest.raises(ValueError, match="mirostat"):
        engine.complete(replace(ASK, options=options(mirostat=1)))
    with pytest.raises(ValueError, match="num_ctx may be at most the engine's 4096; it is 8192"):
        engine.complete(replace(ASK, options=options(num_ctx=8192)))
    with pytest.raises(ValueError, match=r"differs in \['seed'\]"):
        engine.complete(replace(ASK, options={k: v for k, v in OPTIONS.items() if k != "seed"}))


def test_nothing_is_written_to_the_terminal(engine: LlamaCppEngine, capfd: pytest.CaptureFixture[str]) -> None:
    engine.release(ASK.model)
    engine.complete(replace(ASK, options=options(num_predict=2)))
    failure = expect_failure(engine.complete(replace(ASK, user="word " * 2000)))
    assert failure.kind is FailureKind.PROMPT_TOO_LONG
    assert "1024" in failure.reason
    engine.release(ASK.model)
    assert capfd.readouterr() == ("", "")


def test_the_port_that_xllamacpp_opens_accepts_no_connection(engine: LlamaCppEngine) -> None:
    engine.complete(replace(ASK, options=options(num_predict=1)))
    address = llamacpp._SHARED_MODEL.server.listening_address
    with httpx.Client(base_url=address, trust_env=False) as client:
        assert client.post("/completion", json={"prompt": "x", "n_predict": 1}).status_code == 401
        assert client.get("/slots").status_code == 401


def test_a_file_that_is_not_a_model_fails_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(SMOLLM2, size=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(llamacpp, "EMBEDDED_MODELS", {broken.name: broken})
    path = weights_path(tmp_path)
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    assert expect_failure(LlamaCppEngine(tmp_path, num_ctx=4096).complete(ASK)).kind is FailureKind.LOAD_FAILED


# --- time and cancelling


# At temperature 0 and without a repeat penalty the model repeats itself until it has all its tokens.
LONG = replace(
    ASK, user="Write a very long story.", options=options(num_predict=900, temperature=0, repeat_penalty=1.0)
)


def time_to_midway(engine: LlamaCppEngine) -> float:
    """Seconds after which this machine has begun LONG and is far from its end."""
    start = time.monotonic()
    expect_completion(engine.complete(replace(LONG, options={**LONG.options, "num_predict": 1})))
    return 3 * (time.monotonic() - start) + 0.5


def test_an_answer_over_time_is_stopped_and_keeps_its_text(engine: LlamaCppEngine) -> None:
    before = expect_completion(engine.complete(ASK)).text
    limit = time_to_midway(engine)
    start = time.monotonic()
    failure = expect_failure(engine.complete(replace(LONG, timeout_s=limit)))
    assert failure.kind is FailureKind.TIMEOUT
    assert failure.partial
    assert limit <= time.monotonic() - start < limit + 30.0
    assert expect_completion(engine.complete(ASK)).text == before, "the next answer is right"


def test_a_long_prompt_over_time_is_stopped_before_its_end(engine: LlamaCppEngine) -> None:
    ask = replace(ASK, user="word " * 3900, options=options(num_ctx=4096, num_predict=1), timeout_s=0.2)
    failure = expect_failure(engine.complete(ask))
    assert (failure.kind, failure.partial) == (FailureKind.TIMEOUT, "")


def test_a_cancelled_answer_is_stopped_at_once(engine: LlamaCppEngine) -> None:
    cancel = threading.Event()
    limit = time_to_midway(engine)
    timer = threading.Timer(limit, cancel.set)
    start = time.monotonic()
    timer.start()
    failure = expect_failure(engine.complete(replace(LONG, cancel=cancel)))
    timer.join()
    assert failure.kind is FailureKind.CANCELLED
    assert time.monotonic() - start < limit + 30.0


def test_a_request_cancelled_while_queued_does_not_start(engine: LlamaCppEngine) -> None:
    cancel = threading.Event()
    cancel.set()
    with llamacpp._SHARED_MODEL.lock:
        assert expect_failure(engine.complete(replace(LONG, cancel=cancel))).kind is FailureKind.CANCELLED


def test_other_threads_run_while_it_generates(engine: LlamaCppEngine) -> None:
    engine.complete(replace(ASK, options=options(num_predict=1)))
    done = threading.Event()
    ticks = 0

    def answer() -> None:
        engine.complete(replace(ASK, options=options(num_predict=16)))
        done.set()

    thread = threading.Thread(target=answer)
    thread.start()
    while not done.wait(0.01):
        ticks += 1
    thread.join()
    assert ticks > 3


def test_requests_from_several_threads_get_their_own_answers(engine: LlamaCppEngine) -> None:
    requests = [replace(ASK, options=options(seed=seed, num_predict=6)) for seed in range(3)]
    alone = [expect_completion(engine.complete(ask)).text for ask in requests]
    together: dict[int, str] = {}

    def answer(index: int) -> None:
        together[index] = expect_completion(engine.complete(requests[index])).text

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(3)] == alone


SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from generate.test_llamacpp import ASK, LONG, LlamaCppEngine, options
engine = LlamaCppEngine(Path(sys.argv[1]), num_ctx=4096, threads=1)
engine.complete(replace(ASK, options=options(num_predict=1)))
print("loaded", flush=True)
while sys.argv[3] == "wait":
    engine.complete(LONG)
"""


def start_engine_process(home: Path, mode: str) -> subprocess.Popen[str]:
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", SCRIPT, str(home), str(tests), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.process
def test_a_process_with_the_model_loaded_ends_cleanly(home: Path) -> None:
    with start_engine_process(home, "end") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "loaded\n", "")


@pytest.mark.process
def test_ctrl_c_during_an_answer_is_not_swallowed(home: Path) -> None:
    with start_engine_process(home, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in err
    assert process.returncode == -signal.SIGINT
    assert time.monotonic() - began < 30


# --- memory


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read memory from")


@needs_proc
def test_release_frees_the_memory(engine: LlamaCppEngine) -> None:
    engine.complete(replace(ASK, options=options(num_predict=1)))
    loaded = resident_mb()
    engine.release(ASK.model)
    assert loaded - resident_mb() > 80


@needs_proc
def test_two_engines_hold_one_set_of_weights(home: Path) -> None:
    ask = replace(ASK, options=options(num_predict=1))
    first, second = LlamaCppEngine(home, num_ctx=1024, threads=1), LlamaCppEngine(home, num_ctx=4096, threads=1)
    first.complete(ask)
    loaded = resident_mb()
    second.complete(ask)
    assert expect_completion(second.complete(ask)).load_s == 0
    assert resident_mb() - loaded < 40


def test_the_last_request_unloads_the_weights(engine: LlamaCppEngine) -> None:
    engine.complete(replace(ASK, options=options(num_predict=1), last=True))
    assert llamacpp._SHARED_MODEL.server is None


def test_releasing_a_model_that_is_not_loaded_does_nothing(engine: LlamaCppEngine) -> None:
    engine.release(ASK.model)
    engine.release("embedded:nothing")
