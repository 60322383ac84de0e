"""The webhook over HTTP and on the settings page: for admins, without secrets, without blocking requests."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tipbench.errors import UsageError
from tipbench.web.signing import Seen, verify
from web.hook_receiver import SECRET, HookReceiver, HookRequest, run_hook_receiver
from web.panels import API, EXPERIMENT, HTML, ServedPanel, answered_store, serve_panel

HOOK = f"{API}/hook"


@pytest.fixture
def receiver() -> Iterator[HookReceiver]:
    with run_hook_receiver() as receiver:
        yield receiver


@pytest.fixture
def panel(home: Path, receiver: HookReceiver) -> Iterator[ServedPanel]:
    """A panel with a webhook that only sends tests, because another process seems to be the supervisor."""
    with serve_panel(home, answered_store(), environment(receiver)) as served:
        yield served


def environment(receiver: HookReceiver, **more: str) -> dict[str, str]:
    return {"TIPBENCH_HOOK_URL": f"{receiver.url}?key=s3cret", "TIPBENCH_HOOK_SECRET": SECRET, **more}


def wait_for_delivery(served: ServedPanel, state: str, wait_s: float = 120) -> Any:
    """Wait until the newest delivery has this state; return all deliveries."""
    deadline = time.monotonic() + wait_s
    while True:
        items = served.get(f"{HOOK}/deliveries").json()["items"]
        if items and items[0]["state"] == state:
            return items
        assert time.monotonic() < deadline, items
        time.sleep(0.05)


def test_a_test_delivery_reaches_the_receiver_signed(panel: ServedPanel, receiver: HookReceiver) -> None:
    response = panel.post(f"{HOOK}/test", json={"experiment": EXPERIMENT})
    assert response.status_code == 200
    (request,) = receiver.requests
    verify(SECRET, request.headers, request.body, time.time(), Seen())
    assert request.payload == response.json()["payload"]
    assert (request.payload["event"], request.payload["links"]["apply"]) == ("test", f"{API}/judge/{EXPERIMENT}/apply")
    assert (response.json()["state"], response.json()["attempts"][0]["status"]) == ("delivered", 204)


def test_a_rejected_test_delivery_has_a_reason(panel: ServedPanel, receiver: HookReceiver) -> None:
    receiver.respond = lambda _request: 401
    response = panel.post(f"{HOOK}/test")
    assert response.status_code == 200
    assert (response.json()["state"], response.json()["attempts"][0]["reason"]) == ("failed", "responded with 401")


def test_a_second_test_at_the_same_time_is_refused(panel: ServedPanel, receiver: HookReceiver) -> None:
    request_arrived, release = threading.Event(), threading.Event()

    def slowly(_request: HookRequest) -> int:
        request_arrived.set()
        return 204 if release.wait(8) else 500

    receiver.respond = slowly
    first = threading.Thread(target=lambda: panel.post(f"{HOOK}/test"))
    first.start()
    assert request_arrived.wait(20)
    assert panel.error(panel.post(f"{HOOK}/test")) == (409, "conflict")
    release.set()
    first.join(20)


@pytest.mark.parametrize(
    ("body", "path"), [({"experiment": "mine"}, "body.experiment"), ({"url": "http://evil.example"}, "body.url")]
)
def test_a_test_delivery_names_only_a_tipbench_experiment(
    panel: ServedPanel, receiver: HookReceiver, body: dict[str, str], path: str
) -> None:
    response = panel.post(f"{HOOK}/test", json=body)
    assert (response.status_code, response.json()["error"]["path"]) == (422, path)
    assert receiver.requests == []


def test_without_a_webhook_there_is_nothing_to_test(served: ServedPanel) -> None:
    assert served.get(HOOK).json()["configured"] is False
    assert served.get(f"{HOOK}/deliveries").json() == {"items": [], "next": None}
    assert served.error(served.post(f"{HOOK}/test")) == (409, "conflict")


def test_the_state_contains_no_secret(panel: ServedPanel, receiver: HookReceiver) -> None:
    response = panel.get(HOOK)
    assert (response.json()["url"], response.json()["watching"]) == (receiver.url.removesuffix("hook") + "…", False)
    panel.post(f"{HOOK}/test")
    for text in (response.text, panel.get(f"{HOOK}/deliveries").text, panel.get("/settings", headers=HTML).text):
        assert "s3cret" not in text
        assert SECRET not in text


def test_responses_are_as_documented(panel: ServedPanel) -> None:
    document = panel.app.openapi()
    responses = {
        (HOOK, "get"): panel.get(HOOK),
        (f"{HOOK}/test", "post"): panel.post(f"{HOOK}/test"),
        (f"{HOOK}/deliveries", "get"): panel.get(f"{HOOK}/deliveries"),
    }
    for (path, method), response in responses.items():
        content = document["paths"][path][method]["responses"]["200"]["content"]
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        jsonschema.validate(response.json(), schema)


def test_deliveries_come_in_pages_newest_first(panel: ServedPanel) -> None:
    sent = [panel.post(f"{HOOK}/test").json()["id"] for _ in range(3)]
    first = panel.get(f"{HOOK}/deliveries?limit=2").json()
    second = panel.get(f"{HOOK}/deliveries?limit=2&next={first['next']}").json()
    assert [each["id"] for each in first["items"] + second["items"]] == sent[::-1]
    assert second["next"] is None


def test_the_button_on_the_settings_page_sends_a_test_and_shows_its_result(
    panel: ServedPanel, receiver: HookReceiver
) -> None:
    panel.log_in(panel.admin)
    page = panel.get("/settings", token=None, headers=HTML).text
    assert "No deliveries yet" in page
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found
    response = panel.post("/settings/hook/test", token=None, data={"csrf": found[1]})
    assert response.status_code == 303
    assert [request.payload["event"] for request in receiver.requests] == ["test"]
    after = panel.get(response.headers["location"], token=None, headers=HTML).text
    assert "The receiver accepted the test" in after
    assert receiver.url.removesuffix("hook") + "…" in after


def test_the_settings_page_shows_why_a_test_was_rejected(panel: ServedPanel, receiver: HookReceiver) -> None:
    receiver.respond = lambda _request: 503
    response = panel.post("/settings/hook/test")
    page = panel.get(response.headers["location"], headers=HTML).text
    assert "The test failed" in page
    assert "responded with 503" in page


def test_without_a_webhook_the_settings_page_shows_how_to_configure_one(served: ServedPanel) -> None:
    page = served.get("/settings", headers=HTML).text
    assert "TIPBENCH_HOOK_URL" in page
    assert "Send a test" not in page


def test_a_served_panel_delivers_pending_cells(home: Path, receiver: HookReceiver) -> None:
    with serve_panel(home, answered_store(), environment(receiver, TIPBENCH_HOOK_WATCH_S="1"), run_jobs=True) as served:
        (delivery,) = wait_for_delivery(served, "delivered")
        assert served.get(HOOK).json()["watching"] is True
        page = served.get("/settings", headers=HTML).text
    assert (delivery["experiment"], delivery["payload"]["pending"]) == (EXPERIMENT, 48)
    assert "48 pending cells" in page


def test_a_receiver_that_hangs_blocks_no_other_request(home: Path, receiver: HookReceiver) -> None:
    request_arrived, release = threading.Event(), threading.Event()

    def hang(_request: HookRequest) -> int:
        request_arrived.set()
        return 204 if release.wait(120) else 500

    receiver.respond = hang
    with serve_panel(home, answered_store(), environment(receiver, TIPBENCH_HOOK_WATCH_S="1"), run_jobs=True) as served:
        assert request_arrived.wait(30)
        began = time.monotonic()
        response = served.get(f"{API}/experiments")
        took = time.monotonic() - began
    release.set()
    assert response.status_code == 200
    assert took < 60, "the receiver hangs for 120 s"


def test_a_panel_does_not_start_with_an_address_it_may_not_call(home: Path) -> None:
    wrong = {"TIPBENCH_HOOK_URL": "https://judge.example.org/", "TIPBENCH_HOOK_SECRET": SECRET}
    with pytest.raises(UsageError, match="TIPBENCH_HOOK_HOSTS"), serve_panel(home, environment=wrong):
        pass
