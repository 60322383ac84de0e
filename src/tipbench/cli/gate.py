"""`tipbench gate`: check in CI that a candidate pair is not worse than a baseline."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.options import (
    ExperimentOption,
    JsonOption,
    MlflowOption,
    OnlyJudgeOption,
    WhereOption,
    chosen_experiment,
    open_experiment,
)
from tipbench.errors import NotEnoughData, TipbenchError, UsageError
from tipbench.files import check_output, write_output
from tipbench.settings import load_settings
from tipbench.text import printable_lines


def gate(
    candidate: Annotated[str, typer.Option(metavar="MODEL/PROMPT", help="The pair to check.")],
    baseline: Annotated[str, typer.Option(metavar="MODEL/PROMPT", help="The pair to compare with.")],
    experiment: ExperimentOption = None,
    margin: Annotated[
        float, typer.Option(metavar="POINTS", help="Largest acceptable loss, in points.", show_default=True)
    ] = 1.0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if undecided.")] = False,
    failed_as_floor: Annotated[
        bool, typer.Option("--failed-as-floor", help="Count the candidate's failed cells at the rubric's floor.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the result as JUnit XML.")] = None,
    annotations: Annotated[
        bool, typer.Option("--annotations", help="Also print a GitHub workflow annotation.")
    ] = False,
    where: WhereOption = None,
    judge: OnlyJudgeOption = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Check whether a candidate is worse than a baseline.

    For CI. Computes the 95 % confidence interval of the paired difference over the scenarios judged for both. Exit 0 if
    the interval is above −margin: the candidate is not worse. Exit 1 if it is below −margin: the candidate is worse.
    Otherwise the result is undecided: exit 0 with a warning, or 1 with --strict. The candidate must be judged in every
    scenario in which the baseline is, and in at least six. If it is not, or if all scores are provisional, exit 3 with
    a message on what is missing.

    Examples:

      tipbench gate --candidate qwen2.5:0.5b/v2-mentor --baseline qwen2.5:0.5b/v1 --experiment tip-bench-may

      tipbench gate --candidate gemma3:1b/v1 --baseline qwen2.5:0.5b/v1 --strict --junit gate.xml --annotations
    """
    from tipbench.compare.cells import read_board_cells
    from tipbench.compare.gate import GateOptions, Outcome, annotation, evaluate_gate, junit_xml, unknown_result
    from tipbench.workflows.board import board_query, parse_pair_option

    settings = load_settings()
    candidate_pair = parse_pair_option(candidate, "candidate")
    baseline_pair = parse_pair_option(baseline, "baseline")
    if not isfinite(margin) or margin < 0:
        raise UsageError(f"--margin must be 0 or more (got {margin:g}).")
    options = GateOptions(candidate_pair, baseline_pair, margin, failed_as_floor=failed_as_floor)
    cell_filter = board_query(where=where or (), judge=judge).cell_filter
    experiment_name = chosen_experiment(settings, experiment)
    if junit is not None:
        check_output(junit, "--junit")
    try:
        with open_experiment(settings, mlflow_url, experiment_name) as (store, stored_experiment):
            result = evaluate_gate(read_board_cells(store, stored_experiment.experiment_id, cell_filter), options)
    except NotEnoughData as exc:
        result = unknown_result(options, str(exc))
    except TipbenchError as exc:
        if junit is not None:  # otherwise CI would read the report of an earlier build
            write_output(junit, junit_xml(experiment_name, unknown_result(options, str(exc))), "--junit")
        raise
    if junit is not None:
        write_output(junit, junit_xml(experiment_name, result, strict=strict), "--junit")
    if annotations:
        line = annotation(experiment_name, result, strict=strict)
        if json_:  # stdout is for the JSON
            print_message(line)
        else:
            print(line)
    exit_code = result.exit_code(strict=strict)
    if json_:
        print_json({"experiment": experiment_name, **result.to_json(), "strict": strict, "exit_code": exit_code})
    elif result.outcome is Outcome.UNKNOWN:
        raise NotEnoughData(result.reason)
    else:
        print(printable_lines(result.reason))
        if result.outcome is Outcome.UNDECIDED and not strict:
            print_message("warning: the gate is undecided; pass --strict to fail in this case")
    raise typer.Exit(exit_code)
