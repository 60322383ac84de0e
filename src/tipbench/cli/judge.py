"""`tipbench judge export / apply`: export and apply blind sheets."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tipbench.cli.console import print_json, print_message, progress_counter
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment
from tipbench.errors import SheetRefused, UsageError
from tipbench.files import ResourceLock, check_output, writable_home, write_output
from tipbench.http import canonical_url
from tipbench.settings import Settings, load_settings

if TYPE_CHECKING:
    from tipbench.judge.apply import ApplyResult, ItemChange
    from tipbench.judge.export import ExportRequest, ExportResult
    from tipbench.judge.sheet_store import StoredSheet
    from tipbench.plan.rubric import Rubric
    from tipbench.record.mlflow import MlflowStore

STREAM = "-"  # stdout, or stdin
_MOST_KEPT = 1000


def is_stream(path: Path) -> bool:
    """Whether a path means stdout or stdin."""
    return str(path) == STREAM


def check_target(path: Path) -> None:
    """Raise UsageError if the output file cannot be written."""
    if is_stream(path):
        return
    check_output(path, "--out")
    if path.exists() and not path.is_file():
        raise UsageError(f"--out {path} is not a regular file; choose another file.")


def _worth_keeping(path: Path) -> bool:
    """Whether a file must not be overwritten: it is not empty, and not an unfilled sheet or duel file."""
    from tipbench.judge.sheet_file import read_sheet_file

    if not path.exists() or path.stat().st_size == 0:
        return False
    try:
        return _is_filled(read_sheet_file(path))
    except (SheetRefused, UsageError, KeyError, TypeError, AttributeError):
        return True


def _keep_aside(path: Path) -> None:
    """Rename a file that would be overwritten, so that an export never loses scores."""
    if not _worth_keeping(path):
        return
    names = (path.with_name(f"{path.name}.{number}.old") for number in range(1, _MOST_KEPT))
    free = next((name for name in names if not name.exists()), None)
    if free is None:
        raise UsageError(f"{path} and {_MOST_KEPT - 1} older versions exist; choose another file or delete some.")
    path.rename(free)
    print_message(f"{path} already existed; it was renamed to {free}")


def _is_filled(raw: dict[str, Any]) -> bool:
    """Whether a sheet or duel file has any entries. Raises KeyError, TypeError or AttributeError if it is neither."""
    from tipbench.judge.duels import FORMAT as DUELS
    from tipbench.judge.sheet import FORMAT

    if raw["format"] == DUELS:
        return any(item["winner"] is not None for item in raw["items"])
    if raw["format"] != FORMAT:
        raise KeyError(raw["format"])
    tips = [tip for item in raw["items"] for tip in item["tips"]]
    return any(tip.get("note") or any(score is not None for score in tip["scores"].values()) for tip in tips)


def read_filled(path: Path) -> dict[str, Any]:
    """Read a filled sheet from a file or stdin."""
    from tipbench.judge.sheet_file import MAX_BYTES, parse_sheet, read_sheet_file

    if is_stream(path):
        return parse_sheet(sys.stdin.buffer.read(MAX_BYTES + 1))
    return read_sheet_file(path)


def write_text(path: Path, text: str, otherwise: str) -> None:
    """Write a sheet to a file, atomically, or to stdout; `otherwise` is appended to the error message."""
    if is_stream(path):
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))  # lone surrogates become JSON escapes
        sys.stdout.buffer.flush()
        return
    _keep_aside(path)
    write_output(path, text, "--out", otherwise)


_ANCHORS_SHOWN = 5


@contextmanager
def judging_lock(settings: Settings, store: MlflowStore) -> Iterator[None]:
    """Lock the store for writing scores on this machine; a second command waits."""
    with _locked(settings, "judging at {server}", "another judge command", store, wait=True):
        yield


@contextmanager
def judge_run_lock(
    settings: Settings, store: MlflowStore, experiment: str, judge: str, *, wait: bool
) -> Iterator[None]:
    """Allow one `judge run` per judge and experiment on this machine. Raises LockHeld unless `wait`."""
    resource = f"judge {judge} in {experiment} at {{server}}"
    with _locked(settings, resource, f"a judge run for {judge} in {experiment}", store, wait=wait):
        yield


@contextmanager
def _locked(settings: Settings, resource: str, purpose: str, store: MlflowStore, *, wait: bool) -> Iterator[None]:
    name = resource.replace("{server}", canonical_url(store.url))
    lock = ResourceLock(writable_home(settings.home), name, purpose)
    lock.acquire(wait=wait, report=print_message)
    try:
        yield
    finally:
        lock.release()


def refused_json(exc: SheetRefused, sheet: object) -> dict[str, Any]:
    """Return the JSON output for a refused sheet."""
    from tipbench.judge.check import Problem

    errors = [problem.to_json() for problem in exc.problems if isinstance(problem, Problem)]
    told = errors or [{"item": None, "tip": None, "field": "sheet", "message": str(exc)}]
    name = sheet if isinstance(sheet, str) and len(sheet) <= 64 else None
    return {"sheet": name, "status": "refused", "applied": 0, "unfinished": 0, "errors": told, "drift": None}


def applied_json(applied: ApplyResult) -> dict[str, Any]:
    """Return the JSON output of an apply; a dry run includes all changes."""
    changes = {"dry_run": True, "changes": [change.to_json() for change in applied.changes]}
    return {**applied.to_json(), **(changes if applied.dry_run else {})}


def show_applied(applied: ApplyResult) -> None:
    """Print what was applied, or would be in a dry run."""
    for change in applied.changes if applied.dry_run else ():
        print(_change_line(change, held=applied.held))
    would = "would be " if applied.dry_run else ""
    left = f", {applied.unfinished} unfinished and still pending" if applied.unfinished else ""
    state = "held" if applied.held else "applied"
    print(f"sheet {applied.sheet} by {applied.judge}: {applied.finished} items {would}{state}{left}")
    show_verdict(applied)


def show_verdict(applied: ApplyResult) -> None:
    """Print the drift verdict, and what follows from it."""
    for sentence in applied.sentences():
        print(sentence)
    if applied.held:
        show_held(applied)
    elif applied.accepted:
        print(f"The drift is accepted: {applied.accepted}")


def _change_line(change: ItemChange, *, held: bool) -> str:
    if held:
        return f"  {change.item}: {_numbers(change.before)} → held, does not count: {_numbers(change.given)}"
    return f"  {change.item}: {_numbers(change.before)} → {_numbers(change.after)}"


def _numbers(values: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items()) if values else "not judged"


def show_held(applied: ApplyResult) -> None:
    """Print the anchors of drifted scales and the two options; never reveals which items were controls."""
    scales = applied.drift.scales if applied.drift is not None and not applied.revision else ()
    drifted = {scale.scale for scale in scales if scale.beyond}
    for name in applied.rubric.scale_names:
        if scales and (name in drifted or not drifted):
            print(f"\nAnchors for {name}:")
            for line in _anchor_lines(applied.rubric, name):
                print(line)
    print(
        "\nThe scores are stored but not counted; an honest judge is held in about 1 of 20 sheets. Compare them "
        "with the anchors, revise the sheet and apply it again, or pass --accept-drift with a reason to count them."
    )


def _anchor_lines(rubric: Rubric, scale: str) -> list[str]:
    by_step = {anchor.scores[scale]: anchor for anchor in reversed(rubric.anchors)}
    shown = [by_step[step] for step in sorted(by_step)]
    return [f"  {anchor.scores[scale]}  “{anchor.tip}” ({anchor.why})" for anchor in shown[:_ANCHORS_SHOWN]]


app = typer.Typer(help="Score answers blind against the pinned rubric.", no_args_is_help=True, rich_markup_mode=None)

JudgeOption = Annotated[str | None, typer.Option("--judge", metavar="NAME", help="Name of the judge.")]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        "--suite", metavar="NAME|FOLDER", help="Suite with the cards, rubric and controls. [default: as collected]"
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, metavar="NUMBER", help="Maximum number of answers; whole scenarios first."),
]
OverlapOption = Annotated[
    float,
    typer.Option("--overlap", min=0.0, max=1.0, metavar="SHARE", help="Share of other judges' answers to include."),
]
AcceptOption = Annotated[
    str | None,
    typer.Option("--accept-drift", metavar="REASON", help="Count the scores despite the drift, with this reason."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All answers this judge has not scored.")]
RejudgeOption = Annotated[bool, typer.Option("--rejudge", help="Include answers scored under another rubric.")]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", min=0, metavar="NUMBER", help="Seed for the order and the hidden items. [default: random]"),
]


class SheetFormat(StrEnum):
    """File format of a sheet."""

    JSON = "json"
    CSV = "csv"


SheetOption = Annotated[
    str | None, typer.Option("--sheet", metavar="ID", help="Write an existing sheet again, byte for byte.")
]
FilledOption = Annotated[bool, typer.Option("--filled", help="With --sheet: include the scores applied so far.")]
SheetFormatOption = Annotated[
    SheetFormat,
    typer.Option("--format", metavar="json|csv", help="File format; csv is for spreadsheets.", show_default=True),
]
FocusOption = Annotated[
    bool,
    typer.Option("--focus", help="Only the leader and pairs tied with it, most informative scenarios first."),
]


@app.command("export")
def export(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Output file; - is stdout.")],
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
    """Export a blind sheet for a judge: answers without model or prompt names, in random order, with the rubric.

    It includes hidden control items that measure the judge. The key is stored in MLflow, so the sheet can be applied
    from any machine. Fill in the scores, then run `tipbench judge apply FILE`.

    Examples:

      tipbench judge export --experiment tip-bench-demo --judge anna --out anna.json

      tipbench judge export --judge ben --limit 40 --format csv --out ben.csv
    """
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.judge.export import ExportRequest, export_sheet

    settings = load_settings()
    request = ExportRequest(
        judge=checked_judge(judge),
        limit=limit,
        overlap=overlap,
        everything=all_,
        rejudge=rejudge,
        seed=seed,
        suite=suite,
    )
    if filled and sheet is None:
        raise UsageError("--filled applies to an existing sheet: name it with --sheet ID.")
    check_target(out)
    with open_store(settings, mlflow_url) as store:
        found = existing_experiment(store, chosen_experiment(settings, experiment))
        if sheet is not None:
            _write_again(out, format_, _recorded(store, found.experiment_id, found.name, sheet), filled=filled)
            return
        if focus:
            request = _focused(store, found.experiment_id, request)
        done = export_sheet(store, found, request)
    _write(out, format_, done.stored)
    _say_exported(done, request, out)


def _focused(store: MlflowStore, experiment_id: str, request: ExportRequest) -> ExportRequest:
    """Restrict a request to the leader and pairs tied with it, most informative scenarios first."""
    from tipbench.compare.cells import CellFilter, read_board
    from tipbench.compare.focus import focus
    from tipbench.compare.leaderboard import BoardOptions, make_board
    from tipbench.errors import NotEnoughData

    cells = read_board(store, experiment_id, CellFilter())
    found = None if cells.provisional else focus(cells, make_board("", cells, BoardOptions()).ranking)
    if found is None:
        raise NotEnoughData(
            "--focus needs judged cells, a leader with tied pairs, and unjudged cells of these. "
            "See `tipbench compare`, or leave --focus out to judge all pending cells."
        )
    print_message(
        f"in focus: {len(found.pairs)} pairs in {len(found.scenarios)} scenarios"
    )  # no names, as judging is blind
    return replace(request, only=found.run_ids, first=found.scenarios, overlap=0.0)


def checked_judge(name: str | None) -> str | None:
    """Return the normalized judge name. Raises UsageError if it is invalid."""
    from tipbench.judge.check import name_problem, normalize_name

    if name is None:
        return None
    if fault := name_problem(name):
        raise UsageError(f"--judge takes {fault} (got {name[:80]!r}).")
    return normalize_name(name)


def _recorded(store: MlflowStore, experiment_id: str, name: str, sheet: str) -> StoredSheet:
    from tipbench.judge.sheet_store import find_sheet

    found = find_sheet(store, experiment_id, name, sheet)
    if found is None:
        raise UsageError(f"{name} has no sheet {sheet!r}. `tipbench judge status` lists the sheets.")
    return found


def _write_again(path: Path, format_: SheetFormat, judging: StoredSheet, *, filled: bool) -> None:
    if filled:  # keep the judge's name in the file
        judging = replace(judging, sheet=replace(judging.sheet, judge=judging.owner))
    _write(path, format_, judging, filled=filled)
    scored = f", {judging.finished} with the scores applied so far" if filled else ""
    print_message(f"sheet {judging.sheet.id} again: {len(judging.entries)} items {_place(path)}{scored}")


def _write(path: Path, format_: SheetFormat, judging: StoredSheet, *, filled: bool = False) -> None:
    from tipbench.judge.sheet import sheet_text
    from tipbench.judge.sheet_file import sheet_csv

    form = sheet_text if format_ is SheetFormat.JSON else sheet_csv
    text = form(judging.sheet, judging.answers if filled else None)
    again = f"tipbench judge export --experiment {judging.sheet.experiment} --sheet {judging.sheet.id} --out FILE"
    write_text(path, text, f"The sheet is stored in MLflow: {again} writes it again.")


def _place(path: Path) -> str:
    return "on stdout" if is_stream(path) else f"in {path}"


def _say_exported(done: ExportResult, request: ExportRequest, out: Path) -> None:
    items = len(done.stored.entries)
    who = f" for {request.judge}" if request.judge else ""
    print_message(f"sheet {done.stored.sheet.id}{who}: {items} items {_place(out)}")
    if done.unknown_scenarios:
        print_message(
            f"left out: {done.unknown_scenarios} cells whose scenario is not in the current suite; see --suite"
        )
    if done.older_rubric:
        print_message(f"{done.older_rubric} cells were scored under another rubric; --rejudge includes them")
    if done.other_conditions:
        print_message(
            f"{done.other_conditions} answers were collected under older conditions; compare uses only the newest"
        )
    if done.added:
        print_message(
            f"{done.added} answers more than --limit: whole scenarios were added, so that the judge can be checked"
        )
    if not done.enough_controls:
        print_message("the drift verdict of this sheet will be unknown: it has too few check items")
    print_message(
        f"next: fill in the scores, then `tipbench judge apply {'FILE' if is_stream(out) else shlex.quote(str(out))}`"
    )


@app.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The filled sheet (JSON, CSV) or duels; - is stdin.")],
    judge: JudgeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    accept_drift: AcceptOption = None,
    final: Annotated[
        bool, typer.Option("--final", help="Finish the sheet: check the drift now; open items return to the queue.")
    ] = False,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Apply a filled sheet: validate it, measure the judge's drift and count the scores.

    Any error rejects the whole sheet; the message names item, tip and field. Unfinished items stay pending; the sheet
    can be completed or revised and applied again. The drift is checked once, with the last item or with --final; a
    later revision returns only whether the scores count. If the drift exceeds the limit, the scores are held: stored
    but not counted, until the sheet is revised or the drift is accepted with a reason.

    Examples:

      tipbench judge apply anna.json --dry-run

      tipbench judge apply anna.json --accept-drift "agreed in the team on 3 May"
    """
    from tipbench.judge.duels import FORMAT as DUELS

    settings = load_settings()
    reason = checked_reason(accept_drift)
    name = checked_judge(judge)
    raw: dict[str, Any] = {}
    try:
        raw = read_filled(file)
        if raw.get("format") == DUELS:
            _apply_duels(settings, mlflow_url, raw, name, reason, dry_run=dry_run, json_=json_)
            return
        applied = _apply(settings, mlflow_url, raw, name, reason, final=final, dry_run=dry_run)
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
    """Return the reason for accepting drift. Raises UsageError if it is invalid."""
    if text is None:
        return None
    if not text.strip() or len(text) > 1000:
        raise UsageError(f"--accept-drift takes a reason of 1 to 1000 characters (got {len(text.strip())}).")
    return text.strip()


def _apply(
    settings: Settings,
    url: str | None,
    raw: dict[str, Any],
    judge: str | None,
    reason: str | None,
    *,
    final: bool,
    dry_run: bool,
) -> ApplyResult:
    from tipbench.cli.session import open_store
    from tipbench.judge.apply import SheetApplier
    from tipbench.judge.sheet_store import receive

    with open_store(settings, url) as store, judging_lock(settings, store):
        got = receive(store, raw, judge=judge, accepting=reason is not None)
        with progress_counter("applying") as count:
            work = SheetApplier(store, got.experiment, got.stored, got.filled)
            return work.run(accept=reason, final=final, dry_run=dry_run, progress=count)


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
        raise UsageError("--accept-drift applies to sheets; duels have no drift.")
    with open_store(settings, url) as store, judging_lock(settings, store):
        apply_duel_file(store, raw, judge, dry_run=dry_run, json_=json_)
