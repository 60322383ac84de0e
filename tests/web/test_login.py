"""Login: a token for a cookie, changes only with the CSRF token, and rate limits for failed attempts."""

from __future__ import annotations

import re
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.web.auth import Role
from tipbench.web.login import local_path
from tipbench.web.login_limiter import FAILURE_BURST, FREE_FAILURES
from web.panels import API, EXPERIMENT, OPERATOR, ServedPanel, answered_store, serve_panel

PLAN = {"models": "baseline:template", "prompts": "v1", "n_scenarios": 1}


def cookie_of(response: Any) -> Any:
    """Return the only cookie that a response sets."""
    (cookie,) = SimpleCookie(response.headers["set-cookie"]).values()
    return cookie


def post_login_form(served: ServedPanel, **fields: str) -> Any:
    return served.client.post("/login", data=fields, follow_redirects=False)


def test_the_login_page_has_a_form_and_no_script(served: ServedPanel) -> None:
    page = served.get("/login?next=/runs", token=None)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<form method="post" action="/login">' in page.text
    assert 'value="/runs"' in page.text
    assert "<script" not in page.text
    assert not re.search(r"<style|\sstyle=", page.text)


def test_a_form_with_a_valid_token_sets_a_cookie_and_redirects(served: ServedPanel) -> None:
    response = post_login_form(served, token=f" {served.admin} ", next="/runs?x=1")
    assert (response.status_code, response.headers["location"]) == (303, "/runs?x=1")
    assert served.get(f"{API}/experiments", token=None).status_code == 200


def test_the_cookie_is_http_only_and_same_site_strict(served: ServedPanel) -> None:
    cookie = cookie_of(post_login_form(served, token=served.admin))
    assert cookie.key == "tipbench_session"
    assert (cookie["httponly"], cookie["samesite"], cookie["path"], cookie["domain"]) == (True, "strict", "/", "")
    assert 0 < int(cookie["max-age"]) <= 12 * 3600
    assert not cookie["secure"]  # this test speaks plain HTTP


def test_over_tls_the_cookie_is_secure_and_bound_to_its_host(home: Path) -> None:
    with serve_panel(home, base_url="https://localhost") as served:
        cookie = cookie_of(post_login_form(served, token=served.admin))
        assert (cookie.key, cookie["secure"], cookie["path"]) == ("__Host-tipbench_session", True, "/")


def test_the_cookie_contains_neither_token_nor_role(served: ServedPanel) -> None:
    cookie = cookie_of(post_login_form(served, token=served.judge))
    assert served.judge not in cookie.value
    assert served.judge.split("_", 2)[2] not in cookie.value


def test_a_form_with_a_wrong_token_shows_the_page_again(served: ServedPanel) -> None:
    response = post_login_form(served, token="nonsense", next='/x"><script>')
    assert response.status_code == 401
    assert 'role="alert"' in response.text
    assert "<script>" not in response.text
    assert "set-cookie" not in response.headers


def test_a_program_gets_an_error_as_json(served: ServedPanel) -> None:
    response = served.client.post("/login", json={"token": "nonsense"})
    assert served.error(response) == (401, "unauthorised")


def test_a_second_login_ends_the_first_session(served: ServedPanel) -> None:
    served.log_in(served.admin)
    first = served.client.cookies["tipbench_session"]
    served.log_in(served.admin)
    assert served.client.cookies["tipbench_session"] != first
    assert served.panel.authenticator.by_cookie(first) is None


def test_logging_out_invalidates_all_copies_of_the_cookie(served: ServedPanel) -> None:
    csrf = served.log_in(served.admin)
    stolen = served.client.cookies["tipbench_session"]
    response = served.post("/logout", token=None, headers={"X-CSRF-Token": csrf})
    assert response.status_code == 204
    assert cookie_of(response)["max-age"] == "0"
    assert served.panel.authenticator.by_cookie(stolen) is None


def test_a_logout_by_form_leads_back_to_the_login_page(served: ServedPanel) -> None:
    csrf = served.log_in(served.judge)
    response = served.client.post("/logout", data={"csrf": csrf}, follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, "/login")


def test_a_session_ends_with_its_token(served: ServedPanel) -> None:
    served.log_in(served.admin)
    for token in served.panel.authenticator.tokens.all():
        served.panel.authenticator.tokens.revoke(token.id)
    assert served.error(served.get(f"{API}/experiments", token=None)) == (401, "unauthorised")


def test_a_new_operators_token_ends_the_sessions_of_the_old_one(home: Path) -> None:
    with serve_panel(home, environment={"TIPBENCH_ADMIN_TOKEN": OPERATOR}) as served:
        served.log_in(OPERATOR)
        cookie = served.client.cookies["tipbench_session"]
    with serve_panel(home, environment={"TIPBENCH_ADMIN_TOKEN": OPERATOR + "-2"}) as served:
        assert served.panel.authenticator.by_cookie(cookie) is None
    with serve_panel(home, environment={"TIPBENCH_ADMIN_TOKEN": OPERATOR}) as served:
        assert served.panel.authenticator.by_cookie(cookie) is not None


def test_a_session_survives_a_restart_of_the_panel(home: Path) -> None:
    store = answered_store()
    with serve_panel(home, store) as served:
        served.log_in(served.admin)
        cookie = served.client.cookies["tipbench_session"]
    with serve_panel(home, store) as served:
        found = served.panel.authenticator.by_cookie(cookie)
        assert found is not None
        assert found.role is Role.ADMIN


def test_a_session_has_the_role_of_its_token(served: ServedPanel) -> None:
    served.log_in(served.judge)
    assert served.error(served.get(f"{API}/leaderboard/{EXPERIMENT}", token=None)) == (403, "forbidden")


