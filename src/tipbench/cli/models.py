"""`tipbench models fetch / list`: download the embedded model, and list available models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tipbench.cli.console import err, print_json, print_message, print_table
from tipbench.cli.options import JsonOption
from tipbench.files import writable_home
from tipbench.settings import Settings, load_settings
from tipbench.text import file_size, parameter_count, printable

if TYPE_CHECKING:
    from tipbench.generate.engine import ModelFacts

app = typer.Typer(
    help="Fetch embedded weights; list the models Ollama has.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def fetch() -> None:
    """Download the embedded model's weights (98 MB).

    Verifies their hash, stores them under TIPBENCH_HOME and prints the path.
    Safe to interrupt: running it again resumes the download.
    """
    print(fetch_with_progress(load_settings()))


def fetch_with_progress(settings: Settings) -> str:
    """Download the weights if they are missing; returns the path of the file."""
    from tipbench.generate.weights import fetch_weights

    home = writable_home(settings.home)
    with _download_progress() as report:
        return str(fetch_weights(home, report=report))


@contextmanager
def _download_progress() -> Iterator[Callable[[int, int | None], None]]:
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err(), transient=True) as progress:
        task = progress.add_task("weights", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines() -> Callable[[int, int | None], None]:
    """Return a callback that prints a line for each quarter of the download."""
    shown = -1

    def report(done: int, total: int | None) -> None:
        nonlocal shown
        quarter = done * 4 // total if total else 0
        if quarter != shown:
            shown = quarter
            print_message(
                f"weights: {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else f"weights: {done / 1e6:.0f} MB"
            )

    return report


@app.command("list")
def list_models(
    ollama_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The Ollama server. [default: OLLAMA_HOST, else http://localhost:11434]"),
    ] = None,
    max_model_b: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="The size limit, in billions of parameters. [default: 4.0]")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """List Ollama's models, and which are within the size limit.

    Includes the built-in models, which do not need Ollama.

    Example:

      tipbench models list --max-model-b 2
    """
    settings = load_settings()
    config = settings.collect_config({"ollama_url": ollama_url, "max_model_b": max_model_b})
    rows = _own_models(settings, config.max_model_b) + _ollama_models(config.ollama_url, config.max_model_b)
    if json_:
        print_json(rows)
        return
    print_table(
        ["model", "parameters", "quantization", "file", "may run"],
        [
            [
                row["model"],
                parameter_count(row["params_b"]),
                row["quantization"],
                file_size(row["file_bytes"]),
                row["refusal"] is None,
            ]
            for row in rows
        ],
        text=["model", "quantization"],
    )
    reasons = [printable(row["refusal"]) for row in rows if row["refusal"] is not None]
    print("\n".join(["", *reasons] if reasons else [f"\nall within the limit of {config.max_model_b:g}B"]))


def _own_models(settings: Settings, limit: float) -> list[dict[str, Any]]:
    from tipbench.errors import TipbenchError
    from tipbench.generate.engine import Engine
    from tipbench.generate.llamacpp import LlamaCppEngine
    from tipbench.generate.template import MODEL, TemplateEngine
    from tipbench.generate.weights import EMBEDDED_MODELS

    embedded: Engine = LlamaCppEngine(settings.home, num_ctx=4096)
    template: Engine = TemplateEngine()
    rows = []
    for model, engine in [*((name, embedded) for name in EMBEDDED_MODELS), (MODEL, template)]:
        try:
            rows.append(_row(engine.facts(model), limit))
        except TipbenchError as exc:
            rows.append(_unknown(model, engine.name, str(exc)))
    return rows


def _unknown(model: str, engine: str, reason: str) -> dict[str, Any]:
    unknown = dict.fromkeys(("params_b", "quantization", "file_bytes", "digest"))
    return {"model": model, "engine": engine, **unknown, "refusal": reason}


def _ollama_models(url: str, limit: float) -> list[dict[str, Any]]:
    from tipbench.errors import ModelRefused, OllamaError, OllamaUnavailable
    from tipbench.generate.ollama import OllamaEngine

    engine = OllamaEngine(url)
    rows = []
    try:
        for model in engine.list_models():
            try:
                rows.append(_row(engine.facts(model), limit))
            except ModelRefused as exc:
                rows.append(_unknown(model, engine.name, str(exc)))
    except (OllamaUnavailable, OllamaError) as exc:
        print_message(f"warning: {exc}")
    finally:
        engine.close()
    return rows


def _row(facts: ModelFacts, limit: float) -> dict[str, Any]:
    from tipbench.generate.engine import rejection_reason

    return {
        "model": facts.model,
        "engine": facts.engine,
        "params_b": facts.params_b,
        "quantization": facts.quantization,
        "file_bytes": facts.file_bytes,
        "digest": facts.digest,
        "refusal": rejection_reason(facts, max_model_b=limit, allow_unknown_size=False),
    }
