"""Schemathesis on the OpenAPI document: whatever it sends, no 500, and no answer that the document does not have.

It is the program itself, against the application on a real port: that road has its phases (examples, boundary values,
random ones, operations that follow each other) and the bytes of a real connection.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.panel_site import Site, panel_site
from support.sample_experiment import SampleExperiment, record_sample
from support.scripted_ollama import ScriptedOllama
from support.scripted_runner import ScriptedRunner
from tipbench.jobs.command import collect_request
from tipbench.jobs.job import Job, JobState, JobStatus
from tipbench.jobs.store import JobFilter
from tipbench.plan.collect_config import make_config
from tipbench.record import events
from tipbench.record.store import MemoryStore
from tipbench.web import login_limiter
from tipbench.web.auth import Role
from web.hook_receiver import SECRET, run_hook_receiver

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)
LIMIT_S = 240  # of one run, on a busy machine; alone it takes half a minute
pytestmark = pytest.mark.process

REVOKE = "/api/bench/tokens/{token_id}"  # would revoke the token of the request
SCALES = ("relevance", "actionability", "tone")
REAL_SHARE = 0.8  # share of the values that name existing objects


@pytest.fixture
def sample_site(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, SampleExperiment]]:
    """A panel with an object of every kind, and without a rate limit for invalid tokens."""
    monkeypatch.setattr(login_limiter, "FREE_FAILURES", 10**9)
    monkeypatch.setattr(login_limiter, "FAILURE_BURST", 10**9)
    store = MemoryStore()
    content = record_sample(store)
    with ScriptedOllama(models=["a:1b", "b:1b"]) as ollama, run_hook_receiver() as receiver:
        urls = {"OLLAMA_HOST": ollama.url, "TIPBENCH_HOOK_URL": receiver.url, "TIPBENCH_HOOK_SECRET": SECRET}
        with panel_site(
            home, store, urls, ScriptedRunner(ends=_job_status, emitted=_events, printed="one line\n" * 50)
        ) as site:
            for number in range(4):
                request = collect_request(make_config({"models": "baseline:template", "experiment": content.name}))
                site.panel.jobs.submit(request, idempotency_key=f"job-{number}")
            yield site, content


def _job_status(job: Job) -> JobStatus:
    """Let jobs run, fail or succeed."""
    ends = {
        "0": JobStatus(JobState.RUNNING),
        "1": JobStatus(JobState.FAILED, 1, "It had to."),
        "2": JobStatus(JobState.LOST),
    }
    return ends.get((job.key or "")[-1:], JobStatus(JobState.SUCCEEDED, 0))


def _events(job: Job) -> Sequence[events.Event]:
    return [
        events.Started("1"),
        events.BlockStarted("a:1b", 8),
        events.CellFinished("a:1b", "v1", "student@morning", 1, 8, output_tokens=80, tokens_per_s=20.0),
        events.Message("something"),
    ]


@dataclass(frozen=True)
class BatchMaker:
    """Opens batches over HTTP as a judge does."""

    site: Site
    experiment: str

    def request(self, method: str, token: str, path: str = "", **options: Any) -> Any:
        url = f"{self.site.url}/api/bench/judge/{self.experiment}/batches{path}"
        headers = {"Authorization": f"Bearer {token}"}
        response = httpx.request(method, url, headers=headers, trust_env=False, timeout=30, **options)
        assert response.is_success, response.text
        return response.json()

    def open_batch(self, token: str) -> tuple[str, list[dict[str, Any]]]:
        """Open a batch of this token's owner; return its sheet and items."""
        sheet = self.request("POST", token, json={})["batch"]["sheet"]
        return sheet, self.request("GET", token, f"/{sheet}")["items"]

    def make_held_batch(self) -> str:
        """Close a batch in which everything has a 5, so that it is held; return its sheet."""
        _, token = self.site.panel.authenticator.tokens.create(Role.JUDGE, "careless", life_s=None)
        sheet, items = self.open_batch(token)
        for item in items:
            tips = [{"scores": dict.fromkeys(SCALES, 5)} for _ in item["tips"]]
            body = {"version": 0, "state": "submitted", "tips": tips}
            self.request("PUT", token, f"/{sheet}/items/{item['item']}", json=body)
        closed = self.request("POST", token, f"/{sheet}/close")
        assert closed["batch"]["status"] == "held", closed
        return sheet


