"""`tipbench judge export / apply`: the judge's file goes out and comes back."""

from __future__ import annotations

import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tipbench.cli.console import print_json, say
from tipbench.cli.counting import counting
from tipbench.cli.judge_applied import alone, applied_json, refused_json, show_applied
from tipbench.cli.judge_files import check_target, is_stream, read_filled, write_text
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment
from tipbench.errors import SheetRefused, UsageError
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.judge.exporting import Exported, Request
    from tipbench.judge.judging import Judging
    from tipbench.judge.telling import Applied
    from tipbench.record.mlflow import MlflowStore

app = typer.Typer(help="Score answers blind against the pinned rubric.", no_args_is_help=True, rich_markup_mode=None)

JudgeOption = Annotated[str | None, typer.Option("--judge", metavar="NAME", help="Who judges.")]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        "--suite", metavar="NAME|FOLDER", help="Where cards, rubric and controls are. [default: as collected]"
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, metavar="NUMBER", help="At most so many answers; whole scenarios first.")
]
OverlapOption = Annotated[
    float, typer.Option("--overlap", min=0.0, max=1.0, metavar="SHARE", help="Share of what others have scored.")
]
AcceptOption = Annotated[
    str | None, typer.Option("--accept-drift", metavar="REASON", help="Count the scores all the same, and why.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Everything this judge has not scored.")]
RejudgeOption = Annotated[bool, typer.Option("--rejudge", help="Also what was scored under another rubric.")]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", min=0, metavar="NUMBER", help="Order and hidden items by this seed, not by chance."),
]


class SheetFormat(StrEnum):
    """How a sheet is written."""

    JSON = "json"
    CSV = "csv"


SheetOption = Annotated[
    str | None, typer.Option("--sheet", metavar="ID", help="Write this sheet once more, byte for byte.")
]
FilledOption = Annotated[
    bool, typer.Option("--filled", help="With --sheet: with the scores that have come back so far.")
]
SheetFormatOption = Annotated[
    SheetFormat, typer.Option("--format", metavar="json|csv", help="csv is for spreadsheets.", show_default=True)
]
FocusOption = Annotated[
    bool,
    typer.Option("--focus", help="Only the leader and what ties with it, the scenarios that would tell most first."),
]


@app.command("export")
def export(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the sheet is written; - is stdout.")],
    experiment: ExperimentOption = None,
    judge: JudgeOption = None,
    limit: LimitOption = None,
    overlap: OverlapOption = 0.2,
    all_: AllOption = False,
    rejudge: RejudgeOption = False,
    seed: SeedOption = None,
    sheet: SheetOption = None,
    filled: FilledOption = False,
    format_: SheetFormatOption = SheetFormat.JSON,
    focus: FocusOption = False,
    suite: SuiteOption = None,
    mlflow_url: MlflowOption = None,
) -> None:
    """Write a blind sheet for a judge: answers without their model or prompt, in random order, with the rubric.

    Among them are hidden ones that measure the judge. The key stays in MLflow, so the sheet can be applied from any
    machine. Fill in the scores, then run `tipbench judge apply FILE`.

    Examples:

      tipbench judge export --experiment tip-bench-demo --judge anna --out anna.json

      tipbench judge export --judge ben --limit 40 --format csv --out ben.csv
    """
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.judge.exporting import Request, export_sheet

    settings = load_settings()
    request = Request(
        judge=checked_judge(judge),
        limit=limit,
        overlap=overlap,
        everything=all_,
        rejudge=rejudge,
        seed=seed,
        suite=suite,
    )
    if filled and sheet is None:
        raise UsageError("--filled is for a sheet that was exported before: name it with --sheet ID.")
    check_target(out)
    with open_store(settings, mlflow_url) as store:
        found = existing_experiment(store, chosen_experiment(settings, experiment))
        if sheet is not None:
            _write_again(out, format_, _recorded(store, found.experiment_id, found.name, sheet), filled=filled)
            return
        if focus:
            request = _focused(store, found.experiment_id, request)
        done = export_sheet(store, found, request)
    _write(out, format_, done.judging)
    _say_exported(done, request, out)


def _focused(store: MlflowStore, experiment_id: str, request: Request) -> Request:
    """What compare doubts about the top, handed down to the export as plain values."""
    from tipbench.compare.cells import Question, read_board
    from tipbench.compare.focus import focus
    from tipbench.compare.leaderboard import Options, make_board
    from tipbench.errors import NotEnoughData

    cells = read_board(store, experiment_id, Question())
    found = None if cells.provisional else focus(cells, make_board("", cells, Options()).ranking)
    if found is None:
        raise NotEnoughData(
            "--focus needs judged cells, a leader that others tie with, and unjudged cells of these. "
            "`tipbench compare` shows how it stands; leave --focus out to judge what waits."
        )
    say(f"in focus: {len(found.pairs)} pairs in {len(found.scenarios)} scenarios")  # no names: the sheet is blind
    return replace(request, only=found.run_ids, first=found.scenarios, overlap=0.0)


def checked_judge(name: str | None) -> str | None:
    """A judge's name as it is kept, or UsageError."""
    from tipbench.judge.checking import name_fault, tidy_name

    if name is None:
        return None
    if fault := name_fault(name):
        raise UsageError(f"--judge takes {fault} (got {name[:80]!r}).")
    return tidy_name(name)


