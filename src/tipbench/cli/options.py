"""Options that several commands share; those of `collect` are made from CollectConfig, so none can be missing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import typer

from tipbench.errors import UsageError
from tipbench.plan.config import DEFAULT_EXPERIMENT, CollectConfig, check_experiment_name
from tipbench.settings import SETTINGS, Settings, load_settings

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
    """Turn `command(config, settings, **own)` into one that takes every option of CollectConfig."""
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
    """What applies without the flag, as help shows it: the usual variables first."""
    setting = next(setting for setting in SETTINGS if setting.key == key)
    parts = [*setting.variables[1:], *([setting.default] if setting.default else [])]
    return f" [default: {', else '.join(parts)}]" if parts else ""


def _kind(annotation: Any) -> tuple[Any, str | None]:
    """The type an option is parsed as, and how it is shown. Values are read by CollectConfig, whatever their source."""
    if annotation in (int, float):
        return str, "NUMBER"
    if annotation is bool:
        return bool, None
    if get_origin(annotation) is not None and str in map(type, get_args(annotation)):
        return str, "|".join(get_args(annotation))
    return str, "TEXT"


def chosen_experiment(settings: Settings, flag: str | None) -> str:
    """The experiment a reading command is about, checked like that of a collect."""
    name = flag or settings.get("experiment") or DEFAULT_EXPERIMENT
    try:
        return check_experiment_name(name)
    except ValueError as exc:
        source = "--experiment" if flag else settings.sources.get("experiment", "experiment")
        raise UsageError(f"{source}: {exc}") from exc
