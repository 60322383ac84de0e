"""The whole flow without a person: collect → webhook → an external judge → its scores → the leaderboard.

`tipbench panel` and its jobs are processes, the browser is real; the judge is a small HTTP server with the webhook's
secret and a judge's token.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pytest

from support.command import tipbench
from support.mlflow_server import free_port
from support.scripted_mlflow import ScriptedMlflow
from tipbench.plan.suite import load_suite
from tipbench.web.forms import MAX_LIMIT
from tipbench.web.signing import DELIVERY, TIME, DeliveryRefused, Seen, verify
from web.hook_receiver import SECRET, HookReceiver, HookRequest, run_hook_receiver
from web.panel_process import PanelProcess
from web.panels import API, OPERATOR

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.process

JUDGE = "outside-judge"
SMALL: dict[str, Any] = {"models": "baseline:template", "n_scenarios": 4, "n_tips": 2}
CELLS = 4
WAIT_S = 120.0
DOCS = Path(__file__).parents[2] / "docs" / "webhook.md"


@dataclass
class OutsideJudge:
    """Accepts each signed delivery once, requests a sheet, fills it in and applies it."""

    experiment: str = ""  # deliveries of other tests' experiments are ignored
    panel: str = ""
    token: str = ""
    may_start: threading.Event = field(default_factory=threading.Event)
    refused: list[str] = field(default_factory=list)
    applied: list[Any] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    clock: Callable[[], float] = time.time
    _seen: Seen = field(default_factory=Seen)
    _known: set[str] = field(default_factory=set)

    def answer(self, request: HookRequest) -> int:
        """Respond to the panel at once and judge in a thread."""
        try:
            verify(SECRET, request.headers, request.body, self.clock(), self._seen)
        except DeliveryRefused as exc:
            self.refused.append(exc.why)
            return 401
        payload = request.payload
        if payload["experiment"] == self.experiment and payload["id"] not in self._known:
            self._known.add(payload["id"])
            threading.Thread(target=self._judge, args=(payload["links"],), daemon=True).start()
        return 202

    def _judge(self, links: dict[str, str]) -> None:
        try:
            assert self.may_start.wait(WAIT_S)
            headers = {"Authorization": f"Bearer {self.token}"}
            with httpx.Client(base_url=self.panel, headers=headers, trust_env=False, timeout=60) as client:
                sheet = client.post(links["sheets"], json={})
                assert sheet.status_code == 201, sheet.text
                applied = client.post(links["apply"], json=fill_sheet(sheet.json()))
                assert applied.status_code == 200, applied.text
                self.applied.append(applied.json())
        except BaseException as exc:  # noqa: BLE001 - the test asserts that there is none
            self.errors.append(exc)

    def wait_for_result(self) -> Any:
        """Wait for the panel's response to the scores and return it."""
        deadline = time.monotonic() + WAIT_S
        while not self.applied:
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, "no sheet was applied"
            time.sleep(0.05)
        return self.applied[0]


def fill_sheet(sheet: dict[str, Any]) -> dict[str, Any]:
    """Fill in the reference scores of controls, and 3 for all other tips."""
    agreed = {control.tip: control.scores for control in load_suite("tips").controls}
    for item in sheet["items"]:
        for tip in item["tips"]:
            tip["scores"] = {name: agreed.get(tip["tip"], {}).get(name, 3) for name in tip["scores"]}
    return sheet


@contextmanager
def start_panel(home: Path, mlflow_url: str, hook_url: str) -> Iterator[PanelProcess]:
    """A panel that checks for pending cells every second."""
    environment = {
        "MLFLOW_TRACKING_URI": mlflow_url,
        "TIPBENCH_HOOK_URL": hook_url,
        "TIPBENCH_HOOK_SECRET": SECRET,
        "TIPBENCH_HOOK_WATCH_S": "1",
    }
    with PanelProcess(home, environment) as process:
        yield process


