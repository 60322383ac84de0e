"""Judging for commands, panel and DAG tasks: options of judges, sheets, duels, and the lock on writing scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tipbench.compare.cells import BoardCells, CellFilter, Focus, focus, read_board_cells
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.compare.verdict import TIED
from tipbench.errors import InvalidOption, LockHeld, NotEnoughData, SheetRefused
from tipbench.files import ResourceLock
from tipbench.http import canonical_url
from tipbench.judge.apply import ApplyResult, Progress, SheetApplier
from tipbench.judge.automatic import JudgeChoice, JudgeKind
from tipbench.judge.check import Problem
from tipbench.judge.duels import FORMAT as DUELS
from tipbench.judge.duels import DuelApplyResult, DuelRequest, apply_duels
from tipbench.judge.export import ExportRequest, ExportResult, export_sheet
from tipbench.judge.sheet import sheet_text
from tipbench.judge.sheet_file import sheet_csv
from tipbench.judge.sheet_store import ItemKind, StoredSheet, find_sheet, stored_sheets
from tipbench.plan.design import read_design
from tipbench.record.store import Experiment, RunStore

_MAX_REASON_LENGTH = 1000  # characters
MODEL_OPTIONS = ("ollama_url", "max_model_b", "num_ctx", "evict", "allow_unknown_size")  # a collect has them too
_ANY_JUDGE = tuple(JudgeKind)
JUDGE_OPTIONS: Mapping[str, tuple[JudgeKind, ...]] = {  # by option of `judge run`: the judges it applies to
    **dict.fromkeys(("with", "experiment", "limit", "overlap", "all", "rejudge", "seed", "suite"), _ANY_JUDGE),
    **dict.fromkeys(("wait", "mlflow_url"), _ANY_JUDGE),
    **dict.fromkeys(("judge", "batch", "accept_drift"), (JudgeKind.COMMAND,)),
    "timeout_s": (JudgeKind.COMMAND, JudgeKind.MODEL),
    **dict.fromkeys(MODEL_OPTIONS, (JudgeKind.MODEL,)),
}


def check_judge_options(judge: JudgeChoice, options: Mapping[str, object]) -> None:
    """Raise InvalidOption if an option is set that does not apply to the judge. None and False are unset."""
    for key, value in options.items():
        if value is not None and value is not False and judge.kind not in JUDGE_OPTIONS[key]:
            judges = " and ".join(f"{kind}:…" for kind in JUDGE_OPTIONS[key])
            raise InvalidOption(key, f"applies only to {judges}, not to {str(judge)[:80]}. Leave it out.")


@contextmanager
def judging_lock(
    home: Path, url: str, *, report: Callable[[str], None] = lambda _text: None, wait_s: float | None = None
) -> Iterator[None]:
    """Hold this machine's lock on writing scores to the MLflow at `url`.

    Raises LockHeld if the lock is not free within `wait_s`; waits without limit if `wait_s` is None.
    """
    lock = ResourceLock(home, f"judging at {canonical_url(url)}", purpose="another judge command")
    try:
        lock.acquire(wait=True, report=report, timeout_s=wait_s)
    except LockHeld as exc:
        raise LockHeld("Another sheet is being applied. Nothing was changed; try again shortly.") from exc
    try:
        yield
    finally:
        lock.release()


def parse_drift_reason(text: str, key: str = "accept_drift") -> str:
    """Return the reason for accepting drift, stripped. Raises InvalidOption unless it is one line of text.

    `key` is the option or field that the error names.
    """
    reason = text.strip()
    if not (0 < len(reason) <= _MAX_REASON_LENGTH and reason.isprintable()):
        raise InvalidOption(
            key, f"takes a reason on one line, 1 to {_MAX_REASON_LENGTH} characters (got {len(reason)})."
        )
    return reason


@dataclass(frozen=True)
class SheetRequest:
    """A request for the file of a new sheet or a stored one."""

    export: ExportRequest
    sheet: str | None = None  # id of the stored sheet; None for a new one
    filled: bool = False  # with the scores applied so far
    focus: bool = False  # only cells that can separate the leader from the pairs tied with it
    format: Literal["json", "csv"] = "json"
    by_judge: bool = False  # requested by a judge, who may see only their own sheets

    def __post_init__(self) -> None:
        if self.filled and self.sheet is None:
            raise InvalidOption("filled", "applies to an existing sheet: name it with --sheet ID.")


def requested_sheet(
    store: RunStore,
    experiment: Experiment,
    request: SheetRequest,
    *,
    report_focus: Callable[[Focus], None] = lambda _focus: None,
) -> ExportResult | None:
    """Return the stored sheet or a new export. None if the stored sheet does not exist or belongs to another judge.

    With `by_judge`, a judge with an open sheet gets it again while more than half of it is unscored.
    """
    if request.sheet is not None:
        stored = find_sheet(store, experiment, request.sheet)
        if stored is None or (request.by_judge and stored.owner != request.export.judge):
            return None
        return ExportResult(stored)
    export = request.export
    if request.focus:
        export, selected = _with_focus(store, experiment, export)
        report_focus(selected)
    if request.by_judge:
        judge_sheets = stored_sheets(store, experiment, export.judge)
        own_sheets = [sheet for sheet in judge_sheets if not sheet.provisional]
        for sheet in own_sheets:
            is_mostly_unscored = len(sheet.unscored) > len(sheet.entries) / 2
            if sheet.is_open and is_mostly_unscored:
                return ExportResult(sheet)
        # Leave out the unscored cells of the judge's other sheets. Otherwise these cells would be on two sheets but
        # controls on only one, so the judge could recognise controls.
        unscored = (entry for sheet in own_sheets for entry in sheet.unscored)
        cell_ids = frozenset(entry.run_id for entry in unscored if entry.kind is ItemKind.CELL and entry.run_id)
        export = replace(export, without=cell_ids)
    return export_sheet(store, experiment, export)


def sheet_file(stored: StoredSheet, request: SheetRequest) -> str:
    """Return the content of the sheet's file. A filled one contains the name of its judge."""
    to_text = sheet_csv if request.format == "csv" else sheet_text
    if not request.filled:
        return to_text(stored.sheet)
    return to_text(replace(stored.sheet, judge=stored.owner), stored.scores)


