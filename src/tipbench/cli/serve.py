"""`tipbench serve`: the policy server."""

from __future__ import annotations

import contextlib
import getpass
import logging
from pathlib import Path
from typing import Annotated

import typer

from tipbench.cli.console import print_message
from tipbench.cli.options import PriorOption, StateOption
from tipbench.cli.panel import check_installed
from tipbench.errors import UsageError
from tipbench.files import writable_home
from tipbench.settings import load_settings


def serve(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="NUMBER", help="The port; 0 for any.")] = 5181,
    state: StateOption = "sqlite",
    active: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Switch to this policy without a promotion; needs --unchecked."),
    ] = None,
    unchecked: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="The reason for --active without a passed `promote check`; logged."),
    ] = None,
    shadow: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Enable a shadow, such as egreedy-v2-shadow; repeatable.")
    ] = None,
    prior: PriorOption = None,
    catalogue: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of `tipbench catalogue build`: the tips for requests without candidates."
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log every request, without its query string.")
    ] = False,
) -> None:
    """Serve policies that pick tips and learn from rewards.

    Listens on localhost by default. Every request needs a token from `tipbench token create --role app`. State and
    the event log are stored in TIPBENCH_HOME/serve; only one server at a time can use them. Press Ctrl-C to stop:
    queued events are written first.

    Examples:

      tipbench serve --catalogue tips.toml --shadow egreedy-v2-shadow

      tipbench serve --active egreedy/v3 --unchecked "first start, no users yet"
    """
    check_installed("The server", ("fastapi", "msgspec", "uvicorn"), extra="serve")
    from tipbench.serve.catalogue import load_catalogue
    from tipbench.serve.policy import check_policy
    from tipbench.serve.prior import load_prior
    from tipbench.serve.recommender import Recommender
    from tipbench.serve.service import PolicyService
    from tipbench.web.auth import POLICY_SERVER_REFUSED_ROLES, TokenGuard, TokenStore
    from tipbench.web.database import panel_database
    from tipbench.web.login_limiter import LoginLimiter
    from tipbench.web.options import panel_options
    from tipbench.web.server import listen, run_server, server_url
    from tipbench.web.serving import PolicyServer, tune_garbage_collector

    if active is not None:
        check_policy(active)
    elif unchecked is not None:
        raise UsageError(
            "--unchecked needs --active, the policy to switch to. Add --active POLICY, or leave --unchecked out."
        )
    settings = load_settings()
    home = writable_home(settings.home)
    admin_token = panel_options(settings).admin_token  # the panel's admin token is valid here too
    tip_catalogue = load_catalogue(catalogue) if catalogue is not None else None
    priors = [load_prior(path) for path in prior or []]
    logging.basicConfig(
        level=logging.INFO if access_log else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(listen(host, port, "policy server")))
        tokens = TokenStore(stack.enter_context(contextlib.closing(panel_database(home))))
        service = stack.enter_context(contextlib.closing(PolicyService(home, store_kind=state, priors=priors)))
        recommender = stack.enter_context(contextlib.closing(Recommender(service, catalogue=tip_catalogue)))
        for name in shadow or ():
            recommender.switches.set_shadow(name, enabled=True)
        current = recommender.switches.active()
        if active is not None and active != current:
            if unchecked is None:
                raise UsageError(
                    f"The active policy is {current}; `tipbench promote apply` changes it after a passed check. To "
                    f"switch to {active} without one, give --unchecked REASON."
                )
            recommender.switches.switch_unchecked(active, user=getpass.getuser(), reason=unchecked)
        for warning in recommender.policies()["warnings"]:
            print_message(f"warning: {warning}")
        now = tokens.clock()
        accepted_tokens = [token for token in tokens.all() if token.role not in POLICY_SERVER_REFUSED_ROLES]
        has_token = any(token.state(now) == "active" for token in accepted_tokens)
        if not has_token and admin_token is None:
            print_message("there is no token yet: `tipbench token create --role app --name NAME` creates one")
        guard = TokenGuard(tokens, LoginLimiter(), admin_token, POLICY_SERVER_REFUSED_ROLES)
        tune_garbage_collector()
        address, policy = server_url(sock, host), recommender.switches.active()
        run_server(
            PolicyServer(service, recommender, guard, texts=tip_catalogue.texts if tip_catalogue else {}),
            sock,
            name="policy server",
            before_start=lambda: print_message(f"policy server: {address} (active: {policy}; press Ctrl-C to stop)"),
        )
    print_message("policy server stopped; all data is written")
