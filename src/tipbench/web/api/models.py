"""Request and response models of the API. Their descriptions are part of its OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from tipbench.compare.verdict import TIED
from tipbench.jobs.job import Job, JobKind
from tipbench.judge.automatic import WITH_PATTERN
from tipbench.record.events import strip_logins
from tipbench.text import iso

NextCursor = Annotated[
    str | None,
    Field(description="Cursor of the next page, for the query parameter `next`; null on the last page."),
]
# Options of a new sheet, for people or an automatic judge.
MaxAnswers = Annotated[
    int | None, Field(ge=1, le=100_000, description="Maximum number of answers, taken scenario by scenario.")
]
Overlap = Annotated[
    float,
    Field(ge=0, le=1, description="Share of the answers scored by other judges that this judge gets, too."),
]
Everything = Annotated[
    bool, Field(description="Include every answer this judge has not scored, not only pending ones.")
]
Rejudge = Annotated[bool, Field(description="Include answers scored under another rubric.")]
Seed = Annotated[
    int | None, Field(ge=0, lt=2**63, description="Seed for the order and the hidden items; random if missing.")
]
Suite = Annotated[
    str | None, Field(max_length=4000, description="The suite with the scenario cards, rubric and controls.")
]


class Shape(BaseModel):
    """Base class of responses; fields may be added later."""

    model_config = ConfigDict(extra="allow")


class RequestBody(BaseModel):
    """Base class of request bodies; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Shape):
    code: str = Field(description="Error code for programs; does not change with the message.", examples=["not_found"])
    message: str = Field(description="A sentence for people.", examples=["There is no experiment tip-bench-may."])
    path: str | None = Field(description="The invalid part of the request.", examples=["path.experiment"])


class ErrorAnswer(Shape):
    """The body of every error response."""

    error: ErrorDetails


class ExperimentRow(Shape):
    experiment: str = Field(examples=["tip-bench-auto"])
    cells: int = Field(examples=[96])
    pending: int = Field(examples=[40])
    judged: int = Field(examples=[54])
    failed: int = Field(examples=[2])
    provisional: int = Field(description="Cells that an automatic judge has scored.", examples=[96])
    held: int = Field(description="Sheets whose scores do not count yet.", examples=[0])
    models: list[str] = Field(examples=[["gemma3:1b", "qwen2.5:0.5b"]])
    changed: str | None = Field(
        description="Time at which the newest cell was generated.", examples=["2026-05-04T10:15:00Z"]
    )
    leader: dict[str, Any] | None = Field(
        description="The leader of the leaderboard; null if there is none, or if the leaderboard is not computed yet.",
        examples=[{"model": "gemma3:1b", "prompt_version": "v1", "decided": False, "provisional": True}],
    )
    url: str | None = Field(
        description="The experiment's page in MLflow.", examples=["http://localhost:5000/#/experiments/3/runs"]
    )


class ExperimentList(Shape):
    items: list[ExperimentRow]
    next: NextCursor


class RunRow(Shape):
    run_id: str = Field(examples=["1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed"])
    state: str | None = Field(description="Of a cell: pending, judged or failed; null for other kinds of run.")
    params: dict[str, str] = Field(examples=[{"model": "qwen2.5:0.5b", "prompt_version": "v1"}])
    metrics: dict[str, float | None] = Field(examples=[{"latency_s": 2.4, "composite": 12.75}])
    tags: dict[str, str] = Field(examples=[{"kind": "cell", "judge_pending": "false"}])
    start_ms: int
    end_ms: int | None
    url: str | None = Field(description="The run's page in MLflow.")


class RunList(Shape):
    items: list[RunRow]
    next: NextCursor
    total: int = Field(description="Number of matching runs on all pages.")


class RunDetail(RunRow):
    status: str = Field(description="MLflow's status: FINISHED or FAILED.")
    texts: dict[str, str] = Field(
        description="All texts by key, each verified against its hash.",
        examples=[{"artifact:raw.txt": '[{"tip": "…", "rationale": "…"}]'}],
    )


class PairName(Shape):
    model: str = Field(examples=["qwen2.5:0.5b"])
    prompt_version: str = Field(examples=["v2-mentor"])


class DifferenceShape(Shape):
    mean: float
    ci_low: float | None
    ci_high: float | None
    p: float | None


