"""The whole product as a team uses it: every step is one command with a known result.

Three models, two prompts, eight scenarios. On every scale alpha's answers get two points more than beta's and three
more than gamma's; its two prompts get the same. So alpha must lead and its two prompts must tie; the duels, which
prefer one of them, must not change that.
"""

from __future__ import annotations

import csv
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from support.command import tipbench
from support.experiments import find_experiment
from support.judging import fill, items_of
from support.scripted_ollama import ScriptedOllama
from tipbench.judge.duels import find_duel
from tipbench.judge.sheet_store import find_sheet
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun

pytestmark = pytest.mark.process

MODELS, PROMPTS = ("alpha:1b", "beta:1b", "gamma:1b"), ("v1", "v2-mentor")
MAY, JUNE = "tip-bench-whole-may", "tip-bench-whole-june"
ALPHA, MENTOR, BETA = "alpha:1b/v1", "alpha:1b/v2-mentor", "beta:1b/v1"
LEVELS = {"alpha:1b": 4, "beta:1b": 2, "gamma:1b": 1}
BOARD_KEYS = {
    *("experiment", "suite", "rubric", "conditions", "judges", "provisional", "baseline", "verdict", "standings"),
    *("attribution", "duels"),
}


def true_score(run: StoredRun, number: int) -> int:
    """The score of a tip on every scale: its model's level, or one more by a fixed random draw."""
    coin = random.Random(f"{run.params['model']}{run.params['prompt_version']}{run.params['scenario']}{number}")
    return LEVELS[run.params["model"]] + coin.randint(0, 1)


@dataclass(frozen=True)
class Team:
    """Runs commands on a shared MLflow."""

    home: Path
    folder: Path
    url: str

    def run(self, *arguments: str, code: int = 0) -> CompletedProcess[str]:
        done = tipbench(*arguments, "--mlflow-url", self.url, home=self.home, check=False)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    def store(self) -> MlflowStore:
        return MlflowStore(self.url)

    def collect(self, ollama: str, experiment: str, models: str, **options: str) -> None:
        named = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
        self.run(
            *("collect", "--experiment", experiment, "--models", models, "--prompts", ",".join(PROMPTS)),
            *("--ollama-url", ollama, "--n-tips", "3", "--num-predict", "256", *named),
        )

    def judge(self, experiment: str, name: str, harsh: int = 0) -> dict[str, Any]:
        """Export a sheet, fill it with the tips' scores and apply it; returns the output of apply."""
        file = self.folder / f"{experiment}-{name}.json"
        self.run("judge", "export", "--experiment", experiment, "--judge", name, "--out", str(file))
        sheet = json.loads(file.read_text("utf-8"))["sheet"]
        with self.store() as store:
            found = find_experiment(store, experiment)
            judging = find_sheet(store, found, sheet)
            cells = {run.run_id: run for run in store.search(found.experiment_id, where={"kind": "cell"})}
        assert judging is not None
        raw = fill(judging)
        for run_id, item in items_of(raw, judging).items():
            for number, tip in enumerate(item["tips"]):
                score = max(1, true_score(cells[run_id], number) - harsh)
                tip["scores"] = dict.fromkeys(tip["scores"], score)
        file.write_text(json.dumps(raw), "utf-8")
        return dict(self.json("judge", "apply", str(file)))

    def judge_duels(self, experiment: str, name: str, winner: str) -> dict[str, Any]:
        """Export the duels, let one prompt win all of them and apply them; returns the output of apply."""
        file = self.folder / "duels.json"
        self.run("judge", "duel", "--experiment", experiment, "--judge", name, "--out", str(file))
        raw = json.loads(file.read_text("utf-8"))
        with self.store() as store:
            key = find_duel(store, find_experiment(store, experiment), raw["sheet"])
        assert key is not None
        for item in raw["items"]:
            item["winner"] = "ab"[[key.pairs[run][1] for run in key.sides[item["item"]]].index(winner)]
        file.write_text(json.dumps(raw), "utf-8")
        return dict(self.json("judge", "apply", str(file)))


