"""Jobs pages: the list of jobs, and one job with live updates. The pages also work without JavaScript."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import JobConflict
from tipbench.jobs.job import ACTIVE, ENDED, RETRIABLE, Job, JobKind, JobState
from tipbench.jobs.progress import ModelProgress, Phase, Progress
from tipbench.jobs.store import JobFilter
from tipbench.markup import duration
from tipbench.plan.collect_config import split_names
from tipbench.record.events import strip_logins
from tipbench.text import join_names, plural
from tipbench.web.api.jobs import JobPath
from tipbench.web.api.models import job_links
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState
from tipbench.web.errors import Invalid, WebError
from tipbench.web.forms import DEFAULT_LIMIT, Limit, Next
from tipbench.web.job_service import retry_job
from tipbench.web.panel.pages import SentForm, charts_installed, page

RUNNERS = {"local": "this machine", "airflow": "Airflow"}
_ANNOUNCED_PERCENT = 25  # progress between two announcements for screen readers
_PHASES = {  # displayed text and badge
    Phase.LOADING: ("loading", "queued"),
    Phase.GENERATING: ("answering", "running"),
    Phase.UNLOADING: ("unloading", "queued"),
    Phase.EMPTY: ("done, memory freed", "ok"),
    Phase.STOPPED: ("stopped", "cancelled"),
}
_MAX_BRIEF_CHARS = 240
_MIN_DONE = 2  # number of finished cells, items or seeds needed to estimate the time left


@dataclass(frozen=True)
class ModelRow:
    """A requested model of a collect."""

    model: str
    state: str  # as displayed
    badge: str
    progress: ModelProgress | None = None  # None until the model starts
    refusal: str | None = None


@dataclass(frozen=True)
class JobText:
    """A job's texts for the pages."""

    job: Job
    progress: Progress
    position: int | None = None  # in the queue, from 1; None if the job is not queued
    now: float = field(default_factory=time.time)

    @property
    def ended(self) -> bool:
        return self.job.state in ENDED

    @property
    def cancelling(self) -> bool:
        return self.job.cancel_requested is not None and not self.ended

    @property
    def can_retry(self) -> bool:
        return self.job.state in RETRIABLE

    @property
    def state(self) -> str:
        """The displayed state: the job's, or "cancelling" or "paused"."""
        if self.cancelling:
            return "cancelling"
        return "paused" if self.paused else self.job.state.value

    @property
    def paused(self) -> bool:
        """Whether the job waits for an unavailable server."""
        return self.job.state is JobState.RUNNING and bool(self.progress.waiting_for)

    @property
    def badge(self) -> str:
        """The state that determines the badge's icon and colour."""
        return JobState.WAITING.value if self.paused else self.job.state.value

    @property
    def reason(self) -> str:
        """The reason for the state, without logins in URLs."""
        return strip_logins(self.job.reason)

    @property
    def runs_on(self) -> str | None:
        """The displayed name of the runner, or None for this machine."""
        name = self.job.runner
        return None if name == "local" else RUNNERS.get(name, name)

    @property
    def may_reappear(self) -> bool:
        """Whether a lost job may be found again. If not, its reason suggests a retry."""
        return self.job.state is JobState.LOST and "retry" not in self.job.reason

    @property
    def duration_s(self) -> float | None:
        """Seconds from start to end, or None if the job has not ended or never started."""
        if self.job.ended is None or self.job.started is None:
            return None
        return self.job.ended - self.job.started

    @property
    def models(self) -> tuple[ModelRow, ...]:
        """The models in the order in which they run. Models that have not started come last."""
        rows = []
        for each in self.progress.models:
            state, badge = _PHASES[each.phase]
            rows.append(ModelRow(each.model, state, badge, progress=each))
        if self.job.kind is not JobKind.COLLECT:
            return tuple(rows)
        started = {row.model for row in rows}
        refusals = {each.model: strip_logins(each.reason) for each in self.progress.refused}
        command_ended = self.ended or self.progress.exit_code is not None
        unstarted_state = "nothing generated" if command_ended else "not started"
        for name in split_names(str(self.job.arguments.get("models", ""))):
            if name in started:
                continue
            if name in refusals:
                rows.append(ModelRow(name, "refused", "refused", refusal=refusals[name]))
            else:
                rows.append(ModelRow(name, unstarted_state, "later"))
        return tuple(rows)

    @property
    def share(self) -> float | None:
        """Progress from 0 to 1, or None while unknown."""
        if self.job.state is JobState.SUCCEEDED:
            return 1.0
        finished, total = self._finished_and_total()
        return finished / total if total else None

    @property
    def running_s(self) -> float | None:
        """Seconds since the start of a running job, or None if it is not running."""
        if self.job.state is not JobState.RUNNING or self.job.started is None:
            return None
        return max(0.0, self.now - self.job.started)

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until a running job ends; None if unknown."""
        running_s = self.running_s
        if running_s is None or self.paused or self.cancelling:
            return None
        finished, total = self._finished_and_total()
        recorded_before = sum(each.recorded for each in self.progress.models)  # by an earlier collect
        done_by_job = finished - recorded_before
        if done_by_job < _MIN_DONE or finished >= total:
            return None
        return running_s / done_by_job * (total - finished)

    @property
    def headline(self) -> str:
        """The status in one sentence."""
        state, reason = self.job.state, self.reason
        if state is JobState.RUNNING:
            return self._running_headline()
        if state is JobState.SUCCEEDED:
            return self._succeeded_headline()
        if state is JobState.WAITING:
            suffix = f" {reason}" if reason else ""
            return f"Waiting for a judge; the job uses no resources.{suffix}"
        if state is JobState.QUEUED:
            if self.position is None or self.position <= 1:
                return reason or "Next in the queue: it starts as soon as its server or model is free."
            return reason or f"Position {self.position} in the queue, behind jobs that need the same server or model."
        if state is JobState.CANCELLED and self.job.started is None:
            return reason or "Cancelled before it started."
        return reason or self.progress.failure or "See the log for the reason."

    @property
    def evidence(self) -> tuple[str, str]:
        """Badge and text on whether more than one model was observed in the server's memory."""
        memory = self.progress.memory
        if memory is None or memory.samples == 0:  # samples without a response are not counted
            return "unknown", "memory was not observed"
        if memory.most_resident > 1:
            return "failed", "more than one model in memory"
        if memory.foreign:
            return "stale", "other clients' models in memory"
        return "ok", "never more than one model in memory"

    @property
    def brief(self) -> str:
        """The headline shortened for lists."""
        text = " ".join(self.headline.split())
        return text if len(text) <= _MAX_BRIEF_CHARS else f"{text[: _MAX_BRIEF_CHARS - 1]}…"

    @property
    def title(self) -> str:
        """The title of the browser tab."""
        share = self.share
        state = self.state.capitalize()
        if self.job.state is JobState.RUNNING and share is not None:
            state = f"{int(share * 100)} %"
        return f"{state} · {self.job.kind.value} {self.job.experiment}"

    @property
    def announcement(self) -> str:
        """Text for screen readers. It changes with the state and with every quarter of the progress."""
        state, share = self.state.capitalize(), self.share
        if self.ended:
            if self.headline.startswith(state):
                return self.headline
            return f"{state}. {self.headline}".strip()
        if share is None:
            return f"{state}."
        percent = int(share * 100) // _ANNOUNCED_PERCENT * _ANNOUNCED_PERCENT
        return f"{state}, {percent} % done."

    def _finished_and_total(self) -> tuple[int, int]:
        """Return the number of finished cells, items or seeds, and their total; both are 0 while unknown.

        A model that has not started is estimated to have as many cells as the largest started model.
        """
        judging, simulating = self.progress.judging, self.progress.simulating
        if judging is not None:
            return judging.scored + judging.unscored, judging.total
        if simulating is not None:
            return simulating.done, simulating.total
        started = self.progress.models
        n_not_started = len([row for row in self.models if row.progress is None and row.refusal is None])
        largest = max((each.total for each in started), default=0)
        total = sum(each.total for each in started) + n_not_started * largest
        return sum(each.done for each in started), total

    def _running_headline(self) -> str:
        progress = self.progress
        if self.cancelling:
            return "Cancelling: it stops, unloads its model and records the finished results."
        if progress.waiting_for:
            return f"Waiting for {join_names(progress.waiting_for, 3)}; the job continues once the server is available."
        if progress.judging is not None:
            judging = progress.judging
            processed = judging.scored + judging.unscored
            if processed >= judging.total:
                return f"{judging.judge} has processed {plural(judging.total, 'item')}; saving scores."
            return f"{judging.judge} has processed {processed:,} of {plural(judging.total, 'item')}."
        if progress.simulating is not None:
            seeds = progress.simulating
            return f"World {seeds.world}: {seeds.done:,} of {plural(seeds.total, 'seed')} simulated."
        if progress.recording_left:
            return f"Saving results: {plural(progress.recording_left, 'result')} to be sent to MLflow."
        if self.reason:
            return self.reason
        if not progress.models:
            return "Starting."
        current = progress.models[-1]
        phase, _ = _PHASES[current.phase]
        return f"{current.model}: {phase}, {current.done:,} of {plural(current.total, 'cell')}."

    def _succeeded_headline(self) -> str:
        collected, judged = self.progress.collected, self.progress.judged
        if collected is not None:
            time_taken = f" in {duration(collected.seconds)}" if collected.seconds is not None else ""
            reason = f" {self.reason}" if self.reason else ""
            return (
                f"{plural(collected.generated, 'cell')} generated{time_taken}, "
                f"{collected.recorded_before:,} recorded before, {collected.failed:,} failed.{reason}"
            )
        if judged is not None:
            provisionally = " provisionally" if judged.provisional else ""
            return f"{judged.judge} has{provisionally} scored {plural(judged.scored, 'item')}."
        if (seeds := self.progress.simulating) is not None:
            return f"World {seeds.world}: {plural(seeds.total, 'seed')} simulated."
        return "Finished."


