"""Which recorded cells a board rests on, and what each contributes: one set of conditions, one build of each name.

Nothing is dropped in silence: what is left out is counted, and stands as a flag beside the row it belongs to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tipbench.compare.matrix import Pair
from tipbench.errors import MixedRubrics, NotEnoughData, UsageError
from tipbench.judge.scores import SCORES, CellScores, read_scores
from tipbench.record.current import stale_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore


@dataclass(frozen=True)
class Question:
    """What is asked of the cells."""

    where: Mapping[str, str] = field(default_factory=dict)
    judge: str | None = None  # only this judge's scores
    provisional: bool = False  # the provisional scores, also where judges have scored


@dataclass(frozen=True)
class BoardCell:
    """One cell of a board; `values` has the composite, scales and flags, or is empty while nothing counts."""

    run: StoredRun
    values: Mapping[str, float]

    @property
    def pair(self) -> Pair:
        return Pair(self.run.params.get("model", ""), self.run.params.get("prompt_version", ""))

    @property
    def scenario(self) -> str:
        return self.run.params.get("scenario", "")

    @property
    def persona(self) -> str:
        return self.run.params.get("persona", "")

    @property
    def failed(self) -> bool:
        return self.run.state == RunState.FAILED


@dataclass(frozen=True)
class BoardCells:
    """The cells of one board, and what was left out of it."""

    cells: tuple[BoardCell, ...]
    rubric: str  # id@sha256 of the scores; empty when nothing is scored
    judges: tuple[str, ...]
    provisional: bool
    stale: Mapping[Pair, int]  # runs of older builds
    other_conditions: int  # runs under conditions that are not looked at
    conditions: str
    other_ids: tuple[str, ...] = ()  # those other conditions, newest first


def read_board(store: RunStore, experiment_id: str, question: Question) -> BoardCells:
    """Read an experiment's cells and choose. NotEnoughData when there are none."""
    kind = str(RunKind.CELL)
    if question.where.get("kind", kind) != kind:
        raise UsageError(f"A board is made of cells; --where kind={question.where['kind']} would leave none.")
    where = {"kind": kind, **question.where}
    found = store.read(experiment_id, where=where, texts=(SCORES,))
    runs = [(run, read_scores(texts.get(SCORES))) for run, texts in found if run.tags.get("superseded") != "true"]
    if not runs:
        raise NotEnoughData("No cell matches: nothing can be compared yet. `tipbench runs list` shows what there is.")
    return choose(runs, question)


def choose(runs: Sequence[tuple[StoredRun, CellScores]], question: Question) -> BoardCells:
    """The newest conditions, the newest build of every name, and their scores."""
    newest = max((run for run, _ in runs), key=lambda run: run.start_ms)
    conditions = newest.tags.get("conditions", "")
    same = [(run, scores) for run, scores in runs if run.tags.get("conditions", "") == conditions]
    old = stale_runs([run for run, _ in same]) | _stale_scenarios([run for run, _ in same])
    current = [(run, scores) for run, scores in same if run.run_id not in old]
    provisional = question.provisional or (question.judge is None and not _any_judge(current))
    scored = _provisional(current) if provisional else _judged(current, question.judge)
    judges = {name for _, _, _, names in scored for name in names}
    if question.judge is not None and not judges:
        raise NotEnoughData(_scored_nothing(question.judge, current))
    rubrics = Counter(rubric for _, _, rubric, _ in scored if rubric)
    if len(rubrics) > 1:
        raise MixedRubrics(_mixed(rubrics, "provisional_rubric" if provisional else "scores_rubric"))
    return BoardCells(
        cells=tuple(BoardCell(run, values) for run, values, _, _ in scored),
        rubric=next(iter(rubrics), ""),
        judges=tuple(sorted(judges)),
        provisional=provisional,
        stale=Counter(_pair(run) for run, _ in same if run.run_id in old),
        other_conditions=len(runs) - len(same),
        conditions=conditions,
        other_ids=_newest_first(run for run, _ in runs if run.tags.get("conditions", "") != conditions),
    )


_Scored = tuple[StoredRun, Mapping[str, float], str, tuple[str, ...]]  # values, rubric, judges


def _judged(runs: Iterable[tuple[StoredRun, CellScores]], judge: str | None) -> list[_Scored]:
    return [_judged_cell(run, scores, judge) for run, scores in runs]


def _judged_cell(run: StoredRun, scores: CellScores, judge: str | None) -> _Scored:
    if run.state != RunState.JUDGED:
        return run, {}, "", ()
    rubric = run.tags.get("scores_rubric", "")
    if run.tags.get("floored") == "true":
        return run, run.metrics, rubric, ()
    counted = scores.counted
    if judge is None:
        return run, run.metrics, rubric, tuple(given.judge for given in counted)
    own = next((given for given in counted if given.judge == judge), None)
    return (run, {**run.metrics, **own.means}, own.rubric, (judge,)) if own else (run, {}, "", ())


def _provisional(runs: Sequence[tuple[StoredRun, CellScores]]) -> list[_Scored]:
    latest = max(
        (given for _, scores in runs for given in scores.provisional.values()), key=lambda given: given.at, default=None
    )
    return [_provisional_cell(run, scores, latest.judge if latest else None) for run, scores in runs]


def _provisional_cell(run: StoredRun, scores: CellScores, judge: str | None) -> _Scored:
    if run.tags.get("floored") == "true":
        return run, run.metrics, run.tags.get("scores_rubric", ""), ()
    given = scores.provisional.get(judge or "")
    return (run, {**run.metrics, **given.means}, given.rubric, (given.judge,)) if given else (run, {}, "", ())


def _any_judge(runs: Iterable[tuple[StoredRun, CellScores]]) -> bool:
    return any(run.state == RunState.JUDGED and run.tags.get("floored") != "true" for run, _ in runs)


def _stale_scenarios(runs: Sequence[StoredRun]) -> set[str]:
    """Runs of a scenario whose content has changed since, under the same id."""
    newest: dict[str, StoredRun] = {}
    for run in runs:
        scenario = run.params.get("scenario", "")
        if scenario not in newest or run.start_ms > newest[scenario].start_ms:
            newest[scenario] = run
    return {
        run.run_id
        for run in runs
        if run.tags.get("scenario_hash") != newest[run.params.get("scenario", "")].tags.get("scenario_hash")
    }


def _pair(run: StoredRun) -> Pair:
    return Pair(run.params.get("model", ""), run.params.get("prompt_version", ""))


def _newest_first(runs: Iterable[StoredRun]) -> tuple[str, ...]:
    """The conditions of these runs."""
    ordered = sorted(runs, key=lambda run: (-run.start_ms, run.run_id))
    return tuple(dict.fromkeys(run.tags.get("conditions", "") for run in ordered))


def _scored_nothing(judge: str, runs: Iterable[tuple[StoredRun, CellScores]]) -> str:
    others = sorted({given.judge for _, scores in runs for given in scores.counted})
    who = f"scores of {', '.join(others)} count" if others else "nobody's scores count yet"
    return f"No score of {judge} counts here; {who}. `tipbench judge status` shows who has judged what."


def _mixed(rubrics: Counter[str], tag: str) -> str:
    counts = ", ".join(
        f"{rubric.split('@')[0]}@{rubric.split('@')[-1][:8]} ({count} cells)" for rubric, count in rubrics.most_common()
    )
    return (
        f"The scores were given under different rubrics: {counts}. They do not compare. Score the older ones again "
        f"(`tipbench judge export --rejudge`), or look at one: --where {tag}={rubrics.most_common(1)[0][0]}"
    )
