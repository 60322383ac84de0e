"""`tipbench gate`: exit codes, the reason on one line, and the reports for CI."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from invoke_command import CommandResult, invoke, usage_error

from support.judged import judge_at
from support.judging import SheetDriver, record_cells
from support.mlflow_server import free_port
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun

EXPERIMENT, FRESH = "tip-bench-gated", "tip-bench-gated-fresh"
GOOD, SAME, BAD = "good:1b/v1", "good:1b/v2-mentor", "bad:1b/v1"


def level(run: StoredRun, number: int) -> int:
    """The good model's prompts lead in turn, the bad model is much worse; scores vary over the scenarios."""
    wave = sum(map(ord, run.params["scenario"])) % 2
    if run.params["model"] == "bad:1b":
        return 1 + wave
    turn = run.params["prompt_version"] == "v2-mentor" and number == wave
    return 3 + wave + (0 if wave or not turn else 1)


@pytest.fixture(scope="module")
def filled_mlflow(mlflow_url: str) -> str:
    with MlflowStore(mlflow_url) as store:
        models = ("good:1b", "bad:1b")
        judge_at(
            SheetDriver(store, record_cells(store, models=models, experiment=EXPERIMENT, prompts="v1,v2-mentor")), level
        )
        record_cells(store, models=models, experiment=FRESH, prompts="v1")
    return mlflow_url


@pytest.fixture(autouse=True)
def use_filled_mlflow(filled_mlflow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", filled_mlflow)
    monkeypatch.setenv("TIPBENCH_EXPERIMENT", EXPERIMENT)


def gate(candidate: str, baseline: str, *options: str) -> CommandResult:
    return invoke("gate", "--candidate", candidate, "--baseline", baseline, *options)


def test_a_pair_that_is_not_worse_passes_with_one_line() -> None:
    result = gate(SAME, GOOD)
    assert result.code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"not worse: {SAME} − {GOOD} = ")
    assert "over 8 scenarios" in line


def test_a_worse_pair_fails() -> None:
    result = gate(BAD, GOOD)
    assert result.code == 1
    assert result.stdout.startswith(f"worse: {BAD} − {GOOD} = −")


def test_undecided_passes_with_a_warning_and_fails_if_strict() -> None:
    narrow = gate(SAME, GOOD, "--margin", "0")
    assert narrow.stdout.startswith("undecided: ")
    assert narrow.code == 0
    assert "warning: " in narrow.stderr
    strict = gate(SAME, GOOD, "--margin", "0", "--strict")
    assert strict.code == 1
    assert "--strict" not in strict.stderr


def test_json_has_everything() -> None:
    result = gate(BAD, GOOD, "--json", "--annotations")
    assert result.code == 1
    found = result.json
    assert (found["experiment"], found["outcome"], found["exit_code"], found["strict"]) == (
        EXPERIMENT, "worse", 1, False,
    )  # fmt: skip
    assert found["candidate"] == {"model": "bad:1b", "prompt_version": "v1"}
    assert set(found["difference"]) == {"mean", "ci_low", "ci_high", "p"}
    assert (found["margin"], found["n_scenarios"], found["scenarios_needed"]) == (1.0, 8, None)
    assert (found["failed"], found["pending"], found["baseline_scenarios"]) == (0, 0, 8)
    assert (found["judges"], found["rubric"].partition("@")[0]) == (["anna"], "tip-v1")
    assert found["conditions"]
    assert any(line.startswith("::error title=") for line in result.stderr.splitlines())


def test_annotations_are_on_separate_lines() -> None:
    assert gate(SAME, GOOD, "--annotations").stdout.splitlines()[0].startswith("::notice title=")
    assert gate(BAD, GOOD, "--annotations").stdout.splitlines()[0].startswith("::error title=")


def test_junit_is_written(tmp_path: Path) -> None:
    file = tmp_path / "gate.xml"
    assert gate(BAD, GOOD, "--junit", str(file)).code == 1
    root = ET.parse(file).getroot()  # noqa: S314 - our own
    (failure,) = root.iter("failure")
    assert (failure.get("message") or "").startswith("worse: ")


def test_provisional_scores_only_are_not_enough(tmp_path: Path) -> None:
    file = tmp_path / "gate.xml"
    options = ("--experiment", FRESH, "--junit", str(file))
    result = gate(BAD, GOOD, *options)
    assert (result.code, result.stdout) == (3, "")
    assert "not enough data: no judge has scored" in result.stderr
    assert "`tipbench judge export` writes a sheet." in result.stderr
    assert list(ET.parse(file).getroot().iter("error"))  # noqa: S314
    found = gate(BAD, GOOD, *options, "--json")
    assert (found.code, found.json["outcome"], found.json["difference"]) == (3, "not enough data", None)


def test_one_shared_scenario_is_not_enough() -> None:
    result = gate(SAME, GOOD, "--where", "scenario=nurse@morning")
    assert result.code == 3
    assert "both judged in 1 scenario; at least 6 are needed" in result.stderr


def test_no_cell_at_all_is_not_enough() -> None:
    assert gate(SAME, GOOD, "--where", "scenario=nobody@never").code == 3
    result = gate(SAME, GOOD, "--experiment", "tip-bench-nosuch", "--json")
    assert (result.code, result.json["outcome"]) == (3, "not enough data")


def test_a_judge_who_scored_nothing_is_not_enough() -> None:
    assert gate(SAME, GOOD, "--judge", "anna").code == 0
    assert gate(SAME, GOOD, "--judge", "ben").code == 3


def test_invalid_options_are_usage_errors() -> None:
    for options, message in [
        (("--candidate", "nosuch:1b/v1", "--baseline", GOOD), f"Available: {BAD}, bad:1b/v2-mentor, {GOOD}"),
        (("--candidate", "nosuch", "--baseline", GOOD), "--candidate takes MODEL/PROMPT (got 'nosuch')"),
        (("--candidate", GOOD, "--baseline", "/"), "--baseline takes MODEL/PROMPT"),
        (("--candidate", GOOD, "--baseline", GOOD), "the same pair"),
        (("--candidate", GOOD, "--baseline", BAD, "--margin", "-1"), "--margin must be 0 or more (got -1)"),
        (("--candidate", GOOD, "--baseline", BAD, "--margin", "nan"), "--margin must be 0 or more"),
        (("--candidate", GOOD, "--baseline", BAD, "--where", "x"), "--where takes key=value"),
        (("--candidate", GOOD, "--baseline", BAD, "--junit", "no/such/folder/x.xml"), "--junit takes a file"),
        (("--candidate", GOOD, "--baseline", BAD, "--judge", "rules"), "--judge takes a name"),
        (("--candidate", GOOD), "--baseline"),
        (
            ("--candidate", GOOD, "--baseline", BAD, "--where", "suite=a", "--where", "suite=b"),
            "--where has two values for suite, a and b",
        ),
    ]:
        assert message in usage_error("gate", *options)


def test_a_report_names_the_error_if_mlflow_is_unavailable(tmp_path: Path) -> None:
    file = tmp_path / "gate.xml"
    file.write_text("old")
    result = gate(SAME, GOOD, "--mlflow-url", f"http://127.0.0.1:{free_port()}", "--junit", str(file))
    assert result.code == 1
    (error,) = ET.parse(file).getroot().iter("error")  # noqa: S314
    assert "cannot be reached" in (error.get("message") or "")