def pair_name(row: dict[str, Any]) -> str:
    return f"{row['model']}/{row['prompt_version']}"


@pytest.fixture
def team(home: Path, tmp_path: Path, real_mlflow_url: str) -> Team:
    return Team(home, tmp_path, real_mlflow_url)


def test_from_collect_to_a_decision(team: Team) -> None:
    with ScriptedOllama(MODELS) as ollama:
        team.collect(ollama.url, MAY, ",".join(MODELS))
        team.collect(ollama.url, JUNE, "alpha:1b", temperature="0.3")
    _check_that_nothing_is_claimed_before_judging(team)
    assert team.judge(MAY, "anna")["status"] == "applied"
    assert team.judge(MAY, "ben", harsh=1)["status"] == "applied"

    board = team.json("compare", MAY)
    _check_the_ranking(board)
    leader = _check_that_every_format_has_the_same_numbers(team, board)
    _check_other_comparisons(team)
    _check_the_gate(team)

    other = MENTOR if leader == ALPHA else ALPHA
    assert team.judge_duels(MAY, "anna", winner=other.rpartition("/")[2])["status"] == "applied"
    after = team.json("compare", MAY)
    assert pair_name(after["duels"]["winner"]) == other
    assert after["verdict"]["text"].startswith(board["verdict"]["text"])
    assert f"{other} wins the duels between the tied rows; duels do not change ranks" in after["verdict"]["text"]
    assert {**after, "duels": None, "verdict": None} == {**board, "duels": None, "verdict": None}

    _check_the_decision(team, leader, other)
    _check_june_against_may(team)
    with team.store() as store:
        boards = list(store.search(find_experiment(store, MAY).experiment_id, where={"kind": "leaderboard"}))
    texts = {run.tags["mlflow.note.content"] for run in boards}
    assert {board["verdict"]["text"], after["verdict"]["text"]} <= texts
    assert len({run.tags["tipbench.record"] for run in boards}) == len(boards), "the same board is kept once"


def _check_that_nothing_is_claimed_before_judging(team: Team) -> None:
    nothing = team.json("compare", MAY)
    assert (nothing["verdict"]["leader"], nothing["verdict"]["decided"]) == (None, False)
    assert {row["composite"] for row in nothing["standings"]} == {None}
    team.run("gate", "--experiment", MAY, "--candidate", MENTOR, "--baseline", ALPHA, code=3)
    team.run("compare", "tip-bench-whole-nosuch", code=3)
    team.run("compare", "whole", code=2)


def _check_the_ranking(board: dict[str, Any]) -> None:
    assert set(board) >= BOARD_KEYS
    verdict = board["verdict"]
    assert board["judges"] == ["anna", "ben"]
    assert {pair_name(verdict["leader"]), *map(pair_name, verdict["tied_with_leader"])} == {ALPHA, MENTOR}
    assert verdict["decided"] is False
    assert verdict["scenarios_needed"] is None, "too close to call"
    rows = board["standings"]
    assert [row["model"] for row in rows] == ["alpha:1b"] * 2 + ["beta:1b"] * 2 + ["gamma:1b"] * 2
    assert sum(row["p_best"] for row in rows) == pytest.approx(1)
    assert rows[0]["p_best"] + rows[1]["p_best"] > 0.99
    assert all(row["diff_to_leader"]["p"] <= 0.05 for row in rows[2:])
    assert {(row["judged"], row["total"], row["failed"]) for row in rows} == {(8, 8, 0)}
    assert board["attribution"]["model"] > 0.7
    assert board["attribution"]["prompt"] < 0.05
    assert sum(board["attribution"].values()) == pytest.approx(1)


