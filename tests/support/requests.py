"""Generation requests and planned cells for tests."""

from __future__ import annotations

import threading
from typing import Any

from tipbench.generate.engine import Completion, EngineFailure, GenerationRequest, engine_type_of
from tipbench.plan.collect_config import make_config
from tipbench.plan.grid import ModelIdentity, PlannedCell, plan_grid
from tipbench.plan.suite import load_suite

SUITE = load_suite("tips")


def planned_cells(model: str = "alpha:135m", digest: str = "sha-alpha", **config: object) -> list[PlannedCell]:
    """A grid over one model."""
    return plan_grid(
        SUITE, make_config(config), [ModelIdentity(model, digest, has_prompt=engine_type_of(model).has_prompt)]
    )


def ask(
    model: str = "alpha:135m", *, last: bool = False, timeout_s: float = 120.0, **config: object
) -> GenerationRequest:
    """The generation request of the first cell of a small grid."""
    values: dict[str, Any] = {"num_predict": 64, "n_tips": 2, **config}
    cell = planned_cells(model, **values)[0]
    return GenerationRequest(
        model=model,
        system=cell.rendered.system,
        user=cell.rendered.user,
        scenario=cell.scenario,
        n_tips=2,
        options=cell.options,
        timeout_s=timeout_s,
        last=last,
        cancel=threading.Event(),
    )


def expect_completion(result: Completion | EngineFailure) -> Completion:
    """Return the result, which must be a completion."""
    assert isinstance(result, Completion), result
    return result


def expect_failure(result: Completion | EngineFailure) -> EngineFailure:
    """Return the result, which must be a failure."""
    assert isinstance(result, EngineFailure), result
    return result
