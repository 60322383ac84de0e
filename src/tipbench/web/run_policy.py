"""Run policy: which servers and suites a request may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tipbench.http import canonical_url, strip_login
from tipbench.plan.config import DEFAULT_OLLAMA_URL, CollectConfig
from tipbench.plan.suite import builtin_suites
from tipbench.settings import Settings
from tipbench.web.errors import Forbidden, checked
from tipbench.web.options import PanelOptions

_URLS = ("ollama_url", "mlflow_url")


@dataclass(frozen=True)
class RunPolicy:
    """Servers and suites the operator allows. URLs are used as configured, including credentials."""

    settings: Settings
    urls: Mapping[str, tuple[str, ...]]  # by configuration key
    suites: tuple[Path, ...] = ()

    @classmethod
    def of(cls, settings: Settings, options: PanelOptions) -> RunPolicy:
        """Allow the configured servers and those listed in the options."""
        own = {"ollama_url": settings.get("ollama_url") or DEFAULT_OLLAMA_URL, "mlflow_url": settings.get("mlflow_url")}
        urls = {key: tuple(dict.fromkeys(url for url in (own[key], *options.urls) if url)) for key in _URLS}
        return cls(settings, urls, options.suites)

    def config(self, given: Mapping[str, Any]) -> CollectConfig:
        """Return the configuration of `given` over the settings. Raises Invalid or Forbidden with the wrong key."""
        asked = {key: value for key, value in given.items() if not (key == "mlflow_url" and value is None)}
        values = {key: value for key, value in self.settings.values.items() if key in CollectConfig.model_fields}
        config = checked(CollectConfig, {**values, **asked}, "body")
        changes = {key: self._url(key, getattr(config, key)) for key in _URLS if key in asked}
        if "suite" in asked:
            self.check_suite(config.suite)
        return config.model_copy(update=changes)

    def schema(self) -> dict[str, Any]:
        """Return the configuration's JSON schema, with this server's defaults and allowed URLs."""
        schema = CollectConfig.model_json_schema()
        properties = schema["properties"]
        for key, value in self.config({}).model_dump().items():
            shown = strip_login(value) if key in _URLS and value else value
            properties[key]["default"] = shown
        for key in _URLS:
            nothing = [] if key == "ollama_url" else [None]
            properties[key]["enum"] = [*nothing, *(strip_login(url) for url in self.urls[key])]
        return schema

    def check_suite(self, suite: str) -> None:
        """Raise Forbidden unless the suite is built in, configured, or in an allowed folder."""
        if suite in builtin_suites() or suite == self.settings.get("suite"):
            return
        try:
            there = Path(suite).expanduser().resolve()
            inside = any(there.is_relative_to(folder.resolve()) for folder in self.suites)
        except (OSError, ValueError, RuntimeError):  # invalid path, or unknown user in ~user
            inside = False
        if not inside:
            raise Forbidden(
                f"suite is one of {', '.join(builtin_suites())}, or a folder under TIPBENCH_PANEL_SUITES "
                f"(got {suite[:120]!r}).",
                code="not_allowed",
                path="body.suite",
            )

    def _url(self, key: str, url: str) -> str:
        known = {canonical_url(each): each for each in self.urls[key]}
        if canonical_url(url) not in known:
            there = ", ".join(strip_login(each) for each in self.urls[key]) or "none"
            raise Forbidden(
                f"{key} is one of the servers the operator allows: {there} (got {strip_login(url)[:120]}). "
                "TIPBENCH_PANEL_URLS adds others.",
                code="not_allowed",
                path=f"body.{key}",
            )
        return known[canonical_url(url)]
