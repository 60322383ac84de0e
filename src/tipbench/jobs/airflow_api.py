"""Client for Airflow's REST API, and the requests about a DAG and its runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tipbench.errors import AirflowError, AirflowUnavailable, JobStartError, UsageError
from tipbench.http import TOO_MANY_FILES_ADVICE, http_client, is_http_url, is_too_many_files, read_body

MAX_BYTES = 32 * 1024 * 1024  # of a response
TIMEOUT_S = 10.0
BACKOFF_S = 5.0  # requests fail immediately for this time after a failure, so that a slow server does not block jobs
LOGIN_BACKOFF_S = 30.0  # after a failed login; longer, to avoid locking the account
_TIMEOUT_BACKOFF_FACTOR = 6  # longer back-off after a timeout, because each timeout delays all other jobs
_RESPONSE_TIMEOUT_FACTOR = 3  # timeout of a whole response, as a multiple of the timeout of one read
_UNAVAILABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_MESSAGE = 600  # characters of an error message
TOO_LONG = 413  # status of our AirflowError for a response longer than MAX_BYTES; not expected from Airflow itself

Json = dict[str, Any]


@dataclass(frozen=True)
class AirflowAccess:
    """Airflow's address and credentials: either a token, or a user name and password to request tokens with."""

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    dag_id: str = "bench_collect"
    public_url: str | None = None  # address of the web UI, if browsers use a different one

    def check(self) -> None:
        """Raise UsageError if a setting is invalid or missing."""
        _check_address("airflow_url", self.url)
        if self.public_url:
            _check_address("airflow_public_url", self.public_url)
        if not self.token and not (self.username and self.password):
            raise UsageError(
                "airflow_url is set without a login. Set TIPBENCH_AIRFLOW_USERNAME and "
                "TIPBENCH_AIRFLOW_PASSWORD, or TIPBENCH_AIRFLOW_TOKEN."
            )
        if not self.dag_id.replace("-", "_").replace(".", "_").isidentifier():  # Airflow also allows - and .
            raise UsageError(f"airflow_dag takes the id of a DAG, such as bench_collect (got {self.dag_id[:80]!r}).")


def _check_address(key: str, url: str) -> None:
    if "@" in url:  # checked first, because the message below shows the address
        raise UsageError(
            f"{key} holds a user name or password. Leave them out, and set TIPBENCH_AIRFLOW_USERNAME and "
            "TIPBENCH_AIRFLOW_PASSWORD."
        )
    if not is_http_url(url):
        raise UsageError(f"{key} takes a web address such as http://airflow.example:8080 (got {url[:80]!r}).")


