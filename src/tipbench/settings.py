"""Settings from flags, environment variables, tipbench.toml and defaults, in this order of precedence.

Settings are read once, at startup. `SETTINGS` lists all of them; the documentation is generated from it.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from tipbench.errors import UsageError
from tipbench.files import check_ownership
from tipbench.plan.collect_config import DEFAULT_OLLAMA_URL, CollectConfig, Url, validate_settings

if TYPE_CHECKING:
    from tipbench.workflows.mlflow import MlflowAccess

_Config = TypeVar("_Config", bound=BaseModel)

CONFIG_FILE = "tipbench.toml"
LOCAL_HOME = ".tipbench"
DEFAULT_TOKEN_LIFETIME = "90d"  # noqa: S105 - not a token
HOME_ONLY = frozenset({"judge_command", "hook_url"})  # not read from a tipbench.toml in the working folder


@dataclass(frozen=True)
class Setting:
    """One setting and its documentation."""

    key: str
    variables: tuple[str, ...]  # environment variables; the first one that is set is used
    default: str  # for the documentation
    meaning: str
    in_file: bool = True  # may be set in tipbench.toml


_VARIABLES = {  # environment variables by key; all other settings use TIPBENCH_ and the key
    "ollama_url": ("TIPBENCH_OLLAMA_URL", "OLLAMA_HOST"),
    "mlflow_url": ("TIPBENCH_MLFLOW_URL", "MLFLOW_TRACKING_URI"),
    "mlflow_username": ("MLFLOW_TRACKING_USERNAME",),
    "mlflow_password": ("MLFLOW_TRACKING_PASSWORD",),
    "mlflow_token": ("MLFLOW_TRACKING_TOKEN",),
}
_DEFAULT_TEXTS = {  # descriptions of defaults that are not constant
    "mlflow_public_url": "mlflow_url",
    "admin_token": "created by the first `tipbench panel`, and printed once",
    "runner": "airflow if airflow_url is set, else local",
    "airflow_public_url": "airflow_url",
}


def _split_list(value: object) -> tuple[str, ...]:
    """Return the items of a list (from a file) or of a comma-separated string (from an environment variable)."""
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    texts = (str(item).strip() for item in items)
    return tuple(text for text in texts if text)


def _normalise_proxy(text: str) -> str:
    try:
        if "/" in text:
            return str(ipaddress.ip_network(text, strict=False))
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(f"{text[:80]!r} is not the address of a reverse proxy, such as 127.0.0.1") from None


Names = Annotated[tuple[str, ...], BeforeValidator(_split_list)]
Urls = Annotated[tuple[Url, ...], BeforeValidator(_split_list)]
Proxies = Annotated[tuple[Annotated[str, AfterValidator(_normalise_proxy)], ...], BeforeValidator(_split_list)]


class OperatorConfig(BaseModel):
    """Settings of MLflow, panel, webhook, jobs and Airflow.

    `repr=False` marks user names and secrets; such settings cannot be set in tipbench.toml.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mlflow_username: str | None = Field(None, description="User name for MLflow.", repr=False)
    mlflow_password: str | None = Field(None, description="Password for MLflow.", repr=False)
    mlflow_token: str | None = Field(None, description="Bearer token for MLflow.", repr=False)
    mlflow_host_header: str | None = Field(
        None,
        description="Host header to send to MLflow instead of its address, where its --allowed-hosts cannot be "
        "changed.",
    )
    mlflow_public_url: str | None = Field(None, description="Address of MLflow for browsers, for links to its pages.")
    admin_token: str | None = Field(None, description="The panel's admin token, of 32 characters or more.", repr=False)
    panel_host: str = Field("127.0.0.1", description="The address the panel listens on.")
    panel_port: int = Field(5180, ge=0, le=65535, description="The port the panel listens on.")
    panel_hosts: Names = Field(
        (),
        description="Comma-separated host names that the panel accepts, besides this machine's names and panel_host.",
    )
    panel_proxies: Proxies = Field(
        (),
        description="Comma-separated addresses of reverse proxies whose X-Forwarded-For and X-Forwarded-Proto are "
        "trusted.",
    )
    panel_urls: Urls = Field(
        (),
        description="Comma-separated Ollama servers that a job started over HTTP or Airflow may use, besides the "
        "configured one.",
    )
    panel_mlflow_urls: Urls = Field(
        (),
        description="Comma-separated MLflow servers that a job started over HTTP or Airflow may use, besides the "
        "configured one; no login is sent to them.",
    )
    panel_suites: Names = Field(
        (),
        description="Comma-separated folders of suites that a job started over HTTP may use, besides the built-in "
        "suites.",
    )
    panel_session_hours: float = Field(12, gt=0, le=24 * 31, description="Hours until a browser session expires.")
    judge_command: str | None = Field(
        None, description="The program that `judge run --with command` runs, also for jobs started over HTTP."
    )
    hook_url: str | None = Field(
        None, description="URL that the panel notifies of cells that wait for a judge; see docs/webhook.md."
    )
    hook_hosts: Names = Field(
        (),
        description="Comma-separated hosts that hook_url may use, besides this machine; `http://` in front allows "
        "plain HTTP.",
    )
    hook_watch_s: float = Field(30, ge=1, le=86_400, description="Seconds between two checks for waiting cells.")
    runner: Literal["local", "airflow"] | None = Field(
        None, description="Runner of jobs that do not choose one: local (this machine) or airflow."
    )
    airflow_url: str | None = Field(
        None, description="The Airflow that runs collects for the panel, such as http://airflow.example:8080."
    )
    airflow_public_url: str | None = Field(None, description="Address of Airflow for browsers, for links to its pages.")
    airflow_dag: str = Field("bench_collect", description="The id of tipbench's DAG in Airflow.")
    ollama_hosts: Names = Field(
        (), description="Comma-separated NAME=URL of the Ollama servers that share the models of an Airflow run."
    )
    jobs_keep_days: float = Field(
        90,
        ge=0,
        le=36_500,
        description="Days until a finished job is deleted with its log and events; a lost job has no end, so its days "
        "count from its start. 0 keeps all jobs.",
    )
    hook_secret: str | None = Field(
        None,
        description="Secret that signs the webhook's requests, of 20 characters or more; the receiver needs it too.",
        repr=False,
    )
    airflow_username: str | None = Field(None, description="User name for Airflow.", repr=False)
    airflow_password: str | None = Field(None, description="Password for Airflow.", repr=False)
    airflow_token: str | None = Field(
        None, description="Token for Airflow, instead of a user name and password; it is not renewed.", repr=False
    )


