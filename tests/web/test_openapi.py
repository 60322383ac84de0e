"""The OpenAPI document: complete, and consistent with the responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from support.judging import fill
from web.judge_client import driver_of, stored_sheet
from web.panels import API, EXPERIMENT, ServedPanel

METHODS = {"get", "post", "put", "patch", "delete"}
NO_BODY = ("/logout", "/cancel", "/retry", "/undo", "/close", "/reopen")  # the path is enough


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert method in METHODS
            yield f"{method.upper()} {path}", operation


def schema_for(document: dict[str, Any], path: str, method: str, status: int) -> dict[str, Any]:
    """Return the schema of a response, with the definitions it refers to."""
    content = document["paths"][path][method]["responses"][str(status)]["content"]
    return {**content["application/json"]["schema"], "components": document["components"]}


@pytest.fixture
def document(served: ServedPanel) -> Any:
    return served.get(f"{API}/openapi.json").json()


def test_the_document_is_whole_and_can_be_made_again(served: ServedPanel, document: dict[str, Any]) -> None:
    assert document == json.loads(json.dumps(served.app.openapi()))
    assert document["info"]["title"] == "tipbench"


def test_every_operation_has_a_summary_a_description_and_a_tag(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        assert operation["summary"], name
        assert operation["description"], name
        assert operation["tags"], name


def test_every_operation_has_its_errors_in_one_format(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        open_ = "security" not in operation
        wanted = {"400"} if open_ else {"400", "401", "403", "413", "422", "429", "500"}
        assert wanted <= set(operation["responses"]), name
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                content = response["content"]["application/json"]
                assert content["schema"] == {"$ref": "#/components/schemas/ErrorAnswer"}, (name, status)
                jsonschema.validate(content["example"], {**content["schema"], "components": document["components"]})


def test_only_health_and_login_need_no_authorisation(document: dict[str, Any]) -> None:
    free = {name for name, operation in operations(document) if "security" not in operation}
    assert free == {"GET /healthz", "GET /readyz", "GET /login", "POST /login"}
    assert set(document["components"]["securitySchemes"]) == {"token", "session"}


def test_every_body_has_a_schema_and_every_parameter_a_place(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        if name.startswith("POST") and not name.endswith(NO_BODY):
            contents = operation["requestBody"]["content"]
            assert all(content["schema"] for content in contents.values()), name
        for parameter in operation.get("parameters", []):
            assert parameter["in"] in ("path", "query", "header"), name
            assert parameter["schema"], name


def test_schemas_refer_to_nothing_that_is_missing(document: dict[str, Any]) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            for each in value.values():
                yield from references(each)
        elif isinstance(value, list):
            for each in value:
                yield from references(each)

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known


def test_real_responses_are_as_documented(served: ServedPanel, document: dict[str, Any]) -> None:
    driver_of(served).judged_by("anna", everything=True)
    run_id = served.get(f"{API}/runs/{EXPERIMENT}?limit=1").json()["items"][0]["run_id"]
    job_id = served.post(f"{API}/run", json={"models": "baseline:template"}).json()["job"]["id"]
    urls = {
        f"{API}/experiments": f"{API}/experiments",
        f"{API}/runs/{{experiment}}": f"{API}/runs/{EXPERIMENT}?limit=3",
        f"{API}/runs/{{experiment}}/{{run_id}}": f"{API}/runs/{EXPERIMENT}/{run_id}",
        f"{API}/leaderboard/{{experiment}}": f"{API}/leaderboard/{EXPERIMENT}?baseline=alpha:135m/v1",
        f"{API}/judges/{{experiment}}": f"{API}/judges/{EXPERIMENT}",
        f"{API}/config": f"{API}/config",
        f"{API}/jobs": f"{API}/jobs?limit=2",
        f"{API}/jobs/{{job_id}}": f"{API}/jobs/{job_id}",
        "/healthz": "/healthz",
        "/readyz": "/readyz",
    }
    for path, url in urls.items():
        response = served.get(url)
        assert response.status_code == 200, url
        jsonschema.validate(response.json(), schema_for(document, path, "get", 200))


def test_real_responses_to_changes_are_as_documented(served: ServedPanel, document: dict[str, Any]) -> None:
    template = {"models": "baseline:template"}
    plan = served.post(f"{API}/plan", json=template)
    jsonschema.validate(plan.json(), schema_for(document, f"{API}/plan", "post", 200))
    started = served.post(f"{API}/run", json=template)
    jsonschema.validate(started.json(), schema_for(document, f"{API}/run", "post", 202))
    cancelled = served.post(f"{API}/jobs/{started.json()['job']['id']}/cancel")
    jsonschema.validate(cancelled.json(), schema_for(document, f"{API}/jobs/{{job_id}}/cancel", "post", 200))
    sheet = served.post(f"{API}/judge/{EXPERIMENT}/sheets", json={"judge": "anna"})
    jsonschema.validate(sheet.json(), schema_for(document, f"{API}/judge/{{experiment}}/sheets", "post", 201))
    filled = fill(stored_sheet(served, sheet.json()["sheet"]))
    for query in ("?dry_run=true", ""):
        done = served.post(f"{API}/judge/{EXPERIMENT}/apply{query}", json=filled)
        jsonschema.validate(done.json(), schema_for(document, f"{API}/judge/{{experiment}}/apply", "post", 200))
    login = served.client.post("/login", json={"token": served.judge})
    jsonschema.validate(login.json(), schema_for(document, "/login", "post", 200))


def test_the_document_itself_is_behind_authorisation(served: ServedPanel) -> None:
    for path in (f"{API}/openapi.json", "/openapi.json", "/docs", "/redoc"):
        assert served.get(path, token=None).status_code in (401, 404)
