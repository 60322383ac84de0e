"""`tipbench judge duel`: blind A/B comparisons of pairs tied by score."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.judge import JudgeOption, SeedOption, SuiteOption, check_target, checked_judge, write_text
from tipbench.cli.options import ExperimentOption, MlflowOption, chosen_experiment
from tipbench.errors import NotEnoughData, UsageError
from tipbench.settings import load_settings

if TYPE_CHECKING:
    from tipbench.judge.duels import DuelApplyResult, DuelExport, DuelRequest, StoredDuelSheet
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.store import Experiment

_MANY = 200  # comparisons, above which a hint is printed


def duel(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Output file; - is stdout.")],
    experiment: ExperimentOption = None,
    judge: JudgeOption = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=2, metavar="NUMBER", help="Maximum number of comparisons; whole scenarios first."),
    ] = None,
    seed: SeedOption = None,
    sheet: Annotated[
        str | None, typer.Option("--sheet", metavar="ID", help="Write an existing duel file again, byte for byte.")
    ] = None,
    suite: SuiteOption = None,
    mlflow_url: MlflowOption = None,
) -> None:
    """Write blind A/B comparisons of tied pairs for a judge.

    Compares the leader's answers with those of the pairs tied with it. Each two answers to a scenario appear twice, in
    both orders. Fill in each `winner` (a, b or tie), then run `tipbench judge apply FILE`. `tipbench compare` shows
    the results next to the leaderboard; they never change its ranks. Exit 3 if nothing is tied.

    Examples:

      tipbench judge duel --experiment tip-bench-demo --judge anna --out duels.json

      tipbench judge duel --judge ben --limit 40 --out duels.json
    """
    from tipbench.cli.session import existing_experiment, open_store
    from tipbench.judge.duels import export_duels

    settings = load_settings()
    name = checked_judge(judge)
    check_target(out)
    with open_store(settings, mlflow_url) as store:
        found = existing_experiment(store, chosen_experiment(settings, experiment))
        if sheet is not None:
            _write(out, _recorded(store, found, sheet))
            return
        done = export_duels(store, found, _request(store, found, name, limit, seed, suite))
    _write(out, done.stored)
    _say_exported(done, name, out)


def _request(
    store: MlflowStore,
    experiment: Experiment,
    judge: str | None,
    limit: int | None,
    seed: int | None,
    suite: str | None,
) -> DuelRequest:
    """Return the export request for the leader and the pairs tied with it."""
    from tipbench.compare.cells import CellFilter, read_board
    from tipbench.compare.leaderboard import BoardOptions, make_board
    from tipbench.judge.duels import DuelRequest

    cells = read_board(store, experiment.experiment_id, CellFilter())
    if cells.provisional:
        raise NotEnoughData(
            f"{experiment.name} has no scores yet, so no pairs are tied. Run `tipbench judge export` first."
        )
    board = make_board(experiment.name, cells, BoardOptions())
    leader, tied = board.ranking.leader, board.ranking.tied
    if leader is None or not tied:
        raise NotEnoughData(f"No pairs are tied in {experiment.name}: {board.verdict}")
    among = {leader, *tied}
    runs = {
        cell.run.run_id: (cell.pair.model, cell.pair.prompt)
        for cell in cells.cells
        if cell.pair in among and not cell.failed
    }
    return DuelRequest(runs, cells.rubric, judge, limit, seed, suite)


def _recorded(store: MlflowStore, experiment: Experiment, sheet: str) -> StoredDuelSheet:
    from tipbench.judge.duels import find_duel

    found = find_duel(store, experiment.experiment_id, experiment.name, sheet)
    if found is None:
        raise UsageError(f"{experiment.name} has no duel file {sheet!r}. Leave --sheet out to export a new one.")
    return found


def _write(path: Path, judging: StoredDuelSheet) -> None:
    from tipbench.judge.duels import duel_text

    sheet = judging.sheet
    again = f"tipbench judge duel --experiment {sheet.experiment} --sheet {sheet.id} --out FILE"
    write_text(path, duel_text(sheet), f"The duels are stored in MLflow: {again} writes them again.")


def _say_exported(done: DuelExport, judge: str | None, out: Path) -> None:
    who = f" for {judge}" if judge else ""
    items = len(done.stored.sheet.items)
    print_message(
        f"duels {done.stored.sheet.id}{who}: {items} comparisons of {done.pairs} pairs over {done.scenarios} "
        f"scenarios in {out}"
    )
    if items > _MANY:
        print_message("use --limit for fewer comparisons; it fills whole scenarios first")
    if done.without_tips:
        print_message(f"left out: {done.without_tips} answers without a tip")
    if done.unknown_scenarios:
        print_message(
            f"left out: {done.unknown_scenarios} answers whose scenario is not in the current suite; see --suite"
        )
    print_message(f"next: fill in each winner, then `tipbench judge apply {out}`")


def apply_duel_file(store: MlflowStore, raw: dict[str, Any], judge: str | None, *, dry_run: bool, json_: bool) -> None:
    """Apply a file of duels, for `judge apply`."""
    from tipbench.judge.duels import apply_duels, receive_duels

    applied = apply_duels(store, receive_duels(store, raw, judge=judge), dry_run=dry_run)
    if json_:
        print_json({**applied.to_json(), **({"dry_run": True, "changes": _changes_json(applied)} if dry_run else {})})
        return
    for change in applied.changes if dry_run else ():
        print(f"  {change.item}: {change.before or 'not judged'} → {change.after}")
    left = f", {applied.unfinished} unfinished and still open" if applied.unfinished else ""
    would = "would be " if dry_run else ""
    print(f"duels {applied.sheet} by {applied.judge}: {applied.finished} {would}applied{left}")
    if applied.twice:
        print(f"{applied.same} of {applied.twice} match-ups have the same winner in both orders")


def _changes_json(applied: DuelApplyResult) -> list[dict[str, Any]]:
    return [vars(change) for change in applied.changes]
