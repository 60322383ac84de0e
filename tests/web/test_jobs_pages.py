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
from tipbench.plan.config import make_config
from tipbench.record import events
from tipbench.record.store import MemoryStore
from tipbench.settings import load_settings
from tipbench.web.auth import Role
from tipbench.web.panel.jobs import JobText
from web.page_forms import HEADERS, PageForm
from web.panels import API, BASE, JUDGE, Served, TestClient, serving

EVIL = '"><script>alert(1)</script>'
RUNNING = JobStatus(JobState.RUNNING)


@dataclass
class Paper:
    """A panel with scripted jobs; `tick` processes them once."""

    served: Served
    stories: dict[str, Sequence[events.Event]]
    ends: dict[str, JobStatus]

    def order(self, sight: JobStatus = RUNNING, *story: events.Event, **config: Any) -> Job:
        """A collect with this status."""
        return self._ordered(
            collect_request(make_config({"models": "a:1b", **config}), started_by="boss"), sight, story
        )

    def judge(self, sight: JobStatus = RUNNING, *story: events.Event) -> Job:
        options = {"with": "rules", "experiment": "tip-bench-auto"}
        return self._ordered(judge_request(options, ollama_url="http://x:1", started_by="boss"), sight, story)

    def _ordered(self, order: Any, sight: JobStatus, story: Sequence[events.Event]) -> Job:
        driver = self.served.panel.jobs
        job = driver.submit(order).job
        self.stories[job.id], self.ends[job.id] = story, sight
        for _ in range(2):  # started, then seen
            driver.supervisor.tick()
        return driver.store.get(job.id)

    def page(self, job: Job) -> str:
        response = self.served.get(f"/jobs/{job.id}")
        assert response.status_code == 200, response.text
        return unescape(re.sub(r"\s+", " ", response.text))

    def post(self, path: str, body: str = "") -> Any:
        return self.served.post(path, content=body, headers=HEADERS)


@contextmanager
def on_paper(home: Path, **environment: str) -> Iterator[Paper]:
    settings = load_settings({"TIPBENCH_HOME": str(home), **environment}, home.parent)
    stories: dict[str, Sequence[events.Event]] = {}
    ends: dict[str, JobStatus] = {}
    runner = ScriptedRunner(
        ends=lambda job: ends.get(job.id, RUNNING),
        emitted=lambda job: stories.get(job.id, ()),
        printed=f"first\n{EVIL}\nlast",
    )
    app = make_app(settings, store=MemoryStore(), runners={"local": runner})
    app.state.panel.jobs.supervisor.start = lambda: None  # the test ticks by itself
    tokens = app.state.panel.guard.tokens
    admin, judge = (
        tokens.create(role, name, life_s=3600)[1] for role, name in ((Role.ADMIN, "boss"), (Role.JUDGE, JUDGE))
    )
    with TestClient(app, base_url=BASE) as client:
        yield Paper(Served(app, client, admin, judge, MemoryStore(), home), stories, ends)


@pytest.fixture
def paper(home: Path) -> Iterator[Paper]:
    with on_paper(home) as made:
        yield made


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


def test_without_jobs_the_list_shows_the_next_step(paper: Paper) -> None:
    page = paper.served.get("/jobs").text
    assert "No jobs yet" in page
    assert 'href="/run"' in page


def test_the_list_shows_state_experiment_progress_and_who(paper: Paper) -> None:
    job = paper.order(RUNNING, *HALF, experiment="tip-bench-a/b")
    page = paper.served.get("/jobs").text
    for part in (f"/jobs/{job.id}", "/experiments/tip-bench-a%2Fb", "running", "2 of 4 cells", "boss", 'value="0.5"'):
        assert part in page, part


def test_a_job_that_waits_shows_its_place(paper: Paper) -> None:
    for _ in range(3):
        last = paper.order()
    assert "Position 2 in the queue" in paper.served.get("/jobs").text
    assert "Position 2 in the queue" in paper.page(last)


