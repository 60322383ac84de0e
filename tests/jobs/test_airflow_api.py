"""Airflow's REST API: authentication, retries, and errors when it is unavailable."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.scripted_airflow import DAG, PASSWORD, USER, ScriptedAirflow
from tipbench.errors import AirflowError, AirflowUnavailable, TipbenchError, UsageError
from tipbench.jobs.airflow_api import BACKOFF_S, LOGIN_BACKOFF_S, AirflowAccess, AirflowApi, AirflowDag, path_of

UNREACHABLE = "http://127.0.0.1:9"


class Clock:
    """A clock that only the test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def airflow(home: Path) -> Iterator[ScriptedAirflow]:
    with ScriptedAirflow(home) as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rest(airflow: ScriptedAirflow, clock: Clock) -> Iterator[AirflowApi]:
    with closing(AirflowApi(AirflowAccess(airflow.url, USER, PASSWORD), clock=clock)) as client:
        yield client


def test_one_login_serves_all_requests(airflow: ScriptedAirflow, rest: AirflowApi) -> None:
    for _ in range(3):
        assert rest.get(f"dags/{DAG}")["is_paused"] is False
    assert airflow.logins == 1


def test_an_expired_token_is_renewed(airflow: ScriptedAirflow, rest: AirflowApi) -> None:
    rest.get(f"dags/{DAG}")
    airflow.tokens.clear()
    assert rest.get(f"dags/{DAG}")["dag_id"] == DAG
    assert airflow.logins == 2


def test_a_token_signed_with_another_key_is_renewed(airflow: ScriptedAirflow) -> None:
    access = AirflowAccess(airflow.url, USER, PASSWORD, token="of-another-key")
    with closing(AirflowApi(access)) as rest:
        assert rest.get(f"dags/{DAG}")["dag_id"] == DAG
    assert airflow.logins == 1


def test_a_configured_token_is_used_and_not_renewed(airflow: ScriptedAirflow) -> None:
    airflow.tokens.add("given")
    with closing(AirflowApi(AirflowAccess(airflow.url, token="given"))) as rest:
        assert rest.get(f"dags/{DAG}")["dag_id"] == DAG
        airflow.tokens.clear()
        with pytest.raises(AirflowUnavailable, match="Set TIPBENCH_AIRFLOW_TOKEN to a fresh one"):
            rest.get(f"dags/{DAG}")
    assert airflow.logins == 0


def test_a_wrong_password_is_reported_and_not_retried(airflow: ScriptedAirflow, clock: Clock) -> None:
    with closing(AirflowApi(AirflowAccess(airflow.url, USER, "wrong-a1b2"), clock=clock)) as rest:
        for _ in range(3):
            with pytest.raises(
                AirflowUnavailable, match=r"rejects the login of bench .*TIPBENCH_AIRFLOW_PASSWORD"
            ) as caught:
                rest.get(f"dags/{DAG}")
            assert "wrong-a1b2" not in str(caught.value)
        assert airflow.logins == 1
        clock.now += LOGIN_BACKOFF_S + 1
        with pytest.raises(AirflowUnavailable):
            rest.get(f"dags/{DAG}")
    assert airflow.logins == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("away", "cannot be reached: .* Is its API server running"),
        ("busy", "is not available: HTTP 503, try later"),
        ("html", "Not an Airflow server .*Check airflow_url"),
    ],
)
def test_a_server_that_does_not_answer_is_unavailable_until_it_does(
    airflow: ScriptedAirflow, rest: AirflowApi, clock: Clock, fault: str, words: str
) -> None:
    rest.get(f"dags/{DAG}")
    airflow.fault = fault
    with pytest.raises(AirflowUnavailable, match=words):
        rest.get(f"dags/{DAG}")
    airflow.fault = ""
    clock.now += BACKOFF_S + 1
    assert rest.get(f"dags/{DAG}")["dag_id"] == DAG


