"""`tipbench token` and `tipbench panel`: output, refusals, and the panel as a subprocess."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from tipbench.cli import panel, token
from tipbench.cli.main import RootGroup

# Assembled as main.py does, so that these tests do not depend on other commands.
app = typer.Typer(cls=RootGroup, pretty_exceptions_enable=False)
app.add_typer(token.app, name="token")
app.command("panel")(panel.panel)

SCRIPT = (
    "import typer, signal\n"
    "from tipbench.cli import main, panel, token\n"
    "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
    "app = typer.Typer(cls=main.RootGroup, pretty_exceptions_enable=False)\n"
    "app.command('panel')(panel.panel)\n"
    "app.add_typer(token.app, name='token')\n"
    "app()\n"
)
START_S = 120.0


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def create_token(*arguments: str) -> dict[str, Any]:
    """Create a token and return it as JSON."""
    result = run_command("token", "create", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_a_token_is_printed_once_and_alone() -> None:
    result = run_command("token", "create", "--role", "judge", "--name", "reviewer-1", "--expires", "30d")
    assert result.exit_code == 0
    assert re.fullmatch(r"tipbench_[0-9a-f]{12}_[\w-]{43}\n", result.stdout)
    assert "reviewer-1 (judge)" in result.stderr
    listed = run_command("token", "list")
    assert result.stdout.strip() not in listed.stdout + listed.stderr


def test_a_second_judges_token_of_a_name_is_created_with_a_warning() -> None:
    first = create_token("--role", "judge", "--name", "anna")
    result = run_command("token", "create", "--role", "judge", "--name", "anna")
    assert result.exit_code == 0
    assert f"warning: anna already has another active judge token ({first['id']})" in " ".join(result.stderr.split())


def test_a_token_as_json_has_its_facts_and_its_secret() -> None:
    token_ = create_token("--role", "admin", "--name", "ci", "--expires", "never")
    assert (token_["role"], token_["name"], token_["state"], token_["expires"]) == ("admin", "ci", "active", None)
    assert token_["token"].startswith(f"tipbench_{token_['id']}_")


def test_the_list_has_every_token_without_its_secret() -> None:
    create_token("--role", "judge", "--name", "anna")
    rows = json.loads(run_command("token", "list", "--json").stdout)
    assert [set(row) for row in rows] == [{"id", "role", "name", "state", "created", "expires", "revoked", "last_used"}]
    assert "anna" in run_command("token", "list").stdout


def test_the_list_fits_into_80_columns() -> None:
    create_token("--role", "judge", "--name", "reviewer-1")
    create_token("--role", "app", "--name", "ios-app", "--expires", "never")
    lines = run_command("token", "list").stdout.splitlines()
    assert lines[0].split() == ["id", "role", "name", "state", "created", "expires", "last", "used"]
    assert any(re.search(r"  active  \d{4}-\d\d-\d\d  never +–$", line) for line in lines)
    assert max(map(len, lines)) <= 80


def test_an_empty_list_shows_the_next_step() -> None:
    result = run_command("token", "list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "tipbench token create" in result.stderr


def test_a_token_is_revoked_by_its_id() -> None:
    one, other = create_token("--role", "judge", "--name", "anna"), create_token("--role", "judge", "--name", "anna")
    assert json.loads(run_command("token", "revoke", one["id"], "--json").stdout) == {"revoked": [one["id"]]}
    states = {row["id"]: row["state"] for row in json.loads(run_command("token", "list", "--json").stdout)}
    assert states == {one["id"]: "revoked", other["id"]: "active"}


def test_all_tokens_of_a_name_are_revoked_together() -> None:
    for role in ("judge", "judge", "admin"):
        create_token("--role", role, "--name", "anna")
    assert (
        len(json.loads(run_command("token", "revoke", "--name", "anna", "--role", "judge", "--json").stdout)["revoked"])
        == 2
    )
    assert len(json.loads(run_command("token", "revoke", "--name", "anna", "--json").stdout)["revoked"]) == 1
    assert run_command("token", "revoke", "--name", "anna").stdout == "already revoked\n"


def test_a_usage_error_exits_with_2_and_a_message() -> None:
    cases: list[tuple[str, ...]] = [
        ("token", "create", "--role", "owner", "--name", "x"),
        ("token", "create", "--role", "judge", "--name", "rules"),
        ("token", "create", "--role", "judge", "--name", ""),
        ("token", "create", "--role", "judge", "--name", "x", "--expires", "soon"),
        ("token", "create", "--role", "judge"),
        ("token", "revoke"),
        ("token", "revoke", "nobody"),
        ("token", "revoke", "x", "--name", "y"),
        ("panel", "--port", "70000"),
        ("panel", "--host", "http://x"),
        ("panel", "--host", "no.such.host.invalid"),
    ]
    for arguments in cases:
        result = run_command(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Traceback" not in result.stderr
        assert result.stderr


@pytest.mark.server
def test_a_port_in_use_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run_command("panel", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "Is another panel running?" in result.stderr


# the panel as a process


class RunningPanel:
    """The panel as a subprocess, with its output in files."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder
        self.url = ""

    @property
    def stdout(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "err").read_text()

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"^panel: (http://\S+)/ ", self.stderr, re.MULTILINE):
                self.url = found[1]
                if self._answers():
                    return
            time.sleep(0.1)
        raise AssertionError(f"the panel did not start:\n{self.stderr}")

    def _answers(self) -> bool:
        try:
            return self.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, secret: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        return httpx.get(self.url + path, headers=headers, trust_env=False, timeout=60)

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def start_panel(home: Path, tmp_path: Path, *arguments: str, **environment: str) -> Iterator[RunningPanel]:
    folder = tmp_path / f"streams-{time.monotonic_ns()}"
    folder.mkdir()
    command = [sys.executable, "-W", "error", "-c", SCRIPT, "panel", "--port", "0", *arguments]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        env = {**os.environ, "TIPBENCH_HOME": str(home), **environment}
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)
    try:
        panel = RunningPanel(process, folder)
        panel.wait()
        yield panel
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