def test_the_login_page_redirects_with_a_session(served: ServedPanel) -> None:
    served.log_in(served.admin)
    response = served.get("/login?next=/runs", token=None)
    assert (response.status_code, response.headers["location"]) == (303, "/runs")


def test_a_page_without_a_session_redirects_to_the_login_page(served: ServedPanel) -> None:
    response = served.get("/metrics?a=1", token=None, headers={"Accept": "text/html,*/*"})
    assert (response.status_code, response.headers["location"]) == (303, "/login?next=%2Fmetrics%3Fa%3D1")


# changes made with a cookie


def test_a_change_with_the_csrf_token_is_accepted(served: ServedPanel) -> None:
    csrf = served.log_in(served.admin)
    response = served.post(f"{API}/plan", token=None, json=PLAN, headers={"X-CSRF-Token": csrf})
    assert response.status_code == 200


@pytest.mark.parametrize("given_", [None, "", "wrong", "é"])
def test_a_change_without_a_valid_csrf_token_is_rejected(served: ServedPanel, given_: str | None) -> None:
    served.log_in(served.admin)
    headers: dict[str, Any] = {} if given_ is None else {"X-CSRF-Token": given_.encode()}
    response = served.post(f"{API}/plan", token=None, json=PLAN, headers=headers)
    assert served.error(response) == (403, "csrf")


def test_a_read_with_a_cookie_needs_no_csrf_token(served: ServedPanel) -> None:
    served.log_in(served.admin)
    assert served.get(f"{API}/config", token=None).status_code == 200


def test_a_bearer_token_needs_no_csrf_token(served: ServedPanel) -> None:
    assert served.post(f"{API}/plan", json=PLAN).status_code == 200


def test_a_login_of_another_origin_is_rejected(served: ServedPanel) -> None:
    headers = {"Origin": "https://evil.example"}
    response = served.client.post("/login", data={"token": served.judge}, headers=headers)
    assert served.error(response) == (403, "foreign_origin")


def test_a_change_of_the_same_origin_is_accepted(served: ServedPanel) -> None:
    headers = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    response = served.client.post("/login", data={"token": served.admin}, headers=headers, follow_redirects=False)
    assert response.status_code == 303


# failed attempts


def test_failed_logins_are_rate_limited(served: ServedPanel) -> None:
    served.stop_clock()
    tries = [post_login_form(served, token=f"guess {n}") for n in range(FREE_FAILURES + 3)]
    assert [response.status_code for response in tries] == [401] * FREE_FAILURES + [429] * 3
    assert int(tries[-1].headers["retry-after"]) >= 1


def test_invalid_bearer_tokens_are_rate_limited(served: ServedPanel) -> None:
    served.stop_clock()
    tries = [served.get(f"{API}/experiments", token=f"guess-{n}") for n in range(FREE_FAILURES + 1)]
    assert served.error(tries[-1]) == (429, "too_many_attempts")


def test_failed_attempts_of_others_do_not_lock_the_operator_out(home: Path) -> None:
    with serve_panel(home, environment={"TIPBENCH_ADMIN_TOKEN": OPERATOR}) as served:
        served.stop_clock()
        for number in range(FREE_FAILURES + 1):
            served.get("/metrics", token=f"guess-{number}")
        assert [served.get("/metrics", token=OPERATOR).status_code for _ in range(12)] == [200] * 12
        assert served.error(served.get("/metrics", token=OPERATOR + "x")) == (429, "too_many_attempts")


def test_a_valid_token_is_accepted_while_its_client_is_rate_limited(served: ServedPanel) -> None:
    for number in range(FREE_FAILURES + 1):
        served.get("/metrics", token=f"guess-{number}")
    assert served.get("/metrics").status_code == 200


def test_a_session_is_accepted_while_its_client_is_rate_limited(served: ServedPanel) -> None:
    served.log_in(served.admin)
    for number in range(FREE_FAILURES + 1):
        served.get("/metrics", token=f"guess-{number}")
    assert served.get("/metrics", token=None).status_code == 200


def test_failed_attempts_of_many_clients_are_rate_limited_together(home: Path) -> None:
    with serve_panel(home, environment={"TIPBENCH_ADMIN_TOKEN": OPERATOR}) as served:
        served.stop_clock()
        attempts = served.panel.authenticator._limiter
        for number in range(FAILURE_BURST):
            attempts.count_failure(f"client {number}")
        assert served.error(served.get("/metrics", token="guess")) == (429, "too_many_attempts")


def test_the_login_page_shows_how_long_to_wait(served: ServedPanel) -> None:
    served.stop_clock()
    for number in range(FREE_FAILURES):
        post_login_form(served, token=f"guess {number}")
    page = post_login_form(served, token="guess")
    assert page.headers["content-type"].startswith("text/html")
    assert "Try again in" in page.text


# redirects after a login


def test_a_path_of_the_panel_is_a_valid_redirect() -> None:
    for path in ["/", "/runs", "/runs?model=a%2Fb&x=1#top", "/a//b"]:
        assert local_path(path) == path


def test_any_other_address_is_replaced_by_the_front_page() -> None:
    for text in [
        "",
        "runs",
        "//evil.example",
        "/\\evil.example",
        "https://evil.example",
        "javascript:alert(1)",
        "/\n/evil.example",
        "\\/evil.example",
        "/\t/evil.example",
        "/a\\b",
        " /x",
        "/" + "x" * 2000,
    ]:
        assert local_path(text) == "/"


@given(st.text(max_size=40) | st.from_regex(r"[/\\]{0,3}[a-z.@:]{0,20}", fullmatch=True))
def test_a_login_never_redirects_to_another_site(text: str) -> None:
    path = local_path(text)
    assert path.startswith("/")
    assert path[1:2] not in ("/", "\\")
    assert path.isprintable()
