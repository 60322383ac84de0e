"""The servers of the serving benchmark, one per process: `python benchmarks/policy_servers.py NAME HOME`.

`tipbench` is the policy server. `smallest` does the same log write and nothing else: it parses the body, replaces the
user id by its keyed hash, appends the request with a prepared decision to the same event log, waits for the commit and
sends a prepared response. Both print their port and a token, then serve until they are stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic_core import from_json, to_json

from decisions import request_body
from tipbench.serve.event_log import EventLog, Keys, load_keys
from tipbench.serve.recommender import Recommender
from tipbench.serve.service import PolicyService
from tipbench.web.auth import POLICY_SERVER_REFUSED_ROLES, Role, TokenGuard, TokenStore
from tipbench.web.database import panel_database
from tipbench.web.login_limiter import LoginLimiter
from tipbench.web.server import listen, run_server
from tipbench.web.serving import PolicyServer, tune_garbage_collector

CANDIDATES = 20


def main(name: str, home: Path) -> None:
    """Print the port and a token, then serve until stopped."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(listen("127.0.0.1", 0)))
        tokens = TokenStore(stack.enter_context(contextlib.closing(panel_database(home))))
        _, token = tokens.create(Role.APP, "bench", life_s=None)
        app: Any
        if name == "tipbench":
            service = stack.enter_context(contextlib.closing(PolicyService(home)))
            recommender = stack.enter_context(contextlib.closing(Recommender(service)))
            tune_garbage_collector()
            app = PolicyServer(
                service, recommender, TokenGuard(tokens, LoginLimiter(), None, POLICY_SERVER_REFUSED_ROLES)
            )
        else:
            log = EventLog(home, lock=threading.RLock(), on_failure=lambda: None, capacity=8192)
            stack.enter_context(contextlib.closing(log))
            app = smallest(log, load_keys(home), *sample(home / "x"))
        run_server(app, sock, before_start=lambda: print(sock.getsockname()[1], token, flush=True))


def sample(home: Path) -> tuple[dict[str, Any], bytes]:
    """The log entry and the response of one real decision, for the smallest application to repeat."""
    home.mkdir(parents=True)
    with contextlib.closing(PolicyService(home)) as service:
        answer = service.score("egreedy/v1", request_body(CANDIDATES, 1))
        service.log.wait()
        body = answer.entry.body if answer.entry else {}
        return body, to_json(answer.body)


def smallest(log: EventLog, keys: Keys, decision: dict[str, Any], answer: bytes) -> Callable[..., Awaitable[None]]:
    """The smallest application with the same log write."""
    batch: list[tuple[Future[None], asyncio.Future[None]]] = []
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        request = from_json((await receive())["body"])
        user = keys.hash_user_id(request.pop("user_id"))
        entry = {**decision, "request": request}
        _, committed = log.append("score", user, time.time(), entry, event=uuid4().hex, policy="egreedy/v1")
        if not batch or batch[0][0] is not committed:
            batch[:] = [(committed, asyncio.wrap_future(committed))]
        await batch[0][1]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
