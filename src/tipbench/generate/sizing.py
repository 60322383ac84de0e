"""The size gate and the memory check: decided by the true parameter count, before anything is generated."""

from __future__ import annotations

from dataclasses import dataclass

from tipbench.generate.engine import ModelFacts

_OVERHEAD = 1.1  # buffers for the computation itself, on top of weights and context


@dataclass(frozen=True)
class Memory:
    """Free memory of the machine that computes, in bytes. None where it cannot be seen."""

    ram: int | None = None
    vram: int | None = None


def refusal(facts: ModelFacts, *, max_model_b: float, allow_unknown_size: bool) -> str | None:
    """Why a model may not run, with the number; None when it may."""
    if facts.remote:
        return f"{facts.model} is a cloud model: it would be computed elsewhere. Choose a model with local weights."
    if not facts.completes:
        return f"{facts.model} cannot complete text (its capabilities lack `completion`). Choose a chat model."
    if facts.params_b is None:
        if allow_unknown_size:
            return None
        return (
            f"{facts.model} does not tell its parameter count; the limit is {max_model_b:g}B. "
            "Choose another model, or pass --allow-unknown-size."
        )
    if facts.params_b > max_model_b:
        return (
            f"{facts.model} has {facts.params_b:.2f}B parameters; the limit is {max_model_b:g}B. "
            "Choose a smaller model or raise --max-model-b."
        )
    return None


def memory_needed(facts: ModelFacts, *, num_ctx: int, concurrency: int = 1) -> int | None:
    """Bytes for weights and context, roughly; None when the file's size is unknown."""
    if facts.file_bytes is None:
        return None
    context = (facts.kv_bytes_per_token or 0) * num_ctx * concurrency
    return int((facts.file_bytes + context) * _OVERHEAD)


def memory_warning(facts: ModelFacts, needed: int | None, free: Memory) -> str | None:
    """A warning when a model will hardly fit; None when it fits or nothing is known."""
    room = max((space for space in (free.ram, free.vram) if space is not None), default=None)
    if needed is None or room is None or needed <= room:
        return None
    return (
        f"{facts.model} needs about {needed / 2**30:.1f} GiB with its context; only {room / 2**30:.1f} GiB are free. "
        "Expect slow answers or failed loads; free memory or lower --num-ctx."
    )