def _recorded(store: MlflowStore, experiment_id: str, name: str, sheet: str) -> Judging:
    from tipbench.judge.judging import find_judging

    found = find_judging(store, experiment_id, name, sheet)
    if found is None:
        raise UsageError(f"{name} has no sheet {sheet!r}. `tipbench judge status` lists the sheets.")
    return found


def _write_again(path: Path, format_: SheetFormat, judging: Judging, *, filled: bool) -> None:
    if filled:  # whoever fills it further need not sign it again
        judging = replace(judging, sheet=replace(judging.sheet, judge=judging.owner))
    _write(path, format_, judging, filled=filled)
    scored = f", {judging.finished} of them with the scores given so far" if filled else ""
    say(f"sheet {judging.sheet.id} once more: {len(judging.entries)} items {_place(path)}{scored}")


def _write(path: Path, format_: SheetFormat, judging: Judging, *, filled: bool = False) -> None:
    from tipbench.judge.sheet import sheet_text
    from tipbench.judge.sheet_csv import sheet_csv

    form = sheet_text if format_ is SheetFormat.JSON else sheet_csv
    text = form(judging.sheet, judging.answers if filled else None)
    again = f"tipbench judge export --experiment {judging.sheet.experiment} --sheet {judging.sheet.id} --out FILE"
    write_text(path, text, f"The sheet is kept: {again} writes it again.")


def _place(path: Path) -> str:
    return "on stdout" if is_stream(path) else f"in {path}"


def _say_exported(done: Exported, request: Request, out: Path) -> None:
    items = len(done.judging.entries)
    who = f" for {request.judge}" if request.judge else ""
    say(f"sheet {done.judging.sheet.id}{who}: {items} items {_place(out)}")
    if done.unknown_scenarios:
        say(f"left out: {done.unknown_scenarios} cells whose scenario the suite does not have as it was; see --suite")
    if done.older_rubric:
        say(f"{done.older_rubric} cells were scored under another rubric; --rejudge scores them again")
    if done.other_conditions:
        say(f"{done.other_conditions} answers have other conditions than the newest; compare shows only the newest")
    if not done.enough_controls:
        say("the drift verdict of this sheet will be unknown: it has too little in it that measures the judge")
    say(f"next: fill in the scores, then `tipbench judge apply {'FILE' if is_stream(out) else shlex.quote(str(out))}`")


@app.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The filled sheet (JSON, CSV) or duels; - is stdin.")],
    judge: JudgeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    accept_drift: AcceptOption = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Take a filled sheet back: check everything, measure the judge, count the scores.

    A mistake anywhere refuses the whole sheet and names item, tip and field. Items that are not finished stay pending;
    the sheet may be applied again, further filled or revised. Scores of a judge who is beyond the drift limit are
    held: stored, not counted, until the sheet is revised or the drift is accepted with a reason.

    Examples:

      tipbench judge apply anna.json --dry-run

      tipbench judge apply anna.json --accept-drift "agreed in the team on 3 May"
    """
    from tipbench.judge.duel_sheet import FORMAT as DUELS

    settings = load_settings()
    reason = checked_reason(accept_drift)
    name = checked_judge(judge)
    raw: dict[str, Any] = {}
    try:
        raw = read_filled(file)
        if raw.get("format") == DUELS:
            _apply_duels(settings, mlflow_url, raw, name, reason, dry_run=dry_run, json_=json_)
            return
        applied = _apply(settings, mlflow_url, raw, name, reason, dry_run=dry_run)
    except SheetRefused as exc:
        if not json_:
            raise
        print_json(refused_json(exc, raw.get("sheet")))
        raise typer.Exit(1) from exc
    if json_:
        print_json(applied_json(applied))
    else:
        show_applied(applied)
    if applied.held:
        raise typer.Exit(1)


def checked_reason(text: str | None) -> str | None:
    """Why a drift is accepted, or UsageError."""
    if text is None:
        return None
    if not text.strip() or len(text) > 1000:
        raise UsageError(f"--accept-drift takes a reason of 1 to 1000 characters (got {len(text.strip())}).")
    return text.strip()


def _apply(
    settings: Settings, url: str | None, raw: dict[str, Any], judge: str | None, reason: str | None, *, dry_run: bool
) -> Applied:
    from tipbench.cli.session import open_store
    from tipbench.judge.applying import Application
    from tipbench.judge.receiving import receive

    with open_store(settings, url) as store, alone(settings, store):
        got = receive(store, raw, judge=judge)
        with counting("applying") as count:
            work = Application(store, got.experiment, got.judging, got.filled)
            return work.run(accept=reason, dry_run=dry_run, progress=count)


def _apply_duels(
    settings: Settings,
    url: str | None,
    raw: dict[str, Any],
    judge: str | None,
    reason: str | None,
    *,
    dry_run: bool,
    json_: bool,
) -> None:
    from tipbench.cli.judge_duel import apply_duel_file
    from tipbench.cli.session import open_store

    if reason is not None:
        raise UsageError("--accept-drift is for sheets with scores; duels have no drift to accept.")
    with open_store(settings, url) as store, alone(settings, store):
        apply_duel_file(store, raw, judge, dry_run=dry_run, json_=json_)