class StandingShape(PairName):
    rank: int | None
    rank_low: int | None
    rank_high: int | None
    composite: float | None = Field(examples=[12.75])
    ci_low: float | None
    ci_high: float | None
    composite_adjusted: float | None = Field(description="Mean adjusted for missing scenarios; rows are ranked by it.")
    composite_usable: float | None = Field(description="Mean composite of the answers with a usable tip.")
    usable: float | None = Field(description="Share of scenarios whose answer has a usable tip.")
    usable_low: float | None
    usable_high: float | None
    p_best: float | None
    diff_to_leader: DifferenceShape | None
    diff_to_baseline: DifferenceShape | None
    format_ok: float | None
    overlong: float | None
    diversity: float | None
    latency_s: float | None
    tokens_per_s: float | None
    n_scenarios: int
    judged: int
    total: int
    failed: int
    flags: list[str]


class LookShape(Shape):
    number: int
    of: int
    at: int = Field(description="Number of judged scenarios at which this look tests the leaderboard.")


class NextLookShape(LookShape):
    scenarios: int = Field(description="Number of scenarios still to be judged.")
    answers: int = Field(description="Number of answers still to be judged.")
    minutes: float | None = Field(description="Estimated time to judge them, from the measured pace.")
    power: float | None = Field(description="Probability of a decision at this look.")


class VerdictShape(Shape):
    text: str
    leader: PairName | None
    tied_with_leader: list[PairName]
    decided: bool
    fragile: bool = Field(
        description="True if decided, but with somewhat more unusable answers the leader would not lead."
    )
    level: float = Field(
        description=f"Significance level: a row whose p is above it, or unknown, is {TIED} with the leader.",
        examples=[0.0182],
    )
    look: LookShape | None
    next_look: NextLookShape | None
    beats_reference: bool | None
    diff_to_reference: DifferenceShape | None = Field(description="Leader − best reference.")
    scenarios_needed: int | None = Field(
        description="Total number of scenarios needed for a decision; null if out of reach."
    )


class BoardShape(Shape):
    """The leaderboard, as printed by `tipbench compare --format json`."""

    experiment: str
    suite: str
    rubric: str | None
    conditions: dict[str, Any]
    judges: list[str]
    provisional: bool
    baseline: PairName | None
    verdict: VerdictShape
    standings: list[StandingShape] = Field(description="Each standing also has the rubric's scales, by name.")
    references: list[StandingShape] = Field(description="Reference pairs, which are not ranked, best first.")
    attribution: dict[str, float | None] | None
    duels: dict[str, Any] | None
    notes: list[str]


class PlanShape(Shape):
    """What a run with this configuration would do."""

    experiment: str
    suite: str
    cells: int
    recorded: int
    to_generate: int
    seconds: float | None
    models: list[dict[str, Any]]
    refused: list[dict[str, str]] = Field(examples=[[{"model": "gemma3:27b", "reason": "gemma3:27b has 27.4B …"}]])
    outlook: dict[str, Any] = Field(
        description="The smallest difference that the scenarios can detect, and how long judging takes."
    )
    warnings: list[str]


class SheetShape(Shape):
    """A blind sheet, to be filled in and sent to …/apply."""

    format: Literal["tipbench-sheet/1"]
    sheet: str
    experiment: str
    judge: str | None
    instructions: str
    rubric: dict[str, str]
    items: list[dict[str, Any]]


class AppliedShape(Shape):
    """The result of applying a sheet, as printed by `judge apply --json`."""

    sheet: str
    status: Literal["applied", "held"]
    applied: int
    unfinished: int
    errors: list[Any]
    drift: dict[str, Any] | None


class SheetOptions(RequestBody):
    """Options of a sheet export. A judge's token may use `judge`, `limit`, `all`, `sheet`, `filled` and `format`."""

    judge: str | None = Field(
        None, max_length=200, description="The judge's name; a judge's token may only use its own."
    )
    limit: MaxAnswers = None
    overlap: Overlap = 0.2
    all: Everything = False
    rejudge: Rejudge = False
    seed: Seed = None
    sheet: str | None = Field(None, min_length=1, max_length=64, description="Export this sheet again, byte for byte.")
    filled: bool = Field(False, description="With `sheet`: include the scores applied so far.")
    focus: bool = Field(False, description=f"Only the leader and the rows {TIED} with it.")
    suite: Suite = None
    format: Literal["json", "csv"] = Field("json", description="csv is for spreadsheets.")