def _settings_of(config_class: type[BaseModel]) -> list[Setting]:
    settings = []
    for key, info in config_class.model_fields.items():
        default = "" if info.default in (None, ()) else str(info.default)
        if isinstance(info.default, bool):
            default = default.lower()  # as in TOML
        settings.append(
            Setting(
                key,
                variables=_VARIABLES.get(key, (f"TIPBENCH_{key.upper()}",)),
                default=_DEFAULT_TEXTS.get(key, default),
                meaning=info.description or "",
                in_file=info.repr,  # secrets are neither shown nor read from a file
            )
        )
    return settings


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "home",
        variables=("TIPBENCH_HOME",),
        default=f"./{LOCAL_HOME} if it exists, else tipbench in the user's data folder",
        meaning="Folder for weights, the local MLflow, journals and locks.",
        in_file=False,
    ),
    *_settings_of(CollectConfig),
    *_settings_of(OperatorConfig),
    Setting(
        "events",
        variables=("TIPBENCH_EVENTS",),
        default="",
        meaning="Internal: the file in which a job's command reports its progress. The panel sets it for each job.",
        in_file=False,
    ),
    Setting(
        "no_color",
        variables=("NO_COLOR",),
        default="",
        meaning="Any value: no colours on the terminal.",
        in_file=False,
    ),
)


@dataclass(frozen=True)
class Settings:
    """Values from the environment and tipbench.toml."""

    home: Path
    values: Mapping[str, Any] = field(default_factory=dict)  # strings; from a file also numbers, booleans and lists
    sources: Mapping[str, str] = field(default_factory=dict)  # by key: where the value comes from, for messages

    def get(self, key: str) -> str | None:
        """Return a setting as text; None if it is not set."""
        value = self.values.get(key)
        return None if value is None else str(value)

    def get_list(self, key: str) -> tuple[str, ...]:
        """Return the items of a list setting; empty if it is not set."""
        return _split_list(self.values.get(key) or "")

    def allowed_servers(self, key: str, others: Iterable[str], *, find: bool = True) -> tuple[str, ...]:
        """Return the servers that a job started over HTTP or Airflow may use: the configured one and `others`.

        `key` is "ollama_url" or "mlflow_url". If no MLflow is configured, the servers that tipbench finds by itself are
        allowed instead, unless `find` is false.
        """
        from tipbench.record.mlflow import default_servers

        own: tuple[str, ...] = ()
        if url := self.get(key) or CollectConfig.model_fields[key].default:  # `mlflow_url` has no default
            own = (url,)
        elif find:
            own = default_servers(self.home)
        return tuple(dict.fromkeys((*own, *others)))

    @property
    def mlflow(self) -> MlflowAccess:
        """The configured MLflow."""
        from tipbench.workflows.mlflow import MlflowAccess

        return MlflowAccess(
            self.home,
            url=self.get("mlflow_url"),
            username=self.get("mlflow_username"),
            password=self.get("mlflow_password"),
            token=self.get("mlflow_token"),
            public_url=self.get("mlflow_public_url"),
            host_header=self.get("mlflow_host_header"),
        )

    def collect_config(self, flags: Mapping[str, object]) -> CollectConfig:
        """Return the configuration of a collect; flags override all other sources."""
        return self._validate(CollectConfig, flags)

    def operator_config(self, *, host: str | None = None, port: int | None = None) -> OperatorConfig:
        """Return the operator's settings; the flags of `tipbench panel` override all other sources."""
        return self._validate(OperatorConfig, {"panel_host": host, "panel_port": port})

    @contextmanager
    def add_source_to_errors(self) -> Iterator[None]:
        """Add the source of a setting to a UsageError whose message begins with the key of the setting."""
        try:
            yield
        except UsageError as exc:
            key, _, _ = str(exc).partition(" ")
            if key not in self.sources:
                raise
            source = self.sources[key].removesuffix(f": {key}")  # the message has the key already
            raise UsageError(f"{source}: {exc}") from exc

    def _validate(self, config_class: type[_Config], flags: Mapping[str, object]) -> _Config:
        """Validate the settings of this class. Flags that are None are ignored."""
        given = {key: value for key, value in flags.items() if value is not None}
        values = {key: self.values[key] for key in config_class.model_fields if self.values.get(key) not in (None, "")}
        # The flag of `panel_port` is --port.
        flag_names = {key: "--" + key.removeprefix("panel_").replace("_", "-") for key in given}
        return validate_settings(config_class, {**values, **given}, {**self.sources, **flag_names})


