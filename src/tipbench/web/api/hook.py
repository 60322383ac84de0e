"""The webhook over HTTP: how it fares, what it has delivered, and a test. Its address is the operator's to set."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tipbench.plan.config import check_experiment_name
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin
from tipbench.web.errors import Invalid, WebError, checked
from tipbench.web.forms import JSON, read_json
from tipbench.web.hook import Hook
from tipbench.web.hook_store import Delivery
from tipbench.web.paging import LIMIT, Limit, Next, Place, page_of
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON, refusals

router = APIRouter(prefix="/api/bench/hook", tags=["judge"], dependencies=[ADMINS_ONLY], responses=COMMON)


class HookConflict(WebError):
    """There is no webhook, or it is being tested."""

    status, code = 409, "conflict"


class TestWish(BaseModel):
    """What the test names."""

    model_config = ConfigDict(extra="forbid")

    experiment: str | None = Field(None, max_length=200, description="Its links are in the message then.")


class AttemptShape(BaseModel):
    """One try of a delivery."""

    model_config = ConfigDict(extra="allow")

    number: int
    time: str
    took_s: float
    status: int | None = Field(description="What the receiver answered; null when nothing came.")
    reason: str | None = Field(description="Why it was not taken.", examples=["answered 503"])


class DeliveryShape(BaseModel):
    """A message to the receiver, with every try."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(description="The same for every try.", examples=["0f6a2b9c4d1e4f508192a3b4c5d6e7f8"])
    event: Literal["cells.pending", "test"]
    experiment: str | None
    state: Literal["queued", "delivered", "failed", "replaced"] = Field(
        description="replaced: a newer one of the same experiment says all that it would have said."
    )
    created: str
    next_try: str | None
    attempts: list[AttemptShape]
    payload: dict[str, Any] = Field(description="What is sent.", examples=[{"event": "cells.pending", "pending": 40}])


class DeliveryList(BaseModel):
    """Deliveries, newest first."""

    items: list[DeliveryShape]
    next: str | None = Field(description="Pass it as `next` for the page after this one; null at the end.")


class HookShape(BaseModel):
    """How the webhook fares."""

    model_config = ConfigDict(extra="allow")

    configured: bool
    url: str | None = Field(description="Its host; the rest may be a secret.", examples=["https://judge.example.org/…"])
    hosts: list[str] = Field(description="Hosts it may lead to, beside this machine.")
    watch_s: float | None
    watching: bool = Field(description="Whether this panel looks and sends; of several on one home one does.")
    looked: str | None = Field(description="When it last looked for pending cells.")
    problem: str | None = Field(description="Why it could not look, the last time it tried.")
    queued: int = Field(description="Deliveries that wait for their first or next try.")


_NONE: dict[str, Any] = {
    "configured": False,
    "url": None,
    "hosts": [],
    "watch_s": None,
    "watching": False,
    "looked": None,
    "problem": None,
    "queued": 0,
}
_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "May be left out.",
        "content": {JSON: {"schema": TestWish.model_json_schema(), "example": {"experiment": "tip-bench-auto"}}},
    }
}


def hook_of(request: Request) -> Hook | None:
    """The application's webhook, if there is one."""
    hook: Hook | None = request.app.state.hook
    return hook


HookState = Annotated[Hook | None, Depends(hook_of)]


async def read_wish(request: Request, _admin: Admin) -> TestWish:
    """What the test shall name."""
    wish = checked(TestWish, await read_json(request), "body")
    if wish.experiment is not None:
        try:
            check_experiment_name(wish.experiment)
        except ValueError as exc:
            raise Invalid(str(exc), path="body.experiment") from exc
    return wish


@router.get("", summary="How the webhook fares", response_model=HookShape)
def state(hook: HookState) -> Response:
    """Where it leads, when it last looked for cells that wait for a judge, what is still to be delivered."""
    return Json(state_of(hook))


@router.get("/deliveries", summary="List the webhook's deliveries", response_model=DeliveryList)
def deliveries(
    hook: HookState,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Newest first, each with what was sent and every try; the last 500 that have ended are kept."""
    found = [] if hook is None else sorted(hook.deliveries(), key=_place)
    page, following = page_of(found, _place, limit=limit, after=next)
    return Json({"items": [delivery.to_json() for delivery in page], "next": following})


@router.post(
    "/test", summary="Test the webhook", response_model=DeliveryShape, openapi_extra=_BODY, responses=refusals(409)
)
def test(hook: HookState, wish: Annotated[TestWish, Depends(read_wish)]) -> Response:
    """Sends a signed message of the event `test`, once and now, and says what came of it within 10 seconds.

    Refused (409) without a webhook, and while another test is under way.
    """
    return Json(run_test(hook, wish.experiment).to_json())


def state_of(hook: Hook | None) -> dict[str, Any]:
    """For the JSON and for the page."""
    return _NONE if hook is None else hook.state()


def run_test(hook: Hook | None, experiment: str | None = None) -> Delivery:
    """The delivery, taken or not. HookConflict without a webhook, and while another test is under way."""
    if hook is None:
        raise HookConflict("There is no webhook. The operator sets TIPBENCH_HOOK_URL and TIPBENCH_HOOK_SECRET.")
    delivery = hook.test(experiment)
    if delivery is None:
        raise HookConflict("A test is under way. Wait for it to end, which takes 10 seconds at most.")
    return delivery


def _place(delivery: Delivery) -> Place:
    return Place(-int(delivery.created * 1000), delivery.message.id)
