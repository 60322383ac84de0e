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
from web.panel_process import wait_for_job
from web.panels import API, BASE, JUDGE, ServedPanel, TestClient

RUN, JOBS = f"{API}/run", f"{API}/jobs"


def report_nothing_to_do(_model: str, log: list[str]) -> int:
    """Report a collect whose cells are all recorded already."""
    log += ["nothing to do", event_line(Exit(0), time.time()).decode().rstrip()]
    return 0


def airflow_environment(airflow: ScriptedAirflow, **more: str) -> dict[str, str]:
    return {
        "TIPBENCH_AIRFLOW_URL": airflow.url,
        "TIPBENCH_AIRFLOW_USERNAME": USER,
        "TIPBENCH_AIRFLOW_PASSWORD": PASSWORD,
        **more,
    }


@contextmanager
def serve_with_airflow(
    home: Path, airflow: ScriptedAirflow, store: RunStore, environment: Mapping[str, str] | None = None
) -> Iterator[ServedPanel]:
    """Serve a panel with Airflow; local jobs end at once, without a process."""
    settings = load_settings({"TIPBENCH_HOME": str(home), **(environment or airflow_environment(airflow))}, home.parent)
    access = airflow_access(settings)
    assert access is not None
    lookup = PanelMlflowLookup(PanelMlflow(settings, store))
    runner = AirflowRunner(home, AirflowApi(access, backoff_s=0), lookup, poll_s=0.05, check_s=0.1, settle_s=0)
    runners: dict[str, Runner] = {"local": ScriptedRunner(), "airflow": runner}
    app = make_app(settings, store=store, runners=runners)
    tokens = app.state.panel.authenticator.tokens
    admin, judge = (
        tokens.create(role, name, life_s=3600)[1] for role, name in ((Role.ADMIN, "boss"), (Role.JUDGE, JUDGE))
    )
    with TestClient(app, base_url=BASE) as client:
        yield ServedPanel(app, client, admin, judge, store, home)


def wait_for_state(served: ServedPanel, job_id: str, state: str, reason: str = "") -> Any:
    """Wait until the job has this state and reason, and return it."""

    def is_reached(found: Any) -> bool:
        return found["job"]["state"] == state and reason in (found["job"]["reason"] or "")

    return wait_for_job(served.get, job_id, is_reached)["job"]
