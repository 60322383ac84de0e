"""`tipbench judge export / duel / instructions / apply`: write blind sheets and duels to files, and apply them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.options import (
    AcceptDriftOption,
    AllOption,
    ExperimentOption,
    JsonOption,
    JudgeOption,
    LimitOption,
    MlflowOption,
    OverlapOption,
    RejudgeOption,
    SeedOption,
    SuiteOption,
    command_group,
    open_experiment,
    open_store,
)
from tipbench.cli.progress import progress_counter
from tipbench.errors import SheetRefused, UsageError
from tipbench.files import check_output, writable_home, write_output
from tipbench.settings import load_settings

if TYPE_CHECKING:
    from tipbench.compare.cells import Focus
    from tipbench.judge.apply import ApplyResult
    from tipbench.judge.duels import DuelApplyResult, StoredDuelSheet
    from tipbench.judge.export import ExportResult

_MAX_OLD_FILES = 999
_MANY_DUELS = 200  # with more, a message recommends --limit
_MAX_ANCHORS_SHOWN = 5

app = command_group("Score answers blind against the pinned rubric.")

OutOption = Annotated[Path, typer.Option("--out", metavar="FILE", help="Output file; - is stdout.")]
SheetOption = Annotated[
    str | None, typer.Option("--sheet", metavar="ID", help="Write the file of this stored sheet again, byte for byte.")
]


@app.command("export")
def export(
    out: OutOption,
    experiment: ExperimentOption = None,
    judge: JudgeOption = None,
    limit: LimitOption = None,
    overlap: OverlapOption = 0.2,
    all_: AllOption = False,
    rejudge: RejudgeOption = False,
    seed: SeedOption = None,
    sheet: SheetOption = None,
    filled: Annotated[bool, typer.Option("--filled", help="With --sheet: include the scores applied so far.")] = False,
    format_: Annotated[
        Literal["json", "csv"] | None,
        typer.Option(
            "--format",
            metavar="json|csv",
            help="File format; csv for spreadsheets. [default: csv for *.csv, else json]",
        ),
    ] = None,
    focus: Annotated[
        bool,
        typer.Option("--focus", help="Only cells that can decide the lead, most informative scenarios first."),
    ] = False,
    suite: SuiteOption = None,
    mlflow_url: MlflowOption = None,
) -> None:
    """Export a blind sheet for a judge.

    A sheet has answers without model or prompt names, in random order, with the rubric and with hidden control items
    that measure the judge. The key to the items is stored only in MLflow, so the sheet can be applied from any machine.
    Fill in the scores, then run `tipbench judge apply FILE`.

    Examples:

      tipbench judge export --experiment tip-bench-demo --judge anna --out anna.json

      tipbench judge export --judge ben --limit 40 --out ben.csv
    """
    from tipbench.judge.export import ExportRequest
    from tipbench.workflows.board import judge_name
    from tipbench.workflows.judging import SheetRequest, requested_sheet, sheet_file

    export_request = ExportRequest(
        judge=judge_name(judge), limit=limit, overlap=overlap, everything=all_, rejudge=rejudge, seed=seed, suite=suite
    )
    file_format = format_ or ("csv" if out.suffix.lower() == ".csv" else "json")
    sheet_request = SheetRequest(export_request, sheet, filled=filled, focus=focus, format=file_format)
    _check_target(out)

    def report_focus(found: Focus) -> None:  # prints no names, because judging is blind
        print_message(f"in focus: {len(found.pairs)} pairs in {len(found.scenarios)} scenarios")

    with open_experiment(load_settings(), mlflow_url, experiment) as (store, stored_experiment):
        result = requested_sheet(store, stored_experiment, sheet_request, report_focus=report_focus)
    if result is None:
        raise UsageError(f"{stored_experiment.name} has no sheet {sheet!r}. `tipbench judge status` lists the sheets.")
    command = f"tipbench judge export --experiment {stored_experiment.name} --sheet {result.stored.sheet.id} --out FILE"
    next_step = f"The sheet is stored in MLflow: {command} writes it again."
    _write_text(out, sheet_file(result.stored, sheet_request), next_step)
    if sheet is None:
        _print_exported(result, export_request.judge, out)
    else:
        with_scores = f", {len(result.stored.scores)} with the scores applied so far" if filled else ""
        print_message(f"sheet {sheet} again: {len(result.stored.entries)} items {_location(out)}{with_scores}")


def _print_exported(result: ExportResult, judge: str | None, out: Path) -> None:
    for_judge = f" for {judge}" if judge else ""
    print_message(f"sheet {result.stored.sheet.id}{for_judge}: {len(result.stored.entries)} items {_location(out)}")
    if result.n_unknown:
        print_message(f"left out: {result.n_unknown} cells whose scenario is not in the current suite; see --suite")
    if result.n_other_rubric:
        print_message(f"{result.n_other_rubric} cells were scored under another rubric; --rejudge includes them")
    if result.n_other_conditions:
        print_message(
            f"{result.n_other_conditions} answers were collected under older conditions; "
            "compare uses only the newest conditions"
        )
    if result.n_added:
        print_message(
            f"{result.n_added} answers more than --limit: whole scenarios were added, "
            "so that the sheet has enough check items"
        )
    if not result.enough_controls:
        print_message("the drift verdict of this sheet will be unknown: it has too few check items")
    print_message(f"next: fill in the scores, then {_apply_command(out)}")


@app.command("duel")
def duel(
    out: OutOption,
    experiment: ExperimentOption = None,
    judge: JudgeOption = None,
    limit: Annotated[
        int | None,
        typer.Option(min=2, metavar="NUMBER", help="Maximum number of comparisons."),
    ] = None,
    seed: SeedOption = None,
    sheet: SheetOption = None,
    suite: SuiteOption = None,
    mlflow_url: MlflowOption = None,
) -> None:
    """Write blind A/B comparisons of tied pairs for a judge.

    Compares the answers of the leader and of the pairs tied with it: every two answers to the same scenario twice, in
    both orders. Fill in each `winner` (a, b or tie), then run `tipbench judge apply FILE`. `tipbench compare` shows the
    results next to the leaderboard; they never change its ranks. Exit 3 if nothing is tied.

    Examples:

      tipbench judge duel --experiment tip-bench-demo --judge anna --out duels.json

      tipbench judge duel --judge ben --limit 40 --out duels.json
    """
    from tipbench.judge.duels import export_duels, find_duel
    from tipbench.workflows.board import judge_name
    from tipbench.workflows.judging import duel_request

    name = judge_name(judge)
    _check_target(out)
    with open_experiment(load_settings(), mlflow_url, experiment) as (store, stored_experiment):
        if sheet is not None:
            stored = find_duel(store, stored_experiment, sheet)
            if stored is None:
                raise UsageError(
                    f"{stored_experiment.name} has no duel file {sheet!r}. Leave --sheet out to export a new one."
                )
            _write_duels(out, stored)
            return
        request = duel_request(store, stored_experiment, judge=name, limit=limit, seed=seed, suite=suite)
        result = export_duels(store, stored_experiment, request)
    _write_duels(out, result.stored)
    for_judge = f" for {name}" if name else ""
    n_items = len(result.stored.sheet.items)
    print_message(
        f"duels {result.stored.sheet.id}{for_judge}: {n_items} comparisons of {result.n_pairs} pairs "
        f"over {result.n_scenarios} scenarios {_location(out)}"
    )
    if n_items > _MANY_DUELS:
        print_message("use --limit for fewer comparisons")
    if result.n_without_tips:
        print_message(f"left out: {result.n_without_tips} answers without a tip")
    if result.n_unknown:
        print_message(f"left out: {result.n_unknown} answers whose scenario is not in the current suite; see --suite")
    print_message(f"next: fill in each winner, then {_apply_command(out)}")


@app.command("instructions")
def instructions() -> None:
    """Print instructions for a coding agent that judges.

    They explain how to fill in a sheet.

    Examples:

      tipbench judge instructions > instructions.md
    """
    from importlib.resources import files

    print(files("tipbench.judge").joinpath("agent_instructions.md").read_text("utf-8"), end="")


@app.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The filled sheet (JSON, CSV) or duels; - is stdin.")],
    judge: JudgeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    accept_drift: AcceptDriftOption = None,
    final: Annotated[
        bool, typer.Option("--final", help="Finish the sheet: check the drift now; open items return to the queue.")
    ] = False,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Apply a filled sheet or duels, and count the scores.

    The sheet is validated, and the judge's drift is measured. Any error rejects the whole sheet; the message names
    item, tip and field. Unfinished items stay pending; the sheet can be completed or revised and applied again. The
    drift is checked and shown when all items are finished, or with --final. After a later revision, only the verdict is
    shown. If the drift exceeds the limit, the scores are held: stored but not counted, until the sheet is revised or
    the drift is accepted with a reason.

    Examples:

      tipbench judge apply anna.json --dry-run

      tipbench judge apply anna.json --accept-drift "agreed in the team on 3 May"
    """
    from tipbench.judge.duels import DuelApplyResult
    from tipbench.judge.sheet_file import MAX_BYTES, parse_sheet, read_sheet_file
    from tipbench.workflows.board import judge_name
    from tipbench.workflows.judging import apply_file, judging_lock, parse_drift_reason, refused_json

    settings = load_settings()
    accept_reason = parse_drift_reason(accept_drift) if accept_drift is not None else None
    name = judge_name(judge)
    sheet: dict[str, Any] = {}  # stays empty if the file cannot be parsed
    try:
        # One byte more than allowed, so that `parse_sheet` refuses a larger input.
        sheet = parse_sheet(sys.stdin.buffer.read(MAX_BYTES + 1)) if _is_stdio(file) else read_sheet_file(file)
        with (
            open_store(settings, mlflow_url) as store,
            judging_lock(writable_home(settings.home), store.url, report=print_message),
            progress_counter("applying") as count,
        ):
            applied = apply_file(
                store, sheet, judge=name, accept=accept_reason, final=final, dry_run=dry_run, progress=count
            )
    except SheetRefused as exc:
        if not json_:
            raise
        print_json(refused_json(exc, sheet.get("sheet")))
        raise typer.Exit(1) from exc
    if json_:
        print_json(applied.to_json())
    elif isinstance(applied, DuelApplyResult):
        _show_duels(applied)
    else:
        show_applied(applied)
    if not isinstance(applied, DuelApplyResult) and applied.held:
        raise typer.Exit(1)


