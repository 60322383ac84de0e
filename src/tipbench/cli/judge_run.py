"""`tipbench judge run`: a judge without a person in front of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.console import print_json, say
from tipbench.cli.counting import counting
from tipbench.cli.judge import (
    AllOption,
    JudgeOption,
    LimitOption,
    OverlapOption,
    RejudgeOption,
    SeedOption,
    SuiteOption,
    alone,
    checked_judge,
    checked_reason,
    say_held,
)
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment
from tipbench.errors import UsageError
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.judge.filler import Filler
    from tipbench.judge.running import Ran
    from tipbench.plan.config import CollectConfig

_REASONS_SHOWN = 5


def run(
    with_: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="rules|command:…|ollama:MODEL",
            help='The judge: transparent rules, any program (command:"agent --judge"), or a local model.',
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
        float, typer.Option("--timeout-s", min=1.0, metavar="SECONDS", help="How long a program may take for a call.")
    ] = 900.0,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, metavar="NUMBER", help="Items a program gets at once. [default: all]"),
    ] = None,
    accept_drift: Annotated[
        str | None, typer.Option("--accept-drift", metavar="REASON", help="Count the scores all the same, and why.")
    ] = None,
    ollama_url: Annotated[
        str | None, typer.Option("--ollama-url", metavar="URL", help="The Ollama server. [default: OLLAMA_HOST]")
    ] = None,
    max_model_b: Annotated[
        str | None,
        typer.Option(
            "--max-model-b", metavar="NUMBER", help="Largest model, in billions of parameters. [default: 4.0]"
        ),
    ] = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Let rules, a program or a local model judge. Each gets the hidden controls too, and its drift is shown.

    `rules` and `ollama:MODEL` are provisional: their scores stand beside those of people, and cells stay pending.
    `command:` pipes the sheet through a program (stdin to stdout; {sheet} and {out} in the command stand for files)
    and counts as the judge --judge NAME (default: the program's name), drift limit included.

    Examples:

      tipbench judge run --experiment tip-bench-demo --with rules

      tipbench judge run --with command:"python my_judge.py" --judge my-judge

      tipbench judge run --with ollama:llama3.2:3b
    """
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.judge.exporting import Request
    from tipbench.judge.running import run_judge

    settings = load_settings()
    request = Request(limit=limit, overlap=overlap, everything=all_, rejudge=rejudge, seed=seed, suite=suite)
    name = checked_judge(judge)
    reason = checked_reason(accept_drift)
    rule = settings.collect_config({"ollama_url": ollama_url, "max_model_b": max_model_b})
    with (
        open_store(settings, mlflow_url) as store,
        _filler(with_, name, settings, rule, timeout_s=timeout_s, batch=batch) as filler,
        counting(f"{filler.name} judges") as count,
    ):
        ran = run_judge(
            store,
            existing_experiment(store, chosen_experiment(settings, experiment)),
            filler,
            request,
            report=say,
            progress=lambda scored, unscored, of: count(scored + unscored, of),
            accept=reason,
            alone=lambda: alone(settings, store),
        )
    if json_:
        print_json(ran.to_json())
    else:
        show_ran(ran, provisional=filler.provisional)
    if ran.applied.held or ran.unscored:
        raise typer.Exit(1)


@contextmanager
def _filler(
    text: str,
    judge: str | None,
    settings: Settings,
    rule: CollectConfig,
    *,
    timeout_s: float,
    batch: int | None,
) -> Iterator[Filler]:
    """The judge that `--with` names, open while it judges."""
    kind, _, rest = text.partition(":")
    if kind == "command" and rest.strip():
        from tipbench.judge.command import CommandJudge, default_name

        yield CommandJudge(rest, judge or checked_judge(default_name(rest)) or "", timeout_s=timeout_s, batch=batch)
        return
    if judge is not None:
        raise UsageError(f"--judge names the judge behind command:…; --with {text} has its own name.")
    if text == "rules":
        from tipbench.judge.rules import RulesJudge

        yield RulesJudge()
    elif kind == "ollama" and rest.strip():
        from tipbench.cli.session import writable_home
        from tipbench.judge.model import open_model_judge

        keys = ("ollama_url", "max_model_b", "num_ctx", "server_wait_s", "evict", "wait", "allow_unknown_size")
        memory_rule = {key: getattr(rule, key) for key in keys}
        with open_model_judge(rest, home=writable_home(settings), report=say, **memory_rule) as opened:
            yield opened
    else:
        raise UsageError(
            f"--with takes rules, command:PROGRAM or ollama:MODEL (got {text[:80]!r}); "
            'for example --with command:"python my_judge.py".'
        )


def show_ran(ran: Ran, *, provisional: bool) -> None:
    """What a judge without a person did."""
    applied = ran.applied
    state = "scored provisionally; the cells stay pending" if provisional else "held" if applied.held else "applied"
    print(f"{applied.judge}: {applied.finished} items {state} (sheet {applied.sheet})")
    if ran.unscored:
        print(f"no score came for {len(ran.unscored)} of {applied.finished + applied.unfinished} items:")
        for each in ran.unscored[:_REASONS_SHOWN]:
            print(f"  {each.item}: {each.reason}")
        if len(ran.unscored) > _REASONS_SHOWN:
            print(f"  and {len(ran.unscored) - _REASONS_SHOWN} more; --json lists all")
    for sentence in applied.drift.sentences(applied.rubric):
        print(sentence)
    if applied.held:
        say_held(applied)
