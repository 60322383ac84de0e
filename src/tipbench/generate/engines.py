"""ENGINES: which engine answers for a model, built with what each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tipbench.errors import ModelRefused, TipbenchError
from tipbench.generate.engine import Engine, ModelFacts, engine_of
from tipbench.generate.lock import ResourceLock
from tipbench.generate.sizing import refusal
from tipbench.plan.config import CollectConfig


@dataclass(frozen=True)
class EngineNeeds:
    """What engines are built from."""

    config: CollectConfig
    home: Path
    report: Callable[[str], None]
    lock: ResourceLock | None = None  # on the Ollama server; none for a dry run


def _ollama(needs: EngineNeeds) -> Engine:
    from tipbench.generate.ollama import MemoryRule, OllamaEngine

    config = needs.config
    rule = MemoryRule(unload=config.unload, evict=config.evict, wait_s=config.server_wait_s)
    return OllamaEngine(config.ollama_url, rule=rule, lock=needs.lock, report=needs.report)


def _embedded(needs: EngineNeeds) -> Engine:
    from tipbench.generate.llamacpp import LlamaCppEngine

    return LlamaCppEngine(needs.home, num_ctx=needs.config.num_ctx)


def _template(_needs: EngineNeeds) -> Engine:
    from tipbench.generate.template import TemplateEngine

    return TemplateEngine()


ENGINES: Mapping[str, Callable[[EngineNeeds], Engine]] = {
    "ollama": _ollama,
    "embedded": _embedded,
    "baseline": _template,
}


def build_engines(models: Iterable[str], needs: EngineNeeds) -> dict[str, Engine]:
    """One engine of each kind that the models ask for."""
    kinds = dict.fromkeys(engine_of(model) for model in models)
    return {kind: ENGINES[kind](needs) for kind in kinds}


def ask_facts(engines: Mapping[str, Engine], config: CollectConfig) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    """Facts of the models that may run, and for each of the others why not. ServerAway passes through."""
    allowed: dict[str, ModelFacts] = {}
    refused: dict[str, str] = {}
    for model in config.model_names:
        try:
            facts = engines[engine_of(model)].facts(model)
        except ModelRefused as exc:
            refused[model] = str(exc)
            continue
        reason = refusal(facts, max_model_b=config.max_model_b, allow_unknown_size=config.allow_unknown_size)
        if reason is None:
            allowed[model] = facts
        else:
            refused[model] = reason
    return allowed, refused


def close_engines(engines: Mapping[str, Engine], report: Callable[[str], None]) -> None:
    """Close all, whatever one of them says."""
    for engine in engines.values():
        try:
            engine.close()
        except TipbenchError as exc:
            report(str(exc))
