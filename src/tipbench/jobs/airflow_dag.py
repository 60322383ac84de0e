"""One DAG in Airflow and the runs of it, as the runner sees them: trigger, look, read a log, cancel, clear, answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tipbench.errors import AirflowAway, AirflowRefused, NotStarted
from tipbench.jobs.airflow_rest import AirflowRest, Json, path_of

COLLECT, WAIT, COMPARE = "collect", "wait_for_judge", "compare"  # ids of its tasks
DEFAULT_POOL = "default_pool"
ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
FAILED = frozenset({"failed", "upstream_failed"})
PARKED = frozenset({"awaiting_input", "deferred"})
UNSTARTED = frozenset({None, "scheduled", "queued"})
_PAGE = 100
_MOST_TASKS = 2000
_MOST_LINE = 65_536
_MOST_ERROR = 2000
_T = TypeVar("_T", bound=BaseModel)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TaskInstance(_Answer):
    """One task of a run; of a mapped one each instance has its own `map_index`, and -1 before it is expanded."""

    task_id: str
    map_index: int = -1
    state: str | None = None
    try_number: int = 0
    start_date: str | None = None
    pool: str = DEFAULT_POOL
    rendered_map_index: str | None = None

    @property
    def key(self) -> str:
        """Its name within the run."""
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.map_index}]"

    @property
    def title(self) -> str:
        """Its name for people: with the model, where there is one."""
        shown = self.rendered_map_index or (str(self.map_index) if self.map_index >= 0 else "")
        return f"{self.task_id} {shown}".strip()

    @property
    def collects(self) -> bool:
        """Whether it generates; several hosts have a task each."""
        return self.task_id.startswith(COLLECT)


class _DagRun(_Answer):
    state: str


class _Dag(_Answer):
    is_paused: bool = False


class _Tasks(_Answer):
    task_instances: list[TaskInstance] = Field(default_factory=list)


class _Log(_Answer):
    content: list[Any] = Field(default_factory=list)
    continuation_token: str | None = None


class _Hitl(_Answer):
    options: list[str] = Field(min_length=1)
    response_received: bool = False


@dataclass(frozen=True)
class SeenRun:
    """A DAG run with its tasks, in the order in which they began."""

    state: str
    tasks: tuple[TaskInstance, ...]

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.state in ("success", "failed")

    def task(self, task_id: str) -> TaskInstance | None:
        """The first instance of a task."""
        return next((task for task in self.tasks if task.task_id == task_id), None)


@dataclass(frozen=True)
class LogLine:
    """One entry of a task's log; `error` is the exception it tells of."""

    text: str
    error: str = ""


@dataclass(frozen=True)
class LogPart:
    """Lines of a task's log, and how to ask for those that follow; None when there will be none."""

    lines: tuple[LogLine, ...]
    token: str | None


