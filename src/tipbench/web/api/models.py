"""Response models of the API, for the OpenAPI document; a test compares real responses with them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetails(_Shape):
    code: str = Field(description="For programs; stable when the message changes.", examples=["not_found"])
    message: str = Field(description="A sentence for people.", examples=["There is no experiment tip-bench-may."])
    path: str | None = Field(description="The invalid part of the request.", examples=["path.experiment"])


class ErrorAnswer(_Shape):
    """The body of every error response."""

    error: ErrorDetails


class ExperimentRow(_Shape):
    experiment: str = Field(examples=["tip-bench-auto"])
    cells: int = Field(examples=[96])
    pending: int = Field(examples=[40])
    judged: int = Field(examples=[54])
    failed: int = Field(examples=[2])
    url: str | None = Field(description="Its page in MLflow.", examples=["http://localhost:5000/#/experiments/3"])


class ExperimentList(_Shape):
    items: list[ExperimentRow]
    next: str | None = Field(
        description="Cursor of the next page, for the query parameter `next`; null on the last page."
    )


class RunRow(_Shape):
    run_id: str = Field(examples=["1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed"])
    state: str | None = Field(description="pending, judged or failed; null for other kinds of run.")
    params: dict[str, str] = Field(examples=[{"model": "qwen2.5:0.5b", "prompt_version": "v1"}])
    metrics: dict[str, float | None] = Field(examples=[{"latency_s": 2.4, "composite": 12.75}])
    tags: dict[str, str] = Field(examples=[{"kind": "cell", "judge_pending": "false"}])
    start_ms: int
    end_ms: int | None
    url: str | None = Field(description="Its page in MLflow.")


class RunList(_Shape):
    items: list[RunRow]
    next: str | None = Field(
        description="Cursor of the next page, for the query parameter `next`; null on the last page."
    )
    total: int = Field(description="Number of matching runs on all pages.")


class RunDetail(RunRow):
    status: str = Field(description="MLflow's status: FINISHED or FAILED.")
    texts: dict[str, str] = Field(
        description="All texts by key, each verified against its hash.",
        examples=[{"artifact:raw.txt": '[{"tip": "…", "rationale": "…"}]'}],
    )


class PairName(_Shape):
    model: str = Field(examples=["qwen2.5:0.5b"])
    prompt_version: str = Field(examples=["v2-mentor"])


class DifferenceShape(_Shape):
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


class VerdictShape(_Shape):
    text: str
    leader: PairName | None
    tied_with_leader: list[PairName]
    decided: bool
    scenarios_needed: int | None


class BoardShape(_Shape):
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
    attribution: dict[str, float | None] | None
    duels: dict[str, Any] | None
    notes: list[str]


class PlanShape(_Shape):
    """What a run with this configuration would do."""

    experiment: str
    suite: str
    cells: int
    recorded: int
    to_generate: int
    seconds: float | None
    models: list[dict[str, Any]]
    refused: list[dict[str, str]] = Field(examples=[[{"model": "gemma3:27b", "reason": "gemma3:27b has 27.4B …"}]])
    warnings: list[str]


class SheetShape(_Shape):
    """A blind sheet, to be filled in and sent to …/apply."""

    format: Literal["tipbench-sheet/1"]
    sheet: str
    experiment: str
    judge: str | None
    instructions: str
    rubric: dict[str, str]
    items: list[dict[str, Any]]


class AppliedShape(_Shape):
    """The result of applying a sheet, as printed by `judge apply --json`."""

    sheet: str
    status: Literal["applied", "held"]
    applied: int
    unfinished: int
    errors: list[Any]
    drift: dict[str, Any] | None


class SheetOptions(BaseModel):
    """Options of a sheet export. A judge's token may use `limit`, `all`, `sheet`, `filled` and `format`."""

    model_config = ConfigDict(extra="forbid")

    judge: str | None = Field(
        None, max_length=200, description="The judge's name; a judge's token may only use its own."
    )
    limit: int | None = Field(None, ge=1, le=100_000, description="Maximum number of answers; whole scenarios first.")
    overlap: float = Field(0.2, ge=0, le=1, description="Share of answers that others have scored.")
    all: bool = Field(False, description="All answers this judge has not scored.")
    rejudge: bool = Field(False, description="Also answers scored under another rubric.")
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="Seed for the order and the hidden items; random if missing."
    )
    sheet: str | None = Field(None, min_length=1, max_length=64, description="Export this sheet again, byte for byte.")
    filled: bool = Field(False, description="With `sheet`: include the scores applied so far.")
    focus: bool = Field(False, description="Only the leader and the rows tied with it.")
    suite: str | None = Field(
        None, max_length=4000, description="The suite with the scenario cards, rubric and controls."
    )
    format: Literal["json", "csv"] = Field("json", description="csv is for spreadsheets.")


