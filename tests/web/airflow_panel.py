"""A panel that follows runs in a scripted Airflow, polling more often than usual."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.panel_site import make_app
from support.scripted_airflow import PASSWORD, USER, ScriptedAirflow
from support.scripted_runner import ScriptedRunner
from tipbench.jobs.airflow import AirflowRunner
from tipbench.jobs.airflow_api import AirflowApi
from tipbench.jobs.job import Runner
from tipbench.record.events import Exit, event_line
from tipbench.record.store import RunStore
from tipbench.settings import load_settings
from tipbench.web.auth import Role
from tipbench.web.deps import PanelMlflow
from tipbench.web.job_service import PanelMlflowLookup, airflow_access
from web.panels import API, BASE, JUDGE, Served, TestClient

RUN, JOBS = f"{API}/run", f"{API}/jobs"


def quietly(_model: str, log: list[str]) -> int:
    """A collect whose cells are all recorded already."""
    log += ["nothing to do", event_line(Exit(0), time.time()).decode().rstrip()]
    return 0


def variables(airflow: ScriptedAirflow, **more: str) -> dict[str, str]:
    return {
        "TIPBENCH_AIRFLOW_URL": airflow.url,
        "TIPBENCH_AIRFLOW_USERNAME": USER,
        "TIPBENCH_AIRFLOW_PASSWORD": PASSWORD,
        **more,
    }


@contextmanager
def followed(
    home: Path, airflow: ScriptedAirflow, store: RunStore, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Local jobs end at once, without a process."""
    settings = load_settings({"TIPBENCH_HOME": str(home), **(environment or variables(airflow))}, home.parent)
    access = airflow_access(settings)
    assert access is not None
    records = PanelMlflowLookup(PanelMlflow(settings, store))
    runner = AirflowRunner(home, AirflowApi(access, backoff_s=0), records, poll_s=0.05, check_s=0.1, settle_s=0)
    runners: dict[str, Runner] = {"local": ScriptedRunner(), "airflow": runner}
    app = make_app(settings, store=store, runners=runners)
    tokens = app.state.panel.authenticator.tokens
    admin, judge = (
        tokens.create(role, name, life_s=3600)[1] for role, name in ((Role.ADMIN, "boss"), (Role.JUDGE, JUDGE))
    )
    with TestClient(app, base_url=BASE) as client:
        yield Served(app, client, admin, judge, store, home)


def job_once(served: Served, job_id: str, state: str, reason: str = "") -> Any:
    """Return the job once it has this state and reason."""
    deadline = time.monotonic() + 120
    while True:
        job = served.get(f"{JOBS}/{job_id}").json()["job"]
        if job["state"] == state and reason in (job["reason"] or ""):
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.02)