# Results


def show_applied(applied: ApplyResult) -> None:
    """Print the number of applied items and the drift verdict; for a dry run, also each change."""
    if applied.dry_run:
        for change in applied.changes:
            after = _scores_text(change.after)
            if applied.held:
                after = f"held, does not count: {_scores_text(change.given)}"
            print(f"  {change.item}: {_scores_text(change.before)} → {after}")
    would_be = "would be " if applied.dry_run else ""
    unfinished = f", {applied.n_unfinished} unfinished and still pending" if applied.n_unfinished else ""
    state = "held" if applied.held else "applied"
    print(f"sheet {applied.sheet} by {applied.judge}: {applied.n_finished} items {would_be}{state}{unfinished}")
    show_verdict(applied)


def show_verdict(applied: ApplyResult) -> None:
    """Print the drift verdict and whether the scores count."""
    for sentence in applied.sentences():
        print(sentence)
    if applied.held:
        _show_held(applied)
    elif applied.accepted:
        print(f"The drift is accepted: {applied.accepted}")


def _scores_text(scores: Mapping[str, float] | None) -> str:
    return ", ".join(f"{scale} {score:.2f}" for scale, score in scores.items()) if scores else "not judged"


def _show_held(applied: ApplyResult) -> None:
    """Print the anchors of the drifted scales and what to do next. Never reveals which items were controls."""
    # With `verdict_only`, no scale is named either: after a revision or with few items, that could reveal a control.
    scales = applied.drift.scales if applied.drift is not None and not applied.verdict_only else ()
    drifted = [scale.scale for scale in scales if scale.beyond]
    # If no single scale has drifted, a measure over all scales has.
    for name in drifted or [scale.scale for scale in scales]:
        print(f"\nAnchors for {name}:")
        # Reversed, so that the first anchor of each score is kept.
        by_score = {anchor.scores[name]: anchor for anchor in reversed(applied.rubric.anchors)}
        for score in sorted(by_score)[:_MAX_ANCHORS_SHOWN]:
            print(f"  {score}  “{by_score[score].tip}” ({by_score[score].why})")
    print(
        "\nThe scores are stored but not counted; an honest judge is held in about 1 of 20 sheets. Compare the scores "
        "with the anchors, revise the sheet and apply it again, or pass --accept-drift with a reason to count them."
    )


