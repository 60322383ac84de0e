"""`tipbench panel`: serve the admin API and the web panel."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.console import print_message
from tipbench.cli.options import MlflowOption
from tipbench.errors import NotEnoughData, TipbenchError, UsageError
from tipbench.files import writable_home
from tipbench.settings import load_settings

if TYPE_CHECKING:
    from tipbench.web.deps import Panel


def panel(
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="NUMBER", help="Port to listen on; 0 for any free one. [default: 5180]"),
    ] = None,
    mlflow_url: MlflowOption = None,
) -> None:
    """Serve the admin API and the web panel.

    Listens on localhost by default. Every page and endpoint requires a token: TIPBENCH_ADMIN_TOKEN, or one that is
    created on the first start and printed once. `tipbench token` creates others. Press Ctrl-C to stop.

    Examples:

      tipbench panel

      tipbench panel --port 8080 --mlflow-url http://mlflow.example:5000
    """
    check_installed("The panel", ("fastapi", "uvicorn", "jinja2"), extra="panel")
    from tipbench.web.app import create_app
    from tipbench.web.options import panel_options
    from tipbench.web.panel.pages import prepare_board_page
    from tipbench.web.server import listen, run_server, server_url

    settings = load_settings()
    if mlflow_url is not None:
        settings = replace(settings, values={**settings.values, "mlflow_url": mlflow_url})
    writable_home(settings.home)  # fails early, with a UsageError
    options = panel_options(settings, host=host, port=port)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.closing(listen(options.host, options.port)) as sock:
        app = create_app(settings, options)
        _ensure_admin_token(app.state.panel)
        if not options.on_loopback and not options.proxies:
            print_message(
                f"warning: the panel listens on {options.host} without TLS: tokens and cookies can be intercepted. Put "
                "a TLS proxy in front and set TIPBENCH_PANEL_PROXIES to its address, or use --host 127.0.0.1"
            )
        if not options.on_loopback and not options.hosts.names:
            print_message(
                "warning: the panel accepts localhost names only; add the names and addresses that others use to "
                "TIPBENCH_PANEL_HOSTS"
            )
        try:  # MLflow is opened now (a local one with data is started), so that the first page does not wait for it
            print_message(f"MLflow: {app.state.panel.mlflow.open().url}")
        except NotEnoughData:
            print_message("MLflow: none yet; the first run starts one")
        except TipbenchError as exc:
            print_message(f"warning: {exc}")
        threading.Thread(target=prepare_board_page).start()  # makes the first board page fast
        run_server(
            app,
            sock,
            before_start=lambda: print_message(f"panel: {server_url(sock, options.host)} (press Ctrl-C to stop)"),
            proxies=options.proxies,
        )


def check_installed(program: str, packages: Sequence[str], extra: str) -> None:
    """Raise UsageError if one of the packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UsageError(f"{program} needs {', '.join(missing)}. Install with: pip install 'tipbench[{extra}]'")


def _ensure_admin_token(panel: Panel) -> None:
    """Create and print an admin token if there is none. Only its hash is stored."""
    from tipbench.web.auth import Role

    tokens = panel.authenticator.tokens
    if panel.options.admin_token is not None:
        print_message("admin token: from TIPBENCH_ADMIN_TOKEN")
    elif tokens.has_admin():
        print_message(
            "admin token: printed when it was created; `tipbench token create --role admin --name NAME` creates another"
        )
    else:
        _, secret = tokens.create(Role.ADMIN, "first admin", life_s=None)
        print_message("admin token created. Store it; it is not shown again:")
        print(secret, flush=True)