@pytest.mark.process
def test_the_first_start_prints_an_admin_token_and_the_second_does_not(
    home: Path, tmp_path: Path, mlflow_url: str
) -> None:
    with start_panel(home, tmp_path, "--mlflow-url", mlflow_url) as panel:
        secret = panel.stdout.strip()
        assert panel.get("/api/bench/experiments").status_code == 401
        assert panel.get("/api/bench/experiments", secret).status_code == 200
        assert f"MLflow: {mlflow_url}" in panel.stderr
        assert secret not in panel.stderr
        assert panel.url.startswith("http://127.0.0.1:")
        assert "warning" not in panel.stderr
        assert "Secure" not in proxied_cookie(panel, secret)

        fresh = create_token("--role", "admin", "--name", "ci")
        assert panel.get("/metrics", fresh["token"]).status_code == 200
        run_command("token", "revoke", fresh["id"])
        assert panel.get("/metrics", fresh["token"]).status_code == 401
        assert panel.stop() == 0
        assert "Traceback" not in panel.stderr
    with start_panel(home, tmp_path, "--host", "0.0.0.0", "--mlflow-url", mlflow_url) as panel:
        assert panel.stdout == ""
        assert "tipbench token create --role admin" in panel.stderr
        assert "without TLS" in panel.stderr
        assert "others use to TIPBENCH_PANEL_HOSTS" in panel.stderr
        assert panel.get("/api/bench/experiments", secret).status_code == 200
        assert panel.stop(signal.SIGTERM) == 0


def proxied_cookie(panel: RunningPanel, secret: str) -> str:
    """The session's cookie of a login through a TLS proxy on this machine."""
    headers = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.9"}
    response = httpx.post(f"{panel.url}/login", json={"token": secret}, headers=headers, trust_env=False, timeout=60)
    return response.headers["set-cookie"]


@pytest.mark.process
def test_the_operators_token_and_proxy_are_used_and_no_token_is_made(
    home: Path, tmp_path: Path, mlflow_url: str
) -> None:
    own = "an-operators-own-token-of-32-or-more"
    environment = {
        "TIPBENCH_ADMIN_TOKEN": own,
        "MLFLOW_TRACKING_URI": mlflow_url,
        "TIPBENCH_PANEL_PROXIES": "127.0.0.1",
    }
    with start_panel(home, tmp_path, **environment) as panel:
        assert panel.stdout == ""
        assert own not in panel.stderr
        assert panel.get("/metrics", own).status_code == 200
        assert panel.get("/metrics", own + "x").status_code == 401
        cookie = proxied_cookie(panel, own)
        assert cookie.startswith("__Host-tipbench_session=")
        assert "Secure" in cookie
    assert json.loads(run_command("token", "list", "--json").stdout) == []
