"""A job's event stream: no event missed or duplicated; closed when a reader leaves or is not authorised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from support.panel_site import make_app, serve_app
from support.polling import eventually
from tipbench.jobs.command import collect_request
from tipbench.jobs.folder import EventWriter, JobFolder
from tipbench.jobs.job import Job, JobState
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record import events as wire
from tipbench.settings import load_settings
from tipbench.web.auth import Role
from tipbench.web.deps import Panel
from web.event_reader import EventReader, Frame, done_counts, read_events
from web.panels import API, OPERATOR, hold_supervisor_lock

CELL = wire.CellFinished("a:1b", "v1", "p@s", 1, 8, output_tokens=40, tokens_per_s=20.0)


@dataclass
class StreamedJob:
    """A panel on a port with one job, and the writer of the job's events."""

    app: FastAPI
    client: httpx.Client
    job: Job
    writer: EventWriter
    token_id: str
    secret: str

    @property
    def panel(self) -> Panel:
        panel: Panel = self.app.state.panel
        return panel

    @property
    def store(self) -> JobStore:
        return self.panel.jobs.store

    def emit(self, *events: wire.Event) -> None:
        for event in events:
            self.writer.write(event)

    def emit_cells(self, first: int, last: int) -> None:
        self.emit(*(wire.CellFinished("a:1b", "v1", "p@s", number, 8) for number in range(first, last + 1)))

    def move(self, *states: JobState) -> None:
        for state in states:
            assert self.store.move(self.job.id, self.store.get(self.job.id).state, state) is not None

    def read(self, query: str = "", **headers: str) -> list[Frame]:
        """Read a stream until it ends."""
        with read_events(self.client, self.job.id, query, **headers) as reader:
            return reader.read_rest()


@pytest.fixture
def streamed(home: Path) -> Iterator[StreamedJob]:
    settings = load_settings({"TIPBENCH_HOME": str(home), "TIPBENCH_ADMIN_TOKEN": OPERATOR}, home.parent)
    app = make_app(settings)
    panel: Panel = app.state.panel
    panel.streams.poll_s = 0.02
    token, secret = panel.authenticator.tokens.create(Role.ADMIN, "boss", life_s=None)
    request = collect_request(make_config({"models": "a:1b", "experiment": "tip-bench-a"}))
    with hold_supervisor_lock(home), serve_app(app) as url:
        job = panel.jobs.submit(request).job
        folder = JobFolder(home / "jobs", job.id)
        folder.make()
        headers = {"Authorization": f"Bearer {secret}"}
        writer = EventWriter(folder.events_file)
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=120) as client:
            yield StreamedJob(app, client, job, writer, token.id, secret)
        writer.close()


def event_names(frames: list[Frame]) -> list[str]:
    return [frame.event for frame in frames]


def test_a_stream_begins_with_a_snapshot_and_ends_after_the_last_event(streamed: StreamedJob) -> None:
    streamed.emit(wire.Started("1"), wire.BlockStarted("a:1b", 8))
    streamed.move(JobState.RUNNING)
    with read_events(streamed.client, streamed.job.id) as reader:
        first = reader.next()
        assert first is not None
        assert (first.event, first.data["job"]["state"], first.data["place"]) == ("snapshot", "running", None)
        assert first.data["progress"]["models"][0]["phase"] == "loading"
        assert first.id == first.data["cursor"] > 0
        streamed.emit(CELL)
        assert event_names(reader.read_until("progress")) == ["cell_finished", "progress"]
        streamed.emit(wire.Exit(0))
        streamed.move(JobState.SUCCEEDED)
        rest = reader.read_rest()
    assert event_names(rest)[-1] == "end"
    assert {"exit", "progress", "job"} <= set(event_names(rest))
    assert rest[-1].data["job"]["state"] == "succeeded"


def test_each_event_has_its_time_its_name_and_its_fields(streamed: StreamedJob) -> None:
    with read_events(streamed.client, streamed.job.id) as reader:
        reader.next()
        streamed.emit(CELL)
        event, progress = reader.read_until("progress")
    assert event.data["at"].endswith("Z")
    assert (event.data["event"], event.data["model"], event.data["output_tokens"]) == ("cell_finished", "a:1b", 40)
    assert progress.data["models"][0]["done"] == 1
    assert event.id == progress.id