def test_filters_are_in_the_url(paper: Paper) -> None:
    paper.order(JobStatus(JobState.FAILED, 1, "no"))
    paper.order(JobStatus(JobState.SUCCEEDED, 0), experiment="tip-bench-x")
    paper.judge(JobStatus(JobState.SUCCEEDED, 0))
    for query, found in [("state=failed", 1), ("kind=judge", 1), ("experiment=tip-bench-x", 1), ("state=&kind=", 3)]:
        page = paper.served.get(f"/jobs?{query}").text
        assert len(re.findall(r'<a href="/jobs/2', page)) == found


def test_filters_without_matches_are_reported(paper: Paper) -> None:
    assert "No job matches these filters" in paper.served.get("/jobs?state=lost").text


def test_a_wrong_filter_is_refused(paper: Paper) -> None:
    for query in ["state=odd", "kind=collect'--", "limit=0", "next=zz", f"experiment={'x' * 300}"]:
        assert paper.served.get(f"/jobs?{query}").status_code == 422


def test_pages_follow_each_other_and_show_every_job_once(paper: Paper) -> None:
    wanted = {paper.order(JobStatus(JobState.SUCCEEDED, 0)).id for _ in range(5)}
    url, seen = "/jobs?limit=2&kind=collect", []
    for _ in range(4):
        page = unescape(paper.served.get(url).text)
        seen += re.findall(r'<a href="/jobs/([\w-]+)"', page)
        following = re.search(r'href="(/jobs\?[^"]*)" rel="next"', page)
        if following is None:
            break
        url = following[1]
    assert sorted(seen) == sorted(wanted)


def test_the_list_links_to_its_json_with_the_same_filters(paper: Paper) -> None:
    page = unescape(paper.served.get("/jobs?state=failed&experiment=tip-bench-a%26b").text)
    assert f'href="{API}/jobs?state=failed&experiment=tip-bench-a%26b"' in page


# one job


def test_a_running_job_shows_each_model(paper: Paper) -> None:
    page = paper.page(paper.order(RUNNING, *HALF, models="a:1b,b:1b"))
    assert "a:1b: answering, 2 of 4 cells." in page
    assert "20.0 tokens/s" in page
    assert "✕ 1 failed" in page
    assert "not started" in page
    assert "<title>25 % · collect tip-bench-auto · tipbench</title>" in page


def test_a_running_job_shows_its_clock_the_time_left_and_what_is_refused(paper: Paper) -> None:
    refused = events.Refused("large:9b", "large:9b has 9.00B parameters; the limit is 4B.")
    job = paper.order(RUNNING, events.Started("1"), refused, *HALF[1:], models="a:1b,b:1b,large:9b")
    page = paper.page(job)
    assert re.search(r'data-clock="\d+">\d+:\d\d<', page)
    assert "large:9b has 9.00B parameters; the limit is 4B." in page
    text = JobText(replace(job, started=1000.0), Progress().after(refused), now=1000.0)
    assert text.left_s is None
    progress = text.progress
    for event in HALF[1:]:
        progress = progress.after(event)
    # 2 of 4 cells in 60 s, and 4 more of the model that has not started; the refused one does not count
    assert JobText(replace(job, started=1000.0), progress, now=1060.0).left_s == pytest.approx(180.0)


def test_an_ended_job_shows_its_result(paper: Paper) -> None:
    page = paper.page(paper.order(JobStatus(JobState.SUCCEEDED, 0, links={"mlflow": "http://mlflow:5000/x"}), *WHOLE))
    for part in (
        "3 cells generated in 12 s",
        "done, memory freed",
        "never more than one model in memory",
        "http://mlflow:5000/x",
    ):
        assert part in page, part
    assert 'data-ended="yes"' in page
    assert "Cancel…" not in page


