"""Judging with the real commands as subprocesses, on 48 cells of a real collect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tipbench as package
from support.command import tipbench, tipbench_json
from support.experiments import find_experiment
from support.judging import SheetDriver, fill, fill_csv, items_of, metrics_of
from support.scripted_ollama import ScriptedOllama
from tipbench.judge.sheet_file import unescape_cell
from tipbench.judge.sheet_store import ItemKind, StoredSheet, find_sheet
from tipbench.record.mlflow import MlflowStore

pytestmark = pytest.mark.process

EXPERIMENT = "tip-bench-flow-judging"
MODELS = ("zebra-unmistakable:135m", "okapi-unmistakable:1b")
PROMPTS = ("marmalade-neutral", "trombone-mentor", "rhubarb-shots")
SUITE = "quagga"
CELLS = 48


@dataclass(frozen=True)
class CollectedExperiment:
    """The experiment, its MLflow, and the suite of its collect."""

    driver: SheetDriver
    url: str
    suite: Path

    def stored_sheet(self, sheet: str) -> StoredSheet:
        found = find_sheet(self.driver.store, self.driver.experiment, sheet)
        assert found is not None
        return found

    def export(self, home: Path, out: Path, *options: str) -> dict[str, Any]:
        """Write a sheet with the real command; only the export needs the suite."""
        where = ("--experiment", EXPERIMENT, "--mlflow-url", self.url)
        tipbench("judge", "export", *where, "--out", str(out), *options, home=home)
        return dict(json.loads(out.read_text())) if out.suffix == ".json" else {}

    def apply(self, home: Path, file: Path, *options: str) -> dict[str, Any]:
        return dict(tipbench_json("judge", "apply", str(file), "--mlflow-url", self.url, *options, home=home))


@pytest.fixture(scope="module")
def collected(mlflow_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectedExperiment]:
    """48 answers whose models, prompts and suite have unmistakable names."""
    suite = tmp_path_factory.mktemp("suite")
    suite.joinpath("suite.toml").write_text(f'name = "{SUITE}"\ntitle = "As tips"\nextends = "tips"\n')
    suite.joinpath("prompts").mkdir()
    originals = Path(package.__file__).parent / "suites" / "tips" / "prompts"
    for name, original in zip(PROMPTS, sorted(originals.glob("*.md")), strict=True):
        suite.joinpath("prompts", f"{name}.md").write_text(original.read_text())
    with ScriptedOllama(MODELS) as server:
        options = (
            *("--models", ",".join(MODELS), "--prompts", ",".join(PROMPTS), "--suite", str(suite)),
            *("--experiment", EXPERIMENT, "--n-tips", "3", "--num-predict", "256"),
            *("--ollama-url", server.url, "--mlflow-url", mlflow_url),
        )
        tipbench("collect", *options, home=tmp_path_factory.mktemp("home"))
    with MlflowStore(mlflow_url) as store:
        yield CollectedExperiment(SheetDriver(store, find_experiment(store, EXPERIMENT)), mlflow_url, suite)


def test_a_sheet_of_real_cells_does_not_reveal_their_origin(
    collected: CollectedExperiment, home: Path, tmp_path: Path
) -> None:
    needles = {"unmistakable", "zebra", "okapi", "marmalade", "trombone", "rhubarb", SUITE}
    needles |= {"sha256:", "ollama", "latency"}
    for run in collected.driver.cells().values():
        needles |= {run.run_id, *(run.tags[name] for name in ("cell_key", "conditions", "collection", "prompt_hash"))}
        needles |= {run.params["model_digest"], run.params["model_digest"].removeprefix("sha256:")[:12]}
        needles |= {run.tags["scenario_hash"], run.tags["cell_seed"]}
    assert len(needles) > 100, sorted(needles)
    out = tmp_path / "sheet.json"
    raw = collected.export(home, out, "--judge", "blind", "--suite", str(collected.suite))
    table = tmp_path / "sheet.csv"
    collected.export(home, table, "--sheet", raw["sheet"], "--format", "csv")
    for path in (out, table):
        text = path.read_text().lower()
        assert [needle for needle in needles if needle.lower() in text] == []
    assert {len(item["item"]) for item in raw["items"]} == {12}
    assert {frozenset(item) for item in raw["items"]} == {
        frozenset(("item", "sha256", "scenario", "format_ok", "tips"))
    }, "a hidden item has the same keys as any other"
    hidden = [entry for entry in collected.stored_sheet(raw["sheet"]).entries if entry.kind is ItemKind.CONTROL]
    assert sum(len(entry.controls) for entry in hidden) >= 40


def test_the_round_trip_of_two_judges_on_several_machines(
    collected: CollectedExperiment, home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "anna.json"
    sheet = collected.export(home, out, "--judge", "anna", "--suite", str(collected.suite))["sheet"]
    stored_sheet = collected.stored_sheet(sheet)
    raw = fill(stored_sheet)
    filled = tmp_path / "filled.json"
    filled.write_text(json.dumps(raw))

    other_home = tmp_path / "other-home"
    before = collected.driver.everything()
    trial = collected.apply(other_home, filled, "--dry-run")
    assert len(trial["changes"]) == len(raw["items"])
    assert collected.driver.everything() == before

    done = collected.apply(other_home, filled)
    assert (done["status"], done["applied"]) == ("applied", len(raw["items"]))
    assert (done["unfinished"], done["errors"]) == (0, [])
    cells = collected.driver.cells()
    assert len(cells) == CELLS
    assert {run.tags["judge_pending"] for run in cells.values()} == {"false"}
    for run_id, item in items_of(raw, stored_sheet).items():
        numbers = metrics_of(item)
        assert {name: cells[run_id].metrics[name] for name in numbers} == pytest.approx(numbers)
    rows = tipbench_json("experiments", "--mlflow-url", collected.url, home=other_home)
    counts = {row["experiment"]: row for row in rows}
    assert (counts[EXPERIMENT]["judged"], counts[EXPERIMENT]["pending"]) == (CELLS, 0)

    before = collected.driver.everything()
    again = collected.apply(tmp_path / "third", filled)
    assert again["changed"] == 0
    assert collected.driver.everything() == before
    copy = tmp_path / "copy.json"
    collected.export(tmp_path / "third", copy, "--sheet", sheet)
    assert copy.read_bytes() == out.read_bytes()

    _apply_second_judge(collected, home, tmp_path, other_home)


def _apply_second_judge(collected: CollectedExperiment, home: Path, tmp_path: Path, other_home: Path) -> None:
    """Apply a second judge's CSV sheet of shared cells: agreement is computed, and the mean counts."""
    table = tmp_path / "ben.csv"
    collected.export(home, table, "--judge", "ben", "--format", "csv", "--suite", str(collected.suite))
    text = table.read_bytes().decode()
    sheet = next(line.split('","')[4] for line in text.splitlines() if line.startswith('"about","sheet"'))
    stored_sheet = collected.stored_sheet(unescape_cell(sheet))
    shared = [entry.run_id for entry in stored_sheet.entries if entry.kind is ItemKind.CELL]
    assert len(shared) == 12, "a fifth of 48, in whole scenarios"
    before = {run_id: run.metrics["composite"] for run_id, run in collected.driver.cells().items()}
    raw = fill(stored_sheet, seed=2)
    table.write_text(fill_csv(text, raw, delimiter="\t"), newline="")
    assert collected.apply(other_home, table)["status"] == "applied"

    after = collected.driver.cells()
    given = items_of(raw, stored_sheet)
    for run_id, composite in before.items():
        both = (composite + metrics_of(given[run_id])["composite"]) / 2 if run_id in given else composite
        assert after[run_id].metrics["composite"] == pytest.approx(both)
    where = ("--experiment", EXPERIMENT, "--mlflow-url", collected.url)
    status = tipbench_json("judge", "status", *where, home=other_home)
    assert status["twice"] == 12
    assert all(-1 <= status["alpha"][name] < 0.8 for name in ("relevance", "actionability", "tone"))
    judges = {judge["judge"]: judge["cells"] for judge in status["judges"]}
    assert (judges["anna"], judges["ben"]) == (48, 12)
