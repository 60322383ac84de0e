"""A job's event stream: no event missed or duplicated; closed when a reader leaves or is not authorised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from support.panel_site import make_app
from tipbench.jobs.command import collect_request
from tipbench.jobs.folder import EventWriter, JobFolder
from tipbench.jobs.job import Job, JobState
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record import events as wire
from tipbench.settings import load_settings
from tipbench.web.auth import Role
from tipbench.web.deps import Panel
from web.event_reading import Frame, Reader, on_a_port, reading, until
from web.panels import API, OPERATOR, another_leads

CELL = wire.CellFinished("a:1b", "v1", "p@s", 1, 8, output_tokens=40, tokens_per_s=20.0)


@dataclass
class Watched:
    """A panel on a port with one job, and the writer of the job's events."""

    app: FastAPI
    client: httpx.Client
    job: Job
    pen: EventWriter
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
            self.pen.write(event)

    def cells(self, first: int, last: int) -> None:
        self.emit(*(wire.CellFinished("a:1b", "v1", "p@s", number, 8) for number in range(first, last + 1)))

    def move(self, *states: JobState) -> None:
        for state in states:
            assert self.store.move(self.job.id, self.store.get(self.job.id).state, state) is not None

    def read(self, query: str = "", **headers: str) -> list[Frame]:
        """Read a stream until it ends."""
        with reading(self.client, self.job.id, query, **headers) as reader:
            return reader.rest()


@pytest.fixture
def watched(home: Path) -> Iterator[Watched]:
    settings = load_settings({"TIPBENCH_HOME": str(home), "TIPBENCH_ADMIN_TOKEN": OPERATOR}, home.parent)
    app = make_app(settings)
    panel: Panel = app.state.panel
    panel.streams.poll_s = 0.02
    token, secret = panel.authenticator.tokens.create(Role.ADMIN, "boss", life_s=None)
    order = collect_request(make_config({"models": "a:1b", "experiment": "tip-bench-a"}))
    with another_leads(home), on_a_port(app) as url:
        job = panel.jobs.submit(order).job
        folder = JobFolder(home / "jobs", job.id)
        folder.make()
        headers = {"Authorization": f"Bearer {secret}"}
        pen = EventWriter(folder.events_file)
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=120) as client:
            yield Watched(app, client, job, pen, token.id, secret)
        pen.close()


def names(frames: list[Frame]) -> list[str]:
    return [frame.event for frame in frames]


def cells_of(frames: list[Frame]) -> list[int]:
    return [frame.data["done"] for frame in frames if frame.event == "cell_finished"]


def test_a_stream_begins_with_a_snapshot_and_ends_after_the_last_event(watched: Watched) -> None:
    watched.emit(wire.Started("1"), wire.BlockStarted("a:1b", 8))
    watched.move(JobState.RUNNING)
    with reading(watched.client, watched.job.id) as reader:
        first = reader.next()
        assert first is not None
        assert (first.event, first.data["job"]["state"], first.data["place"]) == ("snapshot", "running", None)
        assert first.data["progress"]["models"][0]["phase"] == "loading"
        assert first.id == first.data["cursor"] > 0
        watched.emit(CELL)
        assert names(reader.until("progress")) == ["cell_finished", "progress"]
        watched.emit(wire.Exit(0))
        watched.move(JobState.SUCCEEDED)
        rest = reader.rest()
    assert names(rest)[-1] == "end"
    assert {"exit", "progress", "job"} <= set(names(rest))
    assert rest[-1].data["job"]["state"] == "succeeded"


def test_each_event_has_its_time_its_name_and_its_fields(watched: Watched) -> None:
    with reading(watched.client, watched.job.id) as reader:
        reader.next()
        watched.emit(CELL)
        event, progress = reader.until("progress")
    assert event.data["at"].endswith("Z")
    assert (event.data["event"], event.data["model"], event.data["output_tokens"]) == ("cell_finished", "a:1b", 40)
    assert progress.data["models"][0]["done"] == 1
    assert event.id == progress.id


