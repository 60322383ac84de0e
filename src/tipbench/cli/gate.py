"""`tipbench gate`: check in CI that a candidate pair is not worse than a baseline."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.compare import OneJudgeOption, WhereOption, read_filters
from tipbench.cli.console import print_json, print_message
from tipbench.cli.judge import checked_judge
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment, read_pair
from tipbench.errors import NotEnoughData, TipbenchError, UsageError
from tipbench.files import check_output, write_output
from tipbench.settings import Settings, load_settings
from tipbench.text import printable_lines

if TYPE_CHECKING:
    from tipbench.compare.cells import CellFilter
    from tipbench.compare.gate import GateResult
    from tipbench.compare.matrix import Pair


MarginOption = Annotated[
    float,
    typer.Option("--margin", metavar="POINTS", help="Largest acceptable loss, in points.", show_default=True),
]
JunitOption = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Also write the result as JUnit XML.")
]
AnnotationsOption = Annotated[bool, typer.Option("--annotations", help="Also print a GitHub workflow annotation.")]


def gate(
    candidate: Annotated[str, typer.Option("--candidate", metavar="MODEL/PROMPT", help="The pair to check.")],
    baseline: Annotated[str, typer.Option("--baseline", metavar="MODEL/PROMPT", help="The pair to compare with.")],
    experiment: ExperimentOption = None,
    margin: MarginOption = 1.0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if undecided.")] = False,
    junit: JunitOption = None,
    annotations: AnnotationsOption = False,
    where: WhereOption = None,
    judge: OneJudgeOption = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Check whether a candidate is worse than a baseline.

    For CI. Uses the 95 % confidence interval of the paired difference over the scenarios judged for both. Not worse:
    the interval is above −margin; exit 0. Worse: it is below; exit 1.
    Otherwise undecided: exit 0 with a warning, 1 with --strict. Exit 3 with fewer than two shared judged scenarios,
    or if there are only provisional scores.

    Examples:

      tipbench gate --candidate qwen2.5:0.5b/v2-mentor --baseline qwen2.5:0.5b/v1 --experiment tip-bench-may

      tipbench gate --candidate gemma3:1b/v1 --baseline qwen2.5:0.5b/v1 --strict --junit gate.xml --annotations
    """
    from tipbench.compare.cells import CellFilter
    from tipbench.compare.gate import annotation, junit_xml, unknown

    settings = load_settings()
    pairs = read_pair(candidate, "--candidate"), read_pair(baseline, "--baseline")
    if not isfinite(margin) or margin < 0:
        raise UsageError(f"--margin must be 0 or more (got {margin:g}).")
    question = CellFilter(read_filters(where), checked_judge(judge))
    name = chosen_experiment(settings, experiment)
    if junit is not None:
        check_output(junit, "--junit")
    try:
        result = _result(settings, mlflow_url, name, question, pairs, margin)
    except TipbenchError as exc:
        if junit is not None:  # replace the report of an earlier build
            write_output(junit, junit_xml(name, unknown(*pairs, margin, str(exc))), "--junit")
        raise
    if junit is not None:
        write_output(junit, junit_xml(name, result, strict=strict), "--junit")
    if annotations:
        line = annotation(name, result, strict=strict)
        print_message(line) if json_ else print(line)
    code = result.exit_code(strict=strict)
    if json_:
        print_json({"experiment": name, **result.to_json(), "strict": strict, "exit_code": code})
    else:
        _print_result(result)
    raise typer.Exit(code)


def _result(
    settings: Settings, url: str | None, name: str, question: CellFilter, pairs: tuple[Pair, Pair], margin: float
) -> GateResult:
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.compare.cells import read_board
    from tipbench.compare.gate import evaluate_gate, unknown

    try:
        with open_store(settings, url) as store:
            found = existing_experiment(store, name)
            cells = read_board(store, found.experiment_id, question)
        return evaluate_gate(cells, *pairs, margin)
    except NotEnoughData as exc:  # also written to the JUnit report
        return unknown(*pairs, margin, str(exc))


def _print_result(result: GateResult) -> None:
    from tipbench.compare.gate import Outcome

    if result.outcome is Outcome.UNKNOWN:
        raise NotEnoughData(result.reason)
    print(printable_lines(result.reason))
    if result.evidence and result.evidence.unfinished:
        print_message(f"warning: based on part of the candidate's cells: {result.evidence.unfinished}")
    if result.outcome is Outcome.UNDECIDED:
        print_message("warning: the gate is undecided; pass --strict to fail in this case")