def give_token(process: PanelProcess, judge: OutsideJudge) -> OutsideJudge:
    """Give the judge a token and the panel's address."""
    created = process.client.post(f"{API}/tokens", json={"role": "judge", "name": JUDGE})
    judge.token, judge.panel = created.json()["token"], str(process.client.base_url)
    return judge


def list_deliveries(process: PanelProcess, experiment: str) -> list[Any]:
    """List the deliveries of one experiment."""
    items = process.client.get(f"{API}/hook/deliveries", params={"limit": MAX_LIMIT}).json()["items"]
    return [item for item in items if item["experiment"] == experiment]


def wait_for_delivery(process: PanelProcess, experiment: str, wanted: Callable[[Any], object]) -> Any:
    """Wait until the experiment's delivery meets a condition and return it."""
    deadline = time.monotonic() + WAIT_S
    while not ((found := list_deliveries(process, experiment)) and wanted(found[0])):
        assert time.monotonic() < deadline, f"{found}\n{process.stderr}"
        time.sleep(0.1)
    return found[0]


def count_judged(process: PanelProcess, experiment: str) -> int:
    board = process.client.get(f"{API}/leaderboard/{experiment}").json()
    return sum(standing["judged"] for standing in board["references"])


def test_scores_of_an_outside_judge_reach_the_board_and_its_page(home: Path, mlflow_url: str, browser: Browser) -> None:
    name = f"tip-bench-outside-{uuid4().hex[:8]}"
    judge = OutsideJudge(name)
    with (
        run_hook_receiver(HookReceiver(judge.answer)) as receiver,
        start_panel(home, mlflow_url, receiver.url) as process,
    ):
        give_token(process, judge)
        process.wait_for_end(process.run(experiment=name, **SMALL)["id"])
        wait_for_delivery(process, name, lambda delivery: delivery["state"] == "delivered")
        assert count_judged(process, name) == 0
        context = browser.new_context(extra_http_headers={"Authorization": f"Bearer {OPERATOR}"})
        context.set_default_timeout(WAIT_S * 1000)
        page = context.new_page()
        page.goto(f"{process.client.base_url}/experiments/{name}")
        assert not page.locator("#fresh").is_visible()
        judge.may_start.set()
        result = judge.wait_for_result()
        assert count_judged(process, name) == CELLS
        page.get_by_text("New results are available.").wait_for()
        page.get_by_role("link", name="Reload").click()
        page.locator("#fresh").wait_for(state="hidden")
        context.close()
        time.sleep(3)  # three checks: the judge's own scores are not new cells
        assert len(list_deliveries(process, name)) == 1
        board = process.client.get(f"{API}/leaderboard/{name}").json()
    assert (result["status"], result["unfinished"], board["provisional"]) == ("applied", 0, False)
    assert [each["judge"] if isinstance(each, dict) else each for each in board["judges"]] == [JUDGE]
    payload = next(request.payload for request in receiver.requests if request.payload["experiment"] == name)
    assert payload["pending"] == CELLS


def test_a_receiver_that_was_down_is_notified_later_even_after_the_panel_was_killed(
    home: Path, mlflow_url: str
) -> None:
    name = f"tip-bench-outside-down-{uuid4().hex[:8]}"
    judge = OutsideJudge(name)
    judge.may_start.set()
    receiver = HookReceiver(judge.answer, port=free_port())
    with start_panel(home, mlflow_url, receiver.url) as process:
        arguments = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        where = ("--experiment", name, "--mlflow-url", mlflow_url)
        tipbench("collect", *arguments, *where, home=home.with_name("another-home"))  # not a job of this panel
        missed = wait_for_delivery(process, name, lambda delivery: delivery["attempts"])
        assert (missed["state"], missed["attempts"][0]["status"]) == ("queued", None)
        process.kill()
        process.start()
        give_token(process, judge)
        with run_hook_receiver(receiver):
            delivered = wait_for_delivery(process, name, lambda delivery: delivery["state"] == "delivered")
            judge.wait_for_result()
            assert count_judged(process, name) == CELLS
    assert delivered["id"] == missed["id"]
    assert len(delivered["attempts"]) >= 2


