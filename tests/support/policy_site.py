"""The policy server on a real port, in this process or as a subprocess."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.command import tipbench
from support.panel_site import serve_app
from tipbench.serve.catalogue import Catalogue
from tipbench.serve.recommender import Recommender, ShadowScorer, score_shadow
from tipbench.serve.request import RewardRequest, ScoreRequest
from tipbench.serve.service import PolicyService
from tipbench.web.auth import POLICY_SERVER_REFUSED_ROLES, Role, TokenGuard, TokenStore
from tipbench.web.database import panel_database
from tipbench.web.login_limiter import LoginLimiter
from tipbench.web.serving import PolicyServer

DEADLINE_S = 120.0  # for a response; only a server that hangs takes as long
TIPS = [{"tip_id": "t9", "category": "focus", "composite": 12.5}, {"tip_id": "t4", "task": {"is_overdue": True}}]


@dataclass
class OffsetClock:
    """A real clock that tests can set ahead."""

    ahead: float = 0.0
    now: Callable[[], float] = field(default=time.time)

    def __call__(self) -> float:
        return self.now() + self.ahead


@dataclass(frozen=True)
class PolicySite:
    """A running server; requests use an app's token unless `as_` names another role or token."""

    url: str
    app: PolicyServer
    service: PolicyService
    recommender: Recommender
    tokens: TokenStore
    clock: OffsetClock  # of the service: rewards become late by it
    token_clock: OffsetClock
    client: httpx.Client
    secrets: dict[str, str]

    def post(self, path: str, body: Any = None, *, as_: str | None = "app", **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.client.post(path, headers=self.headers(as_), **options)

    def get(self, path: str, *, as_: str | None = "app", **options: Any) -> httpx.Response:
        return self.client.get(path, headers=self.headers(as_), **options)

    def score(self, policy: str, user: str, **more: Any) -> dict[str, Any]:
        response = self.post(f"/score/{policy}", {"user_id": user, "candidates": TIPS, **more})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def wait_for_shadows(self) -> None:
        """Wait until the shadows have scored all responses so far."""
        self.get("/healthz", as_=None)  # a response is queued for the shadows after it is sent, before the next one
        self.recommender.wait()

    def error(self, response: httpx.Response) -> tuple[int, str, str | None]:
        """The status, code and path of an error response, after checking its form."""
        error = response.json()["error"]
        assert error.keys() == {"code", "message", "path"}
        assert error["message"]
        return response.status_code, error["code"], error["path"]

    def headers(self, as_: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets.get(as_, as_)}"} if as_ is not None else {}


@contextlib.contextmanager
def policy_site(
    home: Path,
    *,
    scorer: ShadowScorer = score_shadow,
    queue: int = 8192,
    shadow_queue: int = 1000,
    catalogue: Catalogue | None = None,
) -> Iterator[PolicySite]:
    """Serve policies from this home until the block ends."""
    clock, token_clock = OffsetClock(), OffsetClock(now=time.monotonic)
    with contextlib.ExitStack() as stack:
        tokens = TokenStore(stack.enter_context(contextlib.closing(panel_database(home))))
        secrets = {role.value: tokens.create(role, "x", life_s=None)[1] for role in Role}
        service = stack.enter_context(contextlib.closing(PolicyService(home, clock=clock, queue_capacity=queue)))
        recommender = stack.enter_context(
            contextlib.closing(Recommender(service, catalogue=catalogue, queue_capacity=shadow_queue, scorer=scorer))
        )
        guard = TokenGuard(tokens, LoginLimiter(), None, POLICY_SERVER_REFUSED_ROLES)
        texts = catalogue.texts if catalogue else {}
        app = PolicyServer(service, recommender, guard, texts=texts, clock=token_clock)
        url = stack.enter_context(serve_app(app))
        client = stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=DEADLINE_S))
        yield PolicySite(url, app, service, recommender, tokens, clock, token_clock, client, secrets)


@contextlib.contextmanager
def serve_process(home: Path, *options: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """Run `tipbench serve` on a free port; yields a client with an app's token, and the process."""
    token = tipbench("token", "create", "--role", "app", "--name", "test", home=home).stdout.strip()
    process = subprocess.Popen(
        [sys.executable, "-m", "tipbench", "serve", "--port", "0", *options],
        env={**os.environ, "TIPBENCH_HOME": str(home)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://127[^ ]+", line)))
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=DEADLINE_S) as client:
            yield client, process
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class ServerChooser:
    """Lets a policy server decide for simulated users, as a `Chooser` of `support.simulated_requests`.

    `path` is that of a policy, or empty for the active policy.
    """

    client: httpx.Client
    path: str = ""

    def score(self, request: ScoreRequest) -> str:
        return str(self._post(f"/score/{self.path}" if self.path else "/recommend", request)["chosen"])

    def reward(self, request: RewardRequest) -> None:
        assert self._post(f"/reward/{self.path}".rstrip("/"), request)["applied"] is True

    def _post(self, path: str, request: Any) -> Any:
        response = self.client.post(path, json=request)
        assert response.status_code == 200, response.text
        return response.json()
