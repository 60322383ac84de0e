"""docs/recording.md lists exactly the names that are recorded in MLflow."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from invoke_command import invoke

from support.experiments import find_experiment
from support.judging import fill
from support.scripted_ollama import Fault, ModelSpec, ScriptedOllama, tips
from tipbench.generate.engine import FailureKind
from tipbench.judge.sheet_store import find_sheet
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import RunKind

PAGE = Path(__file__).parents[2] / "docs" / "recording.md"
EXPERIMENT = "tip-bench-recording"
NOT_RECORDED_HERE = {("cell", "Tags", "foreign_resident")}  # needs a second client: see the flow tests

Names = dict[tuple[str, str], set[str]]  # (kind, heading) → names


def documented_names() -> Names:
    names: Names = defaultdict(set)
    kind = heading = ""
    for line in PAGE.read_text("utf-8").splitlines():
        if found := re.match(r"## `kind=(\w+)`", line):
            kind, heading = found[1], ""
        elif found := re.match(r"### (\w+)", line):
            heading = found[1]
        elif kind and heading != "States" and (found := re.match(r"\| `([^`]+)` \|", line)):
            names[kind, heading].add(found[1])
    return names


def reply(model: str, messages: Sequence[Mapping[str, object]], options: Mapping[str, object], nth: int) -> str:
    return "Sorry." if nth == 1 else tips(model, messages, options, nth)


@pytest.fixture
def recorded_names(mlflow_url: str, tmp_path: Path) -> Names:
    """A collect with an answer, an answer without tips, a failure, a refusal; one that replaces the failure; judges."""
    faults = [Fault("error_line", value=3, calls=(2,))]
    with ScriptedOllama(["alpha:135m", ModelSpec("x:e2b", params=4_460_000_000)], faults, reply=reply) as server:
        options = (
            *("--models", "alpha:135m,x:e2b", "--skip-refused"),
            *("--n-tips", "2", "--num-predict", "64", "--ollama-url", server.url),
            *("--mlflow-url", mlflow_url, "--experiment", EXPERIMENT),
        )
        assert [invoke("collect", *options, "--prompts", "v1").code for _ in range(2)] == [1, 0]
        judge_sheet(mlflow_url, tmp_path, "anna")
        assert invoke("collect", *options).code == 0
    judge_sheet(mlflow_url, tmp_path, "anna")  # the sheet now repeats earlier answers
    judge_sheet(mlflow_url, tmp_path, "ben", "--all")
    rules = invoke("judge", "run", "--with", "rules", "--experiment", EXPERIMENT, "--mlflow-url", mlflow_url)
    assert rules.code == 0, rules.stderr
    compare_and_decide(mlflow_url, tmp_path)
    names: Names = defaultdict(set)
    with MlflowStore(mlflow_url) as store:
        experiment = find_experiment(store, EXPERIMENT)
        assert set(experiment.tags) == {"tipbench.design", "tipbench.revision"}
        for found in store.search(experiment.experiment_id, where={}):
            run, texts = store.get(found.run_id)
            for heading, values in zip(
                ("Params", "Metrics", "Tags", "Texts"), (run.params, run.metrics, run.tags, texts), strict=True
            ):
                if values:
                    names[run.tags["kind"], heading] |= {re.sub(r"hidden_\w+", "hidden_…", name) for name in values}
    return names


def judge_sheet(mlflow_url: str, folder: Path, name: str, *options: str) -> None:
    """Export a sheet, fill it completely and apply it; any drift is accepted."""
    where = ("--experiment", EXPERIMENT, "--mlflow-url", mlflow_url)
    out = folder / f"{name}.json"
    assert invoke("judge", "export", *where, "--judge", name, "--seed", "1", "--out", str(out), *options).code == 0
    with MlflowStore(mlflow_url) as store:
        experiment = find_experiment(store, EXPERIMENT)
        sheet = json.loads(out.read_text("utf-8"))["sheet"]
        judging = find_sheet(store, experiment, sheet)
    assert judging is not None
    filled = fill(judging, judge=name)
    for item in filled["items"]:  # equal answers, so that no row leads by chance; their tips differ
        for score, tip in zip((2, 4), item["tips"], strict=False):
            tip["scores"] = dict.fromkeys(tip["scores"], score)
    out.write_text(json.dumps(filled), "utf-8")
    applied = invoke("judge", "apply", str(out), "--mlflow-url", mlflow_url, "--accept-drift", "a test")
    assert applied.code == 0, applied.stderr
    out.unlink()


def compare_and_decide(mlflow_url: str, folder: Path) -> None:
    """Record a board, duels of its tied pairs, and a decision for a pair that does not lead."""
    where = ("--experiment", EXPERIMENT, "--mlflow-url", mlflow_url)
    compared = invoke("compare", *where, "--json")
    assert compared.code == 0, compared.stderr
    last = json.loads(compared.stdout)["standings"][-1]
    out = folder / "duels.json"
    assert invoke("judge", "duel", *where, "--judge", "anna", "--seed", "1", "--out", str(out)).code == 0
    duels = json.loads(out.read_text("utf-8"))
    for item in duels["items"]:
        item["winner"] = "a"
    out.write_text(json.dumps(duels), "utf-8")
    assert invoke("judge", "apply", str(out), "--mlflow-url", mlflow_url).code == 0
    pair = f"{last['model']}/{last['prompt_version']}"
    decided = invoke("decide", *where, "--choose", pair, "--because", "a test", "--out", str(folder / "choice.md"))
    assert decided.code == 0, decided.stderr


def test_the_page_names_exactly_what_is_recorded(recorded_names: Names) -> None:
    page = documented_names()
    for kind, heading, name in NOT_RECORDED_HERE:
        recorded_names[kind, heading].add(name)
    assert set(page) == set(recorded_names)
    for place, names in recorded_names.items():
        assert page[place] == names, place


def test_the_page_names_every_kind_of_run() -> None:
    text = PAGE.read_text("utf-8")
    assert all(f"`{kind}`" in text for kind in RunKind)


def test_the_page_names_every_failure_that_can_be_recorded() -> None:
    row = re.search(r"\| `failure` \| (.*) \|", PAGE.read_text("utf-8"))
    assert row is not None
    assert set(re.findall(r"`(\w+)`", row[1])) == set(FailureKind) - {FailureKind.CANCELLED}
