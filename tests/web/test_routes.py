"""Every route without a token, with an invalid, expired and revoked one, a judge's and an admin's."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter

from tipbench.web.auth import CSRF_FIELD, CSRF_HEADER, SAFE_METHODS, Role
from web.panels import API, EXPERIMENT, ServedPanel, answered_store, route_list, serve_panel

Route = tuple[str, str]

OPEN = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/login"),
    ("POST", "/login"),
    ("GET", "/static/{version}/{name:path}"),
}
JUDGES = {
    ("POST", "/logout"),
    ("POST", f"{API}/judge/{{experiment:path}}/sheets"),
    ("POST", f"{API}/judge/{{experiment:path}}/apply"),
}
JUDGES_PAGES = "/judge"  # this path and those under it
ADMINS_ALONE = ("/accept", "/return")  # of a batch that is held
JUDGES_BATCHES = f"{API}/judge/{{experiment:path}}/batches"  # likewise
INVALID_TOKEN = "tipbench_" + "0" * 12 + "_" + "a" * 43
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE")
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
PAGE = {"Accept": "text/html,application/xhtml+xml"}


def fill_path(path: str) -> str:
    """Return the path with its parameters filled in."""
    path = path.replace("{run_id:run_id}", "0" * 32).replace("{experiment:path}", EXPERIMENT)
    return re.sub(r"\{[^}]*\}", "1", path)


def closed_routes(served: ServedPanel) -> list[Route]:
    """Return every route that requires authentication."""
    return [route for route in route_list(served.app) if route not in OPEN]


def is_for_judges(route: Route) -> bool:
    """Whether a judge may use it."""
    under = any(route[1] == place or route[1].startswith(f"{place}/") for place in (JUDGES_PAGES, JUDGES_BATCHES))
    return (under and not route[1].endswith(ADMINS_ALONE)) or route in JUDGES


def status_and_code(served: ServedPanel, response: Any) -> tuple[int, str]:
    """Return the status, and the code of an error."""
    refused = response.status_code in (401, 403, 429)
    return served.error(response) if refused else (response.status_code, "")


def results_of(served: ServedPanel, token: str | None, **options: Any) -> dict[Route, tuple[int, str]]:
    """Return the responses of all routes that require authentication."""
    return {
        (method, path): status_and_code(served, served.request(method, fill_path(path), token=token, **options))
        for method, path in closed_routes(served)
    }


def test_the_route_tests_cover_every_route(served: ServedPanel) -> None:
    found = set(route_list(served.app))
    pages = {("GET", "/"), ("GET", "/settings"), ("GET", "/jobs"), ("GET", "/experiments/{experiment:path}")}
    assert found >= OPEN | JUDGES | {("GET", f"{API}/experiments"), ("POST", f"{API}/plan"), ("GET", "/metrics")}
    assert found >= pages | {("POST", f"{API}/run"), ("GET", f"{API}/jobs/{{job_id}}/events")}


def test_routes_are_built_at_start_up_and_not_by_the_first_request(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_panel(
        home, answered_store(), routers=(APIRouter(),)
    ) as served:  # not the prepared routes of other tests
        monkeypatch.delattr("fastapi.routing.get_dependant")
        assert served.get(f"/experiments/{EXPERIMENT}").status_code == 200


def test_every_route_of_the_api_is_documented(served: ServedPanel) -> None:
    found = {(method, re.sub(r":\w+\}", "}", path)) for method, path in route_list(served.app)}
    paths = served.app.openapi()["paths"]
    documented = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert documented <= found
    assert {route for route in found if route[1].startswith("/api/")} <= documented


def test_no_page_is_in_the_document_of_the_api(served: ServedPanel) -> None:
    known = ("/api/bench/", "/login", "/logout", "/healthz", "/readyz", "/metrics")
    assert [path for path in served.app.openapi()["paths"] if not path.startswith(known)] == []


def test_every_route_rejects_a_missing_token(served: ServedPanel) -> None:
    results = results_of(served, None)
    assert len(results) > 30
    assert {route for route, given in results.items() if given != (401, "unauthorised")} == set()


def test_a_browser_without_a_session_is_redirected_to_the_login_page(served: ServedPanel) -> None:
    for method, path in closed_routes(served):
        if method == "GET" and not path.startswith("/api/"):
            response = served.get(fill_path(path), token=None, headers=PAGE)
            assert response.status_code == 303, path
            assert response.headers["location"].startswith("/login?next=%2F"), path


def test_every_route_rejects_an_invalid_token(served: ServedPanel) -> None:
    expected = {(401, "unauthorised"), (429, "too_many_attempts")}
    assert set(results_of(served, INVALID_TOKEN).values()) == expected


def test_every_route_rejects_an_expired_token(served: ServedPanel) -> None:
    tokens = served.panel.authenticator.tokens
    _, secret = tokens.create(Role.ADMIN, "yesterday's", life_s=60)
    assert served.get(f"{API}/experiments", token=secret).status_code == 200
    tokens.clock = lambda: time.time() + 61
    assert set(results_of(served, secret).values()) == {(401, "unauthorised"), (429, "too_many_attempts")}


def test_every_route_rejects_a_revoked_token(served: ServedPanel) -> None:
    tokens = served.panel.authenticator.tokens
    token, secret = tokens.create(Role.ADMIN, "dismissed", life_s=None)
    assert served.get(f"{API}/experiments", token=secret).status_code == 200
    tokens.revoke(token.id)
    assert set(results_of(served, secret).values()) == {(401, "unauthorised"), (429, "too_many_attempts")}


def test_every_route_rejects_the_cookie_of_a_revoked_token(served: ServedPanel) -> None:
    tokens = served.panel.authenticator.tokens
    token, secret = tokens.create(Role.ADMIN, "dismissed", life_s=None)
    csrf = served.log_in(secret)
    assert served.get("/", token=None).status_code == 200
    tokens.revoke(token.id)
    assert set(results_of(served, None, headers={CSRF_HEADER: csrf}).values()) == {(401, "unauthorised")}


def test_a_judge_token_is_rejected_outside_judging(served: ServedPanel) -> None:
    results = results_of(served, served.judge)
    let_in = {route for route, given in results.items() if given != (403, "forbidden")}
    assert let_in == {route for route in results if is_for_judges(route)}
    assert let_in >= JUDGES | {("GET", JUDGES_PAGES)}


def test_a_judge_in_a_browser_gets_an_error_page(served: ServedPanel) -> None:
    served.log_in(served.judge)
    for method, path in closed_routes(served):
        if method == "GET" and not path.startswith("/api/") and not is_for_judges((method, path)):
            response = served.get(fill_path(path), token=None, headers=PAGE)
            assert (response.status_code, response.headers["content-type"][:9]) == (403, "text/html"), path


def test_an_app_token_is_rejected_by_every_route_and_the_login(served: ServedPanel) -> None:
    _, secret = served.panel.authenticator.tokens.create(Role.APP, "ios-app", life_s=None)
    assert set(results_of(served, secret).values()) == {(403, "forbidden")}
    assert served.error(served.post("/login", token=None, json={"token": secret})) == (403, "forbidden")
    page = served.post("/login", token=None, data={"token": secret}, headers=PAGE)
    assert (page.status_code, "policy server" in page.text, "set-cookie" in page.headers) == (403, True, False)


def test_an_admin_token_is_accepted_by_every_route(served: ServedPanel) -> None:
    # Without a body and on names that are not there, hardly anything is done; the token itself is not revoked.
    assert {route: given for route, given in results_of(served, served.admin).items() if given[1]} == {}


def test_no_route_breaks_on_an_empty_request(served: ServedPanel) -> None:
    results = results_of(served, served.admin)
    assert {route: status for route, (status, _) in results.items() if status == 500} == {}


def test_no_other_method_bypasses_authorisation(served: ServedPanel) -> None:
    for method in METHODS:
        for _, path in closed_routes(served):
            response = served.request(method, fill_path(path), token=None)
            assert response.status_code in (401, 404, 405), path
            if response.status_code == 405:
                assert method not in response.headers["allow"], path


def test_head_requests_of_a_judge_are_rejected_like_get(served: ServedPanel) -> None:
    for method in ["HEAD", "OPTIONS"]:
        for _, path in closed_routes(served):
            response = served.request(method, fill_path(path), token=served.judge)
            assert response.status_code in (403, 404, 405), path


def test_every_change_with_a_cookie_needs_the_csrf_token(served: ServedPanel) -> None:
    served.log_in(served.admin)
    changes = [(method, path) for method, path in closed_routes(served) if method not in SAFE_METHODS]
    assert len(changes) > 8
    for method, path in changes:
        for body in (b"", b"csrf=", f"{CSRF_FIELD}={'x' * 43}".encode()):
            response = served.request(method, fill_path(path), token=None, headers=FORM, content=body)
            assert status_and_code(served, response) == (403, "csrf"), path


def test_the_csrf_token_of_another_session_is_rejected(served: ServedPanel) -> None:
    other = served.log_in(served.admin)
    served.client.cookies.clear()
    served.log_in(served.admin)
    for method, path in closed_routes(served):
        if method not in SAFE_METHODS:
            response = served.request(method, fill_path(path), token=None, headers={CSRF_HEADER: other})
            assert status_and_code(served, response) == (403, "csrf"), path


def test_a_cross_site_change_is_rejected_even_with_a_csrf_token(served: ServedPanel) -> None:
    cases: list[dict[str, str]] = [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ]
    for headers in cases:
        csrf = served.log_in(served.admin)
        for method, path in closed_routes(served):
            if method not in SAFE_METHODS:
                response = served.request(method, fill_path(path), token=None, headers={CSRF_HEADER: csrf, **headers})
                assert status_and_code(served, response) == (403, "foreign_origin"), path


def test_public_routes_need_no_token(served: ServedPanel) -> None:
    assert [served.get(path, token=None).status_code for path in ("/healthz", "/readyz", "/login")] == [200] * 3
    styles = re.findall(r'href="(/static/[^"]+)"', served.get("/login", token=None).text)
    assert styles
    assert [served.get(path, token=None).status_code for path in styles] == [200] * len(styles)


def test_an_authorization_header_without_bearer_is_rejected(served: ServedPanel) -> None:
    for header in ["Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "bearer\t", "Token x", "x" * 5000]:
        response = served.get(f"{API}/experiments", token=None, headers={"Authorization": header})
        assert served.error(response) == (401, "unauthorised")
        assert response.headers["www-authenticate"].startswith("Bearer")


def test_an_invalid_bearer_token_is_rejected_despite_a_valid_cookie(served: ServedPanel) -> None:
    served.log_in(served.admin)
    assert served.get(f"{API}/experiments", token=None).status_code == 200
    assert served.error(served.get(f"{API}/experiments", token=INVALID_TOKEN)) == (401, "unauthorised")


def test_a_token_in_the_url_is_ignored(served: ServedPanel) -> None:
    response = served.get(f"{API}/experiments?token={served.admin}&access_token={served.admin}", token=None)
    assert served.error(response) == (401, "unauthorised")


def test_the_body_is_not_parsed_before_authentication(served: ServedPanel) -> None:
    """Rejected for missing credentials, not for its content: the body is not parsed."""
    for path in (f"{API}/plan", f"{API}/judge/{EXPERIMENT}/apply", f"{API}/judge/{EXPERIMENT}/sheets"):
        response = served.post(path, token=None, content=b"{no json", headers={"Content-Type": "application/json"})
        assert served.error(response) == (401, "unauthorised")


def test_the_operators_token_has_the_role_admin(home: Path) -> None:
    own = "an-operators-own-token-of-32-or-more"
    with serve_panel(home, answered_store(), {"TIPBENCH_ADMIN_TOKEN": own}) as served:
        assert served.get(f"{API}/experiments", token=own).status_code == 200
        assert served.error(served.get(f"{API}/experiments", token=own + "x")) == (401, "unauthorised")
