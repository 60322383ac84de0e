"""`tipbench decide`: a decision becomes a run and a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoke_command import invoke, usage_error

from support.experiments import recorded_runs
from support.judged import judge_at
from support.judging import SheetDriver, record_cells
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun

EXPERIMENT, FRESH = "tip-bench-decided", "tip-bench-decided-fresh"
GOOD, BAD = "good:1b/v1", "bad:1b/v1"


def level(run: StoredRun, number: int) -> int:
    wave = sum(map(ord, run.params["scenario"])) % 2
    return (1 if run.params["model"] == "bad:1b" else 3) + (wave if number else 0)


@pytest.fixture(scope="module")
def filled_mlflow(mlflow_url: str) -> str:
    with MlflowStore(mlflow_url) as store:
        models = ("good:1b", "bad:1b")
        judge_at(SheetDriver(store, record_cells(store, models=models, experiment=EXPERIMENT, prompts="v1")), level)
        record_cells(store, models=models, experiment=FRESH, prompts="v1")
    return mlflow_url


@pytest.fixture(autouse=True)
def use_filled_mlflow(filled_mlflow: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", filled_mlflow)
    monkeypatch.setenv("TIPBENCH_EXPERIMENT", EXPERIMENT)
    monkeypatch.chdir(tmp_path)


def decisions(url: str) -> list[StoredRun]:
    return recorded_runs(url, EXPERIMENT, "decision")


def test_a_decision_is_a_run_and_a_file(filled_mlflow: str, tmp_path: Path) -> None:
    file = tmp_path / "choice.md"
    result = invoke("decide", "--choose", GOOD, "--because", "It leads.", "--out", str(file), "--json")
    assert result.code == 0, result.stderr
    found = result.json
    assert (found["chosen"], found["reason"]) == ({"model": "good:1b", "prompt_version": "v1"}, "It leads.")
    assert (found["standing"], found["file"]) == ("leader", str(file))
    with MlflowStore(filled_mlflow) as store:
        run, texts = store.get(found["run_id"])
    assert texts["artifact:decision.md"] == file.read_text("utf-8")
    assert json.loads(texts["artifact:leaderboard.json"]) == found["leaderboard"]
    assert run.params["model_digest"] == found["evidence"]["model_digest"] == "sha256:good:1b/1"
    assert run.tags["reason"] == "It leads."
    assert found["leaderboard"]["standings"][0]["relevance"] is not None


def test_deciding_again_is_another_decision(filled_mlflow: str, tmp_path: Path) -> None:
    before = len(decisions(filled_mlflow))
    for name in ("one.md", "two.md"):
        assert invoke("decide", "--choose", GOOD, "--because", "Still.", "--out", name).code == 0
    assert len(decisions(filled_mlflow)) == before + 2


def test_without_out_the_file_has_the_experiment_and_the_time_in_its_name(tmp_path: Path) -> None:
    result = invoke("decide", "--choose", GOOD, "--because", "It leads.")
    assert result.code == 0, result.stderr
    (file,) = tmp_path.glob("decision-*.md")
    assert file.name.startswith(f"decision-{EXPERIMENT}-2")
    assert result.stdout.startswith(f"decided: {GOOD} in {EXPERIMENT}, written to {file.name}\n")


def test_a_choice_that_does_not_lead_is_reported(tmp_path: Path) -> None:
    result = invoke("decide", "--choose", BAD, "--because", "Licence.", "--out", "-")
    assert result.code == 0
    assert result.stdout.startswith(
        "# Decision: bad:1b/v1\n\n> Licence.\n\n- bad:1b/v1 does not lead: it is clearly worse than good:1b/v1"
    )
    assert "does not lead" in result.stderr
    assert not list(tmp_path.glob("decision*"))


def test_a_provisional_board_is_reported() -> None:
    rules = invoke("judge", "run", "--with", "rules", "--experiment", FRESH)
    assert rules.code == 0, rules.stderr
    result = invoke(
        "decide", "--choose", GOOD, "--because", "Try it.", "--experiment", FRESH, "--out", "p.md", "--json"
    )
    assert result.json["provisional"] is True
    assert result.json["findings"][0].startswith("The scores are provisional: by rules")


def test_an_unknown_pair_is_refused_with_the_known_ones(filled_mlflow: str, tmp_path: Path) -> None:
    before = len(decisions(filled_mlflow))
    message = usage_error("decide", "--choose", "nosuch:1b/v1", "--because", "x")
    assert f"Available: {BAD} and {GOOD}." in message
    assert len(decisions(filled_mlflow)) == before
    assert not list(tmp_path.glob("decision*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--choose", GOOD, "--because", " "), "--because must have 1 to 2000 characters (got 0)"),
        (("--choose", GOOD, "--because", "x" * 2001), "(got 2001)"),
        (("--choose", "good", "--because", "x"), "--choose takes MODEL/PROMPT"),
        (("--choose", GOOD, "--because", "x", "--out", "no/such/x.md"), "--out takes a file"),
        (("--choose", GOOD), "--because"),
    ],
)
def test_invalid_options_are_usage_errors_before_anything_is_saved(
    options: tuple[str, ...], message: str, filled_mlflow: str
) -> None:
    before = len(decisions(filled_mlflow))
    assert message in usage_error("decide", *options)
    assert len(decisions(filled_mlflow)) == before


def test_an_earlier_decision_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "choice.md").write_text("mine")
    assert "--out must be a new file" in usage_error("decide", "--choose", GOOD, "--because", "x", "--out", "choice.md")
    assert (tmp_path / "choice.md").read_text() == "mine"


def test_nothing_recorded_is_not_enough_data() -> None:
    assert invoke("decide", "--choose", GOOD, "--because", "x", "--experiment", "tip-bench-nosuch").code == 3
