"""CollectConfig: settings of a collect, shared by the command line, the API, the Airflow DAG and the panel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from tipbench.errors import InvalidOption, UsageError
from tipbench.http import is_http_url
from tipbench.plan.design import LooksOption

_Settings = TypeVar("_Settings", bound=BaseModel)
EXPERIMENT_PREFIX = "tip-bench-"
DEFAULT_EXPERIMENT = "tip-bench-auto"
WAIT_FOR_JUDGE = "wait_for_judge"  # an option only of collects on Airflow, so it is not in CollectConfig
DEFAULT_OLLAMA_URL = "http://localhost:11434"
_MAX_NAME = 200  # characters


def _normalise_url(text: str) -> str:
    """Return the URL without trailing slashes; raises ValueError if it is not an http or https URL."""
    if not is_http_url(text):
        raise ValueError(f"{text[:80]!r} is not a web address; write http://host:port")
    return text.rstrip("/")


def check_experiment_name(name: str) -> str:
    """Return the name unchanged; raises ValueError if it is not a valid experiment name."""
    if not name.startswith(EXPERIMENT_PREFIX) or len(name) == len(EXPERIMENT_PREFIX):
        raise ValueError(
            f"an experiment's name starts with {EXPERIMENT_PREFIX} (got {name[:80]!r}); "
            f"for example {EXPERIMENT_PREFIX}{name[:40] or 'auto'}"
        )
    if len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(
            f"an experiment's name has at most {_MAX_NAME} characters, all of them printable (this one has {len(name)})"
        )
    return name


Url = Annotated[str, AfterValidator(_normalise_url)]


class CollectConfig(BaseModel):
    """Settings of a collect: what to generate, with which models and limits, and where to record it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    models: str = Field(
        "qwen2.5:0.5b,qwen2.5:1.5b,gemma3:1b,llama3.2:3b",
        description="Comma-separated models: Ollama tags, embedded:smollm2:135m, or the reference baseline:template.",
    )
    prompts: str = Field("v1,v2-mentor,v3-few-shot", description="Comma-separated prompt versions of the suite.")
    n_tips: int = Field(5, ge=1, le=50, description="Tips per answer.")
    n_scenarios: int = Field(
        0,
        ge=0,
        description="At most this many scenarios (0 = all); personas and time slots are used equally often (± 1).",
    )
    temperature: float = Field(0.7, ge=0, le=5, description="Sampling temperature.")
    experiment: Annotated[str, AfterValidator(check_experiment_name)] = Field(
        DEFAULT_EXPERIMENT, description=f"MLflow experiment; its name starts with {EXPERIMENT_PREFIX}."
    )
    max_model_b: float = Field(
        4.0, gt=0, description="Refuse models with more billions of parameters than this, before anything is generated."
    )
    ollama_url: Url = Field(DEFAULT_OLLAMA_URL, description="The Ollama server.")
    mlflow_url: Url | None = Field(
        None, description="The MLflow server; by default one on localhost:5000, else a local one is started."
    )
    diversity: bool = Field(False, description="Ask for tips from different angles; diversity is measured either way.")
    looks: LooksOption = Field(
        "auto",
        description="When the leaderboard may decide: auto (every 8 scenarios, at most 4 times), one (at the end).",
    )
    suite: str = Field("tips", description="Built-in suite (tips, tips-32) or the path of a suite folder.")
    repeats: int = Field(1, ge=1, le=100, description="Cells per model, prompt and scenario, each with its own seed.")
    seed: int = Field(42, ge=0, lt=2**31, description="Seed from which the seed of each cell is derived.")
    num_ctx: int = Field(4096, ge=256, le=2**20, description="Context window, in tokens.")
    num_predict: int = Field(1024, ge=1, le=2**17, description="Longest answer, in tokens.")
    concurrency: int = Field(1, ge=1, le=64, description="Calls to one model at the same time.")
    timeout_s: float = Field(300.0, gt=0, le=86400, description="Longest time for one call, in seconds.")
    server_wait_s: float = Field(
        300.0, ge=0, le=86400, description="Seconds to wait for an unavailable server, or for memory to become free."
    )
    unload: Literal["model", "call"] = Field(
        "model", description="Unload the weights after each model, or after each call (implies concurrency 1)."
    )
    evict: bool = Field(False, description="Unload models of other clients that are in the server's memory.")
    skip_refused: bool = Field(False, description="Run the accepted models instead of stopping when one is refused.")
    allow_unknown_size: bool = Field(False, description="Accept models whose parameter count is unknown.")
    wait: bool = Field(False, description="Wait for another collect to finish instead of failing.")

    @field_validator("models", "prompts", mode="before")
    @classmethod
    def _join_list(cls, value: object) -> object:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return ",".join(value)
        return value

    @field_validator("models", "prompts")
    @classmethod
    def _check_names(cls, value: str) -> str:
        names = split_names(value)
        if not names:
            raise ValueError("must name at least one")
        for name in names:
            if len(name) > _MAX_NAME or not name.isprintable() or " " in name:
                raise ValueError(f"{name[:60]!r} is not a name: no spaces, at most {_MAX_NAME} characters")
        return ",".join(names)

    @model_validator(mode="after")
    def _check_context(self) -> CollectConfig:
        if self.num_predict >= self.num_ctx:
            raise ValueError(f"num_predict ({self.num_predict}) must be smaller than num_ctx ({self.num_ctx})")
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        return split_names(self.models)

    @property
    def prompt_versions(self) -> tuple[str, ...]:
        return split_names(self.prompts)

    @property
    def workers(self) -> int:
        """Number of concurrent calls; 1 if the weights are unloaded after each call."""
        return 1 if self.unload == "call" else self.concurrency


URL_KEYS = tuple(key for key in CollectConfig.model_fields if key.endswith("_url"))


def split_wait_for_judge(options: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the options without `wait_for_judge`, and its value. Raises InvalidOption if that is not a boolean."""
    values = dict(options)
    wait = values.pop(WAIT_FOR_JUDGE, False)
    if not isinstance(wait, bool):
        raise InvalidOption(WAIT_FOR_JUDGE, f"takes true or false (got {str(wait)[:80]!r}).")
    return values, wait


def make_config(values: Mapping[str, object], sources: Mapping[str, str] | None = None) -> CollectConfig:
    """Validate values as the configuration of a collect; see `validate_settings`."""
    return validate_settings(CollectConfig, values, sources or {})


def validate_settings(
    settings_type: type[_Settings], values: Mapping[str, object], sources: Mapping[str, str]
) -> _Settings:
    """Validate values as settings of this type; raises UsageError with all problems.

    `sources` maps a key to its name in messages, such as an environment variable.
    """
    try:
        return settings_type.model_validate(dict(values))
    except ValidationError as exc:
        raise UsageError("; ".join(_describe_problem(error, sources) for error in exc.errors())) from exc


def _describe_problem(error: ErrorDetails, sources: Mapping[str, str]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # the problem concerns several settings, which the message names
        return message
    key = ".".join(map(str, error["loc"]))
    source = sources.get(str(error["loc"][0]), key)
    if error["type"] == "extra_forbidden":  # only possible in `make_config`: other callers pass known keys
        return f"{source} is not a setting of collect; see `tipbench collect --help`"
    if error["type"] == "value_error":  # from our own validator: the message is complete
        return f"{source}: {message}"
    return f"{source}: {message} (got {str(error['input'])[:80]!r})"


def split_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list into unique names, in order."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