class AirflowDag:
    """The DAG of the settings. Raises as AirflowRest does."""

    def __init__(self, rest: AirflowRest) -> None:
        self._rest = rest
        self.dag_id = rest.access.dag_id
        self._path = path_of("dags", self.dag_id)

    def page_of(self, run_id: str) -> str:
        """The run's page for people."""
        return f"{self._rest.public_url}/{path_of('dags', self.dag_id, 'runs', run_id)}"

    def trigger(self, run_id: str, conf: Mapping[str, Any], note: str) -> None:
        """Have a run of this id, once. NotStarted when it cannot be, AirflowAway when it may be later."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf), "note": note}
        try:
            self._rest.post(f"{self._path}/dagRuns", body)
        except AirflowRefused as exc:
            if exc.status == 409:  # it is there: ours of an earlier try, whose answer never came
                return
            raise self._not_started(exc) from exc

    def check_awake(self) -> None:
        """AirflowAway when the DAG is paused: it would take a run and let it lie. NotStarted when there is none."""
        try:
            dag = _read(_Dag, self._rest.get(self._path))
        except AirflowRefused as exc:
            raise self._not_started(exc) from exc
        if dag.is_paused:
            raise AirflowAway(
                f"The DAG {self.dag_id} is paused in Airflow. Unpause it there (`airflow dags unpause {self.dag_id}`); "
                "the job then starts by itself."
            )

    def _not_started(self, exc: AirflowRefused) -> NotStarted:
        if exc.status == 404:
            return NotStarted(
                f"There is no DAG {self.dag_id} in Airflow at {self._rest.url}. Put dags/bench_dag.py into its DAG "
                "folder, run `airflow dags reserialize`, and retry."
            )
        if exc.status == 403:
            return NotStarted(f"{exc} The user needs the role op, or another that may trigger the DAG.")
        return NotStarted(str(exc))

    def look(self, run_id: str) -> SeenRun | None:
        """The run as it is now; None when there is none."""
        try:
            run = _read(_DagRun, self._rest.get(self._run(run_id)))
        except AirflowRefused as exc:
            if exc.status == 404:
                return None
            raise
        tasks: list[TaskInstance] = []
        while len(tasks) % _PAGE == 0 and len(tasks) < _MOST_TASKS:
            answer = self._rest.get(f"{self._run(run_id)}/taskInstances", limit=_PAGE, offset=len(tasks))
            found = _read(_Tasks, answer).task_instances
            tasks += found
            if not found:
                break
        tasks.sort(key=lambda task: (task.start_date is None, task.start_date or "", task.key))
        return SeenRun(run.state, tuple(tasks))

    def is_paused(self) -> bool:
        """Whether the DAG is paused."""
        return _read(_Dag, self._rest.get(self._path)).is_paused

    def missing_pools(self, names: Collection[str]) -> list[str]:
        """Those of the pools that are not there: tasks in them never begin."""
        return [name for name in sorted(names) if not self._there(path_of("pools", name))]

    def log(self, run_id: str, task: TaskInstance, attempt: int, token: str | None, skip: int) -> LogPart:
        """What a task has printed after the `skip` lines already read; `token` spares reading those again."""
        path = f"{self._task(run_id, task.task_id)}/{path_of('logs', attempt)}"
        if token is not None:
            try:
                return _log_part(_read(_Log, self._rest.get(path, map_index=task.map_index, token=token)), 0)
            except AirflowRefused as exc:
                if exc.status != 400:  # a token does not outlive a change of Airflow's key
                    raise
        try:
            return _log_part(_read(_Log, self._rest.get(path, map_index=task.map_index)), skip)
        except AirflowRefused as exc:
            if exc.status == 404:
                return LogPart((), None)
            raise

    def cancel(self, run_id: str) -> None:
        """Fail the run: what runs of it is ended, its teardown is not."""
        self._rest.patch(self._run(run_id), {"state": "failed"})

    def clear(self, run_id: str, tasks: Sequence[TaskInstance]) -> None:
        """Have these tasks run again, and all that comes after them."""
        ids = [[task.task_id, task.map_index] if task.map_index >= 0 else task.task_id for task in tasks]
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": ids,
            "only_failed": False,
            "include_downstream": True,
            "reset_dag_runs": True,
        }
        self._rest.post(f"{self._path}/clearTaskInstances", body)

    def answer(self, run_id: str, task: TaskInstance) -> None:
        """Let the task that waits for the judge go on; nothing happens when somebody has answered it."""
        path = f"{self._run(run_id)}/{path_of('taskInstances', task.task_id, task.map_index, 'hitlDetails')}"
        asked = _read(_Hitl, self._rest.get(path))
        if asked.response_received:
            return
        try:
            self._rest.patch(path, {"chosen_options": asked.options[:1], "params_input": {}})
        except AirflowRefused as exc:
            if exc.status != 409:
                raise

    def _run(self, run_id: str) -> str:
        return f"{self._path}/{path_of('dagRuns', run_id)}"

    def _task(self, run_id: str, task_id: str) -> str:
        return f"{self._run(run_id)}/{path_of('taskInstances', task_id)}"

    def _there(self, path: str) -> bool:
        try:
            self._rest.get(path)
        except AirflowRefused as exc:
            return exc.status != 404  # who may not look does not know
        return True


def _read(kind: type[_T], answer: Json) -> _T:
    try:
        return kind.model_validate(answer)
    except ValidationError as exc:
        fault = exc.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise AirflowAway(
            f"Airflow answered something we cannot read ({place}: {fault['msg']}). Is it Airflow 3?"
        ) from exc


def _log_part(log: _Log, skip: int) -> LogPart:
    """Lines without the group at the head that names where they were read from."""
    lines = [_line(entry) for entry in log.content]
    if lines and lines[0].text.startswith("::group::Log message source details"):
        end = next((at for at, line in enumerate(lines) if line.text.startswith("::endgroup::")), -1)
        lines = lines[end + 1 :]
    return LogPart(tuple(lines[skip:]), log.continuation_token)


def _line(entry: object) -> LogLine:
    """An entry is an object with the text under `event`, or a line as it was written."""
    if not isinstance(entry, dict):
        return LogLine(str(entry)[:_MOST_LINE])
    text, details = str(entry.get("event", ""))[:_MOST_LINE], entry.get("error_detail")
    last = details[-1] if isinstance(details, list) and details else None
    if not isinstance(last, dict):
        return LogLine(text)
    return LogLine(text, f"{last.get('exc_type', 'Exception')}: {last.get('exc_value', '')}"[:_MOST_ERROR])
