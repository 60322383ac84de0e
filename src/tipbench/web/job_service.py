"""Starts, retries and lists jobs, and creates their runners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from fastapi import Header

from tipbench.errors import NotEnoughData, ServerUnavailable, UsageError
from tipbench.http import strip_login
from tipbench.jobs.airflow import AirflowRunner
from tipbench.jobs.airflow_api import AirflowAccess, AirflowApi
from tipbench.jobs.command import PROGRAM_VARIABLE, collect_request, judge_request
from tipbench.jobs.job import Job, JobRequest, JobState, LogTail, Runner
from tipbench.jobs.local import LocalRunner
from tipbench.jobs.progress import ProgressCache
from tipbench.jobs.store import MAX_KEY, JobFilter, JobStore, Page, Submitted
from tipbench.jobs.supervisor import Supervisor, queue_positions
from tipbench.jobs.supervisor import retry as queue_retry
from tipbench.judge.automatic import JudgeChoice, JudgeKind
from tipbench.judge.command import split_command
from tipbench.plan.collect_config import URL_KEYS, WAIT_FOR_JUDGE, CollectConfig, make_config
from tipbench.plan.grid import suite_for
from tipbench.record.plan import configured_cells
from tipbench.record.reader import count_states
from tipbench.settings import Settings
from tipbench.web.api.models import JudgeRunRequest
from tipbench.web.cache import Cache
from tipbench.web.errors import Forbidden, Invalid, convert_option_errors
from tipbench.web.queries import get_experiment, revision
from tipbench.workflows.board import judge_name
from tipbench.workflows.judging import MODEL_OPTIONS

if TYPE_CHECKING:
    from tipbench.web.deps import Panel, PanelMlflow

_CACHED_JOBS = 64  # jobs whose number of pending cells is cached


@dataclass(frozen=True)
class PanelMlflowLookup:
    """MLflow access for Airflow jobs: the server's address, and the number of pending cells."""

    mlflow: PanelMlflow
    counts: Cache = field(default_factory=lambda: Cache(_CACHED_JOBS))

    def address(self, job: Job) -> str:
        """Return the MLflow URL for workers: the job's, or else the panel's. Raises NotEnoughData if there is none.

        The URL has no login, because Airflow shows the conf of every DAG run.
        """
        url = job.arguments.get("mlflow_url") or strip_login(self.mlflow.open().url)
        return str(url)

    def pending(self, job: Job) -> int:
        """Return how many of the job's cells wait for a judge; cached per revision of the experiment.

        Raises NotEnoughData if no cells are found, instead of returning 0.
        """
        config = make_config({key: value for key, value in job.arguments.items() if key in CollectConfig.model_fields})
        # A URL with a login is kept in the job's environment variables only.
        url = job.private.get("TIPBENCH_MLFLOW_URL") or config.mlflow_url
        with self.mlflow.connected(url) as opened:
            not_found = NotEnoughData(f"{config.experiment} on MLflow at {opened.url} has no cells of this run.")
            experiment = opened.store.experiment(config.experiment)
            if experiment is None:
                raise not_found

            def count() -> int:
                cells = configured_cells(opened.store, experiment.experiment_id, config)
                if not cells:
                    raise not_found
                return count_states(cells).pending

            return self.counts.get((opened.identity, job.id), revision(experiment), count)


def airflow_access(settings: Settings) -> AirflowAccess | None:
    """Return Airflow's address and credentials, None if not configured. Raises UsageError if invalid."""
    configured = settings.operator_config()
    if not configured.airflow_url:
        return None
    access = AirflowAccess(
        configured.airflow_url.rstrip("/"),
        username=settings.get("airflow_username"),
        password=settings.get("airflow_password"),
        token=settings.get("airflow_token"),
        dag_id=configured.airflow_dag,
        public_url=configured.airflow_public_url,
    )
    with settings.add_source_to_errors():
        access.check()
    return access


def make_runners(settings: Settings, mlflow: PanelMlflow) -> dict[str, Runner]:
    """Create the configured runners, by name."""
    runners: dict[str, Runner] = {LocalRunner.name: LocalRunner(settings.home)}
    access = airflow_access(settings)
    if access is not None:
        runners[AirflowRunner.name] = AirflowRunner(settings.home, AirflowApi(access), PanelMlflowLookup(mlflow))
    return runners


def default_runner(settings: Settings, runners: Mapping[str, Runner]) -> str:
    """Return the default runner: the configured one, else Airflow if available, else the first (the local one).

    Raises UsageError if the configured one is not available.
    """
    configured = settings.operator_config().runner
    if not configured:
        return AirflowRunner.name if AirflowRunner.name in runners else next(iter(runners))
    with settings.add_source_to_errors():
        if configured not in runners:  # only Airflow can be missing
            raise UsageError(
                "runner is airflow, but no Airflow is configured. Set TIPBENCH_AIRFLOW_URL, or runner=local."
            )
    return configured


