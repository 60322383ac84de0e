"""Jobs pages: the list, and one job with live updates. The pages work without JavaScript; a script updates them."""

from __future__ import annotations

import importlib.util
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import JobConflict, TipbenchError
from tipbench.jobs.events import strip_logins
from tipbench.jobs.job import ACTIVE, ENDED, Job, JobKind, JobState
from tipbench.jobs.progress import ModelProgress, Phase, Progress
from tipbench.jobs.store import JobFilter
from tipbench.plan.config import split_names
from tipbench.text import join_names, plural
from tipbench.web.api.jobs import JobPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState, panel_of
from tipbench.web.errors import Invalid, WebError
from tipbench.web.forms import LIMIT, Limit, Next, form_value
from tipbench.web.job_service import job_links, retry_job
from tipbench.web.panel.pages import Chip, duration, page

RETRIABLE = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.LOST})
RUNNERS = {"local": "this machine", "airflow": "Airflow"}
_STEP = 25  # percent between two announcements for screen readers
_PHASES = {
    Phase.LOADING: "loading",
    Phase.GENERATING: "answering",
    Phase.UNLOADING: "unloading",
    Phase.EMPTY: "done, memory freed",
    Phase.STOPPED: "stopped",
}
_BADGES = {
    Phase.LOADING: "queued",
    Phase.GENERATING: "running",
    Phase.UNLOADING: "queued",
    Phase.EMPTY: "ok",
    Phase.STOPPED: "cancelled",
}
_BRIEF = 240
_LATER, _NEVER = "not started", "nothing generated"


