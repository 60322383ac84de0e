"""Runs in Airflow, started and followed from the panel: chosen, waited for, answered when the last cell is judged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.judging import MODELS, Desk, agreed
from support.little_airflow import DAG, PASSWORD, USER, LittleAirflow
from tipbench.errors import NotEnoughData, UsageError
from tipbench.jobs.airflow import AirflowRunner
from tipbench.jobs.airflow_rest import AirflowAccess, AirflowRest
from tipbench.jobs.command import collect_order
from tipbench.jobs.job import Job, Runner
from tipbench.jobs.local import LocalRunner
from tipbench.jobs.sqlite import JobStore
from tipbench.plan.config import make_config
from tipbench.record.memory import MemoryStore
from tipbench.settings import load_settings
from tipbench.web.admin import create_app
from tipbench.web.opening import Tracker
from tipbench.web.runners import PanelRecords, airflow_access, make_runners, usual_runner
from tipbench.web.tokens import Role
from web.page_forms import HEADERS, PageForm
from web.panels import API, BASE, EXPERIMENT, JUDGE, Served, TestClient, answered, serving

RUN, JOBS = f"{API}/run", f"{API}/jobs"
OF_ALL = {"models": ",".join(MODELS), "n_tips": 3, "experiment": EXPERIMENT}
SMALL = {"models": "baseline:template", "prompts": "v1", "n_scenarios": 2, "n_tips": 3}


def quietly(_model: str, log: list[str]) -> int:
    """A collect of what is recorded already."""
    log.append("nothing to do")
    return 0


@pytest.fixture
def airflow(home: Path) -> Iterator[LittleAirflow]:
    with LittleAirflow(home, quietly) as server:
        yield server


def variables(airflow: LittleAirflow, **more: str) -> dict[str, str]:
    return {
        "TIPBENCH_AIRFLOW_URL": airflow.url,
        "TIPBENCH_AIRFLOW_USERNAME": USER,
        "TIPBENCH_AIRFLOW_PASSWORD": PASSWORD,
        **more,
    }


@contextmanager
def followed(home: Path, airflow: LittleAirflow, store: MemoryStore) -> Iterator[Served]:
    """A panel that looks at its Airflow more often than a real one."""
    settings = load_settings({"TIPBENCH_HOME": str(home), **variables(airflow)}, home.parent)
    access = airflow_access(settings)
    assert access is not None
    records = PanelRecords(Tracker(settings, store))
    runner = AirflowRunner(home, AirflowRest(access, rest_s=0), records, poll_s=0.05, check_s=0.1, settle_s=0)
    runners: dict[str, Runner] = {"local": LocalRunner(home), "airflow": runner}
    app = create_app(settings, store=store, runners=runners)
    tokens = app.state.panel.guard.tokens
    admin, judge = (
        tokens.create(role, name, life_s=3600)[1] for role, name in ((Role.ADMIN, "boss"), (Role.JUDGE, JUDGE))
    )
    with TestClient(app, base_url=BASE) as client:
        yield Served(app, client, admin, judge, store, home)


def job_once(served: Served, job_id: str, state: str, reason: str = "") -> Any:
    """The job as the API shows it, once it is so."""
    deadline = time.monotonic() + 30
    while True:
        job = served.get(f"{JOBS}/{job_id}").json()["job"]
        if job["state"] == state and reason in (job["reason"] or ""):
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.02)


# choosing


def test_without_airflow_runs_are_local_and_no_other_can_be_named(served: Served) -> None:
    assert served.post(RUN, json=SMALL).json()["job"]["runner"] == "local"
    response = served.post(f"{RUN}?runner=airflow", json=SMALL)
    assert served.error(response) == (422, "invalid")
    assert response.json()["error"]["path"] == "query.runner"
    assert "TIPBENCH_AIRFLOW_URL" in response.json()["error"]["message"]


def test_where_airflow_is_configured_it_is_the_usual_one_and_either_can_be_named(
    home: Path, airflow: LittleAirflow
) -> None:
    with serving(home, environment=variables(airflow)) as served:
        names = [served.post(f"{RUN}{query}", json=SMALL).json()["job"]["runner"] for query in ("", "?runner=local")]
    assert names == ["airflow", "local"]


def test_the_setting_says_who_runs_what_names_nobody(home: Path, airflow: LittleAirflow) -> None:
    with serving(home, environment=variables(airflow, TIPBENCH_RUNNER="local")) as served:
        assert served.post(RUN, json=SMALL).json()["job"]["runner"] == "local"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"TIPBENCH_RUNNER": "airflow"}, "Set TIPBENCH_AIRFLOW_URL, or runner=local"),
        ({"TIPBENCH_RUNNER": "celery"}, "runner is local or airflow"),
        ({"TIPBENCH_AIRFLOW_URL": "http://airflow:8080"}, "nothing says who we are there"),
        ({"TIPBENCH_AIRFLOW_URL": "airflow"}, "airflow_url takes a web address"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_at_the_start(
    tmp_path: Path, given: dict[str, str], words: str
) -> None:
    settings = load_settings({"TIPBENCH_HOME": str(tmp_path), **given}, tmp_path)
    with pytest.raises(UsageError, match=words):
        usual_runner(settings, make_runners(settings, Tracker(settings, MemoryStore())))


def test_waiting_for_the_judge_belongs_to_airflow(served: Served) -> None:
    response = served.post(f"{RUN}?wait_for_judge=true", json=SMALL)
    assert (response.status_code, response.json()["error"]["path"]) == (422, "query.wait_for_judge")


def test_a_judge_that_is_no_person_stays_on_this_machine(home: Path, airflow: LittleAirflow) -> None:
    store, _ = answered()
    with serving(home, store, variables(airflow)) as served:
        response = served.post(f"{API}/judge/{EXPERIMENT}/run", json={"with": "rules"})
    assert response.json()["job"]["runner"] == "local"


# the form


def test_the_form_offers_both_and_starts_where_it_is_told(home: Path, airflow: LittleAirflow) -> None:
    with serving(home, environment=variables(airflow)) as served:
        form = PageForm(served.get("/run").text, "/run")
        assert form.value("runner") == ["airflow"]
        body = form.body(do="start", models="baseline:template", prompts="v1", wait_for_judge="true")
        assert served.post("/run", content=body, headers=HEADERS).status_code == 303
        (job,) = served.get(JOBS).json()["items"]
        assert (job["runner"], job["arguments"]["wait_for_judge"]) == ("airflow", True)
        again = PageForm(served.get(f"/run?from={job['id']}").text, "/run")
        assert again.value("wait_for_judge") == ["true"]


def test_the_form_tells_what_does_not_go_together(home: Path, airflow: LittleAirflow) -> None:
    with serving(home, environment=variables(airflow)) as served:
        form = PageForm(served.get("/run").text, "/run")
        body = form.body(do="start", models="baseline:template", runner="local", wait_for_judge="true")
        response = served.post("/run", content=body, headers=HEADERS)
    assert response.status_code == 422
    assert "wait_for_judge belongs to Airflow" in response.text


def test_without_airflow_the_form_says_nothing_of_it(served: Served) -> None:
    assert "Airflow" not in served.get("/run").text


# following


def test_a_run_waits_for_the_judge_and_goes_on_when_the_last_cell_is_judged(home: Path, airflow: LittleAirflow) -> None:
    store, experiment = answered()
    with followed(home, airflow, store) as served:
        job = served.post(f"{RUN}?wait_for_judge=true", json=OF_ALL).json()["job"]
        waiting = job_once(served, job["id"], "waiting", "48 cells wait for a judge.")
        assert waiting["links"]["airflow"] == f"{airflow.url}/dags/{DAG}/runs/tipbench__{job['id']}"
        page = served.get(f"/jobs/{job['id']}").text
        assert waiting["links"]["airflow"] in page
        assert "Parked until a judge has answered" in page
        Desk(store, experiment).judged_by("anna", agreed)
        assert job_once(served, job["id"], "succeeded")["exit_code"] == 0
    assert airflow.asked("PATCH", "hitlDetails") == 1


def test_airflow_away_is_told_on_the_page_and_the_job_comes_back(home: Path, airflow: LittleAirflow) -> None:
    airflow.pools.clear()
    store, _ = answered()
    with followed(home, airflow, store) as served:
        job = served.post(RUN, json=OF_ALL).json()["job"]
        assert "no pool ollama" in job_once(served, job["id"], "running", "pool")["reason"]
        assert "airflow pools set ollama 1" in served.get(f"/jobs/{job['id']}").text
        airflow.fault = "away"
        job_once(served, job["id"], "lost", "Is its API server running?")
        assert served.get(f"/jobs/{job['id']}").status_code == 200
        assert served.get(f"{JOBS}/{job['id']}/log").status_code == 200
        airflow.pools.add("ollama")
        airflow.fault = ""
        job_once(served, job["id"], "succeeded")


def test_a_paused_dag_leaves_the_job_in_the_queue_with_its_reason(home: Path, airflow: LittleAirflow) -> None:
    airflow.paused = True
    store, _ = answered()
    with followed(home, airflow, store) as served:
        job = served.post(RUN, json=OF_ALL).json()["job"]
        job_once(served, job["id"], "queued", "Unpause it there")
        airflow.paused = False
        job_once(served, job["id"], "succeeded")


# what is seen in MLflow


def order(home: Path, **changes: Any) -> Job:
    with JobStore(home / "jobs" / "other.db") as jobs:
        return jobs.add(collect_order(make_config({**OF_ALL, **changes}), runner="airflow"))[0]


def records(home: Path, store: MemoryStore) -> PanelRecords:
    return PanelRecords(Tracker(load_settings({"TIPBENCH_HOME": str(home)}, home.parent), store))


def test_only_the_cells_of_the_run_are_waited_for(home: Path) -> None:
    store, _ = answered()
    seen = records(home, store)
    assert seen.pending(order(home)) == 48
    assert seen.pending(order(home, models=MODELS[0], prompts="v1")) == 8
    assert seen.pending(order(home, models=MODELS[0], prompts="v1", n_scenarios=2)) == 2


@pytest.mark.parametrize("changes", [{"n_tips": 4}, {"experiment": "tip-bench-other"}])
def test_what_cannot_be_seen_is_not_taken_for_judged(home: Path, changes: dict[str, Any]) -> None:
    store, _ = answered()
    with pytest.raises(NotEnoughData, match="No cell of the run is in tip-bench-"):
        records(home, store).pending(order(home, **changes))


def test_access_is_as_the_settings_say(tmp_path: Path) -> None:
    given = {"TIPBENCH_AIRFLOW_URL": "http://a:8080/", "TIPBENCH_AIRFLOW_TOKEN": "t", "TIPBENCH_AIRFLOW_DAG": "mine"}
    settings = load_settings({"TIPBENCH_HOME": str(tmp_path), **given}, tmp_path)
    assert airflow_access(settings) == AirflowAccess("http://a:8080", token="t", dag_id="mine")
