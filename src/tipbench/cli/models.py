"""`tipbench models fetch / list`: download the embedded model, and list available models."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from tipbench.cli.console import make_console, print_json, print_message, print_table
from tipbench.cli.options import JsonOption, OllamaOption, command_group, default_text
from tipbench.files import writable_home
from tipbench.plan.collect_config import CollectConfig
from tipbench.settings import Settings, load_settings
from tipbench.text import file_size, parameter_count, printable

app = command_group("Fetch embedded weights; list the models Ollama has.")


@app.command()
def fetch() -> None:
    """Download the embedded model's weights (98 MB).

    Verifies their hash, stores them under TIPBENCH_HOME and prints the path.
    Safe to interrupt and to run again.

    Examples:

      tipbench models fetch
    """
    print(fetch_with_progress(load_settings()))


def fetch_with_progress(settings: Settings) -> str:
    """Download the weights if they are missing, and return the path of the file."""
    from tipbench.generate.weights import fetch_weights

    home = writable_home(settings.home)
    if sys.stderr.isatty():
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
            bar = progress.add_task("weights", total=None)

            def update_bar(done: int, total: int | None) -> None:
                progress.update(bar, completed=done, total=total)

            return str(fetch_weights(home, report=update_bar))
    printed_quarter = -1

    def print_quarters(done: int, total: int | None) -> None:
        nonlocal printed_quarter
        quarter = done * 4 // total if total else 0
        if quarter != printed_quarter:
            printed_quarter = quarter
            of_total = f" of {total / 1e6:.0f}" if total else ""
            print_message(f"weights: {done / 1e6:.0f}{of_total} MB")

    return str(fetch_weights(home, report=print_quarters))


@app.command("list")
def list_models(
    ollama_url: OllamaOption = None,
    max_model_b: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help=f"The size limit, in billions of parameters.{default_text('max_model_b')}"),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """List Ollama's models, and which are within the size limit.

    Includes the built-in models, which do not need Ollama.

    Examples:

      tipbench models list --max-model-b 2
    """
    from tipbench.generate.engine import available_models

    settings = load_settings()
    config = settings.collect_config({"ollama_url": ollama_url, "max_model_b": max_model_b})
    found = available_models(config, settings.home)
    for error in found.errors:
        print_message(f"warning: {error}")
    if json_:
        print_json([each.to_json() for each in found.models])
        return
    rows = []
    for each in found.models:
        params_b = quantization = file_bytes = None
        if each.facts is not None:
            params_b, quantization, file_bytes = each.facts.params_b, each.facts.quantization, each.facts.file_bytes
        may_run = each.refusal is None
        rows.append([each.model, parameter_count(params_b), quantization, file_size(file_bytes), may_run])
    columns = ("model", "parameters", "quantization", "file", "may run")
    print_table(columns, rows, text_columns=("model", "quantization"))
    reasons = [printable(each.refusal) for each in found.models if each.refusal is not None]
    print()
    print("\n".join(reasons) if reasons else f"all within the limit of {config.max_model_b:g}B")


def installed_models_hint(command: str, config: CollectConfig, settings: Settings) -> str | None:
    """Return a hint if none of the requested models may run on the server.

    The hint names the server's models that may run, with a command line that uses them, or says how to get one.
    Returns None if there is no hint, if no requested model needs a server, or if the server does not respond.
    """
    from tipbench.generate.engine import available_models, engine_types

    server_engines = [each for each in engine_types(config.model_names) if each.server]
    if not server_engines:
        return None
    found = available_models(config, settings.home, server_engines)
    if found.errors or set(found.accepted) & set(config.model_names):
        return None
    if not found.accepted:
        return (
            f"The Ollama server has no model of at most {config.max_model_b:g}B parameters. "
            "Get one, for example with `ollama pull gemma3:1b`."
        )
    configured = settings.collect_config({}).model_dump()  # without command-line options
    options = {key: value for key, value in config.model_dump().items() if value != configured[key]}
    options["models"] = ",".join(found.accepted)
    arguments = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", str(value)]
    command_line = shlex.join(["tipbench", command, *arguments])
    return f"Installed and within the limit: {', '.join(found.accepted)}. To use them:\n  {command_line}"