@dataclass(frozen=True)
class ModelRow:
    """Progress of one model of a collect."""

    model: str
    phase: str  # for the style sheet; `words` is the displayed text
    words: str
    badge: str = "later"
    done: int = 0
    total: int | None = None  # None until the model starts
    failed: int = 0
    output_tokens: int = 0
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class JobText:
    """A job's texts for the pages. `place` is its position in the queue, None if it is not queued."""

    job: Job
    progress: Progress
    place: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.job.state in ENDED

    @property
    def cancelling(self) -> bool:
        """Whether cancellation is requested and the job has not ended yet."""
        return self.job.cancel_requested is not None and not self.ended

    @property
    def can_cancel(self) -> bool:
        """Whether the job can be cancelled."""
        return not self.ended and not self.cancelling

    @property
    def can_retry(self) -> bool:
        """Whether the job can be retried."""
        return self.job.state in RETRIABLE

    @property
    def state(self) -> str:
        """The displayed state."""
        if self.cancelling:
            return "cancelling"
        return "paused" if self.paused else self.job.state.value

    @property
    def paused(self) -> bool:
        """Whether the job is running but waiting for an unavailable server."""
        return self.job.state is JobState.RUNNING and bool(self.progress.waiting_for)

    @property
    def badge(self) -> str:
        """The state that determines the badge's icon and colour."""
        return JobState.WAITING.value if self.paused else self.job.state.value

    @property
    def reason(self) -> str:
        """The reason for the state, without credentials."""
        return strip_logins(self.job.reason)

    @property
    def runs_on(self) -> str | None:
        """The runner's name, or None for this machine."""
        name = self.job.runner
        return None if name == "local" else RUNNERS.get(name, name)

    @property
    def found_again(self) -> bool:
        """Whether a lost job may reappear: its reason suggests no retry, and waiting is better than a second job."""
        return self.job.state is JobState.LOST and "retry" not in self.job.reason

    @property
    def seconds(self) -> float | None:
        """Duration of the run in seconds, or None until it has ended."""
        job = self.job
        return job.ended - job.started if job.ended is not None and job.started is not None else None

    @property
    def models(self) -> tuple[ModelRow, ...]:
        """The requested models in the order they run; those not started come last."""
        begun = {each.model: each for each in self.progress.models}
        later = _NEVER if self.progress.exit_code is not None or self.ended else _LATER
        wanted = split_names(str(self.job.arguments.get("models", ""))) if self.job.kind is JobKind.COLLECT else ()
        rest = [ModelRow(name, "later", later) for name in wanted if name not in begun]
        return (*map(_line, begun.values()), *rest)

    @property
    def share(self) -> float | None:
        """Progress from 0 to 1, or None while unknown."""
        judging, simulating = self.progress.judging, self.progress.simulating
        if self.job.state is JobState.SUCCEEDED:
            return 1.0
        if simulating is not None:
            return simulating.done / simulating.total
        if judging is not None:
            return (judging.scored + judging.unscored) / judging.total if judging.total else None
        return _share(self.models)

    @property
    def headline(self) -> str:
        """The status in one sentence."""
        text_of = {
            JobState.QUEUED: self._queued,
            JobState.RUNNING: self._running,
            JobState.SUCCEEDED: self._succeeded,
        }.get(self.job.state)
        if text_of is not None:
            return text_of()
        if self.job.state is JobState.WAITING:
            why = f" {self.reason}" if self.reason else ""
            return f"Waiting for a judge; it uses no resources.{why}"
        if self.job.state is JobState.CANCELLED and self.job.started is None:
            return self.reason or "Cancelled before it started."
        return self.reason or self.progress.failure or "See the log for the reason."

    @property
    def evidence(self) -> tuple[str, str]:
        """Badge state and text for the models observed in the server's memory; claims only what was sampled."""
        seen = self.progress.memory
        if seen is None or seen.samples == 0:  # failed samples are counted separately
            return "unknown", "memory was not observed"
        if seen.most_resident > 1:
            return "failed", "more than one model in memory"
        if seen.foreign:
            return "stale", "other clients' models in memory"
        return "ok", "never more than one model in memory"

    @property
    def brief(self) -> str:
        """The headline shortened for lists."""
        text = " ".join(self.headline.split())
        return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 1]}…"

    @property
    def title(self) -> str:
        """The title of the browser tab."""
        share = self.share
        known = self.job.state is JobState.RUNNING and share is not None
        state = f"{int((share or 0) * 100)} %" if known else self.state.capitalize()
        return f"{state} · {self.job.kind.value} {self.job.experiment}"

    @property
    def announcement(self) -> str:
        """Text for screen readers; changes with the state and with every quarter of the progress."""
        share = self.share
        if self.ended or share is None:
            state, headline = self.state.capitalize(), self.headline if self.ended else ""
            return headline if headline.startswith(state) else f"{state}. {headline}".strip()
        return f"{self.state.capitalize()}, {int(share * 100) // _STEP * _STEP} % done."

    def _queued(self) -> str:
        if self.reason:
            return self.reason
        if self.place is None or self.place <= 1:
            return "Next in the queue: it starts as soon as its server or model is free."
        return f"Position {self.place} in the queue, behind jobs that need the same server or model."

    def _running(self) -> str:
        progress = self.progress
        if self.cancelling:
            return "Cancelling: it stops, unloads its model and records the finished results."
        if progress.waiting_for:
            return f"Waiting for {join_names(progress.waiting_for, 3)}; it continues once the server is available."
        if progress.judging is not None:
            seen = progress.judging
            return f"{seen.judge} has processed {seen.scored + seen.unscored:,} of {plural(seen.total, 'item')}."
        if progress.simulating is not None:
            seeds = progress.simulating
            return f"World {seeds.world}: {seeds.done:,} of {plural(seeds.total, 'seed')} simulated."
        if progress.recording_left:
            return f"Generation finished; {plural(progress.recording_left, 'result')} being sent to MLflow."
        if self.reason:
            return self.reason
        now = progress.models[-1] if progress.models else None
        if now is None:
            return "Starting."
        return f"{now.model}: {_PHASES[now.phase]}, {now.done:,} of {plural(now.total, 'cell')}."

    def _succeeded(self) -> str:
        done, judged = self.progress.collected, self.progress.judged
        if done is not None:
            time = f" in {duration(done.seconds)}" if done.seconds is not None else ""
            return (
                f"{plural(done.generated, 'cell')} generated{time}, {done.recorded_before:,} recorded before, "
                f"{done.failed:,} failed.{f' {self.reason}' if self.reason else ''}"
            )
        if judged is not None:
            kind = " provisionally" if judged.provisional else ""
            return f"{judged.judge} has{kind} scored {plural(judged.scored, 'item')}."
        if (seeds := self.progress.simulating) is not None:
            return f"World {seeds.world}: {plural(seeds.total, 'seed')} simulated."
        return "Finished."


def _line(model: ModelProgress) -> ModelRow:
    return ModelRow(
        model.model,
        model.phase.value,
        _PHASES[model.phase],
        _BADGES[model.phase],
        model.done,
        model.total,
        model.failed,
        model.output_tokens,
        model.tokens_per_s,
    )


def _share(models: tuple[ModelRow, ...]) -> float | None:
    """Returns the progress over all models; those not started count as much as the largest started one."""
    known = [line.total for line in models if line.total]
    if not known:
        return None
    total = sum(line.total if line.total is not None else max(known) for line in models)
    return sum(line.done for line in models) / total


router = APIRouter(include_in_schema=False, dependencies=[ADMINS_ONLY])
LOG_BYTES = 16_384
_CHIP_JOBS = 100
_Word = TypeVar("_Word", bound=StrEnum)
_Choice = Annotated[str, Query(max_length=20)]