def apply_file(
    store: RunStore,
    raw: Mapping[str, Any],
    *,
    judge: str | None,
    accept: str | None = None,
    final: bool = False,
    dry_run: bool = False,
    check: Callable[[SheetApplier], None] = lambda _applier: None,
    progress: Progress | None = None,
) -> ApplyResult | DuelApplyResult:
    """Apply a filled sheet of tips or duels. Raises SheetRefused with all problems of the file.

    `accept` is the reason for accepting drift. With `final`, the sheet is finished, even if items are unscored.
    `check` is called before anything is written, and may raise to refuse a sheet of tips.
    """
    if raw.get("format") == DUELS:
        if accept is not None:
            raise InvalidOption("accept_drift", "applies to sheets of tips; duels have no drift.")
        return apply_duels(store, raw, judge=judge, dry_run=dry_run)
    # Once a judge has opened duels, nothing may change their sheets of tips, except that drift may be accepted.
    applier = SheetApplier.for_file(store, raw, judge=judge, skip_duel_check=accept is not None)
    check(applier)
    return applier.run(accept=accept, final=final, dry_run=dry_run, progress=progress)


def _with_focus(store: RunStore, experiment: Experiment, request: ExportRequest) -> tuple[ExportRequest, Focus]:
    """Limit the request to the cells that can separate the leader from the tied pairs. Return it and these cells.

    Raises NotEnoughData if there are none.
    """
    board_cells, board = _read_cells_and_board(store, experiment)
    selected = focus(board_cells, board.ranking) if board is not None else None
    if selected is None:
        raise NotEnoughData(
            f"focus needs judged cells, a leader with {TIED} pairs, and unjudged cells of these. "
            "See the leaderboard, or leave focus out to judge all pending cells."
        )
    # Overlap would add cells that others have scored, but the selected cells are unjudged.
    return replace(request, only=selected.run_ids, preferred_scenarios=selected.scenarios, overlap=0.0), selected


def duel_request(
    store: RunStore,
    experiment: Experiment,
    *,
    judge: str | None,
    limit: int | None = None,
    seed: int | None = None,
    suite: str | None = None,
) -> DuelRequest:
    """Return a request for duels between any two of the leader and the ranked pairs tied with it.

    Raises NotEnoughData if no pairs are tied. The message names no pair, because judges read it.
    """
    board_cells, board = _read_cells_and_board(store, experiment)
    if board is None or board.ranking.leader is None:
        raise NotEnoughData(
            f"{experiment.name[:200]} has no scores yet, or too few, so no pairs are {TIED}. "
            "Judge a sheet of tips first."
        )
    if not board.ranking.tied_ranked:
        raise NotEnoughData(
            f"There are no duels in {experiment.name[:200]}: no pairs are {TIED}. Judge a sheet of tips instead."
        )
    pairs = {board.ranking.leader, *board.ranking.tied_ranked}
    runs = {
        cell.run.run_id: (cell.pair.model, cell.pair.prompt)
        for cell in board_cells.cells
        if cell.pair in pairs and not cell.failed
    }
    return DuelRequest(runs, board_cells.rubric, judge=judge, limit=limit, seed=seed, suite=suite)


def _read_cells_and_board(store: RunStore, experiment: Experiment) -> tuple[BoardCells, Leaderboard | None]:
    """Return the cells and their leaderboard, or None in place of a provisional leaderboard."""
    cells = read_board_cells(store, experiment.experiment_id, CellFilter())
    if cells.provisional:
        return cells, None
    return cells, make_board(experiment.name, cells, BoardOptions(design=read_design(experiment.tags)))


def refused_json(exc: SheetRefused, sheet: object = None) -> dict[str, Any]:
    """Return a refusal in the form of `judge apply --json`. `sheet` is the sheet's id as read from the file."""
    problems = [problem.to_json() for problem in exc.problems if isinstance(problem, Problem)]
    errors = problems or [{"item": None, "tip": None, "field": "sheet", "message": str(exc)}]
    is_plausible_id = isinstance(sheet, str) and len(sheet) <= 64
    sheet_id = sheet if is_plausible_id else None
    return {"sheet": sheet_id, "status": "refused", "applied": 0, "unfinished": 0, "errors": errors, "drift": None}
