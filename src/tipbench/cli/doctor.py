"""`tipbench doctor`: check Ollama, MLflow, memory, disk, versions and settings."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer

import tipbench
from tipbench.cli.console import print_json
from tipbench.cli.options import JsonOption, MlflowOption, OllamaOption, open_store
from tipbench.errors import NotEnoughData, TipbenchError
from tipbench.http import strip_login
from tipbench.plan.collect_config import CollectConfig
from tipbench.settings import Settings, load_settings
from tipbench.text import file_size, join_names, plural, printable

Status = Literal["ok", "warning", "failed"]

_MARKS = {"ok": "✓", "warning": "!", "failed": "✕"}
_MIN_DISK_BYTES = 2 * 2**30
_MIN_MEMORY_BYTES = 2 * 2**30
_EXTRAS = {  # package → (the extra that installs it, what needs it)
    "mlflow": ("local", "the local MLflow and the demo"),
    "xllamacpp": ("local", "the embedded model and the demo"),
    "altair": ("charts", "charts"),
    "fastapi": ("panel", "the panel"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    found: str
    advice: str | None = None


def doctor(ollama_url: OllamaOption = None, mlflow_url: MlflowOption = None, json_: JsonOption = False) -> None:
    """Check Ollama, MLflow, memory, disk, versions and settings.

    Shows what is wrong and what to do. Exits with 1 if a check failed; warnings do not count.
    Nothing is started or written.

    Examples:

      tipbench doctor

      tipbench doctor --ollama-url http://gpu.example:11434 --json
    """
    findings = list(_run_checks({"ollama_url": ollama_url, "mlflow_url": mlflow_url}))
    n_failed = sum(finding.status == "failed" for finding in findings)
    if json_:
        print_json([vars(finding) for finding in findings])
    else:
        for finding in findings:
            print(printable(f"{_MARKS[finding.status]} {finding.check}: {finding.found}"))
            if finding.advice:
                print(printable(f"    {finding.advice}"))
        n_warnings = sum(finding.status == "warning" for finding in findings)
        print(f"\n{plural(len(findings), 'check')}: {n_failed} failed, {plural(n_warnings, 'warning')}")
    if n_failed:
        raise typer.Exit(1)


def _run_checks(url_options: dict[str, str | None]) -> Iterator[Finding]:
    yield from _check_versions()
    try:
        settings = load_settings()
        config = settings.collect_config(url_options)
    except TipbenchError as exc:
        yield Finding("settings", "failed", str(exc), "The checks that need settings were left out.")
        return
    yield from _check_settings(settings)
    yield from _check_disk(settings.home)
    yield _check_memory(config)
    for name, check in (("ollama", _check_ollama), ("mlflow", _check_mlflow)):
        try:
            yield from check(config, settings)
        except TipbenchError as exc:
            yield Finding(name, "failed", str(exc))


def _check_versions() -> Iterator[Finding]:
    yield Finding("versions", "ok", f"tipbench {tipbench.__version__}, Python {platform.python_version()}")
    for package, (extra, purpose) in _EXTRAS.items():
        if version := _installed_version(package):
            yield Finding(f"package {package}", "ok", version)
        else:
            advice = f"Needed for {purpose}: install tipbench with the extra [{extra}]."
            yield Finding(f"package {package}", "warning", "not installed", advice)


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _check_settings(settings: Settings) -> Iterator[Finding]:
    used_sources = [source for key, source in settings.sources.items() if key in settings.values]
    # A source is an environment variable or "FILE: KEY".
    files = {source.partition(": ")[0] for source in used_sources if ": " in source}
    variables = [source for source in used_sources if ": " not in source]
    origin = join_names([*sorted(files), *sorted(variables)], 8) or "defaults only"
    yield Finding("settings", "ok", f"{origin}; home {settings.home}")
    for key, source in settings.sources.items():
        if key not in settings.values:  # an ignored setting: its source is "PROBLEM; ADVICE"
            problem, _, advice = source.partition("; ")
            yield Finding("settings", "warning", f"{key} is {problem}", f"{advice}.")


def _check_disk(home: Path) -> Iterator[Finding]:
    existing_folder = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(existing_folder, os.W_OK | os.X_OK):
        yield Finding("disk", "failed", f"{home} is not writable", "Set TIPBENCH_HOME to a folder of your own.")
        return
    free = shutil.disk_usage(existing_folder).free
    found = f"{file_size(free)} free in {existing_folder}"
    if free < _MIN_DISK_BYTES:
        advice = "Weights, the local MLflow and journals need space. Free some, or set TIPBENCH_HOME to another disk."
        yield Finding("disk", "warning", found, advice)
    else:
        yield Finding("disk", "ok", found)


def _check_memory(config: CollectConfig) -> Finding:
    from tipbench.generate.engine import free_memory

    free = free_memory(config.model_names[0], config)  # unknown if this model runs on another machine
    sizes = [(size, kind) for size, kind in ((free.ram, "RAM"), (free.vram, "VRAM")) if size is not None]
    if not sizes:
        found = "unknown: the models run on another machine, or this system does not report it"
        return Finding("memory", "warning", found, "`plan` cannot warn of models that do not fit.")
    found = " and ".join(f"{file_size(size)} of {kind}" for size, kind in sizes) + " free"
    if max(size for size, _ in sizes) < _MIN_MEMORY_BYTES:
        return Finding("memory", "warning", found, "Close other programs, or use models below 1B parameters.")
    return Finding("memory", "ok", found)


def _check_ollama(config: CollectConfig, settings: Settings) -> Iterator[Finding]:
    from tipbench.generate.engine import ENGINES, available_models, engine_type_of
    from tipbench.generate.ollama_api import OllamaApi

    url = strip_login(config.ollama_url)
    api = OllamaApi(config.ollama_url)
    try:
        version, loaded = api.version(), api.resident()
    except TipbenchError as exc:
        advice = "Without it only embedded:smollm2:135m and baseline:template run."
        yield Finding("ollama", "failed", str(exc), advice)
        return
    finally:
        api.close()
    yield Finding("ollama", "ok", f"version {version} at {url}")
    server_engines = [engine for engine in ENGINES.values() if engine.server]
    available = available_models(config, settings.home, server_engines)
    refused = [model.model for model in available.models if model.refusal is not None]
    refused_text = f"refused: {join_names(refused, 5)}" if refused else ""
    if available.accepted:
        found = join_names(available.accepted, 8)
        if refused:
            found += f"; {refused_text}"
        yield Finding("models", "ok", found)
    else:
        advice = f"Get a model up to {config.max_model_b:g}B, as with `ollama pull gemma3:1b`."
        yield Finding("models", "failed", refused_text or "none installed", advice)
    on_server = [name for name in config.model_names if engine_type_of(name).server]
    missing = [name for name in on_server if name not in available.accepted and name not in refused]
    if available.accepted and missing:
        advice = f"`tipbench collect --models {','.join(available.accepted)}`, or `ollama pull {missing[0]}`."
        yield Finding("models", "warning", f"configured but not installed: {join_names(missing, 5)}", advice)
    if loaded:
        names = join_names([model.name for model in loaded], 3)
        advice = "A collect needs empty memory; with `--evict` it unloads other models first."
        yield Finding("models", "warning", f"in memory now: {names}", advice)


def _check_mlflow(config: CollectConfig, settings: Settings) -> Iterator[Finding]:
    from tipbench.errors import LocalMlflowError
    from tipbench.record.journal import count_unstored, journal_folder
    from tipbench.record.local_mlflow import LocalMlflow
    from tipbench.record.mlflow import find_mlflow

    try:
        server = find_mlflow(config.mlflow_url, settings.home, start=False, report=lambda _text: None)
        with open_store(settings, server.url) as store:
            experiments = [each for each in store.experiments() if each.name.startswith("tip-bench-")]
        yield Finding("mlflow", "ok", f"{server.description}; {plural(len(experiments), 'experiment')} of tipbench")
    except (LocalMlflowError, NotEnoughData):  # no server was found
        data_text = "has data and " if LocalMlflow(settings.home).has_data() else ""
        if _installed_version("mlflow"):
            yield Finding("mlflow", "ok", f"none on localhost:5000; the local one {data_text}starts when needed")
        else:
            advice = "Install tipbench with the extra [local], or set MLFLOW_TRACKING_URI to a server."
            yield Finding("mlflow", "failed", "no server, and no local one can be started", advice)
    # The parent has the journals of all servers and experiments.
    all_journals = journal_folder(settings.home, server_identity="", experiment="").parent
    if n_unstored := count_unstored(all_journals.glob("*")):
        advice = "The next collect into the same experiment records them."
        yield Finding("journal", "warning", f"{plural(n_unstored, 'finished result')} not yet in MLflow", advice)
