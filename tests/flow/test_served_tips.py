"""From collect to served tips and their rewards: every step is a command, the last ones are HTTP requests."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from support.command import tipbench, tipbench_json
from support.policy_site import ServerChooser, serve_process
from support.simulated_requests import drive
from tipbench.simulate.world import World

pytestmark = pytest.mark.process

EXPERIMENT, PAIR = "tip-bench-served", "baseline:template/v1"
SMALL = ("--seeds", "1", "--users", "800", "--rounds", "100")
WORLD = World("standard", 7, 12, 10)


def test_from_collect_to_an_off_policy_check(
    home: Path, weights_home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    home.mkdir()
    (home / "models").symlink_to(weights_home / "models")
    request.addfinalizer(lambda: tipbench("mlflow", "down", home=home))  # the first command starts it
    catalogue = tmp_path / "tips.toml"

    def run(*arguments: str) -> Any:
        return tipbench_json(*arguments, home=home)

    models = "baseline:template,embedded:smollm2:135m"
    grid = ("--prompts", "v1", "--n-scenarios", "2", "--n-tips", "3", "--num-predict", "48")
    tipbench("collect", "--experiment", EXPERIMENT, "--models", models, *grid, home=home)
    tipbench("judge", "run", "--experiment", EXPERIMENT, "--with", "rules", home=home)
    board = run("compare", EXPERIMENT)
    assert {row["model"] for row in [*board["standings"], *board["references"]]} == set(models.split(","))

    built = run("catalogue", "build", "--experiment", EXPERIMENT, "--pair", PAIR, "--out", str(catalogue))
    assert (built["provisional"], 0 < built["tips"] <= 6) == (True, True)

    simulated = run("simulate", "--policies", "egreedy/v1,egreedy/v1+bias,egreedy/v3", *SMALL)
    gains = {policy["name"]: policy["gain"] for policy in simulated["policies"]}
    assert gains["egreedy/v3"]["ci_low"] > gains["egreedy/v1+bias"]["ci_high"], "not from an intercept alone"
    refused = tipbench("promote", "apply", "--candidate", "egreedy/v3", home=home, check=False)
    assert (refused.returncode, "promote check" in refused.stderr) == (2, True)
    verdict = run("promote", "check", "--candidate", "egreedy/v3", "--simulation-only", *SMALL)
    assert (verdict["passed"], verdict["simulation_only"], len(verdict["clauses"])) == (True, True, 3)
    assert run("promote", "apply", "--candidate", "egreedy/v3")["candidate"] == "egreedy/v3"

    with serve_process(home, "--catalogue", str(catalogue)) as (client, process):
        served = client.post("/recommend", json={"user_id": "ana"}).json()
        assert (served["policy"], len(served["ranking"])) == ("egreedy/v3", built["tips"])
        assert served["tip"] in catalogue.read_text("utf-8")
        reward = {"user_id": "ana", "event_id": served["event_id"], "action": "completed", "dwell_ms": 42_000}
        assert client.post("/reward", json=reward).json() == {"applied": True, "reward": 1.0, "late": False, "n": 1}
        drive(WORLD, ServerChooser(client))  # users with their own tasks
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    evaluate = ("events", "evaluate", "--catalogue", str(catalogue), "--policy")
    own, other = run(*evaluate, "egreedy/v3"), run(*evaluate, "egreedy/v1")
    assert own["decisions"] == other["decisions"] == len(WORLD) * WORLD.n_rounds + 1
    assert own["estimates"]["SNIPS"] == pytest.approx(own["logged_reward"]), "its own log values a policy at its mean"
    assert other["weights"]["effective_sample"] < own["weights"]["effective_sample"]
    assert {row["scale"] for row in own["validity"]} == {"composite", "relevance", "actionability", "tone"}
    assert {row["correlation"] for row in own["validity"]} == {None}, "fewer than 30 tips are not enough data"
    checked = tipbench("promote", "check", "--candidate", "egreedy/v1", *SMALL, home=home, check=False)
    assert (checked.returncode, "egreedy/v1 may not replace egreedy/v3: clauses a" in checked.stdout) == (1, True)