_DAY_S = 86_400.0
_POSITION_ATTEMPTS = 3


@dataclass(frozen=True)
class JobService:
    """Job store, runners and supervisor. Thread-safe."""

    store: JobStore
    runners: Mapping[str, Runner]
    supervisor: Supervisor
    progress: ProgressCache
    default_runner: str

    @classmethod
    def of(cls, settings: Settings, runners: Mapping[str, Runner]) -> Self:
        """Create the service of a home folder with `runners` by name."""
        folder = settings.home / "jobs"
        keep_days = settings.operator_config().jobs_keep_days
        keep_s = keep_days * _DAY_S if keep_days > 0 else None  # 0 keeps all jobs
        store = JobStore(folder / "jobs.db")
        supervisor = Supervisor(store, runners, folder / "supervisor.lock", keep_s=keep_s)
        return cls(store, runners, supervisor, ProgressCache(supervisor.runner_of), default_runner(settings, runners))

    def close(self) -> None:
        """Stop supervising; jobs keep running."""
        self.supervisor.close()
        self.store.close()
        for runner in self.runners.values():
            if isinstance(runner, AirflowRunner):
                runner.close()

    def submit(self, request: JobRequest, *, idempotency_key: str | None = None) -> Submitted:
        """Queue a job request; with an idempotency key, at most once."""
        submitted = self.store.add(request, idempotency_key)
        self.supervisor.wake()
        return submitted

    def cancel(self, job_id: str) -> Job:
        """Cancel a job. Raises JobConflict if it has succeeded or failed, JobNotFound if it does not exist."""
        job = self.store.request_cancel(job_id)
        self.supervisor.wake()
        return job

    def get_with_position(self, job_id: str) -> tuple[Job, int | None]:
        """Return a job and its position in the queue, None if it is not queued. Raises JobNotFound."""
        for _ in range(_POSITION_ATTEMPTS):  # the job may start between the two reads
            job = self.store.get(job_id)
            if job.state is not JobState.QUEUED:
                return job, None
            position = self.queue_positions().get(job_id)
            if position is not None:
                return job, position
        return job, None

    def page(self, filters: JobFilter, *, limit: int, after: str | None = None) -> Page:
        """Return a page of jobs. Raises Invalid if `after` is not a cursor of an earlier page."""
        try:
            return self.store.page(filters, limit=limit, after=after)
        except UsageError as exc:
            message = "next must be the `next` value of the previous page; omit it for the first page."
            raise Invalid(message, path="query.next") from exc

    def queue_positions(self) -> dict[str, int]:
        """Return the position of every queued job, by id."""
        return queue_positions(self.store.in_states({JobState.QUEUED}))

    def log(self, job_id: str, max_bytes: int) -> LogTail:
        """Return the end of a job's log. Raises JobNotFound."""
        job = self.store.get(job_id)
        try:
            return self.supervisor.runner_of(job).log(job, max_bytes)
        except ServerUnavailable as exc:
            return LogTail(f"{exc}\n", size=0, cut=False)


# Options that Airflow sets unless the request does: the DAG sets skip_refused, and the worker sets ollama_url.
_SET_BY_AIRFLOW = {"skip_refused", "ollama_url"}
_MAX_OPTION = 16_000  # characters; the command line is limited
_SHARED_OPTIONS = (*MODEL_OPTIONS, "mlflow_url", "suite", "wait")  # of a judge run and a collect

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=MAX_KEY,
        pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$",
        description="Chosen by the client per request: a repeated key returns the same job and starts nothing.",
        examples=["9c1d5d6e-8f0a-4f3e-a4c5-6b1f0a7d2e10"],
    ),
]


@dataclass(frozen=True)
class CollectTarget:
    """Where and how a collect is executed."""

    runner: str | None = None  # None for the default
    wait_for_judge: bool = False  # before comparing; with Airflow only
    explicit_keys: frozenset[str] = frozenset()  # configuration keys that the request sets