def test_the_receiver_of_the_documentation_works_unchanged(home: Path, tmp_path: Path) -> None:
    """Needs its own MLflow: the receiver judges all pending cells."""
    name, port, script = "tip-bench-outside-docs", free_port(), tmp_path / "receiver.py"
    script.write_text(re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)[0], "utf-8")
    with (
        ScriptedMlflow() as mlflow,
        start_panel(home, mlflow.url, f"http://127.0.0.1:{port}/tipbench") as process,
    ):
        judge = give_token(process, OutsideJudge())
        variables = {**os.environ, "SECRET": SECRET, "PANEL": judge.panel.rstrip("/"), "TOKEN": judge.token}
        with (tmp_path / "log").open("wb") as log:
            receiver = subprocess.Popen([sys.executable, script, str(port)], env=variables, stdout=log, stderr=log)
        try:
            process.wait_for_end(process.run(experiment=name, **SMALL)["id"])
            wait_for_delivery(process, name, lambda delivery: delivery["state"] == "delivered")
            sheets = wait_for_sheets(process, name)
        finally:
            receiver.kill()
            receiver.wait(30)
    assert [(sheet["judge"], sheet["finished"]) for sheet in sheets] == [(JUDGE, sheets[0]["items"])]


def wait_for_sheets(process: PanelProcess, experiment: str) -> list[Any]:
    """Wait until a sheet is applied and return the experiment's sheets."""
    deadline = time.monotonic() + WAIT_S
    while not (found := process.client.get(f"{API}/judges/{experiment}").json()["history"]):
        assert time.monotonic() < deadline, process.stderr
        time.sleep(0.1)
    return list(found)


def test_the_judge_refuses_what_is_forged_replayed_or_late(home: Path, mlflow_url: str) -> None:
    judge = OutsideJudge()
    with (
        run_hook_receiver(HookReceiver(judge.answer)) as receiver,
        start_panel(home, mlflow_url, receiver.url) as process,
    ):
        tested = process.client.post(f"{API}/hook/test").json()
        assert (tested["state"], tested["attempts"][0]["status"]) == ("delivered", 202)
        real = next(request for request in receiver.requests if request.payload["id"] == tested["id"])
        signed_headers = {name: value for name, value in real.headers.items() if name.lower().startswith("tipbench-")}
        assert {name.lower() for name in signed_headers} >= {TIME.lower(), DELIVERY.lower()}
        pending = real.body.replace(b'"test"', b'"cells.pending"')
        judge.refused.clear()
        with httpx.Client(headers=signed_headers, trust_env=False) as attacker:
            answers = [attacker.post(receiver.url, content=body).status_code for body in (real.body, pending)]
        judge.clock = lambda: time.time() + 301
        late = process.client.post(f"{API}/hook/test").json()
    assert answers == [401, 401]
    assert judge.refused[:2] == ["replayed", "forged"]
    assert "late" in judge.refused
    assert late["state"] == "failed"
    assert judge.applied == []


def test_a_webhook_host_that_is_not_allowed_is_never_called(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_hook_receiver() as receiver:
        monkeypatch.setenv("TIPBENCH_HOOK_URL", f"http://receiver.example.org:{receiver.port}/hook")
        monkeypatch.setenv("TIPBENCH_HOOK_SECRET", SECRET)
        monkeypatch.setenv("TIPBENCH_HOOK_HOSTS", "judge.example.org")
        done = tipbench("panel", "--port", "0", home=home, timeout_s=60, check=False)
    assert done.returncode == 2
    assert "receiver.example.org, which is not in hook_hosts" in done.stderr
    assert "Traceback" not in done.stderr
    assert receiver.requests == []
