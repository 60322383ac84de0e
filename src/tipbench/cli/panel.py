"""`tipbench panel`: the admin API and the web panel."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.console import say
from tipbench.cli.options import MlflowOption
from tipbench.errors import TipbenchError, UsageError
from tipbench.settings import load_settings

if TYPE_CHECKING:
    from tipbench.web.deps import Panel
    from tipbench.web.options import PanelOptions

_FIRST = "first admin"


def panel(
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", help="The address to listen on. [default: 127.0.0.1]"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, metavar="NUMBER", help="The port; 0 for any. [default: 5180]"),
    ] = None,
    mlflow_url: MlflowOption = None,
) -> None:
    """Serve the admin API and the web panel.

    It listens on this machine only, unless told otherwise. Every page and endpoint needs a token: TIPBENCH_ADMIN_TOKEN,
    else one that is made on the first start and printed once. `tipbench token` makes others. Ctrl-C ends it.

    Examples:

      tipbench panel

      tipbench panel --port 8080 --mlflow-url http://mlflow.example:5000
    """
    _check_installed()
    from tipbench.cli.session import writable_home
    from tipbench.web.admin import create_app
    from tipbench.web.options import panel_options
    from tipbench.web.server import address_of, listen, serve

    settings = load_settings()
    if mlflow_url is not None:
        settings = replace(settings, values={**settings.values, "mlflow_url": mlflow_url})
    writable_home(settings)
    options = panel_options(settings, host=host, port=port)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.closing(listen(options)) as sock:
        app = create_app(settings, options)
        _first_token(app.state.panel)
        _warn(options)
        _find_mlflow(app.state.panel)
        serve(app, options, sock, started=lambda: say(f"panel: {address_of(sock, options)} (Ctrl-C ends it)"))


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "jinja2") if find_spec(name) is None]
    if missing:
        raise UsageError(f"The panel needs {', '.join(missing)}. Install them with: pip install 'tipbench[panel]'")


def _first_token(panel: Panel) -> None:
    """Made once, printed once: it is kept as a hash only."""
    from tipbench.web.tokens import Role

    tokens = panel.guard.tokens
    if panel.options.admin_token is not None:
        say("admin token: as TIPBENCH_ADMIN_TOKEN says")
    elif tokens.has_admin():
        say("admin token: as printed when it was made; `tipbench token create --role admin --name NAME` makes another")
    else:
        _, secret = tokens.create(Role.ADMIN, _FIRST, life_s=None)
        say("no admin token yet: this is one. Keep it, it is not shown again:")
        print(secret, flush=True)


def _warn(options: PanelOptions) -> None:
    if options.on_loopback:
        return
    if not options.proxies:
        say(
            f"warning: the panel listens on {options.host} without TLS: tokens and cookies can be read on the way. Put "
            "a proxy with TLS in front and name it in TIPBENCH_PANEL_PROXIES, or keep --host 127.0.0.1"
        )
    if not options.hosts.names:
        say(
            "warning: it answers to the names of this machine itself only; TIPBENCH_PANEL_HOSTS adds the names and "
            "addresses that others use"
        )


def _find_mlflow(panel: Panel) -> None:
    """Found, and started where it is ours, before the first page waits for it."""
    from tipbench.errors import NotEnoughData

    try:
        say(f"MLflow: {panel.tracker.open().place}")
    except NotEnoughData:
        say("MLflow: none yet; the first run starts one")
    except TipbenchError as exc:
        say(f"warning: {exc}")
