"""Webhook endpoints: status, deliveries and test. The URL is set in the operator's configuration only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tipbench.plan.config import check_experiment_name
from tipbench.web.api.models import COMMON, refusals
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin
from tipbench.web.errors import Invalid, Json, WebError, checked
from tipbench.web.forms import JSON, LIMIT, Limit, Next, SortKey, page_of, read_json
from tipbench.web.webhook import Webhook
from tipbench.web.webhook_store import Delivery

router = APIRouter(prefix="/api/bench/hook", tags=["judge"], dependencies=[ADMINS_ONLY], responses=COMMON)


class HookConflict(WebError):
    """409: no webhook is configured, or a test is already in progress."""

    status, code = 409, "conflict"


class TestRequest(BaseModel):
    """Options of a webhook test."""

    model_config = ConfigDict(extra="forbid")

    experiment: str | None = Field(None, max_length=200, description="Include links to this experiment in the message.")


class AttemptShape(BaseModel):
    """One delivery attempt."""

    model_config = ConfigDict(extra="allow")

    number: int
    time: str
    took_s: float
    status: int | None = Field(description="The receiver's status code; null without a response.")
    reason: str | None = Field(description="Why the attempt failed.", examples=["responded with 503"])


class DeliveryShape(BaseModel):
    """A message to the receiver, with all delivery attempts."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(description="The same for every attempt.", examples=["0f6a2b9c4d1e4f508192a3b4c5d6e7f8"])
    event: Literal["cells.pending", "test"]
    experiment: str | None
    state: Literal["queued", "delivered", "failed", "replaced"] = Field(
        description="replaced: superseded by a newer delivery of the same experiment."
    )
    created: str
    next_try: str | None
    attempts: list[AttemptShape]
    payload: dict[str, Any] = Field(description="The message.", examples=[{"event": "cells.pending", "pending": 40}])


class DeliveryList(BaseModel):
    """A page of deliveries, newest first."""

    items: list[DeliveryShape]
    next: str | None = Field(
        description="Cursor of the next page, for the query parameter `next`; null on the last page."
    )


class HookShape(BaseModel):
    """Webhook status."""

    model_config = ConfigDict(extra="allow")

    configured: bool
    url: str | None = Field(
        description="Only the host is shown; the rest may be secret.", examples=["https://judge.example.org/…"]
    )
    hosts: list[str] = Field(description="Allowed hosts besides this machine.")
    watch_s: float | None
    watching: bool = Field(description="Whether this panel sends; if several share a home folder, only one does.")
    looked: str | None = Field(description="Time of the last check for pending cells.")
    problem: str | None = Field(description="Error of the last check.")
    queued: int = Field(description="Deliveries waiting for their first or next attempt.")


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
        "description": "Optional.",
        "content": {JSON: {"schema": TestRequest.model_json_schema(), "example": {"experiment": "tip-bench-auto"}}},
    }
}


def hook_of(request: Request) -> Webhook | None:
    """Returns the application's webhook, or None if none is configured."""
    hook: Webhook | None = request.app.state.hook
    return hook


HookState = Annotated[Webhook | None, Depends(hook_of)]


async def read_request(request: Request, _admin: Admin) -> TestRequest:
    """Parses and validates the body of a test request."""
    body = checked(TestRequest, await read_json(request), "body")
    if body.experiment is not None:
        try:
            check_experiment_name(body.experiment)
        except ValueError as exc:
            raise Invalid(str(exc), path="body.experiment") from exc
    return body


@router.get("", summary="Get webhook status", response_model=HookShape)
def state(hook: HookState) -> Response:
    """Returns the webhook's host, the time of its last check for pending cells and the number of queued deliveries."""
    return Json(state_of(hook))


@router.get("/deliveries", summary="List the webhook's deliveries", response_model=DeliveryList)
def deliveries(
    hook: HookState,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Returns deliveries, newest first, each with its payload and all attempts.

    The last 500 finished deliveries are kept.
    """
    found = [] if hook is None else sorted(hook.deliveries(), key=_place)
    page, following = page_of(found, _place, limit=limit, after=next)
    return Json({"items": [delivery.to_json() for delivery in page], "next": following})


@router.post(
    "/test", summary="Test the webhook", response_model=DeliveryShape, openapi_extra=_BODY, responses=refusals(409)
)
def test(hook: HookState, body: Annotated[TestRequest, Depends(read_request)]) -> Response:
    """Sends a signed message with the event `test` once, without retries, and returns the result within 10 seconds.

    Returns 409 if no webhook is configured or another test is in progress.
    """
    return Json(run_test(hook, body.experiment).to_json())


def state_of(hook: Webhook | None) -> dict[str, Any]:
    """Returns the webhook's status for the API and the settings page."""
    return _NONE if hook is None else hook.state()


def run_test(hook: Webhook | None, experiment: str | None = None) -> Delivery:
    """Sends a test message and returns its delivery, successful or not.

    Raises HookConflict if no webhook is configured or another test is in progress.
    """
    if hook is None:
        raise HookConflict("No webhook is configured. Set TIPBENCH_HOOK_URL and TIPBENCH_HOOK_SECRET.")
    delivery = hook.test(experiment)
    if delivery is None:
        raise HookConflict("A test is already running. Try again in 10 seconds.")
    return delivery


def _place(delivery: Delivery) -> SortKey:
    return SortKey(-int(delivery.created * 1000), delivery.message.id)
