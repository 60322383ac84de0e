"""Every route there is, knocked at without a token, with a wrong one, with a judge's and with an admin's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from web.panels import API, EXPERIMENT, Served, answered, route_list, serving

OPEN = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/login"), ("POST", "/login")}
JUDGES = {
    ("POST", "/logout"),
    ("POST", f"{API}/judge/{{experiment:path}}/sheets"),
    ("POST", f"{API}/judge/{{experiment:path}}/apply"),
}
WRONG = "tipbench_" + "0" * 12 + "_" + "a" * 43


def filled(path: str) -> str:
    """The path with something in each of its places."""
    path = path.replace("{run_id:run_id}", "0" * 32).replace("{experiment:path}", EXPERIMENT)
    return re.sub(r"\{[^}]*\}", "1", path)


def refusals(served: Served, token: str | None) -> dict[tuple[str, str], tuple[int, str]]:
    """How every route but the open ones answers to this token."""
    answers = {}
    for method, path in route_list(served.app):
        if (method, path) not in OPEN:
            response = served.ask(method, filled(path), token=token)
            refused = response.status_code in (401, 403, 429)
            answers[method, path] = served.error(response) if refused else (response.status_code, "")
    return answers


def test_the_walk_sees_every_route(served: Served) -> None:
    found = set(route_list(served.app))
    assert found >= OPEN | JUDGES | {("GET", f"{API}/experiments"), ("POST", f"{API}/plan"), ("GET", "/metrics")}


def test_every_route_of_the_api_is_documented(served: Served) -> None:
    found = {(method, re.sub(r":\w+\}", "}", path)) for method, path in route_list(served.app)}
    paths = served.app.openapi()["paths"]
    documented = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert documented <= found
    assert {route for route in found if route[1].startswith("/api/")} <= documented


def test_without_a_token_every_route_refuses(served: Served) -> None:
    answers = refusals(served, None)
    assert len(answers) > 10
    assert set(answers.values()) == {(401, "unauthorised")}


def test_with_a_wrong_token_every_route_refuses(served: Served) -> None:
    assert set(refusals(served, WRONG).values()) <= {(401, "unauthorised"), (429, "too_many_attempts")}


def test_a_judge_is_refused_everywhere_but_where_judges_work(served: Served) -> None:
    answers = refusals(served, served.judge)
    assert {route for route, answer in answers.items() if answer != (403, "forbidden")} == JUDGES


def test_an_admin_is_refused_nowhere(served: Served) -> None:
    assert {code for _, code in refusals(served, served.admin).values()} == {""}


def test_the_open_routes_answer_to_everybody(served: Served) -> None:
    assert [served.get(path, token=None).status_code for path in ("/healthz", "/readyz", "/login")] == [200] * 3


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "bearer\t", "Token x", "x" * 5000])
def test_a_header_that_is_no_bearer_token_is_refused(served: Served, header: str) -> None:
    response = served.get(f"{API}/experiments", token=None, headers={"Authorization": header})
    assert served.error(response) == (401, "unauthorised")
    assert response.headers["www-authenticate"].startswith("Bearer")


def test_a_wrong_bearer_token_is_not_saved_by_a_good_cookie(served: Served) -> None:
    served.log_in(served.admin)
    assert served.get(f"{API}/experiments", token=None).status_code == 200
    assert served.error(served.get(f"{API}/experiments", token=WRONG)) == (401, "unauthorised")


def test_a_token_in_the_url_is_no_token(served: Served) -> None:
    response = served.get(f"{API}/experiments?token={served.admin}&access_token={served.admin}", token=None)
    assert served.error(response) == (401, "unauthorised")


def test_a_strangers_body_is_not_even_read(served: Served) -> None:
    """Refused as unknown, not for what it sent: nothing of a stranger's is parsed."""
    for path in (f"{API}/plan", f"{API}/judge/{EXPERIMENT}/apply", f"{API}/judge/{EXPERIMENT}/sheets"):
        response = served.post(path, token=None, content=b"{no json", headers={"Content-Type": "application/json"})
        assert served.error(response) == (401, "unauthorised")


def test_a_revoked_token_is_refused_at_once(served: Served) -> None:
    tokens = served.panel.guard.tokens
    assert served.get(f"{API}/experiments").status_code == 200
    for token in tokens.all():
        tokens.revoke(token.id)
    assert served.error(served.get(f"{API}/experiments")) == (401, "unauthorised")


def test_the_operators_own_token_is_an_admins(home: Path) -> None:
    store, _ = answered()
    own = "an-operators-own-long-token"
    with serving(home, store, {"TIPBENCH_ADMIN_TOKEN": own}) as served:
        assert served.get(f"{API}/experiments", token=own).status_code == 200
        assert served.error(served.get(f"{API}/experiments", token=own + "x")) == (401, "unauthorised")
