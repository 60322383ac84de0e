"""`tipbench judge run`: run an automatic judge."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.console import print_json, print_message, progress_counter
from tipbench.cli.events import counted, emit_judged, tee_events
from tipbench.cli.judge import (
    AcceptOption,
    AllOption,
    JudgeOption,
    LimitOption,
    OverlapOption,
    RejudgeOption,
    SeedOption,
    SuiteOption,
    checked_judge,
    checked_reason,
    judge_run_lock,
    judging_lock,
    show_verdict,
)
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment
from tipbench.errors import UsageError
from tipbench.files import writable_home, write_atomic
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.judge.run import AutomaticJudge, JudgeEnvironment, JudgeResult, Progress
    from tipbench.plan.config import CollectConfig
    from tipbench.record.mlflow import MlflowStore

_REASONS_SHOWN = 5
_COMMAND_TIMEOUT_S = 900.0
_BELONGS = {  # option → judges it applies to; other options apply to all
    "judge": ("command",),
    "batch": ("command",),
    "accept_drift": ("command",),
    "timeout_s": ("command", "ollama"),
    "ollama_url": ("ollama",),
    "max_model_b": ("ollama",),
    "num_ctx": ("ollama",),
    "evict": ("ollama",),
    "allow_unknown_size": ("ollama",),
}
WithOption = Annotated[
    str,
    typer.Option(
        "--with",
        metavar="rules|command:…|ollama:MODEL",
        help='The judge: transparent rules, any program (command:"agent --judge"; command alone: the one that '
        "TIPBENCH_JUDGE_COMMAND names), or a local model.",
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout-s",
        min=1.0,
        metavar="SECONDS",
        help="Time limit per program call or model answer. [default: 900, 300]",
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, metavar="NUMBER", help="Items per program call. [default: all]"),
]
OllamaOption = Annotated[
    str | None, typer.Option("--ollama-url", metavar="URL", help="The Ollama server. [default: OLLAMA_HOST]")
]
LargestOption = Annotated[
    str | None,
    typer.Option("--max-model-b", metavar="NUMBER", help="Largest model, in billions of parameters. [default: 4.0]"),
]
ContextOption = Annotated[
    str | None, typer.Option("--num-ctx", metavar="NUMBER", help="The model's context, in tokens. [default: 4096]")
]
EvictOption = Annotated[bool, typer.Option("--evict", help="Unload what Ollama has in memory first.")]
UnknownSizeOption = Annotated[bool, typer.Option("--allow-unknown-size", help="Allow a model of unknown size.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Queue behind a collect or another run of this judge.")]


def run(
    with_: WithOption,
    experiment: ExperimentOption = None,
    judge: JudgeOption = None,
    limit: LimitOption = None,
    overlap: OverlapOption = 0.2,
    all_: AllOption = False,
    rejudge: RejudgeOption = False,
    seed: SeedOption = None,
    suite: SuiteOption = None,
    timeout_s: TimeoutOption = None,
    batch: BatchOption = None,
    accept_drift: AcceptOption = None,
    ollama_url: OllamaOption = None,
    max_model_b: LargestOption = None,
    num_ctx: ContextOption = None,
    evict: EvictOption = False,
    allow_unknown_size: UnknownSizeOption = False,
    wait: WaitOption = False,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Run an automatic judge: rules, a program or a local model. Hidden controls measure its drift, which is shown.

    `rules` and `ollama:MODEL` are provisional: their scores are stored separately, and cells stay pending.
    `command:` pipes the sheet through a program (stdin to stdout; {sheet} and {out} in the command are file paths)
    and counts as the judge --judge NAME (default: the program's name), subject to the drift limit.

    Examples:

      tipbench judge run --experiment tip-bench-demo --with rules

      tipbench judge run --with command:"python my_judge.py" --judge my-judge

      tipbench judge run --with ollama:llama3.2:3b
    """
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.judge.export import ExportRequest
    from tipbench.judge.run import run_judge

    settings = load_settings()
    request = ExportRequest(limit=limit, overlap=overlap, everything=all_, rejudge=rejudge, seed=seed, suite=suite)
    ours: dict[str, object] = {"ollama_url": ollama_url, "max_model_b": max_model_b, "num_ctx": num_ctx}
    ours |= {"evict": evict or None, "allow_unknown_size": allow_unknown_size or None}
    own = {"judge": judge, "batch": batch, "accept_drift": accept_drift, "timeout_s": timeout_s}
    _check_options(with_, {**own, **ours})
    name = checked_judge(judge)
    reason = checked_reason(accept_drift)
    rule = settings.collect_config({**ours, "wait": wait or None})
    with (
        open_store(settings, mlflow_url) as store,
        _filler(with_, name, settings, rule, timeout_s=timeout_s, batch=batch) as filler,
        progress_counter(f"{filler.name} judges") as count,
    ):
        found = existing_experiment(store, chosen_experiment(settings, experiment))
        with judge_run_lock(settings, store, found.name, filler.name, wait=rule.wait):
            accepting = _accepting(with_, filler.name, found.name, mlflow_url)
            environment = _around(settings, store, rule, counted(filler.name, count), accepting)
            ran = run_judge(store, found, filler, request, accept=reason, environment=environment)
    emit_judged(ran, provisional=filler.provisional)
    if json_:
        print_json(ran.to_json())
    else:
        show_result(ran, provisional=filler.provisional)
    if ran.applied.held or ran.unscored:
        raise typer.Exit(1)


