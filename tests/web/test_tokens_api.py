"""Tokens over HTTP: made, shown once, listed without their secret, revoked at once."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import jsonschema

from web.panels import API, ServedPanel

TOKENS = f"{API}/tokens"
TOKEN = {"role": "judge", "name": "Renée", "expires": "12h"}


def create_token(served: ServedPanel, **changes: Any) -> dict[str, Any]:
    response = served.post(TOKENS, json={**TOKEN, **changes})
    assert response.status_code == 201, response.text
    token: dict[str, Any] = response.json()
    return token


def test_a_new_token_works(served: ServedPanel) -> None:
    admin = create_token(served, role="admin")
    assert served.get(TOKENS, token=admin["token"]).status_code == 200
    judge = create_token(served)
    assert served.error(served.get(TOKENS, token=judge["token"])) == (403, "forbidden")


def test_a_secret_is_in_one_response_only(served: ServedPanel) -> None:
    token = create_token(served)
    assert token["token"].startswith(f"tipbench_{token['id']}_")
    listed = served.get(TOKENS)
    assert token["token"].rsplit("_", 1)[1] not in listed.text
    assert token["id"] in {each["id"] for each in listed.json()["items"]}


def test_a_second_judges_token_of_a_name_names_the_first(served: ServedPanel) -> None:
    first = create_token(served)
    assert first["same_judge"] == []
    assert create_token(served, role="admin")["same_judge"] == []
    assert create_token(served)["same_judge"] == [first["id"]]
    served.request("DELETE", f"{TOKENS}/{first['id']}")
    assert first["id"] not in create_token(served)["same_judge"]


def test_a_token_expires_after_its_lifetime(served: ServedPanel) -> None:
    assert create_token(served, expires="never")["expires"] is None
    assert create_token(served)["expires"] > create_token(served)["created"]
    assert create_token(served, expires="8w")["expires"] > create_token(served)["expires"]


def test_the_default_lifetime_is_ninety_days(served: ServedPanel) -> None:
    token = served.post(TOKENS, json={"role": "judge", "name": "anna"}).json()
    lifetime = datetime.fromisoformat(token["expires"]) - datetime.fromisoformat(token["created"])
    assert lifetime == timedelta(days=90)


def test_a_revoked_token_is_rejected(served: ServedPanel) -> None:
    token = create_token(served, role="admin")
    response = served.request("DELETE", f"{TOKENS}/{token['id']}")
    assert (response.status_code, response.json()["state"]) == (200, "revoked")
    assert served.error(served.get(TOKENS, token=token["token"])) == (401, "unauthorised")


def test_revoking_twice_has_no_effect(served: ServedPanel) -> None:
    token = create_token(served)
    first = served.request("DELETE", f"{TOKENS}/{token['id']}").json()
    assert served.request("DELETE", f"{TOKENS}/{token['id']}").json() == first


def test_revoking_an_unknown_token_is_not_found(served: ServedPanel) -> None:
    for token_id, expected in [("0" * 12, 404), ("nonsense", 422), ("0" * 13, 422)]:
        assert served.request("DELETE", f"{TOKENS}/{token_id}").status_code == expected


def test_an_invalid_request_names_its_field_and_creates_nothing(served: ServedPanel) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"role": "king"}, "body.role"),
        ({"name": ""}, "body.name"),
        ({"name": "two\nlines"}, "body.name"),
        ({"name": "rules"}, "body.name"),
        ({"name": "x" * 201}, "body.name"),
        ({"name": 7}, "body.name"),
        ({"expires": "soon"}, "body.expires"),
        ({"expires": "-1d"}, "body.expires"),
        ({"expires": "99999w"}, "body.expires"),
        ({"more": 1}, "body.more"),
    ]
    for changes, place in cases:
        before = served.get(TOKENS).json()
        response = served.post(TOKENS, json={**TOKEN, **changes})
        assert served.error(response) == (422, "invalid")
        assert response.json()["error"]["path"] == place
        assert served.get(TOKENS).json() == before


def test_responses_match_the_openapi_document(served: ServedPanel) -> None:
    document = served.app.openapi()

    def schema(path: str, method: str, status: str) -> dict[str, Any]:
        content = document["paths"][path][method]["responses"][status]["content"]["application/json"]
        return {**content["schema"], "components": document["components"]}

    token = create_token(served)
    jsonschema.validate(token, schema(TOKENS, "post", "201"))
    jsonschema.validate(served.get(TOKENS).json(), schema(TOKENS, "get", "200"))
    ended = served.request("DELETE", f"{TOKENS}/{token['id']}").json()
    jsonschema.validate(ended, schema(f"{TOKENS}/{{token_id}}", "delete", "200"))
