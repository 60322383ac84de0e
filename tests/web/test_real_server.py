"""The real application on a real uvicorn, in front of a real MLflow."""

from __future__ import annotations

import http.client
import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from support.judging import SheetDriver, fill, record_cells
from support.panel_site import make_app, serve_app
from tipbench.cli.main import app as commands
from tipbench.record.mlflow import MlflowStore
from tipbench.settings import load_settings
from tipbench.web.auth import Role
from tipbench.web.security import HEADERS
from web.panels import API


def run_command(*arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and output."""
    result = CliRunner().invoke(commands, list(arguments), catch_exceptions=False)
    return result.exit_code, result.stdout


@pytest.fixture
def bench(home: Path, mlflow_url: str) -> Iterator[tuple[httpx.Client, SheetDriver, str]]:
    """An admin's client, and an experiment in MLflow with judged cells."""
    settings = load_settings({"TIPBENCH_HOME": str(home), "MLFLOW_TRACKING_URI": mlflow_url}, home.parent)
    app = make_app(settings)
    _, secret = app.state.panel.authenticator.tokens.create(Role.ADMIN, "boss", life_s=None)
    name = f"tip-bench-web-{uuid.uuid4().hex[:8]}"
    with MlflowStore(mlflow_url) as store:
        experiment = record_cells(store, experiment=name, models=("alpha:135m",), n_scenarios=3)
        store.mark_changed(experiment.experiment_id)
        driver = SheetDriver(store, experiment)
        with serve_app(app) as url:
            headers = {"Authorization": f"Bearer {secret}"}
            with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=120) as client:
                yield client, driver, mlflow_url


def test_the_board_is_the_one_that_compare_prints(bench: tuple[httpx.Client, SheetDriver, str]) -> None:
    client, driver, url = bench
    driver.judged_by("anna", everything=True)
    code, printed = run_command("compare", driver.experiment.name, "--format", "json", "--mlflow-url", url)
    assert code == 0
    assert client.get(f"{API}/leaderboard/{driver.experiment.name}").json() == json.loads(printed)


def test_a_list_of_runs_is_the_one_that_runs_list_prints(bench: tuple[httpx.Client, SheetDriver, str]) -> None:
    client, driver, url = bench
    _, printed = run_command("runs", "list", "--experiment", driver.experiment.name, "--json", "--mlflow-url", url)
    items = client.get(f"{API}/runs/{driver.experiment.name}?limit=500").json()["items"]
    keys = ("run_id", "state", "params", "metrics", "tags")
    listed = sorted(json.loads(printed), key=lambda run: run["run_id"])
    assert sorted(({key: item[key] for key in keys} for item in items), key=lambda run: str(run["run_id"])) == listed


def test_a_sheet_applied_on_the_command_line_shows_at_once(
    bench: tuple[httpx.Client, SheetDriver, str], tmp_path: Path
) -> None:
    client, driver, url = bench
    name = driver.experiment.name
    before = client.get(f"{API}/leaderboard/{name}").json()
    assert client.get(f"{API}/leaderboard/{name}").json() == before
    sheet = tmp_path / "anna.json"
    sheet.write_text(json.dumps(fill(driver.export("anna", everything=True).stored)))
    assert run_command("judge", "apply", str(sheet), "--mlflow-url", url)[0] == 0
    after = client.get(f"{API}/leaderboard/{name}").json()
    assert (before["judges"], after["judges"]) == ([], ["anna"])
    rows = {row["experiment"]: row for row in client.get(f"{API}/experiments").json()["items"]}
    assert rows[name]["judged"] == rows[name]["cells"] == 9


def test_runs_and_experiments_lead_to_their_pages_in_mlflow(bench: tuple[httpx.Client, SheetDriver, str]) -> None:
    client, driver, url = bench
    rows = {row["experiment"]: row for row in client.get(f"{API}/experiments").json()["items"]}
    assert rows[driver.experiment.name]["url"] == f"{url}/#/experiments/{driver.experiment.experiment_id}/runs"
    run = client.get(f"{API}/runs/{driver.experiment.name}?limit=1").json()["items"][0]
    assert run["url"] == f"{url}/#/experiments/{driver.experiment.experiment_id}/runs/{run['run_id']}"
    whole = client.get(f"{API}/runs/{driver.experiment.name}/{run['run_id']}").json()
    assert whole["texts"]["artifact:raw.txt"].startswith("[")


def test_judging_over_http_ends_in_the_scores_that_files_give(bench: tuple[httpx.Client, SheetDriver, str]) -> None:
    client, driver, _ = bench
    name = driver.experiment.name
    sheet = client.post(f"{API}/judge/{name}/sheets", json={"judge": "ben", "all": True})
    assert sheet.status_code == 201
    raw = sheet.json()
    for item in raw["items"]:
        for tip in item["tips"]:
            tip["scores"] = dict.fromkeys(tip["scores"], 3)
    body = client.post(f"{API}/judge/{name}/apply", json=raw).json()
    assert body["status"] in ("applied", "held")
    assert body["unfinished"] == 0
    assert {given.judge for scores in driver.scores().values() for given in scores.applied.values()} == {"ben"}


def raw_request(url: str, *lines: str) -> bytes:
    """Send raw bytes and return the response."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
        return answer


@pytest.mark.parametrize(
    "lines",
    [
        ("GET /healthz HTTP/1.1", "Connection: close"),
        ("GET /healthz HTTP/1.1", "Host: localhost", "Host: evil.example", "Connection: close"),
        ("GET /healthz HTTP/1.1", "Host: evil.example", "Connection: close"),
        ("GET /healthz HTTP/1.1", "Host: ", "Connection: close"),
        ("GET http://evil.example/healthz HTTP/1.1", "Host: evil.example", "Connection: close"),
    ],
)
def test_a_request_without_exactly_one_allowed_host_is_refused(
    bench: tuple[httpx.Client, SheetDriver, str], lines: Any
) -> None:
    client, _, _ = bench
    assert raw_request(str(client.base_url).rstrip("/"), *lines).startswith(b"HTTP/1.1 400")


def test_real_responses_have_the_security_headers(bench: tuple[httpx.Client, SheetDriver, str]) -> None:
    client, _, _ = bench
    for path in ("/healthz", "/nothing", "/metrics", "/login"):
        response = client.get(path)
        assert {name: response.headers[name] for name in HEADERS} == HEADERS
        assert "server" not in response.headers


def test_an_endless_body_is_cut_off(bench: tuple[httpx.Client, SheetDriver, str]) -> None:
    client, _, _ = bench
    host, port = str(client.base_url).removeprefix("http://").rstrip("/").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    sent = 0
    try:
        connection.putrequest("POST", f"{API}/plan")
        for name, value in client.headers.items():
            if name.lower() == "authorization":
                connection.putheader(name, value)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        for _ in range(200):
            connection.send(b"186a0\r\n" + b" " * 100_000 + b"\r\n")
            sent += 100_000
    except (BrokenPipeError, ConnectionResetError):
        pass  # the panel closed the connection, as it should
    finally:
        connection.close()
    assert sent < 200 * 100_000
    assert client.get("/healthz").status_code == 200
