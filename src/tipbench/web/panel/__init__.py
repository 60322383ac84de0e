"""The panel: pages for people, on the same queries as the API."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from tipbench.web.panel import (
    charts_route,
    error_page,
    experiments,
    jobs,
    judge_batch,
    judge_place,
    judges,
    leaderboard,
    login_page,
    pairs,
    run,
    run_form,
    runs,
    settings,
    sheet_import,
    static_files,
)

# One line for each page. Of two whose paths could both fit, the one with the longer path stands first:
# an experiment's name may have slashes, so /experiments/{experiment:path} itself comes last.
ROUTERS: tuple[APIRouter, ...] = (
    static_files.router,
    experiments.router,
    run_form.router,
    jobs.router,
    settings.router,
    judge_place.router,
    judge_place.working,
    judge_batch.router,
    sheet_import.router,
    judges.router,
    run.router,
    runs.router,
    charts_route.router,
    pairs.router,
    leaderboard.router,
)


def install(app: FastAPI) -> None:
    """Put the pages on the application, for people's failures and logins too."""
    app.state.login_page = login_page.render_login
    app.state.error_page = error_page.render_error
    app.state.header_chip = jobs.running_chip
    app.state.sent_forms = settings.Forms()
    for router in ROUTERS:
        app.include_router(router)
