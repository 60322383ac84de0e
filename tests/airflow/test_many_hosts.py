"""Three listed Ollama hosts, one of them away: models are spread over the others, one at a time on each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from support.real_airflow import ENDED, RealAirflow, fresh
from support.scripted_ollama import ScriptedOllama

MODELS = ("alpha:135m", "beta:135m", "delta:135m", "gamma:135m")
SMALL = {"prompts": "v1", "n_tips": 2, "n_scenarios": 4, "num_predict": 64, "server_wait_s": 5}


@dataclass(frozen=True)
class Spread:
    """A run over the listed hosts that has ended, and what it has left behind."""

    run_id: str
    airflow: RealAirflow
    servers: tuple[ScriptedOllama, ScriptedOllama]

    def returned(self, task_id: str) -> Any:
        return self.airflow.returned(self.run_id, task_id)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, mlflow_url: str) -> Iterator[Spread]:
    """On servers and an Airflow of its own, because the hosts make the tasks."""
    with ScriptedOllama(models=MODELS, call_s=1.0) as first, ScriptedOllama(models=MODELS, call_s=1.0) as second:
        own = {
            "MLFLOW_TRACKING_URI": mlflow_url,
            "TIPBENCH_HOME": str(tmp_path_factory.mktemp("worker")),
            "TIPBENCH_OLLAMA_HOSTS": f"away=http://127.0.0.1:9,first={first.url},second={second.url}",
        }
        with RealAirflow(tmp_path_factory.mktemp("airflow"), own) as running:
            name = fresh("tip-bench-many-hosts")
            running.trigger(name, {**SMALL, "models": list(MODELS), "experiment": name})
            assert running.wait_for(name, ENDED) == "success", running.states(name)
            yield Spread(name, running, (first, second))


def test_a_host_that_is_away_is_done_without(spread: Spread) -> None:
    assert spread.returned("plan")["collect_on_away"] == []
    assert spread.airflow.states(spread.run_id)["collect_on_away"] == "skipped"
    assert "Its models run elsewhere" in spread.airflow.logs(spread.run_id, "plan")
    told = spread.returned("export_for_judge")
    assert (told["pending"], told["failed"]) == (16, 0)


@pytest.mark.parametrize(("name", "number"), [("first", 0), ("second", 1)])
def test_each_host_sees_its_share_only_one_model_at_a_time_and_none_in_the_end(
    spread: Spread, name: str, number: int
) -> None:
    share, server = spread.returned("plan")[f"collect_on_{name}"], spread.servers[number]
    assert len(share) == 2
    assert [len(server.log.calls(model)) for model in MODELS] == [4 if model in share else 0 for model in MODELS]
    assert (server.log.max_resident, server.resident) == (1, ())


def test_the_hosts_work_at_the_same_time(spread: Spread) -> None:
    spans = [(calls[0].started, calls[-1].started) for calls in (server.log.calls() for server in spread.servers)]
    assert max(began for began, _ in spans) < min(ended for _, ended in spans)
