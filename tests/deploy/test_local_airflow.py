"""airflow/local.py with a fake Airflow: reports errors, and leaves no process behind. tests/airflow uses a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.fake_airflow import POOLS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


@dataclass
class LocalAirflow:
    """local.py with a fake Airflow."""

    folder: Path
    stack: ExitStack

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        command: list[str | Path] = [sys.executable, ROOT / "airflow" / "local.py", "--home", self.home]
        process = subprocess.Popen(
            [*command, "--environment", self.folder, *options],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stack.enter_context(process)
        self.stack.callback(process.send_signal, signal.SIGTERM)
        return process

    def start_and_wait(self) -> tuple[subprocess.Popen[str], Any]:
        process = self.start()
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    def calls(self) -> list[str]:
        return (self.home / "calls").read_text("utf-8").splitlines()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalAirflow]:
    command = tmp_path / "bin" / "airflow"
    command.parent.mkdir()
    fake = Path(__file__).with_name("fake_airflow.py")
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n', "utf-8")
    command.chmod(0o755)
    with ExitStack() as stack:
        yield LocalAirflow(tmp_path, stack)


def test_an_environment_without_airflow_is_an_error_with_the_command_that_creates_it(local: LocalAirflow) -> None:
    (local.folder / "bin" / "airflow").unlink()
    process = local.start()
    assert "make airflow-environment" in process.communicate(timeout=30)[1]
    assert process.returncode == 1


def test_a_port_that_is_taken_is_reported_before_anything_is_set_up(local: LocalAirflow) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        process = local.start("--port", port)
        output = process.communicate(timeout=30)[1]
    assert f"port {port}" in output
    assert "AIRFLOW_PORT=" in output
    assert not (local.home / "calls").exists()


def test_a_second_airflow_in_the_same_home_is_refused(local: LocalAirflow) -> None:
    local.start_and_wait()
    second = local.start()
    assert f"An Airflow already runs in {local.home}" in second.communicate(timeout=30)[1]
    assert local.calls().count("db migrate") == 1


def test_each_missing_pool_of_the_parsed_dag_is_created_with_one_slot(local: LocalAirflow) -> None:
    local.start_and_wait()
    assert [line for line in local.calls() if line.startswith("made")] == [f"made {POOLS[1]} 1 by Bearer of-admin"]


def test_the_settings_written_for_a_panel_work_and_are_private(local: LocalAirflow) -> None:
    _, output = local.start_and_wait()
    script = f'. {local.home / "panel.env"} && echo "$TIPBENCH_AIRFLOW_URL $TIPBENCH_AIRFLOW_USERNAME" && printenv'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"{output['url']} bench"
    assert f"TIPBENCH_AIRFLOW_PASSWORD={output['users']['bench']}" in done.stdout.splitlines()
    for name in ("panel.env", "passwords.json", "jwt.secret"):
        assert stat.S_IMODE((local.home / name).stat().st_mode) == 0o600


def test_a_dag_that_cannot_be_read_ends_airflow_with_the_reason(local: LocalAirflow) -> None:
    process = local.start(FAKE_BROKEN_DAG="yes")
    output = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "ValueError: the list of hosts is wrong" in output
    assert "cannot read bench_dag.py" in output
    assert len([line for line in local.calls() if line.startswith("ended")]) == 3


def test_a_part_that_ends_unexpectedly_is_named(local: LocalAirflow) -> None:
    process = local.start(FAKE_EXIT="dag-processor")
    output = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "dag-processor has exited" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_scheduler_ends_first_and_the_server_last_on_any_number_of_signals(
    local: LocalAirflow, number: signal.Signals
) -> None:
    process, _ = local.start_and_wait()
    for _ in range(3):
        process.send_signal(number)
    assert process.wait(timeout=30) == 130
    assert local.calls()[-3:] == ["ended scheduler", "ended dag-processor", "ended api-server"]


def test_no_log_server_listens_for_other_machines(local: LocalAirflow) -> None:
    local.start_and_wait()
    assert {"scheduler --skip-serve-logs", "dag-processor", "api-server"} <= set(local.calls())


def test_an_environment_that_was_not_created_completely_is_not_ready(tmp_path: Path) -> None:
    python = tmp_path / "python"
    make_venv = 'for last; do :; done && mkdir -p "$last/bin" && cp /bin/false "$last/bin/python"'
    python.write_text(f'#!/bin/sh\n[ "$2" = venv ] && {make_venv}\nexit 0\n', "utf-8")
    python.chmod(0o755)
    make = ["make", "-C", str(ROOT), "airflow-environment", f"PYTHON={python}", f"AIRFLOW_VENV={tmp_path / 'venv'}"]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert (tmp_path / "venv" / "bin" / "python").exists()
    assert not (tmp_path / "venv" / ".ready").exists()
