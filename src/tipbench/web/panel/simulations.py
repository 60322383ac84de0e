"""Simulations pages: a form to start a simulation, the recorded simulations, and one simulation with its curves."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.charts import THEMES, to_svg
from tipbench.errors import MlflowError, NotEnoughData, TipbenchError, UsageError
from tipbench.jobs.job import ENDED, JobKind
from tipbench.jobs.store import JobFilter
from tipbench.record.store import RunStore
from tipbench.simulate.charts import curves_chart
from tipbench.simulate.simulation import ALL_POLICIES, SimulationConfig, make_simulation_config
from tipbench.simulate.world import WorldName
from tipbench.web.api.jobs import JobPath
from tipbench.web.api.policies import start_simulation
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import ThemeName
from tipbench.web.deps import Admin, Panel, PanelState, Store
from tipbench.web.errors import NotFound
from tipbench.web.panel.jobs import new_idempotency_key
from tipbench.web.panel.pages import SentForm, charts_installed, is_mlflow_error, page
from tipbench.workflows.simulation import read_simulation, read_simulations

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)
_MAX_RECORDED = 30  # simulations listed
_MAX_JOBS = 20  # newest jobs, of which the unfinished ones are listed
_NARROW_PX = 260  # width of the chart on a narrow screen
RunId = Annotated[str, Path(pattern=r"^[0-9a-f]{8,64}$")]


@router.get("/simulations")
def simulations_page(request: Request, panel: PanelState) -> HTMLResponse:
    """List running and recorded simulations, with a form to start one."""
    return _render_list(request, panel, SimulationConfig().model_dump(mode="json"))


@router.post("/simulations")
def start(request: Request, panel: PanelState, admin: Admin, form: SentForm) -> Response:
    """Start a simulation and redirect to the page of its job, which shows the curves live."""
    values = {name: text for name in SimulationConfig.model_fields if (text := form.fields.get(name, "").strip())}
    try:
        config = make_simulation_config(values)
    except UsageError as exc:
        error = str(exc).removeprefix("--")  # the message starts with the option's name on the command line
        return _render_list(request, panel, values, form_error=error)
    submitted = start_simulation(panel, config, started_by=admin.name, idempotency_key=form.fields.get("key") or None)
    return RedirectResponse(f"/jobs/{submitted.job.id}", status_code=303)


def _render_list(
    request: Request, panel: Panel, values: dict[str, Any], *, form_error: str | None = None
) -> HTMLResponse:
    mlflow_error, recorded = None, []
    try:
        with panel.mlflow.connected() as mlflow:
            recorded = list(read_simulations(mlflow.store, _MAX_RECORDED))
    except NotEnoughData:  # MLflow has never been used
        pass
    except TipbenchError as exc:
        if not is_mlflow_error(exc):
            raise
        mlflow_error = str(exc)
    jobs = panel.jobs.page(JobFilter(kind=JobKind.SIMULATE), limit=_MAX_JOBS, after=None).items
    return page(
        request,
        "simulations.html",
        status=422 if form_error else 200,
        rows=[{"run_id": run.run_id, "at": run.start_ms / 1000, "result": result} for run, result in recorded],
        unfinished=[job for job in jobs if job.state not in ENDED],
        mlflow_error=mlflow_error,
        values=values,
        form_error=form_error,
        worlds=[(name.value, name.value) for name in WorldName],  # value and label of each option
        policies=[(name, name) for name in ALL_POLICIES],
        key=new_idempotency_key(),
        json_url="/api/bench/simulations",
    )


@router.get("/simulations/{run_id}")
def simulation_page(request: Request, store: Store, run_id: RunId) -> HTMLResponse:
    """Show one recorded simulation."""
    return page(
        request,
        "simulation.html",
        run_id=run_id,
        result=_read_recorded(store, run_id),
        charts=charts_installed(),
        json_url="/api/bench/simulations",
    )


@router.get("/simulations/{run_id}/curves.svg")
def recorded_curves(store: Store, run_id: RunId, theme: ThemeName = "light", narrow: bool = False) -> Response:
    """Return the curves of a recorded simulation."""
    return _svg(_read_recorded(store, run_id), theme, narrow=narrow)


@router.get("/jobs/{job_id}/curves.svg")
def live_curves(panel: PanelState, job_id: JobPath, theme: ThemeName = "light", narrow: bool = False) -> Response:
    """Return the curves of a running simulation, computed from the finished seeds."""
    job = panel.jobs.store.get(job_id)
    simulating = panel.jobs.progress.current(job).progress.simulating
    if simulating is None:
        raise NotFound("This job has no curves yet; they appear with its first seed.", path="path.job_id")
    curves = zip(simulating.policies, simulating.rewards, strict=True)
    result = {  # the part of a recorded result that the chart uses
        "config": {
            "world": simulating.world,
            "users": simulating.users,
            "rounds": max(simulating.rounds),  # `rounds` are the x-values of the curves
            "seeds": simulating.total,
        },
        "seeds_done": simulating.done,
        "policies": [
            {"name": name, "curve": {"round": simulating.rounds, "reward": reward}} for name, reward in curves
        ],
    }
    return _svg(result, theme, narrow=narrow)


def _read_recorded(store: RunStore, run_id: str) -> dict[str, Any]:
    try:
        result = read_simulation(store, run_id)
    except MlflowError as exc:
        if exc.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        result = None
    if result is None:  # no such run, or not a simulation
        raise NotFound(f"There is no simulation {run_id}. Choose one from the list.", path="path.run_id")
    return result


def _svg(result: dict[str, Any], theme: str, *, narrow: bool) -> Response:
    chart_theme = THEMES[theme]
    if narrow:
        chart = curves_chart(result, chart_theme, width=_NARROW_PX)
        chart = chart.properties(title="")  # it would not fit, and it repeats the page's heading
    else:
        chart = curves_chart(result, chart_theme)
    return Response(to_svg(chart, chart_theme), media_type="image/svg+xml")
