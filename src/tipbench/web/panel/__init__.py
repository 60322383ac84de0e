"""The panel: HTML pages on the same queries as the API."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from tipbench.web.panel import (
    experiments,
    jobs,
    judge,
    judges,
    leaderboard,
    matrix,
    pages,
    pair,
    policies,
    run,
    runs,
    settings,
    sheet_import,
    simulations,
    start,
)

# In order of matching: /experiments/{experiment:path} in `leaderboard` also matches longer paths, so it comes last.
ROUTERS: tuple[APIRouter, ...] = (
    pages.router,
    experiments.router,
    start.router,
    jobs.router,
    policies.router,
    simulations.router,
    settings.router,
    judge.router,
    judge.limited_router,
    sheet_import.router,
    judges.router,
    run.router,
    runs.router,
    pair.router,
    matrix.router,
    leaderboard.router,
)


def install(app: FastAPI) -> None:
    """Add the pages to the application."""
    app.state.login_page = pages.render_login
    app.state.error_page = pages.render_error
    app.state.submitted_forms = settings.SubmittedForms()
    for router in ROUTERS:
        app.include_router(router)