router = APIRouter(include_in_schema=False, dependencies=[ADMINS_ONLY])
_SHOWN_LOG_BYTES = 16_384  # from the end of the log
_Enum = TypeVar("_Enum", bound=StrEnum)
_FilterText = Annotated[str, Query(max_length=20)]


@router.get("/jobs")
def jobs_page(
    request: Request,
    panel: PanelState,
    state: _FilterText = "",
    kind: _FilterText = "",
    experiment: Annotated[str, Query(max_length=200)] = "",
    limit: Limit = DEFAULT_LIMIT,
    next: Next = None,  # noqa: A002 - the name in the URL
) -> HTMLResponse:
    """List the jobs, newest first."""
    filters = JobFilter(
        state=_parse_filter(JobState, state, "state"),
        kind=_parse_filter(JobKind, kind, "kind"),
        experiment=experiment.strip() or None,
    )
    listed = panel.jobs.page(filters, limit=limit, after=next)
    positions = panel.jobs.queue_positions()
    rows = []
    for job in listed.items:
        # Only the events of active jobs are read: a queued job has no progress yet, and an ended job's row shows none.
        progress = panel.jobs.progress.current(job).progress if job.state in ACTIVE else Progress()
        rows.append(JobText(job, progress, positions.get(job.id)))
    query = {key: value for key, value in request.query_params.items() if value}
    return page(
        request,
        "jobs.html",
        rows=rows,
        filters=filters,
        states=[("", "any"), *((each, each) for each in JobState)],
        kinds=[("", "any"), *((each, each) for each in JobKind)],
        next_cursor=listed.next,
        is_first_page=next is None,
        json_url=f"/api/bench/jobs?{urlencode(query)}" if query else "/api/bench/jobs",
    )


