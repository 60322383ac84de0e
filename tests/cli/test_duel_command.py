"""`tipbench judge duel`, and `judge apply` of its sheets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from invoke_command import invoke, usage_error

from support.experiments import find_experiment
from support.judged import judge_at
from support.judging import SheetDriver, record_cells
from tipbench.cli.main import app
from tipbench.judge.duels import StoredDuelSheet, find_duel
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun

TIED, DECIDED, FRESH = "tip-bench-tied", "tip-bench-untied", "tip-bench-untouched"
MODELS = ("one:1b", "two:1b")


def tied_level(run: StoredRun, number: int) -> int:
    return 2 + random.Random(f"{run.params['model']}{run.params['scenario']}{number}").randint(0, 3)


def distinct_level(run: StoredRun, number: int) -> int:
    return (4 if run.params["model"] == "one:1b" else 1) + random.Random(run.params["scenario"]).randint(0, 1)


@pytest.fixture(scope="module")
def filled_mlflow(mlflow_url: str) -> str:
    with MlflowStore(mlflow_url) as store:
        for experiment, level in ((TIED, tied_level), (DECIDED, distinct_level), (FRESH, None)):
            driver = SheetDriver(store, record_cells(store, models=MODELS, experiment=experiment, prompts="v1"))
            if level is not None:
                judge_at(driver, level)
    return mlflow_url


@pytest.fixture(autouse=True)
def use_filled_mlflow(filled_mlflow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", filled_mlflow)
    monkeypatch.setenv("TIPBENCH_EXPERIMENT", TIED)


def export_duels(file: Path, *options: str) -> dict[str, Any]:
    result = invoke("judge", "duel", "--out", str(file), *options)
    assert result.code == 0, result.stderr
    assert result.stdout == ""
    raw: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return raw


def stored_sheet(url: str, raw: dict[str, Any]) -> StoredDuelSheet:
    with MlflowStore(url) as store:
        experiment = find_experiment(store, TIED)
        found = find_duel(store, experiment, raw["sheet"])
    assert found is not None
    return found


def fill(file: Path, raw: dict[str, Any], winners: dict[str, str]) -> None:
    for item in raw["items"]:
        item["winner"] = winners.get(item["item"], item["winner"])
    file.write_text(json.dumps(raw), "utf-8")


def test_duels_on_stdout_are_described_as_such() -> None:
    result = invoke("judge", "duel", "--out", "-", "--judge", "carl")
    assert json.loads(result.stdout)["judge"] == "carl"
    assert "scenarios on stdout" in result.stderr
    assert "`tipbench judge apply FILE`" in result.stderr


def test_exported_duels_are_applied_and_counted(tmp_path: Path, filled_mlflow: str) -> None:
    file = tmp_path / "duels.json"
    raw = export_duels(file, "--judge", "anna")
    assert (raw["format"], raw["judge"], len(raw["items"])) == ("tipbench-duel/1", "anna", 16)
    key = stored_sheet(filled_mlflow, raw)
    two = {item: "ab"[[key.pairs[run][0] for run in runs].index("two:1b")] for item, runs in key.sides.items()}
    fill(file, raw, two)
    dry = invoke("judge", "apply", str(file), "--dry-run", "--json").json
    assert (dry["dry_run"], len(dry["changes"])) == (True, 16)
    result = invoke("judge", "apply", str(file))
    assert result.code == 0, result.stderr
    assert "16 applied" in result.stdout
    assert "8 of 8 match-ups have the same winner in both orders" in result.stdout
    again = invoke("judge", "apply", str(file), "--json").json
    expected = {"status": "applied", "applied": 16, "unfinished": 0, "changed": 0, "errors": [], "drift": None}
    assert again | expected == again
    nothing = invoke("judge", "duel", "--judge", "anna", "--out", str(tmp_path / "more.json"))
    assert (nothing.code, (tmp_path / "more.json").exists()) == (3, False)


def test_part_of_the_duels_may_be_filled(tmp_path: Path) -> None:
    file = tmp_path / "duels.json"
    raw = export_duels(file, "--limit", "4", "--judge", "ben")
    assert len(raw["items"]) == 4
    fill(file, raw, {raw["items"][0]["item"]: "tie"})
    result = invoke("judge", "apply", str(file))
    assert "1 applied, 3 unfinished and still open" in result.stdout


def test_a_mistake_refuses_the_file_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "duels.json"
    raw = export_duels(file, "--judge", "cleo")
    fill(file, raw, {raw["items"][0]["item"]: "left", raw["items"][1]["item"]: "a"})
    result = invoke("judge", "apply", str(file))
    assert (result.code, result.stdout) == (1, "")
    assert (
        f"item {raw['items'][0]['item']}, winner: expected 'a', 'b' or 'tie', or null; found 'left'." in result.stderr
    )
    result = invoke("judge", "apply", str(file), "--json")
    assert (result.code, result.json["status"], result.json["errors"][0]["field"]) == (1, "refused", "winner")


def test_duels_are_written_again_byte_for_byte(tmp_path: Path) -> None:
    file, copy = tmp_path / "duels.json", tmp_path / "copy.json"
    raw = export_duels(file, "--judge", "dora")
    export_duels(copy, "--sheet", raw["sheet"])
    assert copy.read_bytes() == file.read_bytes()
    assert "has no duel file 'nosuch'" in usage_error(
        "judge", "duel", "--sheet", "nosuch", "--out", str(tmp_path / "x")
    )


def test_filled_duels_are_backed_up_before_they_are_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "duels.json"
    raw = export_duels(file, "--judge", "emil")
    fill(file, raw, {raw["items"][0]["item"]: "a"})
    filled = file.read_bytes()
    export_duels(file, "--sheet", raw["sheet"])
    assert (tmp_path / "duels.json.1.old").read_bytes() == filled


def test_a_decided_board_has_no_duels(tmp_path: Path) -> None:
    result = invoke("judge", "duel", "--experiment", DECIDED, "--out", str(tmp_path / "x.json"))
    assert (result.code, result.stdout) == (3, "")
    assert "There are no duels in tip-bench-untied: no pairs are tied" in result.stderr


def test_an_unjudged_board_has_no_duels(tmp_path: Path) -> None:
    result = invoke("judge", "duel", "--experiment", FRESH, "--out", str(tmp_path / "x.json"))
    assert (result.code, result.stdout) == (3, "")
    assert "has no scores yet" in result.stderr


def test_duels_have_no_drift_to_accept(tmp_path: Path) -> None:
    file = tmp_path / "duels.json"
    export_duels(file, "--judge", "finn")
    assert "duels have no drift" in usage_error("judge", "apply", str(file), "--accept-drift", "because")


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--limit", "1"), "--limit"), (("--judge", "rules"), "--judge takes"), (("--experiment", "mine"), "tip-bench-")],
)
def test_invalid_options_are_usage_errors(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in usage_error("judge", "duel", "--out", str(tmp_path / "x.json"), *options)


def test_the_file_can_be_written_to_stdout(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    app(["judge", "duel", "--judge", "gina", "--out", "-"], standalone_mode=False)
    assert json.loads(capfdbinary.readouterr().out)["format"] == "tipbench-duel/1"