def start_collect(
    panel: Panel,
    config: CollectConfig,
    *,
    started_by: str,
    idempotency_key: str | None = None,
    target: CollectTarget | None = None,
) -> Submitted:
    """Queue a collect; `config` comes from `panel.permissions.config`. Raises UsageError if its suite is invalid."""
    target = target or CollectTarget()
    runner = target.runner or panel.jobs.default_runner
    if runner not in panel.jobs.runners:
        raise Invalid(
            f"runner must be one of {', '.join(panel.jobs.runners)} (got {runner[:40]!r}). "
            "TIPBENCH_AIRFLOW_URL adds Airflow.",
            path="query.runner",
        )
    if target.wait_for_judge and runner != AirflowRunner.name:
        raise Invalid(
            "wait_for_judge is available with Airflow only; a local run ends when its results are recorded. "
            "Omit it, or choose runner=airflow.",
            path="query.wait_for_judge",
        )
    for name, value in config.model_dump().items():
        if isinstance(value, str) and len(value) > _MAX_OPTION:
            raise Invalid(f"{name} may have at most {_MAX_OPTION} characters (got {len(value)}).", path=f"body.{name}")
    suite_for(config)  # raises UsageError
    request = collect_request(config, started_by=started_by, runner=runner)
    if runner == AirflowRunner.name:
        # The panel's values are not sent: the DAG skips refused models by default, and a URL such as localhost is
        # another server for a worker than for the panel.
        omitted = _SET_BY_AIRFLOW - target.explicit_keys
        arguments = {name: value for name, value in request.arguments.items() if name not in omitted}
        if target.wait_for_judge:
            arguments[WAIT_FOR_JUDGE] = True
        request = replace(request, arguments=arguments)
    return panel.jobs.submit(request, idempotency_key=idempotency_key)


def start_judge(
    panel: Panel, experiment: str, body: JudgeRunRequest, *, started_by: str, idempotency_key: str | None = None
) -> Submitted:
    """Queue a `judge run` of an existing experiment. Raises Invalid or Forbidden with the path of the option."""
    sent = body.model_dump(by_alias=True, exclude_defaults=True)
    config = panel.permissions.config({name: sent[name] for name in _SHARED_OPTIONS if name in sent})
    with convert_option_errors("body"):
        judge = judge_name(body.judge)
    if body.with_.startswith(f"{JudgeKind.COMMAND}:"):  # the command line would run with the panel's permissions
        raise Forbidden(
            'A command line is not accepted over HTTP. Send "command" to use the program in TIPBENCH_JUDGE_COMMAND.',
            code="not_allowed",
            path="body.with",
        )
    judge_kind = JudgeChoice.parse(body.with_).kind
    program = _judging_program(panel) if judge_kind is JudgeKind.COMMAND else None
    options = {**sent, "with": body.with_, "experiment": experiment, "mlflow_url": config.mlflow_url}
    if judge is not None:
        options["judge"] = judge
    if judge_kind is JudgeKind.MODEL:  # for other judges, judge_request refuses this option
        options["ollama_url"] = config.ollama_url
    with panel.mlflow.connected(config.mlflow_url) as opened:
        get_experiment(opened.store, experiment)  # raises NotFound
    try:
        request = judge_request(options, ollama_url=config.ollama_url, program=program, started_by=started_by)
    except UsageError as exc:  # its message begins with a flag of the command line
        raise Invalid(str(exc).removeprefix("--"), path="body") from exc
    return panel.jobs.submit(request, idempotency_key=idempotency_key)


def retry_job(panel: Panel, job_id: str, *, started_by: str, idempotency_key: str | None = None) -> Submitted:
    """Queue a copy of a job. A judging program is replaced by the one that is configured now.

    Raises JobConflict unless the job failed, was cancelled or is lost. Raises Forbidden if the job needs a
    judging program and none is configured, or if its servers or suite are no longer permitted.
    """
    old = panel.jobs.store.get(job_id)
    restricted = {name: old.arguments[name] for name in (*URL_KEYS, "suite") if old.arguments.get(name) is not None}
    panel.permissions.config(restricted)  # raises Forbidden
    changes: dict[str, Any] = {}
    kind, _, _ = str(old.arguments.get("with", "")).partition(":")  # old jobs have the command line in `with`
    if kind == JudgeKind.COMMAND:
        changes = {
            "arguments": {**old.arguments, "with": str(JudgeKind.COMMAND)},
            "private": {**old.private, PROGRAM_VARIABLE: _judging_program(panel)},
        }
    submitted = queue_retry(
        panel.jobs.store, job_id, started_by=started_by, idempotency_key=idempotency_key, changes=changes
    )
    panel.jobs.supervisor.wake()
    return submitted


def _judging_program(panel: Panel) -> str:
    """Return the configured command line. Raises Forbidden if it is missing or invalid."""
    program = panel.settings.get("judge_command")
    if not program:
        raise Forbidden(
            "No judging program is configured. Set TIPBENCH_JUDGE_COMMAND; rules and ollama:MODEL need none.",
            code="not_allowed",
            path="body.with",
        )
    try:
        split_command(program)
    except UsageError:  # its message contains the command line, which may have secrets
        message = "TIPBENCH_JUDGE_COMMAND cannot be parsed; check its quoting."
        raise Forbidden(message, code="not_allowed", path="body.with") from None
    return program
