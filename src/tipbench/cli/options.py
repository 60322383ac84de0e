"""Options shared by several commands; those of `collect` are generated from CollectConfig."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from tipbench.errors import UsageError
from tipbench.plan.config import DEFAULT_EXPERIMENT, CollectConfig, check_experiment_name
from tipbench.settings import SETTINGS, Settings, load_settings

if TYPE_CHECKING:
    from tipbench.compare.matrix import Pair

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
MlflowOption = Annotated[
    str | None,
    typer.Option(
        "--mlflow-url", metavar="URL", help="The MLflow server. [default: MLFLOW_TRACKING_URI, else found or started]"
    ),
]
ExperimentOption = Annotated[
    str | None, typer.Option("--experiment", metavar="NAME", help=f"MLflow experiment. [default: {DEFAULT_EXPERIMENT}]")
]


def with_collect_options(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap `command(config, settings, **own)` as a command with an option for each field of CollectConfig."""
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name not in ("config", "settings")
    ]

    def run(**given: Any) -> None:
        settings = load_settings()
        flags = {key: given.pop(key) for key in CollectConfig.model_fields}
        command(config=settings.collect_config(flags), settings=settings, **given)

    parameters = [_parameter(key) for key in CollectConfig.model_fields] + own
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(key: str) -> inspect.Parameter:
    info = CollectConfig.model_fields[key]
    flag = "--" + key.replace("_", "-")
    kind, metavar = _kind(info.annotation)
    declaration = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    default = "" if kind is bool else _default(key)
    option = typer.Option(declaration, help=f"{info.description}{default}", metavar=metavar, show_default=False)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default(key: str) -> str:
    """Return the default for the help text, environment variables first."""
    setting = next(setting for setting in SETTINGS if setting.key == key)
    parts = [*setting.variables[1:], *([setting.default] if setting.default else [])]
    return f" [default: {', else '.join(parts)}]" if parts else ""


def _kind(annotation: Any) -> tuple[Any, str | None]:
    """Return an option's type and metavar; values are validated by CollectConfig, as from any other source."""
    if annotation in (int, float):
        return str, "NUMBER"
    if annotation is bool:
        return bool, None
    if get_origin(annotation) is not None and str in map(type, get_args(annotation)):
        return str, "|".join(get_args(annotation))
    return str, "TEXT"


def chosen_experiment(settings: Settings, flag: str | None) -> str:
    """Return the experiment name from the flag or the settings. Raises UsageError if it is invalid."""
    name = flag or settings.get("experiment") or DEFAULT_EXPERIMENT
    try:
        return check_experiment_name(name)
    except ValueError as exc:
        source = "--experiment" if flag else settings.sources.get("experiment", "experiment")
        raise UsageError(f"{source}: {exc}") from exc


def read_pair(text: str, flag: str) -> Pair:
    """Parse MODEL/PROMPT. Raises UsageError if it is invalid."""
    from tipbench.compare.matrix import parse_pair

    pair = parse_pair(text.strip())
    if pair is None:
        raise UsageError(f"{flag} takes MODEL/PROMPT (got {text[:120]!r}); for example {flag} qwen2.5:0.5b/v1")
    return pair
