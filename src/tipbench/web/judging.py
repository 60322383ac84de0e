"""What export and apply do for whom: admins as on the command line, judges for themselves and blind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tipbench.addresses import identity_of
from tipbench.compare.cells import Question, read_board
from tipbench.compare.focus import focus
from tipbench.compare.leaderboard import Options, make_board
from tipbench.errors import LockHeld, NotEnoughData
from tipbench.generate.lock import ResourceLock
from tipbench.judge.applying import Application
from tipbench.judge.calibration import MIN_CONTROLS
from tipbench.judge.checking import name_fault, tidy_name
from tipbench.judge.duel_sheet import FORMAT as DUELS
from tipbench.judge.duelling import apply_duels, receive_duels
from tipbench.judge.exporting import Request, export_sheet
from tipbench.judge.judging import Judging, SheetStatus, find_judging, judgings
from tipbench.judge.key import Behind
from tipbench.judge.problems import Problem, refusal, shown
from tipbench.judge.receiving import receive
from tipbench.judge.sheet import sheet_text
from tipbench.judge.sheet_csv import sheet_csv
from tipbench.judge.telling import Applied
from tipbench.record.store import Experiment, RunStore
from tipbench.web.allowed import Allowed
from tipbench.web.auth import Identity
from tipbench.web.errors import Forbidden, Invalid, NotFound, checked
from tipbench.web.queries import existing
from tipbench.web.shapes import SheetWish

WAIT_S = 20.0  # for another apply to end; longer, and the client should ask again
FEWEST = MIN_CONTROLS  # answers that judges may ask for: as many control tips are hidden among them
MOST_REVISIONS = 5  # of a sheet, by its judge
_POLL_S = 0.2
_JUDGES_MAY_ASK = frozenset({"judge", "limit", "all", "sheet", "filled", "format"})


@dataclass(frozen=True)
class SheetRequest:
    """A checked wish: what to export, or which sheet to write again."""

    request: Request
    sheet: str | None = None
    filled: bool = False
    focus: bool = False
    format: Literal["json", "csv"] = "json"
    own: bool = False  # asked by a judge, for itself


def wish_of(raw: Mapping[str, Any], who: Identity, allowed: Allowed) -> SheetRequest:
    """Invalid names the wrong field; Forbidden what a judge's token may not ask.

    A seed, a focus or another suite would let a judge work out what is hidden where.
    """
    if who.is_judge and (beyond := sorted(raw.keys() - _JUDGES_MAY_ASK)):
        raise Forbidden(
            f"A judge's token may ask for {', '.join(sorted(_JUDGES_MAY_ASK))} (got {beyond[0][:40]!r}).",
            path=f"body.{beyond[0][:40]}",
        )
    wish = checked(SheetWish, raw, "body")
    if wish.suite is not None:
        allowed.check_suite(wish.suite)
    if who.is_judge and wish.limit is not None and wish.limit < FEWEST:
        raise Invalid(
            f"limit is {FEWEST} or more for a judge: on fewer answers too little is hidden to measure by "
            f"(got {wish.limit}).",
            path="body.limit",
        )
    if wish.filled and wish.sheet is None:
        raise Invalid("filled is for a sheet that was exported before: name it in sheet.", path="body.filled")
    request = Request(
        judge=_judge(wish.judge, who, "body.judge"),
        limit=wish.limit,
        overlap=wish.overlap,
        everything=wish.all,
        rejudge=wish.rejudge,
        seed=wish.seed,
        suite=wish.suite,
    )
    return SheetRequest(request, wish.sheet, wish.filled, wish.focus, wish.format, who.is_judge)


def sheet_for(store: RunStore, name: str, ask: SheetRequest) -> Judging:
    """The sheet that was asked for, new or once more."""
    experiment = existing(store, name)
    if ask.sheet is not None:
        return _again(store, experiment, ask.sheet, ask.request.judge if ask.own else None)
    request = _focused(store, experiment, ask.request) if ask.focus else ask.request
    if ask.own:
        mine = [each for each in judgings(store, experiment.experiment_id, name, request.judge) if not each.provisional]
        if there := next(filter(_is_open, mine), None):
            return there
        request = replace(request, without=_left(mine))
    return export_sheet(store, experiment, request).judging


def sheet_file(judging: Judging, ask: SheetRequest) -> str:
    """The sheet as a file: blank, or with the scores that have come back so far and its judge's name."""
    form = sheet_csv if ask.format == "csv" else sheet_text
    if not ask.filled:
        return form(judging.sheet)
    return form(replace(judging.sheet, judge=judging.owner), judging.answers)


def _again(store: RunStore, experiment: Experiment, sheet: str, owner: str | None) -> Judging:
    found = find_judging(store, experiment.experiment_id, experiment.name, sheet)
    if found is None or (owner is not None and found.owner != owner):
        raise NotFound(f"{experiment.name} has no sheet {sheet[:64]!r} of yours.", path="body.sheet")
    return found


def _is_open(judging: Judging) -> bool:
    """Whether its judge has more than half of it to do, and gets it again instead of another."""
    return 2 * len(judging.unanswered) > len(judging.entries)


def _left(mine: Iterable[Judging]) -> frozenset[str]:
    """Cells this judge was shown and left. On a second sheet they would tell which items of the first are controls."""
    return frozenset(
        entry.run_id for each in mine for entry in each.unanswered if entry.behind is Behind.CELL and entry.run_id
    )


