"""Texts for a job's status and progress."""

from __future__ import annotations

from dataclasses import dataclass

from tipbench.jobs.events import strip_logins
from tipbench.jobs.job import ENDED, Job, JobKind, JobState
from tipbench.jobs.progress import ModelProgress, Phase, Progress
from tipbench.plan.config import split_names
from tipbench.text import join_names, plural
from tipbench.web.panel.template_filters import duration

RETRIABLE = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.LOST})
RUNNERS = {"local": "this machine", "airflow": "Airflow"}
_STEP = 25  # percent between two announcements for screen readers
_PHASES = {
    Phase.LOADING: "loading",
    Phase.GENERATING: "answering",
    Phase.UNLOADING: "unloading",
    Phase.EMPTY: "done, verified empty",
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
_LATER, _NEVER = "waits its turn", "nothing generated"


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
        judging = self.progress.judging
        if self.job.state is JobState.SUCCEEDED:
            return 1.0
        if judging is not None:
            return (judging.scored + judging.unscored) / judging.total if judging.total else None
        return _share(self.models)

    @property
    def headline(self) -> str:
        """The status in one sentence."""
        tell = {
            JobState.QUEUED: self._queued,
            JobState.RUNNING: self._running,
            JobState.SUCCEEDED: self._succeeded,
        }.get(self.job.state)
        if tell is not None:
            return tell()
        if self.job.state is JobState.WAITING:
            why = f" {self.reason}" if self.reason else ""
            return f"Parked until a judge has answered; it holds nothing meanwhile.{why}"
        if self.job.state is JobState.CANCELLED and self.job.started is None:
            return self.reason or "Cancelled before it was started."
        return self.reason or self.progress.failure or "The log tells why."

    @property
    def evidence(self) -> tuple[str, str]:
        """Badge state and text for the models observed in the server's memory; claims only what was sampled."""
        seen = self.progress.memory
        if seen is None or seen.samples == 0:  # failed samples are counted separately
            return "unknown", "memory was not seen"
        if seen.most_resident > 1:
            return "failed", "more than one model was seen at once"
        if seen.foreign:
            return "stale", "models of others were seen"
        return "ok", "never more than one model seen"

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
            return "Next in the queue: it starts as soon as what it needs is free."
        return f"Place {self.place} in the queue, behind jobs that need the same server or model."

    def _running(self) -> str:
        progress = self.progress
        if self.cancelling:
            return "Cancelling: it breaks off, unloads its model and records what is finished."
        if progress.waiting_for:
            return f"Waiting for {join_names(progress.waiting_for, 3)}; it goes on by itself once it answers."
        if progress.judging is not None:
            seen = progress.judging
            return f"{seen.judge} has looked at {seen.scored + seen.unscored:,} of {plural(seen.total, 'item')}."
        if progress.recording_left:
            return f"All is answered; {plural(progress.recording_left, 'result')} on the way to MLflow."
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
                f"{done.failed:,} failed."
            )
        if judged is not None:
            kind = " provisionally" if judged.provisional else ""
            return f"{judged.judge} has{kind} scored {plural(judged.scored, 'item')}."
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
