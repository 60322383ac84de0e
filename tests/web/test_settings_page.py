"""The settings page: tokens are made, shown once and revoked; what is configured shows without secrets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from web.panels import HTML, OPERATOR, ServedPanel, serve_panel

SECRET = re.compile(r"tipbench_[0-9a-f]{12}_[A-Za-z0-9_-]{43}")


def settings_page(served: ServedPanel) -> str:
    response = served.get("/settings", headers=HTML)
    assert response.status_code == 200
    return str(response.text)


def create_token(served: ServedPanel, **fields: str) -> Any:
    return served.post("/settings/tokens", headers=HTML, data={"role": "judge", "name": "anna", **fields})


def once_value(page: str) -> str:
    found = re.search(r'name="once" value="([^"]+)"', page)
    assert found
    return found[1]


def test_a_new_tokens_secret_shows_once(served: ServedPanel) -> None:
    page = create_token(served, name="anna", expires="30d")
    assert page.status_code == 201
    (secret,) = SECRET.findall(page.text)
    assert served.panel.authenticator.tokens.find(secret) is not None
    assert secret not in settings_page(served)
    assert page.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("length", [1, 4])  # a mark that is longer than what is remembered, too
def test_reloading_the_response_creates_no_second_token(served: ServedPanel, length: int) -> None:
    mark = length * once_value(settings_page(served))
    assert create_token(served, once=mark).status_code == 201
    again = create_token(served, once=mark)
    assert again.status_code == 409
    assert not SECRET.search(again.text)
    assert [token.name for token in served.panel.authenticator.tokens.all()].count("anna") == 1


def test_a_form_without_the_csrf_token_creates_no_token(served: ServedPanel) -> None:
    served.log_in(served.admin)
    before = served.panel.authenticator.tokens.all()
    for data in ({"role": "admin", "name": "mallory"}, {"role": "admin", "name": "mallory", "csrf": "wrong"}):
        assert served.error(served.post("/settings/tokens", token=None, data=data)) == (403, "csrf")
    assert served.panel.authenticator.tokens.all() == before


def test_an_invalid_field_keeps_its_value_and_shows_the_error(served: ServedPanel) -> None:
    page = create_token(served, name="Renée & co", expires="tomorrow", role="admin")
    assert page.status_code == 422
    assert 'value="Renée &amp; co"' in page.text
    assert re.search(r'id="expires"[^>]*aria-invalid="true"', page.text)
    assert "12h, 30d or 8w" in page.text
    assert 'value="admin" checked' in page.text


def test_a_wrong_field_may_be_corrected_in_the_same_form(served: ServedPanel) -> None:
    mark = once_value(settings_page(served))
    assert create_token(served, once=mark, expires="tomorrow").status_code == 422
    assert create_token(served, once=mark, expires="1d").status_code == 201


def test_a_token_is_revoked_and_the_page_confirms_it(served: ServedPanel) -> None:
    token = next(token for token in served.panel.authenticator.tokens.all() if token.name == "reviewer-1")
    response = served.post(f"/settings/tokens/{token.id}/revoke")
    assert (response.status_code, response.headers["location"]) == (303, f"/settings?revoked={token.id}#tokens")
    page = served.get(f"/settings?revoked={token.id}", headers=HTML).text
    assert "no longer works" in page
    assert f"/settings/tokens/{token.id}/revoke" not in page


def test_revoking_needs_a_confirmation_and_warns_for_the_own_token(served: ServedPanel) -> None:
    served.log_in(served.admin)
    page = served.get("/settings", token=None, headers=HTML).text
    assert "This is the token you are logged in with" in page
    assert page.count("<summary") >= 2


def test_a_token_name_is_shown_as_text(home: Path) -> None:
    with serve_panel(home) as served:
        create_token(served, name="<script>alert(1)</script>")
        create_token(served, name='"><img src=x onerror=alert(1)>')
        page = settings_page(served)
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_a_name_with_direction_characters_is_refused(served: ServedPanel) -> None:
    page = create_token(served, name="anna\u202egnol")
    assert page.status_code == 422
    assert "printable" in page.text


def test_a_form_with_the_csrf_token_of_its_page_works(served: ServedPanel) -> None:
    served.log_in(served.admin)
    page = served.get("/settings", token=None, headers=HTML).text
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found
    data = {"csrf": found[1], "role": "judge", "name": "anna"}
    assert served.post("/settings/tokens", token=None, data=data).status_code == 201


def test_the_configuration_is_shown_without_secrets(home: Path) -> None:
    secrets = {
        "TIPBENCH_ADMIN_TOKEN": OPERATOR,
        "MLFLOW_TRACKING_PASSWORD": "hunter2-hunter2",
        "MLFLOW_TRACKING_TOKEN": "a-bearer-of-mlflow",
        "MLFLOW_TRACKING_URI": "http://me:s3cret@mlflow.example:5000",
        "TIPBENCH_PANEL_URLS": "http://you:s3cret@gpu-box:11434",
        "TIPBENCH_JUDGE_COMMAND": "/opt/judges/agent --key an-agents-key",
    }
    with serve_panel(home, environment=secrets) as served:
        page = settings_page(served)
    for word in (OPERATOR, "hunter2", "a-bearer-of-mlflow", "s3cret", "an-agents-key"):
        assert word not in page
    assert "agent …" in page
    assert "http://mlflow.example:5000" in page
    assert "http://gpu-box:11434" in page
    assert "TIPBENCH_ADMIN_TOKEN" in page