def _show_duels(applied: DuelApplyResult) -> None:
    if applied.dry_run:
        for change in applied.changes:
            print(f"  {change.item}: {change.before or 'not judged'} → {change.after}")
    unfinished = f", {applied.n_unfinished} unfinished and still open" if applied.n_unfinished else ""
    would_be = "would be " if applied.dry_run else ""
    print(f"duels {applied.sheet} by {applied.judge}: {applied.n_finished} {would_be}applied{unfinished}")
    if applied.in_both_orders:
        print(
            f"{applied.same_in_both_orders} of {applied.in_both_orders} match-ups have the same winner in both orders"
        )


# Files


def _is_stdio(path: Path) -> bool:
    return str(path) == "-"


def _location(path: Path) -> str:
    return "on stdout" if _is_stdio(path) else f"in {path}"


def _apply_command(path: Path) -> str:
    return f"`tipbench judge apply {'FILE' if _is_stdio(path) else shlex.quote(str(path))}`"


def _check_target(path: Path) -> None:
    if _is_stdio(path):
        return
    check_output(path, "--out")
    if path.exists() and not path.is_file():
        raise UsageError(f"--out {path} is not a regular file; choose another file.")


def _write_duels(path: Path, stored: StoredDuelSheet) -> None:
    from tipbench.judge.duels import duel_text

    sheet = stored.sheet
    command = f"tipbench judge duel --experiment {sheet.experiment} --sheet {sheet.id} --out FILE"
    _write_text(path, duel_text(sheet), f"The duels are stored in MLflow: {command} writes them again.")


