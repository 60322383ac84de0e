"""The policy server on a real port of this machine, in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.panel_site import listening
from tipbench.serve.catalogue import Catalogue
from tipbench.serve.recommender import Recommender, ShadowScorer, score_shadow
from tipbench.serve.service import PolicyService
from tipbench.web.auth import POLICY_SERVER_REFUSES, Role, TokenGuard, TokenStore, panel_database
from tipbench.web.security import LoginLimiter
from tipbench.web.serving import PolicyServer

TIPS = [{"tip_id": "t9", "category": "focus", "composite": 12.5}, {"tip_id": "t4", "task": {"is_overdue": True}}]


@dataclass
class Clock:
    """Time that tests can move."""

    ahead: float = 0.0
    now: Callable[[], float] = field(default=time.time)

    def __call__(self) -> float:
        return self.now() + self.ahead


@dataclass(frozen=True)
class PolicySite:
    """A server that answers; requests are an app's unless another token is given."""

    url: str
    app: PolicyServer
    service: PolicyService
    recommender: Recommender
    tokens: TokenStore
    clock: Clock  # of the service: rewards become late by it
    token_clock: Clock
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

    def error(self, response: httpx.Response) -> tuple[int, str, str | None]:
        """Return status, code and path of an error, which must have the one shape."""
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
    clock, token_clock = Clock(), Clock(now=time.monotonic)
    with contextlib.ExitStack() as stack:
        tokens = TokenStore(stack.enter_context(contextlib.closing(panel_database(home))))
        secrets = {role.value: tokens.create(role, "x", life_s=None)[1] for role in Role}
        service = stack.enter_context(contextlib.closing(PolicyService(home, clock=clock, queue=queue)))
        recommender = stack.enter_context(
            contextlib.closing(Recommender(service, catalogue=catalogue, queue_size=shadow_queue, scorer=scorer))
        )
        guard = TokenGuard(tokens, LoginLimiter(), None, POLICY_SERVER_REFUSES)
        texts = catalogue.texts if catalogue else {}
        app = PolicyServer(service, recommender, guard, texts=texts, clock=token_clock)
        url = stack.enter_context(listening(app))
        client = stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=30))
        yield PolicySite(url, app, service, recommender, tokens, clock, token_clock, client, secrets)