def test_the_evidence_claims_no_more_than_was_seen(paper: Paper) -> None:
    cases: list[tuple[events.Evidence, str]] = [
        (events.Evidence(0, 0, 0.0, 0), "memory was not observed"),
        (events.Evidence(0, 0, 0.9, 0, unknown_samples=5), "memory was not observed"),
        (events.Evidence(9, 2, 0.9, 1), "more than one model in memory"),
        (events.Evidence(9, 1, 0.9, 1, foreign=("x:1b",)), "other clients' models in memory"),
    ]
    for memory, words in cases:
        page = paper.page(paper.order(JobStatus(JobState.SUCCEEDED, 0), *HALF, memory, events.Exit(0)))
        assert words in page
        assert "never more than one" not in page


def test_every_state_is_shown_in_words(paper: Paper) -> None:
    cases: list[tuple[JobStatus, tuple[str, ...]]] = [
        (JobStatus(JobState.FAILED, 1, "The disk is full."), ("failed", "The disk is full.", "Retry")),
        (JobStatus(JobState.CANCELLED, 130, "Cancelled; finished cells are kept."), ("cancelled", "are kept", "Retry")),
        (JobStatus(JobState.LOST, reason="Its process is gone."), ("lost", "Its process is gone.", "Retry", "Cancel…")),
        (JobStatus(JobState.WAITING), ("waiting", "Waiting for a judge", "Cancel…")),
    ]
    for sight, words in cases:
        page = paper.page(paper.order(sight, *HALF))
        assert all(word in page for word in words)


def test_an_unavailable_server_is_shown(paper: Paper) -> None:
    page = paper.page(paper.order(RUNNING, *HALF, events.Waiting("Ollama", 60.0)))
    assert "Waiting for Ollama; it continues once" in page
    assert "paused" in page


def test_a_judges_job_shows_its_progress(paper: Paper) -> None:
    job = paper.judge(RUNNING, events.Judging("rules", 3, 1, 8))
    page = paper.page(job)
    assert "rules has processed 4 of 8 items." in page
    assert "✕ 1 without a score" in page
    assert "<title>50 %" in page
    assert "Change and run again" not in page
    scored = Progress(judging=events.Judging("rules", 7, 1, 8))
    assert "saving scores" in JobText(replace(job, state=JobState.RUNNING), scored).headline


def test_messages_and_the_log_are_shown_as_text(paper: Paper) -> None:
    job = paper.order(
        RUNNING, *HALF, events.Message(EVIL, warning=True), experiment=f"tip-bench-{EVIL}", models=f"{EVIL}"
    )
    for path in (f"/jobs/{job.id}", "/jobs", f"/jobs/{job.id}/live"):
        page = paper.served.get(path).text
        assert "<script>alert" not in page
        assert "alert(1)" in page
    two = paper.page(paper.order(RUNNING, events.Message("one\ntwo `x`")))
    assert "one<br>two <code>x</code>" in two
    assert "first\n" in paper.served.get(f"/jobs/{job.id}").text


def test_an_invalid_web_address_is_not_a_link(paper: Paper) -> None:
    job = paper.order(JobStatus(JobState.SUCCEEDED, 0, links={"mlflow": "javascript:alert(1)"}), *WHOLE)
    assert "javascript:" not in paper.page(job)


def test_a_login_in_a_reason_or_an_option_is_not_shown(home: Path) -> None:
    with on_paper(home, MLFLOW_TRACKING_URI="http://me:hidden@mlflow:5000") as paper:
        config = paper.served.panel.allowed.config({"models": "a:1b"})
        job = paper.served.panel.jobs.submit(collect_request(config)).job
        paper.ends[job.id] = JobStatus(JobState.FAILED, 1, "http://me:hidden@mlflow:5000 is away")
        for _ in range(2):
            paper.served.panel.jobs.supervisor.tick()
        page = paper.page(job)
        assert "http://mlflow:5000 is away" in page
        assert "hidden" not in re.sub(r'type="hidden"| hidden>|hidden="true"', "", page)


