"""Panel options, validated from flags and settings."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tipbench.errors import UsageError
from tipbench.http import canonical_url, is_http_url, strip_login
from tipbench.plan.config import DEFAULT_OLLAMA_URL, CollectConfig
from tipbench.plan.suite import builtin_suites
from tipbench.settings import Settings
from tipbench.web.errors import Forbidden, checked
from tipbench.web.security import Hosts, host_name, is_loopback_name

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 5180
DEFAULT_SESSION_HOURS = 12.0
SHORTEST_ADMIN_TOKEN = 32  # long enough that it cannot be guessed, like generated tokens
_LONGEST_ADMIN_TOKEN = 200
_LONGEST_SESSION_HOURS = 24.0 * 31


@dataclass(frozen=True)
class PanelOptions:
    """Network options and limits of the panel."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    hosts: Hosts = field(default_factory=lambda: Hosts(frozenset()))
    proxies: tuple[str, ...] = ()
    ollama_urls: tuple[str, ...] = ()
    mlflow_urls: tuple[str, ...] = ()
    suites: tuple[Path, ...] = ()
    session_s: int = int(DEFAULT_SESSION_HOURS * 3600)
    admin_token: str | None = None

    @property
    def on_loopback(self) -> bool:
        """Whether the panel listens on loopback only."""
        return is_loopback_name(self.host.lower())


def panel_options(settings: Settings, *, host: str | None = None, port: int | None = None) -> PanelOptions:
    """Return the options from flags and settings. Raises UsageError with the invalid setting."""
    chosen = _host(host or settings.get("panel_host") or DEFAULT_HOST)
    names = settings.listed("panel_hosts") + _own_name(chosen)
    return PanelOptions(
        host=chosen,
        port=_port(settings, port),
        hosts=Hosts.of(names),
        proxies=tuple(_proxy(each) for each in settings.listed("panel_proxies")),
        ollama_urls=tuple(_url("panel_urls", each) for each in settings.listed("panel_urls")),
        mlflow_urls=tuple(_url("panel_mlflow_urls", each) for each in settings.listed("panel_mlflow_urls")),
        suites=tuple(Path(each).expanduser() for each in settings.listed("panel_suites")),
        session_s=_session_s(settings),
        admin_token=_admin_token(settings.get("admin_token")),
    )


def _host(text: str) -> str:
    name = text.strip().strip("[]")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if host_name(name) is None or ":" in name:
            raise UsageError(
                f"--host must be a name or an address without a port (got {text[:80]!r}), for example 127.0.0.1"
            ) from None
        return name


def _own_name(host: str) -> tuple[str, ...]:
    """Return the listening address as an allowed host, unless it is unspecified (0.0.0.0 or ::)."""
    try:
        return () if ipaddress.ip_address(host).is_unspecified else (host,)
    except ValueError:
        return (host,)


def _port(settings: Settings, flag: int | None) -> int:
    text = str(flag) if flag is not None else settings.get("panel_port") or str(DEFAULT_PORT)
    if not text.isascii() or not text.isdigit() or not 0 <= int(text[:6]) <= 65535:
        raise UsageError(
            f"The panel's port must be a number from 0 to 65535; 0 chooses a free one (got {text[:40]!r})."
        )
    return int(text)


def _proxy(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False) if "/" in text else ipaddress.ip_address(text))
    except ValueError:
        raise UsageError(
            f"panel_proxies must be addresses of reverse proxies, separated by commas (got {text[:80]!r}), "
            "for example 127.0.0.1"
        ) from None


def _url(key: str, text: str) -> str:
    if not is_http_url(text):
        raise UsageError(
            f"{key} must be HTTP URLs, separated by commas (got {text[:80]!r}), for example http://gpu-box:11434"
        )
    return text.rstrip("/")


def _session_s(settings: Settings) -> int:
    text = settings.get("panel_session_hours") or str(DEFAULT_SESSION_HOURS)
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours <= _LONGEST_SESSION_HOURS:
        raise UsageError(
            f"panel_session_hours must be a number of hours above 0, at most {_LONGEST_SESSION_HOURS:g} "
            f"(got {text[:40]!r})."
        )
    return max(1, int(hours * 3600))


def _admin_token(text: str | None) -> str | None:
    """Validate the operator's token, chosen by the operator; errors omit its value."""
    if text is None:
        return None
    if not SHORTEST_ADMIN_TOKEN <= len(text) <= _LONGEST_ADMIN_TOKEN or not text.isascii() or not text.isprintable():
        raise UsageError(
            f"TIPBENCH_ADMIN_TOKEN must have {SHORTEST_ADMIN_TOKEN} to {_LONGEST_ADMIN_TOKEN} printable ASCII "
            f"characters (got {len(text)}). Create one with `openssl rand -hex 32`."
        )
    if " " in text:
        raise UsageError("TIPBENCH_ADMIN_TOKEN must not contain spaces. Create one with `openssl rand -hex 32`.")
    return text


_URLS = ("ollama_url", "mlflow_url")
_LISTS = {"ollama_url": "TIPBENCH_PANEL_URLS", "mlflow_url": "TIPBENCH_PANEL_MLFLOW_URLS"}


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
        listed = {"ollama_url": options.ollama_urls, "mlflow_url": options.mlflow_urls}
        urls = {key: tuple(dict.fromkeys(url for url in (own[key], *listed[key]) if url)) for key in _URLS}
        return cls(settings, urls, options.suites)

    def config(self, given: Mapping[str, Any]) -> CollectConfig:
        """Return the configuration of `given` over the settings. Raises Invalid or Forbidden with the wrong key."""
        named = {key: value for key, value in given.items() if not (key == "mlflow_url" and value is None)}
        values = {key: value for key, value in self.settings.values.items() if key in CollectConfig.model_fields}
        config = checked(CollectConfig, {**values, **named}, "body")
        changes = {key: self._url(key, getattr(config, key)) for key in _URLS if key in named}
        if "suite" in named:
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
            path = Path(suite).expanduser().resolve()
            inside = any(path.is_relative_to(folder.resolve()) for folder in self.suites)
        except (OSError, ValueError, RuntimeError):  # invalid path, or unknown user in ~user
            inside = False
        if not inside:
            raise Forbidden(
                f"suite must be one of {', '.join(builtin_suites())}, or a folder under TIPBENCH_PANEL_SUITES "
                f"(got {suite[:120]!r}).",
                code="not_allowed",
                path="body.suite",
            )

    def _url(self, key: str, url: str) -> str:
        known = {canonical_url(each): each for each in self.urls[key]}
        if canonical_url(url) not in known:
            allowed_urls = ", ".join(strip_login(each) for each in self.urls[key]) or "none"
            raise Forbidden(
                f"{key} must be a server that the operator allows: {allowed_urls} (got {strip_login(url)[:120]}). "
                f"{_LISTS[key]} adds others.",
                code="not_allowed",
                path=f"body.{key}",
            )
        return known[canonical_url(url)]
