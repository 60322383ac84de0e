"""What the operator has configured, as it may be shown: no secrets, no logins in addresses."""

from __future__ import annotations

from dataclasses import dataclass

from tipbench.addresses import without_login
from tipbench.settings import SETTINGS, Setting, Settings
from tipbench.web.deps import Panel
from tipbench.web.hook_options import shown_address
from tipbench.web.panel.showing import duration

_SECRET = ("_username", "_password", "_token", "_secret")  # endings of keys whose values nobody is shown
_ADDRESSES = frozenset(
    {"ollama_url", "mlflow_url", "mlflow_public_url", "panel_urls", "airflow_url", "airflow_public_url"}
)
_MACHINE = frozenset({"home", "no_color"})  # of the process, not of the panel


@dataclass(frozen=True)
class Configured:
    """One setting: what applies, and where it was set; `source` is None for a default."""

    key: str
    value: str
    meaning: str
    source: str | None


def configured(settings: Settings) -> list[Configured]:
    """Every setting, in the order of the documentation."""
    return [_one(settings, setting) for setting in SETTINGS if setting.key not in _MACHINE]


def reached(panel: Panel) -> list[tuple[str, str]]:
    """How this panel is reached and what runs started here may name."""
    options, allowed = panel.options, panel.allowed
    return [
        ("Listens on", f"{options.host}, this machine only" if options.on_loopback else options.host),
        ("Answers to", ", ".join(sorted({"this machine's own names", *options.hosts.names}, key=_own_first))),
        ("Reverse proxies", ", ".join(options.proxies) or "none"),
        ("Sessions last", duration(options.session_s)),
        ("Ollama servers", ", ".join(map(without_login, allowed.urls["ollama_url"]))),
        ("MLflow servers", ", ".join(map(without_login, allowed.urls["mlflow_url"])) or "found when needed"),
        ("Suites", ", ".join(["built in", *(str(folder) for folder in allowed.suites)])),
    ]


def _own_first(name: str) -> tuple[bool, str]:
    return " " not in name, name


def _one(settings: Settings, setting: Setting) -> Configured:
    source = settings.sources.get(setting.key)
    return Configured(setting.key, _value(settings, setting), setting.meaning, source)


def _value(settings: Settings, setting: Setting) -> str:
    if setting.key.endswith(_SECRET):
        return "set" if settings.get(setting.key) else "not set"
    if setting.key not in settings.values:
        return setting.default or "–"
    if setting.key == "hook_url":
        return shown_address(settings.get(setting.key) or "")
    if setting.key in _ADDRESSES:
        return ", ".join(without_login(each) for each in settings.listed(setting.key))
    value = settings.values[setting.key]
    return ", ".join(settings.listed(setting.key)) if isinstance(value, list) else str(value)
