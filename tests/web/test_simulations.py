"""Pages and API of simulations and promotions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tipbench.jobs.command import COMMANDS, command_arguments, simulate_request
from tipbench.jobs.job import JobKind
from tipbench.jobs.progress import Progress
from tipbench.record.events import Simulating
from tipbench.simulate.promotion_gate import Size
from tipbench.simulate.simulation import EXPERIMENT, SimulationConfig, simulate
from tipbench.workflows.promotion import apply_promotion, check_promotion, undo_promotion
from tipbench.workflows.simulation import record_simulation
from web.panels import API, ServedPanel, serve_panel

URL = f"{API}/simulations"


def record_sample_simulation(served: ServedPanel) -> str:
    config = SimulationConfig(users=20, rounds=8, seeds=1, ablation="egreedy/v3")
    return record_simulation(served.store, simulate(config, workers=1).to_json())


def test_a_recorded_simulation_is_listed_with_its_page_and_curves(served: ServedPanel) -> None:
    run_id = record_sample_simulation(served)
    (item,) = served.get(URL).json()["items"]
    assert (item["run_id"], item["config"]["users"], len(item["policies"])) == (run_id, 20, 5)
    assert f'href="/simulations/{run_id}"' in served.get("/simulations").text
    page = served.get(f"/simulations/{run_id}").text
    assert "egreedy/v1+bias" in page
    assert "category_*" in page
    for theme in ("light", "dark"):
        chart = served.get(f"/simulations/{run_id}/curves.svg", params={"theme": theme, "narrow": "true"})
        assert chart.headers["content-type"].startswith("image/svg+xml")
    assert served.error(served.get(f"/simulations/{'0' * 32}")) == (404, "not_found")


def test_a_simulation_can_be_started_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tipbench.record.mlflow.MlflowHttp.is_mlflow", lambda _http: False)
    with serve_panel(tmp_path / "home", find_mlflow=True) as served:
        page = served.get("/simulations")
    assert page.status_code == 200
    assert "No simulations yet" in page.text
    assert "Start a simulation" in page.text


def test_simulations_are_not_listed_among_benchmarks(served: ServedPanel) -> None:
    record_sample_simulation(served)
    names = [each["experiment"] for each in served.get(f"{API}/experiments").json()["items"]]
    assert EXPERIMENT not in names


def test_r20_a_simulation_runs_only_as_a_local_subprocess() -> None:
    order = simulate_request(SimulationConfig(world="drift", users=50), mlflow_url="http://localhost:5000")
    assert (order.kind, order.runner, order.experiment) == (JobKind.SIMULATE, "local", EXPERIMENT)
    assert not any("Ollama" in resource for resource in order.resources), "it waits for no collect"
    words = command_arguments(order)
    assert words[:1] == COMMANDS[JobKind.SIMULATE]
    assert {"--world=drift", "--users=50", "--mlflow-url=http://localhost:5000"} <= set(words)


def test_a_simulation_is_started_over_http_and_from_the_page(served: ServedPanel) -> None:
    response = served.post(URL, json={"world": "null", "users": 30}, headers={"Idempotency-Key": "one"})
    assert response.status_code == 202
    job = response.json()["job"]
    assert (job["kind"], job["runner"], job["arguments"]["world"]) == ("simulate", "local", "null")
    assert (job["links"]["experiment"], "leaderboard" in job["links"]) == ("/simulations", False)
    again = served.post(URL, json={"world": "null", "users": 30}, headers={"Idempotency-Key": "one"})
    assert again.json()["new"] is False
    sent = served.post("/simulations", data={"world": "drift", "users": "40", "key": "form"})
    assert re.fullmatch(r"/jobs/[\w-]+", sent.headers["location"])
    assert f'href="/jobs/{job["id"]}"' in served.get("/simulations").text


@pytest.mark.parametrize("body", [{"users": 1}, {"world": "mars"}, {"policies": "egreedy/v9"}, {"prior": "p.json"}])
def test_invalid_options_are_refused(served: ServedPanel, body: dict[str, object]) -> None:
    assert served.error(served.post(URL, json=body)) == (422, "invalid")
    if "prior" not in body:
        page = served.post("/simulations", data={key: str(value) for key, value in body.items()})
        assert page.status_code == 422
        assert "Not started" in page.text


def test_progress_keeps_the_newest_curves() -> None:
    event = Simulating(1, 4, "null", ("egreedy/v1",), (1, 2), ((0.1, 0.2),), 30)
    assert Progress().after(event).to_json()["simulating"]["rewards"] == [[0.1, 0.2]]


def test_promotions_show_checks_and_switches_with_user_and_time(served: ServedPanel) -> None:
    assert served.get(f"{API}/promotions").json() == {"active": "egreedy/v1", "items": [], "next": None}
    assert "No checks yet" in served.get("/promotions").text
    check_promotion(served.home, "egreedy/v3", size=Size(1, 800, 100), simulation_only=True, user="ada")
    apply_promotion(served.home, "egreedy/v3", user="grace")
    found = served.get(f"{API}/promotions").json()
    assert found["active"] == "egreedy/v3"
    assert [(row["kind"], row["user"], row["passed"]) for row in found["items"]] == [
        ("apply", "grace", None),
        ("check", "ada", True),
    ]
    page = served.get("/promotions").text
    assert "no persona loses" in page
    assert "grace" in page
    undo_promotion(served.home, user="ada")
    assert served.get(f"{API}/promotions").json()["active"] == "egreedy/v1"
