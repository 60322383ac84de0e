"""Builds the run that records a cell's answer or failure. Pure."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import tipbench
from tipbench.generate.diversity import diversity
from tipbench.generate.engine import Completion, EngineFailure, ModelFacts
from tipbench.generate.parsing import Answer, is_overlong, parse_answer, tips_json
from tipbench.plan.config import CollectConfig
from tipbench.plan.grid import PlannedCell
from tipbench.plan.prompts import Rendered
from tipbench.plan.rubric import Rubric
from tipbench.plan.suite import Suite
from tipbench.record.run import NewRun, RunKind, RunState
from tipbench.text import fingerprint


@dataclass(frozen=True)
class RunContext:
    """Data shared by all cells of one collect."""

    config: CollectConfig
    suite: Suite
    collection_id: str

    @property
    def conditions(self) -> str:
        return fingerprint(self.config.conditions(self.suite.sampling), 16)


@dataclass(frozen=True)
class Timing:
    """When a cell was generated, whether a foreign model was in memory, and which failed runs it replaces."""

    start_ms: int
    end_ms: int
    foreign_resident: bool = False
    supersedes: tuple[str, ...] = ()


def cell_run(
    context: RunContext,
    planned: PlannedCell,
    facts: ModelFacts,
    result: Completion | EngineFailure,
    when: Timing,
) -> NewRun:
    """Return the run that records one cell."""
    if isinstance(result, Completion):
        metrics, tags, texts = _answered(context, result)
    else:
        metrics, tags, texts = _failed(result)
    if when.foreign_resident:
        tags["foreign_resident"] = "true"
    return NewRun(
        kind=RunKind.CELL,
        record_id=uuid.uuid4().hex,
        name=str(planned.cell),
        start_ms=when.start_ms,
        end_ms=when.end_ms,
        ok=isinstance(result, Completion),
        cell_key=planned.key,
        params=_params(context, planned, facts),
        metrics=metrics,
        tags=_common_tags(context, planned) | tags,
        texts={
            "artifact:prompt.txt": prompt_text(planned.rendered),
            "artifact:rubric.md": context.suite.rubric.text,
            **texts,
        },
        supersedes=when.supersedes,
    )


def prompt_text(rendered: Rendered) -> str:
    """Return the prompt as stored with the run: both messages under their roles."""
    return f"# system\n\n{rendered.system}\n\n# user\n\n{rendered.user}\n"


def _params(context: RunContext, planned: PlannedCell, facts: ModelFacts) -> dict[str, str]:
    config, cell, scenario = context.config, planned.cell, planned.scenario
    values: dict[str, object | None] = {
        "model": cell.model,
        "prompt_version": cell.prompt,
        "scenario": cell.scenario,
        "persona": scenario.persona.id,
        "time_slot": scenario.slot.id,
        "n_tips": config.n_tips,
        "temperature": config.temperature,
        "seed": config.seed,
        "repeat": cell.repeat,
        "diversity": str(config.diversity).lower(),
        "suite": context.suite.name,
        "engine": facts.engine,
        "engine_version": facts.engine_version,
        "host": facts.host,
        "model_digest": facts.digest,
        "model_params_b": facts.params_b,
        "quantization": facts.quantization,
        "num_ctx": config.num_ctx,
        "num_predict": config.num_predict,
        "sampling": json.dumps(dict(context.suite.sampling), sort_keys=True),
        "rubric": context.suite.rubric.tag,
    }
    return {key: "unknown" if value is None else str(value) for key, value in values.items()}


def _common_tags(context: RunContext, planned: PlannedCell) -> dict[str, str]:
    return {
        "conditions": context.conditions,
        "scenario_hash": planned.scenario.content_hash,
        "prompt_hash": planned.prompt.hash,
        "cell_seed": str(planned.options["seed"]),
        "collection": context.collection_id,
        "tipbench.version": tipbench.__version__,
    }


_Parts = tuple[dict[str, float], dict[str, str], dict[str, str]]


def _answered(context: RunContext, result: Completion) -> _Parts:
    config, rubric = context.config, context.suite.rubric
    answer = parse_answer(result.text, config.n_tips)
    floored = not answer.tips
    metrics = _measures(result) | (_floor(rubric) if floored else _answer_measures(answer, config.n_tips, rubric))
    metrics["n_candidates"] = float(len(answer.tips))
    tags = {
        "state": RunState.JUDGED if floored else RunState.PENDING,
        "judge_pending": "false" if floored else "true",
        "done_reason": result.done_reason,
        "truncated": str(result.truncated).lower(),
    }
    if floored:
        tags |= {"floored": "true", "scores_rubric": rubric.tag}
    texts = {"artifact:raw.txt": result.text, "artifact:candidates.json": tips_json(answer.tips)}
    return metrics, {key: str(value) for key, value in tags.items()}, texts


def _failed(result: EngineFailure) -> _Parts:
    tags = {
        "state": str(RunState.FAILED),
        "judge_pending": "false",
        "failure": str(result.kind),
        "failure_reason": result.reason[:2000],
    }
    texts = {"artifact:raw.txt": result.partial} if result.partial else {}
    return {}, tags, texts


def _measures(result: Completion) -> dict[str, float]:
    """Return the engine's measurements; missing ones are omitted, not zero."""
    values: Mapping[str, float | None] = {
        "latency_s": result.latency_s,
        "load_s": result.load_s,
        "ttft_s": result.ttft_s,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "tokens_per_s": result.tokens_per_s,
    }
    return {key: float(value) for key, value in values.items() if value is not None}


def _answer_measures(answer: Answer, n_tips: int, rubric: Rubric) -> dict[str, float]:
    judged = answer.tips[:n_tips]
    measures = {
        "format_ok": float(answer.format_ok),
        "overlong": sum(is_overlong(tip.tip, rubric.word_limit) for tip in judged) / len(judged),
    }
    spread = diversity([tip.tip for tip in judged])
    return measures | ({"diversity": spread.score, "distinct_2": spread.distinct_2} if spread is not None else {})


def _floor(rubric: Rubric) -> dict[str, float]:
    """Return the scores of an answer without a usable tip, which is judged immediately, at the rubric's floor."""
    return {**rubric.floor, "composite": rubric.floor_composite}
