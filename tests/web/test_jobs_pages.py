"""The pages about jobs: the list with its filters, one job in every state, cancel and retry, all without a script."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.panel_site import make_app
from support.scripted_runner import ScriptedRunner
from tipbench.jobs.command import collect_request, judge_request
from tipbench.jobs.job import Job, JobState, JobStatus
from tipbench.jobs.progress import Progress
from tipbench.plan.collect_config import make_config
from tipbench.record import events
from tipbench.record.store import MemoryStore
from tipbench.settings import load_settings
from tipbench.web.auth import Role
from tipbench.web.panel.jobs import JobText
from web.page_forms import HEADERS, PageForm
from web.panels import API, BASE, JUDGE, ServedPanel, TestClient, serve_panel

EVIL = '"><script>alert(1)</script>'
RUNNING = JobStatus(JobState.RUNNING)


@dataclass
class ScriptedPanel:
    """A panel whose jobs have the statuses and events that the test gives them."""

    served: ServedPanel
    events_by_job: dict[str, Sequence[events.Event]]
    status_by_job: dict[str, JobStatus]

    def collect(self, status: JobStatus = RUNNING, *emitted: events.Event, **config: Any) -> Job:
        """Submit a collect that gets this status and emits these events."""
        return self._submit(
            collect_request(make_config({"models": "a:1b", **config}), started_by="boss"), status, emitted
        )

    def judge(self, status: JobStatus = RUNNING, *emitted: events.Event) -> Job:
        options = {"with": "rules", "experiment": "tip-bench-auto"}
        return self._submit(judge_request(options, ollama_url="http://x:1", started_by="boss"), status, emitted)

    def _submit(self, request: Any, status: JobStatus, emitted: Sequence[events.Event]) -> Job:
        jobs = self.served.panel.jobs
        job = jobs.submit(request).job
        self.events_by_job[job.id], self.status_by_job[job.id] = emitted, status
        for _ in range(2):  # started, then seen
            jobs.supervisor.tick()
        return jobs.store.get(job.id)

    def page(self, job: Job) -> str:
        response = self.served.get(f"/jobs/{job.id}")
        assert response.status_code == 200, response.text
        return unescape(re.sub(r"\s+", " ", response.text))

    def post(self, path: str, body: str = "") -> Any:
        return self.served.post(path, content=body, headers=HEADERS)


@contextmanager
def scripted_panel(home: Path, **environment: str) -> Iterator[ScriptedPanel]:
    settings = load_settings({"TIPBENCH_HOME": str(home), **environment}, home.parent)
    events_by_job: dict[str, Sequence[events.Event]] = {}
    status_by_job: dict[str, JobStatus] = {}
    runner = ScriptedRunner(
        ends=lambda job: status_by_job.get(job.id, RUNNING),
        emitted=lambda job: events_by_job.get(job.id, ()),
        printed=f"first\n{EVIL}\nlast",
    )
    app = make_app(settings, store=MemoryStore(), runners={"local": runner})
    app.state.panel.jobs.supervisor.start = lambda: None  # the test ticks by itself
    tokens = app.state.panel.authenticator.tokens
    admin, judge = (
        tokens.create(role, name, life_s=3600)[1] for role, name in ((Role.ADMIN, "boss"), (Role.JUDGE, JUDGE))
    )
    with TestClient(app, base_url=BASE) as client:
        yield ScriptedPanel(ServedPanel(app, client, admin, judge, MemoryStore(), home), events_by_job, status_by_job)


@pytest.fixture
def panel(home: Path) -> Iterator[ScriptedPanel]:
    with scripted_panel(home) as panel:
        yield panel


HALF = (
    events.Started("1"),
    events.BlockStarted("a:1b", 4),
    events.CellFinished("a:1b", "v1", "x@y", 1, 4, 0, None, 40, 20.0),
    events.CellFinished("a:1b", "v1", "x@z", 2, 4, 1, "reset", None, None),
)
WHOLE = (
    *HALF,
    events.CellFinished("a:1b", "v1", "y@y", 4, 4, 1, None, 40, 21.5),
    events.BlockFinished("a:1b"),
    events.Evidence(412, 1, 0.9, 2, unknown_samples=412),
    events.Collected("tip-bench-auto", 4, 0, 3, 1, (), 12.0, "http://mlflow:5000/#/experiments/3"),
    events.Exit(0),
)


# the list


def test_without_jobs_the_list_shows_the_next_step(panel: ScriptedPanel) -> None:
    page = panel.served.get("/jobs").text
    assert "No jobs yet" in page
    assert 'href="/run"' in page


def test_the_list_shows_state_experiment_progress_and_who(panel: ScriptedPanel) -> None:
    job = panel.collect(RUNNING, *HALF, experiment="tip-bench-a/b")
    page = panel.served.get("/jobs").text
    for part in (f"/jobs/{job.id}", "/experiments/tip-bench-a%2Fb", "running", "2 of 4 cells", "boss", 'value="0.5"'):
        assert part in page, part


def test_a_job_that_waits_shows_its_place(panel: ScriptedPanel) -> None:
    for _ in range(3):
        last = panel.collect()
    assert "Position 2 in the queue" in panel.served.get("/jobs").text
    assert "Position 2 in the queue" in panel.page(last)


def test_filters_are_in_the_url(panel: ScriptedPanel) -> None:
    panel.collect(JobStatus(JobState.FAILED, 1, "no"))
    panel.collect(JobStatus(JobState.SUCCEEDED, 0), experiment="tip-bench-x")
    panel.judge(JobStatus(JobState.SUCCEEDED, 0))
    for query, found in [("state=failed", 1), ("kind=judge", 1), ("experiment=tip-bench-x", 1), ("state=&kind=", 3)]:
        page = panel.served.get(f"/jobs?{query}").text
        assert len(re.findall(r'<a href="/jobs/2', page)) == found


def test_filters_without_matches_are_reported(panel: ScriptedPanel) -> None:
    assert "No job matches these filters" in panel.served.get("/jobs?state=lost").text


def test_a_wrong_filter_is_refused(panel: ScriptedPanel) -> None:
    for query in ["state=odd", "kind=collect'--", "limit=0", "next=zz", f"experiment={'x' * 300}"]:
        assert panel.served.get(f"/jobs?{query}").status_code == 422


def test_pages_follow_each_other_and_show_every_job_once(panel: ScriptedPanel) -> None:
    wanted = {panel.collect(JobStatus(JobState.SUCCEEDED, 0)).id for _ in range(5)}
    url, seen = "/jobs?limit=2&kind=collect", []
    for _ in range(4):
        page = unescape(panel.served.get(url).text)
        seen += re.findall(r'<a href="/jobs/([\w-]+)"', page)
        following = re.search(r'href="(/jobs\?[^"]*)" rel="next"', page)
        if following is None:
            break
        url = following[1]
    assert sorted(seen) == sorted(wanted)


def test_the_list_links_to_its_json_with_the_same_filters(panel: ScriptedPanel) -> None:
    page = unescape(panel.served.get("/jobs?state=failed&experiment=tip-bench-a%26b").text)
    assert f'href="{API}/jobs?state=failed&experiment=tip-bench-a%26b"' in page


# one job


def test_a_running_job_shows_each_model(panel: ScriptedPanel) -> None:
    page = panel.page(panel.collect(RUNNING, *HALF, models="a:1b,b:1b"))
    assert "a:1b: answering, 2 of 4 cells." in page
    assert "20.0 tokens/s" in page
    assert "✕ 1 failed" in page
    assert "not started" in page
    assert "<title>25 % · collect tip-bench-auto · tipbench</title>" in page


def test_a_running_job_shows_its_clock_the_time_left_and_what_is_refused(panel: ScriptedPanel) -> None:
    refused = events.Refused("large:9b", "large:9b has 9.00B parameters; the limit is 4B.")
    job = panel.collect(RUNNING, events.Started("1"), refused, *HALF[1:], models="a:1b,b:1b,large:9b")
    page = panel.page(job)
    assert re.search(r'data-clock="\d+">\d+:\d\d<', page)
    assert "large:9b has 9.00B parameters; the limit is 4B." in page
    text = JobText(replace(job, started=1000.0), Progress().after(refused), now=1000.0)
    assert text.left_s is None
    progress = text.progress
    for event in HALF[1:]:
        progress = progress.after(event)
    # 2 of 4 cells in 60 s, and 4 more of the model that has not started; the refused one does not count
    assert JobText(replace(job, started=1000.0), progress, now=1060.0).left_s == pytest.approx(180.0)


def test_an_ended_job_shows_its_result(panel: ScriptedPanel) -> None:
    page = panel.page(panel.collect(JobStatus(JobState.SUCCEEDED, 0, links={"mlflow": "http://mlflow:5000/x"}), *WHOLE))
    for part in (
        "3 cells generated in 12 s",
        "done, memory freed",
        "never more than one model in memory",
        "http://mlflow:5000/x",
    ):
        assert part in page, part
    assert 'data-ended="yes"' in page
    assert "Cancel…" not in page


def test_the_evidence_claims_no_more_than_was_seen(panel: ScriptedPanel) -> None:
    cases: list[tuple[events.Evidence, str]] = [
        (events.Evidence(0, 0, 0.0, 0), "memory was not observed"),
        (events.Evidence(0, 0, 0.9, 0, unknown_samples=5), "memory was not observed"),
        (events.Evidence(9, 2, 0.9, 1), "more than one model in memory"),
        (events.Evidence(9, 1, 0.9, 1, foreign=("x:1b",)), "other clients' models in memory"),
    ]
    for memory, words in cases:
        page = panel.page(panel.collect(JobStatus(JobState.SUCCEEDED, 0), *HALF, memory, events.Exit(0)))
        assert words in page
        assert "never more than one" not in page


def test_every_state_is_shown_in_words(panel: ScriptedPanel) -> None:
    cases: list[tuple[JobStatus, tuple[str, ...]]] = [
        (JobStatus(JobState.FAILED, 1, "The disk is full."), ("failed", "The disk is full.", "Retry")),
        (JobStatus(JobState.CANCELLED, 130, "Cancelled; finished cells are kept."), ("cancelled", "are kept", "Retry")),
        (JobStatus(JobState.LOST, reason="Its process is gone."), ("lost", "Its process is gone.", "Retry", "Cancel…")),
        (JobStatus(JobState.WAITING), ("waiting", "Waiting for a judge", "Cancel…")),
    ]
    for status, words in cases:
        page = panel.page(panel.collect(status, *HALF))
        assert all(word in page for word in words)


def test_an_unavailable_server_is_shown(panel: ScriptedPanel) -> None:
    page = panel.page(panel.collect(RUNNING, *HALF, events.Waiting("Ollama", 60.0)))
    assert "Waiting for Ollama; the job continues once" in page
    assert "paused" in page


def test_a_judges_job_shows_its_progress(panel: ScriptedPanel) -> None:
    job = panel.judge(RUNNING, events.Judging("rules", 3, 1, 8))
    page = panel.page(job)
    assert "rules has processed 4 of 8 items." in page
    assert "✕ 1 without a score" in page
    assert "<title>50 %" in page
    assert "Change and run again" not in page
    scored = Progress(judging=events.Judging("rules", 7, 1, 8))
    assert "saving scores" in JobText(replace(job, state=JobState.RUNNING), scored).headline


def test_messages_and_the_log_are_shown_as_text(panel: ScriptedPanel) -> None:
    job = panel.collect(
        RUNNING, *HALF, events.Message(EVIL, warning=True), experiment=f"tip-bench-{EVIL}", models=f"{EVIL}"
    )
    for path in (f"/jobs/{job.id}", "/jobs", f"/jobs/{job.id}/live"):
        page = panel.served.get(path).text
        assert "<script>alert" not in page
        assert "alert(1)" in page
    two = panel.page(panel.collect(RUNNING, events.Message("one\ntwo `x`")))
    assert "one<br>two <code>x</code>" in two
    assert "first\n" in panel.served.get(f"/jobs/{job.id}").text


def test_an_invalid_web_address_is_not_a_link(panel: ScriptedPanel) -> None:
    job = panel.collect(JobStatus(JobState.SUCCEEDED, 0, links={"mlflow": "javascript:alert(1)"}), *WHOLE)
    assert "javascript:" not in panel.page(job)


def test_a_login_in_a_reason_or_an_option_is_not_shown(home: Path) -> None:
    with scripted_panel(home, MLFLOW_TRACKING_URI="http://me:hidden@mlflow:5000") as panel:
        config = panel.served.panel.permissions.config({"models": "a:1b"})
        job = panel.served.panel.jobs.submit(collect_request(config)).job
        panel.status_by_job[job.id] = JobStatus(JobState.FAILED, 1, "http://me:hidden@mlflow:5000 is away")
        for _ in range(2):
            panel.served.panel.jobs.supervisor.tick()
        page = panel.page(job)
        assert "http://mlflow:5000 is away" in page
        assert "hidden" not in re.sub(r'type="hidden"| hidden>|hidden="true"', "", page)


def test_the_live_part_is_a_part_of_the_page(panel: ScriptedPanel) -> None:
    job = panel.collect(RUNNING, *HALF)
    part = panel.served.get(f"/jobs/{job.id}/live").text
    assert part.lstrip().startswith('<div class="stack" id="live"')
    whole = panel.served.get(f"/jobs/{job.id}").text
    models = re.compile(r'<div id="part-models">.*?</section>', re.DOTALL)
    assert models.search(part)[0] == models.search(whole)[0]  # type: ignore[index]


def test_an_unknown_job_is_not_found(panel: ScriptedPanel) -> None:
    for path in ("/jobs/never", "/jobs/never/live"):
        assert panel.served.get(path).status_code == 404
    for path in ("/jobs/never/cancel", "/jobs/never/retry"):
        assert panel.post(path).status_code == 404


# cancel and retry


def test_cancel_leads_back_to_the_job_which_is_then_cancelled(panel: ScriptedPanel) -> None:
    job = panel.collect(RUNNING, *HALF)
    form = PageForm(panel.served.get(f"/jobs/{job.id}").text, f"/jobs/{job.id}/cancel")
    response = panel.post(f"/jobs/{job.id}/cancel", form.body())
    assert (response.status_code, response.headers["location"]) == (303, f"/jobs/{job.id}")
    assert "Cancelling: it stops" in panel.page(job)
    panel.served.panel.jobs.supervisor.tick()
    assert panel.served.panel.jobs.store.get(job.id).state is JobState.CANCELLED


def test_cancelling_a_job_that_has_ended_shows_a_message(panel: ScriptedPanel) -> None:
    job = panel.collect(JobStatus(JobState.SUCCEEDED, 0), *WHOLE)
    response = panel.post(f"/jobs/{job.id}/cancel")
    assert response.status_code == 409
    assert "it cannot be cancelled" in response.text


def test_retry_leads_to_a_new_job_that_names_the_old_one(panel: ScriptedPanel) -> None:
    old = panel.collect(JobStatus(JobState.FAILED, 1, "no"), *HALF)
    form = PageForm(panel.served.get(f"/jobs/{old.id}").text, f"/jobs/{old.id}/retry")
    places = {panel.post(f"/jobs/{old.id}/retry", form.body()).headers["location"] for _ in range(3)}
    (there,) = places
    assert f'href="/jobs/{old.id}"' in panel.served.get(there).text


def test_a_job_that_succeeded_is_not_retried(panel: ScriptedPanel) -> None:
    job = panel.collect(JobStatus(JobState.SUCCEEDED, 0), *WHOLE)
    response = panel.post(f"/jobs/{job.id}/retry")
    assert response.status_code == 409
    assert "can be retried" in response.text


# the header


def test_the_header_shows_running_jobs(panel: ScriptedPanel) -> None:
    assert 'id="jobs-link"' not in panel.served.get("/jobs").text
    job = panel.collect(RUNNING, *HALF)
    panel.collect()
    page = panel.served.get("/run").text
    assert f'id="jobs-link" href="/jobs/{job.id}"' in page
    assert "1 running" in page


# with a real supervisor, a real command and a real MLflow


@pytest.mark.process
def test_a_run_started_by_its_form_is_seen_to_its_end(home: Path, mlflow_url: str) -> None:
    name = f"tip-bench-page-{uuid4().hex[:8]}"
    with serve_panel(home, environment={"MLFLOW_TRACKING_URI": mlflow_url}, find_mlflow=True, run_jobs=True) as served:
        form = PageForm(served.get("/run").text, "/run")
        body = form.body(models="baseline:template", prompts="v1", n_scenarios="2", experiment=name, do="start")
        there = served.post("/run", content=body, headers=HEADERS).headers["location"]
        deadline = time.monotonic() + 120
        while 'data-ended="no"' in (page := served.get(there).text) and time.monotonic() < deadline:
            time.sleep(0.3)
        assert "2 cells generated" in page
        assert "done, memory freed" in page
        assert f'href="{mlflow_url}/#/experiments/' in page
