"""Settings from flags, environment variables, tipbench.toml and defaults, in this order of precedence.

They are read once, at startup. `SETTINGS` lists every setting; the docs are generated from it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

from tipbench.errors import UsageError
from tipbench.files import check_own
from tipbench.http import canonical_url, is_http_url
from tipbench.plan.config import DEFAULT_OLLAMA_URL, CollectConfig, make_config

CONFIG_FILE = "tipbench.toml"
LOCAL_HOME = ".tipbench"
HOME_ONLY = frozenset({"judge_command", "hook_url"})  # never read from the working folder's file


@dataclass(frozen=True)
class Setting:
    """One setting: its key in tipbench.toml, its environment variables (the first that is set wins), its meaning."""

    key: str
    variables: tuple[str, ...]
    default: str
    meaning: str
    in_file: bool = True


_USUAL = {"ollama_url": ("OLLAMA_HOST",), "mlflow_url": ("MLFLOW_TRACKING_URI",)}


def _collect_settings() -> list[Setting]:
    return [
        Setting(
            key,
            (f"TIPBENCH_{key.upper()}", *_USUAL.get(key, ())),
            "" if info.default is None else str(info.default).lower() if info.annotation is bool else str(info.default),
            info.description or "",
        )
        for key, info in CollectConfig.model_fields.items()
    ]


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "home",
        ("TIPBENCH_HOME",),
        f"./{LOCAL_HOME} if it is there, else tipbench in the user's data folder",
        "Folder for weights, the local MLflow, journals and locks.",
        in_file=False,
    ),
    *_collect_settings(),
    Setting("mlflow_username", ("MLFLOW_TRACKING_USERNAME",), "", "User name for MLflow.", in_file=False),
    Setting("mlflow_password", ("MLFLOW_TRACKING_PASSWORD",), "", "Password for MLflow.", in_file=False),
    Setting("mlflow_token", ("MLFLOW_TRACKING_TOKEN",), "", "Bearer token for MLflow.", in_file=False),
    Setting(
        "mlflow_public_url",
        ("TIPBENCH_MLFLOW_PUBLIC_URL",),
        "mlflow_url",
        "Address of MLflow for browsers, for links to its pages.",
    ),
    Setting(
        "admin_token",
        ("TIPBENCH_ADMIN_TOKEN",),
        "created by the first `tipbench panel`, and printed once",
        "The panel's admin token, of 32 characters or more.",
        in_file=False,
    ),
    Setting("panel_host", ("TIPBENCH_PANEL_HOST",), "127.0.0.1", "The address the panel listens on."),
    Setting("panel_port", ("TIPBENCH_PANEL_PORT",), "5180", "The port the panel listens on."),
    Setting(
        "panel_hosts",
        ("TIPBENCH_PANEL_HOSTS",),
        "",
        "Comma-separated host names that the panel accepts, besides this machine's names and panel_host.",
    ),
    Setting(
        "panel_proxies",
        ("TIPBENCH_PANEL_PROXIES",),
        "",
        "Comma-separated addresses of reverse proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted.",
    ),
    Setting(
        "panel_urls",
        ("TIPBENCH_PANEL_URLS",),
        "",
        "Comma-separated Ollama servers that a run started over HTTP or Airflow may use, besides the configured one.",
    ),
    Setting(
        "panel_mlflow_urls",
        ("TIPBENCH_PANEL_MLFLOW_URLS",),
        "",
        "Comma-separated MLflow servers that such a run may use, besides the configured one; they get no login.",
    ),
    Setting(
        "panel_suites",
        ("TIPBENCH_PANEL_SUITES",),
        "",
        "Comma-separated folders of suites that a run started over HTTP may use, besides the built-in suites.",
    ),
    Setting("panel_session_hours", ("TIPBENCH_PANEL_SESSION_HOURS",), "12", "Hours until a browser session expires."),
    Setting(
        "judge_command",
        ("TIPBENCH_JUDGE_COMMAND",),
        "",
        "The program that `judge run --with command` runs, also for jobs started over HTTP.",
    ),
    Setting(
        "hook_url",
        ("TIPBENCH_HOOK_URL",),
        "",
        "URL that the panel notifies of cells that wait for a judge; see docs/webhook.md.",
    ),
    Setting(
        "hook_hosts",
        ("TIPBENCH_HOOK_HOSTS",),
        "",
        "Comma-separated hosts that hook_url may use, besides this machine; `http://` in front allows plain HTTP.",
    ),
    Setting(
        "hook_secret",
        ("TIPBENCH_HOOK_SECRET",),
        "",
        "Secret that signs the webhook's requests, of 20 characters or more; the receiver needs it too.",
        in_file=False,
    ),
    Setting("hook_watch_s", ("TIPBENCH_HOOK_WATCH_S",), "30", "Seconds between two checks for waiting cells."),
    Setting(
        "runner",
        ("TIPBENCH_RUNNER",),
        "airflow where airflow_url is set, else local",
        "Runner of jobs that do not choose one: local (this machine) or airflow.",
    ),
    Setting(
        "airflow_url",
        ("TIPBENCH_AIRFLOW_URL",),
        "",
        "The Airflow that runs collects for the panel, such as http://airflow.example:8080.",
    ),
    Setting(
        "airflow_public_url",
        ("TIPBENCH_AIRFLOW_PUBLIC_URL",),
        "airflow_url",
        "Address of Airflow for browsers, for links to its pages.",
    ),
    Setting("airflow_dag", ("TIPBENCH_AIRFLOW_DAG",), "bench_collect", "The id of tipbench's DAG in Airflow."),
    Setting(
        "ollama_hosts",
        ("TIPBENCH_OLLAMA_HOSTS",),
        "",
        "Comma-separated NAME=URL of the Ollama servers that share the models of an Airflow run.",
    ),
    Setting("airflow_username", ("TIPBENCH_AIRFLOW_USERNAME",), "", "User name for Airflow.", in_file=False),
    Setting("airflow_password", ("TIPBENCH_AIRFLOW_PASSWORD",), "", "Password for Airflow.", in_file=False),
    Setting(
        "airflow_token",
        ("TIPBENCH_AIRFLOW_TOKEN",),
        "",
        "Token for Airflow, instead of a user name and password; it is not renewed.",
        in_file=False,
    ),
    Setting(
        "jobs_keep_days",
        ("TIPBENCH_JOBS_KEEP_DAYS",),
        "90",
        "Days after its end (a lost job: its start) until a job is deleted with its log and events; 0 keeps all.",
    ),
    Setting(
        "events",
        ("TIPBENCH_EVENTS",),
        "",
        "Internal: the file in which a job's command reports its progress. The panel sets it for each job.",
        in_file=False,
    ),
    Setting("no_color", ("NO_COLOR",), "", "Any value: no colours on the terminal.", in_file=False),
)


@dataclass(frozen=True)
class Settings:
    """Values from the environment and tipbench.toml; `sources` has the origin of each value."""

    home: Path
    values: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> str | None:
        value = self.values.get(key)
        return None if value is None else str(value)

    def listed(self, key: str) -> tuple[str, ...]:
        """Return a list setting: a list or a comma-separated string in the file, a comma-separated string elsewhere."""
        value: object = self.values.get(key)
        parts = value if isinstance(value, list) else str(value or "").split(",")
        return tuple(text for text in (str(part).strip() for part in parts) if text)

    def collect_config(self, flags: Mapping[str, object]) -> CollectConfig:
        """Return the configuration of a collect; flags override all other sources."""
        values: dict[str, object] = {key: self.values[key] for key in CollectConfig.model_fields if key in self.values}
        sources = dict(self.sources)
        for key, value in flags.items():
            if value is not None:
                values[key] = value
                sources[key] = "--" + key.replace("_", "-")
        return make_config(values, sources)


def load_settings(environment: Mapping[str, str] | None = None, folder: Path | None = None) -> Settings:
    """Read the environment and tipbench.toml; the file in the working folder overrides the one in the home folder.

    Raises UsageError if another user owns the home folder or a file, or may write to it. The keys of `HOME_ONLY` in the
    working folder's file are ignored: a program must not run because somebody put a file into a shared folder.
    """
    env = os.environ if environment is None else environment
    here = folder or Path.cwd()
    home = find_home(env, here)
    check_own(home, "Set TIPBENCH_HOME to a folder of your own.")
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    for path in dict.fromkeys((home / CONFIG_FILE, here.resolve() / CONFIG_FILE)):
        check_own(path, "Work in a folder of your own, or replace the file.")
        for key, value in _read_file(path).items():
            if key in HOME_ONLY and path.parent != home:
                sources.setdefault(key, f"ignored in {path}; use TIPBENCH_{key.upper()} or {home / CONFIG_FILE}")
                continue
            values[key] = value
            sources[key] = f"{path}: {key}"
    for setting in SETTINGS:
        for variable in reversed(setting.variables):
            if env.get(variable):
                values[setting.key] = env[variable]
                sources[setting.key] = variable
    if sources.get("ollama_url") == "OLLAMA_HOST":
        values["ollama_url"] = ollama_url(values["ollama_url"])
    return Settings(home, values, sources)


class MlflowLogin(TypedDict, total=False):
    """Credentials of an MLflow server, as arguments of `tipbench.record.mlflow.MlflowStore`."""

    username: str | None
    password: str | None
    token: str | None


def mlflow_login(settings: Settings, url: str) -> MlflowLogin:
    """Return the configured credentials for the MLflow at `url`: empty unless it is the configured server.

    A run may name another server, as over HTTP or in Airflow, which must not receive them. A login in `url` is its own.
    """
    configured = settings.get("mlflow_url") or ""
    if not is_http_url(configured) or not is_http_url(url) or canonical_url(configured) != canonical_url(url):
        return {}
    get = settings.get
    return {"username": get("mlflow_username"), "password": get("mlflow_password"), "token": get("mlflow_token")}


def mlflow_pages(settings: Settings, url: str) -> str | None:
    """Return the public URL of the MLflow at `url`, for links; None if browsers use the same URL."""
    public, configured = settings.get("mlflow_public_url"), settings.get("mlflow_url") or ""
    if not public or not is_http_url(configured) or canonical_url(configured) != canonical_url(url):
        return None
    if "@" in public or not is_http_url(public):
        raise UsageError(
            "mlflow_public_url takes a web address without a login, such as https://mlflow.example "
            f"(got {public.rpartition('@')[2][:80]!r})."
        )
    return public


def find_home(env: Mapping[str, str], here: Path) -> Path:
    """Return TIPBENCH_HOME, else `.tipbench` in the working folder if it exists, else the user's data folder."""
    if env.get("TIPBENCH_HOME"):
        return Path(env["TIPBENCH_HOME"]).expanduser().resolve()
    if (here / LOCAL_HOME).is_dir():
        return (here / LOCAL_HOME).resolve()
    data = env.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "tipbench"


def ollama_url(host: str) -> str:
    """Parse OLLAMA_HOST as Ollama does: scheme and port are optional, and 0.0.0.0 means this machine."""
    text = host.strip().rstrip("/")
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "http", text
    try:
        parts = urlsplit(f"//{rest}")
        name, port = parts.hostname or "127.0.0.1", parts.port
    except ValueError as exc:
        raise UsageError(f"OLLAMA_HOST is {host!r}, which is not an address: {exc}. Write host:port.") from None
    if name in ("0.0.0.0", "::"):  # noqa: S104 - a server's bind address, which clients reach through loopback
        name = "127.0.0.1"
    default = {"http": 80, "https": 443}.get(scheme, 11434) if separator else urlsplit(DEFAULT_OLLAMA_URL).port
    shown = f"[{name}]" if ":" in name else name
    return f"{scheme}://{shown}:{port or default}{parts.path}"


def _read_file(path: Path) -> dict[str, str]:
    """Return the keys of a tipbench.toml; empty if the file does not exist."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}. Correct it, or remove it to use the defaults.") from exc
    known = {setting.key for setting in SETTINGS if setting.in_file}
    unknown = sorted(set(content) - known)
    if unknown:
        raise UsageError(f"{path} has an unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}.")
    return content
