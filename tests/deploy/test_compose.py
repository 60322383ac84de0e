"""The compose file follows the specification and our rules: health checks, no default password, no open port."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deploy.compose_rules import find_problems

yaml: Any = importlib.import_module("yaml")  # it comes with MLflow, without types
DEPLOY = Path(__file__).parents[2] / "deploy"
FILE = DEPLOY / "compose.yaml"
SECRETS = ("TIPBENCH_ADMIN_TOKEN", *(f"AIRFLOW_{name}" for name in ("DB_PASSWORD", "JWT_SECRET")),
           "AIRFLOW_ADMIN_PASSWORD", "AIRFLOW_BENCH_PASSWORD")  # fmt: skip


@pytest.fixture
def compose() -> dict[str, Any]:
    read = yaml.safe_load(FILE.read_text("utf-8"))
    assert isinstance(read, dict)
    return copy.deepcopy(read)


def test_the_compose_file_follows_all_rules(compose: dict[str, Any]) -> None:
    assert find_problems(compose) == []


def test_a_violation_is_found(compose: dict[str, Any]) -> None:
    for service, key, value, expected in [
        ("panel", "restrat", "always", "restrat is no attribute"),
        ("panel", "restart", "sometimes", "restart is 'sometimes'"),
        ("panel", "restart", False, "restart is False"),
        ("panel", "ports", ["5180:5180"], "publishes 5180:5180"),
        ("panel", "healthcheck", None, "has no health check"),
        ("panel", "depends_on", {"redis": {"condition": "service_started"}}, "redis, which is not there"),
        ("panel", "depends_on", {"airflow-api": {"condition": "service_healthy"}}, "only there with a profile"),
        ("panel", "depends_on", {"mlflow": {"condition": "healthy"}}, "to be 'healthy'"),
        ("panel", "volumes", ["elsewhere:/data"], "elsewhere is not declared"),
        ("panel", "secrets", ["unknown"], "unknown is not declared"),
        ("panel", "environment", {"TIPBENCH_ADMIN_TOKEN": "changeme"}, "is written down"),
        ("panel", "environment", {"X_PASSWORD": "${X_PASSWORD:-admin}"}, "has a default"),
        ("panel", "environment", {"FLAG": True}, "not a text"),
        ("ollama", "image", "ollama/ollama:latest", "has no version"),
    ]:
        compose["services"][service][key] = value
        assert [problem for problem in find_problems(compose) if expected in problem]


def test_ollama_keeps_one_model_in_memory(compose: dict[str, Any]) -> None:
    assert compose["services"]["ollama"]["environment"]["OLLAMA_MAX_LOADED_MODELS"] == "1"


def test_airflow_starts_only_with_its_profile(compose: dict[str, Any]) -> None:
    always = {name for name, service in compose["services"].items() if not service.get("profiles")}
    assert always == {"mlflow", "ollama", "panel"}


def test_the_example_names_every_variable_and_has_no_values() -> None:
    example = dict(
        line.split("=", 1) for line in (DEPLOY / ".env.example").read_text("utf-8").splitlines() if "=" in line[:60]
        and not line.startswith("#")
    )  # fmt: skip
    assert set(SECRETS) <= set(example)
    assert set(example.values()) == {""}
    used = set(re.findall(r"\$\{([A-Z_]+)[:?-]", FILE.read_text("utf-8")))
    assert {name for name in used if name.startswith("TIPBENCH_")} <= set(example)


def test_the_file_with_the_secrets_is_never_committed_packed_or_copied_into_an_image() -> None:
    assert ".env" in (DEPLOY / ".gitignore").read_text("utf-8").split()
    packed = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert "deploy/.env" in packed["sdist"]["exclude"]
    assert (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()[0] == "**"


def test_the_database_is_healthy_when_it_answers_over_tcp(compose: dict[str, Any]) -> None:
    """A temporary server that creates the database listens on a socket only, and stops soon."""
    assert "--host=127.0.0.1" in compose["services"]["airflow-db"]["healthcheck"]["test"]


def test_the_links_and_the_server_of_airflow_have_one_public_address(compose: dict[str, Any]) -> None:
    panel, server = (compose["services"][name]["environment"] for name in ("panel", "airflow-api"))
    assert panel["TIPBENCH_AIRFLOW_PUBLIC_URL"] == server["AIRFLOW__API__BASE_URL"]


def test_the_image_has_the_airflow_that_is_tested() -> None:
    (tested,) = re.findall(
        r"^apache-airflow==(.+)$", (DEPLOY.parent / "airflow" / "constraints.txt").read_text(), re.MULTILINE
    )
    assert f"apache-airflow[postgres]=={tested}'" in (DEPLOY / "Dockerfile").read_text("utf-8")


def test_production_providers_of_airflow_have_exact_versions() -> None:
    pinned = {line.partition("==")[0] for line in (DEPLOY.parent / "airflow" / "constraints.txt").read_text().split()}
    providers = {f"apache-airflow-providers-{name}" for name in ("postgres", "edge3")}
    assert providers | {"psycopg2-binary", "asyncpg"} <= pinned


def test_every_environment_has_the_latest_pip_and_setuptools() -> None:
    commands = re.findall(r"-m venv .*", (DEPLOY.parent / "Makefile").read_text("utf-8"))
    assert len(commands) == 2
    assert all("--upgrade-deps" in line for line in commands)
    installed = re.findall(r"pip install .*", (DEPLOY / "Dockerfile").read_text("utf-8"))
    assert installed[0] == "pip install --upgrade pip setuptools"


def test_every_file_that_the_images_copy_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    for words in re.findall(r"^COPY (?:--\S+ )*(.+)$", text, re.MULTILINE):
        for source in words.split()[:-1]:
            assert (DEPLOY.parent / source).exists(), source


@pytest.mark.process
def test_the_entry_refuses_to_start_without_its_secrets() -> None:
    command = ["sh", str(DEPLOY / "airflow-entry.sh"), "version"]
    path = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 2
    assert "airflow_db_password" in done.stderr


def has_compose() -> bool:
    """Whether there is a docker with the compose command."""
    used = ["docker", "compose", "version"]
    return shutil.which("docker") is not None and subprocess.run(used, capture_output=True, check=False).returncode == 0


@pytest.mark.process
@pytest.mark.skipif(not has_compose(), reason="docker compose is missing; the rules above are still checked")
@pytest.mark.parametrize("profile", [(), ("--profile", "airflow")])
def test_docker_compose_accepts_the_file(profile: tuple[str, ...]) -> None:
    secrets = dict.fromkeys(SECRETS, "a-secret-only-for-this-test")
    command = ["docker", "compose", "--file", str(FILE), *profile, "config", "--quiet"]
    done = subprocess.run(command, env={**os.environ, **secrets}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