def test_a_reconnected_client_gets_every_event_once(streamed: StreamedJob) -> None:
    streamed.move(JobState.RUNNING)
    received: list[int] = []
    last, sent = 0, 0
    for turn in range(4):
        headers = {} if turn == 0 else {"Last-Event-ID": str(last)}
        streamed.emit_cells(sent + 1, sent + 2)  # without a listener
        sent += 2
        query = "?after=0" if turn == 0 else ""
        with read_events(streamed.client, streamed.job.id, query, **headers) as reader:
            frames = reader.read_until("progress")
            received += done_counts(frames)
            last = frames[-1].id or 0
            assert frames[0].data["progress"]["models"][0]["done"] == sent - 2 if turn else True
    assert received == list(range(1, 9))


def test_the_header_takes_precedence_over_the_query(streamed: StreamedJob) -> None:
    streamed.emit_cells(1, 4)
    streamed.move(JobState.RUNNING, JobState.SUCCEEDED)
    all_of_it = streamed.read("?after=0")
    middle = [frame for frame in all_of_it if frame.event == "cell_finished"][1].id
    assert done_counts(all_of_it) == [1, 2, 3, 4]
    assert done_counts(streamed.read("?after=0", **{"Last-Event-ID": str(middle)})) == [3, 4]
    assert done_counts(streamed.read(f"?after={(middle or 0) - 3}")) == [2, 3, 4], "inside an event: from that one on"


@pytest.mark.parametrize("last", ["999999999", "9" * 40])
def test_a_cursor_beyond_the_last_event_is_the_current_state(streamed: StreamedJob, last: str) -> None:
    streamed.emit_cells(1, 2)
    with read_events(streamed.client, streamed.job.id, **{"Last-Event-ID": last}) as reader:
        first = reader.next()
        assert first is not None
        assert first.data["progress"]["models"][0]["done"] == 2
        streamed.emit_cells(3, 3)
        assert done_counts(reader.read_until("progress")) == [3]


def test_an_unknown_cursor_gives_the_current_state(streamed: StreamedJob) -> None:
    streamed.emit_cells(1, 2)
    streamed.move(JobState.RUNNING, JobState.FAILED)
    assert event_names(streamed.read(**{"Last-Event-ID": "abc"})) == ["snapshot", "end"]
    assert streamed.client.get(f"{API}/jobs/{streamed.job.id}/events?after=-1").status_code == 422
    assert streamed.client.get(f"{API}/jobs/{streamed.job.id}/events", headers={"Last-Event-ID": "9" * 41}).is_error


def test_the_stream_of_an_ended_job_is_complete_and_closed(streamed: StreamedJob) -> None:
    streamed.emit_cells(1, 8)
    streamed.move(JobState.RUNNING, JobState.SUCCEEDED)
    snapshot, end = streamed.read()
    assert (snapshot.event, end.event) == ("snapshot", "end")
    assert snapshot.data["progress"]["models"][0]["done"] == 8


def test_more_events_than_one_poll_are_all_sent_before_the_end(streamed: StreamedJob) -> None:
    streamed.emit(*(wire.Message(f"line {number}") for number in range(1300)))
    streamed.move(JobState.RUNNING, JobState.SUCCEEDED)
    frames = streamed.read("?after=0")
    sent = [frame.data["text"] for frame in frames if frame.event == "message"]
    assert sent == [f"line {number}" for number in range(1300)]
    assert frames[-1].event == "end"


def test_a_change_of_state_is_sent_without_an_event(streamed: StreamedJob) -> None:
    with read_events(streamed.client, streamed.job.id) as reader:
        first = reader.next()
        assert first is not None
        assert (first.data["job"]["state"], first.data["place"]) == ("queued", 1)
        streamed.move(JobState.RUNNING)
        assert reader.read_until("job")[-1].data == {"job": get_job(streamed), "place": None}
        streamed.move(JobState.LOST)
        assert reader.read_until("job")[-1].data["job"]["state"] == "lost"
        streamed.store.request_cancel(streamed.job.id)
        assert reader.read_until("job")[-1].data["job"]["cancel_requested"] is True
        streamed.move(JobState.RUNNING, JobState.CANCELLED)
        assert reader.read_until("end")[-1].data["job"]["state"] == "cancelled"
        assert reader.next() is None


def get_job(streamed: StreamedJob) -> object:
    return streamed.client.get(f"{API}/jobs/{streamed.job.id}").json()["job"]


def test_a_text_can_neither_forge_an_event_nor_show_a_login(streamed: StreamedJob) -> None:
    text = "a\n\nevent: end\ndata: {}\r\n\r\nid: 7\u2028 http://anna:hidden@box/x"
    with read_events(streamed.client, streamed.job.id) as reader:
        reader.next()
        streamed.emit(wire.Message(text))
        frames = reader.read_until("progress")
    assert event_names(frames) == ["message", "progress"]
    assert frames[0].data["text"] == text.replace("anna:hidden@", "")


