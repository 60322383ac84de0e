"""Opens MLflow for commands, panel and DAG tasks: the configured server, a running one, or a local one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

from tipbench.errors import LocalServerError, NotEnoughData, UsageError
from tipbench.http import canonical_url, is_http_url
from tipbench.record.collect import TrackingStore
from tipbench.record.local_mlflow import LocalMlflow
from tipbench.record.mlflow import MlflowStore, Tracking, find_tracking
from tipbench.record.store import Experiment


class MlflowLogin(TypedDict, total=False):
    """Credentials and Host header of an MLflow server, as arguments of `MlflowStore`."""

    username: str | None
    password: str | None
    token: str | None
    host_header: str | None


@dataclass(frozen=True)
class MlflowAccess:
    """The configured MLflow server with its login and its address for browsers; the home folder of the local one."""

    home: Path
    url: str | None = None
    username: str | None = None
    password: str | None = None
    token: str | None = None
    public_url: str | None = None
    host_header: str | None = None

    def find(self, url: str | None = None, *, report: Callable[[str], None]) -> Tracking:
        """Return the server to read from, `url` or the configured one; starts the local one only if it has data.

        Raises NotEnoughData if there is no server and nothing was ever recorded.
        """
        has_data = LocalMlflow(self.home).has_data()
        try:
            return find_tracking(url or self.url, self.home, start=has_data, report=report)
        except LocalServerError as exc:
            if has_data:
                raise
            raise NotEnoughData(
                "Nothing is recorded yet: no MLflow responds on localhost:5000, and the local one has no data. "
                "`tipbench demo`, `tipbench collect` or a run in the panel creates the first experiment; "
                "--mlflow-url or MLFLOW_TRACKING_URI selects another server."
            ) from exc

    def connect(self, tracking: Tracking) -> TrackingStore:
        """Return the store of a server."""
        store = MlflowStore(tracking.url, pages_url=self.pages_of(tracking.url), **self.login(tracking.url))
        return TrackingStore(store, tracking.identity, tracking.how.removeprefix("MLflow at "), store.url, store.close)

    def login(self, url: str) -> MlflowLogin:
        """Return the credentials and Host header for the MLflow at `url`: empty unless it is the configured server.

        Requests over HTTP and Airflow runs may name another server, which must not receive the credentials. A user name
        and password inside `url` are always sent. Without a configured server, the Host header is sent to any server.
        """
        host = self.host_header
        if host and not (is_http_url(f"http://{host}") and urlsplit(f"http://{host}").netloc == host):
            raise UsageError(
                f"mlflow_host_header takes a host name, with or without a port, as mlflow.lan:5000 (got {host[:60]!r})."
            )
        if not self.url:
            return {"host_header": host}
        if not self._is_configured(url):
            return {}
        return {"username": self.username, "password": self.password, "token": self.token, "host_header": host}

    def pages_of(self, url: str) -> str | None:
        """Return the address of a server for browsers; None if it is the same. Raises UsageError if it is invalid."""
        public = self.public_url
        if not public or not self._is_configured(url):
            return None
        if "@" in public or not is_http_url(public):
            raise UsageError(
                "mlflow_public_url takes a web address without a login, such as https://mlflow.example "
                f"(got {public.rpartition('@')[2][:80]!r})."
            )
        return public

    def _is_configured(self, url: str) -> bool:
        own = self.url or ""
        return is_http_url(own) and is_http_url(url) and canonical_url(own) == canonical_url(url)

    def open(self, url: str | None = None, *, report: Callable[[str], None]) -> TrackingStore:
        """Open the server to read from; see `find`."""
        return self.connect(self.find(url, report=report))

    def open_or_start(self, url: str | None = None, *, report: Callable[[str], None]) -> TrackingStore:
        """Open the server to record to, `url` if given; starts the local one if no server is found."""
        return self.connect(find_tracking(url, self.home, start=True, report=report))


def existing_experiment(store: MlflowStore, name: str) -> Experiment:
    """Return the experiment. Raises NotEnoughData if it does not exist."""
    experiment = store.experiment(name)
    if experiment is None:
        raise NotEnoughData(
            f"Unknown experiment {name} in MLflow at {store.url}. `tipbench experiments` lists the recorded ones; "
            "`tipbench collect` creates one."
        )
    return experiment
