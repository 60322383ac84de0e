"""Airflow's REST API, as much of it as a runner needs: log in, ask, and say in plain words what went wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from tipbench.addresses import is_web_address
from tipbench.errors import AirflowAway, AirflowRefused, UsageError
from tipbench.generate.http import TOO_MANY_FILES, http_client, tls_for, too_many_files

MAX_BYTES = 32 * 1024 * 1024
TIMEOUT_S = 10.0
REST_S = 5.0  # after a failure nobody is asked for so long: one server that is away must not hold up all jobs
LOGIN_REST_S = 30.0  # a wrong password is not tried again and again, or the account is locked
_SILENT = 6  # so much longer when it is silent: asking costs a time-out, in which all other jobs wait
_DRIBBLE = 3  # an answer may take this many time-outs in all, however slowly it trickles in
_AWAY = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_WORDS = 600
TOO_LONG = 413  # the status of an answer that is longer than MAX_BYTES

Json = dict[str, Any]


@dataclass(frozen=True)
class AirflowAccess:
    """Where Airflow is and who we are there: a user and password, from which tokens are made, or a token."""

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    dag_id: str = "bench_collect"
    public_url: str | None = None  # of its pages, where browsers reach it elsewhere

    def check(self) -> None:
        """UsageError names the setting that is wrong or missing."""
        _check_address("airflow_url", self.url)
        if self.public_url:
            _check_address("airflow_public_url", self.public_url)
        if not self.token and not (self.username and self.password):
            raise UsageError(
                "airflow_url is set, and nothing says who we are there. Set TIPBENCH_AIRFLOW_USERNAME and "
                "TIPBENCH_AIRFLOW_PASSWORD, or TIPBENCH_AIRFLOW_TOKEN."
            )
        if not self.dag_id or not self.dag_id.replace("-", "_").replace(".", "_").isidentifier():
            raise UsageError(f"airflow_dag takes the id of a DAG, such as bench_collect (got {self.dag_id[:80]!r}).")


def _check_address(key: str, url: str) -> None:
    if "@" in url:  # looked for first: the other message shows the address
        raise UsageError(
            f"{key} holds a user name or password. Leave them out, and set TIPBENCH_AIRFLOW_USERNAME and "
            "TIPBENCH_AIRFLOW_PASSWORD."
        )
    if not is_web_address(url):
        raise UsageError(f"{key} takes a web address such as http://airflow.example:8080 (got {url[:80]!r}).")


class AirflowRest:
    """One Airflow. Thread-safe. AirflowAway when it may work later, AirflowRefused (with `status`) when it says no."""

    def __init__(
        self,
        access: AirflowAccess,
        *,
        timeout_s: float = TIMEOUT_S,
        rest_s: float = REST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        access.check()
        self.access = access
        self.url = access.url.rstrip("/")
        self.public_url = (access.public_url or access.url).rstrip("/")
        self._timeout_s = timeout_s
        self._rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._token = access.token
        self._closed_until = 0.0
        self._trouble = ""
        self._client = http_client(
            self.url, tls_for(self.url), timeout=timeout_s, limits=httpx.Limits(max_connections=8, keepalive_expiry=4.0)
        )

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    @property
    def in_trouble(self) -> bool:
        """Whether the last question found it away; the next may have to wait for a time-out."""
        return bool(self._trouble)

    def get(self, path: str, **params: str | int) -> Json:
        """The answer to GET {base}/api/v2/{path}."""
        return self._asked("GET", path, params=params)

    def post(self, path: str, body: Mapping[str, Any]) -> Json:
        """The answer to POST {base}/api/v2/{path}."""
        return self._asked("POST", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Json:
        """The answer to PATCH {base}/api/v2/{path}."""
        return self._asked("PATCH", path, body)

    def _asked(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int] | None = None,
    ) -> Json:
        trouble = self._trouble
        if trouble and self._clock() < self._closed_until:
            raise AirflowAway(trouble)
        url, bearer = f"{self.url}/api/v2/{path}", self._bearer()
        status, content = self._send(method, url, body, params, bearer)
        if _token_refused(status, content) and self.access.username and self.access.password:
            self._forget(bearer)  # it lives a day, or less if Airflow's key changed
            status, content = self._send(method, url, body, params, self._bearer())
        return self._json(status, content)

    def _bearer(self) -> str:
        with self._lock:
            if self._token is None:
                self._token = self._log_in()
            return self._token

    def _forget(self, bearer: str) -> None:
        with self._lock:
            if self._token == bearer:  # else somebody has made a new one meanwhile
                self._token = None

    def _log_in(self) -> str:
        who = {"username": self.access.username, "password": self.access.password}
        status, content = self._send("POST", f"{self.url}/auth/token", who, None, None)
        if status in _AWAY:
            raise self._away(f"Airflow at {self.url} is not available: HTTP {status}, {self._words(content)}.")
        token, words = _object(content).get("access_token"), self._words(content)
        if status not in (200, 201) or not isinstance(token, str) or not token:
            raise self._away(
                f"Airflow at {self.url} does not let {self.access.username} in (HTTP {status}, {words}). "
                "Check TIPBENCH_AIRFLOW_USERNAME and TIPBENCH_AIRFLOW_PASSWORD, and that this is an Airflow 3.",
                LOGIN_REST_S,
            )
        return token

    def _json(self, status: int, content: bytes) -> Json:
        if 200 <= status < 300:
            answer = _object(content)
            if answer or content.strip() in (b"{}", b""):
                self._trouble = ""
                return answer
            raise self._away(
                f"Something else than Airflow answers at {self.url}: {self._words(content)}. Check airflow_url."
            )
        if status in _AWAY:
            words = f"Airflow at {self.url} is not available: HTTP {status}, {self._words(content)}."
            raise self._away(words, 0.0 if status == 500 else None)  # it may be this one page of it that is broken
        if _token_refused(status, content):
            raise self._away(
                f"Airflow at {self.url} no longer takes our token (HTTP {status}). Set TIPBENCH_AIRFLOW_TOKEN to a "
                "fresh one, or a user name and password, from which tokens are made when they are needed.",
                LOGIN_REST_S,
            )
        if 300 <= status < 400:
            raise self._away(f"Airflow at {self.url} sends us elsewhere (HTTP {status}). Give airflow_url as it ends.")
        self._trouble = ""
        raise AirflowRefused(f"Airflow at {self.url} refused (HTTP {status}): {self._words(content)}", status=status)

    def _send(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str | int] | None,
        bearer: str | None,
    ) -> tuple[int, bytes]:
        headers = {"accept": "application/json", **({"authorization": f"Bearer {bearer}"} if bearer else {})}
        deadline = time.monotonic() + self._timeout_s * _DRIBBLE
        try:
            with self._client.stream(method, url, json=body, params=params, headers=headers) as response:
                return response.status_code, self._read(response, deadline)
        except httpx.TimeoutException as exc:
            message = f"Airflow at {self.url} did not answer within {self._timeout_s:g} s. It is asked again."
            raise self._away(message, _SILENT * self._rest_s) from exc
        except (httpx.RequestError, httpx.DecodingError) as exc:
            if too_many_files(exc):
                raise self._away(f"Airflow at {self.url} was not asked: {TOO_MANY_FILES}.") from exc
            reason = str(exc).rstrip(".") or type(exc).__name__
            raise self._away(
                f"Airflow at {self.url} cannot be reached: {reason}. Is its API server running? It is asked again "
                "until it answers."
            ) from exc

    def _read(self, response: httpx.Response, deadline: float) -> bytes:
        content = bytearray()
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > MAX_BYTES:
                raise AirflowRefused(
                    f"Airflow at {self.url} answered with more than {MAX_BYTES >> 20} MB.", status=TOO_LONG
                )
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout("the answer trickles", request=response.request)
        return bytes(content)

    def _words(self, content: bytes) -> str:
        """What an error says, without what we sent to log in: some servers repeat what they were asked."""
        for secret in filter(None, (self.access.password, self._token)):
            content = content.replace(secret.encode(), b"***")
        return _words(content)

    def _away(self, message: str, rest_s: float | None = None) -> AirflowAway:
        """The exception to raise; for a while everybody is told the same at once."""
        self._trouble, self._closed_until = message, self._clock() + (self._rest_s if rest_s is None else rest_s)
        return AirflowAway(message)


def path_of(*parts: str | int) -> str:
    """A path of quoted parts: ids of runs and tasks may hold any character."""
    return "/".join(quote(str(part), safe="") for part in parts)


def _object(content: bytes) -> Json:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _token_refused(status: int, content: bytes) -> bool:
    """An old token is 401; one that was signed with another key is 403, as is what its user may not do."""
    return status == 401 or (status == 403 and "Invalid JWT token" in _words(content))


def _words(content: bytes) -> str:
    """What an error says: `detail` is a text, an object or a list of objects."""
    detail = _object(content[:100_000]).get("detail")
    parts = detail if isinstance(detail, list) else [detail]
    found = [_said(part) for part in parts if part]
    text = "; ".join(found) or content[:_MOST_WORDS].decode("utf-8", "replace")
    return " ".join(text.split())[:_MOST_WORDS] or "without a word"


def _said(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    said = part.get("msg") or part.get("message") or part.get("reason") or json.dumps(part)
    place = part.get("loc")
    return f"{'.'.join(map(str, place))}: {said}" if isinstance(place, list) else str(said)
