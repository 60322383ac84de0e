"""A board is shown before it is recorded, so users who may only read MLflow get it too."""

from __future__ import annotations

import pytest
from invoke_command import invoke

from support.judging import record_cells
from tipbench.errors import MlflowError
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import NewRun

EXPERIMENT = "tip-bench-read-only"


def refuse_write(_store: MlflowStore, _experiment_id: str, _run: NewRun, **_options: object) -> str:
    raise MlflowError("PERMISSION_DENIED: you may only read.")


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_board_that_cannot_be_recorded_is_shown_with_a_note(
    form: str, mlflow_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    with MlflowStore(mlflow_url) as store:
        record_cells(store, experiment=EXPERIMENT, prompts="v1", n_scenarios=1)
    monkeypatch.setattr(MlflowStore, "record", refuse_write)
    result = invoke("compare", EXPERIMENT, "--format", form)
    assert result.code == 0, result.stderr
    assert "Not judged yet" in result.stdout
    assert "alpha:135m" in result.stdout
    assert "note: the leaderboard could not be saved in MLflow (PERMISSION_DENIED: you may only read.)" in result.stderr
