"""Rules for deploy/compose.yaml, of the Compose specification and our own; a violation is a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

TOP = {"name", "services", "volumes", "networks", "secrets", "configs", "include"}
SERVICE = {
    *("build", "cap_add", "cap_drop", "command", "configs", "depends_on", "deploy", "entrypoint", "env_file"),
    *("environment", "expose", "healthcheck", "hostname", "image", "init", "labels", "logging", "networks", "ports"),
    *("profiles", "read_only", "restart", "secrets", "security_opt", "shm_size", "stop_grace_period", "stop_signal"),
    *("tmpfs", "ulimits", "user", "volumes", "working_dir"),
}
BUILD = {"args", "context", "dockerfile", "target", "platforms"}
HEALTH = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
SECRET_SOURCES = {"file", "environment", "external", "name"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
RESTART = re.compile(r"no|always|unless-stopped|on-failure(:\d+)?")
DURATION = re.compile(r"(\d+(h|m|s|ms|us))+")
NAME = re.compile(r"[a-zA-Z0-9._-]+")
LOCAL_PORT = re.compile(r"127\.0\.0\.1:(\$\{[A-Z_]+:-\d+\}|\d+):\d+")
SENSITIVE = re.compile(r"PASSWORD|TOKEN|SECRET|_KEY")
FROM_OUTSIDE = re.compile(r"\$\{[A-Z_]+:(\?[^}]+|-)\}")  # required with a reason, or empty by default


def find_problems(compose: Mapping[str, Any]) -> list[str]:
    """Return the violations in a parsed compose file."""
    services = compose.get("services", {})
    return [
        *(f"{key} is no top-level element" for key in set(compose) - TOP if not key.startswith("x-")),
        *(f"the project's name {name!r} is not in small letters" for name in [compose.get("name", "")]
          if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name)),
        *(problem for name, service in services.items() for problem in _service_problems(name, service, compose)),
        *(f"the secret {name} has {len(SECRET_SOURCES & set(source))} sources"
          for name, source in compose.get("secrets", {}).items() if len(set(source) & SECRET_SOURCES) != 1),
    ]  # fmt: skip


def _service_problems(name: str, service: Mapping[str, Any], compose: Mapping[str, Any]) -> Iterator[str]:
    if not NAME.fullmatch(name):
        yield f"{name!r} is no name of a service"
    yield from (f"{name}: {key} is no attribute of a service" for key in set(service) - SERVICE)
    if not {"image", "build"} & set(service):
        yield f"{name}: has neither image nor build"
    yield from _image_problems(name, service)
    yield from _restart_problems(name, service)
    yield from _health_problems(name, service)
    yield from _dependency_problems(name, service, compose["services"])
    yield from _mount_problems(name, service, compose)
    yield from (
        f"{name}: publishes {port} beyond this machine"
        for port in service.get("ports", ())
        if not LOCAL_PORT.fullmatch(str(port))
    )
    yield from _environment_problems(name, service.get("environment", {}))


def _image_problems(name: str, service: Mapping[str, Any]) -> Iterator[str]:
    image = str(service.get("image", ""))
    if image and (":" not in image or image.endswith(":latest")):
        yield f"{name}: the image {image} has no version"
    build = service.get("build", {})
    yield from (f"{name}: {key} is no attribute of a build" for key in set(build) - BUILD)


def _restart_problems(name: str, service: Mapping[str, Any]) -> Iterator[str]:
    restart = service.get("restart", "")
    if not isinstance(restart, str) or not RESTART.fullmatch(restart):
        yield f"{name}: restart is {restart!r}"


def _health_problems(name: str, service: Mapping[str, Any]) -> Iterator[str]:
    health = service.get("healthcheck")
    if health is None:
        if service.get("restart") != "no":
            yield f"{name}: runs on, and has no health check"
        return
    yield from (f"{name}: {key} is no attribute of a health check" for key in set(health) - HEALTH)
    for key in ("interval", "timeout", "start_period"):
        if not DURATION.fullmatch(str(health.get(key, ""))):
            yield f"{name}: {key} {health.get(key)!r} is no duration"
    test = health.get("test")
    if not isinstance(test, list) or test[0] not in ("CMD", "CMD-SHELL", "NONE"):
        yield f"{name}: the health check does not begin with CMD, CMD-SHELL or NONE"
    if not isinstance(health.get("retries"), int):
        yield f"{name}: retries is no number"


def _dependency_problems(name: str, service: Mapping[str, Any], services: Mapping[str, Any]) -> Iterator[str]:
    for other, dependency in service.get("depends_on", {}).items():
        condition = dependency.get("condition")
        target = services.get(other)
        if target is None:
            yield f"{name}: depends on {other}, which is not there"
        elif condition not in CONDITIONS:
            yield f"{name}: waits for {other} to be {condition!r}"
        elif condition == "service_healthy" and "healthcheck" not in target:
            yield f"{name}: waits for the health of {other}, which has no check"
        elif condition == "service_completed_successfully" and target.get("restart") != "no":
            yield f"{name}: waits for the end of {other}, which is started again and again"
        elif set(target.get("profiles", ())) - set(service.get("profiles", ())):
            yield f"{name}: depends on {other}, which is only there with a profile"


def _mount_problems(name: str, service: Mapping[str, Any], compose: Mapping[str, Any]) -> Iterator[str]:
    for mount in service.get("volumes", ()):
        source, _, target = str(mount).partition(":")
        if not target.startswith("/"):
            yield f"{name}: {mount} is mounted nowhere"
        if not source.startswith((".", "/")) and source not in compose.get("volumes", {}):
            yield f"{name}: the volume {source} is not declared"
    for secret in service.get("secrets", ()):
        if secret not in compose.get("secrets", {}):
            yield f"{name}: the secret {secret} is not declared"


def _environment_problems(name: str, variables: Mapping[str, Any]) -> Iterator[str]:
    for key, value in variables.items():
        if not isinstance(value, str):
            yield f"{name}: {key} is {value!r}, not a text; YAML reads it as something else"
        elif SENSITIVE.search(key) and not key.endswith("_FILE") and not FROM_OUTSIDE.fullmatch(value):
            yield f"{name}: {key} is written down, or has a default"