@router.get("/jobs/{job_id}")
def job_page(request: Request, panel: PanelState, job_id: JobPath) -> HTMLResponse:
    return _render_job(request, panel, job_id)


@router.get("/jobs/{job_id}/live")
def job_live(request: Request, panel: PanelState, job_id: JobPath) -> HTMLResponse:
    """Return the changing part of the job page, which the page's script requests repeatedly."""
    return page(request, "job_live.html", **_job_context(panel, job_id))


@router.post("/jobs/{job_id}/cancel")
def cancel_job(request: Request, panel: PanelState, job_id: JobPath) -> Response:
    """Cancel a job; show its page with an error if it has already ended."""
    try:
        panel.jobs.cancel(job_id)
    except JobConflict as exc:
        return _render_job(request, panel, job_id, error=str(exc), status=409)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/retry")
def retry(request: Request, panel: PanelState, admin: Admin, job_id: JobPath, form: SentForm) -> Response:
    """Retry the job. The form's idempotency key prevents a second retry when the form is sent again."""
    try:
        submitted = retry_job(panel, job_id, started_by=admin.name, idempotency_key=form.fields.get("key") or None)
    except JobConflict as exc:
        return _render_job(request, panel, job_id, error=str(exc), status=409)
    except WebError as exc:
        return _render_job(request, panel, job_id, error=str(exc), status=exc.status)
    return RedirectResponse(f"/jobs/{submitted.job.id}", status_code=303)


def _render_job(
    request: Request, panel: Panel, job_id: str, *, error: str | None = None, status: int = 200
) -> HTMLResponse:
    context = _job_context(panel, job_id)
    return page(
        request,
        "job.html",
        status=status,
        error=error,
        log=panel.jobs.log(job_id, _SHOWN_LOG_BYTES),
        log_bytes=_SHOWN_LOG_BYTES,
        options=[(key, _option_text(value)) for key, value in context["job"].arguments.items() if value is not None],
        json_url=context["links"]["self"],
        mlflow_url=context["job"].links.get("mlflow"),
        **context,
    )


def _job_context(panel: Panel, job_id: str) -> dict[str, Any]:
    job, position = panel.jobs.get_with_position(job_id)
    progress = panel.jobs.progress.current(job).progress
    return {
        "job": job,
        "text": JobText(job, progress, position),
        "progress": progress,
        "links": job_links(job),
        "retry_key": new_idempotency_key(),
        "charts": charts_installed(),
    }


def _option_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _parse_filter(values: type[_Enum], text: str, name: str) -> _Enum | None:
    """Parse a filter value; empty means no filter. Raises Invalid."""
    if not text:
        return None
    try:
        return values(text)
    except ValueError:
        known = ", ".join(each.value for each in values)
        raise Invalid(f"{name} is one of {known} (got {text[:40]!r}).", path=f"query.{name}") from None


def new_idempotency_key() -> str:
    """Return a new idempotency key, so that a form submitted twice starts one job."""
    return f"form-{secrets.token_urlsafe(18)}"