def _check_that_every_format_has_the_same_numbers(team: Team, board: dict[str, Any]) -> str:
    page, svg, png = (team.folder / name for name in ("report.html", "forest.svg", "forest.png"))
    table = team.run("compare", MAY, "--html", str(page), "--plot", str(svg)).stdout
    assert f"{pair_name(board['verdict']['leader'])} leads" in table.partition("\n\n")[0]
    assert "What explains the differences: model " in table
    text = page.read_text("utf-8")
    assert all(name in text for name in (*MODELS, *PROMPTS))
    assert "<script src" not in text
    assert ET.fromstring(svg.read_text("utf-8")).tag.endswith("svg")  # noqa: S314 - our own
    rows = list(csv.DictReader(io.StringIO(team.run("compare", MAY, "--format", "csv").stdout)))
    assert [float(row["composite"]) for row in rows] == [row["composite"] for row in board["standings"]]
    assert [row["standing"] for row in rows] == ["leader", "tied", *["separated"] * 4]
    markdown = team.run("compare", MAY, "--format", "md", "--plot", str(png)).stdout
    assert markdown.count("\n| ") == 8
    assert png.read_bytes().startswith(b"\x89PNG")
    return pair_name(board["verdict"]["leader"])


def _check_other_comparisons(team: Team) -> None:
    models = team.json("compare", MAY, "--by", "model", "--baseline", "gamma:1b")
    assert pair_name(models["verdict"]["leader"]) == "alpha:1b/*"
    assert models["verdict"]["decided"], "two points on every scale is a large effect"
    assert [row["diff_to_baseline"] is None for row in models["standings"]] == [False, False, True]
    assert models["standings"][0]["diff_to_baseline"]["mean"] == pytest.approx(9, abs=1.5)
    personas = team.json("compare", MAY, "--cluster", "persona")
    assert personas["verdict"]["decided"] is False
    assert "over 4 personas" in personas["verdict"]["text"]
    one_prompt = team.json("compare", MAY, "--where", "prompt=v1", "--judge", "anna")
    assert (pair_name(one_prompt["verdict"]["leader"]), one_prompt["verdict"]["decided"]) == (ALPHA, True)
    assert one_prompt["judges"] == ["anna"]


def _check_the_gate(team: Team) -> None:
    def run_gate(candidate: str, *options: str, code: int) -> dict[str, Any]:
        arguments = ("gate", "--experiment", MAY, "--candidate", candidate, "--baseline", ALPHA)
        return dict(team.json(*arguments, *options, code=code))

    junit = team.folder / "gate.xml"
    assert run_gate(MENTOR, "--margin", "3", code=0)["outcome"] == "not worse"
    assert run_gate(BETA, "--junit", str(junit), code=1)["outcome"] == "worse"
    assert list(ET.parse(junit).getroot().iter("failure"))  # noqa: S314 - our own
    assert run_gate(MENTOR, "--margin", "0", "--strict", code=1)["outcome"] == "undecided"
    team.run("gate", "--experiment", MAY, "--candidate", "nosuch", "--baseline", ALPHA, code=2)


def _check_the_decision(team: Team, leader: str, other: str) -> None:
    file = team.folder / "decision.md"
    arguments = ("decide", "--experiment", MAY, "--choose", leader, "--because", "It leads.", "--out", str(file))
    decision = team.json(*arguments)
    assert (decision["standing"], decision["file"]) == ("leader", str(file))
    text = file.read_text("utf-8")
    assert "It leads." in text
    assert other in text, "the tied row is part of the record"
    team.run(*arguments, code=2)


def _check_june_against_may(team: Team) -> None:
    team.run("compare", MAY, JUNE, code=3)
    assert team.judge(JUNE, "anna", harsh=2)["status"] == "applied"
    found = team.json("compare", MAY, JUNE)
    assert found["experiments"] == [MAY, JUNE]
    assert [pair_name(row) for row in found["pairs"]] == [ALPHA, MENTOR]
    for row in found["pairs"]:
        assert row["n_scenarios"] == 8
        assert row["diff"]["mean"] < -3
        assert row["diff"]["p"] <= 0.05
    compared = team.run("compare", MAY, JUNE)
    assert compared.stdout.startswith(f"Worse in {JUNE}: {ALPHA}, {MENTOR}")
    assert "temperature 0.7 → 0.3" in compared.stderr
