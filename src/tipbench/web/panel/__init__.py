"""The panel: HTML pages on the same queries as the API."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from tipbench.web.panel import charts as charts_route
from tipbench.web.panel import errors as error_page
from tipbench.web.panel import errors as login_page
from tipbench.web.panel import experiments, jobs, judges, leaderboard, run, runs, settings, sheet_import
from tipbench.web.panel import judge as judge_batch
from tipbench.web.panel import judge as judge_place
from tipbench.web.panel import pages as static_files
from tipbench.web.panel import pair as pairs
from tipbench.web.panel import start as run_form

# In order of matching, longer paths first: experiment names may contain slashes, so
# /experiments/{experiment:path} must come last.
ROUTERS: tuple[APIRouter, ...] = (
    static_files.router,
    experiments.router,
    run_form.router,
    jobs.router,
    settings.router,
    judge_place.router,
    judge_place.working,
    judge_batch.batch_router,
    sheet_import.router,
    judges.router,
    run.router,
    runs.router,
    charts_route.router,
    pairs.router,
    leaderboard.router,
)


def install(app: FastAPI) -> None:
    """Adds the pages to the application, including the error and login pages."""
    app.state.login_page = login_page.render_login
    app.state.error_page = error_page.render_error
    app.state.header_chip = jobs.running_chip
    app.state.sent_forms = settings.SubmittedForms()
    for router in ROUTERS:
        app.include_router(router)
