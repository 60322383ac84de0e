from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from support.mlflow_server import free_port
from tipbench.errors import MlflowError, MlflowUnavailable, UsageError
from tipbench.record import mlflow, mlflow_http, mlflow_wire, texts
from tipbench.record.mlflow import MlflowStore
from tipbench.record.mlflow_wire import CurrentRun, change_batches, checked_tags, mlflow_filter, run_batches
from tipbench.record.run import NewRun, RunChange, RunKind, StoredRun
from tipbench.settings import Settings

Response = tuple[int, str, bytes]
JSON = "application/json"


class ScriptedHttp(ThreadingHTTPServer):
    """Responds to every request from one function and records the requests."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.respond: Callable[[str, bytes], Response] = lambda _path, _body: (200, JSON, b"{}")
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.encoding = ""
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def close_connections(self) -> None:
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def responds_with(self, status: int, body: bytes, kind: str = JSON) -> None:
        self.respond = lambda _path, _body: (status, kind, body)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedHttp

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.server.seen.append((self.path, headers, sent))
        status, kind, body = self.server.respond(self.path, sent)
        self.send_response(status)
        self.send_header("content-type", kind)
        if self.server.encoding:
            self.send_header("content-encoding", self.server.encoding)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # a client that refuses the response closes the connection
            self.wfile.write(body)

    do_GET = do_POST  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def serving(server: ScriptedHttp) -> Iterator[ScriptedHttp]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.close_connections()
    server.server_close()


@pytest.fixture
def scripted() -> Iterator[ScriptedHttp]:
    with serving(ScriptedHttp()) as server:
        yield server


@pytest.fixture
def store(mlflow_url: str) -> Iterator[MlflowStore]:
    with MlflowStore(mlflow_url) as store:
        yield store


def new_run(**changes: object) -> NewRun:
    given: dict[str, object] = {
        "kind": RunKind.CELL,
        "record_id": uuid.uuid4().hex,
        "name": "a run",
        "start_ms": 1000,
        "end_ms": 2000,
        "cell_key": "key",
        "params": {"model": "m"},
        "metrics": {"latency_s": 1.0},
    }
    return NewRun(**(given | changes))  # type: ignore[arg-type]


def new_experiment(store: MlflowStore) -> str:
    return store.ensure_experiment(f"tip-bench-{uuid.uuid4().hex}").experiment_id


# The server: a real one where its own messages matter, else the scripted one


def test_a_deleted_experiment_is_missing_and_the_error_has_the_restore_command(store: MlflowStore) -> None:
    made = store.ensure_experiment(f"tip-bench-{uuid.uuid4().hex}")
    body = {"experiment_id": made.experiment_id}
    httpx.post(f"{store.url}/api/2.0/mlflow/experiments/delete", json=body, trust_env=False).raise_for_status()
    assert store.experiment(made.name) is None
    with pytest.raises(MlflowError, match=f"restore --experiment-id {made.experiment_id}"):
        store.ensure_experiment(made.name)


def test_a_foreign_host_header_is_explained(real_mlflow_url: str) -> None:
    with httpx.Client(headers={"host": "mlflow.example"}, trust_env=False) as client:
        with pytest.raises(MlflowError, match=r"--allowed-hosts mlflow\.example") as caught:
            MlflowStore(real_mlflow_url, client=client).experiments()
        assert "'Host: mlflow.example'" in str(caught.value)
        assert caught.value.status == 403
    settings = Settings(Path(), {"mlflow_url": real_mlflow_url, "mlflow_host_header": "localhost:5000"})
    with (
        httpx.Client(headers={"host": "mlflow.example"}, trust_env=False) as client,
        MlflowStore(real_mlflow_url, client=client, **settings.mlflow.login(real_mlflow_url)) as store,
    ):
        assert store.experiments()


def test_a_superfluous_prefix_is_explained(real_mlflow_url: str) -> None:
    with MlflowStore(real_mlflow_url + "/mlflow") as store, pytest.raises(MlflowError, match="prefix"):
        store.experiments()


def test_a_prefix_is_part_of_every_address(scripted: ScriptedHttp) -> None:
    scripted.responds_with(200, json.dumps({"run": {"info": {"run_id": "r"}}}).encode())
    with MlflowStore(scripted.url + "/mlflow/") as store:
        store.record("1", new_run())
        assert store.experiment_url("1") == f"{scripted.url}/mlflow/#/experiments/1/runs"
    assert {path.partition("/runs/")[0] for path, _, _ in scripted.seen} == {"/mlflow/api/2.0/mlflow"}


def test_links_use_the_public_address_if_there_is_one(mlflow_url: str) -> None:
    with MlflowStore(mlflow_url, public_url="https://mlflow.example/") as store:
        experiment = store.ensure_experiment("tip-bench-elsewhere")
        assert experiment.url == f"https://mlflow.example/#/experiments/{experiment.experiment_id}/runs"


def test_pages_are_followed_to_the_end(store: MlflowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "RUNS_PER_PAGE", 2)
    monkeypatch.setattr(mlflow, "EXPERIMENTS_PER_PAGE", 1)
    experiment = new_experiment(store)
    ids = {store.record(experiment, new_run(cell_key=str(number), start_ms=number)) for number in range(5)}
    assert {run.run_id for run in store.search(experiment, where={"kind": "cell"})} == ids
    assert len(list(store.search(experiment, where={}, limit=3))) == 3
    assert experiment in {each.experiment_id for each in store.experiments()}


def test_a_page_that_is_too_large_is_requested_in_smaller_pieces(
    store: MlflowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = new_experiment(store)
    texts = {"artifact:raw.txt": "x" * 20_000}
    ids = {store.record(experiment, new_run(cell_key=str(n), start_ms=n, texts=texts)) for n in range(5)}
    monkeypatch.setattr(mlflow_http, "MAX_BYTES", 50_000)
    assert {run.run_id for run in store.search(experiment, where={})} == ids


def test_a_run_that_is_too_large_for_any_page_is_refused(store: MlflowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = new_experiment(store)
    store.record(experiment, new_run(texts={"artifact:raw.txt": "x" * 20_000}))
    monkeypatch.setattr(mlflow_http, "MAX_BYTES", 5_000)
    with pytest.raises(MlflowError, match="more than"):
        list(store.search(experiment, where={}))


def test_a_run_interrupted_after_its_params_is_completed(store: MlflowStore) -> None:
    experiment = new_experiment(store)
    run = new_run(texts={"artifact:raw.txt": "x" * 900_000}, tags={f"t{n}": "v" for n in range(150)})
    first, second, *_ = run_batches(run, checked_tags(run))
    create = {"experiment_id": experiment, "start_time": run.start_ms, "tags": first.tags}
    api = f"{store.url}/api/2.0/mlflow/runs"
    half = httpx.post(f"{api}/create", json=create, trust_env=False).json()["run"]["info"]["run_id"]
    httpx.post(f"{api}/log-batch", json=second.body(half), trust_env=False).raise_for_status()
    assert store.record(experiment, run, may_exist=True) == half
    stored, texts = store.get(half)
    assert (stored.status, stored.params) == ("FINISHED", run.params)
    assert texts == run.texts


def test_a_text_of_more_than_999_parts_is_kept(store: MlflowStore) -> None:
    text = "".join(f"{number:08d}" for number in range(1_000_500))
    run_id = store.record(new_experiment(store), new_run(texts={"artifact:raw.txt": text}))
    assert store.get(run_id)[1] == {"artifact:raw.txt": text}


class FailingTransport(httpx.HTTPTransport):
    """A client that dies after some requests."""

    def __init__(self, requests_left: int) -> None:
        super().__init__()
        self.requests_left = requests_left

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.requests_left == 0:
            raise httpx.ConnectError("the client died")
        self.requests_left -= 1
        return super().handle_request(request)


def update_until_failure(url: str, run_id: str, change: RunChange, *, after: int) -> bool:
    """Return whether the update ends within `after` requests."""
    with httpx.Client(transport=FailingTransport(after), trust_env=False) as client:
        try:
            MlflowStore(url, client=client).update(run_id, change)
        except MlflowUnavailable:
            return False
        return True


def test_wherever_an_update_dies_the_old_or_the_new_text_is_read(
    store: MlflowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for old, new in [(3, 90), (90, 3), (90, 120), (120, 90), (16, 30), (30, 16)]:
        monkeypatch.setattr(texts, "MAX_TAG_CHARS", 10)
        monkeypatch.setattr(mlflow_wire, "MAX_BATCH_TAGS", 5)
        before, after = {"artifact:a": "a" * old}, {"artifact:a": "b" * new}
        run_id = store.record(new_experiment(store), new_run(texts=before, tags={"state": "pending"}))
        change = RunChange(texts=after, tags={"state": "judged"}, at_ms=1)
        for requests_left in range(30):
            done = update_until_failure(store.url, run_id, change, after=requests_left)
            run, now = store.get(run_id)
            assert now == (after if run.state == "judged" else before)
            if done:
                break
            store.update(run_id, RunChange(texts=before, tags={"state": "pending"}, at_ms=1))
        assert done
        assert run.state == "judged"


def test_a_failed_cleanup_does_not_fail_the_update(store: MlflowStore) -> None:
    run_id = store.record(new_experiment(store), new_run(texts={"artifact:a": "x" * 30_000}))
    assert update_until_failure(store.url, run_id, RunChange(texts={"artifact:a": "y"}, at_ms=1), after=2)
    assert store.get(run_id)[1] == {"artifact:a": "y"}


def test_an_update_of_a_deleted_run_is_refused(store: MlflowStore) -> None:
    run_id = store.record(new_experiment(store), new_run())
    url = f"{store.url}/api/2.0/mlflow/runs/delete"
    httpx.post(url, json={"run_id": run_id}, trust_env=False).raise_for_status()
    with pytest.raises(MlflowError, match="deleted"):
        store.update(run_id, RunChange(tags={"a": "b"}, at_ms=1))


# Addresses and logins


def test_an_invalid_http_address_is_a_usage_error() -> None:
    for url in ["file:/tmp/mlruns", "sqlite:///mlflow.db", "localhost:5000", "", "http://", "databricks"]:
        with pytest.raises(UsageError):
            MlflowStore(url)


def test_query_and_fragment_of_a_pasted_address_are_dropped() -> None:
    with MlflowStore("http://localhost:5000/mlflow/?a=b#/experiments/1") as store:
        assert store.url == "http://localhost:5000/mlflow"


def test_a_password_is_sent_and_never_shown(scripted: ScriptedHttp) -> None:
    scripted.responds_with(401, b"You are not authenticated", "text/plain")
    with (
        MlflowStore(scripted.url.replace("//", "//ann:secret@")) as store,
        pytest.raises(MlflowError, match="MLFLOW_TRACKING_USERNAME") as caught,
    ):
        store.experiments()
    assert scripted.seen[0][1]["authorization"].startswith("Basic ")
    assert "secret" not in str(caught.value) + store.url


def test_name_password_and_token_are_sent(scripted: ScriptedHttp) -> None:
    with MlflowStore(scripted.url, username="ann", password="x") as store:
        store.experiments()
    with MlflowStore(scripted.url, token="t0k") as store:
        store.experiments()
    assert [headers["authorization"] for _, headers, _ in scripted.seen] == ["Basic YW5uOng=", "Bearer t0k"]


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(
    scripted: ScriptedHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with MlflowStore(scripted.url) as store:
        assert store.experiments() == []


def test_a_proxy_of_the_environment_is_used_for_other_machines(
    scripted: ScriptedHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", scripted.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with MlflowStore("http://mlflow.example:5000") as store:
        store.experiments()
    assert scripted.seen[0][0].startswith("http://mlflow.example:5000/api/2.0/mlflow/")


def test_an_unusable_proxy_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for proxy in ["socks5://127.0.0.1:1080", "foo://proxy.example", "http://[::1"]:
        for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy)
        with pytest.raises(UsageError, match="HTTP_PROXY="):
            MlflowStore("http://mlflow.example:5000")


def test_unreadable_certificates_are_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "empty.pem"))
    with pytest.raises(UsageError, match="SSL_CERT_FILE"):
        MlflowStore("https://mlflow.example:5000")


# Faults


def test_a_response_of_not_available_is_unavailable(scripted: ScriptedHttp) -> None:
    for status in [408, 429, 502, 503, 504]:
        scripted.responds_with(status, b"<html>Bad gateway</html>", "text/html")
        with MlflowStore(scripted.url) as store, pytest.raises(MlflowUnavailable, match=str(status)) as caught:
            store.experiments()
        assert f"Host: 127.0.0.1:{scripted.server_port}" in str(caught.value)


def test_a_locked_database_is_unavailable(scripted: ScriptedHttp) -> None:
    scripted.responds_with(500, b'{"error_code": "TEMPORARILY_UNAVAILABLE", "message": "database is locked"}')
    with MlflowStore(scripted.url) as store, pytest.raises(MlflowUnavailable, match="database is locked"):
        store.experiments()


def test_no_server_is_unavailable() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with MlflowStore(url) as store, pytest.raises(MlflowUnavailable, match=url):
        store.experiments()


def test_a_server_that_comes_back_is_used_again() -> None:
    port = free_port()
    with MlflowStore(f"http://127.0.0.1:{port}") as store:
        with serving(ScriptedHttp(port)):
            store.mark_changed("1")
        with pytest.raises(MlflowUnavailable):
            store.mark_changed("1")
        with serving(ScriptedHttp(port)):
            store.mark_changed("1")


def test_a_server_that_hangs_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with MlflowStore(url, timeout_s=0.2) as store, pytest.raises(MlflowUnavailable, match=r"within 0\.2 s"):
            store.experiments()


def test_a_response_slower_than_the_deadline_is_unavailable() -> None:
    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):  # until the client disconnects
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while True:
                connection.sendall(b" ")
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with MlflowStore(url, timeout_s=0.1) as store, pytest.raises(MlflowUnavailable, match="did not respond"):
            store.experiments()
        thread.join()


def test_something_else_on_the_port_is_named(scripted: ScriptedHttp) -> None:
    for body in [b"<html>hello</html>", b"", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000]:
        scripted.responds_with(200, body, "text/html")
        with MlflowStore(scripted.url) as store, pytest.raises(MlflowError, match="Not an MLflow server"):
            store.experiments()


def test_a_response_of_unknown_structure_is_refused(scripted: ScriptedHttp) -> None:
    for body in [b'{"runs": [{}]}', b'{"runs": 5}', b'{"runs": [{"info": 7}]}', b'{"runs": [null]}']:
        scripted.responds_with(200, body)
        with MlflowStore(scripted.url) as store, pytest.raises(MlflowError, match="unexpected"):
            list(store.search("1", where={}))


def test_a_response_that_cannot_be_decompressed_is_refused(scripted: ScriptedHttp) -> None:
    scripted.encoding = "gzip"
    scripted.responds_with(200, b"not gzip")
    with MlflowStore(scripted.url) as store, pytest.raises(MlflowError, match="cannot be decompressed"):
        store.experiments()


def test_a_response_that_unpacks_to_too_much_is_refused(
    scripted: ScriptedHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_http, "MAX_BYTES", 1_000_000)
    scripted.encoding = "gzip"
    scripted.responds_with(200, gzip.compress(b" " * 5_000_000))
    with MlflowStore(scripted.url) as store, pytest.raises(MlflowError, match="more than"):
        store.get("1")


def test_a_redirect_is_not_followed_blindly(scripted: ScriptedHttp) -> None:
    scripted.responds_with(302, b"", "text/html")
    with MlflowStore(scripted.url) as store, pytest.raises(MlflowError, match="redirects"):
        store.experiments()


def test_other_refusals_keep_code_and_message(scripted: ScriptedHttp) -> None:
    scripted.responds_with(400, b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "bad filter"}')
    with MlflowStore(scripted.url) as store, pytest.raises(MlflowError, match="bad filter") as caught:
        store.experiments()
    assert (caught.value.code, caught.value.status) == ("INVALID_PARAMETER_VALUE", 400)


def test_a_server_that_repeats_a_page_does_not_cause_an_endless_loop(scripted: ScriptedHttp) -> None:
    scripted.responds_with(200, b'{"next_page_token": "again"}')
    with MlflowStore(scripted.url) as store, pytest.raises(MlflowError, match="same page"):
        store.experiments()


def test_the_next_page_is_requested_before_a_page_is_parsed(scripted: ScriptedHttp) -> None:
    second_requested = threading.Event()

    def respond(_path: str, body: bytes) -> Response:
        if json.loads(body).get("page_token") == "2":
            second_requested.set()
        return 200, JSON, b'{"runs": [not JSON], "next_page_token": "2"}'

    scripted.respond = respond
    with MlflowStore(scripted.url) as store, pytest.raises(MlflowError, match="Not an MLflow server"):
        list(store.search("1", where={}))
    assert second_requested.wait(10)


def test_all_pages_are_read_wherever_a_page_has_its_token(scripted: ScriptedHttp) -> None:
    def page(run_id: str, token: str | None = None) -> bytes:
        run = {"info": {"run_id": run_id, "status": "FINISHED"}, "data": {"tags": [{"key": "next_page_token"}]}}
        return json.dumps({"next_page_token": token, "runs": [run]} if token else {"runs": [run]}, indent=2).encode()

    pages = {None: page("a", "2"), "2": page("b", "3"), "3": page("c")}
    scripted.respond = lambda _path, body: (200, JSON, pages[json.loads(body).get("page_token")])
    with MlflowStore(scripted.url) as store:
        assert [run.run_id for run in store.search("1", where={})] == ["a", "b", "c"]


# What is sent


def test_an_ordinary_run_takes_three_requests(scripted: ScriptedHttp) -> None:
    scripted.responds_with(200, json.dumps({"run": {"info": {"run_id": "r"}}}).encode())
    with MlflowStore(scripted.url) as store:
        store.record("1", new_run(texts={"artifact:raw.txt": "x" * 20_000}, supersedes=("old",)))
    paths = [path.rpartition("/")[2] for path, _, _ in scripted.seen]
    assert paths == ["create", "log-batch", "update", "set-tag"]


def run_response(**tags: str) -> bytes:
    pairs = [{"key": key.replace("__", ":"), "value": value} for key, value in tags.items()]
    return json.dumps({"run": {"info": {"run_id": "r", "status": "FINISHED"}, "data": {"tags": pairs}}}).encode()


def test_an_ordinary_update_takes_two_requests(scripted: ScriptedHttp) -> None:
    scripted.responds_with(200, run_response(state="pending", artifact__a="short"))
    change = RunChange(
        metrics={"tone": 1.0}, tags={"state": "judged"}, texts={"artifact:a": "s", "artifact:b": "x" * 20_000}, at_ms=5
    )
    with MlflowStore(scripted.url) as store:
        store.update("r", change)
    (get, _, _), (path, _, sent) = scripted.seen
    assert get.endswith("/runs/get?run_id=r")
    assert path.endswith("/runs/log-batch")
    assert json.loads(sent)["metrics"] == [{"key": "tone", "value": 1.0, "timestamp": 5, "step": 0}]
    assert [tag["key"] for tag in json.loads(sent)["tags"]][-1] == "state"


def test_an_update_of_nothing_sends_nothing(scripted: ScriptedHttp) -> None:
    scripted.responds_with(200, run_response())
    with MlflowStore(scripted.url) as store:
        store.update("r", RunChange(at_ms=5))
    assert len(scripted.seen) == 1


def test_tags_that_another_writer_has_changed_are_not_deleted(scripted: ScriptedHttp) -> None:
    scripted.responds_with(200, run_response(artifact__a="short"))
    with MlflowStore(scripted.url) as store:
        store.update("r", RunChange(texts={"artifact:a": "x" * 20_000}, at_ms=5))
    assert [path.rpartition("/")[2] for path, _, _ in scripted.seen] == ["get?run_id=r", "log-batch", "get?run_id=r"]


def test_every_request_of_an_update_stays_within_the_limits() -> None:
    change = RunChange(
        metrics={f"m{number}": 1.0 for number in range(1700)},
        tags={f"t{number}": "\x01" * 7000 for number in range(120)} | {"state": "judged", "last": "x"},
        texts={"artifact:a": "😀\x00" * 300_000, "artifact:b": "b"},
        at_ms=1,
    )
    run = StoredRun("r", "FINISHED", 0, 0, {}, {}, {"state": "pending"})
    sent = change_batches(change, CurrentRun(run, texts.to_tags("artifact:a", "a" * 100_000)))
    for batch in sent:
        assert len(batch.tags) <= 100
        assert len(batch.tags) + len(batch.metrics) <= 1000
        assert len(json.dumps(batch.body("r" * 32), ensure_ascii=False).encode()) < 1_000_000
    assert sum(len(batch.metrics) for batch in sent) == 1700
    assert sent[-1].tags[-1]["key"] == "state"


def test_every_request_stays_within_the_limits() -> None:
    run = new_run(
        params={f"p{number}": "😀" * 6000 for number in range(150)},
        metrics={f"m{number}": 1.0 for number in range(2500)},
        tags={f"t{number}": "\x01" * 7000 for number in range(120)},
        texts={"artifact:raw.txt": "😀\x00" * 300_000},
    )
    sent = run_batches(run, checked_tags(run))
    assert not sent[0].params
    assert not sent[0].metrics
    for batch in sent:
        assert len(batch.tags) <= 100
        assert len(batch.params) <= 100
        assert len(batch.tags) + len(batch.params) + len(batch.metrics) <= 1000
        assert len(json.dumps(batch.body("r" * 32), ensure_ascii=False).encode()) < 1_000_000
    tags = [tag["key"] for batch in sent for tag in batch.tags]
    assert len(tags) == len(set(tags))
    assert tags[:4] == ["kind", "tipbench.record", "mlflow.runName", "cell_key"]


def test_what_a_filter_cannot_express_is_filtered_after_reading() -> None:
    where = {"a": "it's", "b": "plain", "c": "' and \"", "d`": "x", "params.e": 'say "x"', "f": "back\\"}
    assert (
        mlflow_filter(where, include_half_written=True)
        == "tags.`a` = \"it's\" AND tags.`b` = 'plain' AND params.`e` = 'say \"x\"'"
    )


def flaky_client(failures: list[httpx.Response | Exception], seen: list[str]) -> httpx.Client:
    """A client whose first requests fail; then every run exists and every write succeeds."""

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path.rpartition("mlflow/")[2])
        if failures:
            failure = failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return failure
        return httpx.Response(200, content=run_response())

    return httpx.Client(transport=httpx.MockTransport(respond))


@pytest.mark.parametrize(
    "failure", [httpx.ReadError("reset"), httpx.RemoteProtocolError("closed"), httpx.Response(500), httpx.Response(503)]
)
def test_reads_and_repeatable_writes_survive_a_reset_and_a_server_error(
    monkeypatch: pytest.MonkeyPatch, failure: httpx.Response | Exception
) -> None:
    monkeypatch.setattr(mlflow_http, "_RETRY_WAITS_S", (0.0, 0.0))
    for before in range(2):  # the read or the write fails
        seen: list[str] = []
        failures = [failure, failure]
        if before:
            failures.insert(0, httpx.Response(200, content=run_response()))
        store = MlflowStore("http://mlflow.example", client=flaky_client(failures, seen))
        store.update("r", RunChange(tags={"note": "x"}, at_ms=1))
        assert sorted(set(seen)) == ["runs/get", "runs/log-batch"]
        assert len(seen) == 4


@pytest.mark.parametrize("failure", [httpx.ReadError("reset"), httpx.Response(503)])
def test_a_run_is_not_created_twice_after_a_reset(failure: httpx.Response | Exception) -> None:
    seen: list[str] = []
    store = MlflowStore("http://mlflow.example", client=flaky_client([failure], seen))
    with pytest.raises(MlflowUnavailable):
        store.record("1", NewRun(RunKind.CELL, "id", "name", 1, 2, cell_key="k"))
    assert seen == ["runs/create"]
