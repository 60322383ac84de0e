"""How an apply ended, for people and for scripts; and the locks under which judge commands write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tipbench.cli.console import say
from tipbench.errors import SheetRefused
from tipbench.settings import Settings

if TYPE_CHECKING:
    from tipbench.judge.telling import Applied, Change
    from tipbench.plan.rubric import Rubric
    from tipbench.record.mlflow import MlflowStore

_ANCHORS_SHOWN = 5


@contextmanager
def alone(settings: Settings, store: MlflowStore) -> Iterator[None]:
    """While it lasts no other command of this machine writes scores there; a second one waits."""
    with _locked(settings, "judging at {server}", "another judge command", store, wait=True):
        yield


@contextmanager
def only_run_of(settings: Settings, store: MlflowStore, experiment: str, judge: str, *, wait: bool) -> Iterator[None]:
    """While it lasts no other `judge run` of this machine works for the same judge; LockHeld unless to `wait`."""
    resource = f"judge {judge} in {experiment} at {{server}}"
    with _locked(settings, resource, f"a judge run for {judge} in {experiment}", store, wait=wait):
        yield


@contextmanager
def _locked(settings: Settings, resource: str, purpose: str, store: MlflowStore, *, wait: bool) -> Iterator[None]:
    from tipbench.addresses import identity_of
    from tipbench.cli.session import writable_home
    from tipbench.generate.lock import ResourceLock

    name = resource.replace("{server}", identity_of(store.url))
    lock = ResourceLock(writable_home(settings), name, purpose)
    lock.acquire(wait=wait, report=say)
    try:
        yield
    finally:
        lock.release()


def refused_json(exc: SheetRefused, sheet: object) -> dict[str, Any]:
    """What scripts read of a sheet that was refused."""
    from tipbench.judge.checking import Problem

    errors = [problem.to_json() for problem in exc.problems if isinstance(problem, Problem)]
    told = errors or [{"item": None, "tip": None, "field": "sheet", "message": str(exc)}]
    name = sheet if isinstance(sheet, str) and len(sheet) <= 64 else None
    return {"sheet": name, "status": "refused", "applied": 0, "unfinished": 0, "errors": told, "drift": None}


def applied_json(applied: Applied) -> dict[str, Any]:
    """What scripts read of an apply; of a dry run also every change."""
    changes = {"dry_run": True, "changes": [change.to_json() for change in applied.changes]}
    return {**applied.to_json(), **(changes if applied.dry_run else {})}


def show_applied(applied: Applied) -> None:
    """What was done, or would be."""
    for change in applied.changes if applied.dry_run else ():
        print(_change_line(change, held=applied.held))
    would = "would be " if applied.dry_run else ""
    left = f", {applied.unfinished} not finished and still pending" if applied.unfinished else ""
    state = "held" if applied.held else "applied"
    print(f"sheet {applied.sheet} by {applied.judge}: {applied.finished} items {would}{state}{left}")
    show_verdict(applied)


def show_verdict(applied: Applied) -> None:
    """What the hidden controls say of the judge, and what follows."""
    for sentence in applied.sentences():
        print(sentence)
    if applied.held:
        show_held(applied)
    elif applied.accepted:
        print(f"The drift is accepted: {applied.accepted}")


def _change_line(change: Change, *, held: bool) -> str:
    if held:
        return f"  {change.item}: {_numbers(change.before)} → held, does not count: {_numbers(change.given)}"
    return f"  {change.item}: {_numbers(change.before)} → {_numbers(change.after)}"


def _numbers(values: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items()) if values else "not judged"


def show_held(applied: Applied) -> None:
    """Show the anchors of the scales that drifted, and the two ways on. Never which items were controls."""
    if applied.dry_run:
        print("The scores would be kept and not count. Applying says which scale drifts, and shows its anchors.")
        return
    drifted = {scale.scale for scale in applied.drift.scales if scale.beyond}
    for name in applied.rubric.scale_names:
        if name in drifted or not drifted:
            print(f"\nAnchors for {name}:")
            for line in _anchor_lines(applied.rubric, name):
                print(line)
    print(
        "\nThe scores are kept and do not count yet; an honest judge is held in about 1 of 20 sheets. Look at them "
        "again beside the anchors, change the sheet and apply it again; or, if they shall stand, pass --accept-drift "
        "with the reason."
    )


def _anchor_lines(rubric: Rubric, scale: str) -> list[str]:
    by_step = {anchor.scores[scale]: anchor for anchor in reversed(rubric.anchors)}
    shown = [by_step[step] for step in sorted(by_step)]
    return [f"  {anchor.scores[scale]}  “{anchor.tip}” ({anchor.why})" for anchor in shown[:_ANCHORS_SHOWN]]