class AirflowApi:
    """Thread-safe REST client. Raises AirflowUnavailable for temporary errors, and AirflowError for all others."""

    def __init__(
        self,
        access: AirflowAccess,
        *,
        timeout_s: float = TIMEOUT_S,
        backoff_s: float = BACKOFF_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        access.check()
        self.access = access
        self.url = access.url.rstrip("/")
        self.public_url = (access.public_url or access.url).rstrip("/")
        self._timeout_s = timeout_s
        self._backoff_s = backoff_s
        self._clock = clock
        self._lock = threading.Lock()
        self._token = access.token
        self._backoff_until = 0.0  # clock value; until then, requests fail with `_error`
        self._error = ""
        self._client = http_client(
            self.url, timeout=timeout_s, limits=httpx.Limits(max_connections=8, keepalive_expiry=4.0)
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    @property
    def is_failing(self) -> bool:
        """Whether Airflow was unavailable at the last request. The next request may then time out."""
        return bool(self._error)

    def get(self, path: str, **params: str | int) -> Json:
        """Send GET {base}/api/v2/{path} and return the response body."""
        return self._request("GET", path, params=params)

    def post(self, path: str, body: Mapping[str, Any]) -> Json:
        """Send POST {base}/api/v2/{path} and return the response body."""
        return self._request("POST", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Json:
        """Send PATCH {base}/api/v2/{path} and return the response body."""
        return self._request("PATCH", path, body)

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int] | None = None,
    ) -> Json:
        error = self._error
        if error and self._clock() < self._backoff_until:
            raise AirflowUnavailable(error)
        url = f"{self.url}/api/v2/{path}"
        token = self._get_token()
        status, content = self._send(method, url, body, params=params, token=token)
        # A token expires after a day, or when Airflow's key changes; a new one needs the user name and password.
        if _token_rejected(status, content) and self.access.username and self.access.password:
            with self._lock:
                if self._token == token:  # otherwise another thread has already renewed it
                    self._token = None
            status, content = self._send(method, url, body, params=params, token=self._get_token())
        return self._parse_response(status, content)

    def _get_token(self) -> str:
        with self._lock:
            if self._token is None:
                login = {"username": self.access.username, "password": self.access.password}
                status, content = self._send("POST", f"{self.url}/auth/token", login)
                token = _parse_object(content).get("access_token")
                reason = self._error_message(content)
                if status in _UNAVAILABLE_STATUSES:
                    raise self._start_backoff(f"Airflow at {self.url} is not available: HTTP {status}, {reason}.")
                if status not in (200, 201) or not isinstance(token, str) or not token:
                    raise self._start_backoff(
                        f"Airflow at {self.url} rejects the login of {self.access.username} (HTTP {status}, {reason}). "
                        "Check TIPBENCH_AIRFLOW_USERNAME and TIPBENCH_AIRFLOW_PASSWORD, and that this is an Airflow 3.",
                        LOGIN_BACKOFF_S,
                    )
                self._token = token
            return self._token

    def _parse_response(self, status: int, content: bytes) -> Json:
        if 200 <= status < 300:
            parsed = _parse_object(content)
            is_empty = content.strip() in (b"", b"{}")
            if parsed or is_empty:  # otherwise `parsed` is {} because the content is not a JSON object
                self._error = ""
                return parsed
            raise self._start_backoff(
                f"Not an Airflow server at {self.url}: {self._error_message(content)}. Check airflow_url."
            )
        if status in _UNAVAILABLE_STATUSES:
            message = f"Airflow at {self.url} is not available: HTTP {status}, {self._error_message(content)}."
            backoff_s = 0.0 if status == 500 else None  # a 500 may concern this path only
            raise self._start_backoff(message, backoff_s)
        if _token_rejected(status, content):
            raise self._start_backoff(
                f"Airflow at {self.url} rejects the token (HTTP {status}). Set TIPBENCH_AIRFLOW_TOKEN to a "
                "fresh one, or set a user name and password, which renew it.",
                LOGIN_BACKOFF_S,
            )
        if 300 <= status < 400:
            raise self._start_backoff(
                f"Airflow at {self.url} redirects (HTTP {status}). Set airflow_url to the final address."
            )
        self._error = ""
        raise AirflowError(
            f"Airflow at {self.url} refused (HTTP {status}): {self._error_message(content)}", status=status
        )

    def _send(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        *,
        params: Mapping[str, str | int] | None = None,
        token: str | None = None,
    ) -> tuple[int, bytes]:
        headers = {"accept": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        deadline = time.monotonic() + self._timeout_s * _RESPONSE_TIMEOUT_FACTOR
        try:
            with self._client.stream(method, url, json=body, params=params, headers=headers) as response:
                content = read_body(response, limit=MAX_BYTES, deadline=deadline)
        except httpx.TimeoutException as exc:
            message = f"Airflow at {self.url} did not respond within {self._timeout_s:g} s. Trying again."
            raise self._start_backoff(message, _TIMEOUT_BACKOFF_FACTOR * self._backoff_s) from exc
        except (httpx.RequestError, httpx.DecodingError) as exc:
            if is_too_many_files(exc):
                raise self._start_backoff(
                    f"Airflow at {self.url} could not be reached: {TOO_MANY_FILES_ADVICE}."
                ) from exc
            reason = str(exc).rstrip(".") or type(exc).__name__
            raise self._start_backoff(
                f"Airflow at {self.url} cannot be reached: {reason}. Is its API server running? Trying again."
            ) from exc
        if content is None:
            size_mb = MAX_BYTES // 2**20
            raise AirflowError(f"Airflow at {self.url} returned more than {size_mb} MB.", status=TOO_LONG)
        return response.status_code, bytes(content)

    def _error_message(self, content: bytes) -> str:
        """Return the message of an error response, without our credentials, because some servers echo the request."""
        for secret in (self.access.password, self._token):
            if secret:
                content = content.replace(secret.encode(), b"***")
        detail = _parse_object(content[:100_000]).get("detail")  # a string, an object or a list of objects
        messages = []
        parts = detail if isinstance(detail, list) else [detail]
        for part in parts:
            if isinstance(part, dict):
                message = part.get("msg") or part.get("message") or part.get("reason") or json.dumps(part)
                location = part.get("loc")
                if isinstance(location, list):
                    messages.append(f"{'.'.join(map(str, location))}: {message}")
                else:
                    messages.append(str(message))
            elif part:
                messages.append(str(part))
        text = "; ".join(messages) or content[:_MAX_MESSAGE].decode("utf-8", "replace")
        return " ".join(text.split())[:_MAX_MESSAGE] or "no message"

    def _start_backoff(self, message: str, backoff_s: float | None = None) -> AirflowUnavailable:
        """Let requests fail with this message for `backoff_s` (None: the default). Returns the exception to raise."""
        self._error = message
        self._backoff_until = self._clock() + (self._backoff_s if backoff_s is None else backoff_s)
        return AirflowUnavailable(message)


def path_of(*parts: str | int) -> str:
    """Quote and join the parts of a URL path. Run and task ids may contain any character."""
    return "/".join(quote(str(part), safe="") for part in parts)


def _parse_object(content: bytes) -> Json:
    """Parse a JSON object; returns an empty one for any other content."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _token_rejected(status: int, content: bytes) -> bool:
    # A token signed with another key is a 403, like a missing permission.
    return status == 401 or (status == 403 and b"Invalid JWT token" in content)


COLLECT, WAIT, COMPARE = "collect", "wait_for_judge", "compare"  # task ids
DEFAULT_POOL = "default_pool"
TASK_ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
TASK_FAILED = frozenset({"failed", "upstream_failed"})
TASK_PARKED = frozenset({"awaiting_input", "deferred"})  # waiting without occupying a worker
TASK_UNSTARTED = frozenset({None, "scheduled", "queued"})
_PAGE_SIZE = 100  # task instances per request
_MAX_TASKS = 2000
_MAX_LINE = 65_536  # characters of a log line
_MAX_ERROR = 2000  # characters of an exception in a log
_ResponseT = TypeVar("_ResponseT", bound=BaseModel)


class _Response(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TaskInstance(_Response):
    """A task instance of a DAG run."""

    task_id: str
    map_index: int = -1  # -1 for an unmapped task, and before a mapped task is expanded
    state: str | None = None
    try_number: int = 0
    start_date: str | None = None
    pool: str = DEFAULT_POOL
    rendered_map_index: str | None = None

    @property
    def key(self) -> str:
        """Unique name within the DAG run."""
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.map_index}]"

    @property
    def title(self) -> str:
        """Display name: the task id, followed by the model of a mapped task, or its index if the model is unknown."""
        if self.rendered_map_index:
            return f"{self.task_id} {self.rendered_map_index}"
        return self.task_id if self.map_index < 0 else f"{self.task_id} {self.map_index}"

    @property
    def is_collect(self) -> bool:
        """Whether this is a collect task. With several Ollama hosts, each has a collect task with its own id."""
        return self.task_id.startswith(COLLECT)


class _Dag(_Response):
    is_paused: bool = False


class _TaskInstances(_Response):
    task_instances: list[TaskInstance] = Field(default_factory=list)


class _Log(_Response):
    content: list[Any] = Field(default_factory=list)
    continuation_token: str | None = None


class _Hitl(_Response):
    """A human-in-the-loop task, which waits for one of its options to be chosen."""

    options: list[str] = Field(min_length=1)
    response_received: bool = False


class DagRun(_Response):
    """A DAG run with its tasks."""

    state: str
    tasks: tuple[TaskInstance, ...] = ()  # by start time

    @property
    def has_ended(self) -> bool:
        return self.state in ("success", "failed")

    def task(self, task_id: str) -> TaskInstance | None:
        """Return the first instance of a task, or None."""
        return next((task for task in self.tasks if task.task_id == task_id), None)


@dataclass(frozen=True)
class LogLine:
    """One entry of a task's log."""

    text: str
    error: str = ""  # the exception that it reports


@dataclass(frozen=True)
class LogPage:
    """A page of log lines."""

    lines: tuple[LogLine, ...]
    token: str | None  # requests the next page; None at the end of the log


class AirflowDag:
    """The configured DAG and its runs. Methods raise the same exceptions as AirflowApi."""

    def __init__(self, api: AirflowApi) -> None:
        self._api = api
        self.dag_id = api.access.dag_id
        self._path = path_of("dags", self.dag_id)

    def run_url(self, run_id: str) -> str:
        """Return the URL of the run's page in the web UI."""
        return f"{self._api.public_url}/{path_of('dags', self.dag_id, 'runs', run_id)}"

    def trigger(self, run_id: str, conf: Mapping[str, Any], note: str) -> None:
        """Trigger a run with this id, once. Raises JobStartError, or AirflowUnavailable for temporary errors."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf), "note": note}
        try:
            self._api.post(f"{self._path}/dagRuns", body)
        except AirflowError as exc:
            if exc.status == 409:  # the run exists: the response to an earlier request was lost
                return
            raise self._start_error(exc) from exc

    def check_unpaused(self) -> None:
        """Raise AirflowUnavailable if the DAG is paused, and JobStartError if it is missing."""
        try:
            paused = self.is_paused()
        except AirflowError as exc:
            raise self._start_error(exc) from exc
        if paused:
            raise AirflowUnavailable(
                f"The DAG {self.dag_id} is paused in Airflow. Unpause it there (`airflow dags unpause {self.dag_id}`); "
                "the job then starts by itself."
            )

    def _start_error(self, exc: AirflowError) -> JobStartError:
        if exc.status == 404:
            return JobStartError(
                f"The DAG {self.dag_id} is missing in Airflow at {self._api.url}. Put dags/bench_dag.py into its DAG "
                "folder, run `airflow dags reserialize`, and retry."
            )
        if exc.status == 403:
            return JobStartError(f"{exc} The user needs the role op, or another that may trigger the DAG.")
        return JobStartError(str(exc))

    def get_run(self, run_id: str) -> DagRun | None:
        """Return the run with its tasks as they are now, or None if it does not exist."""
        try:
            run = _validate(DagRun, self._api.get(self._run_path(run_id)))
        except AirflowError as exc:
            if exc.status == 404:
                return None
            raise
        tasks: list[TaskInstance] = []
        for offset in range(0, _MAX_TASKS, _PAGE_SIZE):
            response = self._api.get(f"{self._run_path(run_id)}/taskInstances", limit=_PAGE_SIZE, offset=offset)
            page = _validate(_TaskInstances, response).task_instances
            tasks += page
            if len(page) < _PAGE_SIZE:
                break
        tasks.sort(key=lambda task: (task.start_date is None, task.start_date or "", task.key))  # unstarted tasks last
        return run.model_copy(update={"tasks": tuple(tasks)})

    def is_paused(self) -> bool:
        """Return whether the DAG is paused."""
        return _validate(_Dag, self._api.get(self._path)).is_paused

    def missing_pools(self, names: Collection[str]) -> list[str]:
        """Return the pools that do not exist; tasks assigned to them never start."""
        missing = []
        for name in sorted(names):
            try:
                self._api.get(path_of("pools", name))
            except AirflowError as exc:
                if exc.status == 404:  # after other errors, such as a missing permission, assume that it exists
                    missing.append(name)
        return missing

    def log(self, run_id: str, task: TaskInstance, attempt: int, *, token: str | None, skip: int) -> LogPage:
        """Return the next page of a task's log; `token` is that of the page before.

        The token is None for the first page, and after a page that was the last when it was read. Without a token, or
        if Airflow rejects it, the log is read from its start, without the first `skip` lines.
        """
        path = f"{self._run_path(run_id)}/{path_of('taskInstances', task.task_id, 'logs', attempt)}"
        if token is not None:
            try:
                return _log_page(_validate(_Log, self._api.get(path, map_index=task.map_index, token=token)))
            except AirflowError as exc:
                if exc.status != 400:  # 400: the page's token is invalid, for example because Airflow's key has changed
                    raise
        try:
            return _log_page(_validate(_Log, self._api.get(path, map_index=task.map_index)), skip=skip)
        except AirflowError as exc:
            if exc.status == 404:
                return LogPage((), None)
            raise

    def cancel(self, run_id: str) -> None:
        """Mark the run as failed: running tasks are stopped, teardown tasks still run."""
        self._api.patch(self._run_path(run_id), {"state": "failed"})

    def clear(self, run_id: str, tasks: Sequence[TaskInstance]) -> None:
        """Clear these tasks and their downstream tasks so that they run again."""
        ids = [task.task_id if task.map_index < 0 else [task.task_id, task.map_index] for task in tasks]
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": ids,
            "only_failed": False,
            "include_downstream": True,
            "reset_dag_runs": True,
        }
        self._api.post(f"{self._path}/clearTaskInstances", body)

    def respond(self, run_id: str, task: TaskInstance) -> None:
        """Choose the first option of a task that waits for a person; does nothing if it has a response."""
        path = f"{self._run_path(run_id)}/{path_of('taskInstances', task.task_id, task.map_index, 'hitlDetails')}"
        hitl = _validate(_Hitl, self._api.get(path))
        if hitl.response_received:
            return
        try:
            self._api.patch(path, {"chosen_options": hitl.options[:1], "params_input": {}})
        except AirflowError as exc:
            if exc.status != 409:  # 409: it has received a response in the meantime
                raise

    def _run_path(self, run_id: str) -> str:
        return f"{self._path}/{path_of('dagRuns', run_id)}"


def _validate(model: type[_ResponseT], response: Json) -> _ResponseT:
    try:
        return model.model_validate(response)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        location = ".".join(map(str, error["loc"]))
        raise AirflowUnavailable(
            f"Airflow returned an unexpected response ({location}: {error['msg']}). Is it Airflow 3?"
        ) from exc


def _log_page(log: _Log, *, skip: int = 0) -> LogPage:
    lines = [_parse_entry(entry) for entry in log.content]
    if lines and lines[0].text.startswith("::group::Log message source details"):  # Airflow's own lines
        group_ends = (index for index, line in enumerate(lines, start=1) if line.text.startswith("::endgroup::"))
        lines = lines[next(group_ends, 0) :]  # all lines if the group has no end
    return LogPage(tuple(lines[skip:]), log.continuation_token)


def _parse_entry(entry: object) -> LogLine:
    if not isinstance(entry, dict):  # a raw line
        return LogLine(str(entry)[:_MAX_LINE])
    text = str(entry.get("event", ""))[:_MAX_LINE]
    exceptions = entry.get("error_detail")  # the raised exception first, then its cause, and so on
    root_cause = exceptions[-1] if isinstance(exceptions, list) and exceptions else None
    if not isinstance(root_cause, dict):
        return LogLine(text)
    return LogLine(text, f"{root_cause.get('exc_type', 'Exception')}: {root_cause.get('exc_value', '')}"[:_MAX_ERROR])