def _focused(store: RunStore, experiment: Experiment, request: Request) -> Request:
    """What compare doubts about the top, handed down to the export as plain values."""
    cells = read_board(store, experiment.experiment_id, Question())
    found = None if cells.provisional else focus(cells, make_board("", cells, Options()).ranking)
    if found is None:
        raise NotEnoughData(
            "focus needs judged cells, a leader that others tie with, and unjudged cells of these. "
            "The leaderboard shows how it stands; leave focus out to judge what waits."
        )
    return replace(request, only=found.run_ids, first=found.scenarios, overlap=0.0)


@dataclass(frozen=True)
class ApplyWish:
    """How a filled sheet is to be applied, and for whom."""

    who: Identity
    judge: str | None = None
    accept: str | None = None
    dry_run: bool = False
    settled: bool = False  # every item was scored or skipped: nothing more is to come

    @classmethod
    def of(cls, who: Identity, *, judge: str | None, accept: str | None, dry_run: bool) -> ApplyWish:
        """Checked; a judge applies under its own name and cannot accept its own drift."""
        if accept is not None and who.is_judge:
            raise Forbidden("A drift is accepted by an admin. Revise the sheet and apply it again.")
        reason = accept.strip() if accept is not None else None
        if reason is not None and not (reason and reason.isprintable()):
            raise Invalid("accept_drift is the reason, in words on one line.", path="query.accept_drift")
        return cls(who, _judge(judge, who, "query.judge"), reason, dry_run)


def apply_sheet(store: RunStore, name: str, raw: Mapping[str, Any], wish: ApplyWish) -> dict[str, Any]:
    """What `judge apply --json` prints; a judge is told less. SheetRefused lists every mistake."""
    existing(store, name)
    if raw.get("experiment") != name:
        raise refusal([Problem(None, None, "experiment", shown(raw.get("experiment")), f"{name!r}, as in the URL")])
    if raw.get("format") == DUELS:
        if wish.accept is not None:
            raise Invalid("Duels have no drift to accept.", path="query.accept_drift")
        duels = apply_duels(store, receive_duels(store, raw, judge=wish.judge), dry_run=wish.dry_run)
        return {**duels.to_json(), **_preview(wish, [vars(change) for change in duels.changes])}
    got = receive(store, raw, judge=wish.judge)
    application = Application(store, got.experiment, got.judging, got.filled)
    if wish.who.is_judge and not wish.dry_run:
        _check_revisions(got.judging, application)
    applied = application.run(accept=wish.accept, dry_run=wish.dry_run)
    if wish.who.is_judge and wish.dry_run:
        return _preview_for_judge(applied)
    told = _for_judge(applied, settled=wish.settled) if wish.who.is_judge else applied.to_json()
    return {**told, **_preview(wish, [change.to_json() for change in applied.changes])}


def _check_revisions(judging: Judging, application: Application) -> None:
    """A judge who could change one item after the other and look at the drift would find the controls."""
    made = len({each.at for each in judging.replaced})
    if made >= MOST_REVISIONS and application.run(dry_run=True).changes:
        raise Forbidden(
            f"Sheet {judging.sheet.id} was revised {made} times; a judge may do so {MOST_REVISIONS} times. "
            "Ask an admin to accept it, or to apply what you would still change.",
            code="too_many_revisions",
            path="body.sheet",
        )


def _preview_for_judge(applied: Applied) -> dict[str, Any]:
    """What would change, and nothing of the measuring: a preview leaves no trace, so it could be asked for ever."""
    changes = [{**change.to_json(), "after": change.given} for change in applied.changes]
    told = {**applied.to_json(), "status": str(SheetStatus.APPLIED), "applied": applied.finished, "held": 0}
    del told["alpha"]
    return {**told, "drift": None, "self_agreement": None, "dry_run": True, "changes": changes}


def _preview(wish: ApplyWish, changes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"dry_run": True, "changes": changes} if wish.dry_run else {}


def _for_judge(applied: Applied, *, settled: bool) -> dict[str, Any]:
    """How far off the judge is comes after the sheet, never before; agreement with others would tell their scores.

    While items are open, whoever is held is told what is beyond the limit, and nothing else.
    """
    told = {key: value for key, value in applied.to_json().items() if key != "alpha"}
    if applied.unfinished and not settled:
        verdict = {"verdict": applied.drift.verdict.value}
        told |= {"drift": verdict | (_beyond(told["drift"]) if applied.held else {}), "self_agreement": None}
    return told


def _beyond(drift: Mapping[str, Any]) -> dict[str, Any]:
    """What holds a sheet, as it is told: the scales, with direction and size, and the pooled numbers."""
    found: dict[str, Any] = {"scales": [scale for scale in drift.get("scales", ()) if scale["beyond"]]}
    for name in ("error", "contrast"):
        if drift.get(f"{name}_beyond"):
            found |= {key: drift[key] for key in (name, f"{name}_limit", f"{name}_beyond")}
    return found


@contextmanager
def alone(home: Path, place: str) -> Iterator[None]:
    """While it lasts no other apply of this machine writes scores there, be it of the panel or the command line."""
    lock = ResourceLock(home, f"judging at {identity_of(place)}", "another judge command")
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            lock.acquire(wait=False, report=lambda _text: None)
            break
        except LockHeld as exc:
            if time.monotonic() > deadline:
                raise LockHeld("Another sheet is being applied. Nothing was changed: send it again shortly.") from exc
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


def _judge(name: str | None, who: Identity, place: str) -> str | None:
    if who.is_judge:
        if name is not None and tidy_name(name) != who.name:
            raise Forbidden(f"This token judges as {who.name} (got {name[:60]!r}).", path=place)
        return who.name
    if name is None:
        return None
    if fault := name_fault(name):
        raise Invalid(f"{place} takes {fault} (got {name[:80]!r}).", path=place)
    return tidy_name(name)