def load_settings(environment: Mapping[str, str] | None = None, folder: Path | None = None) -> Settings:
    """Read the environment and tipbench.toml; the file in the working folder overrides the one in the home folder.

    Raises UsageError if another user owns the home folder or one of the files, or may write to it. In the working
    folder's file, the keys of `HOME_ONLY` are ignored: a file in a shared folder must not make tipbench run a program
    or notify a URL.
    """
    env = os.environ if environment is None else environment
    working_folder = folder or Path.cwd()
    home = find_home(env, working_folder)
    check_ownership(home, "Set TIPBENCH_HOME to a folder of your own.")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    paths = (home / CONFIG_FILE, working_folder.resolve() / CONFIG_FILE)
    for path in dict.fromkeys(paths):  # both are the same file if the home is the working folder
        for key, value in _read_file(path).items():
            if key in HOME_ONLY and path.parent != home:
                # For `tipbench doctor` and the panel, which show the key as ignored.
                sources.setdefault(key, f"ignored in {path}; use TIPBENCH_{key.upper()} or {home / CONFIG_FILE}")
                continue
            values[key] = value
            sources[key] = f"{path}: {key}"
    for setting in SETTINGS:
        for variable in reversed(setting.variables):  # the first one that is set overwrites the others
            if env.get(variable):
                values[setting.key] = env[variable]
                sources[setting.key] = variable
    if sources.get("ollama_url") == "OLLAMA_HOST":
        values["ollama_url"] = parse_ollama_host(values["ollama_url"])
    return Settings(home, values, sources)


def find_home(env: Mapping[str, str], working_folder: Path) -> Path:
    """Return TIPBENCH_HOME, else `.tipbench` in the working folder if it exists, else the user's data folder."""
    if env.get("TIPBENCH_HOME"):
        return Path(env["TIPBENCH_HOME"]).expanduser().resolve()
    if (working_folder / LOCAL_HOME).is_dir():
        return (working_folder / LOCAL_HOME).resolve()
    if env.get("XDG_DATA_HOME"):
        return Path(env["XDG_DATA_HOME"]) / "tipbench"
    return Path.home() / ".local" / "share" / "tipbench"


def parse_ollama_host(host: str) -> str:
    """Parse OLLAMA_HOST as Ollama does: scheme and port are optional, and 0.0.0.0 means this machine."""
    text = host.strip().rstrip("/")
    default_port = urlsplit(DEFAULT_OLLAMA_URL).port
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "http", text
    elif scheme in ("http", "https"):
        default_port = 443 if scheme == "https" else 80
    try:
        parts = urlsplit(f"//{rest}")
        name, port = parts.hostname or "127.0.0.1", parts.port
    except ValueError as exc:
        raise UsageError(f"OLLAMA_HOST is {host!r}, which is not an address: {exc}. Write host:port.") from None
    if name in ("0.0.0.0", "::"):  # noqa: S104 - a server's bind address, which clients reach through loopback
        name = "127.0.0.1"
    url_host = f"[{name}]" if ":" in name else name  # IPv6
    return f"{scheme}://{url_host}:{port or default_port}{parts.path}"


def _read_file(path: Path) -> dict[str, Any]:
    next_step = "Work in a folder of your own, or replace the file."
    check_ownership(path, next_step)
    try:
        with path.open("rb") as file:
            check_ownership(path, next_step, file.fileno())  # the file may have been replaced since the first check
            content = tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}. Correct it, or remove it to use the defaults.") from exc
    known = {setting.key for setting in SETTINGS if setting.in_file}
    unknown = sorted(set(content) - known)
    if unknown:
        raise UsageError(f"{path} has an unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}.")
    return content
