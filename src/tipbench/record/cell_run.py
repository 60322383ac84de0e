"""Builds the run that records a cell's answer or failure, without I/O."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

import tipbench
from tipbench.generate.diversity import measure_diversity
from tipbench.generate.engine import Completion, ModelFacts, memory_needed
from tipbench.generate.parsing import is_overlong, parse_answer, tips_json
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.grid import PlannedCell, conditions_of
from tipbench.plan.suite import Suite
from tipbench.record.generation import GeneratedCell
from tipbench.record.run import NewRun, RunKind, RunState


@dataclass(frozen=True)
class CollectContext:
    """Data shared by all cells of one collect."""

    config: CollectConfig
    suite: Suite
    collection_id: str


def cell_run(
    context: CollectContext, facts: ModelFacts, generated: GeneratedCell, supersedes: tuple[str, ...] = ()
) -> NewRun:
    """Return the run that records one cell; `supersedes` are the ids of the failed runs that it replaces."""
    planned, result = generated.planned, generated.result
    if isinstance(result, Completion):
        metrics, tags, texts = _answer_fields(context, result)
    else:
        metrics = {}
        tags = {
            "state": str(RunState.FAILED),
            "judge_pending": "false",
            "failure": str(result.kind),
            "failure_reason": result.reason[:2000],
        }
        texts = {"artifact:raw.txt": result.partial} if result.partial else {}
    if generated.foreign_resident:  # another client's model was in memory
        tags["foreign_resident"] = "true"
    config, rendered = context.config, planned.rendered
    memory = memory_needed(facts, num_ctx=config.num_ctx, concurrency=config.workers)
    if memory is not None:
        tags["memory_bytes"] = str(memory)
    return NewRun(
        kind=RunKind.CELL,
        record_id=uuid.uuid4().hex,
        name=str(planned.cell),
        start_ms=generated.start_ms,
        end_ms=generated.end_ms,
        ok=isinstance(result, Completion),
        cell_key=planned.key,
        params=_params(context, planned, facts),
        metrics=metrics,
        tags={
            "conditions": conditions_of(config, context.suite),
            "scenario_hash": planned.scenario.content_hash,
            "prompt_hash": planned.prompt.hash,
            "cell_seed": str(planned.options["seed"]),
            "collection": context.collection_id,
            "tipbench.version": tipbench.__version__,
            **tags,
        },
        texts={
            "artifact:prompt.txt": f"# system\n\n{rendered.system}\n\n# user\n\n{rendered.user}\n",
            "artifact:rubric.md": context.suite.rubric.text,
            **texts,
        },
        supersedes=supersedes,
    )


def _params(context: CollectContext, planned: PlannedCell, facts: ModelFacts) -> dict[str, str]:
    config, cell, scenario = context.config, planned.cell, planned.scenario
    values: dict[str, object | None] = {
        "model": cell.model,
        "prompt_version": cell.prompt,
        "scenario": cell.scenario,
        "persona": scenario.persona.id,
        "time_slot": scenario.slot.id,
        "n_tips": config.n_tips,
        "temperature": config.temperature,
        "seed": config.seed,  # of the collect; the tag cell_seed has the cell's, derived from it
        "repeat": cell.repeat,
        "diversity": str(config.diversity).lower(),  # whether the prompt asks for diverse tips
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


def _answer_fields(
    context: CollectContext, result: Completion
) -> tuple[dict[str, float], dict[str, str], dict[str, str]]:
    """Return metrics, tags and texts of an answer. Without a usable tip, its scores are the rubric's floor."""
    config, rubric = context.config, context.suite.rubric
    answer = parse_answer(result.text, config.n_tips)
    measured = {
        "latency_s": result.latency_s,
        "load_s": result.load_s,
        "ttft_s": result.ttft_s,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "tokens_per_s": result.tokens_per_s,
        "n_candidates": len(answer.tips),  # all tips found, which may be more than n_tips
    }
    metrics = {key: float(value) for key, value in measured.items() if value is not None}  # None is unknown
    tags = {
        "state": str(RunState.PENDING),
        "judge_pending": "true",
        "done_reason": result.done_reason,
        "truncated": str(result.truncated).lower(),
    }
    if tips := answer.tips[: config.n_tips]:
        metrics["format_ok"] = float(answer.format_ok)
        metrics["overlong"] = sum(is_overlong(tip.tip, rubric.word_limit) for tip in tips) / len(tips)
        if diversity := measure_diversity([tip.tip for tip in tips]):
            metrics |= {"diversity": diversity.score, "distinct_2": diversity.distinct_2}
    else:
        metrics |= {**rubric.floor, "composite": rubric.floor_composite}
        tags |= {"state": str(RunState.JUDGED), "judge_pending": "false", "floored": "true"}
        tags["scores_rubric"] = rubric.tag
    return metrics, tags, {"artifact:raw.txt": result.text, "artifact:candidates.json": tips_json(answer.tips)}
