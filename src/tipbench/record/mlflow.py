"""Stores runs in MLflow, through its REST API and without the package `mlflow`; finds the tracking server to use."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from tipbench.errors import LocalMlflowError, MlflowError, MlflowUnavailable
from tipbench.http import canonical_url
from tipbench.record import mlflow_wire as wire
from tipbench.record.local_mlflow import LocalMlflow
from tipbench.record.mlflow_http import MlflowHttp, TooLarge
from tipbench.record.run import NewRun, RunChange, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.record.texts import check_key, from_tags, tags_of, unneeded_tags

RUNS_PER_PAGE = 250  # as fast as larger pages, and about 6 MB
EXPERIMENTS_PER_PAGE = 1000
USUAL_URLS = ("http://localhost:5000", "http://localhost:5000/mlflow")
PROBE_S = 1.0  # timeout of the search for a server
_TOKEN_AT_END = re.compile(rb'"next_page_token"\s*:\s*"([^"\\]+)"\s*\}\s*\Z')
_MAX_TOKEN_BYTES = 2000  # longer than any page token

Parsed = TypeVar("Parsed")


class MlflowStore:
    """A `RunStore` in an MLflow tracking server, with texts in tags; see `tipbench.record.texts`. Thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        client: httpx.Client | None = None,
        username: str | None = None,
        password: str | None = None,
        token: str | None = None,
        host_header: str | None = None,  # sent instead of the host of `url`
        public_url: str | None = None,  # URL of MLflow for browsers, if it is not `url`
    ) -> None:
        self._http = MlflowHttp(
            url,
            timeout_s=timeout_s,
            client=client,
            username=username,
            password=password,
            token=token,
            host_header=host_header,
        )
        self.url = self._http.url
        self._public_url = (public_url or self.url).rstrip("/")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def experiment_url(self, experiment_id: str) -> str:
        """Return the URL of the experiment's runs in MLflow."""
        # Without /runs, MLflow 3.17 opens a page about traces, for any value of the tag mlflow.experimentKind.
        return f"{self._public_url}/#/experiments/{experiment_id}/runs"

    def experiment(self, name: str) -> Experiment | None:
        raw = self._experiment_json(name)
        if not raw or raw.get("lifecycle_stage") == "deleted":
            return None
        return self._parse_experiment(raw)

    def ensure_experiment(self, name: str) -> Experiment:
        """Return the experiment of this name, created if missing; safe with concurrent callers."""
        raw = self._experiment_json(name)
        created = False
        if raw is None:
            try:
                self._http.post("experiments/create", {"name": name})
                created = True
            except MlflowError as exc:
                if exc.code != "RESOURCE_ALREADY_EXISTS":
                    raise
            raw = self._experiment_json(name)
        if raw is None:
            raise MlflowError(f"MLflow at {self.url} created the experiment {name} and then did not find it.")
        if raw.get("lifecycle_stage") == "deleted":
            raise MlflowError(
                f"The experiment {name} was deleted in MLflow at {self.url}, and its name is still taken. Restore it "
                f"(MLFLOW_TRACKING_URI={self.url} mlflow experiments restore --experiment-id {raw['experiment_id']}) "
                "or choose another --experiment.",
                code="DELETED",
            )
        return replace(self._parse_experiment(raw), created=created)

    def experiments(self) -> list[Experiment]:
        body = {"max_results": EXPERIMENTS_PER_PAGE}
        return [self._parse_experiment(raw) for raw in self._all_items("experiments/search", body, "experiments")]

    def record(self, experiment_id: str, run: NewRun, *, may_exist: bool = False) -> str:
        """Write a run, as in `RunStore.record`. Readers ignore the run until the last request has set its status."""
        tags = wire.checked_tags(run)
        where = wire.where_same_run(run)
        stored_runs = self.search(experiment_id, where=where, include_half_written=True) if may_exist else ()
        existing = wire.classify_existing(run, stored_runs)
        run_id = existing.written_id
        if run_id is None:
            run_id = self._write(experiment_id, run, tags, half_written_id=existing.half_written_id)
        for old_id in run.supersedes:
            if old_id != run_id:
                self._post_if_exists("runs/set-tag", {"run_id": old_id, "key": wire.SUPERSEDED_TAG, "value": "true"})
        for abandoned_id in existing.abandoned_ids:
            self._post_if_exists("runs/delete", {"run_id": abandoned_id})
        return run_id

    def search(
        self,
        experiment_id: str,
        *,
        where: Mapping[str, str],
        limit: int | None = None,
        include_half_written: bool = False,
    ) -> Iterator[StoredRun]:
        matching = self._matching_runs(experiment_id, where, limit, include_half_written=include_half_written)
        return (run for run, _ in matching)

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        for key in texts:
            check_key(key)
        matching = self._matching_runs(experiment_id, where, limit)
        return ((run, from_tags(text_tags, texts)) for run, text_tags in matching)

    def _matching_runs(
        self, experiment_id: str, where: Mapping[str, str], limit: int | None, *, include_half_written: bool = False
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """Return the matching runs, newest first, each with the tags that contain its texts."""
        body = {
            "experiment_ids": [experiment_id],
            "filter": wire.mlflow_filter(where, include_half_written=include_half_written),
            "order_by": ["attributes.start_time DESC"],
            "max_results": RUNS_PER_PAGE if limit is None else min(limit, RUNS_PER_PAGE),
        }
        # With a limit, a further page may not be needed, so none is requested ahead.
        raw_runs = self._all_items("runs/search", body, "runs", read_ahead=limit is None)
        parsed = (self._parse(raw, wire.parse_run) for raw in raw_runs)
        # Filtered again: MLflow's filter cannot express every value, and the only status it excludes is RUNNING.
        matching = (
            (run, text_tags)
            for run, text_tags in parsed
            if (include_half_written or run.status in wire.WRITTEN_STATUSES) and wire.matches(run, where)
        )
        return islice(matching, limit)

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        current = self._current_run(run_id)
        return current.run, from_tags(current.text_tags)

    def update(self, run_id: str, change: RunChange) -> None:
        """Update a recorded run, in one request if MLflow's limits allow it."""
        before = self._current_run(run_id)
        batches = wire.change_batches(change, before)
        for batch in batches:
            self._http.post("runs/log-batch", batch.body(run_id))
        expected_tags = wire.text_tags_after(before.text_tags, batches)
        if any(unneeded_tags(key, expected_tags) for key in change.texts):
            with suppress(MlflowUnavailable, MlflowError):  # readers ignore unneeded tags
                self._delete_unneeded_tags(run_id, change.texts, expected_tags)

    def _delete_unneeded_tags(self, run_id: str, text_keys: Collection[str], expected_tags: Mapping[str, str]) -> None:
        current_tags = self._current_run(run_id).text_tags
        for key in text_keys:
            if tags_of(key, current_tags) == tags_of(key, expected_tags):  # else another writer has changed the text
                for tag in unneeded_tags(key, current_tags):
                    self._post_if_exists("runs/delete-tag", {"run_id": run_id, "key": tag})

    def _current_run(self, run_id: str) -> wire.CurrentRun:
        response = self._http.get("runs/get", {"run_id": run_id})
        return self._parse(response, lambda raw: wire.parse_current_run(raw["run"]))

    def mark_changed(self, experiment_id: str) -> None:
        self.tag_experiment(experiment_id, {})  # sets only a new revision

    def tag_experiment(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        for key, value in {**tags, wire.REVISION_TAG: uuid.uuid4().hex}.items():
            body = {"experiment_id": experiment_id, "key": key, "value": value}
            self._http.post("experiments/set-experiment-tag", body)

    def _experiment_json(self, name: str) -> wire.Json | None:
        try:
            response = self._http.get("experiments/get-by-name", {"experiment_name": name})
        except MlflowError as exc:
            if exc.code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return self._parse(response, lambda raw: dict(raw["experiment"]))

    def _parse_experiment(self, raw: wire.Json) -> Experiment:
        experiment_id, name, tags = self._parse(raw, wire.parse_experiment)
        return Experiment(experiment_id, name, tags, self.experiment_url(experiment_id))

    def _write(self, experiment_id: str, run: NewRun, tags: Mapping[str, str], *, half_written_id: str | None) -> str:
        """Write a new run, or complete the half-written one, and return its id."""
        batches = wire.run_batches(run, tags)
        run_id = half_written_id
        if run_id is None:
            creation, *batches = batches  # the first batch has only tags
            body = {"experiment_id": experiment_id, "start_time": run.start_ms, "tags": creation.tags}
            response = self._http.post("runs/create", body)
            run_id = self._parse(response, lambda raw: str(raw["run"]["info"]["run_id"]))
        try:
            for batch in batches:
                self._http.post("runs/log-batch", batch.body(run_id))
        except MlflowError as exc:
            if exc.status == 400:  # MLflow would reject the batch again, and the run would stay half-written
                with suppress(MlflowUnavailable, MlflowError):
                    self._post_if_exists("runs/delete", {"run_id": run_id})
            raise
        status = "FINISHED" if run.ok else "FAILED"
        self._http.post("runs/update", {"run_id": run_id, "status": status, "end_time": run.end_ms})
        return run_id

    def _all_items(self, path: str, body: wire.Json, key: str, *, read_ahead: bool = False) -> Iterator[wire.Json]:
        """Yield the items of all pages; a page has them in its field `key`.

        With `read_ahead`, the next page is requested before the current one is parsed.
        """
        body = dict(body)  # because `fetch` changes it

        def fetch(token: str | None, on_sent: Callable[[], None] | None = None) -> bytearray:
            """Return an unparsed page, the first one if `token` is None. Calls `on_sent` once the request is sent."""
            while True:
                page_body = {**body, "page_token": token} if token else body
                try:
                    return self._http.post_unparsed(path, page_body, on_sent)
                except TooLarge:
                    # A page token is a position, so the page size may change between pages.
                    if body["max_results"] == 1:
                        raise
                    body["max_results"] //= 2

        content = fetch(None)
        previous_token = None
        while True:
            next_content = None
            if read_ahead and (token := _next_token(content)):
                next_content = _in_background(fetch, token)
            page = self._http.parse(content)
            next_token = page.get("next_page_token")
            yield from self._parse(page.pop(key, []), list)
            if not next_token:
                return
            if next_token == previous_token:
                raise MlflowError(f"MLflow at {self.url} returns the same page repeatedly ({path}).")
            content = next_content.result() if next_content else fetch(next_token)
            previous_token = next_token

    def _parse(self, raw: Any, parse: Callable[[Any], Parsed]) -> Parsed:
        """Return `parse(raw)`; raises MlflowError if the response does not have the expected form."""
        try:
            return parse(raw)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise MlflowError(
                f"MLflow at {self.url} returned an unexpected response ({type(exc).__name__}: {exc}). "
                "tipbench supports MLflow 2 and 3; check for a proxy in between.",
                code="UNEXPECTED",
            ) from exc

    def _post_if_exists(self, path: str, body: wire.Json) -> None:
        """Send a request about a run or tag; does nothing if it does not exist or is deleted."""
        try:
            self._http.post(path, body)
        except MlflowError as exc:
            # For a deleted run, the code is that of any invalid parameter, so the message is checked.
            if exc.code != "RESOURCE_DOES_NOT_EXIST" and "Current state is deleted" not in str(exc):
                raise


def _next_token(page: bytearray) -> str | None:
    """Return the token of the next page, which is at the end of an unparsed page; None if there is none."""
    match = _TOKEN_AT_END.search(page, max(0, len(page) - _MAX_TOKEN_BYTES))
    return match[1].decode() if match else None


def _in_background(fetch: Callable[[str, Callable[[], None]], bytearray], token: str) -> Future[bytearray]:
    """Call `fetch` in a thread, and return its future once the request is sent.

    The thread is a daemon, unlike those of a pool, so that an interrupted process does not wait for the response.
    """
    future: Future[bytearray] = Future()
    sent = threading.Event()

    def run() -> None:
        try:
            future.set_result(fetch(token, sent.set))
        except BaseException as exc:  # noqa: BLE001 - `Future.result` raises it in the calling thread
            future.set_exception(exc)
        finally:
            sent.set()

    threading.Thread(target=run, name="mlflow-page", daemon=True).start()
    sent.wait()  # else the caller's parsing, which holds the GIL, would delay the request
    return future


@dataclass(frozen=True)
class MlflowServer:
    """Address of an MLflow tracking server."""

    url: str  # may contain a login; never print it
    identity: str  # part of the names of journals and locks; that of the local server does not depend on its port
    description: str  # for messages, as in "local MLflow at http://127.0.0.1:5123 (started by tipbench)"


@dataclass(frozen=True)
class MlflowConnection:
    """An open connection to MLflow."""

    store: RunStore
    identity: str  # of its MlflowServer
    description: str  # for messages, as in "http://localhost:5000 (found on the usual port)"
    url: str = ""  # without a login
    close: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def find_mlflow(
    url: str | None,
    home: Path,
    *,
    start: bool,
    report: Callable[[str], None],
    usual_urls: tuple[str, ...] = USUAL_URLS,
) -> MlflowServer:
    """Return the server at `url`. Without `url`, return one that responds at a usual URL, else the local one.

    If the local one is not running, `start` decides whether it is started or LocalMlflowError is raised.
    """
    local = LocalMlflow(home)
    local_identity = f"local:{home.resolve()}"
    if url:
        with closing(MlflowHttp(url, timeout_s=PROBE_S)) as http:
            status = local.status()
            is_local = status.url is not None and canonical_url(status.url) == canonical_url(http.url)
            if is_local and not status.running:
                is_local = not http.is_mlflow()  # the local one is stopped, so an MLflow that responds is another one
            if is_local:
                return MlflowServer(url, local_identity, f"local MLflow at {http.url}")
            return MlflowServer(url, canonical_url(http.url), f"MLflow at {http.url}")
    deadline = time.monotonic() + PROBE_S
    for usual_url in usual_urls:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        with closing(MlflowHttp(usual_url, timeout_s=remaining_s)) as http:
            if http.is_mlflow():
                description = f"MLflow at {usual_url} (found on the usual port)"
                return MlflowServer(usual_url, canonical_url(usual_url), description)
    status = local.status()
    if status.healthy and status.url is not None:
        return MlflowServer(status.url, local_identity, f"local MLflow at {status.url}")
    if not start:
        usual_place = usual_urls[0] if usual_urls else "its usual port"
        raise LocalMlflowError(
            f"No MLflow responds on {usual_place}, and the local one is not running. "
            "Start it with `tipbench mlflow up`, or give --mlflow-url."
        )
    local_url = local.up(report=report)
    return MlflowServer(local_url, local_identity, f"local MLflow at {local_url} (started by tipbench)")


def default_servers(home: Path) -> tuple[str, ...]:
    """Return the URLs of the servers that `find_mlflow` may choose if it gets no URL."""
    local_url = LocalMlflow(home).status().url
    return (*USUAL_URLS, local_url) if local_url else USUAL_URLS
