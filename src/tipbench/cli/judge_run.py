"""`tipbench judge run`: run an automatic judge."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.judge import show_verdict
from tipbench.cli.options import (
    AcceptDriftOption,
    AllOption,
    ExperimentOption,
    JsonOption,
    JudgeOption,
    LimitOption,
    MlflowOption,
    OllamaOption,
    OverlapOption,
    RejudgeOption,
    SeedOption,
    SuiteOption,
    default_text,
    open_experiment,
)
from tipbench.cli.progress import progress_counter, report_message, write_event
from tipbench.files import ResourceLock, writable_home, write_atomic
from tipbench.http import canonical_url
from tipbench.record.events import Judged, Judging
from tipbench.settings import load_settings

if TYPE_CHECKING:
    from tipbench.judge.automatic import JudgeChoice
    from tipbench.judge.run import AutomaticJudge, JudgeResult
    from tipbench.plan.collect_config import CollectConfig

_MAX_REASONS_SHOWN = 5
_COMMAND_TIMEOUT_S = 900.0


def run(
    with_: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="rules|command:…|ollama:MODEL",
            help='The judge: transparent rules, any program (as in command:"agent --judge"; without a program, '
            "`command` uses TIPBENCH_JUDGE_COMMAND), or a local model.",
        ),
    ],
    experiment: ExperimentOption = None,
    judge: JudgeOption = None,
    limit: LimitOption = None,
    overlap: OverlapOption = 0.2,
    all_: AllOption = False,
    rejudge: RejudgeOption = False,
    seed: SeedOption = None,
    suite: SuiteOption = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            metavar="SECONDS",
            help="Time limit per program call or model answer. [default: 900 for a program, 300 for a model]",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Items per program call. [default: all]")
    ] = None,
    accept_drift: AcceptDriftOption = None,
    ollama_url: OllamaOption = None,
    max_model_b: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help=f"Largest model, in billions of parameters.{default_text('max_model_b')}"),
    ] = None,
    num_ctx: Annotated[
        str | None, typer.Option(metavar="NUMBER", help=f"The model's context, in tokens.{default_text('num_ctx')}")
    ] = None,
    evict: Annotated[bool, typer.Option("--evict", help="First unload what Ollama has in memory.")] = False,
    allow_unknown_size: Annotated[
        bool, typer.Option("--allow-unknown-size", help="Allow a model of unknown size.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Queue behind a collect or another run of this judge.")] = False,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Run an automatic judge: rules, a program or a local model.

    Hidden controls measure the judge's drift, which is shown. `rules` and `ollama:MODEL` are provisional: their scores
    are stored separately, and cells stay pending. `command:` runs a program that reads the sheet from stdin and writes
    it, filled, to stdout, or uses files: {sheet} and {out} in the command are replaced by their paths. A
    program's scores count as those of --judge NAME (default: the program's name), unless its drift exceeds the limit.

    Examples:

      tipbench judge run --experiment tip-bench-demo --with rules

      tipbench judge run --with command:"python my_judge.py" --judge my-judge

      tipbench judge run --with ollama:llama3.2:3b
    """
    from tipbench.judge.automatic import JudgeChoice
    from tipbench.judge.export import ExportRequest
    from tipbench.judge.run import JudgeEnvironment, run_judge
    from tipbench.workflows.board import judge_name
    from tipbench.workflows.judging import check_judge_options, judging_lock, parse_drift_reason

    settings = load_settings()
    request = ExportRequest(limit=limit, overlap=overlap, everything=all_, rejudge=rejudge, seed=seed, suite=suite)
    model_options: dict[str, object] = {  # None if the option is not given
        "ollama_url": ollama_url,
        "max_model_b": max_model_b,
        "num_ctx": num_ctx,
        "evict": evict or None,
        "allow_unknown_size": allow_unknown_size or None,
    }
    judge_options = {"judge": judge, "batch": batch, "accept_drift": accept_drift, "timeout_s": timeout_s}
    choice = JudgeChoice.parse(with_)
    check_judge_options(choice, {**judge_options, **model_options})
    choice = choice.with_program(settings.get("judge_command"))
    name = judge_name(judge)
    accept_reason = parse_drift_reason(accept_drift) if accept_drift is not None else None
    # The options of a model judge, and --wait, are also options of a collect.
    config = settings.collect_config({**model_options, "wait": wait or None})

    def save_unapplied_sheet(sheet_id: str, text: str) -> Path:
        folder = writable_home(settings.home) / "sheets"
        folder.mkdir(exist_ok=True)
        path = folder / f"{sheet_id}.json"
        write_atomic(path, text.encode("utf-8", "backslashreplace"))
        return path

    with (
        open_experiment(settings, mlflow_url, experiment) as (store, stored_experiment),
        _open_judge(choice, name, settings.home, config, timeout_s=timeout_s, batch=batch) as automatic_judge,
        progress_counter(f"{automatic_judge.name} judges") as count,
    ):

        def progress(scored: int, unscored: int, total: int) -> None:
            count(scored + unscored, total)
            write_event(Judging(automatic_judge.name, scored, unscored, total))

        home = writable_home(settings.home)
        mlflow_option = f" --mlflow-url {shlex.quote(mlflow_url)}" if mlflow_url else ""
        environment = JudgeEnvironment(
            report=report_message,
            progress=progress,
            lock=lambda: judging_lock(home, store.url, report=print_message),
            wait_s=config.server_wait_s,
            save_to_file=save_unapplied_sheet,
            how_to_accept=f"tipbench judge run --experiment {stored_experiment.name} --with {shlex.quote(with_)} "
            f"--judge {shlex.quote(automatic_judge.name)}{mlflow_option} --accept-drift REASON",
        )
        one_run_per_judge = ResourceLock(
            home,
            f"judge {automatic_judge.name} in {stored_experiment.name} at {canonical_url(store.url)}",
            purpose=f"a judge run for {automatic_judge.name} in {stored_experiment.name}",
        )
        with one_run_per_judge.held(wait=config.wait, report=print_message):
            result = run_judge(
                store, stored_experiment, automatic_judge, request, accept=accept_reason, environment=environment
            )
    applied, provisional = result.applied, automatic_judge.provisional
    write_event(
        Judged(
            sheet=applied.sheet,
            judge=applied.judge,
            scored=applied.n_finished,
            unscored=len(result.unscored),
            held=applied.held,
            provisional=provisional,
        )
    )
    if json_:
        print_json(result.to_json())
    else:
        _show_result(result, provisional=provisional)
    if applied.held or result.unscored:
        raise typer.Exit(1)


