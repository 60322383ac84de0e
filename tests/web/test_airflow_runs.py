"""Runs in Airflow, started and followed from the panel, and continued when the last cell is judged."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.judging import MODELS, SheetDriver, agreed
from support.scripted_airflow import DAG, PASSWORD, ScriptedAirflow
from tipbench.errors import NotEnoughData, UsageError
from tipbench.jobs.airflow_api import AirflowAccess
from tipbench.jobs.command import collect_request
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import Job, JobState
from tipbench.jobs.local import LocalRunner
from tipbench.jobs.progress import Progress
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record import events as wire
from tipbench.record.store import MemoryStore
from tipbench.settings import load_settings
from tipbench.web.deps import PanelMlflow
from tipbench.web.job_service import PanelMlflowLookup, airflow_access, default_runner, make_runners
from tipbench.web.panel.jobs import JobText
from web.airflow_panel import JOBS, RUN, airflow_environment, report_nothing_to_do, serve_with_airflow, wait_for_state
from web.page_forms import HEADERS, PageForm
from web.panels import API, EXPERIMENT, ServedPanel, answered_store, serve_panel

OF_ALL = {"models": ",".join(MODELS), "n_tips": 3, "experiment": EXPERIMENT}
SMALL = {"models": "baseline:template", "prompts": "v1", "n_scenarios": 2, "n_tips": 3}


@pytest.fixture
def scripted_airflow(home: Path) -> Iterator[ScriptedAirflow]:
    with ScriptedAirflow(home, report_nothing_to_do) as server:
        yield server


# choosing the runner


def test_without_airflow_runs_are_local_and_other_runners_are_refused(served: ServedPanel) -> None:
    assert served.post(RUN, json=SMALL).json()["job"]["runner"] == "local"
    response = served.post(f"{RUN}?runner=airflow", json=SMALL)
    assert served.error(response) == (422, "invalid")
    assert response.json()["error"]["path"] == "query.runner"
    assert "TIPBENCH_AIRFLOW_URL" in response.json()["error"]["message"]


def test_with_airflow_it_is_the_default_runner_and_either_can_be_chosen(
    home: Path, scripted_airflow: ScriptedAirflow
) -> None:
    with serve_panel(home, environment=airflow_environment(scripted_airflow)) as served:
        names = [served.post(f"{RUN}{query}", json=SMALL).json()["job"]["runner"] for query in ("", "?runner=local")]
    assert names == ["airflow", "local"]


def test_the_setting_chooses_the_default_runner(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    with serve_panel(home, environment=airflow_environment(scripted_airflow, TIPBENCH_RUNNER="local")) as served:
        assert served.post(RUN, json=SMALL).json()["job"]["runner"] == "local"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"TIPBENCH_RUNNER": "airflow"}, "TIPBENCH_RUNNER: .*Set TIPBENCH_AIRFLOW_URL, or runner=local"),
        ({"TIPBENCH_RUNNER": "celery"}, "TIPBENCH_RUNNER: Input should be 'local' or 'airflow'"),
        ({"TIPBENCH_AIRFLOW_URL": "http://airflow:8080"}, "without a login"),
        ({"TIPBENCH_AIRFLOW_URL": "airflow"}, "TIPBENCH_AIRFLOW_URL: airflow_url takes a web address"),
    ],
)
def test_incompatible_settings_are_refused_at_the_start(tmp_path: Path, given: dict[str, str], words: str) -> None:
    settings = load_settings({"TIPBENCH_HOME": str(tmp_path), **given}, tmp_path)
    with pytest.raises(UsageError, match=words):
        default_runner(settings, make_runners(settings, PanelMlflow(settings, MemoryStore())))


def test_waiting_for_the_judge_needs_airflow(served: ServedPanel) -> None:
    response = served.post(f"{RUN}?wait_for_judge=true", json=SMALL)
    assert (response.status_code, response.json()["error"]["path"]) == (422, "query.wait_for_judge")


def test_the_body_may_be_the_conf_of_the_dag(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    with serve_panel(home, environment=airflow_environment(scripted_airflow)) as served:
        job = served.post(RUN, json={**SMALL, "wait_for_judge": True}).json()["job"]
        assert job["arguments"]["wait_for_judge"] is True
        wrong = served.post(RUN, json={**SMALL, "wait_for_judge": "later"})
        assert (wrong.status_code, wrong.json()["error"]["path"]) == (422, "body.wait_for_judge")
        assert served.post(f"{API}/plan", json={**SMALL, "wait_for_judge": True}).status_code == 200


def test_the_panels_server_is_sent_to_airflow_only_if_a_run_names_it(
    home: Path, scripted_airflow: ScriptedAirflow
) -> None:
    with serve_panel(
        home, environment=airflow_environment(scripted_airflow, OLLAMA_HOST="http://panels-own:11434")
    ) as served:
        named = {"ollama_url": "http://panels-own:11434", "skip_refused": False}
        silent, chosen = (served.post(RUN, json={**SMALL, **more}).json()["job"]["arguments"] for more in ({}, named))
        form = PageForm(served.get("/run").text, "/run")
        body = form.body(do="start", models="baseline:template", prompts="v1")
        assert served.post("/run", content=body, headers=HEADERS).status_code == 303
        by_form = served.get(JOBS).json()["items"][0]["arguments"]
    assert not set(named) & set(silent)
    assert not set(named) & set(by_form)
    assert named.items() <= chosen.items()


def test_an_automatic_judge_runs_on_this_machine(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    with serve_panel(home, answered_store(), airflow_environment(scripted_airflow)) as served:
        response = served.post(f"{API}/judge/{EXPERIMENT}/run", json={"with": "rules"})
    assert response.json()["job"]["runner"] == "local"


# the form


def test_the_form_offers_both_runners_and_uses_the_chosen_one(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    with serve_panel(home, environment=airflow_environment(scripted_airflow)) as served:
        form = PageForm(served.get("/run").text, "/run")
        assert form.value("runner") == ["airflow"]
        body = form.body(do="start", models="baseline:template", prompts="v1", wait_for_judge="true")
        assert served.post("/run", content=body, headers=HEADERS).status_code == 303
        (job,) = served.get(JOBS).json()["items"]
        assert (job["runner"], job["arguments"]["wait_for_judge"]) == ("airflow", True)
        again = PageForm(served.get(f"/run?from={job['id']}").text, "/run")
        assert again.value("wait_for_judge") == ["true"]


def test_the_form_reports_incompatible_options(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    with serve_panel(home, environment=airflow_environment(scripted_airflow)) as served:
        form = PageForm(served.get("/run").text, "/run")
        body = form.body(do="start", models="baseline:template", runner="local", wait_for_judge="true")
        response = served.post("/run", content=body, headers=HEADERS)
    assert response.status_code == 422
    assert "wait_for_judge is available with Airflow only" in response.text


def test_without_airflow_the_form_does_not_mention_it(served: ServedPanel) -> None:
    assert "Airflow" not in served.get("/run").text


# following a run


def test_a_run_waits_for_the_judge_and_continues_when_the_last_cell_is_judged(
    home: Path, scripted_airflow: ScriptedAirflow
) -> None:
    store = answered_store()
    experiment = store.ensure_experiment(EXPERIMENT)
    with serve_with_airflow(home, scripted_airflow, store) as served:
        job = served.post(f"{RUN}?wait_for_judge=true", json=OF_ALL).json()["job"]
        waiting = wait_for_state(served, job["id"], "waiting", "48 cells wait for a judge.")
        assert waiting["links"]["airflow"] == f"{scripted_airflow.url}/dags/{DAG}/runs/tipbench__{job['id']}"
        page = served.get(f"/jobs/{job['id']}").text
        assert waiting["links"]["airflow"] in page
        assert "Waiting for a judge" in page
        assert f'href="/experiments/{EXPERIMENT}/judges"' in page
        assert "Airflow" in served.get("/jobs").text
        SheetDriver(store, experiment).judged_by("anna", agreed)
        assert wait_for_state(served, job["id"], "succeeded")["exit_code"] == 0
    assert scripted_airflow.count("PATCH", "hitlDetails") == 1


def test_an_unavailable_airflow_is_shown_on_the_page_and_the_job_is_found_again(
    home: Path, scripted_airflow: ScriptedAirflow
) -> None:
    scripted_airflow.pools.clear()
    with serve_with_airflow(home, scripted_airflow, answered_store()) as served:
        job = served.post(RUN, json=OF_ALL).json()["job"]
        assert "no pool ollama" in wait_for_state(served, job["id"], "running", "pool")["reason"]
        assert "airflow pools set ollama 1" in served.get(f"/jobs/{job['id']}").text
        scripted_airflow.fault = "away"
        wait_for_state(served, job["id"], "lost", "Is its API server running?")
        assert served.get(f"/jobs/{job['id']}").status_code == 200
        assert served.get(f"{JOBS}/{job['id']}/log").status_code == 200
        scripted_airflow.pools.add("ollama")
        scripted_airflow.fault = ""
        wait_for_state(served, job["id"], "succeeded")


def test_a_paused_dag_leaves_the_job_in_the_queue_with_its_reason(
    home: Path, scripted_airflow: ScriptedAirflow
) -> None:
    scripted_airflow.paused = True
    with serve_with_airflow(home, scripted_airflow, answered_store()) as served:
        job = served.post(RUN, json=OF_ALL).json()["job"]
        wait_for_state(served, job["id"], "queued", "Unpause it there")
        scripted_airflow.paused = False
        wait_for_state(served, job["id"], "succeeded")


# counting cells in MLflow


def new_job(home: Path, **changes: Any) -> Job:
    with JobStore(home / "jobs" / "other.db") as jobs:
        return jobs.add(collect_request(make_config({**OF_ALL, **changes}), runner="airflow"))[0]


def mlflow_lookup(home: Path, store: MemoryStore) -> PanelMlflowLookup:
    return PanelMlflowLookup(PanelMlflow(load_settings({"TIPBENCH_HOME": str(home)}, home.parent), store))


def test_only_the_cells_of_the_run_are_waited_for(home: Path) -> None:
    lookup = mlflow_lookup(home, answered_store())
    assert lookup.pending(new_job(home)) == 48
    assert lookup.pending(new_job(home, models=MODELS[0], prompts="v1")) == 8
    assert lookup.pending(new_job(home, models=MODELS[0], prompts="v1", n_scenarios=2)) == 2


@pytest.mark.parametrize("changes", [{"n_tips": 4}, {"experiment": "tip-bench-other"}])
def test_missing_cells_do_not_count_as_judged(home: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(NotEnoughData, match="has no cells of this run"):
        mlflow_lookup(home, answered_store()).pending(new_job(home, **changes))


@pytest.mark.parametrize(("state", "words"), [("running", "50 %"), ("waiting", "Waiting"), ("lost", "Lost")])
def test_the_tab_title_shows_progress_or_what_the_run_waits_for(home: Path, state: str, words: str) -> None:
    progress = Progress().after(wire.BlockStarted(MODELS[0], 2, done=1))
    job = replace(new_job(home, models=MODELS[0]), state=JobState(state))
    assert JobText(job, progress).title == f"{words} · collect {EXPERIMENT}"


@pytest.mark.parametrize(
    ("reason", "found_again"),
    [("Airflow cannot be reached.", True), ("Airflow has no such run any more; a retry continues.", False)],
)
def test_an_unreachable_job_is_waited_for_and_not_retried(home: Path, reason: str, found_again: bool) -> None:
    job = replace(new_job(home), state=JobState.LOST, reason=reason)
    assert JobText(job, Progress()).may_reappear is found_again


# credentials and links


def test_password_and_token_for_airflow_are_never_shown(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    scripted_airflow.pools.clear()
    with serve_with_airflow(home, scripted_airflow, answered_store()) as served:
        job = served.post(RUN, json=OF_ALL).json()["job"]
        wait_for_state(served, job["id"], "running", "pool")
        scripted_airflow.fault = "away"
        wait_for_state(served, job["id"], "lost")
        scripted_airflow.fault = ""
        own = f"{JOBS}/{job['id']}"
        paths = ("/settings", "/jobs", f"/jobs/{job['id']}", "/run", own, f"{own}/log", "/api/bench/config", "/metrics")
        shown = [served.get(path) for path in paths]
        assert served.post(f"{own}/cancel").status_code == 200
        wait_for_state(served, job["id"], "cancelled")
        events = (home / "jobs" / job["id"] / "events.jsonl").read_text()
    assert [response.status_code for response in shown] == [200] * len(paths)
    for text in (events, *(response.text + str(response.headers) for response in shown)):
        assert not any(secret in text for secret in (PASSWORD, *scripted_airflow.tokens))
    for file in filter(Path.is_file, home.rglob("*")):
        assert not any(secret.encode() in file.read_bytes() for secret in (PASSWORD, *scripted_airflow.tokens)), file


@pytest.mark.process
def test_local_jobs_do_not_get_the_airflow_credentials(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    given = {**airflow_environment(scripted_airflow), "TIPBENCH_AIRFLOW_TOKEN": "a-token-of-airflows"}
    runner = LocalRunner(home, environment={**os.environ, **given})
    request = collect_request(make_config({**SMALL, "mlflow_url": "http://127.0.0.1:9", "server_wait_s": 30}))
    with JobStore(home / "jobs" / "other.db") as jobs:
        job = jobs.add(request)[0]
    runner.start(job)
    process = JobFolder(home / "jobs", job.id).process
    assert process is not None
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    os.killpg(process.pid, signal.SIGKILL)
    assert b"TIPBENCH_HOME" in environment
    assert not any(secret.encode() in environment for secret in (PASSWORD, "a-token-of-airflows"))


def test_an_empty_setting_counts_as_unset(tmp_path: Path) -> None:
    names = ("URL", "USERNAME", "PASSWORD", "TOKEN", "DAG", "PUBLIC_URL")
    empty = {
        "TIPBENCH_HOME": str(tmp_path),
        "TIPBENCH_RUNNER": "",
        **{f"TIPBENCH_AIRFLOW_{name}": "" for name in names},
    }
    assert airflow_access(load_settings(empty, tmp_path)) is None
    partly = load_settings({**empty, "TIPBENCH_AIRFLOW_URL": "http://a:8080", "TIPBENCH_AIRFLOW_TOKEN": "t"}, tmp_path)
    assert airflow_access(partly) == AirflowAccess("http://a:8080", token="t")
    (tmp_path / "tipbench.toml").write_text('airflow_url = ""\nairflow_public_url = ""\nrunner = ""\n')
    in_file = load_settings(empty, tmp_path)
    runners = make_runners(in_file, PanelMlflow(in_file, MemoryStore()))
    assert (list(runners), default_runner(in_file, runners)) == (["local"], "local")


def test_links_go_to_the_public_address(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    given = airflow_environment(scripted_airflow, TIPBENCH_AIRFLOW_PUBLIC_URL="https://airflow.example/")
    with serve_with_airflow(home, scripted_airflow, answered_store(), given) as served:
        job = served.post(RUN, json=OF_ALL).json()["job"]
        ended = wait_for_state(served, job["id"], "succeeded")
    assert ended["links"]["airflow"] == f"https://airflow.example/dags/{DAG}/runs/tipbench__{job['id']}"


def test_access_follows_the_settings(tmp_path: Path) -> None:
    given = {"TIPBENCH_AIRFLOW_URL": "http://a:8080/", "TIPBENCH_AIRFLOW_TOKEN": "t", "TIPBENCH_AIRFLOW_DAG": "mine"}
    settings = load_settings({"TIPBENCH_HOME": str(tmp_path), **given}, tmp_path)
    assert airflow_access(settings) == AirflowAccess("http://a:8080", token="t", dag_id="mine")
