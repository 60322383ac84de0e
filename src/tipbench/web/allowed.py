"""What a run's configuration may name when it comes over the network: servers and suites the operator has allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tipbench.addresses import identity_of, without_login
from tipbench.plan.config import DEFAULT_OLLAMA_URL, CollectConfig
from tipbench.plan.suite import builtin_suites
from tipbench.settings import Settings
from tipbench.web.errors import Forbidden, checked
from tipbench.web.options import PanelOptions

_URLS = ("ollama_url", "mlflow_url")


@dataclass(frozen=True)
class Allowed:
    """The operator's lists. A URL is used as the operator spelt it, with the login it may hold."""

    settings: Settings
    urls: Mapping[str, tuple[str, ...]]  # by key of the configuration
    suites: tuple[Path, ...] = ()

    @classmethod
    def of(cls, settings: Settings, options: PanelOptions) -> Allowed:
        """What is configured is allowed, and what is listed beside it."""
        own = {"ollama_url": settings.get("ollama_url") or DEFAULT_OLLAMA_URL, "mlflow_url": settings.get("mlflow_url")}
        urls = {key: tuple(dict.fromkeys(url for url in (own[key], *options.urls) if url)) for key in _URLS}
        return cls(settings, urls, options.suites)

    def config(self, given: Mapping[str, Any]) -> CollectConfig:
        """The configuration that these values and the settings make. Invalid or Forbidden names the wrong one."""
        asked = {key: value for key, value in given.items() if not (key == "mlflow_url" and value is None)}
        values = {key: value for key, value in self.settings.values.items() if key in CollectConfig.model_fields}
        config = checked(CollectConfig, {**values, **asked}, "body")
        changes = {key: self._url(key, getattr(config, key)) for key in _URLS if key in asked}
        if "suite" in asked:
            self.check_suite(config.suite)
        return config.model_copy(update=changes)

    def schema(self) -> dict[str, Any]:
        """The configuration's JSON schema, with the defaults that apply here and the URLs that are allowed."""
        schema = CollectConfig.model_json_schema()
        properties = schema["properties"]
        for key, value in self.config({}).model_dump().items():
            shown = without_login(value) if key in _URLS and value else value
            properties[key]["default"] = shown
        for key in _URLS:
            nothing = [] if key == "ollama_url" else [None]
            properties[key]["enum"] = [*nothing, *(without_login(url) for url in self.urls[key])]
        return schema

    def check_suite(self, suite: str) -> None:
        """Forbidden unless it is built in, configured, or under a folder the operator has allowed."""
        if suite in builtin_suites() or suite == self.settings.get("suite"):
            return
        try:
            there = Path(suite).expanduser().resolve()
            inside = any(there.is_relative_to(folder.resolve()) for folder in self.suites)
        except (OSError, ValueError, RuntimeError):  # a name no file system takes, a home that nobody has
            inside = False
        if not inside:
            raise Forbidden(
                f"suite is one of {', '.join(builtin_suites())}, or a folder under TIPBENCH_PANEL_SUITES "
                f"(got {suite[:120]!r}).",
                code="not_allowed",
                path="body.suite",
            )

    def _url(self, key: str, url: str) -> str:
        known = {identity_of(each): each for each in self.urls[key]}
        if identity_of(url) not in known:
            there = ", ".join(without_login(each) for each in self.urls[key]) or "none"
            raise Forbidden(
                f"{key} is one of the servers the operator allows: {there} (got {without_login(url)[:120]}). "
                "TIPBENCH_PANEL_URLS adds others.",
                code="not_allowed",
                path=f"body.{key}",
            )
        return known[identity_of(url)]
