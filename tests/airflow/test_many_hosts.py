"""Three listed Ollama hosts, one of them away: models are spread over the others, one at a time on each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.real_airflow import RealAirflow
from support.scripted_ollama import ScriptedOllama

MODELS = ("alpha:135m", "beta:135m", "delta:135m", "gamma:135m")
SMALL = {"prompts": "v1", "n_tips": 2, "n_scenarios": 4, "num_predict": 64, "server_wait_s": 5}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ScriptedOllama, ScriptedOllama]]:
    with ScriptedOllama(models=MODELS, call_s=1.0) as first, ScriptedOllama(models=MODELS, call_s=1.0) as second:
        yield first, second


@pytest.fixture(scope="module")
def several(
    tmp_path_factory: pytest.TempPathFactory, mlflow_url: str, servers: tuple[ScriptedOllama, ScriptedOllama]
) -> Iterator[RealAirflow]:
    """An Airflow of its own, because the hosts make the tasks, with a run `spread` that has ended."""
    first, second = servers
    own = {
        "MLFLOW_TRACKING_URI": mlflow_url,
        "TIPBENCH_HOME": str(tmp_path_factory.mktemp("worker")),
        "TIPBENCH_OLLAMA_HOSTS": f"away=http://127.0.0.1:9,first={first.url},second={second.url}",
    }
    with RealAirflow(tmp_path_factory.mktemp("airflow"), own) as running:
        running.trigger("spread", {**SMALL, "models": list(MODELS), "experiment": "tip-bench-many-hosts"})
        assert running.wait_for("spread", frozenset({"success", "failed"})) == "success"
        yield running


def test_a_host_that_is_away_is_done_without(several: RealAirflow) -> None:
    assert several.returned("spread", "plan")["collect_on_away"] == []
    assert several.states("spread")["collect_on_away"] == "skipped"
    assert "Its models run elsewhere" in several.logs("spread", "plan")
    told = several.returned("spread", "export_for_judge")
    assert (told["pending"], told["failed"]) == (16, 0)


@pytest.mark.parametrize(("name", "number"), [("first", 0), ("second", 1)])
def test_each_host_sees_its_share_only_one_model_at_a_time_and_none_in_the_end(
    several: RealAirflow, servers: tuple[ScriptedOllama, ScriptedOllama], name: str, number: int
) -> None:
    share, log = several.returned("spread", "plan")[f"collect_on_{name}"], servers[number].log
    assert len(share) == 2
    assert [len(log.calls(model)) for model in MODELS] == [4 if model in share else 0 for model in MODELS]
    assert (log.max_resident, servers[number].resident) == (1, ())


@pytest.mark.usefixtures("several")
def test_the_hosts_work_at_the_same_time(servers: tuple[ScriptedOllama, ScriptedOllama]) -> None:
    spans = [(calls[0].started, calls[-1].started) for calls in (server.log.calls() for server in servers)]
    assert max(began for began, _ in spans) < min(ended for _, ended in spans)