def test_a_reconnected_client_gets_every_event_once(watched: Watched) -> None:
    watched.move(JobState.RUNNING)
    received: list[int] = []
    last, sent = 0, 0
    for turn in range(4):
        headers = {} if turn == 0 else {"Last-Event-ID": str(last)}
        watched.cells(sent + 1, sent + 2)  # without a listener
        sent += 2
        query = "?after=0" if turn == 0 else ""
        with reading(watched.client, watched.job.id, query, **headers) as reader:
            frames = reader.until("progress")
            received += cells_of(frames)
            last = frames[-1].id or 0
            assert frames[0].data["progress"]["models"][0]["done"] == sent - 2 if turn else True
    assert received == list(range(1, 9))


def test_the_header_takes_precedence_over_the_query(watched: Watched) -> None:
    watched.cells(1, 4)
    watched.move(JobState.RUNNING, JobState.SUCCEEDED)
    all_of_it = watched.read("?after=0")
    middle = [frame for frame in all_of_it if frame.event == "cell_finished"][1].id
    assert cells_of(all_of_it) == [1, 2, 3, 4]
    assert cells_of(watched.read("?after=0", **{"Last-Event-ID": str(middle)})) == [3, 4]
    assert cells_of(watched.read(f"?after={(middle or 0) - 3}")) == [2, 3, 4], "inside an event: from that one on"


@pytest.mark.parametrize("last", ["999999999", "9" * 40])
def test_a_cursor_beyond_the_last_event_is_the_current_state(watched: Watched, last: str) -> None:
    watched.cells(1, 2)
    with reading(watched.client, watched.job.id, **{"Last-Event-ID": last}) as reader:
        first = reader.next()
        assert first is not None
        assert first.data["progress"]["models"][0]["done"] == 2
        watched.cells(3, 3)
        assert cells_of(reader.until("progress")) == [3]


def test_an_unknown_cursor_gives_the_current_state(watched: Watched) -> None:
    watched.cells(1, 2)
    watched.move(JobState.RUNNING, JobState.FAILED)
    assert names(watched.read(**{"Last-Event-ID": "abc"})) == ["snapshot", "end"]
    assert watched.client.get(f"{API}/jobs/{watched.job.id}/events?after=-1").status_code == 422
    assert watched.client.get(f"{API}/jobs/{watched.job.id}/events", headers={"Last-Event-ID": "9" * 41}).is_error


def test_the_stream_of_an_ended_job_is_complete_and_closed(watched: Watched) -> None:
    watched.cells(1, 8)
    watched.move(JobState.RUNNING, JobState.SUCCEEDED)
    snapshot, end = watched.read()
    assert (snapshot.event, end.event) == ("snapshot", "end")
    assert snapshot.data["progress"]["models"][0]["done"] == 8


def test_more_events_than_one_poll_are_all_sent_before_the_end(watched: Watched) -> None:
    watched.emit(*(wire.Message(f"line {number}") for number in range(1300)))
    watched.move(JobState.RUNNING, JobState.SUCCEEDED)
    frames = watched.read("?after=0")
    sent = [frame.data["text"] for frame in frames if frame.event == "message"]
    assert sent == [f"line {number}" for number in range(1300)]
    assert frames[-1].event == "end"


def test_a_change_of_state_is_sent_without_an_event(watched: Watched) -> None:
    with reading(watched.client, watched.job.id) as reader:
        first = reader.next()
        assert first is not None
        assert (first.data["job"]["state"], first.data["place"]) == ("queued", 1)
        watched.move(JobState.RUNNING)
        assert reader.until("job")[-1].data == {"job": _shown(watched), "place": None}
        watched.move(JobState.LOST)
        assert reader.until("job")[-1].data["job"]["state"] == "lost"
        watched.store.request_cancel(watched.job.id)
        assert reader.until("job")[-1].data["job"]["cancel_requested"] is True
        watched.move(JobState.RUNNING, JobState.CANCELLED)
        assert reader.until("end")[-1].data["job"]["state"] == "cancelled"
        assert reader.next() is None


def _shown(watched: Watched) -> object:
    return watched.client.get(f"{API}/jobs/{watched.job.id}").json()["job"]


def test_a_text_can_neither_forge_an_event_nor_show_a_login(watched: Watched) -> None:
    text = "a\n\nevent: end\ndata: {}\r\n\r\nid: 7\u2028 http://anna:hidden@box/x"
    with reading(watched.client, watched.job.id) as reader:
        reader.next()
        watched.emit(wire.Message(text))
        frames = reader.until("progress")
    assert names(frames) == ["message", "progress"]
    assert frames[0].data["text"] == text.replace("anna:hidden@", "")


