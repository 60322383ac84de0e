"""Webhook endpoints: status, deliveries and test. Only the operator's configuration sets the webhook's URL."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from tipbench.web.api.models import COMMON_ERRORS, DeliveryList, DeliveryShape, HookShape, TestRequest, error_responses
from tipbench.web.auth import ADMINS_ONLY, require_admin
from tipbench.web.errors import Conflict
from tipbench.web.forms import DEFAULT_LIMIT, Limit, Next, SortKey, body_of, body_schema, page_of
from tipbench.web.queries import check_name
from tipbench.web.webhook import Delivery, Webhook

router = APIRouter(prefix="/api/bench/hook", tags=["judge"], dependencies=[ADMINS_ONLY], responses=COMMON_ERRORS)
_TEST_BODY = body_schema(TestRequest, {"experiment": "tip-bench-auto"}, about="Optional.", required=False)


def webhook_of(request: Request) -> Webhook | None:
    """Return the application's webhook, or None if none is configured."""
    hook: Webhook | None = request.app.state.webhook
    return hook


WebhookParam = Annotated[Webhook | None, Depends(webhook_of)]
_NOT_CONFIGURED = HookShape(
    configured=False, url=None, hosts=[], watch_s=None, watching=False, looked=None, problem=None, queued=0
)


@router.get("", summary="Get webhook status")
def state(hook: WebhookParam) -> HookShape:
    """Return the webhook's host, the time of its last check for pending cells and the number of queued deliveries."""
    return _NOT_CONFIGURED if hook is None else hook.state()


@router.get("/deliveries", summary="List the webhook's deliveries")
def deliveries(
    hook: WebhookParam,
    limit: Limit = DEFAULT_LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> DeliveryList:
    """Return deliveries, newest first, each with its payload and all attempts.

    The last 500 finished deliveries are kept.
    """
    newest_first = [] if hook is None else sorted(hook.deliveries(), key=_sort_key)
    page, next_cursor = page_of(newest_first, _sort_key, limit=limit, after=next)
    return DeliveryList(items=[delivery.response() for delivery in page], next=next_cursor)


@router.post("/test", summary="Test the webhook", openapi_extra=_TEST_BODY, responses=error_responses(409))
def test(hook: WebhookParam, body: Annotated[TestRequest, body_of(TestRequest, require_admin)]) -> DeliveryShape:
    """Send a signed message with the event `test` once, without retries, and return the result within 10 seconds.

    Returns 409 if no webhook is configured or another test is in progress.
    """
    if body.experiment is not None:
        check_name(body.experiment, "body.experiment")
    return run_test(hook, body.experiment).response()


def run_test(hook: Webhook | None, experiment: str | None = None) -> Delivery:
    """Send a test and return its delivery, even if failed. Raises Conflict without a webhook or during another test."""
    if hook is None:
        raise Conflict("No webhook is configured. Set TIPBENCH_HOOK_URL and TIPBENCH_HOOK_SECRET.")
    delivery = hook.test(experiment)
    if delivery is None:
        raise Conflict("A test is already running. Try again in 10 seconds.")
    return delivery


def _sort_key(delivery: Delivery) -> SortKey:
    return SortKey(-int(delivery.created * 1000), delivery.id)
