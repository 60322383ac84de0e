"""The Engine port: one suite for every engine: the template, the embedded model and a real Ollama."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.real_ollama import RealOllama
from support.requests import ask, expect_completion
from support.threads import in_threads
from tipbench.errors import ModelRefused
from tipbench.generate.engine import Completion, Engine, EngineFailure, FailureKind, GenerationRequest, engine_type_of
from tipbench.generate.llamacpp import LlamaCppEngine
from tipbench.generate.ollama import OllamaEngine
from tipbench.generate.template import TemplateEngine


@dataclass
class EngineUnderTest:
    """An engine, a model that it has, and one that it does not have."""

    engine: Engine
    model: str
    unknown: str

    def ask(self, **config: object) -> GenerationRequest:
        return ask(self.model, **({"num_predict": 12, "num_ctx": 1024} | config))  # type: ignore[arg-type]


@pytest.fixture(
    scope="module",
    params=[
        "baseline",
        pytest.param("embedded", marks=pytest.mark.real),
        pytest.param("ollama", marks=pytest.mark.real),
    ],
)
def subject(request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    if request.param == "baseline":
        built = EngineUnderTest(TemplateEngine(), "baseline:template", "baseline:nosuch")
    elif request.param == "embedded":
        home: Path = request.getfixturevalue("weights_home")
        built = EngineUnderTest(
            LlamaCppEngine(home, num_ctx=1024, threads=1), "embedded:smollm2:135m", "embedded:nosuch"
        )
    else:
        server: RealOllama = request.getfixturevalue("ollama")
        built = EngineUnderTest(OllamaEngine(server.url), "alpha:135m", "nosuch:1b")
    built.engine.start()
    built.engine.prepare(built.engine.facts(built.model))
    yield built
    built.engine.release(built.model)
    built.engine.close()


def test_facts_pin_the_model_by_digest_and_true_size(subject: EngineUnderTest) -> None:
    facts = subject.engine.facts(subject.model)
    assert (facts.model, facts.engine) == (subject.model, subject.engine.name)
    assert engine_type_of(subject.model).name == subject.engine.name
    assert len(facts.digest) == 64
    assert facts.params_b is not None
    assert facts.params_b < 0.2
    assert facts.engine_version
    assert facts.host
    assert facts.completes
    assert not facts.remote


def test_an_unknown_model_is_refused_with_its_name(subject: EngineUnderTest) -> None:
    with pytest.raises(ModelRefused, match=subject.unknown):
        subject.engine.facts(subject.unknown)


def test_the_same_request_gives_the_same_answer_after_any_other(subject: EngineUnderTest) -> None:
    start = time.monotonic()
    first = expect_completion(subject.engine.complete(subject.ask()))
    assert first.text
    assert first.latency_s is not None
    assert 0 <= first.latency_s <= time.monotonic() - start + 0.1
    expect_completion(subject.engine.complete(subject.ask(seed=7, prompts="v2-mentor")))
    again = expect_completion(subject.engine.complete(subject.ask()))
    if subject.engine.name != "ollama":  # its caches make the same seed only nearly repeatable
        assert again.text == first.text
    assert again.done_reason == first.done_reason


def test_calls_from_several_threads_all_return(subject: EngineUnderTest) -> None:
    results = in_threads(3, lambda _: subject.engine.complete(subject.ask(num_predict=4)))
    assert [type(result) for result in results] == [Completion] * 3


def test_a_cancelled_request_returns_a_failure_and_not_an_answer(subject: EngineUnderTest) -> None:
    request = subject.ask()
    request.cancel.set()
    result = subject.engine.complete(request)
    assert isinstance(result, EngineFailure)
    assert result.kind is FailureKind.CANCELLED


def test_a_prompt_longer_than_the_context_is_refused_or_marked(subject: EngineUnderTest) -> None:
    long = dataclasses.replace(subject.ask(), user="Please write tips about gardening. " * 400, timeout_s=300)
    result = subject.engine.complete(long)
    if subject.engine.name == "baseline":
        expect_completion(result)  # it reads no prompt
    elif isinstance(result, Completion):
        assert result.truncated
    else:
        assert result.kind is FailureKind.PROMPT_TOO_LONG


def test_a_model_can_be_used_again_after_its_weights_were_released(subject: EngineUnderTest) -> None:
    subject.engine.release(subject.model)
    subject.engine.prepare(subject.engine.facts(subject.model))
    expect_completion(subject.engine.complete(subject.ask(num_predict=4)))
