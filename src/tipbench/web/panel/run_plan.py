"""The plan of a run as its page shows it: the API's answer, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tipbench.errors import ServerAway, TipbenchError
from tipbench.plan.config import CollectConfig
from tipbench.web.api.plan import plan_of
from tipbench.web.deps import Panel
from tipbench.web.panel.showing import NOTHING

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Outcome:
    """What is shown beside the form."""

    errors: Mapping[str, str] = field(default_factory=dict)  # by field
    plan: Mapping[str, Any] | None = None
    trouble: str | None = None  # what no field can mend
    again: bool = False  # this very form has started a job before, with other values
    status: int = 200


def planned(panel: Panel, config: CollectConfig) -> Outcome:
    """The plan of this configuration."""
    try:
        plan = plan_of(panel, config)
    except ServerAway as exc:
        return Outcome({"ollama_url": str(exc)}, status=503)
    except TipbenchError as exc:
        return Outcome(trouble=str(exc), status=409)
    models = [
        {**model, "size": parameters(model["params_b"]), "memory": memory(model["memory_bytes"])}
        for model in plan["models"]
    ]
    return Outcome(plan={**plan, "models": models, "skip_refused": config.skip_refused})


def parameters(billions: float | None) -> str:
    """How large a model is: 4.46B, 135M."""
    if not billions:
        return NOTHING if billions is None else "none"
    return f"{billions:.2f}B" if billions >= 1 else f"{billions * 1000:.0f}M"


def memory(count: int | None) -> str:
    """What it takes: 1.2 GiB, 340 MiB."""
    if not count:
        return NOTHING if count is None else "none"
    if count < _MIB:
        return "under 1 MiB"
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
