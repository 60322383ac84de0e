"""A local model on Ollama as a judge: provisional, and under the same memory rule as a collect."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date, time
from pathlib import Path

from tipbench.addresses import identity_of, is_loopback
from tipbench.errors import ModelRefused, ResidencyError, ServerAway, TipbenchError, UsageError
from tipbench.generate.engine import Ask, Completion, Engine, EngineFailure, FailureKind, ModelFacts, engine_of
from tipbench.generate.engines import EngineNeeds, ask_facts, build_engines, close_engines
from tipbench.generate.lock import ResourceLock
from tipbench.generate.machine import free_memory
from tipbench.generate.residency import Evidence
from tipbench.generate.sizing import Memory, memory_needed, memory_warning
from tipbench.judge.filler import Unscored, telling
from tipbench.judge.model_questions import Question, questions, read_answer, system_prompt
from tipbench.judge.salvage import safe_line
from tipbench.judge.sheet import Item, ItemScore, Sheet, TipScore
from tipbench.plan.config import CollectConfig, make_config
from tipbench.plan.scenarios import Persona, Scenario, Slot
from tipbench.record.generation import Pause

# No penalty for repeating: two tips may well deserve the same scores.
_SAMPLING: dict[str, float | int] = {"top_k": 40, "top_p": 1.0, "min_p": 0, "repeat_penalty": 1.0}
_TRIES = ((0.0, 0), (0.3, 1))  # temperature and what is added to the seed: without temperature a seed changes nothing
_HOPELESS = (FailureKind.MISSING_MODEL, FailureKind.NOT_LOCAL)  # of no use to ask again, for any item
_POINTLESS = (*_HOPELESS, FailureKind.PROMPT_TOO_LONG, FailureKind.REJECTED)  # of no use to ask the same again
_LOADS_BEFORE_GIVING_UP = 3
_MOST_GONE = 10
_RELEASE_TRIES = 3
_MOST_REASON = 300
# The port hands engines without a language the scenario; this one gets all it needs in words.
_UNUSED = Scenario(Persona("", "", "", "", (), (), ()), Slot("", "", time()), date.min)


class ModelJudge:
    """Fills sheets with a model's scores. Made by `open_model_judge`, which holds the lock on the server."""

    provisional = True

    def __init__(self, engine: Engine, facts: ModelFacts, config: CollectConfig) -> None:
        self.name = f"ollama:{facts.model}"
        self._engine = engine
        self._facts = facts
        self._config = config
        self._cancel = threading.Event()
        self._in_use = False
        self._hopeless = ""
        self._load_failures = 0

    def fill(self, sheet: Sheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """One question after the other; the weights are gone from memory when the last outcome has been taken."""
        if not sheet.items:
            return
        system = system_prompt(sheet.rubric, self._config.num_ctx)
        pause = Pause(self._config.server_wait_s, telling(report), self._cancel)
        with self._in_memory(pause, report):
            for item in sheet.items:
                yield self._score(_Asking(item, sheet, system, pause, item is sheet.items[-1]))
        if (evidence := self.evidence()) is not None:
            report(f"{self.name}: {evidence.sentence()}")

    def evidence(self) -> Evidence | None:
        """What was seen in the server's memory so far."""
        return self._engine.evidence()

    def close(self, report: Callable[[str], None] = lambda _text: None) -> None:
        """Unload what a fill that was broken off left in memory."""
        if self._in_use:
            self._release_in_trouble(report)

    # Memory, in the same order as a collect

    @contextmanager
    def _in_memory(self, pause: Pause, report: Callable[[str], None]) -> Iterator[None]:
        pause.until_alive(self._engine)
        self._engine.prepare(self._facts)
        self._in_use = True
        try:
            yield
        except BaseException:
            self.close(report)
            raise
        self._release(pause)

    def _release(self, pause: Pause) -> None:
        for _ in range(_RELEASE_TRIES):
            pause.until_alive(self._engine)
            try:
                self._engine.release(self._facts.model)
            except ServerAway:
                continue
            self._in_use = False
            return
        raise ResidencyError(f"{self._facts.model} could not be seen leaving the memory of the Ollama server.")

    def _release_in_trouble(self, report: Callable[[str], None]) -> None:
        self._in_use = False
        self._engine.abort()
        if not self._engine.alive():
            return
        try:
            self._engine.release(self._facts.model)
            report(f"{self._facts.model} unloaded")
        except TipbenchError as exc:
            report(str(exc))

    # Questions

    def _score(self, asking: _Asking) -> ItemScore | Unscored:
        item, rubric = asking.item, asking.sheet.rubric
        asked = questions(item, rubric, asking.system, self._config.num_ctx)
        if isinstance(asked, str):
            return _unscored(item, asked)
        scores: list[dict[str, int]] = []
        for question in asked:
            answer = self._hopeless or self._ask_twice(asking, question, asking.last and question is asked[-1])
            if isinstance(answer, str):
                return _unscored(item, answer)
            scores += answer
        tips = zip(item.tips, scores, strict=True)
        return ItemScore(item.id, item.format_ok, tuple(TipScore(given, tip.overlong) for tip, given in tips))

    def _ask_twice(self, asking: _Asking, question: Question, last: bool) -> list[dict[str, int]] | str:
        """Scores, or why there are none; an answer that cannot be used is asked for once more, with another seed."""
        reason = ""
        for temperature, shift in _TRIES:
            result = self._complete(self._ask(asking, question, temperature, shift, last), asking.pause)
            if isinstance(result, EngineFailure):
                reason = f"{result.kind}: {result.reason}"
                self._note_failure(result)
                if self._hopeless or result.kind in _POINTLESS:
                    return reason
                continue
            self._load_failures = 0
            answer = _read(result, asking.sheet, question)
            if not isinstance(answer, str):
                return answer
            reason = answer
        return reason

    def _ask(self, asking: _Asking, question: Question, temperature: float, shift: int, last: bool) -> Ask:
        config = self._config
        return Ask(
            model=self._facts.model,
            system=asking.system,
            user=question.user,
            scenario=_UNUSED,
            n_tips=question.n_tips,
            options={
                **_SAMPLING,
                "num_ctx": config.num_ctx,
                "num_predict": question.num_predict,
                "temperature": temperature,
                "seed": (config.seed + shift) % 2**31,
            },
            timeout_s=config.timeout_s,
            last=last,
            thinking=self._facts.thinking,
            answer_schema=question.answer_schema,
            cancel=self._cancel,
        )

    def _complete(self, ask: Ask, pause: Pause) -> Completion | EngineFailure:
        """A server that is away is waited for and uses up no try; OllamaAway when it stays away."""
        result = self._engine.complete(ask)
        for _ in range(_MOST_GONE):
            if not isinstance(result, EngineFailure) or result.kind is not FailureKind.SERVER_GONE:
                break
            pause.until_alive(self._engine)
            result = self._engine.complete(ask)
        return result

    def _note_failure(self, failure: EngineFailure) -> None:
        if failure.kind is FailureKind.LOAD_FAILED:
            self._load_failures += 1
        if failure.kind in _HOPELESS or self._load_failures >= _LOADS_BEFORE_GIVING_UP:
            self._hopeless = f"not asked any more: {failure.reason}"


@dataclasses.dataclass(frozen=True)
class _Asking:
    """An item on its way to the model, with what all of its questions share."""

    item: Item
    sheet: Sheet
    system: str
    pause: Pause
    last: bool


def _read(result: Completion, sheet: Sheet, question: Question) -> list[dict[str, int]] | str:
    if result.truncated:
        return f"the server cut the question to fit its context ({result.prompt_tokens} tokens read)"
    if result.done_reason != "stop":
        return f"the answer was cut off ({result.done_reason})"
    return read_answer(result.text, sheet.rubric, question.n_tips)


def _unscored(item: Item, reason: str) -> Unscored:
    return Unscored(item.id, safe_line(reason, _MOST_REASON))


@contextmanager
def open_model_judge(
    model: str,
    *,
    ollama_url: str,
    home: Path,
    report: Callable[[str], None],
    max_model_b: float = 4.0,
    **settings: object,
) -> Iterator[ModelJudge]:
    """The judge `ollama:MODEL`, with the size gate passed, the server's lock held and its memory seen empty.

    `settings` are further keys of a collect that apply here: num_ctx, timeout_s, server_wait_s, seed, evict, wait,
    allow_unknown_size. LockHeld while a collect uses the server, OllamaAway when nobody answers.
    """
    config = _config(model, {"ollama_url": ollama_url, "max_model_b": max_model_b, **settings})
    lock = ResourceLock(home, f"Ollama at {identity_of(config.ollama_url)}", f"the judge ollama:{model}")
    engines = build_engines([model], EngineNeeds(config, home, report, lock))
    with ExitStack() as stack:
        stack.callback(close_engines, engines, report)
        facts = _allowed(engines[engine_of(model)], config)
        if lock.acquire(wait=config.wait, report=report):
            facts = _allowed(engines[engine_of(model)], config)  # it may have changed in the queue
        stack.callback(lock.release)
        _warn_of_memory(facts, config, report)
        engine = engines[engine_of(model)]
        engine.start()
        judge = ModelJudge(engine, facts, config)
        stack.callback(judge.close, report)
        yield judge


def _config(model: str, values: dict[str, object]) -> CollectConfig:
    config = make_config({"num_predict": 1, **values, "models": model})  # each question has a limit of its own
    if config.model_names != (model,) or engine_of(model) != "ollama":
        raise UsageError(f"A judge is one model of the Ollama server, as in ollama:qwen2.5:1.5b (got {model[:80]!r}).")
    return config


def _allowed(engine: Engine, config: CollectConfig) -> ModelFacts:
    facts, refused = ask_facts({engine.name: engine}, config)
    if refused:
        raise ModelRefused(" ".join(refused.values()))
    return facts[config.models]


def _warn_of_memory(facts: ModelFacts, config: CollectConfig, report: Callable[[str], None]) -> None:
    free = free_memory() if is_loopback(config.ollama_url) else Memory()
    if warning := memory_warning(facts, memory_needed(facts, num_ctx=config.num_ctx), free):
        report(warning)
