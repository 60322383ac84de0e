"""The start form with a configured Airflow: its options are shown only when it is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.panel_pages import TabOpener
from support.panel_site import Site, make_app, serve_app
from support.scripted_runner import ScriptedRunner
from tipbench.record.store import MemoryStore
from tipbench.settings import load_settings
from tipbench.web.auth import Role


@pytest.fixture
def site(home: Path) -> Iterator[Site]:
    settings = load_settings({"TIPBENCH_HOME": str(home), "OLLAMA_HOST": "127.0.0.1:9"}, home.parent)
    runners = {name: ScriptedRunner(name) for name in ("local", "airflow")}
    app = make_app(settings, store=MemoryStore(), runners=runners)
    tokens = app.state.panel.authenticator.tokens
    admin, judge = (tokens.create(role, role.value, life_s=None)[1] for role in (Role.ADMIN, Role.JUDGE))
    with serve_app(app) as url:
        yield Site(url, app, admin, judge, home)


def test_waiting_for_the_judge_is_offered_with_airflow_only(site: Site, open_tab: TabOpener) -> None:
    page = open_tab(site).page
    page.goto(f"{site.url}/run")
    box = page.get_by_label("Wait for the judge")
    page.get_by_label("Runs on").select_option("airflow")
    box.check()
    page.get_by_label("Runs on").select_option("local")
    assert not box.is_visible()
    page.get_by_role("button", name="Start").click()
    page.wait_for_url("**/jobs/2*")
    (job,) = site.panel.jobs.store.page().items
    assert (job.runner, job.arguments.get("wait_for_judge")) == ("local", None)
