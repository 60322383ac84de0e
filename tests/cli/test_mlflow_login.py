"""The configured MLflow login is sent to the configured server and to no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tipbench.cli.options import open_or_start_mlflow, open_store
from tipbench.errors import TipbenchError
from tipbench.settings import Settings, load_settings
from tipbench.web.deps import PanelMlflow


@contextmanager
def recording_server() -> Iterator[tuple[str, list[str | None]]]:
    """Yield the address of a server that answers 404, and the Authorization headers that it received."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_error(404)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def read_by_command(settings: Settings, url: str) -> None:
    with open_store(settings, url) as store:
        store.experiments()


def write_by_command(settings: Settings, url: str) -> None:
    open_or_start_mlflow(settings, url).store.experiments()


def read_by_panel(settings: Settings, url: str) -> None:
    with PanelMlflow(settings).connected(url) as opened:
        opened.store.experiments()


@pytest.mark.parametrize("use", [read_by_command, write_by_command, read_by_panel])
@pytest.mark.parametrize("login", [("TOKEN",), ("USERNAME", "PASSWORD")])
def test_the_login_goes_to_the_configured_server_only(
    tmp_path: Path, use: Callable[[Settings, str], None], login: tuple[str, ...]
) -> None:
    with recording_server() as (own, own_seen), recording_server() as (other, other_seen):
        secrets = {f"MLFLOW_TRACKING_{name}": "secret" for name in login}
        settings = load_settings({"TIPBENCH_HOME": str(tmp_path), "MLFLOW_TRACKING_URI": own, **secrets}, tmp_path)
        for url in (own, other):
            with suppress(TipbenchError):
                use(settings, url)
    assert any(own_seen), "the configured server gets it"
    assert other_seen, "the other server received a request"
    assert not any(other_seen)
