"""Simulations in MLflow: recorded in the experiment `tip-sim`, and read back."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from tipbench.record.run import NewRun, RunKind, StoredRun
from tipbench.record.store import RunStore
from tipbench.simulate.simulation import EXPERIMENT

_TEXT_KEY = "artifact:simulation.json"


def record_simulation(store: RunStore, result: Mapping[str, Any]) -> str:
    """Record the result of a simulation and return the run id."""
    config = result["config"]
    end_ms = int(time.time() * 1000)
    policies = {policy["name"].replace("+", "-"): policy for policy in result["policies"]}  # MLflow rejects "+"
    # The gain is None for the baseline, which has none over itself; bounds are None if they cannot be estimated.
    metrics = {
        f"{measure}/{name}/{statistic}": policy[measure][statistic]
        for name, policy in policies.items()
        for measure in ("reward", "regret", "gain")
        for statistic in ("mean", "ci_low", "ci_high")
        if policy[measure] is not None and policy[measure][statistic] is not None
    }
    run = NewRun(
        kind=RunKind.SIMULATION,
        record_id=uuid.uuid4().hex,
        name=f"{config['world']}: {config['policies']}"[:200],
        start_ms=end_ms - int(result["seconds"] * 1000),
        end_ms=end_ms,
        params={
            **{key: str(value) for key, value in config.items()},
            "personas": result["personas"],
            **{f"version/{name}": policy["version"] for name, policy in policies.items()},
            **{f"prior/{name}": policy["prior"] for name, policy in policies.items() if policy["prior"]},
        },
        metrics={**metrics, "decisions": float(result["decisions"])},
        texts={_TEXT_KEY: json.dumps(result)},
    )
    experiment = store.ensure_experiment(EXPERIMENT)
    run_id = store.record(experiment.experiment_id, run)
    store.mark_changed(experiment.experiment_id)
    return run_id


def read_simulations(store: RunStore, limit: int = 50) -> Iterator[tuple[StoredRun, dict[str, Any]]]:
    """Yield recorded simulations with their JSON, newest first."""
    experiment = store.experiment(EXPERIMENT)
    if experiment is None:
        return
    where = {"kind": str(RunKind.SIMULATION)}
    for run, texts in store.read(experiment.experiment_id, where=where, texts=[_TEXT_KEY], limit=limit):
        if _TEXT_KEY in texts:
            yield run, json.loads(texts[_TEXT_KEY])


def read_simulation(store: RunStore, run_id: str) -> dict[str, Any] | None:
    """Return the JSON of one simulation; None if the run is not a simulation."""
    _, texts = store.get(run_id)
    return json.loads(texts[_TEXT_KEY]) if _TEXT_KEY in texts else None
