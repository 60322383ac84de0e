"""Panel options, validated from flags and settings."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tipbench.errors import UsageError
from tipbench.http import matching_server, strip_login
from tipbench.plan.collect_config import URL_KEYS, CollectConfig
from tipbench.plan.suite import builtin_suites
from tipbench.settings import Settings
from tipbench.web.errors import Forbidden, validate_part
from tipbench.web.security import Hosts, host_without_port, is_loopback_name

MIN_ADMIN_TOKEN_LENGTH = 32  # characters, so that it cannot be guessed
_MAX_SECRET_LENGTH = 200  # characters


@dataclass(frozen=True)
class PanelOptions:
    """Options of the panel."""

    host: str = "127.0.0.1"  # to listen on
    port: int = 0
    hosts: Hosts = field(default_factory=lambda: Hosts(frozenset()))  # accepted in the Host header
    proxies: tuple[str, ...] = ()  # reverse proxies whose X-Forwarded headers are trusted
    # The next three are allowed in addition to the configured servers and suite.
    ollama_urls: tuple[str, ...] = ()
    mlflow_urls: tuple[str, ...] = ()
    suites: tuple[Path, ...] = ()  # folders
    session_s: int = 12 * 3600
    admin_token: str | None = None

    @property
    def on_loopback(self) -> bool:
        return is_loopback_name(self.host.lower())


def panel_options(settings: Settings, *, host: str | None = None, port: int | None = None) -> PanelOptions:
    """Return the options from flags and settings. Raises UsageError if one is invalid."""
    configured = settings.operator_config(host=host, port=port)
    panel_host = configured.panel_host.strip().strip("[]")
    try:
        address = ipaddress.ip_address(panel_host)
    except ValueError:
        if host_without_port(panel_host) is None:
            raise UsageError(
                f"--host must be a name or an address without a port (got {configured.panel_host[:80]!r}), "
                "for example 127.0.0.1"
            ) from None
        listen_host, on_all_interfaces = panel_host, False
    else:
        listen_host, on_all_interfaces = str(address), address.is_unspecified
    accepted_hosts = list(configured.panel_hosts)
    if not on_all_interfaces:  # a client cannot use 0.0.0.0 or :: as a host name
        accepted_hosts.append(listen_host)
    admin_token = settings.get("admin_token")
    if admin_token is not None:
        check_secret("TIPBENCH_ADMIN_TOKEN", admin_token, MIN_ADMIN_TOKEN_LENGTH)
        if " " in admin_token:
            raise UsageError("TIPBENCH_ADMIN_TOKEN must not contain spaces. Create one with `openssl rand -hex 32`.")
    return PanelOptions(
        host=listen_host,
        port=configured.panel_port,
        hosts=Hosts.of(accepted_hosts),
        proxies=configured.panel_proxies,
        ollama_urls=configured.panel_urls,  # TIPBENCH_PANEL_URLS lists Ollama servers
        mlflow_urls=configured.panel_mlflow_urls,
        suites=tuple(Path(each).expanduser() for each in configured.panel_suites),
        session_s=max(1, int(configured.panel_session_hours * 3600)),
        admin_token=admin_token,
    )


def check_secret(variable: str, text: str, min_length: int) -> None:
    """Raise UsageError if a secret has an invalid length or character. The message does not contain the secret."""
    has_valid_length = min_length <= len(text) <= _MAX_SECRET_LENGTH
    if not (has_valid_length and text.isascii() and text.isprintable()):
        raise UsageError(
            f"{variable} must have {min_length} to {_MAX_SECRET_LENGTH} printable ASCII characters (got {len(text)}). "
            "Create one with `openssl rand -hex 32`."
        )


@dataclass(frozen=True)
class OperatorPermissions:
    """Servers and suites that the operator allows. URLs are used as configured, including their credentials."""

    settings: Settings
    additional_urls: Mapping[str, tuple[str, ...]]  # by configuration key
    suites: tuple[Path, ...] = ()

    @classmethod
    def of(cls, settings: Settings, options: PanelOptions) -> OperatorPermissions:
        """Return the permissions for the configured servers and those in the options."""
        additional_urls = {"ollama_url": options.ollama_urls, "mlflow_url": options.mlflow_urls}
        return cls(settings, additional_urls, options.suites)

    @property
    def urls(self) -> Mapping[str, tuple[str, ...]]:
        """The allowed servers by configuration key, without those that are found automatically."""
        return {key: self.settings.allowed_servers(key, self.additional_urls[key], find=False) for key in URL_KEYS}

    def config(self, values: Mapping[str, Any]) -> CollectConfig:
        """Return the settings overridden by `values`. Raises Invalid or Forbidden with the path of the wrong value."""
        # An mlflow_url of None means the server from the settings, or one that the panel finds.
        requested = {key: value for key, value in values.items() if not (key == "mlflow_url" and value is None)}
        defaults = {key: value for key, value in self.settings.values.items() if key in CollectConfig.model_fields}
        config = validate_part(CollectConfig, {**defaults, **requested}, "body")
        allowed_urls = {key: self._allowed_url(key, getattr(config, key)) for key in URL_KEYS if key in requested}
        if "suite" in requested:
            self.check_suite(config.suite)
        return config.model_copy(update=allowed_urls)

    def schema(self) -> dict[str, Any]:
        """Return the configuration's JSON schema, with the panel's defaults and allowed URLs."""
        schema = CollectConfig.model_json_schema()
        properties = schema["properties"]
        for key, value in self.config({}).model_dump().items():
            properties[key]["default"] = strip_login(value) if key in URL_KEYS and value else value
        for key in URL_KEYS:
            servers = map(strip_login, self.settings.allowed_servers(key, self.additional_urls[key]))
            # An mlflow_url of null means the configured server, or one that the panel finds.
            properties[key]["enum"] = [None, *servers] if key == "mlflow_url" else [*servers]
        return schema

    def check_suite(self, suite: str) -> None:
        """Raise Forbidden unless the suite is built in, configured, or in an allowed folder."""
        if suite in builtin_suites() or suite == self.settings.get("suite"):
            return
        try:
            path = Path(suite).expanduser().resolve()
            is_allowed = any(path.is_relative_to(folder.resolve()) for folder in self.suites)
        except (OSError, ValueError, RuntimeError):  # invalid path, or unknown user in ~user
            is_allowed = False
        if not is_allowed:
            raise Forbidden(
                f"suite must be one of {', '.join(builtin_suites())}, or a folder under TIPBENCH_PANEL_SUITES "
                f"(got {suite[:120]!r}).",
                code="not_allowed",
                path="body.suite",
            )

    def _allowed_url(self, key: str, url: str) -> str:
        """Return the allowed URL of the server at `url`, with its credentials. Raises Forbidden."""
        servers = self.settings.allowed_servers(key, self.additional_urls[key])
        allowed_url = matching_server(url, servers)
        if allowed_url is None:
            shown_servers = ", ".join(map(strip_login, servers))
            variable = "TIPBENCH_PANEL_MLFLOW_URLS" if key == "mlflow_url" else "TIPBENCH_PANEL_URLS"
            raise Forbidden(
                f"{key} must be a server that the operator allows: {shown_servers} (got {strip_login(url)[:120]}). "
                f"{variable} adds others.",
                code="not_allowed",
                path=f"body.{key}",
            )
        return allowed_url