def _check_options(with_: str, given: Mapping[str, object]) -> None:
    """Raise UsageError for an option that does not apply to the chosen judge."""
    kind = with_.partition(":")[0]
    if kind not in ("rules", "command", "ollama"):
        return  # `_filler` raises UsageError
    for key, value in given.items():
        if value is not None and kind not in _BELONGS[key]:
            flag, whose = "--" + key.replace("_", "-"), " and ".join(f"--with {each}:…" for each in _BELONGS[key])
            raise UsageError(f"{flag} applies only to {whose}, not to --with {with_[:80]}. Leave it out.")


def _around(
    settings: Settings, store: MlflowStore, rule: CollectConfig, progress: Progress, accepting: str
) -> JudgeEnvironment:
    from tipbench.judge.run import JudgeEnvironment

    return JudgeEnvironment(
        report=tee_events(print_message),
        progress=progress,
        lock=lambda: judging_lock(settings, store),
        wait_s=rule.server_wait_s,
        rescue=lambda sheet, text: _rescue(settings, sheet, text),
        how_to_accept=accepting,
    )


def _accepting(with_: str, judge: str, experiment: str, mlflow_url: str | None) -> str:
    where = f" --mlflow-url {shlex.quote(mlflow_url)}" if mlflow_url else ""
    return (
        f"tipbench judge run --experiment {experiment} --with {shlex.quote(with_)} --judge {shlex.quote(judge)}{where} "
        "--accept-drift REASON"
    )


def _rescue(settings: Settings, sheet: str, text: str) -> Path:
    """Save a filled sheet that MLflow could not store to the home folder."""
    folder = writable_home(settings.home) / "sheets"
    folder.mkdir(exist_ok=True)
    path = folder / f"{sheet}.json"
    write_atomic(path, text.encode("utf-8", "backslashreplace"))
    return path


@contextmanager
def _filler(
    text: str,
    judge: str | None,
    settings: Settings,
    rule: CollectConfig,
    *,
    timeout_s: float | None,
    batch: int | None,
) -> Iterator[AutomaticJudge]:
    """Open the judge selected by `--with`."""
    kind, _, rest = text.partition(":")
    if text == "command":
        rest = settings.get("judge_command") or ""
    if kind == "command" and rest.strip():
        from tipbench.judge.command import CommandJudge, default_name

        limit_s = _COMMAND_TIMEOUT_S if timeout_s is None else timeout_s
        yield CommandJudge(rest, judge or checked_judge(default_name(rest)) or "", timeout_s=limit_s, batch=batch)
    elif text == "rules":
        from tipbench.judge.rules import RulesJudge

        yield RulesJudge()
    elif kind == "ollama" and rest.strip():
        from tipbench.judge.model import open_model_judge

        keys = ("ollama_url", "max_model_b", "num_ctx", "server_wait_s", "evict", "wait", "allow_unknown_size")
        memory_rule = {key: getattr(rule, key) for key in keys}
        if timeout_s is not None:
            memory_rule["timeout_s"] = timeout_s
        with open_model_judge(
            rest, home=writable_home(settings.home), report=tee_events(print_message), **memory_rule
        ) as opened:
            yield opened
    else:
        raise UsageError(
            f"--with takes rules, command:PROGRAM or ollama:MODEL (got {text[:80]!r}); "
            'for example --with command:"python my_judge.py". command alone is the program of TIPBENCH_JUDGE_COMMAND.'
        )


def show_result(ran: JudgeResult, *, provisional: bool) -> None:
    """Print the result of an automatic judge."""
    applied = ran.applied
    state = "scored provisionally; the cells stay pending" if provisional else "held" if applied.held else "applied"
    print(f"{applied.judge}: {applied.finished} items {state} (sheet {applied.sheet})")
    if ran.unscored:
        print(f"no score for {len(ran.unscored)} of {applied.finished + applied.unfinished} items:")
        for each in ran.unscored[:_REASONS_SHOWN]:
            print(f"  {each.item}: {each.reason}")
        if len(ran.unscored) > _REASONS_SHOWN:
            print(f"  and {len(ran.unscored) - _REASONS_SHOWN} more; --json lists all")
    show_verdict(applied)
