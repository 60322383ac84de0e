"""Application factory: `create_app` assembles the panel and its API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.concurrency import run_in_threadpool

import tipbench
from tipbench.jobs.job import JobState, Runner
from tipbench.record.store import RunStore
from tipbench.settings import Settings
from tipbench.sqlite import Database
from tipbench.web import errors, login
from tipbench.web import panel as pages
from tipbench.web.api import health, hook, jobs, judge, leaderboard, policies, runs, tokens
from tipbench.web.auth import Authenticator, Sessions, TokenStore, load_key
from tipbench.web.batch_store import BatchStore
from tipbench.web.batches import BatchService
from tipbench.web.database import panel_database
from tipbench.web.deps import Panel, PanelMlflow
from tipbench.web.errors import SafeJsonResponse
from tipbench.web.job_service import JobService, make_runners
from tipbench.web.judge_service import UploadStore
from tipbench.web.login_limiter import LoginLimiter
from tipbench.web.metrics import Labels, Metrics, labels
from tipbench.web.options import OperatorPermissions, PanelOptions, panel_options
from tipbench.web.queries import Queries
from tipbench.web.security import CompressionMiddleware, SecurityMiddleware, StreamLimits
from tipbench.web.webhook import make_webhook, read_webhook_options

PUBLIC_ROUTERS = (health.router, login.router)  # no authentication
ROUTERS: tuple[APIRouter, ...] = (
    *PUBLIC_ROUTERS,
    login.logout_router,
    health.metrics_router,
    runs.experiments_router,
    runs.router,
    leaderboard.router,
    jobs.run_router,
    jobs.router,
    judge.sheet_router,
    judge.status_router,
    judge.batch_router,
    judge.held_batch_router,
    jobs.judge_router,
    hook.router,
    tokens.router,
    policies.router,
)
_DESCRIPTION = """Start runs, follow jobs, judge and compare.

Programs send `Authorization: Bearer TOKEN`; browsers log in at /login. Lists are `{"items", "next"}`: pass `next` as
`?next=` for the next page. Errors are `{"error": {"code", "message", "path"}}`. A token of the role *judge* may judge
its own sheets and batches, and nothing else."""


def create_app(
    settings: Settings,
    options: PanelOptions | None = None,
    *,
    store: RunStore | None = None,
    routers: Sequence[APIRouter] = (),
    runners: Mapping[str, Runner] | None = None,
) -> FastAPI:
    """Create the application. `store` replaces the configured MLflow; `routers` are added after the API's.

    `runners` (by name) execute jobs: by default this machine, and Airflow if configured. Jobs outlive the application.
    """
    with settings.add_source_to_errors():
        webhook_options = read_webhook_options(settings)
    panel, database = make_panel(settings, options or panel_options(settings), store, runners)
    webhook = None if webhook_options is None else make_webhook(webhook_options, panel, database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # FastAPI builds a router's routes at the first match. Match here, so that no request waits.
        for route in app.router.routes:
            route.matches({"type": "http", "method": "GET", "path": ""})
        panel.jobs.supervisor.start()
        if webhook is not None:
            webhook.start()
        yield
        if webhook is not None:
            await run_in_threadpool(webhook.close)
        await run_in_threadpool(panel.jobs.close)
        await run_in_threadpool(panel.mlflow.close)
        await run_in_threadpool(database.close)

    app = FastAPI(
        title="tipbench",
        version=tipbench.__version__,
        description=_DESCRIPTION,
        openapi_url=None,  # served by a route that requires authorisation
        docs_url=None,  # the default pages load scripts from a CDN
        redoc_url=None,
        default_response_class=SafeJsonResponse,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.panel = panel
    app.state.webhook = webhook
    app.state.batches = BatchService(panel, BatchStore(database))
    app.state.uploads = UploadStore()
    errors.install(app)
    for router in (*ROUTERS, *routers):
        app.include_router(router)
    pages.install(app)
    app.add_middleware(CompressionMiddleware)
    app.add_middleware(SecurityMiddleware, hosts=panel.options.hosts, metrics=panel.metrics)
    return app


def make_panel(
    settings: Settings,
    options: PanelOptions,
    store: RunStore | None = None,
    runners: Mapping[str, Runner] | None = None,
) -> tuple[Panel, Database]:
    """Return the panel and its database. Raises UsageError for an invalid setting or file.

    The caller closes `panel.jobs`, `panel.mlflow` and the database.
    """
    settings.collect_config(flags={})  # only to raise for an invalid setting
    database = panel_database(settings.home)
    sessions = Sessions(load_key(settings.home), database, life_s=options.session_s)
    authenticator = Authenticator(TokenStore(database), sessions, LoginLimiter(), options.admin_token)
    mlflow = PanelMlflow(settings, store)
    panel = Panel(
        settings=settings,
        options=options,
        authenticator=authenticator,
        mlflow=mlflow,
        queries=Queries(),
        permissions=OperatorPermissions.of(settings, options),
        metrics=Metrics(),
        jobs=JobService.of(settings, make_runners(settings, mlflow) if runners is None else runners),
        streams=StreamLimits(),
    )
    _register_metrics(panel)
    return panel, database


def _register_metrics(panel: Panel) -> None:
    queries, job_store, register = panel.queries, panel.jobs.store, panel.metrics.register
    caches = {
        "snapshots": queries.snapshots,
        "counts": queries.counts,
        "small": queries.small_cache,
        "large": queries.large_cache,
    }

    def cache_requests() -> dict[Labels, float]:
        hits = {labels(cache=name, result="hits"): float(cache.hits) for name, cache in caches.items()}
        misses = {labels(cache=name, result="misses"): float(cache.misses) for name, cache in caches.items()}
        return hits | misses

    def jobs_by_state() -> dict[Labels, float]:
        return {labels(state=state.value): float(count) for state, count in job_store.counts().items()}

    def queued_jobs() -> dict[Labels, float]:
        return {labels(): float(job_store.counts()[JobState.QUEUED])}

    register("tipbench_info", "gauge", "Always 1.", lambda: {labels(version=tipbench.__version__): 1.0})
    register("tipbench_cache_requests_total", "counter", "Cache lookups.", cache_requests)
    register("tipbench_jobs", "gauge", "Jobs by state.", jobs_by_state)
    register("tipbench_queue_length", "gauge", "Queued jobs.", queued_jobs)
    register("tipbench_event_streams", "gauge", "Open event streams.", lambda: {labels(): float(panel.streams.n_open)})
