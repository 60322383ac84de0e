"""`tipbench judge export / apply`: the judge's file goes out and comes back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tipbench.cli.console import print_json, say
from tipbench.cli.counting import counting
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment
from tipbench.errors import SheetRefused, UsageError
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.judge.applying import Applied, Change
    from tipbench.judge.exporting import Exported, Request
    from tipbench.judge.judging import Judging
    from tipbench.plan.rubric import Rubric
    from tipbench.record.mlflow import MlflowStore

app = typer.Typer(help="Score answers blind against the pinned rubric.", no_args_is_help=True, rich_markup_mode=None)

_ANCHORS_SHOWN = 5
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
    sheet: Annotated[
        str | None, typer.Option("--sheet", metavar="ID", help="Write this sheet once more, byte for byte.")
    ] = None,
    format_: Annotated[
        SheetFormat, typer.Option("--format", metavar="json|csv", help="csv is for spreadsheets.", show_default=True)
    ] = SheetFormat.JSON,
    focus: Annotated[
        bool,
        typer.Option(
            "--focus", help="Only the leader and what ties with it, the scenarios that would tell most first."
        ),
    ] = False,
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
    check_target(out)
    with open_store(settings, mlflow_url) as store:
        found = existing_experiment(store, chosen_experiment(settings, experiment))
        if sheet is not None:
            _write(out, format_, _recorded(store, found.experiment_id, found.name, sheet))
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


def check_target(path: Path) -> None:
    """Refuse what cannot be written, or holds somebody's scores, before anything is done."""
    if str(path) == "-":
        return
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UsageError(f"--out takes a file; {path} {what}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--out {path} cannot be written: no permission. Choose another file.")
    if path.exists() and _has_scores(path):
        raise UsageError(
            f"{path} is a sheet with scores in it. Apply it first (tipbench judge apply {path}), or take another file."
        )


def _has_scores(path: Path) -> bool:
    from tipbench.judge.sheet_files import read_sheet_file

    try:
        raw = read_sheet_file(path)
        if any(item.get("winner") is not None for item in raw["items"]):
            return True
        tips = [tip for item in raw["items"] for tip in item["tips"]]
        return any(score is not None for tip in tips for score in tip["scores"].values())
    except (SheetRefused, UsageError, KeyError, TypeError, AttributeError):
        return False


def _recorded(store: MlflowStore, experiment_id: str, name: str, sheet: str) -> Judging:
    from tipbench.judge.judging import find_judging

    found = find_judging(store, experiment_id, name, sheet)
    if found is None:
        raise UsageError(f"{name} has no sheet {sheet!r}. `tipbench judge status` lists the sheets.")
    return found


def _write(path: Path, format_: SheetFormat, judging: Judging) -> None:
    from tipbench.generate.durable import write_whole
    from tipbench.judge.sheet import sheet_text
    from tipbench.judge.sheet_csv import sheet_csv

    text = sheet_text(judging.sheet) if format_ is SheetFormat.JSON else sheet_csv(judging.sheet)
    content = text.encode("utf-8", "backslashreplace")  # half a character becomes its JSON escape
    if str(path) == "-":
        sys.stdout.buffer.write(content)
        return
    try:
        write_whole(path, content)
    except OSError as exc:
        raise UsageError(
            f"--out {path} could not be written: {exc.strerror}. The sheet is kept: tipbench judge export "
            f"--experiment {judging.sheet.experiment} --sheet {judging.sheet.id} --out FILE writes it again."
        ) from exc


def _say_exported(done: Exported, request: Request, out: Path) -> None:
    items = len(done.judging.entries)
    who = f" for {request.judge}" if request.judge else ""
    say(f"sheet {done.judging.sheet.id}{who}: {items} items in {out}")
    if done.unknown_scenarios:
        say(f"left out: {done.unknown_scenarios} cells whose scenario the suite does not have as it was; see --suite")
    if done.older_rubric:
        say(f"{done.older_rubric} cells were scored under another rubric; --rejudge scores them again")
    say(f"next: fill in the scores, then `tipbench judge apply {out}`")


