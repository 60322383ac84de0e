"""`tipbench serve` as a process, and Schemathesis against the policy server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import tipbench, tipbench_json
from support.policy_site import TIPS, policy_site, serve_process
from tipbench.web import login_limiter

pytestmark = pytest.mark.process
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)
LIMIT_S = 240  # on a busy machine; alone it takes seconds


def test_a_stopped_server_has_written_everything_and_the_next_one_continues(tmp_path: Path) -> None:
    with serve_process(tmp_path, "--shadow", "egreedy-v2-shadow") as (client, process):
        event = client.post("/recommend", json={"user_id": "u", "candidates": TIPS}).json()["event_id"]
        reward = {"user_id": "u", "event_id": event, "action": "completed"}
        assert client.post("/reward", json=reward).json()["applied"] is True
        second = tipbench("serve", "--port", "0", home=tmp_path, check=False)
        assert (second.returncode, "in use" in second.stderr) == (1, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    exported = tipbench("events", "export", home=tmp_path, check=False).stdout.splitlines()
    assert [json.loads(line)["signal"] for line in exported][:1] == ["serve"]
    assert any(json.loads(line).get("reward") == 0.6 for line in exported)
    with serve_process(tmp_path, "--state", "sqlite") as (client, _):
        assert client.get("/stats/egreedy/v1", params={"user_id": "u"}).json()["n"] == 1
        assert client.get("/policies").json()["shadows"]["egreedy-v2-shadow"]["enabled"] is True


def test_another_active_policy_needs_a_reason_which_is_recorded(tmp_path: Path) -> None:
    refused = tipbench("serve", "--port", "0", "--active", "egreedy/v3", home=tmp_path, check=False)
    assert (refused.returncode, "--unchecked REASON" in refused.stderr) == (2, True)
    with serve_process(tmp_path, "--active", "egreedy/v3", "--unchecked", "first start") as (client, _):
        assert client.get("/policies").json()["active"] == "egreedy/v3"
        assert client.post("/recommend", json={"user_id": "u", "candidates": TIPS}).json()["policy"] == "egreedy/v3"


def test_state_exported_from_one_home_is_imported_into_another(tmp_path: Path) -> None:
    first, second, files = tmp_path / "first", tmp_path / "second", tmp_path / "files"
    with serve_process(first) as (client, process):
        event = client.post("/score/linucb", json={"user_id": "u", "candidates": TIPS}).json()["event_id"]
        client.post("/reward/linucb", json={"user_id": "u", "event_id": event, "reward": 1.0})
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    tipbench("state", "export", "--dir", str(files), home=first)
    assert sorted(path.name[32:] for path in files.iterdir()) == ["_linucb.json", "_tallies.json"]
    second.mkdir()
    (second / "serve.secret").write_bytes((first / "serve.secret").read_bytes())
    (second / "serve.secret").chmod(0o600)
    assert tipbench_json("state", "import", "--dir", str(files), home=second) == {"files": 2}
    tipbench("state", "rebuild", home=second)
    with serve_process(second) as (client, _):
        assert client.get("/stats/linucb", params={"user_id": "u"}).json()["n"] == 1


def test_schemathesis_gets_only_documented_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_limiter, "FREE_FAILURES", 10**9)  # wrong tokens are tried without a pause
    monkeypatch.setattr(login_limiter, "FAILURE_BURST", 10**9)
    (tmp_path / "work").mkdir()
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    with policy_site(tmp_path / "home") as site:
        document = tmp_path / "openapi.json"
        document.write_bytes(site.get("/openapi.json").content)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", site.url),
                *("--checks", ",".join(CHECKS), "--generation-deterministic", "--max-examples", "3"),
                *("--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--request-timeout", "30"),
                *("--exclude-path-regex", "/(egreedy/v1|egreedy/v3|linucb)$"),  # the same operations as the others
                *("--warnings", "off", "--header", f"Authorization: Bearer {site.secrets['app']}"),
            ],
            cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