def test_an_unavailable_server_is_not_queried_by_every_caller(airflow: ScriptedAirflow, rest: AirflowApi) -> None:
    airflow.fault = "busy"
    for _ in range(5):
        with pytest.raises(AirflowUnavailable):
            rest.get(f"dags/{DAG}")
    assert len(airflow.requests) == 1


def test_a_silent_server_is_queried_less_often(clock: Clock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        access = AirflowAccess(f"http://127.0.0.1:{silent.getsockname()[1]}", USER, PASSWORD)
        with closing(AirflowApi(access, timeout_s=0.3, clock=clock)) as rest:
            queried = []
            for _ in range(3):
                with pytest.raises(AirflowUnavailable, match=r"did not respond within 0\.3 s") as caught:
                    rest.get("dags")
                queried.append(isinstance(caught.value.__cause__, httpx.TimeoutException))
                clock.now += 3 * BACKOFF_S
    assert queried == [True, False, True]


def test_no_server_is_unavailable() -> None:
    with (
        closing(AirflowApi(AirflowAccess(UNREACHABLE, USER, PASSWORD))) as rest,
        pytest.raises(AirflowUnavailable, match=f"Airflow at {UNREACHABLE} cannot be reached"),
    ):
        rest.get("dags")


def test_a_rejected_request_has_status_and_message(rest: AirflowApi) -> None:
    with pytest.raises(AirflowError, match=r"HTTP 404\): The Dag with ID: `other` was not found") as caught:
        rest.get("dags/other")
    assert caught.value.status == 404


def test_ids_with_special_characters_are_one_path_segment() -> None:
    assert path_of("dags", "a/b c?", "x") == "dags/a%2Fb%20c%3F/x"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "airflow:8080"}, "airflow_url takes a web address"),
        ({"url": "http://anna:secret-7@airflow:8080"}, "Leave them out, and set TIPBENCH_AIRFLOW_USERNAME"),
        ({"url": "http://anna:secret-7@airflow:none"}, "airflow_url holds a user name or password"),
        ({"public_url": "airflow.example"}, "airflow_public_url takes a web address"),
        ({"public_url": "http://anna:secret-7@airflow"}, "airflow_public_url holds a user name or password"),
        ({"username": None}, "without a login"),
        ({"password": ""}, "without a login"),
        ({"dag_id": "a/b"}, "airflow_dag takes the id of a DAG"),
    ],
)
def test_invalid_access_settings_are_refused_before_anything_is_sent(changes: dict[str, Any], words: str) -> None:
    given = {"url": UNREACHABLE, "username": USER, "password": PASSWORD, **changes}
    with pytest.raises(UsageError, match=words) as caught:
        AirflowAccess(**given).check()
    assert "secret-7" not in str(caught.value)


def test_secrets_are_not_in_its_representation() -> None:
    assert PASSWORD not in repr(AirflowAccess(UNREACHABLE, USER, PASSWORD, "t0ken"))
    assert "t0ken" not in repr(AirflowAccess(UNREACHABLE, USER, PASSWORD, "t0ken"))


@pytest.mark.parametrize("path", ["/auth/token", "/api/v2/dags"])
def test_a_server_that_echoes_the_request_reveals_no_secret(airflow: ScriptedAirflow, path: str) -> None:
    airflow.echoed_path = path
    with (
        closing(AirflowApi(AirflowAccess(airflow.url, USER, PASSWORD), backoff_s=0)) as rest,
        pytest.raises(TipbenchError) as caught,
    ):
        rest.get(f"dags/{DAG}")
    assert "***" in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert "token-1" not in str(caught.value)


def test_links_use_the_public_address_of_airflow() -> None:
    inside = AirflowAccess(UNREACHABLE, USER, PASSWORD, public_url="https://airflow.example/")
    for access, page in (
        (inside, "https://airflow.example"),
        (AirflowAccess(UNREACHABLE, USER, PASSWORD), UNREACHABLE),
    ):
        with closing(AirflowApi(access)) as rest:
            assert AirflowDag(rest).run_url("a/b") == f"{page}/dags/{DAG}/runs/a%2Fb"