def test_the_live_part_is_a_part_of_the_page(paper: Paper) -> None:
    job = paper.order(RUNNING, *HALF)
    part = paper.served.get(f"/jobs/{job.id}/live").text
    assert part.lstrip().startswith('<div class="stack" id="live"')
    whole = paper.served.get(f"/jobs/{job.id}").text
    models = re.compile(r'<div id="part-models">.*?</section>', re.DOTALL)
    assert models.search(part)[0] == models.search(whole)[0]  # type: ignore[index]


def test_a_job_that_is_not_there_is_not_found(paper: Paper) -> None:
    for path in ("/jobs/never", "/jobs/never/live"):
        assert paper.served.get(path).status_code == 404
    for path in ("/jobs/never/cancel", "/jobs/never/retry"):
        assert paper.post(path).status_code == 404


# cancel and retry


def test_cancel_leads_back_to_the_job_which_is_then_cancelled(paper: Paper) -> None:
    job = paper.order(RUNNING, *HALF)
    form = PageForm(paper.served.get(f"/jobs/{job.id}").text, f"/jobs/{job.id}/cancel")
    response = paper.post(f"/jobs/{job.id}/cancel", form.body())
    assert (response.status_code, response.headers["location"]) == (303, f"/jobs/{job.id}")
    assert "Cancelling: it stops" in paper.page(job)
    paper.served.panel.jobs.supervisor.tick()
    assert paper.served.panel.jobs.store.get(job.id).state is JobState.CANCELLED


def test_cancelling_a_job_that_has_ended_shows_a_message(paper: Paper) -> None:
    job = paper.order(JobStatus(JobState.SUCCEEDED, 0), *WHOLE)
    response = paper.post(f"/jobs/{job.id}/cancel")
    assert response.status_code == 409
    assert "it cannot be cancelled" in response.text


def test_retry_leads_to_a_new_job_that_names_the_old_one(paper: Paper) -> None:
    old = paper.order(JobStatus(JobState.FAILED, 1, "no"), *HALF)
    form = PageForm(paper.served.get(f"/jobs/{old.id}").text, f"/jobs/{old.id}/retry")
    places = {paper.post(f"/jobs/{old.id}/retry", form.body()).headers["location"] for _ in range(3)}
    (there,) = places
    assert f'href="/jobs/{old.id}"' in paper.served.get(there).text


def test_a_job_that_succeeded_is_not_retried(paper: Paper) -> None:
    job = paper.order(JobStatus(JobState.SUCCEEDED, 0), *WHOLE)
    response = paper.post(f"/jobs/{job.id}/retry")
    assert response.status_code == 409
    assert "can be retried" in response.text


# the header


def test_the_header_shows_running_jobs(paper: Paper) -> None:
    assert 'id="header-chip"' not in paper.served.get("/jobs").text
    job = paper.order(RUNNING, *HALF)
    paper.order()
    page = paper.served.get("/run").text
    assert f'id="header-chip" href="/jobs/{job.id}"' in page
    assert "1 running" in page


# with a real supervisor, a real command and a real MLflow


@pytest.mark.process
def test_a_run_started_by_its_form_is_seen_to_its_end(home: Path, mlflow_url: str) -> None:
    name = f"tip-bench-page-{uuid4().hex[:8]}"
    with serving(home, environment={"MLFLOW_TRACKING_URI": mlflow_url}, find_mlflow=True, run_jobs=True) as served:
        form = PageForm(served.get("/run").text, "/run")
        body = form.body(models="baseline:template", prompts="v1", n_scenarios="2", experiment=name, do="start")
        there = served.post("/run", content=body, headers=HEADERS).headers["location"]
        deadline = time.monotonic() + 120
        while 'data-ended="no"' in (page := served.get(there).text) and time.monotonic() < deadline:
            time.sleep(0.3)
        assert "2 cells generated" in page
        assert "done, memory freed" in page
        assert f'href="{mlflow_url}/#/experiments/' in page