class JudgingShape(_Shape):
    """The judging status, as printed by `tipbench judge status --json`."""

    experiment: str
    cells: int
    pending: int
    held: int
    judged: int
    floored: int
    alpha: dict[str, float | None]
    judges: list[dict[str, Any]]
    history: list[dict[str, Any]]


class JobLinks(_Shape):
    self: str = Field(examples=["/api/bench/jobs/20260504-101500-1a2b3c4d"])
    events: str = Field(description="Server-sent events.")
    log: str
    page: str = Field(description="Its page in the panel.", examples=["/jobs/20260504-101500-1a2b3c4d"])
    experiment: str = Field(description="The experiment's page in the panel.")
    mlflow: str | None = Field(None, description="The experiment's page in MLflow, once known.")
    airflow: str | None = Field(None, description="The DAG run's page in Airflow, if it runs there.")


class JobShape(_Shape):
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
    reason: str | None = Field(description="Why it failed, is lost or cannot start.")
    cancel_requested: bool
    started_by: str | None
    runner: str = Field(examples=["local"])


class JobRow(JobShape):
    place: int | None = Field(description="Position in the queue, 1 is next; null if not queued.")


class JobList(_Shape):
    items: list[JobRow]
    next: str | None = Field(
        description="Cursor of the next page, for the query parameter `next`; null on the last page."
    )


class JobAnswer(_Shape):
    job: JobShape
    place: int | None = Field(description="Position in the queue, 1 is next; null if not queued.")


class JobStarted(JobAnswer):
    new: bool = Field(description="False if an earlier request created this job.")


class JobDetail(JobAnswer):
    progress: dict[str, Any] = Field(description="Progress so far: models, messages, failure, memory.")
    cursor: int = Field(
        description="Cursor of the last event in `progress`; pass it as `after` to stream the following events."
    )


class JudgeRunRequest(BaseModel):
    """The options of `tipbench judge run`."""

    model_config = ConfigDict(extra="forbid", populate_by_name=False)

    with_: str = Field(
        alias="with",
        max_length=250,
        pattern=r"^(rules|command|command:.*|ollama:[!-~]+)$",
        description="rules, ollama:MODEL, or command for the program configured by the operator.",
        examples=["rules"],
    )
    judge: str | None = Field(None, max_length=200, description="The judge's name for a program's scores.")
    limit: int | None = Field(None, ge=1, le=100_000, description="Maximum number of answers; whole scenarios first.")
    overlap: float = Field(0.2, ge=0, le=1, description="Share of answers that others have scored.")
    all: bool = Field(False, description="All answers this judge has not scored.")
    rejudge: bool = Field(False, description="Also answers scored under another rubric.")
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="Seed for the order and the hidden items; random if missing."
    )
    suite: str | None = Field(
        None, max_length=4000, description="The suite with the scenario cards, rubric and controls."
    )
    timeout_s: float | None = Field(None, ge=1, le=86_400, description="Timeout of a call to a program or a model.")
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
    wait: bool = Field(False, description="Wait for a collect that was not started here.")
    mlflow_url: str | None = Field(None, max_length=2000, description="The MLflow server; must be allowed.")