class JudgingShape(Shape):
    """The judging status, as printed by `tipbench judge status --json`."""

    experiment: str
    cells: int
    pending: int
    held: int
    judged: int
    floored: int
    alpha: dict[str, float | None] = Field(description="Krippendorff's alpha: the agreement of the judges, by scale.")
    judges: list[dict[str, Any]]
    history: list[dict[str, Any]] = Field(description="Applied and held sheets, oldest first.")


class JobLinks(Shape):
    self: str = Field(examples=["/api/bench/jobs/20260504-101500-1a2b3c4d"])
    events: str = Field(description="Server-sent events.")
    log: str
    page: str = Field(description="The job's page in the panel.", examples=["/jobs/20260504-101500-1a2b3c4d"])
    experiment: str = Field(description="The experiment's page in the panel.")
    mlflow: str | None = Field(None, description="The experiment's page in MLflow, once known.")
    airflow: str | None = Field(None, description="The DAG run's page in Airflow, if the job runs there.")


class JobShape(Shape):
    """A tipbench command that runs in the background."""

    id: str = Field(examples=["20260504-101500-1a2b3c4d"])
    kind: Literal["collect", "judge", "simulate"]
    state: Literal["queued", "running", "waiting", "succeeded", "failed", "cancelled", "lost"]
    experiment: str = Field(examples=["tip-bench-auto"])
    retry_of: str | None = Field(description="The job that this one retries.")
    links: JobLinks
    arguments: dict[str, Any] = Field(description="The command's options, without credentials.")
    created: str = Field(examples=["2026-05-04T10:15:00.000Z"])
    started: str | None
    ended: str | None
    exit_code: int | None
    reason: str | None = Field(description="Why the job failed, is lost or cannot start.")
    cancel_requested: bool
    started_by: str | None
    runner: str = Field(examples=["local"])

    @classmethod
    def of(cls, job: Job, **more: Any) -> Self:
        """Return the response for a job, without credentials. `more` has the fields of subclasses."""
        return cls(
            id=job.id,
            kind=job.kind.value,
            state=job.state.value,
            experiment=job.experiment,
            retry_of=job.retry_of,
            links=JobLinks.model_validate({**job_links(job), **job.links}),
            arguments=dict(job.arguments),
            created=iso(job.created),
            started=iso(job.started),
            ended=iso(job.ended),
            exit_code=job.exit_code,
            reason=strip_logins(job.reason) or None,
            cancel_requested=job.cancel_requested is not None,
            started_by=job.started_by or None,
            runner=job.runner,
            **more,
        )


def job_links(job: Job) -> dict[str, str]:
    """Return the links of a job on this server."""
    url = f"/api/bench/jobs/{job.id}"
    links = {"self": url, "events": f"{url}/events", "log": f"{url}/log", "page": f"/jobs/{job.id}"}
    if job.kind is JobKind.SIMULATE:  # a simulation has no leaderboard
        return links | {"experiment": "/simulations"}
    experiment = quote(job.experiment, safe="")
    return links | {
        "experiment": f"/experiments/{experiment}",
        "leaderboard": f"/api/bench/leaderboard/{experiment}",
    }


class JobRow(JobShape):
    place: int | None = Field(description="Position in the queue, 1 is next; null if not queued.")


class JobList(Shape):
    items: list[JobRow]
    next: NextCursor


class JobAnswer(Shape):
    job: JobShape
    place: int | None = Field(description="Position in the queue, 1 is next; null if not queued.")


class JobStarted(JobAnswer):
    new: bool = Field(description="False if an earlier request created this job.")


class JobDetail(JobAnswer):
    progress: dict[str, Any] = Field(description="Progress so far: models, messages, failure, memory.")
    cursor: int = Field(
        description="Cursor of the last event in `progress`; pass it as `after` to stream the following events."
    )


