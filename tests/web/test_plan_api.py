"""The plan over HTTP, the configuration schema, and the allowed servers and suites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from tipbench.cli.main import app
from tipbench.plan.collect_config import CollectConfig
from web.panels import API, EXPERIMENT, ServedPanel, answered_store, serve_panel

SMALL = {"models": "baseline:template", "prompts": "v1", "n_scenarios": 2, "n_tips": 3}


def schema_of(served: ServedPanel) -> Any:
    return served.get(f"{API}/config").json()


def test_the_schema_has_every_key_of_collect(served: ServedPanel) -> None:
    schema = schema_of(served)
    assert set(schema["properties"]) == set(CollectConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert all(value["description"] for value in schema["properties"].values())


def test_the_schemas_defaults_are_a_configuration_that_is_accepted(served: ServedPanel) -> None:
    schema = schema_of(served)
    defaults = {key: value["default"] for key, value in schema["properties"].items()}
    jsonschema.validate(defaults, schema)
    assert served.panel.permissions.config(defaults) == CollectConfig()


def test_the_schema_shows_what_applies_on_this_server(home: Path) -> None:
    environment = {"TIPBENCH_N_TIPS": "3", "OLLAMA_HOST": "gpu-box", "TIPBENCH_PANEL_URLS": "http://other:11434"}
    with serve_panel(home, environment=environment) as served:
        properties = schema_of(served)["properties"]
    assert properties["n_tips"]["default"] == 3
    assert properties["ollama_url"]["default"] == "http://gpu-box:11434"
    assert properties["ollama_url"]["enum"] == ["http://gpu-box:11434", "http://other:11434"]


def test_credentials_are_not_in_the_schema(home: Path) -> None:
    environment = {"MLFLOW_TRACKING_URI": "http://me:hidden@mlflow:5000"}
    with serve_panel(home, environment=environment) as served:
        text = served.get(f"{API}/config").text
        assert served.panel.permissions.config({}).mlflow_url == "http://me:hidden@mlflow:5000"
    assert "hidden" not in text
    assert "http://mlflow:5000" in text


def test_a_plan_counts_cells_and_generates_nothing(served: ServedPanel) -> None:
    body = served.post(f"{API}/plan", json=SMALL).json()
    assert (body["cells"], body["recorded"], body["to_generate"]) == (2, 0, 2)
    assert body["refused"] == []
    assert served.store.experiment("tip-bench-auto") is None


def test_a_plan_is_the_object_that_the_command_prints(served: ServedPanel) -> None:
    options = ("--models", "baseline:template", "--prompts", "v1", "--n-scenarios", "2", "--n-tips", "3")
    printed = CliRunner().invoke(app, ["plan", "--json", *options, "--mlflow-url", "http://127.0.0.1:9"])
    body = served.post(f"{API}/plan", json=SMALL).json()
    assert body.pop("warnings") == []
    assert body == json.loads(printed.stdout)


def test_an_empty_body_is_the_plan_of_the_defaults(home: Path) -> None:
    environment = {"TIPBENCH_MODELS": "baseline:template", "TIPBENCH_PROMPTS": "v1"}
    with serve_panel(home, answered_store(), environment) as served:
        assert served.post(f"{API}/plan").json()["cells"] == 8


def test_what_is_recorded_is_not_planned_again(served: ServedPanel) -> None:
    from support.collecting import Collecting

    done = Collecting(served.home, "http://127.0.0.1:9", store=served.store)  # type: ignore[arg-type]
    done.run(**{**SMALL, "experiment": EXPERIMENT})
    body = served.post(f"{API}/plan", json={**SMALL, "num_predict": 64, "experiment": EXPERIMENT}).json()
    assert (body["cells"], body["recorded"], body["to_generate"]) == (2, 2, 0)


def test_a_plan_works_without_mlflow(served: ServedPanel) -> None:
    served.store.away = True  # type: ignore[attr-defined]
    body = served.post(f"{API}/plan", json=SMALL).json()
    assert body["cells"] == 2
    assert "counts nothing as recorded" in body["warnings"][0]


def test_an_unreachable_ollama_is_reported(home: Path) -> None:
    with serve_panel(home, environment={"OLLAMA_HOST": "127.0.0.1:9"}) as served:
        assert served.error(served.post(f"{API}/plan", json={"models": "a:1b"})) == (503, "ollama_away")


def test_an_invalid_configuration_is_reported_with_its_key(served: ServedPanel) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n_tips": 0}, "body.n_tips"),
        ({"n_tips": "many"}, "body.n_tips"),
        ({"n_tipps": 1}, "body.n_tipps"),
        ({"experiment": "mine"}, "body.experiment"),
        ({"ollama_url": "file:///etc/passwd"}, "body.ollama_url"),
        ({"num_predict": 5000}, "body"),
        ({"temperature": None}, "body.temperature"),
        ({"models": ""}, "body.models"),
    ]
    for body, place in cases:
        response = served.post(f"{API}/plan", json=body)
        assert (response.status_code, response.json()["error"]["path"]) == (422, place)


def test_an_unknown_prompt_is_rejected(served: ServedPanel) -> None:
    for prompt in ["v9", "../v1"]:
        assert served.error(served.post(f"{API}/plan", json={**SMALL, "prompts": prompt}))[0] == 400


# allowed servers and folders

URLS = {
    "OLLAMA_HOST": "gpu-box:11434",
    "MLFLOW_TRACKING_URI": "http://me:hidden@mlflow:5000/base",
    "TIPBENCH_PANEL_URLS": "https://other.example/ollama, http://10.0.0.7:11434",
    "TIPBENCH_PANEL_MLFLOW_URLS": "https://other.example/mlflow",
}


@pytest.fixture
def restricted_panel(home: Path) -> Any:
    with serve_panel(home, environment=URLS) as served:
        yield served


def test_an_allowed_server_is_used_as_configured(restricted_panel: ServedPanel) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("ollama_url", "http://gpu-box:11434", "http://gpu-box:11434"),
        ("ollama_url", "HTTP://GPU-BOX:11434/", "http://gpu-box:11434"),
        ("ollama_url", "https://other.example:443/ollama", "https://other.example/ollama"),
        ("mlflow_url", "http://mlflow:5000/base", "http://me:hidden@mlflow:5000/base"),
        ("mlflow_url", "https://other.example/mlflow/", "https://other.example/mlflow"),
        ("mlflow_url", "http://you:guess@mlflow:5000/base/", "http://me:hidden@mlflow:5000/base"),
        ("mlflow_url", None, "http://me:hidden@mlflow:5000/base"),
    ]
    for key, url, used in cases:
        assert getattr(restricted_panel.panel.permissions.config({key: url}), key) == used


def test_without_a_configured_mlflow_those_that_the_panel_finds_are_allowed(home: Path) -> None:
    with serve_panel(home, environment={}) as served:
        for url in ("http://localhost:5000", "http://127.0.0.1:5000/mlflow/"):
            assert served.post(f"{API}/plan", json={**SMALL, "mlflow_url": url}).status_code == 200
        listed = served.get(f"{API}/config").json()["properties"]["mlflow_url"]["enum"]
        assert listed[:2] == [None, "http://localhost:5000"]
        other = served.post(f"{API}/plan", json={**SMALL, "mlflow_url": "http://localhost:5001"})
        assert served.error(other) == (403, "not_allowed")


def test_a_server_listed_for_ollama_is_not_allowed_for_mlflow_and_the_reverse(restricted_panel: ServedPanel) -> None:
    for key, url in (("mlflow_url", "http://10.0.0.7:11434"), ("ollama_url", "https://other.example/mlflow")):
        assert restricted_panel.error(restricted_panel.post(f"{API}/plan", json={**SMALL, key: url}))[0] == 403


def test_a_server_that_is_not_allowed_is_never_called(restricted_panel: ServedPanel) -> None:
    for key in ["ollama_url", "mlflow_url"]:
        for url in [
            "http://169.254.169.254/latest/meta-data",
            "http://localhost:6379",
            "http://gpu-box:22",
            "https://gpu-box:11434",
            "http://gpu-box:11434/x",
            "http://gpu-box:11434@evil.example",
            "http://gpu-box.evil.example:11434",
            "http://evil.example/?http://gpu-box:11434",
            "http://evil.example#http://gpu-box:11434",
        ]:
            response = restricted_panel.post(f"{API}/plan", json={**SMALL, key: url})
            assert restricted_panel.error(response) == (403, "not_allowed")
            assert response.json()["error"]["path"] == f"body.{key}"
            assert "hidden" not in response.text


def test_a_suite_outside_the_allowed_folders_is_rejected(served: ServedPanel) -> None:
    for suite in ["/etc", "../suites/tips", "~/suites", "tips/../../x", "\0", "x" * 5000]:
        assert served.error(served.post(f"{API}/plan", json={**SMALL, "suite": suite})) == (403, "not_allowed")


def test_a_suite_in_an_allowed_folder_is_accepted(home: Path, tmp_path: Path) -> None:
    import shutil

    import tipbench

    folder = tmp_path / "suites" / "mine"
    shutil.copytree(Path(tipbench.__file__).parent / "suites" / "tips", folder)
    with serve_panel(home, environment={"TIPBENCH_PANEL_SUITES": str(tmp_path / "suites")}) as served:
        assert served.post(f"{API}/plan", json={**SMALL, "suite": str(folder)}).status_code == 200
        outside = {**SMALL, "suite": str(folder / ".." / ".." / "elsewhere")}
        assert served.error(served.post(f"{API}/plan", json=outside)) == (403, "not_allowed")


def test_a_symlink_out_of_an_allowed_folder_is_rejected(home: Path, tmp_path: Path) -> None:
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "link").symlink_to("/etc")
    with serve_panel(home, environment={"TIPBENCH_PANEL_SUITES": str(tmp_path / "suites")}) as served:
        body = {**SMALL, "suite": str(tmp_path / "suites" / "link")}
        assert served.error(served.post(f"{API}/plan", json=body)) == (403, "not_allowed")