class LoggedIn(_Shape):
    name: str = Field(examples=["reviewer-1"])
    role: Literal["admin", "judge"]
    expires: str = Field(examples=["2026-05-04T20:00:00.000Z"])
    csrf: str


class Health(_Shape):
    status: Literal["ok"]
    version: str


class Readiness(_Shape):
    status: Literal["ready"]
    mlflow: Literal["answers", "none yet"]


_MEANINGS = {
    400: ("host_refused", "header.host", "The request is invalid, or its Host is not allowed."),
    401: ("unauthorised", "header.authorization", "The token is missing, invalid, expired or revoked."),
    403: (
        "csrf",
        "header.x-csrf-token",
        "Not allowed for this role, or a change with a cookie but without its CSRF token.",
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


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the OpenAPI entries for a route's error responses."""
    return {status: _refusal(status) for status in statuses}


def _refusal(status: int) -> dict[str, Any]:
    code, place, meaning = _MEANINGS[status]
    # Not null, although `path` often is: FastAPI drops nulls from the document.
    example = {"error": {"code": code, "message": meaning, "path": place}}
    return {
        "model": ErrorAnswer,
        "description": meaning,
        "content": {"application/json": {"example": example}},
    }


COMMON = refusals(400, 401, 403, 413, 422, 429, 500)  # every route that requires authentication
DATA = refusals(404, 409, 502, 503)  # every route that reads an experiment


class SimulationShape(_Shape):
    run_id: str = Field(description="Its run in MLflow, experiment `tip-sim`.")
    config: dict[str, Any] = Field(description="World, users, rounds, seeds, policies, baseline and ablation.")
    policies: list[dict[str, Any]] = Field(
        description="Reward, regret and gain over the baseline, in all and by persona, with intervals and a curve."
    )


class SimulationList(_Shape):
    items: list[SimulationShape]
    next: str | None = Field(description="Always null: `limit` selects how many.")


class PromotionShape(_Shape):
    id: int
    kind: str = Field(description="check, apply, unchecked or undo.", examples=["apply"])
    at: str
    user: str | None = Field(description="The person who did it.")
    candidate: str = Field(examples=["egreedy/v3"])
    baseline: str = Field(description="The policy that was active, or that a check compared with.")
    passed: bool | None = Field(description="Result of a check; null for switches.")
    body: dict[str, Any] = Field(description="A check's verdict with its clauses; the check or reason of a switch.")


class PromotionList(_Shape):
    active: str = Field(description="The policy that answers `POST /recommend`.", examples=["egreedy/v1"])
    items: list[PromotionShape]
    next: str | None = Field(description="Always null: `limit` selects how many.")


class TipShape(_Shape):
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


class SideShape(_Shape):
    composite: float | None = Field(description="The row's mean in this scenario.")
    answers: list[AnswerShape]


class MeetingShape(_Shape):
    scenario: str = Field(examples=["nurse@evening"])
    difference: float | None = Field(description="Own − reference; null unless both are judged.")
    own: SideShape
    reference: SideShape | None


class ReferenceShape(PairName):
    role: Literal["leader", "baseline", "runner-up", "next row"]


class PairShape(PairName):
    """A row compared with another per scenario, largest loss first."""

    experiment: str
    reference: ReferenceShape | None = Field(
        description="The baseline, else the leader, else (for the leader) the next row."
    )
    difference: DifferenceShape | None = Field(description="Row − reference, over the scenarios that both have.")
    wins: int
    losses: int
    even: int
    scenarios: list[MeetingShape]


class RevisionShape(_Shape):
    experiment: str
    revision: str | None = Field(description="Null if tipbench has never written to the experiment.")