def path_values(site: Site, content: SampleExperiment, token: str | None) -> dict[str, Sequence[str | int]]:
    """Return existing values by path parameter, among them batches of the token's owner."""
    pair = content.pairs[0]
    batches = BatchMaker(site, content.name)
    held = batches.make_held_batch()
    sheet, items = batches.open_batch(token or site.judge)
    return {
        "path.experiment": [content.name],
        "path.sheet": [sheet, sheet, held],
        "path.item": [item["item"] for item in items[:3]],
        "body.version": [0, 1, 2],
        "path.run_id": list(content.runs.values()),
        "query.baseline": [str(each) for each in content.pairs],
        "query.judge": ["anna", "ben", "rules"],
        "query.model": [pair.model],
        "query.prompt": [pair.prompt],
        "query.where": [f"params.model={pair.model}", "state=judged"],
        "body.sheet": [content.held_sheet, content.open_sheet],
        "body.models": ["a:1b,b:1b", "baseline:template", "embedded:smollm2:135m"],
        "body.prompts": ["v1", "v1,v2-mentor"],
        "body.experiment": [content.name, "tip-bench-new"],
        "body.suite": ["tips", "tips-32"],
        "body.token": [site.judge],
        "path.job_id": [job.id for job in site.panel.jobs.store.page(JobFilter(), limit=10).items],
        "body.with": ["rules", "ollama:a:1b"],
    }


def write_config(folder: Path, values: Mapping[str, Sequence[str | int]]) -> Path:
    """Write Schemathesis' settings: most values name existing objects, the others are arbitrary."""
    lines = ["max-stream-events = 1", "[parameters]"]  # a stream lasts as long as its job
    lines += [
        f"{json.dumps(place)} = {{ dictionary = {json.dumps(place.replace('.', '-'))}, probability = {REAL_SHARE} }}"
        for place in values
    ]
    for place, known in values.items():
        lines += [f"[dictionaries.{json.dumps(place.replace('.', '-'))}]", f"values = {json.dumps(list(known))}"]
    path = folder / "schemathesis.toml"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def run_schemathesis(site: Site, content: SampleExperiment, folder: Path, token: str | None, *options: str) -> None:
    """Run Schemathesis; fails with its output."""
    folder.mkdir()
    document = folder / "openapi.json"
    document.write_text(json.dumps(site.app.openapi()), "utf-8")
    settings = write_config(folder, path_values(site, content, token))
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run", str(document)),
        *("--url", site.url, "--checks", ",".join(CHECKS), "--exclude-path", REVOKE, "--generation-deterministic"),
        *("--continue-on-failure", "--request-timeout", "30", "--warnings", "off", *options),
        *(("--header", f"Authorization: Bearer {token}") if token else ()),
    ]
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    done = subprocess.run(  # noqa: PLW1510 - the exit code is checked below
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-4_000:]
    assert site.panel.authenticator.tokens.find(site.admin) is not None, "it has locked itself out"


def test_an_admin_gets_only_documented_answers(sample_site: tuple[Site, SampleExperiment], tmp_path: Path) -> None:
    site, content = sample_site
    run_schemathesis(site, content, tmp_path / "schemathesis", site.admin, "--max-examples", "3")


def test_a_judge_gets_only_documented_answers(sample_site: tuple[Site, SampleExperiment], tmp_path: Path) -> None:
    site, content = sample_site
    phases = ("--phases", "examples,fuzzing", "--max-examples", "2")
    run_schemathesis(site, content, tmp_path / "schemathesis", site.judge, *phases)