@app.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The filled sheet, JSON or CSV, or the filled duels.")],
    judge: JudgeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    accept_drift: Annotated[
        str | None, typer.Option("--accept-drift", metavar="REASON", help="Count the scores all the same, and why.")
    ] = None,
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
    from tipbench.judge.sheet_files import read_sheet_file

    settings = load_settings()
    reason = checked_reason(accept_drift)
    name = checked_judge(judge)
    raw: dict[str, Any] = {}
    try:
        raw = read_sheet_file(file)
        if raw.get("format") == DUELS:
            _apply_duels(settings, mlflow_url, raw, name, reason, dry_run=dry_run, json_=json_)
            return
        applied = _apply(settings, mlflow_url, raw, name, reason, dry_run=dry_run)
    except SheetRefused as exc:
        if not json_:
            raise
        print_json(_refused_json(exc, raw.get("sheet")))
        raise typer.Exit(1) from exc
    if json_:
        print_json({**applied.to_json(), **({"dry_run": True, "changes": _changes_json(applied)} if dry_run else {})})
    else:
        _say_applied(applied, dry_run=dry_run)
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


@contextmanager
def alone(settings: Settings, store: MlflowStore) -> Iterator[None]:
    """While it lasts no other command of this machine writes scores there; a second one waits."""
    from tipbench.cli.session import writable_home
    from tipbench.generate.lock import ResourceLock

    lock = ResourceLock(writable_home(settings), f"judging at {store.url}", "another judge command")
    lock.acquire(wait=True, report=say)
    try:
        yield
    finally:
        lock.release()


def _refused_json(exc: SheetRefused, sheet: object) -> dict[str, Any]:
    from tipbench.judge.checking import Problem

    errors = [problem.to_json() for problem in exc.problems if isinstance(problem, Problem)]
    told = errors or [{"item": None, "tip": None, "field": "sheet", "message": str(exc)}]
    name = sheet if isinstance(sheet, str) and len(sheet) <= 64 else None
    return {"sheet": name, "status": "refused", "applied": 0, "unfinished": 0, "errors": told, "drift": None}


def _changes_json(applied: Applied) -> list[dict[str, Any]]:
    return [{"item": change.item, "before": change.before, "after": change.after} for change in applied.changes]


def _say_applied(applied: Applied, *, dry_run: bool) -> None:
    if dry_run:
        for change in applied.changes:
            print(_change_line(change))
    would = "would be " if dry_run else ""
    left = f", {applied.unfinished} not finished and still pending" if applied.unfinished else ""
    state = "held" if applied.held else "applied"
    print(f"sheet {applied.sheet} by {applied.judge}: {applied.finished} items {would}{state}{left}")
    for sentence in applied.drift.sentences(applied.rubric):
        print(sentence)
    if applied.held:
        say_held(applied)
    elif applied.accepted:
        print(f"The drift is accepted: {applied.accepted}")


def _change_line(change: Change) -> str:
    def numbers(values: dict[str, float] | None) -> str:
        return ", ".join(f"{name} {value:.2f}" for name, value in values.items()) if values else "not judged"

    before = dict(change.before) if change.before else None
    after = dict(change.after) if change.after else None
    return f"  {change.item}: {numbers(before)} → {numbers(after)}"


def say_held(applied: Applied) -> None:
    """Show the anchors of the scales that drifted, and the two ways on. Never which items were controls."""
    drifted = {scale.scale for scale in applied.drift.scales if scale.beyond}
    for name in applied.rubric.scale_names:
        if name in drifted or not drifted:
            print(f"\nAnchors for {name}:")
            for line in _anchor_lines(applied.rubric, name):
                print(line)
    print(
        "\nThe scores are kept and do not count yet. Look at them again beside the anchors, change the sheet and apply "
        "it again; or, if they shall stand, pass --accept-drift with the reason."
    )


def _anchor_lines(rubric: Rubric, scale: str) -> list[str]:
    by_step = {anchor.scores[scale]: anchor for anchor in reversed(rubric.anchors)}
    shown = [by_step[step] for step in sorted(by_step)]
    return [f"  {anchor.scores[scale]}  “{anchor.tip}” ({anchor.why})" for anchor in shown[:_ANCHORS_SHOWN]]