class JudgeRunRequest(RequestBody):
    """The options of `tipbench judge run`."""

    with_: str = Field(
        alias="with",
        max_length=250,
        pattern=WITH_PATTERN,
        description="`rules`, `ollama:MODEL`, or `command`, which runs the program that the operator has configured.",
        examples=["rules"],
    )
    judge: str | None = Field(None, max_length=200, description="Name under which a program's scores are stored.")
    limit: MaxAnswers = None
    overlap: Overlap = 0.2
    all: Everything = False
    rejudge: Rejudge = False
    seed: Seed = None
    suite: Suite = None
    timeout_s: float | None = Field(
        None, ge=1, le=86_400, description="Timeout in seconds of a call to a program or a model."
    )
    batch: int | None = Field(None, ge=1, le=100_000, description="Items per call of a program.")
    accept_drift: str | None = Field(
        None,
        min_length=1,
        max_length=1000,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="Reason for accepting the drift.",
    )
    ollama_url: str | None = Field(None, max_length=2000, description="The Ollama server; must be allowed.")
    max_model_b: float | None = Field(None, gt=0, description="Maximum model size, in billions of parameters.")
    num_ctx: int | None = Field(None, ge=256, le=2**20, description="Context length in tokens.")
    evict: bool = Field(False, description="Unload other models from Ollama first.")
    allow_unknown_size: bool = Field(False, description="Allow a model of unknown size.")
    wait: bool = Field(False, description="Wait for a running `tipbench collect` that was not started by this panel.")
    mlflow_url: str | None = Field(None, max_length=2000, description="The MLflow server; must be allowed.")


class LoggedIn(Shape):
    name: str = Field(examples=["reviewer-1"])
    role: Literal["admin", "judge"]
    expires: str = Field(examples=["2026-05-04T20:00:00.000Z"])
    csrf: str


class Health(Shape):
    status: Literal["ok"]
    version: str


class Readiness(Shape):
    status: Literal["ready"]
    mlflow: Literal["answers", "none yet"] = Field(
        description="`answers` if MLflow responds; `none yet` if there is no MLflow because none was needed."
    )


class SimulationShape(Shape):
    run_id: str = Field(description="The simulation's run in the MLflow experiment `tip-sim`.")
    config: dict[str, Any] = Field(description="World, users, rounds, seeds, policies, baseline and ablation.")
    policies: list[dict[str, Any]] = Field(
        description="Reward, regret and gain over the baseline, overall and by persona, with intervals; learning curve."
    )


class SimulationList(Shape):
    items: list[SimulationShape]
    next: str | None = Field(description="Always null: `limit` selects how many.")


class PromotionShape(Shape):
    id: int
    kind: str = Field(
        description="check, apply (a switch after a passed check), unchecked (a switch without one) or undo.",
        examples=["apply"],
    )
    at: str
    user: str | None = Field(description="Who made the check or the switch.")
    candidate: str = Field(examples=["egreedy/v3"])
    baseline: str = Field(description="The policy that was active, or that a check compared the candidate with.")
    passed: bool | None = Field(description="Result of a check; null for a switch, or if there was not enough data.")
    body: dict[str, Any] = Field(
        description="Of a check, the verdict with its clauses; of a switch, the check it is based on or the reason."
    )


class PromotionList(Shape):
    active: str = Field(description="The policy that answers `POST /recommend`.", examples=["egreedy/v1"])
    items: list[PromotionShape]
    next: str | None = Field(description="Always null: `limit` selects how many.")


class TipShape(Shape):
    tip: str = Field(examples=["Open the handover note and write its first line; stop after five minutes."])
    rationale: str
    scores: dict[str, float] = Field(
        description="Means over the judges whose scores count.", examples=[{"relevance": 4.0}]
    )
    overlong: bool | None


class AnswerShape(PairName):
    run_id: str = Field(examples=["1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed"])
    state: Literal["judged", "pending", "failed"]
    composite: float | None
    format_ok: bool | None
    repeat: str | None
    tips: list[TipShape]


class SideShape(Shape):
    composite: float | None = Field(description="The pair's mean composite in this scenario.")
    answers: list[AnswerShape]


class MeetingShape(Shape):
    """The pair and the other row in one scenario."""

    scenario: str = Field(examples=["nurse@evening"])
    difference: float | None = Field(
        description="Composite of the pair − composite of the other row; null unless both are judged."
    )
    own: SideShape
    reference: SideShape | None


class ReferenceShape(PairName):
    """The other row of a comparison."""

    role: Literal["leader", "baseline", "runner-up", "next row"]