@router.get("/jobs")
def jobs_page(
    request: Request,
    panel: PanelState,
    state: _Choice = "",
    kind: _Choice = "",
    experiment: Annotated[str, Query(max_length=200)] = "",
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> HTMLResponse:
    """Lists the jobs, newest first; filters and page are in the URL."""
    which = JobFilter(_one_of(JobState, state, "state"), _one_of(JobKind, kind, "kind"), experiment.strip() or None)
    listed = panel.jobs.listed(which, limit=limit, after=next)
    query = {key: value for key, value in request.query_params.items() if value}
    return page(
        request,
        "jobs.html",
        rows=[_row(panel, job, listed.queue_positions.get(job.id)) for job in listed.jobs],
        which=which,
        states=list(JobState),
        kinds=list(JobKind),
        following=listed.next,
        first=next is None,
        json_url=f"/api/bench/jobs?{urlencode(query)}" if query else "/api/bench/jobs",
    )


@router.get("/jobs/{job_id}")
def job_page(request: Request, panel: PanelState, job_id: JobPath) -> HTMLResponse:
    """Shows a job."""
    return _page(request, panel, job_id)


@router.get("/jobs/{job_id}/live")
def job_live(request: Request, panel: PanelState, job_id: JobPath) -> HTMLResponse:
    """Returns the part of the job page that changes, for its script."""
    return page(request, "job_live.html", **_context(panel, job_id))


@router.post("/jobs/{job_id}/cancel")
def cancel_job(request: Request, panel: PanelState, job_id: JobPath) -> Response:
    """Cancels a job; shows its page with an error if it has already ended."""
    try:
        panel.jobs.cancel(job_id)
    except JobConflict as exc:
        return _page(request, panel, job_id, fault=str(exc), status=409)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/retry")
async def retry(request: Request, panel: PanelState, admin: Admin, job_id: JobPath) -> Response:
    """Starts a retry of the job; the form's idempotency key prevents duplicates when it is sent again."""
    key = await form_value(request, "key") or None
    try:
        submitted = await run_in_threadpool(retry_job, panel, job_id, started_by=admin.name, key=key)
    except (JobConflict, WebError) as exc:
        status = exc.status if isinstance(exc, WebError) else 409
        return await run_in_threadpool(_page, request, panel, job_id, fault=str(exc), status=status)
    return RedirectResponse(f"/jobs/{submitted.job.id}", status_code=303)


def running_chip(request: Request) -> Chip | None:
    """Returns the header's chip with the number of running or queued jobs; one cheap query, as every page needs it."""
    try:
        found = panel_of(request).jobs.store.in_states({JobState.RUNNING, JobState.QUEUED}, limit=_CHIP_JOBS)
    except TipbenchError:  # shown on the jobs pages
        return None
    running = [job for job in found if job.state is JobState.RUNNING]
    named, word = (running, "running") if running else (found, "queued")
    if not named:
        return None
    url = f"/jobs/{named[0].id}" if len(named) == 1 else f"/jobs?state={word}"
    return Chip(f"{len(named)} {word}", url, word)


def _page(request: Request, panel: Panel, job_id: str, *, fault: str | None = None, status: int = 200) -> HTMLResponse:
    context = _context(panel, job_id)
    return page(
        request,
        "job.html",
        status=status,
        fault=fault,
        log=panel.jobs.log(job_id, LOG_BYTES),
        log_bytes=LOG_BYTES,
        json_url=context["links"]["self"],
        mlflow_url=context["job"].links.get("mlflow"),
        **context,
    )


def _context(panel: Panel, job_id: str) -> dict[str, Any]:
    view = panel.jobs.view(job_id)
    return {
        "job": view.job,
        "words": JobText(view.job, view.snapshot.progress, view.place),
        "progress": view.snapshot.progress,
        "links": job_links(view.job),
        "retry_key": new_idempotency_key(),
        "running_s": time.time() - (view.job.started or 0.0) if view.job.state is JobState.RUNNING else None,
        "charts": all(importlib.util.find_spec(name) for name in ("altair", "vl_convert")),
    }


def _row(panel: Panel, job: Job, place: int | None) -> JobText:
    """Returns a list row; events are read for active jobs only, since an ended job stores its result."""
    progress = panel.jobs.progress.current(job).progress if job.state in ACTIVE else Progress()
    return JobText(job, progress, place)


def _one_of(kinds: type[_Word], text: str, name: str) -> _Word | None:
    """Parses a filter value; empty means no filter."""
    if not text:
        return None
    try:
        return kinds(text)
    except ValueError:
        known = ", ".join(each.value for each in kinds)
        raise Invalid(f"{name} is one of {known} (got {text[:40]!r}).", path=f"query.{name}") from None


def new_idempotency_key() -> str:
    """Returns a new idempotency key, so that a form submitted twice starts one job."""
    return f"form-{secrets.token_urlsafe(18)}"