@contextmanager
def _open_judge(
    choice: JudgeChoice,
    name: str | None,
    home: Path,
    config: CollectConfig,
    *,
    timeout_s: float | None,
    batch: int | None,
) -> Iterator[AutomaticJudge]:
    """`name` and `batch` apply to programs only."""
    from tipbench.judge.automatic import JudgeKind
    from tipbench.workflows.judging import MODEL_OPTIONS

    if choice.kind is JudgeKind.COMMAND:
        from tipbench.judge.command import CommandJudge, default_name
        from tipbench.workflows.board import judge_name

        name = name or judge_name(default_name(choice.target)) or ""
        yield CommandJudge(choice.target, name, timeout_s=timeout_s or _COMMAND_TIMEOUT_S, batch=batch)
    elif choice.kind is JudgeKind.MODEL:
        from tipbench.judge.model import open_model_judge

        options = {key: getattr(config, key) for key in (*MODEL_OPTIONS, "server_wait_s", "wait")}
        if timeout_s is not None:
            options["timeout_s"] = timeout_s
        with open_model_judge(choice.target, home=writable_home(home), report=report_message, **options) as model_judge:
            yield model_judge
    else:
        from tipbench.judge.rules import RulesJudge

        yield RulesJudge()


def _show_result(result: JudgeResult, *, provisional: bool) -> None:
    applied = result.applied
    state = "held" if applied.held else "applied"
    if provisional:
        state = "scored provisionally; the cells stay pending"
    print(f"{applied.judge}: {applied.n_finished} items {state} (sheet {applied.sheet})")
    unscored = result.unscored
    if unscored:
        print(f"no score for {len(unscored)} of {applied.n_finished + applied.n_unfinished} items:")
        for each in unscored[:_MAX_REASONS_SHOWN]:
            print(f"  {each.item}: {each.reason}")
        if len(unscored) > _MAX_REASONS_SHOWN:
            print(f"  and {len(unscored) - _MAX_REASONS_SHOWN} more; --json lists all")
    show_verdict(applied)