def _write_text(path: Path, text: str, next_step: str) -> None:
    """Write a sheet or duels to stdout, or atomically to a file. `next_step` ends the error message of a failed write.

    An existing file is renamed, so that no scores are lost. An empty or unfilled one is replaced.
    """
    if _is_stdio(path):
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))  # lone surrogates become JSON escapes
        sys.stdout.buffer.flush()
        return
    if path.exists() and path.stat().st_size and not _is_unfilled(path):
        old_paths = (path.with_name(f"{path.name}.{number}.old") for number in range(1, _MAX_OLD_FILES + 1))
        unused_path = next((old_path for old_path in old_paths if not old_path.exists()), None)
        if unused_path is None:
            raise UsageError(f"{path} and {_MAX_OLD_FILES} older versions exist; choose another file or delete some.")
        path.rename(unused_path)
        print_message(f"{path} already existed; it was renamed to {unused_path}")
    write_output(path, text, "--out", next_step)


def _is_unfilled(path: Path) -> bool:
    from tipbench.judge.duels import FORMAT as DUEL_FORMAT
    from tipbench.judge.sheet import FORMAT
    from tipbench.judge.sheet_file import read_sheet_file

    try:
        raw = read_sheet_file(path)
        if raw["format"] == DUEL_FORMAT:
            return all(item["winner"] is None for item in raw["items"])
        tips = [tip for item in raw["items"] for tip in item["tips"]]
        has_notes = any(tip.get("note") for tip in tips)
        has_scores = any(score is not None for tip in tips for score in tip["scores"].values())
        return raw["format"] == FORMAT and not has_notes and not has_scores
    except (SheetRefused, UsageError, KeyError, TypeError, AttributeError):  # another file, or a damaged sheet
        return False