class PairShape(PairName):
    """A pair compared with another row, `reference`, in each scenario, largest loss first."""

    experiment: str
    reference: ReferenceShape | None = Field(
        description="The baseline if there is one, otherwise the leader; for the leader itself, the next row."
    )
    difference: DifferenceShape | None = Field(description="Pair − other row, over the scenarios that both have.")
    wins: int = Field(description="Scenarios whose difference, rounded to two decimals, is positive.")
    losses: int = Field(description="Scenarios whose difference, rounded to two decimals, is negative.")
    even: int = Field(description="Scenarios whose difference, rounded to two decimals, is 0.00.")
    scenarios: list[MeetingShape]


class RevisionShape(Shape):
    experiment: str
    revision: str | None = Field(description="Null if tipbench has never written to the experiment.")


class TestRequest(RequestBody):
    """Options of a webhook test."""

    experiment: str | None = Field(None, max_length=200, description="Include links to this experiment in the message.")


class AttemptShape(Shape):
    """One delivery attempt."""

    number: int
    time: str
    took_s: float
    status: int | None = Field(description="The receiver's status code; null without a response.")
    reason: str | None = Field(description="Why the attempt failed.", examples=["responded with 503"])


class DeliveryShape(Shape):
    """A message to the receiver, with all delivery attempts."""

    id: str = Field(description="The same for every attempt.", examples=["0f6a2b9c4d1e4f508192a3b4c5d6e7f8"])
    event: Literal["cells.pending", "test"]
    experiment: str | None
    state: Literal["queued", "delivered", "failed", "replaced"] = Field(
        description="replaced: superseded by a newer delivery of the same experiment."
    )
    created: str
    next_try: str | None
    attempts: list[AttemptShape]
    payload: dict[str, Any] = Field(description="The message.", examples=[{"event": "cells.pending", "pending": 40}])


class DeliveryList(BaseModel):
    """A page of deliveries, newest first."""

    items: list[DeliveryShape]
    next: NextCursor


class HookShape(Shape):
    """Webhook status."""

    configured: bool
    url: str | None = Field(
        description="The webhook's URL, with the host only; the rest may be secret.",
        examples=["https://judge.example.org/…"],
    )
    hosts: list[str] = Field(description="Allowed hosts besides this machine.")
    watch_s: float | None = Field(description="Interval between checks for pending cells, in seconds.")
    watching: bool = Field(
        description="Whether this panel sends deliveries; only one of the panels that share a home folder does."
    )
    looked: str | None = Field(description="Time of the last check for pending cells.")
    problem: str | None = Field(description="Error of the last check.")
    queued: int = Field(description="Deliveries waiting for their first or next attempt.")


# By status: example code, example path and description. Where a real response has the path null, the example has "":
# FastAPI removes nulls from the OpenAPI document.
_ERROR_DOCS = {
    400: ("host_refused", "header.host", "The request is invalid, or its Host is not allowed."),
    401: ("unauthorised", "header.authorization", "The token is missing, invalid, expired or revoked."),
    403: (
        "csrf",
        "header.x-csrf-token",
        "The role is not allowed to do this, or a change with a session cookie has no CSRF token.",
    ),
    404: ("not_found", "path.experiment", "Not found."),
    409: (
        "not_enough_data",
        "path.experiment",
        "Conflict: too little data, a resource is in use, or scores are not comparable.",
    ),
    413: ("too_large", "body", "The body is too large."),
    422: ("invalid", "body.n_tips", "A value is invalid; `path` is its location."),
    429: (
        "too_many_attempts",
        "header.authorization",
        "Too many invalid tokens or concurrent requests; see Retry-After.",
    ),
    500: ("internal", "", "Internal error; the log has the details under the request id."),
    502: ("mlflow_refused", "", "Invalid response from MLflow or Ollama."),
    503: ("mlflow_away", "", "MLflow or Ollama is unavailable; see Retry-After."),
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries for a route's error responses."""
    documented: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        code, path, description = _ERROR_DOCS[status]
        example = {"error": {"code": code, "message": description, "path": path}}
        content = {"application/json": {"example": example}}
        documented[status] = {"model": ErrorAnswer, "description": description, "content": content}
    return documented


def text_response(media_type: str, description: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entry for a successful response that is text, not JSON."""
    return {200: {"description": description, "content": {media_type: {"schema": {"type": "string"}}}}}


COMMON_ERRORS = error_responses(400, 401, 403, 413, 422, 429, 500)  # of every route that requires authentication
EXPERIMENT_ERRORS = error_responses(404, 409, 502, 503)  # of every route that reads an experiment
