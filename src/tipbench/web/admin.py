"""create_app: the admin API put together. The panel's pages are further routers on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.concurrency import run_in_threadpool

import tipbench
from tipbench.jobs.job import JobState, Runner
from tipbench.record.store import RunStore
from tipbench.settings import Settings
from tipbench.web import errors, login
from tipbench.web import panel as pages
from tipbench.web.allowed import Allowed
from tipbench.web.api import batches, config, experiments, health, hook, jobs, judge, leaderboard, plan, runs, tokens
from tipbench.web.auth import Guard
from tipbench.web.batch_store import BatchStore
from tipbench.web.batches import BatchDesk
from tipbench.web.database import Database
from tipbench.web.deps import Panel
from tipbench.web.desk import JobDesk
from tipbench.web.hook import make_hook
from tipbench.web.hook_options import hook_options
from tipbench.web.limits import Attempts
from tipbench.web.metrics import Metrics
from tipbench.web.opening import Tracker
from tipbench.web.options import PanelOptions, panel_options
from tipbench.web.queries import Queries
from tipbench.web.rendering import Json
from tipbench.web.runners import make_runners
from tipbench.web.security import Shield
from tipbench.web.sessions import Sessions, load_key
from tipbench.web.streaming import Streams
from tipbench.web.tokens import TokenStore

OPEN = (health.router, login.router)  # for everybody
ROUTERS: tuple[APIRouter, ...] = (
    *OPEN,
    login.closing,
    health.counted,
    experiments.router,
    runs.router,
    leaderboard.router,
    config.router,
    plan.router,
    jobs.running,
    jobs.router,
    judge.router,
    judge.watching,
    batches.router,
    batches.deciding,
    jobs.judging,
    hook.router,
    tokens.router,
)
_ABOUT = """Start, watch and decide. Programs send `Authorization: Bearer TOKEN`; people log in at /login.

Lists are `{"items", "next"}`: hand `next` back as `?next=`. Every failure is `{"error": {"code", "message", "path"}}`.
A token of the role *judge* may judge, on sheets and batches of its own, and nothing else."""


def create_app(
    settings: Settings,
    options: PanelOptions | None = None,
    *,
    store: RunStore | None = None,
    routers: Sequence[APIRouter] = (),
    runners: Mapping[str, Runner] | None = None,
) -> FastAPI:
    """The application. `store` replaces the MLflow of the settings; `routers` come after the API's own.

    `runners` by name carry jobs out; without them those of the settings do: this machine, and Airflow. While it is
    served it looks after its jobs, and they outlive it.
    """
    hook_wish = hook_options(settings)
    panel, database = make_panel(settings, options or panel_options(settings), store, runners)
    webhook = None if hook_wish is None else make_hook(hook_wish, panel, database, given=store is not None)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        panel.jobs.supervisor.start()
        if webhook is not None:
            webhook.start()
        yield
        if webhook is not None:
            await run_in_threadpool(webhook.close)
        await run_in_threadpool(panel.jobs.close)
        await run_in_threadpool(panel.tracker.close)
        await run_in_threadpool(database.close)

    app = FastAPI(
        title="tipbench",
        version=tipbench.__version__,
        description=_ABOUT,
        openapi_url=None,  # it is behind authorisation, like everything else
        docs_url=None,  # their pages would load scripts from elsewhere
        redoc_url=None,
        default_response_class=Json,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.panel = panel
    app.state.hook = webhook
    app.state.batches = BatchDesk(panel, BatchStore(database))
    app.state.login_page = login.plain_login_page
    app.state.error_page = None  # (request, status, error) → response, once there are pages
    errors.install(app)
    for router in (*ROUTERS, *routers):
        app.include_router(router)
    pages.install(app)
    app.add_middleware(Shield, hosts=panel.options.hosts, metrics=panel.metrics)
    return app


def make_panel(
    settings: Settings,
    options: PanelOptions,
    store: RunStore | None = None,
    runners: Mapping[str, Runner] | None = None,
) -> tuple[Panel, Database]:
    """Everything the handlers need. UsageError when a setting or a file is wrong: better now than at the first run."""
    settings.collect_config({})
    database = Database(settings.home)
    sessions = Sessions(load_key(settings.home), database, life_s=options.session_s)
    guard = Guard(TokenStore(database), sessions, Attempts(), options.admin_token)
    queries, metrics = Queries(), Metrics()
    tracker, streams = Tracker(settings, store), Streams()
    desk = JobDesk.of(settings, make_runners(settings, tracker) if runners is None else runners)
    metrics.show("tipbench_info", "gauge", "Always 1.", lambda: {(("version", tipbench.__version__),): 1.0})
    metrics.show("tipbench_cache_requests_total", "counter", "Questions to the cache.", lambda: dict(_cache(queries)))
    metrics.show("tipbench_jobs", "gauge", "Jobs by state.", lambda: dict(_jobs(desk)))
    metrics.show("tipbench_queue_length", "gauge", "Jobs that wait for their turn.", lambda: {(): _waiting(desk)})
    metrics.show("tipbench_event_streams", "gauge", "Open streams of events.", lambda: {(): float(streams.open)})
    panel = Panel(
        settings=settings,
        options=options,
        guard=guard,
        tracker=tracker,
        queries=queries,
        allowed=Allowed.of(settings, options),
        metrics=metrics,
        jobs=desk,
        streams=streams,
    )
    return panel, database


def _jobs(desk: JobDesk) -> Iterator[tuple[tuple[tuple[str, str], ...], float]]:
    for state, number in desk.store.counts().items():
        yield (("state", state.value),), float(number)


def _waiting(desk: JobDesk) -> float:
    return float(desk.store.counts()[JobState.QUEUED])


def _cache(queries: Queries) -> Iterator[tuple[tuple[tuple[str, str], ...], float]]:
    for name in ("snapshots", "counts", "small", "large"):
        cache = getattr(queries, name)
        for result in ("hits", "misses"):
            yield (("cache", name), ("result", result)), float(getattr(cache, result))
