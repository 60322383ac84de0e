"""Security: headers on every response, hosts, sizes, request ids, and errors without details."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter
from starlette.responses import StreamingResponse

from tipbench.errors import CorruptText
from tipbench.web.auth import ADMINS_ONLY, JUDGES_TOO
from tipbench.web.security import CSP, HEADERS, MAX_BODY_BYTES
from web.panels import API, EXPERIMENT, ServedPanel, TestClient, answered_store, serve_panel

SECRET = "what nobody outside may read"
broken = APIRouter(dependencies=[ADMINS_ONLY])
shared = APIRouter(dependencies=[JUDGES_TOO])


@broken.get("/broken")
def fail() -> None:
    raise RuntimeError(SECRET)


@broken.get("/half")
def break_midway() -> StreamingResponse:
    def chunks() -> Iterator[bytes]:
        yield b"so far"
        raise RuntimeError(SECRET)

    return StreamingResponse(chunks(), media_type="text/plain")


@shared.get("/corrupt")
def corrupt() -> None:
    raise CorruptText("The text of run 0123456789 by qwen2.5:0.5b is not what tipbench writes.")


@pytest.fixture
def panel(home: Path) -> Iterator[ServedPanel]:
    """With routes that fail, on a client that sees what a browser sees."""
    with serve_panel(home, answered_store(), routers=(broken, shared), raise_server_exceptions=False) as served:
        yield served


def every_kind_of_response(panel: ServedPanel) -> dict[int, Any]:
    json_ = {"Content-Type": "application/json"}
    return {
        response.status_code: response
        for response in (
            panel.get("/healthz", token=None),
            panel.post(f"{API}/judge/{EXPERIMENT}/sheets", json={"limit": 1}),
            panel.get("/login", token=None, headers={"Host": "evil.example"}),
            panel.get("/metrics", token=None, headers={"Accept": "text/html"}),
            panel.get("/metrics", token=None),
            panel.get("/metrics", token=panel.judge),
            panel.get("/nothing/here", token=None),
            panel.request("DELETE", "/healthz", token=None),
            panel.get(f"{API}/leaderboard/{EXPERIMENT}?judge=nobody"),
            panel.post(f"{API}/plan", content=b"x" * (MAX_BODY_BYTES + 1), headers=json_),
            panel.get(f"{API}/runs/{EXPERIMENT}?limit=0"),
            panel.get("/broken"),
            panel.get("/corrupt"),
        )
    }


def test_every_response_has_the_security_headers(panel: ServedPanel) -> None:
    responses = every_kind_of_response(panel)
    assert set(responses) == {200, 201, 303, 400, 401, 403, 404, 405, 409, 413, 422, 500, 502}
    for status, response in responses.items():
        for name, value in HEADERS.items():
            assert response.headers[name] == value, (status, name)
        assert response.headers["x-request-id"]


def test_the_policy_allows_no_inline_script_no_other_site_and_no_frame() -> None:
    rules = dict(rule.split(" ", 1) for rule in CSP.split("; "))
    assert "unsafe" not in CSP
    assert "http" not in CSP
    assert "*" not in CSP
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["form-action"] == "'self'"


def test_the_referrer_policy_leaves_our_own_forms_their_origin() -> None:
    """With no-referrer a browser sends `Origin: null`, and every form would be refused."""
    assert HEADERS["Referrer-Policy"] == "same-origin"


def test_an_unknown_host_is_rejected_first(panel: ServedPanel) -> None:
    for host in ["evil.example", "localhost.evil.example", "10.1.2.3", "evil.example:5180"]:
        for path in ["/healthz", "/login", f"{API}/experiments", "/nothing"]:
            response = panel.get(path, headers={"Host": host})
            assert panel.error(response) == (400, "host_refused")
            assert response.json()["error"]["path"] == "header.host"


def test_a_configured_host_is_accepted(home: Path) -> None:
    with serve_panel(home, environment={"TIPBENCH_PANEL_HOSTS": "tips.example.org, 10.0.0.7"}) as served:
        assert served.get("/healthz", token=None, headers={"Host": "tips.example.org:443"}).status_code == 200
        assert served.get("/healthz", token=None, headers={"Host": "10.0.0.8"}).status_code == 400


def test_a_body_with_a_too_large_content_length_is_not_read(panel: ServedPanel) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(10**12)}
    response = panel.post(f"{API}/plan", content=b"{}", headers=headers)
    assert panel.error(response) == (413, "too_large")


def test_a_body_without_content_length_is_limited_while_read(panel: ServedPanel) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 100_000

    response = panel.post(f"{API}/plan", content=endless(), headers={"Content-Type": "application/json"})
    assert panel.error(response) == (413, "too_large")


def test_a_filled_sheet_may_be_larger_than_other_bodies(panel: ServedPanel) -> None:
    body = b'{"format": "' + b"x" * (2 * MAX_BODY_BYTES) + b'"}'
    headers = {"Content-Type": "application/json"}
    response = panel.post(f"{API}/judge/{EXPERIMENT}/apply", content=body, headers=headers)
    assert panel.error(response) == (422, "sheet_refused")


def test_an_invalid_content_length_is_rejected(panel: ServedPanel) -> None:
    for length in ["-1", "x", "1e3", ""]:
        response = panel.post(f"{API}/plan", content=b"{}", headers={"Content-Length": length})
        assert response.status_code == 413


def test_an_internal_error_contains_only_the_request_id(panel: ServedPanel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "tipbench.web"):
        response = panel.get("/broken")
    assert panel.error(response) == (500, "internal")
    assert SECRET not in response.text
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"] in response.text
    assert response.headers["x-request-id"] in caplog.text
    assert SECRET in caplog.text


def test_a_response_that_fails_midway_closes_the_connection(panel: ServedPanel) -> None:
    with TestClient(panel.app, base_url="http://localhost") as strict, pytest.raises(RuntimeError):
        strict.get("/half", headers={"Authorization": f"Bearer {panel.admin}"})


def test_an_error_shows_an_admin_the_reason(panel: ServedPanel) -> None:
    assert "qwen2.5" in panel.get("/corrupt").json()["error"]["message"]


def test_an_error_shows_a_judge_nothing_that_unblinds(panel: ServedPanel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tipbench.web"):
        response = panel.get("/corrupt", token=panel.judge)
    assert panel.error(response) == (502, "corrupt_text")
    assert "qwen2.5" not in response.text
    assert "0123456789" not in response.text
    assert response.headers["x-request-id"] in response.text
    assert "qwen2.5" in caplog.text


def test_a_safe_request_id_of_the_client_is_used(panel: ServedPanel) -> None:
    kept = panel.get("/healthz", headers={"X-Request-ID": "abc-123_XYZ"}).headers["x-request-id"]
    other = panel.get("/healthz", headers={"X-Request-ID": "a b\tc" + "d" * 80}).headers["x-request-id"]
    assert kept == "abc-123_XYZ"
    assert " " not in other
    assert len(other) == 16


def test_websockets_are_rejected(panel: ServedPanel) -> None:
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), panel.client.websocket_connect("/anything"):
        pass


def test_responses_have_no_server_header(panel: ServedPanel) -> None:
    headers = " ".join(f"{name}: {value}" for name, value in panel.get("/healthz").headers.items()).lower()
    assert "uvicorn" not in headers
    assert "starlette" not in headers


def test_only_responses_of_get_requests_are_compressed(served: ServedPanel) -> None:
    accepting = {"Accept-Encoding": "gzip", "Accept": "text/html"}
    page = served.get("/settings", headers=accepting)
    assert page.headers["content-encoding"] == "gzip"
    assert "accept-encoding" in page.headers["vary"].lower()
    sent = served.client.post(
        "/login", data={"token": "x" * 2000}, headers={**accepting, "Origin": "http://testserver"}
    )
    assert "content-encoding" not in sent.headers
