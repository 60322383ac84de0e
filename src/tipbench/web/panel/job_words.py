"""A job in words: where it stands, how far each model is, and what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass

from tipbench.compare.words import counted, listed
from tipbench.jobs.events import without_logins
from tipbench.jobs.job import ENDED, Job, JobKind, JobState
from tipbench.jobs.progress import ModelProgress, Phase, Progress
from tipbench.plan.config import split_names
from tipbench.web.panel.showing import duration

RETRIABLE = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.LOST})
RUNNERS = {"local": "this machine", "airflow": "Airflow"}
_STEP = 25  # percent between two announcements to who cannot see the bars
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
class ModelLine:
    """One model of a collect on the strip."""

    model: str
    phase: str  # for the style sheet; `words` says the same to people
    words: str
    badge: str = "later"
    done: int = 0
    total: int | None = None  # unknown until its block begins
    failed: int = 0
    output_tokens: int = 0
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class JobWords:
    """What the pages show of a job. `place` is its place in the queue, where it waits in one."""

    job: Job
    progress: Progress
    place: int | None = None

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self.job.state in ENDED

    @property
    def cancelling(self) -> bool:
        """Asked to end, and not ended yet."""
        return self.job.cancel_requested is not None and not self.ended

    @property
    def can_cancel(self) -> bool:
        """Whether asking it to end makes sense."""
        return not self.ended and not self.cancelling

    @property
    def can_retry(self) -> bool:
        """Whether a new job may take up what this one left."""
        return self.job.state in RETRIABLE

    @property
    def state(self) -> str:
        """The state as people read it."""
        if self.cancelling:
            return "cancelling"
        return "paused" if self.paused else self.job.state.value

    @property
    def paused(self) -> bool:
        """Running, and waiting for a server that is away."""
        return self.job.state is JobState.RUNNING and bool(self.progress.waiting_for)

    @property
    def badge(self) -> str:
        """The state whose mark and tone it has."""
        return JobState.WAITING.value if self.paused else self.job.state.value

    @property
    def reason(self) -> str:
        """Why it is as it is, as it may be shown."""
        return without_logins(self.job.reason)

    @property
    def runs_on(self) -> str | None:
        """Who carries it out, unless it is this machine."""
        name = self.job.runner
        return None if name == "local" else RUNNERS.get(name, name)

    @property
    def found_again(self) -> bool:
        """Whether it is only out of sight: its reason then names no retry, and waiting is better than a second one."""
        return self.job.state is JobState.LOST and "retry" not in self.job.reason

    @property
    def seconds(self) -> float | None:
        """How long it ran, once it has ended."""
        job = self.job
        return job.ended - job.started if job.ended is not None and job.started is not None else None

    @property
    def models(self) -> tuple[ModelLine, ...]:
        """The models asked for, in the order of their blocks; those not begun come last."""
        begun = {each.model: each for each in self.progress.models}
        later = _NEVER if self.progress.exit_code is not None or self.ended else _LATER
        wanted = split_names(str(self.job.arguments.get("models", ""))) if self.job.kind is JobKind.COLLECT else ()
        rest = [ModelLine(name, "later", later) for name in wanted if name not in begun]
        return (*map(_line, begun.values()), *rest)

    @property
    def share(self) -> float | None:
        """How much of the work is done, 0 to 1; None while nobody knows."""
        judging = self.progress.judging
        if self.job.state is JobState.SUCCEEDED:
            return 1.0
        if judging is not None:
            return (judging.scored + judging.unscored) / judging.total if judging.total else None
        return _share(self.models)

    @property
    def headline(self) -> str:
        """Where it stands, in one sentence."""
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
        """What was seen in the server's memory: a badge's state, and its words. Only what was sampled is claimed."""
        seen = self.progress.memory
        if seen is None or seen.samples == 0:  # those without an answer are counted apart
            return "unknown", "memory was not seen"
        if seen.most_resident > 1:
            return "failed", "more than one model was seen at once"
        if seen.foreign:
            return "stale", "models of others were seen"
        return "ok", "never more than one model seen"

    @property
    def brief(self) -> str:
        """The headline for a list, where there is little room."""
        text = " ".join(self.headline.split())
        return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 1]}…"

    @property
    def title(self) -> str:
        """For the browser's tab."""
        share = self.share
        known = self.job.state is JobState.RUNNING and share is not None
        state = f"{int((share or 0) * 100)} %" if known else self.state.capitalize()
        return f"{state} · {self.job.kind.value} {self.job.experiment}"

    @property
    def announcement(self) -> str:
        """What is worth being read out: a change of state, and every quarter."""
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
            return f"Waiting for {listed(progress.waiting_for, 3)}; it goes on by itself once it answers."
        if progress.judging is not None:
            seen = progress.judging
            return f"{seen.judge} has looked at {seen.scored + seen.unscored} of {counted(seen.total, 'item')}."
        if progress.recording_left:
            return f"All is answered; {counted(progress.recording_left, 'result')} on the way to MLflow."
        if self.reason:
            return self.reason
        now = progress.models[-1] if progress.models else None
        if now is None:
            return "Starting."
        return f"{now.model}: {_PHASES[now.phase]}, {now.done} of {counted(now.total, 'cell')}."

    def _succeeded(self) -> str:
        done, judged = self.progress.collected, self.progress.judged
        if done is not None:
            time = f" in {duration(done.seconds)}" if done.seconds is not None else ""
            return (
                f"{counted(done.generated, 'cell')} generated{time}, {done.recorded_before} recorded before, "
                f"{done.failed} failed."
            )
        if judged is not None:
            kind = " provisionally" if judged.provisional else ""
            return f"{judged.judge} has{kind} scored {counted(judged.scored, 'item')}."
        return "Finished."


def _line(model: ModelProgress) -> ModelLine:
    return ModelLine(
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


def _share(models: tuple[ModelLine, ...]) -> float | None:
    """Models that have not begun count as much as the largest that has."""
    known = [line.total for line in models if line.total]
    if not known:
        return None
    total = sum(line.total if line.total is not None else max(known) for line in models)
    return sum(line.done for line in models) / total