def test_a_quiet_stream_is_kept_alive(watched: Watched) -> None:
    watched.panel.streams.heartbeat_s = 0.1
    with reading(watched.client, watched.job.id) as reader:
        assert names(reader.until(":")) == ["snapshot", ":"]
        assert names(reader.until(":")) == [":"]


def test_a_revoked_tokens_stream_ends(watched: Watched) -> None:
    watched.panel.streams.heartbeat_s = 0.2
    with reading(watched.client, watched.job.id) as reader:
        reader.next()
        watched.panel.authenticator.tokens.revoke(watched.token_id)
        assert set(names(reader.rest())) <= {":"}
    assert watched.client.get(f"{API}/jobs/{watched.job.id}/events").status_code == 401


def test_a_stream_ends_when_its_reader_logs_out(watched: Watched) -> None:
    watched.panel.streams.heartbeat_s = 0.2
    with httpx.Client(base_url=watched.client.base_url, trust_env=False, timeout=120) as browser:
        csrf = browser.post("/login", json={"token": watched.secret}).json()["csrf"]
        cookies = dict(browser.cookies)
        with reading(browser, watched.job.id) as reader:
            reader.until(":")
            with httpx.Client(base_url=browser.base_url, cookies=cookies, trust_env=False) as other:
                assert other.post("/logout", headers={"X-CSRF-Token": csrf}).status_code < 400
            assert set(names(reader.rest())) <= {":"}


def test_the_operators_own_stream_stays(watched: Watched) -> None:
    watched.panel.streams.heartbeat_s = 0.05
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    with (
        httpx.Client(base_url=watched.client.base_url, headers=headers, trust_env=False, timeout=120) as operator,
        reading(operator, watched.job.id) as reader,
    ):
        for _ in range(3):
            reader.until(":")


def test_streams_are_bounded_and_one_that_left_makes_room(watched: Watched) -> None:
    watched.panel.streams.max_open = 2
    with ExitStack() as open_:
        readers = [open_.enter_context(reading(watched.client, watched.job.id)) for _ in range(2)]
        assert all(reader.next() is not None for reader in readers)
        assert watched.panel.streams.n_open == 2
        refused = watched.client.get(f"{API}/jobs/{watched.job.id}/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_streams")
        assert refused.headers["retry-after"] == "5"
    until(lambda: watched.panel.streams.n_open == 0)
    with reading(watched.client, watched.job.id) as reader:
        assert reader.next() is not None


def test_many_streams_block_no_other_request(watched: Watched) -> None:
    limits = httpx.Limits(max_connections=100)
    with (
        httpx.Client(
            base_url=watched.client.base_url,
            headers=watched.client.headers,
            trust_env=False,
            timeout=120,
            limits=limits,
        ) as client,
        ExitStack() as open_,
    ):
        readers: list[Reader] = [open_.enter_context(reading(client, watched.job.id)) for _ in range(60)]
        assert all(reader.next() is not None for reader in readers)
        assert watched.client.get(f"{API}/jobs").status_code == 200
        watched.emit(CELL)
        assert all(cells_of(reader.until("progress")) == [1] for reader in readers)


def test_a_deleted_job_closes_its_stream(watched: Watched) -> None:
    with reading(watched.client, watched.job.id) as reader:
        reader.next()
        watched.store.request_cancel(watched.job.id)
        reader.until("end")
    with reading(watched.client, watched.job.id) as reader:
        watched.store.remove(watched.job.id)
        assert set(names(reader.rest())) <= {"snapshot", "end", "job"}


def test_an_unavailable_job_store_ends_a_stream_without_a_traceback(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with reading(watched.client, watched.job.id) as reader:
        reader.next()
        watched.store._db.execute("ALTER TABLE jobs RENAME TO gone")
        reader.rest()
        watched.store._db.execute("ALTER TABLE gone RENAME TO jobs")
    assert "event stream ended" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_response_disables_buffering_of_proxies(watched: Watched) -> None:
    with reading(watched.client, watched.job.id) as reader:
        assert reader.response.headers["x-accel-buffering"] == "no"
        assert reader.response.headers["cache-control"] == "no-store"
