"""Experiments and runs that were recorded in MLflow."""

from __future__ import annotations

from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun
from tipbench.record.store import Experiment


def find_experiment(store: MlflowStore, name: str) -> Experiment:
    """Return an experiment, which must exist."""
    found = store.experiment(name)
    assert found is not None, f"no experiment {name}"
    return found


def recorded_runs(mlflow_url: str, experiment: str, kind: str = "cell") -> list[StoredRun]:
    """Return the runs of one kind, newest first; none if there is no such experiment."""
    with MlflowStore(mlflow_url) as store:
        found = store.experiment(experiment)
        return [] if found is None else list(store.search(found.experiment_id, where={"kind": kind}))