def test_a_quiet_stream_is_kept_alive(streamed: StreamedJob) -> None:
    streamed.panel.streams.heartbeat_s = 0.1
    with read_events(streamed.client, streamed.job.id) as reader:
        assert event_names(reader.read_until(":")) == ["snapshot", ":"]
        assert event_names(reader.read_until(":")) == [":"]


def test_a_revoked_tokens_stream_ends(streamed: StreamedJob) -> None:
    streamed.panel.streams.heartbeat_s = 0.2
    with read_events(streamed.client, streamed.job.id) as reader:
        reader.next()
        streamed.panel.authenticator.tokens.revoke(streamed.token_id)
        assert set(event_names(reader.read_rest())) <= {":"}
    assert streamed.client.get(f"{API}/jobs/{streamed.job.id}/events").status_code == 401


def test_a_stream_ends_when_its_reader_logs_out(streamed: StreamedJob) -> None:
    streamed.panel.streams.heartbeat_s = 0.2
    with httpx.Client(base_url=streamed.client.base_url, trust_env=False, timeout=120) as browser:
        csrf = browser.post("/login", json={"token": streamed.secret}).json()["csrf"]
        cookies = dict(browser.cookies)
        with read_events(browser, streamed.job.id) as reader:
            reader.read_until(":")
            with httpx.Client(base_url=browser.base_url, cookies=cookies, trust_env=False) as other:
                assert other.post("/logout", headers={"X-CSRF-Token": csrf}).status_code < 400
            assert set(event_names(reader.read_rest())) <= {":"}


def test_a_stream_of_the_operators_token_stays_open(streamed: StreamedJob) -> None:
    streamed.panel.streams.heartbeat_s = 0.05
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    with (
        httpx.Client(base_url=streamed.client.base_url, headers=headers, trust_env=False, timeout=120) as operator,
        read_events(operator, streamed.job.id) as reader,
    ):
        for _ in range(3):
            reader.read_until(":")


def test_the_number_of_streams_is_limited_and_a_closed_one_frees_its_place(streamed: StreamedJob) -> None:
    streamed.panel.streams.max_open = 2
    with ExitStack() as open_:
        readers = [open_.enter_context(read_events(streamed.client, streamed.job.id)) for _ in range(2)]
        assert all(reader.next() is not None for reader in readers)
        assert streamed.panel.streams.n_open == 2
        refused = streamed.client.get(f"{API}/jobs/{streamed.job.id}/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_streams")
        assert refused.headers["retry-after"] == "5"
    assert eventually(lambda: streamed.panel.streams.n_open == 0)
    with read_events(streamed.client, streamed.job.id) as reader:
        assert reader.next() is not None


def test_many_streams_block_no_other_request(streamed: StreamedJob) -> None:
    limits = httpx.Limits(max_connections=100)
    with (
        httpx.Client(
            base_url=streamed.client.base_url,
            headers=streamed.client.headers,
            trust_env=False,
            timeout=120,
            limits=limits,
        ) as client,
        ExitStack() as open_,
    ):
        readers: list[EventReader] = [open_.enter_context(read_events(client, streamed.job.id)) for _ in range(60)]
        assert all(reader.next() is not None for reader in readers)
        assert streamed.client.get(f"{API}/jobs").status_code == 200
        streamed.emit(CELL)
        assert all(done_counts(reader.read_until("progress")) == [1] for reader in readers)


def test_a_deleted_job_closes_its_stream(streamed: StreamedJob) -> None:
    with read_events(streamed.client, streamed.job.id) as reader:
        reader.next()
        streamed.store.request_cancel(streamed.job.id)
        reader.read_until("end")
    with read_events(streamed.client, streamed.job.id) as reader:
        streamed.store.remove(streamed.job.id)
        assert set(event_names(reader.read_rest())) <= {"snapshot", "end", "job"}


def test_an_unavailable_job_store_ends_a_stream_without_a_traceback(
    streamed: StreamedJob, caplog: pytest.LogCaptureFixture
) -> None:
    with read_events(streamed.client, streamed.job.id) as reader:
        reader.next()
        streamed.store._db.execute("ALTER TABLE jobs RENAME TO gone")
        reader.read_rest()
        streamed.store._db.execute("ALTER TABLE gone RENAME TO jobs")
    assert "event stream ended" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_response_disables_buffering_of_proxies(streamed: StreamedJob) -> None:
    with read_events(streamed.client, streamed.job.id) as reader:
        assert reader.response.headers["x-accel-buffering"] == "no"
        assert reader.response.headers["cache-control"] == "no-store"
