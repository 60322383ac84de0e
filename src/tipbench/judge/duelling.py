"""Duels: blind A/B comparisons inside the tied set go out, come back, and are read by compare.

Who is tied is compare's business: it comes in as plain values. Duels score no cell; what came back stays in the duel
sheet's own run.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tipbench.errors import NotEnoughData
from tipbench.judge.duel_runs import (
    DuelAnswer,
    DuelJudging,
    duel_answers_text,
    duel_judgings,
    find_duel,
    record_duel,
)
from tipbench.judge.duel_sheet import FORMAT, DuelItem, DuelSheet, FilledDuels, Winner, check_duels
from tipbench.judge.judging import ANSWERS, SheetStatus, milliseconds, now_iso
from tipbench.judge.material import JudgedCell, material_of, read_cells, suites_of
from tipbench.judge.pairing import Contender, MatchUp, Name, choose_match_ups, in_both_orders, match_ups
from tipbench.judge.receiving import no_such_sheet, origin
from tipbench.judge.scores import RUBRIC
from tipbench.plan.fingerprint import fingerprint
from tipbench.plan.rubric import Rubric
from tipbench.plan.rubric_files import parse_rubric
from tipbench.record.run import RunChange
from tipbench.record.store import Experiment, RunStore


@dataclass(frozen=True)
class DuelRequest:
    """What is asked of an export of duels."""

    leader: Name
    runs: Mapping[str, Name]  # the answers that may meet: run id → model and prompt of its pair
    rubric: str  # id@sha256 of the scores that left them tied
    judge: str | None = None
    limit: int | None = None  # comparisons; both orders count
    seed: int | None = None
    suite: str | None = None


@dataclass(frozen=True)
class DuelExported:
    """A duel sheet that is in MLflow and may be handed out, and what was left out of it."""

    judging: DuelJudging
    pairs: int
    scenarios: int
    without_tips: int  # answers that have no tip to be shown
    unknown_scenarios: int  # answers whose scenario the suite does not have (any more)


def export_duels(store: RunStore, experiment: Experiment, request: DuelRequest) -> DuelExported:
    """Make a duel sheet and keep it. NotEnoughData when there is nothing left to compare."""
    cells = [cell for cell in read_cells(store, experiment.experiment_id) if cell.run.run_id in request.runs]
    if not cells:
        raise NotEnoughData(f"None of the answers that are to meet is in {experiment.name} any more.")
    cards = material_of(suites_of(cells, request.suite)).cards
    known = [cell for cell in cells if cell.scenario in cards]
    shown = [cell for cell in known if cell.tips]
    done = _done(duel_judgings(store, experiment.experiment_id, experiment.name), request.judge)
    found = match_ups([_contender(cell, request) for cell in shown], done)
    if not found:
        raise NotEnoughData(_nothing(experiment.name, request, done, len(cells) - len(known)))
    seed = random.SystemRandom().randrange(2**63) if request.seed is None else request.seed
    rng = random.Random(seed)  # noqa: S311 - an order to shuffle by, not a secret
    chosen = choose_match_ups(found, request.leader, request.limit and max(1, request.limit // 2), rng)
    rubric = _rubric(store, cells, request.rubric)
    cards_by_run = {cell.run.run_id: cards[cell.scenario] for cell in shown}
    judging = replace(_composed(chosen, experiment.name, request.judge, rubric, cards_by_run, rng), seed=seed)
    run_id = record_duel(store, experiment.experiment_id, judging)
    store.touch(experiment.experiment_id)
    return DuelExported(
        judging=replace(judging, run_id=run_id),
        pairs=len(set(judging.names.values())),
        scenarios=len({each.scenario for each in chosen}),
        without_tips=len(known) - len(shown),
        unknown_scenarios=len(cells) - len(known),
    )


def _composed(
    chosen: Sequence[MatchUp],
    experiment: str,
    judge: str | None,
    rubric: Rubric,
    cards: Mapping[str, Mapping[str, Any]],
    rng: random.Random,
) -> DuelJudging:
    sheet_id = uuid.uuid4().hex[:12]
    shows = in_both_orders(chosen, rng)
    items = tuple(
        DuelItem(fingerprint([sheet_id, rng.getrandbits(64), at], 12), cards[a.run_id], a.tips, b.tips)
        for at, (a, b) in enumerate(shows)
    )
    return DuelJudging(
        sheet=DuelSheet(sheet_id, experiment, judge, rubric, items),
        sides={item.id: (a.run_id, b.run_id) for item, (a, b) in zip(items, shows, strict=True)},
        names={side.run_id: side.name for show in shows for side in show},
        exported=now_iso(),
        owner=judge,
    )


@dataclass(frozen=True)
class ReceivedDuels:
    """A checked duel sheet, ready to be applied."""

    experiment: Experiment
    judging: DuelJudging
    filled: FilledDuels


def receive_duels(store: RunStore, raw: Mapping[str, Any], *, judge: str | None = None) -> ReceivedDuels:
    """The duel sheet in MLflow that this file is a filled copy of. SheetRefused names everything that is wrong."""
    experiment, sheet_id = origin(store, raw, FORMAT)
    judging = find_duel(store, experiment.experiment_id, experiment.name, sheet_id)
    if judging is None:
        raise no_such_sheet(experiment, sheet_id)
    expected = replace(judging.sheet, judge=judging.owner or judging.sheet.judge)
    return ReceivedDuels(experiment, judging, check_duels(raw, expected, judge=judge))


@dataclass(frozen=True)
class DuelChange:
    """What applying does to one item."""

    item: str
    before: Winner | None
    after: Winner


@dataclass(frozen=True)
class DuelsApplied:
    """How an apply of duels ended."""

    sheet: str
    judge: str
    finished: int
    unfinished: int
    changes: tuple[DuelChange, ...]
    twice: int  # match-ups judged in both orders
    same: int  # of these, with the same winner in both
    blank: int = 0  # items without a winner in the file that have one from before

    def to_json(self) -> dict[str, Any]:
        """What scripts read; the keys that sheets have, too."""
        return {
            "sheet": self.sheet,
            "status": str(SheetStatus.APPLIED),
            "judge": self.judge,
            "applied": self.finished,
            "held": 0,
            "unfinished": self.unfinished,
            "blank": self.blank,
            "changed": len(self.changes),
            "errors": [],
            "drift": None,
            "judged_in_both_orders": self.twice,
            "same_in_both_orders": self.same,
        }


def apply_duels(store: RunStore, received: ReceivedDuels, *, dry_run: bool = False) -> DuelsApplied:
    """Keep what came back, in one step; what says nothing new changes nothing."""
    judging, filled, at = received.judging, received.filled, now_iso()
    changes, answers, history = [], dict(judging.answers), list(judging.history)
    for item, winner in filled.winners.items():
        former = answers.get(item)
        if former is None or former.winner is not winner:
            changes.append(DuelChange(item, former.winner if former else None, winner))
            history += [former] if former else []
            answers[item] = DuelAnswer(item, winner, at)
    twice, same = _consistency(replace(judging, answers=answers))
    if changes and not dry_run:
        metrics = {"finished": float(len(answers))} | ({"same_in_both_orders": same / twice} if twice else {})
        change = RunChange(
            metrics=metrics,
            tags={"sheet_status": str(SheetStatus.APPLIED), "judge": filled.judge, "applied_at": at},
            texts={ANSWERS: duel_answers_text(answers, tuple(history))},
            at_ms=milliseconds(at),
        )
        store.update(judging.run_id, change)
        store.touch(received.experiment.experiment_id)
    left = len(judging.sheet.items) - len(answers)
    blank = len(judging.answers.keys() - filled.winners.keys())
    return DuelsApplied(judging.sheet.id, filled.judge, len(answers), left, tuple(changes), twice, same, blank)


@dataclass(frozen=True)
class JudgedDuel:
    """One comparison that a judge has made."""

    scenario: str
    runs: tuple[str, str]  # shown as a and as b
    names: tuple[Name, Name]
    winner: Winner
    judge: str
    rubric: str  # id@sha256


def read_duels(store: RunStore, experiment: Experiment) -> list[JudgedDuel]:
    """Every comparison made in an experiment; of a judge who made one on two sheets, the later one."""
    kept: dict[tuple[str, tuple[str, str]], JudgedDuel] = {}
    for judging in reversed(list(duel_judgings(store, experiment.experiment_id, experiment.name))):
        for duel in _judged(judging):
            kept[duel.judge, duel.runs] = duel
    return list(kept.values())


def _judged(judging: DuelJudging) -> Iterator[JudgedDuel]:
    for item in judging.sheet.items:
        if item.id in judging.answers:
            runs = judging.sides[item.id]
            names = judging.names[runs[0]], judging.names[runs[1]]
            winner, owner = judging.answers[item.id].winner, judging.owner or ""
            yield JudgedDuel(item.scenario["id"], runs, names, winner, owner, judging.sheet.rubric.tag)


def _done(judgings: Iterator[DuelJudging], judge: str | None) -> Collection[frozenset[str]]:
    """The match-ups this judge (without a name: anybody) has judged in both orders."""
    orders = {
        (judging.owner, judging.sides[item])
        for judging in judgings
        for item in judging.answers
        if judge is None or judging.owner == judge
    }
    count = Counter((owner, frozenset(sides)) for owner, sides in orders)
    return {runs for (_, runs), times in count.items() if times == 2}


def _consistency(judging: DuelJudging) -> tuple[int, int]:
    """How many match-ups were judged in both orders, and how many of these with the same winner."""
    said: dict[frozenset[str], list[str | None]] = defaultdict(list)
    for item, answer in judging.answers.items():
        a, b = judging.sides[item]
        said[frozenset((a, b))].append({Winner.A: a, Winner.B: b}.get(answer.winner))
    both = [winners for winners in said.values() if len(winners) == 2]
    return len(both), sum(len(set(winners)) == 1 for winners in both)


def _contender(cell: JudgedCell, request: DuelRequest) -> Contender:
    run = cell.run
    return Contender(run.run_id, request.runs[run.run_id], cell.scenario[0], run.params.get("repeat", ""), cell.tips)


def _rubric(store: RunStore, cells: Sequence[JudgedCell], tag: str) -> Rubric:
    """The rubric of the scores that left them tied, as it is kept with one of the cells."""
    for cell in cells:
        if cell.run.tags.get("scores_rubric") == tag:
            _, texts = store.get(cell.run.run_id)
            if RUBRIC in texts:
                return parse_rubric(texts[RUBRIC], Path("rubric.md"))
    raise NotEnoughData("None of the answers that are to meet has been judged yet.")


def _nothing(name: str, request: DuelRequest, done: Collection[frozenset[str]], unknown: int) -> str:
    if done:
        who = request.judge or "somebody"
        more = "" if request.judge else " --judge NAME gives them to somebody else too."
        return f"Every match-up of the tied pairs in {name} has been judged by {who}, in both orders.{more}"
    if unknown:
        return (
            f"{unknown} answers of {name} belong to no scenario of the suite as it is now. "
            "Pass the suite they were collected with (--suite)."
        )
    return f"The tied pairs in {name} share no scenario in which both gave a tip: there is nothing to compare."
