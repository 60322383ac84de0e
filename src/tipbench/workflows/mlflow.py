"""Opens MLflow: the configured server, one on the usual port, or the local one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

from tipbench.errors import LocalMlflowError, NotEnoughData, UsageError
from tipbench.http import canonical_url, is_http_url
from tipbench.record.local_mlflow import LocalMlflow
from tipbench.record.mlflow import MlflowConnection, MlflowServer, MlflowStore, find_mlflow
from tipbench.record.store import Experiment


class MlflowLogin(TypedDict, total=False):
    """Credentials and Host header of an MLflow server, as arguments of `MlflowStore`."""

    username: str | None
    password: str | None
    token: str | None
    host_header: str | None


@dataclass(frozen=True)
class MlflowAccess:
    """The configured server with its login, and the home folder of the local server."""

    home: Path
    url: str | None = None  # of the configured server
    username: str | None = None
    password: str | None = None
    token: str | None = None
    public_url: str | None = None  # of the configured server, for browsers
    host_header: str | None = None

    def open(self, url: str | None = None, *, report: Callable[[str], None]) -> MlflowConnection:
        """Open the server that `find` returns, to read from it."""
        return self.connect(self.find(url, report=report))

    def open_or_start(self, url: str | None = None, *, report: Callable[[str], None]) -> MlflowConnection:
        """Open the server to record to. Like `open`, but starts the local server also if it has no data."""
        return self.connect(find_mlflow(url or self.url, self.home, start=True, report=report))

    def find(self, url: str | None = None, *, report: Callable[[str], None]) -> MlflowServer:
        """Return the server to read from: `url`, else the configured one, one on the usual port, or the local one.

        Starts the local server only if it has data. Raises NotEnoughData if there is no server and no data.
        """
        has_data = LocalMlflow(self.home).has_data()
        try:
            return find_mlflow(url or self.url, self.home, start=has_data, report=report)
        except LocalMlflowError as exc:
            if has_data:
                raise
            raise NotEnoughData(
                "Nothing is recorded yet: no MLflow responds on localhost:5000, and the local one has no data. "
                "`tipbench demo`, `tipbench collect` or a run in the panel creates the first experiment; "
                "--mlflow-url or MLFLOW_TRACKING_URI selects another server."
            ) from exc

    def connect(self, server: MlflowServer) -> MlflowConnection:
        """Open a connection to the server."""
        store = MlflowStore(server.url, public_url=self.public_url_of(server.url), **self.login(server.url))
        return MlflowConnection(
            store,
            identity=server.identity,
            description=server.description.removeprefix("MLflow at "),  # used as in "MLflow: http://localhost:5000"
            url=store.url,
            close=store.close,
        )

    def login(self, url: str) -> MlflowLogin:
        """Return the credentials and Host header for the configured server; empty if `url` is another server.

        Users of the API and of Airflow may name another server, which must not receive the credentials. A login inside
        `url` is always sent. Without a configured server, credentials are not sent, and the Host header, which is no
        secret, is sent to any `url`. Raises UsageError if the Host header is invalid.
        """
        host = self.host_header
        host_url = f"http://{host}"
        if host and not (is_http_url(host_url) and urlsplit(host_url).netloc == host):
            raise UsageError(
                f"mlflow_host_header takes a host name, with or without a port, as mlflow.lan:5000 (got {host[:60]!r})."
            )
        if not self.url:
            return {"host_header": host}
        if not self._is_configured_server(url):
            return {}
        return {"username": self.username, "password": self.password, "token": self.token, "host_header": host}

    def public_url_of(self, url: str) -> str | None:
        """Return the public URL of the server at `url`, or None. Raises UsageError if the public URL is invalid."""
        public = self.public_url
        if not public or not self._is_configured_server(url):
            return None
        if "@" in public or not is_http_url(public):
            _, _, without_login = public.rpartition("@")
            raise UsageError(
                "mlflow_public_url takes a web address without a login, such as https://mlflow.example "
                f"(got {without_login[:80]!r})."
            )
        return public

    def _is_configured_server(self, url: str) -> bool:
        configured = self.url or ""
        return is_http_url(configured) and is_http_url(url) and canonical_url(configured) == canonical_url(url)


def existing_experiment(store: MlflowStore, name: str) -> Experiment:
    """Return the experiment with this name. Raises NotEnoughData if it does not exist."""
    experiment = store.experiment(name)
    if experiment is None:
        raise NotEnoughData(
            f"Unknown experiment {name} in MLflow at {store.url}. `tipbench experiments` lists the recorded ones; "
            "`tipbench collect` creates one."
        )
    return experiment
