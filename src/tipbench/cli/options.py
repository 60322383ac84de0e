"""Options of several commands, and the MLflow and experiment that they select."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer

from tipbench.cli.console import print_message
from tipbench.errors import UsageError
from tipbench.files import writable_home
from tipbench.plan.collect_config import DEFAULT_EXPERIMENT, DEFAULT_OLLAMA_URL, CollectConfig, check_experiment_name
from tipbench.settings import SETTINGS, Settings, load_settings

if TYPE_CHECKING:
    from tipbench.record.mlflow import MlflowConnection, MlflowStore
    from tipbench.record.store import Experiment

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
MlflowOption = Annotated[
    str | None,
    typer.Option(
        "--mlflow-url", metavar="URL", help="The MLflow server. [default: MLFLOW_TRACKING_URI, else a local server]"
    ),
]
OllamaOption = Annotated[
    str | None,
    typer.Option(
        "--ollama-url", metavar="URL", help=f"The Ollama server. [default: OLLAMA_HOST, else {DEFAULT_OLLAMA_URL}]"
    ),
]
ExperimentOption = Annotated[
    str | None, typer.Option("--experiment", metavar="NAME", help=f"MLflow experiment. [default: {DEFAULT_EXPERIMENT}]")
]
ListFormat = Literal["table", "json", "csv"]
ListFormatOption = Annotated[
    ListFormat,
    typer.Option("--format", metavar="table|json|csv", help="Output format. [default: table]", show_default=False),
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="KEY=VALUE", help="Use only matching cells: any tag, or params.NAME; repeatable."),
]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png|.svg", help="Also save a chart.")]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        "--suite",
        metavar="NAME|FOLDER",
        help="Suite with the scenarios, rubric and controls. [default: that of the cells]",
    ),
]
OnlyJudgeOption = Annotated[str | None, typer.Option("--judge", metavar="NAME", help="Use only this judge's scores.")]
JudgeOption = Annotated[str | None, typer.Option("--judge", metavar="NAME", help="Name of the judge.")]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, metavar="NUMBER", help="Maximum number of answers, taken scenario by scenario."),
]
OverlapOption = Annotated[
    float,
    typer.Option(
        "--overlap",
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Also include this share of the answers that other judges scored.",
    ),
]
AcceptDriftOption = Annotated[
    str | None,
    typer.Option("--accept-drift", metavar="REASON", help="Count the scores despite the drift, with this reason."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All answers this judge has not scored.")]
RejudgeOption = Annotated[bool, typer.Option("--rejudge", help="Include answers scored under another rubric.")]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", min=0, metavar="NUMBER", help="Seed for the order and the hidden items. [default: random]"),
]
PriorOption = Annotated[
    list[Path] | None,
    typer.Option("--prior", metavar="FILE", help="A prior from `tipbench prior fit`; repeatable, one per policy."),
]
StateOption = Annotated[
    Literal["sqlite", "files"],
    typer.Option("--state", metavar="sqlite|files", help="Where state is stored: the database, or a file per user."),
]


def command_group(help_text: str) -> typer.Typer:
    """Return a group of commands with a help text."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


def with_collect_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each field of CollectConfig.

    The returned command calls `command` with `config`, `settings`, and the options that `command` declares itself.
    """
    declared = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name not in ("config", "settings")
    ]

    def wrapper(**options: Any) -> None:
        settings = load_settings()
        collect_flags = {key: options.pop(key) for key in CollectConfig.model_fields}
        command(config=settings.collect_config(collect_flags), settings=settings, **options)

    parameters = [_collect_option(key) for key in CollectConfig.model_fields] + declared
    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    # Typer takes names and defaults from the signature, and types from the annotations.
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _collect_option(key: str) -> inspect.Parameter:
    # Values of options that are not boolean stay text: CollectConfig validates them.
    field = CollectConfig.model_fields[key]
    name = key.replace("_", "-")
    annotation: Any
    if field.annotation is bool:
        option = typer.Option(f"--{name}/--no-{name}", help=field.description, show_default=False)
        annotation = Annotated[bool | None, option]
    else:
        metavar = "TEXT"
        if field.annotation in (int, float):
            metavar = "NUMBER"
        elif choices := [choice for choice in get_args(field.annotation) if isinstance(choice, str)]:  # a Literal
            metavar = "|".join(choices)
        help_text = f"{field.description}{default_text(key)}"
        option = typer.Option(f"--{name}", help=help_text, metavar=metavar, show_default=False)
        annotation = Annotated[str | None, option]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def default_text(key: str) -> str:
    """Return the '[default: …]' of an option's help, such as ' [default: OLLAMA_HOST, else http://…]'; may be empty."""
    setting = next(setting for setting in SETTINGS if setting.key == key)
    _tipbench_variable, *sources = setting.variables  # every option has a TIPBENCH_ variable, so it is not listed
    if setting.default:
        sources.append(setting.default)
    return f" [default: {', else '.join(sources)}]" if sources else ""


def chosen_experiment(settings: Settings, flag: str | None) -> str:
    """Return the experiment name from the flag or the settings. Raises UsageError if it is invalid."""
    name = flag or settings.get("experiment") or DEFAULT_EXPERIMENT
    try:
        return check_experiment_name(name)
    except ValueError as exc:
        source = "--experiment" if flag else settings.sources.get("experiment", "experiment")
        raise UsageError(f"{source}: {exc}") from exc


@contextmanager
def open_store(settings: Settings, url: str | None) -> Iterator[MlflowStore]:
    """Open MLflow for reading. Raises NotEnoughData if there is none.

    Starts the local server if it has data and no other is found.
    """
    with settings.mlflow.open(url, report=print_message) as opened:
        if not url and not settings.get("mlflow_url"):  # found automatically
            print_message(f"reading from {opened.description}")
        yield cast("MlflowStore", opened.store)  # `MlflowAccess.connect` opens no other kind of store


@contextmanager
def open_experiment(
    settings: Settings, url: str | None, experiment: str | None
) -> Iterator[tuple[MlflowStore, Experiment]]:
    """Open MLflow for reading, and the experiment. Raises NotEnoughData if either does not exist."""
    from tipbench.workflows.mlflow import existing_experiment

    name = chosen_experiment(settings, experiment)
    with open_store(settings, url) as store:
        yield store, existing_experiment(store, name)


def open_or_start_mlflow(settings: Settings, url: str | None) -> MlflowConnection:
    """Open MLflow for writing; starts the local server if there is no other."""
    writable_home(settings.home)  # fail before a server is started
    return settings.mlflow.open_or_start(url, report=print_message)
