"""The webhook: contents, times and attempts; allowed hosts; restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from support.clock import Clock
from support.judging import EXPERIMENT, SheetDriver, record_cells
from tipbench.errors import MlflowUnavailable
from tipbench.jobs.command import collect_request
from tipbench.jobs.job import JobState
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record.mlflow import MlflowConnection
from tipbench.record.run import RunChange
from tipbench.record.store import MemoryStore
from tipbench.web.database import panel_database
from tipbench.web.signing import DELIVERY, Seen, verify
from tipbench.web.webhook import (
    MAX_CHANGING_S,
    MAX_FINISHED,
    RETRY_WAITS_S,
    Attempt,
    Delivery,
    DeliveryState,
    Poster,
    Webhook,
    WebhookOptions,
    WebhookStore,
    WebhookWatcher,
    new_delivery,
)
from web.hook_receiver import SECRET, HookReceiver, HookRequest, run_hook_receiver

NOW = 1_800_000_000.0
EVERY_S = 30.0


@dataclass
class WebhookBench:
    """A webhook on a store in memory, with a test clock."""

    home: Path
    receiver: HookReceiver
    runs: MemoryStore = field(default_factory=MemoryStore)
    clock: Clock = field(default_factory=Clock)
    mlflow_unavailable: bool = False
    url: str = ""

    def __post_init__(self) -> None:
        self.jobs = JobStore(self.home / "jobs" / "jobs.db")
        self.open()

    def open(self) -> None:
        """Start the webhook as a new panel does."""
        options = WebhookOptions(self.url or self.receiver.url, SECRET)
        self.database = panel_database(self.home)
        self.store = WebhookStore(self.database, options.receiver, self.clock)
        self.watch = WebhookWatcher(self.store, self.jobs, self.open_store, every_s=EVERY_S, clock=self.clock)
        self.hook = Webhook(Poster(options, self.clock), self.store, self.watch, lambda: True)

    def open_store(self) -> MlflowConnection:
        if self.mlflow_unavailable:
            raise MlflowUnavailable("MLflow does not answer.")
        return MlflowConnection(self.runs, "here", "here", "http://here.invalid")

    def close(self) -> None:
        self.hook.close()
        self.database.close()

    def collect(self, **options: Any) -> None:
        """Record cells as another process does."""
        found = record_cells(self.runs, **{"models": ("alpha:135m",), "prompts": "v1", **options})
        self.runs.mark_changed(found.experiment_id)

    def pass_time(self, seconds: float = EVERY_S, times: int = 2) -> None:
        for _ in range(times):
            self.clock.now += seconds
            self.hook.tick()

    def payloads(self) -> list[Any]:
        return [request.payload for request in self.receiver.requests]


@pytest.fixture
def receiver() -> Iterator[HookReceiver]:
    with run_hook_receiver() as receiver:
        yield receiver


@pytest.fixture
def bench(home: Path, receiver: HookReceiver) -> Iterator[WebhookBench]:
    bench = WebhookBench(home, receiver)
    yield bench
    bench.close()
    bench.jobs.close()


def respond_with(*statuses: int) -> Callable[[HookRequest], int]:
    """Return these statuses in order, then 204."""
    left = list(statuses)
    return lambda _request: left.pop(0) if left else 204


# Deliveries


def test_new_pending_cells_are_delivered_once(bench: WebhookBench) -> None:
    bench.collect()
    bench.pass_time(times=6)
    (payload,) = bench.payloads()
    assert (payload["event"], payload["experiment"], payload["pending"], payload["new"]) == (
        "cells.pending",
        EXPERIMENT,
        8,
        8,
    )
    assert payload["links"] == {
        "sheets": f"/api/bench/judge/{EXPERIMENT}/sheets",
        "apply": f"/api/bench/judge/{EXPERIMENT}/apply",
    }


def test_a_delivery_is_signed_and_names_itself(bench: WebhookBench) -> None:
    bench.collect()
    bench.pass_time()
    (request,) = bench.receiver.requests
    verify(SECRET, request.headers, request.body, bench.clock.now, Seen())
    assert {name.lower(): value for name, value in request.headers.items()}[DELIVERY.lower()] == request.payload["id"]


def test_a_delivery_contains_no_model_or_prompt(bench: WebhookBench) -> None:
    bench.collect(models=("okapi-unmistakable:1b",))
    bench.pass_time()
    (request,) = bench.receiver.requests
    for word in ("okapi", "v1", *(run.run_id for run in bench.runs.search("1", where={}))):
        assert word.encode() not in request.body.replace(b"/api/bench", b"")


def test_a_name_with_special_characters_is_quoted_in_the_links(bench: WebhookBench) -> None:
    bench.collect(experiment="tip-bench-may/2026 ?#%é")
    bench.pass_time()
    assert bench.payloads()[0]["links"]["apply"] == "/api/bench/judge/tip-bench-may%2F2026%20%3F%23%25%C3%A9/apply"


def test_a_change_without_new_cells_is_not_delivered(bench: WebhookBench) -> None:
    bench.collect()
    bench.pass_time()
    found = bench.runs.experiment(EXPERIMENT)
    assert found is not None
    SheetDriver(bench.runs, found).export("anna")  # gives a new revision
    bench.pass_time(times=4)
    assert len(bench.payloads()) == 1


def test_judged_cells_are_not_delivered_and_reopened_ones_are_new_again(bench: WebhookBench) -> None:
    bench.collect()
    bench.pass_time()
    found = bench.runs.experiment(EXPERIMENT)
    assert found is not None
    driver = SheetDriver(bench.runs, found)
    driver.judged_by("anna")
    bench.pass_time(times=4)
    assert len(bench.payloads()) == 1
    run_id = next(run_id for run_id, run in driver.cells().items() if run.state == "judged")
    bench.runs.update(run_id, RunChange(tags={"state": "pending", "judge_pending": "true"}, at_ms=2_000))
    bench.runs.mark_changed(found.experiment_id)
    bench.pass_time()
    assert (bench.payloads()[-1]["pending"], bench.payloads()[-1]["new"]) == (1, 1)


def test_a_second_batch_is_delivered_with_all_pending_cells(bench: WebhookBench) -> None:
    bench.collect()
    bench.pass_time()
    bench.collect(models=("beta:1b",))
    bench.pass_time()
    assert [(payload["pending"], payload["new"]) for payload in bench.payloads()] == [(8, 8), (16, 8)]


def test_cells_of_an_external_collect_are_delivered_once_nothing_changes(bench: WebhookBench) -> None:
    for prompt in ("v1", "v2-mentor", "v3-few-shot"):
        bench.collect(prompts=prompt)
        bench.pass_time(times=1)
    assert bench.payloads() == []
    bench.pass_time(times=1)
    assert [payload["pending"] for payload in bench.payloads()] == [24]


def test_an_experiment_that_keeps_changing_is_delivered_eventually(bench: WebhookBench) -> None:
    bench.collect()
    for _ in range(int(MAX_CHANGING_S / EVERY_S) + 2):
        found = bench.runs.experiment(EXPERIMENT)
        assert found is not None
        bench.runs.mark_changed(found.experiment_id)
        bench.pass_time(times=1)
    assert len(bench.payloads()) == 1


def test_a_collect_of_the_panel_is_delivered_at_its_end(bench: WebhookBench) -> None:
    job, _ = bench.jobs.add(collect_request(make_config({"experiment": EXPERIMENT})))
    bench.jobs.move(job.id, JobState.QUEUED, JobState.RUNNING)
    bench.collect()
    bench.pass_time(times=4)
    assert bench.payloads() == []
    bench.jobs.move(job.id, JobState.RUNNING, JobState.SUCCEEDED, exit_code=0)
    bench.pass_time(seconds=1, times=1)
    assert len(bench.payloads()) == 1


def test_a_job_that_waits_for_the_judge_does_not_keep_the_judge_waiting(bench: WebhookBench) -> None:
    job, _ = bench.jobs.add(collect_request(make_config({"experiment": EXPERIMENT})))
    bench.jobs.move(job.id, JobState.QUEUED, JobState.RUNNING)
    bench.collect()
    bench.pass_time(times=2)
    bench.jobs.move(job.id, JobState.RUNNING, JobState.WAITING)
    bench.pass_time(seconds=1, times=1)
    assert len(bench.payloads()) == 1


def test_a_check_without_changes_reads_only_the_experiments(
    bench: WebhookBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.collect()
    bench.pass_time()
    monkeypatch.setattr(bench.runs, "search", lambda *_args, **_options: pytest.fail("looked into an experiment"))
    bench.pass_time(times=4)


def test_an_unavailable_mlflow_is_reported_until_it_is_available(bench: WebhookBench) -> None:
    bench.mlflow_unavailable = True
    bench.collect()
    bench.pass_time()
    assert bench.hook.state().problem == "MLflow does not answer."
    bench.mlflow_unavailable = False
    bench.pass_time()
    assert (bench.hook.state().problem, len(bench.payloads())) == (None, 1)


def test_nothing_is_done_while_another_panel_leads(bench: WebhookBench) -> None:
    bench.collect()
    idle = Webhook(Poster(WebhookOptions(bench.receiver.url, SECRET)), bench.store, bench.watch, lambda: False)
    assert [idle.tick() for _ in range(3)] == [False] * 3
    assert bench.payloads() == []


# Retries


def test_a_receiver_that_fails_gets_the_same_delivery_later(bench: WebhookBench) -> None:
    bench.receiver.respond = respond_with(500, 503)
    bench.collect()
    bench.pass_time()
    assert len(bench.payloads()) == 1
    bench.pass_time(seconds=RETRY_WAITS_S[0] - 0.5, times=1)
    assert len(bench.payloads()) == 1
    bench.pass_time(seconds=0.5, times=1)
    bench.pass_time(seconds=RETRY_WAITS_S[1], times=1)
    assert len({payload["id"] for payload in bench.payloads()}) == 1
    (delivery,) = bench.hook.deliveries()
    assert delivery.state is DeliveryState.DELIVERED
    assert [attempt.status for attempt in delivery.attempts] == [500, 503, 204]


def test_every_attempt_is_signed_with_its_own_time(bench: WebhookBench) -> None:
    bench.receiver.respond = respond_with(500)
    bench.collect()
    bench.pass_time()
    bench.pass_time(seconds=RETRY_WAITS_S[0], times=1)
    seen = Seen()
    for request in bench.receiver.requests:
        verify(SECRET, request.headers, request.body, bench.clock.now, seen)


def test_after_the_last_attempt_it_has_failed_and_the_next_change_is_delivered(bench: WebhookBench) -> None:
    bench.receiver.respond = respond_with(*[500] * (len(RETRY_WAITS_S) + 1))
    bench.collect()
    bench.pass_time()
    for wait in (*RETRY_WAITS_S, 86_400.0):
        bench.pass_time(seconds=wait, times=1)
    assert [each.state for each in bench.hook.deliveries()] == [DeliveryState.FAILED]
    assert len(bench.payloads()) == len(RETRY_WAITS_S) + 1
    bench.collect(models=("beta:1b",))
    bench.pass_time()
    assert (bench.payloads()[-1]["pending"], bench.payloads()[-1]["new"]) == (16, 16)


def test_a_newer_delivery_of_an_experiment_replaces_a_waiting_one(bench: WebhookBench) -> None:
    bench.receiver.respond = respond_with(*[500] * 3)
    bench.collect()
    bench.pass_time()
    bench.collect(models=("beta:1b",))
    bench.pass_time()
    for wait in RETRY_WAITS_S:
        bench.pass_time(seconds=wait, times=1)
    states = [each.state for each in bench.hook.deliveries()]
    assert states == [DeliveryState.DELIVERED, DeliveryState.REPLACED]


def test_a_killed_panel_continues_where_it_stopped(bench: WebhookBench) -> None:
    bench.receiver.respond = respond_with(500)
    bench.collect()
    bench.pass_time()
    bench.close()
    bench.open()
    bench.pass_time(seconds=RETRY_WAITS_S[0], times=1)
    bench.pass_time(times=4)
    assert len({payload["id"] for payload in bench.payloads()}) == 1
    assert [len(each.attempts) for each in bench.hook.deliveries()] == [2]


def test_cells_collected_without_a_panel_are_delivered_by_the_next(bench: WebhookBench) -> None:
    bench.close()
    bench.collect()
    bench.open()
    bench.pass_time()
    bench.close()
    bench.open()
    bench.pass_time(times=4)
    assert len(bench.payloads()) == 1


def test_a_new_receiver_gets_pending_cells_and_no_delivery_of_the_old_one(bench: WebhookBench) -> None:
    bench.receiver.respond = respond_with(500)
    bench.collect()
    bench.pass_time()
    bench.close()
    with run_hook_receiver() as other:
        bench.url = other.url
        bench.open()
        bench.hook.start()
        bench.hook.close()
        bench.hook = Webhook(
            Poster(WebhookOptions(other.url, SECRET), bench.clock), bench.store, bench.watch, lambda: True
        )
        bench.pass_time()
        (old,), (new,) = bench.receiver.requests, other.requests
    assert old.payload["id"] != new.payload["id"]
    states = {each.id: each.state for each in bench.hook.deliveries()}
    assert states[old.payload["id"]] is DeliveryState.FAILED


def test_old_deliveries_are_deleted(bench: WebhookBench) -> None:
    for number in range(MAX_FINISHED + 3):
        bench.clock.now += 1
        delivery = replace(new_delivery("test", bench.clock.now, None), id=f"{number:032x}")
        bench.store.save_test(delivery, Attempt(1, bench.clock.now, 0.1, 204, ""))
    kept = bench.hook.deliveries()
    assert len(kept) == MAX_FINISHED
    assert kept[0].id == f"{MAX_FINISHED + 2:032x}"
    assert all(len(each.attempts) == 1 for each in kept)


# One attempt


def attempt_at(url: str, *, timeout_s: float = 10.0, stop: threading.Event | None = None) -> Attempt:
    poster = Poster(WebhookOptions(url, SECRET), timeout_s=timeout_s)
    return poster.post(new_delivery("test", 0.0, None), stop or threading.Event())


def test_a_redirect_is_not_followed(receiver: HookReceiver) -> None:
    with run_hook_receiver() as other_receiver:
        receiver.location, receiver.respond = other_receiver.url, respond_with(307)
        attempt = attempt_at(receiver.url)
        assert other_receiver.requests == []
    assert (attempt.status, attempt.final_state) == (307, DeliveryState.FAILED)
    assert "redirects are not followed" in attempt.reason


def test_a_receiver_that_does_not_respond_times_out(receiver: HookReceiver) -> None:
    release = threading.Event()
    receiver.respond = lambda _request: 204 if release.wait(120) else 500
    began = time.monotonic()
    attempt = attempt_at(receiver.url, timeout_s=0.5)
    release.set()
    assert time.monotonic() - began < 60
    assert (attempt.status, attempt.reason) == (None, "no response within 0.5 s")


def test_a_receiver_that_is_down_gives_a_reason(receiver: HookReceiver) -> None:
    with run_hook_receiver() as gone:
        url = f"{gone.url}?key=s3cret"
    attempt = attempt_at(url)
    assert attempt.status is None
    assert "ConnectError" in attempt.reason
    assert "s3cret" not in attempt.reason


def test_closing_does_not_wait_for_a_receiver_that_hangs(bench: WebhookBench) -> None:
    release, request_arrived = threading.Event(), threading.Event()

    def hang(_request: HookRequest) -> int:
        request_arrived.set()
        return 204 if release.wait(120) else 500

    bench.receiver.respond = hang
    bench.collect()
    bench.watch.check()
    bench.clock.now += EVERY_S
    bench.hook.start()
    assert request_arrived.wait(60)
    began = time.monotonic()
    bench.hook.close()
    took = time.monotonic() - began
    release.set()
    assert took < 60
    (delivery,) = bench.hook.deliveries()
    assert (delivery.state, delivery.attempts) == (DeliveryState.QUEUED, ())


def test_a_webhook_host_that_is_not_allowed_is_never_called(receiver: HookReceiver) -> None:
    options = WebhookOptions(receiver.url.replace("127.0.0.1", "judge.example.org"), SECRET)
    attempt = Poster(options).post(new_delivery("test", 0.0, None), threading.Event())
    assert attempt.status is None
    assert "hook_hosts" in attempt.reason


def test_a_test_delivery_is_attempted_once_and_stored(bench: WebhookBench) -> None:
    bench.receiver.respond = respond_with(500)
    delivery = bench.hook.test()
    assert isinstance(delivery, Delivery)
    assert delivery.state is DeliveryState.FAILED
    bench.pass_time(times=4)
    assert [request.payload["event"] for request in bench.receiver.requests] == ["test"]
